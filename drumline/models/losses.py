"""Summed cross-entropy and log-probabilities of tokens, from logits or from a head's input.

With hidden states and a head only the logits of some tokens are in memory at once. The functions
know no model and no batch. N tokens, M of them with a target, V entries of the vocabulary, D width;
n tokens of one chunk. `learned_M` are the indices of the tokens with a target, int64[M].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from drumline.models.containers import product_dtype

# The log-probabilities of tokens' targets, and the entropies of tokens or None.
LogProbs = tuple[Tensor, Tensor | None]
IGNORE = -100
# Gradients of logits, softmax − one-hot, lie in [−1, 1]. Times this power of two they come near
# fp16's largest value (65504), and small ones are not rounded to 0.
FP16_SCALE = 2.0**15


@dataclass(frozen=True)
class VocabularyPart:
    """This rank's rows of the head, which begin at row `first`.

    Together the ranks of `group` have all rows, and they get the same tokens.
    """

    group: dist.ProcessGroup
    first: int


@dataclass(frozen=True)
class LinearHead:
    """The head that makes logits of hidden states: hidden @ weightᵀ + bias.

    `part`: weight and bias are this rank's rows of it; None: they are the whole head.
    """

    weight_VD: Tensor
    bias_V: Tensor | None = None
    part: VocabularyPart | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> LinearHead:
        """Return the head with `change` applied to weight and bias."""
        bias_V = self.bias_V
        if bias_V is not None:
            bias_V = change(bias_V)
        return LinearHead(change(self.weight_VD), bias_V, self.part)

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Return the logits of this rank's rows, [N, V]."""
        return functional.linear(hidden_ND, self.weight_VD, self.bias_V)


def summed_loss(logits_NV: Tensor, targets_N: Tensor) -> Tensor:
    """Return Σ −log softmax(logits)[target] over targets != −100, in fp32."""
    logits = logits_NV.float()
    return functional.cross_entropy(logits, targets_N, ignore_index=IGNORE, reduction="sum")


def cross_entropy(logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return `summed_loss`, and bool[N]: whether the first choice is the target."""
    loss_sum = summed_loss(logits_NV, targets_N)
    first_choice_N = logits_NV.detach().argmax(-1)
    return loss_sum, first_choice_N == targets_N


def linear_cross_entropy(
    hidden_ND: Tensor,
    head: LinearHead,
    targets_N: Tensor,
    chunk: int,
    learned_M: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `cross_entropy(head.logits(hidden), targets)`, the logits of few tokens at a time.

    The forward also computes the gradients of hidden, weight and bias, chunk by chunk, while it has
    the logits. Backward only multiplies them by the gradient of the sum, so no logits are computed
    twice. The idea is that of Cut Cross-Entropy (Wijmans et al. 2025) and of Liger's fused head
    (Hsu et al. 2024), here in plain PyTorch. Rows without a target are left out before the product.
    Under autocast the product has its type, as a linear layer would; softmax, sums and gradients
    are fp32. With fp16 these gradients have a scale of their own, since the forward does not know
    the loss scale. Allows one backward, and no second derivatives.

    `chunk`: tokens whose logits are in memory at once, at most; 0 for all.
    If the head has a part of the rows, softmax is over the rows of all ranks (Megatron-LM's
    vocabulary-parallel loss, Shoeybi et al. 2019): loss, first choice and hidden's gradient are
    those of the whole head on each rank. Collective then.
    `learned_M`: the indices of rows with a target. None: they are searched, and the host waits.
    """
    if head.part is None and chunk == 0:
        return cross_entropy(head.logits(hidden_ND), targets_N)
    options = _as_options(targets_N, chunk, head.part, learned_M)
    with_choices = True
    loss_sum, correct_N = _LinearCrossEntropy.apply(
        hidden_ND, head.weight_VD, head.bias_V, *options, with_choices
    )
    return loss_sum, correct_N


def linear_summed_loss(
    hidden_ND: Tensor,
    head: LinearHead,
    targets_N: Tensor,
    chunk: int,
    learned_M: Tensor | None = None,
) -> Tensor:
    """Return only the sum of `linear_cross_entropy`: training needs no first choices.

    So each chunk launches fewer kernels, and with a part of the head has one collective less.
    """
    if head.part is None and chunk == 0:
        return summed_loss(head.logits(hidden_ND), targets_N)
    options = _as_options(targets_N, chunk, head.part, learned_M)
    with_choices = False
    loss_sum, _ = _LinearCrossEntropy.apply(
        hidden_ND, head.weight_VD, head.bias_V, *options, with_choices
    )
    return loss_sum


def _as_options(
    targets_N: Tensor, chunk: int, part: VocabularyPart | None, learned_M: Tensor | None
) -> tuple[Any, ...]:
    """Return the arguments of `_LinearCrossEntropy.apply` between the head's and the last."""
    if learned_M is None:
        learned_M = rows_with_target(targets_N)
    rows_at_once = rows_in_chunk(chunk, targets_N)
    # Inside a Function neither grad mode nor needs_input_grad shows a no_grad around it.
    return targets_N, learned_M, rows_at_once, part, torch.is_grad_enabled()


def rows_in_chunk(chunk: int, targets_N: Tensor) -> int:
    """Return the rows of a chunk: `chunk`, or all of them for 0, but at least 1."""
    if chunk:
        return chunk
    return max(1, len(targets_N))


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of `linear_cross_entropy`, whose gradients the forward computes.

    The last four arguments of `apply` are: the most rows of a chunk, this rank's part of the head
    or None, whether gradients are on around the call, and whether the first choices are computed
    too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        learned_M: Tensor,
        *options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the loss sum, and with choices bool[N]: whether the first choice is the target."""
        chunk, part, is_grad_enabled, with_choices = options
        device = hidden_ND.device
        dtype = product_dtype(hidden_ND)
        precise = torch.promote_types(dtype, torch.float32)
        scale = None
        if dtype == torch.float16:
            scale = FP16_SCALE
        wants = [is_grad_enabled and needed for needed in ctx.needs_input_grad[:3]]
        correct_N = None
        if with_choices:
            correct_N = torch.zeros_like(targets_N, dtype=torch.bool)
        grads = HeadGradients(hidden_ND, weight_VD, bias_V, wants, precise)
        chosen_parts: list[Tensor] = []
        total_parts: list[Tensor] = []
        # The −1 of −one-hot for each row of a chunk whose targets are all in this part. It is made
        # once for all chunks; the last one may be shorter.
        largest_chunk = min(chunk, len(learned_M))
        minus_one_N1 = torch.full((largest_chunk, 1), -1.0, dtype=precise, device=device)
        # Types are set explicitly below: autocast would also lower those of the gradients'
        # products.
        with torch.autocast(device.type, enabled=False):
            weight, bias = cast_head(weight_VD, bias_V, dtype)
            for piece in _pieces(learned_M, targets_N, chunk, part, len(weight)):
                hidden = hidden_ND[piece.rows].to(dtype)
                logits = functional.linear(hidden, weight, bias).to(precise)
                if correct_N is None:
                    top = largest_logit(logits, part)
                else:
                    top, first = _first_choice(logits, part)
                    correct_N[piece.rows] = first == piece.targets
                # These overwrite the logits one after another, to save memory: logits − largest,
                # its exp, softmax, and softmax − one-hot, which is d loss / d logits.
                chosen, total = _softmax_sums(logits, top, piece.column, piece.is_mine, part)
                chosen_parts.append(chosen)
                total_parts.append(total)
                if any(wants):
                    minus_one_hot = minus_one_N1[: len(hidden)]
                    if piece.is_mine is not None:
                        minus_one_hot = -piece.is_mine.to(precise)
                    softmax = logits.div_(total[:, None])
                    grad = softmax.scatter_add_(1, piece.column, minus_one_hot)
                    grads.add(piece.rows, grad, hidden, weight, scale)
        if total_parts:
            # −log softmax(logits)[target] = log Σ exp(d) − d_target.
            log_total_M = torch.cat(total_parts).log()
            loss_M = log_total_M - torch.cat(chosen_parts)
            loss_sum = loss_M.sum()
        else:
            # No row has a target.
            loss_sum = torch.zeros((), dtype=precise, device=device)
        save_gradients(ctx, grads, part, (hidden_ND, weight_VD, bias_V))
        if correct_N is not None:
            ctx.mark_non_differentiable(correct_N)
        return loss_sum, correct_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Any) -> tuple[Any, ...]:
        """Return the gradients that the forward has computed, times that of the loss."""
        # Targets, learned_M and the four options have no gradients.
        return (*scale_saved_gradients(ctx, grad_loss), *[None] * 6)


def save_gradients(
    ctx: Any,
    grads: HeadGradients,
    part: VocabularyPart | None,
    head: tuple[Tensor, Tensor, Tensor | None],
) -> None:
    """Keep in `ctx` the gradients of a head that a forward has computed already.

    `head`: the hidden states, the weight and the bias, in whose types the gradients are returned.
    """
    ctx.save_for_backward(*grads.total(part))
    hidden_ND, weight_VD, bias_V = head
    bias_dtype = None
    if bias_V is not None:
        bias_dtype = bias_V.dtype
    ctx.dtypes = (hidden_ND.dtype, weight_VD.dtype, bias_dtype)


def scale_saved_gradients(ctx: Any, grad_loss: Tensor) -> list[Tensor | None]:
    """Return what `save_gradients` has kept, times the gradient of the loss."""
    grads: list[Tensor | None] = []
    for saved_grad, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True):
        grad = saved_grad
        if grad is not None:
            # In place: a copy of the weight's gradient would be as large as the logits that were
            # saved. autograd refuses a second backward, which would scale it twice.
            grad = grad.mul_(grad_loss).to(dtype)
        grads.append(grad)
    return grads


def largest_logit(logits_NV: Tensor, part: VocabularyPart | None) -> Tensor:
    """Return the largest logit of each row of the whole head. Collective with `part`."""
    top_N = logits_NV.amax(-1)
    if part is not None:
        dist.all_reduce(top_N, dist.ReduceOp.MAX, group=part.group)
    return top_N


def _first_choice(logits_NV: Tensor, part: VocabularyPart | None) -> tuple[Tensor, Tensor]:
    """Return `largest_logit` and its index in the whole vocabulary, of equal ones the lowest.

    Collective with `part`.
    """
    top_N, first_N = logits_NV.max(-1)
    if part is None:
        return top_N, first_N
    top_of_part_N = top_N.clone()
    dist.all_reduce(top_N, dist.ReduceOp.MAX, group=part.group)
    # Only ranks that have the largest logit offer an index. The lowest one wins on every rank.
    has_largest_N = top_of_part_N == top_N
    index_N = first_N + part.first
    no_index = torch.iinfo(torch.int64).max
    first_N = torch.where(has_largest_N, index_N, no_index)
    dist.all_reduce(first_N, dist.ReduceOp.MIN, group=part.group)
    return top_N, first_N


class _Piece(NamedTuple):
    """Rows with a target whose logits are in memory at once.

    `rows`: int64[n], their numbers in all N rows. `targets`: int64[n].
    `column`: int64[n, 1], the target's number in this part of the head; any number of the part if
    the target is in another one.
    `is_mine`: bool[n, 1], whether the target is in this part of the head. None: every target is.
    """

    rows: Tensor
    targets: Tensor
    column: Tensor
    is_mine: Tensor | None


def _pieces(
    learned_M: Tensor, targets_N: Tensor, chunk: int, part: VocabularyPart | None, width: int
) -> list[_Piece]:
    """Return the rows `learned_M`, at most `chunk` at a time.

    `width`: rows of this part of the head.
    """
    if len(learned_M) == 0:
        return []
    targets_M = targets_N[learned_M]
    column_M1 = targets_M[:, None]
    is_mine_M1 = None
    if part is not None:
        place_M1 = column_M1 - part.first
        is_mine_M1 = (place_M1 >= 0) & (place_M1 < width)
        # `gather` and `scatter` need a valid column also for targets of another rank, which
        # `is_mine` masks afterwards.
        column_M1 = place_M1.clamp(0, width - 1)
    pieces = []
    for start in range(0, len(learned_M), chunk):
        here = slice(start, start + chunk)
        is_mine = None
        if is_mine_M1 is not None:
            is_mine = is_mine_M1[here]
        piece = _Piece(learned_M[here], targets_M[here], column_M1[here], is_mine)
        pieces.append(piece)
    return pieces


def _softmax_sums(
    logits: Tensor,
    top: Tensor,
    column: Tensor,
    is_mine: Tensor | None,
    part: VocabularyPart | None,
    entropy: bool = False,
) -> Sequence[Tensor]:
    """Return the sums over the whole vocabulary that losses are computed from, [n] each.

    With d = logit − top these are the target's d, Σ exp(d), and with `entropy` Σ exp(d) d.
    `logits`: [n, V], overwritten: it has exp(d) afterwards, or d with `entropy`. `top`: [n], the
    largest logit of each row, so that no exponential overflows. `column`, `is_mine`: see `_Piece`.
    Collective with `part`.
    """
    logits.sub_(top[:, None])
    chosen = logits.gather(1, column)
    if is_mine is not None:
        # The rank that has the target adds its d to the sum over ranks, all others 0.
        chosen = torch.where(is_mine, chosen, 0.0)
    if entropy:
        # d is needed again below, so exp(d) gets memory of its own.
        weights = logits.exp()
    else:
        weights = logits.exp_()
    sums = [chosen.squeeze(1), weights.sum(-1)]
    if entropy:
        weighted = weights.mul_(logits)
        sums.append(weighted.sum(-1))
    if part is None:
        return sums
    # One collective for all sums.
    stacked = torch.stack(sums)
    dist.all_reduce(stacked, group=part.group)
    return stacked.unbind()


class HeadGradients:
    """Sums the gradients of hidden states, weight and bias of a head over chunks, in `precise`.

    `wants`: which of the three are needed; the others are None.
    """

    def __init__(
        self,
        hidden_ND: Any,
        weight_VD: Any,
        bias_V: Any,
        wants: Sequence[bool],
        precise: torch.dtype,
    ) -> None:
        self.precise = precise
        needs_hidden, needs_weight, needs_bias = wants
        self.hidden: Tensor | None = None
        self.weight: Tensor | None = None
        self.bias: Tensor | None = None
        if needs_hidden:
            self.hidden = torch.zeros_like(hidden_ND, dtype=precise)
        if needs_weight:
            self.weight = torch.zeros_like(weight_VD, dtype=precise)
        if needs_bias:
            self.bias = torch.zeros_like(bias_V, dtype=precise)

    def add(self, rows: Tensor, grad: Tensor, hidden: Tensor, weight: Tensor, scale: Any) -> None:
        """Add the gradients from some rows.

        `rows`: int64[n], numbers of these in all N. `grad`: the gradient of their logits, [n, V] in
        `precise`, which is overwritten. `hidden`: [n, D] and `weight`: [V, D] in the type of
        products.
        `scale`: a power of two for fp16, a number or a tensor; None: 1.
        """
        if self.bias is not None:
            self.bias += grad.sum(0)
        if self.weight is not None and not grad.is_cuda:
            # On a CPU the gradient is neither scaled nor rounded for this product.
            self.weight.addmm_(grad.T, hidden.to(self.precise))
        if scale is not None:
            grad = grad.mul_(scale)
        low = grad.to(hidden.dtype)
        if self.hidden is not None:
            self.hidden[rows] = self._product(low, weight, scale)
        if self.weight is not None and grad.is_cuda:
            self._add_to_weight_on_gpu(self.weight, low, hidden, scale)

    def add_scaled(
        self, rows: Tensor, grad: Tensor, hidden: Tensor, weight: Tensor, temperature: float
    ) -> None:
        """Add the gradients from some rows as `add` does, with the scale that fp16 needs.

        `grad`: the gradient of their logits / temperature. Its entries have no limit.
        """
        # From logits / temperature to logits.
        grad = grad.div_(temperature)
        scale = None
        if hidden.dtype == torch.float16:
            scale = _fp16_scale(grad)
        self.add(rows, grad, hidden, weight, scale)

    def _add_to_weight_on_gpu(
        self, weight_VD: Tensor, low: Tensor, hidden: Tensor, scale: Any
    ) -> None:
        """Add lowᵀ @ hidden / scale to the weight's gradient.

        Where possible the product itself adds: a product of its own would be as large as the
        weight.
        """
        if hidden.dtype == self.precise:
            weight_VD.addmm_(low.T, hidden)
        elif isinstance(scale, Tensor):
            # `addmm` takes its factor as a number of the host, which would have to wait for this
            # tensor.
            weight_VD += self._product(low.T, hidden, scale)
        else:
            factor = 1.0
            if scale is not None:
                factor = 1 / scale
            torch.addmm(weight_VD, low.T, hidden, self.precise, alpha=factor, out=weight_VD)

    def _product(self, a: Tensor, b: Tensor, scale: Any) -> Tensor:
        """Return a @ b / scale in `precise`, also if a and b have 16 bits.

        A result of 16 bits would be less exact, and in fp16 might overflow. A GPU's matrix units
        add in fp32 in any case. On a CPU fp16 is multiplied in fp32, and bf16 is rounded once.
        """
        if a.is_cuda and a.dtype != self.precise:
            product = torch.mm(a, b, out_dtype=self.precise)
        elif a.dtype == torch.float16:
            product = a.to(self.precise) @ b.to(self.precise)
        else:
            product = (a @ b).to(self.precise)
        if scale is None:
            return product
        return product.div_(scale)

    def total(
        self, part: VocabularyPart | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the gradients of hidden states, weight and bias. Collective with `part`.

        The gradient of hidden states is summed over the parts of the head.
        """
        if self.hidden is not None and part is not None:
            dist.all_reduce(self.hidden, group=part.group)
        return self.hidden, self.weight, self.bias

    def total_as(
        self, head: Sequence[Tensor | None], part: VocabularyPart | None
    ) -> list[Tensor | None]:
        """Return `total` in the types of the tensors of `head`. Collective with `part`."""
        results: list[Tensor | None] = []
        for total, tensor in zip(self.total(part), head, strict=True):
            if total is not None and tensor is not None:
                total = total.to(tensor.dtype)
            results.append(total)
        return results


def log_probs(
    logits_NV: Tensor,
    targets_N: Tensor,
    temperature: float = 1.0,
    entropy: bool = False,
    learned_M: Tensor | None = None,
) -> LogProbs:
    """Return log softmax(logits / temperature)[target], fp32[N], and with `entropy` the entropies.

    The entropies of the distributions are in nats, fp32[N]; without `entropy` None. Both are 0 for
    a target of −100. `learned_M`: as in `linear_cross_entropy`.
    """
    if learned_M is None:
        learned_M = rows_with_target(targets_N)
    logits_MV = logits_NV[learned_M]
    precise = torch.promote_types(logits_MV.dtype, torch.float32)
    scaled_MV = logits_MV.to(precise) / temperature
    log_probs_MV = functional.log_softmax(scaled_MV, -1)
    zeros_N = log_probs_MV.new_zeros(len(targets_N))
    targets_M = targets_N[learned_M]
    chosen_M1 = log_probs_MV.gather(1, targets_M[:, None])
    chosen_N = zeros_N.index_copy(0, learned_M, chosen_M1.squeeze(1))
    if not entropy:
        return chosen_N, None
    summands_MV = log_probs_MV.exp() * log_probs_MV
    entropy_M = -summands_MV.sum(-1)
    return chosen_N, zeros_N.index_copy(0, learned_M, entropy_M)


def linear_log_probs(
    hidden_ND: Tensor,
    head: LinearHead,
    targets_N: Tensor,
    chunk: int,
    temperature: float = 1.0,
    entropy: bool = False,
    learned_M: Tensor | None = None,
) -> LogProbs:
    """Return `log_probs(head.logits(hidden), …)` from the logits of few tokens at a time.

    The forward cannot compute gradients as that of `linear_cross_entropy` does, since it does not
    know the gradient of each token's result. It keeps the hidden states and each token's
    log-sum-exp, and backward computes the logits again, chunk by chunk (recomputation, Chen et al.
    2016; of softmax from its log-sum-exp, Cut Cross-Entropy, Wijmans et al. 2025). With p = softmax
    and H its entropy: d log p_target / d logit = onehot − p, dH / d logit = −p (log p + H). Types
    are as in `linear_cross_entropy`. In fp16 each chunk's gradient has a scale of its own. Allows
    any number of backwards, and no second derivatives.

    `chunk`: tokens whose logits are in memory at once, at most, in forward and in backward; 0 for
    all, by autograd.
    If the head has a part of the rows, the results are those of the whole head. Forward and
    backward are collective then.
    `learned_M`: as in `linear_cross_entropy`.
    """
    if learned_M is None:
        learned_M = rows_with_target(targets_N)
    if head.part is None and chunk == 0:
        logits_NV = head.logits(hidden_ND)
        return log_probs(logits_NV, targets_N, temperature, entropy, learned_M)
    rows_at_once = rows_in_chunk(chunk, targets_N)
    options = (targets_N, learned_M, rows_at_once, temperature, entropy, head.part)
    results: LogProbs = _LinearLogProbs.apply(hidden_ND, head.weight_VD, head.bias_V, *options)
    return results


class _LinearLogProbs(torch.autograd.Function):
    """The function of `linear_log_probs`, whose backward computes the logits again.

    The last five arguments of `apply` are: `learned_M`, the most rows of a chunk, the temperature,
    whether entropies are computed too, and this rank's part of the head or None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        targets_N: Tensor,
        *options: Any,
    ) -> LogProbs:
        """Return log-probabilities and entropies, and keep each token's log-sum-exp for backward."""
        learned_M, chunk, temperature, entropy, part = options
        dtype = product_dtype(hidden_ND)
        # Backward runs without the autocast of the forward, whose type it needs.
        ctx.dtype = dtype
        ctx.chunk = chunk
        ctx.temperature = temperature
        ctx.part = part
        # So the gradient of a result that no loss uses is None, and backward skips it.
        ctx.set_materialize_grads(False)
        precise = torch.promote_types(dtype, torch.float32)
        tokens = len(targets_N)
        chosen_N = torch.zeros(tokens, dtype=precise, device=hidden_ND.device)
        total_N = torch.zeros_like(chosen_N)
        entropy_N = torch.zeros_like(chosen_N)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            weight, bias = cast_head(weight_VD, bias_V, dtype)
            for piece in _pieces(learned_M, targets_N, chunk, part, len(weight)):
                rows = piece.rows
                logits = scaled_logits(hidden_ND[rows].to(dtype), weight, bias, temperature)
                top = largest_logit(logits, part)
                chosen, total, *rest = _softmax_sums(
                    logits, top, piece.column, piece.is_mine, part, entropy
                )
                log_total = total.log()
                chosen_N[rows] = chosen - log_total
                # The log-sum-exp of the logits themselves, from which backward has softmax.
                total_N[rows] = top + log_total
                if entropy:
                    # H = −Σ p log p with p = exp(d) / total and log p = d − log total.
                    (weighted_sum,) = rest
                    entropy_N[rows] = log_total - weighted_sum / total
        # Not the cast weight, which would be a copy kept until backward.
        ctx.save_for_backward(
            hidden_ND, weight_VD, bias_V, targets_N, learned_M, total_N, entropy_N
        )
        if not entropy:
            return chosen_N, None
        return chosen_N, entropy_N

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: Any, grad_chosen_N: Tensor | None, grad_entropy_N: Tensor | None
    ) -> tuple[Any, ...]:
        """Return the gradients of hidden states, weight and bias from the logits computed again."""
        hidden_ND, weight_VD, bias_V, targets_N, learned_M, total_N, entropy_N = ctx.saved_tensors
        head = (hidden_ND, weight_VD, bias_V)
        dtype = ctx.dtype
        wants = ctx.needs_input_grad[:3]
        grads = HeadGradients(*head, wants, total_N.dtype)
        with torch.autocast(hidden_ND.device.type, enabled=False):
            weight, bias = cast_head(weight_VD, bias_V, dtype)
            for piece in _pieces(learned_M, targets_N, ctx.chunk, ctx.part, len(weight)):
                rows = piece.rows
                hidden = hidden_ND[rows].to(dtype)
                logits = scaled_logits(hidden, weight, bias, ctx.temperature)
                log_p = logits.sub_(total_N[rows][:, None])
                grad_chosen = _select_rows(grad_chosen_N, rows, log_p.dtype)
                grad_entropy = _select_rows(grad_entropy_N, rows, log_p.dtype)
                grad = _grad_logits(
                    log_p, grad_chosen, grad_entropy, entropy_N[rows], piece.column, piece.is_mine
                )
                grads.add_scaled(rows, grad, hidden, weight, ctx.temperature)
        # Targets and the five options have no gradients.
        return (*grads.total_as(head, ctx.part), *[None] * 6)


def _select_rows(tensor_N: Tensor | None, rows: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the entries of a tensor at `rows` in `dtype`; None of None."""
    if tensor_N is None:
        return None
    return tensor_N[rows].to(dtype)


def cast_head(
    weight_VD: Tensor, bias_V: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a head in the type of its product."""
    weight = weight_VD.to(dtype)
    if bias_V is None:
        return weight, None
    return weight, bias_V.to(dtype)


def rows_with_target(targets_N: Tensor) -> Tensor:
    """Return the numbers of the rows with a target, int64[M].

    On a GPU the host waits for how many there are. Callers that know the rows pass `learned_M`
    instead: every batch that was collated, also cut into parts. This is for targets that were made
    on the device.
    """
    return (targets_N != IGNORE).nonzero().squeeze(1)


def scaled_logits(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float
) -> Tensor:
    """Return the logits of a head divided by the temperature, [n, V], in fp32 or a wider type."""
    logits = functional.linear(hidden, weight, bias)
    precise = torch.promote_types(logits.dtype, torch.float32)
    return logits.to(precise).div_(temperature)


def _grad_logits(
    log_p: Tensor,
    grad_chosen: Tensor | None,
    grad_entropy: Tensor | None,
    entropy: Tensor,
    column: Tensor,
    is_mine: Tensor | None,
) -> Tensor:
    """Return the gradient of logits / temperature, [n, V]; `log_p` is overwritten.

    `log_p`: log softmax, [n, V]. `grad_chosen`, `grad_entropy`: the gradients of log-probabilities
    and entropies, [n]; None: zero. `entropy`: [n]. `column`, `is_mine`: see `_Piece`.
    """
    # With g and h these two gradients, the formulas of `linear_log_probs` add up to
    # g (onehot − p) − h p (log p + H) = p (−h (log p + H) − g) + g onehot.
    p = log_p.exp()
    if grad_chosen is None:
        grad_chosen = torch.zeros_like(entropy)
    chosen = grad_chosen[:, None]
    if grad_entropy is None:
        grad = p.mul_(-chosen)
    else:
        minus_h = -grad_entropy[:, None]
        of_entropy = log_p.add_(entropy[:, None]).mul_(minus_h)
        grad = p.mul_(of_entropy.sub_(chosen))
    if is_mine is not None:
        chosen = torch.where(is_mine, chosen, 0.0)
    return grad.scatter_add_(1, column, chosen)


def _fp16_scale(grad: Tensor) -> Tensor:
    """Return the power of two that brings the largest entry of a gradient near FP16_SCALE.

    It is a tensor, so that the host does not wait for the device.
    """
    # The smallest normal number in place of 0, which has no such power.
    largest = grad.abs().amax().clamp_min(torch.finfo(grad.dtype).tiny)
    exponent = (FP16_SCALE / largest).log2().floor()
    # Within the exponents of fp32, also for the inverse.
    return torch.exp2(exponent.clamp(-100, 100))
