"""A run's weights as a Hugging Face folder: written, read back, and compared before it is called done."""

from __future__ import annotations

import contextlib
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
from drumline.config.schema import ModelConfig
from drumline.errors import CheckpointError, DrumlineError, EnvironmentFault
from drumline.models.load import build_model, load_tokenizer, quiet
from drumline.models.names import canonical_tensors
from drumline.plan.plan import Plan

Which = Literal["last", "best"] | int
PROVENANCE = "drumline.json"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
TOLERANCE = 1e-5


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
    in `to` is replaced; any other content is left alone. Raises CheckpointError or EnvironmentFault, and DrumlineError where the
    folder does not read back as the same model; in all cases `to` is as it was before.
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
    # Attention as a reader of the folder will have it: what the run used may need another device, and rounds differently.
    source = plan.config.model.model_copy(update={"attention": "auto"})
    model = _filled(plan.model_path, source, checkpoint)
    # Parameters only: rounded rotary frequencies, which no file holds, would make another model.
    for parameter in model.parameters():
        parameter.data = parameter.data.to(getattr(torch, DTYPES[dtype]))
    step = check(checkpoint, verify=False, alone=True).step
    progress("export", 1, 4)
    temporary = to.parent / f".{to.name}-{secrets.token_hex(4)}"
    try:
        _require_space(to.parent, model)
        temporary.mkdir(parents=True)
        model.save_pretrained(temporary)
        load_tokenizer(plan.model_path, source).save_pretrained(temporary)
        origin = {"drumline": __version__, "run": str(run_dir), "checkpoint": checkpoint.name, "step": step, "dtype": dtype}
        (temporary / PROVENANCE).write_text(json.dumps(origin, indent=2) + "\n")
        progress("export", 2, 4)
        difference = _compare(model.float(), temporary, source.trust_remote_code)
        progress("export", 3, 4)
        _put(temporary, to)
    except OSError as error:
        raise _cannot_write(to, error.strerror or str(error)) from error
    except Exception as error:
        # safetensors reports a full disk by a class of its own, which is no OSError.
        if type(error).__name__ != "SafetensorError":
            raise
        raise _cannot_write(to, str(error)) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    progress("export", 4, 4)
    return ExportResult(to, step, time.time() - began, difference)


def _filled(path: str | None, model: ModelConfig, checkpoint: Path) -> Any:
    """The model with a checkpoint's weights, in eval mode. What is not weights (how to generate) is the original model's."""
    from transformers import GenerationConfig

    built = build_model(path, model.model_copy(update={"init": "random"}), seed=0)
    load(checkpoint, canonical_tensors(built), alone=True)
    built.config.use_cache = True
    if path is not None:
        # A model need not have one: then it is what transformers makes from the config.
        with contextlib.suppress(OSError):
            built.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return built.eval()


def _plan_of(run_dir: Path) -> Plan:
    path = run_dir / "plan.json"
    if not path.exists():
        raise CheckpointError(
            "not a run folder: it has no plan.json", where=str(run_dir), fix="name the folder that `drumline train` printed"
        )
    return Plan.load(path)


def _choose(root: Path, which: Which) -> Path:
    """The whole checkpoint that is meant. Raises CheckpointError; only `last` passes a damaged one over."""
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
        reasons = "; ".join(reason for _, reason in found.skipped)
        raise CheckpointError(
            f"no whole checkpoint to export{': ' if reasons else ''}{reasons}", where=str(root), fix="train first, or set checkpoint.every"
        )
    return found.path


def _require_free(to: Path) -> None:
    """Our own older export may be replaced; what somebody else put there may not."""
    if to.exists() and any(to.iterdir() if to.is_dir() else [to]) and not (to / PROVENANCE).exists():
        raise EnvironmentFault("holds something that is not an export of Drumline", where=str(to), fix="name another folder with --to")


def _require_space(folder: Path, model: Any) -> None:
    """Said before half an hour of writing rather than after it."""
    while not folder.exists():
        folder = folder.parent
    needed, free = sum(p.numel() * p.element_size() for p in model.parameters()), shutil.disk_usage(folder).free
    if free < needed:
        raise EnvironmentFault(
            f"the model takes {needed / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free",
            where=str(folder),
            fix="choose another disk with --to",
        )


def _cannot_write(to: Path, reason: str) -> EnvironmentFault:
    return EnvironmentFault(f"cannot write: {reason}", where=str(to), fix="choose a folder on a disk with space, or one that is yours")


def _put(temporary: Path, to: Path) -> None:
    """Give the finished folder its name; what had it before goes only once the new one has it."""
    if not to.exists():
        temporary.rename(to)
        return
    old = temporary.with_name(temporary.name + "-old")
    to.rename(old)
    temporary.rename(to)
    shutil.rmtree(old)


def _compare(model: Any, folder: Path, trust_remote_code: bool) -> float:
    """The largest difference of logits between `model` (fp32, with the weights as they were written) and the folder read back by
    transformers, computed in fp32. Raises DrumlineError above 1e-5."""
    import torch
    from transformers import AutoModelForCausalLM

    quiet()
    again: Any = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=torch.float32, local_files_only=True, trust_remote_code=trust_remote_code
    )
    text = model.config.get_text_config()
    length = min(16, getattr(text, "max_position_embeddings", None) or 16)
    ids_BT = torch.arange(length)[None] % text.vocab_size
    with torch.no_grad():
        logits, logits_again = (m.eval()(input_ids=ids_BT).logits for m in (model, again))
    difference = float((logits - logits_again).abs().max())
    if not difference <= TOLERANCE:
        raise DrumlineError(f"the folder does not read back as the same model: logits differ by {difference:g}", where=str(folder))
    return difference
