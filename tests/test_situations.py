"""Five situations that users described, each with the command that answers it."""

import json
import re
from pathlib import Path

import pytest

from planner.commands.exit_codes import EXIT_NOTHING_FITS, EXIT_PLANNED, EXIT_WRONG_INPUT
from planner.commands.main import run
from planner.errors import InputError
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.methods import MethodName
from planner.models.catalogue import load_model
from planner.planning import plan
from planner.quantities import Note
from planner.report.sentences import in_one_line
from planner.requests.options import SearchOptions
from planner.requests.read_options import read_options
from planner.search.fit import estimate_or_none
from planner.search.knobs import SearchProblem, tuning_class_of, tuning_classes
from planner.search.search import search
from planner.search.sizes import batch_sizes
from planner.search.structures import structures
from planner.units import GIB

Report = dict  # type: ignore[type-arg]

FOUR_GB = "--model Qwen2.5-0.5B --gpus 1xRTX-3050-4G --method sft --effective-batch-size 8"
COLOCATED = (
    "--gpus 2xA100-40G --method grpo --set use_vllm=true --set vllm_mode=colocate "
    "--set vllm_gpu_memory_utilization=0.2 --set vllm_max_model_length=2500 --set num_generations=2"
)
GPTQ = f"--model Qwen2.5-7B-Instruct-GPTQ-Int4 --tuning lora {COLOCATED}"
QLORA = f"--model Qwen2.5-7B-Instruct --tuning qlora {COLOCATED}"
LONG_REWARD = (
    "--model gemma-3-4b-it --gpus 1xA100-80G --method reward --tuning lora --lora-r 8 "
    "--set lora_target_modules=q_proj,k_proj,v_proj,o_proj"
)
AS_PUBLISHED = f"{LONG_REWARD} --set dtype=float32 --set attn_implementation=eager --batch-size 1"
SERVER = (
    "--model Qwen2.5-7B --gpus 8xH100 --method grpo --tuning lora "
    "--set zero_stage=3 --set use_vllm=true --set vllm_mode=server"
)
LARGER_THAN_A_GPU = "--model Qwen2.5-32B --gpus 4xRTX-3090 --set zero_stage=3"


def answered(command: str, capsys: pytest.CaptureFixture[str], code: int = EXIT_PLANNED) -> Report:
    assert run([*command.split(), "--json", "--quiet"]) == code
    report: Report = json.loads(capsys.readouterr().out)
    return report


def table(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    """The whole table as one line of words, so that line breaks do not matter."""
    run([*command.split(), "--quiet", "--verbose"])
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("tuning", ["auto", "qlora"])
def test_a_4_gb_card_fits_with_the_batch_kept_by_accumulation(tuning: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = answered(f"{FOUR_GB} --tuning {tuning}", capsys)
    settings = report["best"]["settings"]
    assert report["verdict"] == "fits"
    assert settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"] == 8
    assert settings["gradient_checkpointing_kwargs"] == {"use_reentrant": False}
    assert settings["environment"] == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def test_a_4_gb_card_is_told_what_peft_and_trl_do_in_which_order(capsys: pytest.CaptureFixture[str]) -> None:
    said = table(f"{FOUR_GB} --tuning qlora --set gradient_checkpointing=true", capsys)
    assert (
        "in this order: load the model (nf4), get_peft_model, adapters cast to bfloat16, enable_input_require_grads, "
        "checkpointing at train()" in said
    )
    assert "non-reentrant" in said


def test_a_colocated_engine_prints_its_budget_and_its_cache(capsys: pytest.CaptureFixture[str]) -> None:
    said = table(QLORA, capsys)
    assert "engine budget 8.0 = weights" in said
    assert "kv cache" in said and "kv cache tokens" in said


def test_a_colocated_engine_is_within_its_budget_and_the_pins_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    """But for its CUDA graphs: vLLM 0.27, which loads 4-bit bases, does not measure them before the cache."""
    report = answered(QLORA, capsys)
    gpu = report["best"]["gpus"][0]
    budget = {
        name: size
        for name, size in gpu["details"]["engine_budget"].items()
        if not name.endswith(("tokens", "sequences", "cuda_graphs"))
    }
    assert abs(sum(budget.values()) / GIB - 0.2 * 39.49) < 0.01  # torch's total on an A100-40G is 39.49 GiB
    settings = report["best"]["settings"]
    assert (
        settings["vllm_gpu_memory_utilization"],
        settings["vllm_max_model_length"],
        settings["num_generations"],
    ) == (0.2, 2500, 2)


def test_a_gptq_base_has_no_engine_as_peft_merges_nothing_into_it(capsys: pytest.CaptureFixture[str]) -> None:
    """It stopped in the first weight sync on an emulated card: results/emulated_situations.md."""
    assert run(GPTQ.split()) == EXIT_WRONG_INPUT
    (said,) = capsys.readouterr().err.splitlines()
    assert "PEFT merges none into GPTQ layers. Use --set use_vllm=false instead of --set use_vllm=true" in said
    free = "--model Qwen2.5-7B-Instruct-GPTQ-Int4 --gpus 2xA100-40G --method grpo"
    report = answered(free, capsys)
    assert report["best"]["settings"]["use_vllm"] is False
    assert "base_takes_no_adapters" in [note["code"] for note in report["warnings_data"]]


def test_quadratic_attention_fits_at_8192_as_published(capsys: pytest.CaptureFixture[str]) -> None:
    report = answered(f"estimate {AS_PUBLISHED} --max-length 8192", capsys)
    assert report["fits"]
    assert 32 * GIB < report["gpus"][0]["peak_bytes"] < 44 * GIB  # the run showed "about 40 GB"


def test_quadratic_attention_does_not_fit_at_16384_as_published(capsys: pytest.CaptureFixture[str]) -> None:
    report = answered(f"estimate {AS_PUBLISHED} --max-length 16384", capsys, EXIT_NOTHING_FITS)
    assert not report["fits"]
    assert answered(f"{AS_PUBLISHED} --max-length 16384", capsys, EXIT_NOTHING_FITS)["verdict"] == "does_not_fit"


def test_the_longest_rows_say_what_made_them_possible(capsys: pytest.CaptureFixture[str]) -> None:
    report = answered(f"{LONG_REWARD} --optimize max-length", capsys)
    assert report["best"]["settings"]["max_length"] >= 32768
    assert any(
        "attn_implementation flash_attention_2 instead of sdpa" in reason for reason in report["best"]["reasons"]
    )


def test_a_server_has_gpus_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    report = answered(SERVER, capsys)
    train, serve = report["best"]["gpus"]
    assert (train["role"], serve["role"]) == ("train", "vllm")
    assert train["count"] + serve["count"] <= 8
    assert report["best"]["settings"]["num_processes"] == train["count"]


def test_eight_processes_and_a_server_on_eight_gpus_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*SERVER.split(), "--set", "num_processes=8"]) == EXIT_WRONG_INPUT
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("Error: num_processes 8 and a vLLM server on 1 of the same 8 GPUs would share cards")
    assert captured.err.count("\n") == 1


# GiB of tensors, without the context, by rows and micro-batches of a step: TRL 1.12 on an emulated A100-80G (prompts of
# 128 tokens, completions of 64), with the mixed precision of accelerate.yaml. Of 80 rows the scores are padded to 128.
PPO_ALLOCATED = {
    (4, 1): {"rollout": 7.85, "score": 7.85, "loss": 10.46, "backward": 11.38, "optimizer_step": 9.94},
    (4, 8): {"rollout": 10.96, "score": 10.68, "loss": 13.98, "backward": 14.39, "optimizer_step": 11.38},
    (20, 4): {"rollout": 19.58, "score": 16.22, "loss": 31.55, "backward": 33.57, "optimizer_step": 18.62},
}


@pytest.mark.parametrize(("rows", "accumulation"), PPO_ALLOCATED)
def test_ppo_keeps_scores_outputs_and_every_activation(
    rows: int, accumulation: int, capsys: pytest.CaptureFixture[str]
) -> None:
    job = "estimate --model Qwen2.5-0.5B --gpus 1xA100-80G --method ppo --tuning full --set dtype=bfloat16"
    batch = f"--batch-size {rows} --set gradient_accumulation_steps={accumulation}"
    report = answered(f"{job} {batch} --prompt-length 128 --max-completion-length 64", capsys)
    phases = {row["name"]: row["components"] for row in report["gpus"][0]["phases"]}
    for phase, seen in PPO_ALLOCATED[rows, accumulation].items():
        tensors = sum(size for kind, size in phases[phase].items() if kind not in ("runtime", "fragmentation"))
        assert tensors / GIB == pytest.approx(seen, rel=0.015), phase


@pytest.mark.parametrize("method", ["online-dpo", "rloo", "ppo"])
def test_gathering_a_model_larger_than_a_gpu_does_not_fit(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = answered(
        f"estimate {LARGER_THAN_A_GPU} --method {method} --tuning lora --set dtype=bfloat16 --batch-size 1",
        capsys,
        EXIT_NOTHING_FITS,
    )
    rollout = next(phase for phase in report["gpus"][0]["phases"] if phase["name"] == "rollout")
    assert rollout["components"]["communication"] > 60 * GIB  # 65.5 GB of bfloat16 weights, gathered whole


def test_ppo_of_32b_has_no_plan_on_four_desktops(capsys: pytest.CaptureFixture[str]) -> None:
    """Its trainer checkpoints no activations, and trains a value model of 32 B parameters, too."""
    answered(f"{LARGER_THAN_A_GPU} --method ppo --host-memory 1024GiB", capsys, EXIT_NOTHING_FITS)


@pytest.mark.parametrize("method", ["online-dpo", "rloo"])
def test_partitioned_generation_is_chosen_with_its_price(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = answered(f"{LARGER_THAN_A_GPU} --method {method}", capsys)
    assert report["best"]["settings"]["ds3_gather_for_generation"] is False
    reason = next(
        reason
        for reason in report["best"]["reasons"]
        if reason.startswith("ds3_gather_for_generation false instead of true")
    )
    assert "times the speed" in reason
    assert "gathering the whole model on every GPU takes" in reason


def test_of_several_ranks_the_largest_that_fits_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    command = "--model Qwen2.5-7B --gpus 1xRTX-4090 --method sft --tuning lora --lora-r"
    report = answered(f"{command} 8,64,1024", capsys)
    assert report["best"]["settings"]["lora_r"] == 64
    assert "lora_r 64 is the largest of 8, 64, 1024 that fits" in report["warnings"]
    alone = answered(f"{command} 1024 --host-memory 128GiB", capsys)["best"]["settings"]
    assert alone["offload_param_device"] == "cpu"  # on the card alone it does not fit


def test_an_engine_spans_as_many_gpus_as_pay(capsys: pytest.CaptureFixture[str]) -> None:
    job = "--model Qwen2.5-7B --gpus 8xH100 --method grpo --tuning lora"
    free = answered(job, capsys)["best"]
    pinned = answered(f"{job} --set vllm_tensor_parallel_size=4 --set vllm_mode=colocate", capsys)["best"]
    assert free["throughput"]["tokens_per_second"] >= 0.999 * pinned["throughput"]["tokens_per_second"]
    assert free["settings"]["vllm_tensor_parallel_size"] in (2, 4)  # 28 heads


def test_an_engine_keeps_its_rows_and_no_speed_is_lost(capsys: pytest.CaptureFixture[str]) -> None:
    job = "--model Qwen2.5-7B --gpus 2xA100-40G --method grpo --tuning lora --set vllm_mode=colocate"
    free = answered(job, capsys)["best"]
    share = free["settings"]["vllm_gpu_memory_utilization"]
    pinned = [
        answered(f"{job} --set vllm_gpu_memory_utilization={share + change:.2f}", capsys)["best"]
        for change in (0.02, -0.02)
    ]
    speed = free["throughput"]["tokens_per_second"]
    assert all(each["throughput"]["tokens_per_second"] <= speed * 1.002 for each in pinned)


def test_of_nearly_equal_speeds_the_one_with_most_headroom_is_taken() -> None:
    job = Job(model=load_model("Qwen2.5-7B"), method="sft", tuning="lora")
    problem = SearchProblem(job=job, cluster=parse_cluster("1xA100-80G", None), tuning_class="lora")
    best = search(problem)
    assert best is not None
    candidates = (each for structure in structures(problem) for each in batch_sizes(structure, job))
    every = [estimate_or_none(each, problem) for each in candidates]
    fitting = [each for each in every if each is not None and each.fits]
    fastest = max(each.throughput.tokens_per_second for each in fitting)
    near = [each for each in fitting if each.throughput.tokens_per_second >= 0.98 * fastest]
    assert best.gpus[0].peak_bytes == min(each.gpus[0].peak_bytes for each in near)


def test_without_a_wish_16_bit_weights_are_not_trained_in_full(capsys: pytest.CaptureFixture[str]) -> None:
    job = "--model Qwen2.5-7B --gpus 1xA100-80G --method sft"
    assert answered(job, capsys)["best"]["settings"]["use_peft"] is True
    assert answered(f"{job} --tuning full", capsys)["best"]["settings"]["dtype"] == "bfloat16"


def test_qlora_is_taken_where_lora_is_much_slower(capsys: pytest.CaptureFixture[str]) -> None:
    report = answered("--model Qwen2.5-14B --gpus 2xRTX-4090 --method dpo", capsys)
    assert report["best"]["settings"]["load_in_4bit"] is True
    lora = next(each for each in report["alternatives"] if each["label"] == "LoRA")
    speeds = [each["throughput"]["tokens_per_second"] for each in (report["best"], lora)]
    assert speeds[0] >= 1.5 * speeds[1]


def test_a_faster_alternative_is_pointed_at(capsys: pytest.CaptureFixture[str]) -> None:
    report = answered("--model Llama-3.1-8B --gpus 1xA10G --method reward", capsys)
    assert report["warnings"][0] == "QLoRA is 1.4 times as fast (--tuning qlora)"


@pytest.mark.parametrize("loaded", ["load_in_8bit=true", "use_bnb_nested_quant=true --tuning qlora"])
def test_another_quantization_than_the_searched_one_is_planned(loaded: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = answered(f"--model Qwen2.5-0.5B --gpus 2xL4 --method sft --set {loaded}", capsys)
    name = loaded.partition("=")[0]
    assert report["best"]["settings"][name] is True


def test_a_server_on_several_nodes_has_one_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    job = "--model Qwen2.5-7B --gpus 2x8xH100 --method grpo --tuning lora --set vllm_mode=server"
    settings = answered(job, capsys)["best"]["settings"]
    assert settings["num_processes"] == 8
    assert settings["vllm_tensor_parallel_size"] * settings["vllm_data_parallel_size"] == 8


def test_of_4_bit_weights_only_checkpoints_are_offloaded() -> None:
    job = Job(model=load_model("gemma-3-4b-it"), method="orpo", tuning="qlora", pinned={"max_length": 512})
    cluster = parse_cluster("4xL4")
    offloaded = [*structures(SearchProblem(job=job, cluster=cluster, tuning_class="qlora", offload=True))]
    assert offloaded
    assert all(each.checkpoint_offload and not (each.offload_optimizer or each.offload_param) for each in offloaded)


@pytest.mark.parametrize(
    ("method", "activations"), [("kto", "activation_offloading"), ("reward", "checkpoint_offload")]
)
def test_long_rows_on_a_small_card_fit_with_checkpoints_on_the_host(method: MethodName, activations: str) -> None:
    """TRL keeps `checkpoint_offload` only where no pass without gradients comes between (trl 1.16, models/utils.py)."""
    pinned = {"max_length": 8192 if method == "kto" else 16384, "use_liger_kernel": False}
    answer = plan(Job(model=load_model("Qwen2.5-14B"), method=method, pinned=pinned), parse_cluster("1xRTX4090"))
    assert answer.verdict == "fits"
    assert getattr(answer.best.candidate, activations)
    assert not answer.best.candidate.offload_param


def test_checkpoints_stay_on_the_gpu_where_they_fit() -> None:
    answer = plan(Job(model=load_model("Llama-3.1-70B"), method="sft", tuning="full"), parse_cluster("8xH100"))
    assert answer.best.candidate.offload_optimizer
    assert not answer.best.candidate.checkpoint_offload


def test_the_longest_rows_of_other_tuning_classes_are_named() -> None:
    answer = plan(Job(model=load_model("Qwen2.5-7B"), method="dpo", optimize="max-length"), parse_cluster("1xA100-40G"))
    qlora = next(other for other in answer.alternatives if other.change == Note("tuning_class", {"tuning": "qlora"}))
    assert qlora.estimate.candidate.max_length > answer.best.candidate.max_length
    assert in_one_line(qlora.takes) == f"max_length {qlora.estimate.candidate.max_length:,}"


def test_a_gpu_that_no_engine_can_use_is_left_idle() -> None:
    """Five A100 were a third slower than four: engines of two or four GPUs do not divide five processes."""
    job = Job(model=load_model("Qwen2.5-7B"), method="grpo", tuning="lora", pinned={"max_completion_length": 1024})
    four, five = (
        search(SearchProblem(job=job, cluster=parse_cluster(f"{count}xA100-40G"), tuning_class="lora"))
        for count in (4, 5)
    )
    assert four is not None and five is not None
    assert (five.candidate.num_processes, five.throughput) == (4, four.throughput)


def test_every_split_between_server_and_trainer_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    job = "--model Qwen2.5-7B --gpus 8xH100 --method grpo --tuning lora --set vllm_mode=server"
    free = answered(job, capsys)["best"]
    for tensor_parallel, data_parallel in ((4, 1), (2, 2), (1, 4), (1, 6)):
        sizes = f"--set vllm_tensor_parallel_size={tensor_parallel} --set vllm_data_parallel_size={data_parallel}"
        pinned = answered(f"{job} {sizes}", capsys)["best"]
        assert free["throughput"]["tokens_per_second"] >= 0.98 * pinned["throughput"]["tokens_per_second"]


def test_the_headline_of_a_server_plan_is_the_peak_of_the_trainer(capsys: pytest.CaptureFixture[str]) -> None:
    text = table(SERVER, capsys)
    headline = text[text.index("peak ") : text.index("nvidia-smi")]
    assert "in the rollout" not in headline
    assert " step " in text and "compute " in text


@pytest.mark.parametrize(
    "job",
    [
        "--model Llama-3.1-70B --gpus 1xRTX-3090 --method dpo --tuning full",
        "--model Llama-3.1-405B --gpus 1xRTX-3090 --method grpo",
        "--model Llama-3.1-70B --gpus 2xRTX-4090 --method sft",
        "--model Mixtral-8x7B-v0.1 --gpus 1xT4 --method reward --tuning full",
    ],
)
def test_where_nothing_fits_something_larger_does(job: str, capsys: pytest.CaptureFixture[str]) -> None:
    report = answered(job, capsys, EXIT_NOTHING_FITS)
    assert report["remedies"]


def test_rows_beyond_the_context_of_the_model_are_noted(capsys: pytest.CaptureFixture[str]) -> None:
    job = "--model Qwen2.5-0.5B --gpus 1xA100-80G --method sft --batch-size 1"
    for length, noted in ((32_768, False), (33_024, True)):
        warnings = answered(f"{job} --max-length {length}", capsys)["warnings"]
        assert any("32,768 positions" in line for line in warnings) is noted


class TestQloraOnSeveralGpus:
    def test_zero_3_is_refused_by_name_where_sharded_4_bit_weights_are_not_planned(self) -> None:
        job = Job(model=load_model("Qwen2.5-7B"), method="orpo", tuning="qlora", pinned={"sharding": "zero3"})
        with pytest.raises(InputError, match="planned for sft, dpo, kto, tpo, reward, not for orpo"):
            plan(job, parse_cluster("4xA100-40G", None))

    def test_a_model_that_one_gpu_cannot_hold_in_4_bits_and_train_is_cut_by_fsdp(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Each GPU has the whole 4-bit model while it loads, and its shards beside it."""
        job = "--model Llama-3.1-70B --method sft --tuning qlora --max-length 32768"
        settings = answered(f"{job} --gpus 2xA100-80G", capsys)["best"]["settings"]
        assert (settings["fsdp_version"], settings["bnb_4bit_quant_storage"]) == (2, "bfloat16")

    def test_one_whose_shards_have_no_room_beside_it_is_not_cut(self, capsys: pytest.CaptureFixture[str]) -> None:
        job = "--model Llama-3.1-70B --gpus 2xL40S --method sft --tuning qlora"
        assert "bnb_4bit_quant_storage" not in answered(job, capsys)["best"]["settings"]

    def test_one_that_it_can_is_copied(self, capsys: pytest.CaptureFixture[str]) -> None:
        report = answered("--model Qwen2.5-7B --gpus 2xRTX-3090 --method sft --tuning qlora", capsys)
        assert report["best"]["settings"]["distributed_type"] == "MULTI_GPU"
        assert "bnb_4bit_quant_storage" not in report["best"]["settings"]

    def test_pinned_fsdp_cuts_the_weights(self, capsys: pytest.CaptureFixture[str]) -> None:
        pinned = "--model Qwen2.5-7B --gpus 2xRTX-3090 --method sft --tuning qlora --set distributed_type=FSDP"
        assert answered(pinned, capsys)["best"]["settings"]["bnb_4bit_quant_storage"] == "bfloat16"


def test_rows_that_no_gpu_can_hold_are_shared(capsys: pytest.CaptureFixture[str]) -> None:
    """By the fewest GPUs; a row that one GPU can hold is not shared."""
    command = "--model Llama-3.1-8B --gpus 8xA100-40G --method sft --tuning lora --max-length"
    report = answered(f"{command} 122880", capsys)
    settings = report["best"]["settings"]
    assert settings.get("sp_size", 1) * settings.get("cp_size", 1) == 2
    assert any(line.startswith("2 GPUs share each row") for line in report["warnings"])
    assert "communication" in report["best"]["throughput"]["seconds"]
    alone = answered(f"{command} 8192", capsys)["best"]["settings"]
    assert "sp_size" not in alone and "cp_size" not in alone


def test_only_as_many_layers_are_checkpointed_as_memory_needs(capsys: pytest.CaptureFixture[str]) -> None:
    """Beside vLLM, which has its own bounds on transformers, all layers or none."""
    command = "--model Llama-3.2-1B --gpus 1xL4 --method sft --tuning lora --max-length 16384"
    some = answered(command, capsys)["best"]
    every = answered(f"{command} --set every_n_layers=1 --set gradient_checkpointing=true", capsys)["best"]
    assert some["settings"]["gradient_checkpointing_kwargs"]["every_n_layers"] in (2, 4)
    assert some["throughput"]["tokens_per_second"] > 1.1 * every["throughput"]["tokens_per_second"]
    colocated = answered("--model Qwen2.5-7B --gpus 8xH100 --method grpo --tuning full", capsys)["best"]["settings"]
    assert "every_n_layers" not in colocated.get("gradient_checkpointing_kwargs", {})


class TestSeveralNodes:
    """Between nodes the network is the bottleneck: with a copy of the model on each only gradients cross it."""

    COMMAND = "--model Qwen2.5-7B --gpus 2x8xH100 --method sft --tuning full"

    def test_each_node_keeps_a_copy_of_the_model(self, capsys: pytest.CaptureFixture[str]) -> None:
        hybrid = answered(self.COMMAND, capsys)["best"]
        whole = answered(f"{self.COMMAND} --set fsdp_version=2 --set dp_replicate_size=1", capsys)["best"]
        assert hybrid["settings"]["dp_replicate_size"] == 2
        assert hybrid["throughput"]["tokens_per_second"] > 1.1 * whole["throughput"]["tokens_per_second"]

    def test_a_slower_network_makes_a_slower_plan(self, capsys: pytest.CaptureFixture[str]) -> None:
        slow, usual, fast = (
            answered(self.COMMAND + network, capsys)["best"]["throughput"]["tokens_per_second"]
            for network in (" --network 100Gb", "", " --network 8x400Gb")
        )
        assert slow < usual < fast

    def test_the_assumed_network_is_named(self, capsys: pytest.CaptureFixture[str]) -> None:
        line = "the network of each node is taken as 400 Gb/s: give yours with --network"
        assert line in answered(self.COMMAND, capsys)["warnings"]
        assert line not in answered(f"{self.COMMAND} --network 100Gb", capsys)["warnings"]


def test_a_remedy_says_what_it_saves(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = "--model Qwen2.5-7B --gpus 1xRTX-4090 --method sft --tuning lora --max-length 131072"
    report = answered(command, capsys, EXIT_NOTHING_FITS)
    shorter = next(each for each in report["remedies"] if each["change"].startswith("--max-length"))
    peaks = [max(gpu["peak_bytes"] for gpu in each["gpus"]) for each in (report["best"], shorter)]
    assert shorter["saves_bytes"] == peaks[0] - peaks[1] > 2**30
    page, saves = tmp_path / "page.html", f"saves {shorter['saves_bytes'] / 2**30:.1f} GiB"
    assert run([*command.split(), "--quiet", "-v", "--html", str(page)]) == EXIT_NOTHING_FITS
    assert f", {saves}" in " ".join(capsys.readouterr().out.split())
    assert f"; {saves}" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("accumulated", ["", " --set gradient_accumulation_steps=8"])
def test_a_batch_that_does_not_fit_is_accumulated_from_smaller_ones(
    accumulated: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without the batch alone the answer was about 8 samples per step, or 64, and not 24 or 192."""
    command = "--model Qwen2.5-1.5B --gpus 1xRTX-4090 --method orpo --tuning lora --max-length 4096 --batch-size 24"
    remedies = answered(command + accumulated, capsys, EXIT_NOTHING_FITS)["remedies"]
    change = remedies[0]["change"]
    found = re.fullmatch(r"--set per_device_train_batch_size=(\d+) --set gradient_accumulation_steps=(\d+)", change)
    assert found and int(found[1]) * int(found[2]) == (192 if accumulated else 24)
    assert not any("without per_device_train_batch_size" in each["change"] for each in remedies)
    assert answered(f"{command.partition(' --batch-size')[0]} {change}", capsys)["verdict"] == "fits"


def test_a_vision_models_plan_says_that_images_are_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    command = "--gpus 1xA100-80G --method sft --tuning lora --model"
    line = "rows of text are planned: images and the passes of the vision tower are not counted: --images-per-row 1"
    assert line in answered(f"{command} gemma-3-4b-it", capsys)["warnings"]
    assert line not in answered(f"{command} gemma-3-1b-it", capsys)["warnings"]


@pytest.mark.parametrize("tuning", ["auto", "lora", "qlora"])
def test_the_residual_of_a_quantized_checkpoint_reaches_the_search_that_found_it(tuning) -> None:
    """The class of a plan's candidate is one that the plan searched, so a dry run's residual is not dropped."""
    job = Job(model=load_model("Qwen2.5-7B-Instruct-GPTQ-Int4"), method="sft", tuning=tuning)
    cluster = parse_cluster("1xA100-40G")
    best = plan(job, cluster).best
    assert tuning_classes(job) == (tuning_class_of(best.candidate, job),)
    raised = plan(job, cluster, {tuning_class_of(best.candidate, job): 0.5}).best
    assert raised.gpus[0].phases[0].components["unexplained"] > 0


def test_a_plan_without_the_pins_keeps_the_precision_of_the_training() -> None:
    pinned = {"precision": "no", "sharding": "zero3", "per_device_train_batch_size": 1}
    job = Job(model=load_model("Qwen2.5-7B"), method="sft", pinned=pinned)
    others = plan(job, parse_cluster("8xA100-40G")).alternatives
    free = next(other for other in others if other.change == Note("without_pins"))
    assert free.estimate.candidate.precision == "no"


def test_a_plan_without_the_pins_names_those_that_the_user_gave() -> None:
    """`use_vllm=false` alone decides about the engine: the user gave no vllm_mode that could be left out."""
    options = SearchOptions(model="Qwen2.5-0.5B", gpus="2xH100", method="grpo", set={"use_vllm": False})
    request = read_options(options, lambda model: model)
    others = plan(request.job, request.cluster).alternatives
    (way,) = next(other for other in others if other.change == Note("without_pins")).takes
    assert way.values["settings"] == {"use_vllm": True}
