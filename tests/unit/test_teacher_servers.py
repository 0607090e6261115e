"""The client of a teacher's servers against a real small HTTP server: its numbers, and every way of
failing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drumline.algorithms.distill.spec import DistillConfig
from drumline.config.load import load_text
from drumline.errors import ConfigError, DrumlineError, EnvironmentFault, PlanError
from drumline.models.choices import top_choices
from drumline.rl.teacher_servers import LEAST_REST, TaughtText, TeacherServers
from tests.distributed.ranks import free_port
from tests.harness import write_config
from tests.plans import resolve_plan
from tests.tiny import read_model, tiny_model_dir, tiny_tokenizer
from tests.vllm_stub import StubServer

ENTRIES = 320
TOP_K = 8
SENTENCES = ["The", "What is two plus three?", "one two three", "Every rank keeps in step"]


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[StubServer]]:
    """Two servers of the same teacher, which is surer than a fresh model."""
    folder = tiny_model_dir(tmp_path / "teacher", seed=7)
    model = read_model(folder)
    with torch.no_grad():
        model.model.norm.weight.mul_(20)
    model.save_pretrained(folder)
    with StubServer(read_model(folder)) as first, StubServer(read_model(folder)) as second:
        yield [first, second]


def connect(*servers: StubServer, vocabulary: int = ENTRIES, **options: Any) -> TeacherServers:
    urls = [server.url for server in servers]
    teacher = {"kind": "server", "url": urls, "model": "tiny", **options.pop("teacher", {})}
    algorithm = {"kind": "distill", "teacher": teacher, "top_k": TOP_K, **options}
    teaching = DistillConfig.model_validate(algorithm)
    assert teaching.served_teacher is not None
    return TeacherServers(teaching.served_teacher, teaching.top_k, tiny_tokenizer(), vocabulary)


def texts() -> list[TaughtText]:
    """Texts of which all tokens but the first are learned, and one of which every other one is."""
    made = []
    for sentence in SENTENCES:
        tokens = tiny_tokenizer().encode(sentence)
        made.append(TaughtText(tokens, list(range(1, len(tokens)))))
    made.append(TaughtText(made[-1].tokens, made[-1].positions[::2]))
    return made


def expected(model: Any) -> np.ndarray[Any, Any]:
    """What the model itself says, as packed choices."""
    rows = []
    for text in texts():
        with torch.no_grad():
            logits_TV = model(torch.tensor([text.tokens])).logits[0]
        choices = top_choices(logits_TV[[place - 1 for place in text.positions]], TOP_K, ENTRIES)
        rows.append(torch.cat((choices.ids_MK.float(), choices.log_probs_ML), 1))
    return torch.cat(rows).numpy()


def assert_same(packed: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
    """The same tokens and log-probs. What is left of 1 is known to the rounding of fp32."""
    assert packed.dtype == np.float32
    assert (packed[:, :TOP_K] == wanted[:, :TOP_K]).all()
    assert packed[:, TOP_K:-1] == pytest.approx(wanted[:, TOP_K:-1], abs=1e-5)
    rest = np.exp(packed[:, -1])
    assert rest == pytest.approx(np.exp(wanted[:, -1]), abs=1e-6)
    assert (rest >= 0.9 * LEAST_REST).all()


def test_a_server_says_what_the_model_itself_says(servers: list[StubServer]) -> None:
    assert_same(connect(servers[0]).ask(texts()), expected(servers[0].model))
    bodies = servers[0].bodies("/v1/completions")
    assert all(body["prompt_logprobs"] == TOP_K and body["max_tokens"] == 1 for body in bodies)


def test_a_lost_server_is_named_and_comes_back(
    servers: list[StubServer], caplog: pytest.LogCaptureFixture
) -> None:
    made = connect(*servers)
    servers[0].dies_after = servers[0].completed + 1
    assert_same(made.ask(texts()), expected(servers[1].model))
    assert list(made.pool.lost) == [servers[0].url]
    assert "algorithm.teacher: a server is lost, the others go on" in caplog.text

    servers[0].restart()
    asked = servers[0].completed
    made.ask(texts())
    assert not made.pool.lost
    assert servers[0].completed > asked + 1


def answer_of(places: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "finish_reason": "length", "prompt_logprobs": places}]}


def place_of(log_probs: list[float], first_token: int = 0) -> dict[str, Any]:
    entries = {}
    for number, log_prob in enumerate(log_probs):
        entries[str(first_token + number)] = {"logprob": log_prob, "rank": number + 1}
    return entries


TOKENS = tiny_tokenizer().encode(SENTENCES[1])
EVEN = [math.log(0.1)] * TOP_K
# What the server answers → a part of the one line.
NONSENSE: dict[str, tuple[Any, str]] = {
    "no log-probs": ({"choices": [{"prompt_logprobs": None}]}, "gave no log-probs of the prompt"),
    "no choices": ({"choices": []}, "gave no log-probs of the prompt"),
    "too short": (answer_of([None]), f"1 positions of {len(TOKENS)}"),
    "too few": (answer_of([place_of(EVEN[1:])] * len(TOKENS)), "7 tokens at a position, of 8"),
    "logits": (answer_of([place_of([3.0] * TOP_K)] * len(TOKENS)), "add up to"),
    "no number": (
        answer_of([place_of([float("nan")] * TOP_K)] * len(TOKENS)),
        "a log-prob is nan",
    ),
    "below fp32": (
        answer_of([place_of([*EVEN[1:], -1e300])] * len(TOKENS)),
        "a log-prob is -1e+300",
    ),
    "a number too large": (
        answer_of([place_of([*EVEN[1:], 10**400])] * len(TOKENS)),
        "gave no log-probs of the prompt",
    ),
    "nested too deep": ("[" * 100_000, "is no JSON"),
    "another vocabulary": (
        answer_of([place_of(EVEN, ENTRIES - 1)] * len(TOKENS)),
        f"gave token {ENTRIES}, and the trained model has {ENTRIES} tokens",
    ),
    "an error": (500, "was answered 500: EngineCore encountered an issue"),
    "hang": ("hang", "took longer than 0.5 s — raise timeout_seconds"),
}


@pytest.mark.parametrize("failure", NONSENSE)
def test_nonsense_is_one_line(servers: list[StubServer], failure: str) -> None:
    answer, part = NONSENSE[failure]
    made = connect(servers[0])
    if failure == "hang":
        made.pool.servers[0].timeout_seconds = 0.5
    servers[0].break_with = {"/v1/completions": answer}
    with pytest.raises(DrumlineError) as refused:
        made.ask([TaughtText(TOKENS, [1, 2])])
    line = refused.value.line()
    assert part in line
    assert "algorithm.teacher.url: " in line
    assert "\n" not in line


def test_what_the_server_cannot_do_is_found_before_the_run(servers: list[StubServer]) -> None:
    first = servers[0]
    first.most_log_probs = TOP_K - 1
    limit = r"greater than max allowed: 7.*--max-logprobs 8, or lower algorithm.top_k"
    with pytest.raises(EnvironmentFault, match=limit):
        connect(first)
    first.most_log_probs = 20

    with pytest.raises(EnvironmentFault, match="has no model 'large', but tiny"):
        connect(first, teacher={"model": "large"})

    first.tokenize = lambda text: [1, 2, 3]
    with pytest.raises(
        EnvironmentFault, match=r"the tokenizer of http.* differs from the trained model's"
    ):
        connect(first)

    missing = {"url": f"http://127.0.0.1:{free_port()}"}
    with pytest.raises(EnvironmentFault, match="Connection refused — start it with `vllm serve"):
        connect(first, teacher=missing)


def test_a_text_without_room_is_one_line(servers: list[StubServer]) -> None:
    text = TaughtText([5] * 512, [1])
    # A PlanError, so that the launcher does not start the run again.
    with pytest.raises(PlanError, match=r"a text has 512 tokens, and .* takes 511") as refused:
        connect(servers[0]).ask([text])
    assert "--max-model-len 513" in refused.value.line()


def test_a_url_may_stand_in_a_variable(
    servers: list[StubServer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEACHER", servers[0].url)
    text = (
        "algorithm: {kind: distill, teacher: {kind: server, url: '${env:TEACHER}', model: tiny}}\n"
    )
    algorithm = load_text(text + "data: {train: x.jsonl}", []).algorithm
    assert isinstance(algorithm, DistillConfig)
    teacher = algorithm.served_teacher
    assert teacher is not None and teacher.url == "${env:TEACHER}"
    asked = connect(teacher={"url": teacher.url}).ask(texts())
    assert_same(asked, expected(servers[0].model))


SERVED = "kind: server, url: 'http://a', model: large"
REFUSED: dict[str, tuple[str, str]] = {
    "the whole vocabulary": (f"{{{SERVED}}}, top_k: 0", "a server gives the likeliest tokens"),
    "a temperature": (f"{{{SERVED}}}, temperature: 2", "leave temperature out"),
    "in every step": (f"{{{SERVED}}}, log_probs: live", "a server is asked once"),
    "no model": ("{kind: server, url: 'http://a'}", "'model' is missing"),
    "no url": ("{kind: server, url: 'a:80', model: large}", "begins with http"),
    "an unknown key": (f"{{{SERVED}, batch: 3}}", "unknown key 'batch'"),
    "a key of base": ("{kind: base, url: 'http://a'}", "kind server has it"),
    "an id beside server": (
        "{kind: server, url: 'http://a', model: large, id: x}",
        "of kind server — the section of a model has it, without that kind",
    ),
    "an id beside base": ("{kind: base, id: x}", "of kind base — the section of a model has it"),
    "a server without its kind": (
        "{url: 'http://a', model: large}",
        "unknown key 'url' (and 1 more mistake) — kind server has it: add kind: server",
    ),
    "nothing": ("null", "write the id of a model, or {kind: …}, with a kind of server, base"),
    "a key of a model": ("{id: some/model, urll: x}", "unknown key 'urll'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_teachers_that_cannot_be_are_refused_in_one_line(case: str) -> None:
    teacher, part = REFUSED[case]
    text = f"algorithm: {{kind: distill, teacher: {teacher}}}\ndata: {{train: x.jsonl}}"
    with pytest.raises(ConfigError) as refused:
        load_text(text, [])
    assert part in refused.value.line()
    assert ".hf" not in refused.value.line()


def test_gkd_with_a_server_needs_top_k() -> None:
    text = f"algorithm: {{kind: gkd, teacher: {{{SERVED}}}}}\ndata: {{train: x.jsonl}}"
    with pytest.raises(ConfigError, match="set top_k, such as 20"):
        load_text(text, [])


ATTENTION = {"kind": "lora", "targets": "attention"}
HEAD = {"kind": "lora", "targets": ["q_proj", "embed_tokens"]}
GKD = {"kind": "gkd", "generator": {"kind": "hf", "max_new_tokens": 6}}
BASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no adapter": ({"kind": "none"}, {}, "there is no adapter to switch off"),
    "PiSSA": ({**ATTENTION, "init": "pissa"}, {}, "PiSSA and modules_to_save change its weights"),
    "nothing to learn": (ATTENTION, {"cross_entropy_weight": 0}, "nothing would be learned"),
    "gkd": (ATTENTION, GKD, "nothing would be learned — name another model"),
    "the head": (HEAD, {"top_k": 0, "log_probs": "live"}, "the adapter stands in its place"),
    "rows of the head": (
        {**ATTENTION, "trainable_tokens": [5]},
        {"top_k": 0, "log_probs": "live"},
        "the adapter stands in its place",
    ),
}


@pytest.mark.parametrize("case", BASES)
def test_a_base_that_cannot_teach_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    adapter, options, part = BASES[case]
    algorithm = {"kind": "distill", "teacher": "base", **options}
    if algorithm["kind"] == "distill":
        algorithm.setdefault("cross_entropy_weight", 0.5)
    model = tiny_model_dir(tmp_path / "model")
    path = write_config(tmp_path, model, algorithm=algorithm, adapter=adapter)
    with pytest.raises(PlanError) as refused:
        resolve_plan(path, world_size=1)
    assert part in refused.value.line()
