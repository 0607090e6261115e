"""Runs a model on a batch, and gives its outputs to an objective.

If a model's logits are its head over its hidden states and nothing else, the outputs are these two,
and a loss computes the logits of few tokens at a time. Otherwise the outputs are all logits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from torch.nn import functional

from drumline.config.algorithm import DivergenceKind
from drumline.dist.mesh import first_row
from drumline.errors import ModelError
from drumline.models import kernels
from drumline.models.attention import model_inputs
from drumline.models.choices import Choices, linear_top_choices, top_choices
from drumline.models.classes import (
    bidirectional_error,
    ends_in_classes,
    ends_in_hidden_states,
    is_seq2seq,
    reads_images,
)
from drumline.models.divergence import Divergence
from drumline.models.losses import (
    IGNORE,
    LinearHead,
    LogProbs,
    VocabularyPart,
    cross_entropy,
    linear_cross_entropy,
    linear_log_probs,
    linear_summed_loss,
    log_probs,
    rows_with_target,
    summed_loss,
)
from drumline.models.router import router_of, trains_router
from drumline.models.router_load import count_expert_tokens
from drumline.models.scores import class_logits, grey_image, score_head, score_parts
from drumline.models.seq2seq import (
    head_bias,
    is_head_of_seq2seq,
    require_seq2seq,
    seq2seq_inputs,
    seq2seq_parts,
)
from drumline.models.sequence import SequencePart
from drumline.models.small import (
    DOCUMENT_TOKENS,
    TrialTokens,
    is_close,
    pack_of_two,
    trial_tokens,
    try_small,
)
from drumline.models.teaching import Comparison, Teacher, TeacherStates
from drumline.plan.attention import has_drumline_attention
from drumline.plan.rules import NO_PACKING


@dataclass(frozen=True)
class Outputs:
    """The outputs of a model for an objective: `logits_BTV`, or `hidden_BTD` with the head.

    With a head, logits = hidden @ weight_VDᵀ + bias_V. However head and sequences are sharded, the
    methods return numbers of whole sequences, the same on all ranks that share them.
    """

    # The hidden states, which are the input of head and score.
    hidden_BTD: torch.Tensor | None = None
    # The head; None if the loss takes logits.
    weight_VD: torch.Tensor | None = None
    bias_V: torch.Tensor | None = None
    # The logits of a language model; None if the loss takes hidden states.
    logits_BTV: torch.Tensor | None = None
    # Which rows of the head `weight_VD` has; None: all.
    part: VocabularyPart | None = None
    # Context parallelism: the tensors above are of this part of the sequences.
    sequence: SequencePart | None = None
    # A layer that gives one number for each token of `hidden_BTD`.
    score: nn.Linear | None = None
    # The logits of a classifier: C classes for each of B samples.
    logits_BC: torch.Tensor | None = None
    # With a router loss: the router's logits of each layer, [B × T, E].
    router_logits: Sequence[torch.Tensor] = ()
    # Whether Liger's kernel may compute the loss. It needs the whole head.
    fused: bool = False
    # The batch's targets, and the indices of this part's tokens with a target, int64[M].
    targets: tuple[torch.Tensor, torch.Tensor] | None = None

    def class_logits(self) -> torch.Tensor:
        """Return a classifier's logits, float[B, C].

        They are whole on every rank that shares the samples.
        """
        assert self.logits_BC is not None, "the model has no head of classes"
        return self.logits_BC

    def sum_of_all(self) -> torch.Tensor:
        """Return a sum that depends on every weight of these outputs, for a trial backward."""
        tensors = [self.hidden_BTD, self.weight_VD, self.bias_V, self.logits_BTV, self.logits_BC]
        if self.score is not None:
            tensors += self.score.parameters()
        sums = [tensor.sum() for tensor in tensors if tensor is not None]
        return torch.stack(sums).sum()

    def summed_loss(self, targets_BT: torch.Tensor, chunk: int) -> torch.Tensor:
        """Return Σ −log p(target) over targets != −100.

        `chunk`: tokens whose logits are in memory at once, with hidden states and a head; 0: all.
        """
        targets_of_part = self._cut(targets_BT)
        targets_N = targets_of_part.reshape(-1)
        if self.logits_BTV is not None:
            logits_NV = self.logits_BTV.flatten(0, 1)
            loss_sum = summed_loss(logits_NV, targets_N)
        elif self._has_fused_head(chunk):
            loss_sum, _ = self._fused_cross_entropy(targets_N)
        else:
            learned_M = self._target_rows(targets_BT)
            hidden_ND, head = self._hidden_and_head()
            loss_sum = linear_summed_loss(hidden_ND, head, targets_N, chunk, learned_M)
        return self._total(loss_sum)

    def cross_entropy(
        self, targets_BT: torch.Tensor, chunk: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `summed_loss`, and bool[B, T]: whether the first choice is the target."""
        targets_of_part = self._cut(targets_BT)
        targets_N = targets_of_part.reshape(-1)
        if self.logits_BTV is not None:
            logits_NV = self.logits_BTV.flatten(0, 1)
            loss_sum, correct_N = cross_entropy(logits_NV, targets_N)
        elif self._has_fused_head(chunk):
            loss_sum, correct_N = self._fused_cross_entropy(targets_N)
        else:
            learned_M = self._target_rows(targets_BT)
            hidden_ND, head = self._hidden_and_head()
            loss_sum, correct_N = linear_cross_entropy(hidden_ND, head, targets_N, chunk, learned_M)
        correct_of_part = correct_N.view_as(targets_of_part)
        correct_BT = self._whole(correct_of_part)
        return self._total(loss_sum), correct_BT

    def _has_fused_head(self, chunk: int) -> bool:
        """Return whether Liger's kernel computes the loss of hidden states.

        It needs the whole head, and does not compute all logits at once, which a `chunk` of 0
        means.
        """
        return self.fused and self.part is None and chunk > 0

    def log_probs(
        self, targets_BT: torch.Tensor, chunk: int, temperature: float = 1.0, entropy: bool = False
    ) -> LogProbs:
        """Return log softmax(logits / temperature)[target], and with `entropy` the entropies.

        Both are fp32[B, T], 0 for a target of −100, and differentiable. The entropy of each token's
        distribution is in nats; without `entropy` it is None. `chunk`: as in `summed_loss`.
        """
        targets_of_part = self._cut(targets_BT)
        targets_N = targets_of_part.reshape(-1)
        learned_M = self._target_rows(targets_BT)
        if self.logits_BTV is not None:
            logits_NV = self.logits_BTV.flatten(0, 1)
            chosen_N, entropy_N = log_probs(logits_NV, targets_N, temperature, entropy, learned_M)
        else:
            hidden_ND, head = self._hidden_and_head()
            chosen_N, entropy_N = linear_log_probs(
                hidden_ND, head, targets_N, chunk, temperature, entropy, learned_M
            )
        chosen_BT = self._whole(chosen_N.view_as(targets_of_part))
        if entropy_N is None:
            return chosen_BT, None
        entropy_BT = self._whole(entropy_N.view_as(targets_of_part))
        return chosen_BT, entropy_BT

    def values(self) -> torch.Tensor:
        """Return the score or the value of each token, fp32[B, T]. Autocast is off for it."""
        hidden_BTD, score = self.hidden_BTD, self.score
        assert hidden_BTD is not None, "the model has no head of scores or values"
        assert score is not None, "the model has no head of scores or values"
        precise = torch.promote_types(hidden_BTD.dtype, torch.float32)
        with torch.autocast(hidden_BTD.device.type, enabled=False):
            weight = score.weight.to(precise)
            bias = None
            if score.bias is not None:
                bias = score.bias.to(precise)
            values_BT1 = functional.linear(hidden_BTD.to(precise), weight, bias)
        return self._whole(values_BT1.squeeze(-1))

    def pool(self, weights_BT: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of each row's hidden states, fp32[B, D].

        It is whole on every rank that shares the samples. `weights_BT`: fp32, without gradient.
        """
        assert self.hidden_BTD is not None, "the model has no hidden states"
        weights_of_part = self._cut(weights_BT)
        weighted_BTD = self.hidden_BTD.float() * weights_of_part[:, :, None]
        return self._total(weighted_BTD.sum(1))

    def divergence(
        self,
        teacher: Teacher,
        targets_BT: torch.Tensor,
        chunk: int,
        kind: DivergenceKind,
        beta: float,
        temperature: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the divergence from a teacher and KL(teacher ‖ student), summed over all targets.

        Both are in nats, in fp32; the first has a gradient. `teacher`: its distributions at the
        targets of whole sequences, in their order. `chunk`: as in `summed_loss`. `kind`, `beta`: see
        `models.divergence`. `temperature`: both models' logits are divided by it.
        """
        comparison = Comparison(Divergence(kind, beta), temperature, chunk)
        rows_M = self._rows_of_targets(targets_BT)
        if self.sequence is not None:
            teacher = teacher.select(self._numbers_of_targets(targets_BT)[rows_M])
        if self.logits_BTV is not None:
            logits_NV = self.logits_BTV.flatten(0, 1)
            loss_sum, kl_sum = comparison.sum_with_logits(logits_NV, rows_M, teacher)
        else:
            hidden_ND, head = self._hidden_and_head()
            loss_sum, kl_sum = comparison.sum_with_head(hidden_ND, head, rows_M, teacher)
        return self._total(loss_sum), self._total(kl_sum)

    def top_choices(
        self, targets_BT: torch.Tensor, k: int, limit: int, chunk: int, temperature: float
    ) -> Choices:
        """Return the likeliest continuations at all targets of whole sequences, without gradients.

        `k`: how many of each. `limit`: entries of the vocabulary that count, the first ones.
        `chunk`: as in `summed_loss`.
        """
        rows_M = self._rows_of_targets(targets_BT)
        if self.logits_BTV is not None:
            logits_MV = self.logits_BTV.flatten(0, 1)[rows_M]
            choices = top_choices(logits_MV, k, limit, temperature)
        else:
            hidden_ND, head = self._hidden_and_head()
            choices = linear_top_choices(hidden_ND, head, rows_M, k, limit, chunk, temperature)
        return Choices(
            self._gather_rows(choices.ids_MK, rows_M, targets_BT),
            self._gather_rows(choices.log_probs_ML, rows_M, targets_BT),
        )

    def states(self, targets_BT: torch.Tensor) -> TeacherStates:
        """Return the hidden states at all targets of whole sequences, and the head.

        With a strategy that shards the head its weight is there until the model's forward ends.
        """
        rows_M = self._rows_of_targets(targets_BT)
        hidden_ND, head = self._hidden_and_head()
        return TeacherStates(self._gather_rows(hidden_ND[rows_M], rows_M, targets_BT), head)

    def _numbers_of_targets(self, targets_BT: torch.Tensor) -> torch.Tensor:
        """Return each place's number among all targets, int64[N] of this part; any for the others."""
        is_target_BT = targets_BT != IGNORE
        numbers_N = is_target_BT.flatten().cumsum(0) - 1
        return self._cut(numbers_N.view_as(targets_BT)).reshape(-1)

    def _gather_rows(
        self, part_MK: torch.Tensor, rows_M: torch.Tensor, targets_BT: torch.Tensor
    ) -> torch.Tensor:
        """Return numbers of all targets of whole sequences from those of this part's targets.

        `part_MK`: K numbers of each. `rows_M`: the places of this part's targets.
        """
        if self.sequence is None:
            return part_MK
        rows, width = targets_BT.shape
        numbers = part_MK.shape[1]
        tokens = rows * width // self.sequence.world_size
        part_NK = part_MK.new_zeros((tokens, numbers)).index_copy(0, rows_M, part_MK)
        # `gather` joins along the second dimension: a token's numbers stay together in it.
        whole = self.sequence.gather(part_NK.reshape(rows, -1))
        whole_NK = whole.reshape(rows * width, numbers)
        return whole_NK[rows_with_target(targets_BT.reshape(-1))]

    def _hidden_and_head(self) -> tuple[torch.Tensor, LinearHead]:
        """Return the hidden states, [N, D], and the head: the first arguments of losses over a head."""
        assert self.hidden_BTD is not None
        assert self.weight_VD is not None
        hidden_ND = self.hidden_BTD.flatten(0, 1)
        return hidden_ND, LinearHead(self.weight_VD, self.bias_V, self.part)

    def _fused_cross_entropy(self, targets_N: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the summed loss and whether first choices are right, by Liger's kernel."""
        hidden_ND, head = self._hidden_and_head()
        return kernels.linear_cross_entropy(hidden_ND, head.weight_VD, head.bias_V, targets_N)

    def _target_rows(self, targets_BT: torch.Tensor) -> torch.Tensor | None:
        """Return the indices of this part's tokens with a target, int64[M]; None: not known.

        They are known for the batch's own targets, which the host has counted.
        """
        if not self.targets:
            return None
        counted_BT, learned_M = self.targets
        if counted_BT is not targets_BT:
            return None
        return learned_M

    def _rows_of_targets(self, targets_BT: torch.Tensor) -> torch.Tensor:
        """Return `_target_rows`, which are searched if they are not known. The host waits then."""
        rows_M = self._target_rows(targets_BT)
        if rows_M is not None:
            return rows_M
        targets_N = self._cut(targets_BT).reshape(-1)
        return rows_with_target(targets_N)

    def _cut(self, whole_BT: torch.Tensor) -> torch.Tensor:
        """Return this rank's part [B, t] of numbers of whole sequences [B, T]."""
        if self.sequence is None:
            return whole_BT
        return self.sequence.cut(whole_BT)

    def _whole(self, part_Bt: torch.Tensor) -> torch.Tensor:
        """Return the numbers of whole sequences [B, T] from those of each rank's part [B, t]."""
        if self.sequence is None:
            return part_Bt
        return self.sequence.gather(part_Bt)

    def _total(self, part_sum: torch.Tensor) -> torch.Tensor:
        """Return the sum over whole sequences from the sum over each rank's part."""
        if self.sequence is None:
            return part_sum
        return self.sequence.total(part_sum)


def trunk_and_head(model: Any) -> tuple[Callable[..., Any], nn.Linear] | None:
    """Return (trunk, head) of a model of text; None if it lacks one.

    The trunk of a vision-language model includes the tower, and that of an encoder-decoder model
    both stacks. The head must be a plain linear layer: its weight is used without its forward,
    which an adapter would change.
    """
    scores = score_parts(model)
    if scores is not None:
        return scores
    if is_seq2seq(model):
        return seq2seq_parts(model)
    has_tower = getattr(model.config, "vision_config", None) is not None
    if has_tower:
        trunk = model.base_model
    else:
        trunk = model.get_decoder()
    head = model.get_output_embeddings()
    if trunk is None or trunk is model:
        return None
    if not isinstance(head, nn.Linear):
        return None
    return trunk, head


def can_split(model: Any) -> bool:
    """Return whether a model's logits are its head over its trunk and nothing else.

    Soft-capping or scaling the logits would be something else. Score models need no trial. Any
    other model is tried: a small copy must give equal logits for eight tokens, to the last bit.
    """
    if score_parts(model) is not None:
        return True
    if trunk_and_head(model) is None:
        return False
    if is_seq2seq(model):
        return try_small(model, "cpu", is_head_of_seq2seq)
    return try_small(model, "cpu", _is_head_of_trunk)


def _is_head_of_trunk(small: Any, ids_BT: torch.Tensor) -> bool:
    """Return whether the logits of a small model are its head over its trunk, bit for bit."""
    parts = trunk_and_head(small)
    if parts is None:
        return False
    trunk, head = parts
    assert isinstance(trunk, nn.Module)
    # Soft-capping hardly changes the small logits of a fresh model: this makes them large.
    head.weight.mul_(50)
    outputs_of_trunk: list[Any] = []
    trunk.register_forward_hook(lambda _module, _inputs, output: outputs_of_trunk.append(output))
    logits = small(input_ids=ids_BT, use_cache=False).logits
    # A model that runs its trunk twice, or not at all, is not its head over its trunk.
    if len(outputs_of_trunk) != 1:
        return False
    hidden = getattr(outputs_of_trunk[0], "last_hidden_state", None)
    if hidden is None or hidden.shape[-1] != head.in_features:
        return False
    # The logits are compared to the hidden states of the same run: two runs of a trunk may round
    # differently.
    alone = trunk(input_ids=ids_BT, use_cache=False).last_hidden_state
    return torch.equal(logits, head(hidden)) and is_close(alone, hidden)


def require_next_token(model: Any, device: str, packed: bool) -> None:
    """Raise an error for a model that cannot be trained to predict the next token.

    Two trials with eight tokens on `device` find that out. Another last token must not change the
    logits before it: raises ModelError for a bidirectional model, whose tokens would attend to
    their targets. With `packed`, the second of two packed documents must have the same logits as
    alone: raises PlanError for a model whose documents attend to the one before. The trials of a
    model with an encoder and a decoder are those of `require_seq2seq`.
    """
    if is_seq2seq(model):
        require_seq2seq(model, device)
        return

    def trial(small: Any, ids_BT: torch.Tensor) -> bool:
        """Return whether documents are kept apart; true if nothing is packed."""
        changed_BT = ids_BT.clone()
        changed_BT[:, -1] = ids_BT[:, 0]
        before_last = small(input_ids=ids_BT, use_cache=False).logits[:, :-1]
        before_changed = small(input_ids=changed_BT, use_cache=False).logits[:, :-1]
        if not torch.isfinite(before_last).all():
            what = f"{type(model).__name__} computes no finite numbers with this configuration"
            fix = "look at rope_parameters, the eps of its norms and its other numbers"
            raise ModelError(what, where="model", fix=fix)
        if not is_close(before_last, before_changed):
            raise bidirectional_error(model)
        return not packed or _keeps_documents_apart(small, ids_BT)

    if not try_small(model, device, trial):
        raise NO_PACKING.error(
            f"{type(model).__name__} does not keep the documents of a pack apart"
        )


def _keeps_documents_apart(small: Any, ids_BT: torch.Tensor) -> bool:
    """Return whether the second of two packed documents has the logits that it has alone.

    `ids_BT`: one row of eight tokens, four of each document.
    """
    pack = pack_of_two(small, ids_BT)
    with model_inputs(small, pack) as inputs:
        in_pack = small(**inputs, use_cache=False).logits[:, DOCUMENT_TOKENS:]
    alone = {}
    for name, values in pack.inputs().items():
        alone[name] = values[..., DOCUMENT_TOKENS:]
    expected = small(**alone, use_cache=False).logits
    return is_close(in_pack, expected)


def shares_prompts(model: Any, device: str) -> bool:
    """Return whether completions have the same numbers behind a shared prompt as behind their own.

    This is tried with eight tokens: a prompt of four, and two completions. It is False for a
    mixture that trains its router, whose loss counts the tokens of rows.
    """
    if not has_drumline_attention(model) or trains_router(model):
        return False
    return try_small(model, device, _has_same_logits_behind_shared_prompt)


def _has_same_logits_behind_shared_prompt(small: Any, ids_BT: torch.Tensor) -> bool:
    """Return whether a prompt that runs once for two completions gives the logits of two rows.

    The prompt has four of the eight tokens of `ids_BT`, the completions three and one.
    """
    # Each completion continues the prompt: its positions begin at 4.
    positions_BT = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 4]], device=ids_BT.device)
    shared = TrialTokens(
        ids_BT, positions_BT, document_lengths=((4, 3, 1),), has_shared_prefix=True
    )
    with model_inputs(small, shared) as inputs:
        together = small(**inputs, use_cache=False).logits
    first = small(input_ids=ids_BT[:, :7], use_cache=False).logits
    second = small(input_ids=ids_BT[:, [0, 1, 2, 3, 7]], use_cache=False).logits
    return is_close(together, torch.cat([first, second[:, 4:]], 1))


def trial_batch(model: Any, device: Any, side: int | None = None) -> Any:
    """Return a small batch that uses every part of a model.

    It has eight tokens, for a vision-language model also an image; for an image model it is one
    grey image. `side`: pixels of the grey image's side; None: the model's.
    """
    if reads_images(model):
        pixels_BCHW = grey_image(model.config, device, side)
        return SimpleNamespace(inputs=lambda: {"pixel_values": pixels_BCHW})
    ids_BT = torch.zeros((1, 8), dtype=torch.int64, device=device)
    if is_seq2seq(model):
        return SimpleNamespace(inputs=lambda: seq2seq_inputs(ids_BT))
    return trial_tokens(model, ids_BT)


def compute_outputs(
    model: Any,
    batch: Any,
    parts: tuple[Callable[..., Any], nn.Linear] | None,
    sequence: SequencePart | None = None,
) -> Outputs:
    """Run a model on a batch, or on this rank's part of it, and return its outputs.

    `parts`: trunk and head, if the loss takes hidden states. Documents are kept apart by their
    lengths (`models.attention`), or by the block-diagonal mask that transformers makes from
    positions, which restart at each document. Prompts that rows share run once if a trial has shown
    that this gives the same numbers (`shares_prompts`).
    """
    if ends_in_classes(model):
        with count_expert_tokens(model, batch, sequence=sequence):
            return Outputs(logits_BC=class_logits(model, batch, sequence))
    if ends_in_hidden_states(model):
        return _hidden_outputs(model, batch, sequence)
    score = score_head(model)
    parts = parts or score_parts(model)
    shared = None
    if parts and sequence is None:
        shared = _shared_prompts(model, batch)
    inputs_of_head: list[torch.Tensor] = []
    with contextlib.ExitStack() as contexts:
        if parts is None and score is not None:
            # This model cannot be split. The hidden states for the score are the input of its head.
            contexts.enter_context(_record_inputs(model.get_output_embeddings(), inputs_of_head))
        inputs: dict[str, Any]
        inputs = contexts.enter_context(model_inputs(model, shared or batch, sequence))
        if trains_router(model):
            inputs["output_router_logits"] = True
        run: Callable[..., Any] = model
        if parts is not None:
            run, _ = parts
        with count_expert_tokens(model, batch, shared, sequence):
            result = run(**inputs, use_cache=False)
    known = Outputs(
        score=score,
        sequence=sequence,
        router_logits=getattr(result, "router_logits", None) or (),
        fused=getattr(model, "_drumline_fused", False),
        targets=_known_targets(batch, sequence),
    )
    if parts is None:
        # There is one if the model has a score, else none.
        input_of_head = next(iter(inputs_of_head), None)
        return replace(known, logits_BTV=result.logits, hidden_BTD=input_of_head)
    hidden_BTD = result.last_hidden_state
    if shared:
        # From the rows with shared prompts back to one row for each sample of the batch.
        hidden_ND = hidden_BTD.flatten(0, 1)
        hidden_BTD = hidden_ND[shared.token_indices_BT]
    _, head = parts
    if head is score:
        return replace(known, hidden_BTD=hidden_BTD)
    return _add_head(known, head, hidden_BTD, head_bias(model, head))


def _shared_prompts(model: Any, batch: Any) -> Any:
    """Return the batch's rows with each prompt once; None if they have none, or the model cannot."""
    if not getattr(model, "_drumline_shares", False):
        return None
    return getattr(batch, "shared", None)


def _hidden_outputs(model: Any, batch: Any, sequence: SequencePart | None) -> Outputs:
    """Return the outputs of a trunk without a head."""
    with (
        model_inputs(model, batch, sequence) as inputs,
        count_expert_tokens(model, batch, sequence=sequence),
    ):
        hidden_BTD = model(**inputs).last_hidden_state
    return Outputs(hidden_BTD=hidden_BTD, sequence=sequence)


def _record_inputs(
    head: nn.Module, recorded: list[torch.Tensor]
) -> contextlib.AbstractContextManager[Any]:
    """Record the inputs of a head within the context.

    The hook comes before the one of tensor parallelism, which makes the input a DTensor.
    """
    return head.register_forward_pre_hook(
        lambda _module, inputs: recorded.append(inputs[0]), prepend=True
    )


def _add_head(
    known: Outputs, head: nn.Linear, hidden_BTD: torch.Tensor, bias: torch.Tensor | None
) -> Outputs:
    """Return `known` with hidden states, the head's weight and the bias of the logits.

    Under tensor parallelism these are this rank's rows of them.
    """
    # Before the weight is read: FSDP2 gathers it in this call.
    gather_head = getattr(head, "_drumline_gather", None)
    if gather_head is not None:
        hidden_BTD = gather_head(hidden_BTD)
    weight = head.weight
    if not isinstance(weight, DTensor):
        return replace(known, hidden_BTD=hidden_BTD, weight_VD=weight, bias_V=bias)
    mesh = weight.device_mesh
    first = first_row(weight.shape[0], mesh)
    part = VocabularyPart(mesh.get_group(), first)
    local_bias: torch.Tensor | None = bias
    if isinstance(bias, DTensor):
        local_bias = bias.to_local()
    return replace(
        known,
        hidden_BTD=hidden_BTD,
        weight_VD=weight.to_local(),
        bias_V=local_bias,
        part=part,
    )


def _known_targets(
    batch: Any, sequence: SequencePart | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return a batch's targets, and the indices of the tokens with a target in this rank's part.

    The indices are int64[M]. None if the host has not counted them.
    """
    learned_M = getattr(batch, "learned_M", None)
    if learned_M is None:
        return None
    if sequence is None:
        return batch.targets_BT, learned_M
    if batch.learned_on_host_M is None:
        return None
    return batch.targets_BT, sequence.places(batch.learned_on_host_M, batch.targets_BT)


def gather_for_objective(head: nn.Linear) -> None:
    """Make FSDP2 gather a head for an objective that uses its weight without its forward.

    FSDP2 gathers such a head by itself. This sets a method of the head, which `compute_outputs`
    calls with the hidden states. For FSDP2 the call is the head's forward: its weight is gathered
    before, and its gradient is reduced once the gradient of the hidden states is there.
    """
    head._drumline_gather = MethodType(_return_hidden, head)  # type: ignore[assignment]
    register_fsdp_forward_method(head, "_drumline_gather")


def _return_hidden(head: nn.Linear, hidden_BTD: torch.Tensor) -> torch.Tensor:
    """Return the hidden states unchanged. Called as a method of the head, it runs FSDP2's hooks."""
    return hidden_BTD


class ForwardWithObjective(nn.Module):
    """A module whose forward runs the model and the objective.

    So a data-parallel wrapper around it covers all uses of every weight. `has_separable_head`:
    whether the head can be left out of the forward, so that the loss takes hidden states. `router`:
    the router loss; None: it is not trained. `sequence`: the part of each sequence that this rank
    computes; context parallelism sets it.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.has_separable_head = can_split(model)
        self.router = router_of(model)
        self.sequence: SequencePart | None = None

    def forward(self, batch: Any, objective: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return (loss sum, other sums).

        It is a plain tuple: DDP's static graph finds tensors there, but not in a dataclass.
        """
        parts = None
        if self.has_separable_head:
            parts = trunk_and_head(self.model)
        model_outputs = compute_outputs(self.model, batch, parts, self.sequence)
        result = objective(model_outputs, batch)
        # Only training has a router loss. `Engine.infer` runs without gradients, and the batches of
        # trials have no `token_weights`.
        if not torch.is_grad_enabled() or not hasattr(batch, "token_weights"):
            return result.loss_sum, result.sums
        if self.router is None:
            return result.loss_sum, result.sums
        router_logits = [self._whole(layer_NE) for layer_NE in model_outputs.router_logits]
        router_loss, router_sums = self.router(router_logits, batch)
        return result.loss_sum + router_loss, result.sums | router_sums

    def _whole(self, logits_NE: torch.Tensor) -> torch.Tensor:
        """Return a router's logits for all tokens of the whole sequences, [B × T, E].

        `logits_NE`: those of this rank's part.
        """
        if self.sequence is None:
            return logits_NE
        assert self.sequence.positions_BT is not None
        rows = len(self.sequence.positions_BT)
        experts = logits_NE.shape[-1]
        # `gather` joins along the second dimension: a token's E numbers stay together in it.
        by_row = logits_NE.reshape(rows, -1)
        whole = self.sequence.gather(by_row)
        return whole.reshape(-1, experts)
