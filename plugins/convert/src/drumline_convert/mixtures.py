"""Translate mixtures of datasets into data.train and data.eval.

These are `datasets` of TRL, and dataset_mixture and dataset_mixer of the alignment handbook.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drumline.compat.rules import read_names, read_number
from drumline.compat.sheet import AUTO, OldKey, Sheet, format_value, take_waiting, translation_error
from drumline_convert.sources import Dataset, put_sources, sources_of

# The keys of an entry that are translated here.
KNOWN = {
    *("id", "path", "name", "config", "split", "data_dir", "data_files"),
    *("weight", "fraction"),
}


def read_mixture(sheet: Sheet, old: OldKey) -> None:
    """Put a list of datasets on the sheet, or a section with such a list and rows to hold out.

    Raises ConfigError if there is no list of sections.
    """
    section = old.children_by_key() if isinstance(old.value, dict) else {"datasets": old}
    datasets = section.get("datasets", old)
    is_list = isinstance(datasets.value, list)
    if not is_list or not all(isinstance(each, dict) for each in datasets.value):
        raise translation_error(
            datasets,
            f"{format_value(datasets.value)} given, a list of datasets is wanted",
            "begin each with `- id: …`",
        )
    sources: list[dict[str, Any]] = []
    for index, entry in enumerate(datasets.value):
        place = (*datasets.place, str(index))
        sources += _entry(sheet, replace(datasets, value=entry, place=place))
    put_sources(sheet, "train", sources, datasets)
    hold_out(sheet, section.get("test_split_size"))
    note_unknown(sheet, section, {"datasets", "test_split_size"})


def hold_out(sheet: Sheet, old: OldKey | None) -> None:
    """Hold out a number of rows (1 or more) or a fraction of them (below 1), if a key sets it."""
    if old is None or old.value in AUTO:
        return
    size = read_number(old)
    if not size:
        return
    if size < 1:
        sheet.put("data.holdout", size, old)
    else:
        sheet.put("data.holdout", int(size), old)


def _entry(sheet: Sheet, old: OldKey) -> list[dict[str, Any]]:
    """Return the sources for one dataset of a mixture. Raises ConfigError if it has no id."""
    entry = old.children_by_key()
    path = _first_set(sheet, entry, "path", "id")
    if path is None:
        raise translation_error(old, "names no dataset", "write `id: org/name`")
    subset = _first_set(sheet, entry, "config", "name")
    if subset is not None and subset.value == "default":
        subset = None
    dataset = Dataset(
        path,
        subset,
        entry.get("split"),
        folder=entry.get("data_dir"),
        files=entry.get("data_files"),
    )
    sources = sources_of(sheet, dataset)
    if "weight" in entry:
        for source in sources:
            _cut_split(sheet, source, entry["weight"])
    elif "fraction" in entry:
        sheet.report_unsupported(
            entry["fraction"],
            "sources are not cut to shares of a mixture",
            "set weight of each source",
        )
    note_unknown(sheet, entry, KNOWN)
    return sources


def _first_set(sheet: Sheet, entry: dict[str, OldKey], *names: str) -> OldKey | None:
    """Return the first of these keys that has a value; a further one with another value is noted."""
    found = [entry[name] for name in names if name in entry and entry[name].value]
    if not found:
        return None
    first, *others = found
    for other in others:
        if other.value != first.value:
            sheet.note(other, f"without effect: {first.key} is read")
    return first


def note_unknown(sheet: Sheet, section: dict[str, OldKey], known: set[str]) -> None:
    """Add a note for each key of a section that is not translated and has a value."""
    for key, old in section.items():
        if key not in known and old.value:
            sheet.note(old, "unknown here: rows are read by their format (docs/reference/data.md)")


def _cut_split(sheet: Sheet, source: dict[str, Any], old: OldKey) -> None:
    """Cut a source to the first rows of its split, in whole percents, as datasets does it.

    `old` has the fraction of the rows. Raises ConfigError if it is below half a percent.
    """
    fraction = read_number(old)
    if fraction >= 1:
        return
    percent = round(fraction * 100)
    if percent < 1:
        raise translation_error(
            old,
            f"{format_value(old.value)} given, a split is cut to whole percents",
            "set it to 0.01 or more, or leave the dataset out",
        )
    if source["kind"] == "hub":
        source["split"] = f"{source.get('split', 'train')}[:{percent}%]"
    else:
        sheet.report_unsupported(old, "files are not cut to a part", "set limit of the source")


def read_mixer(sheet: Sheet) -> None:
    """Put dataset_mixer on the sheet: {id: fraction of its rows}.

    dataset_splits and dataset_configs belong to it. Splits of training are cut to the fraction,
    splits of evaluation are not.
    """
    old = take_waiting(sheet, "dataset_mixer", "dataset_splits", "dataset_configs")
    mixer = old.get("dataset_mixer")
    if mixer is None:
        return
    splits = read_names(old["dataset_splits"]) if "dataset_splits" in old else ["train"]
    configs = read_names(old["dataset_configs"]) if "dataset_configs" in old else []
    _put_splits(sheet, mixer, "train", _splits_with(splits, ("train",)), configs)
    _put_splits(sheet, mixer, "eval", _splits_with(splits, ("test", "valid", "eval")), configs)


def _splits_with(splits: list[str], tokens: tuple[str, ...]) -> list[str]:
    """Return the splits whose names contain one of the words."""
    return [split for split in splits if any(word in split for word in tokens)]


def _put_splits(
    sheet: Sheet, mixer: OldKey, part: str, splits: list[str], configs: list[str]
) -> None:
    """Set data.train or data.eval to these splits of each dataset of the mixer, if there are any.

    `configs` has the configuration of each dataset, in the order of the mixer.
    """
    sources: list[dict[str, Any]] = []
    for split in splits:
        for index, dataset in enumerate(mixer.children()):
            source: dict[str, Any] = {"kind": "hub", "id": dataset.key}
            if index < len(configs):
                source["name"] = configs[index]
            source["split"] = split
            if part == "train":
                _cut_split(sheet, source, dataset)
            sources.append(source)
    put_sources(sheet, part, sources, mixer)
