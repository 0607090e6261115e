"""Context parallelism against one process, on models whose attention differs: loss, first choices
and gradients of every weight.

Ring attention has no CPU kernel in torch; here torch's own ring is handed the CPU's flash kernel,
so that all around it (how sequences are cut and gathered, what must run inside its context) is
tested where there is no GPU.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from drumline.models.attention import use_document_attention
from drumline.models.recurrent_trial import separate_recurrent_layers
from tests.checkpoint_ranks import run
from tests.harness import Sections
from tests.tiny import tiny_vision_dir
from tests.unit.test_attention import layout
from tests.unit.test_recurrent import MODELS, PACKED
from tests.unit.test_recurrent import build as build_hybrid

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 64,
}
SIZES |= {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IN_TURN = ["sliding_attention", "full_attention"]
GPT2 = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "vocab_size": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
KINDS: dict[str, Sections] = {
    "llama": {
        "model_type": "llama",
        **SIZES,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "qwen3, one head of keys": {
        "model_type": "qwen3",
        **SIZES,
        "num_key_value_heads": 1,
        "head_dim": 16,
    },
    "mistral, window of 5": {"model_type": "mistral", **SIZES, "sliding_window": 5},
    "gemma3, windows in turn": {
        "model_type": "gemma3_text",
        **SIZES,
        "head_dim": 8,
        "sliding_window": 4,
        "layer_types": IN_TURN,
    },
    "gpt2": {"model_type": "gpt2", **GPT2},
}
RING = ["llama", "qwen3, one head of keys"]
# Image tokens of the rows of `batch_with_images`, each with the place of the first and the patches
# in time, height and width.
IMAGES = [[(13, (1, 4, 6)), (24, (1, 2, 2))], [(2, (1, 4, 4))]]


def build(kind: str) -> Any:
    from drumline.config.model import ModelConfig
    from drumline.models.build import build_model

    return build_model(None, ModelConfig(id=None, config=KINDS[kind]), seed=0)


def made_batch(packed: bool) -> Any:
    """Two rows of 16. Packed: documents of 5 + 11 and 9 + 7, which cross the places where parts
    meet."""
    return drawn_batch(16, ((5, 11), (9, 7)) if packed else ((16,), (16,)))


def drawn_batch(width: int, lengths: tuple[tuple[int, ...], ...]) -> Any:
    """A row for each of `lengths`, which are those of its documents."""
    from drumline.data.batches import TokenBatch, cumulative_lengths

    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 64, (len(lengths), width), generator=draw)
    targets = torch.randint(3, 64, (len(lengths), width), generator=draw)
    targets[0, 4] = -100
    targets[1, 8:] = -100
    positions = torch.stack([torch.cat([torch.arange(each) for each in row]) for row in lengths])
    learned = places_of_learned(targets)
    known: Sections = {
        "document_lengths": lengths,
        "cu_seqlens_N": cumulative_lengths(lengths, width),
        "learned_M": learned,
        "learned_on_host_M": learned.numpy(),
    }
    return TokenBatch(ids, targets, positions, weight=len(learned), **known)


def batch_with_images(model: Any, packed: bool) -> Any:
    """Two rows of 32 with images. The first image lies where two parts meet. Packed: documents of
    11 + 21 and 9 + 23."""
    from drumline.config.model import ModelConfig
    from drumline.data.batches import ImageInputs
    from drumline.models.image_tokens import QwenVision

    batch = drawn_batch(32, ((11, 21), (9, 23)) if packed else ((32,), (32,)))
    vision = QwenVision.from_config("", ModelConfig(), model.config)
    grids = []
    for row, images in enumerate(IMAGES):
        for first, grid in images:
            batch.input_ids_BT[row, first : first + vision.tokens(grid)] = vision.token_id
            grids.append(grid)
    rope_3BT = torch.empty((3, 2, 32), dtype=torch.int64)
    left = list(grids)
    for row, lengths in enumerate(batch.document_lengths):
        start = 0
        for length in lengths:
            document = slice(start, start + length)
            positions = vision.rotary_positions(batch.input_ids_BT[row, document].numpy(), left)
            assert positions is not None
            rope_3BT[:, row, document] = torch.from_numpy(positions)
            start += length
    draw = np.random.default_rng(0)
    pixels = []
    for _, height, width in grids:
        pixels.append(draw.standard_normal((height * width, vision.width), dtype=np.float32))
    arguments = vision.arguments(pixels, grids, batch.input_ids_BT)
    return replace(batch, images=ImageInputs(arguments, rope_3BT))


def places_of_learned(targets: torch.Tensor) -> torch.Tensor:
    """Where targets are learned, in the flattened rows."""
    return (targets != -100).flatten().nonzero().squeeze(1)


class Choices:
    """An objective that keeps the first choices too."""

    correct_BT: torch.Tensor | None = None

    def __call__(self, outputs: Any, batch: Any) -> Any:
        from drumline.algorithms.base import LossOut

        loss_sum, self.correct_BT = outputs.cross_entropy(batch.targets_BT, 4)
        return LossOut(loss_sum)


def answers(
    module: Any, batch: Any, around: Any
) -> tuple[float, list[bool], dict[str, torch.Tensor]]:
    """Loss, first choices, and gradients summed over ranks."""
    choices = Choices()
    with around():
        loss, _ = module(batch, choices)
        loss.backward()
    assert choices.correct_BT is not None
    gradients = {name: p.grad for name, p in module.model.named_parameters()}
    return float(loss.detach()), choices.correct_BT.flatten().tolist(), gradients


def apart(kind: str, method: str, packed: bool, by_documents: bool = False) -> float:
    """The largest distance of anything from one process, relative; `by_documents`: from one under a
    mask."""
    return distance(build(kind), made_batch(packed), method, packed, by_documents)


def distance(
    model: Any, batch: Any, method: str, packed: bool, by_documents: bool = False
) -> float:
    """See `apart`."""
    import contextlib

    from torch.distributed.device_mesh import init_device_mesh

    from drumline.engine.context_parallel import apply_context_parallel
    from drumline.models.head import ForwardWithObjective

    whole = ForwardWithObjective(copy.deepcopy(model))
    parted = ForwardWithObjective(model)
    if by_documents:
        use_document_attention(parted.model, layout())
    loss, correct, gradients = answers(whole, batch, contextlib.nullcontext)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    apply_context_parallel(parted, parted.model, mesh, method, packed)
    sequence = parted.sequence
    assert sequence is not None
    my_places = places_of_learned(sequence.cut(batch.targets_BT))
    assert torch.equal(sequence.places(batch.learned_on_host_M, batch.targets_BT), my_places)
    my_loss, my_correct, my_gradients = answers(parted, batch, sequence.around)
    assert my_correct == correct
    distances = [abs(my_loss - loss) / loss]
    for name, gradient in my_gradients.items():
        dist.all_reduce(gradient)
        difference = (gradient - gradients[name]).norm()
        distances.append(float(difference / gradients[name].norm()))
    return max(distances)


def cpu_kernel_for_torchs_ring() -> None:
    """Lay the CPU's flash kernel under torch's ring as torch lays those of GPUs."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.experimental._context_parallel import _attention as rings

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    kernel_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def here(values: Any) -> list[Any]:
        return [value.to_local() if isinstance(value, DTensor) else value for value in values]

    def spread(parts: Any, like: Any) -> Any:
        place = (like.device_mesh, like.placements)
        return tuple(DTensor.from_local(part, *place, run_check=False) for part in parts)

    def forward(_op: Any, args: Any, options: Any) -> Any:
        query, key, value, dropout, causal = here(args)
        out = rings._templated_ring_attention(
            args[0].device_mesh.get_group(),
            2,
            kernel,
            query,
            key,
            value,
            is_causal=causal,
            dropout_p=dropout,
            **options,
        )
        return spread(out, args[0])

    def backward(_op: Any, args: Any, options: Any) -> Any:
        grad, query, key, value, out, logsumexp, dropout, causal = here(args)
        grads = rings._templated_ring_attention_backward(
            args[1].device_mesh.get_group(),
            2,
            kernel_backward.default,
            grad_out=grad,
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=logsumexp,
            is_causal=causal,
            dropout_p=dropout,
            **options,
        )
        return spread(grads, args[1])

    rings.custom_ops[kernel.default] = forward
    rings.custom_ops[kernel_backward.default] = backward


def all_apart(ring: bool) -> dict[str, float]:
    distances = {}
    for kind in KINDS:
        for packed in (True, False):
            distances[f"{kind}, packed {packed}"] = apart(kind, "ulysses", packed)
    if ring:
        cpu_kernel_for_torchs_ring()
        for kind in RING:
            distances[f"{kind}, ring"] = apart(kind, "ring", packed=False)
    return distances


def all_with_images(folder: str, ring: bool) -> dict[str, float]:
    """The distances of a vision-language model, whose tower runs whole on each rank."""
    from drumline.config.model import ModelConfig
    from drumline.models.build import build_model

    asked = [("ulysses", True), ("ulysses", False)]
    if ring:
        cpu_kernel_for_torchs_ring()
        asked = [("ring", False)]
    distances = {}
    for method, packed in asked:
        model = build_model(folder, ModelConfig(id=folder), seed=0)
        batch = batch_with_images(model, packed)
        distances[f"{method}, packed {packed}"] = distance(model, batch, method, packed)
    return distances


def hybrids_apart(ring: bool) -> dict[str, float]:
    """The distances of hybrid models, whose recurrent layers run on whole rows on each rank."""
    if ring:
        cpu_kernel_for_torchs_ring()
        model = build_hybrid("qwen3_5_text")
        return {"ring": distance(model, made_batch(packed=False), "ring", packed=False)}
    distances = {}
    for kind in MODELS:
        model = build_hybrid(kind)
        distances[kind] = distance(model, made_batch(packed=False), "ulysses", packed=False)
        if kind not in PACKED:
            continue
        model = build_hybrid(kind)
        use_document_attention(model, layout())
        separate_recurrent_layers(model, "cpu")
        distances[f"{kind}, packed"] = distance(model, made_batch(packed=True), "ulysses", True)
    return distances


REFUSED: dict[str, Sections] = {
    "not go through transformers' attention interface": {
        "model_type": "bloom",
        "hidden_size": 32,
        "n_layer": 1,
        "n_head": 4,
    },
    "does not go through transformers' attention interface with sdpa": {
        "model_type": "mamba2",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 1,
        "vocab_size": 64,
    },
}


def refusals() -> list[str]:
    from torch.distributed.device_mesh import init_device_mesh

    from drumline.config.model import ModelConfig
    from drumline.engine.context_parallel import apply_context_parallel
    from drumline.errors import PlanError
    from drumline.models.build import build_model
    from drumline.models.head import ForwardWithObjective

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    lines = []
    for config in REFUSED.values():
        model = build_model(None, ModelConfig(id=None, config=config), seed=0)
        with pytest.raises(PlanError) as error:
            apply_context_parallel(ForwardWithObjective(model), model, mesh, "ulysses", False)
        lines.append(error.value.line())
    return lines


def test_models_whose_tokens_meet_outside_of_attention_are_refused() -> None:
    """By all ranks alike: convolutions show on the ranks behind the first alone."""
    for lines in run(2, refusals):
        for reason, line in zip(REFUSED, lines, strict=True):
            assert reason in line


def all_by_documents() -> dict[str, float]:
    return {kind: apart(kind, "ulysses", packed=True, by_documents=True) for kind in KINDS}


def all_near(results: list[dict[str, float]]) -> None:
    for distances in results:
        assert distances
        assert max(distances.values()) < 1e-5, distances


@pytest.mark.parametrize(
    "ring",
    [pytest.param(False, id="ulysses"), pytest.param(True, id="ring", marks=pytest.mark.full)],
)
def test_rows_with_images_compute_what_one_process_does(tmp_path: Path, ring: bool) -> None:
    folder = tiny_vision_dir(tmp_path / "model")
    all_near(run(2, all_with_images, str(folder), ring, timeout=110))


@pytest.mark.full
def test_parts_by_documents_compute_what_one_process_does_under_a_mask() -> None:
    all_near(run(2, all_by_documents, timeout=110))


@pytest.mark.claim("context parallelism runs recurrent layers on whole rows")
@pytest.mark.parametrize(
    ("ranks", "ring"),
    [
        pytest.param(2, False, id="2 ranks"),
        pytest.param(2, True, id="2 ranks, ring", marks=pytest.mark.full),
        pytest.param(4, False, id="4 ranks", marks=pytest.mark.full),
    ],
)
def test_hybrid_models_in_parts_compute_what_one_process_does(ranks: int, ring: bool) -> None:
    all_near(run(ranks, hybrids_apart, ring, timeout=200))


@pytest.mark.claim("tensor and context parallelism train each kind of model")
@pytest.mark.parametrize(
    ("ranks", "ring"),
    [
        pytest.param(2, False, id="2 ranks"),
        # Parity has both methods.
        pytest.param(4, True, id="4 ranks, ring too", marks=pytest.mark.full),
    ],
)
def test_parts_compute_what_one_process_does(ranks: int, ring: bool) -> None:
    all_near(run(ranks, all_apart, ring, timeout=110))
