"""Recall and nDCG of a held-out set, each query against the documents of the whole set.

Equal texts count once, as one query or one document. A document answers a query if some sample has
the two as its query and its positive. A query's own text is left out of its ranking, unless it is
an answer.

N samples of R texts with D numbers each: the query, its positive, and R − 2 negatives.
M = N · (R − 1) texts of documents. Q distinct queries, q of them at a time. U distinct documents.
K ranks of each query.
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
# Ranks of each query that are computed, if there are so many documents.
MOST_RANKS = max(*RECALL_AT, NDCG_AT)
# Names of the columns of `rank_documents`.
RANKED = ("queries", "recall@1", "recall@10", "ndcg@10")


class _Pairs(NamedTuple):
    """Pairs of a query and a document.

    Attributes:
        queries: the number of each pair's query among the distinct queries, in ascending order.
        documents: the number of each pair's document among the distinct documents.
    """

    queries: Numbers
    documents: Numbers

    def mask(self, similarity_qU: torch.Tensor, first_query: int) -> torch.Tensor:
        """Return bool[q, U], True at each pair.

        Args:
            similarity_qU: of some consecutive queries and all documents.
            first_query: the number of the first of these queries.
        """
        next_query = first_query + len(similarity_qU)
        start, stop = np.searchsorted(self.queries, (first_query, next_query))
        rows = torch.from_numpy(self.queries[start:stop] - first_query)
        columns = torch.from_numpy(self.documents[start:stop])

        mask_qU = torch.zeros_like(similarity_qU, dtype=torch.bool)
        device = similarity_qU.device
        mask_qU[rows.to(device), columns.to(device)] = True
        return mask_qU


class _Judgements(NamedTuple):
    """Which documents answer which queries.

    Attributes:
        sample_of_query: int64[Q], the first sample that has each distinct query.
        text_of_document: int64[U], the first of the M texts that is each distinct document.
        answers: pairs of a query and a document that answers it.
        copies: pairs of a query and a document with the same text.
    """

    sample_of_query: Numbers
    text_of_document: Numbers
    answers: _Pairs
    copies: _Pairs


def rank_documents(compared_NRD: torch.Tensor, ids_NR: torch.Tensor) -> torch.Tensor:
    """Return the numbers `RANKED` of each sample, fp64[N, 4].

    The first sample with a query has the numbers of this query, and a 1 as the first of them. The
    other samples with the same query have zeros.

    Among documents that are equally similar to a query, those that answer it come last, so a model
    that embeds all texts alike finds nothing.

    Args:
        compared_NRD: embeddings whose dot product is the similarity.
        ids_NR: a number of each text, below 0 for a text that a sample lacks.
    """
    device = compared_NRD.device
    judged = _match_queries_to_answers(ids_NR.cpu().numpy())

    samples_Q = torch.from_numpy(judged.sample_of_query).to(device)
    queries_QD = compared_NRD[samples_Q, 0]
    texts_MD = compared_NRD[:, 1:].flatten(0, 1)
    texts_U = torch.from_numpy(judged.text_of_document).to(device)
    documents_UD = texts_MD[texts_U]

    table_N4 = torch.zeros(len(ids_NR), len(RANKED), dtype=torch.float64, device=device)
    queries_at_once = max(1, MOST_ENTRIES // len(documents_UD))
    for start in range(0, len(queries_QD), queries_at_once):
        stop = start + queries_at_once
        similarity_qU = queries_QD[start:stop] @ documents_UD.T
        answers_qU = judged.answers.mask(similarity_qU, start)
        copies_qU = judged.copies.mask(similarity_qU, start)

        hits_qK = _find_hits(similarity_qU, answers_qU, copies_qU)
        answer_counts_q = answers_qU.sum(1)
        samples_q = samples_Q[start:stop]
        table_N4[samples_q] = _score_hits(hits_qK, answer_counts_q)
    return table_N4


def _match_queries_to_answers(ids_NR: npt.NDArray[np.float64]) -> _Judgements:
    """Return which documents answer which queries. `ids_NR`: as of `rank_documents`."""
    query_ids_Q, sample_of_query_Q, query_of_sample_N = np.unique(
        ids_NR[:, 0], return_index=True, return_inverse=True
    )

    text_ids_M = ids_NR[:, 1:].reshape(-1)
    present_texts = np.flatnonzero(text_ids_M >= 0)
    document_ids_U, first_present = np.unique(text_ids_M[present_texts], return_index=True)
    text_of_document_U = present_texts[first_present]

    # Each sample is a pair of a query and its answer. Several samples may be the same pair.
    answer_of_sample_N = np.searchsorted(document_ids_U, ids_NR[:, 1])
    pairs_N2 = np.stack([query_of_sample_N, answer_of_sample_N], axis=1)
    distinct_pairs = np.unique(pairs_N2, axis=0)
    answers = _Pairs(distinct_pairs[:, 0], distinct_pairs[:, 1])

    has_copy_Q = np.isin(query_ids_Q, document_ids_U)
    copied_queries = np.flatnonzero(has_copy_Q)
    copied_documents = np.searchsorted(document_ids_U, query_ids_Q[copied_queries])
    copies = _Pairs(copied_queries, copied_documents)
    return _Judgements(sample_of_query_Q, text_of_document_U, answers, copies)


def _find_hits(
    similarity_qU: torch.Tensor, answers_qU: torch.Tensor, copies_qU: torch.Tensor
) -> torch.Tensor:
    """Return bool[q, K]: whether the document at each of the first K ranks answers.

    Args:
        similarity_qU: of queries and documents.
        answers_qU: bool, whether a document answers.
        copies_qU: bool, whether a document is the query itself.
    """
    # An answer gets the next smaller number. It then comes after the documents that were equal to
    # it, and still before those that were less similar.
    lowest_qU = torch.full_like(similarity_qU, -torch.inf)
    lowered_qU = torch.nextafter(similarity_qU, lowest_qU)
    sort_keys_qU = torch.where(answers_qU, lowered_qU, similarity_qU)

    is_left_out_qU = copies_qU & ~answers_qU
    sort_keys_qU = sort_keys_qU.masked_fill(is_left_out_qU, -torch.inf)

    documents = similarity_qU.shape[1]
    ranks = min(MOST_RANKS, documents)
    best = sort_keys_qU.topk(ranks, 1)
    return answers_qU.gather(1, best.indices)


def _score_hits(hits_qK: torch.Tensor, answer_counts_q: torch.Tensor) -> torch.Tensor:
    """Return the numbers `RANKED` of queries, fp64[q, 4].

    Args:
        hits_qK: bool, whether the document at each of the first K ranks answers.
        answer_counts_q: how many documents answer, at least 1.
    """
    hits_qK = hits_qK.double()
    counted_q = torch.ones_like(hits_qK[:, 0])
    columns = [counted_q]
    for cutoff in RECALL_AT:
        found_q = hits_qK[:, :cutoff].sum(1)
        columns.append(found_q / answer_counts_q)
    columns.append(_ndcg(hits_qK[:, :NDCG_AT], answer_counts_q))
    return torch.stack(columns, 1)


def _ndcg(hits_qK: torch.Tensor, answer_counts_q: torch.Tensor) -> torch.Tensor:
    """Return nDCG@NDCG_AT of queries, fp64[q] (Järvelin & Kekäläinen 2002).

    A document that answers has a gain of 1 / log2(1 + rank). The sum of the gains is divided by
    that of the best order, in which all answers come first.

    Args:
        hits_qK: fp64, 1 if the document at a rank answers, otherwise 0. At most NDCG_AT ranks.
        answer_counts_q: how many documents answer, at least 1.
    """
    ranks = torch.arange(1, NDCG_AT + 1, device=hits_qK.device, dtype=torch.float64)
    discounts = 1 / torch.log2(1 + ranks)

    ranks_with_documents = hits_qK.shape[1]
    gains_qK = hits_qK * discounts[:ranks_with_documents]
    gain_q = gains_qK.sum(1)

    # The best sum for 1, 2, … answers.
    best_gains = discounts.cumsum(0)
    answers_in_ranks_q = answer_counts_q.clamp(max=NDCG_AT)
    best_gain_q = best_gains[answers_in_ranks_q - 1]
    return gain_q / best_gain_q
