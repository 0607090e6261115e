"""Count how many tokens each expert of a mixture gets, layer by layer, over the global batch.

- `watch_router_load` prepares a model: the experts of each layer count the router's choices on
  the device, so the host waits for nothing.
- Engines run each forward within `count_expert_tokens`, which adds up the counts of its layers.
- `train.router_load` sums them over the ranks once a step, reports them and balances the experts.

Padding is not counted, so the sum over all ranks is the same however a batch is cut and spread. No
token is ever dropped: an expert computes all tokens that choose it.

N tokens that a rank computes of a micro-batch, k experts that are chosen for each, S = N · k
choices, E experts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from drumline.dist.reduce import to_fp64
from drumline.models.blocks import GETS_EQUAL_ROWS, expert_modules, find_base_layer
from drumline.models.sequence import SequencePart

# The attribute of a model that has its `RouterLoad`.
ATTRIBUTE = "_drumline_router_load"
# transformers' name of a router's bias, float[E]. This buffer is added to the scores when experts
# are chosen, and not to the weights of the chosen ones (DeepSeek-V3, GLM-4.5).
BIAS = "e_score_correction_bias"


class LayerCount:
    """Counts the tokens of each expert of one layer, in the running forward.

    It does not know the number of its layer: equal blocks that differ in such a number would each
    be compiled.

    Attributes:
        load: The `RouterLoad` of the model.
        experts: How many experts the layer has.
        counts_E: int64[E], how many tokens each expert got; None before the layer has run.
    """

    def __init__(self, load: RouterLoad, experts: int) -> None:
        self.load = load
        self.experts = experts
        self.counts_E: Tensor | None = None

    def count(self, chosen_Nk: Tensor) -> None:
        """Count the router's choices, int[N, k], in place of an earlier count.

        A checkpointed block is computed again in backward and counts again. That does no harm,
        because the counts are added up when the forward ends.
        """
        weights_N = self.load.weights_N
        if weights_N is None or len(chosen_Nk) != len(weights_N):
            return
        weights_S = weights_N[:, None].expand_as(chosen_Nk).reshape(-1)
        # In some models a larger number stands for the choice of no expert. It gets a last count,
        # which is cut off.
        chosen_S = chosen_Nk.reshape(-1).long().clamp(max=self.experts)
        no_counts = weights_N.new_zeros(self.experts + 1)
        counts = no_counts.index_add(0, chosen_S, weights_S)
        self.counts_E = counts[: self.experts]


class CountedExperts:
    """A class to derive from before a class of experts, so that a call also counts its tokens.

    A hook would not do: each hook has a number of its own, so equal blocks would each be compiled.
    `forward` stays that of the experts' class, because strategies that cut experts replace it.

    `layer_count`: counts the choices.
    """

    layer_count: LayerCount

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Count the choices, and run the experts.

        `inputs`: those of the experts' class: hidden states, choices int[N, k], and their weights.
        """
        if len(inputs) > 1 and inputs[1].dtype in (torch.int32, torch.int64):
            self.layer_count.count(inputs[1])
        return super().__call__(*inputs, **options)  # type: ignore[misc]


@lru_cache
def _counted_class(experts_class: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass of `experts_class` that counts its tokens."""
    return type(experts_class.__name__, (CountedExperts, experts_class), {})


class RouterLoad:
    """Counts the tokens that each expert gets in the forwards of a step that have gradients.

    Attributes:
        layers: Name of a module of experts → how many experts it has.
        biased: For each layer the module with the router's BIAS; None for a router without one.
        counts: int64, the counts of all layers end to end, from the forwards on this rank since
            `begin_step`; None before the first.
    """

    def __init__(self, layers: dict[str, int], biased: Sequence[nn.Module | None] = ()) -> None:
        self.layers = layers
        self.biased = biased or [None] * len(layers)
        self.in_forward = [LayerCount(self, experts) for experts in layers.values()]
        self.counts: Tensor | None = None
        # How often each token of the running forward counts, int64[N]: 0 for padding.
        self.weights_N: Tensor | None = None
        # With sequence parallelism, (index, parts): which part of each sequence the experts of this
        # rank see. None: all of it.
        self.token_part: tuple[int, int] | None = None
        # Whether another rank counts the same tokens.
        self.repeats_another = False

    def begin_step(self) -> None:
        """Forget the counts of the step before."""
        self.counts = None

    @contextlib.contextmanager
    def count_forward(
        self, batch: Any, shared: Any = None, sequence: SequencePart | None = None
    ) -> Iterator[None]:
        """Within the context, count the forward of a micro-batch.

        Args:
            batch: The micro-batch.
            shared: The same rows with each prompt once, if the model runs on these. The tokens of a
                prompt then count as often as rows have it.
            sequence: The part of each row that this rank computes.
        """
        with torch.no_grad():
            self.weights_N = self._token_weights(batch, shared, sequence)
        for layer in self.in_forward:
            layer.counts_E = None
        yield
        self._add_forward(batch.lengths_B.device)

    def _token_weights(self, batch: Any, shared: Any, sequence: SequencePart | None) -> Tensor:
        """Return how often each token that this rank computes counts, int64[N]."""
        width = batch.input_ids_BT.shape[1]
        places_T = torch.arange(width, device=batch.lengths_B.device)
        weights_BT = (places_T < batch.lengths_B[:, None]).long()
        if shared is not None:
            # A token of the batch → its place in the rows with shared prompts.
            place_S = shared.token_indices_BT.flatten()
            weights_N = torch.zeros_like(shared.input_ids_BT).flatten()
            weights_N.index_add_(0, place_S, weights_BT.flatten())
            weights_BT = weights_N.view_as(shared.input_ids_BT)
        if sequence is not None:
            weights_BT = sequence.cut(weights_BT)
        if self.token_part is not None:
            index, parts = self.token_part
            weights_BT = _chunk(weights_BT, index, parts)
        return weights_BT.flatten()

    def _add_forward(self, device: torch.device) -> None:
        """Add the counts of the forward that has ended.

        The layers of other pipeline stages do not run on this rank, and add zeros.
        """
        parts = []
        for layer in self.in_forward:
            counts_E = layer.counts_E
            if counts_E is None:
                counts_E = torch.zeros(layer.experts, dtype=torch.int64, device=device)
            parts.append(counts_E)
        counts = torch.cat(parts)
        # `weights_N` stays, because a compiled block that is recomputed in backward must find the
        # state that it had in forward.
        if self.counts is None:
            self.counts = counts
        else:
            self.counts = self.counts + counts

    def local_counts(self, device: str | torch.device) -> Tensor:
        """Return what this rank adds to the counts of all ranks, float64, all layers end to end."""
        if self.counts is None or self.repeats_another:
            return torch.zeros(sum(self.layers.values()), dtype=torch.float64, device=device)
        return to_fp64(self.counts).to(device)

    @torch.no_grad()
    def balance(self, counts: Tensor, rate: float, may_update: Tensor) -> None:
        """Move the biases of all routers on this rank by one step towards even loads.

        b_e += rate × sign(mean load − load of e), with the loads of the whole global batch (Wang et
        al. 2024, algorithm 1; DeepSeek-V3, section 2.1.2).

        Args:
            counts: The summed counts of all ranks, all layers end to end.
            rate: The step.
            may_update: bool scalar on the device. False leaves the biases as they are, because the
                step leaves the weights as they are.
        """
        parts = counts.split(list(self.layers.values()))
        for load_E, router in zip(parts, self.biased, strict=True):
            if router is None:
                continue
            bias_E = router.get_buffer(BIAS)
            if bias_E.is_meta:
                # Another pipeline stage has it.
                continue
            direction_E = torch.sign(load_E.mean() - load_E) * may_update.to(load_E.device)
            bias_E.add_(direction_E.to(bias_E), alpha=rate)

    def split_by_layer(self, counts: list[float]) -> dict[str, list[int]]:
        """Return the counts of each layer by its name. `counts`: those of all layers end to end."""
        found: dict[str, list[int]] = {}
        start = 0
        for name, experts in self.layers.items():
            found[name] = [round(count) for count in counts[start : start + experts]]
            start += experts
        return found


def _chunk(weights_BT: Tensor, index: int, parts: int) -> Tensor:
    """Return part `index` of the tokens, cut as a DTensor cuts a sharded dimension."""
    chunks = weights_BT.chunk(parts, 1)
    if index < len(chunks):
        return chunks[index]
    return weights_BT[:, :0]


def watch_router_load(model: Any) -> None:
    """Give a model a `RouterLoad`, and let its experts count their tokens.

    A model without experts stays as it is, and so does an encoder-decoder model. Call this after
    all adapters are in place, and before experts are cut over ranks.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        # The tokens of two stacks are not those of the batch's rows.
        return
    layers: dict[str, int] = {}
    for name in expert_modules(model):
        base = find_base_layer(model.get_submodule(name))
        # The classes that compute equal rows for all experts do not get the router's choices.
        if type(base).__name__ not in GETS_EQUAL_ROWS:
            layers[name] = base.num_experts
    if not layers:
        return
    load = RouterLoad(layers, biased_routers(model, layers))
    for name, layer_count in zip(layers, load.in_forward, strict=True):
        module: Any = model.get_submodule(name)
        module.__class__ = _counted_class(module.__class__)
        module.layer_count = layer_count
    setattr(model, ATTRIBUTE, load)


def biased_routers(model: nn.Module, layers: Iterable[str]) -> list[nn.Module | None]:
    """Return for each layer of experts the module with the buffer BIAS; None if there is none.

    That module is the router or a part of it, and has the same parent as the experts. A bias that
    is a parameter does not count: it is frozen, and no checkpoint has it.
    """
    modules = dict(model.named_modules())
    holders = [name for name, module in modules.items() if BIAS in module._buffers]
    found: list[nn.Module | None] = []
    for layer in layers:
        parent, _, _ = layer.rpartition(".")
        beside = [modules[name] for name in holders if name.startswith(f"{parent}.")]
        found.append(beside[0] if len(beside) == 1 else None)
    return found


def has_router_bias(model: nn.Module) -> bool:
    """Return whether each layer of experts has a router whose BIAS can be trained."""
    layers = expert_modules(model)
    return bool(layers) and None not in biased_routers(model, layers)


def router_load_of(model: Any) -> RouterLoad | None:
    """Return the `RouterLoad` of a model; None if it has none."""
    load: RouterLoad | None = getattr(model, ATTRIBUTE, None)
    return load


def count_expert_tokens(
    model: Any, batch: Any, shared: Any = None, sequence: SequencePart | None = None
) -> contextlib.AbstractContextManager[None]:
    """Return the context in which to run a forward, so that its experts' tokens are counted.

    Forwards without gradients are not counted, because evaluations are no part of a step. The
    arguments are those of `RouterLoad.count_forward`.
    """
    load = router_load_of(model)
    counts = load is not None and torch.is_grad_enabled() and hasattr(batch, "lengths_B")
    if load is None or not counts:
        return contextlib.nullcontext()
    return load.count_forward(batch, shared, sequence)


def note_tensor_parallelism(model: Any, index: int, ranks: int, cuts_tokens: bool) -> None:
    """Tell a model's `RouterLoad` which tokens the experts of this tensor-parallel rank see.

    Args:
        model: The model; without a `RouterLoad` nothing is done.
        index: The number of this rank among the tensor-parallel ranks.
        ranks: How many these are.
        cuts_tokens: Whether each of them sees a part of the tokens (sequence parallelism).
            Otherwise all see the same tokens, and only the first rank counts them.
    """
    load = router_load_of(model)
    if load is None:
        return
    if cuts_tokens:
        load.token_part = (index, ranks)
    else:
        load.repeats_another = index > 0


def load_metrics(by_layer: dict[str, list[int]]) -> dict[str, Any]:
    """Return the metrics of the experts' load in a step; {} if nothing was counted.

    - `expert_load_max_by_layer`: for each layer the tokens of its fullest expert, divided by the
      mean of the layer's experts; 1 if they are even.
    - `expert_load_max`: the largest of these ratios.
    - `expert_load`: each expert's share of all choices, 1 / E if they are even. Left out if the
      layers have different numbers of experts.

    `by_layer`: name of a layer → the tokens of each of its experts.
    """
    counted = [counts for counts in by_layer.values() if sum(counts)]
    if not counted:
        return {}
    ratios = [max(counts) * len(counts) / sum(counts) for counts in counted]
    metrics: dict[str, Any] = {
        "expert_load_max": max(ratios),
        "expert_load_max_by_layer": ratios,
    }
    sizes = {len(counts) for counts in counted}
    if len(sizes) == 1:
        totals = [sum(of_expert) for of_expert in zip(*counted, strict=True)]
        total = sum(totals)
        metrics["expert_load"] = [count / total for count in totals]
    return metrics
