"""The KV cache of `generate` equals that of a real small model on the CPU, to the byte."""

import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cache_keys import training_settings
from planner.candidate import Candidate
from planner.memory.generation import (
    generation_logits_bytes,
    kv_cache_bytes,
    kv_cache_dtype_bytes,
    kv_cache_peak_bytes,
    mla_expansion_bytes,
    of_prompt,
    prefill_cache_bytes,
    recurrent_state_bytes,
)
from planner.memory.layers.measured_layers import MeasuringRefused, complete_model, complete_shipped
from planner.models.catalogue import load_model
from planner.models.from_config import NOT_COUNTED, shape_of

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402  after the check that torch is there
from torch.utils._pytree import tree_leaves  # noqa: E402

ROWS, PROMPT, COMPLETION = 3, 12, 20
TOKENS = PROMPT + COMPLETION - 1
COMMON = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 512, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
LATENT = {
    "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2,
    "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 16, "vocab_size": 512, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**COMMON, num_hidden_layers=3),
    "gemma3_text": lambda: transformers.Gemma3TextConfig(**COMMON, num_hidden_layers=6, sliding_window=8),
    "mixtral": lambda: transformers.MixtralConfig(
        **COMMON, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2
    ),
    "deepseek_v3": lambda: transformers.DeepseekV3Config(**LATENT),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=64, n_layer=2, n_head=4, vocab_size=512, bos_token_id=1, eos_token_id=None, pad_token_id=0
    ),
}


class _Alive(TorchDispatchMode):
    """Count the bytes of the live tensors that `counts` selects, and their peak."""

    def __init__(self, counts):  # type: ignore[no-untyped-def]
        super().__init__()
        self.counts, self.sizes, self.now, self.peak = counts, {}, 0, 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = op(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and self.counts(op, args, tensor):
                self._born(tensor.untyped_storage())
        return out

    def _born(self, storage):  # type: ignore[no-untyped-def]
        key = storage._cdata
        if key not in self.sizes:
            self.sizes[key] = storage.nbytes()
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._died, key)

    def _died(self, key):  # type: ignore[no-untyped-def]
        self.now -= self.sizes.pop(key)


def _stored_bytes(cache) -> int:  # type: ignore[no-untyped-def]
    storages = [tensor.untyped_storage() for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _model(name, dtype):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    config = CONFIGS[name]()
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval(), shape_of(
        config.to_dict(), id=name
    )


def _prompts():  # type: ignore[no-untyped-def]
    mask = torch.ones(ROWS, PROMPT, dtype=torch.long)
    mask[0, :3] = 0
    return {"input_ids": torch.full((ROWS, PROMPT), 7), "attention_mask": mask}


HYBRIDS = {
    "qwen3_next": {
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
        "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
    "qwen3_5_text": {
        "linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    },
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "granitemoehybrid": {
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "mamba_n_heads": 8, "mamba_d_head": 16,
        "mamba_d_state": 24, "mamba_n_groups": 2, "num_local_experts": 0, "shared_intermediate_size": 64,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M-M*", "mamba_num_heads": 8, "mamba_head_dim": 20, "ssm_state_size": 24,
        "n_groups": 2,
    },
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("dtype", "autocast"), [("float32", False), ("float32", True), ("bfloat16", False)])
@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_without_keys_keep_the_states_of_the_formula(name, dtype, autocast):  # type: ignore[no-untyped-def]
    from probes.layers.shapes import shapes_of_layers

    config = transformers.AutoConfig.for_model(name, **COMMON, num_hidden_layers=4, **HYBRIDS[name])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    shape = shape_of(config.to_dict(), id=name, counts=NOT_COUNTED)
    shape = complete_model(shape, shapes_of_layers(shape), _not_measured)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        layers = _generate(model).past_key_values.layers
    states = [
        state
        for layer in layers
        for kept in (getattr(layer, "conv_states", {}), getattr(layer, "recurrent_states", {}))
        for state in kept.values()
        if state is not None
    ]
    found = sum(state.untyped_storage().nbytes() for state in states)
    assert found == recurrent_state_bytes(shape, ROWS, 4 if dtype == "float32" else 2, autocast) > 0
    keys = [layer for layer in layers if getattr(layer, "keys", None) is not None]
    width = keys[0].keys.element_size()
    assert sum(layer.keys.nbytes + layer.values.nbytes for layer in keys) == kv_cache_bytes(shape, ROWS, TOKENS, width)


# glm_moe_dsa: "shared" layers take the tokens that the layer before chose, and keep no indexer's keys.
SPARSE = {
    "deepseek_v32": {},
    "glm_moe_dsa": {"num_hidden_layers": 4, "indexer_types": ["full", "full", "shared", "shared"]},
}
INDEXER = {"index_n_heads": 3, "index_head_dim": 16, "index_topk": 8}


def _sparse_model(name):  # type: ignore[no-untyped-def]
    from probes.layers.shapes import shapes_of_layers

    config = transformers.AutoConfig.for_model(name, **{**LATENT, **INDEXER, **SPARSE[name]})
    shape = shape_of(config.to_dict(), id=name, counts=NOT_COUNTED)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return model, complete_model(shape, shapes_of_layers(shape), _not_measured)


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_attention_keeps_a_latent_and_the_keys_of_its_indexer(name):  # type: ignore[no-untyped-def]
    model, shape = _sparse_model(name)
    with torch.no_grad():
        layers = _generate(model).past_key_values.layers
    indexed = [layer.indexer_keys.nbytes for layer in layers if layer.indexer_keys is not None]
    assert len(indexed) == 2
    latents = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert latents + sum(indexed) == kv_cache_bytes(shape, ROWS, TOKENS, 2)


@pytest.mark.parametrize("name", SPARSE)
def test_an_indexer_scores_while_the_expanded_latent_is_alive(name):  # type: ignore[no-untyped-def]
    model, shape = _sparse_model(name)
    sizes = {
        torch.bfloat16: {ROWS * TOKENS * 4 * (16 + 16), ROWS * TOKENS * 4 * (16 + 8)},
        torch.float32: {ROWS * TOKENS * 16, ROWS * TOKENS * 3},  # the indexer's keys; its scores, and scaled scores
    }
    alive = _Alive(lambda op, args, tensor: tensor.numel() in sizes.get(tensor.dtype, ()))
    with torch.no_grad(), alive:
        _generate(model)
    assert alive.peak == mla_expansion_bytes(shape, ROWS, TOKENS, 2)


def _not_measured(recipe):  # type: ignore[no-untyped-def]
    raise AssertionError("the shapes are enough")


def _generate(model, **more):  # type: ignore[no-untyped-def]
    return model.generate(
        **_prompts(), max_new_tokens=COMPLETION, do_sample=True, top_k=0, return_dict_in_generate=True, **more
    )


CASES = [
    pytest.param(name, dtype, autocast, id=f"{name}-{dtype}{'-autocast' if autocast else ''}")
    for name in CONFIGS
    for dtype, autocast in (("float32", False), ("float32", True), ("bfloat16", False), ("bfloat16", True))
]


@pytest.mark.parametrize(("name", "dtype", "autocast"), CASES)
def test_generate_keeps_the_bytes_of_the_formula(name, dtype, autocast):  # type: ignore[no-untyped-def]
    model, shape = _model(name, getattr(torch, dtype))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        cache = _generate(model).past_key_values
    dtype_bytes = kv_cache_dtype_bytes(shape, 4 if dtype == "float32" else 2, autocast)
    assert _stored_bytes(cache) == kv_cache_bytes(shape, ROWS, TOKENS, dtype_bytes)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_prompt_is_kept_whole_until_the_next_token(name):  # type: ignore[no-untyped-def]
    model, shape = _model(name, torch.bfloat16)
    with torch.no_grad():
        cache = model(
            **_prompts(), use_cache=True, past_key_values=transformers.DynamicCache(config=model.config)
        ).past_key_values
    assert _stored_bytes(cache) == prefill_cache_bytes(shape, ROWS, PROMPT, 2)


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_growing_the_cache_takes_one_old_copy_more(name):  # type: ignore[no-untyped-def]
    model, shape = _model(name, torch.bfloat16)
    grown = _Alive(lambda op, args, tensor: op is torch.ops.aten.cat.default and args[1:] == (-2,))
    with torch.no_grad(), grown:
        _generate(model)
    assert grown.peak == kv_cache_peak_bytes(shape, ROWS, PROMPT, TOKENS, 2)


@pytest.mark.parametrize("name", ["gemma3_text", "deepseek_v3"])
def test_growth_of_mixed_layers_stays_within_a_token_of_the_formula(name):  # type: ignore[no-untyped-def]
    model, shape = _model(name, torch.bfloat16)
    grown = _Alive(lambda op, args, tensor: op is torch.ops.aten.cat.default and args[1:] == (-2,))
    with torch.no_grad(), grown:
        _generate(model)
    a_token = kv_cache_bytes(shape, ROWS, 2, 2) - kv_cache_bytes(shape, ROWS, 1, 2)
    assert 0 <= kv_cache_peak_bytes(shape, ROWS, PROMPT, TOKENS, 2) - grown.peak <= a_token


def test_a_grown_latent_cache_copies_the_latent_of_the_tokens_before():
    """Of 32 + 8 numbers per token the 32 of the latent are the larger tensor."""
    shape = shape_of(CONFIGS["deepseek_v3"]().to_dict(), id="deepseek_v3")
    copies = kv_cache_peak_bytes(shape, ROWS, 1, TOKENS, 2) - kv_cache_bytes(shape, ROWS, TOKENS, 2)
    assert copies == ROWS * (TOKENS - 1) * 32 * 2


def test_latent_attention_expands_every_token_of_one_layer():
    model, shape = _model("deepseek_v3", torch.bfloat16)
    sizes = {
        ROWS * TOKENS * 4 * (16 + 16),
        ROWS * TOKENS * 4 * (16 + 8),
    }  # kv_b_proj's output of nope and v; the keys of nope and rope
    # The float32 copies are made by the CPU's attention only.
    expanded = _Alive(lambda op, args, tensor: tensor.numel() in sizes and tensor.dtype == torch.bfloat16)
    with torch.no_grad(), expanded:
        _generate(model)
    assert expanded.peak == mla_expansion_bytes(shape, ROWS, TOKENS, 2)


@pytest.mark.parametrize(("dtype", "dtype_bytes"), [("float32", 4), ("bfloat16", 2)])
def test_sampling_makes_the_copies_of_the_formula(dtype, dtype_bytes):  # type: ignore[no-untyped-def]
    model, shape = _model("llama", getattr(torch, dtype))
    logits = _Alive(lambda op, args, tensor: tensor.shape[-1:] == (512,) and tensor.numel() == ROWS * 512)
    with torch.no_grad(), logits:
        _generate(model)
    assert logits.peak == generation_logits_bytes(shape, ROWS, dtype_bytes)


def test_qwen_under_autocast_caches_in_float32():
    qwen = load_model("Qwen2.5-7B")
    assert kv_cache_bytes(qwen, 8, 1023, kv_cache_dtype_bytes(qwen, 4, autocast=True)) == 8 * 1023 * 28 * 1024 * 4


def test_one_rotary_layer_makes_the_cache_of_a_float32_model_float32():
    """SmolLM3 rotates in three of four layers, GPT-2 in none."""
    assert kv_cache_dtype_bytes(load_model("SmolLM3-3B"), 4, autocast=True) == 4
    assert kv_cache_dtype_bytes(load_model("gpt2"), 4, autocast=True) == 2


@given(
    rows=st.integers(1, 64),
    tokens=st.integers(2, 8192),
    more=st.integers(1, 64),
    name=st.sampled_from(["Qwen3-4B", "gemma-3-4b-pt"]),
)
def test_more_tokens_and_rows_never_need_less(rows, tokens, more, name):  # type: ignore[no-untyped-def]
    shape = load_model(name)
    assert kv_cache_bytes(shape, rows, tokens, 2) <= kv_cache_bytes(shape, rows, tokens + more, 2)
    assert kv_cache_peak_bytes(shape, rows, tokens, tokens, 2) <= kv_cache_peak_bytes(
        shape, rows + more, tokens, tokens + more, 2
    )
    assert kv_cache_bytes(shape, rows, tokens, 2) <= kv_cache_peak_bytes(shape, rows, 1, tokens, 2)


def test_layers_that_share_keys_pass_the_last_token_of_a_prompt_alone() -> None:
    """Their MLPs are twice as wide in Gemma 4 E2B, of which a rollout had 529 MiB too much (start 7-58)."""
    model = complete_shipped(load_model("google/gemma-4-E2B"), lambda recipe: MeasuringRefused(reason="not shipped"))
    assert model is not None
    passed = of_prompt(training_settings(Candidate(model=model, method="distillation", tuning="lora"))).layers
    assert len(model.layers) == 35
    assert {layer.feed_forward.intermediate_size for layer in passed} == {6144}  # type: ignore[union-attr]
    assert len(passed) == 15
