"""A generator that samples on SGLang's servers by their native API.

Written from SGLang's documentation and source. It was tested against a small server that speaks the
same API, and never against SGLang itself.

Random numbers are SGLang's own, seeded for each request. It reads the seeds only if it runs with
--enable-deterministic-inference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drumline.config.rollouts import SGLangGenerator as Config
from drumline.rl.generate import Completion, Request, request_seed
from drumline.rl.servers import (
    FINISHED,
    HEALTH_SECONDS,
    MOST_ANSWER,
    ServedGenerator,
    Server,
    ServerKind,
    parse_version,
)


class RemoteSGLang(ServedGenerator):
    """Samples on SGLang servers by POST /generate.

    A completion needs the log-probs of softmax(logits / temperature), which SGLang returns unless it
    runs with SGLANG_RETURN_ORIGINAL_LOGPROB. `SamplerCheck` measures how far others are off.
    """

    kind = ServerKind(
        key_variable="SGLANG_API_KEY",
        how_to_start="start it with `python -m sglang.launch_server --model-path MODEL`",
        what_to_check="is it SGLang that listens there?",
        needed_version="it takes a version of SGLang with the native API /generate",
    )
    config: Config

    def load_weights(self, server: Server, folder: Path, version: str) -> None:
        """Have a server load the weights in a folder, and empty its prefix cache.

        Raises ServerError if it does not load them. `version`: a name that no other weights have.
        """
        not_loaded = f"the server must see {folder} under the same path, or set weights: none"
        fixes = {400: not_loaded, 404: self.kind.needed_version, 500: not_loaded}
        update = {"model_path": str(folder), "weight_version": version}
        answer = server.request("/update_weights_from_disk", update, fixes)
        has_loaded = isinstance(answer, dict) and answer.get("success") is True
        if not has_loaded:
            shown = str(answer)[:MOST_ANSWER]
            raise server.fault(f"{server.url} did not load the weights: {shown}", not_loaded)
        # The answer is no JSON. SGLang refuses while requests are under way; now there are none.
        server.request_text("/flush_cache", {}, fixes)

    def read_version(self, server: Server) -> str | None:
        """Return the version of the weights that a server has; None if it cannot tell.

        Raises ServerError if it does not answer.
        """
        return parse_version(server.request_if_offered("/get_model_info", seconds=HEALTH_SECONDS))

    def complete(self, server: Server, request: Request, step: int) -> Completion:
        """See ServedGenerator."""
        body = {
            "input_ids": request.tokens,
            "sampling_params": self._options(request, step),
            "return_logprob": True,
            # Log-probs of the completion only, and not of the prompt.
            "logprob_start_len": -1,
        }
        return self.request_completion(server, "/generate", body, _parse_answer)

    def _options(self, request: Request, step: int) -> dict[str, Any]:
        """Return SGLang's options for a request's sampling.

        All are set, because SGLang's defaults may be those of the model's generation config.
        """
        config = self.config
        top_k = config.top_k
        if top_k == 0:
            # SGLang's number for "all tokens".
            top_k = -1
        return {
            "n": 1,
            "max_new_tokens": request.limit(config.max_new_tokens),
            "sampling_seed": request_seed(self.seed, step, request.key),
            "temperature": config.temperature,
            "top_p": config.top_p,
            "top_k": top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(config.stop),
            "stop_token_ids": self.end_tokens,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }


def _parse_answer(answer: Any) -> Completion | None:
    """Return the completion in an answer of /generate; None if it is empty or was broken off.

    Raises an error of `servers.MALFORMED` for an answer of another form.
    """
    meta = answer["meta_info"]
    tokens = []
    log_probs = []
    for log_prob, token, *_ in meta["output_token_logprobs"]:
        tokens.append(int(token))
        log_probs.append(float(log_prob))
    reason = meta["finish_reason"]["type"]
    if not tokens or reason not in FINISHED:
        return None
    return Completion(tokens, log_probs, reason == "stop")
