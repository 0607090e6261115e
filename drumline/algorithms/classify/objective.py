"""Classification: one class for each text or image. B samples, C classes."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cross_entropy, one_hot

from drumline.algorithms.base import Algorithm, LossOut
from drumline.algorithms.classify.spec import TOP, ClassifyConfig
from drumline.data.batches import IGNORE


class Classify(Algorithm):
    """Cross-entropy summed over the samples. With smoothing s the target is 1 − s on the class and s spread evenly over all of them
    (Szegedy et al. 2016).

    Held out: top-1 accuracy (top-5 too from 10 classes on), and macro F1: the plain mean over the classes of 2·tp / (labelled + predicted),
    of those that occur among labels or predictions, as scikit-learn has it. It is made of sums over samples, so it is that of the
    whole set, on any number of ranks.
    """

    def __init__(self, spec: ClassifyConfig) -> None:
        self.label_smoothing = spec.label_smoothing

    def objective(self, outputs: Any, batch: Any) -> LossOut:
        logits_BC, loss_sum = self._loss(outputs, batch, self.label_smoothing)
        labelled_B = batch.labels_B != IGNORE
        correct_B = (logits_BC.argmax(1) == batch.labels_B) & labelled_B
        return LossOut(loss_sum, {"samples": labelled_B.sum(), "correct": correct_B.sum()})

    def eval_objective(self, outputs: Any, batch: Any) -> LossOut:
        logits_BC, loss_sum = self._loss(outputs, batch, 0.0)
        labelled_B = batch.labels_B != IGNORE
        logits_BC, labels_B = logits_BC[labelled_B], batch.labels_B[labelled_B]
        classes, chosen_B = logits_BC.shape[1], logits_BC.argmax(1)
        right_BC, chosen_BC = one_hot(labels_B, classes), one_hot(chosen_B, classes)
        sums = {"samples": labelled_B.sum(), "correct": (chosen_B == labels_B).sum()}
        if classes >= 2 * TOP:
            sums["top"] = (logits_BC.topk(TOP, 1).indices == labels_B[:, None]).sum()
        counted = {"tp": right_BC & chosen_BC, "labelled": right_BC, "chosen": chosen_BC}
        for name, which_BC in counted.items():
            sums |= {
                f"{name}.{index}": number for index, number in enumerate(which_BC.sum(0).unbind())
            }
        return LossOut(loss_sum, sums)

    def _loss(
        self, outputs: Any, batch: Any, smoothing: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
        samples = max(1.0, sums["samples"])
        metrics = {"loss": sums["loss"] / samples, "accuracy": sums["correct"] / samples}
        if "top" in sums:
            metrics[f"top{TOP}_accuracy"] = sums["top"] / samples
        classes = sum(name.startswith("tp.") for name in sums)
        sizes = {
            index: sums[f"labelled.{index}"] + sums[f"chosen.{index}"] for index in range(classes)
        }
        scores = [2 * sums[f"tp.{index}"] / size for index, size in sizes.items() if size]
        metrics["macro_f1"] = sum(scores) / max(1, len(scores))
        return metrics

    def step_metrics(self, sums: dict[str, float]) -> dict[str, float]:
        return {"accuracy": sums["correct"] / max(1.0, sums["samples"])}
