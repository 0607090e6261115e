"""Rows as other tools write them, renamed to the forms of `data.sources`. `source.format` fixes one; else the columns tell it.

    sharegpt    conversations of {from, value}, {role, content}, {input, output} or bare texts; also system, tools, images; chosen and
                rejected beside them
    alpaca      instruction, input, output; also system and history (pairs of a question and its answer); chosen and rejected beside them
    verdict     two answers, and which is the better: response_0, response_1, better_response_id, and the like
    ranked      a prompt and a list of answers with scores or ranks: the best and the worst become a pair
    pair        a prompt, the better and the worse answer under other names
    answer      a prompt and its answer under other names
    transcript  texts with `Human:` and `Assistant:` turns: chosen and rejected, or the prompt
    document    a text under another name

A null or empty column counts as absent, but an empty answer stays one where no other column answers. Columns that a format does not use
stay with the row, for reward functions.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from drumline.core.data import JUDGED_FORMS, PAIR_FORMS, TEXT_FORMS, Forms
from drumline.data.questions import first, headed, question_of, system_of, with_context
from drumline.data.rivals import Values, rivals
from drumline.data.turns import (
    TURN,
    are_texts,
    calls_of,
    messages_of,
    read_talks,
    rounds_of,
    transcribed,
)
from drumline.errors import DataError

# Columns under our names, and the names of those that they were made of.
Found = tuple[dict[str, Any], set[str]]

PROMPTS = (
    "prompt",
    "instruction",
    "question",
    "query",
    "problem",
    "inputs",
    "input",
    "message_1",
    "document",
    "article",
    "dialogue",
)
# Solutions come before answers: where a row has both, the answer is the result alone.
REPLIES = (
    "completion", "output", "response", "solution", "generated_solution", "answer", "demonstration", "targets", "target", "message_2",
)  # fmt: skip
ANSWERS = (*REPLIES, "summary", "highlights", "code")
TEXTS = ("content", "document", "article", "passage", "sentence", "review", "code")
TALKS = ("conversations", "conversation", "messages", "dialogue", "dialog", "trajectory", "chat")
SIDES = ("prompt", "completion", "chosen", "rejected", "chosen_messages", "rejected_messages")
LISTS = ("completions", "responses", "answers", "candidates", "outputs")
BEST_HIGH, BEST_LOW = (
    ("scores", "score", "ratings", "rating", "rewards", "overall_score", "pm_score"),
    ("ranks", "rank", "ranking"),
)
PAIRS = (
    ("chosen", "rejected"),
    ("chosen_response", "rejected_response"),
    ("response_chosen", "response_rejected"),
    ("preferred", "dispreferred"),
    ("win", "lose"),
    ("accepted", "rejected"),
    ("preferred_output", "non_preferred_output"),
    ("response_j", "response_k"),
    ("response_w", "response_l"),
    ("better", "worse"),
    ("chosen_messages", "rejected_messages"),
)
SIGN = ("below 0", "above 0")
VERDICTS = (  # two answers, the column that names the better, what it says of each
    ("response_0", "response_1", "better_response_id", ("0", "1")),
    ("response_a", "response_b", "winner", ("a", "b")),
    ("answer_a", "answer_b", "winner", ("a", "b")),
    ("response_a", "response_b", "preference", ("a", "b")),
    ("output_1", "output_2", "preference", ("1", "2")),
    ("response_1", "response_2", "preference", ("1", "2")),
    ("response_1", "response_2", "preference_strength", SIGN),
    ("response1", "response2", "overall_preference", SIGN),
    ("human_ref_A", "human_ref_B", "labels", ("1", "0")),
    ("orig_response_A", "orig_response_B", "orig_preference", ("a", "b")),
    ("conversation_a", "conversation_b", "winner", ("a", "b")),
)
LABELS = {
    "true": True,
    "1": True,
    "yes": True,
    "good": True,
    "false": False,
    "0": False,
    "no": False,
    "bad": False,
}
TIES = ("tie", "both", "neither", "equal", "same")  # how verdicts begin that name none
SHAPES: dict[str, dict[str, tuple[str, ...]]] = {  # what a row is for → format → its columns
    "text": {
        "alpaca": ("instruction", "output"),
        "sharegpt": ("conversations",),
        "answer": ("question", "answer"),
        "document": ("content",),
    },
    "pair": {
        "pair": ("question", "chosen", "rejected"),
        "verdict": ("prompt", "response_a", "response_b", "winner"),
        "ranked": ("prompt", "completions", "scores"),
    },
    "label": {
        "alpaca": ("instruction", "output", "kto_tag"),
        "sharegpt": ("conversations", "kto_tag"),
    },
    "prompt": {"alpaca": ("instruction",), "sharegpt": ("conversations",), "answer": ("question",)},
    "class": {"document": ("content", "label")},
}
FOR = ((JUDGED_FORMS, "kto"), (TEXT_FORMS, "sft"), (PAIR_FORMS, "dpo, orpo, simpo or reward"))


class Tie(Exception):
    """A row of two or more answers, none of which is the better."""


def shaped(
    values: dict[str, Any], known: Forms, wanted: str, origin: str
) -> tuple[str, dict[str, Any]]:
    """(format, the row's columns under our names); the format is empty for a row that has one of the forms itself. `wanted`: a format, or
    auto. Where no column fits, `Question` is as good as `question`. Raises DataError for a row that is not of the `wanted` one, or that its
    format cannot be read from, and Tie."""
    if wanted == "own" or (found := _shaped(values, known, wanted, origin)) is None:
        lower = {str(name).lower(): name for name in values}
        if wanted == "own" or lower.keys() == values.keys() or len(lower) < len(values):
            found = None
        elif found := _shaped(
            type(values)({name: values[old] for name, old in lower.items()}), known, wanted, origin
        ):
            ours = {"images", "tools", *(part for form in known for part in form)}
            found = (
                found[0],
                type(values)(
                    {
                        name if name in ours else lower.get(name, name): value
                        for name, value in found[1].items()
                    }
                ),
            )
    if found is not None or wanted in ("own", "auto"):
        return found or ("", values)
    shape = " and ".join(SHAPES[_wants(known)].get(wanted, ()))
    what = f"is no row of the format {wanted}{f', which has {shape}' if shape else ''}: its columns are {', '.join(values) or 'none'}"
    raise DataError(what, where=origin, fix="leave `format` out, or map `columns`")


def _shaped(
    values: dict[str, Any], known: Forms, wanted: str, origin: str
) -> tuple[str, dict[str, Any]] | None:
    talks = read_talks(
        {name: values[name] for name in (*SIDES, *TALKS) if name in values},
        values.get(first(values, PROMPTS) or ""),
        origin,
    )
    # Of the row's own class: rows of a table are padded with null keys.
    plain = type(values)(values | {name: value for name, (_, value) in talks.items()})
    if (
        _wants(known) == "pair"
        and (question := first(plain, PROMPTS))
        and _repeats(plain, question)
    ):
        del plain[question]
    if (
        "messages" in plain and "functions" in plain and not plain.get("tools")
    ):  # OpenAI's older name
        plain["tools"] = plain.pop("functions")
    there = {
        name: value
        for name, value in plain.items()
        if value is not None and value != "" and value != []
    }
    if (blank := _blank(plain, there)) is not None:
        there[blank] = ""
    own = any(
        set(form) <= there.keys() for form in known if {"prompt", "messages", "label"} & set(form)
    )
    systems = bool(headed(there.get("prompt"), there)[1])
    foreign = max(
        (name for part, (name, _) in talks.items() if any(part in form for form in known)),
        default="",
    )
    if wanted == "auto" and own and (not systems or _wants(known) == "class"):
        return foreign, _labelled(plain, known)
    for name in FORMATS if wanted == "auto" else (wanted,):
        # A text beside a question and an answer is the whole row; beside an instruction it is Alpaca's, written out for a model. A passage
        # beside a question is not the whole row.
        whole = name == "answer" and "text" in there and not systems
        partial = name == "document" and (first(there, PROMPTS) or TEXTS[0]) not in TEXTS
        if (wanted != "auto" or not (whole or partial)) and (
            found := FORMATS[name](there, _wants(known), origin)
        ) is not None:
            made, used = found
            return name, _labelled(
                type(values)(
                    {key: value for key, value in plain.items() if key not in used} | made
                ),
                known,
            )
    return (
        (foreign, plain)
        if wanted == "auto" and any(set(form) <= plain.keys() for form in known)
        else None
    )


def _blank(plain: Values, there: Values) -> str | None:
    """The column of an empty answer to a question that no column answers; what else a row has is not learned in its place."""
    if (
        there.keys() & {*REPLIES, *LISTS}
        or first(there, TALKS, list)
        or not first(there, PROMPTS, str | list)
    ):
        return None
    return next((name for name in ANSWERS if plain.get(name) == ""), None)


def _labelled(values: dict[str, Any], known: Forms) -> dict[str, Any]:
    """The row of an answer that is good or bad with true or false as its label: tables have texts."""
    label = values.get("label")
    if _wants(known) == "label" and isinstance(label, str) and label.lower() in LABELS:
        values["label"] = LABELS[label.lower()]
    return values


def nearest_format(values: Values, known: Forms) -> str:
    """What a row of no form is nearest to, as the end of a line, or which algorithms take it; empty where nothing is near."""
    wants = _wants(known)
    for forms, algorithms in FOR:
        if wants != _wants(forms):
            try:
                name, made = shaped(dict(values), forms, "auto", "")
            except (DataError, Tie):
                continue
            if name or any(set(form) <= made.keys() for form in forms):
                return f"; such rows are for algorithm {algorithms}"

    there = [str(name) for name in values]

    def near(columns: tuple[str, ...]) -> float:
        found = [
            1.0 if each in there else 0.8 * bool(difflib.get_close_matches(each, there, 1, 0.75))
            for each in columns
        ]
        return sum(found) / len(found)

    shapes = [
        *(("form", form) for form in known),
        *((f"format {name}, which", columns) for name, columns in SHAPES[wants].items()),
    ]
    name, columns = max(shapes, key=lambda item: near(item[1]))
    if not near(columns):
        return ""
    lacks = [each for each in columns if each not in there]
    close = [
        f"`{match[0]}` may be {each}"
        for each in lacks
        if (match := difflib.get_close_matches(each, there, 1, 0.75))
    ]
    close += (
        []
        if lacks
        else [
            f"`{each}` is {type(values[each]).__name__}"
            for each in columns
            if not isinstance(values[each], str)
        ]
    )
    return f"; the nearest {name} has {' and '.join(columns)}" + (
        f": {', '.join(close)}" if close else ""
    )


def _wants(known: Forms) -> str:
    """What the algorithm takes: pairs, prompts, answers with a label, or text to learn."""
    parts = {part for form in known for part in form}
    if "chosen" in parts:
        return "pair"
    if "label" in parts:
        return "label" if "completion" in parts else "class"
    return "text" if parts & {"completion", "text"} else "prompt"


def judges_answers(known: Forms) -> bool:
    """Whether an algorithm with these forms learns from answers that are labelled good or bad."""
    return _wants(known) == "label"


def _sides(there: Values) -> tuple[str, str] | None:
    return next((pair for pair in PAIRS if pair[0] in there and pair[1] in there), None)


def _repeats(there: Values, question: str) -> bool:
    """Whether a pair has its prompt twice: as a text, and in both sides, which are whole conversations."""
    prompt, sides = (
        there[question],
        [there[key] for key in ("chosen", "rejected") if _is_whole(there.get(key))],
    )
    has = [
        any(
            str(prompt).strip() in str(turn.get("content"))
            for turn in side
            if isinstance(turn, Mapping)
        )
        for side in sides
    ]
    return isinstance(prompt, str) and len(has) == 2 and all(has)


def _is_whole(side: Any) -> bool:
    """Whether an answer is a conversation from its start."""
    return (
        isinstance(side, list)
        and bool(side)
        and isinstance(side[0], Mapping)
        and side[0].get("role") in ("system", "user")
    )


def _completed(
    prompt: Any, there: Values, used: set[str], wants: str, answer: str | None
) -> Found | None:
    """A row of a prompt and what the algorithm takes beside it; None without that."""
    made, sides = {"prompt": prompt}, _sides(there)
    if wants == "prompt":
        return made, used
    if wants == "pair":
        return (
            None
            if sides is None
            else (
                made | {"chosen": there[sides[0]], "rejected": there[sides[1]]},
                used | set(sides),
            )
        )
    if answer is None:
        return None
    made["completion"], used = there[answer], used | {answer}
    if wants == "label":
        label = "label" if "label" in there else "kto_tag"
        return None if label not in there else (made | {"label": there[label]}, used | {label})
    return made, used


def _alpaca(there: Values, wants: str, origin: str) -> Found | None:
    instruction = there.get("instruction")
    if (
        not isinstance(instruction, str)
        or wants == "class"
        or ((answer := first(there, ANSWERS)) is None and wants in ("text", "label"))
    ):
        return None
    (prompt_text, used), (messages, systems) = (
        with_context(there, "instruction", origin),
        system_of(there),
    )
    used |= ({"history"} & there.keys()) | systems
    if not messages and "history" not in used:
        return _completed(prompt_text, there, used, wants, answer)
    history = there.get("history", [])
    if isinstance(history, str):  # of a table
        try:
            history = json.loads(history)
        except (ValueError, RecursionError):
            history = None
    for turns in history if isinstance(history, list) else [None]:
        if not isinstance(turns, list | tuple) or len(turns) != 2:
            raise DataError(
                "`history` holds what is no pair of a question and its answer", where=origin
            )
        messages += [
            {"role": role, "content": text}
            for role, text in zip(("user", "assistant"), turns, strict=True)
        ]
    messages.append({"role": "user", "content": prompt_text})
    if wants != "text":
        return _completed(messages, there, used, wants, answer)
    assert answer is not None
    return {"messages": [*messages, {"role": "assistant", "content": there[answer]}]}, used | {
        answer
    }


def _sharegpt(there: Values, wants: str, origin: str) -> Found | None:
    name = first(there, TALKS, list) or next(
        (each for each in ("data", "turns") if are_texts(there.get(each))), None
    )
    name = name or ("texts" if rounds_of(there.get("texts")) else None)
    # Beside a prompt, or whole conversations, it is there for another algorithm.
    beside = {
        "pair": "prompt" in there or _is_whole(there.get("chosen")),
        "label": "completion" in there,
    }.get(wants, False)
    if name is None or wants == "class" or beside:
        return None
    systems, column = system_of(there)
    messages, used = messages_of(there[name], origin), {name} | column
    if systems and messages[0]["role"] != "system":
        messages = [*systems, *messages]
    # OpenAI's older name.
    tools = {} if there.get("functions") is None else {"tools": there["functions"]}
    if wants in ("text", "prompt"):
        return {"messages": messages, **tools}, used | ({"functions"} if tools else set())
    if wants == "label":
        *messages, last = messages
        there = {**there, "completion": [last]}
        return _completed(messages, there, used | {"completion"}, wants, "completion")
    return _completed(messages, there, used, wants, None)


def _verdict(there: Values, wants: str, origin: str) -> Found | None:
    if wants != "pair":
        return None
    laid, own = rivals(there) or ({}, set())
    there = {**there, **laid}
    prompt = first(there, (*PROMPTS, "history", "context"), str | list)
    names = next((each for each in VERDICTS if set(each[:3]) <= there.keys()), None)
    # The prompt is in them.
    whole = names is not None and all(isinstance(there[side], list) for side in names[:2])
    if names is None or (prompt is None and not whole):
        return None
    one, other, column, marks = names
    verdict = there[column]
    if marks is SIGN and isinstance(verdict, int | float):
        verdict = SIGN[verdict > 0] if verdict and math.isfinite(verdict) else "tie"
    better = str(verdict).lower().removeprefix("model_").removeprefix("response_")
    if better.startswith(TIES):
        raise Tie
    if better not in marks:
        fix = f"write {marks[0]} or {marks[1]}, or tie"
        raise DataError(
            f"column {column!r} says {there[column]!r}, and names no better answer",
            where=origin,
            fix=fix,
        )
    chosen, rejected = (one, other) if better == marks[0] else (other, one)
    made, used = {"chosen": there[chosen], "rejected": there[rejected]}, {one, other, column}
    if whole:
        made, systems = _sides_headed(there, (chosen, rejected))
        used |= systems
    else:
        made["prompt"], more = question_of(there, prompt or "", origin)
        used |= more
    return made, own or used


def _ranked(there: Values, wants: str, origin: str) -> Found | None:
    prompt, name = first(there, PROMPTS, str | list), first(there, LISTS, list)
    if wants != "pair" or prompt is None or name is None:
        return None
    answers, used = there[name], {prompt, name}
    if all(isinstance(each, Mapping) for each in answers):
        text = next(
            (key for key in (*ANSWERS, "text", "content", "value") if key in answers[0]), ""
        )
        column = next((key for key in (*BEST_HIGH, *BEST_LOW) if key in answers[0]), "")
        texts, marks = [each.get(text) for each in answers], [each.get(column) for each in answers]
    else:
        column = first(there, (*BEST_HIGH, *BEST_LOW), list) or ""
        texts, marks, used = answers, there.get(column, []), used | {column}
    if not column or len(texts) != len(marks) or len(texts) < 2:
        return None
    try:
        numbers = [-float(mark) if column in BEST_LOW else float(mark) for mark in marks]
    except (TypeError, ValueError, OverflowError):
        numbers = [math.nan]
    if not all(map(math.isfinite, numbers)):
        raise DataError(f"{column!r} of the answers are no numbers", where=origin)
    best, worst = numbers.index(max(numbers)), numbers.index(min(numbers))
    if best == worst:
        raise Tie
    question, more = question_of(there, prompt, origin)
    return {"prompt": question, "chosen": texts[best], "rejected": texts[worst]}, used | more


def _sides_headed(there: Values, sides: tuple[str, str]) -> Found:
    """The better and the worse answer, conversations from their start, behind the system's message in a column of its own; and that."""
    heads = [headed(there[side], there) for side in sides]
    return {name: head for name, (head, _) in zip(("chosen", "rejected"), heads, strict=True)}, {
        *heads[0][1],
        *heads[1][1],
    }


def _pair(there: Values, wants: str, origin: str) -> Found | None:
    prompt, sides = first(there, PROMPTS, str | list | Mapping), _sides(there)
    if wants != "pair" or sides is None:
        return None
    if prompt is None:
        made, systems = _sides_headed(there, sides)
        whole = all(_is_whole(there[side]) for side in sides)
        return (made, {*sides, *systems}) if whole and (systems or sides != PAIRS[0]) else None
    tools = {}
    if isinstance(request := there[prompt], Mapping):  # OpenAI's preferences
        tools = {"tools": request["tools"]} if request.get("tools") else {}
        if not isinstance(request.get("messages"), list):
            return None
        there = {**there, prompt: request["messages"]}
    question, used = question_of(there, prompt, origin)
    made, used = _completed(question, there, used, wants, None) or ({}, set())
    return made | tools, used


def _answer(there: Values, wants: str, origin: str) -> Found | None:
    prompt, (answer, reply) = first(there, PROMPTS, str | list), _reply(there)
    if wants in ("pair", "class") or prompt is None or (answer is None and wants != "prompt"):
        return None
    question, used = question_of(there, prompt, origin)
    return _completed(
        question, there if answer is None else {**there, answer: reply}, used, wants, answer
    )


def _reply(there: Values) -> tuple[str | None, Any]:
    """The column of the answer, and the answer: a text, messages, calls of tools, or the first of several texts that are as good."""
    if (name := first(there, ANSWERS)) is not None:
        return name, there[name]
    for name in (*ANSWERS, *LISTS):
        value = there.get(name)
        if "tools" in there and (calls := calls_of(value)):
            return name, [{"role": "assistant", "content": "", "tool_calls": calls}]
        texts = value.get("text") if isinstance(value, Mapping) else value
        if not isinstance(texts, list) or not texts:
            continue
        if isinstance(texts[0], Mapping) and name in ANSWERS:
            return name, texts
        if isinstance(texts[0], str) and first(there, (*BEST_HIGH, *BEST_LOW), list) is None:
            return name, texts[0]
    return None, None


def _transcript(there: Values, wants: str, origin: str) -> Found | None:
    sides = {name: there.get(name) for name in ("chosen", "rejected")}
    if wants != "pair" or not all(
        isinstance(text, str) and TURN.match(text) for text in sides.values()
    ):
        return None
    return {name: transcribed(str(text)) for name, text in sides.items()}, set()


def _document(there: Values, wants: str, origin: str) -> Found | None:
    name = first(there, TEXTS)
    if (
        name is None
        or "text" in there
        or wants not in ("text", "class")
        or (wants == "class" and "label" not in there)
    ):
        return None
    return {"text": there[name]} | ({"label": there["label"]} if wants == "class" else {}), {name}


FORMATS: dict[str, Callable[[Values, str, str], Found | None]] = {
    "sharegpt": _sharegpt, "alpaca": _alpaca, "verdict": _verdict, "ranked": _ranked, "pair": _pair, "answer": _answer,
    "transcript": _transcript, "document": _document,
}  # fmt: skip
