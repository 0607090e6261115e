"""A vLLM engine in each rank, on the GPU that it trains on, behind the seam.

Not run: there was no GPU with vLLM. Written from vLLM's documentation (0.22 and later): `LLM.generate` with seeds of our own,
`collective_rpc("reload_weights")` with an iterator of weights, and the executor that leaves processes to their launcher.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

from drumline.core.rollouts import VLLMGenerator as Config
from drumline.core.secret import reveal
from drumline.errors import DrumlineError, EnvironmentFault
from drumline.rl.generate import WHERE, Weights, require_room
from drumline.rl.sampling import Completion, Request
from drumline.rl.vllm import VLLMClient


class VLLMEngine(VLLMClient):
    """`generate` by `vllm.LLM` of the model at `model_path`, computing in `dtype` (bfloat16, float16 or float32)."""

    def __init__(self, config: Config, tokenizer: Any, seed: int, model_path: str, dtype: str) -> None:
        """Raises EnvironmentFault where vLLM is missing or cannot start."""
        require_installed(config)
        super().__init__(config, tokenizer, seed)
        # Of softmax(logits / temperature): raw ones know no temperature, processed ones top_p and top_k (see the config's check).
        log_probs = "raw_logprobs" if config.temperature == 1 else "processed_logprobs"
        self.llm = _engine(model_path, dtype, config.memory, config.batch, log_probs, seed)
        self.positions: int | None = self.llm.llm_engine.model_config.max_model_len

    def generate(self, requests: list[Request], step: int) -> list[Completion]:
        """Raises DataError and PlanError as other generators do, DrumlineError where a request is given up."""
        require_room(requests, self.config.max_new_tokens, self.positions)
        if not requests:
            return []
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": request.tokens} for request in requests]
        parameters = [SamplingParams(**self.parameters(request, step)) for request in requests]
        outputs = self.llm.generate(prompts, parameters, use_tqdm=False)
        return [self._completion(output.outputs[0]) for output in outputs]

    def refresh(self, weights: Weights) -> None:
        """Take over all weights. Collective where they are."""
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.reset_prefix_cache()

    def _completion(self, made: Any) -> Completion:
        tokens = list(made.token_ids)
        if not tokens or made.finish_reason not in ("stop", "length") or made.logprobs is None:
            raise DrumlineError(f"vLLM gave up a request: {made.finish_reason}", where=WHERE)
        log_probs = [float(step[token].logprob) for token, step in zip(tokens, made.logprobs, strict=True)]
        return Completion(tokens, log_probs, made.finish_reason == "stop")


def require_installed(config: Any) -> None:
    """Raises EnvironmentFault where this generator needs vLLM here and it is missing, ConfigError for a url that is not known here;
    nothing is imported."""
    if isinstance(config, Config) and config.url is None and importlib.util.find_spec("vllm") is None:
        raise EnvironmentFault("the package vllm is missing", where=f"{WHERE}.kind", fix="pip install vllm, or set url")
    if isinstance(config, Config):
        reveal(config.url, f"{WHERE}.url")


@functools.cache
def _engine(model_path: str, dtype: str, memory: float, batch: int, log_probs: str, seed: int) -> Any:
    """One engine a process, for all callers: there is memory for no other. Raises EnvironmentFault where it cannot start."""
    # Weights are handed over as tensors, so the engine must be in this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM

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
        )
    except (RuntimeError, ValueError, OSError) as error:
        first = str(error).strip().splitlines()[:1]
        raise EnvironmentFault(f"vLLM does not start: {first[0] if first else type(error).__name__}", where=WHERE) from None
