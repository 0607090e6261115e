"""How an embedding model makes embeddings, once the model is known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from drumline.algorithms.embed.spec import EmbedConfig, Pooling
from drumline.config.config import Config
from drumline.errors import ModelError
from drumline.models.classes import require_text_trunk
from drumline.models.embedding_files import EmbeddingFiles, read_embedding_files
from drumline.planner.sizes import FoundModel

# Ways to pool that embed has, by sentence-transformers' names.
POOLINGS: dict[str, Pooling] = {"mean": "mean", "lasttoken": "last", "cls": "cls"}
# Key of a prompt → names that it has in files of models.
PROMPTS = {"query_prompt": ("query",), "document_prompt": ("document", "passage", "corpus")}


def resolve_embedding(
    config: Config, policy: FoundModel, note: Callable[[Iterable[str]], Any]
) -> Config:
    """Return the config with the pooling that the model's files name, unless one is set.

    Any config that trains no embeddings is returned as it is.

    `note`: is given lines for the user: what the files have said, and where they say something else
    than the config. Raises ModelError for a model of which no embedding of a text is made, and for
    files that name a pooling which is not written here.
    """
    algorithm = config.algorithm
    # Models without files are refused as their sizes are counted.
    if config.head != "embedding" or policy.path is None:
        return config
    require_text_trunk(policy.hf_config)
    if not isinstance(algorithm, EmbedConfig):
        return config
    files = read_embedding_files(policy.path, policy.model)
    if files is None:
        return config
    pooling = algorithm.pooling
    if files.pooling:
        pooling, lines = _choose_pooling(algorithm.pooling, files)
        note(lines)
    note(_contradictions(algorithm, files))
    resolved = algorithm.model_copy(update={"pooling": pooling})
    return config.model_copy(update={"algorithm": resolved})


def _choose_pooling(given: Pooling, files: EmbeddingFiles) -> tuple[Pooling, list[str]]:
    """Return the pooling to train with, and what the user should know of it, a line or none.

    `given`: that of the config. Raises ModelError if it is auto, and embed lacks that of the files.
    """
    modes = " and ".join(files.pooling)
    # Several are joined, which is none of ours.
    of_files = POOLINGS.get(modes)
    if given == of_files:
        return given, []
    if given != "auto":
        line = f"algorithm.pooling is {given}, and {files.pooling_file} of the model says {modes}"
        return given, [line]
    if of_files is None:
        what = f"{files.pooling_file} of the model pools by {modes}, which embed does not train"
        fix = "set algorithm.pooling to mean, last or cls"
        raise ModelError(what, where="algorithm.pooling", fix=fix)
    return of_files, [f"algorithm.pooling: {of_files}, as {files.pooling_file} of the model says"]


def _contradictions(algorithm: EmbedConfig, files: EmbeddingFiles) -> Iterator[str]:
    """Yield lines on what else the files of a model say otherwise than the algorithm."""
    if files.normalizes and not algorithm.normalize:
        yield "algorithm.normalize is false, and the model's files normalise embeddings"
    if files.other_modules:
        names = ", ".join(files.other_modules)
        yield f"the model's files have a module {names}, which is neither trained nor exported"
    has_prompt = bool(algorithm.query_prompt or algorithm.document_prompt)
    if has_prompt and not files.pools_prompt:
        yield "prompts count in the pooling, and the model's files leave them out of it"
    for key, names_in_files in PROMPTS.items():
        own = getattr(algorithm, key)
        for name in names_in_files:
            stored = files.prompts.get(name, own)
            if stored != own:
                yield f"algorithm.{key} is {own!r}, and the model's files have {stored!r}"
