"""Environments of the packages verifiers and openenv for tests: a number is to be guessed.

`load_environment` is what verifiers loads by the name `tests.guessing`. Where a package is not
installed, the tests of it are skipped.
"""

from __future__ import annotations

from typing import Any

ANSWER = "7"
QUESTION = "Guess a number from 1 to 9."
SYSTEM = "Answer by one digit."


def double(number: int) -> int:
    """Double a number.

    Args:
        number: Any whole number.
    """
    return 2 * number


def load_environment(kind: str = "guess", tries: int = 3) -> Any:
    """Return an environment of verifiers.

    `kind`: guess (several turns), single (one turn), tools, group (whose rubric compares episodes), or
    forgetful (which takes back what it has said).
    """
    import verifiers as vf
    from datasets import Dataset

    rows = [{"question": QUESTION, "answer": ANSWER}, {"question": "Another.", "answer": "3"}]
    dataset = Dataset.from_list(rows)

    async def right(completion: Any, answer: str) -> float:
        said = [message.content for message in completion if message.role == "assistant"]
        return float(answer in said) / len(said)

    def best(completions: Any) -> list[float]:
        return [0.0 for _ in completions]

    class Guess(vf.MultiTurnEnv):  # type: ignore[misc]
        async def env_response(self, messages: Any, state: Any, **extra: Any) -> Any:
            said = messages[-1]["content"]
            if said == "raise":
                raise ValueError("not today")
            if said == state["answer"]:
                state["final_env_response"] = [{"role": "user", "content": "Yes."}]
                return state["final_env_response"]
            if kind == "forgetful":
                messages[0].content = "Something else."
            return [{"role": "user", "content": "No."}]

    rubric = vf.Rubric(funcs=[best if kind == "group" else right])
    if kind == "single":
        return vf.SingleTurnEnv(dataset=dataset, rubric=rubric, system_prompt=SYSTEM)
    if kind == "tools":
        return vf.ToolEnv(tools=[double], dataset=dataset, rubric=rubric, max_turns=tries)
    return Guess(dataset=dataset, rubric=rubric, system_prompt=SYSTEM, max_turns=tries)


def make_app() -> Any:
    """Return the app of a server of OpenEnv. An observation says where the number lies."""
    from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

    class Guess(Action):  # type: ignore[misc]
        text: str

    class Hint(Observation):  # type: ignore[misc]
        text: str

    class Guessing(Environment):  # type: ignore[misc]
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: Any = None, episode_id: Any = None, **extra: Any) -> Hint:
            self.number = int(extra.get("answer", seed % 9 + 1))
            return Hint(text=f"It is below {self.number + 5}.")

        def step(self, action: Guess, timeout_s: Any = None, **extra: Any) -> Hint:
            if action.text == "raise":
                raise ValueError("not today")
            if action.text == str(self.number):
                return Hint(text="Yes.", reward=1.0, done=True)
            return Hint(text=f"Not {action.text}.", reward=-0.1)

        @property
        def state(self) -> State:
            return State(step_count=0)

    return create_fastapi_app(Guessing, Guess, Hint, max_concurrent_envs=16)


def shout(message: dict[str, Any]) -> dict[str, Any]:
    """The action of a message: its last word."""
    return {"text": message["content"].split()[-1]}


def whisper(observation: dict[str, Any]) -> str:
    """The text of an observation in small letters."""
    return str(observation["text"]).lower()
