"""InfoNCE over a global batch, with its gradient with respect to every embedding.

`embed.objective` calls it with the embeddings of all ranks.

N samples of R texts with D numbers each: the query, its positive, and R − 2 negatives.
M = N · (R − 1) documents: the positives and negatives of all samples, sample by sample.
Q queries of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

# The most similarities that exist at once. More queries are compared in chunks.
MOST_ENTRIES = 2**24


class Contrast(NamedTuple):
    """The result of comparing each query with all documents.

    Attributes:
        loss_N: fp32, −log of the share of the positive in Σ exp(similarity / temperature), summed
            over all sizes.
        correct_N: bool, whether the positive is more similar to the query than every negative.
        similarity_N: fp32, the similarity of the query and its positive.
        gradient_NRD: fp32, the gradient of Σ loss_N with respect to the embeddings; None if it was
            not asked for.
    """

    loss_N: torch.Tensor
    correct_N: torch.Tensor
    similarity_N: torch.Tensor
    gradient_NRD: torch.Tensor | None


@dataclass(frozen=True)
class InfoNCE:
    """InfoNCE (van den Oord et al. 2018) with the texts of all samples as negatives.

    Two kinds of documents are not negatives of a query: those that answer it in any sample, and
    those with the query's own text.

    Attributes:
        temperature: divides each similarity.
        normalize: whether similarity is the cosine; otherwise it is the dot product.
        sizes: for each size the loss is also computed from the first `size` numbers of each
            embedding, and added (Matryoshka, Kusupati et al. 2022).
    """

    temperature: float
    normalize: bool
    sizes: Sequence[int] = ()

    def compare(
        self, embeddings_NRD: torch.Tensor, ids_NR: torch.Tensor, with_gradient: bool
    ) -> Contrast:
        """Return the loss of each sample, and with `with_gradient` the gradient of their sum.

        Args:
            embeddings_NRD: fp32, before they are normalised.
            ids_NR: a number for each text, equal for equal texts; below 0 for a text that a sample
                lacks.
            with_gradient: whether the gradient is computed.
        """
        full = self._compare_at_size(embeddings_NRD, ids_NR, with_gradient)
        loss_N = full.loss_N
        gradient_NRD = full.gradient_NRD
        for size in self.sizes:
            part_NRd = embeddings_NRD[:, :, :size]
            part = self._compare_at_size(part_NRd, ids_NR, with_gradient)
            loss_N = loss_N + part.loss_N
            if gradient_NRD is not None and part.gradient_NRD is not None:
                gradient_NRD[:, :, :size] += part.gradient_NRD
        return full._replace(loss_N=loss_N, gradient_NRD=gradient_NRD)

    def _compare_at_size(
        self, embeddings_NRD: torch.Tensor, ids_NR: torch.Tensor, with_gradient: bool
    ) -> Contrast:
        """Return the contrast of embeddings of one size."""
        with torch.set_grad_enabled(with_gradient):
            raw_NRD = embeddings_NRD.detach().requires_grad_(with_gradient)
            compared_NRD = raw_NRD
            if self.normalize:
                compared_NRD = functional.normalize(raw_NRD, dim=-1)
            # The chunks of queries add up their gradients in this leaf. So the normalisation is
            # differentiated once, after the last chunk.
            leaf_NRD = compared_NRD.detach().requires_grad_(with_gradient)
            chunks = []
            for queries in self._chunks(ids_NR):
                chunk = self._compare_queries(leaf_NRD, ids_NR, queries)
                if with_gradient:
                    chunk.loss_N.sum().backward()
                chunks.append(chunk)
            if with_gradient:
                compared_NRD.backward(leaf_NRD.grad)
        return Contrast(
            torch.cat([chunk.loss_N.detach() for chunk in chunks]),
            torch.cat([chunk.correct_N for chunk in chunks]),
            torch.cat([chunk.similarity_N.detach() for chunk in chunks]),
            raw_NRD.grad,
        )

    def _chunks(self, ids_NR: torch.Tensor) -> list[slice]:
        """Return slices of the queries, each with at most MOST_ENTRIES similarities."""
        samples, texts = ids_NR.shape
        documents = max(1, samples * (texts - 1))
        size = max(1, MOST_ENTRIES // documents)
        return [slice(start, start + size) for start in range(0, samples, size)]

    def _compare_queries(
        self, compared_NRD: torch.Tensor, ids_NR: torch.Tensor, queries: slice
    ) -> Contrast:
        """Return the contrast of some queries with all documents, without a gradient."""
        documents_MD = compared_NRD[:, 1:].flatten(0, 1)
        similarity_QM = compared_NRD[queries, 0] @ documents_MD.T
        excluded_QM = _mask_excluded(ids_NR, queries)
        per_sample = ids_NR.shape[1] - 1
        samples_N = torch.arange(len(ids_NR), device=ids_NR.device)
        positive_Q = samples_N[queries] * per_sample
        positive_Q1 = positive_Q[:, None]
        excluded_QM.scatter_(1, positive_Q1, False)
        logits_QM = (similarity_QM / self.temperature).masked_fill(excluded_QM, -torch.inf)
        loss_Q = functional.cross_entropy(logits_QM, positive_Q, reduction="none")
        positive_logits_Q1 = logits_QM.gather(1, positive_Q1)
        as_similar_Q = (logits_QM >= positive_logits_Q1).sum(1)
        # The positive itself is always counted.
        correct_Q = as_similar_Q == 1
        similarity_Q = similarity_QM.gather(1, positive_Q1).squeeze(1)
        return Contrast(loss_Q, correct_Q, similarity_Q, None)


@contextmanager
def exact_products() -> Iterator[None]:
    """Within the context, compute fp32 matrix products in fp32, whatever `precision.tf32` says.

    TF32 keeps 10 bits. Similarities are divided by the temperature, which enlarges the rounding
    error: at a temperature of 0.02 a logit can change by 0.02.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _mask_excluded(ids_NR: torch.Tensor, queries: slice) -> torch.Tensor:
    """Return bool[Q, M]: whether a document is not a negative of a query.

    A document is not a negative if the sample lacks it, if it answers the query, or if it has the
    query's own text. A text answers a query if some sample has the two as its query and its
    positive; then all copies of this text are excluded, in whatever sample they are.
    """
    document_ids_M = ids_NR[:, 1:].flatten().contiguous()
    query_ids_N = ids_NR[:, 0].contiguous()
    positive_ids_N = ids_NR[:, 1].contiguous()
    query_ids_Q1 = query_ids_N[queries, None]
    # Equal texts get equal numbers below M: the place of the first copy in the sorted ids. Numbers
    # of distinct texts would need their count, for which the host would wait for the device.
    sorted_ids_M = document_ids_M.sort().values
    texts_M = torch.searchsorted(sorted_ids_M, document_ids_M)
    answers_N = torch.searchsorted(sorted_ids_M, positive_ids_N)
    has_same_query_QN = query_ids_Q1 == query_ids_N
    answered_QM = torch.zeros(
        len(has_same_query_QN), len(texts_M), dtype=torch.int32, device=ids_NR.device
    )
    answered_QM.index_add_(1, answers_N, has_same_query_QN.int())
    is_answer_QM = answered_QM[:, texts_M] > 0
    is_missing_M = document_ids_M < 0
    is_query_QM = query_ids_Q1 == document_ids_M
    return is_missing_M | is_answer_QM | is_query_QM
