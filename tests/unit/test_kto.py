"""KTO: losses, figures and gradients of eight fixed answers equal those of TRL's KTOTrainer to 1e-5, however they are cut.

The numbers are those of `tests/reference/kto_trl.json`; TRL's own tokeniser calls, collators, pairing and models made them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from drumline.algorithms.base import LossOut
from drumline.algorithms.dpo.spec import DPOConfig
from drumline.algorithms.kto.spec import KTOConfig
from drumline.config.algorithm import AlgorithmSpec
from drumline.config.config import Config
from drumline.config.data import JUDGED_FORMS, DataConfig, FileSource
from drumline.data.batches import FirstPassNumbers
from drumline.data.cache import TokenCache
from drumline.data.encode import JudgedRows
from drumline.data.judged import collate_mismatched, require_both_labels
from drumline.data.pairs import split_pair
from drumline.data.prepare import prepare
from drumline.data.sources import Row, read_rows
from drumline.errors import ConfigError, DataError, PlanError
from drumline.models.head import ForwardWithObjective
from drumline.plan.batch import resolve_batch
from drumline.plan.plan import DataPlan
from tests.reference.pairs import gradients, model, tokenizer, unpaired
from tests.unit.test_pairs_trl import close

pytestmark = [pytest.mark.claim("new losses of pairs, KTO and GRPO's kinds are TRL's")]

TRL: dict[str, Any] = json.loads(
    (Path(__file__).parents[1] / "reference" / "kto_trl.json").read_text()
)
ROWS = unpaired()
CLOSE = {"rel": 1e-5, "abs": 1e-5}


def data(**keys: Any) -> DataConfig:
    return DataConfig.model_validate(
        {"train": [{"kind": "file", "path": "unused"}], "max_length": 128, **keys}
    )


def batches(cuts: list[list[int]], before: dict[int, int] | None = None) -> list[Any]:
    """-1: a filler. The sample before the first is the last; `before` has others."""
    made = [
        JudgedRows(tokenizer(), data()).encode(Row(f"row {index}", row))
        for index, row in enumerate(ROWS)
    ]
    segments = [[(side.tokens, side.learn) for side in each.segments] for each in made]
    cache = SimpleNamespace(segments=segments.__getitem__, meta=lambda sample: made[sample].meta)
    micro_batches = []
    for ids in cuts:
        previous = [(sample - 1) % len(ROWS) if sample >= 0 else -1 for sample in ids]
        for place, sample in enumerate(ids):
            previous[place] = (before or {}).get(sample, previous[place])
        micro_batches.append(collate_mismatched(cache, ids, previous, 0, None, 128))
    return micro_batches


def read(learner: Any, batch: Any, what: Any) -> torch.Tensor:
    found: list[torch.Tensor] = []

    def kept(outputs: Any, b: Any) -> LossOut:
        found.append(what(outputs, b))
        return LossOut(found[0].sum())

    with torch.no_grad():
        ForwardWithObjective(learner)(batch, kept)
    return found[0]


def spec_of(options: dict[str, Any]) -> KTOConfig:
    own = {name: value for name, value in options.items() if name != "loss_type"}
    return KTOConfig(**own, loss=options.get("loss_type", "kto"), loss_chunk=16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "cuts", [[list(range(8))], [[3, 0, -1], [7, 6, 1], [2, 5, 4]]], ids=["whole", "cut"]
)
@pytest.mark.parametrize("name", TRL["cases"])
def test_losses_figures_and_gradients_are_trls(name: str, cuts: list[list[int]]) -> None:
    from transformers import LlamaForCausalLM

    case = TRL["cases"][name]
    algorithm = spec_of(case["options"]).build()
    policy, reference = (model(LlamaForCausalLM, seed) for seed in case["seeds"])
    micro_batches = [
        replace(
            b,
            reference_B=read(reference, b, algorithm.score),
            first_reference_B=read(reference, b.mismatched, algorithm.score),
        )
        for b in batches(cuts)
    ]
    if algorithm.first_pass is not None:
        numbers = [
            read(policy, algorithm.first_batch(b), algorithm.first_pass)[b.real_P > 0]
            for b in micro_batches
        ]
        first = FirstPassNumbers(torch.cat(numbers))
        micro_batches = [replace(b, first=first) for b in micro_batches]
    sums: dict[str, float] = {}
    for batch in micro_batches:
        loss_sum, told = ForwardWithObjective(policy)(batch, algorithm.objective)
        (loss_sum / len(ROWS)).backward()
        for key, value in {"loss": loss_sum.detach(), **told}.items():
            sums[key] = sums.get(key, 0.0) + float(value)
    figures = algorithm.metrics(sums)
    assert figures.pop("loss") == pytest.approx(case["loss"], **CLOSE)
    assert figures == pytest.approx(case["figures"], **CLOSE)
    close(gradients(policy), case["gradients"])


@pytest.mark.parametrize(
    "spec",
    [KTOConfig(), KTOConfig(loss="apo_zero_unpaired"), DPOConfig(), DPOConfig(loss="aot")],
    ids=repr,
)
def test_a_first_pass_is_planned(spec: AlgorithmSpec) -> None:
    assert (spec.build().first_pass is not None) == bool(spec.extra_forwards)
    is_kto = isinstance(spec, KTOConfig) and spec.loss == "kto"
    assert spec.pairs_with_previous == is_kto


def test_a_traced_batch_is_one_of_the_objective() -> None:
    plan: Any = None
    batch = KTOConfig().traced_batch(plan, 3, 5, 0)
    outputs = SimpleNamespace(log_probs=lambda targets, _: (torch.zeros(targets.shape), None))
    assert KTOConfig().build().objective(outputs, batch).sums["good"] == 3


def test_where_the_reference_comes_from() -> None:
    def found(algorithm: dict[str, Any], **more: Any) -> str:
        sections = {
            "model": {"id": "a/b"},
            "data": {"train": ["rows.jsonl"], "max_length": 8},
            **more,
        }
        config = Config.model_validate({**sections, "algorithm": {"kind": "kto", **algorithm}})
        return config.algorithm.reference_of(config)

    apo = {"loss": "apo_zero_unpaired"}
    assert (found({}), found({}, adapter={"kind": "lora"}), found(apo)) == (
        "live",
        "adapter",
        "precomputed",
    )
    forwards = [
        spec.reference_forwards for spec in (KTOConfig(), KTOConfig(**apo), DPOConfig(loss="aot"))
    ]
    assert forwards == [2, 1, 1], "the planner counts these"
    with pytest.raises(ValidationError, match="precomputed requires loss: apo_zero_unpaired"):
        KTOConfig(reference="precomputed")


def test_a_mismatched_row_has_its_own_prompt_and_the_answer_before_it() -> None:
    (batch,) = batches([[0, 1]])
    text = tokenizer()
    rows = [
        text.decode(row[:last])
        for row, last in zip(batch.mismatched.input_ids_BT, batch.mismatched.lengths_B, strict=True)
    ]
    for row, index, before in zip(rows, (0, 1), (7, 0), strict=True):
        assert (
            ROWS[index]["prompt"][0]["content"] in row
            and ROWS[before]["completion"][0]["content"] in row
        )
    assert batch.token_weights().sum(1).tolist() == [1, 1] and batch.weight == 2


GOOD = [True, 1, "true", "1", "Good"]
BAD = [False, 0, "False", "0", "no"]


@pytest.mark.parametrize("label", [*GOOD, *BAD], ids=repr)
def test_labels(label: Any) -> None:
    encoded = JudgedRows(tokenizer(), data()).encode(Row("row 1", {**ROWS[0], "label": label}))
    assert encoded.meta["good"] == (label in GOOD)


def test_answers_to_a_prompt_share_its_digest_however_they_are_cut() -> None:
    content = ROWS[0]["completion"][0]["content"]
    longer = [{"role": "assistant", "content": content * 3}]
    encoder = JudgedRows(tokenizer(), data(max_length=24, truncation="left"))
    rows = (ROWS[0], {**ROWS[0], "completion": longer}, ROWS[1])
    prompts = [encoder.encode(Row("row", row)).meta["prompt"] for row in rows]
    assert prompts[0] == prompts[1] != prompts[2]


def test_a_prompt_without_another_one_adds_nothing_to_the_kl() -> None:
    algorithm = KTOConfig().build()
    (batch,) = batches([[0, 1]], {1: -1})
    assert batch.weight == 2 and batch.mismatched.real_P.tolist() == [1, 0]
    scores = SimpleNamespace(log_probs=lambda *_: (torch.tensor([[4.0], [9.0]]), None))
    zeros_B = torch.zeros(2, dtype=torch.float64)
    numbers_NK = algorithm.first_pass(scores, replace(batch.mismatched, reference_B=zeros_B))
    first = FirstPassNumbers(numbers_NK)
    assert algorithm.baseline(replace(batch, first=first)) == 4
    assert algorithm.baseline(replace(batch, first=FirstPassNumbers(numbers_NK[1:]))) == 0


def test_a_batch_of_one_sample_is_refused_for_the_kl_alone() -> None:
    def config(algorithm: dict[str, Any], **batch: int) -> Config:
        sections = {"model": {"id": "a/b"}, "data": {"train": ["rows.jsonl"], "max_length": 8}}
        algorithm = {"kind": "kto", **algorithm}
        return Config.model_validate({**sections, "algorithm": algorithm, "batch": batch})

    with pytest.raises(
        PlanError, match="a global batch of 1 sample has no answer to another prompt"
    ):
        resolve_batch(config({}, global_samples=1), 1)
    assert resolve_batch(config({}), 1).global_samples == 2, "chosen"
    apo = {"loss": "apo_zero_unpaired"}
    assert resolve_batch(config(apo), 1).global_samples == 1


class OneLabel:
    """A token cache of three bad answers."""

    def __len__(self) -> int:
        return 3

    def meta(self, sample: int) -> dict[str, bool]:
        return {"good": False}


def test_a_mistake_is_one_line() -> None:
    encoder = JudgedRows(tokenizer(), data())
    with pytest.raises(DataError, match="row 1: `label` is 'fine', true or false is wanted"):
        encoder.encode(Row("row 1", {**ROWS[0], "label": "fine"}))
    with pytest.raises(DataError, match="`completion` is empty"):
        encoder.encode(Row("row 1", {**ROWS[0], "completion": " "}))
    with pytest.raises(ConfigError, match=r"data\.learn_on"):
        JudgedRows(tokenizer(), data(learn_on="all"))
    with pytest.raises(DataError, match="are the same answer"):
        split_pair({"prompt": "q", "chosen": "a", "rejected": "a"}, "row 1")
    with pytest.raises(DataError, match="all 3 training rows have label false"):
        require_both_labels(OneLabel())


USER, SAY, BAD_SAY = (
    {"role": role, "content": text}
    for role, text in (("user", "q"), ("assistant", "a"), ("assistant", "b"))
)
ALIKE = {"prompt": "q", "completion": "a", "label": True}
PAIR = [ALIKE, {"prompt": "q", "completion": "b", "label": False}]
TALKS = [{"prompt": [USER], "completion": [each], "label": each is SAY} for each in (SAY, BAD_SAY)]
SHAPES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "judged": ({"prompt": "q", "completion": "a", "label": True}, [ALIKE]),
    "number": ({"prompt": "q", "completion": "a", "label": 1}, [ALIKE]),
    "messages": ({"messages": [USER, SAY], "label": True}, TALKS[:1]),
    "alpaca": ({"instruction": "q", "output": "a", "kto_tag": "true"}, [ALIKE]),
    "sharegpt": (
        {
            "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}],
            "kto_tag": True,
        },
        TALKS[:1],
    ),
    "pair": ({"prompt": "q", "chosen": "a", "rejected": "b"}, PAIR),
    "pair with a label of another kind": (
        {"prompt": "q", "chosen": "a", "rejected": "b", "label": 0},
        PAIR,
    ),
    "pair of questions": ({"question": "q", "Chosen": "a", "Rejected": "b"}, PAIR),
    "verdict": ({"prompt": "q", "response_a": "b", "response_b": "a", "winner": "model_b"}, PAIR),
    "conversations": ({"chosen": [USER, SAY], "rejected": [USER, BAD_SAY]}, TALKS),
    "repeated prompt": ({"prompt": "q", "chosen": [USER, SAY], "rejected": [USER, BAD_SAY]}, TALKS),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_and_pairs_are_judged_answers(shape: str, tmp_path: Path) -> None:
    row, wanted = SHAPES[shape]
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    found = list(read_rows(FileSource(path="rows.jsonl"), tmp_path, JUDGED_FORMS))
    assert [each.values for each in found] == wanted and not any(each.plain for each in found)


def test_pairs_by_mapped_columns_and_without_a_prompt(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "q", "better": "a", "worse": "b"}) + "\n")
    columns = {"prompt": "q", "chosen": "better", "rejected": "worse"}
    source = FileSource.model_validate({"path": "rows.jsonl", "columns": columns})
    assert [row.values for row in read_rows(source, tmp_path, JUDGED_FORMS)] == PAIR
    (tmp_path / "named.jsonl").write_text(
        json.dumps({"q": "q", "chosen": "a", "rejected": "b"}) + "\n"
    )
    source = FileSource.model_validate({"path": "named.jsonl", "columns": {"prompt": "q"}})
    assert [row.values for row in read_rows(source, tmp_path, JUDGED_FORMS)] == PAIR
    (tmp_path / "texts.jsonl").write_text(
        json.dumps({"chosen": "one two a", "rejected": "one two b"}) + "\n"
    )
    rows = list(read_rows(FileSource(path="texts.jsonl"), tmp_path, JUDGED_FORMS))
    assert [(row.values["prompt"], row.values["completion"], row.plain) for row in rows] == [
        ("one two", " a", True),
        ("one two", " b", True),
    ]
    # Such texts are taken as they are: the chat template's tokens are not among them.
    text = tokenizer()
    encoded = JudgedRows(text, data()).encode(rows[0])
    assert text.decode(encoded.segments[0].tokens[:-1]) == "one two a"


def prepared(folder: Path, held_out: int) -> DataPlan:
    """The rows of `folder`, some of them held out."""
    tokenizer().save_pretrained(folder / "tokenizer")
    sections = {
        "train": "rows.jsonl",
        "max_length": 64,
        "holdout": held_out,
        "cache_dir": str(folder),
    }
    config = Config.model_validate(
        {"model": {"id": "m"}, "algorithm": "kto", "data": sections, "optimizer": {"lr": 1e-3}}
    )
    return prepare(config, str(folder / "tokenizer"), folder)


@pytest.mark.parametrize("held_out", [2, 3, 1])
def test_both_answers_of_a_pair_are_held_out(tmp_path: Path, held_out: int) -> None:
    """A prompt is either trained on or held out; at least one prompt is."""
    pairs = [{"prompt": f"{n} + 1", "chosen": str(n + 1), "rejected": "no"} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    made = prepared(tmp_path, held_out)
    prompts = []
    for folder in (made.train_cache, made.eval_caches[""]):
        cache = TokenCache.open(Path(folder))
        metas = [cache.meta(sample) for sample in range(len(cache))]
        prompts.append([meta["prompt"] for meta in metas if meta is not None])
    trained, held = prompts
    assert len(trained) == 10 and len(held) == 2
    assert not set(trained) & set(held)


def test_answers_to_one_prompt_alone_cannot_be_held_out(tmp_path: Path) -> None:
    rows = [{"prompt": "1 + 1", "completion": str(n), "label": n == 2} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(DataError, match="all 6 rows are answers to held-out prompts"):
        prepared(tmp_path, 2)
