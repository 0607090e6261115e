"""Decide whether a run compiles its blocks if the config leaves it open (`compile: auto`). Pure.

The seconds in which it compiles before its first step are weighed against those that a step saves.
"""

from __future__ import annotations

import math
import os
import shutil

from drumline.config.config import Config
from drumline.config.mesh import Mesh
from drumline.errors import PlanError
from drumline.hardware.cluster import Cluster
from drumline.plan.attention import is_installed
from drumline.plan.estimate import Estimate
from drumline.plan.facts import ModelFacts
from drumline.plan.plan import Layout
from drumline.plan.rule import Case, packed_bits
from drumline.plan.rules import check_rules
from drumline.planner.cost.times import estimate
from drumline.planner.search.answer import TIE, number

NOT_SHOWN = "experimental: it has run on no GPU here"


def set_compile(config: Config, is_enabled: bool) -> Config:
    """Return the config with `compile.enabled` set."""
    options = config.compile.model_copy(update={"enabled": is_enabled})
    return config.model_copy(update={"compile": options})


def reason_against(config: Config, facts: ModelFacts, cluster: Cluster) -> str:
    """Return why `compile: auto` leaves a run eager, whatever its layout and its seconds.

    Empty if there is no reason. See also `reason_against_layout`.
    """
    if cluster.device.kind == "cpu":
        return "on a CPU compiling takes minutes, and what it gains is not known"
    if config.images_alone or config.has_own_module or facts.vision_language:
        return "what it gains is known for blocks of texts alone"
    if facts.encoder_decoder:
        return "what it gains is not known for an encoder and a decoder"
    if config.algorithm.rollout is not None or config.eval.generates:
        return "the blocks also sample, and each new length would be compiled anew"
    if packed_bits(config):
        return "unpacking a weight is not compiled, so a block would fall into many parts"
    if cluster.is_this_machine:
        return _missing_tool()
    return ""


def _missing_tool() -> str:
    """Return which tool of torch.compile this machine lacks; an empty text if it has all."""
    if not is_installed("triton"):
        return "the package triton is missing here"
    compilers = (os.environ.get("CC", "cc"), "gcc", "clang")
    if not any(shutil.which(name) for name in compilers):
        return "Triton needs a C compiler, and none is here"
    return ""


def reason_against_layout(layout: Layout, facts: ModelFacts) -> str:
    """Return why a layout stays eager, whatever its seconds; empty if there is no reason."""
    return reason_against_mesh(layout.mesh, facts) or _rule_against_compiling(layout, facts)


def reason_against_mesh(mesh: Mesh, facts: ModelFacts) -> str:
    """Return why all layouts of a mesh stay eager; empty if there is no reason.

    With `ep`, the experts of a mixture are not compiled, only what is around them. Without it they
    are a part of the compiled block.
    """
    if facts.experts and mesh.ep == 1:
        return "how many tokens come to an expert is another number each time, and without ep experts are compiled"
    return ""


def compile_speeds_up_step(layout: Layout, facts: ModelFacts, cluster: Cluster) -> bool:
    """Return whether compiling makes a step faster. Then the length of the run decides if it pays."""
    if _any_reason_against(layout, facts, cluster):
        return False
    eager, compiled = _both(layout, facts, cluster)
    return _is_gain(eager, compiled)


def describe_compile(layout: Layout, facts: ModelFacts, cluster: Cluster, steps: int | None) -> str:
    """Return what `compile: auto` has chosen for a layout and why, with the seconds; empty on a CPU.

    `steps`: the number of steps of the run; None: it is not known.
    """
    if layout.device == "cpu":
        return ""
    reason = _any_reason_against(layout, facts, cluster)
    if reason:
        return f"compile auto: off: {reason}"
    eager, compiled = _both(layout, facts, cluster)
    saved = eager.seconds.total - compiled.seconds.total
    before = f"compiling takes about {compiled.startup:.0f} s before the first step"
    compiled_step = number(compiled.seconds.total)
    eager_step = number(eager.seconds.total)
    each = f"a step takes {compiled_step} s compiled and {eager_step} s eager"
    if layout.config.compile.enabled:
        text = f"compile auto: on ({NOT_SHOWN}): {before}; {each}"
    else:
        text = f"compile auto: off: {before}; {each}"
    if not _is_gain(eager, compiled):
        return f"{text}, which is no gain that counts"
    if steps is None:
        return f"{text}, so it pays from step {math.ceil(compiled.startup / saved):,} on"
    return f"{text}, which saves {number(saved * steps)} s over {steps:,} steps"


def _any_reason_against(layout: Layout, facts: ModelFacts, cluster: Cluster) -> str:
    """Return why a layout stays eager, because of the run or of the layout; empty without a reason."""
    reason = reason_against(layout.config, facts, cluster)
    return reason or reason_against_layout(layout, facts)


def _both(layout: Layout, facts: ModelFacts, cluster: Cluster) -> tuple[Estimate, Estimate]:
    """Return the estimates of a layout eager and compiled."""
    eager = estimate(_with_compile(layout, False), facts, cluster)
    return eager, estimate(_with_compile(layout, True), facts, cluster)


def _is_gain(eager: Estimate, compiled: Estimate) -> bool:
    """Return whether a compiled step is faster by more than the error of a prediction."""
    return eager.seconds.total - compiled.seconds.total > TIE * compiled.seconds.total


def _with_compile(layout: Layout, is_enabled: bool) -> Layout:
    """Return the layout with `compile.enabled` set."""
    return layout.model_copy(update={"config": set_compile(layout.config, is_enabled)})


def _rule_against_compiling(layout: Layout, facts: ModelFacts) -> str:
    """Return the text of the rule that refuses to compile a layout; empty if none does."""
    config = set_compile(layout.config, True)
    try:
        check_rules(Case(config, layout.mesh, layout.device, layout.precision, facts))
    except PlanError as error:
        return error.what
    return ""
