"""Start vLLM engines as TRL does on emulated GPUs, awake and asleep, beside the formulas: results/emulated_engine.md.

    DIR/bin/python -m scripts.emulated_engine run [COUNT]    in scripts/emulated_environment.sh's with vLLM
    DIR/bin/python -m scripts.emulated_engine held MODEL     what PyTorch holds asleep, by the allocating function
    python -m scripts.emulated_engine table                  the page, from the rows that there are

An engine that has a row is not started again, so that a run can be broken off.
"""

import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from textwrap import wrap
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from planner.gpus.cluster import Gpu
from planner.gpus.parse import parse_cluster
from planner.memory.engine.budget import EngineMemory, EngineSettings, engine_memory
from planner.models.catalogue import load_model
from planner.settings.vllm_releases import VllmVersion
from planner.units import GIB
from scripts.emulated_jobs import complete

RESULTS = Path(__file__).resolve().parents[1] / "results"
ROWS, PAGE = RESULTS / "emulated_engine.jsonl", RESULTS / "emulated_engine.md"
SECONDS = 900
MASTER_PORT = "29517"
NEWEST: VllmVersion = "0.31"
OLDER: tuple[VllmVersion, ...] = ("0.22", "0.27")  # the oldest that TRL 1.16 takes, and the last with bitsandbytes
GRAPHS_APART: tuple[VllmVersion, ...] = ("0.22", "0.26")  # `peak_activation_memory` is without them


class Engine(Struct, frozen=True, kw_only=True):
    """One engine on A100s of 40 GB; the defaults are TRL's of a colocated one (trl 1.16, vllm_generation.py)."""

    model: str
    tensor_parallel_size: int = 1
    enforce_eager: bool = False
    gpu_memory_utilization: float = 0.5
    max_model_len: int = 4096
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 4096
    max_lora_rank: int = 0
    max_loras: int = 0  # 0: it serves no adapters
    version: VllmVersion = NEWEST  # of vLLM, in whose environment it is started

    @property
    def arguments(self) -> dict[str, Any]:
        """Return vLLM's arguments but for the model; those of adapters only if it serves some."""
        named = {name: value for name, value in asdict(self).items() if name not in ("model", "version")}
        served = {"enable_lora": True} if self.max_loras else {}
        return {name: value for name, value in named.items() if "lora" not in name or self.max_loras} | served

    @property
    def settings(self) -> EngineSettings:
        named = {name: value for name, value in self.arguments.items() if name != "enable_lora"}
        quantization = load_model(self.model).quantization_row.engine
        return EngineSettings(**named, quantization=quantization, sleep=2, version=self.version)


ENGINES = (
    Engine(model="Qwen2.5-0.5B"),
    Engine(model="Qwen2.5-0.5B", enforce_eager=True),
    Engine(model="Qwen2.5-1.5B"),
    Engine(model="Qwen2.5-7B"),
    Engine(model="Qwen2.5-7B", enforce_eager=True),
    Engine(model="Qwen2.5-7B", tensor_parallel_size=2),
    Engine(model="Llama-3.2-1B"),
    Engine(model="Llama-3.1-8B"),
    Engine(model="Llama-3.1-8B", tensor_parallel_size=2, enforce_eager=True),
    Engine(model="google/gemma-2-2b"),
    Engine(model="Qwen3-4B"),
    Engine(model="Qwen2.5-1.5B", max_num_seqs=64),
    Engine(model="Qwen2.5-3B"),
    Engine(model="Qwen2-1.5B", enforce_eager=True),
    Engine(model="Qwen3-0.6B"),
    Engine(model="Qwen3-1.7B", enforce_eager=True),
    Engine(model="Qwen3-8B"),
    Engine(model="Llama-3.2-3B", enforce_eager=True),
    Engine(model="Meta-Llama-3-8B", max_num_seqs=64),
    Engine(model="TinyLlama-1.1B-Chat-v1.0", max_model_len=2048),
    Engine(model="SmolLM2-135M"),
    Engine(model="SmolLM2-1.7B", enforce_eager=True),
    Engine(model="SmolLM3-3B"),
    Engine(model="Mistral-7B-v0.3"),
    Engine(model="gemma-3-1b-pt"),
    Engine(model="gemma-2-9b", gpu_memory_utilization=0.7),
    Engine(model="Phi-3-mini-4k-instruct"),
    Engine(model="Phi-4-mini-instruct"),
    Engine(model="OLMo-2-0425-1B"),
    Engine(model="Falcon3-7B-Base"),
    Engine(model="granite-3.3-2b-instruct"),
    Engine(model="Yi-1.5-9B", gpu_memory_utilization=0.7),
    Engine(model="DeepSeek-R1-Distill-Llama-8B", tensor_parallel_size=2),
    Engine(model="Qwen2.5-14B", tensor_parallel_size=2, gpu_memory_utilization=0.6),
    Engine(model="Qwen2.5-32B", tensor_parallel_size=4, gpu_memory_utilization=0.7),
    Engine(model="Qwen3-30B-A3B", tensor_parallel_size=4, gpu_memory_utilization=0.7),
    Engine(model="Llama-3.1-70B", tensor_parallel_size=8, gpu_memory_utilization=0.7, enforce_eager=True),
    Engine(model="Qwen2.5-VL-3B-Instruct"),
    Engine(model="Qwen2.5-VL-7B-Instruct", gpu_memory_utilization=0.7),
    Engine(model="Qwen2-VL-2B-Instruct"),
    Engine(model="Qwen3-VL-4B-Instruct"),
    Engine(model="Qwen3-VL-4B-Instruct", enforce_eager=True),
    Engine(model="Qwen3.5-0.8B"),
    Engine(model="Qwen3.5-4B"),
    Engine(model="gemma-3-4b-pt"),
    Engine(model="Ministral-3-3B-Base-2512"),
    Engine(model="Qwen2.5-7B-Instruct-GPTQ-Int4", enforce_eager=True, max_loras=6, max_lora_rank=16),
    *(
        Engine(model=model, enforce_eager=eager, version=version)
        for version in OLDER
        for model, eager in (
            ("Qwen2.5-0.5B", False),
            ("Qwen2.5-1.5B", True),
            ("Llama-3.2-1B", False),
            ("gemma-3-1b-pt", False),
            ("Qwen3-4B", False),
        )
    ),
    Engine(model="Qwen3-0.6B", version="0.22"),
    Engine(model="Qwen2.5-0.5B", version="0.26"),
    Engine(model="Llama-3.2-1B", version="0.26"),
)


def gpu() -> Gpu:
    return parse_cluster("1xA100-40G", None).gpu


def row(engine: Engine, what: str = "one") -> dict[str, Any]:
    """Start an engine on emulated GPUs, one process a GPU, and return what the first process saw: `one` or `held`."""
    from probes.emulated_gpu.machine import Machine
    from probes.emulated_gpu.start import machine_environment

    with tempfile.TemporaryDirectory() as folder:
        ranks = engine.tensor_parallel_size
        variables = machine_environment(Machine(gpu=gpu(), cards=ranks), Path(folder))
        command = [sys.executable, "-m", "scripts.emulated_engine", what, folder, json.dumps(asdict(engine))]
        processes = [
            subprocess.Popen(
                command,
                env=os.environ | variables | _rank_variables(rank, ranks),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        ended = [process.communicate(timeout=SECONDS) for process in processes]
    lines = [line for line in ended[0][0].splitlines() if line.startswith("{")]
    if not lines:
        return {"engine": asdict(engine), "failed": ended[0][1].strip().splitlines()[-1][-300:]}
    return {"engine": asdict(engine), "seen": json.loads(lines[-1])}


def _rank_variables(rank: int, ranks: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": MASTER_PORT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }


def one(folder: Path, engine: Engine, traced: bool) -> dict[str, Any]:
    """Start the engine in this process and return bytes: its parts, and what the card holds awake and asleep.

    With `traced`, also what PyTorch holds asleep outside the pools of sleep mode, by the function that allocated it.
    """
    import torch
    from vllm import LLM

    from probes.emulated_gpu.values import small_values_on_host
    from probes.worker.random_weights import model_folder

    model = model_folder(load_model(engine.model), folder / os.environ["RANK"])

    def held() -> int:
        free, total = torch.cuda.mem_get_info()
        return int(total - free)

    with small_values_on_host():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.empty(1, device="cuda")
        before = held()
        if traced:
            torch.cuda.memory._record_memory_history(enabled="all", context="alloc", stacks="python")
        llm = LLM(
            model=str(model),
            load_format="dummy",
            enable_sleep_mode=True,
            distributed_executor_backend="external_launcher",
            logprobs_mode="processed_logprobs",
            skip_tokenizer_init=not load_model(engine.model).config.get("vision_config"),  # a processor needs it
            seed=0,
            **engine.arguments,
        )
        worker = llm.llm_engine.model_executor.driver_worker.worker
        seen = {
            "before": before,
            "weights": int(worker.model_runner.model_memory_usage),
            "activation_and_graphs": int(worker.peak_activation_memory)
            + (int(worker.cudagraph_memory_estimate) if engine.version in GRAPHS_APART else 0),
            "graphs_estimate": int(worker.cudagraph_memory_estimate),
            "kv_cache": int(worker.available_kv_cache_memory_bytes),
            "blocks": int(worker.cache_config.num_gpu_blocks),
            "awake": held(),
        }
        for level in (1, 2):
            llm.sleep(level=level)
            seen[f"asleep_{level}"] = held()
            seen[f"asleep_{level}_allocated"] = torch.cuda.memory_allocated()
            seen[f"asleep_{level}_reserved"] = torch.cuda.memory_reserved()
            if traced:
                seen["by_function"] = by_function(torch.cuda.memory._snapshot()["segments"])
            llm.wake_up()
        seen["awake_again"] = held()
    return seen


def by_function(segments: list[dict[str, Any]]) -> dict[str, int]:
    """Bytes of the live blocks in PyTorch's own pool by the vLLM function that allocated them, the largest first."""
    found: Counter[str] = Counter()
    for segment in segments:
        if tuple(segment["segment_pool_id"]) == (0, 0):
            for block in segment["blocks"]:
                names = [each["name"] for each in block.get("frames", ()) if "/vllm/" in each["filename"]]
                found[names[0] if names else "?"] += block["size"] if block["state"] == "active_allocated" else 0
    return dict(found.most_common(10))


def run(count: int) -> None:
    """Start the engines of the vLLM here that have no row yet, at most `count`, and append each row as it is ready."""
    lines = ROWS.read_text(encoding="utf-8").splitlines() if ROWS.exists() else []
    done = [Engine(**json.loads(line)["engine"]) for line in lines]
    here = importlib.metadata.version("vllm")
    own = [each for each in ENGINES if here.startswith(f"{each.version}.")]
    for engine in [each for each in own if each not in done][:count]:
        text = json.dumps(row(engine))
        with ROWS.open("a", encoding="utf-8") as file:
            file.write(text + "\n")
        print(text, flush=True)


# -- the page ----------------------------------------------------------------------------------------------------------

EXPLANATION = (
    "Engines with TRL's settings of a colocated one (max_num_batched_tokens 4,096, external_launcher, sleep mode), on "
    "emulated A100s of 40 GB, beside the formulas of planner/memory/engine. GiB, formula / emulated. Weights: what "
    "loading took. Activation: the peak of vLLM's own profile run. KV cache: with CUDA graphs and memory outside "
    "PyTorch, which an emulated card does not have: it loads no kernels and captures empty graphs. Awake, asleep: the "
    "card's bytes less those of a process with a CUDA context; the formula of the latter is a median of real figures, "
    "`ASLEEP_BYTES`, so that the emulated figure shows what PyTorch keeps of it. Sleep levels 1 and 2 leave the same."
)
NOTES = (
    "The GPTQ model has slots for 6 adapters of rank 16, among its weights. "
    "The nine before it are vision-language models: the profile run shows their encoders the largest images, which is "
    "the peak (`encoder_peak_bytes`), but of Ministral, whose images are small. "
    "With torch.compile on one GPU the profile run peaks while Inductor times the first kernel, whose made-up "
    "arguments hold a second embedding table (`autotune_peak_bytes`): a start from vLLM's cache of compiled graphs has "
    "that much more for its KV cache. Real start-up logs (results/engine.md) are of the older runner, whose sampler "
    "decides the peak. Weights are the growth of the card's used memory, with the rest of PyTorch's segments. "
    "On several GPUs each NCCL communicator holds 434 MiB, an assumption of the emulated card, where the formula has "
    "154. Qwen3-30B-A3B, the only mixture of experts here, has two: of its tensor parallel group and of its expert "
    "parallel group, which vLLM makes of the same GPUs. Asleep, PyTorch holds 318 MiB of it, of which 256 are the "
    "buffer in which its experts compute (`held Qwen3-30B-A3B`: `_ensure_workspace_size`; our "
    "`expert_workspace_bytes`); 894 MiB are outside PyTorch. "
    "vLLM 0.27 (torch 2.13) measures no CUDA graphs with model runner 2, and the table on which a kernel is tuned is "
    "not returned after the profile run: a small tensor lies in its segment. It is taken from the KV cache and stays "
    "asleep (`tuned_table_bytes`). vLLM 0.22 and 0.26 (torch 2.11) tune kernels, too, and return the table. They size "
    "the KV cache by PyTorch's reserved bytes, so that a tied head of Llama and Gemma 3, dropped while they load, "
    "is added to it and to what the engine holds (`_dropped_head_bytes`)."
)
HEAD = "| model | tp | sequences | graphs | weights | activation | KV cache | awake | asleep |"


def page() -> str:
    """Return the page, from the rows and today's formulas."""
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    lines = [
        "# vLLM engines on emulated GPUs",
        "",
        *wrap(EXPLANATION, 118),
        "",
        HEAD,
        "|" + "---|" * (HEAD.count("|") - 1),
    ]
    lines += [_line(Engine(**each["engine"]), each["seen"]) for each in rows if "seen" in each]
    lines += [f"\nNot started: {each['engine']}: {each['failed']}" for each in rows if "failed" in each]
    lines += ["", *wrap(NOTES, 118)]
    return "\n".join(lines) + "\n"


def _line(engine: Engine, seen: dict[str, int]) -> str:
    memory = engine_memory(complete(load_model(engine.model)), gpu(), engine.settings)
    activation = seen["activation_and_graphs"] - seen["graphs_estimate"]
    release = "" if engine.version == NEWEST else f", vLLM {engine.version}"
    cells = [
        f"{engine.model.rpartition('/')[2]}{release}",
        str(engine.tensor_parallel_size),
        str(engine.max_num_seqs),
        "no" if engine.enforce_eager else "yes",
        _both(memory.weights_bytes, seen["weights"]),
        _both(memory.activation_peak_bytes, activation),
        _both(cache_bytes(memory), seen["kv_cache"] + seen["graphs_estimate"]),
        _both(memory.resident_bytes, seen["awake"] - seen["before"]),
        f"{memory.asleep_bytes / GIB:.2f} / {(seen['asleep_2'] - seen['before']) / GIB:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def cache_bytes(memory: EngineMemory) -> int:
    """Return what a KV cache has on an emulated card, with CUDA graphs: nothing is outside PyTorch there."""
    parts = (memory.activation_peak_bytes, memory.persistent_buffer_bytes, memory.expert_workspace_bytes)
    kept = memory.weights_bytes + memory.tuned_table_bytes - memory.dropped_head_bytes
    return memory.budget_bytes - kept - sum(parts)


def _both(computed: int, seen: int) -> str:
    return f"{computed / GIB:.3f} / {seen / GIB:.3f} ({computed / seen - 1:+.1%})"


if __name__ == "__main__":
    if sys.argv[1] == "run":
        print({name: importlib.metadata.version(name) for name in ("torch", "vllm", "transformers")})
        run(int(sys.argv[2]) if len(sys.argv) > 2 else sys.maxsize)
    elif sys.argv[1] == "held" and len(sys.argv) == 3:
        print(row(next(each for each in ENGINES if each.model == sys.argv[2]), "held"))
    elif sys.argv[1] in ("one", "held"):
        found = one(Path(sys.argv[2]), Engine(**json.loads(sys.argv[3])), sys.argv[1] == "held")
        print("\n" + json.dumps(found), flush=True)
        os._exit(0)
    else:
        PAGE.write_text(page(), encoding="utf-8")
