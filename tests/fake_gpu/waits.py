"""Why the host waits for the device in a step that is not logged. The target is none."""

from __future__ import annotations

DEEPSPEED = "DeepSpeed's own engine: it reads norms and counts, and synchronises its streams"
GENERATE = "a rollout: transformers' generate and the reading of what was sampled"
# Function that waits, as `counts.json` names it → why it does.
REASONS = {
    "dist/reduce.py:read < train/state.py:arrived": (
        "the numbers of the step before; the device already has this step's work by then"
    ),
    "dist/reduce.py:read < dist/reduce.py:__call__": (
        "the weight of all ranks' episodes, which no rank knows alone: losses are divided by it"
    ),
    # The optimizer.
    "dist/copies.py:read < engine/native.py:step": (
        "whether the step is finite: the optimizer cannot be told on the device (see `masks`)"
    ),
    "dist/copies.py:read < engine/per_parameter.py:step": (
        "whether the step is finite: an optimizer on the host has to know before it computes"
    ),
    "engine/per_parameter.py:step < engine/optimizer.py:take_step": (
        "an optimizer on the host waits for each gradient that it computes with; the later ones"
        " are copied meanwhile"
    ),
    "engine/native.py:step < train/loop.py:_train_step": (
        "the factor of clipping, where gradients lie in host memory"
    ),
    # FSDP2 with weights and gradients in host memory.
    "streams.py:synchronize": (
        "FSDP2 waits at the end of a backward until the host has the gradients; all were copied"
        " in a row"
    ),
    "_fsdp_collectives.py:foreach_reduce": (
        "FSDP2 adds the gradients of a further micro-batch on the host, one after the other; not"
        " with one micro-batch a step, or `sync_each_micro_batch: false`"
    ),
    # Experts.
    "engine/experts.py:_run_where_experts_are < engine/experts.py:exchange_tokens": (
        "how many tokens each rank sends and gets: NCCL takes these sizes from the host, and the"
        " router of a layer decides them right before"
    ),
    "engine/experts.py:run < engine/experts.py:run": (
        "torch's grouped product of fp32 weights reads the bounds of the experts, and multiplies"
        " expert by expert"
    ),
    "": "the same in backward, where torch calls it without Python",
    # Models with an encoder and a decoder.
    "models/seq2seq.py:__call__ < models/head.py:compute_outputs": (
        "transformers asks whether a row of the encoder is padded, once for each stack: without"
        " padding its attention takes the kernels that need no mask"
    ),
    # Rollouts.
    "dist/copies.py:read < rl/generate.py:_read": GENERATE,
    "rl/generate.py:_generate_batch < rl/generate.py:generate": GENERATE,
    "rl/generate.py:_prefill_shared_prompts < rl/generate.py:_prompt_arguments": GENERATE,
    "rl/reading.py:read < rl/sampler_check.py:_mean_difference": (
        "log-probabilities of a probe of the sampler, compared on the host after each hand-over"
    ),
    # ZeRO.
    "engine/strategies/zero/engine.py:_step < engine/strategies/zero/engine.py:step": DEEPSPEED,
    "engine/strategies/zero/engine.py:backward < engine/strategies/zero/engine.py:forward_backward": DEEPSPEED,
    "engine/strategies/zero/engine.py:forward_backward < train/loop.py:_train_step": DEEPSPEED,
    "engine/strategies/zero/engine.py:grad_norm < train/loop.py:_reduce_before_norm": DEEPSPEED,
    "engine/strategies/zero/engine.py:step < train/loop.py:_train_step": DEEPSPEED,
    "models/head.py:compute_outputs < models/head.py:forward": DEEPSPEED,
}
