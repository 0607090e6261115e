"""Classification: one class for each text or image.

B samples, L of them with a label, C classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy, one_hot

from drumline.algorithms.base import Algorithm, LossOut
from drumline.algorithms.classify.spec import TOP, ClassifyConfig
from drumline.data.batches import IGNORE


class Classify(Algorithm):
    """Cross-entropy summed over the samples.

    With label smoothing s the target is 1 − s on the class and s spread evenly over all classes
    (Szegedy et al. 2016).

    Held-out metrics are top-1 accuracy, top-5 too if there are at least 10 classes, and macro F1.
    The latter is the plain mean of 2·tp / (labelled + predicted) over the classes that occur among
    labels or predictions, as scikit-learn has it. It is computed from sums over samples, so it is
    that of the whole set on any number of ranks.
    """

    def __init__(self, spec: ClassifyConfig) -> None:
        self.label_smoothing = spec.label_smoothing

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the loss with label smoothing, and the numbers of labelled and of correct samples."""
        logits_BC, loss_sum = self._loss(outputs, batch, self.label_smoothing)
        labelled_B = batch.labels_B != IGNORE
        chosen_B = logits_BC.argmax(1)
        correct_B = (chosen_B == batch.labels_B) & labelled_B
        sums = {"samples": labelled_B.sum(), "correct": correct_B.sum()}
        return LossOut(loss_sum, sums)

    def eval_objective(self, outputs: Any, batch: Any) -> LossOut:
        """Return the loss without label smoothing, and the sums of the held-out metrics."""
        logits_BC, loss_sum = self._loss(outputs, batch, 0.0)
        labelled_B = batch.labels_B != IGNORE
        logits_LC = logits_BC[labelled_B]
        labels_L = batch.labels_B[labelled_B]
        chosen_L = logits_LC.argmax(1)
        correct_L = chosen_L == labels_L
        sums = {"samples": labelled_B.sum(), "correct": correct_L.sum()}
        classes = logits_LC.shape[1]
        if classes >= 2 * TOP:
            top_LK = logits_LC.topk(TOP, 1).indices
            is_label_LK = top_LK == labels_L[:, None]
            sums["top"] = is_label_LK.sum()
        labels_LC = one_hot(labels_L, classes)
        chosen_LC = one_hot(chosen_L, classes)
        true_positives_LC = labels_LC & chosen_LC
        sums |= _class_sums("tp", true_positives_LC)
        sums |= _class_sums("labelled", labels_LC)
        sums |= _class_sums("chosen", chosen_LC)
        return LossOut(loss_sum, sums)

    def _loss(
        self, outputs: Any, batch: Any, smoothing: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits fp32[B, C], and the loss summed over the samples with a label."""
        logits_BC = outputs.class_logits().float()
        loss_sum = cross_entropy(
            logits_BC,
            batch.labels_B,
            ignore_index=IGNORE,
            reduction="sum",
            label_smoothing=smoothing,
        )
        return logits_BC, loss_sum

    def metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the loss, the accuracies and macro F1 of the whole held-out set."""
        samples = max(1.0, sums["samples"])
        metrics = {
            "loss": sums["loss"] / samples,
            "accuracy": sums["correct"] / samples,
        }
        if "top" in sums:
            metrics[f"top{TOP}_accuracy"] = sums["top"] / samples
        metrics["macro_f1"] = _macro_f1(sums)
        return metrics

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        """Return the accuracy of the global batch."""
        samples = max(1.0, sums["samples"])
        return {"accuracy": sums["correct"] / samples}


def _class_sums(name: str, is_class_LC: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return NAME.CLASS → number of samples. `is_class_LC`: 1 or 0 for each sample and class."""
    sums = {}
    for index, count in enumerate(is_class_LC.sum(0).unbind()):
        sums[f"{name}.{index}"] = count
    return sums


def _macro_f1(sums: dict[str, float]) -> float:
    """Return the mean F1 of the classes that occur among labels or predictions; 0 if none does."""
    classes = sum(name.startswith("tp.") for name in sums)
    scores = []
    for index in range(classes):
        occurrences = sums[f"labelled.{index}"] + sums[f"chosen.{index}"]
        if occurrences:
            true_positives = sums[f"tp.{index}"]
            scores.append(2 * true_positives / occurrences)
    return sum(scores) / max(1, len(scores))
