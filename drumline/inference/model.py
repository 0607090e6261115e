"""A trained model in memory, from a run, an exported folder, the hub or a package: to talk to and to generate with.

`drumline.load` gives it to Python, and `drumline chat` to a terminal: answers go to standard output, everything else to standard error.
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
from drumline.core.model import MOST_MULTIPLE, ModelConfig
from drumline.core.out_of_memory import memory_errors
from drumline.core.plan import Plan
from drumline.core.process import uncollected
from drumline.core.rollouts import HFGenerator as HFConfig
from drumline.core.signals import CtrlC
from drumline.dist.seeds import derive
from drumline.errors import DataError, ModelError, UserError
from drumline.foreign import expanded, judged, read_object, require_package
from drumline.models.adapters import CONFIG as ADAPTER
from drumline.models.adapters import merge_read, read_over
from drumline.models.build import build_model
from drumline.models.classes import auto_class
from drumline.models.export import PROVENANCE, read_checkpoint, read_run
from drumline.models.files import from_hub, hub_options, quiet, resolve
from drumline.models.load import load_config
from drumline.models.own import read_module
from drumline.models.tokenizer import load_tokenizer
from drumline.models.vocabulary import Growth, grow_whole
from drumline.report.bars import OnProgress, aside, bars
from drumline.rl.generate import Completion, HFGenerator, Request, end_tokens
from drumline.train.run import Run

COMMANDS = "/exit or Ctrl-D leaves, /clear starts a new conversation, Ctrl-C stops an answer"
# What a model's own generation config may set for sampling, and greedy decoding would warn of.
NO_SAMPLING = {"temperature": None, "top_p": None, "top_k": None}
# A model may write what a terminal takes for a command; line breaks and tabs are text.
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
Message = dict[str, str]


@memory_errors()
def load(
    place: str | Path | Run, *, trust_remote_code: bool = False, display: bool = False
) -> Model:
    """`place`: a Run, a run folder, an exported or any Hugging Face folder, a hub id, or `package:NAME`. Code that comes with a model runs
    only with `trust_remote_code`. Raises ModelError for what does not write text, CheckpointError for a run that saved nothing."""
    where = place.dir if isinstance(place, Run) else place
    path = Path(where) / "plan.json"
    plan = Plan.load(path, trust_remote_code) if path.is_file() else None
    if plan is not None and plan.config.plain:
        if not trust_remote_code and ":" in (plan.config.model.builder or ""):
            fix = f"read {plan.config.model.builder}, then add trust_remote_code=True"
            raise ModelError(
                "this run's model is code beside its config", where=str(where), fix=fix
            )
        module, checkpoint = read_module(plan, path.parent, "best")
        return Model(module, None, str(checkpoint))
    with aside(display) as on_progress:
        return open_model(os.fspath(where), on_progress, trust_remote_code)


@dataclass(frozen=True, eq=False)
class Model:
    """`module`: whole, on one device, in eval mode; `tokenizer`; `origin`: where it is from, in words."""

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
        """The answer; `turns` keeps both. Temperature 0 takes the likeliest token each time. Raises UserError for a system message
        where the model has no chat template, and for an option out of its range; whatever is raised, `turns` stays as it was."""
        return Conversation(
            self, max_new_tokens, temperature, system, self.turns, show=False
        ).answer(text)

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
        """How each text goes on, in order, without a chat template. With a temperature the draws are by `seed` and the prompt's place
        in the list. Raises DataError for an empty prompt, PlanError for one that leaves too few positions, UserError for an option out
        of its range."""
        self._require_text()
        texts = [prompts] if isinstance(prompts, str) else prompts
        greedy: dict[str, Any] = (
            {"top_k": 1}
            if temperature == 0
            else {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        )
        try:
            config = HFConfig(max_new_tokens=max_new_tokens, batch=batch, **greedy)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise UserError(
                f"{'.'.join(map(str, first['loc']))}: {first['msg'][0].lower()}{first['msg'][1:]}",
                where="generate",
            ) from None
        return [
            text
            for text, _ in self.complete(
                (list(self.tokenizer(text)["input_ids"]) for text in texts), config, seed
            )
        ]

    def complete(
        self, prompts: Iterable[list[int]], config: HFConfig, seed: int
    ) -> list[tuple[str, Completion]]:
        """The text and tokens of the completion of each prompt, in order."""
        requests = [Request(tokens, (number,)) for number, tokens in enumerate(prompts)]
        done = HFGenerator(config, self.module, self.tokenizer, seed).generate(requests, 0)
        return [
            (self.tokenizer.decode(completion.tokens, skip_special_tokens=True), completion)
            for completion in done
        ]

    def _require_text(self) -> None:
        if self.tokenizer is None:
            raise ModelError(
                "this module gives numbers, not text",
                where=self.origin,
                fix="call `module` yourself",
            )


def open_model(place: str, on_progress: OnProgress, trust: bool = False) -> Model:
    """`place`: a run folder (its export, else its best or newest checkpoint), a folder that transformers or PEFT reads, a hub id, or
    `package:NAME`. Raises ModelError for what does not write text, CheckpointError for a run that has saved nothing."""
    quiet()
    folder = expanded(place)
    if (folder / "plan.json").exists():
        plan = Plan.load(folder / "plan.json", trust)
        if not plan.config.algorithm.writes:
            raise ModelError(
                f"a model of algorithm {plan.config.algorithm.kind} gives numbers, not text",
                where=place,
            )
        exported = exported_folder(folder)
        if exported is None:
            model, tokenizer, checkpoint = read_run(folder, trust=trust)
            return Model(_placed(model), tokenizer, f"{checkpoint}, which is not exported")
        return _from_folder(str(exported), trust)
    if (folder / ADAPTER).exists() and not (folder / "config.json").exists():
        return _from_folder(str(folder), trust)
    source = resolve(ModelConfig(id=place), on_progress, named="")
    assert source is not None, "an id leads somewhere"
    return _from_folder(source, trust)


def exported_folder(run: Path) -> Path | None:
    """RUN/export, where there is a model or an adapter in it."""
    folder = run / "export"
    return folder if any((folder / name).exists() for name in ("config.json", ADAPTER)) else None


def open_plan(plan: Plan, checkpoint: Path | None) -> Model:
    """The plan's model with the weights of a checkpoint of any run; None: as training starts from it."""
    if checkpoint is not None:
        check(checkpoint, verify=True, alone=True)
        model, tokenizer = read_checkpoint(plan, checkpoint)
        return Model(_placed(model), tokenizer, str(checkpoint))
    config = plan.config.model
    model = build_model(plan.model_path, config, seed=derive(plan.config.run.seed, "weights"))
    return Model(_placed(model), load_tokenizer(plan.model_path, config), str(plan.model_path))


def _from_folder(source: str, trust_remote_code: bool) -> Model:
    model = ModelConfig(id=source, trust_remote_code=trust_remote_code)
    adapter = Path(source) / ADAPTER
    if not adapter.exists() or (Path(source) / "config.json").exists():
        return Model(_placed(_pretrained(source, model)), load_tokenizer(source, model), source)
    named = read_object(adapter, ModelError)
    base, revision = named.get("base_model_name_or_path"), named.get("revision")
    if not isinstance(base, str):
        raise ModelError(
            "names no base_model_name_or_path",
            where=str(adapter),
            fix="put it in: a folder or hub id",
        )
    require_package("peft", source)
    below = model.model_copy(
        update={"id": base, "revision": revision if isinstance(revision, str) else None}
    )
    # PEFT saves no tokenizer; a trainer that saves one may have given it tokens.
    own = any(Path(source).glob("tokenizer*"))
    tokenizer = load_tokenizer(source, model) if own else load_tokenizer(base, below)
    whole = _pretrained(base, below)
    _make_room(whole, Path(source), tokenizer)
    with judged(
        "cannot be laid over its base", source, ModelError, "give a folder that PEFT wrote"
    ):
        is_ours = (Path(source) / PROVENANCE).exists()
        merged = merge_read(read_over(whole, Path(source), is_ours))
        return Model(_placed(merged), tokenizer, f"{source} over {base}")


def _make_room(base: Any, adapter: Path, tokenizer: Any) -> None:
    """Give the base of an adapter the rows that it had in training, more where tokens were added."""
    rows = len(tokenizer)
    provenance = adapter / PROVENANCE
    if provenance.exists():
        rows_in_training = read_object(provenance, ModelError).get("rows")
        if isinstance(rows_in_training, int) and rows < rows_in_training <= rows + MOST_MULTIPLE:
            rows = rows_in_training
    stored = base.get_input_embeddings().weight.shape[0]
    if rows > stored:
        grow_whole(base, Growth(stored, rows, trained_rows=stored))


def _pretrained(source: str, model: ModelConfig) -> Any:
    config = load_config(source, model)
    architectures = getattr(config, "architectures", None) or [""]
    if any(name.endswith("Classification") for name in architectures):
        raise ModelError(
            f"{architectures[0]} gives numbers, not text", where=source, fix="name a language model"
        )
    options = {"dtype": torch.float32, "output_loading_info": True, **hub_options(source, model)}
    read, report = from_hub(
        source, model, lambda: auto_class(config).from_pretrained(source, **options)
    )
    if lacking := sorted(report["missing_keys"]):  # which transformers draws at random
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise ModelError(
            f"has no weights for {lacking[0]}{more}",
            where=source,
            fix="name a folder or id of a whole model",
        )
    return read


def _placed(model: Any) -> Any:
    """On the GPU in bf16 where there is one, else in fp32 on the CPU."""
    if torch.cuda.is_available():
        model = model.to(
            "cuda", torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
        )
    return model.eval().requires_grad_(False)


def chat(
    place: str, max_new_tokens: int, temperature: float, system: str | None, trust: bool = False
) -> None:
    """Read lines from standard input until it ends, and answer each. Piped input works the same, without a prompt sign."""
    with uncollected(), bars(Console(stderr=True)) as on_progress:
        model = open_model(place, on_progress, trust)
    talk = Conversation(model, max_new_tokens, temperature, system)
    _tell(f"{model.origin} — {COMMANDS}")
    if not talk.has_template:
        _tell("it has no chat template: each line is continued by itself")
    with CtrlC():
        while (line := _next_line()) is not None:
            if line == "/exit":
                break
            if line == "/clear":
                talk.turns.clear()
            elif line.startswith("/") and line[1:].isalpha():
                _tell(f"no command {line}: {COMMANDS}")
            elif line:
                talk.answer(line)


@dataclass
class Conversation:
    """The conversation so far, and the model that goes on with it. `temperature` 0 is the likeliest token each time. `show`: print answers
    as they come."""

    model: Model
    max_new_tokens: int
    temperature: float
    system: str | None
    turns: list[Message] = field(default_factory=list)
    show: bool = True

    def __post_init__(self) -> None:
        self.module, self.tokenizer = self.model.module, self.model.tokenizer
        self.has_template = bool(self.tokenizer.chat_template)
        if self.system is not None and not self.has_template:
            raise UserError(
                "this model has no chat template, and so no place for it",
                where="--system",
                fix="leave it out",
            )
        if self.max_new_tokens < 1 or not 0 <= self.temperature < math.inf:
            raise UserError("max_new_tokens is 1 or more, and temperature 0 or more", where="chat")
        self.positions: int = (
            getattr(self.module.config.get_text_config(), "max_position_embeddings", None)
            or sys.maxsize
        )
        self.ends = sorted(end_tokens(self.module, self.tokenizer))

    def answer(self, line: str) -> str:
        """The answer; both are kept, and the oldest turns give way where they leave too few positions. Ctrl-C ends it early: the text until
        then is kept."""
        question = {"role": "user", "content": line}
        if (size := len(self._tokens([question]))) >= self.positions:
            _tell(
                f"that is {size} tokens, and the model has {self.positions} positions: nothing is answered"
            )
            return ""
        turns = [*self.turns, question] if self.has_template else [question]
        while (
            len(ids := self._tokens(turns)) + self.max_new_tokens > self.positions
            and len(turns) > 1
        ):
            del turns[:2]
            _tell("the model's positions are used up: the oldest turn is forgotten")
        out = Printer(self.tokenizer, self.show)
        ids_BT = torch.tensor([ids], device=self.module.device)
        sampled = (
            {"do_sample": True, "temperature": self.temperature}
            if self.temperature > 0
            else {"do_sample": False, **NO_SAMPLING}
        )
        try:
            with torch.no_grad():
                self.module.generate(
                    ids_BT,
                    attention_mask=torch.ones_like(ids_BT),
                    streamer=out,
                    max_new_tokens=min(self.max_new_tokens, self.positions - len(ids)),
                    eos_token_id=self.ends or None,
                    pad_token_id=self.tokenizer.pad_token_id or (self.ends or [0])[0],
                    **sampled,
                )
        except KeyboardInterrupt:
            out.on_finalized_text(" …", stream_end=True)
        answer = "".join(out.answer)
        self.turns[:] = [*turns, {"role": "assistant", "content": answer}]
        return answer

    def _tokens(self, turns: list[Message]) -> list[int]:
        if not self.has_template:
            return list(self.tokenizer(turns[0]["content"])["input_ids"])
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        with judged("the chat template refuses this conversation", self.model.origin, DataError):
            text = self.tokenizer.apply_chat_template(
                [*system, *turns], tokenize=False, add_generation_prompt=True
            )
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class Printer(TextStreamer):
    """A streamer that keeps what comes in `answer`, and prints it word by word."""

    def __init__(self, tokenizer: Any, show: bool = True) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.show, self.answer = show, list[str]()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.answer.append(text)
        if self.show:
            print(CONTROLS.sub("�", text), end="\n" if stream_end else "", flush=True)


def _next_line() -> str | None:
    """The next line; None at the end. Ctrl-C with nothing to stop only shows how to leave."""
    terminal = sys.stdin.isatty()
    if terminal:
        import readline  # noqa: F401 — gives `input` its arrow keys
    try:
        return input("> " if terminal else "").strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        _tell(f"\n{COMMANDS}")
        return ""


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
