"""Laws of layers that attend to a window of tokens: the pairs they compute, and a window that no row reaches."""

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.candidate import Candidate
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.memory.generation import kv_cache_bytes, kv_cache_peak_bytes
from planner.models.from_config import shape_of
from planner.models.shape import ModelShape
from planner.throughput.rates import attention_rate
from planner.throughput.training import Batch, attention_seconds
from planner.throughput.work import policy_work

CLUSTER = parse_cluster("1xA100-80G", None)
LAYERS, HEADS, HEAD_DIM = 4, 4, 16
DIAGONAL = 0.5  # pairs per token of the row: the formula counts half of each token's pair with itself
ROUNDING = 1e-9


def windowed(window: int | None, of_four: int = LAYERS) -> ModelShape:
    """A model of four layers, the first of which have a window."""
    config = {
        "model_type": "gemma3_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "head_dim": HEAD_DIM, "vocab_size": 512,
        "max_position_embeddings": 4096, "tie_word_embeddings": True, "sliding_window": window,
        "layer_types": ["sliding_attention"] * of_four + ["full_attention"] * (LAYERS - of_four),
    }  # fmt: skip
    return shape_of(config, id="windowed")


def seen_pairs(length: int, window: int) -> int:
    """Query-key pairs of a causal mask with a window, counted one by one."""
    query, key = numpy.ogrid[:length, :length]
    return int(((key <= query) & (key > query - window)).sum())


@settings(deadline=None)
@given(length=st.integers(1, 400), window=st.integers(1, 500), rows=st.integers(1, 5), of_four=st.integers(0, LAYERS))
def test_attention_computes_the_pairs_that_a_mask_shows(length: int, window: int, rows: int, of_four: int) -> None:
    candidate = Candidate(model=windowed(window, of_four), method="sft", dtype="bfloat16")
    batch = Batch(rows=rows, length=length, scored=0, flattened=False, kernel="flash_attention_2")
    seconds = attention_seconds(policy_work(candidate), CLUSTER.gpu, batch)
    products = 2 * 2 * HEADS * HEAD_DIM  # two products of 2 FLOP for each feature of each head
    computed = seconds * attention_rate(CLUSTER.gpu, "flash_attention_2") / products
    wanted = rows * (of_four * seen_pairs(length, window) + (LAYERS - of_four) * seen_pairs(length, length))
    diagonal, rounding = DIAGONAL * rows * length * LAYERS, ROUNDING * wanted
    assert -rounding <= wanted - computed <= diagonal + rounding


@settings(deadline=None, max_examples=30)
@given(length=st.integers(130, 2000), more=st.integers(1, 500), padded=st.booleans())
def test_a_window_that_no_row_reaches_is_no_window(length: int, more: int, padded: bool) -> None:
    wide, without = (
        estimate(
            Candidate(
                model=windowed(window), method="sft", dtype="bfloat16", max_length=length, padded=padded,
                per_device_train_batch_size=2,
            ),
            CLUSTER,
        )
        for window in (length + more, None)
    )  # fmt: skip
    if not padded:  # a padded batch has a mask for each kind of layer
        assert wide.gpus == without.gpus
    assert wide.throughput.seconds == pytest.approx(without.throughput.seconds, rel=ROUNDING)


@settings(deadline=None)
@given(tokens=st.integers(1, 2000), window=st.integers(1, 2000), of_four=st.integers(0, LAYERS))
def test_a_cache_keeps_no_more_tokens_than_the_window(tokens: int, window: int, of_four: int) -> None:
    a_token = 2 * HEADS * HEAD_DIM * 2  # key and value in 16 bits
    kept = of_four * min(tokens, window) + (LAYERS - of_four) * tokens
    assert kv_cache_bytes(windowed(window, of_four), 3, tokens, 2) == 3 * kept * a_token


@pytest.mark.parametrize(("tokens", "old"), [(10, 9), (16, 15), (17, 16), (40, 16)])
def test_growing_a_window_copies_keys_and_values_of_the_tokens_before(tokens: int, old: int) -> None:
    model, a_token = windowed(16), 2 * HEADS * HEAD_DIM * 2
    copies = kv_cache_peak_bytes(model, 3, 1, tokens, 2) - kv_cache_bytes(model, 3, tokens, 2)
    assert copies == 3 * old * a_token


@pytest.mark.parametrize("window", [None, 16])
def test_every_layer_of_mistral_has_the_window_of_the_config(window: int | None) -> None:
    config = {
        "model_type": "mistral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "sliding_window": window,
    }  # fmt: skip
    assert [layer.attention.sliding_window for layer in shape_of(config, id="mistral").layers] == [window] * 3


def test_llama_has_no_window_and_rotates_everywhere() -> None:
    """LlamaConfig has no `sliding_window`: one in its file is not read."""
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "sliding_window": 16,
    }  # fmt: skip
    attention = [layer.attention for layer in shape_of(config, id="llama").layers]
    assert [(layer.sliding_window, layer.rotary) for layer in attention] == [(None, True)] * 3


@pytest.mark.parametrize(("window", "rotary"), [(None, [True] * 4), (16, [True, True, True, False])])
def test_exaone4_rotates_in_windows_only_if_it_has_some(window: int | None, rotary: list[bool]) -> None:
    """transformers, models/exaone4: `sliding_window_pattern` 4 makes every fourth layer see all tokens."""
    config = {
        "model_type": "exaone4", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 512, "max_position_embeddings": 4096,
        "tie_word_embeddings": True, "sliding_window": window, "sliding_window_pattern": 4,
    }  # fmt: skip
    layers = shape_of(config, id="exaone4").layers
    assert [layer.attention.rotary for layer in layers] == rotary
    assert [layer.attention.sliding_window for layer in layers] == [window] * 3 + [None]


@pytest.mark.parametrize(("kernel", "pairs"), [("eager", 128 * 128), ("sdpa-masked", 128 * 128), ("sdpa", 128 * 64)])
def test_a_mask_hides_no_pair_from_the_kernel(kernel: str, pairs: int) -> None:
    work = policy_work(Candidate(model=windowed(16, 0), method="sft", dtype="bfloat16"))
    batch = Batch(rows=2, length=128, scored=0, flattened=False, kernel=kernel)
    bandwidth = 0.75 * 2.039e12
    moved = {"eager": 4 * HEADS * 26 * pairs, "sdpa-masked": 4 * 5 * pairs, "sdpa": 0}[kernel]
    flop = 4 * 2 * 2 * HEADS * HEAD_DIM * pairs
    expected = 2 * (flop / attention_rate(CLUSTER.gpu, kernel) + moved / bandwidth)
    assert attention_seconds(work, CLUSTER.gpu, batch) == pytest.approx(expected, rel=ROUNDING)


def test_concatenated_rows_are_one_long_row_without_a_kernel_for_several() -> None:
    work = policy_work(Candidate(model=windowed(16, 0), method="sft", dtype="bfloat16"))
    rows, row = (
        Batch(rows=rows, length=length, scored=0, flattened=flattened, kernel="sdpa-masked")
        for rows, length, flattened in ((3, 100, True), (1, 300, False))
    )
    assert attention_seconds(work, CLUSTER.gpu, rows) == attention_seconds(work, CLUSTER.gpu, row)


def test_patches_of_an_image_see_those_before_and_after_them() -> None:
    """100 patches with all others, or with a window of 10."""
    whole, window = (policy_work(Candidate(model=windowed(10, n), method="sft", dtype="bfloat16")) for n in (0, LAYERS))
    batch = Batch(rows=1, length=100, scored=0, flattened=False, kernel="sdpa", causal=False)
    flop = 4 * 2 * 2 * HEADS * HEAD_DIM / attention_rate(CLUSTER.gpu, "sdpa")
    assert attention_seconds(whole, CLUSTER.gpu, batch) == pytest.approx(10_000 * flop, rel=ROUNDING)
    assert attention_seconds(window, CLUSTER.gpu, batch) == pytest.approx(1000 * flop, rel=ROUNDING)


def test_gpus_that_share_a_row_share_its_pairs() -> None:
    work = policy_work(Candidate(model=windowed(16, 0), method="sft", dtype="bfloat16"))
    alone, shared = (Batch(rows=1, length=400, scored=0, flattened=False, kernel="sdpa", row_gpus=n) for n in (1, 4))
    assert attention_seconds(work, CLUSTER.gpu, shared) == attention_seconds(work, CLUSTER.gpu, alone) / 4
    assert (alone.tokens, shared.tokens) == (400, 100)
