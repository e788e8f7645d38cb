"""Out-of-memory messages of PyTorch, vLLM, NCCL and the kernel, and the figures in each."""

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from planner.diagnose.incident import IncidentKind
from planner.units import GIB, KIB, MIB

# The kernel's kB are KiB; PyTorch's KB, MB and GB on MPS are KiB, MiB and GiB (pytorch 2.3, ATen/mps/MPSAllocator.h).
UNITS = {"bytes": 1, "kB": KIB, "KB": KIB, "MB": MIB, "GB": GIB, "KiB": KIB, "MiB": MIB, "GiB": GIB}
ROUNDING_BYTES = 6 * GIB // 100  # the message rounds each of up to six figures to 0.01 GiB
# Digits are bounded, so that a search takes linear time in a line of digits.
SIZE = r"(\d{1,15}(?:\.\d{1,9})?) ?(bytes|[KMG]i?B)"
GIBS = r"(-?\d{1,9}(?:\.\d{1,9})?)"
COUNT = r"(\d{1,15})"


class Message(Struct, frozen=True, kw_only=True):
    """One error message. `pattern` finds it; the other fields are patterns of figures that it may contain, by name.

    The line in which a message begins contains one of its `words`: a test that is quick and skips nearly all lines.
    Patterns of `sizes` match a number and its unit, those of `gibs` and `numbers` a number. In `numbers`, "gpu" is the
    GPU's index and "bytes" the size of the request.
    """

    kind: IncidentKind
    words: tuple[str, ...]
    pattern: str
    sizes: Mapping[str, str] = field(default_factory=dict)
    gibs: Mapping[str, str] = field(default_factory=dict)  # sizes that vLLM prints in GiB, without a unit to match
    numbers: Mapping[str, str] = field(default_factory=dict)


def _sentences(kind: IncidentKind, sentences: Mapping[str, str], numbers: Mapping[str, str] | None = None) -> Message:
    """A message that libraries say in several sentences: a word of each -> its pattern; empty: the word itself."""
    patterns = (pattern or re.escape(word) for word, pattern in sentences.items())
    return Message(kind=kind, words=tuple(sentences), pattern="|".join(patterns), numbers=numbers or {})


# Source: pytorch 2.13, c10/cuda/CUDACachingAllocator.cpp, `malloc`. Releases before 2.1 put the figures in brackets;
# 2.1 wrote "capacty"; those before 1.4 wrote what is cached and unused, not what is reserved.
GPU = Message(
    kind="gpu",
    words=("CUDA out of memory", "HIP out of memory", "OutOfMemoryError: Tried to allocate"),
    pattern=r"(?:(?:CUDA|HIP) out of memory\.|OutOfMemoryError:) ?Tried to allocate (?:\d|more than 1EB)",
    sizes={
        "tried": rf"Tried to allocate {SIZE}",
        "total": rf"total capaci?ty of {SIZE}|{SIZE} total capacity",
        "free": rf"of which {SIZE}(?: is free|\s*$)|allocated; {SIZE} free",
        "process": rf"this process has {SIZE} memory in use",
        "allocated": rf"allocated memory {SIZE} is allocated by PyTorch|{SIZE} already allocated",
        "unallocated": rf"and {SIZE} is reserved by PyTorch but unallocated|{SIZE} cached",
        "reserved": rf"{SIZE} reserved in total by PyTorch",
        "graphs": rf"with {SIZE} allocated in private pools",
        "allowed": rf"{SIZE} allowed",
    },
    numbers={"gpu": rf"GPU {COUNT}"},
)
# An exception of the same class whose text was cut, by who pasted the log, or by Ray, which prints what a task raised.
RAY_TASK = "RayTaskError(OutOfMemoryError)"
CUT = Message(
    kind="gpu",
    words=("CUDA out of mem", "HIP out of mem", "OutOfMemoryError", RAY_TASK),
    pattern=r"\w(?:Error|Exception): (?:CUDA|HIP) out of mem(?:ory)?\W{0,9}$|^(?:CUDA|HIP) out of memory\W{0,9}$|"
    r"^(?:\w{1,60}\.){0,5}\w{0,60}(?:Error|Exception): (?:CUDA|HIP) out of memory\b(?! occurred)|"
    r"^(?:torch\.)?(?:cuda\.)?OutOfMemoryError:?\s*$|RayTaskError\(OutOfMemoryError\): ray::",
)
JAX_OR_TENSORFLOW, LLAMA_CPP = "JAX or TensorFlow", "llama.cpp"
# Sign of a device in its message -> its name.
DEVICES = {
    "ggml_": LLAMA_CPP,
    "llama_": LLAMA_CPP,
    "for kv cache": LLAMA_CPP,
    "MPS ": "MPS",
    "NPU ": "NPU",
    "XPU ": "XPU",
    "METAL]": "MPS",
    "metal::": "MPS",
    "[malloc": "MPS",
    "Invalid buffer": "MPS",
    "UR_RESULT": "XPU",
    "PI_ERROR": "XPU",
    "PT_DEVMEM": "HPU",
    "to reserve": "the TPU",
    "space hbm": "the TPU",
    "enough device memory": "the TPU",
    "_HBM": "the TPU",
}
# What NCCL says of a segment that another rank was to make, and which is not there: nothing is full. Older releases say
# it in the line before alone. Source: nccl, src/misc/shmutils.cc and src/include/shm.h.
NO_SEGMENT = r".{0,200}error: (?:No such file or directory|Permission denied)"
NO_FILE = r"NCCL WARN Call to (?:shm_)?open failed ?: (?:No such file or directory|Permission denied)"
OTHER_PROCESS = re.compile(rf"Process (\d{{1,10}}) has {SIZE} memory in use")

# The messages of vLLM and NCCL are those of published logs (neither was installed here); the files are those that print
# them. tests/data/messages.jsonl has the logs.
MESSAGES: tuple[Message, ...] = (
    GPU,
    CUT,
    # tensorflow 2, core/framework/op_kernel.cc, of a tensor on the host
    Message(
        kind="host",
        words=("OOM when allocating tensor", "ResourceExhaustedError"),
        pattern=r"OOM when allocating tensor with shape\[[\d,]{0,99}\] and type \w{1,20} on \S{0,200}device:CPU:|"
        r"ResourceExhaustedError: \S{0,9}function_node \S{0,200}device:CPU:\S{1,9} failed to allocate memory",
    ),
    # pytorch 2.13, c10/cuda/CUDAMallocAsyncAllocator.cpp, `malloc`; its CUDACachingAllocator.cpp asks NVML for the
    # figures of its message, which fails in some containers
    Message(
        kind="gpu",
        words=("Allocation on device", "NVML_SUCCESS =="),
        pattern=r"Allocation on device (?:\d+ )?would exceed allowed memory|"
        r"NVML_SUCCESS == .{0,80}INTERNAL ASSERT FAILED at \S{0,200}CUDACachingAllocator",
        sizes={
            "tried": rf"Requested {{0,30}}: {SIZE}",
            "total": rf"Device limit {{0,30}}: {SIZE}",
            "free": rf"Free \(according to CUDA\) {{0,9}}: {SIZE}",
            "allocated": rf"Currently allocated {{0,30}}: {SIZE}",
        },
        numbers={"gpu": rf"on device {COUNT}"},
    ),
    # PyTorch 0.4 and older, aten/src/THC/generic/THCStorage.cu: the storage of a tensor, without figures
    Message(
        kind="gpu",
        words=("THCudaCheck FAIL",),
        pattern=r"THCudaCheck FAIL file=\S{1,300} line=\d{1,6} error=2 : out of memory",
    ),
    # vllm 0.33, v1/worker/utils.py
    Message(
        kind="engine_start",
        words=("Free memory on device",),
        pattern=r"Free memory on device .{0,60}on startup is less than desired GPU memory utilization",
        gibs={
            "free": rf"\({GIBS}/[\d.]{{1,12}} GiB\) on startup",
            "total": rf"\([\d.]{{1,12}}/{GIBS} GiB\) on startup",
            "wanted": rf"utilization \([\d.]{{1,12}}, {GIBS} GiB\)",
        },
        numbers={"utilization": rf"utilization \({GIBS},", "gpu": rf"on device \w{{1,9}}:{COUNT}"},
    ),
    # vllm 0.33, v1/core/kv_cache_planning.py; older releases wrote "models's" and the size in brackets
    Message(
        kind="engine_length",
        words=("To serve at least one request",),
        pattern=r"To serve at least one request with the model'?s'?s? max seq len",
        gibs={"needed": rf"{GIBS} GiB KV cache is needed", "available": rf"available KV cache memory \({GIBS} GiB\)"},
        numbers={"length": rf"max seq len \({COUNT}\)", "longest": rf"estimated maximum model length is {COUNT}"},
    ),
    Message(
        kind="engine_length",
        words=("max seq len",),
        pattern=r"max seq len \(\d{1,15}\) is larger than the maximum number of tokens that can be stored in KV cache",
        numbers={"length": rf"max seq len \({COUNT}\)", "longest": rf"stored in KV cache \({COUNT}\)"},
    ),
    Message(
        kind="engine_cache",
        words=("No available memory for the cache", "Cannot auto-fit max_model_len"),
        pattern=r"No available memory for the cache blocks|Cannot auto-fit max_model_len: not enough GPU memory",
    ),
    # vllm 0.31, v1/worker/gpu_model_runner.py, `_dummy_sampler_run`
    Message(
        kind="engine_sampler",
        words=("warming up sampler",),
        pattern=r"CUDA out of memory occurred when warming up (?:sampler|pooler)",
        numbers={"sequences": rf"with {COUNT} dummy requests"},
    ),
    # sglang, srt/model_executor/model_runner.py
    Message(
        kind="sglang",
        words=("mem-fraction-static", "mem_fraction_static"),
        pattern=r"Not enough memory[.;,]? ?Please try to increase --mem-fraction-static|"
        r"(?:try|consider) (?:to )?(?:decreas|reduc|lower|increas)\w{1,3} (?:--)?mem.fraction.static",
    ),
    # vllm 0.33, v1/worker/gpu_worker.py and device_allocator/cumem.py
    Message(
        kind="engine_profile",
        words=("Error in memory profiling",),
        pattern=r"Error in memory profiling\. (?:Initial free memory|This happens when)",
    ),
    Message(
        kind="engine_pool",
        words=("Expandable segments are not",),
        pattern=r"Expandable segments are not compatible with memory pool",
    ),
    # torch_memory_saver 0.0.9, with which SGLang sleeps; its releases before print "result=2"
    Message(
        kind="engine_wake",
        words=("cumem_allocator", "torch_memory_saver", "wake_up method failed"),
        pattern=r"(?i:cuda error): out of memory at \S{0,300}cumem_allocator|"
        r"wake_up method failed: (?i:cuda error): out of memory|"
        r"torch_memory_saver\w{0,4}\.cpp\] (?:CUresult|cudaError|hipError_t) error:? {1,2}(?:result=)?2\b",
    ),
    # llama.cpp, ggml/src/ggml-backend.cpp, ggml-cuda/ggml-cuda.cu, src/llama-kv-cache.cpp and llama-model.cpp
    Message(
        kind="foreign",
        words=("ggml_", "llama_kv_cache", "llama_model_load", "failed to allocate buffer for kv cache"),
        pattern=r"ggml_\w{1,60}: (?:allocating|failed to allocate) .{0,60}(?:out of memory|buffer)|"
        r"ggml_\w{1,60}: .{0,20}(?:out of memory|failed to (?:alloc|reserve))|"
        r"(?:llama_kv_cache\w{0,20}|llama_model_load\w{0,20}): (?:failed|unable) to allocate|"
        r"failed to allocate buffer for kv cache|error loading model: unable to allocate",
        sizes={"tried": rf"allocating {SIZE}"},
        numbers={"bytes": rf"buffer of size {COUNT}"},
    ),
    # nccl 2.28, src/include/alloc.h and checks.h
    Message(
        kind="communication",
        words=("Failed to CUDA calloc", "Failed to CUDA malloc", "Cuda failure"),
        pattern=r"Failed to CUDA [cm]alloc(?: async)? \d{1,15} bytes|Cuda failure (?:2 )?'out of memory'",
        numbers={"bytes": rf"[cm]alloc(?: async)? {COUNT} bytes"},
    ),
    # torch's cudaMallocAsync backend ("Allocation on device"); bitsandbytes, csrc/pythonInterface.cpp and ops.cu
    Message(
        kind="library",
        words=(
            "_STATUS_ALLOC_FAILED",
            "CUDA error: out of memory",
            "CUDA Error: out of memory",
            "cudaErrorMemoryAllocation",
            "Allocation on device",
            "Error out of memory at line",
            "CUDA driver error: out of memory",
            "_STATUS_NOT_INITIALIZED",
            "CUFFT_ALLOC_FAILED",
            "cudaMalloc failed: out of memory",
            "Triton Error [CUDA]: out of memory",
            "CUDA error 2 at",
            "CUBLAS_STATUS_INTERNAL_ERROR",
        ),
        pattern=r"CU[A-Z]{2,8}_STATUS_ALLOC_FAILED|CUDA [Ee]rror: out of memory|cudaErrorMemoryAllocation|"
        r"(?:OutOfMemoryError: |Exception Message:\W{0,4}|Exception during processing !!! )Allocation on device|"
        r"Error out of memory at line \d{1,6} in file|CUDA driver error: out of memory|"
        r"CU[A-Z]{2,8}_STATUS_NOT_INITIALIZED|CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate|"
        r"CUFFT_ALLOC_FAILED|cudaMalloc failed: out of memory|Triton Error \[CUDA\]: out of memory|"
        r"CUDA error 2 at \S{1,200}: out of memory",
    ),
    # pytorch 2.13, c10/core/impl/alloc_cpu.cpp; python's OSError; torch/utils/data/_utils/signal_handling.py; the
    # kernel's log; ray, src/ray/raylet/node_manager.cc; SLURM's slurmstepd and srun; docker's and Kubernetes' state
    Message(
        kind="host",
        words=("DefaultCPUAllocator",),
        pattern=r"DefaultCPUAllocator: (?:can't|not enough memory)",
        numbers={"bytes": rf"tried to allocate {COUNT} bytes"},
    ),
    # triton 3.7, runtime/errors.py, `OutOfResources`; torch 2.13, _inductor/runtime/triton_heuristics.py
    Message(
        kind="kernel",
        words=("out of resource",),
        pattern=r"out of resource: \w[\w ]{0,200},? ?Required: \d",
        numbers={"needed": rf"Required: {COUNT}", "limit": rf"Hardware limit: ?{COUNT}"},
    ),
    # torch 2.13, utils/data/_utils/signal_handling.py and _utils/worker.py, aten/src/ATen/MapAllocator.cpp; nccl 2.28,
    # src/misc/shmutils.cc; bash; Open MPI, DeepSpeed's and PyTorch's launchers, which print the signal that ended a
    # process: Linux' SIGBUS is 7
    Message(
        kind="shared_memory",
        words=(
            "killed by signal: Bus error",
            "shared memory",
            "/dev/shm",
            "Bus error",
            "bus error",
            "unable to write to file </torch",
            "return code = -7",
            "exitcode",
            "SIGBUS",
            "exited unexpectedly",
            "joblib will operate in serial mode",
        ),
        pattern=r"killed by signal: Bus error|bus error encountered in worker|Fatal Python error: Bus error|"
        r"insufficient shared memory|out of shared memory|"
        r"[Uu]nable to (?:open|allocate|resize) shared memory(?!.{0,200}Too many open files)|"
        rf"[Ee]rror while (?:creating|attaching to) shared memory(?!{NO_SEGMENT})|"
        r"unable to write to file </torch_|"
        r"^Bus error\b|\bSignal: Bus error \(7\)|: line \d{1,9}: +\d{1,10} Bus error|return code = -7\b|"
        r"exitcode *: ?-7\b|\(SIGBUS\)|"
        r"/dev/shm/\S{1,80}.{0,40}No space left on device|No space left on device: (?:.{0,200}['\" ])?/dev/shm/|"
        r"No space left on device\. {1,2}joblib will operate in serial mode|"
        r"DataLoader worker \(pid\(s\) [\d, ]{1,99}\) exited unexpectedly",
    ),
    # python, numpy and pyarrow; libstdc++; Google Cloud's jobs; Windows; Colab and Kaggle; systemd-oomd; ray,
    # raylet/node_manager.cc and _private/memory_monitor.py, whose GB are 2**30 bytes
    Message(
        kind="host",
        words=(
            "MemoryError",
            "std::bad_alloc",
            "os error 1455",
            "WinError 1455",
            "paging file is too small",
            "session crashed after using all available RAM",
            "tried to allocate more memory than is available",
            "systemd-oomd",
            "node running low on memory",
            "emory on the node",
            "System memory low at node",
            "ran out-of-memory and exited",
            "memory cgroup out of memory",
            "Memory cgroup out of memory",
        ),
        pattern=r"\b_?(?:Array|Arrow)?MemoryError(?::|\s*$)|std::bad_alloc|(?:os error|WinError) 1455|"
        r"paging file is too small|crashed after using all available RAM|"
        r"tried to allocate more memory than is available|systemd-oomd\W.{0,40}[Kk]illed|"
        r"node running low on memory|[Mm]emory on the node .{0,500}exceeds the memory usage thr|"
        r"System memory low at node|ran out-of-memory and exited|[Mm]emory cgroup out of memory",
        sizes={"tried": rf"Unable to allocate {SIZE}", "killed": rf"anon-rss:{COUNT}(kB)"},
        gibs={
            "host_used": rf"(?:running was|Used memory) \(?{GIBS} ?GB",
            "host_total": rf"GB\)? ?/ ?(?:total capacity )?\(?{GIBS} ?GB",
        },
        numbers={"bytes": rf"alloc of size {COUNT} failed"},
    ),
    Message(
        kind="host",
        words=(
            "is killed by signal",
            "Cannot allocate memory",
            "oom-kill",
            "oom_kill",
            "Out of memory: Kill",
            "killed due to",
            "Out Of Memory",
            "OOMKilled",
            "low on resource: memory",
        ),
        pattern=r"DataLoader worker .{0,40}is killed by signal: Killed|Cannot allocate memory|oom[-_]kill|"
        r"Out of memory: Kill(?:ed)? process|killed due to (?:memory pressure|the node running low on memory)|"
        r"srun: error: .{0,80}Out Of Memory|OOMKilled(?!\W{0,3}false)|node was low on resource: memory",
        sizes={"killed": rf"Killed process .{{0,200}}anon-rss:{COUNT}(kB)"},
        numbers={"bytes": rf"unable to mmap {COUNT} bytes from file"},
    ),
    # torch 2.13, distributed/elastic/multiprocessing/api.py and multiprocessing/spawn.py; deepspeed 0.19.8,
    # launcher/launch.py; subprocess.CalledProcessError; bash; docker (137 = 128 + 9); datasets 5.0, utils/py_utils.py;
    # ray, where "SIGKILL by OOM killer" is the first of three causes that it names; Jupyter and VS Code
    Message(
        kind="killed",
        words=(
            "exitcode",
            "return code = -9",
            "SIGKILL",
            "worker died",
            "worker process has died",
            "actor died unexpectedly",
            "OOM killer due to high memory usage",
            "subprocesses has abruptly died",
            "Killed",
            "code 137",
            "code: 137",
            "Exited (137)",
            "ExitCode",
            "appears to have died",
            "estarting kernel (",
            "Kernel crashed while executing",
        ),
        pattern=r"exitcode *: ?-9\b|return code = -9\b|[Ss]ignal 9 \(SIGKILL\)|died with <Signals\.SIGKILL: 9>|"
        r"terminated with signal SIGKILL|SIGKILL by OOM killer|subprocesses has abruptly died during map|"
        r"worker died (?:or was killed|unexpectedly) while executing|worker process has died|"
        r"actor died unexpectedly before finishing|"
        r"^\s*Killed\s*$|: line \d{1,9}: +\d{1,10} Killed\b|"
        r"(?:[Ee]xit(?:ed)?|status)(?: with)?(?: status)? code:? 137\b|"
        r"Exited \(137\)|ExitCode\W{1,3}137\b|[Kk]ernel (?:for \S{1,99} )?appears to have died|"
        r"KernelRestarter: restarting kernel|Kernel crashed while executing code",
    ),
    # Rust's alloc crate, as of tokenizers and polars; SLURM's slurmstepd, sacct and seff; PBS, LSF, HTCondor and YARN;
    # the kernel's oom_kill.c; earlyoom; systemd's manager.c; Kubernetes' oom_watcher; ray's object store; SageMaker;
    # Hugging Face's Spaces; Windows' error codes; vllm 0.10, config/cache.py, `verify_with_parallel_config`
    _sentences(
        "host",
        {
            "memory allocation of": r"memory allocation of \d{1,20} bytes failed",
            "emory limit": r"[Ee]xceeded (?:job |its |the )?memory limit|over memory limit of|Memory limit exceeded",
            "State: OUT_OF_ME": "",
            "PBS: job killed": r"PBS: job killed: v?mem ",
            "TERM_MEMLIMIT": "",
            "exceeding memory limits": "",
            "oom_reaper": r"oom_reaper: reaped process",
            "earlyoom": r"earlyoom\W.{0,40}(?:low memory!|sending SIG(?:TERM|KILL))",
            "OOM killer": r"\bby the (?:\w{1,20} ){0,2}OOM killer",
            "System OOM encountered": "",
            "OOM-killed": "",
            "ObjectStoreFullError": r"\bObjectStoreFullError:",
            "Please use an instance type with more memory": "",
            "WinError": r"WinError (?:8|14|1450)\]",
            "RayOutOfMemoryError": r"More than \d{1,3}% of the memory on node",
            "less than desired CPU memory utilization": "",
            "is less than requested memory for kv": "",
            "Too large swap space": r"Too large swap space\.",
        },
        {"bytes": rf"memory allocation of {COUNT} bytes"},
    ),
    # gcc and clang, nvcc: an extension that is built, such as flash-attn
    _sentences(
        "host",
        {
            "Killed signal terminated program": "",
            "died due to signal 9": "",
            "internal compiler error: Killed": "",
            "virtual memory exhausted": "",
        },
    ),
    # zsh, fish, bash and make; python's subprocess and concurrent.futures; joblib's loky; Colab; Databricks; nbclient;
    # Spyder; kubectl
    _sentences(
        "killed",
        {
            "killed  ": r"^ ?(?:\[\d{1,3}\] ?)?[+-]? ?\d{1,10} killed ",
            "zsh: killed": "",
            "Killed": r"^\[\d{1,3}\][+-]? {1,4}Killed\b|^make(?:\[\d{1,3}\])?: \*\*\* .{0,200}\] Killed",
            "Error 137": r"^make(?:\[\d{1,3}\])?: \*\*\* .{0,200}\] Error 137",
            "by signal SIGKILL": "",
            "exit status": r"exit status (?:137|-9)\b",
            "died with": r"died with <Signals\.SIGKILL",
            "BrokenProcessPool": r"BrokenProcessPool: ",
            "TerminatedWorkerError": r"TerminatedWorkerError: ",
            "session crashed for an unknown reason": "",
            "Python kernel is unresponsive": "",
            "DeadKernelError": r"DeadKernelError: ",
            "kernel died": r"[Tt]he kernel died, restarting",
        },
    ),
    # vllm 0.8, core/scheduler.py, `_preempt`, a warning
    _sentences(
        "engine_preempts", {"because there is not enough KV cache space": r"preempted by .{0,60} because there"}
    ),
    # vllm 0.8, core/scheduler.py, `_swap_out`
    _sentences("engine_swap", {"lack of CPU swap space": ""}),
    # transformers 5.23, quantizers/, and modeling_utils.py; accelerate 1.15, big_modeling.py
    _sentences(
        "dispatched",
        {
            "Some modules are dispatched on the CPU or the disk": "",
            "load_in_8bit_fp32_cpu_offload=True": "",
            "llm_int8_enable_fp32_cpu_offload=True": "",
            "that contains a CPU or disk device": "",
            "had weights offloaded to the disk": "",
            "We need an `offload_dir` to dispatch": "",
        },
    ),
    # sglang, srt/managers/schedule_batch.py and scheduler.py
    _sentences(
        "sglang", {"out of memory. Try to lower your batch size": r"(?:Prefill|Decode) out of memory\. Try to lower"}
    ),
    # mlx, backend/metal/allocator.cpp
    _sentences("foreign", {"[malloc_or_wait] Unable to allocate": "", "[malloc] Unable to allocate": ""}),
    # nccl 2.28, src/misc/shmutils.cc
    _sentences("shared_memory", {"posix_fallocate": r"Call to posix_fallocate failed"}),
    # accelerate 1.15, utils/memory.py, `find_executable_batch_size`
    _sentences("gpu", {"No executable batch size found": r"No executable batch size found, reached zero"}),
    # Level Zero's ur_result_t of XPUs; Gaudi's PyTorch bridge (optimum-habana#2214); XLA on TPUs
    Message(
        kind="foreign",
        words=(
            "OUT_OF_DEVICE_MEMORY",
            "PT_DEVMEM Allocation failed",
            "Attempting to reserve",
            "in memory space hbm",
            "enough device memory",
            "MPS backend out of memory",
            "PU out of memory",
            "xhausted: Out of memory",
            "XHAUSTED: Out of memory",
            "CUDA_ERROR_OUT_OF_MEMORY",
            "HIP_ERROR_OutOfMemory",
            "PI_ERROR_OUT_OF_",
            "[METAL]",
            "[metal::malloc]",
            "Invalid buffer size",
            "OOM when allocating tensor",
            "ResourceExhaustedError",
            "RESOURCE_EXHAUSTED",
            "_bfc) ran out of",
        ),
        pattern=r"MPS backend out of memory|[NX]PU out of memory|UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY|"
        r"PT_DEVMEM Allocation failed for size|(?:RESOURCE_EXHAUSTED|Resource exhausted): Attempting to reserve|"
        r"Ran out of memory in memory space hbm|unlikely to have enough device memory|"
        r"(?:RESOURCE_EXHAUSTED|Resource exhausted): (?:Out of memory|Error allocating device|Failed to allocate)|"
        r"PI_ERROR_OUT_OF_(?:RESOURCES|HOST_MEMORY)|\[METAL\] .{0,80}Insufficient Memory|"
        r"OOM when allocating tensor (?:with|of shape)|"
        # tensorflow 2, core/common_runtime/bfc_allocator.cc, which also warns where a caller can go on
        r"Allocator \(GPU_\d{1,3}_bfc\) ran out of +memory +trying to allocate (?!.{0,200}not a failure)|"
        r"ResourceExhaustedError: .{0,300}failed to allocate memory|"
        r"\[metal::malloc\] Attempting to allocate \d|Error: Invalid buffer size: \d|"
        r"failed to alloc(?:ate)? .{0,40} (?:from device|on host): (?:CUDA_ERROR_OUT_OF_MEMORY|HIP_ERROR_OutOf)",
        sizes={
            "tried": rf"[Tt](?:ried|rying) to allocate {SIZE}",
            "total": rf"total capacity of {SIZE}|max allowed: {SIZE}|{SIZE} total capacity",
            "free": rf"active; {SIZE} free",
            "allocated": rf"{SIZE} already allocated|MPS allocated: {SIZE}",
            "reserved": rf"{SIZE} reserved in total by PyTorch",
            "outside": rf"other allocations: {SIZE}",
        },
        gibs={
            "tried": rf"Attempting to reserve {GIBS}G |device memory\. Requires {GIBS}G",
            "total": rf"memory space hbm\. Used \S{{1,12}} of {GIBS}G |Requires \S{{1,12}}, has {GIBS}G",
        },
        numbers={
            "gpu": rf"(?:device:GPU:|\(GPU_){COUNT}",
            "bytes": rf"(?:failed for size::|alloc(?:ate)? (?:[\d.]{{1,12}}[KMGT]?(?:iB)? \()?){COUNT}(?: bytes| \()",
        },
    ),
    # CUDA's driver API, cuda.h, as numba, RMM, cuMem and others print it; ROCm's hip_runtime_api.h; cupy's memory pool;
    # cuDNN 9, cudnn_graph.h; cuSPARSE; LMDeploy's turbomind; onnxruntime, core/framework/bfc_arena.cc
    _sentences(
        "library",
        {
            "CUDA_ERROR_OUT_OF_MEMORY": r"CUDA_ERROR_OUT_OF_MEMORY(?! \(may not be an issue)",
            "hipErrorOutOfMemory": "",
            "HIP error: out of memory": "",
            "Out of memory allocating": r"Out of memory allocating [\d,]{1,20} bytes",
            "_ALLOCATION_FAILED": r"CUDNN_STATUS_INTERNAL_ERROR_(?:DEVICE|HOST)_ALLOCATION_FAILED",
            "CUSPARSE_STATUS_INSUFFICIENT_RESOURCES": "",
            "CUDA runtime error: out of memory": "",
            "valid cuDNN algorithm": r"Unable to find a valid cuDNN algorithm",
            "unable to find an engine": r"was unable to find an engine to execute this computation",
            "BFCArena": r"BFCArena::AllocateRawInternal.{0,60} Failed to allocate memory",
        },
        {"bytes": rf"requested buffer of size {COUNT}"},
    ),
)


# An error in words that no row of MESSAGES has: of a lack of memory, and of whose.
LACKS = re.compile(
    r"(?:out of|not enough|insufficient|lack of|no (?:more|free|available)|exceed\w*|ran out of|running low on) "
    r"(?:\w+[ -]){0,4}(?:memory|RAM|VRAM|swap)\b|\b(?:un|not )able to allocate \d|"
    r"\b(?:failed|failure|cannot|can't|could not|couldn't)(?: to)? allocat\w+\b(?!.*static TLS)|\bOOM\b|"
    r"\bmemory (?:allocation failed|exhausted|limit)",
    re.IGNORECASE,
)
OF_GPU = re.compile(r"cuda|\bgpu|vram|\bhip\b|device memory|\bhbm|cublas|cudnn|nccl|prefill|kv.?cache", re.IGNORECASE)
# The same in a line that is no exception's: words that it has, and words of advice.
LACK_WORDS = (
    "ut of memory",
    "total capac",
    "UT OF MEMORY",
    "ut Of Memory",
    "ot enough memory",
    "nsufficient memory",
    "to avoid fragmentation",
)
NO_LACK = re.compile(
    r"\b(?:if|when|tip|avoid|prevent|may|might|could|can|help|reduce|case|fix|caught|retry\w*)\b|['\"`](?:\w+ )?out of",
    re.IGNORECASE,
)
OWN_WORDS = 200  # characters of an error in which they stand


# PyTorch's message whose begin was cut, or of which only the end is left.
HEADLESS = r"GPU \d{1,3} has a total capac\w{1,4} of \d|\(GPU \d{1,3}; [\d.]{1,9} [KMG]iB total capacity; "
TAIL = r"to avoid fragmentation\. +See documentation for Memory Management"


def without_begin(line: str) -> Message | None:
    """PyTorch's message if a line has all of it but its begin, or its end; None if it does not."""
    is_one = re.search(f"{HEADLESS}|{TAIL}", line) and not re.search(r"[NX]PU out of", line)
    return (
        Message(kind="gpu", words=(), pattern=f"{HEADLESS}|{TAIL}", sizes=GPU.sizes, numbers=GPU.numbers)
        if is_one
        else None
    )


def in_own_words(error: str) -> Message | None:
    """The message of an error that says in words of its own that memory ran out; None if it does not."""
    if not LACKS.search(error[:OWN_WORDS]):
        return None
    kind: IncidentKind = "library" if OF_GPU.search(error[:OWN_WORDS]) else "host"
    return Message(kind="foreign" if "NPU " in error[:OWN_WORDS] else kind, words=(), pattern=LACKS.pattern)


def device_of(message: str) -> str:
    """The device or the library whose allocator, not PyTorch's for CUDA or ROCm, printed a message."""
    return next((name for sign, name in DEVICES.items() if sign in message), JAX_OR_TENSORFLOW)


def figures(message: Message, text: str) -> tuple[dict[str, int], dict[str, float]]:
    """The sizes in bytes and the other numbers that a message contains, by name.

    Adds derived sizes: "unallocated" = reserved - allocated if the message has both, and those of `_other_sizes`.
    """
    sizes = {name: found for name, pattern in message.sizes.items() if (found := _size(pattern, text)) is not None}
    sizes |= {
        name: round(float(next(filter(None, match.groups()))) * GIB)
        for name, pattern in message.gibs.items()
        if (match := re.search(pattern, text))
    }
    numbers = {
        name: float(match[1]) for name, pattern in message.numbers.items() if (match := re.search(pattern, text))
    }
    if "reserved" in sizes and "allocated" in sizes:
        sizes.setdefault("unallocated", max(sizes["reserved"] - sizes["allocated"], 0))
    if message.sizes is GPU.sizes:
        others = _other_processes(sizes, text)
        sizes |= _other_sizes(sizes, others)
        if others:
            numbers["other_processes"] = len(others)
            listed = [int(number) for number, *_ in OTHER_PROCESS.findall(text)]
            numbers["process_numbers"] = max(listed) - min(listed) + 1
    return sizes, numbers


def _other_processes(sizes: dict[str, int], text: str) -> list[int]:
    """Sizes of the other processes on the GPU; adds "process", this process's size, to `sizes` if it is recognized.

    PyTorch finds its own process by its number. In a container NVML has other numbers, and the message lists this
    process as "Process N". It is then the smallest one that has room for what PyTorch's allocator holds: CUDA context
    and NCCL come on top. Source: pytorch 2.13, c10/cuda/CUDACachingAllocator.cpp, `reportProcessMemoryInfo`.
    """
    by_number = {number: _known(_bytes(*size), sizes) for number, *size in OTHER_PROCESS.findall(text)}
    listed = sorted(by_number.values())
    held = sizes.get("allocated", 0) + sizes.get("unallocated", 0)
    if "process" in sizes:
        sizes["process"] = _known(sizes["process"], sizes)
    elif held:
        own = next((number for number, size in enumerate(listed) if size + ROUNDING_BYTES >= held), None)
        if own is not None:
            sizes["process"] = listed.pop(own)
    elif listed:  # the message was cut; this process is one of those
        sizes["process"] = listed.pop()
    return listed


def _known(process_bytes: int, sizes: Mapping[str, int]) -> int:
    """The size of a process; 0 if NVML does not know it, which PyTorch prints as 0 or 17179869184.00 GiB (2**64)."""
    return process_bytes if process_bytes <= sizes.get("total", process_bytes) else 0


def _other_sizes(sizes: Mapping[str, int], others: Sequence[int]) -> dict[str, int]:
    """Memory that this process does not hold: "others" by other listed processes, "unnamed" by no listed process.

        unnamed = total - free - this process - others

    Leaves out "unnamed" if the message lacks a figure.
    """
    found = {"others": sum(others), "smallest_other": min(others), "largest_other": max(others)} if others else {}
    if {"total", "free", "allocated"} <= sizes.keys():
        held = max(sizes.get("process", 0), sizes["allocated"] + sizes.get("unallocated", 0))
        unnamed = sizes["total"] - sizes["free"] - held - sum(others)
        if unnamed > ROUNDING_BYTES:
            found["unnamed"] = unnamed
    return found


def _size(pattern: str, text: str) -> int | None:
    """The bytes of the first size that matches; None if none does."""
    match = re.search(pattern, text)
    if match is None:
        return None
    number, unit = (group for group in match.groups() if group is not None)
    return _bytes(number, unit)


def _bytes(number: str, unit: str) -> int:
    return round(float(number) * UNITS[unit])
