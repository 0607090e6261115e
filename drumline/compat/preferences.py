"""What compares answers: the losses of preference pairs, and the algorithm that they make. Names by TRL (1.16) and LLaMA-Factory (0.9)."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from drumline.compat.rules import Defaults, Rule, fill, flag, later, name_list, number, one_of, to
from drumline.compat.sheet import Old, Sheet, contradiction, pop, refuse
from drumline.core.algorithm import AlgorithmSpec
from drumline.core.mistakes import by_word
from drumline.core.registry import find

_DPO, _KTO = find(AlgorithmSpec, "dpo"), find(AlgorithmSpec, "kto")
assert _DPO is not None and _KTO is not None
# Loss there → kind of algorithm here. All but two are losses of DPO, with the same names.
LOSSES = {
    "simpo": "simpo",
    "orpo": "orpo",
    **dict.fromkeys((*get_args(_DPO.model_fields["loss"].annotation), "sft"), "dpo"),
}
KTO_LOSSES = {name: name for name in get_args(_KTO.model_fields["loss"].annotation)}
PAIRS_RATE = 1e-6  # what TRL's trainers for pairs take
# Of all three tools.
SIMPO: Defaults = {
    "algorithm.beta": (0.1, "beta"),
    "algorithm.gamma": (0.5, "simpo_gamma"),
}
PREFERENCES: dict[str, Rule] = by_word(
    {
        "loss_type pref_loss loss_weights cpo_alpha pref_ftx": later(),
        "beta pref_beta": to("algorithm.beta", number),
        "label_smoothing dpo_label_smoothing": to("algorithm.label_smoothing", number),
        "simpo_gamma": to("algorithm.gamma", number),
        "f_divergence_type": to("algorithm.f_divergence"),
        "f_alpha_divergence_coef": to("algorithm.f_alpha", number),
        "discopop_tau": to("algorithm.discopop_tau", number),
        "precompute_ref_log_probs": to(
            "algorithm.reference", lambda old: "precomputed" if flag(old) else "live", skip=()
        ),
        "ref_model ref_model_name_or_path": to(
            "algorithm.reference_model.id", lambda old: str(old.value), skip=()
        ),
    }
)


def preferences(sheet: Sheet) -> None:
    """The algorithm by loss_type and loss_weights, or pref_loss; and the weight of the likelihood, which has two names."""
    old = pop(sheet, "loss_type", "pref_loss", "loss_weights", "cpo_alpha", "pref_ftx")
    kind = old.get("loss_type") or old.get("pref_loss")
    if kind is not None and "pref_loss" in old and kind is not old["pref_loss"]:
        raise contradiction(old["pref_loss"], kind)
    if kind is not None and str(kind.value) != "nll":
        _losses(sheet, kind, old.get("loss_weights"))
        if (
            not {"learning_rate", "base_learning_rate"} & sheet.waiting.keys()
            and sheet.get("optimizer.lr") is None
        ):
            sheet.put("optimizer.lr", PAIRS_RATE, kind)
    for each in (old[name] for name in ("cpo_alpha", "pref_ftx") if name in old):
        if number(each):
            sheet.put("algorithm.sft_weight", number(each), each)
    if sheet.get("algorithm.kind") == "kto":
        _kto_reference(sheet)
    if sheet.get("algorithm.kind") == "simpo":
        # LLaMA-Factory adds no likelihood.
        given = old.keys() & {
            "cpo_alpha",
            "pref_loss",
            "pref_ftx",
        }
        fill(
            sheet,
            sheet.origins["algorithm", "kind"],
            SIMPO if given else {**SIMPO, "algorithm.sft_weight": (1.0, "cpo_alpha")},
            "its",
        )


def kto_loss(sheet: Sheet, old: Old | None) -> None:
    """`loss_type` of TRL's KTOTrainer. Raises ConfigError for one that is not here."""
    if old is not None:
        sheet.put("algorithm.loss", one_of(KTO_LOSSES)(old), old)


def _kto_reference(sheet: Sheet) -> None:
    """TRL precomputes the KL of pairs that it fixes beforehand; here they change with each batch, and the reference is asked anew."""
    has_kl = sheet.get("algorithm.loss", "kto") == "kto"
    if has_kl and sheet.get("algorithm.reference") == "precomputed":
        old = sheet.origins["algorithm", "reference"]
        sheet.put("algorithm.reference", "auto", old, over="precomputed")
        sheet.note(
            old, "the KL of kto is of answers that change with each batch: algorithm.reference auto"
        )


def _losses(sheet: Sheet, old: Old, weights: Old | None) -> None:
    names = name_list(old)
    unknown = next((name for name in names if name not in LOSSES), None if names else "")
    if unknown is not None:
        raise refuse(old, f"no loss {unknown!r} here", f"there are nll, {', '.join(LOSSES)}")
    algorithm = LOSSES[names[0]]
    if len({LOSSES[name] for name in names}) > 1 or (len(names) > 1 and algorithm != "dpo"):
        raise refuse(
            old, f"{', '.join(names)} are losses of different algorithms", "keep those of one"
        )
    values = [1.0] * len(names) if weights is None else weights.value
    if not isinstance(values, list) or len(values) != len(names):
        raise refuse(
            weights or old,
            f"{len(names)} losses and not as many weights",
            "give one weight for each",
        )
    sheet.put("algorithm.kind", algorithm, old)
    pairs = {
        name: number(replace(weights or old, value=value))
        for name, value in zip(names, values, strict=True)
    }
    if "sft" in pairs:
        sheet.put("algorithm.sft_weight", pairs.pop("sft"), old)
    if algorithm == "dpo" and not pairs:
        raise refuse(
            old, "sft alone compares no answers", "use prompt and completion, without loss_type"
        )
    if algorithm == "dpo" and list(pairs.values()) == [1.0]:
        sheet.put("algorithm.loss", next(iter(pairs)), old)
    elif algorithm == "dpo":
        sheet.put("algorithm.loss_weights", pairs, old)
