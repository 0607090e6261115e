"""Mixtures of datasets: TRL's `datasets`, and dataset_mixture and dataset_mixer of the alignment handbook → data.train, data.eval."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drumline.compat.rules import name_list, number
from drumline.compat.sheet import AUTO, Old, Sheet, pop, refuse, shown

NAMES = {"id": "id", "path": "id", "name": "name", "config": "name", "split": "split"}


def mixture(sheet: Sheet, old: Old) -> None:
    """A list of datasets, or a section that has one, and rows to hold out."""
    section = old.by_key() if isinstance(old.value, dict) else {"datasets": old}
    listed = section.get("datasets", old)
    if not isinstance(listed.value, list) or not all(
        isinstance(each, dict) for each in listed.value
    ):
        raise refuse(
            listed,
            f"{shown(listed.value)} given, a list of datasets is wanted",
            "begin each with `- id: …`",
        )
    sources = [
        _entry(sheet, replace(listed, value=each, place=(*listed.place, str(at))))
        for at, each in enumerate(listed.value)
    ]
    sheet.put("data.train", sources, listed)
    hold_out(sheet, section.get("test_split_size"))


def hold_out(sheet: Sheet, old: Old | None) -> None:
    """Hold out a number of rows, or a part of them, where a key says so."""
    if old is not None and old.value not in AUTO and (size := number(old)):
        sheet.put("data.holdout", size if size < 1 else int(size), old)


def _entry(sheet: Sheet, old: Old) -> dict[str, Any]:
    entry = old.by_key()
    source = {
        "kind": "hub",
        **{
            key: str(entry[name].value)
            for name, key in NAMES.items()
            if name in entry and entry[name].value
        },
    }
    if "id" not in source:
        raise refuse(old, "names no dataset", "write `id: org/name`")
    if source.get("name") == "default":
        del source["name"]
    if "weight" in entry:
        _take(source, entry["weight"])
    elif "fraction" in entry:
        sheet.lacks(
            entry["fraction"],
            "sources are not cut to shares of a mixture",
            "set weight of each source",
        )
    return source


def _take(source: dict[str, Any], old: Old) -> None:
    """The first rows of a split, in whole percents, as datasets cuts it."""
    if (part := number(old)) >= 1:
        return
    if (percent := round(part * 100)) < 1:
        raise refuse(
            old,
            f"{shown(old.value)} given, a split is cut to whole percents",
            "set it to 0.01 or more, or leave the dataset out",
        )
    source["split"] = f"{source.get('split', 'train')}[:{percent}%]"


def mixer(sheet: Sheet) -> None:
    """dataset_mixer: {id: part of its rows}, with dataset_splits and dataset_configs."""
    old = pop(sheet, "dataset_mixer", "dataset_splits", "dataset_configs")
    mixed = old.get("dataset_mixer")
    if mixed is None:
        return
    splits = name_list(old["dataset_splits"]) if "dataset_splits" in old else ["train"]
    configs = name_list(old["dataset_configs"]) if "dataset_configs" in old else []
    for key, parts in (("train", ("train",)), ("eval", ("test", "valid", "eval"))):
        sources: list[dict[str, Any]] = []
        for split in (split for split in splits if any(part in split for part in parts)):
            for at, each in enumerate(mixed.inside()):
                sources.append(
                    {
                        "kind": "hub",
                        "id": each.key,
                        **({"name": configs[at]} if at < len(configs) else {}),
                        "split": split,
                    }
                )
                if key == "train":
                    _take(sources[-1], each)
        if sources:
            sheet.put(f"data.{key}", sources, mixed)
