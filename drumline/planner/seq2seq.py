"""Which algorithm trains a model with an encoder and a decoder, once the model is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from drumline.config.config import Config
from drumline.errors import ModelError
from drumline.foreign import read_object
from drumline.models.classes import ENCODER_DECODERS, WRITING, decoder_start, is_encoder_decoder
from drumline.planner.sizes import FoundModel


def may_have_encoder(config: Config, policy: FoundModel) -> bool:
    """Return whether `resolve_seq2seq` may change the config or refuse it.

    It looks at the type of the model alone, since a plan of known sizes needs no transformers.
    """
    values = policy.model.config
    if policy.path is not None:
        file = Path(policy.path) / "config.json"
        if not file.is_file():
            return True
        values = read_object(file, ModelError)
    return config.head == "seq2seq" or values.get("model_type") in ENCODER_DECODERS


def resolve_seq2seq(config: Config, hf_config: Any, note: Callable[[Iterable[str]], Any]) -> Config:
    """Return the config with the algorithm that its model takes.

    For a model with an encoder and a decoder `seq2seq` stands in the place of `sft`, with the
    decoder's first token, and rows are not packed. Any other config is returned as it is.

    `hf_config`: transformers' config of the model. `note`: is given a line for the user. Raises
    ModelError for an algorithm that the model cannot be trained by.
    """
    algorithm = config.algorithm
    name = hf_config.model_type
    if algorithm.head in ("text", "score") and is_encoder_decoder(hf_config):
        what = f"{name} has an encoder and a decoder, which {algorithm.kind} does not train"
        fix = "name an encoder such as BERT, or a language model of text"
        raise ModelError(what, where="model", fix=fix)
    if algorithm.head not in WRITING:
        return config
    if not is_encoder_decoder(hf_config):
        if algorithm.head == "seq2seq":
            what = f"{name} has no encoder beside its decoder"
            raise ModelError(what, where="algorithm.kind", fix="use algorithm: sft")
        return config
    start = decoder_start(hf_config)
    if start is None:
        what = "the config does not say which token the decoder begins with"
        fix = "set model.config: {decoder_start_token_id: …}"
        raise ModelError(what, where="model.config", fix=fix)
    spec = algorithm.spec_for_encoder_decoder(start)
    if spec is None:
        what = f"{name} has an encoder and a decoder, which {algorithm.kind} does not train"
        raise ModelError(what, where="algorithm.kind", fix="use algorithm: sft")
    given = getattr(algorithm, "decoder_start", None)
    if given not in (None, start):
        what = f"the decoder of {name} begins with token {start}, not {given}"
        fix = "leave it out, or set model.config.decoder_start_token_id"
        raise ModelError(what, where="algorithm.decoder_start", fix=fix)
    if algorithm.head != spec.head:
        line = f"algorithm: {spec.kind} in place of {algorithm.kind}, since {name} has an encoder"
        note([f"{line}; rows stay unpacked"])
    # Packing is on by default, and a run folder's config has every default written out. So it is
    # turned off and not refused.
    data = config.data.model_copy(update={"packing": False})
    return config.model_copy(update={"algorithm": spec, "data": data})
