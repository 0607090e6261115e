"""The loss that balances a mixture's experts: transformers' own for one row, and a sum however documents are packed and batches cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.algorithms.tokens.objective import NextToken
from drumline.config.model import ModelConfig
from drumline.data.batches import TokenBatch, collate
from drumline.errors import ModelError
from drumline.models.build import build_model
from drumline.models.head import ForwardWithObjective
from drumline.models.load import facts, load_config
from drumline.models.router import router_metrics, router_of
from drumline.telemetry.events import Event
from drumline.telemetry.trackers import metrics

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
SIZES |= {
    "vocab_size": 64,
    "num_experts_per_tok": 2,
    "output_router_logits": True,
    "router_aux_loss_coef": 0.5,
}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen2_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
    },
    "qwen3_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 16,
        "head_dim": 8,
        "mlp_only_layers": [0],
    },
    "olmoe": {"num_experts": 4},
    "granitemoe": {"num_local_experts": 4},
    "phimoe": {"num_local_experts": 4, "input_jitter_noise": 0.0, "router_jitter_noise": 0.0},
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
}


def config_of(kind: str, **changes: Any) -> ModelConfig:
    return ModelConfig(id=None, config={"model_type": kind, **SIZES, **KINDS[kind], **changes})


def documents(lengths: list[int], seed: int = 0) -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(seed)
    return [(draw.integers(0, 64, n).astype(np.uint32), np.ones(n, np.uint8)) for n in lengths]


def trained(
    module: ForwardWithObjective, batches: list[TokenBatch]
) -> tuple[float, dict[str, float], dict[str, torch.Tensor]]:
    """Loss over the weight of all batches, sums, gradients."""
    module.zero_grad()
    weight, total, sums = sum(b.weight for b in batches), 0.0, dict[str, float]()
    for batch in batches:
        loss_sum, out = module(batch, NextToken(chunk=0, answers=False).objective)
        (loss_sum / weight).backward()
        total += float(loss_sum.detach()) / weight
        sums = {name: sums.get(name, 0.0) + float(value) for name, value in out.items()}
    return (
        total,
        sums,
        {name: p.grad.clone() for name, p in module.model.named_parameters() if p.grad is not None},
    )


@pytest.mark.claim(
    "the loss of routers is that of transformers for one row, and the same however documents are packed"
)
@pytest.mark.parametrize("kind", KINDS)
def test_one_row_has_the_loss_and_gradients_of_transformers(kind: str) -> None:
    model = build_model(None, config_of(kind), seed=0)
    batch = collate([documents([12])], 0, None)
    try:
        theirs = model(input_ids=batch.input_ids_BT, labels=batch.input_ids_BT, use_cache=False)
    except AttributeError:  # transformers 5.17's granitemoe cannot compute its own
        with pytest.raises(ModelError, match="would not be trained"):
            router_of(model)
        return
    loss, sums, gradients = trained(ForwardWithObjective(model), [batch])
    model.zero_grad()
    theirs.loss.backward()
    assert loss == pytest.approx(float(theirs.loss), rel=1e-6)
    assert sums["router_loss"] / batch.weight == pytest.approx(float(theirs.aux_loss), rel=1e-6)
    assert gradients.keys() == {name for name, p in model.named_parameters() if p.grad is not None}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)
    without = config_of(kind, output_router_logits=False)
    alone, _, _ = trained(ForwardWithObjective(build_model(None, without, seed=0)), [batch])
    assert loss - alone == pytest.approx(0.5 * float(theirs.aux_loss), rel=1e-4)


@pytest.mark.claim(
    "the loss of routers is that of transformers for one row, and the same however documents are packed"
)
def test_packing_padding_and_cutting_change_nothing() -> None:
    """A product of means over a batch would: transformers' own loss of the pack is another number."""
    model = build_model(None, config_of("mixtral"), seed=0)
    module, docs = ForwardWithObjective(model), documents([3, 9, 5, 7])
    alone = trained(module, [collate([[doc]], 0, None) for doc in docs])
    for batches in (
        [collate([docs], 0, None)],
        [collate([docs[:2], None, docs[2:]], 0, 32)],
        [collate([[doc] for doc in docs], 0, None)],
    ):
        loss, sums, gradients = trained(module, batches)
        assert loss == pytest.approx(alone[0], rel=1e-6) and sums == pytest.approx(
            alone[1], rel=1e-5
        )
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, alone[2][name], rtol=1e-4, atol=1e-6)
    packed = collate([docs], 0, None)
    theirs = model(**packed.inputs(), use_cache=False).aux_loss
    assert abs(float(theirs) - alone[1]["router_loss"] / packed.weight) > 1e-3


def test_what_the_event_says() -> None:
    module = ForwardWithObjective(build_model(None, config_of("mixtral"), seed=0))
    batch = collate([documents([6, 4])], 0, 16)
    _, sums, _ = trained(module, [batch])
    said = router_metrics(sums, batch.weight)
    assert (
        said["router_loss"] >= 0.9
        and len(said["expert_load"]) == 4
        and sum(said["expert_load"]) == pytest.approx(1)
    )
    # Real tokens × chosen × layers.
    assert sum(v for k, v in sums.items() if k.startswith("expert_load/")) == 10 * 2 * 2
    assert metrics(Event.of({"kind": "moved", "expert_load": [0.25, 0.75]})) == {
        "expert_load/least": 0.25,
        "expert_load/most": 0.75,
    }
    with torch.no_grad():
        assert module(batch, NextToken(0, False).objective)[1] == {}, (
            "asked without gradients: the loss of the tokens alone"
        )
    assert router_metrics({"loss": 1.0}, 1.0) == {}


def test_a_router_loss_that_is_not_known_is_refused() -> None:
    model = build_model(None, config_of("mixtral"), seed=0)
    assert facts(load_config(None, config_of("mixtral")), 16).trains_router
    assert not facts(
        load_config(None, config_of("mixtral", output_router_logits=False)), 16
    ).trains_router
    assert router_of(model) is not None

    class Other(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **options: Any) -> Any:
            out = super().forward(*args, **options)
            if options.get("output_router_logits"):
                out.aux_loss, out.loss = 2 * out.aux_loss, out.loss + out.aux_loss
            return out

    with pytest.raises(
        ModelError,
        match=r"^model\.config\.output_router_logits: the router loss of Other is not the one",
    ):
        router_of(Other(model.config))


def test_the_tokens_of_pairs_and_episodes_weigh_what_their_losses_do(tmp_path: Path) -> None:
    from drumline.data.batches import Episodes, collate_episodes, pair_batch

    pairs = pair_batch([documents([5, 3]), None], [0, -1], [{}, {}], 0, None)
    assert pairs.token_weights().sum(1).tolist() == [0.5, 0, 0.5, 0] and pairs.lengths_B.tolist()[
        ::2
    ] == [5, 3]
    episodes = Episodes.start(
        [np.ones(2, np.int64)] * 2, [np.ones(4, np.int64), np.ones(2, np.int64)]
    )
    weighted = episodes.weighted("sequence", 4, torch.ones(2, dtype=torch.bool))
    batch = collate_episodes(weighted, [0, 1], 0, 8)
    assert batch.token_weights().sum(1).tolist() == [1, 1] and batch.lengths_B.tolist() == [6, 4]
