"""Exports: transformers reads back the model that was trained, and nothing of anybody else's is touched."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drumline import __version__
from drumline.checkpoint.load import read_pointer
from drumline.checkpoint.remote import choose
from drumline.checkpoint.save import Checkpointer
from drumline.config.model import ModelConfig
from drumline.errors import CheckpointError, DrumlineError, EnvironmentFault
from drumline.inference.model import open_plan
from drumline.models import export as module
from drumline.models.build import build_model
from drumline.models.export import _portable_name, export, plan_of
from drumline.models.shards import canonical_tensors
from drumline.models.templates import read_template
from drumline.plan.plan import Plan
from tests.plans import small_config, small_plan
from tests.tiny import CHATML, tiny_architecture_dir, tiny_model_dir

TEMPLATE = CHATML + "{# own #}"


def write_plan(run: Path, model: dict[str, Any], model_path: str | None, kind: str = "sft") -> Plan:
    data = {"train": [{"kind": "file", "path": "x.jsonl"}]}
    config = small_config(model=model, algorithm={"kind": kind}, data=data)
    plan = small_plan(config, run, lr=1e-3, model_path=model_path)
    run.mkdir(parents=True, exist_ok=True)
    plan.save(run / "plan.json")
    return plan


def save_steps(
    run: Path, plan: Plan, metrics: list[float | None]
) -> dict[int, dict[str, torch.Tensor]]:
    """Save a checkpoint for each metric, the weights moved on between; return the weights of each step."""
    model = build_model(plan.model_path, plan.config.model, seed=0, head=plan.config.head)
    checkpointer = Checkpointer(
        run / "checkpoints", keep=9, keep_best=True, mode="min", asynchronous=False
    )
    weights = {}
    for step, metric in enumerate(metrics, start=1):
        torch.manual_seed(step)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn_like(parameter)

        tensors = canonical_tensors(model) | {"optim.x.step": torch.ones(1)}
        checkpointer.save(step, tensors, {"step": step}, metric)
        (result,) = checkpointer.wait()

        assert result.error is None, result.error

        weights[step] = {name: value.clone() for name, value in model.state_dict().items()}

    return weights


def write_run(
    root: Path, model: dict[str, Any], folder: Path, kind: str = "sft"
) -> dict[int, dict[str, torch.Tensor]]:
    """Write a run with one checkpoint to `root`/run, and return its weights by step."""
    run = root / "run"
    return save_steps(run, write_plan(run, model, str(folder), kind), [1.0])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of three checkpoints, the second the best; its model says how to generate, the config gives a chat template."""
    folder = tiny_model_dir(tmp_path / "model")
    generation = {"eos_token_id": [2, 0], "do_sample": True, "temperature": 0.3}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    template = tmp_path / "own.jinja"
    template.write_text(TEMPLATE)
    run = tmp_path / "run"
    plan = write_plan(run, {"id": str(folder), "chat_template": str(template)}, str(folder))
    torch.save(save_steps(run, plan, [3.0, 1.0, 2.0]), tmp_path / "weights.pt")
    return run


def read_back(folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return dict(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).state_dict())


def trained(run: Path, step: int) -> dict[str, torch.Tensor]:
    return torch.load(run.parent / "weights.pt", weights_only=True)[step]


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert torch.equal(value, wanted[name]), name


def left_over(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith("."))


@pytest.mark.parametrize(("which", "step"), [("last", 3), ("best", 2), (1, 1)])
@pytest.mark.slow
def test_the_checkpoint_that_was_asked_for(
    run: Path, tmp_path: Path, which: Any, step: int
) -> None:
    seen: list[tuple[int, int | None]] = []

    def show(phase: str, done: int, total: int | None) -> None:
        seen.append((done, total))

    out = tmp_path / "out"
    result = export(run, out, which, show)

    assert result.path == out
    assert result.step == step
    assert result.max_logit_difference == 0.0
    assert seen == [(done, 4) for done in range(5)]

    assert_same(read_back(out), trained(run, step))
    origin = json.loads((out / "drumline.json").read_text())

    assert origin.pop("torch") == torch.__version__
    assert origin.pop("transformers")
    assert origin == {
        "drumline": __version__,
        "run": str(run),
        "checkpoint": f"step-{step:08d}",
        "step": step,
        "dtype": "fp32",
    }
    assert left_over(tmp_path) == []


def save_one_tensor(root: Path, step: int, metric: float | None, **options: Any) -> None:
    """Save a checkpoint of one tensor; two are kept."""
    checkpointer = Checkpointer(root, keep=2, asynchronous=False, **options)
    checkpointer.save(step, {"model.w": torch.ones(1)}, {"step": step}, metric)
    checkpointer.wait()


def kept_steps(root: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in root.glob("step-*"))


def test_the_best_of_those_that_are_kept(tmp_path: Path) -> None:
    root = tmp_path / "run" / "checkpoints"
    for step, metric in enumerate((1.0, 2.0, 3.0), start=1):
        save_one_tensor(root, step, metric, keep_best=False, mode="min")

    assert kept_steps(root) == [2, 3]

    best = read_pointer(root, "best")
    assert best is not None
    assert best.name == "step-00000002"

    # Of an older version, which had removed the best one.
    (root / "best").write_text("step-00000001\n")
    _, chosen, _ = choose(f"file://{tmp_path / 'run'}", "best")

    assert chosen == "checkpoints/step-00000003"


def test_values_of_another_metric_are_not_compared(tmp_path: Path) -> None:
    """After `--allow eval.metric`; those of an older version, which does not say what they are of, count."""
    root = tmp_path / "checkpoints"
    found = []
    metrics = [
        ("min loss", 1.1),
        ("min loss", 1.5),
        ("max acc", None),
        ("max acc", 0.6),
        ("max acc", 0.5),
    ]

    for step, (mode, metric) in enumerate(metrics, start=1):
        save_one_tensor(root, step, metric, keep_best=True, mode=mode)
        best = read_pointer(root, "best")
        assert best is not None
        found.append(best.name)

    assert [int(name.removeprefix("step-")) for name in found] == [1, 1, 3, 4, 4]
    assert kept_steps(root) == [4, 5]


def flip_a_bit(path: Path, position: int) -> None:
    """Damage one byte of a file; a negative position counts from its end."""
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_damaged_shard_is_found_by_whoever_reads_it(run: Path, tmp_path: Path) -> None:
    checkpoint = run / "checkpoints" / "step-00000002"
    shard = next(checkpoint.glob("*.distcp"))
    flip_a_bit(shard, -200)
    with pytest.raises(CheckpointError, match=r"distcp.*sha256"):
        open_plan(plan_of(run, False), checkpoint)


def test_the_base_of_an_adapter_has_its_name_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    model = ModelConfig(id="a/b")
    copy = tmp_path / "hub" / "models--a--b" / "snapshots" / "1"

    assert _portable_name(model, str(copy)) == "a/b"
    assert _portable_name(model, "/elsewhere") == "/elsewhere"


@pytest.mark.slow
def test_texts_end_where_a_template_ends_answers(tmp_path: Path) -> None:
    """A base model ends texts by <|endoftext|>; what was trained with chatml also by <|im_end|>, for whatever serves the folder."""
    from transformers import AutoTokenizer, GenerationConfig

    folder = tiny_model_dir(tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    write_run(tmp_path, {"id": str(folder), "chat_template": "chatml"}, folder)
    out = export(tmp_path / "run", tmp_path / "out", "last").path

    assert GenerationConfig.from_pretrained(out).eos_token_id == [0, 2]
    assert AutoTokenizer.from_pretrained(out).chat_template == read_template("chatml")


@pytest.mark.slow
def test_the_padding_of_a_reward_model_ends_no_text(tmp_path: Path) -> None:
    """transformers finds the last token before the padding: with one token for both it would read the score one place too early."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tiny_model_dir(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    config_path = folder / "config.json"
    config = json.loads(config_path.read_text())
    config_path.write_text(json.dumps(config | {"pad_token_id": 5}))
    write_run(tmp_path, {"id": str(folder)}, folder, "reward")
    out = export(tmp_path / "run", tmp_path / "out", "last").path
    model = AutoModelForSequenceClassification.from_pretrained(out)
    tokenizer = AutoTokenizer.from_pretrained(out)

    assert model.config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.pad_token_id != tokenizer.eos_token_id

    turn = {"role": "user", "content": "one"}
    short = tokenizer.apply_chat_template([turn], tokenize=False).strip()
    long = tokenizer.apply_chat_template([turn, turn], tokenize=False).strip()

    assert short.endswith(tokenizer.eos_token)

    both = model(**tokenizer([short, long], padding=True, return_tensors="pt")).logits
    alone = model(**tokenizer([short], return_tensors="pt")).logits

    assert torch.allclose(both[0], alone[0], atol=1e-5)


@pytest.mark.slow
def test_what_a_class_freezes_comes_from_the_models_files(tmp_path: Path) -> None:
    """A checkpoint has the trainable weights alone; the biases of these routers keep the values that the files give them."""
    folder = tmp_path / "model"
    tiny_architecture_dir(folder, "ernie4_5_moe", layers=2)
    tensors = load_file(folder / "model.safetensors")
    (bias,) = [name for name in tensors if "e_score_correction_bias" in name]
    tensors[bias] += torch.arange(4.0)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    weights = write_run(tmp_path, {"id": str(folder)}, folder)
    found = read_back(export(tmp_path / "run", tmp_path / "out", "last").path)
    assert_same(found, weights[1])
    # By another name than in the files.
    (read,) = [value for name, value in found.items() if name.endswith("e_score_correction_bias")]

    assert torch.equal(read, tensors[bias])


@pytest.mark.slow
def test_all_that_goes_with_the_weights(run: Path, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    folder = export(run, tmp_path / "out", "last").path
    tokenizer = AutoTokenizer.from_pretrained(folder)

    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.eos_token == "<|im_end|>"

    generation = GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == [2, 0]
    assert generation.do_sample is True
    assert generation.temperature == 0.3
    assert AutoConfig.from_pretrained(folder).use_cache is True
    assert not list(folder.glob("*.bin")), "safetensors only"


@pytest.mark.slow
def test_files_have_the_mode_of_the_umask(run: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        folder = export(run, tmp_path / "out", "last").path
    finally:
        os.umask(before)

    assert (folder / "model.safetensors").exists()

    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize(("dtype", "kind"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
@pytest.mark.slow
def test_half_the_bytes_on_request(
    run: Path, tmp_path: Path, dtype: str, kind: torch.dtype
) -> None:
    result = export(run, tmp_path / "out", "last", dtype=dtype)
    assert result.max_logit_difference == 0.0

    config = json.loads((result.path / "config.json").read_text())
    assert f"torch.{config['dtype']}" == str(kind)

    rounded = {name: value.to(kind) for name, value in trained(run, 3).items()}
    assert_same(read_back(result.path, kind), rounded)
    with pytest.raises(EnvironmentFault, match="no dtype 'int3'"):
        export(run, tmp_path / "other", "last", dtype="int3")


@pytest.mark.slow
def test_a_model_written_out_by_its_config(tmp_path: Path) -> None:
    """Untied weights, the tokenizer from elsewhere, and an attention that this machine has not."""
    run = tmp_path / "run"
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 320,
        "tie_word_embeddings": False,
    }
    tokenizer = tiny_model_dir(tmp_path / "model")
    model = {"id": None, "init": "random", "config": config, "tokenizer": str(tokenizer)}
    plan = write_plan(run, model, None)
    weights = save_steps(run, plan, [None])
    flash = plan.config.model.model_copy(update={"attention": "flash_attention_2"})
    changed = plan.config.model_copy(update={"model": flash})
    plan.model_copy(update={"config": changed}).save(run / "plan.json")
    result = export(run, tmp_path / "out", "best")

    assert result.max_logit_difference == 0.0

    assert_same(read_back(result.path), weights[1])


@pytest.mark.slow
def test_an_older_export_is_replaced_and_nothing_else(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    export(run, out, 1)

    assert export(run, out, "last").step == 3

    assert_same(read_back(out), trained(run, 3))
    assert left_over(tmp_path) == []

    (out / "drumline.json").unlink()
    with pytest.raises(EnvironmentFault, match="not an export of Drumline"):
        export(run, out, 1)

    assert_same(read_back(out), trained(run, 3))
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(EnvironmentFault):
        export(run, file, 1)

    assert file.read_text() == "mine"


@pytest.mark.slow
def test_a_folder_that_reads_back_otherwise_is_not_kept(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export(run, out, 1)
    original = module._read_back

    def read_another(*arguments: Any) -> Any:
        model = original(*arguments)
        model.get_output_embeddings().weight.data *= 1.01
        return model

    monkeypatch.setattr(module, "_read_back", read_another)
    with pytest.raises(DrumlineError, match="does not read back as the same model"):
        export(run, out, "last")

    assert_same(read_back(out), trained(run, 1))
    assert left_over(tmp_path) == []


@pytest.mark.slow
def test_damage_is_noticed(run: Path, tmp_path: Path) -> None:
    newest = run / "checkpoints" / "step-00000003"
    (shard,) = newest.glob("*.distcp")
    flip_a_bit(shard, shard.stat().st_size // 2)
    with pytest.raises(CheckpointError, match=shard.name):
        export(run, tmp_path / "out", 3)

    assert export(run, tmp_path / "out", "last").step == 2, "the newest whole one"


def test_where_there_is_nothing_to_export(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"plan\.json"):
        export(tmp_path, out, "last")

    with pytest.raises(CheckpointError, match="step-00000009"):
        export(run, out, 9)

    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "plan.json").write_text((run / "plan.json").read_text())
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        export(empty, out, "last")

    assert not out.exists()


def test_where_it_cannot_be_written(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentFault, match="cannot write"):
        export(run, tmp_path / "file" / "out", "last")
