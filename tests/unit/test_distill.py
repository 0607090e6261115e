"""The losses of distillation against their formulas, written out entry by entry."""

from __future__ import annotations

import contextlib
import errno
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drumline.config.algorithm import DivergenceKind
from drumline.config.load import load_text
from drumline.errors import ConfigError, EnvironmentFault, ModelError
from drumline.models.choices import (
    Choices,
    choice_log_probs,
    linear_choice_log_probs,
    linear_top_choices,
    top_choices,
)
from drumline.models.divergence import Divergence
from drumline.models.head import compute_outputs, trunk_and_head
from drumline.models.losses import LinearHead
from drumline.models.teaching import Comparison, TeacherStates
from drumline.plan.plan import Plan
from drumline.planner.cost.compute import scoring_flops
from drumline.planner.cost.memory import memory
from drumline.train import teacher_table
from drumline.train.replan import planning_question
from tests.harness import write_config
from tests.plans import resolve_plan
from tests.tiny import read_model, tiny_model_dir
from tests.unit.test_planner_times import cluster

FP32_BYTES = 4
TOKENS = 11
WIDTH = 6
WIDTH_OF_TEACHER = 9
ENTRIES = 17
ROWS = torch.tensor([0, 1, 3, 4, 7, 8, 10])
KINDS: tuple[DivergenceKind, ...] = ("forward_kl", "reverse_kl", "jsd")
Distribution = Sequence[float]


def plain_kl(first: Distribution, second: Distribution) -> float:
    """KL(first ‖ second), a sum over the entries."""
    total = 0.0
    for p, q in zip(first, second, strict=True):
        total += p * math.log(p / q)
    return total


def plain_divergence(
    kind: DivergenceKind, beta: float, student: Distribution, teacher: Distribution
) -> float:
    """Agarwal et al. 2024, section 2: P is the teacher, Q the student.

    D_JSD(β)(P ‖ Q) = β KL(P ‖ β P + (1 − β) Q) + (1 − β) KL(Q ‖ β P + (1 − β) Q)
    """
    if kind == "forward_kl":
        return plain_kl(teacher, student)
    if kind == "reverse_kl":
        return plain_kl(student, teacher)
    mixture = []
    for q, p in zip(student, teacher, strict=True):
        mixture.append(beta * p + (1 - beta) * q)
    return beta * plain_kl(teacher, mixture) + (1 - beta) * plain_kl(student, mixture)


def with_others(distribution: Distribution, chosen: Sequence[int]) -> list[float]:
    """The probabilities of the chosen entries, and of all others together."""
    probabilities = [distribution[entry] for entry in chosen]
    return [*probabilities, 1 - sum(probabilities)]


class Models:
    """Random hidden states and heads of a student, whose tensors learn, and of a teacher."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        draw = torch.Generator().manual_seed(3)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64).to(dtype)

        self.hidden = normal(TOKENS, WIDTH).requires_grad_()
        self.weight = normal(ENTRIES, WIDTH).requires_grad_()
        self.bias = normal(ENTRIES).requires_grad_()
        self.head = LinearHead(self.weight, self.bias)
        states = normal(len(ROWS), WIDTH_OF_TEACHER)
        self.teacher = TeacherStates(states, LinearHead(normal(ENTRIES, WIDTH_OF_TEACHER)))

    def logits(self) -> Tensor:
        return self.head.logits(self.hidden)

    def teacher_logits(self) -> Tensor:
        return self.teacher.head.logits(self.teacher.hidden_ME)

    def distributions(self, temperature: float) -> list[tuple[list[float], list[float]]]:
        """The probabilities of student and teacher at each token."""
        student = (self.logits()[ROWS] / temperature).softmax(-1)
        teacher = (self.teacher_logits() / temperature).softmax(-1)
        return list(zip(student.tolist(), teacher.tolist(), strict=True))

    def gradients(self, loss: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(loss, [self.hidden, self.weight, self.bias]))


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("beta", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("kind", KINDS)
def test_the_whole_vocabulary_by_the_formulas_of_the_paper(
    kind: DivergenceKind, beta: float, temperature: float
) -> None:
    models = Models(torch.float32)
    expected = 0.0
    expected_kl = 0.0
    for student, teacher in models.distributions(temperature):
        expected += plain_divergence(kind, beta, student, teacher)
        expected_kl += plain_kl(teacher, student)

    comparison = Comparison(Divergence(kind, beta), temperature, chunk=3)
    loss, kl = comparison.sum_with_head(models.hidden, models.head, ROWS, models.teacher)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    assert kl.item() == pytest.approx(expected_kl, rel=1e-5)
    whole, _ = comparison.sum_with_logits(models.logits(), ROWS, models.teacher)
    assert whole.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_likeliest_entries_and_all_others_by_the_formulas(kind: DivergenceKind) -> None:
    models = Models()
    choices = linear_top_choices(
        models.teacher.hidden_ME,
        models.teacher.head,
        torch.arange(len(ROWS)),
        k=4,
        limit=ENTRIES,
        chunk=3,
        temperature=0.8,
    )
    expected = 0.0
    both = zip(models.distributions(0.8), choices.ids_MK.tolist(), strict=True)
    for (student, teacher), chosen in both:
        likeliest = sorted(range(ENTRIES), key=lambda entry: -teacher[entry])
        assert chosen == likeliest[:4]
        expected += plain_divergence(
            kind, 0.3, with_others(student, chosen), with_others(teacher, chosen)
        )

    comparison = Comparison(Divergence(kind, 0.3), temperature=0.8, chunk=3)
    loss, _ = comparison.sum_with_head(models.hidden, models.head, ROWS, choices)
    assert loss.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("chunk", [0, 3, 100])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [None, 4])
def test_gradients_in_chunks_are_those_of_whole_logits(
    kind: DivergenceKind, chunk: int, k: int | None
) -> None:
    models = Models()
    teacher: Choices | TeacherStates = models.teacher
    if k is not None:
        teacher = top_choices(models.teacher_logits(), k, ENTRIES, 1.3)
    comparison = Comparison(Divergence(kind, 0.2), 1.3, chunk)
    whole, whole_kl = comparison.sum_with_logits(models.logits(), ROWS, teacher)
    expected = models.gradients(whole / 5)
    loss, kl = comparison.sum_with_head(models.hidden, models.head, ROWS, teacher)
    torch.testing.assert_close(loss, whole)
    torch.testing.assert_close(kl, whole_kl)
    for mine, theirs in zip(models.gradients(loss / 5), expected, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_tiny_share_of_all_others_keeps_its_digits() -> None:
    """fp32 would lose them in 1 minus the sum of the chosen ones."""
    logits = torch.zeros(1, ENTRIES)
    logits[0, 5] = 40.0
    ids = torch.tensor([[5, 2]])
    expected = choice_log_probs(logits.double(), ids)
    weight = logits.T.clone().requires_grad_()
    found = linear_choice_log_probs(
        torch.ones(1, 1), LinearHead(weight), torch.tensor([0]), ids, chunk=1
    )
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(found[0, 2], weight)
    # All others share it equally, and the likeliest entry takes it away from them.
    assert gradient[5].item() == pytest.approx(-1.0)
    assert gradient[0].item() == pytest.approx(1 / (ENTRIES - 2), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_large_gradients_of_logits_stay_finite_in_fp16(kind: DivergenceKind) -> None:
    """At a temperature of 0.05 they are up to 20, and in reverse KL larger still."""
    low = Models(torch.float16)
    precise = Models(torch.float32)
    comparison = Comparison(Divergence(kind), temperature=0.05, chunk=4)
    gradients = []
    for models in (low, precise):
        loss, _ = comparison.sum_with_head(models.hidden, models.head, ROWS, models.teacher)
        gradients.append(models.gradients(loss / TOKENS))
    for mine, theirs in zip(*gradients, strict=True):
        # The temperature makes twenty times as much of what rounding takes from logits.
        difference = (mine.float() - theirs).norm()
        assert difference <= 0.25 * theirs.norm()


def test_a_cache_that_cannot_be_written_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another user's."""

    def refuse(root: Path) -> contextlib.AbstractContextManager[Path]:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(teacher_table, "temporary_folder", refuse)
    with (
        pytest.raises(EnvironmentFault, match="cannot be written: Permission denied") as refused,
        teacher_table._table_folder(tmp_path / "teachers" / "key"),
    ):
        pass
    assert "set data.cache_dir" in refused.value.line()


def test_a_cache_without_samples_has_a_table_without_rows(tmp_path: Path) -> None:
    folder = tmp_path / "table"
    folder.mkdir()
    arrays = teacher_table.TableArrays.create(folder, tokens=0, choices=1)
    arrays.ids.flush()
    arrays.log_probs.flush()
    empty: Any = SimpleNamespace(target_counts=np.zeros(0, np.int64))
    table = teacher_table.ChoiceTable.open(folder, empty, top_k=4)
    assert table is not None
    assert table.choices_of([-1], "cpu").ids_MK.shape == (0, 1)


def test_what_is_no_number_is_kept_in_no_table() -> None:
    """fp16 overflows in models that were trained in bf16. Later runs would find the table."""
    packed = np.zeros((3, 5), np.float32)
    teacher_table._require_finite(packed)
    teacher_table._require_finite(packed[:0])
    packed[1, 4] = np.nan
    with pytest.raises(ModelError, match="NaN or infinite") as refused:
        teacher_table._require_finite(packed)
    assert "algorithm.teacher" in refused.value.line()


def test_a_student_has_no_row_for_the_padding_of_its_teacher() -> None:
    models = Models(torch.float32)
    padded = torch.cat((models.teacher.head.weight_VD, torch.ones(3, WIDTH_OF_TEACHER)))
    teacher = TeacherStates(models.teacher.hidden_ME, LinearHead(padded))
    comparison = Comparison(Divergence("reverse_kl"), chunk=4)
    loss, _ = comparison.sum_with_head(models.hidden, models.head, ROWS, teacher)
    expected, _ = comparison.sum_with_head(models.hidden, models.head, ROWS, models.teacher)
    torch.testing.assert_close(loss, expected)
    logits = teacher.head.logits(teacher.hidden_ME)
    assert int(top_choices(logits, 30, ENTRIES).ids_MK.max()) < ENTRIES


ROW = "data: {train: [{kind: file, path: a.jsonl}]}"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("top_k: 0", "set log_probs: live"),
        ("beta: 0.2", "beta requires divergence: jsd"),
        ("divergence: jsd, beta: 1", "less than 1"),
    ],
)
def test_options_that_have_no_meaning_are_refused(options: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(ROW, [f"algorithm={{kind: distill, teacher: some/model, {options}}}"])
    assert line in error.value.line()


def test_a_precomputed_teacher_needs_all_rows() -> None:
    stream = ["data.stream=true", "run.steps=3"]
    algorithm = "algorithm={kind: distill, teacher: some/model, log_probs: precomputed}"
    with pytest.raises(ConfigError) as error:
        load_text(ROW, [algorithm, *stream])
    assert "algorithm.log_probs: precomputed (live does not)" in error.value.line()


def test_the_teacher_is_an_auxiliary_model() -> None:
    config = load_text(ROW, ["algorithm={kind: distill, teacher: some/model}"])
    models = config.algorithm.auxiliary_models(config)
    assert list(models) == ["teacher"]
    assert models["teacher"].model.id == "some/model"
    assert config.algorithm.reference_of(config) == "precomputed"


def planned(folder: Path, log_probs: str, top_k: int) -> Plan:
    """The plan of a run in one process, whose teacher is deeper than its student."""
    folder.mkdir()
    model = tiny_model_dir(folder / "model")
    teacher = tiny_model_dir(folder / "teacher", layers=4)
    algorithm = {
        "kind": "distill",
        "teacher": {"id": str(teacher)},
        "log_probs": log_probs,
        "top_k": top_k,
    }
    path = write_config(folder, model, algorithm=algorithm, strategy={"kind": "single"})
    return resolve_plan(path, world_size=1)


def test_a_teacher_is_planned(tmp_path: Path) -> None:
    """One that is live is held all the time, and one that is asked before only until then."""
    live = planned(tmp_path / "live", "live", 0)
    before = planned(tmp_path / "before", "precomputed", 8)
    facts = planning_question(live).facts
    student = FP32_BYTES * facts.parameters
    teacher = FP32_BYTES * facts.roles["teacher"].parameters
    held = memory(live, facts, cluster())
    assert held.parameters == student + teacher
    assert "teacher" not in held.phases

    freed = memory(before, planning_question(before).facts, cluster())
    assert freed.parameters == student
    optimizer = 2 * student
    assert freed.phases["teacher"] == student + max(teacher, optimizer)
    assert scoring_flops(live, facts) > 0
    assert scoring_flops(before, facts) == 0


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp2", 2)])
def test_what_a_teacher_says_of_all_micro_batches_is_counted(
    tmp_path: Path, strategy: str, ranks: int
) -> None:
    """Hidden states of 32 numbers a token, or the ids and log-probs of 8 tokens and the rest.

    FSDP2 frees a gathered head after the forward, so a copy of it is kept.
    """
    bytes_of_phase = {}
    for top_k in (0, 8):
        planned(tmp_path / str(top_k), "live", top_k)
        overrides = [f"strategy={strategy}", f"algorithm.top_k={top_k}"]
        path = tmp_path / str(top_k) / "config.yaml"
        plan = resolve_plan(path, *overrides, world_size=ranks)
        facts = planning_question(plan).facts
        bytes_of_phase[top_k] = memory(plan, facts, cluster()).phases["clip"]
    batch = plan.batch
    tokens = batch.micro_batch * batch.accumulation * plan.config.data.max_length
    assert tokens == 4 * 96 / ranks
    states = FP32_BYTES * 32
    choices = 8 * 8 + FP32_BYTES * 9
    head = FP32_BYTES * 320 * 32 if strategy == "fsdp2" else 0
    assert bytes_of_phase[0] - bytes_of_phase[8] == tokens * (states - choices) + head


@pytest.mark.parametrize(("log_probs", "top_k"), [("live", 0), ("precomputed", 8)])
def test_a_step_is_traced_with_a_teacher_s_numbers(
    tmp_path: Path, log_probs: str, top_k: int
) -> None:
    plan = planned(tmp_path / "run", log_probs, top_k)
    batch = plan.config.algorithm.traced_batch(plan, rows=2, length=6, channels=3)
    tokens = len(batch.learned_M)
    if top_k:
        assert batch.teacher.ids_MK.shape == (tokens, top_k)
        assert batch.teacher.log_probs_ML.shape == (tokens, top_k + 1)
    else:
        assert batch.teacher.hidden_ME.shape == (tokens, 32)
    model = read_model(tmp_path / "run" / "model")
    outputs = compute_outputs(model, batch, trunk_and_head(model))
    loss = plan.config.algorithm.build().objective(outputs, batch).loss_sum
    loss.backward()
    assert torch.isfinite(loss)
