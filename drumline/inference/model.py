"""`drumline.load(…)`: a trained model to talk to and to generate with, from Python."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drumline.core.rollouts import HFGenerator as HFConfig
from drumline.errors import CheckpointError, ModelError
from drumline.inference.chat import Conversation
from drumline.inference.open import LoadedModel, open_model
from drumline.report.bars import aside
from drumline.rl.generate import HFGenerator
from drumline.rl.sampling import Request
from drumline.train.run import Run

if TYPE_CHECKING:
    from drumline.inference.chat import Message


def load(place: str | Path | Run, *, trust_remote_code: bool = False, display: bool = False) -> Model:
    """`place`: a Run, a run folder, an exported or any Hugging Face folder, a hub id, or `package:NAME`. Code that comes with a model runs
    only with `trust_remote_code`. Raises ModelError for what does not write text, CheckpointError for a run that saved nothing."""
    where = place.dir if isinstance(place, Run) else place
    if (found := _own(Path(where), trust_remote_code)) is not None:
        return found
    with aside(display) as on_progress:
        return Model(open_model(os.fspath(where), on_progress, trust_remote_code))


def _own(folder: Path, trusted: bool) -> Model | None:
    """The module of the user's own that a run folder is about; None for anything else."""
    from drumline.checkpoint.load import best_or_latest
    from drumline.core.plan import Plan
    from drumline.models.own import read_module

    if not (folder / "plan.json").is_file():
        return None
    plan, root = Plan.load(folder / "plan.json", trusted), folder / "checkpoints"
    if not plan.config.plain:
        return None
    if not trusted and ":" in (plan.config.model.builder or ""):
        fix = f"read {plan.config.model.builder}, then add trust_remote_code=True"
        raise ModelError("this run's model is code beside its config", where=str(folder), fix=fix)
    checkpoint = best_or_latest(root)
    if checkpoint is None:
        raise CheckpointError("nothing was saved", where=str(folder))
    return Model(LoadedModel(read_module(plan, checkpoint), None, str(checkpoint)))


class Model:
    """`module`: whole, on one device, in eval mode; `tokenizer`; `origin`: where it is from, in words."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self.module, self.tokenizer, self.origin = loaded.model, loaded.tokenizer, loaded.origin

    @cached_property
    def _talk(self) -> Conversation:
        if self.tokenizer is None:
            raise ModelError("this module gives numbers, not text", where=self.origin, fix="call `module` yourself")
        return Conversation(self._loaded, 0, 0.0, None, show=False)

    @property
    def turns(self) -> list[Message]:
        """The conversation so far. Clear it to begin another; put a system message's text into `chat`."""
        return self._talk.turns

    def chat(self, text: str, *, max_new_tokens: int = 512, temperature: float = 0.7, system: str | None = None) -> str:
        """The answer; `turns` keeps both. Temperature 0 takes the likeliest token each time. Raises UserError for a system message
        where the model has no chat template."""
        turns = self._talk.turns
        return Conversation(self._loaded, max_new_tokens, temperature, system, turns, show=False).answer(text)

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
        in the list. Raises DataError for an empty prompt, PlanError for one that leaves too few positions."""
        self._talk  # noqa: B018 - refuses what writes no text
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        greedy: dict[str, Any] = {"top_k": 1} if temperature == 0 else {"temperature": temperature, "top_k": top_k, "top_p": top_p}
        config = HFConfig(max_new_tokens=max_new_tokens, batch=batch, **greedy)
        requests = [Request(list(self.tokenizer(text)["input_ids"]), (number,)) for number, text in enumerate(texts)]
        done = HFGenerator(config, self.module, self.tokenizer, seed).generate(requests, 0)
        return [self.tokenizer.decode(completion.tokens, skip_special_tokens=True) for completion in done]
