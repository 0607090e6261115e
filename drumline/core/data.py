"""Where rows come from and how they become tokens. No torch here."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from drumline.core.section import MOST_SEED, Amount, PathText, Section, Steps


class Columns(Section):
    """Which column of a row plays which part. Unset parts are looked for under their own names."""

    messages: str | None = Field(None, description="Column with a list of {role, content}.")
    prompt: str | None = Field(None, description="Column with the prompt (text, or a list of messages).")
    completion: str | None = Field(None, description="Column with the completion that is learned.")
    text: str | None = Field(None, description="Column with plain text.")
    chosen: str | None = Field(None, description="Column with the better answer of a pair (text, or messages with or without the prompt).")
    rejected: str | None = Field(None, description="Column with the worse answer.")
    margin: str | None = Field(None, description="Column with by how much chosen is better (optional).")
    label: str | None = Field(None, description="Column with the class: a name or a number.")
    image: str | None = Field(None, description="Column with the path of an image, relative to the data file.")
    tools: str | None = Field(None, description="Column with the tools to call: JSON schemas for the chat template. An empty text: none.")
    images: str | None = Field(None, description="Column with a list of image paths, for messages that say where the images stand.")


class _Source(Section):
    columns: Columns = Field(default_factory=Columns, description="Map your column names to messages | prompt + completion | text.")
    limit: Steps | None = Field(None, description="Take at most this many rows.")
    domain: str | None = Field(None, description="ppo, grpo: name under which these prompts are counted; null: the task's or file's name.")


class FileSource(_Source):
    kind: Literal["file"] = "file"
    path: PathText = Field(description="A .jsonl, .json, .csv, .tsv, .parquet or .txt file, or a glob. Relative to the YAML's folder.")


class HubSource(_Source):
    kind: Literal["hub"] = "hub"
    id: PathText = Field(description="A `datasets` hub id.")
    name: PathText | None = Field(None, description="The subset (configuration) of the dataset.")
    split: str = Field("train", description="Split expression.")
    revision: PathText | None = Field(None, description="Branch, tag or commit.")
    streaming: bool = Field(False, description="Read rows as a stream: the raw data is never stored, only its tokens. Needs `limit`.")

    @model_validator(mode="after")
    def _stream_needs_an_end(self) -> HubSource:
        if self.streaming and self.limit is None:
            raise ValueError("streaming needs `limit`: the number of rows to take from the stream")
        return self


class SavedSource(_Source):
    kind: Literal["saved"] = "saved"
    path: PathText = Field(description="A folder written by `datasets`' save_to_disk.")
    split: str | None = Field(None, description="Split, where the folder holds several.")


class TasksSource(_Source):
    kind: Literal["tasks"] = "tasks"
    tasks: dict[str, dict[str, Any]] = Field(
        min_length=1,
        description="reasoning-gym task name → its own options ({} for the defaults), e.g. {basic_arithmetic: {max_digits: 2}}.",
    )
    size: int = Field(500, gt=0, le=10**8, description="Rows in all, dealt evenly over the tasks.")
    question: str = Field("{question}", description="What a prompt says; {question} is the task's own.")
    seed: int = Field(0, ge=0, le=MOST_SEED, description="Seed of the task generator. Give train and eval different ones.")


class DigitsSource(_Source):
    """scikit-learn's 1797 handwritten digits (8 × 8 pixels, Alpaydin & Kaynak 1998), as images: for classification without a download."""

    kind: Literal["digits"] = "digits"
    split: Literal["train", "test", "all"] = Field("train", description="train: the first 1437; test: the last 360, by other writers.")


Source = Annotated[FileSource | HubSource | SavedSource | TasksSource | DigitsSource, Field(discriminator="kind")]


class DataConfig(Section):
    train: list[Source] = Field(min_length=1, description="Where the training rows come from; sources are joined.")
    eval: list[Source] = Field(default_factory=list, description="Held-out rows.")
    holdout: Amount = Field(0, description="With no `eval`: hold out this many training rows, chosen by hash of their content.")
    max_length: int = Field(1024, gt=1, le=10**8, description="Tokens of a training sequence, and of a pack.")
    truncation: Literal["error", "right", "left", "drop"] = Field(
        "right",
        description="A row longer than max_length is cut at its end (right) or start (left), dropped, or an error; such rows are counted.",
    )
    packing: bool = Field(True, description="Join short rows up to max_length; attention and positions respect their boundaries.")
    image_max_pixels: int | None = Field(
        None, gt=0, le=10**10, description="Images with more pixels are scaled down in proportion; null: the image processor's limit."
    )
    learn_on: Literal["assistant", "all"] = Field("assistant", description="Tokens with loss: assistant turns and completions, or all.")
    order: Literal["shuffle", "sequential"] = Field(
        "shuffle", description="Order of the samples in an epoch: shuffled as (run.seed, epoch) fix it, or as the data come."
    )
    workers: int | None = Field(None, gt=0, le=1024, description="Processes that tokenise; null: one per core, at most 8.")
    prefetch: int = Field(2, ge=0, le=1000, description="Global batches collated ahead by a thread; 0 collates in line.")
    verify: bool = Field(True, description="Check the token cache's checksums when a run starts, while the model is loaded.")
    cache_dir: PathText | None = Field(None, description="Where tokens are cached by content hash; null: ~/.cache/drumline/data.")
