"""Rows that several GPUs share: context parallel (`cp_size`) and Ulysses sequence parallel (`sp_size`)."""

import json

import pytest
import yaml
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.commands.main import run
from planner.errors import InputError
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.jobs.rules import refuse_contradictions
from planner.launch.accelerate import accelerate_yaml
from planner.launch.torchrun import sharding_settings
from planner.memory.layers.attention import exchanged_bytes, sdpa
from planner.memory.layers.autograd import Tape
from planner.memory.layers.recipe import Recipe
from planner.memory.schemes.table import scheme_of
from planner.methods import MethodName
from planner.models.catalogue import load_model
from planner.planning import plan
from planner.settings.setting import Value
from planner.units import MIB
from scripts.emulated_grid import torch_bytes

CLUSTER = parse_cluster("8xH100")
MODEL = load_model("Qwen/Qwen3-4B")
CONTEXT = Candidate(
    model=MODEL,
    method="sft",
    sharding="fsdp2",
    num_processes=8,
    max_length=32768,
    padded=False,
    per_device_train_batch_size=1,
)
ULYSSES = replace(CONTEXT, sharding="zero3", attn_implementation="flash_attention_2")


def test_each_gpu_has_its_share_of_tokens_and_of_pairs() -> None:
    shared = replace(CONTEXT, cp_size=4)
    assert (shared.tokens, shared.labelled_tokens, shared.row_tokens) == (8192, 8192, 32768)
    assert shared.scores == CONTEXT.scores // 4 == 8192 * 32768


def test_gpus_that_share_rows_see_fewer_samples_a_step() -> None:
    assert replace(CONTEXT, cp_size=4).effective_batch_size == 2


def test_ulysses_casts_the_gradients_of_a_bucket_to_float32_and_puts_them_side_by_side() -> None:
    whole = replace(ULYSSES, reduce_bucket_size=500_000_000)
    alone, shared = (scheme_of(each).gathered(each).at["backward"] for each in (whole, replace(whole, sp_size=8)))
    assert shared - alone == (2 * 4 - 2) * 500_000_000


@pytest.mark.parametrize(
    ("model", "gpus", "sp_size", "emulated_mib"),
    [("allenai/OLMoE-1B-7B-0924", "8xH100", 4, 17_755), ("Qwen/Qwen3-30B-A3B", "4x8xH100", 8, 21_304)],
)
def test_ulysses_casts_a_gradient_larger_than_the_bucket(
    model: str, gpus: str, sp_size: int, emulated_mib: int
) -> None:
    """2,048 tokens on each GPU: 2.4 and 6.7 % less without the copies of the experts' gradients."""
    cluster = parse_cluster(gpus)
    shared = replace(
        ULYSSES, model=load_model(model), attn_implementation="sdpa", max_length=2048 * sp_size, sp_size=sp_size,
        num_nodes=cluster.nodes, num_processes=cluster.num_gpus,
    )  # fmt: skip
    phases = {phase.name: phase for phase in estimate(shared, cluster).gpus[0].phases}
    assert torch_bytes(shared, cluster, phases["backward"]) / MIB == pytest.approx(emulated_mib, rel=0.021)


@pytest.mark.parametrize(("whole", "field"), [(CONTEXT, "cp_size"), (ULYSSES, "sp_size")])
def test_sharing_rows_saves_activations_and_no_states(whole: Candidate, field: str) -> None:
    alone, shared = (estimate(each, CLUSTER).gpus[0] for each in (whole, replace(whole, **{field: 8})))
    assert shared.peak_bytes < 0.7 * alone.peak_bytes
    components = [
        next(phase for phase in gpu.phases if phase.name == "optimizer_step").components for gpu in (alone, shared)
    ]
    assert components[0]["weights"] == components[1]["weights"]
    assert components[0]["optimizer_states"] == components[1]["optimizer_states"]


@pytest.mark.parametrize(("whole", "field"), [(CONTEXT, "cp_size"), (ULYSSES, "sp_size")])
def test_tokens_of_a_shared_row_are_counted_once(whole: Candidate, field: str) -> None:
    throughput = estimate(replace(whole, **{field: 8}), CLUSTER).throughput
    assert throughput.tokens_per_second * throughput.step_seconds == pytest.approx(32768)


@pytest.mark.parametrize(("field", "whole"), [("cp_size", CONTEXT), ("sp_size", ULYSSES)])
def test_the_launch_file_says_who_shares_rows(field: str, whole: Candidate) -> None:
    section = yaml.safe_load(accelerate_yaml(replace(whole, **{field: 4})))["parallelism_config"]
    assert section[f"parallelism_config_{field}"] == 4
    assert section["parallelism_config_dp_shard_size"] == 2
    assert "parallelism_config" not in yaml.safe_load(accelerate_yaml(whole))


@pytest.mark.parametrize(
    ("method", "pinned", "message"),
    [
        ("sft", {"cp_size": 2, "sharding": "zero3"}, "cp_size 2 is planned with FSDP2 only. Use"),
        ("sft", {"sp_size": 2, "sharding": "fsdp2"}, "sp_size 2 is planned with ZeRO-3 only. Use"),
        ("grpo", {"cp_size": 2, "sharding": "fsdp2"}, "which TRL's sft does, not grpo"),
        ("sft", {"cp_size": 3, "sharding": "fsdp2"}, "cp_size 3 does not divide num_processes 8. Use --set cp_size=2"),
        ("sft", {"cp_size": 2, "sp_size": 2, "sharding": "fsdp2"}, "either cp_size or sp_size above 1"),
        ("sft", {"cp_size": 2, "sharding": "fsdp2", "packing": True}, "TRL refuses packing with it"),
        ("sft", {"dp_replicate_size": 2, "sharding": "zero3"}, r"is FSDP2's hybrid sharding \(here: ZeRO-3\)\. Use"),
        (
            "sft",
            {"dp_replicate_size": 3, "sharding": "fsdp2"},
            "leaves no equal groups of several of the 8 processes",
        ),
        (
            "sft",
            {"dp_replicate_size": 2, "cp_size": 2, "sharding": "fsdp2"},
            "are not planned together. Drop one",
        ),
        ("sft", {"cp_size": 8, "sharding": "fsdp2", "max_length": 1000}, "no multiple of 16. Use --max-length 992"),
    ],
)
def test_what_the_libraries_refuse_is_refused(method: MethodName, pinned: dict[str, Value], message: str) -> None:
    with pytest.raises(InputError, match=message):
        refuse_contradictions(Job(model=MODEL, method=method, pinned=pinned), CLUSTER)


def test_a_search_keeps_pinned_shares_and_the_effective_batch() -> None:
    job = Job(model=MODEL, method="sft", pinned={"cp_size": 4, "sharding": "fsdp2", "max_length": 32768})
    best = plan(job, CLUSTER).best
    assert best is not None
    assert (best.candidate.cp_size, best.candidate.attn_implementation) == (4, "sdpa")
    assert best.candidate.effective_batch_size == 16


@pytest.mark.parametrize(("share", "kind"), [("cp_size", "fsdp_version"), ("sp_size", "zero_stage")])
def test_a_pinned_share_has_the_sharding_that_it_needs(
    share: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was refused: "cp_size 2 is planned with FSDP2 only"."""
    asked = ["--model=Qwen3-4B", "--gpus=8xH100", "--method=sft", "--tuning=lora", "--max-length=32768"]
    assert run([*asked, "--json", "--quiet", f"--set={share}=2"]) == 0
    settings = json.loads(capsys.readouterr().out)["best"]["settings"]
    assert settings[share] == 2 and kind in settings


def test_a_row_of_a_million_tokens_takes_the_seconds_that_trl_measured(capsys: pytest.CaptureFixture[str]) -> None:
    """TRL 1.13's release notes: Qwen3-8B on eight H100, 380 s. It was refused."""
    asked = ["--model=Qwen3-8B", "--gpus=8xH100", "--method=sft", "--tuning=full", "--max-length=1048576"]
    assert run([*asked, "--json", "--quiet", "--set=cp_size=8", "--set=dtype=bfloat16"]) == 0
    best = json.loads(capsys.readouterr().out)["best"]
    assert best["settings"]["gradient_checkpointing_kwargs"]["offload"] is True
    seconds = best["throughput"]["step_seconds"] / best["settings"]["gradient_accumulation_steps"]
    assert seconds == pytest.approx(380, rel=0.1)


def test_exchanged_keys_and_values_of_a_layer_are_counted() -> None:
    """4,096 query elements of a token and 2,048 of its key and value: see the formula's docstring."""
    q, kv, recipe = 4096, 2048, Recipe(weight_width=2, autocast_width=0, trainable=True)
    block = MODEL.layer_kinds[0][0].attention
    ring, ulysses = replace(recipe, ring_gpus=8), replace(recipe, ulysses_gpus=8)
    forward, backward = exchanged_bytes(ring, block, 2)
    assert forward == 8 * kv * 2 + 4 * q * 4
    assert backward == 8 * kv * 2 + (q + 3 * kv) * 4 + (2 * kv + q - (kv + 2 * q) // 2) * 2
    assert exchanged_bytes(ulysses, block, 2) == ((3 * q + kv) * 2, 0)
    assert exchanged_bytes(recipe, block, 2) == (0, 0)


def test_ulysses_repeats_heads_of_keys_that_are_fewer_than_its_gpus() -> None:
    """deepspeed 0.19.8, `UlyssesSPAttentionHF`: 2 heads of 128 for 8 GPUs are 4 copies of keys and of values."""
    block = load_model("Qwen2.5-3B").layer_kinds[0][0].attention
    saved = {}
    for gpus in (1, 2, 8):
        recipe = Recipe(weight_width=2, autocast_width=0, trainable=True, ulysses_gpus=gpus)
        tape = Tape()
        q, k, v = (tape.leaf((size, 0, 0), 2) for size in (block.q_dim, block.k_dim, block.v_dim))
        before = tape.total[0]
        result = sdpa(tape, recipe, block, q, k, v)
        saved[gpus] = tape.total[0] - before
        assert result.elements[0] == block.q_dim
    assert saved[2] == saved[1]
    assert saved[8] - saved[2] == 4 * 2 * (2 * 128) * 2  # beside the keys and values of the layer itself


def test_a_wide_feed_forward_block_does_not_run_beside_the_ring() -> None:
    """Its backward pass was counted with what the ring holds in the attention's: 65.6 GB for the 56.2 of trl#6846."""
    million = replace(
        CONTEXT,
        model=load_model("Qwen/Qwen3-8B"),
        cp_size=8,
        max_length=1_048_576,
        gradient_checkpointing=True,
        checkpoint_offload=True,
    )
    phase = next(phase for phase in estimate(million, CLUSTER).gpus[0].phases if phase.name == "backward")
    tensors = phase.total_bytes - phase.components["fragmentation"] - phase.components["runtime"]
    assert tensors == pytest.approx(56.2e9, rel=0.03)


@pytest.mark.parametrize(("whole", "field"), [(CONTEXT, "cp_size"), (ULYSSES, "sp_size")])
def test_sharing_a_row_costs_seconds_of_communication(whole: Candidate, field: str) -> None:
    alone, shared = (estimate(each, CLUSTER).throughput for each in (whole, replace(whole, **{field: 8})))
    assert shared.seconds["communication"] > alone.seconds["communication"]
    assert shared.tokens_per_second < alone.tokens_per_second


def test_hybrid_sharding_is_in_the_launch_file_and_read_back() -> None:
    hybrid = replace(CONTEXT, dp_replicate_size=2)
    section = yaml.safe_load(accelerate_yaml(hybrid))["parallelism_config"]
    assert (section["parallelism_config_dp_replicate_size"], section["parallelism_config_dp_shard_size"]) == (2, 4)
    assert not {"parallelism_config_sp_backend", "parallelism_config_cp_backend"} & section.keys()


def test_a_copy_of_the_model_on_each_node_takes_its_bytes() -> None:
    whole, hybrid = (
        estimate(replace(CONTEXT, dp_replicate_size=size), CLUSTER).gpus[0].phases[-1].components for size in (1, 2)
    )
    assert hybrid["weights"] == pytest.approx(2 * whole["weights"], rel=0.01)
    assert hybrid["optimizer_states"] == pytest.approx(2 * whole["optimizer_states"], rel=0.01)


@pytest.mark.parametrize("changes", [{"cp_size": 2}, {"dp_replicate_size": 2}])
def test_torchrun_has_no_file_for_shared_rows_and_copies(changes: dict[str, int]) -> None:
    with pytest.raises(InputError, match="Use --launcher accelerate"):
        sharding_settings(replace(CONTEXT, **changes))


def test_longer_rows_that_take_several_gpus_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--model=Llama-3.1-8B", "--gpus=4xA100-40G", "--method=sft", "--tuning=lora", "--optimize=max-length"]
    assert run([*asked, "--json", "--set=use_liger_kernel=false"]) == 0
    report = json.loads(capsys.readouterr().out)
    lengths = {other["label"]: other["settings"]["max_length"] for other in report["alternatives"]}
    assert lengths["with shared rows"] > lengths["with offloading"] > report["best"]["settings"]["max_length"]
