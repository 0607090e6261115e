"""Writes a run's weights as a Hugging Face folder, reads it back and compares the logits."""

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

from drumline.checkpoint.load import check, load_tensors, newest, read_pointer
from drumline.checkpoint.manifest import folder_name, read_manifest
from drumline.config.config import LoRAConfig
from drumline.config.model import Head, ModelConfig
from drumline.dist.seeds import derive
from drumline.errors import CheckpointError, DrumlineError, EnvironmentFault, ModelError
from drumline.foreign import read_object
from drumline.hardware.detect import free_bytes
from drumline.models import adapters
from drumline.models.build import build_model
from drumline.models.classes import (
    LM,
    WRITING,
    auto_class,
    is_seq2seq,
    is_vision_language,
    reads_images,
    restore_noise,
)
from drumline.models.files import (
    OnProgress,
    find_file,
    silence_transformers,
    temporary_folder_beside,
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
from drumline.models.seq2seq import seq2seq_inputs
from drumline.models.shards import canonical_tensors
from drumline.models.small import trial_tokens
from drumline.models.templates import end_ids, special_ids
from drumline.models.tokenizer import load_tokenizer, pad_token_id
from drumline.models.vision import PROCESSOR_FILES, load_processor
from drumline.plan.plan import Plan
from drumline.system.files import rename_over
from drumline.version import __version__

Which = Literal["last", "best"] | int
PROVENANCE = "drumline.json"
# Names of types in configs and commands → torch's.
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
VALUE_FILE = "value_head.safetensors"
# The most tokens whose logits are compared.
TRIED_TOKENS = 16


@dataclass(frozen=True)
class ExportResult:
    """A finished export.

    `max_logit_difference`: between the model in memory and the folder read back, on a few tokens.
    `rounding`: what `dtype` changed, ‖a − b‖ / ‖b‖ of the same logits.
    """

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
    trust_remote_code: bool = False,
) -> ExportResult:
    """Write a checkpoint of `run_dir` to folder `to` as a Hugging Face folder.

    It has safetensors, config, generation config and tokenizer. `which`: the newest checkpoint, the
    best by eval.metric (the newest if none was measured), or that of a step. `dtype`: a key of
    DTYPES, or auto, which takes `checkpoint.export_dtype` of the run.
    `adapter`: write only the adapters of a LoRA run, as PEFT's files; else they are merged.
    `trust_remote_code`: whether the model's own code may run, see `plan_of`.
    An older export in `to` is replaced. Raises CheckpointError, ModelError, EnvironmentFault, and
    DrumlineError if the folder does not read back as the same model; then `to` is as it was.
    """
    start_time = time.time()
    if dtype not in ("auto", *DTYPES):
        fix = f"one of auto, {', '.join(DTYPES)}"
        raise EnvironmentFault(f"no dtype {dtype!r}", where="--dtype", fix=fix)
    plan = plan_of(run_dir, trust_remote_code)
    base = None
    if adapter:
        base = _base_model_name(plan)
    checkpoint = _choose_checkpoint(run_dir / "checkpoints", which)
    _require_free(to)
    progress("export", 0, 4)
    # Everything above is checked before the model is built, which may take minutes.
    source = _use_default_attention(plan.config.model)
    model = _build_trained_model(plan, source, checkpoint, merged=not adapter)
    value = _take_value_head(model)
    dtype = _choose_dtype(dtype, plan, adapter)
    trainable, rounding = _round_weights(model, dtype, plan, checkpoint)
    step = check(checkpoint, verify=False, collective=False).step
    progress("export", 1, 4)
    fix = "choose a folder on a disk with space, or one that is yours"
    with temporary_folder_beside(to, "cannot write", to, fix) as temporary:
        _require_space(to.parent, trainable)
        # Before the weights, since it may set the padding id in the model's config.
        _save_tokenizer_or_processor(plan, source, model, temporary)
        if base is not None:
            adapters.save_adapter(model, temporary, _portable_name(source, base), source.revision)
        else:
            if plan.config.head == "embedding":
                restore_noise(model.config, load_config(plan.model_path, source))
            model.save_pretrained(temporary)
        _save_files_of_algorithm(plan, model, temporary)
        if value:
            save_file(value, temporary / VALUE_FILE)
        origin: dict[str, Any] = {
            "drumline": __version__,
            "run": str(run_dir),
            "checkpoint": checkpoint.name,
            "step": step,
            "dtype": dtype,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        }
        # PEFT's files have no place for these.
        if plan.labels:
            origin["labels"] = list(plan.labels)
        if source.may_grow and not plan.config.images_alone:
            # Whoever loads the adapter has to give its base as many rows.
            origin["rows"] = model.get_input_embeddings().weight.shape[0]
        (temporary / PROVENANCE).write_text(json.dumps(origin, indent=2) + "\n")
        progress("export", 2, 4)
        expected = _logits(model.float(), plan)
        # So the host has only one of the two models in memory.
        del model, trainable
        gc.collect()
        again = _read_back(temporary, base, plan, source)
        difference = _require_read_back(again, expected, plan, temporary)
        progress("export", 3, 4)
        _give_usual_modes(temporary)
        rename_over(temporary, to, temporary.with_name(f"{temporary.name}-old"))
    progress("export", 4, 4)
    return ExportResult(to, step, time.time() - start_time, difference, dtype, rounding)


def _use_default_attention(model: ModelConfig) -> ModelConfig:
    """Return the model's options with transformers' default attention.

    Whoever loads the folder gets that one. The run's own may need a GPU, and rounds differently.
    """
    return model.model_copy(update={"attention": "auto"})


def _take_value_head(model: Any) -> dict[str, torch.Tensor]:
    """Remove the value head and return its tensors; {} without one.

    It is no part of the language model, whose files have no place for it.
    """
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.startswith(f"{VALUE}."):
            tensors[name] = tensor.detach().contiguous()
    if tensors:
        delattr(model, VALUE)
    return tensors


def _choose_dtype(wanted: str, plan: Plan, adapter: bool) -> str:
    """Return the type to write, a key of DTYPES.

    Weights that were drawn are exported as they were trained. Files of another type, or of none,
    count as fp32.
    """
    if wanted == "auto":
        wanted = plan.config.checkpoint.export_dtype
    if wanted != "auto":
        return wanted
    if adapter:
        return "fp32"
    if plan.model_path is None or plan.config.model.init == "random":
        return plan.config.precision.master
    config = load_config(plan.model_path, plan.config.model)
    loaded = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    for key, name in DTYPES.items():
        if str(loaded) == f"torch.{name}":
            return key
    return "fp32"


def _round_weights(model: Any, dtype: str, plan: Plan, checkpoint: Path) -> tuple[list[Any], float]:
    """Cast the weights that will be written to `dtype`, and return (weights, change of the logits).

    These are the trainable parameters: all of a merged model, or only those of its adapters. fp32
    changes nothing. The change is `ExportResult.rounding`. Rounding may change the logits by as
    much as they move if each weight is moved at random within the bits that the type lacks. Raises
    DrumlineError for a larger change, such as that of weights beyond the range of the type, which
    become infinite or zero.
    """
    # Only parameters. Rotary frequencies are buffers and in no file, so they must not be rounded.
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
    # The logits of the rounded weights are computed in fp32. `float` replaces the rounded weights
    # by fp32 copies, so they are put back afterwards.
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
    # The smallest number in place of 0, for a model whose logits are all 0.
    divisor = max(size, torch.finfo(exact.dtype).tiny)
    return trainable, change / divisor


def find_or_export(
    run_dir: Path, adapter: bool, progress: OnProgress, trust_remote_code: bool = False
) -> Path:
    """Return a folder that `export` has written of a run, or write one.

    RUN/export is returned if it has this form (merged, or an adapter) and is of the checkpoint that
    the run exports. If not, a folder beside it is returned. `trust_remote_code`: as in `plan_of`.
    Raises what `export` raises.
    """
    plan = plan_of(run_dir, trust_remote_code)
    root = run_dir / "checkpoints"
    which: Which = "best"
    if plan.config.checkpoint.export == "last":
        which = "last"
    checkpoint = None
    if which == "best":
        checkpoint = read_pointer(root, "best")
    if checkpoint is None:
        # The run exports its newest one, or nothing was measured.
        checkpoint = read_pointer(root, "latest")
    own_name = "merged"
    if adapter:
        own_name = "adapter"
    for name in ("export", own_name):
        folder = run_dir / name
        if _is_export_of(folder, adapter, checkpoint):
            return folder
    to = run_dir / "export"
    if to.exists():
        to = run_dir / own_name
    result = export(
        run_dir, to, which, progress, adapter=adapter, trust_remote_code=trust_remote_code
    )
    return result.path


def _is_export_of(folder: Path, adapter: bool, checkpoint: Path | None) -> bool:
    """Return whether a folder is an export of a checkpoint, of its adapter or merged.

    `checkpoint` None: no checkpoint was kept, and the folder is all there is.
    """
    config_file = folder / "config.json"
    if adapter:
        config_file = folder / adapters.CONFIG
    provenance_file = folder / PROVENANCE
    if not config_file.exists() or not provenance_file.exists():
        return False
    provenance = read_object(provenance_file, ModelError, f"remove {folder}")
    if checkpoint is None:
        return True
    return provenance.get("checkpoint") == checkpoint.name


def read_run(run_dir: Path, trust_remote_code: bool = False) -> tuple[Any, Any, Path]:
    """Return a run's model, tokenizer and best checkpoint: what `export` would write, in memory.

    The model is in eval mode and fp32, its adapters merged. `trust_remote_code`: as in `plan_of`.
    Raises CheckpointError if the run has no whole checkpoint.
    """
    checkpoint = _choose_checkpoint(run_dir / "checkpoints", "best")
    model, tokenizer = read_checkpoint(plan_of(run_dir, trust_remote_code), checkpoint)
    return model, tokenizer, checkpoint


def read_checkpoint(plan: Plan, checkpoint: Path) -> tuple[Any, Any]:
    """Return model and tokenizer of one checkpoint, as `read_run` does."""
    source = _use_default_attention(plan.config.model)
    model = _build_trained_model(plan, source, checkpoint, merged=True)
    return model, load_tokenizer(plan.model_path, source)


def _build_trained_model(plan: Plan, model: ModelConfig, checkpoint: Path, merged: bool) -> Any:
    """Return the model with a checkpoint's weights in eval mode, adapters injected or merged.

    The generation config is the original model's.
    """
    from transformers import GenerationConfig

    path = plan.model_path
    adapter = plan.config.adapter
    seed = plan.config.run.seed
    head = plan.config.head
    if plan.base is not None and weights_digest(path) not in (None, plan.base):
        what = "its frozen weights are not those that the run was trained on top of"
        raise ModelError(what, where=f"model {path}", fix="bring the old ones back")
    # A checkpoint has only trainable weights. Frozen ones are read from the model's files, or drawn
    # again on the CPU, as the run did on any device (`draw_device` in plan.plan).
    kept = _model_tensors(checkpoint)
    weights_seed = derive(seed, "weights")
    built = build_model(
        path, model, weights_seed, head=head, labels=plan.labels, checkpoint_keys=kept
    )
    freeze(built, model.freeze)
    if isinstance(adapter, LoRAConfig):
        adapters.inject(built, adapter, seed)
    load_tensors(checkpoint, canonical_tensors(built), collective=False)
    built.config.use_cache = True
    if head in WRITING and path is not None:
        # A model without one keeps what transformers makes from the config.
        with contextlib.suppress(OSError):
            built.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    if isinstance(adapter, LoRAConfig):
        adapters.require_trained(built)
        if merged:
            _merge(built, plan, checkpoint)
    if merged:
        # An export writes all weights, and `_round_weights` rounds those that are trainable.
        built.requires_grad_(True)
    return built.eval()


def _model_tensors(checkpoint: Path) -> frozenset[str]:
    """Return the names of the model's tensors that a checkpoint has."""
    names = set()
    for name in read_manifest(checkpoint).tensors:
        if name.startswith("model."):
            names.add(name.removeprefix("model."))
    return frozenset(names)


def _merge(model: Any, plan: Plan, checkpoint: Path) -> None:
    """Merge the adapters of a model in eval mode, fp32.

    Raises DrumlineError if the merged model computes something else. `adapters.merge` has checked
    each layer by itself, in fp64. The logits of the whole model show other mistakes, such as a
    weight that two layers share. They may differ by rounding: the sum of two products is rounded
    differently than the product of a sum. The limit for that is measured in fp32, since an fp64
    copy of an 8B model would take 64 GB.
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


def _save_tokenizer_or_processor(plan: Plan, model: ModelConfig, module: Any, folder: Path) -> None:
    """Save the tokenizer or the image processor to `folder`.

    If the run set a chat template, the generation config also ends texts as that template ends
    answers.
    """
    config = module.config
    path = plan.model_path
    if plan.config.images_alone:
        image_size = getattr(plan.config.algorithm, "image_size", None)
        load_processor(path, model, config, image_size).save_pretrained(folder)
        return
    tokenizer = load_tokenizer(path, model)
    if plan.config.head not in WRITING:
        # transformers' own classifiers take the token before the first padding id for the last one
        # of a row. So the padding id must not end texts.
        padding_id = tokenizer.pad_token_id
        if padding_id is None or padding_id in end_ids(tokenizer):
            tokenizer.pad_token = tokenizer.convert_ids_to_tokens(_padding_id(tokenizer))
        config.get_text_config().pad_token_id = tokenizer.pad_token_id
    if plan.config.algorithm.joins_texts:
        # sentence-transformers would render a pair of texts as a conversation, which scores otherwise.
        tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    if model.chat_template is not None:
        _add_ends(getattr(module, "generation_config", None), end_ids(tokenizer))
    # The model's own folder first: a tokenizer's folder may have no image processor.
    processor_folder = tokenizer_folder(path or model.tokenizer or "")
    if not processor_folder:
        return
    names: tuple[str, ...] = PROCESSOR_FILES
    if getattr(config, "vision_config", None) is None:
        # The language model within a vision-language model takes no pixels.
        names = ("chat_template.json",)
    for name in names:
        file = find_file(
            processor_folder, name, model, _raise_exceptions_for_connection_errors=False
        )
        if file:
            shutil.copyfile(file, folder / name)


def _save_files_of_algorithm(plan: Plan, model: Any, folder: Path) -> None:
    """Save the JSON files that the algorithm adds to an export."""
    if plan.config.images_alone:
        return
    hidden = model.config.get_text_config().hidden_size
    for name, content in plan.config.algorithm.export_files(plan, hidden).items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content, indent=2) + "\n")


def _add_ends(generation_config: Any, ids: set[int]) -> None:
    """Make a generation config end texts at these token ids, too. None stays None."""
    if generation_config is None:
        return
    ends = generation_config.eos_token_id
    if ends is None:
        ends = []
    elif not isinstance(ends, list):
        ends = [ends]
    more = sorted(ids - set(ends))
    if more:
        generation_config.eos_token_id = [*ends, *more]


def _padding_id(tokenizer: Any) -> int:
    """Return the id of a special token that begins and ends no text.

    Without such a token it is the id that fills rows in training.
    """
    bounds = {tokenizer.bos_token_id, tokenizer.cls_token_id, tokenizer.sep_token_id}
    free = special_ids(tokenizer) - end_ids(tokenizer) - bounds
    if tokenizer.unk_token_id in free:
        return int(tokenizer.unk_token_id)
    if free:
        return min(free)
    return pad_token_id(tokenizer)


def _base_model_name(plan: Plan) -> str:
    """Return the folder or id of the adapter's base model. Raises ModelError if there is none."""
    if plan.config.adapter.kind != "lora":
        fix = "export the whole model: leave --adapter out"
        raise ModelError("this run has no adapter", where=plan.run_dir, fix=fix)
    if plan.model_path is None or not plan.config.model.as_published:
        what = (
            "the frozen model of this run lies in no folder"
            " that a reader could lay the adapter over"
        )
        fix = "export the merged model: leave --adapter out"
        raise ModelError(what, where=plan.run_dir, fix=fix)
    return plan.model_path


def _portable_name(model: ModelConfig, base: str) -> str:
    """Return the name by which a reader on any machine finds the base model of an adapter.

    It is a hub id rather than the folder of its copy here.
    """
    from huggingface_hub.constants import HF_HUB_CACHE

    if model.id is not None and Path(base).is_relative_to(HF_HUB_CACHE):
        return model.id
    return base


def plan_of(run_dir: Path, trust_remote_code: bool) -> Plan:
    """Return the plan of a run folder.

    `trust_remote_code`: whether the model's own code may run. The folder does not decide that,
    since it may be a stranger's.
    """
    path = run_dir / "plan.json"
    if not path.exists():
        what = "not a run folder: it has no plan.json"
        fix = "name the folder that `drumline train` printed"
        raise CheckpointError(what, where=str(run_dir), fix=fix)
    plan = Plan.load(path, trust_remote_code)
    if plan.config.has_own_module:
        what = "a module of your own is no Hugging Face model"
        fix = (
            "its weights are in export/model.safetensors of the run,"
            " where checkpoint.export is not none; drumline.load gives the module"
        )
        raise ModelError(what, where=str(run_dir), fix=fix)
    update = {"trust_remote_code": trust_remote_code}
    model = plan.config.model.model_copy(update=update)
    config = plan.config.model_copy(update={"model": model})
    return plan.model_copy(update={"config": config})


def _choose_checkpoint(root: Path, which: Which) -> Path:
    """Return the checkpoint to read.

    The checkpoint of a step, or the one that was measured as the best, must be whole. Otherwise it
    is the newest whole one, and damaged ones are skipped. Raises CheckpointError.
    """
    path = None
    if isinstance(which, int):
        path = root / folder_name(which)
    elif which == "best":
        path = read_pointer(root, "best")
    if path is not None:
        check(path, verify=True, collective=False)
        return path
    # The newest that is whole: a run may have been killed as it wrote the last one.
    found = newest(root, verify=True, collective=False)
    if found.path is None:
        what = "no whole checkpoint"
        reasons = [reason for _, reason in found.skipped]
        if reasons:
            what += f": {'; '.join(reasons)}"
        raise CheckpointError(what, where=str(root), fix="train first, or set checkpoint.every")
    return found.path


def _require_free(to: Path) -> None:
    """Raise EnvironmentFault unless `to` is empty or holds an older export."""
    if not to.exists() or (to / PROVENANCE).exists():
        return
    is_empty_folder = to.is_dir() and not any(to.iterdir())
    if not is_empty_folder:
        what = "holds something that is not an export of Drumline"
        raise EnvironmentFault(what, where=str(to), fix="name another folder with --to")


def _require_space(folder: Path, trainable: list[Any]) -> None:
    """Raise EnvironmentFault if the disk has too little space, before anything is written."""
    needed = sum(parameter.numel() * parameter.element_size() for parameter in trainable)
    free = free_bytes(folder)
    if free < needed:
        what = f"the model takes {needed / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free"
        raise EnvironmentFault(what, where=str(folder), fix="choose another disk with --to")


def _give_usual_modes(folder: Path) -> None:
    """Give all files the mode of a new file under the umask.

    safetensors makes its files readable by the owner alone.
    """
    mode = (folder / PROVENANCE).stat().st_mode
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def _read_back(folder: Path, base: str | None, plan: Plan, model: ModelConfig) -> Any:
    """Return the model that transformers reads from a folder, or PEFT over `base`, in fp32."""
    silence_transformers()
    head: Head = plan.config.head
    if head in LM:
        # A folder has no value head (see `_take_value_head`).
        head = "lm"
    if base is not None:
        base_model = build_model(base, model, seed=0, head=head, labels=plan.labels)
        return adapters.load_adapters(base_model, folder)
    # The folder has a config, a tokenizer and rows of its own.
    own = model.model_copy(update={"config": {}, "tokenizer": None, "new_tokens": ()})
    config = load_config(str(folder), own)
    labels = tuple(config.id2label.get(index) for index in range(len(plan.labels)))
    if labels != plan.labels:
        what = f"the folder names the classes otherwise: {list(labels)}"
        raise DrumlineError(what, where=str(folder))
    return auto_class(config, head).from_pretrained(
        str(folder),
        dtype=torch.float32,
        local_files_only=True,
        trust_remote_code=model.trust_remote_code,
    )


def _logits(model: Any, plan: Plan) -> Any:
    """Return the logits of a few tokens, float[1, T, V]; of a classifier float[1, C].

    Of a model without a head these are its hidden states, float[1, T, D]. A vision-language model
    also gets an image.
    """
    # PEFT's class around a model does not tell what the model reads.
    own = model.get_base_model() if hasattr(model, "get_base_model") else model
    inputs = _trial_inputs(own, plan)
    with torch.no_grad():
        outputs = model.eval()(**inputs)
    if plan.config.head == "embedding":
        return outputs.last_hidden_state
    return outputs.logits


def _trial_inputs(model: Any, plan: Plan) -> dict[str, torch.Tensor]:
    """Return the arguments of a model for `_logits`."""
    if reads_images(model):
        grey = grey_image(model.config, "cpu", getattr(plan.config.algorithm, "image_size", None))
        pixels = torch.linspace(-2, 2, grey.numel()).view_as(grey)
        return {"pixel_values": pixels}
    text_config = model.config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None) or TRIED_TOKENS
    ids_T = torch.arange(min(TRIED_TOKENS, positions)) % text_config.vocab_size
    ids_BT = ids_T[None]
    if is_vision_language(model.config):
        return trial_tokens(model, ids_BT).inputs()
    if is_seq2seq(model):
        return seq2seq_inputs(ids_BT)
    return {"input_ids": ids_BT}


def _require_read_back(model: Any, expected: torch.Tensor, plan: Plan, folder: Path) -> float:
    """Return how far the logits of a model that was read back, fp32, are from `expected`.

    A whole model has the same weights to the last bit and the same arithmetic, so they are equal.
    With PiSSA the folder's adapter is added to the base in another order than in memory (see
    `adapters.save_adapter`): then the logits may differ by what rounding does to them. Raises
    DrumlineError for a larger difference.
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
