"""Whatever stands in a YAML, a model's files, rows, JSON, a template or on the command line: one line, no traceback, no hang.

Each case runs in this process under an alarm. The cases are the same on every machine (`derandomize`). For more, of other seeds:

    DRUMLINE_FUZZ=20000 python -m pytest tests/unit/test_fuzz.py -n0 --timeout 0
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers.utils.chat_template_utils import render_jinja_template

from drumline import cli
from drumline.config.config import Config
from drumline.config.load import load, load_text, to_yaml
from drumline.errors import ConfigError, DataError
from drumline.foreign import parse_json, translate_exceptions
from drumline.models import rendering
from tests.tiny import CHATML, tiny_model_dir

pytestmark = pytest.mark.slow

MORE = int(os.environ.get("DRUMLINE_FUZZ", "0"))
SECONDS = 30  # of one case: a waiting limit, not a measurement


def cases(number: int) -> Any:
    return settings(
        max_examples=MORE or number,
        derandomize=not MORE,
        deadline=None,
        database=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
        ],
    )


class Hang(KeyboardInterrupt):
    """A case that does not come to its end: the one thing that no boundary turns into an error of its input."""


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def one_line(*arguments: str) -> str:
    """Run a command; what it says on stderr. Fails on a traceback, a hang, a net, and more than one line."""
    said, out = io.StringIO(), io.StringIO()
    code: object = 0
    with alarm(), contextlib.redirect_stderr(said), contextlib.redirect_stdout(out):
        try:
            cli.main(list(arguments))
        except SystemExit as ended:
            code = ended.code
    text = said.getvalue()
    errors = [line for line in text.splitlines() if line.startswith("error:")]
    assert "unexpected error" not in text and "Traceback" not in text, text
    usage = "Usage:" in text or "─ Error ─" in text
    assert code in (0, 2) and (code == 0 or len(errors) == 1 or usage), (code, text)
    assert all(len(line) < 6000 for line in errors)
    return text


RUN: dict[str, Any] = {
    "data": {"train": [{"kind": "file", "path": "rows.jsonl"}]},
    "run": {"steps": 1, "dir": "run"},
}

numbers = st.sampled_from(
    [
        0,
        -1,
        1,
        2,
        7,
        10**9,
        2**63 - 1,
        -(2**63),
        10**30,
        10**400,
        0.5,
        -0.5,
        1e300,
        1e-300,
        float("inf"),
        float("nan"),
        1.0,
    ]
)
words = st.sampled_from(
    [
        "",
        " ",
        "x",
        "none",
        "auto",
        "null",
        "true",
        "x" * 5000,
        "a/" * 3000,
        "\u0000",
        "\u202e",
        "😀",
        "../..",
        "/dev/zero",
        "/",
        "~",
        "*",
        "{",
        "package:",
        "hub:x",
    ]
)
texts = words | st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
plain = numbers | texts | st.booleans() | st.none()
values = st.recursive(
    plain,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def places(model: Any = Config, prefix: str = "", depth: int = 0) -> list[str]:
    from drumline.config.mistakes import _sections

    found = []
    for name, field in model.model_fields.items():
        found.append(prefix + name)
        if depth < 3:
            found += [
                place
                for section in _sections(field.annotation)
                for place in places(section, f"{prefix}{name}.", depth + 1)
            ]
    return sorted(set(found))


@pytest.mark.claim("any input ends in one line: no traceback, no hang")
@cases(150)
@given(place=st.sampled_from(places()), value=values)
def test_any_value_at_any_place_of_the_yaml(place: str, value: Any) -> None:
    made = json.loads(json.dumps(RUN))
    inside = made
    *sections, last = place.split(".")
    for section in sections:
        inside = (
            inside.setdefault(section, {}) if isinstance(inside.get(section, {}), dict) else inside
        )
    inside[last] = value
    with alarm():
        try:
            config = load_text(yaml.safe_dump(made, allow_unicode=True), [], "c.yaml")
        except ConfigError as error:
            assert error.line().isprintable() and len(error.line()) < 6000
        else:
            assert load_text(to_yaml(config), [], "again.yaml") == config


@cases(80)
@given(
    text=st.text(max_size=60)
    | st.text("[]{}:,-&*!|>'\"#%@` \n\t0a~?", max_size=60)
    | st.binary(max_size=40)
)
def test_any_bytes_as_a_config(tmp_path: Path, text: str | bytes) -> None:
    (tmp_path / "t.yaml").write_bytes(
        text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    )
    with alarm(), pytest.raises(ConfigError) as error:
        load(tmp_path / "t.yaml", [])
    assert error.value.line().isprintable()


@cases(80)
@given(
    text=st.text(max_size=40)
    | st.text('[]{}:,"\\ud80019e-+.', max_size=60)
    | values.map(json.dumps)
)
def test_any_json(text: str) -> None:
    with alarm():
        try:
            json.dumps(parse_json(text, "x", DataError, numbers=True)).encode()
        except DataError as error:
            assert error.line().isprintable()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a model, rows and a config that work; the current one, and all that is looked for outside of it is not there."""
    folder = tmp_path_factory.mktemp("fuzz")
    tiny_model_dir(folder / "model")
    (folder / "rows.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'
    )
    made = {**RUN, "model": {"id": "model"}, "batch": {"global_samples": 1}, "strategy": "single"}
    made["data"] = {**RUN["data"], "max_length": 64}
    (folder / "c.yaml").write_text(yaml.safe_dump(made))
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        # The hub as one without a network sees it.
        for place in (
            "huggingface_hub.constants.HF_HUB_OFFLINE",
            "transformers.utils.hub.constants.HF_HUB_OFFLINE",
        ):
            patch.setattr(place, True)
        yield folder


DRY = ("train", "c.yaml", "--dry-run", "run.device=cpu")
KINDS = ("sft", "pretrain", "dpo", "reward", "grpo", "classify")
COMMANDS = (
    "train",
    "plan",
    "prepare",
    "convert",
    "export",
    "eval",
    "chat",
    "strategies",
    "c.yaml",
    "model",
    "--resume",
)
COMMANDS += (
    "--json",
    "--to",
    "--model",
    "--cluster",
    "--length",
    "--check",
    "-y",
    "--which",
    "strategy=ddp",
    "a=",
    "=",
)


@pytest.mark.claim("any input ends in one line: no traceback, no hang")
@cases(25)
@given(arguments=st.lists(st.sampled_from(COMMANDS) | texts, min_size=1, max_size=5))
def test_any_command_line(home: Path, arguments: list[str]) -> None:
    one_line(*arguments, *["--dry-run"] * ("train" in arguments))


@cases(20)
@given(
    arguments=st.lists(
        st.sampled_from(("--model", "model", "--cluster", "--data", "rows.jsonl", "--length"))
        | texts,
        max_size=5,
    )
)
def test_any_command_line_of_init(home: Path, arguments: list[str]) -> None:
    """It plans with the model that is named, and would convert one that is installed: here none is."""
    with contextlib.suppress(FileNotFoundError):
        (home / "new.yaml").unlink()
    one_line("init", "new.yaml", "-y", "--model", "model", *arguments)


@contextlib.contextmanager
def with_key(file: Path, key: str, value: Any) -> Iterator[None]:
    before = file.read_text()
    file.write_text(json.dumps({**json.loads(before), key: value}))
    try:
        yield
    finally:
        file.write_text(before)


CONFIG_KEYS = [
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_theta", "rope_scaling", "tie_word_embeddings",
    "hidden_act", "pad_token_id", "eos_token_id", "bos_token_id", "torch_dtype", "dtype", "attention_bias", "mlp_bias", "auto_map",
    "initializer_range", "use_cache", "architectures", "num_labels", "id2label", "label2id", "layer_types", "sliding_window",
    "quantization_config", "text_config", "vision_config", "attn_implementation", "num_experts", "transformers_version", "pretraining_tp",
    "problem_type", "is_encoder_decoder", "chunk_size_feed_forward", "configuration_files", "per_layer_config", "base_model_tp_plan",
]  # fmt: skip
TOKENIZER_KEYS = [
    "tokenizer_class", "model_max_length", "pad_token", "eos_token", "bos_token", "unk_token", "chat_template", "added_tokens_decoder",
    "auto_map", "additional_special_tokens", "extra_special_tokens", "clean_up_tokenization_spaces", "padding_side", "truncation_side",
    "add_bos_token", "backend", "add_prefix_space", "legacy", "model_input_names", "split_special_tokens", "is_local", "tokenizer_file",
    "sep_token", "cls_token", "processor_class", "name_or_path", "fix_mistral_regex", "fast_tokenizer_files", "vocab", "merges",
]  # fmt: skip


@cases(25)
@given(key=st.sampled_from(CONFIG_KEYS), value=values)
def test_any_value_in_a_models_config(home: Path, key: str, value: Any) -> None:
    with with_key(home / "model" / "config.json", key, value):
        said = one_line(*DRY)
    assert "error:" not in said or "model" in said, said


@cases(20)
@given(key=st.sampled_from(TOKENIZER_KEYS), value=values)
def test_any_value_in_a_tokenizers_config(home: Path, key: str, value: Any) -> None:
    with with_key(home / "model" / "tokenizer_config.json", key, value):
        one_line("prepare", "c.yaml")


COLUMNS = [
    "messages",
    "prompt",
    "completion",
    "text",
    "chosen",
    "rejected",
    "label",
    "images",
    "tools",
    "margin",
]
SPOKEN = st.sampled_from(["user", "assistant", "tool"])
MESSAGES = st.lists(
    st.dictionaries(
        st.sampled_from(["role", "content", "tool_calls", "name"]), values | SPOKEN, max_size=3
    ),
    max_size=3,
)
ROWS = (
    st.dictionaries(st.sampled_from(COLUMNS) | texts, values, max_size=3)
    | st.fixed_dictionaries({"messages": MESSAGES})
    | values
)


@cases(20)
@given(rows=st.lists(ROWS, max_size=2), algorithm=st.sampled_from(KINDS))
def test_any_rows(home: Path, rows: list[Any], algorithm: str) -> None:
    (home / "r.jsonl").write_text("\n".join(map(json.dumps, rows)))
    one_line(
        "prepare", "c.yaml", f"algorithm={algorithm}", "data.train=[{kind: file, path: r.jsonl}]"
    )


PIECES = [
    "{% for m in messages %}", "{% endfor %}", "{% for i in range(99999) %}", "{{ m.content }}",
    "{{ messages }}", "{{ 'a' * 10**9 }}", "{% set x = 'a' %}", "{% set x = x ~ x %}",
    "{% if m.role %}", "{% endif %}", "{{ 9**9**9 }}", "{{ x|center(10**9) }}",
    "{{ raise_exception('no') }}", "{{ 1/0 }}", "{% macro f() %}{{ f() }}{% endmacro %}", "{{ f() }}",
    "{% generation %}", "{% endgeneration %}", "text", "{{",
    "}}", "{%", "{{ ''.__class__ }}",
]  # fmt: skip


@cases(60)
@given(
    template=st.lists(st.sampled_from(PIECES), max_size=6).map("".join)
    | st.text(max_size=20)
    | st.just(CHATML)
)
def test_any_template(template: str) -> None:
    """What a template does wrong is judged as where it is used; nothing but a text or that error comes out."""
    rendering.limit_templates()
    with alarm(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendering, "MOST_STEPS", 5_000)
        try:
            with translate_exceptions(
                "the chat template refuses this conversation", "row", DataError
            ):
                text = render_jinja_template(
                    [[{"role": "user", "content": "a"}]], chat_template=template
                )[0][0]
        except DataError as error:
            assert error.line().isprintable() and "MemoryError" not in error.line()
        else:
            assert isinstance(text, str) and len(text) < 10**6
