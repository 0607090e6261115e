"""LoRA: which layers are adapted, what learns, what is saved, and that what is exported is what was trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.checkpoint.save import Checkpointer
from drumline.config.config import Config, LoRAConfig, LoRAFactors
from drumline.config.load import load
from drumline.config.mesh import Mesh
from drumline.config.model import ModelConfig
from drumline.errors import EnvironmentFault, ModelError, PlanError
from drumline.inference.card import card
from drumline.models import adapters
from drumline.models.build import build_model
from drumline.models.export import export
from drumline.models.load import facts, load_config
from drumline.models.shards import canonical_tensors
from drumline.plan.plan import BatchPlan, DataPlan, Plan, Predicted
from drumline.plan.rule import Case
from drumline.plan.rules import check_rules
from drumline.train.setup import Request, make_plan
from tests.harness import write_config
from tests.tiny import tiny_architecture_dir, tiny_model_dir
from tests.unit.conftest import Run

IDS = torch.arange(24)[None] * 7 % 300
LORA = LoRAConfig(r=4, alpha=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("adapters") / "model")


def adapted(folder: Path, options: LoRAConfig = LORA, seed: int = 0) -> Any:
    model = build_model(str(folder), ModelConfig(id=str(folder)), seed=0)
    adapters.inject(model, options, seed)
    return model


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=300))


def learned(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.data for name, p in model.named_parameters() if p.requires_grad}


def move(model: Any) -> Any:
    """Adapters as if they had been trained."""
    torch.manual_seed(1)
    for value in learned(model).values():
        value += 0.3 * torch.randn_like(value)
    return model


def run_of(tmp_path: Path, folder: Path, model: Any, /, **sections: Any) -> Path:
    """A run folder with one checkpoint of an adapted model."""
    values = {
        "model": {"id": str(folder)},
        "data": {"train": [{"kind": "file", "path": "x"}]},
        "adapter": LORA.model_dump(),
        **sections,
    }
    plan = Plan(
        config=Config.model_validate(values), run_dir=str(tmp_path / "run"), mesh=Mesh(), engine="native", device="cpu", backend="gloo",
        precision="fp32", batch=BatchPlan(global_samples=1, micro_batch=1, accumulation=1, eval_micro_batch=1),
        lr=1e-3, steps=3, data=None, model_path=str(folder), predicted=Predicted(),
    )  # fmt: skip
    (tmp_path / "run").mkdir()
    plan.save(tmp_path / "run" / "plan.json")
    checkpointer = Checkpointer(
        tmp_path / "run" / "checkpoints", keep=2, keep_best=True, mode="min", asynchronous=False
    )
    checkpointer.save(1, canonical_tensors(model), {"step": 1}, None)
    (result,) = checkpointer.wait()
    assert result.error is None, result.error
    return tmp_path / "run"


def test_a_fresh_adapter_changes_nothing_and_only_it_learns(folder: Path) -> None:
    plain, model = build_model(str(folder), ModelConfig(id=str(folder)), seed=0), adapted(folder)
    assert type(model) is type(plain)
    assert torch.equal(plain(input_ids=IDS).logits, model(input_ids=IDS).logits)
    names = learned(model)
    assert len(names) == 2 * 7 * 2 and all(adapters.is_adapter(name) for name in names)
    assert not any("lm_head" in name or "embed" in name for name in names)
    model(input_ids=IDS).logits.sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(names)
    saved = canonical_tensors(model)
    assert {name for name in saved if name.startswith("model.")} == {
        f"model.{name}" for name in names
    }


def test_first_values_hang_on_seed_and_name_alone(folder: Path) -> None:
    torch.manual_seed(1)
    a = learned(adapted(folder))
    torch.manual_seed(2)
    b, other = learned(adapted(folder)), learned(adapted(folder, seed=1))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert all(torch.equal(a[name], adapters.first_values(name, a[name].shape, 0)) for name in a)
    assert all(torch.equal(a[name], other[name]) == name.endswith(adapters.B) for name in a)
    first, second = (
        a[f"model.layers.0.self_attn.{layer}{adapters.A}"] for layer in ("q_proj", "k_proj")
    )
    assert not torch.equal(first, second) and first.abs().max() <= 1 / first.shape[1] ** 0.5


@pytest.mark.parametrize(
    ("targets", "ends"),
    [
        ("attention", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (["v_proj", "mlp.up_proj"], {"v_proj", "up_proj"}),
    ],
)
def test_targets(folder: Path, targets: Any, ends: set[str]) -> None:
    model = build_model(str(folder), ModelConfig(id=str(folder)), seed=0)
    names = adapters.target_names(model, LoRAConfig(targets=targets))
    assert len(names) == 2 * len(ends) and {name.rpartition(".")[2] for name in names} == ends


def test_gpt2_has_conv1d(tmp_path: Path) -> None:
    model = gpt2().eval()
    before = model(input_ids=IDS).logits
    with torch.no_grad():
        adapters.inject(model, LoRAConfig(r=4, targets="attention"), seed=0)
        assert len(learned(model)) == 2 * 2 * 2, (
            "c_attn and c_proj of two blocks, not the c_proj of their MLPs"
        )
        assert torch.equal(model(input_ids=IDS).logits, before)
        moved = move(model)(input_ids=IDS).logits
        adapters.merge(model)
        assert set(dict(model.named_parameters())) == set(dict(gpt2().named_parameters()))
        assert not torch.allclose(moved, before) and torch.allclose(
            model(input_ids=IDS).logits, moved, atol=1e-5
        )


def test_unknown_targets_are_told_with_the_nearest(folder: Path) -> None:
    model = build_model(str(folder), ModelConfig(id=str(folder)), seed=0)
    with pytest.raises(ModelError, match=r"named 'q_porj' — did you mean q_proj\?"):
        adapters.target_names(model, LoRAConfig(targets=["q_porj"]))
    with pytest.raises(ModelError, match="there are down_proj, embed_tokens, gate_proj"):
        config = load_config(str(folder), ModelConfig(id=str(folder)))
        facts(config, 64, LoRAConfig(targets=["nothing"]))
    with pytest.raises(ModelError, match=r"did you mean embed_tokens\?"):
        adapters.target_names(model, LoRAConfig(targets=["embed_token"]))


def test_a_target_that_is_none_is_refused_before_data_are_prepared(
    folder: Path, tmp_path: Path, run: Run
) -> None:
    """The rows need not even be there."""
    path = write_config(tmp_path, folder, rows=1, adapter={"kind": "lora", "targets": ["q_porj"]})
    overrides = [f"data.cache_dir={tmp_path / 'cache'}", f"data.train={tmp_path / 'nowhere.jsonl'}"]
    with pytest.raises(ModelError, match=r"did you mean q_proj\?"):
        make_plan(Request(load(path, overrides), world_size=1), on_progress=lambda *_: None)
    code, _, err = run("prepare", path, *overrides)
    assert (
        code == 2
        and "no layer of LlamaForCausalLM that can get an adapter is named 'q_porj'" in err
    )
    assert not (tmp_path / "cache").exists()


def test_threads_of_dp_have_no_adapter_over_the_embedding(folder: Path) -> None:
    adapter = LoRAConfig(targets=["embed_tokens"])
    values = {
        "model": {"id": str(folder)},
        "data": {"train": [{"kind": "file", "path": "x"}]},
        "adapter": adapter.model_dump(),
        "strategy": "dp",
    }
    config = Config.model_validate(values)
    sizes = facts(load_config(str(folder), ModelConfig(id=str(folder))), 64, adapter)
    check_rules(Case(config, Mesh(), "cpu", "fp32", sizes))
    with pytest.raises(PlanError, match="an adapter over the embedding × dp"):
        check_rules(Case(config, Mesh(), "cuda", "fp32", sizes))


def test_facts_count_what_learns(folder: Path) -> None:
    config, model = load_config(str(folder), ModelConfig(id=str(folder))), adapted(folder)
    found, plain = facts(config, 64, LORA), facts(config, 64)
    assert (
        found.trainable == sum(v.numel() for v in learned(model).values())
        and plain.trainable == plain.parameters
    )
    assert found.frozen == plain.parameters
    assert (
        found.flops_per_token == plain.flops_per_token - 2 * plain.parameters + 6 * found.trainable
    )


@pytest.mark.slow
def test_merged_export_is_the_model_that_was_trained(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = move(adapted(folder))
    result = export(run_of(tmp_path, folder, model), tmp_path / "out", "last")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert (
        result.max_logit_difference == 0.0
        and not (tmp_path / "out" / "adapter_config.json").exists()
    )
    expected = model.eval()(input_ids=IDS).logits
    assert torch.allclose(again(input_ids=IDS).logits, expected, atol=1e-5)
    base = build_model(str(folder), ModelConfig(id=str(folder)), 0).eval()
    assert not torch.allclose(base(input_ids=IDS).logits, expected, atol=1e-2)


@pytest.mark.slow
def test_adapter_export_is_what_peft_reads(folder: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoTokenizer

    model = move(adapted(folder))
    result = export(run_of(tmp_path, folder, model), tmp_path / "out", "last", adapter=True)
    assert result.max_logit_difference == 0.0
    assert {p.name for p in (tmp_path / "out").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "drumline.json",
    }
    assert not (tmp_path / "out" / "model.safetensors").exists()
    written = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (written["r"], written["lora_alpha"], written["base_model_name_or_path"]) == (
        4,
        16,
        str(folder),
    )
    assert set(written["target_modules"]) == {
        f"{n}_proj" for n in ("q", "k", "v", "o", "gate", "up", "down")
    }
    base = build_model(str(folder), ModelConfig(id=str(folder)), 0)
    for again in (
        PeftModel.from_pretrained(base, tmp_path / "out"),
        AutoPeftModelForCausalLM.from_pretrained(tmp_path / "out"),
    ):
        assert torch.equal(again.eval()(input_ids=IDS).logits, model.eval()(input_ids=IDS).logits)
    assert len(AutoTokenizer.from_pretrained(tmp_path / "out")) > 300


@pytest.mark.slow
def test_the_adapter_of_a_classifier_names_its_classes(folder: Path, tmp_path: Path) -> None:
    labels = ("no", "y*s", "perhaps")
    model = build_model(str(folder), ModelConfig(id=str(folder)), 0, head="text", labels=labels)
    adapters.inject(model, LORA, 0)
    run = run_of(tmp_path, folder, move(model), algorithm={"kind": "classify"})
    plan = Plan.load(run / "plan.json")
    plan = plan.model_copy(update={"data": DataPlan(train_cache="", labels=labels)})
    plan.save(run / "plan.json")
    export(run, tmp_path / "out", "last", adapter=True)
    assert json.loads((tmp_path / "out" / "drumline.json").read_text())["labels"] == [*labels]
    assert "| 1 | y\\*s |" in card(run, plan, tmp_path / "out", "me/mine", adapter=True)


@pytest.mark.parametrize("adapter", [False, True], ids=["merged", "adapter"])
def test_an_empty_adapter_is_not_exported(folder: Path, tmp_path: Path, adapter: bool) -> None:
    with pytest.raises(ModelError, match="the adapter is empty: every lora_B is zero"):
        export(run_of(tmp_path, folder, adapted(folder)), tmp_path / "out", "last", adapter=adapter)
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelError, match="the model has no adapter"):
        adapters.save_adapter(
            build_model(str(folder), ModelConfig(id=str(folder)), 0),
            tmp_path / "out",
            str(folder),
            None,
        )


def test_an_adapter_over_a_random_model(folder: Path, tmp_path: Path) -> None:
    """Merged into the very weights that the run's seed drew; by itself it would mean nothing to a reader."""
    from transformers import AutoModelForCausalLM

    from drumline.dist.seeds import derive

    own = {"model": {"id": str(folder), "init": "random"}, "run": {"seed": 5}}
    model = build_model(
        str(folder), ModelConfig(id=str(folder), init="random"), seed=derive(5, "weights")
    )
    adapters.inject(model, LORA, 5)
    run = run_of(tmp_path, folder, move(model), **own)
    export(run, tmp_path / "out", "last")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    difference = (again(input_ids=IDS).logits - model.eval()(input_ids=IDS).logits).abs().max()
    assert difference < 1e-4
    with pytest.raises(ModelError, match="lies in no folder"):
        export(run, tmp_path / "other", "last", adapter=True)


def test_a_run_in_bf16_is_merged_into_the_base_as_it_was_loaded(
    folder: Path, tmp_path: Path
) -> None:
    """The frozen base is rounded where the run computes with it; what is exported knows nothing of that."""
    from safetensors.torch import load_file

    model = move(adapted(folder))
    export(run_of(tmp_path, folder, model, precision="bf16"), tmp_path / "out", "last")
    base, merged = (
        load_file(folder / "model.safetensors"),
        load_file(tmp_path / "out" / "model.safetensors"),
    )
    layer = "model.layers.0.mlp.up_proj"
    a, b = (learned(model)[f"{layer}{factor}"] for factor in (adapters.A, adapters.B))
    expected = base[f"{layer}.weight"] + 16 / 4 * b @ a
    assert torch.allclose(merged[f"{layer}.weight"], expected, rtol=0, atol=1e-6)
    assert not torch.allclose(
        base[f"{layer}.weight"].bfloat16().float(), base[f"{layer}.weight"], rtol=0, atol=1e-4
    )
    assert torch.equal(merged["model.embed_tokens.weight"], base["model.embed_tokens.weight"])


def test_a_plan_without_peft_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan asks for the sizes of adapters on a machine that need not train."""
    monkeypatch.setitem(sys.modules, "peft", None)
    config = load_config(str(tiny_model_dir(tmp_path / "model")), ModelConfig())
    with pytest.raises(
        EnvironmentFault, match="adapter: the package peft is missing — pip install peft"
    ):
        facts(config, 16, LoRAConfig())


KINDS = {
    "dora": LoRAConfig(r=4, dora=True, rslora=True),
    "pissa": LoRAConfig(r=4, init="pissa"),
    "fast pissa of all there is, with dora": LoRAConfig(
        r=40, alpha=20, init="pissa_fast", dora=True, rslora=True
    ),
    "whole modules": LoRAConfig(r=4, modules_to_save=("lm_head", "model.norm", "mlp.up_proj")),
    "tokens": LoRAConfig(r=4, trainable_tokens=(3, 200), targets="attention"),
    "two": LoRAConfig(
        r=4,
        targets="attention",
        more={"feed": LoRAFactors(r=2, alpha=8, rslora=True, targets=["up_proj", "q_proj"])},
    ),
}
ENDS = ["q_proj", "lm_head", "embed_tokens"]
KINDS |= {
    "both ends": LoRAConfig(
        r=4, targets=ENDS, more={"more": LoRAFactors(r=2, targets=["embed_tokens"])}
    ),
    "the embedding, dora": LoRAConfig(r=4, targets=["embed_tokens"], dora=True),
    "the head": LoRAConfig(r=4, targets=["q_proj", "lm_head"], rslora=True),
}
AGAIN = ("dora", "pissa")  # with --full: another has both


@pytest.mark.claim(
    "kinds of adapters change nothing at first, and are exported as they were trained"
)
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.full if kind in AGAIN else []) for kind in KINDS]
)
@pytest.mark.slow
def test_kinds_change_nothing_at_first_and_are_exported_as_they_were_trained(
    folder: Path, tmp_path: Path, kind: str
) -> None:
    """Merged for transformers, and apart for PEFT."""
    from transformers import AutoModelForCausalLM

    base, options = build_model(str(folder), ModelConfig(id=str(folder)), 0).eval(), KINDS[kind]
    model = adapted(folder, options).eval()
    assert torch.allclose(base(input_ids=IDS).logits, model(input_ids=IDS).logits, atol=1e-5)
    on_meta = facts(load_config(str(folder), ModelConfig(id=str(folder))), 64, options)
    assert on_meta.trainable == sum(value.numel() for value in learned(model).values())
    expected = move(model).eval()(input_ids=IDS).logits
    assert not torch.allclose(base(input_ids=IDS).logits, expected, atol=1e-2)
    run = run_of(tmp_path, folder, model, adapter=options.model_dump())
    export(run, tmp_path / "merged", "last")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    torch.testing.assert_close(again(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)
    export(run, tmp_path / "apart", "last", adapter=True)
    again = adapters.load_adapters(
        build_model(str(folder), ModelConfig(id=str(folder)), 0), tmp_path / "apart"
    )
    torch.testing.assert_close(again(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)
    plain = adapters.merge_loaded(again).eval()
    assert not any(
        "base_layer" in name or "original_module" in name for name, _ in plain.named_modules()
    )
    torch.testing.assert_close(plain(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)
    assert "pissa" not in (tmp_path / "apart" / "adapter_config.json").read_text()
    if options.more:
        again = adapters.load_adapters(
            build_model(str(folder), ModelConfig(id=str(folder)), 0),
            tmp_path / "apart",
            all_of_them=False,
        )
        assert not torch.allclose(again(input_ids=IDS).logits, expected, atol=1e-2)


@pytest.mark.slow
def test_shared_experts_of_a_mixture_are_adapted_and_experts_are_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PEFT by itself would take `gate_proj` for the experts, whose adapters no merge and no count of ours knows."""
    from transformers import AutoModelForCausalLM

    base = tiny_architecture_dir(tmp_path / "base", "deepseek_v3", layers=2)
    model = adapted(base).eval()
    assert any("shared_experts.gate_proj.lora_A" in name for name in learned(model))
    assert any("layers.0.mlp.gate_proj.lora_A" in name for name in learned(model))
    assert not any("experts" in name.split(".") for name in learned(model))
    counted = facts(load_config(str(base), ModelConfig(id=str(base))), 64, LORA)
    assert counted.trainable == sum(value.numel() for value in learned(model).values())
    expected = move(model).eval()(input_ids=IDS).logits
    run = run_of(tmp_path, base, model)
    export(run, tmp_path / "merged", "last")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    torch.testing.assert_close(merged(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)
    export(run, tmp_path / "apart", "last", adapter=True)
    assert (
        "PEFT itself would take the targets down_proj, gate_proj, up_proj for the experts"
        in caplog.text
    )
    read = adapters.load_adapters(
        build_model(str(base), ModelConfig(id=str(base)), 0), tmp_path / "apart"
    )
    torch.testing.assert_close(read(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_shard_begins_as_its_part_of_one_process(folder: Path) -> None:
    """On the meta device first, as ranks have it: values are filled in from the files, a whole weight at a time."""
    from drumline.models.build import lay_out
    from drumline.models.shards import Values

    for options in KINDS.values():
        model, source = lay_out(str(folder), ModelConfig(id=str(folder)), 0)
        adapters.inject(model, options, 0)
        Values(source, "cpu", 0).fill(model)
        whole = dict(adapted(folder, options).named_parameters())
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter, whole[name], msg=name)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"trainable_tokens": [10**6]}, "token 1000000 has no row: the embedding has 3"),
        (
            {"modules_to_save": ["lm_haed"]},
            "no module 'lm_haed' with weights — did you mean lm_head",
        ),
        ({"targets": ["lm_head"], "init": "pissa"}, "which the embedding looks up"),
        (
            {"targets": ["lm_head"], "trainable_tokens": [3]},
            "lm_head out of adapter.targets, or remove adapter.trainable_tokens",
        ),
        (
            {
                "targets": ["q_proj"],
                "trainable_tokens": [3],
                "more": {"x": {"targets": ["lm_head"]}},
            },
            "lm_head out of adapter.more.x.targets, or remove adapter.trainable_tokens",
        ),
        (
            {"targets": ["lm_head"], "modules_to_save": ["embed_tokens"]},
            "the weight of lm_head is trained whole, and gets no adapter",
        ),
    ],
)
def test_what_the_model_does_not_have(folder: Path, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        adapted(folder, LoRAConfig.model_validate(options))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"dora": True, "more": {"a": {}}}, "length of a whole row"),
        ({"trainable_tokens": [1, 1]}, "stands twice"),
        ({"more": {"default": {}}}, "PEFT means something else"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LoRAConfig.model_validate(options)
