"""An environment for `algorithm.environment: {kind: class}`: questions of reasoning-gym, with several tries.

Rows come from a data source of kind tasks. The task's verifier scores each answer from 0 to 1; as long as
it is not right, the model gets a hint and another try.
"""

from __future__ import annotations

from typing import Any

import reasoning_gym

NEARLY = "The right answer is in there. Write it alone."
WRONG = "That is wrong. Try again."


class Tries:
    """An episode: one question, and some tries to answer it.

    The reward of a try is how far its score is above the best score before it, so a repeated answer
    gains nothing. It is multiplied by `discount` once for each try before.
    """

    def __init__(self, tries: int = 3, discount: float = 0.5) -> None:
        """`tries`: the most answers. `discount`: from 0 to 1; below 1 an early right answer pays more."""
        self.tries = tries
        self.discount = discount

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the question. `row`: has `task`, its `options`, `entry` and `messages`."""
        self.entry = row["entry"]
        self.verifier = reasoning_gym.create_dataset(row["task"], **(row["options"] or {}))
        self.done = 0
        self.best_score = 0.0
        messages: list[dict[str, Any]] = row["messages"]
        return messages

    def step(self, message: dict[str, Any]) -> tuple[list[dict[str, Any]], float, bool]:
        """Return a hint, the reward of the model's answer, and whether the episode is over."""
        score = self.score(message["content"])
        gain = max(score - self.best_score, 0.0)
        reward = gain * self.discount**self.done
        self.best_score = max(score, self.best_score)
        self.done += 1
        if score == 1 or self.done == self.tries:
            return [], reward, True
        hint = WRONG
        if score > 0:
            hint = NEARLY
        return [{"role": "user", "content": hint}], reward, False

    def score(self, answer: str) -> float:
        """Return the verifier's score of an answer, from 0 to 1."""
        try:
            return float(self.verifier.score_answer(answer.strip(), self.entry))
        except Exception:  # noqa: BLE001 — a strange answer makes verifiers raise anything
            return 0.0
