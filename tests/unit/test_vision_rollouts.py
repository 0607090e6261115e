"""Rollouts of prompts with images: what is sampled is the policy, and rewards read the paths."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoImageProcessor

from drumline.config.config import Config
from drumline.config.rollouts import HFGenerator as HFSection
from drumline.data.batches import Episodes
from drumline.data.cache import TokenCache
from drumline.data.images import collate_vision_episodes, image_arguments
from drumline.data.prepare import prepare
from drumline.models.image_tokens import Vision
from drumline.models.tokenizer import load_tokenizer
from drumline.rl.generate import HFGenerator, Request, Sampler, VisionPrompts
from tests.harness import vision_rows, write_rows
from tests.tiny import tiny_vision_dir
from tests.tiny_vision import tiny_family_dir
from tests.vision_setups import ROWS, built, vision_of

pytestmark = pytest.mark.skipif(
    hasattr(AutoImageProcessor, "_backends"),
    reason="this transformers reads images with torchvision alone",
)
TESTED = ("qwen3_vl", "qwen2_5_vl", "gemma3", "internvl", "smolvlm")
NEW_TOKENS = 5


@pytest.fixture(scope="module", params=TESTED)
def vision(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vision:
    """A model of a family; the folder around it has prompts with and without images."""
    root = tmp_path_factory.mktemp(request.param)
    if request.param == "qwen3_vl":
        tiny_vision_dir(root / "model")
    else:
        tiny_family_dir(root / "model", request.param)
    write_rows(root / "rows.jsonl", vision_rows(root, 6))
    return vision_of(root / "model")


def prompts_of(folder: Path, vision: Vision, **data: Any) -> TokenCache:
    values = {
        "model": {"id": vision.path},
        "algorithm": {"kind": "grpo", "generator": {"kind": "hf", "max_new_tokens": NEW_TOKENS}},
        "data": {"train": [ROWS], "workers": 1, "cache_dir": str(folder / "cache"), **data},
    }
    config = Config.model_validate(values)
    return TokenCache.open(prepare(config, vision.path, folder, vision=vision).train_cache)


def sampler(vision: Vision, model: Any, **options: Any) -> HFGenerator:
    """Return the policy's own sampler. `options`: of its section."""
    return HFGenerator(
        HFSection(max_new_tokens=NEW_TOKENS, batch=4, **options),
        model,
        load_tokenizer(vision.path, vision.model),
        seed=0,
        vision=VisionPrompts(partial(image_arguments, vision=vision), vision.token_id),
    )


def requests_of(cache: TokenCache, completions: int) -> list[Request]:
    """Return the requests for some completions of each prompt."""
    requests = []
    for sample in range(len(cache)):
        tokens = cache.segments(sample)[0][0].tolist()
        for index in range(completions):
            requests.append(Request(tokens, (sample, index), cache.meta(sample)))
    return requests


def test_what_is_sampled_is_the_policy(vision: Vision) -> None:
    """The sampler's log-probs are those of the policy over prompt, images and completion."""
    cache = prompts_of(Path(vision.path).parent, vision, max_length=256)
    model = built(vision)
    generator = sampler(vision, model)
    requests = requests_of(cache, completions=2)
    completions = generator.generate(requests, step=0)
    episodes = Episodes.start(
        [torch.tensor(request.tokens).numpy() for request in requests],
        [torch.tensor(completion.tokens).numpy() for completion in completions],
        images=[request.images for request in requests],
    )
    batch = collate_vision_episodes(episodes, range(len(requests)), 0, None, vision)
    with torch.no_grad():
        logits = model.eval()(**batch.inputs()).logits
    log_probs_BT = torch.log_softmax(logits, -1)[:, :-1]

    assert batch.shared is None

    for row, (request, completion) in enumerate(zip(requests, completions, strict=True)):
        start = len(request.tokens)
        for index, (token, found) in enumerate(
            zip(completion.tokens, completion.log_probs, strict=True)
        ):
            wanted = float(log_probs_BT[row, start + index - 1, token])

            assert found == pytest.approx(wanted, abs=1e-4)

    alone = generator.generate(requests[:1], step=0)[0]

    assert alone.tokens == completions[0].tokens


def test_a_completion_is_continued_behind_its_images(vision: Vision) -> None:
    """As partial rollouts do; greedily, so that the rest is that of the whole completion."""
    cache = prompts_of(Path(vision.path).parent, vision, max_length=256)
    generator = sampler(vision, built(vision), top_k=1)
    requests = requests_of(cache, completions=1)
    wholes = generator.generate(requests, step=0)
    begun = []
    expected = []
    for request, whole in zip(requests, wholes, strict=True):
        if whole.length > 2:
            tokens = [*request.tokens, *whole.tokens[:2]]
            begun.append(replace(request, tokens=tokens, max_new_tokens=NEW_TOKENS - 2))
            expected.append(whole)
    assert begun
    for rest, whole in zip(generator.generate(begun, step=2), expected, strict=True):
        assert rest.tokens == whole.tokens[2:]
        assert rest.log_probs == pytest.approx(whole.log_probs[2:], abs=1e-4)
        assert rest.ended == whole.ended


def test_rewards_read_the_paths_of_images(vision: Vision) -> None:
    folder = Path(vision.path).parent
    cache = prompts_of(folder, vision, max_length=256)
    metas = [cache.meta(sample) for sample in range(len(cache))]

    for meta in metas:
        for path in meta["images"]:
            assert Path(path).parent == folder / "images"
            assert Path(path).is_file()

    assert sorted(len(meta["images"]) for meta in metas) == [0, 0, 1, 1, 2, 2]
    assert cache.info["images"] == 6


def test_a_prompt_that_would_lose_an_image_is_left_out(vision: Vision) -> None:
    folder = Path(vision.path).parent
    full = prompts_of(folder, vision, max_length=256)
    longest = int(full.lengths.max())
    # The cut goes beyond the header of the turn, into the first image.
    room = longest - 15
    short = prompts_of(folder, vision, max_length=room + NEW_TOKENS, truncation="left")

    assert 0 < len(short) < len(full)

    for sample in range(len(short)):
        grids = short.meta(sample)["grid"]
        wanted = sum(vision.tokens(tuple(grid)) for grid in grids)
        tokens, _ = short.segments(sample)[0]

        assert int((tokens == vision.token_id).sum()) == wanted


@pytest.mark.parametrize("top_k", [0, 1, 2])
def test_a_token_without_a_feature_is_never_sampled(top_k: int) -> None:
    """Its logit is the largest. The log-probs are those of all tokens, as training computes them."""
    logits_BV = torch.tensor([[1.0, 9.0, 2.0]]).repeat(64, 1)
    seeds_B = torch.arange(64)
    sampler = Sampler(1.0, top_k, banned=(1,))
    noisy_BV, log_probs_B = sampler.choose(logits_BV, seeds_B, torch.zeros_like(seeds_B))
    chosen_B = noisy_BV.argmax(1)

    assert not (chosen_B == 1).any()

    wanted_B = torch.log_softmax(logits_BV, 1).gather(1, chosen_B[:, None])[:, 0]
    torch.testing.assert_close(log_probs_B, wanted_B)

    if top_k == 1:
        assert set(chosen_B.tolist()) == {2}
