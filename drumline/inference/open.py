"""A trained model in memory, ready to generate: from a run, an exported folder, the hub or a package."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drumline.core.model import ModelConfig
from drumline.core.plan import Plan
from drumline.dist.seeds import derive
from drumline.errors import EnvironmentFault, ModelError
from drumline.foreign import judged, read_object
from drumline.models.build import build_model
from drumline.models.classes import auto_class
from drumline.models.export import read_checkpoint, read_run
from drumline.models.files import quiet
from drumline.models.load import from_hub, hub_options, load_config, load_tokenizer
from drumline.models.package import resolve
from drumline.report.bars import OnProgress

ADAPTER = "adapter_config.json"


@dataclass(frozen=True)
class LoadedModel:
    """`model`: whole, on one device, in eval mode. `origin`: what it is, in words."""

    model: Any
    tokenizer: Any
    origin: str


def open_model(place: str, on_progress: OnProgress, trust: bool = False) -> LoadedModel:
    """`place`: a run folder (its export, else its best or newest checkpoint), a folder that transformers or PEFT reads, a hub id, or
    `package:NAME`. Raises ModelError for what does not write text, CheckpointError for a run that has saved nothing."""
    quiet()
    folder = Path(place).expanduser()
    if (folder / "plan.json").exists():
        plan = Plan.load(folder / "plan.json", trust)
        if not plan.config.algorithm.writes:
            raise ModelError(f"a model of algorithm {plan.config.algorithm.kind} gives numbers, not text", where=place)
        exported = exported_folder(folder)
        if exported is None:
            model, tokenizer, checkpoint = read_run(folder, trust=trust)
            return LoadedModel(_placed(model), tokenizer, f"{checkpoint}, which is not exported")
        return _from_folder(str(exported), trust)
    if (folder / ADAPTER).exists() and not (folder / "config.json").exists():
        return _from_folder(str(folder), trust)
    source = resolve(ModelConfig(id=place), on_progress)
    assert source is not None, "an id leads somewhere"
    return _from_folder(source, trust)


def exported_folder(run: Path) -> Path | None:
    """RUN/export, where there is a model or an adapter in it."""
    folder = run / "export"
    return folder if any((folder / name).exists() for name in ("config.json", ADAPTER)) else None


def open_plan(plan: Plan, checkpoint: Path | None) -> LoadedModel:
    """The plan's model with the weights of a checkpoint of any run; None: as training starts from it."""
    if checkpoint is not None:
        model, tokenizer = read_checkpoint(plan, checkpoint)
        return LoadedModel(_placed(model), tokenizer, str(checkpoint))
    config = plan.config.model
    model = build_model(plan.model_path, config, seed=derive(plan.config.run.seed, "weights"))
    return LoadedModel(_placed(model), load_tokenizer(plan.model_path, config), str(plan.model_path))


def _from_folder(source: str, trust_remote_code: bool) -> LoadedModel:
    model = ModelConfig(id=source, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(source, model)
    adapter = Path(source) / ADAPTER
    if adapter.exists() and not (Path(source) / "config.json").exists():
        base = read_object(adapter, ModelError).get("base_model_name_or_path")
        if not isinstance(base, str):
            raise ModelError("names no base_model_name_or_path", where=str(adapter), fix="put it in: a folder or hub id")
        return LoadedModel(_placed(_with_adapter(base, source, model)), tokenizer, f"{source} over {base}")
    return LoadedModel(_placed(_read(source, model)), tokenizer, source)


def _read(source: str, model: ModelConfig) -> Any:
    import torch

    config = load_config(source, model)
    architectures = getattr(config, "architectures", None) or [""]
    if any(name.endswith("Classification") for name in architectures):
        raise ModelError(f"{architectures[0]} gives numbers, not text", where=source, fix="name a language model")
    return from_hub(source, model, lambda: auto_class(config).from_pretrained(source, dtype=torch.float32, **hub_options(source, model)))


def _with_adapter(base: str, source: str, model: ModelConfig) -> Any:
    try:
        from peft import PeftModel
    except ImportError as error:
        raise EnvironmentFault("the package peft is missing", where=source, fix="pip install peft") from error
    whole = _read(base, model)
    with judged("cannot be laid over its base", source, ModelError, "give a folder that PEFT wrote"):
        return PeftModel.from_pretrained(whole, source).merge_and_unload()


def _placed(model: Any) -> Any:
    """On the GPU in bf16 where there is one, else in fp32 on the CPU."""
    import torch

    if torch.cuda.is_available():
        model = model.to("cuda", torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32)
    return model.eval().requires_grad_(False)
