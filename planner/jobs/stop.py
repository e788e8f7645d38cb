"""The type of a row of the table of stops, and what its rows read of a candidate."""

from collections.abc import Callable, Iterator, Mapping
from math import gcd

from msgspec import Struct
from msgspec.structs import replace

from planner.candidate import DEFAULTS, FLASH, PREPARATIONS, Candidate
from planner.gpus.cluster import Cluster
from planner.jobs.remedy import remedy
from planner.jobs.settings import setting_field
from planner.jobs.usual import usual_settings
from planner.methods import LINEAR_HEAD, NEWEST_TRL
from planner.models.architectures.table import architecture_of
from planner.models.catalogue import model_rows
from planner.models.layers import Experts, Layer, Linear, Mlp
from planner.models.lora_targets import listed_targets, widest_targets
from planner.models.recurrent import states_of
from planner.models.shape import ModelShape
from planner.quantizations import ENGINE_QUANTIZATIONS, QUANTIZATIONS
from planner.settings.setting import Value
from planner.settings.vllm_releases import vllm_has

Change = Mapping[str, object]  # values of Candidate fields
CAST_TO = {"bf16": "bfloat16", "fp16": "float16"}  # by mixed precision


class Stop(Struct, frozen=True, kw_only=True):
    """One row of the table `STOPS`.

        what       its name, as in docs/limits.md
        when       whether a candidate meets it
        cause      what happens then, with values of the candidate and the GPU
        remedies   changes each of which removes it, or the function that computes them
        otherwise  a remedy that is no setting
        source     a library's file and symbol, and where the stop was seen
        estimated  a single candidate that meets it is estimated, not refused

    Searches leave out every candidate that meets a stop.
    """

    what: str
    when: Callable[[Candidate, Cluster], bool]
    cause: str
    remedies: tuple[Change, ...] | Callable[[Candidate], tuple[Change, ...]] = ()
    otherwise: str | Callable[[Candidate], str] = ""
    source: str
    estimated: bool = False

    def changes(self, candidate: Candidate) -> tuple[Change, ...]:
        """Return the changes of a candidate, each of which removes the stop."""
        return self.remedies(candidate) if callable(self.remedies) else self.remedies

    def reason(self, candidate: Candidate, cluster: Cluster) -> str:
        """Return the cause as a sentence without a full stop."""
        return self.cause.format(
            candidate=candidate,
            gpu=cluster.gpu,
            base=candidate.quantization_row.words,
            whole=whole_model_setting(candidate),
            teacher=teacher(candidate),
            classifier=unclassified(candidate),
            flashless=without_flash_attention(candidate),
            parted=parted_inputs(candidate),
            features=parted_features(candidate),
        )

    def sentence(self, candidate: Candidate, cluster: Cluster, given: Mapping[str, Value]) -> str:
        """Return what stops a candidate that meets it, and what to do beside the given settings of the user."""
        ways = [remedy(change, given) for change in self.changes(candidate)]
        needless = {name for way in ways if len(way.replaced) == 1 for name in way.replaced}
        left_out = [f"leave out {name}" for name in sorted(needless) if self._passes_without(name, candidate, cluster)]
        other = self.otherwise(candidate) if callable(self.otherwise) else self.otherwise
        words = (*map(str, ways), other, *left_out)
        return f"{self.reason(candidate, cluster)}. Use {', or '.join(word for word in words if word)}."

    def _passes_without(self, name: str, candidate: Candidate, cluster: Cluster) -> bool:
        """Return whether a candidate would not meet the stop without a setting of this name."""
        field = setting_field(name)
        usual = {
            **DEFAULTS,
            "sharding": "ddp" if candidate.num_processes > 1 else "none",
            **usual_settings(candidate.model, candidate.method, candidate.trl_version, cluster),
        }
        return not self.when(replace(candidate, **{field: usual[field]}), cluster)


def default_attention(candidate: Candidate) -> tuple[Change, ...]:
    """Return the change to the attention that Transformers uses if no setting names one."""
    return ({"attn_implementation": candidate.model.default_attention},)


def teacher(candidate: Candidate) -> ModelShape:
    """Return the teacher of a method that has one: the policy's shape without another."""
    return candidate.teacher_model or candidate.model


def unclassified(candidate: Candidate) -> ModelShape | None:
    """Return a reward model, trained or only used, whose type has no sequence classifier; None if there is none."""
    row = candidate.method_row
    used = candidate.reward_model or (candidate.model if row.reward_model == "always" else None)
    models = (candidate.model if row.head == "score" else None, used)
    return next((model for model in models if model and not model.architecture.classifier), None)


def without_flash_attention(candidate: Candidate) -> ModelShape | None:
    """Return a model of the run that FlashAttention, if it is set, does not run; None if there is none."""
    flash = candidate.attn_implementation in FLASH
    return next((model for model in candidate.models if flash and not model.supports_flash_attention), None)


def casts_announced_weights(candidate: Candidate) -> bool:
    """Return whether DeepSpeed casts weights of whose dtype an asynchronous trainer has told its server."""
    casts = candidate.scheme_row.casts == "module" and CAST_TO.get(candidate.precision, candidate.dtype)
    sends = candidate.method_row.asynchronous and not candidate.sends_adapters
    return sends and casts not in (False, candidate.dtype)


def scans_or_sinks(model: ModelShape) -> bool:
    """Return whether a model has layers with a recurrent state, or attention sinks."""
    return bool(states_of(model)) or any(layer.attention.sink_params for layer, _ in model.layer_kinds)


def nearest_classifier(candidate: Candidate) -> str:
    """Return the name of the catalogue's model with a sequence classifier whose size is next to that of one without."""
    model = unclassified(candidate) or candidate.model
    size = next((row.params for row in model_rows() if row.id == model.id), model.linear_params)
    rows = (row for row in model_rows() if row.known and architecture_of(row.model_type).classifier)
    return min(rows, key=lambda row: abs(row.params - size)).id


# -- conditions of stops -----------------------------------------------------------------------------------------------


def in_full(candidate: Candidate) -> bool:
    """Return whether the whole model is trained."""
    return candidate.tuning == "full"


def whole_model_setting(candidate: Candidate) -> str:
    """Return the setting that is planned for whole models only, not for sharded ones; empty: none."""
    names = (*(PREPARATIONS if candidate.quantization_row.bitsandbytes else ()), "use_dora", "lora_modules_to_save")
    return next((name for name in names if getattr(candidate, name)), "")


def is_not_distributed(candidate: Candidate, cluster: Cluster) -> bool:
    """Return whether Transformers divides the model while loading it in a way that was never started."""
    started = (
        candidate.method_row.distributes
        and candidate.tool == "trl"
        and candidate.trl_version == NEWEST_TRL
        and not candidate.images_per_row
        and not candidate.offload_param
        and candidate.dp_replicate_size == 1
        and candidate.num_processes > 1
    )
    return candidate.scheme_row.loads_divided and not started


def has_undivided_experts(candidate: Candidate) -> bool:
    """Return whether `ep_size` GPUs cannot divide the experts: their number is no multiple, or there are none.

    With `tp_size` above 1, return whether `ep_size` is above 1 too, or no GPUs are left for FSDP2. Layers without
    formulas count as layers without experts, because the traffic between them is not measured.
    """
    if not candidate.scheme_row.divides_experts:
        return False
    if candidate.layer_gpus > 1:
        return candidate.ep_size > 1 or candidate.shard_gpus == 1
    divides = candidate.ep_size > 1 and candidate.shard_gpus % candidate.ep_size == 0
    experts = [
        layer.feed_forward for layer, _ in candidate.model.layer_kinds if isinstance(layer.feed_forward, Experts)
    ]
    divided = experts and not any(block.num_experts % candidate.ep_size for block in experts)
    return not (divides and divided) or candidate.model.architecture.layer is None


def has_undivided_layers(candidate: Candidate) -> bool:
    """Return whether GPUs cannot share each layer: the type has no plan, or they do not divide heads or features."""
    gpus, model = candidate.layer_gpus, candidate.model
    if gpus == 1:
        return False
    sizes = [
        size
        for layer, _ in model.layer_kinds
        for size in (layer.attention.num_key_value_heads, layer.attention.num_attention_heads, *_features(layer))
    ]
    uneven = candidate.num_processes % gpus or any(size % gpus for size in sizes)
    return not model.architecture.divides_layers or bool(uneven)


def divides_layers_otherwise(candidate: Candidate, cluster: Cluster) -> bool:
    """Return whether GPUs share each layer in a way that was never started on emulated GPUs."""
    if candidate.layer_gpus == 1:
        return False
    return bool(cluster.gpus_per_node % candidate.layer_gpus) or candidate.use_liger_kernel or candidate.use_kernels


def _features(layer: Layer) -> tuple[int, ...]:
    """Return the features inside a layer's MLP, or inside its experts and what is beside them."""
    block = layer.feed_forward
    if isinstance(block, Mlp):
        return (block.intermediate_size,)
    return (block.moe_intermediate_size, *((block.shared.intermediate_size,) if block.shared else ()))


def adapts_divided_inputs(candidate: Candidate) -> bool:
    """Return whether an adapter is on a projection that writes the hidden states, whose inputs GPUs divide."""
    if candidate.layer_gpus == 1 or candidate.tuning != "lora":
        return False
    targets = listed_targets(candidate.model, candidate.lora_target_modules)
    return targets == ("all-linear",) or not _divided_inputs(candidate.model).isdisjoint(targets)


def targets_beside_inputs(candidate: Candidate) -> tuple[Change, ...]:
    """Return the names of the projections that read the hidden states, whose outputs GPUs divide."""
    names = {linear.name for layer, _ in candidate.model.layer_kinds for linear in layer.linears}
    return ({"lora_target_modules": tuple(sorted(names - _divided_inputs(candidate.model)))},)


def parts_groups(candidate: Candidate) -> bool:
    """Return whether a vLLM engine would divide a group of weights with one scale, of GPTQ or AWQ, between GPUs."""
    return parted_inputs(candidate) is not None


def parted_inputs(candidate: Candidate) -> Linear | None:
    """Return the first projection of which a vLLM engine would divide a group between GPUs; None if there is none.

    Tensor parallelism divides the inputs of projections that write the hidden states. Experts get smaller groups.
    Source: vllm 0.31, model_executor/layers/quantization/moe_wna16.py, `MoeWNA16Method.create_weights`.
    """
    gpus, quantization = candidate.vllm_tensor_parallel_size, candidate.engine_quantization
    size = candidate.model.quantization_group_size  # -1: all inputs of an output are one group
    grouped = quantization is not None and ENGINE_QUANTIZATIONS[quantization].bytes_per_group > 0
    if candidate.vllm == "off" or gpus == 1 or not grouped or size <= 0:
        return None
    linears = _divided_linears(candidate.model)
    return next((each for each in linears if size < each.in_features and each.in_features % (size * gpus)), None)


def gpus_of_whole_groups(candidate: Candidate) -> tuple[Change, ...]:
    """Return the largest tensor parallel size below a candidate's that divides it and parts no group and no block."""
    size = candidate.vllm_tensor_parallel_size
    smaller: list[Change] = [{"vllm_tensor_parallel_size": each} for each in range(size - 1, 0, -1) if not size % each]
    fewer = (replace(candidate, **change) for change in smaller)
    whole = next(each for each in fewer if not parts_groups(each) and not parts_blocks(each))
    return ({"vllm_tensor_parallel_size": whole.vllm_tensor_parallel_size},)


# Weights that share a scale, at least. Source: vllm 0.31, model_executor/layers/fused_moe/oracle/fp8.py,
# `refine_fp8_moe_block_shape`.
SMALLEST_BLOCK = 32


def parts_blocks(candidate: Candidate) -> bool:
    """Return whether a vLLM engine would divide a block of FP8 weights with one scale between GPUs."""
    return parted_features(candidate) > 0


def parted_features(candidate: Candidate) -> int:
    """Return the features of one GPU of a vLLM engine where they are no whole number of FP8 blocks; 0 if all are.

    Queries, keys, values, MLPs and shared experts; routed ones if vLLM does not make their blocks smaller
    ("refines_blocks"). Leaves out layers with states.
    """
    gpus, block, model = candidate.vllm_tensor_parallel_size, candidate.model.quantization_group_size, candidate.model
    scaled = candidate.engine_quantization == model.quantization_row.engine and model.quantization_row.scales_blocks
    if candidate.vllm == "off" or gpus == 1 or not scaled or block <= 0:
        return 0
    for layer, _ in model.layer_kinds:
        routed = layer.feed_forward.moe_intermediate_size // gpus if isinstance(layer.feed_forward, Experts) else 0
        refined = vllm_has(candidate.vllm_release, "refines_blocks")
        refined = refined and gcd(block, routed, layer.hidden_size) >= SMALLEST_BLOCK
        for features in (*_features_of_gpu(layer, gpus), 0 if refined else routed):
            if features % block:
                return features
    return 0


def _features_of_gpu(layer: Layer, gpus: int) -> Iterator[int]:
    attention, block = layer.attention, layer.feed_forward
    if attention.kv_latent_dim:
        divided = {"q_proj", "q_b_proj", "kv_b_proj"}
        yield from (linear.out_features // gpus for linear in attention.linears if linear.name in divided)
    else:
        sharing = min(gpus, attention.num_key_value_heads)  # with more GPUs than heads some share one
        yield from (attention.q_dim // gpus, attention.k_dim // sharing, attention.v_dim // sharing)
    yield attention.num_attention_heads * attention.v_head_dim // gpus
    dense = block.shared if isinstance(block, Experts) else block
    yield from (dense.intermediate_size // gpus,) if dense else ()


def _divided_inputs(model: ModelShape) -> frozenset[str]:
    return frozenset(linear.name for linear in _divided_linears(model))


def _divided_linears(model: ModelShape) -> tuple[Linear, ...]:
    """Return the projections that write the hidden states, beside experts': tensor parallelism divides their inputs."""
    layers = [layer for layer, _ in model.layer_kinds]
    blocks = [layer.feed_forward for layer in layers]
    dense = [block.shared if isinstance(block, Experts) else block for block in blocks]
    lists = (*(layer.attention.linears for layer in layers), *(block.linears for block in dense if block))
    return tuple(linears[-1] for linears in lists if linears)  # a layer of Nemotron-H has one of the two


def adapts_divided_experts(candidate: Candidate) -> bool:
    """Return whether adapters are on the fused parameters of experts, or their router, that Transformers shards."""
    row, targets = candidate.model.architecture, listed_targets(candidate.model, candidate.lora_target_modules)
    named = targets == ("all-linear",) or not row.converted_names.keys().isdisjoint(targets)
    wraps = bool(candidate.lora_target_parameters) or (bool(row.converted_names) and named)
    return candidate.scheme_row.loads_divided and candidate.tuning == "lora" and wraps


def targets_beside_experts(candidate: Candidate) -> tuple[Change, ...]:
    """Return the names of the linear layers that are no experts."""
    names = {linear.name for layer, _ in candidate.model.layer_kinds for linear in layer.linears}
    kept = tuple(sorted(names - candidate.model.architecture.converted_names.keys()))
    named: Change = {"lora_target_parameters": ()} if candidate.lora_target_parameters else {}
    return ({"lora_target_modules": kept, **named},)


def precomputes_on_cpu(candidate: Candidate, cluster: Cluster) -> bool:
    """Return whether the reference's log-probabilities are wanted from a model that is still on the CPU."""
    wanted = candidate.precompute_ref_log_probs and candidate.method_row.precomputes_reference
    return wanted and candidate.tuning == "lora" and candidate.scheme_row.prepares_late


def precomputes_in_other_trainer(candidate: Candidate) -> bool:
    """Return whether the reference's log-probabilities are wanted first from a tool's trainer, which has no such."""
    wanted = candidate.precompute_ref_log_probs and candidate.method_row.precomputes_reference
    return wanted and candidate.method in candidate.tool_row.losses


def can_precompute(candidate: Candidate, cluster: Cluster) -> bool:
    """Return whether the trainer can compute the reference's log-probabilities first; TRL refuses it for images."""
    ahead = replace(candidate, precompute_ref_log_probs=True)
    return (
        candidate.method_row.precomputes_reference
        and not candidate.images_per_row
        and not precomputes_on_cpu(ahead, cluster)
        and not precomputes_in_other_trainer(ahead)
    )


def generates_ungathered(candidate: Candidate) -> bool:
    """Return whether the trainer's `generate` runs with ZeRO-3's hooks, which gather a module when it is called."""
    row = candidate.method_row
    hooked = row.generates and candidate.vllm == "off" and not candidate.ds3_gather_for_generation
    return hooked and candidate.scheme_row.traces_modules and not row.always_gathers


def reads_convolution(candidate: Candidate, cluster: Cluster) -> bool:
    """Return whether layers read the weight of their convolution, which they do not call, while it is a shard.

    All layers that keep a state do. DeepSpeed gathers a weight that is read in the engine's forward pass only, and
    `generate` calls the model inside it.
    """
    return generates_ungathered(candidate) and states_of(candidate.model) != ()


def prefetches_read_head(candidate: Candidate, cluster: Cluster) -> bool:
    """Return whether ZeRO-3 is still gathering the head when TRL's loss gathers it.

    `generate` with ZeRO-3's hooks calls the head after the layers, so that DeepSpeed prefetches it in the next pass,
    whose loss does not call it but reads its weight. With adapters `generate` calls the base model, whose passes
    DeepSpeed does not record. A tied head stays gathered from the embedding on, and nothing stops, if the layers
    between have fewer parameters than `stage3_max_reuse_distance`.
    """
    if not generates_ungathered(candidate) or candidate.stage3_prefetch_bucket_size == 0 or not in_full(candidate):
        return False
    if candidate.loss in LINEAR_HEAD:
        return False
    between = sum(layer.params for layer in candidate.model.layers)
    return not (candidate.model.tied and between < candidate.stage3_max_reuse_distance)


def trains_in_bfloat16(candidate: Candidate) -> bool:
    """Return whether an optimizer without sharding gets a bfloat16 gradient: of weights, adapters or copied modules.

    It gets none where the training script casts what is trained to float32.
    """
    if not candidate.scheme_row.whole or candidate.script_casts_to_float32:
        return False
    kept = in_full(candidate) or candidate.has_copies or not candidate.autocast_adapter_dtype
    return candidate.trainer_casts_to_bfloat16 or (kept and candidate.dtype == "bfloat16")


def scales_16_bit_gradients(candidate: Candidate, cluster: Cluster) -> bool:
    """Return whether GradScaler gets 16-bit gradients. DeepSpeed scales by itself; FSDP2 trains float32 parameters."""
    half = candidate.precision == "fp16" and candidate.scheme_row.whole and candidate.dtype != "float32"
    adapters = not candidate.autocast_adapter_dtype and not candidate.quantization_row.bitsandbytes
    return half and (in_full(candidate) or (adapters and not candidate.script_casts_to_float32))


def waits_for_tower(candidate: Candidate, cluster: Cluster) -> bool:
    """Return whether DDP waits forever for gradients of a vision tower: text alone, in full, with checkpointing."""
    unused = candidate.model.vision_params > 0 and not candidate.images_per_row
    return candidate.scheme_row.reducer and in_full(candidate) and candidate.gradient_checkpointing and unused


def loads_float32(candidate: Candidate, cluster: Cluster) -> bool:
    """Return whether the weights are loaded in float32 although the candidate says another dtype."""
    plain = (
        candidate.scheme_row.creates_sharded
        and not candidate.quantization_row.quantized
        and candidate.precision == "no"
    )
    return plain and candidate.dtype != "float32"


def shares_rows_without_kernel(candidate: Candidate, cluster: Cluster) -> bool:
    """Return whether GPUs share rows with attention that cannot: eager, or any but sdpa with context parallel."""
    kernel = candidate.attn_implementation
    return (candidate.cp_size > 1 and kernel != "sdpa") or (candidate.sp_size > 1 and kernel == "eager")


def kernel_of_shared_rows(candidate: Candidate) -> tuple[Change, ...]:
    """Return the attention that shares rows, or rows that are not shared for a model that has none."""
    if candidate.model.supports_sdpa:
        return ({"attn_implementation": "sdpa"},)
    return ({"attn_implementation": "flash_attention_2"},) if candidate.cp_size == 1 else ({"cp_size": 1},)


def can_have_server(candidate: Candidate) -> bool:
    """Return whether a vLLM server can sample for the candidate: on a GPU of its own, from weights of 16 bits."""
    return candidate.num_processes > 1 and not candidate.quantization_row.quantized


def stored_as_floats(candidate: Candidate) -> bool:
    """Return whether 4-bit weights are sharded as floats of another dtype than uint8."""
    floats = candidate.scheme_row.shards_4bit == "as floats" and candidate.bnb_4bit_quant_storage != "uint8"
    return floats and candidate.quantization_row.four_bit


def shards_4bit(candidate: Candidate) -> bool:
    """Return whether ZeRO-3 shards 4-bit weights."""
    always = candidate.scheme_row.shards_4bit == "always" and candidate.quantization_row.four_bit
    return always and candidate.num_processes > 1


def teacher_in_bfloat16(candidate: Candidate, cluster: Cluster) -> bool:
    """Return whether a teacher is loaded in a bfloat16 that the GPU lacks; DeepSpeed casts it under fp16."""
    cast = candidate.scheme_row.casts == "module" and candidate.precision == "fp16"
    loaded = candidate.method_row.teacher and not cast and candidate.teacher_load_dtype == "bfloat16"
    return loaded and not cluster.gpu.supports_bf16


def named_targets(candidate: Candidate) -> tuple[Change, ...]:
    """Return the names of all linear layers that take adapters, instead of PEFT's shorthand."""
    return ({"lora_target_modules": widest_targets(candidate.model)},)


def another_sharding(candidate: Candidate) -> tuple[Change, ...]:
    """Return the sharding of a method that stops under a kind of FSDP."""
    row = candidate.method_row
    return ({"sharding": "fsdp2" if row.runs_under_fsdp2 else "zero2" if row.samples_values else "zero3"},)


def one_dtype(candidate: Candidate) -> tuple[Change, ...]:
    """Return what gives the layers of a quantized base one dtype, as FSDP 1 wants it, or leaves FSDP 1."""
    leave: Change = {"sharding": "fsdp2"}
    if not candidate.quantization_row.four_bit:
        return (leave,)
    kept = CAST_TO.get(candidate.precision, "bfloat16")
    return ({"dtype": kept, "bnb_4bit_quant_storage": kept}, leave)


def plain_experts(candidate: Candidate) -> tuple[Change, ...]:
    """Return the same quantization without the experts."""
    spelling = candidate.quantization_row.spelling
    kept = {name: value for name, value in spelling.items() if name != "quantize_moe_experts"}
    return tuple({"quantization": name} for name, row in QUANTIZATIONS.items() if row.spelling == kept)


def fitting_storage(candidate: Candidate) -> tuple[Change, ...]:
    """Return the dtype of the storage of 4-bit weights that survives the cast of mixed precision."""
    return ({"bnb_4bit_quant_storage": CAST_TO[candidate.precision]},)
