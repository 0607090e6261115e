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
from drumline.inference.card import model_card
from drumline.models import adapters
from drumline.models.build import build_model
from drumline.models.export import export
from drumline.models.load import facts, load_config
from drumline.models.shards import canonical_tensors
from drumline.plan.plan import DataPlan, Plan
from drumline.plan.rule import Case
from drumline.plan.rules import check_rules
from drumline.train.setup import Request, make_plan
from tests.harness import write_config
from tests.plans import small_config, small_plan
from tests.tiny import tiny_architecture_dir, tiny_model_dir
from tests.unit.conftest import Run

IDS = torch.arange(24)[None] * 7 % 300
LORA = LoRAConfig(r=4, alpha=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("adapters") / "model")


def base_model(folder: Path, **options: Any) -> Any:
    return build_model(
        str(folder),
        ModelConfig(id=str(folder)),
        0,
        **options,
    )


def base_config(folder: Path) -> Any:
    return load_config(str(folder), ModelConfig(id=str(folder)))


def adapted(
    folder: Path,
    options: LoRAConfig = LORA,
    seed: int = 0,
) -> Any:
    model = base_model(folder)
    adapters.inject(model, options, seed)
    return model


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=300))


def exported_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits(model: Any) -> torch.Tensor:
    return model(input_ids=IDS).logits


def assert_logits(model: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(
        logits(model),
        expected,
        rtol=1e-4,
        atol=1e-4,
    )


def learned(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.data for name, p in model.named_parameters() if p.requires_grad}


def count_learned(model: Any) -> int:
    return sum(value.numel() for value in learned(model).values())


def move(model: Any) -> Any:
    """Change the adapters as if they had been trained."""
    torch.manual_seed(1)
    for value in learned(model).values():
        value += 0.3 * torch.randn_like(value)
    return model


def adapter_config(folder: Path, **sections: Any) -> Config:
    values = {"model": {"id": str(folder)}, "adapter": LORA.model_dump(), **sections}
    return small_config(**values)


def run_of(tmp_path: Path, folder: Path, model: Any, /, **sections: Any) -> Path:
    """Return a run folder with one checkpoint of an adapted model."""
    run_dir = tmp_path / "run"
    config = adapter_config(folder, **sections)
    plan = small_plan(config, run_dir, lr=1e-3, model_path=str(folder))
    run_dir.mkdir()
    plan.save(run_dir / "plan.json")
    checkpoints = run_dir / "checkpoints"
    checkpointer = Checkpointer(
        checkpoints,
        keep=2,
        keep_best=True,
        mode="min",
        asynchronous=False,
    )
    checkpointer.save(1, canonical_tensors(model), {"step": 1}, None)
    (result,) = checkpointer.wait()
    assert result.error is None, result.error

    return run_dir


def test_a_fresh_adapter_changes_nothing_and_only_it_learns(folder: Path) -> None:
    plain = base_model(folder)
    model = adapted(folder)
    assert type(model) is type(plain)
    assert torch.equal(logits(plain), logits(model))

    names = set(learned(model))
    assert len(names) == 2 * 7 * 2

    for name in names:
        assert adapters.is_adapter(name)
        assert "lm_head" not in name
        assert "embed" not in name

    logits(model).sum().backward()
    with_gradient = {name for name, p in model.named_parameters() if p.grad is not None}
    assert with_gradient == names

    saved = set(canonical_tensors(model))
    saved_weights = {name for name in saved if name.startswith("model.")}
    assert saved_weights == {f"model.{name}" for name in names}


def test_first_values_hang_on_seed_and_name_alone(folder: Path) -> None:
    torch.manual_seed(1)
    values = learned(adapted(folder))
    torch.manual_seed(2)
    again = learned(adapted(folder))
    other = learned(adapted(folder, seed=1))
    for name, value in values.items():
        assert torch.equal(value, again[name])
        assert torch.equal(value, adapters.first_values(name, value.shape, 0))
        is_zero = name.endswith(adapters.B)
        assert torch.equal(value, other[name]) == is_zero

    attention = "model.layers.0.self_attn"
    first = values[f"{attention}.q_proj{adapters.A}"]
    second = values[f"{attention}.k_proj{adapters.A}"]
    assert not torch.equal(first, second)
    assert first.abs().max() <= 1 / first.shape[1] ** 0.5


@pytest.mark.parametrize(
    ("targets", "ends"),
    [
        ("attention", {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (["v_proj", "mlp.up_proj"], {"v_proj", "up_proj"}),
    ],
)
def test_targets(
    folder: Path,
    targets: Any,
    ends: set[str],
) -> None:
    names = adapters.target_names(base_model(folder), LoRAConfig(targets=targets))
    assert len(names) == 2 * len(ends)
    assert {name.rpartition(".")[2] for name in names} == ends


@torch.no_grad()
def test_gpt2_has_conv1d(tmp_path: Path) -> None:
    model = gpt2().eval()
    before = logits(model)
    adapters.inject(
        model,
        LoRAConfig(r=4, targets="attention"),
        seed=0,
    )
    # c_attn and c_proj of two blocks, not the c_proj of their MLPs.
    assert len(learned(model)) == 2 * 2 * 2
    assert torch.equal(logits(model), before)

    moved = logits(move(model))
    adapters.merge(model)
    assert dict(model.named_parameters()).keys() == dict(gpt2().named_parameters()).keys()
    assert not torch.allclose(moved, before)
    assert torch.allclose(logits(model), moved, atol=1e-5)


def test_unknown_targets_are_told_with_the_nearest(folder: Path) -> None:
    model = base_model(folder)
    config = base_config(folder)
    with pytest.raises(ModelError, match=r"named 'q_porj' — did you mean q_proj\?"):
        adapters.target_names(model, LoRAConfig(targets=["q_porj"]))

    with pytest.raises(ModelError, match="there are down_proj, embed_tokens, gate_proj"):
        facts(config, 64, LoRAConfig(targets=["nothing"]))

    with pytest.raises(ModelError, match=r"did you mean embed_tokens\?"):
        adapters.target_names(model, LoRAConfig(targets=["embed_token"]))


def test_a_target_that_is_none_is_refused_before_data_are_prepared(
    folder: Path, tmp_path: Path, run: Run
) -> None:
    """The rows need not even be there."""
    cache = tmp_path / "cache"
    path = write_config(
        tmp_path,
        folder,
        rows=1,
        adapter={"kind": "lora", "targets": ["q_porj"]},
    )
    overrides = [f"data.cache_dir={cache}", f"data.train={tmp_path / 'nowhere.jsonl'}"]
    request = Request(load(path, overrides), world_size=1)
    with pytest.raises(ModelError, match=r"did you mean q_proj\?"):
        make_plan(request, on_progress=lambda *_: None)

    code, _, err = run("prepare", path, *overrides)
    assert code == 2
    assert "no layer of LlamaForCausalLM that can get an adapter is named 'q_porj'" in err
    assert not cache.exists()


def test_threads_of_dp_have_no_adapter_over_the_embedding(folder: Path) -> None:
    adapter = LoRAConfig(targets=["embed_tokens"])
    config = adapter_config(
        folder,
        adapter=adapter.model_dump(),
        strategy="dp",
    )
    sizes = facts(base_config(folder), 64, adapter)
    check_rules(Case(config, Mesh(), "cpu", "fp32", sizes))
    with pytest.raises(PlanError, match="an adapter over the embedding × dp"):
        check_rules(Case(config, Mesh(), "cuda", "fp32", sizes))


def test_facts_count_what_learns(folder: Path) -> None:
    config = base_config(folder)
    found = facts(config, 64, LORA)
    plain = facts(config, 64)
    assert found.trainable == count_learned(adapted(folder))
    assert plain.trainable == plain.parameters
    assert found.frozen == plain.parameters

    more_flops = found.flops_per_token - plain.flops_per_token
    assert more_flops == 6 * found.trainable - 2 * plain.parameters


@pytest.mark.slow
def test_merged_export_is_the_model_that_was_trained(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = move(adapted(folder))
    result = export(run_of(tmp_path, folder, model), out, "last")
    assert result.max_logit_difference == 0.0
    assert not (out / "adapter_config.json").exists()

    expected = logits(model.eval())
    assert torch.allclose(logits(exported_model(out)), expected, atol=1e-5)

    base = base_model(folder).eval()
    assert not torch.allclose(logits(base), expected, atol=1e-2)


@pytest.mark.slow
def test_adapter_export_is_what_peft_reads(folder: Path, tmp_path: Path) -> None:
    from peft import AutoPeftModelForCausalLM, PeftModel
    from transformers import AutoTokenizer

    out = tmp_path / "out"
    model = move(adapted(folder))
    result = export(
        run_of(tmp_path, folder, model),
        out,
        "last",
        adapter=True,
    )
    assert result.max_logit_difference == 0.0
    assert (out / "adapter_model.safetensors").exists()
    assert (out / "drumline.json").exists()
    assert not (out / "model.safetensors").exists()

    written = json.loads((out / "adapter_config.json").read_text())
    assert written["r"] == 4
    assert written["lora_alpha"] == 16
    assert written["base_model_name_or_path"] == str(folder)

    layers = ("q", "k", "v", "o", "gate", "up", "down")
    assert set(written["target_modules"]) == {f"{layer}_proj" for layer in layers}

    expected = logits(model.eval())
    by_hand = PeftModel.from_pretrained(base_model(folder), out)
    assert torch.equal(logits(by_hand.eval()), expected)

    by_folder = AutoPeftModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits(by_folder.eval()), expected)
    assert len(AutoTokenizer.from_pretrained(out)) > 300


@pytest.mark.slow
def test_the_adapter_of_a_classifier_names_its_classes(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    labels = ("no", "y*s", "perhaps")
    model = base_model(folder, head="text", labels=labels)
    adapters.inject(model, LORA, 0)
    run = run_of(
        tmp_path,
        folder,
        move(model),
        algorithm={"kind": "classify"},
    )
    plan_file = run / "plan.json"
    data = DataPlan(train_cache="", labels=labels)
    plan = Plan.load(plan_file).model_copy(update={"data": data})
    plan.save(plan_file)
    export(run, out, "last", adapter=True)
    written = json.loads((out / "drumline.json").read_text())
    assert written["labels"] == [*labels]
    assert "| 1 | y\\*s |" in model_card(run, plan, out, "me/mine", adapter=True)


@pytest.mark.parametrize("adapter", [False, True], ids=["merged", "adapter"])
def test_an_empty_adapter_is_not_exported(folder: Path, tmp_path: Path, adapter: bool) -> None:
    out = tmp_path / "out"
    run = run_of(tmp_path, folder, adapted(folder))
    with pytest.raises(ModelError, match="the adapter is empty: every lora_B is zero"):
        export(run, out, "last", adapter=adapter)

    assert not out.exists()

    base = base_model(folder)
    with pytest.raises(ModelError, match="the model has no adapter"):
        adapters.save_adapter(base, out, str(folder), None)


@pytest.mark.slow
def test_an_adapter_over_a_random_model(folder: Path, tmp_path: Path) -> None:
    """Merged into the very weights that the run's seed drew; by itself it would mean nothing to a reader."""
    from drumline.dist.seeds import derive

    out = tmp_path / "out"
    options = ModelConfig(id=str(folder), init="random")
    model = build_model(
        str(folder),
        options,
        seed=derive(5, "weights"),
    )
    adapters.inject(model, LORA, 5)
    section = {"id": str(folder), "init": "random"}
    run = run_of(
        tmp_path,
        folder,
        move(model),
        model=section,
        run={"seed": 5},
    )
    export(run, out, "last")
    again = exported_model(out)
    difference = logits(again) - logits(model.eval())
    assert difference.abs().max() < 1e-4

    with pytest.raises(ModelError, match="lies in no folder"):
        export(run, tmp_path / "other", "last", adapter=True)


@pytest.mark.slow
def test_a_run_in_bf16_is_merged_into_the_base_as_it_was_loaded(
    folder: Path, tmp_path: Path
) -> None:
    """The frozen base is rounded where the run computes with it; what is exported knows nothing of that."""
    from safetensors.torch import load_file

    out = tmp_path / "out"
    model = move(adapted(folder))
    export(run_of(tmp_path, folder, model, precision="bf16"), out, "last")
    base = load_file(folder / "model.safetensors")
    merged = load_file(out / "model.safetensors")
    layer = "model.layers.0.mlp.up_proj"
    factors = learned(model)
    product = factors[f"{layer}{adapters.B}"] @ factors[f"{layer}{adapters.A}"]
    weight = base[f"{layer}.weight"]
    expected = weight + 16 / 4 * product
    assert torch.allclose(merged[f"{layer}.weight"], expected, rtol=0, atol=1e-6)

    rounded = weight.bfloat16().float()
    assert not torch.allclose(rounded, weight, rtol=0, atol=1e-4)

    embedding = "model.embed_tokens.weight"
    assert torch.equal(merged[embedding], base[embedding])


def test_a_plan_without_peft_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan asks for the sizes of adapters on a machine that need not train."""
    monkeypatch.setitem(sys.modules, "peft", None)
    config = load_config(str(tiny_model_dir(tmp_path / "model")), ModelConfig())
    says = "adapter: the package peft is missing — pip install peft"
    with pytest.raises(EnvironmentFault, match=says):
        facts(config, 16, LoRAConfig())


FEED = LoRAFactors(
    r=2,
    alpha=8,
    rslora=True,
    targets=["up_proj", "q_proj"],
)
MORE = LoRAFactors(r=2, targets=["embed_tokens"])
ENDS = ["q_proj", "lm_head", "embed_tokens"]
WHOLE = ("lm_head", "model.norm", "mlp.up_proj")
KINDS = {
    "dora": LoRAConfig(r=4, dora=True, rslora=True),
    "pissa": LoRAConfig(r=4, init="pissa"),
    "fast pissa of all there is, with dora": LoRAConfig(
        r=40,
        alpha=20,
        init="pissa_fast",
        dora=True,
        rslora=True,
    ),
    "whole modules": LoRAConfig(r=4, modules_to_save=WHOLE),
    "tokens": LoRAConfig(r=4, trainable_tokens=(3, 200), targets="attention"),
    "two": LoRAConfig(r=4, targets="attention", more={"feed": FEED}),
    "both ends": LoRAConfig(r=4, targets=ENDS, more={"more": MORE}),
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
    options = KINDS[kind]
    base = base_model(folder).eval()
    model = adapted(folder, options).eval()
    assert torch.allclose(logits(base), logits(model), atol=1e-5)
    assert facts(base_config(folder), 64, options).trainable == count_learned(model)

    expected = logits(move(model).eval())
    assert not torch.allclose(logits(base), expected, atol=1e-2)

    run = run_of(
        tmp_path,
        folder,
        model,
        adapter=options.model_dump(),
    )
    merged = tmp_path / "merged"
    export(run, merged, "last")
    assert_logits(exported_model(merged).eval(), expected)

    apart = tmp_path / "apart"
    export(run, apart, "last", adapter=True)
    assert "pissa" not in (apart / "adapter_config.json").read_text()

    again = adapters.load_adapters(base_model(folder), apart)
    assert_logits(again, expected)

    plain = adapters.merge_loaded(again).eval()
    for name, _ in plain.named_modules():
        assert "base_layer" not in name
        assert "original_module" not in name

    assert_logits(plain, expected)

    if options.more:
        first_alone = adapters.load_adapters(
            base_model(folder),
            apart,
            all_of_them=False,
        )
        assert not torch.allclose(logits(first_alone), expected, atol=1e-2)


@pytest.mark.slow
def test_layers_of_a_mixture_are_named_so_that_peft_takes_none_for_experts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PEFT takes the names `gate_proj` and `down_proj` for the experts, wherever they stand."""
    from peft import PeftModel

    base = tiny_architecture_dir(tmp_path / "base", "deepseek_v3", layers=2)
    model = adapted(base).eval()
    names = learned(model)
    assert any("shared_experts.gate_proj.lora_A" in name for name in names)
    assert any("layers.0.mlp.gate_proj.lora_A" in name for name in names)
    assert any("experts.base_layer.lora_A" in name for name in names)
    assert facts(base_config(base), 64, LORA).trainable == count_learned(model)

    expected = logits(move(model).eval())
    run = run_of(tmp_path, base, model)
    merged = tmp_path / "merged"
    export(run, merged, "last")
    assert_logits(exported_model(merged).eval(), expected)

    apart = tmp_path / "apart"
    export(run, apart, "last", adapter=True)
    assert "PEFT itself would take" not in caplog.text
    saved = json.loads((apart / "adapter_config.json").read_text())
    assert "gate_proj.weight" in saved["target_parameters"]
    assert not {"gate_proj", "up_proj", "down_proj"} & set(saved["target_modules"])
    assert_logits(adapters.load_adapters(base_model(base), apart), expected)
    assert_logits(PeftModel.from_pretrained(base_model(base), str(apart)).eval(), expected)


@pytest.mark.slow
def test_a_warning_of_targets_that_peft_would_take_for_experts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """PEFT has no DoRA over a weight that is named."""
    base = tiny_architecture_dir(tmp_path / "base", "deepseek_v3", layers=2)
    targets = ["gate_proj", "up_proj", "down_proj"]
    model = move(adapted(base, LoRAConfig(r=4, targets=targets, dora=True)).eval())
    assert not any("experts" in name.split(".") for name in learned(model))
    adapters.save_adapter(model, tmp_path, str(base), None)
    warning = "PEFT itself would take the targets down_proj, gate_proj, up_proj for the experts"
    assert warning in caplog.text


@pytest.mark.slow
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
            torch.testing.assert_close(
                parameter,
                whole[name],
                msg=name,
            )


TOKEN_OF_HEAD = {"targets": ["lm_head"], "trainable_tokens": [3]}
TOKEN_OF_SECOND_HEAD = {
    "targets": ["q_proj"],
    "trainable_tokens": [3],
    "more": {"x": {"targets": ["lm_head"]}},
}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"trainable_tokens": [10**6]},
            "token 1000000 has no row: the embedding has 3",
        ),
        (
            {"modules_to_save": ["lm_haed"]},
            "no module 'lm_haed' with weights — did you mean lm_head",
        ),
        (
            {"targets": ["lm_head"], "init": "pissa"},
            "which the embedding looks up",
        ),
        (
            TOKEN_OF_HEAD,
            "lm_head out of adapter.targets, or remove adapter.trainable_tokens",
        ),
        (
            TOKEN_OF_SECOND_HEAD,
            "lm_head out of adapter.more.x.targets, or remove adapter.trainable_tokens",
        ),
        (
            {"targets": ["lm_head"], "modules_to_save": ["embed_tokens"]},
            "the weight of lm_head is trained whole, and gets no adapter",
        ),
    ],
)
def test_what_the_model_does_not_have(
    folder: Path,
    options: dict[str, Any],
    says: str,
) -> None:
    config = LoRAConfig.model_validate(options)
    with pytest.raises(ModelError, match=says):
        adapted(folder, config)


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


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_pissa_fast_draws_on_the_cpu(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An export finds the factors again, maybe on a machine without the run's GPU."""
    matrix = torch.arange(24.0).reshape(shape).sin()
    with torch.random.fork_rng():
        torch.manual_seed(3)
        left, sizes, right = torch.svd_lowrank(matrix, 2, niter=adapters.ROUNDS)
    factors = adapters._approximate_svd(matrix, 2, seed=3)
    assert all(map(torch.equal, factors, (left, sizes, right.T)))

    devices = []
    randn = torch.randn

    def record(*sizes: int, **options: Any) -> torch.Tensor:
        drawn = randn(*sizes, **options)
        devices.append(drawn.device.type)
        return drawn

    monkeypatch.setattr(torch, "randn", record)
    adapters._principal(matrix.to("meta"), 2, 1.0, seed=3)
    assert devices == ["cpu"]
