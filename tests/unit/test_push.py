"""`drumline push` to a hub on loopback, the model card, and the type of exported weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from drumline.config.load import load_text
from drumline.errors import DrumlineError, EnvironmentFault, UserError
from drumline.inference.card import _changed_keys, license_of, shorten_paths
from drumline.inference.hub import push
from drumline.models.export import export, find_or_export
from drumline.plan.plan import Plan
from drumline.telemetry.events import Eval, EventLog, Step
from tests.hub import Hub, serving
from tests.tiny import tiny_model_dir
from tests.unit.test_adapters import adapted, move, run_of
from tests.unit.test_models_export import save_steps, write_plan

pytestmark = pytest.mark.slow

TOKEN = "hf_" + "secret" * 5


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of a model whose files are bf16, with a license; its name and metrics are no Markdown."""
    folder = tiny_model_dir(tmp_path / "model")
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# Tiny\n")
    run = tmp_path / "run"
    save_steps(run, write_plan(run, {"id": str(folder)}, str(folder)), [2.0, 1.0])
    log = EventLog(run / "events.jsonl")
    for step, loss in ((0, 3.0), (2, 1.25)):
        log.emit(Eval(step=step, samples=6, seconds=1.0, metrics={"loss": loss, "<b>|": 0.5}))
    numbers: dict[str, Any] = dict.fromkeys(Step.names(), 1) | {
        "step": 2,
        "loss": 1.5,
        "tokens": 4200,
        "seconds": 2.0,
        "memory_bytes": [],
    }
    log.emit(Step(**numbers))
    return run


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    from huggingface_hub import constants

    with serving() as hub:
        for name, value in {
            "ENDPOINT": hub.url,
            "HF_HUB_DISABLE_XET": True,
            "HF_HUB_OFFLINE": False,
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def front(card: str) -> dict[str, Any]:
    return dict(yaml.safe_load(card.split("---\n")[1]))


@pytest.mark.claim(
    "what a push sends is the export with a card of facts, and a token stands in no message"
)
def test_what_arrives_is_the_export_with_a_card_of_facts(
    run: Path, hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.files["model-00001-of-00002.safetensors"] = b"of an earlier push"
    push(run, "me/tiny", private=True, adapter=False, dry_run=False, trust=False)
    assert hub.private is True and f"Bearer {TOKEN}" in hub.tokens
    written = {
        path.name: path.read_bytes()
        for path in (run / "export").iterdir()
        if path.name != "drumline.json"
    }
    card = hub.files.pop("README.md").decode()
    assert hub.files == written, "also what an earlier push left is gone"
    assert front(card)["license"] == "apache-2.0" and front(card)["tags"] == ["drumline", "sft"]
    for fact in (
        "| loss | 3 | 1.25 |",
        r"\<b\>\|",
        "4.2K tokens",
        "last training loss 1.5",
        "`x.jsonl`",
        f"torch {torch.__version__}",
    ):
        assert fact in card, card
    assert str(tmp_path) not in card and TOKEN not in card + "".join(capsys.readouterr())
    config = yaml.safe_load(card.split("```yaml\n")[1].split("```")[0])
    assert config["data"]["train"] == [{"kind": "file", "path": "x.jsonl"}]


def test_a_dry_run_sends_nothing(run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    push(run, "me/tiny", private=False, adapter=False, dry_run=True, trust=False)
    out = capsys.readouterr().out
    assert "model.safetensors" in out and "# tiny" in out and "nothing was sent" in out
    assert not hub.tokens and not hub.files


@pytest.mark.parametrize(
    "name", ["tiny", "me/ti ny", "a/b/c", "me/", "/tiny", "ме/имя", "", "me/" + "x" * 200]
)
def test_a_name_that_is_none(run: Path, name: str) -> None:
    with pytest.raises(UserError, match="write it as ORG/NAME"):
        push(run, name, private=False, adapter=False, dry_run=True, trust=False)


@pytest.mark.claim(
    "what a push sends is the export with a card of facts, and a token stands in no message"
)
def test_refusals_are_a_line_without_the_token(
    run: Path, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    find_or_export(run, False, lambda *_: None)
    hub.private = False
    with pytest.raises(UserError, match="is there already, and public"):
        push(run, "me/tiny", private=True, adapter=False, dry_run=False, trust=False)
    assert not hub.files
    for status, says in (
        (401, "hf auth login"),
        (403, "hf auth login"),
        (400, "the hub answers"),
        (404, "the hub answers"),
    ):
        hub.refuses = status
        with pytest.raises(EnvironmentFault, match=says) as found:
            push(run, "me/tiny", private=False, adapter=False, dry_run=False, trust=False)
        assert TOKEN not in found.value.line()
    monkeypatch.setenv("HF_TOKEN", TOKEN + "\x07ü")
    with pytest.raises(EnvironmentFault) as found:
        push(run, "me/tiny", private=False, adapter=False, dry_run=False, trust=False)
    assert TOKEN not in found.value.line()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(UserError, match="no token for the hub — `hf auth login`"):
        push(run, "me/tiny", private=False, adapter=False, dry_run=False, trust=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no card",
        "---\nlicense: [a, b]\n---\n",
        "---\n: {\n---\n",
        "---\nlicense_name: x\n---\n",
        "---\n- 1\n---\n",
    ],
)
def test_a_license_is_never_invented(tmp_path: Path, text: str) -> None:
    (tmp_path / "README.md").write_text(text)
    assert license_of(tmp_path / "README.md", "me/base", None) == {}
    assert license_of(tmp_path / "none.md", "me/base", None) == {}


def test_a_run_is_named_from_within(
    run: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run)
    push(Path(), "me/tiny", private=False, adapter=False, dry_run=True, trust=False)
    assert "drumline train run.yaml" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("/home/alice smith/secret proj/rows.jsonl", "…/rows.jsonl"),
        ("file:///home/alice/rows.jsonl", "file:…/rows.jsonl"),
        ("file://localhost/home/alice b/rows.jsonl", "file:…/rows.jsonl"),
        ("json:/home/alice/rows.json", "json:…/rows.json"),
        ("sqlite:////home/alice/db.sqlite", "sqlite:…/db.sqlite"),
        ("simplecache::file:///home/alice/x", "simplecache::file:…/x"),
        ("~alice/rows.jsonl", "…/rows.jsonl"),
        ("/home/alice/mine.py:Name", "…/mine.py:Name"),
        ("/usr/bin/python /home/alice/x.py --to=/home/alice/y", "…/python …/x.py --to=…/y"),
        *(
            (same, same)
            for same in (
                "https://x.org/a/b",
                "postgresql://u@h/db",
                "hub:me/rows",
                "and/or/so",
                "/no_think Say yes and/or no",
            )
        ),
    ],
)
def test_whatever_a_path_is_written_like(given: str, shown: str) -> None:
    assert shorten_paths(given) == shown


def test_the_hosts_of_a_cluster_stay_at_home() -> None:
    given = "model: {id: x}\ndata: {train: [x.jsonl]}\nrun: {dir: runs/x}\nlaunch: {kind: ssh, hosts: [alice@10.1.2.3]}\n"
    config = load_text(given + "checkpoint: {url: s3://corp/x, every: 7}", [])
    assert (
        _changed_keys(config)["checkpoint"] == {"every": 7}
        and "launch" not in _changed_keys(config)
        and _changed_keys(config)["run"] == {}
    )


def test_paths_of_the_machine_are_names_alone() -> None:
    given = {
        "a": ["/home/me/rows.jsonl", "~/x/y"],
        "b": "me/model",
        "c": "s3://bucket/a/b",
        "d": "runs/one",
        "e": 3,
    }
    assert shorten_paths(given) == {
        "a": ["…/rows.jsonl", "…/y"],
        "b": "me/model",
        "c": "s3://bucket/a/b",
        "d": "runs/one",
        "e": 3,
    }


@pytest.mark.claim("exported weights have the type that was loaded, or is set")
@pytest.mark.parametrize(
    ("wanted", "dtype"), [("auto", "bf16"), ("fp32", "fp32"), ("fp16", "fp16")]
)
def test_weights_have_the_type_that_was_loaded_or_set(
    run: Path, tmp_path: Path, wanted: str, dtype: str
) -> None:
    plan = Plan.load(run / "plan.json")
    checkpoint = plan.config.checkpoint.model_copy(update={"export_dtype": wanted})
    plan.model_copy(
        update={"config": plan.config.model_copy(update={"checkpoint": checkpoint})}
    ).save(run / "plan.json")
    result = export(run, tmp_path / "out", "last")
    assert (
        result.dtype == dtype
        and (dtype == "fp32" or 0 < result.rounding < 0.02)
        and result.max_logit_difference == 0
    )
    kind = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}[dtype]
    assert json.loads((result.path / "config.json").read_text())["dtype"] == kind


def test_weights_that_a_type_cannot_hold_are_refused(run: Path, tmp_path: Path) -> None:
    plan = Plan.load(run / "plan.json")
    from drumline.checkpoint.save import Checkpointer
    from drumline.models.build import build_model
    from drumline.models.shards import canonical_tensors

    model = build_model(plan.model_path, plan.config.model, seed=0)
    model.get_input_embeddings().weight.data[5] = 1e6
    saver = Checkpointer(
        run / "checkpoints", keep=9, keep_best=True, mode="min", asynchronous=False
    )
    saver.save(9, canonical_tensors(model), {"step": 9}, None)
    saver.wait()
    with pytest.raises(DrumlineError, match=r"fp16 does not hold its weights.*--dtype fp32"):
        export(run, tmp_path / "out", 9, dtype="fp16")
    assert not (tmp_path / "out").exists()


def test_an_adapter_goes_alone_or_merged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_model_dir(tmp_path / "model")
    run = run_of(tmp_path, folder, move(adapted(folder)))
    push(run, "me/tiny", private=False, adapter=True, dry_run=True, trust=False)
    out = capsys.readouterr().out
    assert (
        "adapter_model.safetensors" in out
        and " model.safetensors" not in out
        and "License\nNot known" in out
    )
    card = front(out[out.index("---") :])
    assert card["library_name"] == "peft" and "license" not in card and "base_model" not in card, (
        "a folder is no id of the hub"
    )
    assert find_or_export(run, True, lambda *_: None) == run / "export", "it is not written twice"
    merged = find_or_export(run, False, lambda *_: None)
    assert (
        merged == run / "merged" == find_or_export(run, False, lambda *_: None)
        and (merged / "config.json").exists()
    )
