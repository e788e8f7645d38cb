"""Advice that depends on where a run stopped: what helps while a model loads does nothing for a batch."""

import math
import re
from collections.abc import Iterator, Sequence

from planner.diagnose.incident import Activity, Incident
from planner.quantities import Phase
from planner.units import GIB, MIB, format_count, format_gib

MODEL_PHASES = (None, "backward", "optimizer_step")  # in which gradients, copies and states of a model are made
LEAST_MODEL_BYTES = GIB  # judged: activations and buckets are often as large as what is smaller
MODEL_ROUNDING = 0.12  # of a model's size, by which its name differs from its parameters: 7B has 6.7 to 7.6
OF_MODEL = (
    "flat gradients, float32 copies or an optimizer's states, which no batch and no length changes: ZeRO-3 or FSDP "
    "over more GPUs, offload_optimizer_device=cpu, LoRA, or an 8-bit optimizer (optim=adamw_8bit)"
)
SMALL_REQUEST = 0.02  # of the tensors that the process holds. Judged: one layer's share
FILLED_SHARE = 0.97  # of a GPU, from which tensors fill it. Judged: above vLLM's own share, with its context beside
FIRST_STEPS = 3  # by then optimizer states exist, and the allocator holds what a step needs
# What a training step has less of -> the setting of `IN_EFFECT` that makes it so already, and how that is said.
SMALLER_BATCH = "a smaller per_device_train_batch_size with more gradient_accumulation_steps"
SHORTER = "a shorter max_length (max_completion_length where it generates)"
CHECKPOINTING = "gradient_checkpointing=true"
BATCH = f"{SMALLER_BATCH}, {SHORTER}, or {CHECKPOINTING}"
# Source: transformers 5.23, modeling_utils.py; diffusers 0.35, pipelines/pipeline_utils.py
INFERRING = (
    "a smaller batch or shorter input, weights in fewer bits (dtype=bfloat16, load_in_4bit=true), or layers on several "
    'devices (device_map="auto"); in diffusers enable_model_cpu_offload() and enable_vae_tiling()'
)
# Source: deepspeed 0.19.8, runtime/zero/stage_1_and_2.py, `bit16_groups_flat` and `single_partition_of_fp32_groups`
MASTER = (
    "DeepSpeed was making its flat and float32 copies of the weights that it trains, which no batch size changes: LoRA "
    "trains fewer, offload_optimizer_device=cpu keeps them on the host, ZeRO-3 and more GPUs divide more"
)
# Source: torch 2.13, optim/adam.py, `_init_group`: the states are made in the first step
STATES_CAME = (
    "the first step fitted, and at its end the optimizer made its states, which stay: 8 bytes a trained parameter of "
    "AdamW, 2 of optim=adamw_8bit"
)
ROOM = "if a batch of 1 is too large still"
LOADING = (
    "only the model is loading, which no batch size and no length changes: a larger GPU, a smaller model, 4-bit "
    "weights (load_in_4bit=true), ZeRO-3 or FSDP over more GPUs, or offloading"
)
# Of trainers that make each GPU's share of the weights themselves.
BUILDING_SHARE = (
    "Megatron was making this GPU's share of the weights, which no batch size and no length changes: a larger expert, "
    "tensor or pipeline parallel size makes it smaller (see in the log that they took effect), as do more GPUs, a "
    "smaller model, and 16 bits a weight"
)
QUANTIZING = (
    "only the model is loading, in few bits already, which no batch size and no length changes: a larger GPU, more "
    "GPUs that share it (ZeRO-3, FSDP), a smaller model; see nvidia-smi for what else holds the GPU"
)
# Source: vllm 0.31, v1/worker/gpu_worker.py, `determine_available_memory`: before it takes a KV cache
ENGINE_PROFILES = (
    "vLLM was running with as many tokens as it may take at once, before it takes a KV cache: a smaller "
    "max_num_batched_tokens, max_num_seqs or vllm_max_model_length (vLLM's max_model_len) makes that run smaller"
)
ENGINE_WEIGHTS = (
    "weights that leave more room: a larger vllm_tensor_parallel_size, or fewer bits; beside a trainer "
    "vllm_enable_sleep_mode=true, or vllm_mode=server on GPUs of its own; a smaller vllm_gpu_memory_utilization leaves "
    "more for what comes after that run, not for it"
)
ENGINE_STARTS = (
    "vLLM was starting beside what the GPU held: a smaller vllm_gpu_memory_utilization, "
    "vllm_enable_sleep_mode=true, or vllm_mode=server on GPUs of its own"
)
ENGINE_SHARE = (
    "a smaller vllm_gpu_memory_utilization (its own name: gpu_memory_utilization) leaves more beside its KV cache"
)
ENGINE_EAGER = "enforce_eager=true captures no CUDA graphs"
ENGINE_LESS = "a smaller max_num_seqs or max_num_batched_tokens needs less"
ENGINE_FLOAT = (
    "the command has weights in float32: dtype=bfloat16, half or auto instead takes half of that, which no other "
    "setting changes as much"
)
ENGINE_SAMPLES = (
    "the sampler sorts the logits of all sequences at once, max_num_seqs times the vocabulary: a smaller max_num_seqs; "
    f"{ENGINE_SHARE}"
)
# Source: vllm 0.31, v1/worker/gpu_worker.py: weights, a profile run and the KV cache are to fit into the share
BEYOND_SHARE = 1.25  # of what gpu_memory_utilization grants, from which tensors are weights that are too many. Judged
SGLANG = (
    "the process is SGLang's: a smaller --mem-fraction-static leaves more beside its pools, --disable-cuda-graph, or a "
    "smaller --cuda-graph-max-bs, takes less for graphs"
)
SGLANG_LOADS = (
    "SGLang was loading its weights beside what the GPU held: a larger --tp-size shards them over more GPUs, or fewer "
    "bits a weight; nvidia-smi shows what else holds the GPU. No share of memory and no length changes their size"
)
ENGINE_LOADS = (
    "vLLM was loading its weights beside what the GPU held: a larger vllm_tensor_parallel_size shards them, or "
    "vllm_mode=server on GPUs of its own; no share of memory and no length changes their size"
)
# Source: vllm 0.31, config/cache.py: gpu_memory_utilization is 0.9 unless it is set
ENGINE_FULL = (
    "tensors alone fill the GPU, beyond the share that vLLM leaves free: most likely its weights, whose size no "
    "gpu_memory_utilization changes: a larger vllm_tensor_parallel_size (tensor_parallel_size), a checkpoint that is "
    "quantized already instead of one that is quantized as it loads, or a smaller model"
)
ENGINE_NOT_SPLIT = (
    "that is far more than the share that gpu_memory_utilization grants: most likely the weights, which are not split "
    "over the GPUs as asked. See in its log that tensor_parallel_size is in effect on each GPU, and that every GPU "
    "is used; else more GPUs, a checkpoint that is quantized already, or a smaller model"
)
ENGINE_CAPTURES = "vLLM was capturing CUDA graphs beside its KV cache: enforce_eager=true (vLLM's) captures none"
# Source: vllm 0.31, config/model.py and config/multimodal.py
ENGINE_ENCODES = (
    "vLLM's encoder of images and videos ran, which its profile run at the start gives the largest that may come: "
    "smaller ones (max_pixels in mm_processor_kwargs), fewer or none (limit_mm_per_prompt), skip_mm_profiling=true, or "
    "an attention that makes no tensor of all pairs (mm_encoder_attn_backend); no share of memory changes its size"
)
ENGINE_RUNS = (
    "vLLM was generating: a smaller vllm_gpu_memory_utilization (vLLM's own gpu_memory_utilization) leaves more beside "
    "its KV cache, a smaller max_num_seqs or max_num_batched_tokens needs less"
)
DATA_PARALLEL = (
    "several GPUs in one process (torch.nn.DataParallel) gather all outputs on the first: start the script with "
    "accelerate launch or torchrun, or show it one GPU (CUDA_VISIBLE_DEVICES=0)"
)
BUCKET = (
    "the buffer that failed is a bucket of gradients: a smaller reduce_bucket_size in DeepSpeed's config, and "
    "overlap_comm: false, which needs one instead of two"
)
MERGING = (
    "adapters merge into the whole base model, and a weight at a time needs room beside it: load the base model anew, "
    'in 16 bits (dtype=bfloat16) with device_map="cpu" (LLaMA-Factory: export_device cpu), in a process that trains '
    "nothing, and merge there"
)
NO_BATCH = "no batch size fits, down to 1: a shorter max_length, gradient_checkpointing=true, or LoRA or 4-bit weights"
UNKNOWN_PHASE = "the log does not show in which phase it was, as a whole traceback does. "
IN_ANY_PHASE = "In any phase: fewer bits a weight, a smaller model, or more devices that share it"
# Source: transformers 5.23, integrations/sdpa_attention.py and flash_attention.py
ATTENTION = (
    "eager attention was making a tensor of all pairs of tokens, for each head and row: attn_implementation=sdpa or "
    "flash_attention_2 makes none, and half the length needs a quarter of it"
)
# Source: transformers 4.30, models/llama/modeling_llama.py, `_expand_mask`; 5.23, masking_utils.py
MASK = (
    "a mask of all pairs of tokens was made for each row: half the length needs a quarter of it, a batch of 1 one row; "
    "attn_implementation=flash_attention_2 makes none, nor do newer releases of transformers with sdpa; of images, "
    "fewer pixels (max_pixels) make fewer tokens"
)
BEST_MODEL = (
    "the best checkpoint was loading beside the model that had trained: load_best_model_at_end=false loads none, and "
    "the best one can be loaded in a process of its own"
)
SYNC_REFERENCE = (
    "sync_ref_model=false, or a larger ref_model_sync_steps to see that it is this: under ZeRO-3 it gathers the whole "
    "policy and the whole reference on every GPU"
)
RESUMING = (
    'a checkpoint was loading beside the model that was there before: torch.load(map_location="cpu") in code of your '
    "own, and a sharded checkpoint where the model is sharded"
)
# Source: Megatron-LM, core/transformer/module.py, `float16_to_fp32`; slime's option --max-tokens-per-gpu
FLOAT_LOGITS = (
    "Megatron was making the logits anew in float32, 4 bytes for each token and each word of the vocabulary: a larger "
    "tensor or context parallel size divides them, and a smaller micro batch, a lower limit of tokens of a GPU, or "
    "shorter samples make fewer; gradient checkpointing does not change them"
)
# Source: torch 2.13, csrc/distributed/c10d/reducer.cpp, `initialize_buckets`
BUCKETS = (
    "DistributedDataParallel was taking buckets, as large as the gradients of all trainable weights: LoRA trains "
    "fewer, ZeRO or FSDP over the same GPUs divides them"
)
REFERENCE = (
    "if a reference model scores: beta=0.0 loads none for GRPO and RLOO, precompute_ref_log_probs=true scores before "
    "DPO and KTO train, and with LoRA the base model is the reference"
)
# Source: transformers 5.23, trainer.py, `evaluation_loop`, and training_args.py; accelerate 1.15,
# utils/fsdp_utils.py; deepspeed 0.19.8, runtime/engine.py, `save_16bit_model`.
KEEPS_NO_LOGITS = (
    "logits that an evaluation keeps of every batch: prediction_loss_only=true keeps none, eval_accumulation_steps=1 "
    "moves them to host memory, preprocess_logits_for_metrics makes them smaller"
)
KEEPS_PREDICTIONS = (
    "predict() keeps the outputs of all rows: eval_accumulation_steps=1 moves them to host memory, "
    "preprocess_logits_for_metrics keeps what is needed of them (and no hidden states), or fewer rows at a time; "
    "prediction_loss_only=true keeps none, and returns none"
)
EVAL_BATCH = (
    "a smaller per_device_eval_batch_size, which is 8 unless it is set, whatever training's is; in code of your own a "
    "smaller batch"
)
SAVING = (
    "a checkpoint in one piece gathers the model, and FSDP's the optimizer too: fsdp_state_dict_type: "
    "SHARDED_STATE_DICT or stage3_gather_16bit_weights_on_model_save: false write shards"
)
# The same by the library that shards. Source: torch 2.13, distributed/fsdp/api.py; deepspeed 0.19.8,
# utils/zero_to_fp32.py.
SAVING_SHARDED = {
    "fsdp": (
        "a checkpoint in one piece gathers the model, and the optimizer too: fsdp_state_dict_type: SHARDED_STATE_DICT "
        "writes shards; in code of your own FullStateDictConfig(offload_to_cpu=True, rank0_only=True) gathers on the "
        "host"
    ),
    "zero3": (
        "a checkpoint in one piece gathers the model: stage3_gather_16bit_weights_on_model_save: false writes shards, "
        "which zero_to_fp32.py joins on the CPU"
    ),
}
# Source: bitsandbytes 0.38, nn/modules.py, `Linear8bitLt._save_to_state_dict`; releases since 0.45 have no such order
SAVING_8BIT = (
    "weights of 8 bits were put into another order to save them, a copy of each on the GPU: save the adapters alone "
    "(model.save_pretrained of PEFT), or take a newer bitsandbytes"
)
# Source: torch 2.13, optim/adam.py, `_multi_tensor_adam`; deepspeed 0.19.8, runtime/zero/config.py
FOREACH = (
    "foreach=False in code of your own, or a fused optimizer (optim=adamw_torch_fused), takes no temporaries of all "
    "weights at once"
)
# In the optimizer's step, by the library that shards.
# Source: deepspeed 0.19.8, runtime/zero/config.py, `sub_group_size`.
STEP_SHARDED = {
    "zero3": "a smaller sub_group_size in DeepSpeed's config, 1e9 unless it is set: so many weights are stepped at once"
}
# Source: torch 2.13, distributed/fsdp/_state_dict_utils.py, which warns and goes on
NOT_WHOLE = "the checkpoint that was written after this warning may not be whole: do not go on from it"
SAVE_ONLY_MODEL = "save_only_model=true writes no optimizer states, but a run cannot go on from it"
# Of Ray's list of the ten processes that hold most: number, GB, title.
RAY_LIST, RAY_LISTS = "Top 10 memory users:", 10
RAY_USERS = re.compile(r"\b\d{1,9}[\t ](\d{1,6}\.\d\d)[\t ](?=\S)")
LISTED_SHARE = 0.5  # of what is in use: if those listed hold less, others hold more than they
FEW_PAGES_BYTES = MIB  # judged: where it lacks, a node is past use
PAGING = r"(?:os error|WinError) (?:8|14|1450|1455)\b|paging file is too small"
FUSED_LOSS = (
    "use_liger_kernel=true makes no tensor of all logits, where the trainer has such a loss; elsewhere a fused or "
    "chunked cross entropy"
)
# Phase -> advice for a GPU, the one most likely to help first.
GPU_ADVICE: dict[Phase, tuple[str, ...]] = {
    "load": (LOADING,),
    "rollout": (
        "a shorter max_completion_length, or fewer sequences at a time: a smaller per_device_train_batch_size or "
        "generation_batch_size; in code of your own a shorter prompt, fewer beams or a smaller batch",
        ROOM,
    ),
    "score": (BATCH, REFERENCE, ROOM),
    "forward": (BATCH, ROOM),
    "loss": (FUSED_LOSS, BATCH, ROOM),
    "backward": (BATCH, ROOM),
    "optimizer_step": (
        "the optimizer's states and copies, which no batch size changes: LoRA, an 8-bit or paged optimizer "
        "(optim=adamw_8bit, paged_adamw_8bit), ZeRO or FSDP over more GPUs, or states on the host "
        "(offload_optimizer_device=cpu)",
    ),
    "evaluation": (EVAL_BATCH, KEEPS_NO_LOGITS),
    "weight_sync": (
        "the weights are gathered, and merged if there are adapters, beside the engine: a smaller "
        "vllm_gpu_memory_utilization, or vllm_mode=server on GPUs of its own",
    ),
    "save": (SAVING, SAVE_ONLY_MODEL),
}
HOST_LOADING = (
    "each process first loads the model's weights into host memory, to resume a checkpoint's states too, and offloaded "
    "states and parameters stay there: give what a node has with --host-memory, and see the plan's line `host`"
)
# Judged: a TiB in one tensor of the host; the largest weight of a model of the catalogue has a tenth of it. A PiB on a
# GPU, where attention may ask for a row that is too long: scores of 10 million tokens for each of 5 heads, in 16 bits.
WRONG_SIZE_BYTES = {"host": 2**40, "gpu": 2**50}
WRONG_SIZE = (
    "no node holds that in one tensor: look for the operation in the traceback, and for a length, an index or a "
    "config.json that is wrong, or versions that do not go together; only scores of eager attention over rows of "
    "hundreds of thousands of tokens are as large"
)
WRONG_SIZE_OF_GPU = (
    "no GPU holds that in one tensor, so no setting of memory helps: a length, an index or a shape that was computed "
    "or copied wrongly. CUDA_LAUNCH_BLOCKING=1 shows the operation; without what is special about the run (beams, "
    "several GPUs, a custom kernel), or with another release, it shows whose bug it is"
)
HOST_GREW = (
    "earlier steps fitted, so if it was host memory, that grew: a smaller dataloader_num_workers, and what is kept "
    "over steps (completions that are logged, metrics, caches of images); free -g during the run shows the growth per "
    "step"
)
HOST_TRAINS = (
    "states and parameters that are offloaded, and each process's own copy of the data, stay in host memory: fewer "
    "data loader workers, no offloading of parameters, or a larger node; --host-memory plans with what it has"
)
FORKING = (
    "no process could be started by fork, which may need as much host memory as the trainer holds: a smaller "
    "dataloader_num_workers or dataset_num_proc"
)
SPAWNING = (
    "a process that was started, as Windows starts a data loader's workers, could not read what it was given: "
    "dataloader_num_workers=0, a smaller dataset_num_proc"
)
PAGED = (
    "unified memory for a paged optimizer's states, which host memory holds: optim=adamw_8bit pages nothing, and more "
    "host memory, or a larger memory= in WSL's .wslconfig, gives it room"
)
HOST_LIMIT = (
    "the limit of the container or of the job was reached, not that of the node: docker --memory, Kubernetes "
    "resources.limits.memory, SLURM --mem"
)
LIMIT_REACHED = r"MEMCG|cgroup|StepId|OOMKilled|OOM-killed|emory limit|OUT_OF_ME|job killed|exceeding memory limits"
HOST_OFFLOADS = (
    "DeepSpeed was putting the optimizer's states into host memory, 12 bytes a trainable parameter for Adam and 16 "
    "with gradients, which stay there if they are offloaded: offload_optimizer none if the GPUs have room, or device: "
    "nvme; LoRA trains fewer parameters, pin_memory: false locks none of it. --host-memory plans with what a node has"
)
ON_CPU = (
    "the step was computed on the CPU, or its activations were moved there: a smaller per_device_train_batch_size with "
    "more gradient_accumulation_steps, a shorter max_length or block size, gradient_checkpointing=true, or a GPU"
)
# Source: torch 2.13, optim/adam.py, `_init_group`: exp_avg and exp_avg_sq
STATES_ON_CPU = (
    "the optimizer was making its states on the CPU, 8 bytes a parameter of AdamW in float32, which no batch size "
    "changes: LoRA trains fewer, optim=adafactor or sgd keep less"
)
HOST_REMEDY = (
    "a node or a limit with more; fewer processes a node, of which each loads; dtype=bfloat16 with safetensors, so "
    "that no second copy in float32 is made; ZeRO-3 (zero.Init) or fsdp_cpu_ram_efficient_loading=true, so that not "
    "every rank holds the whole model"
)
HOST_MORE = (
    "more host memory: a larger limit of the container or job (docker run -m, Kubernetes resources.limits.memory, "
    "SLURM's mem), a larger node, or fewer processes on it"
)
HOST_LESS = (
    "or less in use: no offloading of optimizer states or parameters to the CPU, a smaller dataloader_num_workers and "
    "dataset_num_proc, streaming; if the model was loading, dtype=bfloat16 with safetensors. --host-memory plans with "
    "what a node has"
)
LIMIT_FIRST = (
    "little of the node's memory was in use before: first see the limit of the container or of the job (docker "
    "--memory, Kubernetes resources.limits.memory, SLURM --mem)"
)
TABLE = "a table of the dataset did not fit: streaming, a smaller dataset_num_proc, or fewer columns and shorter texts"
PAGING_FILE = (
    "Windows' paging file is too small: a larger one (Advanced system settings, Performance, Virtual memory), and "
    "dataloader_num_workers=0, since each process loads PyTorch's libraries anew"
)
PINNED = (
    "page-locked (pinned) host memory ran out, not the GPU's: offload_optimizer and offload_param with pin_memory: "
    "false, dataloader_pin_memory=false"
)
PINNED_WSL = "under WSL 2 only a part of host memory can be pinned: a larger memory= in .wslconfig, or Linux itself"
DRIVER_SAYS = (
    "the message is the driver's, not of PyTorch's allocator: nvidia-smi shows whether another process filled the GPU"
)
OUTSIDE_PYTORCH = (
    f"{DRIVER_SAYS}; with offloading, and under WSL, pinned host memory may be what ran out "
    "(dataloader_pin_memory=false)"
)
MAPPING = (
    "a worker that prepares the dataset died, most often of host memory: a smaller dataset_num_proc (each worker holds "
    "a copy of what it reads), or streaming"
)
BUILDING = (
    "a compiler ran out of host memory, which built an extension: MAX_JOBS=2 runs fewer of them at once; a wheel that "
    "is built needs none"
)
CALIBRATING = (
    "the model was being quantized layer by layer on rows for calibration: fewer and shorter rows, kept on the CPU "
    "(cache_examples_on_gpu=False), one at a time; or load weights that somebody has quantized"
)
OBJECT_STORE = (
    "Ray's object store is full: a larger object_store_memory (ray.init, ray start), which lies in /dev/shm, or fewer "
    "and smaller batches that pass between its workers"
)
SWAP_SPACE = "vLLM's swap_space, which each of its GPUs takes of host memory: swap_space=0 takes none"
EVICTED = (
    "Kubernetes evicted the pod since its node ran low, which takes pods first that use more than they request: "
    "resources.requests.memory of what the run needs, or a larger node"
)
LOCKED = (
    "memory that the network card may lock has a limit: ulimit -l unlimited, docker run --ulimit memlock=-1; SLURM: "
    "PropagateResourceLimitsExcept=MEMLOCK. NCCL_IB_DISABLE=1 goes without InfiniBand, and is slower"
)
POOL = "fewer worker processes (dataset_num_proc, num_proc, n_jobs), each of which holds a copy of what it reads"
PREPARING = (
    "the dataset was being prepared: a smaller dataset_num_proc (each worker holds a copy of what it reads), a smaller "
    "writer_batch_size of map, streaming, or fewer columns (images and long texts)"
)
# Source: the kernel's Documentation/admin-guide/sysctl/vm.rst, 65,530 mappings; torch's page of multiprocessing
MAPPINGS = (
    "sysctl -w vm.max_map_count=1048576 allows a process more mappings; each tensor that a worker sends is one, so "
    "fewer and larger ones help too; torch.multiprocessing.set_sharing_strategy('file_system') if descriptors lack; "
    "df -h /dev/shm shows if that is full (docker run --shm-size=16g)"
)
LOADER = (
    "a data loader's worker had too little host memory, or was killed for it: a smaller dataloader_num_workers or "
    "dataloader_prefetch_factor, since each worker holds the dataset's Python objects and the batches that it prepares"
)
HOST_MERGING = (
    "the merged model is put together in host memory to be written: load it in 16 bits (dtype=bfloat16, "
    "low_cpu_mem_usage=True) or on the GPU, write smaller shards (max_shard_size; LLaMA-Factory's export_size, "
    "Unsloth's maximum_memory_usage), or keep the adapters alone"
)
HOST_ADVICE: dict[Phase | None, tuple[str, ...]] = {
    None: (HOST_MORE, HOST_LESS),
    "load": (HOST_LOADING, HOST_REMEDY),
    "evaluation": (
        "eval_accumulation_steps moves logits to host memory: prediction_loss_only=true keeps none",
        HOST_MORE,
    ),
    "save": (SAVING, SAVE_ONLY_MODEL, HOST_MORE),
    **dict.fromkeys(
        ("rollout", "score", "forward", "loss", "backward", "optimizer_step", "weight_sync"), (HOST_TRAINS,)
    ),
}
# Of an accelerator for which plan has no figures: without what only CUDA has.
LOADING_ELSEWHERE = (
    "only the model is loading, which no batch size and no length changes: a smaller model, fewer bits a weight, more "
    "devices that share it, or one with more memory"
)
ADVICE_ELSEWHERE: dict[Phase | None, tuple[str, ...]] = {
    "load": (LOADING_ELSEWHERE,),
    "rollout": GPU_ADVICE["rollout"],
    "evaluation": GPU_ADVICE["evaluation"],
    "optimizer_step": (
        "the optimizer's states, which no batch size changes: LoRA, an optimizer with fewer states (adafactor), or "
        "more devices that share them",
    ),
    **dict.fromkeys(("score", "forward", "loss", "backward"), (BATCH,)),
}
# What ran -> advice, where it decides more than the phase does.
ACTIVITY_ADVICE: dict[Activity, tuple[str, ...]] = {
    "engine_loads": (ENGINE_LOADS,),
    "engine_profiles": (ENGINE_PROFILES, ENGINE_WEIGHTS),
    "engine_encodes": (ENGINE_ENCODES,),
    "engine_starts": (ENGINE_STARTS,),
    "engine_captures": (ENGINE_CAPTURES, ENGINE_STARTS),
    "engine_runs": (ENGINE_RUNS,),
    "engine_samples": (ENGINE_SAMPLES,),
    "joins_logits": (KEEPS_NO_LOGITS,),
    "loads_best": (BEST_MODEL,),
    "merges": (MERGING,),
    "builds": (BUILDING_SHARE,),
    "reorders": (SAVING_8BIT,),
    "calibrates": (CALIBRATING,),
    "resumes": (RESUMING, LOADING),
    "wraps_ddp": (BUCKETS, LOADING),
    "sglang": (SGLANG,),
    "sglang_loads": (SGLANG_LOADS,),
    "syncs_reference": (SYNC_REFERENCE,),
}
# What ran and the phase -> advice, where one alone does not decide.
BOTH_ADVICE: dict[tuple[Activity, Phase | None], str] = {
    ("quantizes", "load"): QUANTIZING,
    ("infers", "forward"): INFERRING,
    ("makes_master", "load"): MASTER,
    ("converts_logits", "forward"): FLOAT_LOGITS,
}
# What ran -> advice before that of the phase.
FIRST_ADVICE: dict[Activity, str] = {
    "data_parallel": DATA_PARALLEL,
    "fills_bucket": BUCKET,
    "attends": ATTENTION,
    "masks": MASK,
}
# The same for host memory: by what the message says, or by what ran.
HOST_MESSAGES = {
    "terminated program|due to signal 9|compiler error: Killed|virtual memory exhausted": (BUILDING,),
    "ObjectStoreFullError": (OBJECT_STORE,),
    "Too large swap space": (SWAP_SPACE,),
    "name=RayWorker(?:Vllm|Wrapper)": (HOST_MORE, SWAP_SPACE),
    "low on resource: memory": (EVICTED, HOST_LOADING),
    r"\bibv_\w+": (LOCKED,),
    "BrokenProcessPool|TerminatedWorkerError": (POOL,),
    PAGING: (PAGING_FILE, HOST_LOADING),
    "during map": (MAPPING,),
    "ArrowMemoryError": (TABLE,),
    "DataLoader worker": (LOADER,),
}
HOST_ACTIVITY_ADVICE: dict[Activity, tuple[str, ...]] = {
    "forks": (FORKING,),
    "spawns": (SPAWNING,),
    "merges": (HOST_MERGING, HOST_MORE),
    "prepares": (PREPARING,),
    "loads_data": (LOADER,),
    "offloads": (HOST_OFFLOADS, HOST_MORE),
    "trains": (HOST_TRAINS,),
}


def advice_for_gpu(incident: Incident) -> Iterator[str]:
    """Yield advice for the phase in which a GPU ran out of memory."""
    yield from _growth(incident)
    if incident.activity in FIRST_ADVICE:
        yield FIRST_ADVICE[incident.activity]
    if (incident.activity, incident.phase) in BOTH_ADVICE:
        yield BOTH_ADVICE[incident.activity, incident.phase]
    elif incident.activity == "engine":
        yield from _of_engine(incident)
    elif incident.activity in ACTIVITY_ADVICE:
        yield from ACTIVITY_ADVICE[incident.activity]
    elif incident.phase is not None:
        yield from _of_phase(incident, incident.phase)
    elif incident.activity == "trains" or (
        (incident.beside.step or incident.beside.memory) and not incident.beside.leaks
    ):
        yield of_batch(incident)  # a training step, since its bar or its metrics are the last that was printed
        if incident.beside.batch == 1:
            yield f"{ROOM}: {_lighter(incident)}, leave more of the GPU for it"


def _fills(incident: Incident) -> bool:
    """True if tensors fill the GPU."""
    return incident.sizes.get("allocated", 0) >= FILLED_SHARE * incident.sizes.get("total", math.inf)


def _of_engine(incident: Incident) -> Iterator[str]:
    """Advice for a process of vLLM, without what its command has already."""
    beside = incident.beside
    if "float32" in beside.in_effect:
        yield ENGINE_FLOAT
    eager = [] if "eager" in beside.in_effect else [ENGINE_EAGER]
    granted = beside.utilization * incident.sizes.get("total", 0)
    if 0 < BEYOND_SHARE * granted < incident.sizes.get("allocated", 0):
        yield f"tensors take {format_gib(incident.sizes['allocated'])}; {ENGINE_NOT_SPLIT}"
    elif _fills(incident):
        yield "; if it was capturing CUDA graphs, ".join([ENGINE_FULL, *(each.split()[0] for each in eager)])
    else:
        set_to = f" (the command has {beside.utilization:g})" if beside.utilization else ""
        helps = ", ".join([ENGINE_SHARE + set_to, *eager, ENGINE_LESS])
        yield f"the process is vLLM's: {helps}; if its weights alone fill the GPU, a larger tensor_parallel_size"


def _of_phase(incident: Incident, phase: Phase) -> Iterator[str]:
    lines = GPU_ADVICE[phase]
    if phase == "evaluation" and incident.activity == "predicts":
        lines = (KEEPS_PREDICTIONS, EVAL_BATCH)
    if phase == "forward" and incident.activity == "makes_logits":
        lines = GPU_ADVICE["loss"]
    for line in _sharded(incident, lines):
        if line is ROOM:
            yield from room(incident)
        else:
            yield of_batch(incident) if line is BATCH else line
    if phase == "optimizer_step" and "_multi_tensor_" in incident.where:
        yield FOREACH
    if phase == "optimizer_step" and incident.sharding in STEP_SHARDED:
        yield STEP_SHARDED[incident.sharding]
    if "Failed to clone() tensor" in incident.message:
        yield NOT_WHOLE


def of_batch(incident: Incident) -> str:
    """BATCH, without what the log shows to be so already."""
    checkpoints = incident.checkpoints or "checkpointing" in incident.beside.in_effect
    already = ["the batch is 1"] * (incident.beside.batch == 1)
    already += ["gradient checkpointing is on"] * checkpoints
    helps = [SHORTER] if incident.beside.batch == 1 else [SMALLER_BATCH, SHORTER]
    helps += [] if checkpoints else [CHECKPOINTING]
    return _or(helps) + (f"; {' and '.join(already)} already" if already else "")


def _or(texts: Sequence[str]) -> str:
    """Join texts: "a", "a, or b", "a, b, or c"."""
    return ", ".join((*texts[:-1], f"or {texts[-1]}")) if len(texts) > 1 else texts[0]


def _lighter(incident: Incident) -> str:
    """What leaves more of the GPU in any phase, without what the log shows to be so already."""
    in_effect = incident.beside.in_effect
    adapters = incident.adapters or "adapters" in in_effect
    helps = [] if adapters else ["LoRA or 4-bit weights"]
    if adapters and "4-bit" not in in_effect:
        helps = ["4-bit weights of the base model (load_in_4bit=true)"]
    sharded = incident.sharding in ("zero3", "fsdp") or "sharding" in in_effect
    helps += ["more GPUs" if sharded else "ZeRO-3 or FSDP over more GPUs", "offloading"]
    return _or(helps)


def of_model_size(incident: Incident) -> Iterator[str]:
    """Advice for a request that is as large as a whole model, or as each rank's share of one."""
    trains_less = incident.adapters or "adapters" in incident.beside.in_effect
    tried = incident.sizes.get("tried", 0)
    if trains_less or incident.phase not in MODEL_PHASES or incident.activity or tried < LEAST_MODEL_BYTES:
        return
    whole = next(
        (
            (billions, bits)
            for billions in sorted(incident.beside.parameters)
            for bits in (16, 32)
            if abs(tried - billions * 1e9 * bits / 8) <= MODEL_ROUNDING * tried
        ),
        None,
    )
    if whole:
        yield f"the request has the size of {whole[0]:g}B parameters in {whole[1]} bits: {OF_MODEL}"
    elif incident.same_on > 1 and tried > SMALL_REQUEST * incident.sizes.get("allocated", math.inf):
        yield (
            f"the same {format_gib(tried)} was asked for on {incident.same_on} GPUs that held the same: unless all "
            f"rows have one length, a rank's share of {OF_MODEL}"
        )


def unknown_phase(incident: Incident) -> str:
    """Advice for the phases that it may have been, as the run's command says: first of what helps most often."""
    commands = incident.beside.commands
    evaluates = f"In an evaluation: {EVAL_BATCH}"
    if commands and "trains" not in commands:
        branches = [IN_ANY_PHASE, f"As it generates: {INFERRING}" if commands == {"infers"} else evaluates]
    else:
        in_any = IN_ANY_PHASE if incident.kind == "foreign" else f"In any phase: {_lighter(incident)}"
        branches = [f"In a training step: {of_batch(incident)}", in_any, evaluates]
    return UNKNOWN_PHASE + ". ".join(branches)


def room(incident: Incident) -> Iterator[str]:
    """Yield advice that leaves more room for rows.

    It is for a GPU full of tensors before a step had fitted, most likely weights and states, at which a small request
    failed; and for a batch that is 1 already.
    """
    sizes = incident.sizes
    small = 0 < sizes.get("tried", 0) <= SMALL_REQUEST * sizes.get("allocated", 0)
    is_first = incident.beside.step <= FIRST_STEPS and not incident.beside.memory
    mostly = 2 * sizes.get("allocated", 0) >= sizes.get("total", 1)
    if (small or incident.beside.batch == 1) and mostly and is_first and incident.activity not in FIRST_ADVICE:
        yield f"{ROOM}: {_lighter(incident)}, leave more of the GPU for it"


def _sharded(incident: Incident, lines: tuple[str, ...]) -> Iterator[str]:
    """The lines, with that of saving as the library in the traceback names it."""
    for line in lines:
        yield SAVING_SHARDED.get(incident.sharding, line) if line is SAVING else line


def has_wrong_size(incident: Incident) -> bool:
    """True if a tensor was asked for that no memory holds."""
    return incident.sizes.get("tried", 0) >= WRONG_SIZE_BYTES.get(incident.kind, math.inf)


def no_mapping(incident: Incident) -> bool:
    """True if the host refused to map a few pages, of which there is no lack."""
    return "unable to mmap" in incident.message and 0 < incident.sizes.get("tried", 0) < FEW_PAGES_BYTES


def ray_lists(text: str) -> Sequence[str]:
    """Return the memory of the processes in Ray's list, in GB."""
    return RAY_USERS.findall(text.partition(RAY_LIST)[2])


def _unlisted(incident: Incident) -> Iterator[str]:
    """Say if the processes that Ray lists, those that hold most, hold little of what is in use."""
    held = [float(size) * GIB for size in ray_lists(incident.message)]
    used = incident.sizes.get("host_used", 0)
    if not held or not used:
        return
    most = sum(held) + max(RAY_LISTS - len(held), 0) * held[-1]
    if most < LISTED_SHARE * used:
        yield (
            f"the processes that Ray lists hold {format_gib(round(sum(held)), 0)} of the {format_gib(used, 0)}: first "
            "find what else does, such as other jobs, left processes, files in /dev/shm, or Ray's object store "
            "(ray memory)"
        )


def advice_for_host(incident: Incident) -> Iterator[str]:
    """Yield advice for the phase in which host memory ran out."""
    if has_wrong_size(incident):
        yield WRONG_SIZE
        return
    if no_mapping(incident):
        yield from (MAPPINGS, LOADER)
        return
    yield from _unlisted(incident)
    said = next((lines for sign, lines in HOST_MESSAGES.items() if re.search(sign, incident.message)), ())
    if said:
        yield from said
        return
    if incident.kind == "killed" and 0 < 2 * incident.beside.host_used < incident.beside.host_total:
        yield LIMIT_FIRST
    if re.search(LIMIT_REACHED, incident.message):
        yield HOST_LIMIT
    if known := HOST_ACTIVITY_ADVICE.get(incident.activity, ()) or _on_cpu(incident):
        yield from known
    elif incident.phase is None and incident.beside.step > FIRST_STEPS:
        yield f"{format_count(incident.beside.step - 1)} {HOST_GREW}"
        yield HOST_TRAINS
    else:
        loads = incident.phase is None and incident.beside.commands == {"infers"}
        yield from _sharded(incident, HOST_ADVICE["load" if loads else incident.phase])


def _on_cpu(incident: Incident) -> tuple[str, ...]:
    """Advice for a tensor on the CPU that a step made; empty if it is none, or a library's that offloads."""
    if "DefaultCPUAllocator" not in incident.message or incident.sharding:
        return ()
    if incident.phase == "optimizer_step":
        return STATES_ON_CPU, HOST_MORE
    return (ON_CPU, HOST_MORE) if incident.phase in ("forward", "loss", "backward") else ()


def step_of(incident: Incident) -> str:
    """The training step that ran, as text; empty if the log has none."""
    beside = incident.beside
    return f"step {format_count(beside.step)} of {format_count(beside.steps)}" if beside.step else ""


def _growth(incident: Incident) -> Iterator[str]:
    """Why a step needs more than those before it."""
    beside = incident.beside
    if incident.phase in ("load", "save", "evaluation", "weight_sync") or incident.activity in (
        "engine_runs",
        "syncs_reference",
    ):
        return
    if beside.memory:
        first, last = (format_gib(size, 1) for size in (beside.memory[0], beside.memory[-1]))
        if beside.leaks:
            yield (
                f"memory grew by about the same in every step, from {first} to {last}: a leak, such as losses that are "
                "kept without detach() or item()"
            )
        else:
            yield (
                f"memory grew from {first} to {last} in jumps, as longer rows or completions came, which is no leak: "
                "the longest must fit, so plan with --max-length or --max-completion-length at their limit"
            )
    elif beside.step == 2 and incident.phase in ("forward", "loss", "backward") and not incident.adapters:
        yield STATES_CAME
    elif beside.step > FIRST_STEPS:
        yield (
            f"{format_count(beside.step - 1)} steps had fitted: most likely a longer row came, else memory that grew, "
            "or fragments. The longest row must fit, so plan with --max-length or --max-completion-length at their "
            "limit"
        )
