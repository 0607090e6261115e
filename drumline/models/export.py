"""A run's weights as a Hugging Face folder: written, read back, and compared before it is called done."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from drumline import __version__
from drumline.checkpoint.load import check, load, newest, pointed
from drumline.checkpoint.manifest import folder_name
from drumline.errors import CheckpointError, DrumlineError, EnvironmentFault
from drumline.models.load import build_model, load_tokenizer, quiet
from drumline.models.names import canonical_tensors
from drumline.plan.plan import Plan

Which = Literal["last", "best"] | int
PROVENANCE = "drumline.json"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class ExportResult:
    """What was written. `max_logit_difference`: between the model in memory and the folder read back, on a few tokens."""

    path: Path
    step: int
    seconds: float
    max_logit_difference: float


def export(
    run_dir: Path, to: Path, which: Which, on_progress: Callable[[str, int, int | None], None] | None = None, dtype: str = "fp32"
) -> ExportResult:
    """Write safetensors, config, generation config and tokenizer of a checkpoint of `run_dir` to folder `to`.

    `which`: the newest checkpoint, the best by eval.metric (the newest where none was measured), or that of a step. An older export
    in `to` is replaced; any other content is left alone. Raises CheckpointError or EnvironmentFault, and DrumlineError, leaving
    nothing behind, where the folder does not read back as the same model.
    """
    import torch

    began = time.time()
    progress = on_progress or (lambda phase, done, total: None)
    if dtype not in DTYPES:
        raise EnvironmentFault(f"no dtype {dtype!r}", where="--dtype", fix=f"one of {', '.join(DTYPES)}")
    plan = _plan_of(run_dir)
    checkpoint = _choose(run_dir / "checkpoints", which)
    _require_free(to)
    progress("export", 0, 4)
    model = build_model(plan.model_path, plan.config.model.model_copy(update={"init": "random"}), seed=0)
    load(checkpoint, canonical_tensors(model), alone=True)
    model = model.to(getattr(torch, DTYPES[dtype])).eval()
    progress("export", 1, 4)
    manifest = check(checkpoint, verify=False, alone=True)
    temporary = to.parent / f".{to.name}-{secrets.token_hex(4)}"
    try:
        temporary.mkdir(parents=True)
        model.config.use_cache = True
        model.save_pretrained(temporary)
        load_tokenizer(plan.model_path, plan.config.model).save_pretrained(temporary)
        origin = {"drumline": __version__, "run": str(run_dir), "checkpoint": checkpoint.name, "step": manifest.step, "dtype": dtype}
        (temporary / PROVENANCE).write_text(json.dumps(origin, indent=2) + "\n")
        progress("export", 2, 4)
        difference = _compare(model, temporary, dtype)
        progress("export", 3, 4)
        if to.exists():
            shutil.rmtree(to)
        temporary.rename(to)
    except OSError as error:
        raise EnvironmentFault(f"cannot write: {error.strerror or error}", where=str(to), fix="choose a folder on a disk with space") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    progress("export", 4, 4)
    return ExportResult(to, manifest.step, time.time() - began, difference)


def _plan_of(run_dir: Path) -> Plan:
    path = run_dir / "plan.json"
    if not path.exists():
        raise CheckpointError("not a run folder: it has no plan.json", where=str(run_dir), fix="name the folder that `drumline train` printed")
    return Plan.load(path)


def _choose(root: Path, which: Which) -> Path:
    if isinstance(which, int):
        path = root / folder_name(which)
        check(path, verify=True, alone=True)
        return path
    best = pointed(root, "best") if which == "best" else None
    if best is not None:
        check(best, verify=True, alone=True)
        return best
    found = newest(root, verify=True, alone=True)
    if found.path is None:
        raise CheckpointError("no whole checkpoint to export", where=str(root), fix="train first, or set checkpoint.every")
    return found.path


def _require_free(to: Path) -> None:
    """Our own older export may be replaced; what somebody else put there may not."""
    if to.exists() and any(to.iterdir() if to.is_dir() else [to]) and not (to / PROVENANCE).exists():
        raise EnvironmentFault("holds something that is not an export of Drumline", where=str(to), fix="name another folder with --to")


def _compare(model: Any, folder: Path, dtype: str) -> float:
    """The largest difference of logits between `model` and the folder, read back by transformers. Raises DrumlineError above 1e-5."""
    import torch
    from transformers import AutoModelForCausalLM

    quiet()
    again: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=getattr(torch, DTYPES[dtype]), local_files_only=True).eval()
    ids = torch.arange(16)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        difference = float((model(input_ids=ids).logits.float() - again(input_ids=ids).logits.float()).abs().max())
    if not difference <= 1e-5:
        raise DrumlineError(f"the folder does not read back as the same model: logits differ by {difference:g}", where=str(folder))
    return difference
