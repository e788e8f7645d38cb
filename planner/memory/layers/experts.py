"""Mixture-of-experts blocks: router, gathered tokens, grouped matrix products, weighted sum in the original order.

Sources: transformers 5.23 `integrations/moe.py` (`grouped_mm_experts_forward`), `models/<family>/modeling_<family>.py`
(`*TopKRouter`, `*SparseMoeBlock`). Indices are int64. Autocast has no rule for grouped_mm: experts compute in the dtype
of their weights.
"""

from collections.abc import Callable

from msgspec.structs import replace

from planner.memory.layers import operators as op
from planner.memory.layers.autograd import Tape, Tensor
from planner.memory.layers.feed_forward import activate, mlp
from planner.memory.layers.linear import cast_weight, linear
from planner.memory.layers.recipe import Recipe, tokens
from planner.models.layers import ExpertPart, Experts, Linear, Mlp, RouterStyle

INDEX = 8  # bytes of an int64


def experts(tape: Tape, recipe: Recipe, block: Experts, x: Tensor) -> Tensor:
    """The whole block: router, experts, and the shared expert if there is one.

    The router's results are local variables of the block and live until its end.
    """
    flat = op.view(tape, x)
    if block.shared is not None and block.shared_gate_params:
        return op.view(tape, experts_with_gated_shared(tape, recipe, block, flat, block.shared))
    chosen = ROUTERS[block.router](tape, recipe, block, flat)
    result = op.view(tape, chosen_experts(tape, recipe, block, flat, *chosen[1:]))
    if block.shared is None:
        return result
    shared = mlp(tape, recipe, block.shared, x)
    result = op.add(tape, result, shared)
    del chosen
    return result


def experts_with_gated_shared(tape: Tape, recipe: Recipe, block: Experts, x: Tensor, shared_block: Mlp) -> Tensor:
    """Qwen2MoeSparseMoeBlock: computes the shared expert first and multiplies it by a sigmoid gate at the end."""
    shared = mlp(tape, recipe, shared_block, x, flat=True)
    chosen = ROUTERS[block.router](tape, recipe, block, x)
    result = chosen_experts(tape, recipe, block, x, *chosen[1:])
    gate = Linear(name="shared_expert_gate", in_features=x.elements[0], out_features=1)
    opening = op.unary(tape, linear(tape, recipe, gate, x, flat=True), "output")
    shared = op.mul(tape, opening, shared)
    del opening
    result = op.add(tape, result, shared)
    del chosen
    return result


# -- routers: each returns the logits, the weights of the chosen experts, and the experts' indices ---------------------


def router_product(tape: Tape, recipe: Recipe, block: Experts, x: Tensor, width: int) -> Tensor:
    """F.linear(x, router weight, bias) in a dtype of `width` bytes; the bias has the router's remaining parameters."""
    hidden, count = x.elements[0], block.num_experts
    bias = block.router_params - hidden * count
    offset = (
        cast_weight(tape, recipe, tape.weight(bias, recipe.weight_width, recipe.trainable), width) if bias else None
    )
    stored = router_weight(tape, recipe, hidden, count)
    weight = cast_weight(tape, recipe, stored, width)
    narrow = op.cast(tape, x, width)
    return op.mm(tape, narrow, op.view(tape, weight), tokens(count), offset)


def router_weight(tape: Tape, recipe: Recipe, hidden: int, count: int) -> Tensor:
    """The router's weight; with adapters on the experts, weight + B @ A (peft `ParamWrapper.get_delta_weight`)."""
    weight = tape.weight(hidden * count, recipe.weight_width, recipe.trainable)
    rank = recipe.expert_rank("router")
    if not rank:
        return weight
    own = recipe.adapter_width if recipe.on_cuda else 4  # peft adds in float32 on the CPU
    width = recipe.autocast_width or own
    wide_down = op.cast(tape, tape.weight(rank * hidden, recipe.adapter_width, True), own)
    wide_up = op.cast(tape, tape.weight(rank * count, recipe.adapter_width, True), own)
    down, up = cast_weight(tape, recipe, wide_down, width), cast_weight(tape, recipe, wide_up, width)
    del wide_down, wide_up
    product = op.bmm(tape, up, down, weight.elements)
    delta = op.cast(tape, op.scale(tape, product), recipe.weight_width)
    del product
    tape.empty(weight.elements, recipe.weight_width)  # register_parametrization computes the sum once to check it
    return op.add(tape, weight, delta)


def expert_factors(
    tape: Tape, recipe: Recipe, block: Experts, part: ExpertPart, sizes: tuple[int, int]
) -> tuple[Tensor, ...]:
    """LoRA matrices B and A of all experts, cast to the dtype of the weights (`get_delta_factors`); () without.

    `sizes` are the input and output features of one expert. Registering the parametrization computes the sum once.
    Beside them the parameter, of quantized experts: `_activate_lora` holds what it reads until the forward pass ends.
    """
    inward, outward = sizes
    rank, count = recipe.expert_rank(part) * block.num_experts, block.num_experts * inward * outward
    if not rank:
        return ()
    width = recipe.expert_width or recipe.weight_width
    read = (dequantized(tape, recipe, count),) if recipe.expert_width else ()
    up = op.cast(tape, tape.weight(rank * outward, recipe.adapter_width, True), width)
    down = op.cast(tape, tape.weight(rank * inward, recipe.adapter_width, True), width)
    tape.empty((0, 0, count), width)
    return (up, down, *read)


def softmax_router(tape: Tape, recipe: Recipe, block: Experts, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax over all experts in float32, then the largest k, divided by their sum (mixtral).

    qwen and olmoe ("softmax_cast") cast the weights to the dtype of the logits.
    """
    logits = router_product(tape, recipe, block, x, recipe.compute_width)
    probabilities = op.softmax(tape, logits, recipe.on_cuda, half=recipe.half)
    values, indices = topk(tape, probabilities, block.num_experts_per_tok)
    if block.router_normalised:
        values = divide_by_sum(tape, values)
    if block.router == "softmax_cast":
        values = op.cast(tape, values, logits.width)
    return logits, values, indices


def topk_softmax_router(tape: Tape, recipe: Recipe, block: Experts, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The largest k logits, then softmax over them in their own dtype (gpt_oss)."""
    logits = router_product(tape, recipe, block, x, recipe.compute_width)
    values, indices = topk(tape, logits, block.num_experts_per_tok)
    return logits, op.softmax(tape, values, recipe.on_cuda, float32=False), indices


def float32_softmax_router(tape: Tape, recipe: Recipe, block: Experts, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """deepseek_v2: logits in float32 (16-bit under autocast), softmax, the largest k."""
    logits = float32_product(tape, recipe, block, x)
    probabilities = op.softmax(tape, logits, recipe.on_cuda, half=recipe.half)
    if block.router_groups:
        mask = grouped_mask(tape, probabilities, block)
        probabilities = op.masked_fill(tape, probabilities, mask)
        del mask
    values, indices = topk(tape, probabilities, block.num_experts_per_tok)
    return logits, op.scale(tape, values), indices


def float32_sigmoid_router(tape: Tape, recipe: Recipe, block: Experts, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """deepseek_v3: sigmoid of the logits; a bias and groups affect only which experts are chosen, not their weights."""
    logits = float32_product(tape, recipe, block, x)
    probabilities = op.unary(tape, logits, "output")
    chosen = Tensor(probabilities.storage, probabilities.elements, probabilities.width)
    biased = op.add_number(tape, op.cast(tape, chosen, 4))
    mask = grouped_mask(tape, biased, block)
    biased = op.masked_fill(tape, biased, mask)
    del mask, chosen
    indices = tape.empty(tokens(block.num_experts_per_tok), INDEX)
    values = op.gather(tape, probabilities, indices)
    if block.router_normalised:
        values = divide_by_sum(tape, values)
    return logits, op.scale(tape, values), indices


def float32_product(tape: Tape, recipe: Recipe, block: Experts, x: Tensor) -> Tensor:
    """F.linear(x.type(float32), weight.type(float32)); autocast casts both float32 copies to 16 bits."""
    hidden, count, width = x.elements[0], block.num_experts, recipe.autocast_width or 4
    wide = op.cast(tape, x, 4)
    weight = op.cast(tape, router_weight(tape, recipe, hidden, count), 4)
    narrow_weight, narrow = op.cast(tape, weight, width), op.cast(tape, wide, width)
    return op.mm(tape, narrow, op.view(tape, narrow_weight), tokens(count))


def grouped_mask(tape: Tape, scores: Tensor, block: Experts) -> Tensor:
    """Bool mask of the experts whose group was chosen; allocates the groups' scores and masks as temporaries."""
    groups = max(block.router_groups, 1)
    group_scores = tape.empty(tokens(groups), scores.width)
    group_mask = tape.empty(tokens(groups), scores.width)
    score_mask = tape.empty(tokens(block.num_experts), scores.width)
    del group_scores, group_mask
    as_bool = tape.empty(tokens(block.num_experts), 1)
    del score_mask
    return as_bool


def topk(tape: Tape, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """x.topk(count): values and indices; saves the indices; the gradient is scattered into zeros of x's size."""
    values, indices = tape.empty(tokens(count), x.width), tape.empty(tokens(count), INDEX)
    saved = tape.save(indices) if x.requires_grad else []
    return tape.output(values, (x,), saved, op.same_size_backward(tape, x)), indices


def divide_by_sum(tape: Tape, values: Tensor) -> Tensor:
    """values /= values.sum(): an in-place division, for which autograd saves a copy of the old values, and the sum."""
    one = tokens(1)
    sum_ = op.sum_last(tape, values, one)
    original = tape.empty(values.elements, values.width)
    saved = tape.save(original if sum_.requires_grad else None, sum_ if values.requires_grad else None)
    elements, width = values.elements, values.width

    def backward(gradient: Tensor) -> list[Tensor | None]:
        held = [tape.empty(elements, width)]
        quotient = tape.empty(elements, width)
        held.append(tape.empty(elements, width))
        of_sum = tape.empty(elements, width)
        del quotient
        return [held[0], of_sum]

    return tape.output(Tensor(values.storage, elements, width), (values, sum_), saved, backward)


ROUTERS: dict[RouterStyle, Callable[[Tape, Recipe, Experts, Tensor], tuple[Tensor, Tensor, Tensor]]] = {
    "softmax": softmax_router,
    "softmax_cast": softmax_router,
    "topk_softmax": topk_softmax_router,
    "float32_softmax": float32_softmax_router,
    "float32_sigmoid": float32_sigmoid_router,
}


# -- the experts -------------------------------------------------------------------------------------------------------


def chosen_experts(tape: Tape, recipe: Recipe, block: Experts, x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
    """Run the chosen experts where they are: on this GPU, or divided among several."""
    if recipe.ep_size == 1:
        return grouped_experts(tape, recipe, block, x, weights)
    return dispatched_experts(tape, recipe, block, x, weights)


def dispatched_experts(tape: Tape, recipe: Recipe, block: Experts, x: Tensor, weights: Tensor) -> Tensor:
    """Send each pair of a token and an expert to the GPU of the expert, and multiply what comes back by the weights.

    Every GPU gets as many pairs as it sends: the routing is even.
    Source: transformers 5.23, distributed/expert_parallel.py, `AllToAllEP`.
    """
    top_k, hidden = block.num_experts_per_tok, x.elements[0]
    own = replace(
        block,
        num_experts=block.num_experts // recipe.ep_size,
        expert_params=block.expert_params // recipe.ep_size,
    )
    pairs = tokens(top_k * hidden)
    order, places = tape.empty(tokens(top_k), INDEX), tape.empty(tokens(top_k), INDEX)
    sent = op.index(tape, x, places, pairs)
    del places
    received = op.copy_to(tape, sent, sent.width)
    del sent
    experts_of_rows, ones = tape.empty(tokens(top_k), INDEX), tape.empty(tokens(top_k), x.width)
    output = grouped_experts(tape, recipe, own, received, ones, sent=True)
    returned = op.copy_to(tape, output, output.width)
    placed = op.index(tape, returned, order, pairs)
    weighted = op.mul(tape, placed, weights)
    width = 4 if recipe.autocast_width and recipe.on_cuda else weighted.width
    result = op.mean_last(tape, weighted, tokens(hidden), width)
    del weighted, returned, placed
    narrow = op.cast(tape, result, x.width)
    del order, experts_of_rows, received, output
    return narrow


def grouped_experts(
    tape: Tape, recipe: Recipe, block: Experts, x: Tensor, weights: Tensor, sent: bool = False
) -> Tensor:
    """Run the chosen experts on their tokens (integrations/moe.py, `grouped_mm_experts_forward`).

    Sorts the tokens by expert, computes two grouped products with the activation between, multiplies by the router's
    weights, restores the order and sums over the chosen experts. `sent`: the tokens came here for one expert each, and
    rows of other GPUs' experts are masked, of which there are none.
    """
    top_k, inner = block.num_experts_per_tok, block.moe_intermediate_size
    hidden = x.elements[0] // top_k if sent else x.elements[0]
    down_factors = expert_factors(tape, recipe, block, "down", (inner, hidden))
    up_factors = expert_factors(tape, recipe, block, "gate_up", (hidden, 2 * inner))
    chosen = tokens(top_k)
    order, permutation = tape.empty(chosen, INDEX), tape.empty(chosen, INDEX)
    rows = tape.empty(chosen, INDEX)
    gathered = op.index(tape, x, rows, tokens(top_k * hidden))
    del rows
    sorted_weights = op.index(tape, op.view(tape, weights), permutation, weights.elements)
    histogram_input = tape.empty(chosen, 4)
    counts = tape.empty((0, 0, block.num_experts), 4)
    offsets = tape.empty((0, 0, block.num_experts), 4)
    mask = tape.empty(chosen, 1) if sent else None
    merged_up = merged_weights(tape, recipe, block, hidden * 2 * inner, up_factors)
    biases = expert_biases(tape, recipe, block, order, 2 * inner)
    projected = grouped_product(tape, recipe, block, gathered, offsets, merged_up, biases, 2 * inner)
    projected = projected if mask is None else op.masked_fill(tape, projected, mask)
    projected = gated_activation(tape, recipe, block, projected)
    merged_down = merged_weights(tape, recipe, block, inner * hidden, down_factors)
    biases = expert_biases(tape, recipe, block, order, hidden)
    projected = grouped_product(tape, recipe, block, projected, offsets, merged_down, biases, hidden)
    projected = projected if mask is None else op.masked_fill(tape, projected, mask)
    weighted = op.mul(tape, projected, sorted_weights)
    inverse = inverse_permutation(tape, top_k)
    weighted = op.index(tape, weighted, inverse, tokens(top_k * hidden))
    result = op.mean_last(
        tape,
        weighted,
        x.elements if sent else tokens(hidden),
        4 if recipe.autocast_width and recipe.on_cuda else weighted.width,
    )
    narrow = op.cast(tape, result, x.width)
    del order, histogram_input, counts, gathered
    return narrow


def merged_weights(tape: Tape, recipe: Recipe, block: Experts, elements: int, factors: tuple[Tensor, ...]) -> Tensor:
    """The fused weight of all experts; with adapters, a new tensor weight + B @ A, which the backward pass needs.

    Quantized experts are dequantized by each forward pass, which keeps them to its end (`QuantizationRow.expert_width`;
    torch/nn/utils/parametrize.py, `_cache`).
    """
    count = block.num_experts * elements
    stored = dequantized(tape, recipe, count) if recipe.expert_width else None
    if not factors:
        return stored or tape.weight(count, recipe.weight_width, recipe.trainable)
    return op.baddbmm(tape, count, recipe.expert_width or recipe.weight_width, factors[0], factors[1])


def dequantized(tape: Tape, recipe: Recipe, count: int) -> Tensor:
    """Return a dequantized parameter of all experts of a layer (`count` weights); its scratch memory is freed here."""
    scratch = tape.empty((0, 0, round(count * recipe.expert_scratch)), 1) if recipe.expert_scratch else None
    weight = tape.empty((0, 0, count), recipe.expert_width)
    del scratch
    return weight


def inverse_permutation(tape: Tape, count: int) -> Tensor:
    """Indices that restore the tokens' original order."""
    result = tape.empty(tokens(count), INDEX)
    tape.empty(tokens(count), INDEX)  # torch.arange, copied into the result
    return result


def expert_biases(tape: Tape, recipe: Recipe, block: Experts, order: Tensor, outward: int) -> Tensor | None:
    """For each chosen token the bias of its expert (gpt_oss); None for experts without biases."""
    if not block.clamped:
        return None
    biases = tape.weight(block.num_experts * outward, recipe.weight_width, recipe.trainable)
    return op.index(tape, biases, order, tokens(block.num_experts_per_tok * outward))


def grouped_product(
    tape: Tape,
    recipe: Recipe,
    block: Experts,
    x: Tensor,
    offsets: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    outward: int,
) -> Tensor:
    """torch._grouped_mm over all experts in the dtype of their weights; the bias is added in place."""
    top_k = block.num_experts_per_tok
    narrow = op.cast(tape, x, weight.width)
    result = op.mm(
        tape, narrow, op.view(tape, weight), tokens(top_k * outward), extra=offsets, weight_kind="activations"
    )
    if bias is None:
        return result
    return tape.output(
        Tensor(result.storage, result.elements, result.width), (result, bias), [], lambda gradient: [gradient, gradient]
    )


def gated_activation(tape: Tape, recipe: Recipe, block: Experts, together: Tensor) -> Tensor:
    """act(gate) * up, from the two halves of the grouped product.

    gpt_oss takes every second feature, clamps both parts and computes (up + 1) * gate * sigmoid(gate * alpha).
    """
    half = together.elements[0] // 2
    if not block.clamped:
        gate, up = op.split(tape, together, (half, half))
        active = activate(tape, recipe, block.activation, gate)
        return op.mul(tape, active, up)
    gate, up = op.slice_view(tape, together, tokens(half)), op.slice_view(tape, together, tokens(half))
    clamped_gate = op.unary(tape, gate, "input", temporaries=1)
    clamped_up = op.unary(tape, up, "input", temporaries=1)
    scaled = op.scale(tape, clamped_gate)
    opening = op.unary(tape, scaled, "output")
    del scaled
    active = op.mul(tape, clamped_gate, opening)
    del opening
    raised = op.add_number(tape, clamped_up)
    return op.mul(tape, raised, active)
