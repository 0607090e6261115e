"""`drumline.session` with models, optimizers and datasets of every sort: what is kept, what is the same on all ranks, what is refused."""

from __future__ import annotations

import copy
import math
import os
import random
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from drumline.config.strategy import CopyOptions
from drumline.data.samples import evaluation_batches, global_batches, read_samples
from drumline.dist.seeds import Draws
from drumline.engine.data_parallel import Replicated
from drumline.engine.transforms import apply_ddp
from drumline.errors import ModelError, PlanError, Preempted, UserError
from tests.checkpoint_ranks import run
from tests.distributed.setups import cases
from tests.harness import events
from tests.unit.test_session import BATCH, ROWS, build, collate, loss_of, session, sgd, stepped


class Shuffled(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        rows = list(range(12))
        random.shuffle(rows)
        return (row for row in rows if torch.rand(()) >= 0)


def loader() -> Any:
    return torch.utils.data.DataLoader([*range(12)], batch_size=None, shuffle=True)


def seed_all(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)


def integers(rows: Any) -> list[int]:
    return [int(row) for row in rows]


def trained(
    dataset: Any,
    rank: int,
    position: int = 0,
    seed: int = 7,
) -> list[list[int]]:
    """Return the rows of each of this rank's batches of two passes."""
    seed_all(rank)
    used = Draws(seed).use
    found = []
    for parts in global_batches(
        dataset,
        BATCH,
        rank,
        position,
        2,
        None,
        used,
    ):
        found.append(integers(chain.from_iterable(parts)))
        seed_all(rank)  # as a step of the rank's own does

    return found


def evaluated(dataset: Any, rank: int) -> list[int]:
    found = []
    for rows, counts in evaluation_batches(
        dataset,
        3,
        rank,
        2,
        Draws(7).use,
    ):
        if counts:
            found.extend(integers(rows))
    return found


@pytest.mark.parametrize("make", [Shuffled, loader])
def test_what_a_dataset_draws_is_the_same_on_all_ranks_and_after_a_resume(
    make: Callable[[], Any],
) -> None:
    every_row = [*range(12)]
    first = trained(make(), 0)
    second = trained(make(), 1)
    for part in (slice(0, 3), slice(3, 6)):
        rows = chain(*first[part], *second[part])
        assert sorted(rows) == every_row

    assert first[:3] != first[3:]
    assert first != trained(make(), 0, seed=8)
    assert trained(make(), 0, position=8) == first[2:]

    rows = evaluated(make(), 0) + evaluated(make(), 1)
    assert sorted(rows) == every_row


def test_evaluation_draws_from_a_stream_of_its_own() -> None:
    torch.manual_seed(3)
    expected = torch.rand(())
    torch.manual_seed(3)
    list(
        evaluation_batches(
            Shuffled(),
            3,
            0,
            1,
            Draws(7).use,
        )
    )
    assert torch.rand(()) == expected


def test_samples_that_are_kept_are_the_same_in_each_process(tmp_path: Path) -> None:
    class Given:
        limit = None
        label = "mine"
        is_read_by_sources = False

        def rows(self, _: Path) -> Any:
            return iter(Shuffled())

    def kept(seed: int) -> list[int]:
        random.seed(seed)
        return [*read_samples([Given()], tmp_path, Draws(0).use)]  # type: ignore[list-item]

    assert kept(1) == kept(2)


class Net(nn.Module):
    """A batch norm that is frozen, a number, and a method beside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.norm = nn.BatchNorm1d(1)
        self.scale = 1.0
        self.norm.eval()

    def forward(self, inputs: torch.Tensor) -> Any:
        return self.norm(self.embed(inputs)) * self.scale

    def embed(self, inputs: torch.Tensor) -> Any:
        return self.layer(inputs)


@pytest.mark.slow
def test_modules_stay_in_their_mode(tmp_path: Path) -> None:
    with session(tmp_path) as s:
        model, _ = s.prepare(Net, sgd)
        assert model.training
        assert not model.norm.training
        s.evaluate(ROWS, collate, partial(loss_of, model))
        assert model.training
        assert model.layer.training
        assert not model.norm.training
    with session(tmp_path / "whole") as s:
        model, _ = s.prepare(lambda: Net().eval(), sgd)
        # A model that is in eval mode as a whole is trained.
        assert model.training
        assert model.norm.training


@pytest.mark.slow
def test_a_model_is_read_set_and_copied_as_the_module_is(tmp_path: Path) -> None:
    with session(tmp_path) as s:
        model, _ = s.prepare(Net, sgd)
        model.scale = 0.0
        assert model.module.scale == 0
        assert not model(torch.ones(2, 2)).any()
        del model.scale
        assert not hasattr(model, "scale")
        assert not hasattr(model, "__array__")
        assert model
        with pytest.raises(UserError, match="layer has weights, and the model is spread already"):
            model.layer = nn.Linear(2, 1)
        weight = model.layer.weight
        other = copy.deepcopy(model)
        assert type(other) is Net
        assert torch.equal(other.layer.weight, weight)
        assert other.layer is not model.layer
        averaged = torch.optim.swa_utils.AveragedModel(model)
        averaged.update_parameters(model)
        assert torch.equal(averaged.module.layer.weight, weight)
    with session(tmp_path / "list") as s:
        model, _ = s.prepare(lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), sgd)
        assert len(model) == 2
        assert model[1] is model.module[1]
        assert [*model] == [*model.module]


@pytest.mark.slow
def test_a_part_is_not_copied(tmp_path: Path) -> None:
    refusal = pytest.raises(UserError, match="make it a second model of prepare")
    with refusal, session(tmp_path, "fsdp2") as s:
        model, _ = s.prepare(build, sgd)
        copy.deepcopy(model)


def test_what_is_not_the_model_s_is_not_stepped(tmp_path: Path) -> None:
    centres = nn.Parameter(torch.zeros(3))

    def make(model: Any) -> Any:
        return torch.optim.SGD([*model.parameters(), centres], lr=0.1)

    refusal = pytest.raises(UserError, match="steps 1 parameters that are not the model's")
    with refusal, session(tmp_path) as s:
        s.prepare(build, make)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"max_grad_norm": -1}, "above 0"),
        ({"max_grad_norm": 0}, "above 0"),
        ({"lr": -1}, "lr is -1"),
    ],
)
def test_steps_that_would_train_uphill_or_not_at_all(
    tmp_path: Path,
    options: dict[str, float],
    what: str,
) -> None:
    with pytest.raises(UserError, match=what), session(tmp_path) as s:
        s.prepare(build, sgd)
        s.step(**options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["loss", "weight"])
def test_sums_of_measure_take_no_sum_s_place(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"a sum of the name '{name}'"), session(tmp_path) as s:
        model, _ = s.prepare(build, sgd)

        def measure(batch: Any) -> Any:
            loss, weight = loss_of(model, batch)
            return loss, weight, {name: torch.ones(())}

        s.evaluate(ROWS, collate, measure)


class Counting(torch.optim.Optimizer):
    """Its constructor takes more than its defaults; it keeps a number of each parameter, on which its rate hangs."""

    def __init__(
        self,
        parameters: Any,
        options: dict[str, float],
        kept: Any = None,
    ) -> None:
        super().__init__(parameters, {"lr": options["lr"]})
        self.decay = options["decay"]
        self.kept = kept

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state.setdefault("kept", self.kept)
                state["n"] = state.get("n", 0) + 1
                rate = group["lr"] * self.decay ** state["n"]
                parameter.add_(parameter.grad, alpha=-rate)


def counting(model: Any, kept: Any = None) -> Counting:
    return Counting(model.parameters(), {"lr": 0.1, "decay": 0.5}, kept)


def train(
    s: Any,
    model: Any,
    rows: Any = ROWS,
    **options: Any,
) -> None:
    """Train a model of a session on these rows."""
    for batch in s.batches(rows, collate, **options):
        s.backward(*loss_of(model, batch))
        s.step()


class Remembering(nn.Linear):
    calls = 0

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(inputs) / self.calls


def count(
    folder: Path,
    steps: int,
    **options: Any,
) -> list[float]:
    """Return weights that hang on the numbers that an optimizer and a module keep."""
    with session(folder, **options) as s:
        model, optimizer = s.prepare(lambda: Remembering(2, 1), counting)
        train(s, model, steps=steps)
        numbers = [state["n"] for state in optimizer.state.values()]
        assert numbers == [steps, steps]
        assert model.calls == steps
        return model.weight[0].tolist()


@pytest.mark.slow
def test_numbers_of_optimizers_and_states_of_modules_are_saved(tmp_path: Path) -> None:
    whole = count(tmp_path / "whole", 4)
    count(tmp_path / "parts", 2)
    assert count(tmp_path / "parts", 4, resume=True) == whole


def keeps_list(model: Any) -> Any:
    return counting(model, kept=[])


def sparse(model: Any) -> Any:
    return torch.optim.SparseAdam(model.parameters())


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (keeps_list, r"keeps a list of each parameter \(kept\)"),
        (sparse, "SparseAdam does not step a matrix by itself"),
    ],
    ids=["list", "sparse"],
)
def test_optimizers_that_no_checkpoint_has(
    tmp_path: Path,
    make: Any,
    what: str,
) -> None:
    with pytest.raises(PlanError, match=what), session(tmp_path) as s:
        s.prepare(build, make)


def test_a_state_that_no_checkpoint_has(tmp_path: Path) -> None:
    class Keeps(nn.Linear):
        def get_extra_state(self) -> Any:
            return torch.zeros(1)

    said = "get_extra_state of it gives what JSON does not have"
    with pytest.raises(ModelError, match=said), session(tmp_path) as s:
        s.prepare(lambda: Keeps(2, 1), sgd)


def adamw(model: Any) -> Any:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["single", pytest.param("zero1", marks=pytest.mark.slow)])
def test_statistics_of_a_step_that_is_none_are_put_back(tmp_path: Path, strategy: str) -> None:
    rows = list(ROWS)
    inputs, target = rows[5]
    rows[5] = (inputs * float("nan"), target)
    with session(tmp_path, strategy, on_nan="skip") as s:
        model, _ = s.prepare(lambda: nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1)), adamw)
        norm = model.module[0]
        means = []
        for batch in s.batches(
            rows,
            collate,
            steps=2,
            shuffle=False,
        ):
            s.backward(*loss_of(model, batch))
            s.step()
            means.append(norm.running_mean.clone())
        assert means[0].any()
        assert torch.equal(*means)
        assert norm.num_batches_tracked == 1


@pytest.mark.slow
def test_a_process_trains_under_zero_again(tmp_path: Path) -> None:
    """DeepSpeed keeps the groups that it has made, and those of the session before are gone."""
    for number in range(2):
        with session(tmp_path / str(number), "zero1") as s:
            model, _ = s.prepare(lambda: nn.Linear(2, 1), sgd)
            train(s, model, steps=2, shuffle=False)
            assert s.steps == 2


def losses_of(
    kind: str,
    model: Net,
    call: Any,
    inputs: torch.Tensor,
    last: bool,
) -> list[Any]:
    """Return the losses of a micro-batch, each from what its kind calls of the model."""
    if kind == "twice":
        one = call(inputs)
        other = call(inputs * 2)
        return [one.sum(), other.square().sum()]

    if kind == "none" and last:
        return []

    if kind == "method":
        return [model.embed(inputs).square().sum()]

    return [call(inputs).square().sum()]


def gradients_of(module: nn.Module) -> list[torch.Tensor]:
    return [each.grad for each in module.parameters() if each.grad is not None]


def flatten(tensors: list[torch.Tensor]) -> list[float]:
    return torch.cat([each.flatten() for each in tensors]).tolist()


def gradients(kind: str) -> tuple[list[float], list[float]]:
    """(as two ranks average them, the mean of what each has by itself) of two micro-batches."""
    torch.manual_seed(0)
    module = Net()
    alone = copy.deepcopy(module)
    group = dist.group.WORLD

    assert group is not None

    module.norm.requires_grad_(kind != "thaw")
    spread = Replicated(apply_ddp(module, CopyOptions(), group))

    def back(
        model: Net,
        call: Any,
        inputs: torch.Tensor,
        last: bool,
    ) -> None:
        model.norm.requires_grad_(kind != "thaw" or last)
        model.layer.bias.requires_grad_(kind != "freeze" or not last)
        for loss in losses_of(kind, model, call, inputs, last):
            with spread.backward_context(loss):
                loss.backward()

    for index in range(2):
        last = index == 1
        inputs = torch.arange(6.0).view(3, 2) + 10 * dist.get_rank() + index
        with spread.micro_batch(last=last):
            back(module, spread.train_module, inputs, last)
        back(alone, alone, inputs, last)

    expected = gradients_of(alone)
    for gradient in expected:
        dist.all_reduce(gradient)
        gradient /= 2

    return flatten(gradients_of(module)), flatten(expected)


# Losses of `twice` and `freeze` come from calls, too.
AGAIN = ("call", "method", "none", "thaw")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", cases(("call", "method", "twice", "none", "freeze", "thaw"), AGAIN)
)
def test_copies_average_whatever_a_loss_comes_from(kind: str) -> None:
    (mine, expected), (other, _) = run(2, gradients, kind)
    assert mine == other == pytest.approx(expected)


def be_rank() -> None:
    rank = str(dist.get_rank())
    os.environ["RANK"] = rank
    os.environ["WORLD_SIZE"] = "2"
    os.environ["LOCAL_RANK"] = rank
    os.environ["LOCAL_WORLD_SIZE"] = "2"


def built_before(folder: Path) -> str:
    be_rank()
    torch.manual_seed(7)
    same = build()
    torch.manual_seed(dist.get_rank())
    other = build()
    with session(folder / "same", "ddp") as s:
        s.prepare(lambda: same, sgd)

    try:
        with session(folder / "other", "ddp") as s:
            s.prepare(lambda: other, sgd)
    except ModelError as error:
        return error.line()

    return ""


@pytest.mark.slow
def test_a_module_that_was_made_before_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    said = (
        "build: weight is not the same on all ranks"
        " — make the module inside of build, which draws from the run's seed"
    )
    assert run(2, built_before, tmp_path) == [said, said]


def preempted(folder: Path) -> str:
    be_rank()
    try:
        with session(folder, "ddp", asynchronous=False) as s:
            model, _ = s.prepare(build, sgd)
            for batch in s.batches(ROWS, collate, epochs=9):
                s.backward(*loss_of(model, batch))
                if s.steps == 2:
                    os.kill(os.getpid(), signal.SIGTERM)
                s.step()
                if s.is_first:
                    assert s.losses
                    assert s.grad_norms
                    s.log()
    except Preempted as error:
        return error.line()

    return ""


@pytest.mark.slow
def test_one_rank_may_read_what_all_have_done(tmp_path: Path) -> None:
    for line in run(2, preempted, tmp_path):
        assert "stopped and saved at step" in line
    assert len(events(tmp_path / "run", "save")) == 1


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_read_before_it_stops(tmp_path: Path) -> None:
    with session(tmp_path, on_nan="skip") as s:
        model = stepped(s)
        for batch in s.batches(ROWS, collate, steps=2):
            loss, _ = loss_of(model, batch)
            s.backward(loss * float("nan"), 4)
            s.step()
            assert math.isnan(s.losses[""])
            # The step is judged where all ranks come.
            assert not events(tmp_path / "run", "nonfinite")

    assert len(events(tmp_path / "run", "nonfinite")) == 1
