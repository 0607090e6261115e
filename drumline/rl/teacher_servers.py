"""A client of vLLM's servers that gives a teacher's log-probs of the tokens of whole texts.

Each text is sent as the prompt of POST /v1/completions with `prompt_logprobs`. Written from vLLM's
source (0.32). The likeliest tokens at each position come at temperature 1, whatever the server samples
with. All other tokens together get what is left of the probability 1. With fp32 log-probs that is
known to about 1e-7, so a smaller rest counts as that much.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from drumline.config.teachers import ServedTeacher
from drumline.errors import PlanError
from drumline.rl.servers import MALFORMED, MOST_ANSWER, Server, ServerClient, ServerKind

WHERE = "algorithm.teacher"
# Requests that each rank has under way on each server. vLLM runs the prompts of several side by side.
REQUESTS_AT_ONCE = 16
# What all other tokens together have at least: the rounding of fp32.
LEAST_REST = float(np.finfo(np.float32).eps)
# How far above 1 the sum of the probabilities at a position may be by rounding, in fp16 and bf16 as well.
MOST_ROUNDING = 1e-2
# The least log-prob that fp32 has.
LEAST_LOG_PROB = float(np.finfo(np.float32).min)
# Texts whose tokens are compared with the server's.
TOKENIZER_PROBES = (
    "What is two plus three?",
    " 7*8 = 56;\n\tÄpfel, 苹果 🍎",
    "def f(x):\n    return x",
)


class TaughtText(NamedTuple):
    """A text, and the positions in it at which the teacher predicts the next token.

    Attributes:
        tokens: The ids of all its tokens.
        positions: The indices of the tokens to predict, from 1 on, in their order.
    """

    tokens: list[int]
    positions: list[int]


class MalformedAnswer(Exception):
    """The answer has no valid log-probs of the prompt; the message says why."""


class TeacherServers(ServerClient):
    """Asks vLLM servers for the K likeliest tokens at each position of texts.

    Attributes:
        choices: The number K of likeliest tokens that are asked for.
    """

    kind = ServerKind(
        key_variable="VLLM_API_KEY",
        how_to_start="start it with `vllm serve MODEL`",
        what_to_check="is it vLLM that listens there?",
        needed_version="it takes vLLM 0.22 or later",
    )

    def __init__(self, config: ServedTeacher, top_k: int, tokenizer: Any, vocabulary: int) -> None:
        """Connect to all servers, and check that each one serves the teacher.

        Args:
            config: The section `algorithm.teacher`.
            top_k: The key `algorithm.top_k`.
            tokenizer: The tokenizer of the trained model.
            vocabulary: Entries of the trained model's vocabulary.

        Raises EnvironmentFault if a server is not there, does not serve the teacher, has another
        tokenizer, or gives fewer log-probs than `top_k`.
        """
        self.config = config
        self.tokenizer = tokenizer
        self.vocabulary = vocabulary
        # At least one token must remain for the entry of all others, see `models.choices`.
        self.choices = min(top_k, vocabulary - 1)
        super().__init__(config.urls, config.timeout_seconds, WHERE)

    def ask(self, texts: Sequence[TaughtText]) -> npt.NDArray[np.float32]:
        """Return the packed choices at all positions of texts, fp32[M, J].

        See `train.teachers.FrozenTeacher.packed_choices`; M are the positions of all texts, end to end.

        Raises ServerError if the last server fails, or if one refuses a request.
        """
        self.readmit_servers()
        rows = self.answer_all(texts, self._ask_about, REQUESTS_AT_ONCE)
        empty = np.zeros((0, 2 * self.choices + 1), np.float32)
        return np.concatenate([empty, *rows])

    def identify(self, server: Server, seconds: float | None = None) -> None:
        """Check that a server serves the teacher, with the tokenizer and the log-probs needed.

        Raises ServerError if it does not answer. `seconds`: see `ServerClient.identify`.
        """
        super().identify(server, seconds)
        self._require_same_tokens(server, seconds)
        self._require_log_probs(server, seconds)

    def choose_model(self, server: Server, names: list[str]) -> str:
        """Return the teacher's name. Raises ServerError if the server has no such model."""
        name = self.config.model
        if name not in names:
            what = f"{server.url} has no model {name!r}, but {', '.join(names)}"
            raise server.fault(what, "correct algorithm.teacher.model", is_refusal=True)
        return name

    def _require_same_tokens(self, server: Server, seconds: float | None) -> None:
        """Raise ServerError if a server's tokenizer makes other tokens of a text."""
        for text in TOKENIZER_PROBES:
            own = self.tokenizer.encode(text, add_special_tokens=False)
            body = {"model": server.model, "prompt": text, "add_special_tokens": False}
            answer = server.request("/tokenize", body, seconds=seconds)
            theirs = answer.get("tokens") if isinstance(answer, dict) else None
            if theirs != own:
                what = f"the tokenizer of {server.url} differs from the trained model's: {text!r} has other tokens there"
                fix = "serve a teacher with the tokenizer of the trained model"
                raise server.fault(what, fix, is_refusal=True)

    def _require_log_probs(self, server: Server, seconds: float | None) -> None:
        """Raise ServerError if a server gives fewer log-probs than are needed."""
        tokens = self.tokenizer.encode(TOKENIZER_PROBES[0], add_special_tokens=False)
        text = TaughtText(tokens, list(range(1, len(tokens))))
        fixes = {
            400: f"start it with --max-logprobs {self.choices}, or lower algorithm.top_k",
            # Its kernels of adapters on a CPU take as many rows as there are requests, not as tokens.
            500: "see its log; on a CPU, vLLM 0.32 with --enable-lora gives no log-probs of prompts",
        }
        self._ask_about(server, text, fixes, seconds)

    def _ask_about(
        self,
        server: Server,
        text: TaughtText,
        fixes: dict[int, str] | None = None,
        seconds: float | None = None,
    ) -> npt.NDArray[np.float32]:
        """Return the packed choices at a text's positions, fp32[M, J].

        Raises ServerError for an answer without them. `fixes`: see `Server.request`.
        `seconds`: the most that the answer may take; None: `timeout_seconds`.
        """
        self._require_room(server, len(text.tokens))
        body = {
            "model": server.model,
            "prompt": text.tokens,
            # vLLM does not accept 0. The generated token is ignored.
            "max_tokens": 1,
            "temperature": 0.0,
            "prompt_logprobs": self.choices,
        }
        path = "/v1/completions"
        answer = server.request(path, body, fixes, seconds)
        try:
            entries = answer["choices"][0]["prompt_logprobs"]
            if len(entries) != len(text.tokens):
                raise MalformedAnswer(f"{len(entries)} positions of {len(text.tokens)}")
            rows = [self._read_position(server, entries[position]) for position in text.positions]
        except MalformedAnswer as error:
            what = f"{path} of {server.url} gave no log-probs of the prompt: {error}"
            raise server.fault(what, self.kind.what_to_check) from None
        except MALFORMED:
            shown = str(answer)[:MOST_ANSWER]
            what = f"{path} of {server.url} gave no log-probs of the prompt: {shown}"
            raise server.fault(what, self.kind.needed_version) from None
        packed = np.asarray(rows, np.float32)
        return packed.reshape(len(rows), 2 * self.choices + 1)

    def _require_room(self, server: Server, tokens: int) -> None:
        """Raise PlanError for a text that a server does not take.

        It must have room for one token more, which it generates.
        """
        if server.max_sequence_length is not None and tokens >= server.max_sequence_length:
            what = f"a text has {tokens} tokens, and {server.url} takes {server.max_sequence_length - 1}"
            fix = f"start it with --max-model-len {tokens + 1} or more, or lower data.max_length"
            raise PlanError(what, where=server.where, fix=fix)

    def _read_position(self, server: Server, given: dict[str, dict[str, Any]]) -> list[float]:
        """Return the ids of the likeliest tokens at a position, their log-probs, and that of all others.

        Raises MalformedAnswer for what is no distribution, and ServerError for a token that the trained
        model does not have.

        Args:
            server: The server.
            given: Token id → its log-prob. The text's own token may be there besides the likeliest.
        """
        log_probs = {}
        for name, about in given.items():
            log_probs[int(name)] = float(about["logprob"])
        if len(log_probs) < self.choices:
            raise MalformedAnswer(f"{len(log_probs)} tokens at a position, of {self.choices}")
        likeliest = sorted(log_probs.items(), key=lambda pair: -pair[1])[: self.choices]
        for token, log_prob in likeliest:
            if not 0 <= token < self.vocabulary:
                what = f"{server.url} gave token {token}, and the trained model has {self.vocabulary} tokens"
                fix = "serve a teacher with the vocabulary of the trained model"
                raise server.fault(what, fix, is_refusal=True)
            if not math.isfinite(log_prob) or log_prob < LEAST_LOG_PROB:
                raise MalformedAnswer(f"a log-prob is {log_prob}")
        # A log-prob far above 0 is an error that the next lines report; `exp` must not overflow.
        chosen = sum(math.exp(min(log_prob, 1.0)) for _, log_prob in likeliest)
        if chosen > 1 + MOST_ROUNDING:
            raise MalformedAnswer(f"the probabilities at a position add up to {chosen:.3g}")
        rest = max(1 - chosen, LEAST_REST)
        log_total = math.log(chosen + rest)
        row = [float(token) for token, _ in likeliest]
        row += [log_prob - log_total for _, log_prob in likeliest]
        row.append(math.log(rest) - log_total)
        return row
