"""A small server that speaks vLLM's HTTP API, as far as the client uses it, over a real tiny model: in a thread, on a free port.

It checks what it is sent as vLLM's pydantic model would (unknown keys are refused), samples with our own sampler seeded by the request,
and loads weights from a folder. As vLLM does, it takes a head that is tied to the embedding for a weight of its own as it reloads.
`break_with`: a path → how it fails there. `ignored`: names of weights that it does not load, after `honest_loads` hand-overs.
`dies_after`: so many completions are answered, and then it is dead until `restart`.
`restarts_after`: before the completions with these numbers it is restarted so quickly that no request fails.
`has_plug_in`: whether it reads weights over the network, by the code of drumline-vllm.
`dies_while_reading`: it is dead once it has read a weight over the network.
"""

from __future__ import annotations

import json
import shutil
import tempfile
import threading
import time
from collections.abc import Collection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

import torch
from safetensors.torch import load_file

from drumline.rl.generate import Sampler, StopRules
from drumline.rl.vllm import MOST_STOP_TEXTS, PROTOCOL
from drumline_vllm.reading import read_tensors, write_files
from tests.tiny import tiny_tokenizer

# vllm/entrypoints/openai/completion/protocol.py, of CompletionRequest: what a request may say, and of which type.
FIELDS = {
    "model": str, "prompt": list, "n": int, "max_tokens": int, "seed": int, "temperature": float, "top_p": float, "top_k": int,
    "min_p": float, "repetition_penalty": float, "presence_penalty": float, "frequency_penalty": float, "stop": list,
    "stop_token_ids": list, "include_stop_str_in_output": bool, "skip_special_tokens": bool, "logprobs": int,
    "return_tokens_as_token_ids": bool, "allowed_token_ids": list, "prompt_logprobs": int,
}  # fmt: skip


# What a hand-over of whole weights asks of a server.
HAND_OVER = ["/collective_rpc", "/reset_prefix_cache", "/update_weight_version"]
# What a hand-over of whole weights over the network asks of a server.
NETWORK_HAND_OVER = [
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/reset_prefix_cache",
    "/finish_weight_update",
]
# What vLLM 0.32 answers if its engine fails at such a call.
FAILED_CALL = "Call to collective_rpc method failed: "
# The most tokens of a sequence.
POSITIONS = 512
TRANSFER = (
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
)
NOT_FOUND = (404, {"detail": "Not Found"})
# What vLLM and SGLang call the weights that they were started with.
FIRST_VERSION = "default"


class StubServer(ThreadingHTTPServer):
    daemon_threads = True
    # Ranks connect with many threads at once. With Python's 5 places some would be turned away.
    request_queue_size = 128
    # The path that is asked for completions.
    completions = "/v1/completions"

    def __init__(self, model: Any, processed: bool = False, key: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.model, self.processed, self.key = model, processed, key
        head = model.get_output_embeddings()
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
        self.break_with: dict[str, Any] = {}
        self.ignored: set[str] = set()
        self.honest_loads, self.loads = 0, 0
        self.gate: threading.Barrier | None = None
        self.asked: list[tuple[str, Any]] = []
        self.dies_after: int | None = None
        self.restarts_after: Collection[int] = ()
        self.is_dead, self.completed = False, 0
        # vLLM 0.32 tells the version of its weights, which an older one cannot.
        self.tells_version, self.weight_version = True, FIRST_VERSION
        # Whether it runs with VLLM_ALLOW_RUNTIME_LORA_UPDATING and --enable-lora, and its --max-lora-rank.
        self.takes_adapters, self.max_rank = True, 16
        # Whether it runs with the plug-in drumline-vllm, and whether an update of its weights has begun.
        self.has_plug_in, self.is_updating = True, False
        self.dies_while_reading = False
        # --max-logprobs, here with vLLM's default, and the text → tokens of its tokenizer.
        self.most_log_probs = 20
        self.tokenize = lambda text: tiny_tokenizer().encode(text, add_special_tokens=False)
        # Name of an adapter → name of a weight → what it adds to that.
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}
        # The folder for adapters that are sent over the network.
        self.memory = Path(tempfile.mkdtemp(prefix="drumline-stub-"))
        self.first_state = {name: value.clone() for name, value in model.state_dict().items()}
        self.lock, self.at_once, self.most_at_once = threading.Lock(), 0, 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def __enter__(self) -> Self:
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()
        shutil.rmtree(self.memory)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is no news."""

    def restart(self) -> None:
        """Be there again, with the weights that it was first started with."""
        self.model.load_state_dict(self.first_state)
        self.dies_after = None
        self.is_dead = False
        self.adapters = {}
        self.weight_version = FIRST_VERSION
        self.is_updating = self.dies_while_reading = False

    def begin_completion(self) -> None:
        """Count a completion that is asked for, and die if it is one too many, or be restarted before it."""
        with self.lock:
            if self.completed == self.dies_after:
                self.is_dead = True
            if self.completed in self.restarts_after:
                self.restart()
            self.completed += 1

    def get(self, path: str) -> tuple[int, Any]:
        """Return the status and the answer to a GET."""
        if path == "/health":
            return 200, None
        if path == "/v1/models":
            models: list[Any] = [{"id": "tiny", "max_model_len": POSITIONS}]
            models += [{"id": name, "parent": "tiny"} for name in self.adapters]
            return 200, {"object": "list", "data": models}
        if path == "/weight_info" and self.tells_version:
            return 200, {"weight_version": self.weight_version}
        return NOT_FOUND

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and the answer to a POST."""
        if path == self.completions:
            return self.answer_completion(body)
        if path == "/tokenize":
            assert body["add_special_tokens"] is False, body
            tokens = self.tokenize(body["prompt"])
            answer = {"count": len(tokens), "max_model_len": POSITIONS, "tokens": tokens}
            return 200, {**answer, "token_strs": None}
        if path == "/collective_rpc":
            assert body["method"] == "reload_weights", body
            self.load(body["kwargs"]["weights_path"])
            return 200, {"results": [None]}
        if path == "/reset_prefix_cache":
            return 200, None
        if path == "/update_weight_version" and self.tells_version:
            self.weight_version = body["new_version"]
            return 200, {"success": True, "new_version": self.weight_version}
        if path in TRANSFER:
            return self.answer_transfer(path, body)
        if path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter") and self.takes_adapters:
            return self.answer_adapter(path, body)
        return NOT_FOUND

    def answer_adapter(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        name = body["lora_name"]
        if path == "/v1/unload_lora_adapter":
            self.unload_adapter(name)
            return 200, f"Success: LoRA adapter '{name}' removed successfully."
        try:
            self.load_adapter(name, body["lora_path"])
        except (AssertionError, KeyError, OSError) as error:
            # vLLM 0.32 answers 500 to whatever its engine does not load, also a rank too large.
            return 500, {"error": {"message": str(error), "type": "InternalServerError"}}
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def answer_transfer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        try:
            self.transfer(path, body)
        except (RuntimeError, ValueError) as error:
            message = f"{FAILED_CALL}{error}"
            return 500, {"error": {"message": message, "type": "InternalServerError"}}
        return 200, {"message": "done"}

    def transfer(self, path: str, body: dict[str, Any]) -> None:
        """Do what vllm/v1/worker/gpu_worker.py and the engine of drumline-vllm do."""
        if not self.has_plug_in:
            raise RuntimeError("Weight transfer not configured.")
        if path == "/init_weight_transfer_engine":
            if body["init_info"] != {"protocol": PROTOCOL}:
                raise ValueError("Invalid init_info")
            return
        if path == "/start_weight_update":
            if self.is_updating:
                raise RuntimeError("a weight update is already active")
            self.is_updating = True
            return
        if not self.is_updating:
            raise RuntimeError("start_weight_update must be called before")
        self.is_updating = False
        if path == "/finish_weight_update":
            self.weight_version = body.get("weight_version", self.weight_version)
            return
        self.read_update(body["update_info"])
        self.is_updating = True

    def read_update(self, update: dict[str, Any]) -> None:
        """Read weights from the trainer."""
        if "adapter" in update:
            folder = self.memory / update["adapter"]
            write_files(update["source"], update["seconds"], folder)
            return
        state = {}
        for name, tensor in read_tensors(update["source"], update["seconds"]):
            if self.dies_while_reading:
                self.is_dead = True
                raise RuntimeError("killed")
            state[name] = tensor
        self.load_state(state)

    def answer_completion(self, body: dict[str, Any]) -> tuple[int, Any]:
        if body["model"] not in ("tiny", *self.adapters):
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        if len(body.get("stop", ())) > MOST_STOP_TEXTS:
            message = "List should have at most 4 items after validation, not 5"
            return 400, {"error": {"message": message, "type": "BadRequestError", "code": 400}}
        asked = body.get("prompt_logprobs")
        if asked is not None and asked > self.most_log_probs:
            message = (
                f"Requested prompt logprobs of {asked}, which is greater than max allowed:"
                f" {self.most_log_probs} (parameter=prompt_logprobs, value={asked})"
            )
            error = {"message": message, "type": "BadRequestError", "param": "prompt_logprobs"}
            return 400, {"error": {**error, "code": 400}}
        return 200, self.counted(body)

    def bodies(self, path: str) -> list[Any]:
        return [body for asked, body in self.asked if asked == path]

    def counted(self, body: dict[str, Any]) -> dict[str, Any]:
        """`complete`, counted while it is under way: no longer, for a client may ask anew before its answer is sent to the end."""
        with self.lock:
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            if "prompt_logprobs" in body:
                return self.score(body)
            return self.complete(body)
        finally:
            with self.lock:
                self.at_once -= 1

    @torch.no_grad()
    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        for key, value in body.items():
            assert isinstance(value, FIELDS[key]), (key, value)
        sampler = Sampler(body["temperature"], body["top_k"], body["top_p"])
        rules = StopRules(
            frozenset(body["stop_token_ids"]), tuple(body["stop"]), tokenizer_of(body)
        )
        if self.gate is not None:
            self.gate.wait()
        tokens: list[int] = []
        log_probs: list[float] = []
        ended = False
        while len(tokens) < body["max_tokens"] and not ended:
            with self.lock:
                logits = self.run(body["model"], body["prompt"] + tokens)
            allowed = logits
            if (
                "allowed_token_ids" in body
            ):  # vLLM masks the others after it has taken raw log-probs
                mask = torch.full_like(logits, -torch.inf)
                mask[:, body["allowed_token_ids"]] = 0
                allowed = logits + mask
            noisy, _ = sampler.choose(
                allowed, torch.tensor([body["seed"]]), torch.tensor([len(tokens)])
            )
            token = int(noisy.argmax())
            kept = logits.float()
            if self.processed:
                kept = allowed.float() / body["temperature"]
                for warper in sampler.warpers:
                    kept = warper(None, kept)
            tokens.append(token)
            log_probs.append(float(kept.log_softmax(-1)[0, token]))
            ended = rules.is_met(tokens)
        told = {
            "tokens": [f"token_id:{token}" for token in tokens],
            "token_logprobs": log_probs,
            "top_logprobs": None,
            "text_offset": [],
        }
        return {
            "choices": [
                {
                    "index": 0,
                    "text": "",
                    "logprobs": told,
                    "finish_reason": "stop" if ended else "length",
                }
            ]
        }

    @torch.no_grad()
    def score(self, body: dict[str, Any]) -> dict[str, Any]:
        """Answer as vllm/entrypoints/openai/completion/serving.py does, with one greedy token.

        Of each place but the first there is first the prompt's own token, with its rank, and then the
        likeliest ones in their order. A token that is both has one entry, at the first place.
        """
        for key, value in body.items():
            assert isinstance(value, FIELDS[key]), (key, value)
        tokens = body["prompt"]
        assert len(tokens) + body["max_tokens"] <= POSITIONS, "maximum context length"
        with self.lock:
            logits_TV = self.model(torch.tensor([tokens])).logits[0].float()
        log_probs_TV = logits_TV.log_softmax(-1)
        places: list[Any] = [None]
        for place in range(1, len(tokens)):
            log_probs_V = log_probs_TV[place - 1]
            own = log_probs_V[tokens[place]]
            values, ids = log_probs_V.topk(body["prompt_logprobs"])
            ranked = [(tokens[place], float(own), int((log_probs_V >= own).sum()))]
            for rank, (token, value) in enumerate(zip(ids.tolist(), values.tolist(), strict=True)):
                ranked.append((token, value, rank + 1))
            entries = {}
            for token, value, rank in ranked:
                entries[str(token)] = {"logprob": value, "rank": rank, "decoded_token": ""}
            places.append(entries)
        choice = {
            "index": 0,
            "text": "",
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
            "prompt_logprobs": places,
        }
        return {"object": "text_completion", "model": body["model"], "choices": [choice]}

    def run(self, name: str, tokens: list[int]) -> torch.Tensor:
        """The last logits of the model, with an adapter if it is asked for by the name of one."""
        weights = {}
        for path, product in self.adapters.get(name, {}).items():
            weights[path] = self.model.get_parameter(path) + product
        out = torch.func.functional_call(self.model, weights, (torch.tensor([tokens]),))
        return out.logits[:, -1]

    def load_adapter(self, name: str, path: str) -> None:
        """Read PEFT's files as vllm/lora/peft_helper.py and lora_model.py do."""
        assert name not in self.adapters, f"The lora adapter '{name}' has already been loaded"
        folder = Path(path)
        options = json.loads((folder / "adapter_config.json").read_text())
        assert not options["use_dora"] and not options["modules_to_save"], options
        assert options["r"] <= self.max_rank, (
            f"LoRA rank {options['r']} is greater than max_lora_rank {self.max_rank}"
        )
        scale = options["lora_alpha"] / (
            options["r"] ** 0.5 if options["use_rslora"] else options["r"]
        )
        tensors = load_file(folder / "adapter_model.safetensors")
        products = {}
        for key, first in tensors.items():
            assert key.startswith("base_model.model.") and key.endswith(
                (".lora_A.weight", ".lora_B.weight")
            ), key
            if key.endswith(".lora_A.weight"):
                module = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                second = tensors[key.replace(".lora_A.", ".lora_B.")]
                products[f"{module}.weight"] = scale * second @ first
        self.adapters[name] = products

    def unload_adapter(self, name: str) -> None:
        assert name in self.adapters, f"The lora adapter '{name}' cannot be found."
        del self.adapters[name]

    def load(self, path: str) -> None:
        folder = Path(path)
        files = sorted(folder.glob("*.safetensors"))
        assert files, "Cannot find any model weights"
        self.load_state(
            {name: tensor for file in files for name, tensor in load_file(file).items()}
        )

    def load_state(self, state: dict[str, torch.Tensor]) -> None:
        self.loads += 1
        ignored = self.ignored if self.loads > self.honest_loads else set()
        own = {name: tensor for name, tensor in state.items() if name not in ignored}
        missing, unexpected = self.model.load_state_dict(own, strict=False)
        assert not unexpected and set(missing) <= {"lm_head.weight", *ignored}, (
            missing,
            unexpected,
        )


def tokenizer_of(body: dict[str, Any]) -> Any:
    """Return a tokenizer that decodes as a request says; vLLM leaves special tokens out by default."""
    tokenizer = tiny_tokenizer()
    if body.get("skip_special_tokens", True):
        decode = tokenizer.decode
        tokenizer.decode = lambda tokens, **options: decode(
            tokens, **{**options, "skip_special_tokens": True}
        )
    return tokenizer


class Handler(BaseHTTPRequestHandler):
    server: StubServer

    def do_GET(self) -> None:
        if self.server.is_dead:
            self.cut()
        else:
            self.answer(*self.server.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server = self.server
        with server.lock:
            server.asked.append((self.path, body))
        if self.path == server.completions:
            server.begin_completion()
        if server.is_dead:
            self.cut()
        elif self.path in server.break_with:
            self.answer(200, None)
        else:
            try:
                status, answer = server.post(self.path, body)
            except (AssertionError, KeyError, OSError) as error:
                message = f"{type(error).__name__}: {error}"
                status, answer = 400, {"error": {"message": message, "type": "BadRequestError"}}
            if server.is_dead:
                # It was killed while it worked.
                self.cut()
            else:
                self.answer(status, answer)

    def answer(self, status: int, body: Any) -> None:
        how = self.server.break_with.get(self.path)
        if (
            self.server.key is not None
            and self.headers.get("Authorization") != f"Bearer {self.server.key}"
        ):
            status, body = 401, {"error": "Unauthorized"}
        elif how == "hang":
            time.sleep(3)
        elif how == "cut":
            return self.cut()
        elif isinstance(how, int):
            status, body = how, {"error": {"message": "EngineCore encountered an issue"}}
        elif how is not None:
            body = how
        text = (
            b""
            if body is None
            else body.encode()
            if isinstance(body, str)
            else json.dumps(body).encode()
        )
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def cut(self) -> None:
        """Close the connection without an answer."""
        self.close_connection = True
        self.connection.close()

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""
