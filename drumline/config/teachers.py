"""The teachers that a model learns from: another model, a model on servers, or its own base model.

This module does not import torch.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from drumline.config.model import ModelConfig
from drumline.config.rollouts import Urls, check_urls, list_urls
from drumline.config.section import Seconds, Section, Short


class ServedTeacher(Section):
    """A model on vLLM's servers, which are asked for the log-probs of whole texts."""

    kind: Literal["server"] = "server"
    url: Urls = Field(
        description="http://HOST:PORT of the server, or a list of them. A request goes to the server with the fewest requests under way."
        " If a server is lost, its requests go to the others.",
    )
    model: str = Field(
        min_length=1,
        max_length=1000,
        description="Name of the teacher on the server (--served-model-name). What distill computes before training is kept under this"
        " name, so serve changed weights under another one.",
    )
    timeout_seconds: Seconds = Field(600.0, description="The most time for one request.")

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses of the servers."""
        return list_urls(self.url)

    @model_validator(mode="after")
    def _check_urls(self) -> ServedTeacher:
        """Refuse addresses that are no URLs or given twice."""
        check_urls(self.urls)
        return self


class BaseTeacher(Section):
    """The trained model with its adapter switched off (self-distillation)."""

    kind: Literal["base"] = "base"


def _as_section(value: Any) -> Any:
    """Return the section that a text is short for: `base`, or the id of a model."""
    if value == "base":
        return {"kind": "base"}
    if isinstance(value, str):
        return {"id": value}
    return value


def _kind_of_teacher(value: Any) -> str:
    """Return the kind of a teacher's section: `server`, `base`, or `hf` for anything else (a model section)."""
    kind = value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)
    if kind in ("server", "base"):
        return str(kind)
    return "hf"


Teacher = Annotated[
    Annotated[ModelConfig, Tag("hf")]
    | Annotated[ServedTeacher, Tag("server")]
    | Annotated[BaseTeacher, Tag("base")],
    Discriminator(_kind_of_teacher),
    Short(_as_section, {"type": "string"}),
]
