"""The loss that balances a mixture's experts: transformers' own for one row.

It is a sum, however documents are packed and batches cut.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from drumline.algorithms.tokens.objective import NextToken
from drumline.config.model import ModelConfig
from drumline.data.batches import Episodes, TokenBatch, collate, collate_episodes, pair_batch
from drumline.errors import ModelError
from drumline.models.build import build_model
from drumline.models.head import ForwardWithObjective
from drumline.models.load import facts, load_config
from drumline.models.router import router_metrics, router_of

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
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
    "phimoe": {
        "num_local_experts": 4,
        "input_jitter_noise": 0.0,
        "router_jitter_noise": 0.0,
    },
    "gpt_oss": {"num_local_experts": 4, "head_dim": 8},
}
OBJECTIVE = NextToken(chunk=0, has_answers=False).objective


def config_of(kind: str, **changes: Any) -> ModelConfig:
    config = {"model_type": kind, **SIZES, **KINDS[kind], **changes}
    return ModelConfig(id=None, config=config)


def mixture(kind: str = "mixtral", **changes: Any) -> Any:
    return build_model(None, config_of(kind, **changes), seed=0)


def documents(lengths: list[int]) -> list[tuple[Any, Any]]:
    draw = np.random.default_rng(0)
    found = []
    for length in lengths:
        tokens = draw.integers(0, 64, length).astype(np.uint32)
        found.append((tokens, np.ones(length, np.uint8)))

    return found


def gradients_of(model: Any) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.clone()

    return found


class Trained(NamedTuple):
    # Over the weight of all batches.
    loss: float
    sums: dict[str, float]
    gradients: dict[str, Tensor]


def train(model: Any, batches: list[TokenBatch]) -> Trained:
    """Return what one step over all batches gives."""
    module = ForwardWithObjective(model)
    module.zero_grad()
    weight = sum(batch.weight for batch in batches)
    loss = 0.0
    sums: dict[str, float] = defaultdict(float)
    for batch in batches:
        loss_sum, out = module(batch, OBJECTIVE)
        (loss_sum / weight).backward()
        loss += float(loss_sum.detach()) / weight
        for name, value in out.items():
            sums[name] += float(value)

    return Trained(loss, dict(sums), gradients_of(model))


def assert_same_gradients(
    found: dict[str, Tensor],
    expected: dict[str, Tensor],
) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name],
            gradient,
            rtol=1e-4,
            atol=1e-6,
        )


@pytest.mark.claim(
    "the loss of routers is that of transformers for one row, "
    "and the same however documents are packed"
)
@pytest.mark.parametrize("kind", KINDS)
def test_one_row_has_the_loss_and_gradients_of_transformers(kind: str) -> None:
    model = mixture(kind)
    batch = collate([documents([12])], 0, None)
    ids_BT = batch.input_ids_BT
    try:
        theirs = model(input_ids=ids_BT, labels=ids_BT, use_cache=False)
    except AttributeError:  # transformers 5.17's granitemoe cannot compute its own
        with pytest.raises(ModelError, match="would not be trained"):
            router_of(model)
        return

    ours = train(model, [batch])
    model.zero_grad()
    theirs.loss.backward()

    router_loss = float(theirs.aux_loss)
    assert ours.loss == pytest.approx(float(theirs.loss), rel=1e-6)
    assert ours.sums["router_loss"] / batch.weight == pytest.approx(router_loss, rel=1e-6)
    assert_same_gradients(ours.gradients, gradients_of(model))

    without = train(mixture(kind, output_router_logits=False), [batch])
    assert ours.loss - without.loss == pytest.approx(0.5 * router_loss, rel=1e-4)


@pytest.mark.claim(
    "the loss of routers is that of transformers for one row, "
    "and the same however documents are packed"
)
def test_packing_padding_and_cutting_change_nothing() -> None:
    """A product of means over a batch would: transformers' loss of the pack is another number."""
    model = mixture()
    docs = documents([3, 9, 5, 7])
    each_alone = [[doc] for doc in docs]
    packed = collate([docs], 0, None)
    padded = collate(
        [docs[:2], None, docs[2:]],
        0,
        32,
    )
    in_rows = collate(each_alone, 0, None)
    expected = train(model, [collate([row], 0, None) for row in each_alone])

    for batch in (packed, padded, in_rows):
        found = train(model, [batch])
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        assert found.sums == pytest.approx(expected.sums, rel=1e-5)
        assert_same_gradients(found.gradients, expected.gradients)

    theirs = model(**packed.inputs(), use_cache=False)
    router_loss = expected.sums["router_loss"] / packed.weight
    assert abs(float(theirs.aux_loss) - router_loss) > 1e-3


def test_what_the_event_says() -> None:
    model = mixture()
    batch = collate([documents([6, 4])], 0, 16)
    sums = train(model, [batch]).sums
    said = router_metrics(sums, batch.weight)
    assert said["router_loss"] >= 0.9
    assert router_metrics({"loss": 1.0}, 1.0) == {}


def test_without_gradients_the_loss_is_that_of_the_tokens_alone() -> None:
    module = ForwardWithObjective(mixture())
    batch = collate([documents([6, 4])], 0, 16)
    with torch.no_grad():
        _, sums = module(batch, OBJECTIVE)
    assert sums == {}


def test_a_router_loss_that_is_not_known_is_refused() -> None:
    with_loss = load_config(None, config_of("mixtral"))
    without = load_config(None, config_of("mixtral", output_router_logits=False))
    assert facts(with_loss, 16).trains_router
    assert not facts(without, 16).trains_router

    model = mixture()
    assert router_of(model) is not None

    class Other(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **options: Any) -> Any:
            out = super().forward(*args, **options)
            if options.get("output_router_logits"):
                router_loss = out.aux_loss
                out.loss = out.loss + router_loss
                out.aux_loss = 2 * router_loss
            return out

    message = r"^model\.config\.output_router_logits: the router loss of Other is not the one"
    with pytest.raises(ModelError, match=message):
        router_of(Other(model.config))


def test_the_tokens_of_pairs_and_episodes_weigh_what_their_losses_do() -> None:
    pairs = pair_batch(
        [documents([5, 3]), None],
        [0, -1],
        [{}, {}],
        0,
        None,
    )
    assert pairs.token_weights().sum(1).tolist() == [0.5, 0, 0.5, 0]
    assert pairs.lengths_B.tolist()[::2] == [5, 3]

    prompt = np.ones(2, np.int64)
    completions = [np.ones(4, np.int64), np.ones(2, np.int64)]
    episodes = Episodes.start([prompt, prompt], completions)
    counts_N = torch.ones(2, dtype=torch.bool)
    weighted = episodes.add_loss_weights("sequence", 4, counts_N)
    batch = collate_episodes(weighted, [0, 1], 0, 8)
    assert batch.token_weights().sum(1).tolist() == [1, 1]
    assert batch.lengths_B.tolist() == [6, 4]
