"""InfoNCE over a global batch, with its gradient with respect to every embedding.

N samples of R texts with D numbers each: the query, its positive, and R − 2 negatives.
M = N · (R − 1) documents: the positives and negatives of all samples, sample by sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

# Similarities that exist at once.
MOST_ENTRIES = 2**24


class Contrast(NamedTuple):
    """What the texts of a global batch give.

    Attributes:
        loss_N: fp32, −log of the share of the positive in Σ exp(similarity / temperature), summed
            over all sizes.
        correct_N: bool, whether no other document is as similar to the query as its positive.
        similarity_N: fp32, of the query and its positive.
        gradient_NRD: fp32, of Σ loss_N; None if it was not asked for.
    """

    loss_N: torch.Tensor
    correct_N: torch.Tensor
    similarity_N: torch.Tensor
    gradient_NRD: torch.Tensor | None


@dataclass(frozen=True)
class InfoNCE:
    """InfoNCE (van den Oord et al. 2018) with the negatives of all samples.

    A document is no negative of a query if any sample has both texts as its query and its positive,
    or if it is the query's own text.

    Attributes:
        temperature: similarities are divided by it.
        normalize: similarity is the cosine, otherwise the dot product.
        sizes: the loss is also computed of the first so many numbers of each embedding.
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
            ids_NR: a number of each text, below 0 for a text that a sample lacks.
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
            # Chunks of queries add up the gradient here, so the norm is differentiated once.
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
        """Return slices of the queries, so that MOST_ENTRIES similarities exist at once."""
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
        excluded_QM = _is_no_negative(ids_NR, queries)
        per_sample = ids_NR.shape[1] - 1
        samples_N = torch.arange(len(ids_NR), device=ids_NR.device)
        positive_Q = samples_N[queries] * per_sample
        positive_Q1 = positive_Q[:, None]
        excluded_QM.scatter_(1, positive_Q1, False)
        logits_QM = (similarity_QM / self.temperature).masked_fill(excluded_QM, -torch.inf)
        loss_Q = functional.cross_entropy(logits_QM, positive_Q, reduction="none")
        # The positive is one of them.
        as_similar_Q = (logits_QM >= logits_QM.gather(1, positive_Q1)).sum(1)
        correct_Q = as_similar_Q == 1
        similarity_Q = similarity_QM.gather(1, positive_Q1).squeeze(1)
        return Contrast(loss_Q, correct_Q, similarity_Q, None)


@contextmanager
def exact_products() -> Iterator[None]:
    """Compute fp32 matrix products within the context in fp32, whatever `precision.tf32` says.

    TF32 keeps 10 bits, and a similarity is divided by a temperature: at 0.02 its rounding can
    change a logit by 0.02.
    """
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _is_no_negative(ids_NR: torch.Tensor, queries: slice) -> torch.Tensor:
    """Return bool[Q, M]: whether each document is missing, or answers each of some queries.

    A text answers a query if some sample has both as its query and its positive, wherever else the
    text stands. The query's own text is no negative either.
    """
    document_ids_M = ids_NR[:, 1:].flatten().contiguous()
    query_ids_N = ids_NR[:, 0].contiguous()
    positive_ids_N = ids_NR[:, 1].contiguous()
    query_ids_Q1 = query_ids_N[queries, None]
    # Each text by the place of its first copy among all documents in order: so the host does not
    # wait for the device, as it would for the number of distinct texts.
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
