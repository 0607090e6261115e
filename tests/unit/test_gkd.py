"""On-policy distillation: its loss against a plain loop, which completions are whose, and its plan."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from drumline.algorithms.gkd.objective import OnPolicyDistillation
from drumline.algorithms.gkd.spec import GKDConfig
from drumline.config.algorithm import SamplingSpec
from drumline.config.data import DataConfig
from drumline.config.load import load_text
from drumline.data.batches import Episodes
from drumline.data.cache import TokenCache
from drumline.data.encode import AnsweredPromptEncoder
from drumline.data.sources import Row
from drumline.data.taught import collate_taught_episodes
from drumline.errors import ConfigError, DataError, PlanError, TrainingStopped
from drumline.models.head import compute_outputs, trunk_and_head
from drumline.plan.plan import Plan
from drumline.planner.cost.compute import scoring_flops
from drumline.planner.cost.memory import memory
from drumline.planner.cost.times import rollout_seconds
from drumline.report.facts import curve_values
from drumline.rl.conversations import Conversation
from drumline.rl.rewards import EpisodeText, Rewards
from drumline.rl.rollouts import (
    Rollouts,
    RowCompletion,
    Sample,
    ScoredSamples,
    _row_sample,
    _samples_to_episodes,
)
from drumline.telemetry.events import EventLog
from drumline.train.replan import planning_question
from tests.harness import write_config
from tests.plans import resolve_plan
from tests.tiny import read_model, tiny_architecture_dir, tiny_model_dir, tiny_tokenizer
from tests.unit.test_distill import FP32_BYTES, KINDS, ROW, plain_divergence, plain_kl
from tests.unit.test_planner_times import cluster
from tests.unit.test_report_progress import START, told
from tests.unit.test_rollout_evaluation import ROLLOUT, Unreported

PAD = 0
# Prompts and completions. The policy has sampled all of the first two completions; of the last one
# the two tokens in the middle are those of an environment.
PROMPTS = [[5, 6, 7], [8], [9, 10]]
COMPLETIONS = [[11, 12], [13, 14, 15, 16], [17, 18, 19, 20]]
SAMPLED = [[True] * 2, [True] * 4, [True, False, False, True]]


def spec(**options: Any) -> GKDConfig:
    return GKDConfig.model_validate({"teacher": {"id": "some/model"}, **options})


def episodes() -> Episodes:
    prompts = [np.array(tokens) for tokens in PROMPTS]
    completions = [np.array(tokens) for tokens in COMPLETIONS]
    made: Episodes = spec().assign_credit(
        Episodes.start(prompts, completions, sampled=SAMPLED), torch.zeros(3), None
    )
    return made


def learned_distributions(model: Any, temperature: float) -> list[list[float]]:
    """The distributions from which the sampled tokens were drawn, computed row by row."""
    found = []
    for prompt, completion, flags in zip(PROMPTS, COMPLETIONS, SAMPLED, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *completion]])).logits[0]
        for index, is_sampled in enumerate(flags):
            if is_sampled:
                row = logits[len(prompt) - 1 + index] / temperature
                found.append(row.softmax(-1).tolist())
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A student and a teacher that is surer of itself."""
    root = tmp_path_factory.mktemp("models")
    tiny_model_dir(root / "model")
    tiny_model_dir(root / "teacher", layers=4, seed=7, hidden=48)
    teacher = read_model(root / "teacher")
    with torch.no_grad():
        teacher.model.norm.weight.mul_(20)
    teacher.save_pretrained(root / "teacher")
    return root


@pytest.mark.parametrize("temperature", [1.0, 1.7])
@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_divergence_at_the_sampled_tokens(
    folder: Path, kind: Any, temperature: float
) -> None:
    student = read_model(folder / "model")
    teacher = read_model(folder / "teacher")
    options: dict[str, Any] = {"divergence": kind, "temperature": temperature, "loss_chunk": 3}
    beta = 0.5
    if kind == "jsd":
        options["beta"] = beta = 0.3
    algorithm = OnPolicyDistillation(spec(**options))

    # A filler makes the batch one row longer.
    batch = collate_taught_episodes(episodes(), [0, 1, 2, -1], PAD, None)
    assert batch.weight == 8
    with torch.no_grad():
        outputs = compute_outputs(teacher, batch, trunk_and_head(teacher))
        states = outputs.states(batch.targets_BT)
    taught = replace(batch, teacher=states)
    found = algorithm.objective(compute_outputs(student, taught, trunk_and_head(student)), taught)

    expected = 0.0
    expected_kl = 0.0
    both = zip(
        learned_distributions(student, temperature),
        learned_distributions(teacher, temperature),
        strict=True,
    )
    for of_student, of_teacher in both:
        expected += plain_divergence(kind, beta, of_student, of_teacher)
        expected_kl += plain_kl(of_teacher, of_student)
    assert expected > 0.1
    assert found.loss_sum.item() == pytest.approx(expected, rel=1e-5)
    assert found.sums["kl"].item() == pytest.approx(expected_kl, rel=1e-5)
    assert found.sums["tokens"].item() == 8
    means = algorithm.metrics({"loss": 4.0, "kl": 2.0, "tokens": 8.0})
    assert means == {"loss": 0.5, "kl": 0.25}
    found.loss_sum.backward()
    assert student.model.norm.weight.grad.norm() > 0


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_the_distance_of_the_sampler_is_measured_at_sampled_tokens(
    folder: Path, temperature: float
) -> None:
    """Not at those of a row's own completion, which is the second one, and of an environment."""
    student = read_model(folder / "model")
    teacher = read_model(folder / "teacher")
    url = "http://127.0.0.1:8000"
    generator = {"kind": "vllm", "url": url, "temperature": temperature}
    algorithm = OnPolicyDistillation(spec(loss_chunk=3, generator=generator))
    made = episodes()
    sampler_NM = torch.randn(made.mask_NM.shape, generator=torch.Generator().manual_seed(5))
    sampler_NM[1] = torch.nan
    made = replace(made, sampler_log_probs_NM=sampler_NM)
    batch = collate_taught_episodes(made, [0, 1, 2, -1], PAD, None)
    with torch.no_grad():
        outputs = compute_outputs(teacher, batch, trunk_and_head(teacher))
        taught = replace(batch, teacher=outputs.states(batch.targets_BT))
    found = algorithm.objective(compute_outputs(student, taught, trunk_and_head(student)), taught)
    figures = algorithm.step_metrics({name: float(value) for name, value in found.sums.items()})

    differences = []
    distributions = iter(learned_distributions(student, temperature))
    for row, (completion, flags) in enumerate(zip(COMPLETIONS, SAMPLED, strict=True)):
        for column, token in enumerate(completion):
            if not flags[column]:
                continue
            probability = next(distributions)[token]
            if row != 1:
                differences.append(math.log(probability) - float(sampler_NM[row, column]))
    assert len(differences) == 4
    assert figures["sampler_log_ratio"] == pytest.approx(sum(differences) / 4, rel=1e-4)
    largest = max(abs(difference) for difference in differences)
    assert figures["sampler_log_ratio_max"] == pytest.approx(largest, rel=1e-4)


def test_a_policy_that_samples_itself_is_not_compared() -> None:
    assert not spec(generator={"kind": "hf"}).compares_with_sampler
    assert spec(generator={"kind": "hf"}, ahead=1).compares_with_sampler
    assert spec(generator={"kind": "continuous"}).compares_with_sampler


def chosen(share: float, seed: int, positions: range) -> list[bool]:
    """Whether the policy completes the prompts at some positions itself."""
    rollouts = object.__new__(Rollouts)
    rollouts.algorithm = spec(on_policy_share=share)
    run = SimpleNamespace(seed=seed)
    rollouts.plan = SimpleNamespace(config=SimpleNamespace(run=run))  # type: ignore[assignment]
    return [rollouts._is_sampled(position) for position in positions]


def test_who_completes_a_prompt_depends_on_seed_and_position_alone() -> None:
    first = chosen(0.3, 1, range(2000))
    assert sum(first) / 2000 == pytest.approx(0.3, abs=0.04)
    assert chosen(0.3, 1, range(500, 2000)) == first[500:]
    assert chosen(0.3, 2, range(2000)) != first
    assert all(chosen(1.0, 1, range(200)))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ("beta: 0.2", "beta requires divergence: jsd"),
        ("on_policy_share: 0", "greater than 0"),
        ("clip: 0.1", "unknown key 'clip'"),
        ("log_probs: live", "unknown key 'log_probs'"),
        ("curriculum: {kind: success}", "curriculum: success follows rewards"),
        ("missing_stop_penalty: 0.1", "missing_stop_penalty is taken off rewards"),
        ("reward_workers: 2", "reward_workers compute rewards"),
        (
            "environment: {kind: class, path: 'a.py:B', max_tokens: 8}",
            "has no room for a turn",
        ),
    ],
)
def test_options_that_have_no_meaning_are_refused(options: str, line: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_text(ROW, [f"algorithm={{kind: gkd, teacher: some/model, {options}}}"])
    assert line in error.value.line()
    assert "\n" not in error.value.line()


def test_rewards_are_those_of_an_environment_or_none() -> None:
    assert spec().rewards == []
    environment = {"kind": "class", "path": "a.py:B", "max_tokens": 100}
    (reward,) = spec(environment=environment).rewards
    assert reward.kind == "environment"


class Cache:
    """A token cache of encoded rows."""

    def __init__(self, samples: list[Any]) -> None:
        self.samples = samples

    def segments(self, number: int) -> list[Any]:
        return [(segment.tokens, segment.learn) for segment in self.samples[number].segments]

    def meta(self, number: int) -> Any:
        return self.samples[number].meta


def row(values: dict[str, Any]) -> Row:
    return Row("x.jsonl:1", values, {}, domain="sums")


def encoder(**data: Any) -> AnsweredPromptEncoder:
    settings = {"train": [{"kind": "file", "path": "x.jsonl"}], **data}
    algorithm = spec(on_policy_share=0.5, generator={"kind": "hf", "max_new_tokens": 8})
    made = algorithm.encoder(tiny_tokenizer(), DataConfig.model_validate(settings))
    assert isinstance(made, AnsweredPromptEncoder)
    return made


def test_a_row_s_own_completion_is_learned_as_fine_tuning_learns_it() -> None:
    """Of a conversation all answers are, and the prompt to complete has all but the last one."""
    plain = row({"prompt": "two plus three", "completion": "five"})
    turns = []
    for role, content in (("user", "one"), ("assistant", "1"), ("user", "two"), ("assistant", "2")):
        turns.append({"role": role, "content": content})
    samples = []
    for each in (plain, row({"messages": turns})):
        sample = encoder().encode(each)
        assert sample is not None
        samples.append(sample)
    cache: Any = Cache(samples)
    decode = tiny_tokenizer().decode
    first = _row_sample(cache, 0)
    assert decode(first.prompt_tokens).endswith("<|im_start|>assistant\n")
    assert decode(first.completion.tokens) == "five<|im_end|>"
    assert first.prompt_tokens == samples[0].segments[0].tokens.tolist()

    second = _row_sample(cache, 1)
    assert decode(samples[1].segments[0].tokens).count("<|im_start|>assistant\n") == 2
    made = _samples_to_episodes(cache, [first, second])
    made = spec().assign_credit(made, torch.zeros(2), None)
    targets = [sample.segments[1].target_count for sample in samples]
    assert made.weight_N.tolist() == targets
    tokens = torch.tensor([*second.completion.tokens])
    learned = tokens[made.mask_NM[1, : len(tokens)]]
    assert decode(learned) == "1<|im_end|>2<|im_end|>"


def test_a_row_without_a_completion_is_refused_in_one_line() -> None:
    question = {"role": "user", "content": "one"}
    with pytest.raises(DataError, match="has no completion to learn from") as refused:
        encoder().encode(row({"messages": [question]}))
    assert "algorithm.on_policy_share" in refused.value.line()


def planned(folder: Path, root: Path, **algorithm: Any) -> Plan:
    """The plan of a run in one process."""
    root.mkdir()
    options = {
        "kind": "gkd",
        "teacher": {"id": str(folder / "teacher")},
        "generator": {"kind": "hf", "max_new_tokens": 8},
        **algorithm,
    }
    path = write_config(
        root, folder / "model", algorithm=options, strategy={"kind": "single"}, launch={"nproc": 1}
    )
    return resolve_plan(path, world_size=1)


def test_held_out_rows_need_no_completions(folder: Path, tmp_path: Path) -> None:
    """The model completes all of them, whatever the share of the training prompts is."""
    algorithm = {
        "kind": "gkd",
        "teacher": {"id": str(folder / "teacher")},
        "generator": {"kind": "hf", "max_new_tokens": 8},
        "on_policy_share": 0.5,
    }
    path = write_config(tmp_path, folder / "model", algorithm=algorithm)
    prompts = [{"prompt": f"what is {number}"} for number in range(5)]
    lines = [json.dumps(prompt) for prompt in prompts]
    (tmp_path / "eval.jsonl").write_text("\n".join(lines))
    data = resolve_plan(path, world_size=1).data
    assert data is not None
    (held_out,) = [TokenCache.open(Path(cache)) for cache in data.eval_caches.values()]
    train = TokenCache.open(Path(data.train_cache))
    assert len(held_out) == 5
    assert len(held_out.segments(0)) == 1
    assert len(train.segments(0)) == 2


def test_the_teacher_is_planned_and_counted_once(folder: Path, tmp_path: Path) -> None:
    plan = planned(folder, tmp_path / "run")
    facts = planning_question(plan).facts
    held = memory(plan, facts, cluster())
    teacher = facts.roles["teacher"].parameters
    assert held.parameters == FP32_BYTES * (facts.parameters + teacher)
    assert "teacher" not in held.phases
    assert held.phases["rollout"] > held.parameters
    assert scoring_flops(plan, facts) > 0

    # It answers in steps, and not in the rollout.
    alone = replace(facts, roles={})
    whole = rollout_seconds(plan, facts, cluster())
    assert whole == rollout_seconds(plan, alone, cluster())
    half = planned(folder, tmp_path / "half", on_policy_share=0.5)
    assert rollout_seconds(half, facts, cluster()) <= whole


def test_beside_a_mixture_with_ep_a_frozen_model_may_be_dense(folder: Path, tmp_path: Path) -> None:
    """A refusal of one that is trained names it: the policy has experts."""
    mixture = tiny_architecture_dir(tmp_path / "mixture", "qwen3_moe", layers=2)
    dense = {"id": str(folder / "model")}
    common = {"generator": {"kind": "hf", "max_new_tokens": 8}}
    rewards = [{"kind": "regex", "pattern": "a"}]
    gkd = {"kind": "gkd", "teacher": dense, **common}
    ppo = {"kind": "ppo", "value": "separate", "value_model": dense, "rewards": rewards, **common}
    ep = {"kind": "fsdp2", "ep": 2}
    plan = resolve_plan(write_config(tmp_path, mixture, algorithm=gkd, strategy=ep), world_size=2)
    assert plan.mesh.ep == 2
    path = write_config(tmp_path, mixture, algorithm=ppo, strategy=ep)
    with pytest.raises(PlanError, match="of the value: ep × the model: it has no experts"):
        resolve_plan(path, world_size=2)


@pytest.mark.parametrize("top_k", [0, 8])
def test_a_step_is_traced_with_a_teacher_s_numbers(
    folder: Path, tmp_path: Path, top_k: int
) -> None:
    plan = planned(folder, tmp_path / "run", top_k=top_k)
    batch = plan.config.algorithm.traced_batch(plan, rows=2, length=6, channels=3)
    model = read_model(folder / "model")
    outputs = compute_outputs(model, batch, trunk_and_head(model))
    loss = plan.config.algorithm.build().objective(outputs, batch).loss_sum
    loss.backward()
    assert torch.isfinite(loss)


def test_without_rewards_none_are_given_and_nothing_is_said_of_them() -> None:
    with Rewards([], Path()) as rewards:
        (score,) = rewards.score([EpisodeText("a", "b", 1)])
    assert np.isnan(score.value)
    assert not score.applies
    text = told(START, {**ROLLOUT, "rewards": {}, "failures": {}, "from_rows": 4})[1]
    assert "rollout for steps up to 3: length 3.0" in text
    assert "completions of rows 4" in text
    assert "reward" not in text


def test_a_rollout_of_rows_alone_has_an_event_and_a_line(tmp_path: Path) -> None:
    log = EventLog(tmp_path / "events.jsonl")
    nothing = {field.name: None for field in fields(Rollouts)}
    values: dict[str, Any] = {**nothing, "algorithm": spec(on_policy_share=0.5)}
    run = Rollouts(**{**values, "emit": log.emit, "lost_servers": dict})
    completion = RowCompletion([5, 6], [0.0, 0.0], True, learned=[True, True])
    row_sample = Sample(0, [1], completion, "", float("nan"), applies=False)
    sampled = ScoredSamples([], {}, {}, row_samples=(row_sample,) * 4)
    run._report(3, sampled, 4, {})

    # Without episodes there are none to show.
    (written,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())

    assert written["kind"] == "rollout"
    assert [written[key] for key in ("episodes", "prompts", "drawn", "from_rows")] == [0, 0, 4, 4]
    assert [written[key] for key in ("reward", "length", "length_max", "ended")] == [None] * 4

    line = told(START, written)[1]

    assert "rollout for steps up to 3: completions of rows 4 · seconds generate 0.0" in line
    assert curve_values(written) == {}


def test_a_plug_in_may_define_how_credit_is_assigned_by_the_former_name() -> None:
    class Plugged(SamplingSpec):
        def credited(self, *given: Any) -> Any:
            return given

    old = Plugged.model_construct()

    assert old.assign_credit("episodes", "rewards", "cost") == ("episodes", "rewards", "cost")


def rollout_of(tokens: list[int]) -> ScoredSamples:
    """A rollout of two episodes. Without tokens its environment failed as it began."""
    completion = Conversation(tokens, [-1.0] * len(tokens), False, sampled=[True] * len(tokens))
    sample = Sample(0, [1], completion, "", float("nan"), applies=False)
    failures = {"environment": Counter({"raised KeyError": 2})}
    return ScoredSamples([sample] * 2, {}, {} if tokens else failures)


@pytest.mark.parametrize(
    ("rollouts", "stops"),
    [
        ("....", False),
        ("..x.xx.", False),
        ("..xxx", True),
        # The last of 8 steps.
        ("xx......", False),
        (".......x", False),
    ],
)
def test_a_run_whose_environment_always_fails_is_stopped(rollouts: str, stops: bool) -> None:
    """It had losses of 0 to its end, and exit code 0."""
    nothing = {field.name: None for field in fields(Rollouts)}
    algorithm = SimpleNamespace(failure_limit=None, steps_per_rollout=1)
    values: dict[str, Any] = {**nothing, "plan": SimpleNamespace(steps=8), "algorithm": algorithm}
    run = Unreported(**values)
    for step, mark in enumerate(rollouts[:-1]):
        run._check_rewards(step, rollout_of([] if mark == "x" else [5]), 2)
    last = rollout_of([] if rollouts[-1] == "x" else [5])
    if not stops:
        run._check_rewards(len(rollouts) - 1, last, 2)
        return
    with pytest.raises(TrainingStopped) as stopped:
        run._check_rewards(len(rollouts) - 1, last, 2)
    assert "no episode has a token to learn from: environment raised KeyError (2×)" in (
        stopped.value.line()
    )


def test_a_short_run_whose_environment_always_fails_is_stopped_at_its_end() -> None:
    nothing = {field.name: None for field in fields(Rollouts)}
    algorithm = SimpleNamespace(failure_limit=None, steps_per_rollout=1)
    values: dict[str, Any] = {**nothing, "plan": SimpleNamespace(steps=2), "algorithm": algorithm}
    run = Unreported(**values)
    run._check_rewards(0, rollout_of([]), 2)
    with pytest.raises(TrainingStopped, match="no episode has a token to learn from"):
        run._check_rewards(1, rollout_of([]), 2)
