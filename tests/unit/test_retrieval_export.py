"""Exports of embedding models and rerankers give other libraries the numbers that they were trained for."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers.processors import TemplateProcessing
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from drumline.algorithms.embed.contrast import InfoNCE
from drumline.algorithms.embed.objective import pooling_weights
from drumline.algorithms.embed.spec import EmbedConfig
from drumline.algorithms.rerank.objective import listwise_loss, pointwise_loss
from drumline.checkpoint.save import Checkpointer
from drumline.config.model import ModelConfig
from drumline.data.cache import TokenCache
from drumline.models.build import build_model
from drumline.models.embedding_files import read_embedding_files
from drumline.models.export import export
from drumline.models.head import compute_outputs
from drumline.models.shards import canonical_tensors
from drumline.plan.plan import Plan
from drumline.planner.embedding import POOLINGS
from tests.harness import Sections, retrieval_rows, write_config
from tests.plans import resolve_plan
from tests.tiny import tiny_model_dir, tiny_tokenizer

# Another than BERT's usual one.
DROPOUT = 0.25
BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "hidden_dropout_prob": DROPOUT,
}
HELD_OUT = 6
RERANK = {"kind": "rerank", "negatives": 2}
EMBED = {"kind": "embed", "negatives": 2, "query_prompt": "q: ", "document_prompt": "d: "}


def require_peer() -> Any:
    """Return sentence-transformers; without it the test is skipped."""
    reason = "sentence_transformers is not installed: make environments"
    return pytest.importorskip("sentence_transformers", reason=reason)


def make_run(root: Path, kind: str, algorithm: Sections) -> tuple[Plan, Any]:
    """Return the plan of a run that has one checkpoint, and the model of this checkpoint."""
    if kind == "bert":
        tokenizer = tiny_tokenizer()
        eos = "<|im_end|>"
        # As BERT's, which tells a query from a text.
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"$A {eos}",
            pair=f"$A {eos} $B:1 {eos}:1",
            special_tokens=[(eos, tokenizer.convert_tokens_to_ids(eos))],
        )
        folder = root / "tokenizer"
        tokenizer.save_pretrained(folder)
        file = folder / "tokenizer_config.json"
        names = ["input_ids", "token_type_ids", "attention_mask"]
        file.write_text(json.dumps({**json.loads(file.read_text()), "model_input_names": names}))
        model: Sections = {"id": None, "config": BERT, "tokenizer": str(folder)}
    else:
        folder = tiny_model_dir(root / "model")
        model = {"id": str(folder)}
    config = write_config(root, folder, model=model, algorithm=algorithm, strategy="single")
    plan = resolve_plan(config)
    source = plan.config.model
    built = build_model(plan.model_path, source, 0, head=plan.config.head, labels=plan.labels)
    torch.manual_seed(1)
    for parameter in built.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    run = Path(plan.run_dir)
    run.mkdir(parents=True, exist_ok=True)
    plan.save(run / "plan.json")
    checkpointer = Checkpointer(
        run / "checkpoints", keep=1, keep_best=False, mode="min", asynchronous=False
    )
    checkpointer.save(1, canonical_tensors(built), {"step": 1}, None)
    (result,) = checkpointer.wait()
    assert result.error is None
    return plan, built.eval()


def held_out_batch(plan: Plan) -> Any:
    """Return the batch of all held-out rows."""
    assert plan.data is not None
    (folder,) = plan.data.eval_caches.values()
    collate = plan.config.algorithm.collator(plan, None)
    return collate(TokenCache.open(Path(folder)))(list(range(HELD_OUT)))


def pairs_of_rows() -> list[tuple[str, str]]:
    """Return the query and each candidate of the held-out rows, in the order of a batch."""
    pairs = []
    rows = retrieval_rows(HELD_OUT, seed=1)
    for number in range(3):
        for row in rows:
            texts = [row["positive"], *row.get("negative", [])]
            if number < len(texts):
                pairs.append((row["query"], texts[number]))
    return pairs


@pytest.fixture(name="reranker", scope="module", params=["bert", "decoder"])
def make_reranker(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, torch.Tensor]:
    """The export of a reranker, and its scores of `pairs_of_rows` in training."""
    root = tmp_path_factory.mktemp(request.param)
    plan, model = make_run(root, request.param, RERANK)
    batch = held_out_batch(plan)
    assert (batch.token_type_ids_BT is not None) == (request.param == "bert")
    with torch.no_grad():
        logits_B = compute_outputs(model, batch, None).class_logits()[:, 0]
    out = root / "out"
    export(Path(plan.run_dir), out, "last")
    return out, logits_B[batch.present_B]


def test_transformers_gives_the_scores_of_a_reranker(
    reranker: tuple[Path, torch.Tensor],
) -> None:
    """The calls are those that sentence-transformers' CrossEncoder makes."""
    folder, expected = reranker
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    assert model.config.num_labels == 1
    inputs = tokenizer(pairs_of_rows(), padding=True, truncation=True, return_tensors="pt")
    with torch.no_grad():
        scores = model(**inputs).logits[:, 0]
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)


def test_sentence_transformers_gives_the_scores_of_a_reranker(
    reranker: tuple[Path, torch.Tensor],
) -> None:
    library = require_peer()
    folder, expected = reranker
    model = library.CrossEncoder(str(folder), device="cpu")
    pairs = pairs_of_rows()
    scores = model.predict(pairs, activation_fn=torch.nn.Identity(), convert_to_tensor=True)
    torch.testing.assert_close(scores.float(), expected, rtol=1e-5, atol=1e-5)
    # By default a score is the probability that the text answers.
    shares = model.predict(pairs, convert_to_tensor=True)
    torch.testing.assert_close(shares.float(), expected.sigmoid(), rtol=1e-5, atol=1e-5)


@dataclass(frozen=True)
class Embedder:
    """The export of an embedding model, its pooling, and what training makes of the held-out rows.

    `expected`: embeddings of all queries, and then of all positives.
    """

    folder: Path
    pooling: str
    expected: torch.Tensor


@pytest.fixture(name="embedder", scope="module", params=["bert", "decoder"])
def make_embedder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Embedder:
    root = tmp_path_factory.mktemp(f"embed-{request.param}")
    plan, model = make_run(root, request.param, EMBED)
    algorithm = plan.config.algorithm
    assert isinstance(algorithm, EmbedConfig)
    batch = held_out_batch(plan)
    pooling = algorithm.pooling_of(plan.bidirectional)
    weights_BT = pooling_weights(pooling, batch.lengths_B, batch.input_ids_BT.shape[1])
    with torch.no_grad():
        pooled_BD = compute_outputs(model, batch, None).pool(weights_BT)
    expected = functional.normalize(pooled_BD, dim=-1)[: 2 * HELD_OUT]
    out = root / "out"
    export(Path(plan.run_dir), out, "last")
    return Embedder(out, pooling, expected)


def test_the_files_of_an_embedding_model_say_how_it_embeds(embedder: Embedder) -> None:
    """So a run that goes on from the export pools in the same way."""
    files = read_embedding_files(str(embedder.folder), ModelConfig(id=str(embedder.folder)))
    assert files is not None
    assert [POOLINGS[name] for name in files.pooling] == [embedder.pooling]
    assert files.normalizes
    assert files.prompts == {"query": "q: ", "document": "d: "}
    assert not files.other_modules


def test_the_exported_config_has_the_dropout_of_the_model(tmp_path: Path) -> None:
    """Training embeds each text twice, without dropout; whoever trains on has the model's own."""
    plan, model = make_run(tmp_path, "bert", EMBED)
    assert model.config.hidden_dropout_prob == 0

    export(Path(plan.run_dir), tmp_path / "out", "last")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["hidden_dropout_prob"] == DROPOUT
    assert config["attention_probs_dropout_prob"] == 0.1


def test_sentence_transformers_gives_the_embeddings(embedder: Embedder) -> None:
    library = require_peer()
    rows = retrieval_rows(HELD_OUT, seed=1)
    reader = library.SentenceTransformer(str(embedder.folder), device="cpu")
    queries = reader.encode([row["query"] for row in rows], prompt_name="query")
    answers = reader.encode([row["positive"] for row in rows], prompt_name="document")
    found = torch.cat([torch.as_tensor(queries), torch.as_tensor(answers)])
    torch.testing.assert_close(found.float(), embedder.expected, rtol=1e-5, atol=1e-5)


def test_sentence_transformers_has_the_same_losses_of_a_reranker(
    reranker: tuple[Path, torch.Tensor],
) -> None:
    library = require_peer()
    losses = importlib.import_module("sentence_transformers.cross_encoder.losses")
    folder, _ = reranker
    model = library.CrossEncoder(str(folder), device="cpu")
    for row in retrieval_rows(HELD_OUT, seed=1):
        texts = [row["positive"], *row.get("negative", [])]
        queries = [row["query"]] * len(texts)
        answers = torch.tensor([1.0] + [0.0] * (len(texts) - 1))
        with torch.no_grad():
            logits_PC = model.predict(
                list(zip(queries, texts, strict=True)),
                activation_fn=torch.nn.Identity(),
                convert_to_tensor=True,
            )[None]
            pointwise = losses.BinaryCrossEntropyLoss(model)([queries, texts], answers)
            # Its targets are a softmax of the labels, here 1 for the positive and 0 for all others.
            listwise = losses.ListNetLoss(model)([[row["query"]], [texts]], [1e4 * answers])
        present_PC = torch.ones_like(logits_PC, dtype=torch.bool)
        own_pointwise = pointwise_loss(logits_PC, present_PC)[0]
        own_listwise = listwise_loss(logits_PC, present_PC)[0]
        torch.testing.assert_close(own_pointwise, pointwise, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(own_listwise, listwise, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sizes", [(), (4, 8)])
def test_sentence_transformers_has_the_same_loss_of_embeddings(sizes: tuple[int, ...]) -> None:
    """Also with Matryoshka sizes, whose losses are added to that of all numbers."""
    require_peer()
    losses = importlib.import_module("sentence_transformers.sentence_transformer.losses")
    samples, texts, width = 7, 4, 16
    draw = torch.Generator().manual_seed(0)
    embeddings_NRD = torch.randn(samples, texts, width, generator=draw, dtype=torch.float64)
    ids_NR = torch.arange(samples * texts, dtype=torch.float64).view(samples, texts)
    own = InfoNCE(0.05, normalize=True, sizes=sizes).compare(embeddings_NRD, ids_NR, True)

    leaf_NRD = embeddings_NRD.clone().requires_grad_()
    ranking = losses.MultipleNegativesRankingLoss(None, scale=20.0)
    loss = torch.zeros((), dtype=torch.float64)
    for size in (width, *sizes):
        columns = list(leaf_NRD[..., :size].unbind(1))
        loss = loss + ranking.compute_loss_from_embeddings(columns, None)
    loss.backward()

    # Theirs is a mean over the samples.
    torch.testing.assert_close(own.loss_N.sum() / samples, loss.detach())
    assert leaf_NRD.grad is not None
    torch.testing.assert_close(own.gradient_NRD / samples, leaf_NRD.grad)
