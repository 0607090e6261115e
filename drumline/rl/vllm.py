"""vLLM behind the seam: a client of its server (`vllm serve`), to which a folder hands the weights; and an engine in each rank, on the GPU
that it trains on.

Written from vLLM's documentation and source (0.22 and later). CI tests it against a small server that speaks the same API, and a stand-in
for `vllm.LLM`. The server was run by hand as vLLM 0.32 on a CPU; nothing was run on GPUs. As vLLM reloads, it does not tie a head to the
embedding again, so a tied weight is handed over under each of its names (`Engine.whole_weights`).

Random numbers are vLLM's own, seeded for each request from (run seed, step, key): the same on any number of ranks, as far as vLLM keeps a
seeded request apart from its batch.
"""

from __future__ import annotations

import base64
import functools
import http.client
import json
import math
import os
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from drumline.core.heartbeat import alive
from drumline.core.redact import reveal
from drumline.core.rollouts import VLLMGenerator as Config
from drumline.data.templates import end_ids
from drumline.dist.reduce import from_all
from drumline.errors import DrumlineError, EnvironmentFault
from drumline.foreign import require_package
from drumline.rl.generate import (
    WHERE,
    Completion,
    Request,
    Weights,
    place,
    request_seed,
    require_room,
)

SHARD_BYTES = 2 * 2**30  # of a file of weights: what rank 0 has in host memory at once
TOKEN = "token_id:"
DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1, or set weights: none"


class Server:
    """A server at `url`. Until `found` is set, what fails is the user's mistake (EnvironmentFault); after that, the run's (DrumlineError).

    Proxies are passed by: the server is the cluster's own. The key, where it requires one, is in VLLM_API_KEY, as for vLLM itself;
    user:password@ in the url are sent as HTTP's basic authentication.
    """

    def __init__(self, url: str, timeout_seconds: float, where: str) -> None:
        parts = urllib.parse.urlsplit(url.rstrip("/"))
        user, at, host = parts.netloc.rpartition("@")
        # http.client takes no user:password in an address, and a line that names the server may not have it.
        self.basic = base64.b64encode(urllib.parse.unquote(user).encode()).decode() if at else None
        self.url, self.timeout_seconds, self.where = (
            parts._replace(netloc=host).geturl(),
            timeout_seconds,
            where,
        )
        self.found = False
        self.opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def request(
        self, path: str, body: dict[str, Any] | None = None, fixes: dict[int, str] | None = None
    ) -> Any:
        """The JSON that the server answers to a GET, or to a POST of `body`; None where that is empty. `fixes`: how to mend it, by HTTP
        status."""
        data, headers = (
            (None, {})
            if body is None
            else (json.dumps(body).encode(), {"Content-Type": "application/json"})
        )
        request = urllib.request.Request(self.url + path, data, headers)
        if key := os.environ.get("VLLM_API_KEY"):
            request.add_unredirected_header("Authorization", f"Bearer {key}")
        elif self.basic:
            request.add_unredirected_header("Authorization", f"Basic {self.basic}")
        what = f"{request.get_method()} {request.full_url}"
        alive(2 * self.timeout_seconds)
        try:
            with self.opener.open(request, timeout=self.timeout_seconds) as answer:
                text = answer.read()
            return json.loads(text) if text.strip() else None
        except urllib.error.HTTPError as error:
            raise self.fault(
                f"{what} was answered {error.code}: {_reason(error)}", (fixes or {}).get(error.code)
            ) from None
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(cause, TimeoutError):
                raise self.fault(
                    f"{what} took longer than {self.timeout_seconds:g} s", "raise timeout_seconds"
                ) from None
            raise self.fault(
                f"{what}: {cause or type(cause).__name__}",
                "start it with `vllm serve MODEL`, or mend the url",
            ) from None
        except ValueError:
            raise self.fault(
                f"{what} was answered with what is no JSON", "is it vLLM that listens there?"
            ) from None

    def fault(self, what: str, fix: str | None = None) -> DrumlineError:
        return (DrumlineError if self.found else EnvironmentFault)(what, where=self.where, fix=fix)


def _reason(error: urllib.error.HTTPError) -> str:
    """The message in the body of an error, in vLLM's form or another, in 300 letters."""
    text = error.read().decode(errors="replace").strip()
    try:
        body = json.loads(text)
        inner = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
        text = str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except ValueError:
        return text[:300] or str(error.reason)
    return text[:300]


class VLLMClient:
    """What requests to vLLM have in common, to its server or in this process."""

    positions: int | None

    def __init__(self, config: Config, tokenizer: Any, seed: int) -> None:
        self.config, self.seed = config, seed
        self.end_tokens = sorted(end_ids(tokenizer))

    def generate(self, requests: list[Request], step: int) -> list[Completion]:
        """Raises DataError and PlanError as other generators do, DrumlineError where the server fails or a request is given up."""
        require_room(requests, self.config.max_new_tokens, self.positions)
        return self._generate(requests, step) if requests else []

    def _generate(self, requests: list[Request], step: int) -> list[Completion]:
        raise NotImplementedError

    def parameters(self, request: Request, step: int) -> dict[str, Any]:
        """Everything that has a default is set: vLLM's defaults may be those of the model's generation config."""
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


class VLLMServer(VLLMClient):
    """`generate` by POST /v1/completions, one request a prompt, `config.batch` at once. The first one finds out which log-probs the server
    gives: a completion's are those of softmax(logits / temperature)."""

    def __init__(self, config: Config, tokenizer: Any, seed: int) -> None:
        """Raises EnvironmentFault where no healthy server answers at `config.url`."""
        assert config.url is not None
        super().__init__(config, tokenizer, seed)
        self.server = Server(
            reveal(config.url, f"{WHERE}.url"), config.timeout_seconds, f"{WHERE}.url"
        )
        self.server.request("/health")
        served = self.server.request("/v1/models")
        try:
            self.model, self.positions = (
                str(served["data"][0]["id"]),
                served["data"][0].get("max_model_len"),
            )
        except (TypeError, KeyError, IndexError):
            raise self.server.fault(
                "/v1/models does not name a model", "is it vLLM that listens there?"
            ) from None
        self.server.found, self.probed = True, False

    def _generate(self, requests: list[Request], step: int) -> list[Completion]:
        if not self.probed:
            self._require_log_probs(requests[0])
        with ThreadPoolExecutor(self.config.batch) as threads:
            answers = [
                threads.submit(self._complete, self._requested(request, step))
                for request in requests
            ]
            try:
                return [answer.result() for answer in answers]
            except DrumlineError:
                threads.shutdown(wait=False, cancel_futures=True)
                raise

    def _requested(self, request: Request, step: int) -> dict[str, Any]:
        own = {"model": self.model, "prompt": request.tokens, "return_tokens_as_token_ids": True}
        return self.parameters(request, step) | own

    def _complete(self, body: dict[str, Any]) -> Completion:
        answer = self.server.request("/v1/completions", body)
        try:
            choice = answer["choices"][0]
            tokens = [int(token.removeprefix(TOKEN)) for token in choice["logprobs"]["tokens"]]
            made = Completion(
                tokens,
                [float(p) for p in choice["logprobs"]["token_logprobs"]],
                choice["finish_reason"] == "stop",
            )
            whole = (
                made.tokens
                and len(made.tokens) == len(made.log_probs)
                and choice["finish_reason"] in ("stop", "length")
            )
        except (TypeError, KeyError, IndexError, ValueError, AttributeError):
            whole = False
        if not whole:
            raise self.server.fault(
                f"/v1/completions gave no tokens with log-probs: {str(answer)[:200]}",
                "it takes vLLM 0.22 or later",
            )
        return made

    def _require_log_probs(self, request: Request) -> None:
        """Finds out whether the server gives log-probs of the logits as they are, or of what is sampled from. Raises DrumlineError where it
        is not the kind needed."""
        needed = self.config.temperature != 1
        # Without cuts both are the same; and a greedy choice is no sample, so nothing reads its log-prob.
        either = self.config.top_k == 1 or (
            not needed and self.config.top_p == 1 and self.config.top_k == 0
        )
        if not either and self._gives_processed_log_probs(request) != needed:
            kind = "processed_logprobs" if needed else "raw_logprobs"
            what = f"temperature {self.config.temperature:g} needs log-probs that this server does not give"
            raise self.server.fault(what, f"start it with --logprobs-mode {kind}")
        self.probed = True

    def _gives_processed_log_probs(self, request: Request) -> bool:
        """Whether log-probs are of the distribution that is sampled from.

        Two requests are each allowed one token. Processed log-probs are then 0 for both. Raw ones are
        of the whole vocabulary, where two tokens cannot both be likelier than a half.
        """
        ordinary = (token for token in count() if token not in self.end_tokens)
        for token in islice(ordinary, 2):
            own = {"max_tokens": 1, "allowed_token_ids": [token]}
            made = self._complete(self._requested(request, 0) | own)
            if made.tokens != [token]:
                raise self.server.fault(
                    "/v1/completions does not keep to allowed_token_ids",
                    "it takes vLLM 0.22 or later",
                )
            if made.log_probs[0] < math.log(0.5):
                return False
        return True


class WeightFolder:
    """Hands the weights to a server through a folder that both see: rank 0 writes safetensors files and calls /collective_rpc
    `reload_weights` (the documented way of layer-wise reloading), then empties the server's prefix cache."""

    def __init__(self, server: Server, folder: Path, dtype: torch.dtype) -> None:
        """`dtype`: of floating-point weights in the files."""
        self.server, self.folder, self.dtype = server, folder, dtype
        self.turn = 0

    def refresh(self, weights: Weights) -> None:
        """Collective: all ranks go through the weights, and none goes on before the server has them. Raises EnvironmentFault where the
        folder cannot be written, DrumlineError where the server fails; on all ranks."""
        failure: DrumlineError | None = None
        folder = self.folder / f"{self.turn % 2}"
        if place()[0] == 0:
            for number, shard in enumerate(
                _shards(weights, self.dtype)
            ):  # to the end also where one fails: the other ranks go on
                failure = failure or self._save(shard, folder, number)
            try:
                if failure is None:
                    unread = f"the server must see {folder} under the same path; {DEV_MODE}"
                    fixes = {404: DEV_MODE, 500: unread, 400: unread}
                    self.server.request(
                        "/collective_rpc",
                        {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}},
                        fixes,
                    )
                    self.server.request("/reset_prefix_cache", {}, fixes)
                    # The previous weights: nothing reads them.
                    shutil.rmtree(self.folder / f"{(self.turn + 1) % 2}", ignore_errors=True)
            except DrumlineError as error:
                failure = error
        else:
            for _ in weights:
                continue
        self.turn += 1
        failed = from_all(failure is not None)
        if failure is not None:
            raise failure
        if any(failed):
            raise DrumlineError(
                "rank 0 could not hand over the weights; its log has the reason", where=WHERE
            )

    def _save(
        self, shard: dict[str, torch.Tensor], folder: Path, number: int
    ) -> EnvironmentFault | None:
        """Why a file of weights cannot be written; None if it is."""
        try:
            if number == 0:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
            save_file(
                shard, folder / f"model-{number + 1:05d}.safetensors", metadata={"format": "pt"}
            )
        except (OSError, SafetensorError) as error:
            fix = f"set {WHERE}.folder to a folder with room"
            return EnvironmentFault(
                f"weights cannot be written: {error}", where=str(self.folder), fix=fix
            )
        return None


def _shards(weights: Weights, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """The weights on the host, in parts of at most SHARD_BYTES, or of one tensor."""
    shard, size = dict[str, torch.Tensor](), 0
    for name, tensor in weights:
        kept = (
            tensor.detach()
            .to("cpu", dtype if tensor.is_floating_point() else None, copy=True)
            .contiguous()
        )
        if shard and size + kept.nbytes > SHARD_BYTES:
            yield shard
            shard, size = {}, 0
        shard[name] = kept
        size += kept.nbytes
    yield shard


class VLLMEngine(VLLMClient):
    """`generate` by `vllm.LLM` of the model at `model_path`, computing in `dtype` (bfloat16, float16 or float32): with seeds of our own,
    `collective_rpc("reload_weights")` with an iterator of weights, and the executor that leaves processes to their launcher."""

    def __init__(
        self,
        config: Config,
        tokenizer: Any,
        seed: int,
        model_path: str,
        dtype: str,
        rows: int | None = None,
    ) -> None:
        """`rows`: of an embedding that is larger than that in the model's files.

        Raises EnvironmentFault where vLLM is missing or cannot start.
        """
        require_installed(config)
        super().__init__(config, tokenizer, seed)
        # Of softmax(logits / temperature): raw ones know no temperature, processed ones top_p and top_k (see the config's check).
        log_probs = "raw_logprobs" if config.temperature == 1 else "processed_logprobs"
        self.llm = _engine(model_path, dtype, config.memory, config.batch, log_probs, seed, rows)
        self.positions = self.llm.llm_engine.model_config.max_model_len

    def _generate(self, requests: list[Request], step: int) -> list[Completion]:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": request.tokens} for request in requests]
        parameters = [SamplingParams(**self.parameters(request, step)) for request in requests]
        completions = list[Completion]()
        for made in (
            output.outputs[0] for output in self.llm.generate(prompts, parameters, use_tqdm=False)
        ):
            tokens = list(made.token_ids)
            if not tokens or made.finish_reason not in ("stop", "length") or made.logprobs is None:
                raise DrumlineError(f"vLLM gave up a request: {made.finish_reason}", where=WHERE)
            log_probs = [
                float(step[token].logprob)
                for token, step in zip(tokens, made.logprobs, strict=True)
            ]
            completions.append(Completion(tokens, log_probs, made.finish_reason == "stop"))
        return completions

    def refresh(self, weights: Weights) -> None:
        """Take over all weights. Collective where they are."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.reset_prefix_cache()


def require_installed(config: Any) -> None:
    """Raises EnvironmentFault where this generator needs vLLM here and it is missing, ConfigError for a url that is not known here;
    nothing is imported."""
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
    """One engine a process, for all callers: there is memory for no other. Raises EnvironmentFault where it cannot start."""
    # Weights are handed over as tensors, so the engine must be in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

    # The files have too few rows, and all weights are handed over before anything is sampled.
    grown: dict[str, Any] = {}
    if rows is not None:
        grown = {
            "load_format": "dummy",
            "hf_overrides": functools.partial(_with_rows, rows=rows),
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
        first = str(error).strip().splitlines()[:1]
        raise EnvironmentFault(
            f"vLLM does not start: {first[0] if first else type(error).__name__}", where=WHERE
        ) from None


def _with_rows(config: Any, rows: int) -> Any:
    """The Hugging Face config of a model, with so many rows of its embedding."""
    for part in (config, config.get_text_config()):
        if hasattr(part, "vocab_size"):
            part.vocab_size = rows
    return config
