"""The strategy of training arguments: distributed_strategy, fsdp, fsdp_config, deepspeed, zero_stage, ddp_… and degrees."""

from __future__ import annotations

from dataclasses import replace

from drumline.compat import accelerate as acc
from drumline.compat.deepspeed import STAGES, deepspeed_config, found, load_file, own_deepspeed_file
from drumline.compat.rules import flag, name_list, number, one_of, whole
from drumline.compat.sheet import Old, Sheet, contradiction, pop, refuse

SHARDING = [name for name in acc.SHARDING if not name.isdigit()]
STRATEGIES = {
    **dict.fromkeys(("ddp", "distributed_data_parallel", "data_parallel", "multi_gpu", "torch_ddp"), "ddp"),
    **dict.fromkeys(("fsdp", "fsdp2", "fully_sharded_data_parallel"), "fsdp2"),
    **dict.fromkeys(("deepspeed", "zero"), "deepspeed"),
    **{f"{before}{n}": f"zero{n}" for n in (1, 2, 3) for before in ("zero", "zero_", "zero-", "deepspeed_zero", "deepspeed_zero_")},
    **dict.fromkeys(("single", "none", "no", "single_gpu"), "single"),
    **dict.fromkeys(("tp", "tensor_parallel"), "tp"),
    **dict.fromkeys(("pp", "pipeline", "pipeline_parallel"), "pp"),
    **dict.fromkeys(("cp", "context_parallel", "sequence_parallel"), "cp"),
    **{name: name for name in ("auto", "dp", "model_parallel", "local_sgd", "diloco")},
}


def choose(sheet: Sheet) -> None:
    """The strategy by distributed_strategy, fsdp, fsdp_config, deepspeed, zero_stage and ddp_…, which must agree."""
    old = pop(sheet, "distributed_strategy", "fsdp", "fsdp_config", "fsdp_layer", "deepspeed", "zero_stage", "tp", "pp", "cp")
    named = old.pop("distributed_strategy", None)
    old = {name: each for name, each in old.items() if _is_on(sheet, each)}
    kind = one_of(STRATEGIES, {"horovod": "use ddp"})(named) if named else None
    groups = (
        (_fsdp_parts(old), kind in (None, "fsdp2"), _fsdp),
        ([old[name] for name in ("deepspeed", "zero_stage") if name in old], kind in (None, "deepspeed", "zero1", "zero2", "zero3"), _zero),
    )
    for parts, chosen, translate in groups:
        if parts and chosen:
            translate(sheet, old)
        elif named is not None:
            # A section for another strategy is a guide's way to show all of them; one word is a contradiction.
            for each in parts:
                if not isinstance(each.value, dict):
                    raise contradiction(each, named)
                sheet.note(each, f"without effect: {named.where} is {named.value}")
    if named is not None and kind not in (None, "auto") and (kind != "deepspeed" or sheet.get("strategy.kind") is None):
        sheet.put("strategy.kind", "zero2" if kind == "deepspeed" else kind, named)
    for name in ("tp", "pp", "cp"):
        if name in old and whole(old[name]) > 1:
            if (kind := sheet.get("strategy.kind")) is None:
                sheet.put("strategy.kind", "ddp", old[name])
            sheet.put("strategy.degree" if kind == name else f"strategy.{name}", whole(old[name]), old[name])
    _ddp(sheet)


def _is_on(sheet: Sheet, old: Old) -> bool:
    """False for a section with `enabled: false`, as guides write it."""
    on = old.by_key().get("enabled") if isinstance(old.value, dict) else None
    if on is None or flag(on):
        return True
    sheet.note(old, "without effect: enabled is false")
    return False


def _fsdp_parts(old: dict[str, Old]) -> list[Old]:
    """The keys that request FSDP: `fsdp: ""`, `fsdp: false` and a bare fsdp_config beside other strategies do not."""
    on = old.get("fsdp")
    if on is not None and (on.value in (False, "", []) or str(on.value).lower() in ("false", "none", "no")):
        return []
    return [old[name] for name in ("fsdp", "fsdp_config", "fsdp_layer") if name in old]


def _fsdp(sheet: Sheet, old: dict[str, Old]) -> None:
    """fsdp: "full_shard auto_wrap offload", with fsdp_config as keys and values or the path of a JSON."""
    olds: list[Old] = []
    words = old.get("fsdp")
    if words is not None and isinstance(words.value, str | list):
        for word in name_list(words) if isinstance(words.value, list) else words.value.replace(",", " ").split():
            low = word.lower()
            if low in acc.SHARDING:
                olds.append(replace(words, key="sharding_strategy", value=low))
            elif low == "offload":
                olds.append(replace(words, key="offload_params", value=True))
            elif low not in ("auto_wrap", "true"):
                raise refuse(words, f"no {word!r} here", f"there are {', '.join(SHARDING)}, offload, auto_wrap")
    for name in ("fsdp", "fsdp_config"):
        section = old.get(name)
        if section is not None and isinstance(section.value, dict):
            olds += [each for each in section.inside() if each.key != "enabled"]
        elif name == "fsdp_config" and section is not None and isinstance(section.value, str):
            olds += load_file(found(sheet.base, section.value), section)
    if "fsdp_layer" in old:
        olds.append(replace(old["fsdp_layer"], key="transformer_layer_cls_to_wrap"))
    acc.read_fsdp(sheet, _fsdp_parts(old)[0], olds)


def _zero(sheet: Sheet, old: dict[str, Old]) -> None:
    """deepspeed: the path of a JSON, the JSON itself, or a stage and switches as accelerate has them."""
    section = old.get("deepspeed")
    if section is not None and isinstance(section.value, dict) and section.value:
        inner = section.by_key()
        file = inner.get("config") or inner.get("config_file") or inner.get("config_path")
        if file is not None and isinstance(file.value, str):
            own_deepspeed_file(sheet, file)
        elif "zero_optimization" in inner or not inner.keys() & {"stage", "zero_stage", "enabled", *acc.DEEPSPEED}:
            deepspeed_config(sheet, list(inner.values()))
        else:
            olds = [each for each in inner.values() if each.key != "enabled"]
            names = {"stage": "zero_stage"}
            acc.read_deepspeed(sheet, section, [replace(each, key=names.get(each.key, each.key)) for each in olds])
    elif section is not None and isinstance(section.value, str) and section.value:
        own_deepspeed_file(sheet, section)
    if (stage := old.get("zero_stage")) is not None:
        sheet.put("strategy.kind", one_of(STAGES)(stage), stage)


def _ddp(sheet: Sheet) -> None:
    """Options of DDP, which the argument names have on any strategy."""
    for dotted, old in pop(sheet, *(f"ddp.{name}" for name in DDP)).items():
        name = dotted.removeprefix("ddp.")
        kind = sheet.get("strategy.kind")
        if kind is None:
            sheet.put("strategy.kind", "ddp", old)
        elif kind != "ddp":
            sheet.note(old, f"without effect: the strategy is {kind}")
            continue
        sheet.put(f"strategy.{name}", number(old) if name == "bucket_cap_mb" else flag(old), old)


DDP = ("bucket_cap_mb", "find_unused_parameters", "broadcast_buffers", "static_graph", "gradient_as_bucket_view")
