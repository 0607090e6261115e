"""The losses of preference pairs, and the algorithm that they make.

Names by TRL (1.16) and LLaMA-Factory (0.9).
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

from drumline.compat.rules import (
    Rule,
    choose_by_flag,
    postpone,
    read_as_text,
    read_choice,
    read_names,
    read_number,
    set_key,
)
from drumline.compat.sheet import OldKey, Sheet, contradiction, take_waiting, translation_error
from drumline.config.algorithm import AlgorithmSpec
from drumline.config.mistakes import split_synonyms
from drumline.config.registry import find
from drumline_convert.defaults import Defaults, fill_defaults

_DPO, _KTO = find(AlgorithmSpec, "dpo"), find(AlgorithmSpec, "kto")
assert _DPO is not None and _KTO is not None
# Loss there → kind of algorithm here. All but two are losses of DPO, with the same names.
DPO_LOSSES = (*get_args(_DPO.model_fields["loss"].annotation), "sft")


LOSSES = {"simpo": "simpo", "orpo": "orpo", **dict.fromkeys(DPO_LOSSES, "dpo")}
KTO_LOSSES = {name: name for name in get_args(_KTO.model_fields["loss"].annotation)}
# The learning rate of TRL's trainers for pairs.
PAIRS_RATE = 1e-6
# The defaults of simpo in all three tools.
SIMPO: Defaults = {
    "algorithm.beta": (0.1, "beta"),
    "algorithm.gamma": (0.5, "simpo_gamma"),
}
PREFERENCES: dict[str, Rule] = split_synonyms(
    {
        "loss_type pref_loss loss_weights cpo_alpha pref_ftx": postpone(),
        "beta pref_beta": set_key("algorithm.beta", read_number),
        "label_smoothing dpo_label_smoothing": set_key("algorithm.label_smoothing", read_number),
        "simpo_gamma": set_key("algorithm.gamma", read_number),
        "f_divergence_type": set_key("algorithm.f_divergence"),
        "f_alpha_divergence_coef": set_key("algorithm.f_alpha", read_number),
        "discopop_tau": set_key("algorithm.discopop_tau", read_number),
        "precompute_ref_log_probs": set_key(
            "algorithm.reference", choose_by_flag("precomputed", "live"), skip=()
        ),
        "ref_model ref_model_name_or_path": set_key(
            "algorithm.reference_model.id", read_as_text, skip=()
        ),
    }
)


def combine_preferences(sheet: Sheet) -> None:
    """Set the algorithm by loss_type and loss_weights, or by pref_loss, and the likelihood's weight.

    The weight of the likelihood has two names. Raises ConfigError if both losses are given.
    """
    old = take_waiting(sheet, "loss_type", "pref_loss", "loss_weights", "cpo_alpha", "pref_ftx")
    kind = old.get("loss_type") or old.get("pref_loss")
    if kind is not None and "pref_loss" in old and kind is not old["pref_loss"]:
        raise contradiction(old["pref_loss"], kind)
    if kind is not None and str(kind.value) != "nll":
        _set_losses(sheet, kind, old.get("loss_weights"))
        sets_rate = {"learning_rate", "base_learning_rate"} & sheet.waiting.keys()
        if not sets_rate and sheet.get("optimizer.lr") is None:
            sheet.put("optimizer.lr", PAIRS_RATE, kind)
    for name in ("cpo_alpha", "pref_ftx"):
        if name in old and read_number(old[name]):
            sheet.put("algorithm.sft_weight", read_number(old[name]), old[name])
    algorithm = sheet.get("algorithm.kind")
    if algorithm == "kto":
        _refresh_kto_reference(sheet)
    elif algorithm == "simpo":
        defaults = dict(SIMPO)
        # LLaMA-Factory, whose keys are pref_…, adds no likelihood by default.
        if not old.keys() & {"cpo_alpha", "pref_loss", "pref_ftx"}:
            defaults["algorithm.sft_weight"] = (1.0, "cpo_alpha")
        fill_defaults(sheet, sheet.origins["algorithm", "kind"], defaults, "its")


def set_kto_loss(sheet: Sheet, old: OldKey | None) -> None:
    """Read `loss_type` of TRL's KTOTrainer, if given. Raises ConfigError for an unknown one."""
    if old is not None:
        sheet.put("algorithm.loss", read_choice(KTO_LOSSES)(old), old)


def _refresh_kto_reference(sheet: Sheet) -> None:
    """Run the reference model in each step of kto if the old file precomputes it.

    TRL precomputes the KL of pairs that it fixes beforehand. Here they change with each batch.
    """
    has_kl = sheet.get("algorithm.loss", "kto") == "kto"
    if has_kl and sheet.get("algorithm.reference") == "precomputed":
        old = sheet.origins["algorithm", "reference"]
        sheet.put("algorithm.reference", "auto", old, over="precomputed")
        sheet.note(
            old, "the KL of kto is of answers that change with each batch: algorithm.reference auto"
        )


def _set_losses(sheet: Sheet, old: OldKey, weights: OldKey | None) -> None:
    """Set the algorithm and its losses. `old` names them, `weights` has the weight of each.

    Raises ConfigError for losses of different algorithms, and for those that are not here.
    """
    names = read_names(old)
    algorithm = _algorithm_of_losses(names, old)
    values = [1.0] * len(names)
    if weights is not None:
        values = weights.value
    if not isinstance(values, list) or len(values) != len(names):
        raise translation_error(
            weights or old,
            f"{len(names)} losses and not as many weights",
            "give one weight for each",
        )
    sheet.put("algorithm.kind", algorithm, old)
    weight_by_loss = {}
    for name, value in zip(names, values, strict=True):
        weight_by_loss[name] = read_number(replace(weights or old, value=value))
    if "sft" in weight_by_loss:
        sheet.put("algorithm.sft_weight", weight_by_loss.pop("sft"), old)
    if algorithm != "dpo":
        return
    if not weight_by_loss:
        raise translation_error(
            old, "sft alone compares no answers", "use prompt and completion, without loss_type"
        )
    if list(weight_by_loss.values()) == [1.0]:
        only_loss = next(iter(weight_by_loss))
        sheet.put("algorithm.loss", only_loss, old)
    else:
        sheet.put("algorithm.loss_weights", weight_by_loss, old)


def _algorithm_of_losses(names: list[str], old: OldKey) -> str:
    """Return the kind of algorithm that has all these losses. Raises ConfigError if none has."""
    unknown = [name for name in names if name not in LOSSES]
    if unknown or not names:
        name = unknown[0] if unknown else ""
        raise translation_error(
            old, f"no loss {name!r} here", f"there are nll, {', '.join(LOSSES)}"
        )
    algorithms = {LOSSES[name] for name in names}
    if len(algorithms) > 1 or (len(names) > 1 and algorithms != {"dpo"}):
        raise translation_error(
            old, f"{', '.join(names)} are losses of different algorithms", "keep those of one"
        )
    return LOSSES[names[0]]
