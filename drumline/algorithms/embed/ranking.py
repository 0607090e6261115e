"""Recall and nDCG of a held-out set, each query against the documents of the whole set.

N samples of R texts with D numbers each. Q distinct queries, U distinct documents: equal texts count
once. A document answers a query if some sample has them as its query and its positive. A query is
not looked for among the documents: its own text is no document for it, unless it is an answer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from drumline.algorithms.embed.contrast import MOST_ENTRIES

Numbers = npt.NDArray[np.int64]
# k of recall@k, and of nDCG@k.
RECALL_AT = (1, 10)
NDCG_AT = 10
# Documents of each query that are looked at, if there are so many.
MOST_RANKS = max(*RECALL_AT, NDCG_AT)
# Names of the columns of `rank_documents`.
RANKED = ("queries", "recall@1", "recall@10", "ndcg@10")


class _Pairs(NamedTuple):
    """Pairs of a query and a document, each as a number, sorted by the query."""

    queries: Numbers
    documents: Numbers

    def mark(self, similarity_qU: torch.Tensor, start: int) -> torch.Tensor:
        """Return bool[q, U]: which of these are pairs. `start`: the number of the first query."""
        stop = start + len(similarity_qU)
        first, end = np.searchsorted(self.queries, (start, stop))
        device = similarity_qU.device
        rows = torch.from_numpy(self.queries[first:end] - start).to(device)
        columns = torch.from_numpy(self.documents[first:end]).to(device)
        marked_qU = torch.zeros_like(similarity_qU, dtype=torch.bool)
        marked_qU[rows, columns] = True
        return marked_qU


class _Judgements(NamedTuple):
    """Which documents answer which queries.

    Attributes:
        query_rows: int64[Q], the sample of each distinct query.
        document_rows: int64[U], the place of each distinct document among all texts of documents.
        answers: pairs of a query and a document that answers it.
        copies: pairs of a query and a document with the same text.
    """

    query_rows: Numbers
    document_rows: Numbers
    answers: _Pairs
    copies: _Pairs


def rank_documents(compared_NRD: torch.Tensor, ids_NR: torch.Tensor) -> torch.Tensor:
    """Return the numbers `RANKED` of each sample, fp64[N, 4].

    The first is 1 for the first sample with a query, and all are 0 for its other samples. Of
    documents that are as similar to a query, those that answer come last: so a model that embeds
    all texts alike finds nothing.

    Args:
        compared_NRD: embeddings whose dot product is the similarity.
        ids_NR: a number of each text, below 0 for a text that a sample lacks.
    """
    device = compared_NRD.device
    judged = _judge(ids_NR.cpu().numpy())
    query_rows_Q = torch.from_numpy(judged.query_rows).to(device)
    document_rows_U = torch.from_numpy(judged.document_rows).to(device)
    queries_QD = compared_NRD[query_rows_Q, 0]
    texts_MD = compared_NRD[:, 1:].flatten(0, 1)
    documents_UD = texts_MD[document_rows_U]
    table_N4 = torch.zeros(len(ids_NR), len(RANKED), dtype=torch.float64, device=device)
    size = max(1, MOST_ENTRIES // len(documents_UD))
    for start in range(0, len(queries_QD), size):
        queries = slice(start, start + size)
        similarity_qU = queries_QD[queries] @ documents_UD.T
        answers_qU = judged.answers.mark(similarity_qU, start)
        copies_qU = judged.copies.mark(similarity_qU, start)
        hits_qK = _first_hits(similarity_qU, answers_qU, copies_qU)
        counts_q = answers_qU.sum(1)
        table_N4[query_rows_Q[queries]] = _score_hits(hits_qK, counts_q)
    return table_N4


def _judge(ids_NR: npt.NDArray[np.float64]) -> _Judgements:
    """Return which documents answer which queries. `ids_NR`: as of `rank_documents`."""
    queries, query_rows, query_of_sample = np.unique(
        ids_NR[:, 0], return_index=True, return_inverse=True
    )
    ids_M = ids_NR[:, 1:].reshape(-1)
    present_rows = np.flatnonzero(ids_M >= 0)
    documents, first_places = np.unique(ids_M[present_rows], return_index=True)
    answer_of_sample = np.searchsorted(documents, ids_NR[:, 1])
    # A pair as one number, by which equal pairs are found.
    numbers = query_of_sample.reshape(-1) * len(documents) + answer_of_sample
    distinct = np.unique(numbers)
    answers = _Pairs(distinct // len(documents), distinct % len(documents))
    has_copy = np.isin(queries, documents)
    copied = np.flatnonzero(has_copy)
    copies = _Pairs(copied, np.searchsorted(documents, queries[copied]))
    return _Judgements(query_rows, present_rows[first_places], answers, copies)


def _first_hits(
    similarity_qU: torch.Tensor, answers_qU: torch.Tensor, copies_qU: torch.Tensor
) -> torch.Tensor:
    """Return bool[q, K]: whether the document at each of the first K ranks answers.

    Args:
        similarity_qU: of queries and documents.
        answers_qU: bool, whether a document answers.
        copies_qU: bool, whether a document is the query itself.
    """
    ranks = min(MOST_RANKS, similarity_qU.shape[1])
    below = torch.full_like(similarity_qU, -torch.inf)
    # The next smaller number, which is behind those that are equal and before all others.
    lowered_qU = torch.nextafter(similarity_qU, below)
    sorted_by_qU = torch.where(answers_qU, lowered_qU, similarity_qU)
    is_left_out_qU = copies_qU & ~answers_qU
    sorted_by_qU = sorted_by_qU.masked_fill(is_left_out_qU, -torch.inf)
    best = sorted_by_qU.topk(ranks, 1)
    return answers_qU.gather(1, best.indices)


def _score_hits(hits_qK: torch.Tensor, counts_q: torch.Tensor) -> torch.Tensor:
    """Return the numbers `RANKED` of queries, fp64[q, 4].

    The gain of a document that answers is 1, discounted by log2(1 + rank) (Järvelin & Kekäläinen
    2002), and divided by that of the best order.

    Args:
        hits_qK: bool, whether the document at each of the first K ranks answers.
        counts_q: how many documents answer.
    """
    hits_qK = hits_qK.double()
    columns = [torch.ones_like(hits_qK[:, 0])]
    for cutoff in RECALL_AT:
        found_q = hits_qK[:, :cutoff].sum(1)
        columns.append(found_q / counts_q)
    ranks_K = torch.arange(1, NDCG_AT + 1, device=hits_qK.device, dtype=torch.float64)
    discounts_K = 1 / torch.log2(1 + ranks_K)
    looked_at_qK = hits_qK[:, :NDCG_AT]
    gains_qK = looked_at_qK * discounts_K[: looked_at_qK.shape[1]]
    best_K = discounts_K.cumsum(0)
    places_q = counts_q.clamp(max=NDCG_AT) - 1
    columns.append(gains_qK.sum(1) / best_K[places_q])
    return torch.stack(columns, 1)
