"""The rules of a model that learns from a teacher's distributions. No torch here."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.config.refusal import Refusal
from drumline.plan.rule import Case


def refusals(case: Case) -> Iterator[Refusal]:
    """Yield refusals of a teacher whose whole vocabulary is compared; none for other runs."""
    teaching = case.config.algorithm.teaching
    if teaching is None or teaching.top_k > 0 or case.facts is None:
        return
    teacher = case.facts.roles.get("teacher")
    if teaching.is_own_teacher:
        teacher = case.facts
    if teacher is None:
        return
    if teacher.changes_logits:
        yield Refusal(
            "top_k=0 × a teacher that caps or scales its logits",
            "its hidden states and its head alone would be kept, which do not give its logits",
            "use algorithm.top_k=32",
            "algorithm.top_k",
        )
    if case.mesh.tp > 1 and teacher.vocab_size != case.facts.vocab_size:
        yield Refusal(
            "top_k=0 × tp × heads with unequal rows",
            f"the teacher's head has {teacher.vocab_size} rows and the model's {case.facts.vocab_size}, so ranks would hold other tokens"
            " of the two",
            "use algorithm.top_k=32, or strategy=fsdp2",
            "algorithm.top_k",
        )
