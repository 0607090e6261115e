"""Pure bf16 with rollouts and with images: near one process however it is spread, bytes as planned,
and a run that stops under one spread and goes on under another. With given texts: test_optimizers,
test_experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.distributed.promises import held_as_planned
from tests.distributed.setups import (
    SAVED_TWICE,
    case,
    chosen_params,
    goes_on_from,
    merge,
    plan_in,
    run_of,
    same_steps,
    train_kinds,
)
from tests.harness import LETTERS, Sections, column, vision_rows, write_rows
from tests.tiny import tiny_model_dir, tiny_vision_dir

pytestmark = pytest.mark.timeout(1500)
# Half of the last bit of a bf16 number, relative: what rounding one gradient may change.
ROUNDING = 2**-8
PURE = {"kind": "bf16", "master": "bf16"}
GENERATOR = {"kind": "hf", "max_new_tokens": 6}
BASE: Sections = {
    "precision": PURE,
    "batch": {"global_samples": 8, "micro_batch": 2},
    "optimizer": {"lr": 3e-3, "weight_decay": 0.1, "eps": 1e-6},
    "checkpoint": SAVED_TWICE,
    "eval": {"at_start": False},
    "run": {"steps": 3},
}
VIT: Sections = {
    "model_type": "vit",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 16,
    "patch_size": 4,
}


class Kind(NamedTuple):
    """`model`: a folder below the root; None: the sections have its config."""

    model: str | None
    sections: Sections
    spreads: tuple[str, ...]


KINDS = {
    "grpo": Kind(
        "model",
        {
            "algorithm": {
                "kind": "grpo",
                "group_size": 4,
                "loss_chunk": 32,
                "kl": {"coefficient": 0.05},
                "generator": GENERATOR,
                "rewards": [LETTERS],
            }
        },
        ("ddp 2", "fsdp2 2", "tp 2", "pp 2"),
    ),
    "ppo": Kind(
        "model",
        {
            "algorithm": {
                "kind": "ppo",
                "value": "separate",
                "epochs": 1,
                "loss_chunk": 32,
                "generator": GENERATOR,
                "rewards": [LETTERS],
            }
        },
        ("ddp 2", "tp 2"),
    ),
    "continuous batching": Kind(
        "model",
        {
            "algorithm": {
                "kind": "grpo",
                "group_size": 4,
                "loss_chunk": 32,
                "generator": {**GENERATOR, "kind": "continuous"},
                "rewards": [LETTERS],
            }
        },
        (),
    ),
    "vision-language": Kind("vision", {"data": {"max_length": 128}}, ("ddp 2", "fsdp2 2")),
    "vit": Kind(
        None,
        {
            "algorithm": {"kind": "classify", "modality": "image", "image_size": 16},
            "data": {
                "train": [{"kind": "digits", "limit": 30}],
                "eval": [{"kind": "digits", "split": "test", "limit": 11}],
            },
            "model": {"id": None, "config": VIT},
        },
        ("ddp 2", "fsdp2 2"),
    ),
}
SPREADS: dict[str, tuple[int, Any]] = {
    "single": (1, "single"),
    "ddp 2": (2, "ddp"),
    "fsdp2 2": (2, "fsdp2"),
    "tp 2": (2, "tp"),
    "pp 2": (2, "pp"),
}
OFTEN = [("grpo", "tp 2"), ("vision-language", "fsdp2 2")]


def pairs(kinds: tuple[str, ...]) -> list[Any]:
    found = []
    for kind in kinds:
        for name in KINDS[kind].spreads:
            often = (kind, name) in OFTEN
            found.append(case(kind, name, id=f"{kind}-{name}", full=not often))
    return found


def plan(root: Path, folder: str, kind: str, spread: str) -> Path:
    """The plan of three steps, with a checkpoint after two."""
    ranks, strategy = SPREADS[spread]
    model, sections, _ = KINDS[kind]
    where: Sections = {}
    if model == "vision":
        where = {"data": {"train": str(root / "images.jsonl"), "eval": []}}
    merged = merge(BASE, where, sections)
    return plan_in(root, folder, ranks, root / (model or "model"), strategy=strategy, **merged)


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pure")
    tiny_model_dir(root / "model", layers=2)
    tiny_vision_dir(root / "vision")
    write_rows(root / "images.jsonl", vision_rows(root, 30))
    train_kinds(root, chosen_params(request.session, __file__), plan)
    return root


@pytest.mark.claim("pure bf16 trains on images as in one process")
@pytest.mark.parametrize(("kind", "name"), pairs(("vision-language", "vit")))
def test_images_train_near_one_process(runs: Path, kind: str, name: str) -> None:
    run = run_of(runs, kind, name)
    same_steps(run, run_of(runs, kind, "single"), ROUNDING)
    if kind == "vision-language":
        # The number of labels of the others is known with their data.
        held_as_planned(run, ("parameters", "optimizer"))


@pytest.mark.claim("pure bf16 trains on rollouts as in one process")
@pytest.mark.parametrize(("kind", "name"), pairs(("grpo", "ppo")))
def test_rollouts_train_near_one_process(runs: Path, kind: str, name: str) -> None:
    """Where two tokens are about as likely, rounding decides which is sampled, and later rollouts
    may begin with another policy. So a few episodes may differ; on one CPU none did."""
    run = run_of(runs, kind, name)
    alone = run_of(runs, kind, "single")
    assert column(run, "episodes", "rollout") == column(alone, "episodes", "rollout")
    rewards = column(alone, "reward", "rollout")
    assert column(run, "reward", "rollout") == pytest.approx(rewards, abs=0.1)
    assert column(run, "entropy") == pytest.approx(column(alone, "entropy"), rel=ROUNDING)
    norms = column(alone, "grad_norm")
    assert column(run, "grad_norm") == pytest.approx(norms, rel=0.3)
    if kind == "grpo":
        # PPO steps a value model besides, and both hold a reference besides the policy.
        held_as_planned(run, ("optimizer",))


@pytest.mark.full
@pytest.mark.parametrize(("kind", "name"), [("continuous batching", "single")])
def test_the_policy_itself_is_sampled(runs: Path, kind: str, name: str) -> None:
    """Its weights are in the type that it computes in, so no copy is needed, nor autocast."""
    run = run_of(runs, kind, name)
    # The log-probs of the sampler are the policy's, but for rounding.
    for ratio in column(run, "ratio_mean")[:1]:
        assert ratio == pytest.approx(1.0, rel=ROUNDING)


@pytest.mark.parametrize(
    ("kind", "a", "b"),
    [
        case("vision-language", "fsdp2 2", "single", id="vision-language", full=True),
        case("vit", "single", "ddp 2", id="vit", full=True),
    ],
)
def test_goes_on_under_another(runs: Path, kind: str, a: str, b: str) -> None:
    goes_on_from(runs, kind, a, b, ROUNDING)


@pytest.mark.full
@pytest.mark.parametrize(("kind", "a", "b"), [("grpo", "tp 2", "single")])
def test_rollouts_go_on_under_another(runs: Path, kind: str, a: str, b: str) -> None:
    run = run_of(runs, kind, a, b)
    assert column(run, "step") == [3]
    entropies = column(run_of(runs, kind, "single"), "entropy")
    assert column(run, "entropy") == pytest.approx(entropies[2:], rel=ROUNDING)
