"""What the planner knows of a model without its weights, and of the same model otherwise: under a LoRA adapter, on rows of another length.
No torch here; `models.load.facts` builds the model and counts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from drumline.core.config import LoRAConfig

# The styles of transformers' tensor-parallel plans that parallel.tensor_parallel knows; all others belong to mixtures of experts.
ROWS_CUT, COLUMNS_CUT = ("colwise", "colwise_gather_output", "colwise_rep"), ("rowwise", "rowwise_rep", "rowwise_split_input")
TP_STYLES = frozenset((*ROWS_CUT, *COLUMNS_CUT, "replicate", "replicated_with_grad_allreduce"))
Place = Literal["block", "before", "after", "both"]


class Weight(NamedTuple):
    """A parameter. `name`: inside its block; of those outside of blocks, in the model. `style`: how tensor parallelism cuts its
    layer, by the names above; embedding and head are cut by rows. `owners`: classes of the modules around it, its block's and those
    inside. `place`: both is a head tied to the embedding."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    style: str = ""
    owners: tuple[str, ...] = ()
    place: Place = "block"

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a model. Counts are of parameters (tied ones once), FLOPs of the matrix products of one token, forward and backward.
    `tp_styles`: the words of the tensor-parallel plan that the model carries, none without one. `tp_cuts_heads`: under it, a rank holds
    some of the attention heads. `classes`: names of the classes of its modules."""

    name: str
    parameters: int
    flops_per_token: float
    vocab_size: int
    max_positions: int | None
    layers: int
    hidden: int
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 0  # entries of an attention head
    tp_styles: frozenset[str] = frozenset()
    tp_cuts_heads: bool = False
    batch_norms: int = 0
    classes: frozenset[str] = frozenset()
    frozen: int = 0  # of the parameters, those that are not trained (adapters lie over them)
    block_parameters: tuple[int, ...] = ()  # of each block in order; empty where the model has no one list of them
    embedding_parameters: int = 0  # of everything before the first block
    head_parameters: int = 0  # tied to the embedding, they are counted here too
    attention_flops: float = 0.0  # of one block's attention, besides its matrices
    bidirectional: bool = False  # a token sees those behind it too, as in BERT: batches carry an attention mask
    first_position: int | None = 0  # the id of the first token's position, None where the model takes none
    vision_language: bool = False  # images stand among its tokens
    flops_per_image_token: float = 0.0  # of the vision tower, for each token that stands for a part of an image
    block_weights: tuple[tuple[Weight, ...], ...] = ()  # of each block, a vision tower's among them; equal blocks share one tuple
    end_weights: tuple[Weight, ...] = ()  # of everything outside of the blocks; a tied head is its embedding
    changes_logits: bool = False  # soft-caps or scales what its head gives: they are made whole, whatever loss_chunk says
    trains_router: bool = False  # its config sets the loss that balances a mixture's experts
    keeps_scores: bool = False  # its class has no attention in tiles: all scores are kept
    caps_scores: bool = False  # and soft-capped before the softmax
    drops_scores: bool = False  # there is dropout over attention's scores
    drops_stream: bool = False  # and over what attention and feed-forward give
    recomputes: bool = True  # its blocks have activation checkpointing
    whole_sequences: str = ""  # why its sequences cannot be cut over ranks; empty where they can
    uncut: str = ""  # why its blocks cannot be the stages of a pipeline, as far as its modules say; empty where they may be
    windows: bool = False  # some layers look at a window or a chunk of the tokens before
    buffer_bytes: int = 0  # of what a module keeps besides parameters, tables of rotary embeddings among them
    roles: Mapping[str, ModelFacts] = field(default_factory=dict)  # of the models that an algorithm needs besides this one

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Of a few fields, once: facts are the key of what the planner computes thousands of times."""
        return hash((self.name, self.parameters, self.frozen, self.flops_per_token, self.layers, self.hidden, self.vocab_size))

    @property
    def trainable(self) -> int:
        """Parameters with a gradient and moments."""
        return self.parameters - self.frozen

    @cached_property
    def parameters_before(self) -> tuple[int, ...]:
        """Of `block_parameters` those before each block, and all: a table over all stages of a pipeline needs thousands of sums."""
        return (0, *accumulate(self.block_parameters))

    @cached_property
    def kinds_of_blocks(self) -> tuple[tuple[tuple[Weight, ...], int], ...]:
        """Blocks that are equal, and how many there are of each kind."""
        return tuple(Counter(self.block_weights).items())

    @cached_property
    def first_of_kind(self) -> tuple[int, ...]:
        """For each of `block_weights` the number of the first that is equal to it."""
        return tuple(self.block_weights.index(block) for block in self.block_weights)


def with_length(facts: ModelFacts, old: int, new: int) -> ModelFacts:
    """Training rows of `new` tokens in place of `old`: attention looks at as many more (PaLM's count, see models.load.facts)."""
    attention = facts.attention_flops * new / old
    flops = facts.flops_per_token + facts.layers * (attention - facts.attention_flops)
    roles = {name: with_length(role, old, new) for name, role in facts.roles.items()}
    return replace(facts, attention_flops=attention, flops_per_token=flops, roles=roles)


def with_lora(facts: ModelFacts, adapter: LoRAConfig) -> ModelFacts | None:
    """An adapter over all linear layers in the blocks, as PEFT lays it, everything else frozen. None for a model that has adapters or
    frozen parts already, or whose weights are not known one by one."""
    if facts.frozen or not facts.block_weights or facts.vision_language:
        return None
    blocks = tuple(tuple(part for weight in block for part in _adapted(weight, adapter.r)) for block in facts.block_weights)
    added = sum(weight.numel for block in blocks for weight in block if weight.trainable)
    if not added:
        return None
    ahead = len(blocks) - len(facts.block_parameters)
    products = facts.flops_per_token - facts.layers * facts.attention_flops
    return replace(
        facts,
        parameters=facts.parameters + added,
        frozen=facts.parameters,
        flops_per_token=products * 4 / 6 + 6 * added + facts.layers * facts.attention_flops,
        block_weights=blocks,
        block_parameters=tuple(sum(weight.numel for weight in block) for block in blocks[ahead:]),
        end_weights=tuple(weight._replace(trainable=False) for weight in facts.end_weights),
    )


def _adapted(weight: Weight, rank: int) -> list[Weight]:
    """A weight, frozen; of a linear layer also the two factors, the one beside the cut dimension cut like it."""
    frozen = weight._replace(trainable=False)
    if len(weight.shape) != 2 or weight.owners[-1:] != ("Linear",):
        return [frozen]
    layer, owners = weight.name.removesuffix(".weight"), (*weight.owners, "ModuleDict", "Linear")
    rows, columns = weight.shape
    by_row = weight.style.startswith("rowwise")
    first = Weight(f"{layer}.lora_A.default.weight", (rank, columns), True, weight.style if by_row else "", owners)
    second = Weight(f"{layer}.lora_B.default.weight", (rows, rank), True, "" if by_row else weight.style, owners)
    return [frozen._replace(name=f"{layer}.base_layer.weight", owners=(*weight.owners, "Linear")), first, second]
