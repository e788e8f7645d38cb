"""Transformers' own FSDP2: the model is sharded while it loads, and GPUs may divide the experts of a layer.

Each token is dispatched to the GPU that has its expert (planner/memory/layers/experts.py). If the GPUs that divide the
experts are all that share a copy of the model (`ep_size` = `shard_gpus`), each keeps its experts whole; otherwise the
GPUs with the same experts shard them among each other. Adapters are added after sharding and are whole on every GPU.
Source: transformers 5.23, distributed/configuration_utils.py (`DistributedConfig`), mixin.py
(`maybe_distribute_model`), fsdp.py (`apply_fully_sharded_data_parallelism`); trainer.py
(`_sync_replicated_trainable_parameters`).
"""

from planner.cache_keys import StateInput, TrainingInput
from planner.memory.dtypes import DTYPE_BYTES
from planner.memory.parameters.optimizer_states import step_bytes
from planner.memory.parameters.policy import policy_parameters
from planner.memory.parameters.quantized import whole_policy_bytes, whole_quantized_bytes
from planner.memory.parameters.tensors import TensorSet, rounded_bytes, tensor_bytes
from planner.memory.parameters.trained import Group, learning_groups
from planner.memory.parameters.widths import base_dtype_bytes, compute_weight_width
from planner.memory.schemes.contract import (
    NOTHING_GATHERED,
    Buffers,
    GatherMoment,
    Gathers,
    Gradients,
    Masters,
    Scheme,
    Traffic,
    is_local,
    late_embedding_bytes,
)
from planner.memory.schemes.fsdp2 import Fsdp2, fsdp2_shards
from planner.memory.schemes.tensor import head_bytes, other_words_bytes, summing_seconds
from planner.models.layers import Experts, Layer
from planner.quantities import Phase


class Distributed(Scheme):
    """`DistributedConfig(fsdp_size=...)`: FSDP2 as Transformers applies it, with `ep_size` or `tp_size` beside it."""

    def stored(self, tensors: TensorSet, bytes_per_param: int, candidate: StateInput, *, trained: bool) -> int:
        """ceil(rows / G) rows of each tensor on one of G GPUs, of experts too; adapters whole.

        Each of `ep_size` GPUs has a part of the experts, and the G / `ep_size` GPUs with the same experts have a part
        of that.
        """
        return tensor_bytes(_shards(tensors, candidate.shard_gpus), bytes_per_param)

    def stored_quantized(self, candidate: StateInput) -> int:
        return whole_quantized_bytes(candidate)

    def unsharded_while_loading(self, candidate: StateInput, policy_bytes: int) -> int:
        """None: each GPU reads the slices of its shards (transformers 5.23, core_model_loading.py)."""
        return 0

    def optimized(self, candidate: StateInput) -> tuple[Group, ...]:
        """The shards, in the dtype of the parameter."""
        return tuple((_shards(tensors, candidate.shard_gpus), size) for tensors, size in learning_groups(candidate))

    def masters(self, candidate: StateInput) -> Masters:
        return Masters(0, 0)

    def gathered(self, candidate: StateInput) -> Gathers:
        if is_local(candidate):
            return NOTHING_GATHERED
        at = gathered_units(candidate)
        if candidate.layer_gpus > 1:
            at |= {
                "loss": at["loss"] + head_bytes(candidate),
                "head_backward": at["head_backward"] + head_bytes(candidate),
            }
        return Gathers(at=at)

    def kept_by_graph(self, candidate: TrainingInput) -> int:
        return 0

    def gradients(self, candidate: StateInput) -> Gradients:
        """Shards in the dtype of the parameter; between micro-steps without `sync_each_batch` those of whole tensors.

        Gradients of experts are only of this GPU's experts. A tied head has a second gradient until the next step: the
        final norm's is a view of the buffer in which both were reduced, after the root's unit had reduced the head's.
        With `tp_size` the embedding's has all words until it is reduced (`Tensor.gradients`).
        Source: transformers 5.23, trainer.py, `Trainer._defer_fsdp_gradient_reduction`; torch 2.13,
        distributed/fsdp/_fully_shard/_fsdp_collectives.py, `foreach_reduce` (`to_accumulate_grad`).
        """
        shards = sum(rounded_bytes(tensors.params * size) for tensors, size in self.optimized(candidate))
        again = again_gathered(candidate) if candidate.tuning == "full" else 0
        shards += rounded_bytes(-(-again // candidate.shard_gpus))
        kept = shards
        if candidate.keeps_whole_gradients:
            groups = learning_groups(candidate)
            experts = sum(tensors.only("expert").params * size for tensors, size in groups)
            kept = sum(tensors.params * size for tensors, size in groups) - experts + experts // candidate.ep_size
            kept += again + other_words_bytes(candidate)
        return Gradients(after_backward=max(kept, shards), accumulated=kept, at_step=shards, norm_of_offloaded=0)

    def step_temporaries(self, candidate: StateInput) -> int:
        return sum(step_bytes(tensors, size, candidate.optim) for tensors, size in self.optimized(candidate))

    def split_blocks(self, candidate: TrainingInput, phase: Phase) -> int:
        return late_embedding_bytes(candidate, phase)

    def buffers(self, candidate: StateInput) -> Buffers:
        return Buffers(kept=0, broadcast=0)

    def steps_on_host(self, candidate: StateInput) -> bool:
        return False

    def offloaded_states(self, candidate: StateInput) -> int:
        return 0

    def offloaded_parameters(self, candidate: StateInput) -> int:
        return 0

    def saving(self, candidate: StateInput, processes: int, policy_bytes: int, adapters_bytes: int) -> int:
        """The whole model on rank 0; of adapters only they, if the script keeps PEFT from gathering the rest.

        Source: transformers 5.23, distributed/utils.py, `gather_full_state_dict`;
        `Candidate.script_saves_adapters_alone`.
        """
        whole = candidate.layer_gpus * whole_policy_bytes(candidate, base_dtype_bytes(candidate))
        return whole if candidate.tuning == "full" else adapters_bytes

    def seconds(self, candidate: TrainingInput, traffic: Traffic) -> float:
        """Seconds that one GPU waits for FSDP2's gathers and reductions, and for the exchange of the experts' tokens.

            FSDP2    as `Fsdp2.seconds`, of this GPU's weights: all but the experts that other GPUs have
            experts  (e - 1) / e x tokens x chosen experts x hidden x bytes / link in each layer, to the experts and
                     back: in the forward pass, in its recomputation and in the backward pass; nothing runs beside it

        Leaves out that routing is uneven, and that the host waits for the sizes in each layer.
        Source: transformers 5.23, distributed/expert_parallel.py, `AllToAllEP`.
        """
        tensors, divided = policy_parameters(candidate).base_tensors, candidate.ep_size
        experts = tensors.only("expert").params / max(tensors.params, 1)
        copies = candidate.shard_gpus // divided
        moved = experts / divided * (copies - 1) / copies / ((candidate.shard_gpus - 1) / candidate.shard_gpus)
        share = 1 - experts + moved
        shared = traffic._replace(
            stored_bytes=traffic.embedding_bytes + (traffic.stored_bytes - traffic.embedding_bytes) * share,
            gradient_bytes=traffic.gradient_bytes * (1.0 if traffic.adapter_only else share),
        )
        passes = 2 * (3 if candidate.gradient_checkpointing else 2)
        sent = (divided - 1) / divided * passes * _sent_bytes(candidate) / traffic.shard_link
        summing = summing_seconds(candidate, traffic) if candidate.layer_gpus > 1 else 0.0
        return Fsdp2().seconds(candidate, shared) + candidate.gradient_accumulation_steps * sent + summing


def _sent_bytes(candidate: TrainingInput) -> int:
    """Bytes that dispatched tokens take in all layers of a micro-step, each counted once for each chosen expert."""
    width, total = DTYPE_BYTES[candidate.dtype], 0
    for layer, count in candidate.model.layer_kinds:
        if isinstance(layer.feed_forward, Experts):
            total += count * layer.feed_forward.num_experts_per_tok * layer.hidden_size
    return candidate.tokens * total * width


def _shards(tensors: TensorSet, gpus: int) -> TensorSet:
    """The shards on rank 0: adapters are not sharded."""
    adapters = TensorSet(kinds=tuple(kind for kind in tensors.kinds if kind.part == "adapter"))
    rest = TensorSet(kinds=tuple(kind for kind in tensors.kinds if kind.part != "adapter"))
    return TensorSet(kinds=(*fsdp2_shards(rest, gpus).kinds, *adapters.kinds))


def gathered_units(candidate: StateInput) -> dict[GatherMoment, int]:
    """Bytes of gathered units and of gradients being reduced, in the dtype of the parameters.

    Units are the layers without their experts (L), the experts of a layer on this GPU (E), the tail (final norm and
    head), and an untied embedding, received (B) and copied (P) as in fsdp2_units.py, `gathered_units`. Experts that no
    other GPU shares are not received, but copied. The first layers of GLM and DeepSeek have none, and larger L.

        embedding            B + P of the embedding; B of it, B + P of a layer
        forward              P of L, P + B of E, or B of L before them
        loss, head           P of the tail, B of it, or B of a layer
        backward             P of L and E, which a checkpoint gathers to compute the layer again, B of the next L,
                             and the gradients of the L before, being reduced; those of E when its weights are gone

    Source: transformers 5.23, distributed/fsdp.py, `apply_fully_sharded_data_parallelism`; torch 2.13,
    distributed/fsdp/_fully_shard/_fsdp_param_group.py, `wait_for_unshard` (`world_size == 1`), `pre_backward`,
    `post_backward`; results/emulated.jsonl.
    """
    model, size = candidate.model, compute_weight_width(candidate)
    full = candidate.tuning == "full"
    copies = 2 if candidate.ep_size < candidate.shard_gpus else 1
    units = [_unit_params(layer, candidate) for layer in model.layers]
    before, after = [units[0], *units[:-1]], [*units[1:], units[-1]]
    around = set(zip(before, units, after, strict=True))
    lowest = units[0][0] * size
    backward = size * max(below + own + experts + full * above for (below, _), (own, experts), (above, _) in around)
    first = size * (sum(units[0]) + full * after[0][0])
    tail = (model.final_norm.params + (model.embed_params if model.tied else model.lm_head_params)) * size
    embedding = model.embed_params * size
    again = again_gathered(candidate)
    kept = tail + again if model.tied else 0
    forward = size * max(own + max(own, copies * experts) for own, experts in units)
    last = units[-1][0] * size
    return {
        "embedding": kept + max(2 * tail, tail + 2 * lowest) if model.tied else embedding + max(embedding, 2 * lowest),
        "forward": forward + kept,
        "loss": kept + last if model.tied else 2 * tail,
        "head_backward": tail + (again if model.tied else last),
        "backward": backward + kept,
        "first_layer_backward": 0 if model.tied else first + embedding,
        "embedding_backward": (kept if model.tied else embedding) + full * lowest,
    }


def again_gathered(candidate: StateInput) -> int:
    """Bytes of a tied head, which the root's unit gathers and reduces beside the unit of the embedding; 0 if untied.

    Units are made while embedding and head are two parameters, tied after that.
    Source: transformers 5.23, distributed/fsdp.py, `apply_fully_sharded_data_parallelism` (its note); four processes
    over gloo.
    """
    model = candidate.model
    return model.embed_params * compute_weight_width(candidate) if model.tied else 0


def _unit_params(layer: Layer, candidate: StateInput) -> tuple[int, int]:
    """(Parameters of the layer's unit, of its experts on one GPU when gathered).

    FSDP2 shards a GPU's experts by expert over the GPUs that have the same ones, and pads their number to a multiple of
    these. Example: Mixtral's 8 experts with `ep_size` 8 on 16 GPUs: one expert a GPU, gathered as two.
    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py, `_init_sharded_param` (`padded_sharded_size`).
    """
    block = layer.feed_forward
    if not isinstance(block, Experts):
        return layer.params, 0
    own, copies = block.num_experts // candidate.ep_size, candidate.shard_gpus // candidate.ep_size
    padded = -(-own // copies) * copies
    return layer.params - block.expert_params, block.expert_params // block.num_experts * padded
