"""Converts rows as other tools write them to the forms of rows in `data.sources`.

`source.format` names the format of all rows of a source. Without it, the columns of each row decide:

    sharegpt    conversations of {from, value}, {role, content}, {input, output} or bare texts;
                also system, tools, images; chosen and rejected beside them
    alpaca      instruction, input, output; also system and history (pairs of a question and its
                answer); chosen and rejected beside them
    verdict     two answers and which of them is better: response_0, response_1,
                better_response_id, and the like
    ranked      a prompt and a list of answers with scores or ranks: the best and the worst become
                a pair
    pair        a prompt, the better and the worse answer under other names
    answer      a prompt and its answer under other names
    transcript  texts with `Human:` and `Assistant:` turns: chosen and rejected, or the prompt
    document    a text under another name
    retrieval   a query, a text that answers it, and texts that do not, under other names or in
                numbered columns

A null or empty column counts as absent, but an empty answer stays an answer if no other column
holds one. Columns that a format does not use stay with the row, for reward functions.

To add a format, write a reader, and add it to `FORMATS`, `TYPICAL_COLUMNS` and the names of
config.data. A reader (`_read_…`) gets the columns that hold something, the kind of rows that the
algorithm takes (see `RowKind`), and the row's name for errors. It returns None for a row that is
not of its format.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from drumline.config.data import (
    JUDGED_FORMS,
    PAIR_FORMS,
    RETRIEVAL_FORMS,
    TEXT_FORMS,
    Forms,
)
from drumline.data.questions import (
    PresentColumns,
    build_question,
    find_column,
    join_context,
    prepend_system,
    read_system,
)
from drumline.data.turns import (
    TURN,
    Messages,
    ParsedColumn,
    convert_turns,
    find_round_keys,
    is_list_of_texts,
    parse_calls,
    parse_columns,
    split_transcript,
)
from drumline.data.two_answers import read_two_answers
from drumline.errors import DataError

# What an algorithm takes: preference pairs, answers that are labelled good or bad, texts or images
# with a class, texts (conversations, completions and documents), prompts of rollouts, or queries
# with texts that do and do not answer them.
RowKind = Literal["pair", "judged", "classification", "text", "prompt", "retrieval"]


class Reading(NamedTuple):
    """The columns that a format has read from a row.

    Attributes:
        columns: the row's columns under our names.
        used: the names of the row's own columns that these replace.
    """

    columns: dict[str, Any]
    used: set[str]


class VerdictColumns(NamedTuple):
    """The names of the columns of two answers and of the verdict.

    `verdict_values`: the verdict for the first answer, and that for the second.
    """

    first: str
    second: str
    verdict: str
    verdict_values: tuple[str, str]


# Names of a prompt. The first that a row has counts, here and in the lists below.
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
# Solutions come before answers: if a row has both, its answer is only the final result.
REPLIES = (
    "completion",
    "output",
    "response",
    "solution",
    "generated_solution",
    "answer",
    "demonstration",
    "targets",
    "target",
    "message_2",
)
# The last names are also used beside answers. They are answers only if no other column is one.
ANSWERS = (*REPLIES, "summary", "highlights", "code")
TEXTS = ("content", "document", "article", "passage", "sentence", "review", "code")
# Names of a query, of a text that answers it, and of one or several that do not.
QUERIES = ("query", "anchor", "question", "title")
POSITIVES = ("positive", "pos", "positives", "positive_passages", "answer", "passage", "document")
NEGATIVES = ("negative", "neg", "negatives", "negative_passages", "hard_negatives")
# Columns of several negatives: negative_1, negative_2 and so on.
NUMBERED_NEGATIVE = re.compile(r"negative_?(\d{1,4})")
CONVERSATION_COLUMNS = (
    "conversations",
    "conversation",
    "messages",
    "dialogue",
    "dialog",
    "trajectory",
    "chat",
)
SIDES = ("prompt", "completion", "chosen", "rejected", "chosen_messages", "rejected_messages")
LISTS = ("completions", "responses", "answers", "candidates", "outputs")
# Columns of the scores or ranks of several answers: the best has the highest score, or the lowest
# rank.
SCORES = ("scores", "score", "ratings", "rating", "rewards", "overall_score", "pm_score")
RANKS = ("ranks", "rank", "ranking")
SCORE_COLUMNS = (*SCORES, *RANKS)
# Names of the better and of the worse answer; our own first, see `_read_pair_of_conversations`.
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
# The `verdict_values` of a verdict that is a number: its sign names the better answer.
SIGN = ("below 0", "above 0")
VERDICTS = (
    VerdictColumns("response_0", "response_1", "better_response_id", ("0", "1")),
    VerdictColumns("response_a", "response_b", "winner", ("a", "b")),
    VerdictColumns("answer_a", "answer_b", "winner", ("a", "b")),
    VerdictColumns("response_a", "response_b", "preference", ("a", "b")),
    VerdictColumns("output_1", "output_2", "preference", ("1", "2")),
    VerdictColumns("response_1", "response_2", "preference", ("1", "2")),
    VerdictColumns("response_1", "response_2", "preference_strength", SIGN),
    VerdictColumns("response1", "response2", "overall_preference", SIGN),
    VerdictColumns("human_ref_A", "human_ref_B", "labels", ("1", "0")),
    VerdictColumns("orig_response_A", "orig_response_B", "orig_preference", ("a", "b")),
    VerdictColumns("conversation_a", "conversation_b", "winner", ("a", "b")),
)
# Texts that label an answer good or bad, in small letters.
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
# A verdict is a tie if it begins with one of these.
TIES = ("tie", "both", "neither", "equal", "same")
# Kind of rows → formats that can be read as such rows, with their usual
# columns.
TYPICAL_COLUMNS: dict[RowKind, dict[str, tuple[str, ...]]] = {
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
    "judged": {
        "alpaca": ("instruction", "output", "kto_tag"),
        "sharegpt": ("conversations", "kto_tag"),
    },
    "prompt": {"alpaca": ("instruction",), "sharegpt": ("conversations",), "answer": ("question",)},
    "classification": {"document": ("content", "label")},
    "retrieval": {"retrieval": ("anchor", "positive", "negative")},
}
# Forms → the algorithms that take them, which an error recommends for rows of other forms.
ALGORITHMS_OF_FORMS = (
    (JUDGED_FORMS, "kto"),
    (TEXT_FORMS, "sft"),
    (PAIR_FORMS, "dpo, orpo, simpo or reward"),
    (RETRIEVAL_FORMS, "embed or rerank"),
)
# A name counts as a misspelling of another if their ratio by `difflib` is at least this.
LEAST_SIMILARITY = 0.75
# How much a misspelled column counts beside one with its right name.
MISSPELLED_WEIGHT = 0.8


class Tie(Exception):
    """A row of two or more answers, none of which is the better."""


def convert_row(
    values: dict[str, Any], accepted_forms: Forms, wanted: str, origin: str
) -> tuple[str, dict[str, Any]]:
    """Return the format of a row, and its columns under our names.

    If the row fits no format, its names are compared in small letters: `Question` as `question`.

    Args:
        values: the row's columns.
        accepted_forms: the forms of rows that the run's algorithm takes.
        wanted: the source's `format`: auto, own or the name of a format.
        origin: the row's name in an error.

    Returns:
        The name of the format, which is empty for a row that has one of the forms `accepted_forms`
        already, and the columns.

    Raises DataError for a row that is not of the format `wanted`, or that its format cannot be read
    from. Raises Tie for answers of which none is better.
    """
    if wanted == "own":
        return "", values
    found = _convert_by_exact_names(values, accepted_forms, wanted, origin)
    if found is None:
        found = _convert_by_small_letters(values, accepted_forms, wanted, origin)
    if found is not None:
        return found
    if wanted == "auto":
        return "", values
    usual_columns = TYPICAL_COLUMNS[_row_kind(accepted_forms)].get(wanted, ())
    which = ""
    if usual_columns:
        which = f", which has {' and '.join(usual_columns)}"
    names = ", ".join(values) or "none"
    what = f"is no row of the format {wanted}{which}: its columns are {names}"
    raise DataError(what, where=origin, fix="leave `format` out, or map `columns`")


def _convert_by_small_letters(
    values: dict[str, Any], accepted_forms: Forms, wanted: str, origin: str
) -> tuple[str, dict[str, Any]] | None:
    """Convert a row as if its columns were written in small letters.

    Returns None if that changes nothing, if two columns would be one, or if no format fits.
    """
    original_names = {str(name).lower(): name for name in values}
    changes_nothing = original_names.keys() == values.keys()
    merges_columns = len(original_names) < len(values)
    if changes_nothing or merges_columns:
        return None
    # Of the row's own class: `TableRow` says that nulls pad its columns.
    row_type = type(values)
    lowered = {name: values[original] for name, original in original_names.items()}
    found = _convert_by_exact_names(row_type(lowered), accepted_forms, wanted, origin)
    if found is None:
        return None
    format_name, columns = found
    our_names = {"images", "tools"}
    for form in accepted_forms:
        our_names.update(form)
    renamed = {}
    for name, value in columns.items():
        if name in our_names:
            renamed[name] = value
        else:
            # A column that no format used gets its own name back.
            renamed[original_names.get(name, name)] = value
    return format_name, row_type(renamed)


def _convert_by_exact_names(
    values: dict[str, Any], accepted_forms: Forms, wanted: str, origin: str
) -> tuple[str, dict[str, Any]] | None:
    """Return (format, columns under our names), or None if no format fits the row."""
    kind = _row_kind(accepted_forms)
    parsed_columns = _parse_conversation_columns(values, origin)
    parsed_row = _replace_conversations(values, parsed_columns, kind)
    present = _present_columns(parsed_row)
    if wanted != "auto":
        return _convert_by_format(wanted, parsed_row, present, accepted_forms, origin)

    _, system_columns = prepend_system(present.get("prompt"), present)
    has_system = bool(system_columns)
    conversation_format = _format_of_conversations(parsed_columns, accepted_forms)
    # A row of our own form is only converted to put a system's message, which has its own column,
    # before the prompt. Rows with a class have no prompt.
    needs_no_format = not has_system or kind == "classification"
    if _has_own_form(present, accepted_forms) and needs_no_format:
        return conversation_format, _parse_label(parsed_row, kind)
    for name in FORMATS:
        if _is_misled(name, present, has_system):
            continue
        found = _convert_by_format(name, parsed_row, present, accepted_forms, origin)
        if found is not None:
            return found
    # No format fits. A row with the columns of one of our forms is taken as it is, even if they are
    # empty.
    for form in accepted_forms:
        if set(form) <= parsed_row.keys():
            return conversation_format, parsed_row
    return None


def _convert_by_format(
    name: str,
    parsed_row: dict[str, Any],
    present: PresentColumns,
    accepted_forms: Forms,
    origin: str,
) -> tuple[str, dict[str, Any]] | None:
    """Return the format's name and the columns that it gives; None for a row of another format.

    Args:
        name: a key of `FORMATS`.
        parsed_row: all columns of the row, with conversations as messages.
        present: those of `parsed_row` that hold something.
        accepted_forms: the forms of rows that the run's algorithm takes.
        origin: the row's name in an error.
    """
    kind = _row_kind(accepted_forms)
    if kind == "retrieval" and name not in TYPICAL_COLUMNS[kind]:
        # The others would make prompts and answers of it.
        return None
    read = FORMATS[name]
    reading = read(present, kind, origin)
    if reading is None:
        return None
    columns = {key: value for key, value in parsed_row.items() if key not in reading.used}
    columns.update(reading.columns)
    # Of the row's own class: `TableRow` says that nulls pad its columns.
    row_type = type(parsed_row)
    return name, _parse_label(row_type(columns), kind)


def _is_misled(name: str, present: PresentColumns, has_system: bool) -> bool:
    """Return whether a format would read only a part of what the row says."""
    if name == "answer":
        # Beside a question and an answer the column `text` has the whole row. (Beside an
        # instruction it is Alpaca's rendering of the row, which the format alpaca has read before.)
        return "text" in present and not has_system
    if name == "document":
        # A passage beside a question is not the whole row.
        prompt = find_column(present, PROMPTS)
        return prompt is not None and prompt not in TEXTS
    return False


def _parse_conversation_columns(values: dict[str, Any], origin: str) -> dict[str, ParsedColumn]:
    """Return the columns that may hold conversations, read as `ParsedColumn`s."""
    columns = {}
    for name in (*SIDES, *CONVERSATION_COLUMNS):
        if name in values:
            columns[name] = values[name]
    question = None
    prompt = find_column(values, PROMPTS)
    if prompt is not None:
        question = values[prompt]
    return parse_columns(columns, question, origin)


def _replace_conversations(
    values: dict[str, Any], parsed_columns: dict[str, ParsedColumn], kind: RowKind
) -> dict[str, Any]:
    """Return the row with its conversations as messages.

    Leaves out a prompt that both sides of a pair repeat.
    """
    columns = dict(values)
    for name, parsed in parsed_columns.items():
        columns[name] = parsed.value
    # Of the row's own class: `TableRow` says that nulls pad its columns.
    parsed_row = type(values)(columns)
    if kind == "pair":
        question = find_column(parsed_row, PROMPTS)
        if question is not None and _is_repeated_in_sides(parsed_row, question):
            del parsed_row[question]
    if "messages" in parsed_row and "functions" in parsed_row and not parsed_row.get("tools"):
        # OpenAI's older name of `tools`.
        parsed_row["tools"] = parsed_row.pop("functions")
    return parsed_row


def _present_columns(parsed_row: PresentColumns) -> dict[str, Any]:
    """Return the columns that hold something.

    They include the column of an empty answer if no other column answers.
    """
    present = {}
    for name, value in parsed_row.items():
        if value is not None and value != "" and value != []:
            present[name] = value
    empty_answer = _find_empty_answer(parsed_row, present)
    if empty_answer is not None:
        present[empty_answer] = ""
    return present


def _find_empty_answer(parsed_row: PresentColumns, present: PresentColumns) -> str | None:
    """Return the column of an empty answer to a question that has no other answer; else None.

    Without it another column of the row would be learned in place of the answer.
    """
    # `present` has no empty columns, so these find only answers that say something.
    has_answer = bool(present.keys() & {*REPLIES, *LISTS})
    has_conversation = find_column(present, CONVERSATION_COLUMNS, list) is not None
    has_prompt = find_column(present, PROMPTS, str | list) is not None
    if has_answer or has_conversation or not has_prompt:
        return None
    for name in ANSWERS:
        if parsed_row.get(name) == "":
            return name
    return None


def _has_own_form(present: PresentColumns, accepted_forms: Forms) -> bool:
    """Return whether the row has one of our forms under names that mean the same in all tools."""
    # `text`, `chosen` and `rejected` alone are also names of other tools, with other contents.
    distinct_names = {"prompt", "messages", "label"}
    for form in accepted_forms:
        is_distinct = not distinct_names.isdisjoint(form)
        if is_distinct and set(form) <= present.keys():
            return True
    return False


def _format_of_conversations(parsed_columns: dict[str, ParsedColumn], accepted_forms: Forms) -> str:
    """Return the format that the conversations of the algorithm's columns were written in.

    Empty for our own.
    """
    parts = set[str]().union(*accepted_forms)
    formats = [parsed.format for name, parsed in parsed_columns.items() if name in parts]
    # The empty name, which stands for our own format, is the smallest.
    return max(formats, default="")


def _parse_label(values: dict[str, Any], kind: RowKind) -> dict[str, Any]:
    """Replace a text that labels an answer good or bad by true or false.

    A CSV has only texts. Changes and returns `values`.
    """
    label = values.get("label")
    if kind == "judged" and isinstance(label, str):
        name = label.lower()
        values["label"] = LABELS.get(name, label)
    return values


def describe_nearest_format(values: PresentColumns, accepted_forms: Forms) -> str:
    """Return a text to append to the error about a row that has none of the accepted forms.

    It begins with "; ", and says which algorithms take the row, or which form or format is nearest.
    It is empty if none is near.
    """
    kind = _row_kind(accepted_forms)
    names = [str(name) for name in values]
    shapes = [("form", form) for form in accepted_forms]
    for format_name, format_columns in TYPICAL_COLUMNS[kind].items():
        shapes.append((f"format {format_name}, which", format_columns))
    # The first of equally near ones.
    name, columns = max(shapes, key=lambda shape: _similarity(shape[1], names))
    similarity = _similarity(columns, names)
    if similarity < 1:
        # Otherwise the row has all of these columns, and one has values of a wrong type.
        algorithms = _find_other_algorithms(values, kind)
        if algorithms is not None:
            return f"; such rows are for algorithm {algorithms}"
    if not similarity:
        return ""
    hint = f"; the nearest {name} has {' and '.join(columns)}"
    differences = _describe_differences(values, columns, names)
    if differences:
        hint += f": {', '.join(differences)}"
    return hint


def _find_other_algorithms(values: PresentColumns, kind: RowKind) -> str | None:
    """Return the algorithms that take a row which the algorithm of a run does not; None if none does.

    `kind`: what the run's algorithm takes.
    """
    for forms, algorithms in ALGORITHMS_OF_FORMS:
        if kind == _row_kind(forms):
            continue
        try:
            name, columns = convert_row(dict(values), forms, "auto", "")
        except (DataError, Tie):
            continue
        if name:
            return algorithms
        for form in forms:
            if set(form) <= columns.keys():
                return algorithms
    return None


def _similarity(columns: Sequence[str], names: list[str]) -> float:
    """Return how much of `columns` the row has, from 0 to 1, if its columns are called `names`."""
    scores = []
    for column in columns:
        if column in names:
            scores.append(1.0)
        elif _find_misspelling(column, names) is not None:
            scores.append(MISSPELLED_WEIGHT)
        else:
            scores.append(0.0)
    return sum(scores) / len(scores)


def _find_misspelling(column: str, names: list[str]) -> str | None:
    """Return which of `names` may be a misspelling of a column; None if none is near."""
    matches = difflib.get_close_matches(column, names, 1, LEAST_SIMILARITY)
    if not matches:
        return None
    return matches[0]


def _describe_differences(
    values: PresentColumns, columns: Sequence[str], names: list[str]
) -> list[str]:
    """Return what keeps a row from being one with `columns`.

    These are misspelled names, or, if the row has all columns, values that are no texts.
    """
    missing = [column for column in columns if column not in names]
    differences = []
    for column in missing:
        match = _find_misspelling(column, names)
        if match is not None:
            differences.append(f"`{match}` may be {column}")
    if not missing:
        for column in columns:
            value = values[column]
            if not isinstance(value, str):
                differences.append(f"`{column}` is {type(value).__name__}")
    return differences


def _row_kind(accepted_forms: Forms) -> RowKind:
    """Return the kind of rows that an algorithm with these forms takes.

    See `RowKind`.
    """
    parts = set[str]().union(*accepted_forms)
    if "positive" in parts:
        return "retrieval"
    if "chosen" in parts:
        return "pair"
    if "label" in parts and "completion" in parts:
        return "judged"
    if "label" in parts:
        return "classification"
    if parts & {"completion", "text"}:
        return "text"
    return "prompt"


def judges_answers(accepted_forms: Forms) -> bool:
    """Return whether an algorithm with these forms learns from answers that are labelled good or bad."""
    return _row_kind(accepted_forms) == "judged"


def _find_sides(present: PresentColumns) -> tuple[str, str] | None:
    """Return the columns of the better and of the worse answer; None without both."""
    for chosen, rejected in PAIRS:
        if chosen in present and rejected in present:
            return chosen, rejected
    return None


def _is_repeated_in_sides(present: PresentColumns, question: str) -> bool:
    """Return whether a pair has its prompt twice.

    That is so if the column `question` has it as a text, and both sides, which are whole
    conversations, have it too.
    """
    prompt = present[question]
    if not isinstance(prompt, str):
        return False
    for name in ("chosen", "rejected"):
        side = present.get(name)
        if not _is_whole_conversation(side) or not _mentions(side, prompt.strip()):
            return False
    return True


def _mentions(turns: Any, text: str) -> bool:
    """Return whether the content of any of some messages has `text` in it."""
    contents = [str(turn.get("content")) for turn in turns if isinstance(turn, Mapping)]
    return any(text in content for content in contents)


def _is_whole_conversation(side: Any) -> bool:
    """Return whether an answer is a conversation from its start, and not its end alone."""
    if not isinstance(side, list) or not side:
        return False
    first = side[0]
    return isinstance(first, Mapping) and first.get("role") in ("system", "user")


def _complete(
    prompt: Any, present: PresentColumns, used: set[str], kind: RowKind, answer: str | None
) -> Reading | None:
    """Return the reading of a prompt and the answers that the algorithm needs; None without these.

    Args:
        prompt: a text or messages.
        present: the columns of the row that hold something.
        used: the columns that the prompt was made of.
        kind: what the algorithm takes, see `RowKind`.
        answer: the column of the answer, if there is one.
    """
    columns = {"prompt": prompt}
    if kind == "prompt":
        return Reading(columns, used)
    if kind == "pair":
        sides = _find_sides(present)
        if sides is None:
            return None
        chosen, rejected = sides
        columns["chosen"] = present[chosen]
        columns["rejected"] = present[rejected]
        return Reading(columns, used | set(sides))
    if answer is None:
        return None
    columns["completion"] = present[answer]
    used = used | {answer}
    if kind == "judged":
        label = "label"
        if label not in present:
            # LLaMA-Factory's name of it.
            label = "kto_tag"
        if label not in present:
            return None
        columns["label"] = present[label]
        used.add(label)
    return Reading(columns, used)


def _read_alpaca(present: PresentColumns, kind: RowKind, origin: str) -> Reading | None:
    """Read Alpaca's columns: an instruction, perhaps an input and a history, and an answer.

    Raises DataError for an input or a history that would be left out.
    """
    if not isinstance(present.get("instruction"), str) or kind == "classification":
        return None
    answer = find_column(present, ANSWERS)
    if answer is None and kind in ("text", "judged"):
        return None
    question, used = join_context(present, "instruction", origin)
    messages, system_columns = read_system(present)
    used |= system_columns
    if "history" in present:
        used.add("history")
        messages += _read_history(present["history"], origin)
    elif not messages:
        # Neither a system's message nor earlier turns: the prompt is a text.
        return _complete(question, present, used, kind, answer)
    messages.append({"role": "user", "content": question})
    if kind != "text":
        return _complete(messages, present, used, kind, answer)
    assert answer is not None
    messages.append({"role": "assistant", "content": present[answer]})
    return Reading({"messages": messages}, used | {answer})


def _read_history(history: Any, origin: str) -> Messages:
    """Return the messages of a list of [question, answer], or of the same as JSON.

    Raises DataError for anything else.
    """
    if isinstance(history, str):
        try:
            history = json.loads(history)
        except (ValueError, RecursionError):
            history = None
    what = "`history` holds what is no pair of a question and its answer"
    if not isinstance(history, list):
        raise DataError(what, where=origin)
    messages = []
    for turns in history:
        if not isinstance(turns, list | tuple) or len(turns) != 2:
            raise DataError(what, where=origin)
        question, answer = turns
        messages.append({"role": "user", "content": question})
        messages.append({"role": "assistant", "content": answer})
    return messages


def _find_conversation(present: PresentColumns) -> str | None:
    """Return the column of a conversation; None without one."""
    name = find_column(present, CONVERSATION_COLUMNS, list)
    if name is not None:
        return name
    # Names that may hold anything count only with contents that are certainly turns.
    for name in ("data", "turns"):
        if is_list_of_texts(present.get(name)):
            return name
    if find_round_keys(present.get("texts")) is not None:
        return "texts"
    return None


def _read_sharegpt(present: PresentColumns, kind: RowKind, origin: str) -> Reading | None:
    """Read a conversation that is one column, such as ShareGPT's `conversations`."""
    name = _find_conversation(present)
    if name is None or kind == "classification":
        return None
    # A pair may have such a column too, for other algorithms: its own sides are read instead.
    has_own_sides = "prompt" in present or _is_whole_conversation(present.get("chosen"))
    if kind == "pair" and has_own_sides:
        return None
    if kind == "judged" and "completion" in present:
        return None
    system_messages, system_columns = read_system(present)
    messages = convert_turns(present[name], origin)
    used = {name} | system_columns
    if system_messages and messages[0]["role"] != "system":
        messages = [*system_messages, *messages]
    if kind in ("text", "prompt"):
        columns: dict[str, Any] = {"messages": messages}
        if present.get("functions") is not None:
            # OpenAI's older name of `tools`.
            columns["tools"] = present["functions"]
            used.add("functions")
        return Reading(columns, used)
    if kind == "judged":
        # The last turn is the answer that is judged.
        *messages, last = messages
        with_completion = {**present, "completion": [last]}
        used.add("completion")
        return _complete(messages, with_completion, used, kind, "completion")
    return _complete(messages, present, used, kind, None)


def _read_verdict(present: PresentColumns, kind: RowKind, origin: str) -> Reading | None:
    """Read two answers to a prompt, and a column that says which of them is better."""
    if kind != "pair":
        return None
    two_answers = read_two_answers(present)
    if two_answers is not None:
        present = {**present, **two_answers.columns}
    names = _find_verdict(present)
    if names is None:
        return None
    prompt = find_column(present, (*PROMPTS, "history", "context"), str | list)
    # Answers that are lists are whole conversations, which have the prompt in them.
    answers = (present[names.first], present[names.second])
    are_conversations = all(isinstance(answer, list) for answer in answers)
    if prompt is None and not are_conversations:
        return None
    chosen = names.first
    rejected = names.second
    if not _is_first_better(present[names.verdict], names, origin):
        chosen = names.second
        rejected = names.first
    used = {names.first, names.second, names.verdict}
    if are_conversations:
        columns, system_columns = _prepend_system_to_sides(present, chosen, rejected)
        used |= system_columns
    else:
        columns = {"chosen": present[chosen], "rejected": present[rejected]}
        columns["prompt"], question_columns = build_question(present, prompt or "", origin)
        used |= question_columns
    if two_answers is not None:
        # The names of the row's own columns, not of those that `read_two_answers` has made.
        used = two_answers.used
    return Reading(columns, used)


def _find_verdict(present: PresentColumns) -> VerdictColumns | None:
    """Return the first of `VERDICTS` whose columns all hold something; None without one."""
    for names in VERDICTS:
        if {names.first, names.second, names.verdict} <= present.keys():
            return names
    return None


def _is_first_better(verdict: Any, names: VerdictColumns, origin: str) -> bool:
    """Return whether a verdict names the first answer.

    Raises Tie if it names neither, and DataError if it cannot be read.
    """
    value = verdict
    if names.verdict_values is SIGN and isinstance(verdict, int | float):
        if verdict == 0 or not math.isfinite(verdict):
            value = "tie"
        elif verdict > 0:
            value = SIGN[1]
        else:
            value = SIGN[0]
    # Verdicts such as `model_a` and `response_1` name the answer behind a common word.
    better = str(value).lower().removeprefix("model_").removeprefix("response_")
    if better.startswith(TIES):
        raise Tie
    if better not in names.verdict_values:
        what = f"column {names.verdict!r} says {verdict!r}, and names no better answer"
        fix = f"write {names.verdict_values[0]} or {names.verdict_values[1]}, or tie"
        raise DataError(what, where=origin, fix=fix)
    return better == names.verdict_values[0]


def _read_ranked(present: PresentColumns, kind: RowKind, origin: str) -> Reading | None:
    """Read a list of answers to a prompt, each with a score or a rank."""
    prompt = find_column(present, PROMPTS, str | list)
    name = find_column(present, LISTS, list)
    if kind != "pair" or prompt is None or name is None:
        return None
    answers = present[name]
    used = {prompt, name}
    if all(isinstance(answer, Mapping) for answer in answers):
        # The first answer tells under which keys all have their text and their score.
        text_key = _find_key(answers[0], (*ANSWERS, "text", "content", "value"))
        score_column = _find_key(answers[0], SCORE_COLUMNS)
        texts = [answer.get(text_key) for answer in answers]
        scores = [answer.get(score_column) for answer in answers]
    else:
        score_column = find_column(present, SCORE_COLUMNS, list) or ""
        texts = answers
        scores = present.get(score_column, [])
        used.add(score_column)
    if not score_column or len(texts) != len(scores) or len(texts) < 2:
        return None
    values = _read_scores(scores, score_column, origin)
    best = values.index(max(values))
    worst = values.index(min(values))
    if best == worst:
        raise Tie
    question, question_columns = build_question(present, prompt, origin)
    columns = {"prompt": question, "chosen": texts[best], "rejected": texts[worst]}
    return Reading(columns, used | question_columns)


def _find_key(answer: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Return the first of `keys` that an answer has; empty if it has none."""
    for key in keys:
        if key in answer:
            return key
    return ""


def _read_scores(scores: list[Any], column: str, origin: str) -> list[float]:
    """Return scores or ranks as numbers, of which the highest is the best.

    Raises DataError for what is no finite number.
    """
    try:
        values = [float(score) for score in scores]
    except (TypeError, ValueError, OverflowError):
        # Refused below, as a score that is NaN is.
        values = [math.nan]
    if not all(map(math.isfinite, values)):
        raise DataError(f"{column!r} of the answers are no numbers", where=origin)
    if column in RANKS:
        return [-value for value in values]
    return values


def _prepend_system_to_sides(present: PresentColumns, chosen: str, rejected: str) -> Reading:
    """Return the better and the worse answer of a row, each behind the system's message.

    The answers are whole conversations, and the system's message is in a column of its own. `used`
    of the result has that column alone.
    """
    chosen_messages, chosen_used = prepend_system(present[chosen], present)
    rejected_messages, rejected_used = prepend_system(present[rejected], present)
    columns = {"chosen": chosen_messages, "rejected": rejected_messages}
    return Reading(columns, chosen_used | rejected_used)


def _read_pair(present: PresentColumns, kind: RowKind, origin: str) -> Reading | None:
    """Read a chosen and a rejected side, with a prompt of their own or in both."""
    sides = _find_sides(present)
    if kind != "pair" or sides is None:
        return None
    prompt = find_column(present, PROMPTS, str | list | Mapping)
    if prompt is None:
        return _read_pair_of_conversations(present, sides)
    tools = None
    request = present[prompt]
    # OpenAI's preferences have a request as their prompt.
    if isinstance(request, Mapping):
        tools = request.get("tools")
        messages = request.get("messages")
        if not isinstance(messages, list):
            return None
        present = {**present, prompt: messages}
    question, used = build_question(present, prompt, origin)
    chosen, rejected = sides
    columns = {"prompt": question, "chosen": present[chosen], "rejected": present[rejected]}
    if tools:
        columns["tools"] = tools
    return Reading(columns, used | set(sides))


def _read_pair_of_conversations(present: PresentColumns, sides: tuple[str, str]) -> Reading | None:
    """Return a pair whose answers are whole conversations.

    None if they are not, or if the row needs no change.
    """
    chosen, rejected = sides
    columns, system_columns = _prepend_system_to_sides(present, chosen, rejected)
    if not _is_whole_conversation(present[chosen]) or not _is_whole_conversation(present[rejected]):
        return None
    have_our_names = sides == PAIRS[0]
    if have_our_names and not system_columns:
        return None
    return Reading(columns, {*sides, *system_columns})


def _read_answer(present: PresentColumns, kind: RowKind, origin: str) -> Reading | None:
    """Read a prompt and its answer."""
    prompt = find_column(present, PROMPTS, str | list)
    if kind in ("pair", "classification") or prompt is None:
        return None
    answer, reply = _find_reply(present)
    if answer is None and kind != "prompt":
        return None
    question, used = build_question(present, prompt, origin)
    if answer is not None:
        present = {**present, answer: reply}
    return _complete(question, present, used, kind, answer)


def _find_reply(present: PresentColumns) -> tuple[str | None, Any]:
    """Return the column of the answer, and the answer; (None, None) without one.

    An answer is a text, messages, calls of tools, or the first of several texts that are as good as
    each other.
    """
    name = find_column(present, ANSWERS)
    if name is not None:
        return name, present[name]
    for name in (*ANSWERS, *LISTS):
        reply = _read_reply(name, present)
        if reply is not None:
            return name, reply
    return None, None


def _read_reply(name: str, present: PresentColumns) -> Any:
    """Return the answer that a column holds which is no text; None if it holds none."""
    value = present.get(name)
    if "tools" in present:
        # A row with tools is answered by calls of them.
        calls = parse_calls(value)
        if calls:
            return [{"role": "assistant", "content": "", "tool_calls": calls}]
    texts = value
    if isinstance(value, Mapping):
        # SQuAD has {text: [answers], answer_start: [numbers]}.
        texts = value.get("text")
    if not isinstance(texts, list) or not texts:
        return None
    if isinstance(texts[0], Mapping) and name in ANSWERS:
        return texts
    # With scores, the answers are not as good as each other.
    if isinstance(texts[0], str) and find_column(present, SCORE_COLUMNS, list) is None:
        return texts[0]
    return None


def _read_transcript(present: PresentColumns, kind: RowKind, origin: str) -> Reading | None:
    """Read a chosen and a rejected transcript, whose turns begin with the speaker."""
    if kind != "pair":
        return None
    columns = {}
    for name in ("chosen", "rejected"):
        text = present.get(name)
        if not isinstance(text, str) or not TURN.match(text):
            return None
        columns[name] = split_transcript(text)
    # The new columns replace the old ones under the same names, so none has to be removed.
    return Reading(columns, set())


def _read_document(present: PresentColumns, kind: RowKind, origin: str) -> Reading | None:
    """Read a column of plain text under another name than `text`."""
    name = find_column(present, TEXTS)
    if name is None or "text" in present:
        return None
    columns = {"text": present[name]}
    if kind == "classification" and "label" in present:
        columns["label"] = present["label"]
    elif kind != "text":
        return None
    return Reading(columns, {name})


def _read_retrieval(present: PresentColumns, kind: RowKind, origin: str) -> Reading | None:
    """Read a query, a text that answers it, and the texts that do not.

    Of several texts that answer it the first is read.
    """
    query = find_column(present, QUERIES)
    positive = find_column(present, POSITIVES, str | list | Mapping)
    if kind != "retrieval" or query is None or positive is None:
        return None
    positives = _passages(present[positive])
    columns: dict[str, Any] = {"query": present[query], "positive": positives[0]}
    used = {query, positive}
    negatives = []
    for name in _negative_columns(present):
        negatives += _passages(present[name])
        used.add(name)
    if negatives:
        columns["negative"] = negatives
    has_our_names = used == columns.keys()
    if has_our_names and isinstance(present[positive], str):
        # The row needs no change.
        return None
    return Reading(columns, used)


def _negative_columns(present: PresentColumns) -> list[str]:
    """Return the columns of texts that do not answer a query, numbered ones by their numbers."""
    name = find_column(present, NEGATIVES, str | list | Mapping)
    if name is not None:
        return [name]
    numbered = {}
    for column in present:
        match = NUMBERED_NEGATIVE.fullmatch(str(column))
        if match is not None:
            numbered[int(match[1])] = column
    return [numbered[number] for number in sorted(numbered)]


def _passages(value: Any) -> list[Any]:
    """Return the texts of a column that has one text, or a list of them.

    A passage of Tevatron is {title, text}. What is no text is left for the check of the row.
    """
    if not isinstance(value, list):
        value = [value]
    passages = []
    for passage in value:
        if isinstance(passage, Mapping) and isinstance(passage.get("text"), str):
            parts = [passage.get("title"), passage["text"]]
            passages.append("\n".join(part for part in parts if part))
        else:
            passages.append(passage)
    return passages


# Format → its reader, which takes (the row's columns that hold something, kind of rows, origin).
# They are tried in this order.
FORMATS: dict[str, Callable[[PresentColumns, RowKind, str], Reading | None]] = {
    "sharegpt": _read_sharegpt,
    "alpaca": _read_alpaca,
    "verdict": _read_verdict,
    "ranked": _read_ranked,
    "pair": _read_pair,
    "answer": _read_answer,
    "transcript": _read_transcript,
    "document": _read_document,
    "retrieval": _read_retrieval,
}
