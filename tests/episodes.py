"""Environments of tests."""

from __future__ import annotations

import os
import random
import time
from typing import Any

# What `spell` returns. It has no word with u.
SPELLED = {"a": "and", "e": "even", "i": "in", "o": "one"}


class Vowels:
    """Asks for vowels, and answers each turn by a word that it draws.

    An episode is over after `turns` turns, or once the model has said the letter of its row. It is slow
    by `seconds` a turn.
    """

    def __init__(self, turns: int = 3, seconds: float = 0.0) -> None:
        self.turns = turns
        self.seconds = seconds
        self.letter = ""
        self.done = 0

    def reset(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        self.letter = row["letter"]
        start = random.choice(("one", "two", "three", "four"))
        return [*row["messages"][:-1], {"role": "user", "content": f"{row['prompt']} {start}"}]

    def step(self, message: dict[str, Any]) -> tuple[Any, float, bool]:
        time.sleep(self.seconds)
        self.done += 1
        said = message["content"]
        reward = sum(letter in "aeiou" for letter in said) / max(1, len(said))
        word = random.choice(("more", "again", "and"))
        is_over = self.done == self.turns or self.letter in said
        return [{"role": "user", "content": word}], reward + 0.1 * (self.letter in said), is_over


def spell(letter: str) -> str:
    """Return a word that begins with a letter.

    Args:
        letter: A vowel.
    """
    return SPELLED[letter]


class Naughty:
    """Does what its row says, at `reset` or at `step`."""

    def reset(self, row: dict[str, Any]) -> Any:
        self.do = row["do"]
        if self.do.startswith("reset "):
            return self.act(self.do.removeprefix("reset "))
        return "hello"

    def step(self, message: dict[str, Any]) -> Any:
        return self.act(self.do)

    def act(self, do: str) -> Any:
        if do == "raise":
            raise ValueError("not today")
        if do == "hang":
            time.sleep(600)
        if do == "exit":
            os._exit(3)
        if do == "crash":
            os.kill(os.getpid(), 11)
        if do == "close":
            for fd in range(3, 100):
                try:
                    os.close(fd)
                except OSError:
                    continue
        returned: dict[str, Any] = {
            "nan": ([], float("nan"), True),
            "text": ([], "1.0", True),
            "pair": ([], 1.0),
            "no role": ([{"content": "x"}], 1.0, False),
            "nothing": [],
            "half": ("a\ud800b \ud83e\udd41", None, False),
            "set": (" ".join({"one", "two", "three", "four", "five", "six"}), None, False),
            "random": ([{"role": "user", "content": str(random.random())}], None, False),
        }
        return returned.get(do, ("go on", 1, False))
