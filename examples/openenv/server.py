"""A server of OpenEnv for `algorithm.environment: {kind: openenv}`: a number from 1 to 9 is to be guessed."""

from __future__ import annotations

import random
from typing import Any

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Guess(Action):
    guess: str


class Hint(Observation):
    hint: str


class Guessing(Environment):
    """A game of one session."""

    # Each session has a `Guessing` of its own. Without this line a server takes one session.
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **columns: Any) -> Hint:
        """Choose a number. `seed`: the same for all episodes of a group, which so get the same number."""
        self.number = random.Random(seed).randint(1, 9)
        return Hint(hint="You have four guesses.")

    def step(self, action: Guess, timeout_s: float | None = None, **extra: Any) -> Hint:
        """Compare a guess with the number."""
        if str(self.number) in action.guess:
            return Hint(hint="Right.", reward=1.0, done=True)
        return Hint(hint="Wrong. Guess again.", reward=0.0)

    @property
    def state(self) -> State:
        """Nothing that a client needs."""
        return State()


# The most sessions at the same time.
app = create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=256)
