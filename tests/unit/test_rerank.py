"""Rerankers: both losses and the ranks against plain loops, and rows of a query with a text."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig

from drumline.algorithms.rerank.objective import (
    Rerank,
    listwise_loss,
    pointwise_loss,
    rank_sums,
)
from drumline.algorithms.rerank.spec import RerankConfig
from drumline.config.data import DataConfig
from drumline.data.retrieval import CandidateRowEncoder
from drumline.data.sources import Row
from drumline.errors import DataError, ModelError, PlanError
from drumline.models.head import Outputs
from drumline.plan.rules import check_rules
from drumline.planner.seq2seq import resolve_seq2seq
from tests.tiny import tiny_tokenizer
from tests.unit.test_embed import case

# Three samples: with two negatives, with one, and a filler.
LOGITS_PC = torch.tensor([[0.5, 1.0, -1.0], [2.0, 0.3, 9.0], [4.0, 4.0, 4.0]])
PRESENT_PC = torch.tensor([[True, True, True], [True, True, False], [False, False, False]])
REAL_P = torch.tensor([1.0, 1.0, 0.0])


def test_pointwise_loss_is_that_of_plain_loops() -> None:
    def loss(logit: float, answers: bool) -> float:
        share = 1 / (1 + math.exp(-logit))
        return -math.log(share if answers else 1 - share)

    first = (loss(0.5, True) + loss(1.0, False) + loss(-1.0, False)) / 3
    second = (loss(2.0, True) + loss(0.3, False)) / 2
    found = pointwise_loss(LOGITS_PC, PRESENT_PC).tolist()
    assert found == pytest.approx([first, second, 0.0])


def test_listwise_loss_is_that_of_plain_loops() -> None:
    first = -math.log(math.exp(0.5) / sum(map(math.exp, (0.5, 1.0, -1.0))))
    second = -math.log(math.exp(2.0) / (math.exp(2.0) + math.exp(0.3)))
    found = listwise_loss(LOGITS_PC, PRESENT_PC).tolist()
    assert found == pytest.approx([first, second, 0.0])


def test_a_sample_without_a_negative_is_not_ranked() -> None:
    """Its positive would be first whatever the model says."""
    logits_PC = torch.tensor([[0.5, 1.0, -1.0], [2.0, 0.0, 0.0]])
    present_PC = torch.tensor([[True, True, True], [True, False, False]])
    sums = rank_sums(logits_PC, present_PC)
    assert {name: float(value) for name, value in sums.items()} == pytest.approx(
        {"ranked": 1, "first": 0, "reciprocal": 1 / 2, "discounted": 1 / math.log2(3)}
    )


@pytest.mark.parametrize("loss", ["pointwise", "listwise"])
def test_sums_and_metrics(loss: str) -> None:
    """The first positive is second, the other one first; the filler counts nowhere."""

    class Batch:
        present_B = PRESENT_PC.T.flatten()
        real_P = REAL_P

    algorithm = Rerank(RerankConfig.model_validate({"loss": loss, "negatives": 2}))
    out = algorithm.objective(Outputs(logits_BC=LOGITS_PC.T.reshape(-1, 1)), Batch())
    sums = {name: float(value) for name, value in out.sums.items()}
    metrics = algorithm.metrics({**sums, "loss": float(out.loss_sum)})
    expected = {"accuracy": 0.5, "mrr@10": 0.75, "ndcg@10": (1 + 1 / math.log2(3)) / 2}
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    losses_P = pointwise_loss if loss == "pointwise" else listwise_loss
    mean = float(losses_P(LOGITS_PC, PRESENT_PC).sum()) / 2
    assert metrics["loss"] == pytest.approx(mean)


def test_encoding_cuts_the_text_and_keeps_the_query() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.model_input_names = ["input_ids", "token_type_ids"]
    values: dict[str, Any] = {"train": ["rows.jsonl"], "max_length": 12, "truncation": "right"}
    data = DataConfig.model_validate(values)
    long = "one two three four five six seven eight"
    row = Row("here", {"query": "one", "positive": long, "negative": ["two", "three"]})
    sample = CandidateRowEncoder(tokenizer, data, 1).encode(row)
    assert sample is not None
    first, second = sample.segments
    query = tokenizer("one")["input_ids"]
    assert len(first.tokens) == 12
    assert first.tokens[: len(query)].tolist() == query
    assert tokenizer.decode(second.tokens) == "onetwo"
    assert sample.truncated
    assert sample.meta == {"negatives": 1, "starts": [len(query), len(query)]}
    with pytest.raises(DataError, match="the query has"):
        CandidateRowEncoder(tokenizer, data, 1).encode(
            Row("here", {"query": long, "positive": long})
        )


def test_a_query_that_leaves_room_for_no_token_of_the_text_is_refused() -> None:
    """A pair has one special token more than a text alone."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>",
        pair="$A <eos> $B <eos>",
        special_tokens=[("<eos>", tokenizer.eos_token_id)],
    )
    limit = len(tokenizer("one")["input_ids"]) + 1
    values: dict[str, Any] = {"train": ["rows.jsonl"], "max_length": limit, "truncation": "right"}
    encoder = CandidateRowEncoder(tokenizer, DataConfig.model_validate(values), 1)
    with pytest.raises(DataError, match=f"the query has {limit} tokens"):
        encoder.encode(Row("here", {"query": "one", "positive": "two three"}))


def test_rows_without_negatives_teach_nothing() -> None:
    class Cache:
        def __len__(self) -> int:
            return 2

        def meta(self, sample: int) -> dict[str, int]:
            return {"negatives": 0}

    spec = RerankConfig()
    with pytest.raises(DataError, match="none of the 2 training rows has a negative"):
        spec.check_rows(Cache())
    # Nor is there anything to rank.
    with pytest.raises(DataError, match="none of the 2 held-out rows has a negative"):
        spec.classes(Cache(), [Cache()])


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_models_with_an_encoder_and_a_decoder_are_refused(kind: str) -> None:
    """Before data are prepared. transformers has classifiers of them, which read a row twice."""
    config = case("single", 1, algorithm={"kind": "rerank"}).config
    with pytest.raises(ModelError) as error:
        resolve_seq2seq(config, AutoConfig.for_model(kind), list)
    line = error.value.line()
    assert f"{kind} has an encoder and a decoder, which rerank does not train" in line
    assert "\n" not in line


@pytest.mark.parametrize("strategy", ["pp", "cp"])
def test_refused(strategy: str) -> None:
    with pytest.raises(PlanError, match=f"{strategy} × rerank"):
        check_rules(case(strategy, 2, algorithm={"kind": "rerank"}))
