"""ZeRO-3 on emulated GPUs (results/zero3_streams.md) beside the estimate."""

import pytest
from msgspec import Struct
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.memory.communication import nccl_bytes
from planner.memory.parameters.policy import policy_parameters
from planner.memory.runtime import context_bytes
from planner.memory.schemes.contract import Gathers
from planner.memory.schemes.table import scheme_of
from planner.memory.weights import policy_weights_bytes
from planner.models.catalogue import load_model
from planner.quantities import GpuMemory, PhaseMemory
from planner.units import GIB

ALLOCATED_WITHIN = 0.02  # rotary tables, small tensors and padding


def gathered(held: Candidate) -> Gathers:
    return scheme_of(held).gathered(held)


class Run(Struct, frozen=True, kw_only=True):
    model: str
    tuning: str
    ranks: int
    length: int
    allocated: float  # GiB, as the next
    need: float  # 0: not measured
    load: float
    share: float = 0  # estimated over measured need; below 1, as the slack is a median of many runs
    expandable: bool = False


RUNS = (
    Run(model="7B", tuning="lora", ranks=4, length=2048, allocated=7.814, need=9.64, load=6.340, share=0.939),
    Run(model="7B", tuning="lora", ranks=4, length=2048, allocated=7.810, need=0, load=6.338, expandable=True),
    Run(model="1.5B", tuning="full", ranks=2, length=1024, allocated=15.835, need=0, load=7.188),
    Run(model="1.5B", tuning="full", ranks=4, length=2048, allocated=9.275, need=10.928, load=3.594, share=0.899),
    Run(model="0.5B", tuning="full", ranks=4, length=512, allocated=3.608, need=0, load=1.177),
    Run(model="1.5B", tuning="lora", ranks=8, length=512, allocated=2.412, need=0, load=1.664, expandable=True),
    Run(model="7B", tuning="full", ranks=8, length=2048, allocated=19.764, need=21.541, load=8.867, share=0.989),
)


def candidate_of(run: Run) -> Candidate:
    return Candidate(
        model=load_model(f"Qwen/Qwen2.5-{run.model}"),
        method="sft",
        tuning="lora" if run.tuning == "lora" else "full",
        padded=False,
        per_device_train_batch_size=1,
        max_length=run.length,
        num_processes=run.ranks,
        sharding="zero3",
        expandable_segments=run.expandable,
    )


def memory_of(run: Run) -> GpuMemory:
    return estimate(candidate_of(run), parse_cluster(f"{run.ranks}xA100-80G", None)).gpus[0]


def estimated(run: Run, without: tuple[str, ...]) -> dict[str, float]:
    """GiB of each phase without the named components and NCCL."""
    gpu = memory_of(run)

    def size(phase: PhaseMemory) -> int:
        kept = sum(size for component, size in phase.components.items() if component not in without)
        return kept - gpu.nccl_bytes

    return {phase.name: size(phase) / GIB for phase in gpu.phases}


class TestZero3OnEmulatedGpus:
    @pytest.mark.parametrize("run", RUNS)
    def test_allocated_bytes_are_those_that_were_measured(self, run: Run) -> None:
        found = max(estimated(run, ("runtime", "fragmentation")).values())
        assert found == pytest.approx(run.allocated, rel=ALLOCATED_WITHIN)

    @pytest.mark.parametrize("run", RUNS)
    def test_the_load_holds_whole_weights_and_copies(self, run: Run) -> None:
        assert estimated(run, ("runtime", "fragmentation"))["load"] == pytest.approx(run.load, rel=0.035)

    @pytest.mark.parametrize("run", [run for run in RUNS if run.need])
    def test_the_interval_contains_the_measured_need(self, run: Run) -> None:
        """A card below its upper end is not called one that fits: less would be an out-of-memory error."""
        gpu = memory_of(run)
        assert max(estimated(run, ("runtime",)).values()) / run.need == pytest.approx(run.share, abs=0.01)
        low, high = ((end - gpu.context_bytes - gpu.nccl_bytes) / GIB for end in gpu.interval_bytes)
        assert low <= run.need <= high


class TestQLoraUnderZero3:
    """results/zero3_streams.md: Qwen2.5-1.5B in nf4 with LoRA on 4 ranks."""

    @pytest.mark.parametrize(
        ("phase", "emulated", "within"),
        [
            ("load", 1_368_520_704, 0.11),  # unexplained
            ("forward", 1_827_143_680, 0.02),
            ("loss", 1_822_598_144, 0.02),
            ("backward", 1_895_737_856, 0.02),
            ("optimizer_step", 504_765_440, 0.04),  # two workspaces of cuBLAS, which are CUDA's in the formulas
        ],
    )
    def test_pieces_of_4_bit_weights_are_gathered(self, phase: str, emulated: int, within: float) -> None:
        candidate = Candidate(
            model=load_model("Qwen/Qwen2.5-1.5B"), method="sft", tuning="lora", dtype="bfloat16", quantization="nf4",
            padded=False, per_device_train_batch_size=1, max_length=1024, num_processes=4, sharding="zero3",
        )  # fmt: skip
        cluster = parse_cluster("4xA100-80G", None)
        found = next(each for each in estimate(candidate, cluster).gpus[0].phases if each.name == phase)
        outside = nccl_bytes(candidate) + context_bytes(cluster.gpu) + found.components["fragmentation"]
        assert found.total_bytes - outside == pytest.approx(emulated, rel=within)

    def test_offloaded_pieces_are_on_the_host(self) -> None:
        base = Candidate(
            model=load_model("Qwen/Qwen2.5-7B"), method="sft", tuning="lora", dtype="bfloat16", quantization="nf4",
            num_processes=4, sharding="zero3", offload_optimizer=True,
        )  # fmt: skip
        moved = replace(base, offload_param=True)
        pieces = policy_parameters(base).quantized_params // 2 // 4
        unquantized = replace(moved, quantization="none")
        assert policy_weights_bytes(base) - policy_weights_bytes(moved) > pieces
        assert scheme_of(moved).offloaded_parameters(moved) > pieces
        assert scheme_of(moved).offloaded_parameters(moved) < scheme_of(unquantized).offloaded_parameters(unquantized)

    def test_the_dtype_of_the_storage_makes_no_difference_but_for_what_may_be_whole(self) -> None:
        """Numbers count: four weights in one of bfloat16, and half as many numbers of uint8's."""
        base = Candidate(
            model=load_model("Qwen/Qwen2.5-7B"), method="sft", tuning="lora", dtype="bfloat16", quantization="nf4",
            num_processes=4, sharding="zero3",
        )  # fmt: skip
        wide = replace(base, bnb_4bit_quant_storage="bfloat16")
        assert policy_weights_bytes(wide) == pytest.approx(policy_weights_bytes(base), rel=0.001)
        assert gathered(wide).at["loss"] > 1.2 * gathered(base).at["loss"]

    def test_a_teacher_gathers_its_own_layers(self) -> None:
        base = Candidate(
            model=load_model("Qwen/Qwen2.5-0.5B"), teacher_model=load_model("Qwen/Qwen2.5-32B"), method="gkd",
            dtype="bfloat16", num_processes=8, sharding="zero3",
        )  # fmt: skip
        small = replace(base, teacher_model=base.model)
        layers = [gathered(each).of_reference.layers for each in (base, small)]
        assert layers[0] > 3 * layers[1]


class TestAfterSampling:
    @pytest.mark.parametrize(
        ("phase", "emulated"), [("forward", 846_376_960), ("loss", 643_857_408), ("backward", 778_940_416)]
    )
    def test_layers_are_released_as_in_the_trace_of_a_token(self, phase: str, emulated: int) -> None:
        """GMPO of SmolLM2-135M, results/emulated.jsonl: the loss was estimated at 909 MB, the peak 20 % too high."""
        held = Candidate(
            model=load_model("HuggingFaceTB/SmolLM2-135M"), method="gmpo", precision="no", max_length=256,
            per_device_train_batch_size=1, gradient_accumulation_steps=4, prompt_length=128, max_completion_length=32,
            num_generations=4, steps_per_generation=4, padded=True, num_processes=8, sharding="zero3",
            ds3_gather_for_generation=False, expandable_segments=True,
        )  # fmt: skip
        cluster = parse_cluster("8xA100-40G", None)
        found = next(each for each in estimate(held, cluster).gpus[0].phases if each.name == phase)
        outside = nccl_bytes(held) + context_bytes(cluster.gpu) + found.components["fragmentation"]
        assert found.total_bytes - outside == pytest.approx(emulated, rel=0.008)
