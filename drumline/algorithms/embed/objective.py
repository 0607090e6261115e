"""Bi-encoders: a query and the texts that answer it get similar embeddings.

A query is compared with all documents of the global batch, whatever rank or micro-batch they are
in. This takes two passes (GradCache, Gao et al. 2021), with the result of one large batch:

1. `first_pass` embeds all texts without gradients. `combine_first` computes the loss from all
   embeddings, and its gradient with respect to each of them.
2. `objective` embeds the texts of a micro-batch again, and passes each embedding its gradient.

P samples of a micro-batch, N of the global batch, R texts of a sample, D numbers of an embedding,
E = R · D numbers of a sample's embeddings, B = R · P rows.
K numbers of a sample in `batch.first`: see `Embed.combine_first`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from drumline.algorithms.base import Algorithm, LossOut
from drumline.algorithms.embed.contrast import InfoNCE, exact_products
from drumline.algorithms.embed.ranking import RANKED, rank_documents
from drumline.algorithms.embed.spec import STATISTIC_COUNT, EmbedConfig


class Embed(Algorithm):
    """InfoNCE over the global batch, with GradCache."""

    evaluates_first_pass = True

    def __init__(self, spec: EmbedConfig) -> None:
        self.spec = spec
        self.texts = spec.rows_per_sample
        self.contrast = InfoNCE(spec.temperature, spec.normalize, spec.matryoshka)

    def first_pass(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the embeddings and the ids of each sample's texts, fp64[P, R · D + R]."""
        embeddings_PRD = self._embed(outputs, batch)
        ids_PR = self._group_by_sample(batch.text_ids_B)
        flat_PE = embeddings_PRD.flatten(1)
        parts = [flat_PE.double(), ids_PR]
        return torch.cat(parts, 1)

    def combine_first(self, numbers_NK: torch.Tensor, trains: bool) -> torch.Tensor:
        """Return the numbers that `objective` and `eval_objective` read of each sample, fp64[N, K].

        In training K is E + 3: the gradient of each embedding, and then the statistics, which are the
        loss, whether the positive is the most similar document, and its similarity. In an evaluation K is
        3 + 4: the statistics, and then RANKED. N is the whole held-out set there.
        """
        flat_NE = numbers_NK[:, : -self.texts].float()
        embeddings_NRD = flat_NE.unflatten(1, (self.texts, -1))
        ids_NR = numbers_NK[:, -self.texts :]
        with exact_products():
            return self._compare(embeddings_NRD, ids_NR, trains)

    def _compare(
        self, embeddings_NRD: torch.Tensor, ids_NR: torch.Tensor, trains: bool
    ) -> torch.Tensor:
        """Do the work of `combine_first`, from embeddings in fp32 and the ids of their texts."""
        result = self.contrast.compare(embeddings_NRD, ids_NR, with_gradient=trains)
        statistics = [result.loss_N, result.correct_N, result.similarity_N]
        columns = [numbers_N.double() for numbers_N in statistics]
        statistics_N3 = torch.stack(columns, 1)
        if result.gradient_NRD is not None:
            gradient_NE = result.gradient_NRD.flatten(1).double()
            return torch.cat([gradient_NE, statistics_N3], 1)
        if self.spec.normalize:
            embeddings_NRD = functional.normalize(embeddings_NRD, dim=-1)
        ranked_N4 = rank_documents(embeddings_NRD, ids_NR)
        return torch.cat([statistics_N3, ranked_N4], 1)

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the loss of the samples. Its gradient is that of the whole global batch's loss."""
        embeddings_PRD = self._embed(outputs, batch)
        numbers_PK = _numbers_of_samples(batch)
        gradient_PE = numbers_PK[:, :-STATISTIC_COUNT].float()
        gradient_PRD = gradient_PE.view(embeddings_PRD.shape)
        gradient_carrier = (embeddings_PRD * gradient_PRD).sum()
        statistics_P3 = numbers_PK[:, -STATISTIC_COUNT:]
        loss_sum, sums = _statistics(statistics_P3, batch)
        # `gradient_carrier` has the right gradient and a meaningless value. Minus its own value it is
        # 0, so that the sum has the value of the loss and the gradient of the carrier.
        zero_with_gradient = gradient_carrier - gradient_carrier.detach()
        loss = loss_sum + zero_with_gradient
        return LossOut(loss.float(), sums)

    def eval_objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the loss against all documents of the set, with the sums of the ranking."""
        numbers_PK = _numbers_of_samples(batch)
        statistics_P3 = numbers_PK[:, :STATISTIC_COUNT]
        loss_sum, sums = _statistics(statistics_P3, batch)
        ranked_4 = numbers_PK[:, STATISTIC_COUNT:].sum(0)
        for name, value in zip(RANKED, ranked_4.unbind(), strict=True):
            sums[name] = value
        return LossOut(loss_sum.float(), sums)

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the means of a held-out set.

        Loss, accuracy and similarity are means over its samples, recall and nDCG over its distinct
        queries.
        """
        metrics = {"loss": sums["loss"] / max(1.0, sums["samples"]), **self.step_metrics(sums)}
        count, *names = RANKED
        for name in names:
            metrics[name] = sums[name] / max(1.0, sums[count])
        return metrics

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return means over the samples of the global batch."""
        samples = max(1.0, sums["samples"])
        return {
            "accuracy": sums["correct"] / samples,
            "similarity": sums["similarity"] / samples,
        }

    def _embed(self, outputs: Any, batch: Any) -> torch.Tensor:
        """Return the embeddings of each sample's texts, fp32[P, R, D], not normalised."""
        kind = self.spec.pooling_of(bidirectional=batch.attention_mask_BT is not None)
        weights_BT = pooling_weights(kind, batch.lengths_B, batch.input_ids_BT.shape[1])
        return self._group_by_sample(outputs.pool(weights_BT))

    def _group_by_sample(self, values_B: torch.Tensor) -> torch.Tensor:
        """Return values of rows [B, …] by sample, [P, R, …]."""
        return values_B.unflatten(0, (self.texts, -1)).transpose(0, 1)


def pooling_weights(kind: str, lengths_B: torch.Tensor, width: int) -> torch.Tensor:
    """Return the weight of each token in the embedding of its text, fp32[B, T].

    Args:
        kind: mean of all tokens, last token, or the first one (cls).
        lengths_B: tokens of each text.
        width: T, tokens of a row with padding.
    """
    columns_T = torch.arange(width, device=lengths_B.device)
    lengths_B1 = lengths_B[:, None]
    if kind == "mean":
        return (columns_T < lengths_B1) / lengths_B1
    if kind == "last":
        return (columns_T == lengths_B1 - 1).float()
    is_first_T = columns_T == 0
    return is_first_T.expand(len(lengths_B), width).float()


def _numbers_of_samples(batch: Any) -> torch.Tensor:
    """Return the numbers of `Embed.combine_first` for each sample of a batch, [P, K].

    Fillers, which pad a batch to its number of samples, get zeros.
    """
    numbers_PK = batch.first.numbers_NK[batch.places_P]
    # Fillers have the place −1, by which they were given the numbers of the last sample.
    return numbers_PK.masked_fill(batch.real_P[:, None] == 0, 0)


def _statistics(
    statistics_P3: torch.Tensor, batch: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the sum of the losses, and the sums that `Embed.step_metrics` reads.

    `statistics_P3`: the statistics of each sample; 0 for fillers.
    """
    loss_sum, correct, similarity = statistics_P3.sum(0).unbind()
    sums = {"samples": batch.real_P.sum(), "correct": correct, "similarity": similarity}
    return loss_sum, sums
