"""The tree of a model's modules, in the order in which a forward pass calls them."""

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Literal

from msgspec import Struct

from planner.memory.parameters.lora import expert_ranks, fused_matrices, target_names
from planner.memory.parameters.tensors import decoder_linears, expert_shapes
from planner.memory.schemes.zero3.coordinator import Modules
from planner.models.layers import ExpertPart, Experts, Layer, Linear
from planner.models.shape import ModelShape

# How the head is used: it runs as a module; the loss reads its weight, which DeepSpeed then assigns to the module that
# calls the decoder (`ds_external_parameters`); or it is a score head, which is small and stays whole.
# Source: deepspeed 0.19.8, zero/parameter_offload.py, `ZeROOrderedDict`; trl 1.16, trainer/utils.py,
# `maybe_gather_lm_head_ctx`.
HeadUse = Literal["module", "weight", "score"]


class Adapters(Struct, frozen=True, kw_only=True):
    """Settings of LoRA: `targets` is `lora_target_modules`, `named` is `lora_target_parameters`."""

    rank: int
    targets: tuple[str, ...]
    param_bytes: int
    named: tuple[str, ...] = ()


class Stored(Struct, frozen=True, kw_only=True):
    """Storage of a base model's parameters under ZeRO-3.

    Parameters of at most `persistence_threshold` elements are whole on every GPU.
    """

    param_bytes: int
    persistence_threshold: int
    quantized: tuple[str, ...] = ()  # parts of the model in other dtypes: "linear", "expert"
    packed_bytes: int = 0  # width of the numbers that hold 4-bit weights; 0: quantized parts are whole on every GPU
    viewed: bool = False  # linear layers multiply by a view of their weight
    gathered_block: bool = False  # a block of experts is gathered as one module, a "leaf"


class Node(Struct, frozen=True):
    """A module with the modules that it calls.

    `by_keyword`: its input is a keyword argument, so that DeepSpeed's post-backward hook is not attached and its
    backward pass has no end event. `adapter`: not called where PEFT's adapters are switched off.
    Source: deepspeed 0.19.8, zero/parameter_offload.py, `_post_backward_module_hook`; transformers 5.23,
    models/qwen2/modeling_qwen2.py, `Qwen2DecoderLayer.forward` (`self_attn(hidden_states=...)`).
    """

    module: int
    children: tuple["Node", ...] = ()
    by_keyword: bool = False
    adapter: bool = False


class EqualLayers(Struct, frozen=True):
    """The longest run of equal layers of a model: `count` of them from layer `first` on, each with so many elements."""

    first: int
    count: int
    elements: int


class Tree(Struct, frozen=True, kw_only=True, eq=False):
    """A model's modules. Each of `above` calls the next one; the last (the decoder) calls embedding, layers and norm.

    The last but one (the causal language model) then calls the head.

    `to_merge`: by module, the bytes of experts' weights that its layer has yet to merge with adapters from this module
    on. The memory of a layer counts these bytes already.

    Compared by identity, which makes it a fast key for `lru_cache`: `module_tree` returns the same object again.
    """

    modules: Modules
    above: tuple[int, ...]  # the outermost first
    embedding: Node
    between: Node  # position embeddings, or rotary frequencies (no parameters)
    layers: tuple[Node, ...]
    norm: Node
    head: Node | None
    equal: EqualLayers
    to_merge: dict[int, int]


class _Builder:
    """Builder of a tree: numbers modules and parameters as they are added."""

    def __init__(self, stored: Stored, adapters: Adapters | None) -> None:
        self.stored, self.adapters = stored, adapters
        self.params_of: list[tuple[int, ...]] = []
        self.elements: list[int] = []
        self.size_bytes: list[int] = []
        self.frozen: list[bool] = []
        self.viewed: list[int] = []
        self.attributes: list[int] = []
        self.to_merge: dict[int, int] = {}
        self.leaves: list[int] = []

    def param(self, elements: int, *, adapter: bool = False) -> tuple[int, ...]:
        """Add a parameter and return its index; return an empty tuple if every GPU keeps it whole."""
        if elements <= self.stored.persistence_threshold:
            return ()
        width = self.adapters.param_bytes if adapter and self.adapters else self.stored.param_bytes
        self.elements.append(elements)
        self.size_bytes.append(elements * width)
        self.frozen.append(self.adapters is not None and not adapter)
        return (len(self.elements) - 1,)

    def packed(self, weights: int) -> tuple[int, ...]:
        """Add a parameter of packed 4-bit weights, two in a byte, and return its index, as `param` does."""
        width = self.stored.packed_bytes
        found = self.param(-(-weights // (2 * width)))
        for number in found:
            self.size_bytes[number] = self.elements[number] * width
        self.attributes += found
        return found

    def node(
        self,
        params: tuple[int, ...] = (),
        children: tuple[Node, ...] = (),
        *,
        by_keyword: bool = False,
        adapter: bool = False,
    ) -> Node:
        self.params_of.append(params)
        return Node(len(self.params_of) - 1, children, by_keyword, adapter)

    def linear(self, linear: Linear, targeted: frozenset[str]) -> Node:
        if "linear" not in self.stored.quantized:
            base = self.param(linear.weight_params)
            self.viewed += base if self.stored.viewed else ()
        else:
            base = self.packed(linear.weight_params) if self.stored.packed_bytes else ()
        if self.adapters is None or linear.name not in targeted:
            return self.node(base)
        return self.adapted(base, (linear.in_features, linear.out_features))

    def adapted(self, base: tuple[int, ...], features: tuple[int, int]) -> Node:
        """Node of a linear layer with an adapter.

        PEFT's wrapper reads the dtype of A, so that DeepSpeed gathers A for the wrapper and for A's own module.
        Source: peft 0.21.2, tuners/lora/layer.py, `Linear.forward` (`_cast_input_dtype(x, lora_A.weight.dtype)`).
        """
        assert self.adapters is not None
        first = self.param(self.adapters.rank * features[0], adapter=True)
        second = self.param(self.adapters.rank * features[1], adapter=True)
        called = ((), first, second)  # dropout, A, B
        return self.node(first, (self.node(base), *(self.node(each, adapter=True) for each in called)))

    def layer(self, layer: Layer, targeted: frozenset[str], ranks: dict[ExpertPart, int]) -> Node:
        """A decoder layer: norms, attention, and an MLP or experts. Norms and biases are always whole.

        `targeted`: names of the linear layers with adapters; `ranks`: of those on parameters of experts.
        """
        experts = layer.feed_forward if isinstance(layer.feed_forward, Experts) else None
        attention = tuple(self.linear(each, targeted) for each in layer.attention.linears)
        inner = [self.linear(each, targeted) for each in decoder_linears(layer)[len(attention) :]]
        norms, merged = tuple(self.node() for _ in layer.norms), 0
        if experts is None:
            inner.insert(1, self.node())  # the activation, after the first projection
            mlp = self.node((), tuple(inner))
        else:
            mlp, merged = self.mixture(layer, experts, tuple(inner), ranks)
        found = self.node((), (norms[0], self.node((), attention, by_keyword=True), *norms[1:], mlp))
        if merged:
            self.to_merge |= dict.fromkeys((found.module, norms[0].module), merged)
        return found

    def mixture(
        self, layer: Layer, experts: Experts, shared: tuple[Node, ...], ranks: dict[ExpertPart, int]
    ) -> tuple[Node, int]:
        """Return the node of a mixture of experts with its shared linear layers, and the bytes merged with adapters.

        For some models the block is a leaf, whose parameters are gathered together, in the order in which they were
        created.
        Source: deepspeed 0.19.8, zero/leaf_module_config.py; zero/partitioned_param_coordinator.py,
        `record_parameters`. PEFT merges the parameters that have adapters when all are gathered.
        """
        read = self.experts(layer, experts, ranks)
        router = self.wrapped({"router": self.param(experts.router_params)}, layer, ranks)
        computing = self.wrapped(read, layer, ranks)
        mlp = self.node((), (router, computing, *shared))
        if self.stored.gathered_block:
            mlp = computing = self.node(tuple(sorted(params_within(mlp, self.params_of))))
            self.leaves.append(mlp.module)
        while computing.children:
            computing = computing.children[0]
        merged = [self.size_bytes[param] for part in read if part in ranks for param in read[part]]
        self.to_merge |= {computing.module: 0} if merged else {}
        return mlp, sum(merged)

    def within(self, above: list[int], called: tuple[Node, ...], head: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """Return all parameters inside each module. The modules around the decoder also contain the head."""
        found = list(self.params_of)
        nodes = list(called)
        while nodes:
            node = nodes.pop()
            found[node.module] = tuple(params_within(node, self.params_of))
            nodes += node.children
        decoder = {param for node in called for param in found[node.module]}
        for module in above:
            found[module] = tuple(decoder if module == above[-1] else decoder.union(head))
        return tuple(found)

    def elements_beside_leaves(self, layer: Node) -> int:
        """Elements by which a layer increases DeepSpeed's distance to the next use of a parameter outside leaves."""
        leaves = {param for leaf in self.leaves for param in self.params_of[leaf]}
        return sum(self.elements[param] for param in params_within(layer, self.params_of) - leaves)

    def experts(
        self, layer: Layer, experts: Experts, ranks: dict[ExpertPart, int]
    ) -> dict[ExpertPart, tuple[int, ...]]:
        """Return the two fused parameters of a layer's experts.

        One without an adapter is multiplied as a view, `weight.transpose`, which autograd saves. The parameters of
        gpt_oss are stored transposed, so that autograd saves the parameter itself.
        Source: transformers 5.23, integrations/moe.py, `_grouped_linear`; models/gpt_oss/modeling_gpt_oss.py
        (`is_transposed=True`); pytorch 2.13, torch/csrc/autograd/saved_variable.cpp (`saved_original_`).
        """
        if "expert" in self.stored.quantized:
            return {"gate_up": (), "down": ()}
        gate_up, down = (self.param(prod(shape)) for shape in expert_shapes(layer, experts))
        found: dict[ExpertPart, tuple[int, ...]] = {"gate_up": gate_up, "down": down}
        self.viewed += [param for part in found if part not in ranks and not experts.clamped for param in found[part]]
        return found

    def wrapped(self, read: dict[ExpertPart, tuple[int, ...]], layer: Layer, ranks: dict[ExpertPart, int]) -> Node:
        """Return the node of a module that reads these parameters, inside a `ParamWrapper` for each with an adapter.

        The wrapper itself reads the parameter, A and B, so that they are gathered for the wrapper. While the module
        runs, a parametrization stands in for the parameter.
        Source: peft 0.21.2, tuners/lora/layer.py, `ParamWrapper._activate_lora`.
        """
        module = self.node(tuple(param for part, params in read.items() if part not in ranks for param in params))
        for part in read:
            if part in ranks:
                matrices = fused_matrices(layer, part, ranks[part])
                params = tuple(param for each in matrices for param in self.param(each.elements, adapter=True))
                module = self.node((*read[part], *params), (module,))
        return module


def params_within(node: Node, params_of: Sequence[tuple[int, ...]]) -> set[int]:
    """Return the parameters that a module and its descendants read."""
    return set(params_of[node.module]).union(*(params_within(child, params_of) for child in node.children))


@lru_cache(maxsize=64)
def module_tree(model: ModelShape, head: HeadUse, stored: Stored, adapters: Adapters | None) -> Tree:
    """Module tree of `model` under ZeRO-3, with the parameters that are gathered for each module.

    It has one layer if the model's shapes are not known.

    Leaves out vision towers, which text rows do not call, and parameters that belong to no known module.
    """
    build = _Builder(stored, adapters)
    embed = build.param(model.embed_params)
    embedding = build.node(embed)
    position = (*build.param(model.position_params), *build.param(model.per_layer_embed_params))
    between = build.node(position)
    targeted: frozenset[str] = frozenset()
    ranks: tuple[dict[ExpertPart, int], ...] = ({},) * len(model.layers)
    if adapters is not None:
        targeted = target_names(model, adapters.targets)
        ranks = expert_ranks(model, adapters.rank, adapters.targets, adapters.named)
    passed = [(layer, own) for layer, own in zip(model.layers, ranks, strict=True) if layer.passed]
    layers = tuple(build.layer(layer, targeted, own) for layer, own in passed)
    first, count = _longest_run(passed)
    if not layers:  # no shapes are known: one layer
        rest = model.params - model.embed_params - model.position_params - model.lm_head_params
        layers = (build.node(build.param(rest)),)
    norm = build.node()
    weight = () if head == "score" else embed if model.tied else build.param(model.lm_head_params)
    tail = build.node(weight) if head == "module" else build.node() if head == "score" else None
    causal = build.node(weight if head == "weight" else ()).module
    above = [causal, build.node().module]
    if adapters is not None:
        above = [build.node().module, build.node().module, *above]  # PeftModel and LoraModel
    return Tree(
        modules=Modules(
            tuple(build.params_of),
            tuple(build.elements),
            tuple(build.size_bytes),
            tuple(build.frozen),
            frozenset(build.viewed),
            frozenset(build.attributes),
            frozenset(build.leaves),
            build.within(above, (embedding, between, *layers, norm), weight) if build.leaves else (),
        ),
        above=tuple(above),
        embedding=embedding,
        between=between,
        layers=layers,
        norm=norm,
        head=tail,
        equal=EqualLayers(first, count, build.elements_beside_leaves(layers[first])),
        to_merge=build.to_merge,
    )


def _longest_run(items: list[tuple[Layer, dict[ExpertPart, int]]]) -> tuple[int, int]:
    """Return the position and the length of the longest run of equal items; (0, 0) without items."""
    best, first = (0, 0), 0
    for i, item in enumerate(items):
        if item != items[first]:
            first = i
        best = max(best, (first, i + 1 - first), key=lambda run: run[1])
    return best
