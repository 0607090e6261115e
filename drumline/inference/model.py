"""A trained model in memory, to chat with and to generate with.

It comes from a run, an exported folder, the hub or a package. `drumline.load` returns it in Python.
`drumline chat` talks with it in a terminal: answers go to standard output, everything else to
standard error.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from rich.console import Console
from transformers import TextStreamer

from drumline.checkpoint.load import check
from drumline.config.model import MOST_MULTIPLE, ModelConfig
from drumline.config.rollouts import HFGenerator as HFConfig
from drumline.dist.seeds import derive
from drumline.errors import DataError, ModelError, UserError
from drumline.foreign import expand_home, read_object, require_package, translate_exceptions
from drumline.models.adapters import CONFIG as ADAPTER
from drumline.models.adapters import load_adapters, merge_loaded
from drumline.models.build import build_model, read_pretrained
from drumline.models.classes import is_encoder_decoder
from drumline.models.export import PROVENANCE, read_checkpoint, read_run
from drumline.models.files import hub_options, resolve, silence_transformers
from drumline.models.load import load_config
from drumline.models.own import read_module
from drumline.models.tokenizer import load_tokenizer
from drumline.models.vocabulary import Growth, grow_whole
from drumline.plan.out_of_memory import memory_errors
from drumline.plan.plan import Plan
from drumline.report.bars import OnProgress, bars, stderr_bars
from drumline.rl.generate import Completion, HFGenerator, Request, end_tokens
from drumline.system.process import pause_garbage_collection
from drumline.system.signals import CtrlC
from drumline.train.run import Run

COMMANDS = "/exit or Ctrl-D leaves, /clear starts a new conversation, Ctrl-C stops an answer"
# The options of sampling, unset. A model's own generation config may set them, and transformers would
# warn of them in greedy decoding.
NO_SAMPLING = {"temperature": None, "top_p": None, "top_k": None}
# Control characters in a model's text, which a terminal could take for commands. Line breaks and tabs
# are text.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
Message = dict[str, str]


@memory_errors()
def load(
    place: str | Path | Run, *, trust_remote_code: bool = False, display: bool = False
) -> Model:
    """Return the trained model of a run, a folder or the hub.

    Args:
        place: A Run, a run folder, an exported or any Hugging Face folder, a hub id, or
            `package:NAME`.
        trust_remote_code: Run code that comes with the model.
        display: Show progress.

    Raises ModelError for a classifier or a reward model of transformers, CheckpointError for a run
    that saved nothing. A module of your own is returned, and its `chat` and `generate` raise
    ModelError.
    """
    if isinstance(place, Run):
        where = os.fspath(place.dir)
    else:
        where = os.fspath(place)
    plan_file = expand_home(where) / "plan.json"
    if plan_file.is_file():
        plan = Plan.load(plan_file, trust_remote_code)
        if plan.config.has_own_module:
            return _load_own_module(plan, plan_file.parent, where, trust_remote_code)
    with stderr_bars(display) as on_progress:
        return open_model(where, on_progress, trust_remote_code)


def _load_own_module(plan: Plan, run_dir: Path, where: str, trust_remote_code: bool) -> Model:
    """Return the module of a run that trained a module of the user's own, from its best checkpoint.

    Raises ModelError if a file beside the config builds it, and `trust_remote_code` is False.
    """
    builder = plan.config.model.builder or ""
    # A builder FILE.py:NAME lies beside the config. Any other is that of an installed package, which
    # the user has chosen.
    is_in_file = ":" in builder
    if is_in_file and not trust_remote_code:
        fix = f"read {builder}, then add trust_remote_code=True"
        raise ModelError("this run's model is code beside its config", where=where, fix=fix)
    module, checkpoint = read_module(plan, run_dir, "best")
    return Model(module, None, str(checkpoint))


@dataclass(frozen=True, eq=False)
class Model:
    """A trained model and its tokenizer.

    `module`: the torch module, whole, on one device, in eval mode. `tokenizer`: None for a module of
    the user's own. `origin`: its folder or id, for messages.
    """

    module: Any
    tokenizer: Any
    origin: str

    @cached_property
    def turns(self) -> list[Message]:
        """The conversation so far. Clear it to begin another; put a system message's text into `chat`."""
        self._require_text()
        return []

    def chat(
        self,
        text: str,
        *,
        max_new_tokens: int = 512,
        temperature: float = 0.7,
        system: str | None = None,
    ) -> str:
        """Return the answer to a message; `turns` keeps both.

        Args:
            text: The message.
            max_new_tokens: The answer is cut after so many tokens.
            temperature: Of sampling; 0 takes the likeliest token each time.
            system: The text of a system message, which comes before all turns.

        Raises UserError for a system message if the model has no chat template, and for an option
        out of its range. After an error `turns` is as it was.
        """
        conversation = Conversation(
            self, max_new_tokens, temperature, system, self.turns, show=False
        )
        return conversation.answer(text)

    def generate(
        self,
        prompts: str | Sequence[str],
        *,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        batch: int = 16,
    ) -> list[str]:
        """Return the completion of each text, in order, without a chat template.

        Args:
            prompts: A text, or several.
            max_new_tokens: A completion is cut after so many tokens.
            temperature: Of sampling; 0 takes the likeliest token each time.
            top_k: Sample from so many of the likeliest tokens; 0: from all.
            top_p: Sample from the likeliest tokens that have this probability together.
            seed: With a temperature the draws depend on it and on the prompt's place in the list.
            batch: Prompts that are completed together.

        Raises DataError for an empty prompt, PlanError for one that leaves too few positions,
        UserError for an option out of its range.
        """
        self._require_text()
        if isinstance(prompts, str):
            prompts = [prompts]
        # The config refuses a temperature of 0. Drawing from the likeliest token alone is the same.
        sampling: dict[str, Any] = {"top_k": 1}
        if temperature != 0:
            sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        try:
            config = HFConfig(max_new_tokens=max_new_tokens, batch=batch, **sampling)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            option = ".".join(map(str, first["loc"]))
            message = first["msg"]
            what = f"{option}: {message[0].lower()}{message[1:]}"
            raise UserError(what, where="generate") from None
        token_lists = []
        for prompt in prompts:
            token_lists.append(list(self.tokenizer(prompt)["input_ids"]))
        return [text for text, _ in self.complete(token_lists, config, seed)]

    def complete(
        self, prompts: Iterable[list[int]], config: HFConfig, seed: int
    ) -> list[tuple[str, Completion]]:
        """Return the text and the tokens of each prompt's completion, in order.

        Args:
            prompts: The tokens of each prompt.
            config: Options of the generator.
            seed: Draws depend on it and on the prompt's place among `prompts`.
        """
        requests = []
        for number, tokens in enumerate(prompts):
            requests.append(Request(tokens, (number,)))
        generator = HFGenerator(config, self.module, self.tokenizer, seed)
        completed = []
        # There is no run, so the step is always 0: the same call draws the same tokens again.
        for completion in generator.generate(requests, 0):
            text = self.tokenizer.decode(completion.tokens, skip_special_tokens=True)
            completed.append((text, completion))
        return completed

    def _require_text(self) -> None:
        """Raise ModelError for a module of the user's own, which has no tokenizer."""
        if self.tokenizer is None:
            what = "this module gives numbers, not text"
            raise ModelError(what, where=self.origin, fix="call `module` yourself")


def open_model(place: str, on_progress: OnProgress, trust: bool = False) -> Model:
    """Return the language model of a run, a folder, the hub or a package.

    A run's model is read from its export, or without one from its best or newest checkpoint.

    Args:
        place: A run folder, a folder that transformers or PEFT reads, a hub id, or `package:NAME`.
        on_progress: Is called while files are downloaded.
        trust: Run code that comes with the model.

    Raises ModelError for a model that does not write text, CheckpointError for a run that has saved
    nothing.
    """
    silence_transformers()
    folder = expand_home(place)
    if (folder / "plan.json").exists():
        plan = Plan.load(folder / "plan.json", trust)
        if plan.config.head == "seq2seq":
            raise encoder_error(place)
        if not plan.config.algorithm.writes:
            what = f"a model of algorithm {plan.config.algorithm.kind} gives numbers, not text"
            raise ModelError(what, where=place)
        exported = exported_folder(folder)
        if exported is None:
            model, tokenizer, checkpoint = read_run(folder, trust)
            origin = f"{checkpoint}, which is not exported"
            return Model(_place_on_device(model), tokenizer, origin)
        return _open_folder(str(exported), trust)
    # `resolve` takes folders of whole models alone.
    if (folder / ADAPTER).exists() and not (folder / "config.json").exists():
        return _open_folder(str(folder), trust)
    source = resolve(ModelConfig(id=place), on_progress, label="")
    assert source is not None, "an id leads somewhere"
    return _open_folder(source, trust)


def exported_folder(run: Path) -> Path | None:
    """Return RUN/export if there is a model or an adapter in it; else None."""
    folder = run / "export"
    has_model = (folder / "config.json").exists()
    has_adapter = (folder / ADAPTER).exists()
    if has_model or has_adapter:
        return folder
    return None


def open_plan(plan: Plan, checkpoint: Path | None) -> Model:
    """Return the plan's model with the weights of a checkpoint, which may be of another run.

    If `checkpoint` is None, it has the weights that training starts from.
    """
    if checkpoint is not None:
        check(checkpoint, verify=True, collective=False)
        model, tokenizer = read_checkpoint(plan, checkpoint)
        return Model(_place_on_device(model), tokenizer, str(checkpoint))
    config = plan.config.model
    # The seed of training, so that random weights are those of step 0.
    seed = derive(plan.config.run.seed, "weights")
    model = build_model(plan.model_path, config, seed=seed)
    tokenizer = load_tokenizer(plan.model_path, config)
    return Model(_place_on_device(model), tokenizer, str(plan.model_path))


def _open_folder(source: str, trust_remote_code: bool) -> Model:
    """Return the model of a folder or hub id, by transformers.

    A folder may also have only an adapter, which is merged into its base. Raises ModelError.
    """
    model = ModelConfig(id=source, trust_remote_code=trust_remote_code)
    adapter_file = Path(source) / ADAPTER
    is_whole_model = (Path(source) / "config.json").exists()
    if is_whole_model or not adapter_file.exists():
        module = _place_on_device(_read_pretrained(source, model))
        return Model(module, load_tokenizer(source, model), source)
    adapter_config = read_object(adapter_file, ModelError)
    base = adapter_config.get("base_model_name_or_path")
    if not isinstance(base, str):
        what = "names no base_model_name_or_path"
        raise ModelError(what, where=str(adapter_file), fix="put it in: a folder or hub id")
    require_package("peft", source)
    revision = adapter_config.get("revision")
    if not isinstance(revision, str):
        revision = None
    base_model = model.model_copy(update={"id": base, "revision": revision})
    # PEFT saves no tokenizer. A trainer that saves one beside the adapter may have given it tokens.
    if any(Path(source).glob("tokenizer*")):
        tokenizer = load_tokenizer(source, model)
    else:
        tokenizer = load_tokenizer(base, base_model)
    base_module = _read_pretrained(base, base_model)
    _grow_embeddings(base_module, Path(source), tokenizer)
    fix = "give a folder that PEFT wrote"
    with translate_exceptions("cannot be laid over its base", source, ModelError, fix):
        is_ours = (Path(source) / PROVENANCE).exists()
        merged = merge_loaded(load_adapters(base_module, Path(source), is_ours))
        return Model(_place_on_device(merged), tokenizer, f"{source} over {base}")


def _grow_embeddings(base: Any, adapter: Path, tokenizer: Any) -> None:
    """Grow the embeddings of an adapter's base to the number of rows that it had in training.

    An adapter that was trained with added tokens does not fit the base otherwise.
    """
    rows = len(tokenizer)
    provenance = adapter / PROVENANCE
    if provenance.exists():
        rows_in_training = read_object(provenance, ModelError).get("rows")
        # Training may round the rows up to a multiple. A damaged file must not ask for any number.
        if isinstance(rows_in_training, int) and rows < rows_in_training <= rows + MOST_MULTIPLE:
            rows = rows_in_training
    embeddings = base.get_input_embeddings()
    stored = embeddings.weight.shape[0]
    if rows > stored:
        grow_whole(base, Growth(stored, rows, trained_rows=stored))


def encoder_error(where: str) -> ModelError:
    """Return the error for a model whose prompt is read by an encoder."""
    what = (
        "it has an encoder and a decoder, and texts are written here behind a prompt of the decoder"
    )
    fix = "use AutoModelForSeq2SeqLM.from_pretrained and generate of transformers"
    return ModelError(what, where=where, fix=fix)


def _read_pretrained(source: str, model: ModelConfig) -> Any:
    """Return the whole model that transformers reads from a folder or hub id, in fp32.

    Raises ModelError for a classifier, and for a model that lacks weights.
    """
    config = load_config(source, model)
    architectures = getattr(config, "architectures", None) or [""]
    if any(name.endswith("Classification") for name in architectures):
        what = f"{architectures[0]} gives numbers, not text"
        raise ModelError(what, where=source, fix="name a language model")
    if is_encoder_decoder(config):
        raise encoder_error(source)
    options = {"dtype": torch.float32, "output_loading_info": True, **hub_options(source, model)}
    module, lacking = read_pretrained(source, model, options)
    # transformers draws these at random.
    missing = sorted(lacking)
    if missing:
        what = f"has no weights for {missing[0]}"
        if len(missing) > 1:
            what += f" and {len(missing) - 1} more"
        raise ModelError(what, where=source, fix="name a folder or id of a whole model")
    return module


def _place_on_device(model: Any) -> Any:
    """Move a model to the GPU if there is one, and return it in eval mode without gradients.

    On a GPU it is in bf16 if the GPU has that, else in fp32. On the CPU it stays in fp32.
    """
    if torch.cuda.is_available():
        dtype = torch.float32
        if torch.cuda.is_bf16_supported():
            dtype = torch.bfloat16
        model = model.to("cuda", dtype)
    return model.eval().requires_grad_(False)


def chat(
    place: str, max_new_tokens: int, temperature: float, system: str | None, trust: bool = False
) -> None:
    """Answer each line of standard input, until it ends.

    A terminal also shows the commands and a prompt sign.

    Args:
        place: The model; see `open_model`.
        max_new_tokens: An answer is cut after so many tokens.
        temperature: Of sampling; 0 takes the likeliest token each time.
        system: The text of a system message; None: no such message.
        trust: Run code that comes with the model.
    """
    with pause_garbage_collection(), bars(Console(stderr=True)) as on_progress:
        model = open_model(place, on_progress, trust)
    conversation = Conversation(model, max_new_tokens, temperature, system)
    if sys.stdin.isatty():
        _print_to_stderr(f"{model.origin} — {COMMANDS}")
    if not conversation.has_template:
        _print_to_stderr("it has no chat template: each line is continued by itself")
    with CtrlC():
        # None: the input has ended.
        for line in iter(_read_line, None):
            if line == "/exit":
                break
            if line == "/clear":
                conversation.turns.clear()
            elif line.startswith("/") and line[1:].isalpha():
                _print_to_stderr(f"no command {line}: {COMMANDS}")
            elif line:
                conversation.answer(line)


@dataclass
class Conversation:
    """A conversation with a model."""

    model: Model
    max_new_tokens: int
    # 0 takes the likeliest token each time.
    temperature: float
    system: str | None
    # The messages so far.
    turns: list[Message] = field(default_factory=list)
    # Whether to print answers as they come.
    show: bool = True

    def __post_init__(self) -> None:
        self.module = self.model.module
        self.tokenizer = self.model.tokenizer
        self.has_template = bool(self.tokenizer.chat_template)
        if self.system is not None and not self.has_template:
            what = "this model has no chat template, and so no place for a system message"
            raise UserError(what, where="system", fix="leave it out")
        if self.max_new_tokens < 1:
            what = f"{self.max_new_tokens} given, 1 or more is wanted"
            raise UserError(what, where="max_new_tokens")
        if not 0 <= self.temperature < math.inf:
            what = f"{self.temperature:g} given, a finite number of 0 or more is wanted"
            raise UserError(what, where="temperature")
        text_config = self.module.config.get_text_config()
        positions = getattr(text_config, "max_position_embeddings", None)
        self.positions: int = positions or sys.maxsize
        self.ends = sorted(end_tokens(self.module, self.tokenizer))

    def answer(self, line: str) -> str:
        """Return the answer to a line. Both are added to `turns`.

        The oldest turns are removed if they leave the model fewer positions than `max_new_tokens`.
        If the line alone leaves fewer, the answer is cut there. A line that leaves none is not
        answered, and "" is returned. Ctrl-C ends the answer early, and the text up to there counts.
        """
        question = {"role": "user", "content": line}
        size = len(self._tokenize([question]))
        if size >= self.positions:
            _print_to_stderr(
                f"that is {size} tokens, and the model has {self.positions} positions: nothing is answered"
            )
            return ""
        turns = [question]
        if self.has_template:
            turns = [*self.turns, question]
        ids = self._tokenize(turns)
        while len(ids) + self.max_new_tokens > self.positions and len(turns) > 1:
            # A question and its answer: templates refuse a conversation that begins with an answer.
            del turns[:2]
            _print_to_stderr("the model's positions are used up: the oldest turn is forgotten")
            ids = self._tokenize(turns)
        printer = Printer(self.tokenizer, self.show)
        try:
            self._generate(ids, printer)
        except KeyboardInterrupt:
            printer.stop()
        answer = "".join(printer.answer)
        self.turns[:] = [*turns, {"role": "assistant", "content": answer}]
        return answer

    def _generate(self, ids: list[int], printer: Printer) -> None:
        """Generate an answer to the tokens `ids`, and pass its text to `printer`."""
        sampling: dict[str, Any] = {"do_sample": False, **NO_SAMPLING}
        if self.temperature > 0:
            sampling = {"do_sample": True, "temperature": self.temperature}
        # There is one sequence, and so no padding. transformers warns if it is given no id for it.
        padding_id = self.tokenizer.pad_token_id
        if padding_id is None:
            padding_id = self.ends[0] if self.ends else 0
        ids_BT = torch.tensor([ids], device=self.module.device)
        with torch.no_grad():
            self.module.generate(
                ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                streamer=printer,
                max_new_tokens=min(self.max_new_tokens, self.positions - len(ids)),
                eos_token_id=self.ends or None,
                pad_token_id=padding_id,
                **sampling,
            )

    def _tokenize(self, turns: list[Message]) -> list[int]:
        """Return the tokens of a conversation, up to where the answer starts.

        Without a chat template only the first turn counts.
        """
        if not self.has_template:
            return list(self.tokenizer(turns[0]["content"])["input_ids"])
        messages = list(turns)
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        with translate_exceptions(
            "the chat template refuses this conversation", self.model.origin, DataError
        ):
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        # The template has written the special tokens.
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class Printer(TextStreamer):
    """A streamer that keeps the text of an answer in `answer`, and prints it word by word.

    `show`: whether it prints.
    """

    def __init__(self, tokenizer: Any, show: bool = True) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.show = show
        self.answer: list[str] = []
        # What is printed behind the last word.
        self.last_mark = "\n"

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.answer.append(text)
        if self.show:
            print(CONTROLS.sub("�", text), end=self.last_mark if stream_end else "", flush=True)

    def stop(self) -> None:
        """End an answer that was interrupted.

        The last word is kept, though more might have followed. An ellipsis is printed, and is no
        part of the answer.
        """
        self.last_mark = " …\n"
        self.end()


def _read_line() -> str | None:
    """Return the next line of the user; None at the end of the input.

    Ctrl-C only shows how to leave, since there is nothing to stop.
    """
    sign = ""
    if sys.stdin.isatty():
        # Its import gives `input` its arrow keys.
        import readline  # noqa: F401

        sign = "> "
    try:
        return input(sign).strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        _print_to_stderr(f"\n{COMMANDS}")
        return ""


def _print_to_stderr(line: str) -> None:
    """Print a line beside the answers, on standard error."""
    print(line, file=sys.stderr, flush=True)
