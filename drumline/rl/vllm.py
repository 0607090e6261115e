"""Generators that use vLLM: a client of its servers, and an engine inside each rank.

The servers (`vllm serve`) read new weights from a folder (`weight_folder`) or over the network
(`weight_network`). The engine runs on the GPU that its rank trains on.

Written from vLLM's documentation and source (0.22 and later). CI tests the client against a small
server that speaks the same API, and the engine against a stand-in for `vllm.LLM`. `make servers`
tests the client against vLLM 0.32 on a CPU, with whole weights and with adapters. Nothing was run on
GPUs. When vLLM reloads, it does not tie a head to the embedding again, so a tied
weight is handed over under each of its names (`Engine.whole_weights`).

Random numbers are vLLM's own, seeded for each request from (seed of the run, step, key). So they are
the same on any number of ranks, as far as vLLM keeps a seeded request independent of its batch.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from itertools import count, islice
from pathlib import Path
from typing import Any

import httpx2

from drumline.config.rollouts import VLLMGenerator as Config
from drumline.data.targets import end_ids
from drumline.errors import DrumlineError, EnvironmentFault
from drumline.foreign import require_package
from drumline.rl.generate import (
    WHERE,
    Completion,
    Request,
    StopRules,
    Weights,
    copy_to_host,
    request_seed,
    require_room,
)
from drumline.rl.servers import (
    FINISHED,
    HEALTH_SECONDS,
    ServedGenerator,
    Server,
    ServerError,
    ServerKind,
    parse_version,
)

# The prefix of each token id in the server's answers (`return_tokens_as_token_ids`).
TOKEN_PREFIX = "token_id:"
# The HTTP status by which a server says that it has no such model or adapter.
NOT_FOUND = 404
# The most stop texts of a request. vLLM 0.32 refuses more, unless VLLM_MAX_STOP_STRINGS is set.
MOST_STOP_TEXTS = 4
# Texts that say how to fix an error.
DEV_MODE = "start the server with VLLM_SERVER_DEV_MODE=1, or set weights: none"
NEEDED_VERSION = "it takes vLLM 0.22 or later"
PLUG_IN = (
    "`pip install drumline-vllm` where vLLM 0.32 or later runs, and start it with VLLM_SERVER_DEV_MODE=1 and"
    """ --weight-transfer-config '{"backend": "drumline"}', or set transport: folder"""
)
# The version of what is sent to the plug-in drumline-vllm, which names the one that it reads.
PROTOCOL = 1


def sampling_options(
    config: Config, end_tokens: list[int], seed: int, step: int, request: Request
) -> dict[str, Any]:
    """Return vLLM's options for a request's sampling.

    All are set, because vLLM's defaults may be those of the model's generation config.

    Args:
        config: The section `algorithm.generator`.
        end_tokens: The tokens that end a completion.
        seed: The seed of the run.
        step: The optimizer step; random numbers depend on it.
        request: The request.
    """
    return {
        "n": 1,
        "max_tokens": request.limit(config.max_new_tokens),
        "seed": request_seed(seed, step, request.key),
        "temperature": config.temperature,
        "top_p": config.top_p,
        "top_k": config.top_k,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "stop": list(config.stop),
        "stop_token_ids": end_tokens,
        "include_stop_str_in_output": True,
        # A stop text may have special tokens, which vLLM leaves out of its text by default.
        "skip_special_tokens": False,
        "logprobs": 0,
    }


class RemoteVLLM(ServedGenerator):
    """Samples on vLLM servers by POST /v1/completions.

    A completion needs the log-probs of softmax(logits / temperature). `check` makes
    sure of that before the first request to a server.
    """

    kind = ServerKind(
        key_variable="VLLM_API_KEY",
        how_to_start="start it with `vllm serve MODEL`",
        what_to_check="is it vLLM that listens there?",
        needed_version=NEEDED_VERSION,
    )
    config: Config

    def __init__(
        self, config: Config, tokenizer: Any, seed: int, vocabulary: int | None = None
    ) -> None:
        """See ServedGenerator."""
        super().__init__(config, tokenizer, seed, vocabulary)
        # Finds the stop texts that are not sent to a server.
        self.unsent_stops = StopRules(frozenset(), config.stop[MOST_STOP_TEXTS:], tokenizer)

    def load_weights(self, server: Server, folder: Path, version: str) -> None:
        """Have a server load the weights in a folder: all weights, or an adapter.

        Raises ServerError if it does not load them. `version`: a name that no other weights have. It is
        the adapter's name.
        """
        if self.config.weights == "adapter":
            self.load_adapter(
                server, folder, version, f"; it must see {folder} under the same path"
            )
        else:
            self._load_whole(server, folder)
            # Last, so that weights which were not loaded do not get the name. vLLM 0.32 has the path.
            server.request_if_offered("/update_weight_version", {"new_version": version})

    def read_version(self, server: Server) -> str | None:
        """Return the version of the weights that a server has; None if it cannot tell.

        A server that was restarted calls its weights "default", and does not have the adapter.

        Raises ServerError if it does not answer.
        """
        if self.config.weights == "adapter":
            if server.model in self._served_models(server):
                return server.model
            return None
        return parse_version(server.request_if_offered("/weight_info", seconds=HEALTH_SECONDS))

    def fetch_weights(self, server: Server, source: str, version: str) -> None:
        """Have a server read weights over the network, by the plug-in drumline-vllm.

        Of an adapter it only writes the files, which `load_adapter` has it load.

        Raises ServerError if it does not read them.

        Args:
            server: The server.
            source: The URL of the weights.
            version: A name that no other weights have.
        """
        fixes = {400: PLUG_IN, 404: PLUG_IN, 500: PLUG_IN}
        # Only the plug-in takes this. It refuses a protocol that it does not read.
        greeting = {"init_info": {"protocol": PROTOCOL}}
        server.request("/init_weight_transfer_engine", greeting, fixes)
        self._start_update(server)
        update: dict[str, Any] = {"source": source, "seconds": server.timeout_seconds}
        is_adapter = self.config.weights == "adapter"
        if is_adapter:
            # Servers of one host have a folder each, and the same one after a restart.
            url = httpx2.URL(server.url)
            update["adapter"] = f"drumline-adapter-{url.host}-{url.port or url.scheme}"
        reach = {500: "the server must reach this host under that address"}
        server.request("/update_weights", {"update_info": update}, reach)
        if is_adapter:
            server.request("/finish_weight_update", {})
            return
        server.request("/reset_prefix_cache", {})
        # Last, so that weights which were not loaded do not get the name.
        server.request("/finish_weight_update", {"weight_version": version})

    def _start_update(self, server: Server) -> None:
        """Have a server begin an update of its weights, and end one that is left from a killed run."""
        try:
            server.request("/start_weight_update", {})
        except ServerError as error:
            if error.status is None:
                raise
            server.request("/finish_weight_update", {})
            server.request("/start_weight_update", {})

    def load_adapter(
        self, server: Server, folder: Path, name: str, folder_advice: str = ""
    ) -> None:
        """Have a server drop the previous adapter and load the new one.

        Each version has a name of its own, because the server's prefix cache tells adapters apart by
        their names. The old one is dropped first, as the server may have room for one only.

        Raises ServerError if it does not load it.

        Args:
            server: The server.
            folder: The folder with PEFT's files, as the server sees it.
            name: The adapter's name.
            folder_advice: What else may help if it does not load.
        """
        fix = (
            f"start the server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, --enable-lora and a"
            f" --max-lora-rank of adapter.r or more{folder_advice}"
        )
        fixes = {400: fix, 404: fix, 500: fix}
        has_adapter = server.model.startswith(self.version_prefix)
        if has_adapter and server.model in self._served_models(server):
            server.request_text("/v1/unload_lora_adapter", {"lora_name": server.model}, fixes)
        adapter = {"lora_name": name, "lora_path": str(folder)}
        server.request_text("/v1/load_lora_adapter", adapter, fixes)
        server.model = name

    def _served_models(self, server: Server) -> list[str]:
        """Return the names of the models and adapters that a server has now."""
        served = server.request("/v1/models")
        try:
            return [str(model["id"]) for model in served["data"]]
        except (TypeError, KeyError):
            raise server.fault(
                "/v1/models does not name a model", self.kind.what_to_check
            ) from None

    def _load_whole(self, server: Server, folder: Path) -> None:
        """Have a server load all weights, and empty its prefix cache.

        It calls `reload_weights` by /collective_rpc, as vLLM documents it for layer-wise reloading.
        """
        not_loaded = f"the server must see {folder} under the same path; {DEV_MODE}"
        fixes = {404: DEV_MODE, 500: not_loaded, 400: not_loaded}
        arguments = {"weights_path": str(folder)}
        reload = {"method": "reload_weights", "kwargs": arguments}
        server.request("/collective_rpc", reload, fixes)
        server.request("/reset_prefix_cache", {}, fixes)

    def complete(self, server: Server, request: Request, step: int) -> Completion:
        """See ServedGenerator. A server that was restarted does not know the adapter, and answers 404."""
        try:
            completion = self._complete_by(server, self._body(server, request, step))
        except ServerError as error:
            error.lacks_weights = self.config.weights == "adapter" and error.status == NOT_FOUND
            raise
        return self._cut(completion)

    def _cut(self, completion: Completion) -> Completion:
        """Return a completion up to the first stop text that was not sent to the server."""
        if not self.unsent_stops.stop:
            return completion
        length = self.unsent_stops.find_end(completion.tokens)
        if length is None:
            return completion
        return Completion(completion.tokens[:length], completion.log_probs[:length], ended=True)

    def _body(self, server: Server, request: Request, step: int) -> dict[str, Any]:
        """Return the body of a request to /v1/completions."""
        return {
            **sampling_options(self.config, self.end_tokens, self.seed, step, request),
            "stop": list(self.config.stop[:MOST_STOP_TEXTS]),
            "model": server.model,
            "prompt": request.tokens,
            "return_tokens_as_token_ids": True,
        }

    def _complete_by(self, server: Server, body: dict[str, Any]) -> Completion:
        """Return a server's completion. Raises ServerError for an answer without a whole one."""
        return self.request_completion(server, "/v1/completions", body, _parse_answer)

    def check(self, server: Server, request: Request) -> None:
        """Raise ServerError if a server returns log-probs of another kind than is needed.

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
        if takes_either:
            return
        if server.gives_processed_log_probs is None:
            server.gives_processed_log_probs = self._gives_processed_log_probs(server, request)
        if server.gives_processed_log_probs != needs_processed:
            kind = "processed_logprobs" if needs_processed else "raw_logprobs"
            what = f"temperature {config.temperature:g} needs log-probs that {server.url} does not give"
            raise server.fault(what, f"start it with --logprobs-mode {kind}", is_refusal=True)

    def _gives_processed_log_probs(self, server: Server, request: Request) -> bool:
        """Return whether a server's log-probs are of the distribution that is sampled from.

        Two requests are sent, each of which allows a single token, another one each time. A processed
        log-prob is then 0 in both. Raw ones are of the whole vocabulary, in which two tokens cannot both
        have a probability above a half.
        """
        ordinary_tokens = (token for token in count() if token not in self.end_tokens)
        for token in islice(ordinary_tokens, 2):
            limits = {"max_tokens": 1, "allowed_token_ids": [token]}
            completion = self._complete_by(server, self._body(server, request, 0) | limits)
            if completion.tokens != [token]:
                what = f"/v1/completions of {server.url} does not keep to allowed_token_ids"
                raise server.fault(what, self.kind.needed_version, is_refusal=True)
            if completion.log_probs[0] < math.log(0.5):
                return False
        return True


def _parse_answer(answer: Any) -> Completion | None:
    """Return the completion in an answer of /v1/completions; None if it is empty or was broken off.

    Raises an error of `servers.MALFORMED` for an answer of another form.
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


class InProcessVLLM:
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
        self.config = config
        self.seed = seed
        self.end_tokens = sorted(end_ids(tokenizer))
        # Log-probs of softmax(logits / temperature) are needed, see `RemoteVLLM.check`.
        log_probs = "raw_logprobs" if config.temperature == 1 else "processed_logprobs"
        self.llm = _engine(model_path, dtype, config.memory, config.batch, log_probs, seed, rows)
        self.max_sequence_length: int | None = self.llm.llm_engine.model_config.max_model_len

    def generate(self, requests: list[Request], step: int) -> list[Completion]:
        """Return a completion for each request.

        Raises DataError and PlanError as other generators do, and DrumlineError if vLLM gives up a
        request.
        """
        require_room(requests, self.config.max_new_tokens, self.max_sequence_length)
        if not requests:
            return []
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": request.tokens} for request in requests]
        parameters = []
        for request in requests:
            options = sampling_options(self.config, self.end_tokens, self.seed, step, request)
            parameters.append(SamplingParams(**options))
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        return [_to_completion(output.outputs[0]) for output in outputs]

    def hold(self, weights: Weights) -> Callable[[], None]:
        """Keep all weights in host memory, and return the function that replaces the engine's by them.

        Collective if the iterator is; the function is not.
        """
        held = copy_to_host(weights, {})
        return lambda: self.refresh(iter(held))

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

    Raises EnvironmentFault if it runs vLLM in this process and vLLM is not installed.
    """
    if not isinstance(config, Config):
        return
    if config.url is None:
        require_package("vllm", f"{WHERE}.kind", "pip install vllm, or set url")


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
