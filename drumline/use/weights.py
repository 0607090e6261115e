"""Which weights are meant: a checkpoint, a run's best one, or a folder that transformers reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from drumline.checkpoint.load import check, newest, pointed
from drumline.config.load import Loaded, load
from drumline.errors import CheckpointError

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Weights:
    """What is evaluated: `checkpoint` laid over the model of the config, or, where it is None, the model of `loaded` as it is published."""

    loaded: Loaded
    checkpoint: Path | None
    origin: str


def find_weights(config_path: Path, overrides: list[str], place: Path | None, run_dir: Path) -> Weights:
    """`place`: a checkpoint, a run folder or a Hugging Face folder; None: the best or newest checkpoint of `run_dir`, and before there
    is one the model that training starts from. Raises CheckpointError for a place that is none of them."""
    loaded = load(config_path, overrides, trusted=False)
    if place is None:
        found = of_run(run_dir)
        return Weights(loaded, found, str(found) if found else f"{loaded.config.model.id or 'the model'}, not trained")
    if (place / "plan.json").exists():
        found = of_run(place)
        if found is None:
            raise CheckpointError("this run has no whole checkpoint", where=str(place), fix="train first, or set checkpoint.every")
        return Weights(loaded, found, str(found))
    if (place / "config.json").exists():
        own = ["model.revision=null", "model.init=pretrained", "model.config={}", "adapter=none"]
        own += ["model.tokenizer=null"] if (place / "tokenizer_config.json").exists() else []
        return Weights(load(config_path, [*overrides, f"model.id={place.absolute()}", *own], trusted=False), None, str(place))
    check(place, verify=False, alone=True)
    return Weights(loaded, place, str(place))


def of_run(run_dir: Path) -> Path | None:
    """The best checkpoint by eval.metric, else the newest whole one; None where there is none."""
    root = run_dir / CHECKPOINTS
    return pointed(root, "best") or newest(root, verify=False, alone=True).path
