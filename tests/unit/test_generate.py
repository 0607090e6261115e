"""Sampling from a real tiny model: exact, a function of (seed, step, key, position), ended where it should be, model left as it was."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.config.model import ModelConfig
from drumline.config.rollouts import ContinuousGenerator as ContinuousConfig
from drumline.config.rollouts import HFGenerator as HFConfig
from drumline.errors import DataError, DrumlineError, PlanError
from drumline.models.attention import attend_by_documents
from drumline.models.build import build_model
from drumline.rl.continuous import ContinuousGenerator
from drumline.rl.generate import (
    AtEndings,
    Endings,
    HFGenerator,
    Request,
    Sampler,
    assign_requests,
    gumbel,
    request_seed,
)
from drumline.vendor.torch import TorchDispatchMode
from tests.tiny import tiny_model_dir, tiny_tokenizer
from tests.unit.test_attention import PACK, layout

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
def model(folder: Path) -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    yield AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def prompts() -> list[Request]:
    return [Request(tiny_tokenizer().encode(text), (i, 0)) for i, text in enumerate(TEXTS)]


def hf(model: Any, seed: int = 7, **options: Any) -> HFGenerator:
    return HFGenerator(HFConfig(**{"max_new_tokens": 24, **options}), model, tiny_tokenizer(), seed)


def test_noise_is_gumbels_and_stays_what_it_is() -> None:
    seeds = torch.tensor([request_seed(1, 2, (3, row)) for row in range(64)])
    noise = gumbel(seeds, torch.arange(64), 4096).double()
    # Euler's γ, π²/6.
    assert abs(float(noise.mean()) - 0.57722) < 0.01 and abs(float(noise.var()) - 1.64493) < 0.03
    assert torch.isfinite(noise).all() and noise.unique().numel() > 0.99 * noise.numel()
    # A run goes on with the numbers that it began with, on any machine and version: these are stored.
    torch.testing.assert_close(
        gumbel(torch.tensor([5]), torch.tensor([0]), 3),
        torch.tensor([[3.8939576148986816, -0.8089520931243896, 1.9218164682388306]]),
        rtol=1e-6,
        atol=1e-7,
    )
    assert request_seed(1, 2, (3, 4)) == 4866362923935651086


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_p": 0.8},
        {"top_k": 4, "top_p": 0.9, "temperature": 2.0},
    ],
)
def test_samples_have_the_probabilities_asked_for(options: dict[str, float]) -> None:
    logits, draws = torch.tensor([1.5, 1.0, 0.0, -0.5, -2.0, 0.7]), 40_000
    probabilities = (logits / options.get("temperature", 1.0)).softmax(0)
    order = probabilities.argsort(descending=True)
    likely = torch.zeros_like(probabilities)
    if top_k := int(options.get("top_k", 0)):
        order = order[:top_k]
    before = (
        torch.cumsum(probabilities[order] / probabilities[order].sum(), 0)
        - probabilities[order] / probabilities[order].sum()
    )
    likely[order[before < options.get("top_p", 1.0)]] = 1
    expected = probabilities * likely / (probabilities * likely).sum()
    sampler = Sampler(
        options.get("temperature", 1.0), int(options.get("top_k", 0)), options.get("top_p", 1.0)
    )
    scores, log_probs = sampler.choose(
        logits.expand(draws, -1), torch.full((draws,), 11), torch.arange(draws)
    )
    chosen = scores.argmax(-1)
    seen = torch.bincount(chosen, minlength=6) / draws
    assert (seen - expected).abs().max() < 4 * (0.25 / draws) ** 0.5
    assert not seen[expected == 0].any()
    torch.testing.assert_close(log_probs, probabilities.log()[chosen])


def test_greedy_decoding_draws_no_lots_among_equal_logits() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0]]).expand(50, -1)
    scores, log_probs = Sampler(1.0, top_k=1).choose(logits, torch.arange(50), torch.arange(50))
    assert set(scores.argmax(-1).tolist()) == {1}
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[:, 1])


@pytest.mark.slow
def test_a_sample_hangs_on_neither_batch_nor_order_nor_company(model: Any) -> None:
    whole = hf(model, batch=6).generate(prompts(), step=3)
    for batch in (1, 4):
        for one, other in zip(
            whole, hf(model, batch=batch).generate(prompts(), step=3), strict=True
        ):
            assert one.tokens == other.tokens
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    backwards = hf(model, batch=3).generate(prompts()[::-1], step=3)[::-1]
    assert [c.tokens for c in backwards] == [c.tokens for c in whole]
    assert hf(model).generate(prompts()[2:3], step=3)[0].tokens == whole[2].tokens


class HostReads(TorchDispatchMode):
    """Counts how often the host reads a number of a tensor, for which it would wait on a GPU."""

    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("padded", [True, False])
def test_the_host_reads_nothing_of_a_token_but_the_token(model: Any, padded: bool) -> None:
    attend_by_documents(model, layout())
    requests = prompts()[:2] if padded else [Request([5, 6, 7], (i, 0)) for i in range(2)]
    reads = []
    for tokens in (4, 12):
        generator = hf(model, max_new_tokens=tokens)
        generator.endings = Endings(frozenset(), (), None)
        with HostReads() as host:
            made = generator.generate(requests, step=3)
        assert [len(completion.tokens) for completion in made] == [tokens] * 2
        reads.append(host.reads)
    assert reads[0] == reads[1]


def test_a_completion_that_is_read_one_token_late_ends_at_the_same_token() -> None:
    tokens_BT = torch.tensor([[9, 9, 5, 2, 7, 7, 7], [9, 9, 5, 6, 2, 7, 7], [9, 9, 5, 6, 7, 7, 7]])
    found = {}
    for is_late in (False, True):
        ends = AtEndings(Endings(frozenset({2}), (), None), 3, 2, most=5, is_late=is_late)
        flags = [ends(tokens_BT[:, : 3 + step], None).tolist() for step in range(3)]
        assert ends.goes_on()
        assert flags[2] == ([True, not is_late, False])
        ends(tokens_BT[:, :6], None)
        assert ends.goes_on()
        ends(tokens_BT, None)
        assert not ends.goes_on(), "all tokens are there that it may have"
        ends.read_all()
        found[is_late] = ends.lengths
    assert found[False] == found[True] == [2, 3, None]


@pytest.mark.parametrize(
    "kind",
    ["llama", "gpt2", "mistral with a window", pytest.param("gemma3", marks=pytest.mark.full)],
)
def test_a_group_of_requests_reads_its_prompt_once(kind: str) -> None:
    model = build_model(None, ModelConfig(id=None, config=PACK[kind]), seed=0).eval()
    read: list[int] = []

    def look(_module: Any, args: tuple[Any, ...], inputs: dict[str, Any]) -> None:
        read.append((args[0] if args else inputs["input_ids"]).numel())

    model.get_decoder().register_forward_pre_hook(look, with_kwargs=True)
    groups = [
        [Request([5 + i, *range(8, 8 + length)], (i, sample)) for sample in range(4)]
        for i, length in enumerate((2, 8, 5))
    ]
    generator = hf(model, max_new_tokens=6)
    together = generator.generate([request for group in groups for request in group], step=1)
    # Prompts but for their last tokens, three rows 8 wide; then a token of each of the twelve.
    assert read == [3 * 8, *[12] * 6]
    alone = [generator.generate([request], step=1)[0] for group in groups for request in group]
    assert [each.tokens for each in together] == [each.tokens for each in alone]
    for a, b in zip(together, alone, strict=True):
        assert a.log_probs == pytest.approx(b.log_probs, abs=1e-5)


def test_requests_of_a_prompt_go_together_where_prompts_divide_by_ranks() -> None:
    groups = [
        [Request([1] * (3 + prompt), (prompt, sample)) for sample in range(3)]
        for prompt in range(4)
    ]
    requests = [request for group in groups for request in group]
    shares = assign_requests(requests, 2)
    assert sorted(len(share) for share in shares) == [6, 6] and sorted(
        i for share in shares for i in share
    ) == list(range(12))
    assert all(len({requests[i].key[0] for i in share}) == 2 for share in shares)
    assert sorted(len(share) for share in assign_requests(requests, 3)) == [4, 4, 4]


def test_seed_step_and_key_each_change_the_sample(model: Any) -> None:
    tokens = prompts()[1].tokens
    samples = [hf(model).generate([Request(tokens, (1, i))], 0)[0].tokens for i in range(2)]
    samples += [
        hf(model).generate([Request(tokens, (1, 0))], 1)[0].tokens,
        hf(model, seed=8).generate([Request(tokens, (1, 0))], 0)[0].tokens,
    ]
    assert len({tuple(s) for s in samples}) == 4


def test_log_probs_are_those_of_the_model_at_the_temperature(model: Any) -> None:
    requests = prompts()
    for request, made in zip(
        requests, hf(model, temperature=0.7, top_k=20).generate(requests, 0), strict=True
    ):
        ids = torch.tensor([request.tokens + made.tokens])
        with torch.no_grad():
            log_probs = (model(ids).logits[0].float() / 0.7).log_softmax(-1)
        at = range(len(request.tokens) - 1, ids.shape[1] - 1)
        expected = [
            float(log_probs[position, token])
            for position, token in zip(at, made.tokens, strict=True)
        ]
        assert made.log_probs == pytest.approx(expected, abs=1e-5)


def test_top_k_1_is_greedy_decoding(model: Any) -> None:
    request = prompts()[0]
    expected = model.generate(torch.tensor([request.tokens]), do_sample=False, max_new_tokens=24)[
        0, len(request.tokens) :
    ].tolist()
    assert hf(model, top_k=1).generate([request], 0)[0].tokens == expected


def test_a_completion_ends_at_an_end_token_or_a_stop_text(model: Any) -> None:
    free = hf(model).generate(prompts(), 0)
    assert not any(c.ended for c in free) and all(
        len(c.tokens) == len(c.log_probs) == 24 for c in free
    )
    model.generation_config.eos_token_id = [2, free[0].tokens[5], free[1].tokens[9]]
    ended = hf(model).generate(prompts(), 0)
    for was, now in zip(free, ended, strict=True):
        ends = [
            i for i, token in enumerate(was.tokens) if token in model.generation_config.eos_token_id
        ]
        count = ends[0] + 1 if ends else 24
        assert (
            now.tokens == was.tokens[:count]
            and len(now.log_probs) == count
            and now.ended == bool(ends)
        )
    assert any(c.ended for c in ended)


def cut(endings: Endings, tokens: list[int]) -> tuple[int, bool]:
    """(how many of `tokens` there are up to the end, whether there is one)."""
    ends = [count for count in range(1, len(tokens) + 1) if endings.after(tokens[:count])]
    return (ends[0], True) if ends else (len(tokens), False)


def test_a_stop_text_ends_where_it_is_complete() -> None:
    tokenizer = tiny_tokenizer()
    tokens = tokenizer.encode("What is two plus three? Two plus three is five.")
    endings = Endings(frozenset({2}), ("ee? T", "</answer>"), tokenizer)
    count, ended = cut(endings, tokens)
    assert (
        ended
        and "ee? T" in tokenizer.decode(tokens[:count])
        and "ee? T" not in tokenizer.decode(tokens[: count - 1])
    )
    assert cut(endings, tokens[: count - 1]) == (count - 1, False)
    assert cut(endings, [5, 2, 7]) == (2, True)


def test_stop_texts_end_generation_of_a_model(model: Any) -> None:
    tokenizer = tiny_tokenizer()
    free = hf(model).generate(prompts(), 0)
    stop = tokenizer.decode(free[3].tokens[6:8])
    stopped = hf(model, stop=(stop,)).generate(prompts(), 0)
    expected = [cut(Endings(frozenset({2}), (stop,), tokenizer), c.tokens) for c in free]
    assert [(len(c.tokens), c.ended) for c in stopped] == expected and expected[3][1]
    assert all(
        now.tokens == was.tokens[: len(now.tokens)] for was, now in zip(free, stopped, strict=True)
    )


def test_the_model_is_left_as_it_was_and_its_own_generation_config_has_no_say(model: Any) -> None:
    plain = hf(model).generate(prompts(), 0)
    model.generation_config.repetition_penalty, model.config.use_cache = 3.0, False
    own = model.generation_config
    model.train()
    model.model.layers[0].eval()
    assert [c.tokens for c in hf(model).generate(prompts(), 0)] == [c.tokens for c in plain]
    with pytest.raises(PlanError):
        hf(model, max_new_tokens=512).generate(prompts(), 0)
    assert model.generation_config is own and model.config.use_cache is False
    assert model.training and model.model.layers[1].training and not model.model.layers[0].training


def test_no_room_and_no_prompt_are_one_line(model: Any) -> None:
    with pytest.raises(
        PlanError,
        match="a prompt of 500 tokens and max_new_tokens 24 are more than the model's 512 positions — at most 12",
    ):
        hf(model).generate([Request([5] * 500, (0, 0))], 0)
    with pytest.raises(DataError, match="prompt \\(0, 0\\) has no tokens"):
        hf(model).generate([Request([], (0, 0))], 0)
    assert hf(model).generate([], 0) == []


def continuous(model: Any, **options: Any) -> ContinuousGenerator:
    return ContinuousGenerator(
        ContinuousConfig(**{"max_new_tokens": 24, **options}), model, tiny_tokenizer(), 7
    )


MORE = ({"batch": 2}, {"top_p": 0.8, "temperature": 0.7})


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, *(pytest.param(o, marks=pytest.mark.full) for o in MORE)], ids=str
)
def test_continuous_batching_samples_what_generate_samples(
    model: Any, options: dict[str, Any]
) -> None:
    """Twice as many requests as prompts: equal prompts share their cache, and their samples differ."""
    requests = [Request(p.tokens, (p.key[0], sample)) for p in prompts() for sample in range(2)]
    attention = model.config._attn_implementation
    model.train()
    for one, other in zip(
        hf(model, **options).generate(requests, 4),
        continuous(model, **options).generate(requests, 4),
        strict=True,
    ):
        assert one.tokens == other.tokens and one.ended == other.ended
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)
    assert model.training and model.config._attn_implementation == attention


@pytest.mark.slow
def test_continuous_batching_ends_at_end_tokens_and_stop_texts(model: Any) -> None:
    free = hf(model).generate(prompts(), 0)
    stop = tiny_tokenizer().decode(free[3].tokens[6:8])
    model.generation_config.eos_token_id = [2, free[0].tokens[5], free[1].tokens[9]]
    for options in ({}, {"stop": (stop,)}):
        expected = hf(model, **options).generate(prompts(), 0)
        made = continuous(model, **options).generate(prompts(), 0)
        assert [(c.tokens, c.ended) for c in made] == [(c.tokens, c.ended) for c in expected]
        assert any(c.ended for c in made)
        assert all(len(c.tokens) == len(c.log_probs) for c in made)


@pytest.mark.slow
def test_what_fails_in_continuous_batching_is_said_and_nothing_hangs(model: Any) -> None:
    before = set(threading.enumerate())
    made = continuous(model)
    made.sampler.temperature = None  # type: ignore[assignment]
    with pytest.raises(DrumlineError, match="continuous batching failed: unsupported operand"):
        made.generate(prompts(), 0)
    started = set(threading.enumerate()) - before
    for thread in started:
        # Its work is over, and it is about to end.
        thread.join(60)
    assert [thread.name for thread in started if thread.is_alive()] == []
    assert len(continuous(model, batch=1).generate(prompts()[:2], 0)) == 2
    assert continuous(model).generate([], 0) == []
