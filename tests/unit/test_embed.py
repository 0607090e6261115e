"""Embedding models: InfoNCE and its gradient, the ranking of a held-out set, rows, refusals, files.

test_retrieval_export.py compares losses and gradients with those of sentence-transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig

from drumline.algorithms.embed import contrast, ranking
from drumline.algorithms.embed.contrast import InfoNCE
from drumline.algorithms.embed.folder import sentence_transformers_files
from drumline.algorithms.embed.objective import Embed, pooling_weights
from drumline.algorithms.embed.ranking import RANKED, rank_documents
from drumline.algorithms.embed.spec import EmbedConfig
from drumline.config.config import Config
from drumline.config.data import RETRIEVAL_FORMS, DataConfig, FileSource
from drumline.config.load import load_values
from drumline.config.model import ModelConfig
from drumline.data.batches import FirstPassNumbers, WholeTextBatch
from drumline.data.retrieval import RetrievalRowEncoder, text_id
from drumline.data.sources import Row, read_rows
from drumline.engine.engine import sum_without_model
from drumline.errors import DataError, ModelError, PlanError
from drumline.models.classes import set_classes
from drumline.models.head import Outputs
from drumline.models.load import facts
from drumline.plan.rule import Case
from drumline.plan.rules import check_rules
from drumline.planner.cost.memory import memory
from drumline.planner.embedding import resolve_embedding
from drumline.planner.sizes import FoundModel
from tests.tiny import tiny_tokenizer
from tests.unit.test_planner_times import cluster, layout, model

SAMPLES = 7
TEXTS = 4
WIDTH = 16
TEMPERATURE = 0.1


@pytest.fixture(name="embeddings_NRD")
def embeddings() -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, TEXTS, WIDTH, generator=draw, dtype=torch.float64)


@pytest.fixture(name="ids_NR")
def ids() -> torch.Tensor:
    """Every text once; two samples have a negative less, and one has none."""
    ids_NR = torch.arange(SAMPLES * TEXTS, dtype=torch.float64).view(SAMPLES, TEXTS)
    for sample, text in ((2, 3), (4, 3), (5, 2), (5, 3)):
        ids_NR[sample, text] = -1
    return ids_NR


def loss_by_loops(texts_NRD: torch.Tensor, ids_NR: torch.Tensor, size: int) -> torch.Tensor:
    """Return Σ over queries of −log(exp(s⁺/τ) / Σ exp(s/τ)), s the cosine."""
    unit_NRD = functional.normalize(texts_NRD[..., :size], dim=-1)
    loss = torch.zeros((), dtype=texts_NRD.dtype)
    for query in range(len(ids_NR)):
        similarities = [unit_NRD[query, 0] @ unit_NRD[query, 1]]
        for sample in range(len(ids_NR)):
            for text in range(1, TEXTS):
                is_positive = (sample, text) == (query, 1)
                if not is_positive and ids_NR[sample, text] >= 0:
                    similarities.append(unit_NRD[query, 0] @ unit_NRD[sample, text])
        scores = torch.stack(similarities) / TEMPERATURE
        loss = loss - torch.log_softmax(scores, 0)[0]
    return loss


@pytest.mark.parametrize("most", [contrast.MOST_ENTRIES, 50])
def test_loss_and_gradient_are_those_of_plain_loops(
    embeddings_NRD: torch.Tensor, ids_NR: torch.Tensor, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 50 similarities at once, the queries are compared in chunks."""
    monkeypatch.setattr(contrast, "MOST_ENTRIES", most)
    found = InfoNCE(TEMPERATURE, normalize=True, sizes=(4, 8)).compare(embeddings_NRD, ids_NR, True)
    leaf_NRD = embeddings_NRD.clone().requires_grad_()
    loss = torch.zeros((), dtype=torch.float64)
    for size in (WIDTH, 4, 8):
        loss = loss + loss_by_loops(leaf_NRD, ids_NR, size)
    loss.backward()
    torch.testing.assert_close(found.loss_N.sum(), loss.detach())
    torch.testing.assert_close(found.gradient_NRD, leaf_NRD.grad)


def test_dot_product_without_norm(embeddings_NRD: torch.Tensor, ids_NR: torch.Tensor) -> None:
    found = InfoNCE(1.0, normalize=False).compare(embeddings_NRD, ids_NR, False)
    expected = embeddings_NRD[0, 0] @ embeddings_NRD[0, 1]
    torch.testing.assert_close(found.similarity_N[0], expected)
    assert found.gradient_NRD is None


def test_a_text_that_answers_is_no_negative(
    embeddings_NRD: torch.Tensor, ids_NR: torch.Tensor
) -> None:
    """The positive of another sample with the same query, and a copy of the sample's own positive."""
    compare = InfoNCE(TEMPERATURE, normalize=True).compare
    same_NR = ids_NR.clone()
    same_NR[3, 0] = same_NR[0, 0]
    same_NR[1, 2] = same_NR[0, 1]
    missing_NR = ids_NR.clone()
    missing_NR[3, 1] = -1
    missing_NR[1, 2] = -1
    found = compare(embeddings_NRD, same_NR, False)
    expected = compare(embeddings_NRD, missing_NR, False)
    torch.testing.assert_close(found.loss_N[0], expected.loss_N[0])
    assert found.loss_N[0] < compare(embeddings_NRD, ids_NR, False).loss_N[0]


def test_a_text_that_answers_is_no_negative_wherever_it_stands(
    embeddings_NRD: torch.Tensor, ids_NR: torch.Tensor
) -> None:
    """The positive of a sample with the same query also stands beside another query."""
    compare = InfoNCE(TEMPERATURE, normalize=True).compare
    same_NR = ids_NR.clone()
    same_NR[3, 0] = same_NR[0, 0]
    same_NR[6, 1] = same_NR[3, 1]
    missing_NR = ids_NR.clone()
    for sample, text in ((3, 1), (6, 1)):
        missing_NR[sample, text] = -1
    found = compare(embeddings_NRD, same_NR, False)
    expected = compare(embeddings_NRD, missing_NR, False)
    torch.testing.assert_close(found.loss_N[0], expected.loss_N[0])


def test_a_query_is_no_negative_of_itself(
    embeddings_NRD: torch.Tensor, ids_NR: torch.Tensor
) -> None:
    """As in pairs of paraphrases, in which one sample's positive is another one's query."""
    compare = InfoNCE(TEMPERATURE, normalize=True).compare
    same_NR = ids_NR.clone()
    same_NR[3, 1] = same_NR[0, 0]
    missing_NR = ids_NR.clone()
    missing_NR[3, 1] = -1
    found = compare(embeddings_NRD, same_NR, False)
    expected = compare(embeddings_NRD, missing_NR, False)
    torch.testing.assert_close(found.loss_N[0], expected.loss_N[0])


def test_the_gradient_of_dot_products(embeddings_NRD: torch.Tensor, ids_NR: torch.Tensor) -> None:
    found = InfoNCE(3.0, normalize=False).compare(embeddings_NRD, ids_NR, True)
    leaf_NRD = embeddings_NRD.clone().requires_grad_()
    documents_MD = leaf_NRD[:, 1:].flatten(0, 1)
    scores_NM = leaf_NRD[:, 0] @ documents_MD.T / 3.0
    is_missing_M = ids_NR[:, 1:].flatten() < 0
    scores_NM = scores_NM.masked_fill(is_missing_M, -torch.inf)
    positives_N = torch.arange(SAMPLES) * (TEXTS - 1)
    functional.cross_entropy(scores_NM, positives_N, reduction="sum").backward()
    torch.testing.assert_close(found.gradient_NRD, leaf_NRD.grad)


def test_a_model_that_embeds_all_texts_alike_finds_nothing(ids_NR: torch.Tensor) -> None:
    same_NRD = torch.ones(SAMPLES, TEXTS, WIDTH)
    found = InfoNCE(TEMPERATURE, normalize=True).compare(same_NRD, ids_NR, False)
    assert not found.correct_N.any()
    totals = rank_documents(functional.normalize(same_NRD, dim=-1), ids_NR).sum(0)
    assert totals.tolist() == [SAMPLES, 0, 0, 0]


def test_a_query_is_not_looked_for_among_the_documents(
    embeddings_NRD: torch.Tensor, ids_NR: torch.Tensor
) -> None:
    """The first sample's query is the third one's positive, so the most similar document is itself."""
    embeddings_NRD = embeddings_NRD.clone()
    ids_NR = ids_NR.clone()
    ids_NR[3, 1] = ids_NR[0, 0]
    embeddings_NRD[3, 1] = embeddings_NRD[0, 0]
    embeddings_NRD[0, 1] = embeddings_NRD[0, 0] + 0.01
    unit_NRD = functional.normalize(embeddings_NRD, dim=-1)
    assert rank_documents(unit_NRD, ids_NR)[0].tolist() == [1, 1, 1, 1]


def rank_by_loops(unit_NRD: torch.Tensor, ids_NR: torch.Tensor) -> dict[str, float]:
    """Return the mean of each metric over the distinct queries."""
    documents: dict[float, torch.Tensor] = {}
    answers: dict[float, set[float]] = {}
    queries: dict[float, torch.Tensor] = {}
    for texts_RD, numbers in zip(unit_NRD, ids_NR.tolist(), strict=True):
        queries.setdefault(numbers[0], texts_RD[0])
        answers.setdefault(numbers[0], set()).add(numbers[1])
        for number, text_D in zip(numbers[1:], texts_RD[1:], strict=True):
            if number >= 0:
                documents.setdefault(number, text_D)
    totals = dict.fromkeys(RANKED[1:], 0.0)
    for query, query_D in queries.items():
        order = sorted(documents, key=lambda number: -float(documents[number] @ query_D))
        wanted = answers[query]
        for name in totals:
            cutoff = int(name.partition("@")[2])
            hits = [number in wanted for number in order[:cutoff]]
            if name.startswith("recall"):
                totals[name] += sum(hits) / len(wanted)
                continue
            gain = sum(hit / math.log2(rank + 2) for rank, hit in enumerate(hits))
            best = sum(1 / math.log2(rank + 2) for rank in range(min(cutoff, len(wanted))))
            totals[name] += gain / best
    return {name: total / len(queries) for name, total in totals.items()}


@pytest.mark.parametrize("most", [contrast.MOST_ENTRIES, 30])
def test_ranking_is_that_of_plain_loops(
    embeddings_NRD: torch.Tensor, ids_NR: torch.Tensor, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A query with two positives, and a document that stands in two samples, count once."""
    monkeypatch.setattr(ranking, "MOST_ENTRIES", most)
    embeddings_NRD = embeddings_NRD.clone()
    ids_NR = ids_NR.clone()
    for first, second in (((0, 0), (3, 0)), ((1, 1), (2, 2))):
        ids_NR[second] = ids_NR[first]
        embeddings_NRD[second] = embeddings_NRD[first]
    unit_NRD = functional.normalize(embeddings_NRD, dim=-1)
    totals = rank_documents(unit_NRD, ids_NR).sum(0)
    found = dict(zip(RANKED, totals.tolist(), strict=True))
    queries = found.pop("queries")
    assert queries == SAMPLES - 1
    expected = rank_by_loops(unit_NRD, ids_NR)
    assert {name: value / queries for name, value in found.items()} == pytest.approx(expected)


def batch_of(hidden_BTD: torch.Tensor, ids_PR: torch.Tensor) -> Any:
    """Return a batch of texts whose hidden states are known; all tokens are real."""
    from drumline.data.retrieval import RetrievalBatch

    rows, tokens, _ = hidden_BTD.shape
    zeros_BT = torch.zeros(rows, tokens, dtype=torch.int64)
    return RetrievalBatch(
        zeros_BT,
        zeros_BT,
        zeros_BT,
        len(ids_PR),
        attention_mask_BT=torch.ones_like(zeros_BT),
        text_ids_B=ids_PR.T.flatten(),
        real_P=torch.ones(len(ids_PR)),
    )


def test_micro_batches_have_the_gradient_of_one_large_batch() -> None:
    """GradCache: weights get the gradient of all texts compared at once."""
    draw = torch.Generator().manual_seed(1)
    inputs_NRTD = torch.randn(6, 2, 3, WIDTH, generator=draw)
    weight_DD = torch.randn(WIDTH, WIDTH, generator=draw)
    ids_NR = torch.arange(12, dtype=torch.float64).view(6, 2)
    algorithm = Embed(EmbedConfig(temperature=TEMPERATURE))

    def forward(weight: torch.Tensor, picks: list[int]) -> tuple[Outputs, Any]:
        inputs_BTD = inputs_NRTD[picks].transpose(0, 1).flatten(0, 1)
        hidden_BTD = torch.tanh(inputs_BTD @ weight)
        return Outputs(hidden_BTD=hidden_BTD), batch_of(hidden_BTD, ids_NR[picks])

    whole = weight_DD.clone().requires_grad_()
    outputs, _ = forward(whole, list(range(6)))
    texts_NRD = outputs.pool(torch.full((12, 3), 1 / 3)).view(2, 6, WIDTH).transpose(0, 1)
    unit_NRD = functional.normalize(texts_NRD, dim=-1)
    similarities_NN = unit_NRD[:, 0] @ unit_NRD[:, 1].T / TEMPERATURE
    loss = functional.cross_entropy(similarities_NN, torch.arange(6), reduction="sum")
    loss.backward()

    parts = [[4, 0], [1, 5, 2], [3]]
    cut = weight_DD.clone().requires_grad_()
    numbers_NK = torch.zeros(6, 2 * WIDTH + 2, dtype=torch.float64)
    with torch.no_grad():
        for picks in parts:
            numbers_NK[picks] = algorithm.first_pass(*forward(cut, picks))
    first = FirstPassNumbers(algorithm.combine_first(numbers_NK, trains=True))
    total = 0.0
    for picks in parts:
        outputs, batch = forward(cut, picks)
        batch = replace(batch, first=first, places_P=torch.tensor(picks))
        result = algorithm.objective(outputs, batch)
        result.loss_sum.backward()
        total += float(result.loss_sum.detach())
    assert total == pytest.approx(float(loss.detach()), rel=1e-6)
    torch.testing.assert_close(cut.grad, whole.grad, rtol=1e-5, atol=1e-6)


def test_similarities_are_not_rounded_to_tf32() -> None:
    """Whatever the model's products are computed in."""
    seen = []

    class Watched(InfoNCE):
        def compare(self, *arguments: Any, **options: Any) -> contrast.Contrast:
            seen.append(torch.backends.cuda.matmul.allow_tf32)
            return super().compare(*arguments, **options)

    algorithm = Embed(EmbedConfig())
    algorithm.contrast = Watched(TEMPERATURE, normalize=True)
    numbers_NK = torch.rand(3, 2 * WIDTH + 2, dtype=torch.float64)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        algorithm.combine_first(numbers_NK, trains=True)
        assert torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert seen == [False]


def test_fillers_take_nothing_from_the_last_sample() -> None:
    """A filler's place is -1; what is not finite there does not spread."""
    statistics_NK = torch.tensor([[1.0, 1.0, 0.5, 0, 0, 0, 0], [math.nan] * 7], dtype=torch.float64)
    batch = replace(
        batch_of(torch.zeros(4, 1, WIDTH), torch.tensor([[0.0, 1.0], [-1.0, -1.0]])),
        real_P=torch.tensor([1.0, 0.0]),
        first=FirstPassNumbers(statistics_NK),
        places_P=torch.tensor([0, -1]),
    )
    # The first pass has embedded the texts, so the model does not run a second time.
    assert Embed.evaluates_first_pass
    sums = sum_without_model([batch], Embed(EmbedConfig()).eval_objective)
    assert sums["loss"] == 1
    assert sums["similarity"] == 0.5


def test_pooling() -> None:
    lengths_B = torch.tensor([1, 3])
    assert pooling_weights("mean", lengths_B, 3).tolist()[0] == [1, 0, 0]
    torch.testing.assert_close(pooling_weights("mean", lengths_B, 3)[1], torch.full((3,), 1 / 3))
    assert pooling_weights("last", lengths_B, 3).tolist() == [[1, 0, 0], [0, 0, 1]]
    assert pooling_weights("cls", lengths_B, 3).tolist() == [[1, 0, 0], [1, 0, 0]]
    assert EmbedConfig().pooling_of(bidirectional=True) == "mean"
    assert EmbedConfig().pooling_of(bidirectional=False) == "last"


@pytest.mark.parametrize(
    ("row", "values"),
    [
        ({"query": "q", "positive": "p"}, {"query": "q", "positive": "p"}),
        (
            {"query": "q", "positive": "p", "negative": "n"},
            {"query": "q", "positive": "p", "negative": ["n"]},
        ),
        ({"query": "q", "positive": "p", "negative": None}, {"query": "q", "positive": "p"}),
        (
            {"anchor": "q", "positive": "p", "negative_2": "b", "negative_1": "a"},
            {"query": "q", "positive": "p", "negative": ["a", "b"]},
        ),
        (
            {"query": "q", "pos": ["p", "other"], "neg": ["a", "b"]},
            {"query": "q", "positive": "p", "negative": ["a", "b"]},
        ),
        (
            {"query": "q", "positive_passages": [{"title": "t", "text": "p"}]},
            {"query": "q", "positive": "t\np"},
        ),
        ({"question": "q", "answer": "p"}, {"query": "q", "positive": "p"}),
    ],
)
def test_rows_of_other_tools(tmp_path: Path, row: dict[str, Any], values: dict[str, Any]) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (found,) = read_rows(FileSource(path="rows.jsonl"), tmp_path, RETRIEVAL_FORMS)
    assert found.values == values


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"query": "q", "positive": "p", "images": ["a.png"]}, "holds images"),
        ({"query": "q", "positive": "p", "negative": [3]}, "has int among its texts"),
        ({"query": "q", "positive": "p", "negative": 3}, "neither text nor a list of texts"),
        ({"query": ["q"], "positive": "p"}, "is list, not text"),
        ({"prompt": "q", "completion": "p"}, "such rows are for algorithm sft"),
    ],
)
def test_wrong_rows(tmp_path: Path, row: dict[str, Any], says: str) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(DataError, match=says):
        list(read_rows(FileSource(path="rows.jsonl"), tmp_path, RETRIEVAL_FORMS))


def test_an_empty_cell_is_no_negative(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("query,positive,negative\nq,p,n\nq,p,\n")
    source = FileSource(path="rows.csv")
    rows = read_rows(source, tmp_path, RETRIEVAL_FORMS)
    assert [row.values["negative"] for row in rows] == [["n"], []]


def test_an_empty_text_is_refused() -> None:
    data = DataConfig.model_validate({"train": ["rows.jsonl"], "max_length": 32})
    encoder = RetrievalRowEncoder(tiny_tokenizer(), data, 1, "q: ", "d: ")
    row = Row("here", {"query": "one", "positive": "two", "negative": [" "]})
    with pytest.raises(DataError, match="here: `negative` has an empty text"):
        encoder.encode(row)


def test_encoding() -> None:
    """Prompts stand before the texts; the first negatives are taken; none may be left out unasked."""
    tokenizer = tiny_tokenizer()
    data = DataConfig.model_validate({"train": ["rows.jsonl"], "max_length": 32})
    row = Row("here", {"query": "one", "positive": "two", "negative": ["three", "four"]})
    sample = RetrievalRowEncoder(tokenizer, data, 1, "q: ", "d: ").encode(row)
    assert sample is not None
    texts = [tokenizer.decode(segment.tokens) for segment in sample.segments]
    assert texts == ["q: one", "d: two", "d: three"]
    with pytest.raises(DataError, match=r"algorithm.negatives is 0.*set algorithm.negatives to 2"):
        RetrievalRowEncoder(tokenizer, data, 0, "", "").encode(row)


def test_init_takes_as_many_negatives_as_the_first_row_has() -> None:
    fitted = EmbedConfig().fitted_to({"query": "q", "negative": ["a", "b"]})
    assert fitted == EmbedConfig(negatives=2)
    asked = EmbedConfig(negatives=1)
    assert asked.fitted_to({"negative": ["a", "b"]}) is asked
    plain = EmbedConfig()
    assert plain.fitted_to({"query": "q"}) is plain


def test_the_token_cache_depends_on_what_is_read() -> None:
    plain = EmbedConfig().cache_parts()
    changed = ({"negatives": 1}, {"query_prompt": "q: "}, {"document_prompt": "d: "})
    for options in changed:
        assert EmbedConfig.model_validate(options).cache_parts() != plain
    assert EmbedConfig(temperature=1.0).cache_parts() == plain


def test_equal_texts_have_one_number() -> None:
    first = text_id(np.array([5, 6], np.uint16))
    assert first == text_id(np.array([5, 6], np.int32))
    assert first != text_id(np.array([6, 5], np.int32))
    assert float(first) == first


BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


LLAMA = {"config": {**BERT, "model_type": "llama", "num_key_value_heads": 2}}


def case(strategy: Any = "single", world: int = 1, **sections: Any) -> Case:
    from drumline.models.load import load_config

    values = {
        "model": {"config": BERT},
        "data": {"train": ["rows.jsonl"]},
        "algorithm": {"kind": "embed"},
        "strategy": strategy,
        **sections,
    }
    config = load_values(values, []).config
    sizes = facts(load_config(None, config.model), 32, head="embedding")
    return Case(config, config.strategy.mesh(world), "cpu", "fp32", sizes)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (lambda: case("pp", 2), "pp × embeddings"),
        (lambda: case("local_sgd", 2), "embeddings × ranks that train apart"),
        (
            lambda: case(adapter={"kind": "lora", "dropout": 0.1}),
            r"embeddings × adapter.dropout",
        ),
        (
            lambda: case(algorithm={"kind": "embed", "matryoshka": [32]}),
            "matryoshka × the width of the model",
        ),
        (
            lambda: case(model=LLAMA, algorithm={"kind": "embed", "pooling": "cls"}),
            "pooling=cls × a causal model",
        ),
    ],
)
def test_refused(made: Callable[[], Case], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        check_rules(made())


@pytest.mark.parametrize(
    ("kind", "says"),
    [("qwen3_vl", "reads images beside text"), ("t5", "has an encoder and a decoder")],
)
def test_models_without_one_stack_of_text_are_refused(tmp_path: Path, kind: str, says: str) -> None:
    """Before their data are prepared, and as their sizes are counted."""
    config = AutoConfig.for_model(kind)
    with pytest.raises(ModelError, match=f"{kind} {says}"):
        facts(config, 32, head="embedding")
    config.save_pretrained(tmp_path)
    model = FoundModel(ModelConfig(id=str(tmp_path)), str(tmp_path))
    with pytest.raises(ModelError, match=f"{kind} {says}"):
        resolve_embedding(config_of({}), model, list)


def test_nothing_of_a_model_is_random() -> None:
    """Each text is embedded twice. OPT leaves out layers, and Mixtral's router has noise."""
    for kind, key in (("opt", "layerdrop"), ("mixtral", "router_jitter_noise")):
        config = AutoConfig.for_model(kind, **{key: 0.5, "attention_dropout": 0.1})
        set_classes(config, "embedding", ())
        assert (getattr(config, key), config.attention_dropout) == (0, 0)


def test_facts_of_an_encoder() -> None:
    """It reads both ways, and its layer on the first token is no part of it."""
    sizes = case().facts
    assert sizes is not None
    assert sizes.bidirectional
    assert sizes.first_position == 0
    assert all("pooler" not in weight.name for weight in sizes.end_weights)
    check_rules(case("cp", 2))


def test_the_first_pass_is_planned() -> None:
    spec = EmbedConfig(negatives=2)
    assert spec.extra_forwards == 1
    assert spec.build().first_pass is not None
    small = memory(layout("ddp", algorithm={"kind": "embed"}), model(), cluster())
    large = memory(
        layout("ddp", accumulation=4000, algorithm={"kind": "embed"}), model(), cluster()
    )
    # The gradients of 64,000 samples stay until the step ends: 2 texts, fp64.
    kept = 8 * 2 * model().hidden * (64_000 - 64)
    assert large.phases["step"] - small.phases["step"] == pytest.approx(kept, rel=0.01)
    # Meanwhile there are six times as many bytes of copies.
    compared = large.phases["first_pass"] - small.phases["first_pass"]
    assert compared == pytest.approx(7 * kept, rel=0.05)


def test_a_batch_has_no_targets() -> None:
    assert WholeTextBatch.weigh(None, np.arange(5)) == 5  # type: ignore[arg-type]


def pooled_by(root: Path, pooling: dict[str, Any], *modules: str) -> FoundModel:
    """A model whose files say how embeddings are made; `modules`: those beside the pooling."""
    listed = []
    for name in ("Transformer", "Pooling", *modules):
        path = "1_Pooling" if name == "Pooling" else ""
        listed.append({"path": path, "type": f"sentence_transformers.models.{name}"})
    (root / "modules.json").write_text(json.dumps(listed))
    (root / "1_Pooling").mkdir()
    (root / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (root / "config.json").write_text(json.dumps(BERT))
    return FoundModel(ModelConfig(id=str(root)), str(root))


def config_of(algorithm: dict[str, Any]) -> Config:
    values = {"data": {"train": ["rows.jsonl"]}, "algorithm": {"kind": "embed", **algorithm}}
    return load_values(values, []).config


def resolve(model: FoundModel, **algorithm: Any) -> tuple[str, list[str]]:
    """Return the pooling that is trained, and the notes to the user."""
    lines: list[str] = []
    config = resolve_embedding(config_of(algorithm), model, lines.extend)
    return config.algorithm.pooling, lines  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "values",
    [
        {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False},
        {"embedding_dimension": 32, "pooling_mode": "cls"},
    ],
)
def test_the_pooling_of_the_models_files_is_taken(tmp_path: Path, values: dict[str, Any]) -> None:
    """Older versions of sentence-transformers write a key a way to pool, newer ones its name."""
    model = pooled_by(tmp_path, values, "Normalize")
    pooling, lines = resolve(model)
    assert pooling == "cls"
    assert lines == ["algorithm.pooling: cls, as 1_Pooling/config.json of the model says"]
    # What was resolved stays, and is not said again.
    assert resolve(model, pooling="cls") == ("cls", [])


def test_a_pooling_that_was_set_wins(tmp_path: Path) -> None:
    """So do other keys. A note says what the model's files have instead."""
    values = {"pooling_mode_lasttoken": True, "include_prompt": False}
    model = pooled_by(tmp_path, values, "Dense", "Normalize")
    settings = {"prompts": {"query": "ask: ", "document": ""}}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(settings))
    pooling, lines = resolve(model, pooling="mean", normalize=False, query_prompt="q: ")
    assert pooling == "mean"
    assert lines == [
        "algorithm.pooling is mean, and 1_Pooling/config.json of the model says lasttoken",
        "algorithm.normalize is false, and the model's files normalise embeddings",
        "the model's files have a module Dense, which is neither trained nor exported",
        "prompts count in the pooling, and the model's files leave them out of it",
        "algorithm.query_prompt is 'q: ', and the model's files have 'ask: '",
    ]


@pytest.mark.parametrize("values", [{"pooling_mode": "max"}, {"pooling_mode": ["cls", "mean"]}])
def test_a_pooling_that_embed_lacks_is_not_replaced_unasked(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    model = pooled_by(tmp_path, values)
    with pytest.raises(ModelError, match="which embed does not train — set algorithm"):
        resolve(model)
    pooling, lines = resolve(model, pooling="mean")
    assert pooling == "mean"
    assert len(lines) == 1


def test_a_model_without_such_files_decides_by_its_kind(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(BERT))
    model = FoundModel(ModelConfig(id=str(tmp_path)), str(tmp_path))
    assert resolve(model) == ("auto", [])


@pytest.mark.parametrize("algorithm", [{"kind": "embed"}, {"kind": "rerank"}])
def test_random_rows_fill_each_segment(algorithm: dict[str, Any]) -> None:
    """`plan --probe` trains on them."""
    spec = config_of({**algorithm, "negatives": 2}).algorithm
    values: dict[str, Any] = {"train": ["rows.jsonl"], "max_length": 32, "truncation": "right"}
    row = spec.random_row(lambda number: "drum " * number, 32)
    assert row is not None
    encoder = spec.encoder(tiny_tokenizer(), DataConfig.model_validate(values))
    sample = encoder.encode(Row("here", row))
    assert len(sample.segments) == spec.rows_per_sample
    for segment in sample.segments:
        assert len(segment.tokens) == 32


def test_files_of_sentence_transformers() -> None:
    """sentence-transformers 6.2 read these once, and embedded texts as the model did."""
    prompts = {"query": "q: ", "document": ""}
    files = sentence_transformers_files("last", True, prompts, 32, 96)
    modules = files["modules.json"]
    assert [module["path"] for module in modules] == ["", "1_Pooling", "2_Normalize"]
    assert modules[1]["type"] == "sentence_transformers.models.Pooling"
    pooling = files["1_Pooling/config.json"]
    assert pooling["pooling_mode_lasttoken"]
    assert not pooling["pooling_mode_mean_tokens"]
    assert pooling["word_embedding_dimension"] == 32
    assert files["sentence_bert_config.json"]["max_seq_length"] == 96
    assert files["config_sentence_transformers.json"]["prompts"] == prompts
    plain = sentence_transformers_files("mean", False, prompts, 32, 96)
    assert len(plain["modules.json"]) == 2
    assert plain["config_sentence_transformers.json"]["similarity_fn_name"] == "dot"
