"""Encoder-decoder models: losses against transformers' own, rows, sizes, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModelForSeq2SeqLM
from transformers.models.auto import modeling_auto

from drumline.algorithms.seq2seq.spec import Seq2SeqConfig
from drumline.algorithms.tokens.objective import NextToken
from drumline.config.data import DataConfig
from drumline.config.load import load_text
from drumline.config.model import ModelConfig
from drumline.data.seq2seq import Seq2SeqBatch, Seq2SeqRowEncoder, collate_seq2seq
from drumline.data.sources import Row
from drumline.errors import ConfigError, DataError, ModelError
from drumline.models.build import build_model
from drumline.models.classes import ENCODER_DECODERS
from drumline.models.head import ForwardWithObjective, require_next_token
from drumline.models.load import facts, load_config
from drumline.planner.seq2seq import resolve_seq2seq
from drumline.system.yaml_lines import write_yaml
from tests.tiny import CHATML, tiny_tokenizer

T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
T5 |= {"vocab_size": 96, "decoder_start_token_id": 0}
STACK = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32, "dropout": 0.0}
STACK |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
STACK |= {"vocab_size": 96}
GEMMA = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
GEMMA |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
KINDS: dict[str, dict[str, Any]] = {
    "t5": {"model_type": "t5", **T5},
    "t5, untied as 1.1": {"model_type": "t5", **T5, "tie_word_embeddings": False},
    "umt5": {"model_type": "umt5", **T5},
    "bart": {"model_type": "bart", **STACK},
    "pegasus": {"model_type": "pegasus", **STACK, "decoder_start_token_id": 0},
    "t5gemma": {"model_type": "t5gemma", "vocab_size": 96, "encoder": GEMMA, "decoder": GEMMA},
}
# Of these the loss takes hidden states, and a few logits at a time.
SPLIT = ("t5", "t5, untied as 1.1", "umt5", "bart", "pegasus")


def section(kind: str) -> ModelConfig:
    return ModelConfig(id=None, config=KINDS[kind])


def build(kind: str) -> Any:
    model = build_model(None, section(kind), seed=0, head="seq2seq")
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.copy_(torch.linspace(-1, 1, 96)[None])
    return model.eval()


def batch_of(start: int, sizes: tuple[tuple[int, int], ...]) -> Seq2SeqBatch:
    """A batch of (source tokens, target tokens) of each row, and a filler behind them."""
    draw = np.random.default_rng(0)
    rows: list[Any] = []
    for source, target in sizes:
        source_ids = draw.integers(4, 96, source)
        target_ids = np.concatenate(([start], draw.integers(4, 96, target)))
        learn = np.ones(target + 1, np.uint8)
        learn[0] = 0
        rows.append([(source_ids, np.zeros(source, np.uint8)), (target_ids, learn)])
    return collate_seq2seq([*rows, None], 0, None)


def test_types_are_those_of_transformers() -> None:
    names = set(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    assert names >= ENCODER_DECODERS


@pytest.mark.parametrize("kind", KINDS)
def test_loss_and_gradients_are_those_of_transformers(kind: str) -> None:
    model = build(kind)
    start = 2 if kind in ("bart", "t5gemma") else 0
    batch = batch_of(start, ((7, 3), (4, 6), (9, 1)))
    assert batch.weight == 10
    module = ForwardWithObjective(model)
    assert module.has_separable_head == (kind in SPLIT)
    labels_BT = batch.targets_BT
    expected = model(
        input_ids=batch.encoder_ids_BS, attention_mask=batch.encoder_mask_BS, labels=labels_BT
    )
    sum_of_transformers = expected.loss * batch.weight
    sum_of_transformers.backward()
    wanted = {}
    for name, weight in model.named_parameters():
        # Pegasus' positions are not trained.
        if weight.requires_grad:
            wanted[name] = weight.grad.clone()
    for chunk in (4, 0):
        model.zero_grad()
        loss_sum, _ = module(batch, NextToken(chunk, has_answers=True).objective)
        torch.testing.assert_close(loss_sum, sum_of_transformers, rtol=1e-5, atol=0)
        loss_sum.backward()
        for name, gradient in wanted.items():
            found = model.get_parameter(name).grad
            torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-5)


def test_a_head_of_its_own_is_read_trained_and_exported(tmp_path: Path) -> None:
    """FLAN-T5's files hold two weights that its config in transformers 5 ties."""
    values = dict(KINDS["t5, untied as 1.1"])
    written = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**values))
    written.save_pretrained(tmp_path / "flan")
    weights = load_file(tmp_path / "flan" / "model.safetensors")
    weights["lm_head.weight"] = torch.randn(96, 32, generator=torch.Generator().manual_seed(0))
    save_file(weights, tmp_path / "flan" / "model.safetensors", {"format": "pt"})
    (tmp_path / "flan" / "config.json").write_text(json.dumps(values))

    section = ModelConfig(id=str(tmp_path / "flan"))
    model = build_model(section.id, section, seed=0, head="seq2seq")
    known = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "flan")
    for name, value in known.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert model.encoder.embed_tokens.weight is model.shared.weight
    assert facts(load_config(section.id, section), 64, head="seq2seq").parameters == sum(
        parameter.numel() for parameter in known.parameters()
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(tmp_path / "export")
    exported = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "export")
    assert torch.equal(exported.lm_head.weight, 2 * known.lm_head.weight)
    assert not exported.config.scale_decoder_outputs


@pytest.mark.parametrize("kind", ["t5", "bart", "t5gemma"])
def test_trials_before_a_run(kind: str) -> None:
    require_next_token(build(kind), "cpu", packed=False)


def test_decoder_that_begins_otherwise_is_refused() -> None:
    config = {"model_type": "mbart", **STACK}
    model = build_model(None, ModelConfig(id=None, config=config), seed=0, head="seq2seq")
    with pytest.raises(ModelError, match="begin its decoder with decoder_start_token_id"):
        require_next_token(model, "cpu", packed=False)


@pytest.mark.parametrize("kind", KINDS)
def test_sizes_of_both_stacks(kind: str) -> None:
    length = 16
    config = load_config(None, section(kind))
    sizes = facts(config, length, head="seq2seq")
    weights = dict(build(kind).named_parameters())
    assert sizes.parameters == sum(weight.numel() for weight in weights.values())
    # Two blocks a layer; the decoder's attend twice. A token is of one stack, so it counts half.
    attention = 12 * 32 * length * (2 + 2 * 2) / 2
    assert sizes.layers == 2
    assert sizes.layers * sizes.attention_flops == attention
    products = 0.0
    for name, weight in weights.items():
        # Two for a forward, and two for each gradient. The encoder's tokens of T5Gemma are looked up,
        # and all tokens of a T5 whose head has a weight of its own.
        is_looked_up = name == "shared.weight" and "lm_head.weight" in weights
        if name != "model.encoder.embed_tokens.weight" and not is_looked_up:
            products += (4 + 2 * weight.requires_grad) * weight.numel() / 2
    assert sizes.flops_per_token == pytest.approx(products + attention)
    assert "encoder" in sizes.uncut
    assert "encoder" in sizes.whole_sequences


def encoder(template: str | None = None, **data: Any) -> Seq2SeqRowEncoder:
    settings = {"train": [{"kind": "file", "path": "unused"}], "max_length": 64, **data}
    tokenizer = tiny_tokenizer(chat_template=template)
    return Seq2SeqRowEncoder(tokenizer, 0, DataConfig.model_validate(settings))


def sides(using: Seq2SeqRowEncoder, values: dict[str, Any]) -> list[tuple[str, str]]:
    """(what is read, what is learned) of each side, decoded."""
    sample = using.encode(Row("here:1", values))
    assert sample is not None
    shown = []
    for segment in sample.segments:
        learned = segment.learn.astype(bool)
        decode = using.tokenizer.decode
        shown.append((decode(segment.tokens[~learned]), decode(segment.tokens[learned])))
    return shown


START = "<|endoftext|>"


def test_rows_of_texts() -> None:
    row = {"prompt": "two plus three?", "completion": "five"}
    assert sides(encoder(), row) == [("two plus three?", ""), (START, "five<|im_end|>")]


def test_rows_of_conversations() -> None:
    question = {"role": "user", "content": "two plus three?"}
    answer = {"role": "assistant", "content": "five"}
    asked = "<|im_start|>user\ntwo plus three?<|im_end|>\n<|im_start|>assistant\n"
    wanted = [(asked, ""), (START + "\n", "five<|im_end|>")]
    assert sides(encoder(CHATML), {"messages": [question, answer]}) == wanted
    both = {"prompt": "two plus three?", "completion": "five"}
    assert sides(encoder(CHATML), both) == wanted


def test_each_side_is_cut_to_max_length() -> None:
    row = Row("here:1", {"prompt": "one two three four", "completion": "five six seven eight"})
    for truncation in ("right", "left"):
        sample = encoder(max_length=4, truncation=truncation).encode(row)
        assert sample is not None
        source, target = sample.segments
        assert (len(source.tokens), len(target.tokens)) == (4, 4)
        assert sample.truncated
        # The decoder's first token stays.
        assert target.tokens[0] == 0
        assert target.target_count == 3
    assert encoder(max_length=4, truncation="drop").encode(row) is None
    with pytest.raises(DataError, match=r"tokens of the prompt, longer than data\.max_length 4"):
        encoder(max_length=4, truncation="error").encode(row)


def test_rows_that_are_refused() -> None:
    with pytest.raises(DataError, match="no prompt for the encoder"):
        encoder().encode(Row("here:1", {"text": "a"}))
    with pytest.raises(DataError, match="no answer of the assistant at their end"):
        encoder(CHATML).encode(Row("here:1", {"messages": [{"role": "user", "content": "a"}]}))
    with pytest.raises(ConfigError, match="learns the completion alone"):
        encoder(learn_on="all")
    with pytest.raises(ConfigError, match=r"data\.reasoning"):
        encoder(reasoning="mask")


def test_an_empty_prompt_is_refused_also_between_special_tokens() -> None:
    using = encoder()
    eos = using.tokenizer.eos_token
    using.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"$A {eos}", special_tokens=[(eos, using.tokenizer.eos_token_id)]
    )
    assert using.tokenizer("")["input_ids"]
    with pytest.raises(DataError, match="here:1: the prompt is empty"):
        using.encode(Row("here:1", {"prompt": " ", "completion": "five"}))


def test_images_are_refused_as_of_other_models_of_text() -> None:
    row = Row("here:1", {"prompt": "a", "completion": "b", "images": ["a.png"]})
    with pytest.raises(DataError, match="holds images, and text alone is read here"):
        encoder().encode(row)


def config_of(*overrides: str) -> Any:
    text = "data: {train: [{kind: file, path: unused}]}\nmodel: {id: none}\n"
    return load_text(text, list(overrides))


def test_a_preview_names_as_many_segments_as_a_row_has() -> None:
    """A row that is refused has none."""
    assert Seq2SeqConfig().segment_names(2) == ["encoder", "decoder"]
    assert Seq2SeqConfig().segment_names(0) == []


def test_sft_becomes_seq2seq() -> None:
    said: list[str] = []
    t5 = AutoConfig.for_model("t5", **T5)
    config = resolve_seq2seq(config_of("algorithm={kind: sft, loss_chunk: 7}"), t5, said.extend)
    algorithm = config.algorithm
    assert algorithm.model_dump() == {"kind": "seq2seq", "loss_chunk": 7, "decoder_start": 0}
    assert not config.data.packing
    assert "seq2seq in place of sft" in said[0]
    # What is resolved stays as it is.
    assert resolve_seq2seq(config, t5, said.extend) == config
    assert len(said) == 1
    # A plan writes what is set into the YAML.
    written = write_yaml(config.model_dump(mode="json", exclude_unset=True))
    assert load_text(written, []).algorithm == algorithm


@pytest.mark.parametrize(
    ("overrides", "kind", "message"),
    [
        (("algorithm=pretrain",), "t5", "which pretrain does not train"),
        (("algorithm=dpo",), "t5", "which dpo does not train"),
        (("algorithm=seq2seq",), "llama", "has no encoder beside its decoder"),
        (("algorithm={kind: seq2seq, decoder_start: 5}",), "t5", "begins with token 0, not 5"),
    ],
)
def test_what_does_not_go_together(overrides: tuple[str, ...], kind: str, message: str) -> None:
    values = {}
    if kind == "t5":
        values = T5
    config = AutoConfig.for_model(kind, **values)
    with pytest.raises(ModelError, match=message):
        resolve_seq2seq(config_of(*overrides), config, list)
