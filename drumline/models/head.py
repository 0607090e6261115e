"""The seam between a model and a loss: hidden states and the head's weight if the model allows it, otherwise logits."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import functional

from drumline.core.attention import by_documents
from drumline.core.rules import NO_PACKS
from drumline.dist.mesh import first_row
from drumline.models import kernels
from drumline.models.attention import attending
from drumline.models.classes import bidirectional, ends_in_classes, reads_images
from drumline.models.losses import (
    Answers,
    VocabularyPart,
    cross_entropy,
    linear_cross_entropy,
    linear_log_probs,
    linear_summed_loss,
    log_probs,
    summed_loss,
)
from drumline.models.router import loads_of, router_of, trains_router
from drumline.models.scores import class_logits, grey_image, score_head, score_parts
from drumline.models.sequence import SequencePart
from drumline.models.small import Tokens, close, probe, try_small


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model for an objective: `logits_BTV`, or `hidden_BTD` with the head (logits = hidden @ weight_VDᵀ + bias_V; `part`:
    which rows of the head these are, if not all). `score` gives one number for each token of `hidden_BTD`. The methods answer for the whole
    sequences, the same on all ranks that share them, however head and sequence are sharded."""

    hidden_BTD: torch.Tensor | None = None
    weight_VD: torch.Tensor | None = None
    bias_V: torch.Tensor | None = None
    logits_BTV: torch.Tensor | None = None
    part: VocabularyPart | None = None
    sequence: SequencePart | None = (
        None  # context parallel: the tensors above are of this part of the sequences
    )
    score: nn.Linear | None = None
    logits_BC: torch.Tensor | None = None  # of a classifier: C classes for each of B samples
    router_logits: Sequence[
        torch.Tensor
    ] = ()  # with a router loss: for each layer [B × T, E] of this part
    fused: bool = False  # by Liger's kernel, where the head is whole
    targets: tuple[torch.Tensor, torch.Tensor] | None = (
        None  # the batch's, and the places in this part of those that are learned, int64[M]
    )

    def class_logits(self) -> torch.Tensor:
        """float[B, C]: a classifier's logits, whole on every rank that shares the samples."""
        assert self.logits_BC is not None, "the model ends in classes"
        return self.logits_BC

    def touched(self) -> torch.Tensor:
        """A sum that depends on every weight of these outputs, for a backward without an objective."""
        made = [self.hidden_BTD, self.weight_VD, self.bias_V, self.logits_BTV, self.logits_BC]
        made += [] if self.score is None else self.score.parameters()
        return torch.stack([tensor.sum() for tensor in made if tensor is not None]).sum()

    def summed_loss(self, targets_BT: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return Σ −log p(target) over targets != −100.

        `chunk`: tokens whose logits are in memory at once, with hidden states and a head; 0: all.
        """
        targets_N = self._cut(targets_BT).reshape(-1)
        if self.logits_BTV is not None:
            loss_sum = summed_loss(self.logits_BTV.flatten(0, 1), targets_N)
        elif self._has_fused_head(chunk):
            loss_sum, _ = kernels.linear_cross_entropy(*self._head(), targets_N)
        else:
            learned_M = self._learned(targets_BT)
            loss_sum = linear_summed_loss(*self._head(), targets_N, chunk, self.part, learned_M)
        return loss_sum if self.sequence is None else self.sequence.total(loss_sum)

    def cross_entropy(
        self, targets_BT: torch.Tensor, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `summed_loss`, and bool[B, T]: whether the first choice is the target."""
        mine = self._cut(targets_BT)
        if self.logits_BTV is not None:
            loss_sum, correct_N = cross_entropy(self.logits_BTV.flatten(0, 1), mine.reshape(-1))
        elif self._has_fused_head(chunk):
            loss_sum, correct_N = kernels.linear_cross_entropy(*self._head(), mine.reshape(-1))
        else:
            learned_M = self._learned(targets_BT)
            loss_sum, correct_N = linear_cross_entropy(
                *self._head(), mine.reshape(-1), chunk, self.part, learned_M
            )
        correct = self._whole(correct_N.view_as(mine))
        return loss_sum if self.sequence is None else self.sequence.total(loss_sum), correct

    def _has_fused_head(self, chunk: int) -> bool:
        """Whether Liger's kernel makes the loss of hidden states."""
        return self.fused and self.part is None and chunk > 0

    def log_probs(
        self, targets_BT: torch.Tensor, chunk: int, temperature: float = 1.0, entropy: bool = False
    ) -> Answers:
        """log softmax(logits / temperature)[target], fp32[B, T], 0 where the target is −100; and with `entropy` that of the distribution,
        in nats, 0 in the same places. Both are differentiable. `chunk` as in `cross_entropy`."""
        mine, learned_M = self._cut(targets_BT), self._learned(targets_BT)
        if self.logits_BTV is not None:
            chosen_N, entropy_N = log_probs(
                self.logits_BTV.flatten(0, 1), mine.reshape(-1), temperature, entropy, learned_M
            )
        else:
            chosen_N, entropy_N = linear_log_probs(
                *self._head(), mine.reshape(-1), chunk, temperature, entropy, self.part, learned_M
            )
        return self._whole(chosen_N.view_as(mine)), None if entropy_N is None else self._whole(
            entropy_N.view_as(mine)
        )

    def values(self) -> torch.Tensor:
        """fp32[B, T]: the number of the score head, or of the value head of a policy, for each token. Computed in fp32."""
        assert self.hidden_BTD is not None and self.score is not None, (
            "the model has a head for this"
        )
        weight, bias = self.score.weight, self.score.bias
        precise = torch.promote_types(self.hidden_BTD.dtype, torch.float32)
        with torch.autocast(self.hidden_BTD.device.type, enabled=False):
            values_BT1 = functional.linear(
                self.hidden_BTD.to(precise),
                weight.to(precise),
                None if bias is None else bias.to(precise),
            )
        return self._whole(values_BT1.squeeze(-1))

    def _head(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        assert self.hidden_BTD is not None and self.weight_VD is not None
        return self.hidden_BTD.flatten(0, 1), self.weight_VD, self.bias_V

    def _learned(self, targets_BT: torch.Tensor) -> torch.Tensor | None:
        """The places of targets in this part, where the host has counted them: of the batch's own targets."""
        return self.targets[1] if self.targets and self.targets[0] is targets_BT else None

    def _cut(self, whole_BT: torch.Tensor) -> torch.Tensor:
        return whole_BT if self.sequence is None else self.sequence.cut(whole_BT)

    def _whole(self, part_Bt: torch.Tensor) -> torch.Tensor:
        return part_Bt if self.sequence is None else self.sequence.gather(part_Bt)


def split(model: Any) -> tuple[nn.Module, nn.Linear] | None:
    """(trunk, head) of a causal LM or a score model; None if it lacks one. The trunk of a vision-language model includes the tower. The
    head must be a plain linear layer: its weight is used without its forward, which an adapter would change."""
    if (scores := score_parts(model)) is not None:
        return scores
    has_tower = getattr(model.config, "vision_config", None) is not None
    trunk, head = (
        model.base_model if has_tower else model.get_decoder(),
        model.get_output_embeddings(),
    )
    if trunk is None or trunk is model or not isinstance(head, nn.Linear):
        return None
    return trunk, head


def can_split(model: Any) -> bool:
    """Whether the model's logits are its head over its trunk and nothing else (no soft-capping, no scaling). A score model's always are.
    Tried with eight tokens on a small copy, without a list of classes, to the last bit. The trial makes its logits large: soft-capping
    hardly changes the small logits of a fresh model."""

    def is_head_of_trunk(small: Any, ids_BT: torch.Tensor) -> bool:
        parts = split(small)
        if parts is None:
            return False
        trunk, head = parts
        head.weight.mul_(50)
        seen: list[Any] = []
        trunk.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
        logits = small(input_ids=ids_BT, use_cache=False).logits
        # The hidden states of the same run: two runs of a trunk may round differently.
        hidden = [getattr(output, "last_hidden_state", None) for output in seen]
        if len(hidden) != 1 or hidden[0] is None or hidden[0].shape[-1] != head.in_features:
            return False
        by_itself = trunk(input_ids=ids_BT, use_cache=False).last_hidden_state
        return torch.equal(logits, head(hidden[0])) and close(by_itself, hidden[0])

    if score_parts(model) is not None:
        return True
    return split(model) is not None and try_small(model, "cpu", is_head_of_trunk)


def require_next_token(model: Any, device: str, packed: bool) -> None:
    """Raises ModelError for a bidirectional language model, whose tokens would attend to their targets. With `packed` PlanError for one
    whose documents in a pack, given by positions alone, attend to the document before them. Tried with eight tokens on `device`: another
    last token must not change the logits before it, and of two documents of four tokens the second must have the same logits as alone."""

    def trial(small: Any, ids_BT: torch.Tensor) -> bool:
        changed_BT = ids_BT.clone()
        changed_BT[:, -1] = ids_BT[:, 0]
        first, other = (
            small(input_ids=ids, use_cache=False).logits[:, :-1] for ids in (ids_BT, changed_BT)
        )
        if not close(first, other):
            raise bidirectional(model)
        if not packed:
            return True
        positions = torch.arange(4, device=ids_BT.device).repeat(2)[None]
        with attending(small, Tokens(ids_BT, positions, documents=((4, 4),))) as inputs:
            behind = small(**inputs, use_cache=False).logits[:, 4:]
        alone = small(
            input_ids=ids_BT[:, 4:], position_ids=positions[:, 4:], use_cache=False
        ).logits
        return close(behind, alone)

    if not try_small(model, device, trial):
        raise NO_PACKS.error(f"{type(model).__name__} does not keep the documents of a pack apart")


def shares_prompts(model: Any, device: str) -> bool:
    """Whether completions behind one prompt have the numbers that each has behind a prompt of its own. Tried with eight tokens: a prompt of
    four, and two completions. Not of a mixture that trains its router, whose loss counts the tokens of rows."""

    def trial(small: Any, ids_BT: torch.Tensor) -> bool:
        positions_BT = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 4]], device=ids_BT.device)
        with attending(
            small, Tokens(ids_BT, positions_BT, documents=((4, 3, 1),), branches=True)
        ) as inputs:
            both = small(**inputs, use_cache=False).logits
        rows = [
            small(input_ids=ids, use_cache=False).logits
            for ids in (ids_BT[:, :7], ids_BT[:, [0, 1, 2, 3, 7]])
        ]
        return close(both, torch.cat([rows[0], rows[1][:, 4:]], 1))

    return by_documents(model) and not trains_router(model) and try_small(model, device, trial)


def any_batch(model: Any, device: Any, side: int | None = None) -> Any:
    """A batch that runs all of a model: eight tokens, for a vision-language model with an image, for an image model a grey image."""
    if reads_images(model):
        pixels_BCHW = grey_image(model.config, device, side)
        return SimpleNamespace(inputs=lambda: {"pixel_values": pixels_BCHW})
    return probe(model, torch.zeros((1, 8), dtype=torch.int64, device=device))


def outputs(
    model: Any,
    batch: Any,
    parts: tuple[nn.Module, nn.Linear] | None,
    sequence: SequencePart | None = None,
) -> Outputs:
    """The outputs of a model for a batch, or for this rank's part. Documents are kept apart by their lengths (`models.attention`), or else
    by the block-diagonal mask that transformers makes from positions, which restart at each document of a pack. Prompts that rows have in
    common run once where that was found to be the same (`shares_prompts`)."""
    if ends_in_classes(model):
        return Outputs(logits_BC=class_logits(model, batch, sequence))
    score, parts = score_head(model), parts or score_parts(model)
    seen: list[torch.Tensor] = []
    with contextlib.ExitStack() as hooks:
        if parts is None and score is not None:
            # The head's input is the hidden states of a model whose logits are more than its head over its trunk. The hook comes before
            # that of tensor parallelism, which makes the input a DTensor.
            note = lambda _module, inputs: seen.append(inputs[0])  # noqa: E731
            hooks.enter_context(
                model.get_output_embeddings().register_forward_pre_hook(note, prepend=True)
            )
        shared = (
            getattr(batch, "shared", None)
            if parts and sequence is None and getattr(model, "_drumline_shares", False)
            else None
        )
        inputs = hooks.enter_context(attending(model, shared or batch, sequence))
        inputs |= {"output_router_logits": True} if trains_router(model) else {}
        made = (model if parts is None else parts[0])(**inputs, use_cache=False)
    fused, routers = (
        getattr(model, "_drumline_fused", False),
        getattr(made, "router_logits", None) or (),
    )
    known = Outputs(
        score=score,
        sequence=sequence,
        router_logits=routers,
        fused=fused,
        targets=_known_targets(batch, sequence),
    )
    if parts is None:
        return replace(known, logits_BTV=made.logits, hidden_BTD=seen[0] if seen else None)
    hidden_BTD = made.last_hidden_state
    if shared:
        hidden_BTD = hidden_BTD.flatten(0, 1)[shared.places_BT]
    head = parts[1]
    if head is score:
        return replace(known, hidden_BTD=hidden_BTD)
    gather_head = getattr(head, "_drumline_gather", None)
    if gather_head is not None:
        hidden_BTD = gather_head(hidden_BTD)
    known = replace(known, hidden_BTD=hidden_BTD)
    weight, bias = head.weight, head.bias
    if not isinstance(weight, DTensor):
        return replace(known, weight_VD=weight, bias_V=bias)
    part = VocabularyPart(
        weight.device_mesh.get_group(), first_row(weight.shape[0], weight.device_mesh)
    )
    return replace(
        known,
        weight_VD=weight.to_local(),
        bias_V=bias.to_local() if isinstance(bias, DTensor) else bias,
        part=part,
    )


def _known_targets(
    batch: Any, sequence: SequencePart | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a batch's targets and the places of those that are learned, in this rank's part; None where the host has not counted them."""
    learned_M = getattr(batch, "learned_M", None)
    if learned_M is None:
        return None
    if sequence is None:
        return batch.targets_BT, learned_M
    if batch.learned_on_host_M is None:
        return None
    return batch.targets_BT, sequence.places(batch.learned_on_host_M, batch.targets_BT)


def gather_for_objective(head: nn.Linear) -> None:
    """Have a head that FSDP2 gathers by itself gathered for an objective, which uses its weight without its forward.

    `outputs` calls what this sets with the hidden states. For FSDP2 the call is the head's forward: its weight is
    gathered before, and its gradient is reduced when that of the hidden states is there.
    """
    head._drumline_gather = MethodType(_return_hidden, head)  # type: ignore[assignment]
    register_fsdp_forward_method(head, "_drumline_gather")


def _return_hidden(head: nn.Linear, hidden_BTD: torch.Tensor) -> torch.Tensor:
    return hidden_BTD


class ForwardWithObjective(nn.Module):
    """Model and objective in one forward, so that a data-parallel wrapper covers all uses of every weight."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.splits = can_split(model)
        self.router = router_of(model)
        self.sequence: SequencePart | None = None

    def forward(self, batch: Any, objective: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """(loss sum, other sums). A plain tuple: DDP's static graph finds tensors there, but not in a dataclass."""
        made = outputs(self.model, batch, split(self.model) if self.splits else None, self.sequence)
        out = objective(made, batch)
        # The router loss is for training alone, not for `Engine.infer`; the tokens of a trial have no weights.
        if not torch.is_grad_enabled() or not hasattr(batch, "token_weights"):
            return out.loss_sum, out.sums
        if self.router is None:
            return out.loss_sum, out.sums | loads_of(self.model)
        loss_sum, sums = self.router([self._whole(layer) for layer in made.router_logits], batch)
        return out.loss_sum + loss_sum, out.sums | sums

    def _whole(self, logits_NE: torch.Tensor) -> torch.Tensor:
        """A router's logits for all tokens of the whole sequences."""
        if self.sequence is None:
            return logits_NE
        experts, rows = logits_NE.shape[-1], len(self.sequence.positions_BT)  # type: ignore[arg-type]
        return self.sequence.gather(logits_NE.reshape(rows, -1)).reshape(-1, experts)
