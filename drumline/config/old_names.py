"""Modules by the names that they had before 0.6.0, so that plug-ins of then keep working.

`drumline.config` calls `install`. No module of today has one of these names.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

# New room → modules of the old room `core`.
CORE = {
    "system": "files heartbeat process signals sockets network munge output redact threads mirror yaml_lines",
    "config": "load mistakes registry complete mixing section config data model optimizer run rollouts"
    " algorithm launcher cluster strategy urls mesh",
    "plan": "plan batch rules rule attention resolve copies stages unadapted estimate facts explain stream"
    " out_of_memory",
    "planner": "matrix",
}
# Old module → new module, without `drumline.`; of folders all modules.
MOVED = {
    "core.cost": "planner.cost.terms",
    "parallel": "engine",
    "launchers": "launch",
    "strategies.build": "engine.build",
    "strategies.dp.transform": "engine.strategies.dp.transform",
    "strategies.fsdp2.transform": "engine.strategies.fsdp2.transform",
    "strategies.local_sgd.engine": "engine.strategies.local_sgd.engine",
    "strategies.diloco": "engine.strategies.diloco",
    "strategies.zero": "engine.strategies.zero",
}
# Old module → module of another distribution, by its full name; of folders all modules.
DISTRIBUTED = {
    "launch.hosts": "drumline_hosts",
    "launch.ssh": "drumline_hosts.ssh",
    "launch.ray": "drumline_hosts.ray",
    "launch.kubernetes": "drumline_kubernetes",
    "launchers.hosts": "drumline_hosts",
    "launchers.ssh": "drumline_hosts.ssh",
    "launchers.ray": "drumline_hosts.ray",
    "launchers.kubernetes": "drumline_kubernetes",
    "bench.axes": "drumline_sweep.axes",
    "bench.optuna_study": "drumline_sweep.optuna_study",
    "bench.sweep": "drumline_sweep.sweep",
    "bench.trials": "drumline_sweep.trials",
    "compat.arguments": "drumline_convert.arguments",
    "compat.axolotl": "drumline_convert.axolotl",
    "compat.convert": "drumline_convert.convert",
    "compat.groups": "drumline_convert.groups",
    "compat.llama_factory": "drumline_convert.llama_factory",
    "compat.mixtures": "drumline_convert.mixtures",
    "compat.preferences": "drumline_convert.preferences",
    "compat.trl": "drumline_convert.trl",
    "strategies.diloco.links": "drumline_diloco.links",
    "strategies.diloco.peers": "drumline_diloco.peers",
    "strategies.diloco.streaming": "drumline_diloco.streaming",
}
STRATEGIES = (
    *("auto", "single", "dp", "ddp", "local_sgd", "diloco", "fsdp2", "zero", "tp", "cp", "pp"),
    "model_parallel",
)
# Old folders that have gone: they are empty packages now.
PACKAGES = ("core", "strategies", *(f"strategies.{name}" for name in STRATEGIES))
# What an old module has besides what the new one has: old name → (module, name).
ALSO = {
    "core.rule": ("config.refusal", ("Refusal", "no_option")),
    "core.estimate": ("config.section", ("Frozen",)),
    "core.launcher": ("plan.out_of_memory", ("OnOutOfMemory", "Replans")),
    "core.rollouts": ("config.algorithm", ("RolloutSpec",)),
    "core.stream": ("config.strategy", ("SequenceParallel",)),
    "core.strategy": ("planner.strategies.base", ("Space", "SCHEDULES", "mixes")),
}


def install() -> None:
    """Make the old names of modules importable."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldNames())


def new_name(old: str) -> str | None:
    """Return the full name of the module that an old one has become; None if the old name is none.

    `old`: a name without `drumline.`.
    """
    for before, now in DISTRIBUTED.items():
        if old == before or old.startswith(f"{before}."):
            return now + old[len(before) :]
    room, _, name = old.partition(".")
    if room == "core":
        for new_room, names in CORE.items():
            if name in names.split():
                return f"drumline.{new_room}.{name}"
    parts = old.split(".")
    is_spec = len(parts) == 3 and parts[0] == "strategies" and parts[2] == "spec"
    if is_spec and parts[1] in STRATEGIES:
        return f"drumline.config.strategies.{parts[1]}"
    for before, now in MOVED.items():
        if old == before or old.startswith(f"{before}."):
            return f"drumline.{now}{old[len(before) :]}"
    return None


class OldNames(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules of Drumline by the names that they had before 0.6.0."""

    def find_spec(
        self, fullname: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return how an old name is loaded; None for any other name."""
        top, _, old = fullname.partition(".")
        if top != "drumline":
            return None
        is_package = old in PACKAGES or old in MOVED
        if not is_package and new_name(old) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        """Register the new module under the old name; a few old names get a module with more in it."""
        name = module.__name__
        old = name.partition(".")[2]
        new = new_name(old)
        if new is None or old in PACKAGES:
            return
        moved = importlib.import_module(new)
        has_strategies = old == "core.strategy" or old.endswith(".spec")
        if old not in ALSO and not has_strategies:
            sys.modules[name] = moved
            return
        module.__dict__.update(_contents(moved))
        if old in ALSO:
            other, names = ALSO[old]
            source = importlib.import_module(f"drumline.{other}")
            module.__dict__.update({name: getattr(source, name) for name in names})
        if has_strategies:
            plugins = importlib.import_module("drumline.config.old_plugins")
            module.__dict__.update(plugins.legacy_strategies(module))
        if old == "core.strategy":
            module.__dict__["StrategySpec"] = module.__dict__["StrategyConfig"]


def _contents(module: ModuleType) -> dict[str, Any]:
    """Return the names of a module, without those that Python gives to each module."""
    names = vars(module).items()
    return {name: value for name, value in names if not name.startswith("__")}
