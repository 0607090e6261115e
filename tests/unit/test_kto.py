"""KTO: losses, figures and gradients of eight fixed answers equal those of TRL's KTOTrainer to 1e-5, however they are cut.

The numbers are those of `tests/reference/kto_trl.json`; TRL's own tokeniser calls, collators, pairing and models made them.
"""

from __future__ import annotations

import json
from collections import defaultdict
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
from drumline.data.encode import JudgedRowEncoder
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

REFERENCE = Path(__file__).parents[1] / "reference" / "kto_trl.json"
TRL: dict[str, Any] = json.loads(REFERENCE.read_text())
ROWS = unpaired()
CLOSE = {"rel": 1e-5, "abs": 1e-5}
APO: dict[str, Any] = {"loss": "apo_zero_unpaired"}


def data(**keys: Any) -> DataConfig:
    source = {"kind": "file", "path": "unused"}
    return DataConfig.model_validate(
        {
            "train": [source],
            "max_length": 128,
            **keys,
        }
    )


def config_of(algorithm: dict[str, Any], **sections: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"id": "a/b"},
            "data": {"train": ["rows.jsonl"], "max_length": 8},
            "algorithm": {"kind": "kto", **algorithm},
            **sections,
        }
    )


def batches(cuts: list[list[int]], before: dict[int, int] | None = None) -> list[Any]:
    """-1: a filler. The sample before the first is the last; `before` has others."""
    encoder = JudgedRowEncoder(tokenizer(), data())
    segments: list[Any] = []
    metas: list[Any] = []
    previous_of = {-1: -1}
    for index, row in enumerate(ROWS):
        encoded = encoder.encode(Row(f"row {index}", row))
        segments.append([(side.tokens, side.learn) for side in encoded.segments])
        metas.append(encoded.meta)
        previous_of[index] = (index - 1) % len(ROWS)

    previous_of |= before or {}
    cache = SimpleNamespace(segments=segments.__getitem__, meta=metas.__getitem__)
    micro_batches = []
    for ids in cuts:
        previous = [previous_of[sample] for sample in ids]
        micro_batches.append(
            collate_mismatched(
                cache,
                ids,
                previous,
                0,
                None,
                128,
            )
        )

    return micro_batches


def read(
    learner: Any,
    batch: Any,
    what: Any,
) -> torch.Tensor:
    found: list[torch.Tensor] = []

    def kept(outputs: Any, b: Any) -> LossOut:
        found.append(what(outputs, b))
        return LossOut(found[0].sum())

    with torch.no_grad():
        ForwardWithObjective(learner)(batch, kept)

    return found[0]


def spec_of(options: dict[str, Any]) -> KTOConfig:
    own = {name: value for name, value in options.items() if name != "loss_type"}
    return KTOConfig(
        **own,
        loss=options.get("loss_type", "kto"),
        loss_chunk=16,
    )


WHOLE = [list(range(8))]
CUT = [
    [3, 0, -1],
    [7, 6, 1],
    [2, 5, 4],
]


def with_reference(
    batch: Any,
    reference: Any,
    algorithm: Any,
) -> Any:
    """Return the batch with what the reference says about both of its answers."""
    own = read(reference, batch, algorithm.score)
    mismatched = read(reference, batch.mismatched, algorithm.score)
    return replace(batch, reference_B=own, first_reference_B=mismatched)


def first_numbers(
    policy: Any,
    micro_batches: list[Any],
    algorithm: Any,
) -> FirstPassNumbers:
    numbers = []
    for batch in micro_batches:
        of_batch = read(policy, algorithm.first_batch(batch), algorithm.first_pass)
        numbers.append(of_batch[batch.real_P > 0])
    return FirstPassNumbers(torch.cat(numbers))


@pytest.mark.slow
@pytest.mark.parametrize("cuts", [WHOLE, CUT], ids=["whole", "cut"])
@pytest.mark.parametrize("name", TRL["cases"])
def test_losses_figures_and_gradients_are_trls(name: str, cuts: list[list[int]]) -> None:
    from transformers import LlamaForCausalLM

    case = TRL["cases"][name]
    algorithm = spec_of(case["options"]).build()
    policy, reference = (model(LlamaForCausalLM, seed) for seed in case["seeds"])
    micro_batches = []
    for batch in batches(cuts):
        micro_batches.append(with_reference(batch, reference, algorithm))

    if algorithm.first_pass is not None:
        first = first_numbers(policy, micro_batches, algorithm)
        micro_batches = [replace(batch, first=first) for batch in micro_batches]

    sums: dict[str, float] = defaultdict(float)
    for batch in micro_batches:
        loss_sum, told = ForwardWithObjective(policy)(batch, algorithm.objective)
        (loss_sum / len(ROWS)).backward()
        sums["loss"] += loss_sum.item()
        for key, value in told.items():
            sums[key] += float(value)

    figures = algorithm.metrics(sums)

    assert figures.pop("loss") == pytest.approx(case["loss"], **CLOSE)
    assert figures == pytest.approx(case["figures"], **CLOSE)

    close(gradients(policy), case["gradients"])


@pytest.mark.parametrize(
    "spec",
    [
        KTOConfig(),
        KTOConfig(loss="apo_zero_unpaired"),
        DPOConfig(),
        DPOConfig(loss="aot"),
    ],
    ids=repr,
)
def test_a_first_pass_is_planned(spec: AlgorithmSpec) -> None:
    assert (spec.build().first_pass is not None) == bool(spec.extra_forwards)
    is_kto = isinstance(spec, KTOConfig) and spec.loss == "kto"
    assert spec.needs_mismatched_pairs == is_kto


def test_a_traced_batch_is_one_of_the_objective() -> None:
    plan: Any = None
    batch = KTOConfig().traced_batch(plan, 3, 5, 0)
    outputs = SimpleNamespace(log_probs=lambda targets, _: (torch.zeros(targets.shape), None))
    assert KTOConfig().build().objective(outputs, batch).sums["good"] == 3


def test_where_the_reference_comes_from() -> None:
    def found(algorithm: dict[str, Any], **sections: Any) -> str:
        config = config_of(algorithm, **sections)
        return config.algorithm.reference_of(config)

    assert found({}) == "live"
    assert found({}, adapter={"kind": "lora"}) == "adapter"
    assert found(APO) == "precomputed"
    # The planner counts these.
    assert KTOConfig().reference_forwards == 2
    assert KTOConfig(**APO).reference_forwards == 1
    assert DPOConfig(loss="aot").reference_forwards == 1

    with pytest.raises(ValidationError, match="precomputed requires loss: apo_zero_unpaired"):
        KTOConfig(reference="precomputed")


def test_a_mismatched_row_has_its_own_prompt_and_the_answer_before_it() -> None:
    (batch,) = batches([[0, 1]])
    text = tokenizer()
    mismatched = batch.mismatched
    for index, before in ((0, 7), (1, 0)):
        ids = mismatched.input_ids_BT[index, : mismatched.lengths_B[index]]
        row = text.decode(ids)
        assert ROWS[index]["prompt"][0]["content"] in row
        assert ROWS[before]["completion"][0]["content"] in row

    assert batch.token_weights().sum(1).tolist() == [1, 1]
    assert batch.weight == 2


GOOD = [True, 1, "true", "1", "Good"]
BAD = [False, 0, "False", "0", "no"]


@pytest.mark.parametrize("label", [*GOOD, *BAD], ids=repr)
def test_labels(label: Any) -> None:
    row = Row("row 1", {**ROWS[0], "label": label})
    encoded = JudgedRowEncoder(tokenizer(), data()).encode(row)
    assert encoded.meta["good"] == (label in GOOD)


def test_answers_to_a_prompt_share_its_digest_however_they_are_cut() -> None:
    content = ROWS[0]["completion"][0]["content"]
    longer = [{"role": "assistant", "content": content * 3}]
    encoder = JudgedRowEncoder(tokenizer(), data(max_length=24, truncation="left"))

    def digest(row: dict[str, Any]) -> Any:
        return encoder.encode(Row("row", row)).meta["prompt"]

    assert digest({**ROWS[0], "completion": longer}) == digest(ROWS[0])
    assert digest(ROWS[1]) != digest(ROWS[0])


def test_a_prompt_without_another_one_adds_nothing_to_the_kl() -> None:
    algorithm = KTOConfig().build()
    (batch,) = batches([[0, 1]], {1: -1})
    assert batch.weight == 2
    assert batch.mismatched.real_P.tolist() == [1, 0]

    scores = SimpleNamespace(log_probs=lambda *_: (torch.tensor([[4.0], [9.0]]), None))
    zeros_B = torch.zeros(2, dtype=torch.float64)
    mismatched = replace(batch.mismatched, reference_B=zeros_B)
    numbers_NK = algorithm.first_pass(scores, mismatched)
    both = replace(batch, first=FirstPassNumbers(numbers_NK))
    second = replace(batch, first=FirstPassNumbers(numbers_NK[1:]))

    assert algorithm.baseline(both) == 4
    assert algorithm.baseline(second) == 0


def test_a_batch_of_one_sample_is_refused_for_the_kl_alone() -> None:
    refusal = "a global batch of 1 sample has no answer to another prompt"
    with pytest.raises(PlanError, match=refusal):
        resolve_batch(config_of({}, batch={"global_samples": 1}), 1)

    chosen = resolve_batch(config_of({}), 1)
    of_apo = resolve_batch(config_of(APO), 1)

    assert chosen.global_samples == 2
    assert of_apo.global_samples == 1


class OneLabel:
    """A token cache of three bad answers."""

    def __len__(self) -> int:
        return 3

    def meta(self, sample: int) -> dict[str, bool]:
        return {"good": False}


def test_a_mistake_is_one_line() -> None:
    encoder = JudgedRowEncoder(tokenizer(), data())
    with pytest.raises(DataError, match="row 1: `label` is 'fine', true or false is wanted"):
        encoder.encode(Row("row 1", {**ROWS[0], "label": "fine"}))
    with pytest.raises(DataError, match="`completion` is empty"):
        encoder.encode(Row("row 1", {**ROWS[0], "completion": " "}))
    with pytest.raises(ConfigError, match=r"data\.learn_on"):
        JudgedRowEncoder(tokenizer(), data(learn_on="all"))
    with pytest.raises(DataError, match="are the same answer"):
        split_pair(
            {
                "prompt": "q",
                "chosen": "a",
                "rejected": "a",
            },
            "row 1",
        )
    with pytest.raises(DataError, match="all 3 training rows have label false"):
        require_both_labels(OneLabel())


USER = {"role": "user", "content": "q"}
SAY = {"role": "assistant", "content": "a"}
BAD_SAY = {"role": "assistant", "content": "b"}
ALIKE = {
    "prompt": "q",
    "completion": "a",
    "label": True,
}
PAIR = [
    ALIKE,
    {
        "prompt": "q",
        "completion": "b",
        "label": False,
    },
]
GOOD_TALK = {
    "prompt": [USER],
    "completion": [SAY],
    "label": True,
}
BAD_TALK = {
    "prompt": [USER],
    "completion": [BAD_SAY],
    "label": False,
}
TALKS = [GOOD_TALK, BAD_TALK]
HUMAN = {"from": "human", "value": "q"}
GPT = {"from": "gpt", "value": "a"}
SHAPES: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "judged": (
        {
            "prompt": "q",
            "completion": "a",
            "label": True,
        },
        [ALIKE],
    ),
    "number": (
        {
            "prompt": "q",
            "completion": "a",
            "label": 1,
        },
        [ALIKE],
    ),
    "messages": ({"messages": [USER, SAY], "label": True}, [GOOD_TALK]),
    "alpaca": (
        {
            "instruction": "q",
            "output": "a",
            "kto_tag": "true",
        },
        [ALIKE],
    ),
    "sharegpt": (
        {"conversations": [HUMAN, GPT], "kto_tag": True},
        [GOOD_TALK],
    ),
    "pair": (
        {
            "prompt": "q",
            "chosen": "a",
            "rejected": "b",
        },
        PAIR,
    ),
    "pair with a label of another kind": (
        {
            "prompt": "q",
            "chosen": "a",
            "rejected": "b",
            "label": 0,
        },
        PAIR,
    ),
    "pair of questions": (
        {
            "question": "q",
            "Chosen": "a",
            "Rejected": "b",
        },
        PAIR,
    ),
    "verdict": (
        {
            "prompt": "q",
            "response_a": "b",
            "response_b": "a",
            "winner": "model_b",
        },
        PAIR,
    ),
    "conversations": ({"chosen": [USER, SAY], "rejected": [USER, BAD_SAY]}, TALKS),
    "repeated prompt": (
        {
            "prompt": "q",
            "chosen": [USER, SAY],
            "rejected": [USER, BAD_SAY],
        },
        TALKS,
    ),
}


def write_rows(folder: Path, *rows: dict[str, Any]) -> None:
    lines = [json.dumps(row) + "\n" for row in rows]
    (folder / "rows.jsonl").write_text("".join(lines))


def judged_rows(
    folder: Path,
    row: dict[str, Any],
    **source: Any,
) -> list[Row]:
    """Return the judged answers of a file of this one row."""
    write_rows(folder, row)
    file = FileSource.model_validate({"path": "rows.jsonl", **source})
    return list(read_rows(file, folder, JUDGED_FORMS))


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_and_pairs_are_judged_answers(shape: str, tmp_path: Path) -> None:
    row, wanted = SHAPES[shape]
    found = judged_rows(tmp_path, row)
    assert [each.values for each in found] == wanted
    assert not any(each.skip_template for each in found)


def test_pairs_by_mapped_columns_and_without_a_prompt(tmp_path: Path) -> None:
    columns = {
        "prompt": "q",
        "chosen": "better",
        "rejected": "worse",
    }
    mapped = judged_rows(
        tmp_path,
        {
            "q": "q",
            "better": "a",
            "worse": "b",
        },
        columns=columns,
    )
    assert [row.values for row in mapped] == PAIR

    pair = {
        "q": "q",
        "chosen": "a",
        "rejected": "b",
    }
    named = judged_rows(tmp_path, pair, columns={"prompt": "q"})
    assert [row.values for row in named] == PAIR

    good, bad = judged_rows(tmp_path, {"chosen": "one two a", "rejected": "one two b"})
    assert good.skip_template is True
    assert bad.skip_template is True
    assert good.values["prompt"] == bad.values["prompt"] == "one two"
    assert good.values["completion"] == " a"
    assert bad.values["completion"] == " b"

    # Such texts are taken as they are: the chat template's tokens are not among them.
    text = tokenizer()
    encoded = JudgedRowEncoder(text, data()).encode(good)
    assert text.decode(encoded.segments[0].tokens[:-1]) == "one two a"


def prepared(folder: Path, held_out: int) -> DataPlan:
    """The rows of `folder`, some of them held out."""
    weights = folder / "tokenizer"
    tokenizer().save_pretrained(weights)
    sections = {
        "train": "rows.jsonl",
        "max_length": 64,
        "holdout": held_out,
        "cache_dir": str(folder),
    }
    config = config_of({}, data=sections, optimizer={"lr": 1e-3})
    return prepare(config, str(weights), folder)


def prompts_of(folder: str) -> list[Any]:
    cache = TokenCache.open(Path(folder))
    prompts = []
    for sample in range(len(cache)):
        meta = cache.meta(sample)
        if meta is not None:
            prompts.append(meta["prompt"])

    return prompts


@pytest.mark.parametrize("held_out", [2, 3, 1])
def test_both_answers_of_a_pair_are_held_out(tmp_path: Path, held_out: int) -> None:
    """A prompt is either trained on or held out; at least one prompt is."""
    pairs = []
    for number in range(6):
        prompt = f"{number} + 1"
        pairs.append(
            {
                "prompt": prompt,
                "chosen": str(number + 1),
                "rejected": "no",
            }
        )

    write_rows(tmp_path, *pairs)
    made = prepared(tmp_path, held_out)
    trained = prompts_of(made.train_cache)
    held = prompts_of(made.eval_caches[""])

    assert len(trained) == 10
    assert len(held) == 2
    assert not set(trained) & set(held)


def test_answers_to_one_prompt_alone_cannot_be_held_out(tmp_path: Path) -> None:
    rows = []
    for number in range(6):
        rows.append(
            {
                "prompt": "1 + 1",
                "completion": str(number),
                "label": number == 2,
            }
        )
    write_rows(tmp_path, *rows)
    with pytest.raises(DataError, match="all 6 rows are answers to held-out prompts"):
        prepared(tmp_path, 2)
