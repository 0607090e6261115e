"""Sections of ZeRO's strategies that its spec and its DeepSpeed config share. No torch here."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from drumline.core.section import KIND_ALONE, PathText, Ranks, Section


class Offload(Section):
    kind: Literal["none", "cpu", "nvme"] = Field("none", description="Where it lives while it is not used.")
    path: PathText | None = Field(None, description="nvme: a folder on the disk.")
    pin_memory: bool = Field(False, description="Page-locked host memory: faster copies.")

    @model_validator(mode="after")
    def _nvme_needs_a_path(self) -> Offload:
        if self.kind == "nvme" and self.path is None:
            raise ValueError("nvme needs `path`: a folder on the disk")
        return self


OffloadField = Annotated[Offload, KIND_ALONE]


class ZeroPlusPlus(Section):
    """ZeRO++ (Wang et al. 2023)."""

    quantized_weights: bool = Field(False, description="Gather weights as 8-bit blocks.")
    quantized_gradients: bool = Field(False, description="Reduce gradients as 4-bit blocks.")
    hierarchical_partition: Ranks = Field(1, description="Ranks of a second copy of the weights' partition; 1: none.")
