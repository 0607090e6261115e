"""Rows as other tools write them, renamed to the forms of `data.sources`. `source.format` fixes one; else the columns tell it.

    sharegpt    conversations of {from, value} or {role, content}; also system, tools, images; chosen and rejected beside them
    alpaca      instruction, input, output; also system and history (pairs of a question and its answer); chosen and rejected beside them
    verdict     two answers, and which is the better: response_0, response_1, better_response_id, and the like
    ranked      a prompt and a list of answers with scores or ranks: the best and the worst become a pair
    pair        a prompt, the better and the worse answer under other names
    answer      a prompt and its answer under other names
    transcript  chosen and rejected as texts with `Human:` and `Assistant:` turns

A null or empty column counts as absent. Columns that a format does not use stay with the row, for reward functions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from drumline.core.data import Forms
from drumline.errors import DataError

Values = Mapping[str, Any]
Found = tuple[dict[str, Any], set[str]]  # columns under our names, and the names of those that they were made of

PROMPTS = ("prompt", "instruction", "question", "query", "problem")
CONTEXTS = ("input", "context")  # what an instruction is about
ANSWERS = ("completion", "output", "response", "answer", "solution")
LISTS = ("completions", "responses", "answers", "candidates", "outputs")
BEST_HIGH, BEST_LOW = ("scores", "score", "ratings", "rating", "rewards", "overall_score"), ("ranks", "rank", "ranking")
PAIRS = (
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
    ("response_chosen", "response_rejected"),
    ("preferred", "dispreferred"),
    ("win", "lose"),
    ("accepted", "rejected"),
)
VERDICTS = (  # two answers, the column that names the better, what it says of each
    ("response_0", "response_1", "better_response_id", ("0", "1")),
    ("response_a", "response_b", "winner", ("a", "b")),
    ("answer_a", "answer_b", "winner", ("a", "b")),
    ("response_a", "response_b", "preference", ("a", "b")),
    ("output_1", "output_2", "preference", ("1", "2")),
    ("response_1", "response_2", "preference", ("1", "2")),
)
ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "bot": "assistant", "model": "assistant",
    "chatgpt": "assistant", "system": "system", "observation": "tool", "tool": "tool", "function_response": "tool",
    "function_call": "assistant", "tool_call": "assistant",
}  # fmt: skip
CALLS = ("function_call", "tool_call")
TURN = re.compile(r"\n\n(Human|Assistant):[ ]?")


def shaped(values: dict[str, Any], known: Forms, wanted: str, origin: str) -> tuple[str, dict[str, Any]]:
    """(format, the row's columns under our names); the format is empty for a row that has one of the forms itself. `wanted`: a format, or
    auto. Raises DataError for a row that is not of the `wanted` one, or that its format cannot be read from."""
    there = {name: value for name, value in values.items() if value is not None and value != "" and value != []}
    own = any(set(form) <= there.keys() for form in known if {"prompt", "messages", "label"} & set(form))
    if wanted == "own" or (wanted == "auto" and own):
        return "", values
    for name in FORMATS if wanted == "auto" else (wanted,):
        # A text beside a question and an answer is the whole row; beside an instruction it is Alpaca's, written out for a model.
        skip = wanted == "auto" and name == "answer" and "text" in there
        if not skip and (found := FORMATS[name](there, _wants(known), origin)) is not None:
            made, used = found
            # Of the row's own class: rows of a table are padded with null keys.
            return name, type(values)({key: value for key, value in values.items() if key not in used} | made)
    if wanted == "auto":
        return "", values
    columns = ", ".join(values) or "none"
    raise DataError(
        f"is no row of the format {wanted}: its columns are {columns}", where=origin, fix="leave `format` out, or map `columns`"
    )


def nearest_format(values: Values) -> str:
    """What would make a row one of a known format, as the end of a line; empty where nothing is near."""
    if any(name in values for name in PROMPTS):
        return f", or name the answer {', '.join(ANSWERS[:-1])} or {ANSWERS[-1]}"
    return f", or name the question {', '.join(PROMPTS[:-1])} or {PROMPTS[-1]}" if any(name in values for name in ANSWERS) else ""


def _wants(known: Forms) -> str:
    """What the algorithm takes: pairs, prompts, answers with a label, or text to learn."""
    parts = {part for form in known for part in form}
    if "chosen" in parts:
        return "pair"
    if "label" in parts:
        return "label" if "completion" in parts else "class"
    return "text" if parts & {"completion", "text"} else "prompt"


def _first(there: Values, names: tuple[str, ...], kinds: Any = str) -> str | None:
    return next((name for name in names if isinstance(there.get(name), kinds)), None)


def _sides(there: Values) -> tuple[str, str] | None:
    return next((pair for pair in PAIRS if pair[0] in there and pair[1] in there), None)


def _completed(prompt: Any, there: Values, used: set[str], wants: str, answer: str | None) -> Found | None:
    """A row of a prompt and what the algorithm takes beside it; None without that."""
    made, sides = {"prompt": prompt}, _sides(there)
    if wants == "prompt":
        return made, used
    if wants == "pair":
        return None if sides is None else (made | {"chosen": there[sides[0]], "rejected": there[sides[1]]}, used | set(sides))
    if answer is None:
        return None
    made["completion"], used = there[answer], used | {answer}
    if wants == "label":
        label = "label" if "label" in there else "kto_tag"
        return None if label not in there else (made | {"label": there[label]}, used | {label})
    return made, used


def _alpaca(there: Values, wants: str, origin: str) -> Found | None:
    instruction = there.get("instruction")
    if not isinstance(instruction, str) or wants == "class" or ((answer := _first(there, ANSWERS)) is None and wants in ("text", "label")):
        return None
    context = _first(there, CONTEXTS)
    prompt_text = instruction if context is None else f"{instruction}\n{there[context]}"
    used = {"instruction", "system", "history", *([context] if context else [])} & there.keys()
    if not {"system", "history"} & used:
        return _completed(prompt_text, there, used, wants, answer)
    messages = [{"role": "system", "content": there["system"]}] if "system" in there else []
    for turns in there.get("history", ()):
        if not isinstance(turns, list | tuple) or len(turns) != 2:
            raise DataError("`history` holds what is no pair of a question and its answer", where=origin)
        messages += [{"role": role, "content": text} for role, text in zip(("user", "assistant"), turns, strict=True)]
    messages.append({"role": "user", "content": prompt_text})
    if wants != "text":
        return _completed(messages, there, used, wants, answer)
    assert answer is not None
    return {"messages": [*messages, {"role": "assistant", "content": there[answer]}]}, used | {answer}


def _sharegpt(there: Values, wants: str, origin: str) -> Found | None:
    name = _first(there, ("conversations", "conversation"), list)
    if name is None or wants == "class":
        return None
    messages, used = [_message(turn, origin) for turn in there[name]], {name, "system"} & there.keys()
    if isinstance(there.get("system"), str) and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": there["system"]})
    if wants in ("text", "prompt"):
        return {"messages": messages}, used
    if wants == "label":
        *messages, last = messages
        there = {**there, "completion": [last]}
        return _completed(messages, there, used | {"completion"}, wants, "completion")
    sides = _sides(there)
    answers = {side: _turns(there[side], origin) for side in sides or ()}
    return _completed(messages, {**there, **answers}, used, wants, None)


def _turns(value: Any, origin: str) -> Any:
    """An answer of ShareGPT's: a text, a turn, or turns."""
    return value if isinstance(value, str) else [_message(turn, origin) for turn in (value if isinstance(value, list) else [value])]


def _message(turn: Any, origin: str) -> dict[str, Any]:
    if not isinstance(turn, Mapping) or not {"from", "role"} & turn.keys():
        raise DataError("a turn of the conversation has neither `from` nor `role`", where=origin)
    if "from" not in turn:
        return dict(turn)
    role, text = str(turn["from"]).lower(), turn.get("value")
    if role not in ROLES:
        raise DataError(f"a turn is from {turn['from']!r}", where=origin, fix=f"turns are from {', '.join(ROLES)}")
    if not isinstance(text, str):
        raise DataError(f"a turn from {role} has no text under `value`", where=origin)
    rest = {key: value for key, value in turn.items() if key not in ("from", "value") and value is not None}
    if role not in CALLS:
        return {"role": ROLES[role], "content": text, **rest}
    try:
        calls = json.loads(text)
    except (ValueError, RecursionError):
        raise DataError(f"a turn from {role} is no JSON of a call", where=origin, fix="give {name, arguments}, or a list of them") from None
    calls = calls if isinstance(calls, list) else [calls]
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call} for call in calls], **rest}


def _verdict(there: Values, wants: str, origin: str) -> Found | None:
    prompt = _first(there, PROMPTS)
    names = next((each for each in VERDICTS if set(each[:3]) <= there.keys()), None)
    if wants != "pair" or prompt is None or names is None:
        return None
    one, other, column, marks = names
    better = str(there[column]).lower().removeprefix("model_").removeprefix("response_")
    if better not in marks:
        fix = f"write {marks[0]} or {marks[1]}, and leave ties out"
        raise DataError(f"column {column!r} says {there[column]!r}, and names no better answer", where=origin, fix=fix)
    chosen, rejected = (one, other) if better == marks[0] else (other, one)
    return {"prompt": there[prompt], "chosen": there[chosen], "rejected": there[rejected]}, {prompt, one, other, column}


def _ranked(there: Values, wants: str, origin: str) -> Found | None:
    prompt, name = _first(there, PROMPTS), _first(there, LISTS, list)
    if wants != "pair" or prompt is None or name is None:
        return None
    answers, used = there[name], {prompt, name}
    if all(isinstance(each, Mapping) for each in answers):
        text = next((key for key in (*ANSWERS, "text", "content", "value") if key in answers[0]), "")
        column = next((key for key in (*BEST_HIGH, *BEST_LOW) if key in answers[0]), "")
        texts, marks = [each.get(text) for each in answers], [each.get(column) for each in answers]
    else:
        column = _first(there, (*BEST_HIGH, *BEST_LOW), list) or ""
        texts, marks, used = answers, there.get(column, []), used | {column}
    if not column or len(texts) != len(marks) or len(texts) < 2:
        return None
    try:
        numbers = [-float(mark) if column in BEST_LOW else float(mark) for mark in marks]
    except (TypeError, ValueError):
        raise DataError(f"{column!r} of the answers are no numbers", where=origin) from None
    best, worst = numbers.index(max(numbers)), numbers.index(min(numbers))
    if best == worst:
        raise DataError("all answers have one score, so none is the better", where=origin, fix="take the row out")
    return {"prompt": there[prompt], "chosen": texts[best], "rejected": texts[worst]}, used


def _pair(there: Values, wants: str, origin: str) -> Found | None:
    prompt = _first(there, PROMPTS, str | list)
    if wants != "pair" or prompt is None:
        return None
    system, used = there.get("system"), {prompt}
    prompt_text = there[prompt]
    if isinstance(system, str) and isinstance(prompt_text, str):
        prompt_text, used = [{"role": "system", "content": system}, {"role": "user", "content": prompt_text}], used | {"system"}
    return _completed(prompt_text, there, used, wants, None)


def _answer(there: Values, wants: str, origin: str) -> Found | None:
    prompt, answer = _first(there, PROMPTS, str | list), _first(there, ANSWERS)
    if wants in ("pair", "class") or prompt is None or (answer is None and wants != "prompt"):
        return None
    context = _first(there, CONTEXTS)
    prompt_text = there[prompt] if context is None else f"{there[prompt]}\n{there[context]}"
    return _completed(prompt_text, there, {prompt, *([context] if context else [])}, wants, answer)


def _transcript(there: Values, wants: str, origin: str) -> Found | None:
    sides = {name: there.get(name) for name in ("chosen", "rejected")}
    if wants != "pair" or not all(isinstance(text, str) and TURN.match(text) for text in sides.values()):
        return None
    made = {}
    for name, text in sides.items():
        _, *parts = TURN.split(str(text))
        roles = {"Human": "user", "Assistant": "assistant"}
        made[name] = [{"role": roles[who], "content": content.strip()} for who, content in zip(parts[::2], parts[1::2], strict=True)]
    return made, set()


FORMATS: dict[str, Callable[[Values, str, str], Found | None]] = {
    "sharegpt": _sharegpt, "alpaca": _alpaca, "verdict": _verdict, "ranked": _ranked, "pair": _pair, "answer": _answer,
    "transcript": _transcript,
}  # fmt: skip
