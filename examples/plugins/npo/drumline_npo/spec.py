"""The section `algorithm` of negative preference optimisation. No torch at the top: planning imports this."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from drumline.algorithms.specs import JudgedSpec
from drumline.config.algorithm import ReferencedSpec
from drumline.config.model import Model
from drumline.config.section import Above0, Weight


class NPOConfig(JudgedSpec, ReferencedSpec):
    """Negative preference optimisation (Zhang et al. 2024): forget the answers with label false, keep those with label true."""

    kind: Literal["npo"] = "npo"
    # What `init` proposes, and what an evaluation measures.
    rate: ClassVar[float] = 1e-5
    metrics: ClassVar[tuple[str, ...]] = ("loss", "forgotten", "kept")

    beta: Above0 = Field(
        0.1, description="How early the loss of an answer that is forgotten levels off."
    )
    keep_weight: Weight = Field(1.0, description="Weight of the likelihood of the answers to keep.")
    # The two keys that `ReferencedSpec` reads: it says which models a plan needs, and where batches
    # get the reference's log-probabilities from.
    reference: Literal["auto", "precomputed", "live", "adapter"] = Field(
        "auto", description="Log-probs of the reference, as in dpo."
    )
    reference_model: Model | None = Field(
        None, description="Another reference than the model that training starts from."
    )

    def check_rows(self, train: Any) -> None:
        """Accept all rows. `JudgedSpec` wants both labels; here answers to forget are enough."""

    def build(self) -> Any:
        from drumline_npo.objective import NPO

        return NPO(chunk=self.loss_chunk, beta=self.beta, keep_weight=self.keep_weight)
