"""Sampling from a real tiny model: exact, a function of (seed, step, key, position), ended where it should be, model left as it was."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.model import ModelConfig
from drumline.config.rollouts import ContinuousGenerator as ContinuousConfig
from drumline.config.rollouts import HFGenerator as HFConfig
from drumline.errors import DataError, DrumlineError, PlanError
from drumline.models.attention import use_document_attention
from drumline.models.build import build_model
from drumline.rl.continuous import ContinuousGenerator
from drumline.rl.generate import (
    Completion,
    HFGenerator,
    Request,
    Sampler,
    StopCriteria,
    StopRules,
    assign_requests,
    gumbel,
    request_seed,
)
from drumline.vendor.torch import TorchDispatchMode
from tests.tiny import read_model, tiny_architecture_dir, tiny_model_dir, tiny_tokenizer
from tests.unit.test_attention import PACK, layout

Tokens = list[int]
Completions = list[Completion]
# How many tokens a completion has, and whether it ended.
Cut = tuple[int, bool]

TEXTS = [
    "The",
    "What is two plus three?",
    "Every rank keeps in step with the drum: one, two",
    "A gradient",
    "Rome",
    "one two three",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def prompts() -> list[Request]:
    tokenizer = tiny_tokenizer()
    requests = []
    for index, text in enumerate(TEXTS):
        tokens = tokenizer.encode(text)
        requests.append(Request(tokens, (index, 0)))

    return requests


def samples_of(tokens: Tokens, prompt: int, number: int) -> list[Request]:
    """Return requests for several samples of one prompt."""
    return [Request(tokens, (prompt, sample)) for sample in range(number)]


def hf(model: Any, seed: int = 7, **options: Any) -> HFGenerator:
    config = HFConfig(**{"max_new_tokens": 24, **options})
    return HFGenerator(config, model, tiny_tokenizer(), seed)


def generate(
    model: Any, requests: list[Request] | None = None, step: int = 0, **options: Any
) -> Completions:
    """Return what Hugging Face's generation makes of requests; by default of a prompt of each text."""
    generator = hf(model, **options)
    return generator.generate(prompts() if requests is None else requests, step)


def continuous(model: Any, **options: Any) -> ContinuousGenerator:
    config = ContinuousConfig(**{"max_new_tokens": 24, **options})
    return ContinuousGenerator(config, model, tiny_tokenizer(), 7)


def tokens_of(completions: Completions) -> list[Tokens]:
    return [completion.tokens for completion in completions]


def ends_of(completions: Completions) -> list[bool]:
    return [completion.ended for completion in completions]


def assert_each_token_has_a_log_prob(completions: Completions) -> None:
    for completion in completions:
        assert len(completion.tokens) == len(completion.log_probs)


def assert_same_samples(made: Completions, expected: Completions) -> None:
    assert tokens_of(made) == tokens_of(expected)
    for one, other in zip(made, expected, strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


def test_noise_is_gumbels_and_stays_what_it_is() -> None:
    seeds = [request_seed(1, 2, (3, row)) for row in range(64)]
    positions = torch.arange(64)
    noise = gumbel(torch.tensor(seeds), positions, 4096).double()
    assert torch.isfinite(noise).all()

    distinct = noise.unique()
    assert distinct.numel() > 0.99 * noise.numel()

    # Euler's γ, π²/6.
    mean = float(noise.mean())
    variance = float(noise.var())
    assert abs(mean - 0.57722) < 0.01
    assert abs(variance - 1.64493) < 0.03

    # A run goes on with the numbers that it began with, on any machine and version: these are stored.
    stored = torch.tensor([[3.8939576148986816, -0.8089520931243896, 1.9218164682388306]])
    again = gumbel(torch.tensor([5]), torch.tensor([0]), 3)
    torch.testing.assert_close(again, stored, rtol=1e-6, atol=1e-7)
    assert request_seed(1, 2, (3, 4)) == 4866362923935651086


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [
        (1.0, 0, 1.0),
        (0.5, 0, 1.0),
        (1.0, 3, 1.0),
        (1.0, 0, 0.8),
        (2.0, 4, 0.9),
    ],
)
def test_samples_have_the_probabilities_asked_for(
    temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.tensor([1.5, 1.0, 0.0, -0.5, -2.0, 0.7])
    probabilities = (logits / temperature).softmax(0)
    order = probabilities.argsort(descending=True)
    if top_k:
        order = order[:top_k]

    sorted_probabilities = probabilities[order] / probabilities[order].sum()
    before = torch.cumsum(sorted_probabilities, 0) - sorted_probabilities
    kept = order[before < top_p]
    expected = torch.zeros_like(probabilities)
    expected[kept] = probabilities[kept]
    expected /= expected.sum()

    draws = 40_000
    sampler = Sampler(temperature, top_k, top_p)
    scores, log_probs = sampler.choose(
        logits.expand(draws, -1),
        torch.full((draws,), 11),
        torch.arange(draws),
    )
    chosen = scores.argmax(-1)
    seen = torch.bincount(chosen, minlength=6) / draws
    deviation = (seen - expected).abs()
    most = 4 * (0.25 / draws) ** 0.5
    assert deviation.max() < most

    is_left_out = expected == 0
    assert not seen[is_left_out].any()

    torch.testing.assert_close(log_probs, probabilities.log()[chosen])


def test_greedy_decoding_draws_no_lots_among_equal_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]]).expand(50, -1)
    sampler = Sampler(1.0, top_k=1)
    numbers = torch.arange(50)

    scores, log_probs = sampler.choose(logits, numbers, numbers)
    chosen = scores.argmax(-1)
    assert set(chosen.tolist()) == {1}

    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[:, 1])


@pytest.mark.slow
def test_a_sample_hangs_on_neither_batch_nor_order_nor_company(model: Any) -> None:
    whole = generate(model, step=3, batch=6)
    for batch in (1, 4):
        made = generate(model, step=3, batch=batch)
        assert_same_samples(made, whole)

    reversed_prompts = prompts()[::-1]
    backwards = generate(model, reversed_prompts, step=3, batch=3)
    assert tokens_of(backwards[::-1]) == tokens_of(whole)

    third = prompts()[2]
    (alone,) = generate(model, [third], step=3)
    assert alone.tokens == whole[2].tokens


class HostReads(TorchDispatchMode):
    """Counts how often the host reads a number of a tensor, for which it would wait on a GPU."""

    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            self.reads += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("padded", [True, False])
def test_the_host_reads_nothing_of_a_token_but_the_token(model: Any, padded: bool) -> None:
    use_document_attention(model, layout())
    tokens = [5, 6, 7]
    requests = [Request(tokens, (0, 0)), Request(tokens, (1, 0))]
    if padded:
        requests = prompts()[:2]

    reads = []
    for length in (4, 12):
        generator = hf(model, max_new_tokens=length)
        generator.stop_rules = StopRules(frozenset(), (), None)
        with HostReads() as host:
            first, second = generator.generate(requests, step=3)

        assert len(first.tokens) == length
        assert len(second.tokens) == length
        reads.append(host.reads)

    short, long = reads
    assert short == long


@pytest.mark.parametrize("kind", ["hf", "continuous"])
def test_requests_have_limits_of_their_own(model: Any, kind: str) -> None:
    def sample(limits: list[int | None]) -> Completions:
        requests = []
        for request, limit in zip(prompts(), limits, strict=True):
            requests.append(replace(request, max_new_tokens=limit))
        if kind == "hf":
            return generate(model, requests)
        return continuous(model).generate(requests, 0)

    free = sample([None] * len(TEXTS))
    limits = [3, None, 1, 99, 24, 5]
    cut = sample(limits)
    for completion, whole, limit in zip(cut, free, limits, strict=True):
        kept = min(24 if limit is None else limit, whole.length)
        assert completion.tokens == whole.tokens[:kept]
        assert completion.log_probs == pytest.approx(whole.log_probs[:kept], abs=1e-5)
        assert completion.ended == (whole.ended and kept == whole.length)
    assert [completion.length for completion in cut] != [completion.length for completion in free]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_row_is_cut_at_its_own_limit(is_late: bool) -> None:
    tokens_BT = torch.tensor([[9, 5, 2, 7], [9, 5, 6, 7], [9, 5, 6, 2]])
    rules = StopRules(frozenset({2}), (), None)
    ends = StopCriteria(rules, limits=[2, 2, 3], prompt_width=1, is_late=is_late)
    for width in (2, 3, 4):
        ends(tokens_BT[:, :width], None)
    assert not ends.should_continue()
    ends.read_all()
    assert ends.lengths == [2, 2, 3]
    assert ends.are_complete == [True, False, True]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_completion_that_is_read_one_token_late_ends_at_the_same_token(is_late: bool) -> None:
    rows = [
        [9, 9, 5, 2, 7, 7, 7],
        [9, 9, 5, 6, 2, 7, 7],
        [9, 9, 5, 6, 7, 7, 7],
    ]
    tokens_BT = torch.tensor(rows)
    rules = StopRules(frozenset({2}), (), None)
    ends = StopCriteria(
        rules,
        limits=[5, 5, 5],
        prompt_width=2,
        is_late=is_late,
    )
    for width in (3, 4, 5):
        flags = ends(tokens_BT[:, :width], None)

    assert ends.should_continue()
    assert flags.tolist() == [True, not is_late, False]

    ends(tokens_BT[:, :6], None)
    assert ends.should_continue()

    ends(tokens_BT, None)
    assert not ends.should_continue(), "all tokens are there that it may have"

    ends.read_all()
    assert ends.lengths == [2, 3, 5]
    assert ends.are_complete == [True, True, False]


@pytest.mark.parametrize(
    "kind",
    ["llama", "gpt2", "mistral with a window", pytest.param("gemma3", marks=pytest.mark.full)],
)
def test_a_group_of_requests_reads_its_prompt_once(kind: str) -> None:
    config = ModelConfig(id=None, config=PACK[kind])
    model = build_model(None, config, seed=0).eval()
    read: Tokens = []

    def record_size(_module: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        ids = args[0] if args else inputs["input_ids"]
        read.append(ids.numel())

    decoder = model.get_decoder()
    decoder.register_forward_pre_hook(record_size, with_kwargs=True)

    requests = []
    for prompt, length in enumerate((2, 8, 5)):
        ids = range(8, 8 + length)
        tokens = [5 + prompt, *ids]
        requests += samples_of(tokens, prompt, 4)

    generator = hf(model, max_new_tokens=6)
    together = generator.generate(requests, step=1)
    # Prompts but for their last tokens, three rows 8 wide; then a token of each of the twelve.
    assert read == [3 * 8, 12, 12, 12, 12, 12, 12]

    alone = []
    for request in requests:
        alone += generator.generate([request], step=1)

    assert_same_samples(together, alone)


def test_requests_of_a_prompt_go_together_where_prompts_divide_by_ranks() -> None:
    requests = []
    for prompt in range(4):
        tokens = [1] * (3 + prompt)
        requests += samples_of(tokens, prompt, 3)

    first, second = assign_requests(requests, 2)
    assert sorted(first + second) == list(range(12))

    for share in (first, second):
        assert len(share) == 6

        keys = [requests[index].key for index in share]
        prompts_of_share = {prompt for prompt, _ in keys}
        assert len(prompts_of_share) == 2

    thirds = assign_requests(requests, 3)
    assert list(map(len, thirds)) == [4, 4, 4]


def test_seed_step_and_key_each_change_the_sample(model: Any) -> None:
    first, second = samples_of(prompts()[1].tokens, 1, 2)
    made = [
        *generate(model, [first]),
        *generate(model, [second]),
        *generate(model, [first], step=1),
        *generate(model, [first], seed=8),
    ]
    distinct = set(map(tuple, tokens_of(made)))
    assert len(distinct) == 4


def test_log_probs_are_those_of_the_model_at_the_temperature(model: Any) -> None:
    requests = prompts()
    completions = generate(model, requests, temperature=0.7, top_k=20)
    for request, made in zip(requests, completions, strict=True):
        tokens = request.tokens + made.tokens
        with torch.no_grad():
            logits_TV = model(torch.tensor([tokens])).logits[0].float()

        log_probs_TV = (logits_TV / 0.7).log_softmax(-1)
        positions = torch.arange(len(request.tokens) - 1, len(tokens) - 1)
        expected = log_probs_TV[positions, made.tokens]
        assert made.log_probs == pytest.approx(expected.tolist(), abs=1e-5)


def test_top_k_1_is_greedy_decoding(model: Any) -> None:
    request, *_ = prompts()
    ids = torch.tensor([request.tokens])

    (expected,) = model.generate(ids, do_sample=False, max_new_tokens=24)
    (made,) = generate(model, [request], top_k=1)
    assert request.tokens + made.tokens == expected.tolist()


def end_early(model: Any, completions: Completions) -> Tokens:
    """Make two tokens of the completions end tokens of the model, and return all its end tokens."""
    first, second, *_ = completions
    ends = [2, first.tokens[5], second.tokens[9]]
    model.generation_config.eos_token_id = ends
    return ends


def cut(rules: StopRules, tokens: Tokens) -> Cut:
    """Return how many of `tokens` there are up to the end, and whether there is one."""
    for count in range(1, len(tokens) + 1):
        if rules.is_met(tokens[:count]):
            return count, True

    return len(tokens), False


def find_end(tokens: Tokens, ends: Tokens) -> Cut:
    """Return how many of `tokens` there are up to the first of some end tokens, and whether there is one."""
    for place, token in enumerate(tokens):
        if token in ends:
            return place + 1, True

    return len(tokens), False


def assert_cut(made: Completions, free: Completions, expected: list[Cut]) -> None:
    """Check that completions are those of free generation up to their ends, and that one has one.

    `expected`: how many tokens each has, and whether it has an end.
    """
    for now, was, (count, ended) in zip(made, free, expected, strict=True):
        assert now.tokens == was.tokens[:count]
        assert now.ended == ended

    assert_each_token_has_a_log_prob(made)
    assert any(ends_of(made))


def test_a_completion_ends_at_an_end_token_or_a_stop_text(model: Any) -> None:
    free = generate(model)
    assert not any(ends_of(free))

    for completion in free:
        assert len(completion.tokens) == 24

    assert_each_token_has_a_log_prob(free)

    ends = end_early(model, free)
    ended = generate(model)
    expected = [find_end(tokens, ends) for tokens in tokens_of(free)]
    assert_cut(ended, free, expected)


def test_a_stop_text_ends_where_it_is_complete() -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.encode("What is two plus three? Two plus three is five.")

    rules = StopRules(frozenset({2}), ("ee? T", "</answer>"), tokenizer)
    count, ended = cut(rules, tokens)

    assert ended
    assert "ee? T" in tokenizer.decode(tokens[:count])

    shorter = tokens[: count - 1]
    assert "ee? T" not in tokenizer.decode(shorter)
    assert cut(rules, shorter) == (count - 1, False)

    assert cut(rules, [5, 2, 7]) == (2, True)


def test_stop_texts_end_generation_of_a_model(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    free = generate(model)
    stop = tokenizer.decode(free[3].tokens[6:8])

    stopped = generate(model, stop=(stop,))
    rules = StopRules(frozenset({2}), (stop,), tokenizer)
    expected = [cut(rules, tokens) for tokens in tokens_of(free)]
    assert_cut(stopped, free, expected)
    assert stopped[3].ended


def test_the_model_is_left_as_it_was_and_its_own_generation_config_has_no_say(model: Any) -> None:
    plain = generate(model)
    own = model.generation_config
    own.repetition_penalty = 3.0
    model.config.use_cache = False

    first_layer, second_layer = model.model.layers[:2]
    model.train()
    first_layer.eval()

    again = generate(model)
    assert tokens_of(again) == tokens_of(plain)

    with pytest.raises(PlanError):
        generate(model, max_new_tokens=512)

    assert model.generation_config is own
    assert model.config.use_cache is False
    assert model.training
    assert second_layer.training
    assert not first_layer.training


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_a_mixture_that_learns_the_loss_of_its_routers_generates(tmp_path: Path, kind: str) -> None:
    """transformers cannot compute that loss for the tokens of padded rows behind a cache."""
    model = read_model(tiny_architecture_dir(tmp_path / "model", kind, layers=2))
    requests = prompts()
    assert len({len(request.tokens) for request in requests}) > 1

    made = hf(model).generate(requests, 3)

    assert model.config.output_router_logits is True

    model.config.output_router_logits = False
    alone = [hf(model).generate([request], 3)[0] for request in requests]

    assert_same_samples(made, alone)
    assert model.config.output_router_logits is False


def test_no_room_and_no_prompt_are_one_line(model: Any) -> None:
    no_room = "a prompt of 500 tokens and max_new_tokens 24 are more than the model's 512 positions — at most 12"
    long = Request([5] * 500, (0, 0))
    with pytest.raises(PlanError, match=no_room):
        generate(model, [long])

    empty = Request([], (0, 0))
    with pytest.raises(DataError, match="prompt \\(0, 0\\) has no tokens"):
        generate(model, [empty])

    assert generate(model, []) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"batch": 2}, marks=pytest.mark.full),
        pytest.param({"top_p": 0.8, "temperature": 0.7}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_continuous_batching_samples_what_generate_samples(
    model: Any, options: dict[str, Any]
) -> None:
    """Twice as many requests as prompts: equal prompts share their cache, and their samples differ."""
    requests = []
    for index, prompt in enumerate(prompts()):
        requests += samples_of(prompt.tokens, index, 2)

    attention = model.config._attn_implementation
    model.train()

    expected = generate(model, requests, step=4, **options)
    made = continuous(model, **options).generate(requests, 4)

    assert_same_samples(made, expected)
    assert ends_of(made) == ends_of(expected)

    assert model.training
    assert model.config._attn_implementation == attention


@pytest.mark.slow
def test_continuous_batching_ends_at_end_tokens_and_stop_texts(model: Any) -> None:
    free = generate(model)
    stop = tiny_tokenizer().decode(free[3].tokens[6:8])
    end_early(model, free)

    for stops in ((), (stop,)):
        expected = generate(model, stop=stops)
        made = continuous(model, stop=stops).generate(prompts(), 0)

        assert tokens_of(made) == tokens_of(expected)
        assert ends_of(made) == ends_of(expected)
        assert any(ends_of(made))
        assert_each_token_has_a_log_prob(made)


@pytest.mark.slow
def test_what_fails_in_continuous_batching_is_said_and_nothing_hangs(model: Any) -> None:
    made = continuous(model)
    made.sampler.temperature = None  # type: ignore[assignment]

    with pytest.raises(DrumlineError, match="continuous batching failed: unsupported operand"):
        made.generate(prompts(), 0)

    for thread in threading.enumerate():
        # Threads of other tests' servers may be there, too.
        if "_run_generation_loop" in thread.name:
            # Its work is over, and it is about to end.
            thread.join(60)
            assert not thread.is_alive(), thread.name

    two = prompts()[:2]
    completions = continuous(model, batch=1).generate(two, 0)
    assert len(completions) == 2

    assert continuous(model).generate([], 0) == []
