"""A small server that speaks SGLang's native HTTP API, as far as the client uses it, over a real tiny model.

Like the stand-in for vLLM, it samples with our own sampler, seeded by the request: SGLang does so with --enable-deterministic-inference.
"""

from __future__ import annotations

from typing import Any

from tests.vllm_stub import NOT_FOUND, StubServer

# python/sglang/srt/sampling/sampling_params.py, of SamplingParams: what a request may set, and of which type.
OPTIONS = {
    "n": int, "max_new_tokens": int, "sampling_seed": int, "temperature": float, "top_p": float, "top_k": int, "min_p": float,
    "repetition_penalty": float, "presence_penalty": float, "frequency_penalty": float, "stop": list, "stop_token_ids": list,
    "no_stop_trim": bool, "skip_special_tokens": bool,
}  # fmt: skip
# python/sglang/srt/managers/io_struct.py, of GenerateReqInput.
FIELDS = {"input_ids", "sampling_params", "return_logprob", "logprob_start_len"}


class SGLangStub(StubServer):
    completions = "/generate"

    def __init__(self, model: Any, key: str | None = None) -> None:
        # The log-probs are those after the temperature.
        super().__init__(model, processed=True, key=key)

    def get(self, path: str) -> tuple[int, Any]:
        """Return the status and the answer to a GET."""
        if path == "/get_model_info":
            return 200, {"model_path": "tiny", "weight_version": self.weight_version}
        return super().get(path)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and the answer to a POST."""
        if path == "/generate":
            return 200, self.generate(body)
        if path == "/update_weights_from_disk":
            try:
                self.load(body["model_path"])
            except (AssertionError, OSError) as error:
                return 400, {"success": False, "message": str(error), "num_paused_requests": 0}
            self.weight_version = body["weight_version"]
            return 200, {"success": True, "message": "Succeeded.", "num_paused_requests": 0}
        if path == "/flush_cache":
            return 200, "Cache flushed.\nPlease check backend logs for more details.\n"
        return NOT_FOUND

    def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        options = body["sampling_params"]
        assert body.keys() <= FIELDS, body.keys()
        assert body["return_logprob"] is True

        for key, value in options.items():
            assert isinstance(value, OPTIONS[key]), (key, value)

        top_k = options["top_k"]
        sampling = {
            "model": "tiny",
            "prompt": body["input_ids"],
            "max_tokens": options["max_new_tokens"],
            "seed": options["sampling_seed"],
            "temperature": options["temperature"],
            "top_p": options["top_p"],
            "top_k": 0 if top_k == -1 else top_k,
            "stop": options["stop"],
            "stop_token_ids": options["stop_token_ids"],
        }
        (choice,) = self.counted(sampling)["choices"]
        told = choice["logprobs"]
        tokens = [int(token.removeprefix("token_id:")) for token in told["tokens"]]
        pairs = zip(told["token_logprobs"], tokens, strict=True)
        log_probs = [[log_prob, token, None] for log_prob, token in pairs]
        about = {
            "finish_reason": {"type": choice["finish_reason"]},
            "output_token_logprobs": log_probs,
            "completion_tokens": len(tokens),
        }
        return {"text": "", "output_ids": tokens, "meta_info": about}
