"""Why the host waits for the device in a step that is not logged. The target is none."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from tests.fake_gpu.table import COUNTED


@dataclass(frozen=True)
class Reason:
    """Why the host waits at one place, in some rows of the table.

    `place`: the function that waits, as `counts.json` names it. `rows`: patterns of the names of the
    rows in which it waits for this reason.
    """

    place: str
    rows: tuple[str, ...]
    why: str

    def is_of(self, row: str) -> bool:
        return any(fnmatchcase(row, pattern) for pattern in self.rows)


# A step after a checkpoint has nothing left to read: the numbers were read for the checkpoint.
WITHOUT_CHECKPOINT = tuple(row.name for row in COUNTED if "checkpoint" not in row.sections)
ROLLOUTS = ("*, grpo, *", "*, ppo, *", "*, online dpo, *", "*, gkd, *")
ZERO = ("zero*",)
ON_HOST = ("one device, optimizer offloaded", "fsdp2 2, optimizer offloaded")
FSDP2_OFFLOADED = ("fsdp2 2, everything offloaded",)
IMAGES = ("*, images, *",)
EXPERTS_IN_FP32 = ("ep *, fp32", "fsdp2, ep *, fp32")
DEEPSPEED = "DeepSpeed's own engine: it reads norms and counts, and synchronises its streams"
GENERATE = "a rollout: transformers' generate and the reading of what was sampled"

REASONS = [
    Reason(
        "dist/reduce.py:read < train/state.py:arrived",
        WITHOUT_CHECKPOINT,
        "the numbers of the step before; the device already has this step's work by then",
    ),
    # The optimizer.
    Reason(
        "dist/copies.py:read < engine/native.py:step",
        ("*, lion", "*, adafactor", "*, schedule_free", "*, pure bf16, *", *FSDP2_OFFLOADED),
        "whether the step is finite: the optimizer cannot ask on the device (see"
        " `handles_found_inf`)",
    ),
    Reason(
        "dist/copies.py:read < engine/per_parameter.py:step",
        ON_HOST,
        "whether the step is finite: an optimizer on the host has to know before it computes",
    ),
    Reason(
        "engine/per_parameter.py:step < engine/optimizer.py:take_step",
        ON_HOST,
        "an optimizer on the host waits for each gradient that it computes with; the later ones"
        " are copied meanwhile",
    ),
    # FSDP2 with weights and gradients in host memory.
    Reason(
        "engine/native.py:step < train/loop.py:_train_step",
        FSDP2_OFFLOADED,
        "the factor of clipping, where gradients lie in host memory",
    ),
    Reason(
        "streams.py:synchronize",
        FSDP2_OFFLOADED,
        "FSDP2 waits at the end of a backward until the host has the gradients; all were copied"
        " in a row",
    ),
    Reason(
        "_fsdp_collectives.py:foreach_reduce",
        FSDP2_OFFLOADED,
        "FSDP2 adds the gradients of a further micro-batch on the host, one after the other; not"
        " with one micro-batch a step, or `sync_each_micro_batch: false`",
    ),
    # Experts.
    Reason(
        "engine/experts.py:_run_where_experts_are < engine/experts.py:exchange_tokens",
        ("ep *", "fsdp2, ep *"),
        "how many tokens each rank sends and gets: NCCL takes these sizes from the host, and the"
        " router of a layer decides them right before",
    ),
    Reason(
        "engine/experts.py:run < engine/experts.py:run",
        EXPERTS_IN_FP32,
        "torch's grouped product of fp32 weights reads the bounds of the experts, and multiplies"
        " expert by expert",
    ),
    Reason(
        "models/router_load.py:__call__ < models/head.py:compute_outputs",
        ("one device, router bias, fp32",),
        "the same, where experts are not cut and run by transformers' own forward",
    ),
    Reason(
        "",
        (*EXPERTS_IN_FP32, "one device, router bias, fp32"),
        "the same in backward, where torch calls it without Python",
    ),
    # Images, whose sizes are arguments of transformers' models on the device.
    Reason(
        "models/head.py:compute_outputs < models/head.py:forward",
        IMAGES,
        "transformers asks where the tokens of images lie, and whether there are as many as"
        " features; of Qwen3-VL it also reads the sizes of images for the positions of their"
        " patches, for the attention of each block of the tower, and to cut the features",
    ),
    Reason(
        "",
        IMAGES,
        "transformers puts features to where the tokens of images lie, by a mask: its backward asks"
        " for the places, too",
    ),
    # transformers asks for padding and documents, so that attention without them needs no mask.
    Reason(
        "models/head.py:compute_outputs < models/head.py:forward",
        ("dp 2, *",),
        "transformers asks each device's rows whether they have several documents: the documents'"
        " lengths are those of all rows, and not cut with them",
    ),
    Reason(
        "models/seq2seq.py:__call__ < models/head.py:compute_outputs",
        ("*, encoder-decoder, *",),
        "transformers asks whether a row of the encoder is padded, once for each stack",
    ),
    Reason(
        "models/head.py:compute_outputs < models/head.py:forward",
        (
            "*, hybrid, packed, *",
            "*, lfm2, packed, *",
            "*, falcon_h1, packed, *",
            "*, nemotron_h, packed, *",
            "cp 2, gated deltanet, *",
        ),
        "transformers asks whether a row is padded, for the mask of the recurrent layers",
    ),
    Reason(
        "models/head.py:compute_outputs < models/head.py:forward",
        ("one device, gated deltanet, packed, *", "fsdp2 2, gated deltanet, packed, *"),
        "the attention of Qwen3.5 takes a mask, for which transformers asks whether rows have"
        " several documents",
    ),
    # Rollouts.
    Reason(
        "dist/reduce.py:read < dist/reduce.py:__call__",
        ROLLOUTS,
        "whether a rank has a stop signal, which all ask before a rollout, as it takes long",
    ),
    Reason("dist/copies.py:read < rl/generate.py:_read", ROLLOUTS, GENERATE),
    Reason("rl/generate.py:_generate_batch < rl/generate.py:generate", ROLLOUTS, GENERATE),
    Reason(
        "rl/generate.py:_prefill_shared_prompts < rl/generate.py:_prompt_arguments",
        ("fsdp2 2, grpo, fp32", "fsdp2 2, online dpo, *"),
        "transformers asks whether a prompt is padded, where prompts that repeat are computed once",
    ),
    Reason(
        "rl/reading.py:read < rl/rollouts.py:_add_model_outputs",
        ("*, ppo, *",),
        "log-probabilities and values of what was sampled: advantages are computed on the host",
    ),
    Reason(
        "rl/reading.py:read < rl/rollouts.py:_add_model_outputs",
        ("*, online dpo, *", "fsdp2 2, grpo, images, fp32"),
        "log-probabilities of what was sampled, by the policy and the reference: they are kept for"
        " all steps of the rollout",
    ),
    Reason(
        "rl/reading.py:read < rl/sampler_check.py:_mean_difference",
        tuple(f"fsdp2 2{pattern[1:]}" for pattern in ROLLOUTS),
        "log-probabilities of a probe of the sampler, compared on the host after each hand-over",
    ),
    # ZeRO.
    Reason(
        "engine/strategies/zero/engine.py:_step < engine/strategies/zero/engine.py:step",
        ZERO,
        DEEPSPEED,
    ),
    Reason(
        "engine/strategies/zero/engine.py:backward"
        " < engine/strategies/zero/engine.py:forward_backward",
        ("zero3 *", "zero2 2, optimizer offloaded"),
        DEEPSPEED,
    ),
    Reason(
        "engine/strategies/zero/engine.py:forward_backward < train/loop.py:_train_step",
        ZERO,
        DEEPSPEED,
    ),
    Reason(
        "engine/strategies/zero/engine.py:grad_norm < train/loop.py:_reduce_before_norm",
        ZERO,
        DEEPSPEED,
    ),
    Reason(
        "engine/strategies/zero/engine.py:step < train/loop.py:_train_step",
        ZERO,
        DEEPSPEED,
    ),
    Reason(
        "models/head.py:compute_outputs < models/head.py:forward",
        ("zero3 *",),
        "the frequencies of the rotary embedding, copied to the device for each micro-batch:"
        " DeepSpeed leaves buffers in host memory where it shards weights",
    ),
]
