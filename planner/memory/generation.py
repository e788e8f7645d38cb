"""Generation on a training GPU: the rollout, the KV cache of Hugging Face `generate`, logits of the sampled token."""

from functools import lru_cache

from msgspec.structs import replace

from planner.cache_keys import TrainingInput
from planner.candidate import FLASH
from planner.errors import NotMeasured
from planner.memory.activations import EXISTING, stack_inference
from planner.memory.dtypes import FLOAT32_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.images.passes import image_passes, seen
from planner.memory.layers.components import Components, add_components, peak_components, total_bytes
from planner.memory.parameters.widths import reference_dtype_bytes
from planner.memory.passes import Passes, beside_rollouts, kept_pixels, kept_scores, scores_bytes
from planner.memory.stack_recipe import StackRecipe, autocasts_generation, frozen_recipe, generation_stack
from planner.memory.weights import separate_reference_bytes
from planner.models.layers import Attention, Experts, layer_elements
from planner.models.recurrent import cache_is_known, states_of
from planner.models.shape import ModelShape

# Copies of the next token's logits in float32, whatever the model's dtype. When the copy is made: it, and the copy and
# the probabilities of the previous token, which variables still hold. When the token is sampled: the copy, its softmax,
# and the exponential noise of `torch.multinomial`. Source: transformers 5.23, generation/utils.py,
# `GenerationMixin._sample` (no top-k, top-p or temperature processor is active under TRL's defaults); pytorch 2.13,
# aten/src/ATen/native/Distributions.cpp, `multinomial_out`.
FLOAT32_LOGITS_COPIES = 3
# With a filter of the most likely words, the filtered copy of the previous or this token, too, and a byte of its mask
# beside it. Source: transformers 5.23, generation/logits_process.py, `TopKLogitsWarper`.
FILTERED_BYTES = FLOAT32_BYTES + 1


def recurrent_state_bytes(model: ModelShape, rows: int, dtype_bytes: int, autocast: bool) -> int:
    """Bytes of the states that layers keep of `rows` sequences in place of keys and values, from the prompt on.

        states = rows x sum over layers of (channels x kernel x hidden width + heads x head elements x state width)

    The hidden width is `dtype_bytes`, the weights', or 2 under autocast. The state width is 4, but of Mamba 2 it is 2
    under autocast, which reaches the products that make the state.
    Source: transformers 5.23, cache_utils.py, `LinearAttentionLayer` (allocated once, then written in place);
    tests/test_kv_cache.py. See planner/models/recurrent.py for the shapes.

    Example: Qwen3.5-4B, 8 rows, bfloat16: 24 layers of 8,192 x 4 x 2 + 32 x 16,384 x 4 bytes, 396 MiB.
    """
    hidden = 2 if autocast else dtype_bytes
    found = 0
    for state, count in states_of(model):
        width = 2 if autocast and state.dtype == "product" else FLOAT32_BYTES
        found += count * (state.convolution * hidden + state.matrices * width)
    return rows * found


def kv_cache_bytes(model: ModelShape, rows: int, tokens: int, dtype_bytes: int) -> int:
    """Bytes of the cache after `tokens` positions of every row, the last of them one at a time.

        cache = rows x sum over layers of kept x (kv_heads x (head_dim + v_head_dim)) x dtype_bytes
        kept  = tokens, or min(tokens, window) in a sliding-window layer
        MLA   : kv_lora_rank + qk_rope_head_dim in place of kv_heads x (head_dim + v_head_dim)
        DSA   : MLA's, and index_head_dim

    A layer that shares another's cache keeps nothing. `tokens` is prompt + completion - 1 at the end: the last sampled
    token is not fed back.

    Source: transformers 5.23, cache_utils.py, `DynamicLayer` and `DynamicSlidingWindowLayer`, which keeps the last
    window - 1 tokens as a view of an allocated tensor of `window` tokens;
    models/deepseek_v3/modeling_deepseek_v3.py, `DeepseekV3Attention.forward` (the cache holds the latent, not the
    expanded heads); `DynamicIndexedLayer` (sparse attention, DSA, also keeps its indexer's keys).

    Example: Qwen2.5-7B, 8 rows of 1,023 tokens, bf16: 8 x 28 x 1,023 x 1,024 x 2 = 447.6 MiB.

    Leaves out `cache_implementation="static"`, which allocates all tokens of all layers at once.
    """
    windowed, full = _elements_per_token(model)
    kept = full * tokens + sum(elements * min(tokens, window) for window, elements in windowed)
    return rows * kept * dtype_bytes


def prefill_cache_bytes(model: ModelShape, rows: int, prompt_tokens: int, dtype_bytes: int) -> int:
    """Bytes of the cache right after the prompt, when sliding-window layers still hold all of its tokens.

        cache = rows x prompt_tokens x sum over layers of elements x dtype_bytes

    Source: transformers 5.23, cache_utils.py, `DynamicSlidingWindowLayer.update` (the layer keeps a slice of the
    concatenation until the next token's concatenation replaces it).
    """
    windowed, full = _elements_per_token(model)
    return rows * prompt_tokens * (full + sum(elements for _, elements in windowed)) * dtype_bytes


def kv_cache_peak_bytes(model: ModelShape, rows: int, prompt_tokens: int, tokens: int, dtype_bytes: int) -> int:
    """Most bytes of the cache: after the prompt, or while the last token is appended.

        peak = max(prefill, cache(tokens) + the largest old copy of a layer)

    `torch.cat` makes the longer copy before the old one is dropped: of keys or values in a full layer, of both in a
    sliding-window layer. The formula counts one token of a few layers too much if the layer with the largest copy is
    not the last.
    """
    old_copy = max((_old_copy_elements(layer.attention, tokens) for layer, _ in model.layer_kinds), default=0)
    grown = kv_cache_bytes(model, rows, tokens, dtype_bytes) + rows * old_copy * dtype_bytes
    return max(prefill_cache_bytes(model, rows, prompt_tokens, dtype_bytes), grown)


def mla_expansion_bytes(model: ModelShape, rows: int, tokens: int, dtype_bytes: int) -> int:
    """Bytes that one layer with multi-head latent attention (MLA) allocates in a decode step; 0 for other attention.

        expansion = rows x tokens x heads x (nope + v  +  nope + rope) x dtype_bytes
        DSA       : and rows x tokens x 4 x (index_heads + max(index_heads, index_head_dim))

    `kv_b_proj` expands the latent of all tokens for every new one, and the keys are copied with their rotary part. They
    are alive while the indexer of sparse attention scores all tokens in float32: its keys' copy and the scores, then
    the scores and their scaled copy.
    Source: transformers 5.23, models/deepseek_v3/modeling_deepseek_v3.py, `DeepseekV3Attention.expand_kv`;
    models/deepseek_v32/modeling_deepseek_v32.py, `DeepseekV32Indexer.forward`.
    """
    blocks = [layer.attention for layer, _ in model.layer_kinds]
    per_token = (_expanded_elements(block) * dtype_bytes + _scored_elements(block) * FLOAT32_BYTES for block in blocks)
    return rows * tokens * max(per_token, default=0)


def chosen_experts_bytes(model: ModelShape, tokens: int, dtype_bytes: int) -> int:
    """Bytes of experts' weights that `generate` copies in a layer, after the prompt, for `tokens` of a pass.

        copies = tokens x chosen experts x parameters of an expert x dtype_bytes

    For speed with few tokens, `generate` replaces the grouped product by one that copies the weights of each token's
    experts; those of the up projection are alive while those of the down projection are copied. Without a cache each
    pass has all tokens of the rows.
    Source: transformers 5.23, generation/utils.py, `_optimize_model_for_decode`; integrations/moe.py,
    `batched_mm_experts_forward`.

    Example: Qwen1.5-MoE-A2.7B, 16 rows, bfloat16: 16 x 4 x 8.65 M x 2 = 1.03 GiB; without a cache, of 2,048 tokens,
    2.1 TiB.

    Leaves out layers without formulas.
    """
    blocks = [layer.feed_forward for layer, _ in model.layer_kinds if isinstance(layer.feed_forward, Experts)]
    chosen = (block.expert_params // block.num_experts * block.num_experts_per_tok for block in blocks)
    return tokens * max(chosen, default=0) * dtype_bytes


def generation_logits_bytes(model: ModelShape, rows: int, logits_dtype_bytes: int = FLOAT32_BYTES) -> int:
    """Bytes of the next token's logits and of the copies that sampling makes.

        logits = rows x vocabulary x (logits_dtype_bytes + 3 x 4)

    The model's output is alive until the step ends. It is float32 if accelerate converts outputs (`bf16=True`;
    accelerate 1.15, accelerator.py, `Accelerator.prepare_model`), else of the model's dtype. `generate` computes logits
    of the last position only.
    Example: Qwen2.5-7B, 8 rows: 8 x 152,064 x 16 = 18.6 MiB.

    Leaves out top-k and top-p, which sort (TRL's defaults do not use them), and the 16-bit logits that accelerate
    converts, which are dropped before the first copy.
    """
    return rows * model.vocab_size * (logits_dtype_bytes + FLOAT32_LOGITS_COPIES * FLOAT32_BYTES)


def kv_cache_dtype_bytes(model: ModelShape, weight_dtype_bytes: int, autocast: bool) -> int:
    """Bytes of one cached number.

        16-bit weights, or no autocast        as the weights
        float32 weights with 16-bit autocast  4 with rotary embeddings or MLA, else 2

    Rotary embeddings and MLA's norm promote the keys to float32, and the cache takes the keys' dtype for the values
    too.
    Source: transformers 5.23, cache_utils.py, `DynamicLayer.lazy_initialization` and `update`; tests/test_kv_cache.py.
    """
    if weight_dtype_bytes < FLOAT32_BYTES or not autocast:
        return weight_dtype_bytes
    promoted = any(layer.attention.rotary or layer.attention.kv_latent_dim for layer, _ in model.layer_kinds)
    return FLOAT32_BYTES if promoted else FLOAT32_BYTES // 2


@lru_cache(maxsize=1024)
def _elements_per_token(model: ModelShape) -> tuple[tuple[tuple[int, int], ...], int]:
    """Cached numbers per token: (((window, sum over the layers with it), ...), sum over the layers without a window).

    Raises:
        NotMeasured: a layer keeps something else than keys and values, such as the state of a state space model.
    """
    if not cache_is_known(model):
        raise NotMeasured(
            f"{model.id} ({model.model_type}) has layers that keep no keys and values; "
            "what `generate` keeps for them has no formula here. "
            "A method that does not generate can be planned: sft, dpo, kto, reward."
        )
    windowed: dict[int, int] = {}
    full = 0
    for layer, count in model.layer_kinds:
        if layer.attention.shares_cache:
            continue
        elements = layer_elements(layer.attention) * count
        if layer.attention.sliding_window is None:
            full += elements
        else:
            windowed[layer.attention.sliding_window] = windowed.get(layer.attention.sliding_window, 0) + elements
    return tuple(windowed.items()), full


def _old_copy_elements(attention: Attention, tokens: int) -> int:
    if attention.sliding_window is not None:
        return min(tokens - 1, attention.sliding_window) * layer_elements(attention)
    if attention.kv_latent_dim:
        return (tokens - 1) * (attention.kv_latent_dim - attention.rope_head_dim)
    return (tokens - 1) * max(attention.k_dim, attention.v_dim)


def _expanded_elements(attention: Attention) -> int:
    if not attention.kv_latent_dim:
        return 0
    nope = attention.head_dim - attention.rope_head_dim
    return attention.num_attention_heads * (nope + attention.v_head_dim + attention.head_dim)


def _scored_elements(attention: Attention) -> int:
    if not attention.index_head_dim:
        return 0
    return attention.index_heads + max(attention.index_heads, attention.index_head_dim)


def rollout(passes: Passes) -> Components:
    """Completions are sampled by vLLM, or by `generate`, whose KV cache and pixels are then on this GPU."""
    idle = add_components(beside_rollouts(passes), kept_pixels(passes))
    if passes.candidate.vllm != "off":
        return idle
    candidate = passes.candidate
    rows, stack = candidate.generation_rows, generation_stack(passes.recipe, candidate)
    sampled = add_components(idle, kept_pixels(passes), generation(passes, rows, stack))
    return max(sampled, value_samples(passes), key=total_bytes)


def value_samples(passes: Passes) -> Components:
    """The reference samples before the policy trains, `num_value_samples` completions of a prompt; else empty.

    DeepSpeed has not placed the policy by then. Source: see `Method.samples_values`.
    """
    candidate = passes.candidate
    if not candidate.method_row.samples_values:
        return {}
    rows = candidate.rows * candidate.num_value_samples
    frozen = frozen_recipe(candidate, passes.recipe.flash, reference_dtype_bytes(candidate))
    before: Components = {**passes.idle, "optimizer_states": 0, "gradients": 0}
    if candidate.scheme_row.stage:
        before["weights"] = separate_reference_bytes(candidate)
    return add_components(before, generation(passes, rows, generation_stack(frozen, candidate)))


def stacked_scores(candidate: TrainingInput) -> int:
    """Bytes of the scores of all sampled tokens while they are stacked or padded, for a trainer that keeps them."""
    stack = total_bytes(kept_scores(candidate))
    return stack + candidate.rows * candidate.gradient_accumulation_steps * scores_bytes(candidate) if stack else 0


def generation(passes: Passes, rows: int, recipe: StackRecipe) -> Components:
    """`generate` of rows at its peak: the last token with the full KV cache, or the forward pass over the prompt.

    Each with what is gathered then. Without a cache: the forward pass over the whole row.
    """
    candidate, model = passes.candidate, passes.candidate.model
    prompt = candidate.prompt_length
    tokens = prompt + candidate.max_completion_length - 1
    stack = stack_inference(model, recipe)
    weight_width, autocast = recipe.recipe.weight_width, recipe.recipe.autocast_width > 0
    width = kv_cache_dtype_bytes(model, weight_width, autocast)
    logits = generation_logits_bytes(model, rows, FLOAT32_BYTES if autocast else weight_width)
    logits += rows * model.vocab_size * FILTERED_BYTES if candidate.method_row.filters_words else 0
    # PEFT calls the base model's forward, which accelerate does not wrap (`generation_stack`)
    states = recurrent_state_bytes(model, rows, weight_width, autocast and candidate.tuning == "full")
    last: Components = {
        "kv_cache": kv_cache_peak_bytes(model, rows, prompt, tokens, width) + states,
        "loss": logits + stacked_scores(candidate),
        "autocast_copies": stack.copies + generation_head_copy(passes) if candidate.tuning == "full" else 0,
        "transients": mla_expansion_bytes(model, rows, tokens, width) + chosen_experts_bytes(model, rows, weight_width),
    }
    images = image_passes(candidate, recipe, EXISTING, graph=False, rows=rows)
    gathered = passes.states.gathers.generation
    in_prompt: Components = {"communication": gathered.prompt}
    after: Components = {"communication": gathered.after}
    embedding: Components = {"communication": gathered.embedding}
    if candidate.generates_without_cache:
        whole: Components = {
            "loss": logits,
            "attention_scores": recipe.mask_widths * rows * tokens * tokens,
            "transients": chosen_experts_bytes(model, rows * tokens, weight_width),
        }
        layers = peak_components(stack.peak, rows * tokens, rows * tokens * tokens)
        in_layers: Components = {"communication": max(gathered.prompt, gathered.layers_after)}
        row = seen(add_components(whole, layers, in_layers), images)
        return max(embedding, row, add_components({"loss": logits}, after), key=total_bytes)
    scores = rows * prompt * prompt
    prefill: Components = {
        "kv_cache": prefill_cache_bytes(model, rows, prompt, width) + states,
        "attention_scores": recipe.mask_widths * scores,
    }
    in_prefill = stack_inference(of_prompt(candidate), recipe).peak
    layers = add_components(prefill, peak_components(in_prefill, rows * prompt, scores), in_prompt)
    return max(
        add_components(embedding, {"attention_scores": recipe.mask_widths * scores}),
        seen(layers, images),
        add_components(prefill, {"loss": logits}, after),
        add_components(last, after),
        key=total_bytes,
    )


def of_prompt(candidate: TrainingInput) -> ModelShape:
    """Return the model with the layers that all tokens of a prompt pass; see `Architecture.shared_layers_decode`."""
    model = candidate.model
    if not model.architecture.shared_layers_decode or candidate.attn_implementation in FLASH:
        return model
    return replace(model, layers=tuple(layer for layer in model.layers if not layer.attention.shares_cache))


def generation_head_copy(passes: Passes) -> int:
    """Bytes of the 16-bit copy of a float32 head in `generate` of full fine-tuning, which accelerate autocasts."""
    if not autocasts_generation(passes.candidate):
        return passes.head.weight_cast_bytes
    return replace(passes.head, compute_width=SIXTEEN_BIT_BYTES).weight_cast_bytes
