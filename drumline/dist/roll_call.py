"""Whether a rank of another host is at work while those of this one wait: asked and answered in the ranks' store."""

from __future__ import annotations

import torch.distributed as dist

from drumline.core import heartbeat

# How many, the step of the last one, how many answers.
CALLS, STEP, AT_WORK = (
    "calls",
    "step",
    "at-work",
)


class RollCall:
    """All ranks of a run but this one, by a connection of its own to their `store`: the main thread may wait in another."""

    def __init__(self, store: dist.Store) -> None:
        own: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self.store, self.heard, self.answers = dist.PrefixStore("roll-call", own), 0, 0
        heartbeat.answer_hosts(self.ask, self.listen)

    def ask(self, step: int) -> bool:
        """Whether a rank that had done no more steps was at work when this was last asked; and ask again. No rank answers that is
        suspended, or holds Python's lock."""
        before, self.answers = self.answers, self.store.add(AT_WORK, 0)
        self.store.set(STEP, str(step))
        self.heard = self.store.add(CALLS, 1)  # this rank waits
        return self.answers > before

    def listen(self, step: int | None) -> None:
        """Answer a new question. `step`: of this rank; None where it is not at work."""
        calls = self.store.add(CALLS, 0)
        if calls > self.heard and step is not None and step <= int(self.store.get(STEP)):
            self.store.add(AT_WORK, 1)
        self.heard = calls
