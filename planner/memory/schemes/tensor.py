"""Transformers' tensor parallelism: every GPU has its piece of each layer, and all have the same batch.

A GPU has a part of the outputs (heads, features) of each projection that reads the hidden states, a part of the inputs
of each projection that writes them, and a part of the vocabulary in embedding and head. The rest, such as norms and
routers, is on every GPU.
Source: transformers 5.23, distributed/tensor_parallel.py, `ColwiseParallel`, `RowwiseParallel`, `EmbeddingParallel`;
`base_model_tp_plan` of a model's config.
"""

from functools import lru_cache

from msgspec.structs import replace

from planner.cache_keys import StateInput, TrainingInput
from planner.candidate import Candidate
from planner.memory.dtypes import DTYPE_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.parameters.quantized import whole_policy_bytes
from planner.memory.parameters.widths import base_dtype_bytes
from planner.memory.schemes.contract import NOTHING_GATHERED, Gathers, Gradients, Traffic
from planner.memory.schemes.whole import Whole
from planner.models.layers import Experts, Layer, Linear, Mlp
from planner.models.shape import ModelShape


class Tensor(Whole):
    """`DistributedConfig(tp_size=...)`: all states of the GPU's piece of the model, which `of_one_gpu` returns."""

    def gathered(self, candidate: StateInput) -> Gathers:
        """Return the whole head, gathered for the loss and its backward pass."""
        head = head_bytes(candidate)
        return replace(NOTHING_GATHERED, at={**NOTHING_GATHERED.at, "loss": head, "head_backward": head})

    def gradients(self, candidate: StateInput) -> Gradients:
        """Return the gradients of the piece; that of an untied embedding has the whole vocabulary on every GPU.

        Source: torch 2.13, distributed/tensor/_ops/_embedding_ops.py, `embedding_dense_backward_strategy` (does not
        divide the vocabulary); Llama-3.1-8B on one of 8 emulated cards (results/emulated.jsonl, "divided layers").
        """
        found, more = super().gradients(candidate), 0 if candidate.model.tied else other_words_bytes(candidate)
        return found._replace(
            after_backward=found.after_backward + more,
            accumulated=found.accumulated + more,
            at_step=found.at_step + more,
        )

    def step_temporaries(self, candidate: StateInput) -> int:
        """Return the optimizer's temporaries, and a copy of the GPU's part of an untied embedding's gradient."""
        copied = candidate.tuning == "full" and not candidate.model.tied
        more = candidate.model.embed_params * base_dtype_bytes(candidate) if copied else 0
        return super().step_temporaries(candidate) + more

    def saving(self, candidate: StateInput, processes: int, policy_bytes: int, adapters_bytes: int) -> int:
        """Return bytes of the whole model in every process, though only one writes it; with adapters too.

        Source: transformers 5.23, distributed/tensor_parallel.py, `gather_state_dict_for_save` (`.cpu()`), which PEFT
        gives all tensors (peft 0.21.2, utils/save_and_load.py, `get_peft_model_state_dict`).

        Leaves out that norms and routers are not divided, so that they count once for each GPU.
        """
        return processes * candidate.layer_gpus * whole_policy_bytes(candidate, base_dtype_bytes(candidate))

    def seconds(self, candidate: TrainingInput, traffic: Traffic) -> float:
        """Return the seconds of the sums of hidden states and of the head's gather."""
        return summing_seconds(candidate, traffic)


def other_words_bytes(candidate: StateInput) -> int:
    """Bytes of an embedding's gradient for the words that other GPUs hold; 0 with adapters."""
    model = candidate.model
    if candidate.tuning == "lora":
        return 0
    return (model.vocab_size * model.embedding_features - model.embed_params) * base_dtype_bytes(candidate)


def head_bytes(candidate: StateInput) -> int:
    """Bytes of the whole head, which TRL's loss gathers for its own matrix products; its gradient takes as many.

    Source: trl 1.16, trainer/utils.py, `_fused_forward` (`weight.full_tensor()`).
    """
    return candidate.model.vocab_size * candidate.model.embedding_features * base_dtype_bytes(candidate)


def summing_seconds(candidate: TrainingInput, traffic: Traffic) -> float:
    """Seconds of the sums of hidden states and of the head's gather, which overlap with no computation.

        sums   2 (n - 1) / n x tokens x hidden x bytes / link each: one of the embedding; in a layer one for each
               projection that writes hidden states in the forward pass, as many when a checkpoint computes it again,
               and in the backward pass one for each projection that reads them; fused experts count as one of both
        head   (n - 1) / n x bytes / link

    Example: Qwen3-8B on 8 H100s, 4 rows of 1,024 tokens without checkpoints: 36 layers of 7 sums, 0.05 s.

    Source: transformers 5.23, distributed/tensor_parallel.py, `ColwiseParallel.transform_inputs_pre_forward` (each has
    a DTensor of its own), `RowwiseParallel`, `MoeExpertsParallel`.

    Leaves out latency, and the CPU's time to dispatch operators of DTensors, so that small models are slower than
    estimated.
    """
    n, model = candidate.layer_gpus, candidate.model
    again = 1 / candidate.checkpoint_every_n_layers if candidate.gradient_checkpointing else 0.0
    sums = 1.0
    for layer, count in model.layer_kinds:
        experts = isinstance(layer.feed_forward, Experts)  # fused, no `Linear`
        written = sum(linear.split == "in" for linear in layer.linears) + experts
        read = sum(linear.split == "out" for linear in layer.linears) + experts
        sums += count * (written * (1 + again) + read)
    width = SIXTEEN_BIT_BYTES if candidate.precision != "no" else DTYPE_BYTES[candidate.dtype]
    sent = 2 * sums * candidate.tokens * model.hidden_size * width + head_bytes(candidate)
    return candidate.gradient_accumulation_steps * (n - 1) / n * sent / traffic.layer_link


def of_one_gpu(candidate: Candidate) -> Candidate:
    """Return the candidate with its GPU's piece of the model, or itself where no layer is divided."""
    if candidate.layer_gpus == 1:
        return candidate
    return replace(candidate, model=piece_of(candidate.model, candidate.layer_gpus))


@lru_cache(maxsize=256)
def piece_of(model: ModelShape, gpus: int) -> ModelShape:
    """Return the first GPU's piece of a model: a model with fewer heads, features of MLPs, and words of the embedding.

    `vocab_size` stays, because logits have all words.
    """
    pieces = {layer: _piece_of_layer(layer, gpus) for layer, _ in model.layer_kinds}
    layers = tuple(pieces[layer] for layer in model.layers)
    words = -(-model.vocab_size // gpus)
    embedding, head = (params // model.vocab_size * words for params in (model.embed_params, model.lm_head_params))
    gone = sum(count * (layer.params - pieces[layer].params) for layer, count in model.layer_kinds)
    gone += model.embed_params - embedding + model.lm_head_params - head
    return replace(model, layers=layers, embed_params=embedding, lm_head_params=head, params=model.params - gone)


def _piece_of_layer(layer: Layer, gpus: int) -> Layer:
    attention, block = layer.attention, layer.feed_forward
    own = replace(
        attention,
        num_attention_heads=attention.num_attention_heads // gpus,
        num_key_value_heads=attention.num_key_value_heads // gpus,
        linears=_pieces(attention.linears, gpus),
    )
    return replace(layer, attention=own, feed_forward=_piece_of_block(block, gpus))


def _piece_of_block(block: Mlp | Experts, gpus: int) -> Mlp | Experts:
    if isinstance(block, Mlp):
        return _piece_of_mlp(block, gpus)
    return replace(
        block,
        moe_intermediate_size=block.moe_intermediate_size // gpus,
        expert_params=block.expert_params // gpus,
        shared=None if block.shared is None else _piece_of_mlp(block.shared, gpus),
    )


def _piece_of_mlp(block: Mlp, gpus: int) -> Mlp:
    return replace(block, intermediate_size=block.intermediate_size // gpus, linears=_pieces(block.linears, gpus))


def _pieces(linears: tuple[Linear, ...], gpus: int) -> tuple[Linear, ...]:
    """Return the pieces of projections, the last of which writes the hidden states."""
    *inward, out = linears
    return (
        *(replace(linear, out_features=linear.out_features // gpus, split="out") for linear in inward),
        replace(out, in_features=out.in_features // gpus, split="in"),
    )
