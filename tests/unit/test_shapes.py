"""Shapes of known models, held against the counts of parameters that their publishers give."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from drumline.config.config import LoRAConfig
from drumline.config.model import Head, ModelConfig
from drumline.errors import ModelError
from drumline.models.load import facts, load_config, whole_config
from drumline.models.shapes import (
    KNOWN,
    check_length,
    find,
    hub_id,
    list_similar_names,
    names_to_count,
    with_config,
)
from drumline.models.text_part import build_on_meta_device, text_config_of
from drumline.plan.facts import ModelFacts
from drumline.planner.question import Flags, load_with_flags
from drumline.planner.sizes import SHIPPED, FoundModel, sizes_of
from tests.harness import ROOT

TEXTS = names_to_count()

# As the hub counts the tensors of their safetensors files; None: the name's own figure, to a tenth.
PUBLISHED = {
    "gemma-3-4b": 4_300_079_472,
    "gemma-3-12b": 12_187_325_040,
    "gemma-3-27b": 27_432_406_640,
    "qwen3-vl-2b": 2_127_532_032,
    "qwen3-vl-4b": 4_437_815_808,
    "qwen3-vl-8b": 8_767_123_696,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "llama-4-scout": 108_641_793_536,
    "llama-4-maverick": 401_583_781_376,
    "deepseek-v3": 671_026_419_200 - 58 * 256,  # the routers' corrections are buffers
    "qwen3-vl-30b-a3b": 31_070_754_032,
    "mistral-small-3.1-24b": 24_011_361_280,
    "ministral-3-3b": 3_849_090_048,
    "ministral-3-8b": 8_918_026_716 - 476,  # scales of fp8
    "smollm3-3b": 3_075_098_624,
    "olmo-3-7b": 7_298_011_136,
    "olmo-3-32b": 32_233_522_176,
    "phi-4-mini": 3_836_021_760,
    "minimax-m2.7": 228_689_764_864 - 62 * 256,  # the routers' corrections are buffers
    "kimi-k2": 1_026_408_232_448 - 60 * 384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-embedding-0.6b": 595_776_512,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "phi-2": 2_779_683_840,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "smollm2-1.7b": 1_711_376_384,
    "qwen2.5-vl-3b": 3_754_622_976,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen2.5-vl-32b": 33_452_718_336,
    "qwen2.5-vl-72b": 73_410_777_344,
    "internvl3.5-1b": 1_060_897_792,
    "internvl3.5-8b": 8_528_318_464,
    "smolvlm2-2.2b": 2_246_784_880,
    "smolvlm2-500m": 507_482_304,
    "smolvlm2-256m": 256_484_928,
    "lfm2-350m": 354_483_968,
    "lfm2-700m": 742_489_344,
    "lfm2-1.2b": 1_170_340_608,
    "lfm2-2.6b": 2_569_272_320,
    "granite-4.0-h-micro": 3_191_396_096,
    "granite-4.0-h-tiny": 6_939_037_248,
    "falcon-h1-0.5b": 521_411_104,
    "falcon-h1-1.5b": 1_554_863_488,
}
# The same, with the layer that predicts the token after the next one, which transformers leaves out:
# a block, a product of two widths by one, and three norms. GLM's has an embedding and a head of its
# own, and its routers' corrections are buffers.
WITH_NEXT_LAYER = {
    "glm-4.5": 358_337_791_296 - 2 * 151_552 * 5120 - 90 * 160,
    "glm-4.5-air": 110_468_824_832 - 2 * 151_552 * 4096 - 46 * 128,
    "qwen3-next-80b-a3b": 81_324_862_720,
    "qwen3.5-0.8b": 873_438_784,
    "qwen3.5-2b": 2_274_069_824,
    "qwen3.5-4b": 4_659_865_088,
    "qwen3.5-9b": 9_653_104_368,
    "qwen3.5-27b": 27_781_427_952,
    "qwen3.5-35b-a3b": 35_951_822_704,
    "qwen3.5-122b-a10b": 125_086_497_008,
    "qwen3.5-397b-a17b": 403_397_928_944,
}
# Published billions, which the counted ones round to. Those of cards and papers are Gemma 4's, InternVL's,
# Granite's, LFM2's and T5Gemma's; all others are the hub's count of the tensors in the files.
BILLIONS = {
    "qwen2.5-vl-3b": "3.75",
    "qwen2.5-vl-7b": "8.29",
    "qwen2.5-vl-32b": "33.5",
    "qwen2.5-vl-72b": "73.4",
    "internvl3.5-1b": "1.1",
    "internvl3.5-2b": "2.3",
    "internvl3.5-4b": "4.7",
    "internvl3.5-8b": "8.5",
    "internvl3.5-14b": "15.1",
    "smolvlm2-2.2b": "2.25",
    "smolvlm2-500m": "0.507",
    "smolvlm2-256m": "0.256",
    "llava-onevision-0.5b": "0.894",
    "llava-onevision-7b": "8.03",
    "gemma-4-e2b": "5.1",
    "gemma-4-e4b": "8",
    "minimax-m2": "229",
    "ministral-3-14b": "13.9",
    "qwen3-vl-235b-a22b": "236",
    "lfm2-350m": "0.354",
    "lfm2-700m": "0.742",
    "lfm2-1.2b": "1.17",
    "lfm2-2.6b": "2.57",
    "granite-4.0-h-micro": "3",
    "granite-4.0-h-tiny": "7",
    "granite-4.0-h-small": "32",
    "falcon-h1-0.5b": "0.521",
    "falcon-h1-1.5b": "1.55",
    "falcon-h1-1.5b-deep": "1.55",
    "falcon-h1-3b": "3.15",
    "falcon-h1-7b": "7.59",
    "falcon-h1-34b": "33.6",
}
BILLIONS_OF_ENCODERS = {
    "t5-small": "0.0605",
    "t5-base": "0.223",
    "t5-large": "0.738",
    "t5-3b": "2.85",
    "t5-11b": "11.3",
    "t5gemma-2b-2b": "5.6",
    "t5gemma-9b-2b": "12.3",
    "t5gemma-9b-9b": "20.3",
    "bart-base": "0.139",
    "bart-large": "0.406",
    "e5-small-v2": "0.0334",
    "e5-base-v2": "0.109",
    "e5-large-v2": "0.335",
    "all-minilm-l6-v2": "0.0227",
    "multilingual-e5-base": "0.278",
    "multilingual-e5-large": "0.560",
    "bge-m3": "0.568",
    "bge-reranker-base": "0.278",
    "bge-reranker-large": "0.560",
    "bge-reranker-v2-m3": "0.568",
}
# As their cards say, to a hundredth.
ON_CARDS = {
    "gemma-4-26b-a4b": 25.8e9,
    "gemma-4-31b": 31.3e9,
    "nemotron-3-nano-30b-a3b": 31.6e9,
    "nemotron-3-super-120b-a12b": 120e9,
    "deepseek-v3.2": 671e9,
}


@pytest.mark.parametrize("name", WITH_NEXT_LAYER)
def test_sizes_of_models_that_predict_two_tokens(name: str) -> None:
    known = sizes_of(FoundModel(with_config(KNOWN[name], ModelConfig(id=name)), None), 1024, "lm")
    hidden = known.hidden
    block = sum(weight.numel for weight in known.block_weights[-1])
    next_layer = block + 2 * hidden * hidden + 3 * hidden
    assert known.parameters + next_layer == WITH_NEXT_LAYER[name]


def whole_parameters(name: str, sizes: ModelFacts) -> int:
    """Return the parameters that are published, of which only a language model's may be trained."""
    config = whole_config(None, with_config(KNOWN[name], ModelConfig(id=name)))
    if text_config_of(config) is None:
        return sizes.parameters
    return sum(weight.numel() for weight in build_on_meta_device(config).parameters())


@pytest.mark.parametrize("name", ON_CARDS)
def test_sizes_are_those_of_the_card(name: str) -> None:
    known = sizes_of(FoundModel(with_config(KNOWN[name], ModelConfig(id=name)), None), 1024, "lm")
    assert whole_parameters(name, known) == pytest.approx(ON_CARDS[name], rel=0.01)


def rounded(count: int, figure: str) -> str:
    """Return a count in billions, with as many decimals as the published figure."""
    _, _, decimals = figure.partition(".")
    return f"{count / 1e9:.{len(decimals)}f}"


@pytest.mark.parametrize("name", BILLIONS)
def test_sizes_round_to_the_published_billions(name: str) -> None:
    known = sizes_of(FoundModel(with_config(KNOWN[name], ModelConfig(id=name)), None), 1024, "lm")
    assert rounded(whole_parameters(name, known), BILLIONS[name]) == BILLIONS[name]


@pytest.mark.parametrize("name", BILLIONS_OF_ENCODERS)
def test_sizes_of_encoders_round_to_the_published_billions(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    heads: dict[str | None, Head] = {None: "seq2seq", "embed": "embedding", "rerank": "text"}
    known = KNOWN[name]
    head = heads[known.algorithm]
    found = FoundModel(with_config(known, ModelConfig(id=name)), None)
    sizes = sizes_of(found, 512, head, labels=["relevance"])
    count = sizes.parameters
    if head == "embedding":
        # The files have the pooler of BERT, which is not trained.
        count += sizes.hidden * (sizes.hidden + 1)
    assert rounded(count, BILLIONS_OF_ENCODERS[name]) == BILLIONS_OF_ENCODERS[name]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("intfloat/e5-base-v2", "embed"),
        ("BAAI/bge-m3", "embed"),
        ("BAAI/bge-reranker-v2-m3", "rerank"),
        ("google-t5/t5-base", "sft"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "sft"),
    ],
)
def test_a_known_model_is_planned_for_the_algorithm_that_trains_it(name: str, kind: str) -> None:
    assert load_with_flags(None, [], Flags(model=name)).config.algorithm.kind == kind
    asked = load_with_flags(None, [], Flags(model=name, algorithm="classify"))
    assert asked.config.algorithm.kind == "classify"


def test_gemma_4_has_a_name_of_its_own_for_the_experts_of_a_token() -> None:
    model = with_config(KNOWN["gemma-4-26b-a4b"], ModelConfig(id="gemma-4-26b-a4b"))
    known = sizes_of(FoundModel(model, None), 512, "lm")
    assert (known.experts, known.experts_per_token) == (128, 8)


def test_versions_of_one_shape_share_a_line() -> None:
    """Qwen3.8 27B has the shape of Qwen3.5 27B."""
    assert "qwen3.8-27b" not in TEXTS and "qwen3.5-27b" in TEXTS
    model = with_config(KNOWN["qwen3.8-27b"], ModelConfig(id="qwen3.8-27b"))
    same = with_config(KNOWN["qwen3.5-27b"], ModelConfig(id="qwen3.5-27b"))
    counts = [sizes_of(FoundModel(each, None), 512, "lm") for each in (model, same)]
    assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if index % 4 == 0 else pytest.mark.full)
        for index, name in enumerate(TEXTS)
    ],
)
def test_sizes_that_come_with_the_package_are_those_of_the_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another length, too; and the number of parameters is that which is published."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = with_config(KNOWN[name], ModelConfig(id=name))
    made, found = (
        facts(load_config(None, model), 3000),
        sizes_of(FoundModel(model, None), 3000, "lm"),
    )
    # FLOPs of attention are scaled from another length, which may round.
    assert found.attention_flops == pytest.approx(made.attention_flops, rel=1e-15)
    found = replace(found, attention_flops=made.attention_flops)
    assert made == found, "python scripts/known_sizes.py counts anew"
    if name in PUBLISHED:
        assert whole_parameters(name, made) == PUBLISHED[name]
    current = SHIPPED.read_text().splitlines()[0] == metadata.version("transformers")
    assert any(tmp_path.rglob("*.json")) is not current, (
        "they are counted where transformers is another one"
    )


def test_sizes_come_with_the_package_for_the_version_that_is_pinned() -> None:
    version, *lines = SHIPPED.read_text().splitlines()
    assert (
        f"transformers=={version}\n" in (ROOT / "constraints.txt").read_text()
        and [line.split()[0] for line in lines] == TEXTS
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"config": {"mlp_bias": True}},
        {"head": "score"},
        {"frozen": ["model.embed_tokens"]},
        {"adapter": LoRAConfig(dora=True)},
    ],
)
@pytest.mark.slow
def test_any_other_model_than_a_known_one_is_counted(
    changed: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    known, how = KNOWN["smollm2-135m"], {"head": "lm", **changed}
    found = FoundModel(with_config(known, ModelConfig(id="x", config=how.pop("config", {}))), None)
    assert sizes_of(found, 128, **how) != sizes_of(
        FoundModel(with_config(known, ModelConfig(id="x")), None), 128, "lm"
    )
    assert any(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("name", "active"),
    [("mixtral-8x7b", 12.9e9), ("qwen3-30b-a3b", 3.3e9), ("qwen3-235b-a22b", 22.2e9)],
)
def test_a_token_meets_the_experts_that_are_chosen_for_it(name: str, active: float) -> None:
    found = facts(load_config(None, with_config(KNOWN[name], ModelConfig(id=name))), 128)
    looked_up = found.vocab_size * found.hidden
    products = (found.flops_per_token - found.layers * found.attention_flops) / 6
    assert products + looked_up == pytest.approx(active, rel=0.02), "as published"


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("llama-3.1-8b", "llama-3.1-8b"),
        ("Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-chat-hf", "llama-2-7b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b"),
        ("Qwen/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
        ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("openai-community/gpt2", "gpt2"),
        ("mistralai/Mistral-Small-24B-Base-2501", "mistral-small-24b"),
        ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama-4-scout"),
        ("google/gemma-3-27b-it", "gemma-3-27b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("deepseek-ai/DeepSeek-V2", None),
        ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
        ("Qwen/Qwen3-4B-Thinking-2507", "qwen3-4b-2507"),
        ("Qwen/Qwen3-8B-2507", None),
        ("Qwen/Qwen3.8-27B", "qwen3.8-27b"),
        ("Qwen/Qwen3.5-9B-Base", "qwen3.5-9b"),
        ("zai-org/GLM-4.5-Air-Base", "glm-4.5-air"),
        ("allenai/Olmo-3-7B-Think", "olmo-3-7b"),
        ("allenai/Olmo-3-1125-32B", "olmo-3-32b"),
        ("mistralai/Ministral-3-8B-Instruct-2512-BF16", "ministral-3-8b"),
        ("mistralai/Mistral-Small-3.2-24B-Instruct-2506", "mistral-small-3.2-24b"),
        ("HuggingFaceTB/SmolLM3-3B-Base", "smollm3-3b"),
        ("google/gemma-4-31B-it", "gemma-4-31b"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "nemotron-3-nano-30b-a3b"),
        ("moonshotai/Kimi-K2-Instruct", "kimi-k2"),
        ("deepseek-ai/DeepSeek-R1-0528", "deepseek-r1-0528"),
        ("deepseek-ai/DeepSeek-R1-Distill-Llama-8B", None),
        ("Qwen/Qwen2.5-VL-72B-Instruct", "qwen2.5-vl-72b"),
        ("OpenGVLab/InternVL3_5-8B-HF", "internvl3.5-8b"),
        ("HuggingFaceTB/SmolVLM2-500M-Video-Instruct", "smolvlm2-500m"),
        ("llava-hf/llava-onevision-qwen2-0.5b-ov-hf", "llava-onevision-0.5b"),
        ("google/gemma-4-E4B-it", "gemma-4-e4b"),
        ("MiniMaxAI/MiniMax-M2", "minimax-m2"),
        ("mistralai/Ministral-3-14B-Instruct-2512", "ministral-3-14b"),
        ("Qwen/Qwen3-VL-235B-A22B-Instruct", "qwen3-vl-235b-a22b"),
        ("Qwen/Qwen3-Next-80B-A3B-Thinking", "qwen3-next-80b-a3b"),
        ("LiquidAI/LFM2-2.6B", "lfm2-2.6b"),
        ("ibm-granite/granite-4.0-h-tiny-base", "granite-4.0-h-tiny"),
        ("tiiuae/Falcon-H1-1.5B-Deep-Base", "falcon-h1-1.5b-deep"),
        ("google-t5/t5-base", "t5-base"),
        ("google/t5gemma-2b-2b-prefixlm-it", "t5gemma-2b-2b"),
        ("google/flan-t5-base", None),
        ("facebook/bart-large", "bart-large"),
        ("somebody/bart-it", None),
        ("intfloat/e5-base-v2", "e5-base-v2"),
        ("BAAI/bge-reranker-v2-m3", "bge-reranker-v2-m3"),
        ("somebody/else", None),
    ],
)
def test_a_model_is_found_by_short_name_and_hub_id(said: str, name: str | None) -> None:
    assert find(said) == (KNOWN[name] if name else None)


def test_every_row_is_found_by_its_own_id() -> None:
    assert {name: find(row.id) for name, row in KNOWN.items()} == KNOWN


def test_names_on_the_hub() -> None:
    assert hub_id("qwen3-8b") == "Qwen/Qwen3-8B"
    # Never another model than was asked for.
    assert hub_id("llama-3.1-8b-instruct") == "meta-llama/Llama-3.1-8B-Instruct"
    assert hub_id("Meta-Llama-3-8B-Instruct") == "meta-llama/Meta-Llama-3-8B-Instruct"
    assert (
        hub_id("gemma-3-4b-it") == "google/gemma-3-4b-it"
        and hub_id("gemma-2-9b-it") == "google/gemma-2-9b-it"
    )
    assert hub_id("llama-3.3-70b-instruct") == "meta-llama/Llama-3.3-70B-Instruct"
    assert (
        hub_id("llama-2-7b-chat") == "llama-2-7b-chat"
        and hub_id("qwen3-8b-base") == "qwen3-8b-base"
    ), "not known how it is written"
    assert hub_id("me/qwen3-8b") == "me/qwen3-8b" and hub_id("runs/x/export") == "runs/x/export"
    assert list_similar_names("lama-3.1-8b")[0] == "llama-3.1-8b"


def test_a_shape_is_a_llama_that_trains() -> None:
    from drumline.models.build import build_model

    sizes = {
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "kv_heads": 2,
        "intermediate": 64,
        "vocabulary": 64,
    }
    model = ModelConfig.model_validate({"shape": sizes})
    config = load_config(None, model)
    assert (
        config.model_type,
        config.num_key_value_heads,
        config.intermediate_size,
        config.vocab_size,
    ) == ("llama", 2, 64, 64)
    built = build_model(None, model, seed=0)
    assert sum(p.numel() for p in built.parameters()) == facts(config, 8).parameters
    again = ModelConfig.model_validate(model.model_dump())
    assert again == model, "as a plan writes it and ranks read it"


def test_a_model_may_have_no_end_of_its_own() -> None:
    """XLNet's config has -1 positions."""
    for positions in (None, -1, 96):
        check_length(positions, 96)
    with pytest.raises(ModelError, match="96 tokens are longer than the model's 95 positions"):
        check_length(95, 96)
