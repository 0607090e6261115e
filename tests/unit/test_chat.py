"""Talking to a model: what it is asked, when it stops, what is kept; and which places a model can be opened from."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drumline.config.config import LoRAConfig
from drumline.config.model import ModelConfig
from drumline.errors import CheckpointError, DataError, ModelError, UserError
from drumline.inference import model as inference_model
from drumline.inference.evaluate import HeldOutPrompt, complete_prompts, drop_too_long_prompts
from drumline.inference.model import (
    CONTROLS,
    Conversation,
    Model,
    Printer,
    chat,
    load,
    open_model,
)
from drumline.models.templates import turn_end, turn_tail
from drumline.models.tokenizer import load_tokenizer
from drumline.plan.plan import Plan
from tests.harness import ENV, drumline
from tests.tiny import CHATML, tiny_model_dir, tiny_tokenizer
from tests.unit.test_models_export import save_steps, write_plan


def quietly(phase: str, done: int, total: int | None) -> None:
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("chat") / "model", positions=100_000)


@pytest.fixture
def loaded(folder: Path) -> Model:
    return open_model(str(folder), quietly)


def greedy(loaded: Model, text: str, number: int) -> str:
    """What transformers' own generate says to a rendered text."""
    ids = loaded.tokenizer(text, add_special_tokens=False, return_tensors="pt")
    out = loaded.module.generate(**ids, max_new_tokens=number, do_sample=False)
    return loaded.tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)


SYSTEM = "<|im_start|>system\nBe brief.<|im_end|>\n"


@pytest.mark.parametrize("positions", [48, 400])
@pytest.mark.slow
def test_an_answer_has_the_room_behind_its_own_prompt(
    loaded: Model, monkeypatch: pytest.MonkeyPatch, positions: int
) -> None:
    """All had that of the longest prompt. Also where the model has no position to spare."""
    monkeypatch.setattr(loaded.module.config, "max_position_embeddings", positions)
    ids = list(loaded.tokenizer("drum march " * 30)["input_ids"])
    prompts = [ids[:size] for size in (2, 45, 3, 30, 4)]
    together = complete_prompts(loaded, prompts, 48)
    alone = [complete_prompts(loaded, [prompt], 48)[0] for prompt in prompts]
    assert [(text, made.tokens, made.ended) for text, made in together] == [
        (text, made.tokens, made.ended) for text, made in alone
    ]
    for prompt, (text, made) in zip(prompts, together, strict=True):
        assert made.ended or len(made.tokens) == 48 - len(prompt)
        assert text == loaded.tokenizer.decode(made.tokens, skip_special_tokens=True) and len(
            made.log_probs
        ) == len(made.tokens)


def test_a_prompt_without_room_is_passed_over_with_a_note(
    capsys: pytest.CaptureFixture[str],
) -> None:
    questions = [HeldOutPrompt([1] * size, "") for size in (3, 8, 9, 7)]
    assert [len(question.tokens) for question in drop_too_long_prompts(questions, 8)] == [3, 7]
    assert (
        "note: 2 of 4 held-out prompts leave no room for an answer within data.max_length 8"
        in capsys.readouterr().err
    )
    with pytest.raises(DataError, match="2 of 2 held-out prompts leave no room"):
        drop_too_long_prompts(questions[1:3], 8)


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def test_it_answers_and_keeps_what_was_said(
    loaded: Model, capsys: pytest.CaptureFixture[str]
) -> None:
    talk, ask = Conversation(loaded, 12, 0.0, "Be brief."), "<|im_start|>assistant\n"
    first = talk.answer("one?")
    assert first and first == greedy(loaded, SYSTEM + turn("user", "one?") + ask, 12)
    assert capsys.readouterr().out == CONTROLS.sub("�", first) + "\n"
    second = talk.answer("two?")
    assert second == greedy(
        loaded,
        SYSTEM + turn("user", "one?") + turn("assistant", first) + turn("user", "two?") + ask,
        12,
    )
    assert [answer["role"] for answer in talk.turns] == ["user", "assistant"] * 2


def test_a_model_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    """transformers draws them at random, each time anew."""
    folder = tiny_model_dir(tmp_path / "model")
    tensors = {
        name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if ".1.mlp." not in name
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"model: has no weights for model\.layers\.1\.mlp\.\S+ and \d more"
    ):
        open_model(str(folder), lambda *_: None)


def test_it_stops_where_the_template_ends_a_turn(loaded: Model) -> None:
    """The end-of-sequence token of a base model is another than that of the template put over it."""
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    assert (
        turn_end(tokenizer)
        == tokenizer.convert_tokens_to_ids("<|im_end|>")
        != tokenizer.eos_token_id
    )
    assert set(Conversation(Model(loaded.module, tokenizer, "x"), 9, 0.0, None).ends) == {0, 2}
    assert tokenizer.decode(turn_tail(tokenizer)) == "<|im_end|>\n", (
        "what a reward model was trained on behind an answer"
    )
    assert turn_end(tiny_tokenizer(chat_template=None)) is None
    assert turn_end(tiny_tokenizer(chat_template="{{ raise_exception('no') }}")) is None


def test_old_turns_give_way(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = open_model(str(folder), quietly)
    loaded.module.config.max_position_embeddings = 64
    talk = Conversation(loaded, 20, 0.0, None)
    for line in ("one two three?", "four five six?", "seven?"):
        assert talk.answer(line)
    assert len(talk.turns) < 6 and talk.turns[-2]["content"] == "seven?"
    assert "the oldest turn is forgotten" in capsys.readouterr().err
    assert talk.answer("long " * 100) == "" and talk.turns[-2]["content"] == "seven?", (
        "what was said stays"
    )
    assert "nothing is answered" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options", [{"temperature": -1.0}, {"max_new_tokens": 0}, {"temperature": float("nan")}]
)
def test_an_option_out_of_its_range_is_one_line_and_keeps_the_conversation(
    loaded: Model, options: dict[str, Any]
) -> None:
    with pytest.raises(UserError):
        loaded.chat("one?", **options)
    assert loaded.turns == []
    with pytest.raises(UserError, match=r"generate: (temperature|max_new_tokens): input should be"):
        loaded.generate("one", **options)


def test_an_answer_that_fails_leaves_the_conversation_as_it_was(
    loaded: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk = Conversation(loaded, 5, 0.0, None)
    talk.answer("one?")
    before = [*talk.turns]
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(
            loaded.module, "generate", lambda *_, **__: (_ for _ in ()).throw(MemoryError())
        )
        talk.answer("two?")
    assert talk.turns == before


def test_an_answer_that_is_interrupted_counts_up_to_there(
    loaded: Model, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, streamer: Printer, **__: Any) -> None:
        for token in [0, *loaded.tokenizer("one two")["input_ids"]]:
            streamer.put(torch.tensor([token]))
        raise KeyboardInterrupt

    talk = Conversation(loaded, 5, 0.0, None)
    monkeypatch.setattr(loaded.module, "generate", interrupted)
    assert talk.answer("one?") == "one two"
    assert talk.turns[-1]["content"] == "one two"
    assert capsys.readouterr().out == "one two …\n"


def test_without_a_template_each_line_is_continued(loaded: Model) -> None:
    bare = Model(loaded.module, tiny_tokenizer(chat_template=None), "bare")
    talk = Conversation(bare, 5, 0.0, None)
    talk.answer("one two")
    assert talk.answer("three") == greedy(bare, "three", 5)
    with pytest.raises(UserError, match="no chat template"):
        Conversation(bare, 5, 0.0, "Be brief.")


def test_a_model_has_no_say_over_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    out = Printer(tiny_tokenizer())
    out.on_finalized_text("red: \x1b[31m\n\ttab", stream_end=True)
    assert capsys.readouterr().out == "red: �[31m\n\ttab\n" and out.answer == [
        "red: \x1b[31m\n\ttab"
    ]


def test_a_refusing_template_is_one_line(loaded: Model) -> None:
    strict = (
        CHATML
        + "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system, please') }}{% endif %}"
    )
    with pytest.raises(DataError, match="no system, please"):
        Conversation(
            Model(loaded.module, tiny_tokenizer(chat_template=strict), "x"), 5, 0.0, "Be brief."
        ).answer("one?")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_only_a_terminal_is_told_the_commands(
    is_terminal: bool,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Input(io.StringIO):
        def isatty(self) -> bool:
            return is_terminal

    monkeypatch.setattr("sys.stdin", Input("/exit\n"))
    chat(str(folder), 3, 0.0, None)
    assert ("/exit or Ctrl-D leaves" in capsys.readouterr().err) is is_terminal


@pytest.mark.slow
@pytest.mark.full
def test_the_command_reads_a_pipe(folder: Path) -> None:
    """Answers and nothing else on standard output; `/exit` leaves what follows unread."""
    command = [
        sys.executable,
        "-m",
        "drumline",
        "chat",
        str(folder),
        "--max-new-tokens",
        "6",
        "--temperature",
        "0",
    ]
    ended = subprocess.run(
        command,
        input="one?\n\n/what\n/clear\none?\n/exit\nmore\n",
        capture_output=True,
        text=True,
        env=ENV,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    half = len(ended.stdout) // 2  # the same question twice, with nothing before it
    assert ended.stdout[:half] == ended.stdout[half:] and ended.stdout.endswith("\n") and half > 1
    assert "no command /what" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.slow
@pytest.mark.full
def test_ctrl_c_stops_an_answer(folder: Path) -> None:
    command = [
        sys.executable,
        "-u",
        "-m",
        "drumline",
        "chat",
        str(folder),
        "--max-new-tokens",
        "90000",
        "--temperature",
        "0",
    ]
    chat = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENV,
    )
    try:
        assert chat.stdin is not None and chat.stdout is not None
        chat.stdin.write("one?\n")
        chat.stdin.flush()
        heard = os.read(chat.stdout.fileno(), 1)  # it has begun
        chat.send_signal(signal.SIGINT)
        rest, err = chat.communicate("/exit\n", timeout=60)
    finally:
        chat.kill()
        chat.wait()
    assert chat.returncode == 0 and heard and rest.endswith(" …\n") and "Traceback" not in err, err


# -------------------------------------------------------------------------------------------------------------- places


def save_export(run: Path, **_: Any) -> None:
    from drumline.models.export import export

    export(run, run / "export", "best")


def first_weight(model: Any) -> torch.Tensor:
    return next(iter(model.state_dict().values()))


def test_a_run_of_an_own_module_may_lie_below_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plan.json").write_text("{}")
    model = SimpleNamespace(builder="package.function")
    plan = SimpleNamespace(config=SimpleNamespace(has_own_module=True, model=model))
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    monkeypatch.setattr(Plan, "load", lambda *_: plan)
    monkeypatch.setattr(inference_model, "read_module", lambda _, run_dir, __: ("own", run_dir))
    assert load(f"~/{tmp_path.name}").module == "own"


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [None, save_export])
def test_a_run_is_opened_exported_or_not(
    folder: Path, tmp_path: Path, prepare: Callable[..., None] | None
) -> None:
    plan = write_plan(tmp_path / "run", {"id": str(folder)}, str(folder))
    with pytest.raises(CheckpointError, match="no whole checkpoint"):
        open_model(str(tmp_path / "run"), quietly)
    weights = save_steps(tmp_path / "run", plan, [3.0, 1.0, 2.0])
    if prepare:
        prepare(tmp_path / "run")
    loaded = open_model(str(tmp_path / "run"), quietly)
    assert torch.equal(first_weight(loaded.module), weights[2]["model.embed_tokens.weight"]), (
        "the best"
    )
    assert ("not exported" in loaded.origin) == (prepare is None)


def test_an_adapter_is_laid_over_its_model(folder: Path, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    base = open_model(str(folder), quietly).module
    before = first_weight(base).clone(), base.model.layers[0].self_attn.q_proj.weight.clone()
    model = get_peft_model(
        base, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    )
    model.peft_config["default"].base_model_name_or_path = str(folder)
    model.save_pretrained(tmp_path)  # PEFT writes no tokenizer
    assert (
        open_model(str(tmp_path), quietly).tokenizer.get_vocab()
        == load_tokenizer(str(folder), ModelConfig()).get_vocab()
    )
    tiny_tokenizer(300).save_pretrained(tmp_path)
    loaded = open_model(str(tmp_path), quietly)
    assert len(loaded.tokenizer) == 300, "a tokenizer beside it is its own"
    assert torch.equal(first_weight(loaded.module), before[0])
    assert not torch.equal(loaded.module.model.layers[0].self_attn.q_proj.weight, before[1])


@pytest.mark.slow
def test_an_adapter_over_tied_ends_is_merged_as_it_was_trained(
    folder: Path, tmp_path: Path
) -> None:
    """From a folder of another tool's, with a module that was trained whole, and from a run's export."""
    from peft import PeftModel

    from drumline.models.export import export
    from tests.unit.test_adapters import adapted, move, run_of

    targets, whole = ["q_proj", "lm_head"], ("model.norm",)
    options = LoRAConfig(r=4, targets=targets, modules_to_save=whole)
    model = move(adapted(folder, options)).eval()
    run = run_of(tmp_path, folder, model, adapter=options.model_dump())
    written = export(run, run / "export", "last", adapter=True).path
    ids_BT = torch.arange(24)[None]
    expected = model(ids_BT).logits
    base = open_model(str(folder), quietly).module
    peft = PeftModel.from_pretrained(base, written).eval()
    torch.testing.assert_close(peft(ids_BT).logits, expected, rtol=1e-4, atol=1e-4)
    for place in (written, run):
        loaded = open_model(str(place), quietly).module
        torch.testing.assert_close(loaded(ids_BT).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_what_does_not_write_is_refused(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "architectures": ["LlamaForSequenceClassification"]})
    )
    with pytest.raises(ModelError, match="gives numbers, not text"):
        open_model(str(tmp_path), quietly)
    finished = drumline("chat", tmp_path / "nowhere")
    assert (
        finished.code == 2
        and len(finished.error_lines) == 1
        and "no such file or folder" in finished.err
    )
