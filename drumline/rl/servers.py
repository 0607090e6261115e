"""Connections to servers that sample or teach: which one gets the next request, and what follows if one is lost.

The modules `vllm` and `sglang` know the paths and the JSON of their servers.
"""

from __future__ import annotations

import json
import logging
import math
import os
import ssl
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, NamedTuple, TypeVar

import httpx2

from drumline.config.rollouts import ServerGenerator as Config
from drumline.config.teachers import ServedTeacher
from drumline.data.targets import end_ids
from drumline.errors import DrumlineError, EnvironmentFault
from drumline.foreign import first_line
from drumline.rl.generate import (
    WHERE,
    Completion,
    LostWeights,
    Request,
    rank_and_world_size,
    require_room,
)
from drumline.system.heartbeat import alive
from drumline.system.redact import reveal

logger = logging.getLogger(__name__)
# A question to a server, and its answer.
Q = TypeVar("Q")
A = TypeVar("A")

# The most characters of a server's error message, and of its answer, that an error shows.
MOST_MESSAGE = 300
MOST_ANSWER = 200
# What ends a whole completion: the values of vLLM's `finish_reason`, and its types in SGLang.
FINISHED = ("stop", "length")
# The most seconds that a lost server is waited for when it is asked whether it is back.
HEALTH_SECONDS = 10.0
# What reading an answer of another form raises.
MALFORMED = (TypeError, KeyError, IndexError, ValueError, AttributeError, OverflowError)
# The largest log-prob of a token, which is 0 but for rounding.
LARGEST_LOG_PROB = 1e-2
# HTTP statuses of a server that works and refuses the request, as any other server would.
REFUSALS = (400, 401, 403, 422)


class ServerError(DrumlineError):
    """A request to a server failed during the run.

    `is_refusal`: the server works and refuses the request. Otherwise another server may answer it.
    `status`: the HTTP status of the answer; None if there was none, or if it was no error.
    `lacks_weights`: the server works, and does not know the weights that the request names.
    """

    is_refusal = False
    status: int | None = None
    lacks_weights = False


@dataclass(frozen=True)
class ServerKind:
    """What differs between vLLM and SGLang: the variable with the key, and the advice in messages."""

    # The environment variable with the key that the server requires, if it requires one.
    key_variable: str
    # How to start it.
    how_to_start: str
    # What to check if another program seems to listen there.
    what_to_check: str
    # The versions that have the API.
    needed_version: str


class ServerState(NamedTuple):
    """What rank 0 knows about a server after a hand-over, and tells the other ranks."""

    is_lost: bool
    model: str
    max_sequence_length: int | None


class Server:
    """A connection to a server, and the state of that server as this rank sees it.

    A failure before `mark_found` is an EnvironmentFault, as the url or the server is wrong. A failure
    after it is a ServerError, as the server has failed during the run.

    Proxies are not used, because the server is the cluster's own. A key, if it requires one, is read
    from `ServerKind.key_variable`. user:password@ in the url is sent as HTTP's basic authentication.

    Attributes:
        model: The name of the model that this rank's requests name.
        max_sequence_length: The most tokens of a sequence; None: not known.
        under_way: The number of this rank's requests that the server is working on.
        is_lost: Whether it failed. It then gets no requests until it has the present weights again.
        gives_processed_log_probs: See `RemoteVLLM.check`; None: not measured yet.
        tells_version: Whether the server told the version of the weights that it was handed last. Only
            rank 0 knows.
    """

    def __init__(self, kind: ServerKind, url: str, timeout_seconds: float, where: str) -> None:
        try:
            address = httpx2.URL(url.rstrip("/"))
        except httpx2.InvalidURL:
            # Its text may show a part of user:password.
            raise EnvironmentFault("this is no URL", where=where, fix="fix the url") from None
        headers = {}
        auth = None
        key = os.environ.get(kind.key_variable)
        if key:
            headers["Authorization"] = f"Bearer {key}"
        elif address.userinfo:
            auth = httpx2.BasicAuth(address.username, address.password)
        # No message may show user:password.
        self.url = str(address.copy_with(userinfo=b""))
        self.kind = kind
        self.timeout_seconds = timeout_seconds
        self.where = where
        self.is_found = False
        self.model = ""
        self.max_sequence_length: int | None = None
        self.under_way = 0
        self.is_lost = False
        self.gives_processed_log_probs: bool | None = None
        self.tells_version = False
        # Connections are not kept: the server may close them while a step trains.
        limits = httpx2.Limits(max_keepalive_connections=0)
        certificates = ssl.create_default_context()
        # With a transport of its own, a client takes no proxies from the environment.
        transport = httpx2.HTTPTransport(verify=certificates, limits=limits)
        self.client = httpx2.Client(
            headers=headers, auth=auth, transport=transport, follow_redirects=True
        )

    def mark_found(self) -> None:
        """Note that a server of the right kind answers at the url."""
        self.is_found = True

    def request(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        fixes: dict[int, str] | None = None,
        seconds: float | None = None,
    ) -> Any:
        """Return the JSON that the server answers; None if the answer is empty.

        Args:
            path: The path below the server's url.
            body: The JSON of a POST; None: the request is a GET.
            fixes: HTTP status of an error → how to fix it.
            seconds: The most that the answer may take; None: `timeout_seconds`.

        Raises ServerError if there is no answer in time, or if it is an error or no JSON. Before
        `mark_found` that is EnvironmentFault.
        """
        content = self.request_text(path, body, fixes, seconds)
        if not content.strip():
            return None
        try:
            return json.loads(content)
        except (ValueError, RecursionError):
            method = _method(body)
            what = f"the answer to {method} {self.url}{path} is no JSON"
            raise self.fault(what, self.kind.what_to_check) from None

    def request_text(
        self,
        path: str,
        body: dict[str, Any] | None = None,
        fixes: dict[int, str] | None = None,
        seconds: float | None = None,
    ) -> str:
        """Return the text that the server answers.

        The arguments are those of `request`.

        Raises ServerError if there is no answer in time, or if it is an error. Before `mark_found` that is
        EnvironmentFault.
        """
        method = _method(body)
        address = f"{self.url}{path}"
        what = f"{method} {address}"
        timeout = seconds or self.timeout_seconds
        # The answer may take as long as the timeout; meanwhile the watcher must not take this rank for
        # hung.
        alive(2 * timeout)
        try:
            answer = self.client.request(method, address, json=body, timeout=timeout)
        except httpx2.TimeoutException:
            raise self.fault(
                f"{what} took longer than {timeout:g} s", "raise timeout_seconds"
            ) from None
        except httpx2.RequestError as error:
            fix = self.kind.how_to_start
            if not self.is_found:
                fix += ", or fix the url"
            raise self.fault(f"{what}: {first_line(error)}", fix) from None
        status = answer.status_code
        if not answer.is_success:
            fix_of_status = (fixes or {}).get(status)
            message = f"{what} was answered {status}: {_reason(answer)}"
            raise self.fault(message, fix_of_status, is_refusal=status in REFUSALS, status=status)
        return answer.text

    def request_if_offered(
        self, path: str, body: dict[str, Any] | None = None, seconds: float | None = None
    ) -> Any:
        """Return what `request` does; None if the answer is an error, as of a server without that path.

        The arguments are those of `request`. Raises ServerError if there is no answer in time.
        """
        try:
            return self.request(path, body, seconds=seconds)
        except ServerError as error:
            if error.status is None:
                raise
            return None

    def fault(
        self,
        what: str,
        fix: str | None = None,
        is_refusal: bool = False,
        status: int | None = None,
    ) -> DrumlineError:
        """Return the error for a failure: EnvironmentFault before `mark_found`, else ServerError."""
        if not self.is_found:
            return EnvironmentFault(what, where=self.where, fix=fix)
        error = ServerError(what, where=self.where, fix=fix)
        error.is_refusal = is_refusal
        error.status = status
        return error

    def state(self) -> ServerState:
        """Return what other ranks must know of the server."""
        return ServerState(self.is_lost, self.model, self.max_sequence_length)

    def set_state(self, state: ServerState) -> None:
        """Replace what this rank knows of the server by what rank 0 knows."""
        if state.is_lost:
            self.mark_lost()
        self.is_lost, self.model, self.max_sequence_length = state

    def mark_lost(self) -> None:
        """Note that the server is lost. It may come back with other options, so those are forgotten."""
        self.is_lost = True
        self.gives_processed_log_probs = None


def _method(body: dict[str, Any] | None) -> str:
    """Return the method of a request with this body."""
    if body is None:
        return "GET"
    return "POST"


def _reason(answer: httpx2.Response) -> str:
    """Return the message in the body of an error, in vLLM's form or another."""
    text = answer.text.strip()
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):
        return text[:MOST_MESSAGE] or answer.reason_phrase
    if isinstance(message, dict):
        message = message.get("error", message.get("detail", message))
    if isinstance(message, dict):
        message = message.get("message", message)
    return str(message)[:MOST_MESSAGE]


class ServerPool:
    """The servers of a run, as one rank sees them; several threads use it at the same time.

    A request goes to the server with the fewest requests under way. Ties go to the first server of a
    list that begins with another server on each rank, so that ranks do not all use the same one.
    """

    def __init__(self, servers: Sequence[Server]) -> None:
        first = rank_and_world_size()[0] % len(servers)
        # In the order of the config, the same on all ranks.
        self.servers = list(servers)
        self.by_preference = [*servers[first:], *servers[:first]]
        # The url of each server that is lost → why.
        self.lost: dict[str, str] = {}
        self._lock = Lock()

    def take(self, preferred: Server | None = None) -> Server:
        """Choose the server for the next request, count the request as under way, and return the server.

        `preferred`: the server to choose unless it is lost; None: the one with the fewest requests.
        """
        with self._lock:
            chosen = preferred
            if chosen is None or chosen.is_lost:
                working = [server for server in self.by_preference if not server.is_lost]
                # `min` returns the first of several equal ones.
                chosen = min(working, key=lambda server: server.under_way)
            chosen.under_way += 1
        return chosen

    def release(self, server: Server) -> None:
        """Note that a request is not under way any more."""
        with self._lock:
            server.under_way -= 1

    def lose(self, server: Server, error: DrumlineError) -> bool:
        """Take a server out after an error, and return True; return False if it is the last one.

        The last one is not taken out, so that a run with one server fails with the error itself.
        """
        with self._lock:
            remaining = [each for each in self.servers if not each.is_lost and each is not server]
            if not remaining:
                return False
            if not server.is_lost:
                server.mark_lost()
                key = server.where.removesuffix(".url")
                logger.warning("%s: a server is lost, the others go on: %s", key, error.what)
            self.lost[server.url] = error.what
        return True

    def set_states(self, states: Sequence[ServerState]) -> None:
        """Replace what this rank knows of all servers by what rank 0 knows, in the order of the config."""
        with self._lock:
            for server, state in zip(self.servers, states, strict=True):
                self._set_state(server, state)

    def set_state_after_restart(self, server: Server, state: ServerState) -> None:
        """Replace what this rank knows of a server that was restarted by what rank 0 knows."""
        with self._lock:
            # It may have other options than before.
            server.mark_lost()
            self._set_state(server, state)

    def _set_state(self, server: Server, state: ServerState) -> None:
        """Replace what this rank knows of a server, and of whether it is lost."""
        server.set_state(state)
        if state.is_lost:
            self.lost.setdefault(server.url, "rank 0 has lost it")
        else:
            self.lost.pop(server.url, None)


class ServerClient:
    """The base of clients that send requests to all servers of a list, several at a time.

    If a server fails, it is named and taken out, and its requests are sent to the others.
    """

    kind: ClassVar[ServerKind]

    def __init__(self, urls: Sequence[str], timeout_seconds: float, section: str) -> None:
        """Connect to all servers.

        Args:
            urls: Their addresses, as the config has them.
            timeout_seconds: The most time for one request.
            section: The section of the config that has the key `url`.

        Raises EnvironmentFault if one of the addresses has no healthy server of this kind, or if two of
        them are the same address.
        """
        # The server that gets all requests unless it is lost, for a probe of it (`probe_generators`).
        # None: each request goes to the server with the fewest.
        self.preferred_server: Server | None = None
        where = f"{section}.url"
        servers: list[Server] = []
        for url in urls:
            server = Server(self.kind, reveal(url, where), timeout_seconds, where)
            # The config compares what is written there, which may name a variable.
            if any(server.url == earlier.url for earlier in servers):
                fix = "name each server once"
                raise EnvironmentFault(f"{server.url} stands twice there", where=where, fix=fix)
            self.identify(server)
            server.mark_found()
            servers.append(server)
        self.pool = ServerPool(servers)

    def answer_all(
        self, questions: Sequence[Q], answer: Callable[[Server, Q], A], at_once: int
    ) -> list[A]:
        """Return the answer to each question. The first failure cancels those not yet sent.

        Raises DrumlineError if the last server fails, or one refuses a request.

        Args:
            questions: The questions.
            answer: Sends a question to a server, and returns the answer.
            at_once: Requests that are under way at the same time, for each server.
        """
        if not questions:
            return []
        with ThreadPoolExecutor(at_once * self._asked_servers()) as threads:
            answers = [threads.submit(self._answer, each, answer) for each in questions]
            try:
                return [each.result() for each in answers]
            except DrumlineError:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _asked_servers(self) -> int:
        """Return how many servers get requests: those that are not lost, or the one that is wanted."""
        if self.preferred_server is not None:
            return 1
        return sum(not server.is_lost for server in self.pool.servers)

    def _answer(self, question: Q, answer: Callable[[Server, Q], A]) -> A:
        """Return the answer to a question. If its server fails, another one gets the question.

        Raises LostWeights if the last server lacks its weights, as after a restart.
        """
        while True:
            server = self.pool.take(self.preferred_server)
            try:
                return answer(server, question)
            except ServerError as error:
                is_kept = error.is_refusal or not self.pool.lose(server, error)
                if is_kept and error.lacks_weights:
                    raise LostWeights(error.what, where=error.where, fix=error.fix) from error
                if is_kept:
                    raise
            finally:
                self.pool.release(server)

    def readmit_servers(self) -> None:
        """Give requests again to lost servers that are back. Used if they keep their own weights."""
        states = []
        for server in self.pool.servers:
            state = server.state()
            if server.is_lost and self._is_back(server):
                state = server.state()._replace(is_lost=False)
            states.append(state)
        self.pool.set_states(states)

    def _is_back(self, server: Server) -> bool:
        """Return whether a lost server answers again. What `identify` sets of it is then set again."""
        try:
            self.identify(server, HEALTH_SECONDS)
        except ServerError:
            return False
        return True

    def identify(self, server: Server, seconds: float | None = None) -> None:
        """Check that a server is healthy, and set its `model` and `max_sequence_length`.

        Raises ServerError if it does not answer, or names no model. Before `Server.mark_found` that is
        EnvironmentFault. `seconds`: the most that each answer may take; None: `timeout_seconds`.
        """
        server.request_text("/health", seconds=seconds)
        served = server.request("/v1/models", seconds=seconds)
        try:
            lengths = {}
            for model in served["data"]:
                length = model.get("max_model_len")
                if length is not None:
                    length = int(length)
                lengths[str(model["id"])] = length
            server.model = self.choose_model(server, list(lengths))
            server.max_sequence_length = lengths[server.model]
        except MALFORMED:
            raise server.fault(
                "/v1/models does not name a model", self.kind.what_to_check
            ) from None

    def choose_model(self, server: Server, names: list[str]) -> str:
        """Return which of a server's models is asked: the first one.

        Raises IndexError if it has none.
        """
        return names[0]


class ServedGenerator(ServerClient):
    """The base of generators that sample on servers, `config.batch` requests at a time on each.

    Random numbers are seeded for each request, so the completions stay the same if a server is lost.
    """

    def __init__(
        self, config: Config, tokenizer: Any, seed: int, vocabulary: int | None = None
    ) -> None:
        """Connect to all servers.

        Args:
            config: The section `algorithm.generator`.
            tokenizer: The tokenizer of the policy.
            seed: The seed of the run.
            vocabulary: Rows of the policy's embedding; None: token ids of servers are not checked.

        Raises EnvironmentFault as ServerClient does.
        """
        self.config = config
        self.seed = seed
        self.vocabulary = vocabulary
        self.end_tokens = sorted(end_ids(tokenizer))
        super().__init__(config.urls, config.timeout_seconds, WHERE)
        # The first part of the versions of this run's weights. A server may have those of another run.
        self.version_prefix = f"drumline-{uuid.uuid4().hex[:8]}"

    @property
    def max_sequence_length(self) -> int | None:
        """The most tokens of a sequence that all servers take; None: not known."""
        known = [
            server.max_sequence_length
            for server in self.pool.servers
            if server.max_sequence_length is not None
        ]
        return min(known, default=None)

    def generate(self, requests: list[Request], step: int) -> list[Completion]:
        """Return a completion for each request. The first failure cancels requests not yet sent.

        Raises DataError and PlanError as other generators do, and DrumlineError if the last server
        fails, or one refuses a request.
        """
        require_room(requests, self.config.max_new_tokens, self.max_sequence_length)
        if not requests:
            return []
        if self.config.weights == "none":
            self.readmit_servers()
        self._check_servers(requests[0])

        def complete(server: Server, request: Request) -> Completion:
            """Return a server's completion of a request, checked."""
            completion = self.complete(server, request, step)
            self._require_possible(server, request, completion)
            return completion

        return self.answer_all(requests, complete, self.config.batch)

    def _require_possible(self, server: Server, request: Request, completion: Completion) -> None:
        """Raise ServerError for a completion that the policy cannot have been asked for.

        A token that the policy does not have is a refusal, since that server has another model.
        """
        tokens = len(completion.tokens)
        limit = request.limit(self.config.max_new_tokens)
        if tokens > limit:
            what = f"{server.url} gave {tokens} tokens, and at most {limit} were requested"
            raise server.fault(what, self.kind.what_to_check)
        if not all(math.isfinite(log_prob) for log_prob in completion.log_probs):
            raise server.fault(f"{server.url} gave log-probs that are no finite numbers")
        largest = max(completion.log_probs)
        if largest > LARGEST_LOG_PROB:
            what = f"{server.url} gave {largest:g} as a log-prob, which is above 0"
            raise server.fault(what, self.kind.what_to_check)
        if self.vocabulary is None:
            return
        for token in completion.tokens:
            if not 0 <= token < self.vocabulary:
                what = (
                    f"{server.url} gave token {token}, and the policy has {self.vocabulary} tokens"
                )
                raise server.fault(what, "serve the policy's own model there", is_refusal=True)

    def _check_servers(self, request: Request) -> None:
        """Check each server that is not lost, see `check`."""
        for server in self.pool.servers:
            if server.is_lost:
                continue
            try:
                self.check(server, request)
            except ServerError as error:
                if error.is_refusal or not self.pool.lose(server, error):
                    raise

    def check(self, server: Server, request: Request) -> None:
        """Raise ServerError if a server gives other log-probs than are needed. The base cannot tell.

        `request`: any request of the run, whose prompt a test may use.
        """

    def complete(self, server: Server, request: Request, step: int) -> Completion:
        """Return a server's completion. Raises ServerError if it gives no whole one."""
        raise NotImplementedError

    def request_completion(
        self,
        server: Server,
        path: str,
        body: dict[str, Any],
        parse: Callable[[Any], Completion | None],
    ) -> Completion:
        """Send a request, and return the completion in the answer.

        Raises ServerError for an answer without a whole completion.
        `parse`: returns the completion in an answer, or None if it is empty or was broken off. It may
        raise an error of MALFORMED for an answer of another form.
        """
        answer = server.request(path, body)
        try:
            completion = parse(answer)
        except MALFORMED:
            completion = None
        if completion is None:
            shown = str(answer)[:MOST_ANSWER]
            raise server.fault(
                f"{path} of {server.url} gave no tokens with log-probs: {shown}",
                self.kind.needed_version,
            )
        return completion

    def load_weights(self, server: Server, folder: Path, version: str) -> None:
        """Have a server load the weights in a folder, and note their version.

        Raises ServerError if it does not load them. `version`: a name that no other weights have.
        """
        raise NotImplementedError

    def read_version(self, server: Server) -> str | None:
        """Return the version of the weights that a server has; None if it cannot tell.

        Raises ServerError if it does not answer.
        """
        raise NotImplementedError


def parse_version(answer: Any) -> str | None:
    """Return the version of weights that a server's answer names; None if it names none."""
    if not isinstance(answer, dict) or answer.get("weight_version") is None:
        return None
    return str(answer["weight_version"])


def require_addresses(config: Any) -> None:
    """Raise ConfigError if a server's url is in an environment variable that is not set here.

    `config`: the section `algorithm.generator` or `algorithm.teacher`, of any kind.
    """
    if isinstance(config, Config):
        where = f"{WHERE}.url"
    elif isinstance(config, ServedTeacher):
        where = "algorithm.teacher.url"
    else:
        return
    for url in config.urls:
        reveal(url, where)
