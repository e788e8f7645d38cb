"""Settings that stop on emulated GPUs (results/emulated.jsonl) are neither planned nor estimated; others are."""

import ast
import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from planner.cache_keys import training_settings
from planner.candidate import Candidate
from planner.errors import InputError
from planner.gpus.cluster import Gpu
from planner.gpus.parse import parse_cluster
from planner.jobs.base_candidate import base_candidate, single_candidate
from planner.jobs.candidate_rules import refuse_single_candidate
from planner.jobs.job import Job
from planner.jobs.settings import candidate_fields
from planner.jobs.stop import parted_features
from planner.jobs.stops import HEAD_IN_FLIGHT
from planner.launch.files import launch_files
from planner.memory.stack_recipe import StackRecipe, stack_recipe
from planner.methods import MethodName
from planner.models.architectures.table import architecture_of
from planner.models.catalogue import load_model, model_rows
from planner.planning import plan
from planner.report.sentences import sentence
from planner.requests.launch_config import load_launch_config
from planner.schemes import Sharding
from planner.search.knobs import SearchProblem, TuningClass
from planner.search.notes import notes
from planner.search.search import search
from planner.training_stack import complete_models
from scripts.emulated_jobs import Job as EmulatedJob

ROWS = Path(__file__).resolve().parents[1] / "results" / "emulated.jsonl"
IN_FLIGHT = "AssertionError:  Parameter containing:"  # deepspeed: "Cannot partition a param in flight"
UNGATHERED = {"sharding": "zero3", "vllm": "off", "ds3_gather_for_generation": False}


def test_heads_in_flight_are_those_of_the_runs_that_stopped() -> None:
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    stopped: dict[bool, list[bool]] = {True: [], False: []}
    for row in rows:
        if row["settings"].get("sharding") == "zero3" and (row["outcome"] == "fits" or IN_FLIGHT in row["message"]):
            job = EmulatedJob(kind=row["kind"], gpus=row["gpus"], settings=row["settings"])
            stopped[row["outcome"] != "fits"].append(HEAD_IN_FLIGHT.when(job.candidate, parse_cluster(job.gpus)))
    assert stopped[True] == [True, True]
    assert not any(stopped[False])


@pytest.mark.parametrize("method", ["grpo", "rloo", "gmpo", "distillation"])
def test_a_plan_without_gathering_gathers_nothing_ahead_in_full(method: MethodName) -> None:
    job = Job(model=load_model("Qwen2.5-1.5B"), method=method, tuning="full", pinned={**UNGATHERED, "tuning": "full"})
    cluster = parse_cluster("4xA100-80G")
    assert base_candidate(job, cluster).stage3_prefetch_bucket_size == 0
    best = search(SearchProblem(job=job, cluster=cluster, tuning_class="full"))
    assert best is not None and best.candidate.stage3_prefetch_bucket_size == 0


@pytest.mark.parametrize(("tuning", "pinned"), [("lora", UNGATHERED), ("full", {"sharding": "zero3"})])
def test_other_plans_gather_ahead(tuning: TuningClass, pinned: dict[str, Any]) -> None:
    job = Job(model=load_model("Qwen2.5-1.5B"), method="grpo", pinned=pinned)
    best = search(SearchProblem(job=job, cluster=parse_cluster("4xA100-80G"), tuning_class=tuning))
    assert best is not None and best.candidate.stage3_prefetch_bucket_size == "auto"


@pytest.mark.parametrize(("model", "stops"), [("Qwen2.5-0.5B", False), ("Llama-3.2-1B", False), ("Qwen2.5-1.5B", True)])
def test_a_tied_head_of_a_small_model_is_there_already(model: str, stops: bool) -> None:
    """The first two ran on emulated GPUs: their layers have fewer parameters than `stage3_max_reuse_distance` (1e9)."""
    job = Job(model=load_model(model), method="grpo", pinned=UNGATHERED)
    assert (base_candidate(job, parse_cluster("4xA100-80G")).stage3_prefetch_bucket_size == 0) == stops


def test_adapters_and_releases_with_logits_gather_ahead() -> None:
    full = base_candidate(
        Job(model=load_model("Qwen2.5-1.5B"), method="grpo", pinned=UNGATHERED), parse_cluster("4xA100-80G")
    )
    for each in (
        replace(full, tuning="lora"),
        replace(full, trl_version="1.14"),
        replace(full, vllm="colocate"),
        replace(full, ds3_gather_for_generation=True),
    ):
        assert not HEAD_IN_FLIGHT.when(replace(each, stage3_prefetch_bucket_size="auto"), parse_cluster("4xA100-80G"))


def test_an_estimate_that_pins_gathering_ahead_is_refused() -> None:
    job = Job(model=load_model("Qwen2.5-1.5B"), method="grpo", pinned={**UNGATHERED, "stage3_prefetch_bucket_size": 1})
    candidate = base_candidate(job, parse_cluster("4xA100-80G"))
    with pytest.raises(InputError, match=r"Use --set stage3_prefetch_bucket_size=0\.$"):
        refuse_single_candidate(candidate, job, parse_cluster("4xA100-80G"))


@pytest.mark.parametrize("model", ["Mixtral-8x7B-v0.1", "Qwen3-30B-A3B"])
def test_ligers_experts_stop_at_adapters(model: str) -> None:
    """On an emulated H200 both stopped: "'ParamWrapper' object has no attribute 'hidden_dim'"."""
    usual = Candidate(
        model=load_model(model), method="sft", tuning="lora", use_liger_kernel=True, lora_target_modules=("q_proj",)
    )
    card = parse_cluster("1xH200").gpu
    assert stack_of(usual, card).recipe.liger_blocks
    with pytest.raises(InputError, match="stops at adapters on them"):
        stack_of(replace(usual, lora_target_modules=("all-linear",)), card)


def stack_of(candidate: Candidate, card: Gpu) -> StackRecipe:
    return stack_recipe(training_settings(candidate), card.supports_flash_attention_2)


ADAM = r"Use --set optim=adamw_torch_fused"


@pytest.mark.parametrize(
    ("method", "tuning", "pinned", "message"),
    [
        ("dpo", "full", {"optim": "adamw_8bit", "sharding": "fsdp2"}, f"adamw_8bit stops under FSDP2.*{ADAM}"),
        ("sft", "lora", {"optim": "lion_8bit", "sharding": "fsdp2"}, "lion_8bit stops under FSDP2"),
        ("sft", "full", {"precision": "fp16", "dtype": "float16", "sharding": "ddp"}, "cannot be unscaled"),
        ("grpo", "full", {"optim": "adagrad", "sharding": "zero3"}, f"adagrad stops under DeepSpeed.*{ADAM}"),
        ("sft", "lora", {"sharding": "zero3", "precision": "no", "dtype": "bfloat16"}, "Use --set dtype=float32"),
        ("dpo", "full", {"sharding": "zero3", "activation_offloading": True}, "Use --set zero_stage=2"),
        (
            "sft",
            "qlora",
            {"quantization": "int8", "activation_offloading": True, "checkpoint_offload": True},
            "Use --set offload=false",
        ),
        ("reward", "lora", {"use_liger_kernel": True}, "refuses google/gemma-3-270m as a sequence classifier"),
    ],
)
def test_what_stopped_on_an_emulated_gpu_is_refused(
    method: MethodName, tuning: Literal["full", "lora", "qlora"], pinned: dict[str, Any], message: str
) -> None:
    job = Job(model=load_model("google/gemma-3-270m"), method=method, tuning=tuning, pinned=pinned)
    with pytest.raises(InputError, match=message):
        plan(job, parse_cluster("4xA100-40G"))


@pytest.mark.parametrize(
    ("tuning", "pinned"),
    [
        ("full", {"optim": "adamw_8bit", "sharding": "fsdp1"}),
        ("full", {"precision": "fp16", "dtype": "float16", "sharding": "zero2"}),  # hiyouga/LlamaFactory#4133
        ("full", {"precision": "fp16", "dtype": "float16", "sharding": "zero3"}),
    ],
)
def test_what_runs_is_planned(tuning: Literal["full", "lora", "qlora"], pinned: dict[str, Any]) -> None:
    """bitsandbytes updates FSDP 1's parameters, and DeepSpeed scales float16 losses by itself."""
    job = Job(model=load_model("SmolLM2-135M"), method="sft", tuning=tuning, pinned=pinned)
    assert single_candidate(job, parse_cluster("4xA100-40G")).sharding == pinned["sharding"]
    found = search(SearchProblem(job=job, cluster=parse_cluster("4xA100-40G"), tuning_class="full"))
    assert found is not None and found.fits


def test_fsdp_1_is_written_as_it_was_read(tmp_path: Path) -> None:
    usual = Candidate(
        model=load_model("SmolLM2-135M"), method="sft", sharding="fsdp1", num_processes=2,
        optim="adamw_8bit",
    )  # fmt: skip
    file = tmp_path / "accelerate.yaml"
    file.write_text(launch_files(usual)["accelerate.yaml"])
    written = load_launch_config(file, None)
    assert written.settings["fsdp_version"] == 1 and not written.unmodelled
    assert candidate_fields(written.settings, "float32")["sharding"] == "fsdp1"


@pytest.mark.parametrize(
    ("model", "card", "overflows"),
    [
        ("gemma-3-1b-it", "1xT4", True),
        ("gemma-3-1b-it", "1xL4", False),  # it has bfloat16
        ("Qwen2.5-0.5B", "1xT4", False),
    ],
)
def test_activations_beyond_float16_are_said(model: str, card: str, overflows: bool) -> None:
    problem = SearchProblem(
        job=Job(model=load_model(model), method="sft", tuning="lora"), cluster=parse_cluster(card), tuning_class="lora"
    )
    found = search(problem)
    assert found is not None
    assert ("float16_overflows" in [note.code for note in notes(found, problem)]) == overflows


def test_fp16_on_a_card_with_bfloat16_is_advised_against() -> None:
    job = Job(model=load_model("gemma-3-1b-it"), method="sft", tuning="qlora", pinned={"precision": "fp16"})
    problem = SearchProblem(job=job, cluster=parse_cluster("1xL4"), tuning_class="qlora")
    found = search(problem)
    assert found is not None
    said = [sentence(note) for note in notes(found, problem) if note.code == "float16_overflows"]
    assert said and said[0].endswith("use --set bf16=true --set fp16=false")


def test_a_search_leaves_out_what_stops() -> None:
    job = Job(model=load_model("SmolLM2-360M"), method="sft", tuning="full", pinned={"optim": "adamw_8bit"})
    found = search(SearchProblem(job=job, cluster=parse_cluster("4xA100-40G"), tuning_class="full"))
    assert found is not None and found.candidate.sharding != "fsdp2"
    divided = {"sharding": "zero3", "max_length": 8192}
    job = Job(model=load_model("Llama-3.2-1B"), method="dpo", tuning="full", pinned=divided)
    cluster = parse_cluster("2xL4")
    found = search(SearchProblem(job=job, cluster=cluster, tuning_class="full", offload=True))
    assert found is not None and not found.candidate.activation_offloading
    once = {"activation_offloading": True, "quantization": "int8", "max_length": 8192}
    job = Job(model=load_model("Qwen2.5-7B"), method="sft", tuning="qlora", pinned=once)
    found = search(SearchProblem(job=job, cluster=parse_cluster("2xL40S"), tuning_class="qlora", offload=True))
    assert found is None or not found.candidate.checkpoint_offload
    job = Job(model=load_model("google/gemma-3-270m"), method="reward", tuning="full")
    found = search(SearchProblem(job=job, cluster=parse_cluster("1xH100"), tuning_class="full"))
    assert found is not None and not found.candidate.use_liger_kernel


@pytest.mark.parametrize(
    ("changes", "casts"),
    [
        ({}, True),
        ({"dtype": "bfloat16"}, True),
        ({"sharding": "ddp", "num_processes": 2}, True),
        ({"method": "sft", "lora_modules_to_save": ("lm_head",)}, True),
        ({"method": "sft"}, False),
        ({"dtype": "float32"}, False),
        ({"precision": "bf16"}, False),
        ({"sharding": "zero2", "num_processes": 2}, False),
    ],
)
def test_a_script_casts_a_score_head_that_fp16_cannot_unscale(changes: dict[str, Any], casts: bool) -> None:
    """On an emulated T4 a reward model's adapters stopped: "Attempting to unscale FP16 gradients"."""
    usual = Candidate(
        model=load_model("SmolLM2-135M"), method="reward", tuning="lora", dtype="float16", precision="fp16"
    )
    changed = replace(usual, **changes)
    assert changed.script_casts_to_float32 == casts
    assert ("parameter.data.float()" in launch_files(changed).get("train.py", "")) == casts


@pytest.mark.parametrize(("sharding", "casts"), [("ddp", True), ("zero1", False), ("zero2", False), ("zero3", True)])
def test_a_script_casts_adapters_where_a_grad_scaler_meets_them(sharding: Sharding, casts: bool) -> None:
    """DeepSpeed has no GradScaler, and ZeRO-1 and ZeRO-2 cast bfloat16 adapters to float16 all the same.

    QLoRA of SmolLM2-135M under ZeRO-2 in fp16 trained on emulated T4s without the script's cast, within 0.1 %.
    """
    usual = Candidate(
        model=load_model("SmolLM2-135M"), method="sft", tuning="lora", quantization="nf4", dtype="float16",
        precision="fp16", sharding=sharding, num_processes=2,
    )  # fmt: skip
    assert usual.script_casts_to_float32 == casts


def test_bitsandbytes_rmsprop_gets_no_bfloat16_gradients() -> None:
    usual = Candidate(
        model=load_model("SmolLM2-135M"), method="sft", tuning="full", dtype="bfloat16", optim="rmsprop_bnb"
    )
    job = Job(model=usual.model, method="sft")
    for stops in (
        usual,
        replace(usual, optim="rmsprop_bnb_8bit"),
        replace(usual, tuning="lora", quantization="nf4"),
        replace(usual, tuning="lora", method="reward"),
        replace(usual, tuning="lora", autocast_adapter_dtype=False),
        replace(usual, sharding="ddp", num_processes=2),
    ):
        with pytest.raises(InputError, match="has no kernel for bfloat16 gradients"):
            refuse_single_candidate(stops, job, parse_cluster("2xA100-40G"))
    for runs in (
        replace(usual, dtype="float32"),
        replace(usual, tuning="lora"),
        replace(usual, sharding="zero2"),
        replace(usual, tuning="lora", quantization="nf4", float32_adapters=True),
    ):
        refuse_single_candidate(runs, job, parse_cluster("2xA100-40G"))


def test_zero_3_without_mixed_precision_is_planned_in_float32() -> None:
    pinned = {"precision": "no", "sharding": "zero3"}
    job = Job(model=load_model("SmolLM2-360M"), method="sft", tuning="lora", pinned=pinned)
    found = search(SearchProblem(job=job, cluster=parse_cluster("4xA100-40G"), tuning_class="lora"))
    assert found is not None and found.candidate.dtype == "float32"


@pytest.mark.parametrize("model", ["Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen2.5-7B-Instruct-AWQ"])
def test_qlora_on_a_quantized_checkpoint_is_lora_on_it(model: str) -> None:
    """A single estimate took it for nf4, which Transformers refuses to load; a search kept the checkpoint."""
    job = Job(model=load_model(model), method="sft", tuning="qlora")
    cluster = parse_cluster("1xA100-80G")
    found = search(SearchProblem(job=job, cluster=cluster, tuning_class="qlora"))
    assert found is not None
    assert single_candidate(job, cluster).quantization == found.candidate.quantization == job.model.quantization


def test_a_search_under_fsdp_1_stores_4_bit_weights_in_the_dtype_of_the_others() -> None:
    job = Job(model=load_model("Qwen2.5-0.5B"), method="sft", tuning="qlora", pinned={"sharding": "fsdp1"})
    found = plan(job, parse_cluster("2xA100-40G")).best.candidate
    assert (found.sharding, found.bnb_4bit_quant_storage, found.dtype) == ("fsdp1", "bfloat16", "bfloat16")


@pytest.mark.parametrize("setting", [{"dp_replicate_size": 2}, {"cp_size": 2}])
def test_fsdp_1_has_no_mesh_of_several_dimensions(setting: dict[str, Any]) -> None:
    pinned = {"sharding": "fsdp1", "max_length": 1024, **setting}
    job = Job(model=load_model("Qwen2.5-0.5B"), method="sft", tuning="full", pinned=pinned)
    with pytest.raises(InputError, match=r"Use --set fsdp_version=2\.$"):
        single_candidate(job, parse_cluster("4xA100-40G"))


def test_fsdp_has_two_versions() -> None:
    with pytest.raises(InputError, match=r"fsdp_version can be 2, 1\.$"):
        Job(model=load_model("Qwen2.5-0.5B"), method="sft", pinned={"fsdp_version": 3})


HARMLESS = ("dtype", "device", "shape")  # a shard has those of the whole weight, or nobody computes with them
# Layers of other kinds that read a weight they do not call: bloom with `pretraining_tp` above 1, which nobody trains.
READ_BY_OTHERS = {"bloom"}


def weights_read_uncalled(source: str) -> set[str]:
    """`self.<module>.weight` in the `forward` methods of a modeling file, but for what is said of the weight alone."""
    methods = (each for each in ast.walk(ast.parse(source)) if isinstance(each, ast.FunctionDef))
    nodes = [node for method in methods if method.name == "forward" for node in ast.walk(method)]
    harmless = {ast.unparse(node.value) for node in nodes if isinstance(node, ast.Attribute) and node.attr in HARMLESS}
    read = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute) and node.attr == "weight"}
    return {name for name in read - harmless if re.fullmatch(r"self\.\w+\.weight", name)}


@pytest.mark.slow
def test_layers_with_a_state_are_those_that_read_a_weight_without_calling_its_module() -> None:
    """DeepSpeed does not gather such a weight for `generate`: the first rollout stops (IndexError)."""
    names = pytest.importorskip("transformers.models.auto.configuration_auto")
    models = Path(names.__file__).parents[1]
    found = set()
    for model_type in {row.model_type for row in model_rows()}:
        folder = models / names.model_type_to_module_name(model_type)
        if weights_read_uncalled((folder / f"modeling_{folder.name}.py").read_text(encoding="utf-8")):
            found.add(model_type)
    assert found - READ_BY_OTHERS == {name for name in found if architecture_of(name).state is not None}
    assert found >= {row.model_type for row in model_rows() if architecture_of(row.model_type).state is not None}


@pytest.mark.parametrize("name", ["Qwen3.5-35B-A3B", "LFM2-700M", "ibm-granite/granite-4.0-h-micro"])
def test_a_search_gathers_the_weights_of_a_model_with_convolutions_for_its_rollouts(name: str) -> None:
    job = Job(model=complete_models(print)(load_model(name)), method="grpo", pinned={"vllm": "off"})
    cluster = parse_cluster("4xL4")
    ungathered = {**UNGATHERED, "tuning": "lora", "ds3_gather_for_generation": False}
    with pytest.raises(InputError, match="stops in generate under ZeRO-3 with ds3_gather_for_generation=false"):
        refuse_single_candidate(base_candidate(replace(job, pinned=ungathered), cluster), job, cluster)
    best = search(SearchProblem(job=job, cluster=cluster, tuning_class="lora"))
    assert best is None or best.candidate.ds3_gather_for_generation


@pytest.mark.slow
def test_trl_gathers_no_shards_for_vllm_without_accelerates_fsdp() -> None:
    """Under `distributed_config` accelerate has no FSDP, so that vLLM gets DTensors, which its copies refuse."""
    torch = pytest.importorskip("torch")
    from accelerate import Accelerator
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from trl.distributed import DistributedBackend
    from trl.generation.vllm_generation import VLLMGeneration

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        generation = VLLMGeneration.__new__(VLLMGeneration)  # an engine needs a GPU
        generation.model = fully_shard(torch.nn.Linear(4, 4, bias=False))
        generation.mode, generation._dist = "server", DistributedBackend(Accelerator(cpu=True))
        ((_, weight),) = generation._iter_named_params()
        assert isinstance(weight, DTensor)
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            torch.empty(4, 4).copy_(weight)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "gpus", "refused"),
    [
        ("Qwen2.5-0.5B-Instruct-GPTQ-Int4", 2, r"the 896 inputs of o_proj .*groups of 128.*size=1\."),
        ("Qwen2.5-14B-Instruct-AWQ", 8, r"the 13824 inputs of down_proj .*size=4\."),
        ("Qwen2.5-72B-Instruct-AWQ", 8, ""),  # padded, so that 8 GPUs get whole groups
        ("Qwen2.5-7B-Instruct-GPTQ-Int8", 4, ""),
        ("Qwen/Qwen3-30B-A3B-FP8", 4, ""),  # 192 features of an expert: its blocks are made smaller
        ("Qwen/Qwen3-4B-FP8", 8, r"1216 features .* whole blocks of 128.*size=4\."),
        ("Qwen/Qwen3-8B-FP8", 8, ""),
    ],
)
def test_a_server_gets_whole_groups_of_a_quantized_checkpoint(name: str, gpus: int, refused: str) -> None:
    pinned = {"vllm_tensor_parallel_size": gpus}
    job = Job(model=load_model(name), method="async-grpo", pinned=pinned)
    cluster = parse_cluster("2x8xH100" if gpus == 8 else "8xH100")
    if not refused:
        assert plan(job, cluster).best.candidate.vllm_tensor_parallel_size == gpus
        return
    with pytest.raises(InputError, match=refused):
        plan(job, cluster)
    assert plan(replace(job, pinned={}), cluster).best.candidate.vllm_tensor_parallel_size < gpus


def test_older_releases_do_not_part_the_blocks_of_experts() -> None:
    candidate = Candidate(
        model=load_model("Qwen/Qwen3-30B-A3B-FP8"), method="async-grpo", vllm="server", vllm_tensor_parallel_size=4
    )
    parted = {version: parted_features(replace(candidate, vllm_version=version)) for version in ("0.26", "0.31")}
    assert parted == {"0.26": 192, "0.31": 0}
    assert parted_features(replace(candidate, vllm_tensor_parallel_size=16)) == 48  # blocks of 16 are too small


def test_a_server_of_several_nodes_takes_adapters_of_a_gptq_base_with_one_replica() -> None:
    """Its replicas filled a node: the refusal named use_vllm=false, which AsyncGRPO has not."""
    job = Job(model=load_model("Qwen2.5-7B-Instruct-GPTQ-Int4"), method="async-grpo", tuning="lora")
    cluster = parse_cluster("2x8xH100")
    best = plan(job, cluster).best.candidate
    assert (best.vllm_data_parallel_size, best.sends_adapters) == (1, True)
    with pytest.raises(InputError, match=r"Use --set vllm_data_parallel_size=1, or"):
        plan(replace(job, pinned={"vllm_data_parallel_size": 2}), cluster)
