"""The packages that `peers.py` asks: version, what is asked, and the text that asks it in the peer's environment."""

from msgspec import Struct


class Peer(Struct, frozen=True, kw_only=True):
    """A package and the Python text that answers one question in its environment.

    The text defines `answer(q)`, which calls `need(condition, reason)` for what the peer cannot express. It returns the
    peer's total, with its share for the CUDA context ("context_bytes") and for fragmentation, or for both of them where
    it has one figure ("slack_bytes").
    """

    package: str
    version: str
    asked: str
    code: str
    dependencies: bool = True
    borrows: bool = False


# Runs in the peer's environment: one question a line on stdin, one answer a line on stdout.
HARNESS = """
import contextlib, json, sys, time, warnings
warnings.simplefilter("ignore")
SHORT = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
class Cannot(Exception): pass
def need(condition, reason):
    if not condition: raise Cannot(reason)
def one_gpu(q):
    need(q["gpus"] == 1 or q["sharding"] == "ddp", "several GPUs with sharded states")
def only_sft(q):
    need(q["method"] == "sft", "methods other than SFT")
    need(q["vllm"] != "colocate", "a vLLM engine on the trainer's GPU")
out, sys.stdout = sys.stdout, sys.stderr
%s
for line in sys.stdin:
    start = time.perf_counter()
    try: said = answer(json.loads(line))
    except Cannot as error: said = {"cannot": str(error)}
    except Exception as error: said = {"cannot": "its error: " + " ".join(str(error).split())[:90]}
    print(json.dumps({**said, "seconds": time.perf_counter() - start}), file=out, flush=True)
"""

PEERS = (
    Peer(
        package="agilerl-arena",
        version="1.29.0",
        asked="`estimate_training`; claims the NVML peak of AgileRL's own trainer, whose loss is computed in tiles",
        code="""
from agilerl.arena.memory import DeviceSpec, ModelArch, ModelSpec, TrainingSettings, estimate_training, lookup_gpu
from agilerl.arena.models.fsdp import FSDPConfig
def answer(q):
    need(q["method"] in ("sft", "dpo", "grpo"), "methods other than SFT, DPO, GRPO and PPO")
    need(q["tuning"] == "lora", "full fine-tuning")
    need(q["quantization"] == "none", "quantized bases")
    need(q["gpus"] == 1 or q["sharding"] in ("ddp", "zero3", "fsdp2"), "ZeRO-1 and ZeRO-2")
    need(q["vllm"] != "colocate", "a vLLM engine on the trainer's GPU")
    card = lookup_gpu(q["gpu"])
    device = DeviceSpec(total_bytes=q["gpu_bytes"], name=card and card.name)
    sharded = q["gpus"] > 1 and q["sharding"] != "ddp"
    settings = TrainingSettings(
        algorithm=q["method"], group_size=q["num_generations"], max_model_len=q["tokens"], lora_rank=q["lora_r"],
        lora_target_scope="all-linear" if q["all_linear"] else "attention-only", lora_dropout=q["lora_dropout"],
        beta=q["beta"], weight_dtype=SHORT[q["dtype"]],
        gradient_checkpointing=q["checkpointing"], n_training_gpus=q["gpus"], micro_batch_size=q["batch"],
        use_separate_reference_adapter=False, fsdp=FSDPConfig(optim_cpu_offload=q["offload"]) if sharded else None)
    arch = ModelArch.from_hf_config(q["config"])
    found = estimate_training(ModelSpec(model_id=q["model"], arch=arch, n_params=q["params"]), device, settings)
    parts = {part.key: part for part in found.components}
    outside = parts["overhead"].n_bytes - parts["overhead"].detail["rollout_tensors"]
    return {"bytes": found.total_bytes, "slack_bytes": parts["allocator_reserve"].n_bytes, "context_bytes": outside}
""",
    ),
    Peer(
        package="fitcheck-llm",
        version="0.3.1",
        asked="`estimate`; claims the memory of the process: tensors, CUDA context and fragmentation",
        code="""
from fitcheck import GPU_DB, GpuSpec, ModelConfig, TrainingConfig, estimate
from fitcheck.config_parser import _parse_fields, _reject_unsupported
def answer(q):
    only_sft(q); one_gpu(q)
    need(q["quantization"] in ("none", "nf4", "nf4-double", "int8"), "GPTQ bases")
    need(not q["experts"], "mixtures of experts")
    _reject_unsupported(q["config"], q["model"])
    quantized = q["quantization"] != "none"
    model = ModelConfig(name=q["model"], num_params=q["params"], **vars(_parse_fields(q["config"])))
    mib = q["gpu_bytes"] >> 20
    card = GPU_DB.get(q["gpu"].lower().removeprefix("rtx-").removesuffix("g"), GpuSpec(q["gpu"], mib, mib))
    targets = q["lora_targets"] if not q["all_linear"] else [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    found = estimate(model, TrainingConfig(
        precision=q["precision"] if quantized and q["precision"] != "no" else SHORT[q["dtype"]],
        quantization=q["quantization"].removesuffix("-double"), double_quant=q["quantization"] == "nf4-double",
        batch_size=q["batch"], seq_len=q["tokens"], lora_rank=q["lora_r"] if q["tuning"] == "lora" else None,
        lora_targets=targets, grad_checkpoint=q["checkpointing"], flash_attn=q["attn"] != "eager"), card)
    return {"bytes": found.total_mib * 2**20, "slack_bytes": found.overhead_mib * 2**20, "context_bytes": 0}
""",
    ),
    Peer(
        package="vramcalc",
        version="0.1.2",
        asked='`estimate(mode="train")`; tensors, and an overhead of 0.75 GB of its own',
        code="""
from vramcalc import estimate
def answer(q):
    only_sft(q); one_gpu(q)
    need(q["quantization"] == "none", "quantized bases")
    mixed = q["dtype"] == "float32" and q["precision"] != "no"
    found = estimate(q["config"], mode="train", dtype=q["precision"] if mixed else SHORT[q["dtype"]], batch=q["batch"],
        seq_len=q["tokens"], lora_rank=q["lora_r"] if q["tuning"] == "lora" else None,
        grad_checkpoint=q["checkpointing"], precision="amp" if mixed else "pure",
        attn_impl="flash" if q["attn"].startswith("flash") else q["attn"])
    return {"bytes": found.total + found.overhead, "slack_bytes": 0, "context_bytes": found.overhead}
""",
    ),
    Peer(
        package="fitscout",
        version="0.1.1",
        asked="`estimate_memory`, its middle figure (its band is +-20 %)",
        code="""
from fitscout.memory.estimator import estimate_memory
from fitscout.model.introspect import extract_arch_fields
from fitscout.model.profile import ModelProfile
def answer(q):
    only_sft(q); one_gpu(q)
    width = 4 if q["dtype"] == "float32" and (q["quantization"] == "none" or q["precision"] == "no") else 2
    profile = ModelProfile(params=q["params"], dtype_bytes=width, **extract_arch_fields(q["config"]))
    kind = "full" if q["tuning"] == "full" else "lora" if q["quantization"] == "none" else "qlora"
    found = estimate_memory(profile, method=kind, micro_batch=q["batch"], seq_len=q["tokens"],
        grad_ckpt=q["checkpointing"], lora_rank=q["lora_r"], grad_dtype_bytes=width)
    return {"bytes": found.total_gb * 2**30, "slack_bytes": found.overhead_gb * 2**30, "context_bytes": 0}
""",
    ),
    Peer(
        package="ftuneai",
        version="0.4.1",
        asked="`MemoryEstimator.estimate`; total with 20 % for context and fragmentation",
        code="""
from ftuneai.core.memory import MemoryEstimator
from ftuneai.core.models import (
    FineTuneMethod, LoRATarget, ModelSpec, Quantization, ShardingStrategy, TrainingConfig)
SHARDING = {"none": "none", "ddp": "none", "zero1": "zero_1", "zero2": "zero_2", "zero3": "zero_3", "fsdp2": "fsdp"}
def answer(q):
    only_sft(q)
    need(q["hidden_size"] and q["heads"], "models whose attention is not uniform")
    model = ModelSpec(name=q["model"], parameters=q["params"], hidden_size=q["hidden_size"], num_layers=q["layers"],
        num_attention_heads=q["heads"], num_kv_heads=q["kv_heads"], intermediate_size=q["intermediate_size"],
        vocab_size=q["vocab_size"], max_seq_length=max(q["tokens"], q["longest"]), default_dtype=q["dtype"],
        is_moe=q["experts"] > 0, num_experts=q["experts"] or None, num_active_experts=q["experts_per_token"] or None)
    quantized = q["quantization"] != "none"
    found = MemoryEstimator(model, TrainingConfig(
        method=FineTuneMethod("qlora" if quantized else q["tuning"]),
        quantization=Quantization("none" if not quantized else "8bit" if q["quantization"] == "int8" else "4bit"),
        batch_size=q["batch"], seq_length=q["tokens"], gradient_checkpointing=q["checkpointing"],
        lora_rank=q["lora_r"], lora_target=LoRATarget("all_linear" if q["all_linear"] else "attention"),
        flash_attention=q["attn"] != "eager", sharding=ShardingStrategy(SHARDING[q["sharding"]]),
        num_gpus=q["gpus"])).estimate()
    return {"bytes": found.total_gb * 2**30, "slack_bytes": found.overhead_gb * 2**30, "context_bytes": 0}
""",
    ),
    Peer(
        package="torch-kitsune",
        version="0.7.0",
        asked="`predict_memory`, `estimate_lora_memory` on a meta model of the config; 15 % of overhead",
        dependencies=False,
        borrows=True,
        code="""
import pathlib, tempfile, torch
from kitsune.predict.estimator import predict_memory
from kitsune.predict.hf_integration import load_hf_model
from kitsune.predict.lora_estimator import LoRAConfig, estimate_lora_memory
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "qkv", "dense", "fc", "mlp")
def answer(q):
    only_sft(q); one_gpu(q)
    need(q["quantization"] in ("none", "nf4", "nf4-double"), "GPTQ bases")
    quantized = q["quantization"] != "none"
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps({**q["config"], "dtype": "float32" if quantized else q["dtype"]})
        pathlib.Path(folder, "config.json").write_text(text)
        model, _ = load_hf_model(folder)
    shape = ((q["tokens"],), q["batch"], q["dtype"])
    if q["tuning"] == "full":
        found = predict_memory(model, *shape, optimizer="adamw")
    else:
        targets = LINEAR if q["all_linear"] else tuple(q["lora_targets"])
        found = estimate_lora_memory(
            model, *shape, LoRAConfig(rank=q["lora_r"], target_modules=targets, use_qlora=quantized))
    return {"bytes": found.total_bytes, "slack_bytes": found.overhead_bytes, "context_bytes": 0}
""",
    ),
    Peer(
        package="gpu-estimator",
        version="0.2.0",
        asked="`GPUEstimator.estimate`, the total over its GPUs; 20 % for everything else",
        dependencies=False,
        code="""
from gpu_estimator.estimator import GPUEstimator
estimator = GPUEstimator()
def answer(q):
    only_sft(q); one_gpu(q)
    need(q["tuning"] == "full", "adapters")
    found = estimator.estimate(model_params=q["params"], batch_size=q["batch"], sequence_length=q["tokens"],
        precision="fp32" if q["dtype"] == "float32" else "bf16", optimizer="adamw",
        gradient_checkpointing=q["checkpointing"])
    total = found.total_memory_gb * 2**30
    return {"bytes": total, "slack_bytes": total - total / 1.2, "context_bytes": 0}
""",
    ),
    Peer(
        package="alloc",
        version="0.0.16",
        asked="`alloc.ghost` of a parameter count; 10 % of buffer on top",
        code="""
from alloc.ghost import ghost
def answer(q):
    only_sft(q); one_gpu(q)
    need(q["tuning"] == "full", "adapters")
    found = ghost(param_count=q["params"], dtype=q["dtype"], batch_size=q["batch"], seq_length=q["tokens"],
        hidden_dim=q["hidden_size"], optimizer_type=None if q["dtype"] == "float32" else "AdamW")
    return {"bytes": found.total_gb * 2**30, "slack_bytes": found.buffer_gb * 2**30, "context_bytes": 0}
""",
    ),
    Peer(
        package="accelerate",
        version="1.15.0",
        asked="the functions behind `accelerate estimate-memory` on a local config; claims the states alone",
        dependencies=False,
        borrows=True,
        code="""
import pathlib, tempfile, torch
from accelerate import init_empty_weights
from accelerate.commands.estimate import estimate_training_usage
from accelerate.utils import calculate_maximum_sizes
from transformers import AutoConfig, AutoModel
def answer(q):
    only_sft(q); one_gpu(q)
    need(q["tuning"] == "full", "adapters")
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "config.json").write_text(json.dumps(q["config"]))
        config = AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = AutoModel.from_config(config, torch_dtype=torch.float32)
    size, _ = calculate_maximum_sizes(model)
    mixed = {"bf16": "bfloat16", "fp16": "float16"}.get(q["precision"], q["dtype"])
    return {"bytes": max(estimate_training_usage(size, mixed).values()), "slack_bytes": 0, "context_bytes": 0}
""",
    ),
    Peer(
        package="deepspeed",
        version="0.19.8",
        asked="`estimate_zero2/3_model_states_mem_needs`; claims the states alone",
        dependencies=False,
        borrows=True,
        code="""
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2
def answer(q):
    need(q["sharding"] in ("zero2", "zero3"), "runs without ZeRO-2 or ZeRO-3")
    need(q["tuning"] == "full", "adapters: every parameter counts as trainable")
    need(q["vllm"] != "colocate", "a vLLM engine on the trainer's GPU")
    if q["sharding"] == "zero2":
        found = zero2(q["params"], num_gpus_per_node=q["gpus"], cpu_offload=q["offload"])[1]
    else:
        found = zero3(q["params"], q["largest_module_params"], num_gpus_per_node=q["gpus"], cpu_offload=q["offload"],
            cpu_offload_params=False)[1]
    return {"bytes": found, "slack_bytes": 0, "context_bytes": 0}
""",
    ),
)
# Named in the field, and not asked.
NOT_ASKED = (
    "hf-mem, llm-mem-planner: inference",
    "hf-vram-calc: training is a multiple of the weights, whatever the batch",
    "llm-analysis: pre-training with Megatron's parallelism, and libraries of 2023",
    "training-hub: loads the weights of the model, which a hub must serve",
    "xtuner, Unsloth: come with their whole training program, not tried",
    "torchtitan, MemTracker: a run of a model, not an answer from settings",
)
