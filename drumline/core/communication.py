"""At which steps the ranks send what: pure functions of the strategy and the step."""

from __future__ import annotations

from drumline.core import strategies as s


def compression(strategy: s.AnyStrategy) -> str:
    """What DDP's gradients are compressed by; `none` where there is no DDP."""
    return strategy.compression.kind if isinstance(strategy, s.DDPStrategy) else "none"


def compresses(options: s.Compression, step: int) -> bool:
    """Whether gradients are compressed in the step after `step` steps."""
    return options.kind != "none" and (options.kind not in s.WITH_MEMORY or step >= options.start_step)


def averages(strategy: s.LocalSGDStrategy | s.DiLoCoStrategy, step: int) -> bool:
    """Whether the ranks come together at the end of the step after `step` steps."""
    early = isinstance(strategy, s.LocalSGDStrategy) and step < strategy.start_step
    return early or (step + 1) % strategy.period == 0


def step_kind(strategy: s.AnyStrategy, step: int) -> str:
    """A name for what the step after `step` steps sends: steps of one kind send alike."""
    if isinstance(strategy, s.LocalSGDStrategy | s.DiLoCoStrategy):
        return "together" if averages(strategy, step) else "apart"
    return "compressed" if isinstance(strategy, s.DDPStrategy) and compresses(strategy.compression, step) else "whole"


def shares(strategy: s.AnyStrategy) -> dict[str, float]:
    """Of a long run's steps, the part of each kind."""
    if isinstance(strategy, s.LocalSGDStrategy | s.DiLoCoStrategy):
        often = 1 / strategy.period
        return {"together": often, **({"apart": 1 - often} if often < 1 else {})}
    return {"compressed" if compression(strategy) != "none" else "whole": 1.0}


def kept_bytes(strategy: s.AnyStrategy, world: int) -> int:
    """Bytes for each learned parameter that a rank keeps between steps for talking less: errors, or the outer weights and momentum."""
    if isinstance(strategy, s.DiLoCoStrategy):
        return 4 + 4
    return 4 if world > 1 and compression(strategy) in s.WITH_MEMORY else 0


def communication_why(strategy: s.AnyStrategy, world: int) -> list[str]:
    """What the user should know of a strategy that does not send everything at each step."""
    if isinstance(strategy, s.LocalSGDStrategy | s.DiLoCoStrategy):
        lines = [
            f"{strategy.kind}: each rank clips by its own gradient norm; grad_norm is the root mean square over ranks",
            f"{strategy.kind}: evaluation and checkpoints see the mean of the ranks' weights; a checkpoint gives it to all, with moments",
        ]
        return lines if world > 1 else [*lines, f"{strategy.kind}: one process, so the mean is its own weights"]
    kind = compression(strategy)
    if kind == "none":
        return []
    if world == 1:
        return [f"compression {kind}: one process sends nothing"]
    kept = f"compression {kind}: what a rank has not sent yet is not saved; a run that goes on from a checkpoint starts without it"
    return [kept] if kind in s.WITH_MEMORY else []
