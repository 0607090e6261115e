"""The seam between models and losses: when hidden states will do, and names that survive wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from drumline.algorithms.tokens.objective import NextToken
from drumline.config.model import ModelConfig
from drumline.data.batches import TokenBatch
from drumline.errors import ModelError, PlanError
from drumline.models.build import build_model
from drumline.models.head import (
    ForwardWithObjective,
    can_split,
    compute_outputs,
    require_next_token,
    trunk_and_head,
)
from drumline.models.load import build_without_memory, facts, load_config

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LLAMA |= {"vocab_size": 64}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
KINDS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gpt2": GPT2,
    "qwen2": LLAMA,
    "mixtral": LLAMA | {"num_local_experts": 2},
    "gemma2": LLAMA | {"head_dim": 8},
    "granite": LLAMA | {"logits_scaling": 8.0},
    "cohere": LLAMA | {"logit_scale": 0.06},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64},
    "mamba": {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 64},
}


def build(kind: str) -> Any:
    return build_model(
        None, ModelConfig(id=None, config={"model_type": kind, **KINDS[kind]}), seed=0
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "mixtral"])
def test_logits_that_are_head_of_trunk(kind: str) -> None:
    assert can_split(build(kind))


@pytest.mark.parametrize("kind", ["gemma2", "granite", "cohere"])
def test_logits_that_are_more_than_that(kind: str) -> None:
    """Soft-capping and scaling, on fresh models, whose logits are so small that capping hardly shows."""
    model = build(kind)
    assert trunk_and_head(model) is not None and not can_split(model)
    batch = packed_batch()
    out = compute_outputs(model, batch, None)
    assert (
        out.hidden_BTD is None and out.logits_BTV is not None and out.logits_BTV.shape == (2, 8, 64)
    )


def test_a_head_with_more_in_it_than_its_weight_is_not_split() -> None:
    """An adapter around the head is such a module; fresh, it changes nothing yet, and a trial would not find it."""

    class Adapted(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner, self.weight, self.in_features = inner, inner.weight, inner.in_features

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    model = build("llama")
    model.lm_head = Adapted(model.lm_head)
    assert not can_split(model)


def test_the_trial_leaves_no_trace() -> None:
    model = build("gpt2")
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert can_split(model)
    require_next_token(model, "cpu", packed=True)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters()) and not model.transformer._forward_hooks


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen2", "mixtral", "gemma2"])
def test_models_that_keep_documents_apart(kind: str) -> None:
    require_next_token(build(kind), "cpu", packed=True)


@pytest.mark.parametrize("kind", ["bloom", "mamba"])
def test_models_that_do_not(kind: str) -> None:
    with pytest.raises(
        PlanError, match=r"data.packing.*does not keep the documents of a pack apart"
    ):
        require_next_token(build(kind), "cpu", packed=True)


BERT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 64,
}


def test_a_config_that_computes_nan_is_not_called_bidirectional() -> None:
    # The root of a negative number. NaN in attention alone is lost in the kernels of some CPUs.
    config = ModelConfig(id=None, config={"model_type": "llama", **BERT, "rms_norm_eps": -1.0})
    with pytest.raises(ModelError, match="computes no finite numbers"):
        require_next_token(build_model(None, config, seed=0), "cpu", packed=False)


@pytest.mark.parametrize("kind", ["bert", "roberta", "electra", "big_bird"])
def test_an_encoder_is_no_model_of_next_tokens(kind: str) -> None:
    """What its config says is refused when the run is planned, and by trying, and neither sends the user to data.packing."""
    config = ModelConfig(id=None, config={"model_type": kind, **BERT})
    with pytest.raises(ModelError, match="reads in both directions") as refused:
        facts(load_config(None, config), 16)
    assert (
        "data.packing" not in refused.value.line()
        and "model.config.is_decoder: true" in refused.value.line()
    )
    for packed in (False, True):
        with pytest.raises(ModelError, match="reads in both directions"):
            require_next_token(build_model(None, config, seed=0), "cpu", packed)
    decoder = ModelConfig(id=None, config={"model_type": kind, **BERT, "is_decoder": True})
    assert not facts(load_config(None, decoder), 16).bidirectional
    if (
        kind != "big_bird"
    ):  # transformers 5.17's looks ahead as a decoder, too, and is refused there
        require_next_token(build_model(None, decoder, seed=0), "cpu", packed=False)


class LooksAhead(LlamaForCausalLM):
    """A language model whose config says nothing of it."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.self_attn.is_causal = False


@pytest.mark.parametrize(
    "values", [{"num_key_value_heads": 8}, {"num_attention_heads": 4, "num_key_value_heads": 3}]
)
def test_numbers_that_do_not_fit_each_other_are_one_line(values: dict[str, Any]) -> None:
    config = {"model_type": "llama", **LLAMA, **values}
    with pytest.raises(
        ModelError,
        match=r"a small copy of LlamaForCausalLM does not run: .* heads of keys and values",
    ):
        require_next_token(
            build_without_memory(load_config(None, ModelConfig(id=None, config=config))),
            "cpu",
            packed=False,
        )


@pytest.mark.parametrize("packed", [False, True])
def test_a_model_that_looks_ahead_is_found_by_trying(packed: bool) -> None:
    with pytest.raises(
        ModelError, match=r"LooksAhead reads in both directions.*use algorithm: classify"
    ):
        require_next_token(LooksAhead(LlamaConfig(**LLAMA)), "cpu", packed)
    require_next_token(LlamaForCausalLM(LlamaConfig(**LLAMA)), "cpu", packed)


def packed_batch() -> TokenBatch:
    """Two rows of 8: a pack of 5 + 3, and one document of 8."""
    torch.manual_seed(0)
    targets = torch.randint(64, (2, 8))
    targets[0, 4] = targets[0, 7] = targets[1, :3] = -100
    positions = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2], list(range(8))])
    return TokenBatch(
        torch.randint(64, (2, 8)), targets, positions, weight=int((targets != -100).sum())
    )


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_both_ways_give_the_same_loss_and_gradients(kind: str) -> None:
    model, batch = build(kind).eval(), packed_batch()
    module = ForwardWithObjective(model)
    assert module.has_separable_head
    objective = NextToken(chunk=4, has_answers=False).objective
    results = []
    for splits in (True, False):
        module.has_separable_head = splits
        model.zero_grad()
        loss, sums = module(batch, objective)
        loss.backward()
        assert sums == {}
        results.append(
            (loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters()})
        )
    (loss, grads), (plain_loss, plain_grads) = results
    torch.testing.assert_close(loss, plain_loss, rtol=1e-6, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(grad, plain_grads[name], rtol=1e-4, atol=1e-6)
