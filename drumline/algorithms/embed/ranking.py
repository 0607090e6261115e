"""Recall and nDCG of a held-out set, each query against the documents of the whole set.

N samples of R texts with D numbers each. Q distinct queries, U distinct documents: equal texts count
once. A document answers a query if some sample has them as its query and its positive.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from drumline.algorithms.embed.contrast import MOST_ENTRIES

# k of recall@k, and of nDCG@k.
RECALL_AT = (1, 10)
NDCG_AT = 10
# Names of the columns of `rank_documents`.
RANKED = ("queries", "recall@1", "recall@10", "ndcg@10")


class _Judgements(NamedTuple):
    """Which documents answer which queries.

    Attributes:
        query_rows: int64[Q], the sample of each distinct query.
        document_rows: int64[U], the place of each distinct document among all texts of documents.
        keys: int64, query · U + document of each pair that answers, ascending.
        counts: int64[Q], how many documents answer each query.
    """

    query_rows: npt.NDArray[np.int64]
    document_rows: npt.NDArray[np.int64]
    keys: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]


def rank_documents(compared_NRD: torch.Tensor, ids_NR: torch.Tensor) -> torch.Tensor:
    """Return the numbers `RANKED` of each sample, fp64[N, 4].

    The first is 1 for the first sample with a query, and all are 0 for its other samples.

    Args:
        compared_NRD: embeddings whose dot product is the similarity.
        ids_NR: a number of each text, below 0 for a text that a sample lacks.
    """
    device = compared_NRD.device
    judged = _judge(ids_NR.cpu().numpy())
    documents_MD = compared_NRD[:, 1:].flatten(0, 1)

    def copy(array: npt.NDArray[np.int64]) -> torch.Tensor:
        """Return an array as a tensor on the device."""
        tensor = torch.from_numpy(array)
        return tensor.to(device)

    document_rows_U = copy(judged.document_rows)
    documents_UD = documents_MD[document_rows_U]
    query_rows_Q = copy(judged.query_rows)
    keys = copy(judged.keys)
    counts_Q = copy(judged.counts)
    documents = len(documents_UD)
    most = min(documents, max(*RECALL_AT, NDCG_AT))
    table_N4 = torch.zeros(len(ids_NR), len(RANKED), dtype=torch.float64, device=device)
    size = max(1, MOST_ENTRIES // documents)
    for start in range(0, len(query_rows_Q), size):
        rows_q = query_rows_Q[start : start + size]
        similarity_qU = compared_NRD[rows_q, 0] @ documents_UD.T
        top_qK = similarity_qU.topk(most, 1).indices
        queries_q1 = torch.arange(start, start + len(rows_q), device=device)[:, None]
        hits_qK = torch.isin(queries_q1 * documents + top_qK, keys)
        table_N4[rows_q] = _score_hits(hits_qK, counts_Q[start : start + size])
    return table_N4


def _judge(ids_NR: npt.NDArray[np.float64]) -> _Judgements:
    """Return which documents answer which queries. `ids_NR`: as of `rank_documents`."""
    _, query_rows, query_of_sample = np.unique(ids_NR[:, 0], return_index=True, return_inverse=True)
    ids_M = ids_NR[:, 1:].reshape(-1)
    present_rows = np.flatnonzero(ids_M >= 0)
    documents, first_places = np.unique(ids_M[present_rows], return_index=True)
    positives = np.searchsorted(documents, ids_NR[:, 1])
    keys = np.unique(query_of_sample.reshape(-1) * len(documents) + positives)
    counts = np.bincount(keys // len(documents), minlength=len(query_rows))
    return _Judgements(query_rows, present_rows[first_places], keys, counts)


def _score_hits(hits_QK: torch.Tensor, counts_Q: torch.Tensor) -> torch.Tensor:
    """Return the numbers `RANKED` of queries, fp64[Q, 4].

    The gain of a document that answers is 1, discounted by log2(1 + rank) (Järvelin & Kekäläinen
    2002), and divided by that of the best order.

    Args:
        hits_QK: bool, whether the document at each of the first K ranks answers.
        counts_Q: how many documents answer.
    """
    hits_QK = hits_QK.double()
    columns = [torch.ones_like(hits_QK[:, 0])]
    for cutoff in RECALL_AT:
        columns.append(hits_QK[:, :cutoff].sum(1) / counts_Q)
    ranks_K = torch.arange(NDCG_AT, device=hits_QK.device, dtype=torch.float64)
    discounts_K = 1 / torch.log2(ranks_K + 2)
    first_QK = hits_QK[:, :NDCG_AT]
    gain_Q = (first_QK * discounts_K[: first_QK.shape[1]]).sum(1)
    best_K = discounts_K.cumsum(0)
    best_Q = best_K[counts_Q.clamp(max=NDCG_AT) - 1]
    columns.append(gain_Q / best_Q)
    return torch.stack(columns, 1)
