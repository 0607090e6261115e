"""Generators that use vLLM: a client of its server, and an engine inside each rank.

The server (`vllm serve`) reads new weights from a folder. The engine runs on the GPU that its rank
trains on.

Written from vLLM's documentation and source (0.22 and later). CI tests it against a small server that
speaks the same API, and a stand-in for `vllm.LLM`. The server was run by hand as vLLM 0.32 on a CPU;
nothing was run on GPUs. When vLLM reloads, it does not tie a head to the embedding again, so a tied
weight is handed over under each of its names (`Engine.whole_weights`).

Random numbers are vLLM's own, seeded for each request from (seed of the run, step, key). So they are
the same on any number of ranks, as far as vLLM keeps a seeded request independent of its batch.
"""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from typing import Any

import httpx2
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from drumline.config.rollouts import VLLMGenerator as Config
from drumline.data.targets import end_ids
from drumline.dist.reduce import from_all
from drumline.errors import DrumlineError, EnvironmentFault
from drumline.foreign import first_line, require_package
from drumline.rl.generate import (
    WHERE,
    Completion,
    Request,
    Weights,
    rank_and_world_size,
    request_seed,
    require_room,
)
from drumline.system.heartbeat import alive
from drumline.system.redact import reveal

# The most bytes of a file of weights, which rank 0 has in host memory at the same time.
SHARD_BYTES = 2 * 2**30
# The prefix of each token id in the server's answers (`return_tokens_as_token_ids`).
TOKEN_PREFIX = "token_id:"
# Values of `finish_reason` of a whole completion.
FINISHED = ("stop", "length")
# The most characters of a server's error message, and of its answer, that an error shows.
MOST_MESSAGE = 300
MOST_ANSWER = 200
# Texts that say how to fix an error.
DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1, or set weights: none"
IS_IT_VLLM = "is it vLLM that listens there?"
NEEDED_VERSION = "it takes vLLM 0.22 or later"


class VLLMConnection:
    """A connection to vLLM's server at `url`.

    Until `mark_found` is called, a failure is an EnvironmentFault: the url or the server is wrong. Later
    the server has failed during the run, which is a DrumlineError.

    Proxies are not used, because the server is the cluster's own. A key, if it requires one, is read
    from VLLM_API_KEY, as vLLM itself does. user:password@ in the url is sent as HTTP's basic
    authentication.
    """

    def __init__(self, url: str, timeout_seconds: float, where: str) -> None:
        try:
            address = httpx2.URL(url.rstrip("/"))
        except httpx2.InvalidURL:
            # Its text may show a part of user:password.
            raise EnvironmentFault("this is no URL", where=where, fix="fix the url") from None
        headers = {}
        auth = None
        key = os.environ.get("VLLM_API_KEY")
        if key:
            headers["Authorization"] = f"Bearer {key}"
        elif address.userinfo:
            auth = httpx2.BasicAuth(address.username, address.password)
        # No message may show user:password.
        self.url = str(address.copy_with(userinfo=b""))
        self.timeout_seconds = timeout_seconds
        self.where = where
        self.is_found = False
        # Connections are not kept: the server may close them while a step trains.
        limits = httpx2.Limits(max_keepalive_connections=0)
        certificates = ssl.create_default_context()
        # With a transport of its own, a client takes no proxies from the environment.
        transport = httpx2.HTTPTransport(verify=certificates, limits=limits)
        self.client = httpx2.Client(
            headers=headers, auth=auth, transport=transport, follow_redirects=True
        )

    def mark_found(self) -> None:
        """Note that a vLLM server answers at the url."""
        self.is_found = True

    def request(
        self, path: str, body: dict[str, Any] | None = None, fixes: dict[int, str] | None = None
    ) -> Any:
        """Return the JSON that the server answers; None if the answer is empty.

        Args:
            path: The path below the server's url.
            body: The JSON of a POST; None: the request is a GET.
            fixes: HTTP status of an error → how to fix it.

        Raises what `fault` returns if there is no answer, or if it is an error or no JSON.
        """
        method = "GET" if body is None else "POST"
        address = f"{self.url}{path}"
        what = f"{method} {address}"
        timeout = self.timeout_seconds
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
            raise self.fault(
                f"{what}: {first_line(error)}", "start it with `vllm serve MODEL`, or fix the url"
            ) from None
        status = answer.status_code
        if not answer.is_success:
            fix = (fixes or {}).get(status)
            raise self.fault(f"{what} was answered {status}: {_reason(answer)}", fix)
        if not answer.content.strip():
            return None
        try:
            return answer.json()
        except ValueError:
            raise self.fault(f"the answer to {what} is no JSON", IS_IT_VLLM) from None

    def fault(self, what: str, fix: str | None = None) -> DrumlineError:
        """Return the error for a failure: EnvironmentFault before `mark_found`, else DrumlineError."""
        error_type = DrumlineError if self.is_found else EnvironmentFault
        return error_type(what, where=self.where, fix=fix)


def _reason(answer: httpx2.Response) -> str:
    """Return the message in the body of an error, in vLLM's form or another."""
    text = answer.text.strip()
    try:
        message = json.loads(text)
    except ValueError:
        return text[:MOST_MESSAGE] or answer.reason_phrase
    if isinstance(message, dict):
        message = message.get("error", message.get("detail", message))
    if isinstance(message, dict):
        message = message.get("message", message)
    return str(message)[:MOST_MESSAGE]


class BaseVLLM:
    """The base of generators that use vLLM, on its server or in this process."""

    # The most tokens of a sequence; None: not known.
    positions: int | None

    def __init__(self, config: Config, tokenizer: Any, seed: int) -> None:
        self.config = config
        self.seed = seed
        self.end_tokens = sorted(end_ids(tokenizer))

    def generate(self, requests: list[Request], step: int) -> list[Completion]:
        """Return a completion for each request.

        Raises DataError and PlanError as other generators do, and DrumlineError if the server fails or
        gives up a request.
        """
        require_room(requests, self.config.max_new_tokens, self.positions)
        if not requests:
            return []
        return self._generate(requests, step)

    def _generate(self, requests: list[Request], step: int) -> list[Completion]:
        raise NotImplementedError

    def parameters(self, request: Request, step: int) -> dict[str, Any]:
        """Return the options of a request's sampling.

        All are set, because vLLM's defaults may be those of the model's generation config.
        """
        return {
            "n": 1,
            "max_tokens": self.config.max_new_tokens,
            "seed": request_seed(self.seed, step, request.key),
            "temperature": self.config.temperature,
            "top_p": self.config.top_p,
            "top_k": self.config.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(self.config.stop),
            "stop_token_ids": self.end_tokens,
            "include_stop_str_in_output": True,
            "logprobs": 0,
        }


class RemoteVLLM(BaseVLLM):
    """Samples on a vLLM server: POST /v1/completions, `config.batch` requests at the same time.

    A completion needs the log-probs of softmax(logits / temperature). The first call checks that the
    server returns these.
    """

    def __init__(self, config: Config, tokenizer: Any, seed: int) -> None:
        """Raises EnvironmentFault if no healthy server answers at `config.url`."""
        assert config.url is not None
        super().__init__(config, tokenizer, seed)
        where = f"{WHERE}.url"
        self.server = VLLMConnection(reveal(config.url, where), config.timeout_seconds, where)
        self.server.request("/health")
        served = self.server.request("/v1/models")
        try:
            first_model = served["data"][0]
            self.model = str(first_model["id"])
            self.positions = first_model.get("max_model_len")
        except (TypeError, KeyError, IndexError):
            raise self.server.fault("/v1/models does not name a model", IS_IT_VLLM) from None
        self.server.mark_found()
        self.has_checked_log_probs = False

    def _generate(self, requests: list[Request], step: int) -> list[Completion]:
        """Return a completion for each request. The first failure cancels requests not yet sent."""
        if not self.has_checked_log_probs:
            self._require_log_probs(requests[0])
        with ThreadPoolExecutor(self.config.batch) as threads:
            answers = []
            for request in requests:
                answers.append(threads.submit(self._complete, self._body(request, step)))
            try:
                return [answer.result() for answer in answers]
            except DrumlineError:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _body(self, request: Request, step: int) -> dict[str, Any]:
        """Return the body of a request to /v1/completions."""
        return {
            **self.parameters(request, step),
            "model": self.model,
            "prompt": request.tokens,
            "return_tokens_as_token_ids": True,
        }

    def _complete(self, body: dict[str, Any]) -> Completion:
        """Return the server's completion. Raises DrumlineError for an answer without a whole one."""
        answer = self.server.request("/v1/completions", body)
        try:
            completion = _parse_answer(answer)
        except (TypeError, KeyError, IndexError, ValueError, AttributeError):
            completion = None
        if completion is None:
            raise self.server.fault(
                f"/v1/completions gave no tokens with log-probs: {str(answer)[:MOST_ANSWER]}",
                NEEDED_VERSION,
            )
        return completion

    def _require_log_probs(self, request: Request) -> None:
        """Raise DrumlineError if the server returns log-probs of another kind than is needed.

        Raw log-probs are those before temperature, top-k and top-p, processed ones those after.

            temperature 1, neither top-k nor top-p    both are the same
            temperature 1 with top-k or top-p         raw
            another temperature                       processed; the config refuses top-k and top-p
            top-k 1 (greedy)                          either, as nothing reads them
        """
        config = self.config
        needs_processed = config.temperature != 1
        is_greedy = config.top_k == 1
        has_whole_distribution = config.top_p == 1 and config.top_k == 0
        takes_either = is_greedy or (not needs_processed and has_whole_distribution)
        if not takes_either and self._gives_processed_log_probs(request) != needs_processed:
            kind = "processed_logprobs" if needs_processed else "raw_logprobs"
            what = (
                f"temperature {config.temperature:g} needs log-probs that this server does not give"
            )
            raise self.server.fault(what, f"start it with --logprobs-mode {kind}")
        self.has_checked_log_probs = True

    def _gives_processed_log_probs(self, request: Request) -> bool:
        """Return whether the server's log-probs are of the distribution that is sampled from.

        Each of two requests allows one token only, another one each. Processed log-probs are then 0 for
        both tokens. Raw ones are of the whole vocabulary, in which two tokens cannot both have a
        probability above a half.
        """
        ordinary_tokens = (token for token in count() if token not in self.end_tokens)
        for token in islice(ordinary_tokens, 2):
            limits = {"max_tokens": 1, "allowed_token_ids": [token]}
            completion = self._complete(self._body(request, 0) | limits)
            if completion.tokens != [token]:
                raise self.server.fault(
                    "/v1/completions does not keep to allowed_token_ids", NEEDED_VERSION
                )
            if completion.log_probs[0] < math.log(0.5):
                return False
        return True


def _parse_answer(answer: Any) -> Completion | None:
    """Return the completion in an answer of /v1/completions; None if it is empty or was broken off.

    Raises TypeError, KeyError, IndexError, ValueError or AttributeError for an answer of another form.
    """
    choice = answer["choices"][0]
    tokens = []
    for token in choice["logprobs"]["tokens"]:
        tokens.append(int(token.removeprefix(TOKEN_PREFIX)))
    log_probs = [float(log_prob) for log_prob in choice["logprobs"]["token_logprobs"]]
    reason = choice["finish_reason"]
    if not tokens or len(tokens) != len(log_probs) or reason not in FINISHED:
        return None
    return Completion(tokens, log_probs, reason == "stop")


class WeightFolder:
    """Hands the weights to a server through a folder that both can read.

    Rank 0 writes safetensors files and calls `reload_weights` by /collective_rpc, the documented way of
    layer-wise reloading. Then it empties the server's prefix cache.
    """

    def __init__(self, server: VLLMConnection, folder: Path, dtype: torch.dtype) -> None:
        """`dtype`: the type of floating-point weights in the files."""
        self.server = server
        self.folder = folder
        self.dtype = dtype
        # How often weights were handed over.
        self.hand_overs = 0

    def refresh(self, weights: Weights) -> None:
        """Hand over all weights. Collective; it returns once the server has them, on all ranks.

        Raises EnvironmentFault if the folder cannot be written, DrumlineError if the server fails, on
        all ranks.
        """
        failure: DrumlineError | None = None
        if rank_and_world_size()[0] == 0:
            failure = self._hand_over(weights)
        else:
            for _ in weights:
                continue
        self.hand_overs += 1
        has_failed = from_all(failure is not None)
        if failure is not None:
            raise failure
        if any(has_failed):
            raise DrumlineError(
                "rank 0 could not hand over the weights; its log has the reason", where=WHERE
            )

    def _hand_over(self, weights: Weights) -> DrumlineError | None:
        """Write the weights and have the server read them.

        Returns why that failed; None if it did not.
        """
        # Two folders are used alternately, since the server may still read the previous weights.
        folder = self.folder / f"{self.hand_overs % 2}"
        previous_folder = self.folder / f"{(self.hand_overs + 1) % 2}"
        failure: DrumlineError | None = None
        # All weights are taken even if a file cannot be written: the iterator is collective, and the
        # other ranks go on.
        for number, shard in enumerate(_shards(weights, self.dtype)):
            if failure is None:
                failure = self._save(shard, folder, number)
        if failure is not None:
            return failure
        unread = f"the server must see {folder} under the same path; {DEV_MODE}"
        fixes = {404: DEV_MODE, 500: unread, 400: unread}
        arguments = {"weights_path": str(folder)}
        reload = {"method": "reload_weights", "kwargs": arguments}
        try:
            self.server.request("/collective_rpc", reload, fixes)
            self.server.request("/reset_prefix_cache", {}, fixes)
        except DrumlineError as error:
            return error
        # Nothing reads the previous weights any more.
        shutil.rmtree(previous_folder, ignore_errors=True)
        return None

    def _save(
        self, shard: dict[str, torch.Tensor], folder: Path, number: int
    ) -> EnvironmentFault | None:
        """Write a file of weights. Returns why that failed; None if it did not."""
        try:
            # An earlier run, or an attempt that failed, may have left files there.
            if number == 0:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            path = folder / f"model-{number + 1:05d}.safetensors"
            save_file(shard, path, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:
            return EnvironmentFault(
                f"weights cannot be written: {error}",
                where=str(self.folder),
                fix=f"set {WHERE}.folder to a folder with room",
            )
        return None


def _shards(weights: Weights, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the weights on the host, in dictionaries of at most SHARD_BYTES, or of one larger tensor."""
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in weights:
        host_dtype = dtype if tensor.is_floating_point() else None
        on_host = tensor.detach().to("cpu", host_dtype, copy=True).contiguous()
        if shard and size + on_host.nbytes > SHARD_BYTES:
            yield shard
            shard = {}
            size = 0
        shard[name] = on_host
        size += on_host.nbytes
    yield shard


class InProcessVLLM(BaseVLLM):
    """Samples by `vllm.LLM` in this process.

    New weights are handed over as an iterator by `collective_rpc("reload_weights")`. The executor
    `external_launcher` starts no processes of its own.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        seed: int,
        model_path: str,
        dtype: str,
        rows: int | None = None,
    ) -> None:
        """Start the engine, or take the one that this process has.

        Args:
            config: The section `algorithm.generator`.
            tokenizer: The tokenizer of the policy.
            seed: The seed of the run.
            model_path: The folder or hub id of the model that vLLM loads.
            dtype: What it computes in: bfloat16, float16 or float32.
            rows: Rows of the embedding if it is larger than the one in the model's files; else None.

        Raises EnvironmentFault if vLLM is missing or cannot start.
        """
        require_installed(config)
        super().__init__(config, tokenizer, seed)
        # Log-probs of softmax(logits / temperature) are needed, see `RemoteVLLM._require_log_probs`.
        log_probs = "raw_logprobs" if config.temperature == 1 else "processed_logprobs"
        self.llm = _engine(model_path, dtype, config.memory, config.batch, log_probs, seed, rows)
        self.positions = self.llm.llm_engine.model_config.max_model_len

    def _generate(self, requests: list[Request], step: int) -> list[Completion]:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": request.tokens} for request in requests]
        parameters = [SamplingParams(**self.parameters(request, step)) for request in requests]
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        return [_to_completion(output.outputs[0]) for output in outputs]

    def refresh(self, weights: Weights) -> None:
        """Replace all weights. Collective if the iterator is."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.reset_prefix_cache()


def _to_completion(output: Any) -> Completion:
    """Return vLLM's output as a completion. Raises DrumlineError if vLLM gave up the request."""
    tokens = list(output.token_ids)
    if not tokens or output.finish_reason not in FINISHED or output.logprobs is None:
        raise DrumlineError(f"vLLM gave up a request: {output.finish_reason}", where=WHERE)
    log_probs = []
    for token, choices in zip(tokens, output.logprobs, strict=True):
        log_probs.append(float(choices[token].logprob))
    return Completion(tokens, log_probs, output.finish_reason == "stop")


def require_installed(config: Any) -> None:
    """Check that a generator of kind vllm has what it needs, without importing vLLM.

    Raises EnvironmentFault if it runs vLLM in this process and vLLM is not installed, ConfigError if
    its url is in an environment variable that is not set here.
    """
    if not isinstance(config, Config):
        return
    if config.url is None:
        require_package("vllm", f"{WHERE}.kind", "pip install vllm, or set url")
    reveal(config.url, f"{WHERE}.url")


@functools.cache
def _engine(
    model_path: str,
    dtype: str,
    memory: float,
    batch: int,
    log_probs: str,
    seed: int,
    rows: int | None,
) -> Any:
    """Return this process's engine, of which there is one: GPU memory is reserved for a single one.

    Raises EnvironmentFault if it cannot start.
    """
    # Weights are handed over as tensors, so the engine must be in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    # The files have too few rows, and all weights are handed over before anything is sampled.
    grown: dict[str, Any] = {}
    if rows is not None:
        grown = {
            "load_format": "dummy",
            "hf_overrides": functools.partial(_set_vocabulary_size, rows=rows),
        }
    try:
        return LLM(
            model=model_path,
            dtype=dtype,
            tensor_parallel_size=1,
            distributed_executor_backend="external_launcher",
            gpu_memory_utilization=memory,
            max_num_seqs=batch,
            seed=seed % 2**31,
            logprobs_mode=log_probs,
            **grown,
        )
    except (RuntimeError, ValueError, OSError) as error:
        lines = str(error).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        raise EnvironmentFault(f"vLLM does not start: {reason}", where=WHERE) from None


def _set_vocabulary_size(config: Any, rows: int) -> Any:
    """Return a model's Hugging Face config, changed so that the embedding has `rows` rows."""
    for part in (config, config.get_text_config()):
        if hasattr(part, "vocab_size"):
            part.vocab_size = rows
    return config
