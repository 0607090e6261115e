"""Whether a rank of another host is at work while the ranks of this host wait.

Ranks ask and answer in their common store.
"""

from __future__ import annotations

import torch.distributed as dist

from drumline.system import heartbeat

# Keys of the store: how many questions there were, the step of the last one, how many answers.
CALLS = "calls"
STEP = "step"
AT_WORK = "at-work"


class RollCall:
    """Asks all other ranks of a run whether they are at work, and answers them.

    It has a connection of its own to their `store`, because the main thread may wait in another.
    """

    def __init__(self, store: dist.Store) -> None:
        connection: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self.store = dist.PrefixStore("roll-call", connection)
        # Questions and answers that this rank has seen.
        self.calls_seen = 0
        self.answers_seen = 0
        heartbeat.register_host_answers(self.ask, self.listen)

    def ask(self, step: int) -> bool:
        """Return whether another rank answered the last question, and ask again.

        A rank answers if it has done no more steps than `step` and is at work. A rank that is
        suspended, or holds Python's lock, cannot answer.
        """
        answers_before = self.answers_seen
        self.answers_seen = self.store.add(AT_WORK, 0)
        self.store.set(STEP, str(step))
        # This rank waits, so it does not answer its own question.
        self.calls_seen = self.store.add(CALLS, 1)
        return self.answers_seen > answers_before

    def listen(self, step: int | None) -> None:
        """Answer a new question. `step`: of this rank; None if it is not at work."""
        calls = self.store.add(CALLS, 0)
        is_new = calls > self.calls_seen
        if is_new and step is not None and step <= int(self.store.get(STEP)):
            self.store.add(AT_WORK, 1)
        self.calls_seen = calls
