"""Whether a rank of another host is at work while the ranks of this host wait.

Ranks ask and answer in their common store.
"""

from __future__ import annotations

import torch.distributed as dist

from drumline.system import heartbeat

# Keys of the store: the count of questions, the step of the last question, the count of answers.
CALLS = "calls"
STEP = "step"
AT_WORK = "at-work"


class RollCall:
    """Asks all other ranks of a run whether they are at work, and answers their questions.

    Ranks that wait may ask at the same time. They share the answers: one rank at work is enough for
    all. The threads of `system.heartbeat` call the methods, and keep this object.
    """

    def __init__(self, store: dist.Store) -> None:
        # Another connection: the main thread may wait in the one of `store`.
        connection: dist.Store = store.clone()  # type: ignore[attr-defined]  # torch's stubs lack it
        self.store = dist.PrefixStore("roll-call", connection)
        # How many questions and answers this rank has seen.
        self.calls_seen = 0
        self.answers_seen = 0
        heartbeat.register_host_answers(self.poll_and_ask, self.listen)

    def poll_and_ask(self, step: int) -> bool:
        """Return whether a rank has answered since the last call, and ask anew.

        The first call returns False unless others have asked before. A rank answers if it has done
        no more steps than `step` and is at work. A rank that is suspended, or holds Python's lock,
        cannot answer.
        """
        answers_before = self.answers_seen
        self.answers_seen = self.store.add(AT_WORK, 0)
        self.store.set(STEP, str(step))
        # This rank waits, so it answers neither its own question nor others' up to now.
        self.calls_seen = self.store.add(CALLS, 1)
        return self.answers_seen > answers_before

    def listen(self, step: int | None) -> None:
        """Answer the questions that came since the last call, if this rank is at work.

        `step`: how many steps this rank has done; None if it is not at work.
        """
        calls = self.store.add(CALLS, 0)
        is_new = calls > self.calls_seen
        if is_new and step is not None and step <= int(self.store.get(STEP)):
            self.store.add(AT_WORK, 1)
        self.calls_seen = calls
