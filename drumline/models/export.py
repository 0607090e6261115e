"""A run's weights as a Hugging Face folder: written, then read back and compared."""

from __future__ import annotations

import contextlib
import gc
import json
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from safetensors.torch import save_file

from drumline import __version__
from drumline.checkpoint.load import check, load, newest, pointed
from drumline.checkpoint.manifest import folder_name, read_manifest
from drumline.core.config import LoRAConfig
from drumline.core.files import take_name
from drumline.core.model import Head, ModelConfig
from drumline.core.plan import Plan
from drumline.dist.seeds import derive
from drumline.errors import CheckpointError, DrumlineError, EnvironmentFault, ModelError
from drumline.foreign import read_object
from drumline.hardware.detect import free_bytes
from drumline.models import adapters
from drumline.models.build import build_model
from drumline.models.classes import LM, auto_class, is_vision_language, reads_images
from drumline.models.files import (
    OnProgress,
    beside,
    find_file,
    quiet,
    tokenizer_folder,
    weights_digest,
)
from drumline.models.freeze import freeze
from drumline.models.load import load_config
from drumline.models.rounding import (
    ROUNDED_BITS,
    largest_difference,
    product_bits_of,
    rounding_limit,
)
from drumline.models.scores import VALUE, grey_image
from drumline.models.shards import canonical_tensors
from drumline.models.small import probe
from drumline.models.templates import end_ids, special_ids
from drumline.models.tokenizer import load_tokenizer, pad_token_id
from drumline.models.vision import PROCESSOR_FILES, load_processor

Which = Literal["last", "best"] | int
PROVENANCE = "drumline.json"
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
VALUE_FILE = "value_head.safetensors"


@dataclass(frozen=True)
class ExportResult:
    """A finished export. `max_logit_difference`: between the model in memory and the folder read back, on a few tokens. `rounding`: what
    `dtype` changed, ‖a − b‖ / ‖b‖ of the same logits."""

    path: Path
    step: int
    seconds: float
    max_logit_difference: float
    dtype: str
    rounding: float


def export(
    run_dir: Path,
    to: Path,
    which: Which,
    progress: OnProgress = lambda phase, done, total: None,
    dtype: str = "auto",
    adapter: bool = False,
    trust: bool = False,
) -> ExportResult:
    """Write safetensors, config, generation config and tokenizer of a checkpoint of `run_dir` to folder `to`. `which`: the newest
    checkpoint, the best by eval.metric (the newest where none was measured), or that of a step. `dtype`: a key of DTYPES, or auto, as
    `checkpoint.export_dtype` of the run says. The adapters of a LoRA run are merged; `adapter`: only they are written, as PEFT's files.
    An older export in `to` is replaced. Raises CheckpointError, ModelError, EnvironmentFault, and DrumlineError where the folder does not
    read back as the same model; then `to` is as it was."""
    began = time.time()
    if dtype not in ("auto", *DTYPES):
        raise EnvironmentFault(
            f"no dtype {dtype!r}", where="--dtype", fix=f"one of auto, {', '.join(DTYPES)}"
        )
    plan = plan_of(run_dir, trust)
    base = _base_of(plan) if adapter else None
    checkpoint = _choose(run_dir / "checkpoints", which)
    _require_free(to)
    progress("export", 0, 4)
    # Attention as a reader of the folder gets it: that of the run may need another device, and rounds differently.
    source = plan.config.model.model_copy(update={"attention": "auto"})
    model = _filled(plan, source, checkpoint, merged=not adapter)
    value = {
        name: tensor.detach().contiguous()
        for name, tensor in model.state_dict().items()
        if name.startswith(f"{VALUE}.")
    }
    if value:  # it is no part of the language model
        delattr(model, VALUE)
    dtype = _dtype(dtype, plan, adapter)
    trainable, rounding = _round(model, dtype, plan, checkpoint)
    step = check(checkpoint, verify=False, alone=True).step
    progress("export", 1, 4)
    with beside(
        to, "cannot write", to, "choose a folder on a disk with space, or one that is yours"
    ) as temporary:
        _require_space(to.parent, trainable)
        _save_reader(plan, source, model, temporary)
        if base is not None:
            adapters.save_adapter(model, temporary, _known_as(source, base), source.revision)
        else:
            model.save_pretrained(temporary)
        if value:
            save_file(value, temporary / VALUE_FILE)
        origin = {
            "drumline": __version__,
            "run": str(run_dir),
            "checkpoint": checkpoint.name,
            "step": step,
            "dtype": dtype,
        }
        origin |= {"torch": torch.__version__, "transformers": transformers.__version__}
        # Which PEFT's files have no place for.
        origin |= {"labels": [*plan.labels]} if plan.labels else {}
        if source.may_grow and not plan.config.images_alone:
            # A reader of an adapter gives its base as many.
            origin["rows"] = model.get_input_embeddings().weight.shape[0]
        (temporary / PROVENANCE).write_text(json.dumps(origin, indent=2) + "\n")
        progress("export", 2, 4)
        expected = _logits(model.float(), plan)
        del model, trainable  # so that the host has only one of the two models in memory
        gc.collect()
        difference = _require_read_back(
            _read_back(temporary, base, plan, source), expected, plan, temporary
        )
        progress("export", 3, 4)
        _share_alike(temporary)
        take_name(temporary, to, temporary.with_name(f"{temporary.name}-old"))
    progress("export", 4, 4)
    return ExportResult(to, step, time.time() - began, difference, dtype, rounding)


def _dtype(wanted: str, plan: Plan, adapter: bool) -> str:
    """A key of DTYPES. Weights that were drawn are exported as they were trained; files of another type, or of none, count as fp32."""
    wanted = plan.config.checkpoint.export_dtype if wanted == "auto" else wanted
    if wanted != "auto":
        return wanted
    if adapter:
        return "fp32"
    if plan.model_path is None or plan.config.model.init == "random":
        return plan.config.precision.master
    config = load_config(plan.model_path, plan.config.model)
    loaded = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    return {f"torch.{name}": key for key, name in DTYPES.items()}.get(str(loaded), "fp32")


def _round(model: Any, dtype: str, plan: Plan, checkpoint: Path) -> tuple[list[Any], float]:
    """Round the trainable parameters to `dtype`, and return them with what that changed (see ExportResult).

    How far a type of 8 or 11 bits moves the logits is the model's own matter, and
    `ExportResult.rounding` says it. Refused is what these bits do not explain: weights beyond the
    range of the type, which become infinite or zero. The limit is what moving each weight within
    the bits that the type lacks does to the same logits. Raises DrumlineError beyond it.
    """
    # Parameters only: rounded rotary frequencies, which no file holds, would make another model.
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    narrow = getattr(torch, DTYPES[dtype])
    if dtype not in ROUNDED_BITS:
        for parameter in trainable:
            parameter.data = parameter.data.to(narrow)
        return trainable, 0.0
    exact = _logits(model, plan)
    bits = ROUNDED_BITS[dtype]
    limit = rounding_limit(lambda: _logits(model, plan), exact, trainable, lambda _: bits)
    for parameter in trainable:
        parameter.data = parameter.data.to(narrow)
    kept = [parameter.data for parameter in trainable]
    rounded = _logits(model.float(), plan)
    for parameter, data in zip(trainable, kept, strict=True):
        parameter.data = data
    difference = largest_difference(rounded, exact)
    if not difference <= limit:
        what = f"{dtype} does not hold its weights: logits differ by {difference:g}"
        what += f", where rounding alone gives {limit:g} at most"
        fix = "drumline export --dtype fp32, or checkpoint.export_dtype: fp32"
        raise DrumlineError(what, where=str(checkpoint), fix=fix)
    size = float(torch.linalg.vector_norm(exact))
    change = float(torch.linalg.vector_norm(rounded - exact))
    return trainable, change / max(size, torch.finfo(exact.dtype).tiny)


def exported(run_dir: Path, adapter: bool, progress: OnProgress, trust: bool = False) -> Path:
    """The folder that `export` writes of a run: RUN/export where that has this form and the checkpoint that the run exports, else a new one
    beside it. Raises what `export` raises."""
    plan, root = plan_of(run_dir, trust), run_dir / "checkpoints"
    which: Which = "last" if plan.config.checkpoint.export == "last" else "best"
    wanted = (pointed(root, "best") if which == "best" else None) or pointed(root, "latest")
    for name in ("export", "adapter" if adapter else "merged"):
        folder = run_dir / name
        if (folder / (adapters.CONFIG if adapter else "config.json")).exists() and (
            folder / PROVENANCE
        ).exists():
            found = read_object(folder / PROVENANCE, ModelError, f"remove {folder}").get(
                "checkpoint"
            )
            if (
                wanted is None or found == wanted.name
            ):  # where no checkpoint was kept, the folder is all there is
                return folder
    to = run_dir / ("export" if not (run_dir / "export").exists() else name)
    return export(run_dir, to, which, progress, adapter=adapter, trust=trust).path


def read_run(run_dir: Path, trust: bool = False) -> tuple[Any, Any, Path]:
    """(model in eval mode, fp32, adapters merged; its tokenizer; its best checkpoint) of a run: what `export` would write, in memory.
    Raises CheckpointError if the run has no whole checkpoint."""
    checkpoint = _choose(run_dir / "checkpoints", "best")
    return *read_checkpoint(plan_of(run_dir, trust), checkpoint), checkpoint


def read_checkpoint(plan: Plan, checkpoint: Path) -> tuple[Any, Any]:
    """(model, tokenizer) as `read_run` gives them, of one checkpoint."""
    source = plan.config.model.model_copy(update={"attention": "auto"})
    return _filled(plan, source, checkpoint, merged=True), load_tokenizer(plan.model_path, source)


def _filled(plan: Plan, model: ModelConfig, checkpoint: Path, merged: bool) -> Any:
    """The model with a checkpoint's weights in eval mode, adapters injected or merged. The generation config is the original model's."""
    from transformers import GenerationConfig

    path, adapter, seed, head = (
        plan.model_path,
        plan.config.adapter,
        plan.config.run.seed,
        plan.config.head,
    )
    if plan.base is not None and weights_digest(path) not in (None, plan.base):
        what = "its frozen weights are not those that the run was trained on top of"
        raise ModelError(what, where=f"model {path}", fix="bring the old ones back")
    # A checkpoint has the trainable weights only: what is frozen is read from the model's files, or drawn again.
    kept = frozenset(
        name.removeprefix("model.")
        for name in read_manifest(checkpoint).tensors
        if name.startswith("model.")
    )
    built = build_model(
        path, model, derive(seed, "weights"), head=head, labels=plan.labels, checkpoint_keys=kept
    )
    freeze(built, model.freeze)
    if isinstance(adapter, LoRAConfig):
        adapters.inject(built, adapter, seed)
    load(checkpoint, canonical_tensors(built), alone=True)
    built.config.use_cache = True
    if head in LM and path is not None:
        # A model without one keeps that which transformers makes from the config.
        with contextlib.suppress(OSError):
            built.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    if isinstance(adapter, LoRAConfig):
        adapters.require_trained(built)
        if merged:
            _merge(built, plan, checkpoint)
    if merged:
        built.requires_grad_(True)
    return built.eval()


def _merge(model: Any, plan: Plan, checkpoint: Path) -> None:
    """Merge the adapters of a model in eval mode, fp32. Raises DrumlineError where that makes another model.

    `adapters.merge` proves each layer by itself, in fp64. The logits of the whole show what no layer
    shows, such as a weight that two layers share. They may differ by what rounding does to them:
    the sum of two products is rounded otherwise than the product of a sum. The limit for that is
    measured in fp32, since an fp64 copy of an 8B model would take 64 GB.
    """
    trained = _logits(model, plan)
    bits = product_bits_of(model)
    limit = rounding_limit(lambda: _logits(model, plan), trained, model.parameters(), bits)
    adapters.merge(model)
    difference = largest_difference(_logits(model, plan), trained)
    if not difference <= limit:
        what = f"the merged model is not the trained one: logits differ by {difference:g}"
        what += f", where rounding gives {limit:g} at most"
        raise DrumlineError(what, where=str(checkpoint), fix=adapters.UNMERGED)


def _save_reader(plan: Plan, model: ModelConfig, module: Any, folder: Path) -> None:
    """Save the tokenizer or image processor. With a chat template of its own the model also ends texts where that ends an answer."""
    config = module.config
    if plan.config.images_alone:
        load_processor(
            plan.model_path, model, config, getattr(plan.config.algorithm, "image_size", None)
        ).save_pretrained(folder)
        return
    tokenizer = load_tokenizer(plan.model_path, model)
    if plan.config.head not in LM:
        # transformers' own classifiers find the last token of padded rows by it: before the first that pads, so none may end a text.
        if tokenizer.pad_token_id is None or tokenizer.pad_token_id in end_ids(tokenizer):
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(_padding(tokenizer))
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
    tokenizer.save_pretrained(folder)
    if (
        model.chat_template is not None
        and (generation := getattr(module, "generation_config", None)) is not None
    ):
        ends = generation.eos_token_id
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        if more := sorted(end_ids(tokenizer) - set(ends)):
            generation.eos_token_id = [*ends, *more]
    place = tokenizer_folder(plan.model_path or model.tokenizer or "")
    for name in PROCESSOR_FILES if place else ():
        if found := find_file(place, name, model, _raise_exceptions_for_connection_errors=False):
            shutil.copyfile(found, folder / name)


def _padding(tokenizer: Any) -> int:
    """A special token that begins and ends no text; without one that which fills rows in training."""
    bounds = {tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id}
    free = special_ids(tokenizer) - end_ids(tokenizer) - bounds
    if tokenizer.unk_token_id in free:
        return int(tokenizer.unk_token_id)
    return min(free) if free else pad_token_id(tokenizer)


def _base_of(plan: Plan) -> str:
    """The base model of the adapter, by its folder or id. Raises ModelError if it has none."""
    if plan.config.adapter.kind != "lora":
        raise ModelError(
            "this run has no adapter",
            where=plan.run_dir,
            fix="export the whole model: leave --adapter out",
        )
    if plan.model_path is None or not plan.config.model.as_published:
        what = "the frozen model of this run lies in no folder that a reader could lay the adapter over"
        raise ModelError(
            what, where=plan.run_dir, fix="export the merged model: leave --adapter out"
        )
    return plan.model_path


def _known_as(model: ModelConfig, base: str) -> str:
    """How a reader on any machine finds the base: one of the hub by its id, in place of the folder of the copy here."""
    from huggingface_hub.constants import HF_HUB_CACHE

    return model.id if model.id is not None and Path(base).is_relative_to(HF_HUB_CACHE) else base


def plan_of(run_dir: Path, trust: bool) -> Plan:
    """The plan of a run folder. `trust`: whether the model's own code may run; the folder, perhaps a stranger's, does not decide that."""
    path = run_dir / "plan.json"
    if not path.exists():
        what = "not a run folder: it has no plan.json"
        raise CheckpointError(
            what, where=str(run_dir), fix="name the folder that `drumline train` printed"
        )
    plan = Plan.load(path, trust)
    if plan.config.plain:
        fix = "its weights are in export/model.safetensors of the run, where checkpoint.export is not none; drumline.load gives the module"
        raise ModelError(
            "a module of your own is no Hugging Face model", where=str(run_dir), fix=fix
        )
    model = plan.config.model.model_copy(update={"trust_remote_code": trust})
    return plan.model_copy(update={"config": plan.config.model_copy(update={"model": model})})


def _choose(root: Path, which: Which) -> Path:
    """The checkpoint to read. Raises CheckpointError; only `last` skips damaged ones."""
    path = (
        root / folder_name(which)
        if isinstance(which, int)
        else pointed(root, "best")
        if which == "best"
        else None
    )
    if path is not None:
        check(path, verify=True, alone=True)
        return path
    found = newest(root, verify=True, alone=True)
    if found.path is None:
        reasons = "; ".join(reason for _, reason in found.skipped)
        what = f"no whole checkpoint{': ' if reasons else ''}{reasons}"
        raise CheckpointError(what, where=str(root), fix="train first, or set checkpoint.every")
    return found.path


def _require_free(to: Path) -> None:
    """Raises EnvironmentFault unless `to` is empty or holds an older export."""
    if (
        to.exists()
        and any(to.iterdir() if to.is_dir() else [to])
        and not (to / PROVENANCE).exists()
    ):
        raise EnvironmentFault(
            "holds something that is not an export of Drumline",
            where=str(to),
            fix="name another folder with --to",
        )


def _require_space(folder: Path, trainable: list[Any]) -> None:
    """Raises EnvironmentFault before half an hour of writing rather than after it."""
    needed, free = sum(p.numel() * p.element_size() for p in trainable), free_bytes(folder)
    if free < needed:
        what = f"the model takes {needed / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free"
        raise EnvironmentFault(what, where=str(folder), fix="choose another disk with --to")


def _share_alike(folder: Path) -> None:
    """Give all files the mode of a new file under the umask: safetensors makes its files readable by the owner alone."""
    mode = (folder / PROVENANCE).stat().st_mode
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _read_back(folder: Path, base: str | None, plan: Plan, model: ModelConfig) -> Any:
    """The model that transformers reads from a folder, or PEFT with `base`, in fp32."""
    quiet()
    head: Head = "lm" if plan.config.head in LM else plan.config.head
    if base is not None:
        return adapters.read_over(
            build_model(base, model, seed=0, head=head, labels=plan.labels), folder
        )
    # The folder has a config, a tokenizer and rows of its own.
    own = model.model_copy(update={"config": {}, "tokenizer": None, "new_tokens": ()})
    config = load_config(str(folder), own)
    found = tuple(config.id2label.get(index) for index in range(len(plan.labels)))
    if found != plan.labels:
        raise DrumlineError(
            f"the folder names the classes otherwise: {list(found)}", where=str(folder)
        )
    return auto_class(config, head).from_pretrained(
        str(folder),
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=model.trust_remote_code,
    )


def _logits(model: Any, plan: Plan) -> Any:
    """The logits of a few tokens (with an image for a vision-language model), float[1, T, V]; of a classifier float[1, C]."""
    if reads_images(model):
        grey = grey_image(model.config, "cpu", getattr(plan.config.algorithm, "image_size", None))
        inputs = {"pixel_values": torch.linspace(-2, 2, grey.numel()).view_as(grey)}
    else:
        text = model.config.get_text_config()
        ids_BT = (
            torch.arange(min(16, getattr(text, "max_position_embeddings", None) or 16))[None]
            % text.vocab_size
        )
        inputs = (
            probe(model, ids_BT).inputs()
            if is_vision_language(model.config)
            else {"input_ids": ids_BT}
        )
    with torch.no_grad():
        return model.eval()(**inputs).logits


def _require_read_back(model: Any, expected: torch.Tensor, plan: Plan, folder: Path) -> float:
    """Return the largest difference of the logits of a model that was read back, fp32, from `expected`.

    A whole model has the same weights to the last bit and the same arithmetic, so they are equal.
    Adapters over their base are added up in another way where factors began in the base layer: then
    the limit is what rounding does to these logits. Raises DrumlineError beyond it.
    """
    again = _logits(model, plan)
    if torch.equal(again, expected):
        return 0.0
    difference = largest_difference(again, expected)
    bits = product_bits_of(model)
    limit = rounding_limit(lambda: _logits(model, plan), again, model.parameters(), bits)
    if not difference <= limit:
        what = f"the folder does not read back as the same model: logits differ by {difference:g}"
        what += f", where rounding gives {limit:g} at most"
        raise DrumlineError(what, where=str(folder))
    return difference
