"""The precision of an old file, which several keys set; the files that it names, and a DeepSpeed JSON among them."""

from __future__ import annotations

from pathlib import Path

from drumline.compat.deepspeed import deepspeed_config
from drumline.compat.rules import flag, one_of
from drumline.compat.sheet import Old, Sheet, Source, listed, refuse, shown
from drumline.core.yaml_lines import read_yaml
from drumline.errors import ConfigError
from drumline.foreign import read_text

PRECISIONS = {"no": "fp32", "none": "fp32", "fp32": "fp32", "float32": "fp32", "fp16": "fp16", "float16": "fp16", "bf16": "bf16",
              "bfloat16": "bf16"}  # fmt: skip


def low_precision(sheet: Sheet) -> None:
    """bf16, fp16 and mixed_precision, which may stand side by side, must agree. Two that are true are an error with both places."""
    on: list[tuple[str, Old]] = []
    off: list[Old] = []
    for name in ("bf16", "fp16"):
        if (old := sheet.taken.pop(name, None)) is not None:
            on += [(name, old)] if flag(old) else []
            off += [] if flag(old) else [old]
    if (old := sheet.taken.pop("mixed_precision", None)) is not None:
        kind = one_of(PRECISIONS, {"fp8": "there is no FP8 here: use bf16"})(old)
        # `mixed_precision: no` is what accelerate writes unasked, also beside a DeepSpeed JSON that has bf16 on.
        on += [(kind, old)] if kind != "fp32" else []
        off += [old] if kind == "fp32" else []
    for kind, old in on:
        if kind != on[0][0]:
            raise refuse(old, f"{shown(old.value)}, but {on[0][1].where} says {shown(on[0][1].value)}", "keep one of them")
    if on:
        sheet.put("precision.kind", *on[0])
    elif off:
        sheet.put("precision.kind", "fp32", off[0])


def deepspeed_file(sheet: Sheet, olds: list[Old], own_file: str | None = None) -> None:
    """A DeepSpeed config that is a file by itself. Raises ConfigError by its line."""
    deepspeed_config(sheet, olds, own_file)
    low_precision(sheet)


def own_deepspeed_file(sheet: Sheet, old: Old) -> None:
    """A DeepSpeed JSON that an old file names: its stage is the strategy, and Drumline's engine reads the file itself."""
    path = found(sheet.base, str(old.value))
    deepspeed_config(sheet, load_file(path, old), own_file=new_path(sheet, path))


def found(base: Path, name: str) -> Path:
    """A file that an old one names: beside it, or from the current folder, as accelerate and transformers look for it."""
    beside = base / Path(name).expanduser()
    here = Path(name).expanduser()
    return here if not beside.exists() and here.exists() else beside


def new_path(sheet: Sheet, path: Path) -> str:
    """A path as the new config writes it: relative to its folder, or absolute for what lies elsewhere."""
    whole, folder = path.absolute(), sheet.folder.absolute()
    return str(whole.relative_to(folder)) if whole.is_relative_to(folder) else str(whole)


def load_file(path: Path, old: Old) -> list[Old]:
    """The keys of a JSON or YAML file that an old one names."""
    try:
        # JSON may be indented with tabs, and YAML may not.
        text = read_text(path, ConfigError).replace("\t", "  ")
    except ConfigError as error:
        raise refuse(old, f"{str(path)!r} cannot be read: {error.what}", "give the path of a JSON file, relative to this file") from None
    values, lines = read_yaml(text, str(path))
    if not isinstance(values, dict):
        raise ConfigError("holds no keys and values", where=str(path), fix='write {"key": value}')
    return listed(values, Source(str(path), lines))
