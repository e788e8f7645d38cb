"""Logs of runs that ran out of memory: the facts read from them and the plan that fits. From public issues."""

import io
import itertools
import json
import os
import re
import time
import tracemalloc
from pathlib import Path
from typing import get_args

import jsonschema
import pytest

from planner.commands.main import run
from planner.diagnose.advice import advice, describe_incident
from planner.diagnose.beside import Beside
from planner.diagnose.code_phases import phase_of
from planner.diagnose.frames import BEGIN, Frame
from planner.diagnose.incident import Activity, Incident
from planner.diagnose.job import REPLANNED_SETTINGS, TAKES_HOST_MEMORY, Diagnosis
from planner.diagnose.log import BLOCK, incidents, read_incidents, reported_incidents
from planner.diagnose.messages import MESSAGES
from planner.errors import InputError
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.models.catalogue import load_model
from planner.report.diagnosis import diagnosis_table
from planner.report.documents.schema import json_schema
from planner.search.knobs import KNOBS, SearchProblem
from planner.units import GIB, MIB

LOGS = Path(__file__).with_name("logs")
# Seconds of CPU time for each text of LONG_TEXTS; the slowest took 2.6 on a busy machine.
QUICK_SECONDS = 10
METRICS = "{'loss': 1.9, 'memory/max_active (GiB)': 31.4, 'memory/device_reserved (GiB)': 40.2, 'lr': 1e-05}\n"
LONG_TEXTS = {
    "metrics": lambda log: METRICS * 100_000 + log,
    "module names": lambda log: "[INFO|trainer.py:2078] 2024-06-01 16:22:16,125 >> memory 3\n" * 100_000 + log,
    "tracebacks": lambda log: '  File "/x/y.py", line 3, in f\n' * 100_000 + log,
    "incidents": lambda log: "".join(log.replace("130.00 MiB", f"{count}.00 MiB") for count in range(3000)),
    "ranks": lambda log: "".join(log.replace("rank0", f"rank{count}") for count in range(3000)),
    "digits": lambda log: "1" * 200_000 + "\n" + log,
    "digits in a message": lambda log: "CUDA out of memory. Tried to allocate " + "1" * 5_000_000 + "\n" + log,
    "a progress bar": lambda log: (
        "\r".join(f" {count}/100000 [00:00<?, ?it/s]" for count in range(200_000)) + "\n" + log
    ),
    "slashes": lambda log: "/" * 5_000_000 + ".py:\n" + log,
}
LINES = (
    "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "Failed to CUDA calloc async 608 bytes",
    "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when initializing "
    "the engine.",
    "ValueError: The model's max seq len (32768) is larger than the maximum number of tokens that can be stored in KV "
    "cache (12345). Try ..",
    "AssertionError: Error in memory profiling. Initial free memory 8.46 GiB, current free memory 12.98 GiB.",
    "AssertionError: Expandable segments are not compatible with memory pool. Please track ..",
    "RuntimeError: DataLoader worker (pid 412) is killed by signal: Killed.",
    "RuntimeError: [enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 1073741824 bytes.",
    "RuntimeError: MPS backend out of memory (MPS allocated: 5.56 GB, other allocations: 1.10 GB, max allowed: 6.80 "
    "GB). Tried to allocate 768.00 MB on private pool.",
)
# Texts of public GitHub issues ("source" is owner/repository#number), shortened (ends, frames, a launcher's arguments),
# with the facts to read and what the description and the advice say, and do not say. kind null: no lack of memory.
MESSAGE_TEXTS = [
    json.loads(line)
    for line in Path(__file__).with_name("data").joinpath("messages.jsonl").read_text(encoding="utf-8").splitlines()
]
LIBRARY_MESSAGES = [
    json.loads(line)
    for line in Path(__file__).with_name("data").joinpath("library_messages.jsonl").read_text("utf-8").splitlines()
]
# Logs of public issues, reduced, and logs of a kind: what the answer says without a job, and what it must not say. kind
# null: no lack of memory, answered with the first error.
DIAGNOSED_LOGS = [
    json.loads(line)
    for line in Path(__file__).with_name("data").joinpath("diagnosed_logs.jsonl").read_text("utf-8").splitlines()
]
MOST_ADVICE = 5  # lines that a reader in trouble still reads
ROUNDING_GIB = 0.02  # figures are printed to 0.01 GiB, and differences of several figures are compared
JOB = ("--model", "Qwen2.5-7B", "--gpus", "2xA100-40G", "--method", "grpo")


def read(name: str) -> tuple[Incident, ...]:
    return incidents((LOGS / f"{name}.log").read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("name", "kind", "phase", "where"),
    [
        ("grpo_optimizer_step", "gpu", "optimizer_step", "adamw.py:606 in _multi_tensor_adamw"),
        ("dpo_wrapped", "gpu", "loss", "dpo_trainer.py:1410 in compute_loss"),
        ("rollout", "gpu", "rollout", "modeling_qwen2.py:196 in forward"),
        ("before_2_1", "gpu", "backward", "train.py:605 in main"),
        ("shared_card", "gpu", None, ""),
        ("vllm_start", "engine_start", None, ""),
        ("vllm_length", "engine_length", None, ""),
        ("host_killed", "killed", None, ""),
        ("wake_up", "engine_wake", "rollout", "cumem.py:75 in create_and_map"),
        ("gathered_to_generate", "gpu", "rollout", "partition_parameters.py:2224 in __enter__"),
        ("engine_init", "gpu", "load", "llm_engine.py:429 in _initialize_kv_caches"),
        ("rich_traceback", "gpu", "backward", "accelerator.py:2125 in backward"),
        ("more_free_than_asked", "gpu", None, ""),
    ],
)
def test_a_log_tells_what_ran_out_and_in_which_phase(name, kind, phase, where):
    (incident,) = read(name)
    assert (incident.kind, incident.phase, incident.where) == (kind, phase, where)


@pytest.mark.parametrize("size", ["2684354560", "2.50GiB (2684354560", "2.5G (2684354560"])
def test_an_allocator_elsewhere_says_the_size_in_bytes(size):
    (incident,) = incidents(f"failed to allocate {size} bytes) from device: CUDA_ERROR_OUT_OF_MEMORY")
    assert incident.sizes["tried"] == 2684354560


def test_the_figures_of_a_message_are_bytes():
    (incident,) = read("grpo_optimizer_step")
    sizes = {"tried": 130 * MIB, "total": round(94.99 * GIB), "free": round(87.19 * MIB), "process": round(94.88 * GIB)}
    assert incident.sizes == sizes | {"allocated": round(93.10 * GIB), "unallocated": round(1.02 * GIB)}
    assert (incident.rank, incident.gpu, incident.line) == ("rank0", 0, 15)
    assert incident.outside_bytes == round(94.88 * GIB) - round(93.10 * GIB) - round(1.02 * GIB)
    assert incident.fragmented


def test_a_number_that_a_terminal_has_broken_in_two_is_one_number():
    (incident,) = read("dpo_wrapped")
    assert incident.sizes["allocated"] == round(40.30 * GIB)


def test_of_the_processes_on_a_card_those_of_others_are_counted():
    (incident,) = read("shared_card")
    listed = sum(
        round(float(size) * unit) for size, unit in (("6.79", GIB), ("514.00", MIB), ("4.93", GIB), ("894.00", MIB))
    )
    assert incident.sizes["process"] == round(6.79 * GIB)
    assert incident.sizes["others"] == listed - incident.sizes["process"]
    assert any(line.startswith("3 other processes hold 6.30 GiB") for line in advice(incident))


def test_reserved_less_allocated_is_unused_before_torch_2_1():
    (incident,) = read("before_2_1")
    assert incident.sizes["unallocated"] == round(68.48 * GIB) - round(63.19 * GIB)
    assert (incident.gpu, incident.fragmented) == (3, False)


def test_an_engine_is_told_the_share_that_would_start_and_the_length_that_fits():
    (start,), (length,) = read("vllm_start"), read("vllm_length")
    assert "vllm_gpu_memory_utilization=0.51 is the largest" in advice(start)[0]
    assert advice(length)[0].startswith("max_model_len=82944 is the longest")
    assert advice(length, of_job=True)[0].startswith("vllm_max_model_length=82944 is the longest")
    assert describe_incident(length).endswith(
        "a sequence of max_model_len 131,072 needs a KV cache of 34.00 GiB, there were 21.50 GiB"
    )


def test_a_process_that_its_launcher_killed_did_not_lack_main_memory():
    text = (LOGS / "rollout.log").read_text(encoding="utf-8") + (LOGS / "host_killed.log").read_text(encoding="utf-8")
    assert [incident.kind for incident in incidents(text)] == ["gpu"]


def test_a_policy_that_is_made_whole_to_generate_need_not_be() -> None:
    (incident,) = read("gathered_to_generate")
    assert advice(incident)[0].startswith("ds3_gather_for_generation=false")


def test_where_more_was_free_than_asked_nothing_is_said_of_fragmentation() -> None:
    (incident,) = read("more_free_than_asked")
    assert incident.had_room and [line.split(":")[0] for line in advice(incident)] == [
        "more was free than was asked for"
    ]


def test_a_folder_that_is_named_like_shared_memory_is_a_disk(monkeypatch, capsys):
    log = "OSError: [Errno 28] No space left on device: '/mnt/data/dev/shm/x'"
    monkeypatch.setattr("sys.stdin", io.StringIO(log))
    run(["diagnose", "-"])
    assert "/dev/shm is full" not in capsys.readouterr().out


def test_each_rank_is_told_of_once():
    lines = (LOGS / "grpo_optimizer_step.log").read_text(encoding="utf-8")
    assert [incident.rank for incident in incidents(lines + lines + lines.replace("rank0", "rank1"))] == [
        "rank0",
        "rank1",
    ]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", "library"),
        ("RuntimeError: CUDA error: out of memory", "library"),
        ("Failed to CUDA calloc async 608 bytes", "communication"),
        (
            "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when "
            "initializing the engine.",
            "engine_cache",
        ),
        ("AssertionError: Expandable segments are not compatible with memory pool. Please track ..", "engine_pool"),
        ("CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62", "engine_wake"),
        ("RuntimeError: DataLoader worker (pid 412) is killed by signal: Killed.", "host"),
        (
            "RuntimeError: [enforce fail at alloc_cpu.cpp:114] DefaultCPUAllocator: can't allocate memory: you tried "
            "to allocate 1073741824 bytes.",
            "host",
        ),
        (
            "HIP out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 63.98 GiB of which 0 bytes "
            "is free.",
            "gpu",
        ),
    ],
)
def test_every_kind_of_message_is_known_and_said_in_a_line(line, kind):
    (incident,) = incidents(line)
    assert incident.kind == kind
    assert "\n" not in describe_incident(incident)


@pytest.mark.parametrize("name", LONG_TEXTS)
def test_a_long_log_is_read_quickly_to_its_end(name):
    text = LONG_TEXTS[name]((LOGS / "grpo_optimizer_step.log").read_text(encoding="utf-8"))
    began = time.process_time()
    assert "gpu" in kinds(text)
    assert time.process_time() - began < QUICK_SECONDS


@pytest.mark.slow
def test_a_log_is_read_in_memory_that_does_not_grow_with_it(tmp_path):
    path = tmp_path / "train.log"
    with path.open("w", encoding="utf-8") as log:
        for _ in range(60):
            log.write(METRICS * 1000)
        log.write((LOGS / "rollout.log").read_text(encoding="utf-8"))
    tracemalloc.start()
    try:
        assert [incident.kind for incident in read_incidents(str(path))] == ["gpu"]
        assert tracemalloc.get_traced_memory()[1] < path.stat().st_size / 4
    finally:
        tracemalloc.stop()


def test_lines_are_counted_where_blocks_are_skipped():
    message = (LOGS / "shared_card.log").read_text(encoding="utf-8")
    (incident,) = incidents(METRICS * 5000 + message)
    assert incident.line == 5001 and incident.sizes["total"] == round(14.74 * GIB)


@pytest.mark.parametrize("offset", range(0, 1200, 50))
def test_a_message_that_a_block_ends_in_is_read_whole(offset):
    message = (LOGS / "dpo_wrapped.log").read_text(encoding="utf-8")
    filler = "." * 63 + "\n"
    (incident,) = incidents(
        filler * (BLOCK // 64 - 1) + "x" * (64 - offset % 64) + "\n" * (offset // 50) + "\n" + message
    )
    assert incident.sizes["allocated"] == round(40.30 * GIB) and incident.phase == "loss"


@pytest.mark.parametrize("path", ["fifo", "/dev/zero", "."])
def test_only_regular_files_are_read(path, tmp_path, capsys):
    if path == "fifo":
        path = str(tmp_path / "fifo")
        os.mkfifo(path)
    assert run(["diagnose", path]) == 2
    assert "cannot be read: " in capsys.readouterr().err


def test_every_message_is_found_by_its_first_line():
    samples = [*(path.read_text(encoding="utf-8") for path in LOGS.glob("*.log")), *LINES]
    samples += [sample["text"] for sample in LIBRARY_MESSAGES]
    unseen = [
        message.pattern
        for message in MESSAGES
        if not any(re.search(message.pattern, text) and message.kind in kinds(text) for text in samples)
    ]
    assert unseen == []


def kinds(text: str) -> set[str]:
    return {incident.kind for incident in incidents(text)}


@pytest.mark.parametrize("sample", MESSAGE_TEXTS, ids=[sample["source"] for sample in MESSAGE_TEXTS])
def test_a_published_message_is_read_and_explained(sample):
    found = incidents(sample["text"])
    assert [incident.kind for incident in found] == ([sample["kind"]] if sample["kind"] else [])
    for incident in found:
        facts = {"phase": incident.phase, "rank": incident.rank, "gpu": incident.gpu}
        assert {name: facts[name] for name in facts if name in sample} == {
            name: sample[name] for name in facts if name in sample
        }
        for name, gib in sample.get("gib", {}).items():
            assert incident.sizes[name] / GIB == pytest.approx(gib, abs=ROUNDING_GIB)
        text = "\n".join([describe_incident(incident), *advice(incident)])
        assert [part for part in sample["says"] if part not in text] == []
        assert [part for part in sample["silent"] if part in text] == []


@pytest.mark.parametrize("sample", DIAGNOSED_LOGS, ids=[sample["source"] for sample in DIAGNOSED_LOGS])
def test_a_log_is_answered_by_the_phase_in_which_it_stopped(sample):
    if sample["kind"] is None:
        with pytest.raises(InputError) as refused:
            reported_incidents(sample["text"])
        text = str(refused.value)
    else:
        found = reported_incidents(sample["text"])
        assert [(incident.kind, incident.phase) for incident in found] == [(sample["kind"], sample["phase"])]
        text = " ".join(diagnosis_table(Diagnosis(incidents=found), 100).plain.split())
        assert all((incident.kind != "foreign") <= len(advice(incident)) <= MOST_ADVICE for incident in found)
    assert [part for part in sample["says"] if part not in text] == []
    assert [part for part in sample["silent"] if part in text] == []


@pytest.mark.parametrize(
    ("log", "said"),
    [
        (
            "step 1\n[rank1]: RuntimeError: CUDA error: invalid argument\n",
            "in line 2: RuntimeError: CUDA error: invalid",
        ),
        (
            "[rank0]:[E110 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL\n",
            "in line 1: [E110 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught collective operation timeout",
        ),
        ("a\nb\nValueError: no such column\nKeyError: 'text'\n", "in line 3: ValueError: no such column"),
        (
            "error: *** JOB 7 ON gpu1 CANCELLED AT 2026-05-01T12:00:00 DUE TO TIME LIMIT ***\nKilled\n",
            "in line 1: error: *** JOB 7 ON gpu1 CANCELLED AT 2026-05-01T12:00:00 DUE TO TIME LIMIT",
        ),
        (
            'Traceback (most recent call last):\n  File "a.py", line 3, in f\nKeyboardInterrupt\n',
            "line 3: KeyboardInterr",
        ),
        ("ncclSystemError: System call failed\n", "in line 1: ncclSystemError: System call failed"),
        (
            'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\n',
            "its last line, which says what",
        ),
        ("all went well, without Error\n", "The messages of PyTorch, vLLM, NCCL, launchers and the kernel are known."),
    ],
)
def test_a_log_without_a_lack_of_memory_is_answered_with_its_first_error(log, said, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(log))
    assert run(["diagnose", "-"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and "stdin reports no out-of-memory error" in captured.err and said in captured.err


# What changes nothing in a phase, and is never advised there.
OF_ROWS = ("per_device_train_batch_size", "a smaller batch", "max_length", "--max-length", "gradient_checkpointing")
HELPLESS = {
    "load": (*OF_ROWS, "per_device_eval", "max_completion_length", "memory_fraction", "SHARDED", "dataloader_pin"),
    "save": (*OF_ROWS, "per_device_eval", "max_completion_length"),
    "weight_sync": (*OF_ROWS, "SHARDED"),
    "optimizer_step": (*OF_ROWS[:3], "gradient_checkpointing", "SHARDED"),
    "evaluation": ("per_device_train", "SHARDED"),
}
FIGURES = (
    {},
    {"tried": GIB, "total": 80 * GIB, "free": GIB // 2, "allocated": 70 * GIB, "unallocated": GIB // 4},
    {"tried": 90 * GIB, "total": 80 * GIB, "free": GIB, "allocated": 70 * GIB, "unallocated": GIB},
    {"tried": GIB, "total": 80 * GIB, "free": 5 * GIB, "allocated": 70 * GIB, "unallocated": GIB},
)
GREW = (Beside(), Beside(step=128, steps=3000), Beside(memory=(20 * GIB, 28 * GIB, 29 * GIB)))


@pytest.mark.parametrize("kind", ["gpu", "library", "communication", "foreign"])
@pytest.mark.parametrize("phase", HELPLESS)
def test_what_cannot_help_in_a_phase_is_never_advised(phase, kind):
    # Not about what this process holds on the GPU, and vLLM's profile run, which has rows.
    other = {"pins", "first_call", "engine_starts", "engine_profiles"}
    for activity, sizes, beside, message in itertools.product(
        set(get_args(Activity)) - other, FIGURES, GREW, ("CUDA error: out of memory", "NOT_INITIALIZED", "XPU ")
    ):
        incident = Incident(
            kind=kind, line=1, rank="", gpu=0, phase=phase, where="", sizes=sizes, numbers={}, message=message,
            activity=activity, beside=beside,
        )  # fmt: skip
        said = advice(incident)
        assert said or kind == "foreign"
        assert [(word, line) for line in said for word in HELPLESS[phase] if word in line] == []


def test_the_evaluation_of_a_log_is_compared_with_the_estimate_of_one(monkeypatch, capsys):
    log = next(each["text"] for each in DIAGNOSED_LOGS if each["phase"] == "evaluation")
    monkeypatch.setattr("sys.stdin", io.StringIO(log))
    job = "--model Qwen2.5-7B --gpus 1xA100-80G --method sft --tuning lora --set eval_strategy=steps"
    assert run(["diagnose", "-", *job.split()]) == 0
    assert "the estimate of the whole evaluation" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("hiyouga/LlamaFactory#5419, reduced", "the log shows an evaluation, the job has none"),
        ("noonghunna/club-3090#58", "the log shows vLLM, the job has none"),
    ],
)
def test_a_part_of_the_run_that_the_job_has_not_is_said(source, said, monkeypatch, capsys):
    log = next(each["text"] for each in DIAGNOSED_LOGS if each["source"] == source)
    monkeypatch.setattr("sys.stdin", io.StringIO(log))
    assert run(["diagnose", "-", *JOB, "--tuning", "lora", "--json"]) == 0
    assert any(said in line for line in json.loads(capsys.readouterr().out)["compared"])


def test_a_card_that_is_not_the_job_s_is_said(monkeypatch, capsys):
    log = OUT_OF_MEMORY.replace("9 GiB", "23.52 GiB of which 1.00 GiB is free")
    monkeypatch.setattr("sys.stdin", io.StringIO(log))
    assert run(["diagnose", "-", *JOB, "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)["compared"]
    assert any("the log's GPU has 23.52 GiB, as " in line and "RTX-4090" in line for line in compared)


def test_host_memory_beside_a_job_that_fits_is_said_with_what_is_counted(monkeypatch, capsys):
    """It said that the run's GPUs were not its own, of a data loader's worker."""
    log = "RuntimeError: DataLoader worker (pid 164244) is killed by signal: Killed. "
    monkeypatch.setattr("sys.stdin", io.StringIO(log))
    job = "--model gpt2 --gpus 1xL4 --method sft --tuning lora --host-memory 64GiB"
    assert run(["diagnose", "-", *job.split()]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "of a node's 64.0 GiB of host memory are used, without datasets, data loader" in out
    assert "other processes used its GPUs" not in out


def test_a_model_that_loads_whole_was_not_loaded_as_the_job_says(monkeypatch, capsys):
    frame = (
        'Traceback (most recent call last):\n  File "/v/transformers/modeling_utils.py", line 9, in from_pretrained\n'
    )
    sizes = "79.15 GiB of which 1.00 GiB is free. Of the allocated memory 44.80 GiB is allocated by PyTorch"
    monkeypatch.setattr("sys.stdin", io.StringIO(frame + OUT_OF_MEMORY.replace("9 GiB", sizes)))
    job = "--model Qwen2.5-7B --gpus 1xA100-80G --method sft --tuning qlora"
    assert run(["diagnose", "-", *job.split()]) == 0
    assert "was not in effect as it loaded" in " ".join(capsys.readouterr().out.split())


def test_frames_of_an_older_trl_ask_for_its_release(monkeypatch, capsys):
    log = next(each["text"] for each in DIAGNOSED_LOGS if each["source"] == "an older TRL")
    monkeypatch.setattr("sys.stdin", io.StringIO(log))
    assert run(["diagnose", "-", "--model", "Qwen2.5-7B", "--gpus", "1xA100-80G", "--method", "dpo"]) == 0
    assert "the log is of TRL 0.28.0 or older" in " ".join(capsys.readouterr().out.split())


def test_published_messages_are_of_fifty_issues():
    assert len({sample["source"] for sample in MESSAGE_TEXTS}) >= 50


def test_a_batch_that_is_moved_to_the_card_is_not_scored():
    frames = (
        Frame("/x/site-packages/transformers/trainer.py", "2043", "training_step"),
        Frame("/x/site-packages/transformers/trainer.py", "9", "_prepare_inputs"),
    )
    assert phase_of(frames) == "forward"


@pytest.mark.parametrize("tuning_class", ["full", "lora", "qlora"])
@pytest.mark.parametrize("offload", [False, True])
def test_what_a_search_turns_is_chosen_again(tuning_class, offload):
    for method in ("sft", "grpo", "online-dpo"):
        problem = SearchProblem(
            job=Job(model=load_model("Qwen2.5-7B"), method=method),
            cluster=parse_cluster("4xH100"),
            tuning_class=tuning_class,
            offload=offload,
        )
        turned = {name for knob in KNOBS.values() for change in knob(problem) for name in change}
        assert turned - REPLANNED_SETTINGS <= {"tuning", "quantization", "dtype"}  # what is learned stays


# -- the command -------------------------------------------------------------------------------------------------------


def test_with_the_job_it_says_what_was_expected_and_what_fits(capsys):
    assert (
        run(
            [
                "diagnose",
                str(LOGS / "rollout.log"),
                *JOB,
                "--tuning",
                "lora",
                "--batch-size",
                "16",
                "--max-completion-length",
                "2048",
            ]
        )
        == 0
    )
    text = capsys.readouterr().out
    assert text.startswith("happened     GPU 0 ran out of memory in the rollout")
    assert "does not fit" in text.split("instead")[0] and "in the rollout, where it stopped" in text
    assert "fits, " in text.split("instead")[1] and "per_device_train_batch_size=" in text


def test_what_fits_keeps_the_data_and_the_optimizer_step_of_the_run(capsys):
    asked = ["--tuning", "lora", "--batch-size", "16", "--max-completion-length", "2048", "--set", "lora_r=64"]
    assert run(["diagnose", str(LOGS / "rollout.log"), *JOB, *asked, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    settings, before = report["instead"]["settings"], report["expected"]["settings"]
    assert (settings["max_completion_length"], settings["lora_r"]) == (2048, 64)
    samples = [
        each["per_device_train_batch_size"] * each["gradient_accumulation_steps"] * each["num_processes"]
        for each in (settings, before)
    ]
    assert samples[0] == samples[1]


def test_after_a_lack_of_host_memory_nothing_more_is_put_there(capsys):
    job = ["--model", "Qwen2.5-7B", "--gpus", "2xA100-40G", "--method", "sft", "--tuning", "full", "--json"]
    assert run(["diagnose", str(LOGS / "host_killed.log"), *job]) == 0
    settings = json.loads(capsys.readouterr().out)["instead"]["settings"]
    assert {name for name, value in settings.items() if name in TAKES_HOST_MEMORY and value} == set()


@pytest.mark.parametrize("detail", ["dp_replicate_size", "cp_size"])
def test_gpus_that_share_states_or_rows_are_given_up_together_with_the_sharding(detail, capsys):
    job = "--model Llama-3.1-8B --gpus 2x4xA100-40G --method sft --tuning full --batch-size 64 --max-length 4096"
    pins = f"--set distributed_type=FSDP --set fsdp_version=2 --set {detail}=2"
    assert run(["diagnose", str(LOGS / "before_2_1.log"), *f"{job} {pins} --json".split()]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["instead"]["settings"].get(detail, 1) == 1


@pytest.mark.parametrize("job", [(), JOB])
def test_the_report_follows_the_schema(job, capsys):
    assert run(["diagnose", str(LOGS / "grpo_optimizer_step.log"), *job, "--json"]) == 0
    schema = json_schema()
    jsonschema.validate(json.loads(capsys.readouterr().out), schema)


def test_a_log_is_read_from_stdin(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO((LOGS / "vllm_start.log").read_text(encoding="utf-8")))
    assert run(["diagnose", "-"]) == 0
    assert "vLLM did not start" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["nowhere.log"], "nowhere.log cannot be read: No such file or directory"),
        ([str(Path(__file__).with_name("conftest.py"))], "reports no out-of-memory error"),
    ],
)
def test_what_cannot_be_diagnosed_is_one_line(asked, said, capsys):
    assert run(["diagnose", *asked]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("job", "code", "said", "shown"),
    [
        (["--model", "Qwen2.5-7B"], 2, "--gpus and --method are missing", ""),
        ([*JOB[2:], "--model", "Qwen2.5-7X"], 2, "Unknown model 'Qwen2.5-7X'", ""),
        ([*JOB, "--set", "zero_stage=2", "--set", "distributed_type=MULTI_GPU"], 2, "contradict", ""),
        ([*JOB, "--batch-size", "3", "--set", "num_generations=7"], 0, "", "it cannot be planned as given: "),
    ],
)
def test_a_job_that_does_not_plan_hides_nothing_of_what_happened(job, code, said, shown, capsys):
    assert run(["diagnose", str(LOGS / "rollout.log"), *job]) == code
    captured = capsys.readouterr()
    assert captured.out.startswith("happened     GPU 0 ran out of memory in the rollout")
    assert said in captured.err and captured.err.count("\n") == (1 if said else 0)
    assert shown in " ".join(captured.out.split())


@pytest.mark.parametrize("sample", LIBRARY_MESSAGES, ids=[sample["text"][:40] for sample in LIBRARY_MESSAGES])
def test_messages_without_pytorchs_figures_are_known_and_have_advice(sample):
    (incident,) = incidents(f"step 1\n{sample['text']}\nstep 2\n")
    assert incident.kind == sample["kind"]
    assert [word for word in sample["says"] if word not in " ".join(advice(incident))] == []


def test_a_message_that_was_cut_is_described_by_what_is_left_of_it(capsys, monkeypatch):
    cut = (
        "ValueError: To serve at least one request with the model's max seq len (40960), (34.00 GiB KV cache is needed"
    )
    monkeypatch.setattr("sys.stdin", io.StringIO(cut))
    assert run(["diagnose", "-"]) == 0
    assert "needs a KV cache of 34.00 GiB" in " ".join(capsys.readouterr().out.split())


def test_a_tip_that_quotes_the_message_is_no_error():
    assert incidents("Tip: if you see 'CUDA out of memory. Tried to allocate ...', lower the batch size.") == ()


OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 9 GiB"
)
FINISHED = "{'train_runtime': '812.4', 'train_loss': '1.2', 'epoch': '1'}"


def test_an_error_that_a_finished_run_has_caught_is_called_so():
    (incident,) = incidents(f"{OUT_OF_MEMORY}\nretrying\n{FINISHED}\n")
    assert incident.finished == 3
    assert "the run finished in line 3" in describe_incident(incident)


def test_the_error_that_ended_a_run_is_told_from_one_that_was_caught_before():
    (incident,) = incidents(f"{OUT_OF_MEMORY}\n{FINISHED}\nDefaultCPUAllocator: can't allocate memory\n")
    assert (incident.kind, incident.finished) == ("host", 0)


@pytest.mark.parametrize(
    ("file", "sharding", "setting"),
    [
        ("deepspeed/runtime/zero/stage_1_and_2.py", "zero2", "zero_stage=2"),
        ("deepspeed/runtime/zero/stage3.py", "zero3", "zero_stage=3"),
        ("torch/distributed/fsdp/_fully_shard/_fsdp_param.py", "fsdp", "distributed_type=FSDP --set fsdp_version=2"),
    ],
)
def test_a_log_that_shows_sharding_is_not_read_as_ddp(file, sharding, setting, monkeypatch, capsys):
    log = f'Traceback (most recent call last)\n  File "/venv/{file}", line 7, in step\n{OUT_OF_MEMORY}\n'
    assert incidents(log)[0].sharding == sharding
    monkeypatch.setattr("sys.stdin", io.StringIO(log))
    assert run(["diagnose", "-", *JOB, "--tuning", "full"]) == 0
    assert f"add --set {setting}" in " ".join(capsys.readouterr().out.split())


def test_an_error_while_a_sharded_model_is_gathered_to_save_it_is_in_the_save():
    frames = (
        Frame("/v/transformers/trainer.py", "3000", "_save_checkpoint"),
        Frame("/v/torch/distributed/checkpoint/state_dict.py", "1", "get_model_state_dict"),
    )
    assert phase_of(frames) == "save"
    assert phase_of(frames[1:]) == "save"


def test_the_tensors_of_the_log_stand_beside_those_of_the_estimate(capsys):
    asked = ["--tuning", "lora", "--batch-size", "16", "--max-completion-length", "2048"]
    assert run(["diagnose", str(LOGS / "rollout.log"), *JOB, *asked]) == 0
    assert "in tensors with the request that failed, the estimate of the whole rollout" in " ".join(
        capsys.readouterr().out.split()
    )


@pytest.mark.parametrize(
    ("said", "phase", "advised"),
    [
        ("Loading safetensors checkpoint shards:  50% Completed | 2/4 [00:10<00:10,  5.00s/it]", "load", "host memory"),
        ("Tokenizing train dataset:  45%|####5     | 4500/10000 [00:12<00:14, 375.00 examples/s]", None, "num_proc"),
        ("Map (num_proc=32):  45%|####5     | 4500/10000 [00:12<00:14, 375.00 examples/s]", None, "num_proc"),
        ("Generating train split: 12000 examples [00:12, 375.00 examples/s]", None, "num_proc"),
        (
            "Computing reference log probs for train dataset:  3%|3    | 3/100 [00:12<06:14,  3.9s/it]",
            "score",
            "offload",
        ),
        ("Saving model checkpoint to out/checkpoint-500", "save", "save_only_model"),
        ("Map: 100%|##| 9/9 [00:12<00:00, 1.00 examples/s]\n{'loss': 1.2, 'epoch': 0.1}", None, "--host-memory"),
    ],
)
def test_what_a_killed_run_was_doing_is_read_from_its_lines(said, phase, advised):
    (incident,) = incidents(f"***** Running training *****\n{said}\nKilled\n")
    assert (incident.kind, incident.phase) == ("killed", phase)
    assert advised in " ".join(advice(incident))


@pytest.mark.parametrize(
    ("file", "function", "advised"),
    [
        ("torch/utils/data/_utils/fetch.py", "fetch", "dataloader_num_workers"),
        ("datasets/arrow_dataset.py", "map", "dataset_num_proc"),
        ("pandas/io/json/_json.py", "read_json", "streaming"),
    ],
)
def test_host_memory_that_rows_take_is_told_from_that_of_a_model(file, function, advised):
    (incident,) = incidents(
        f'Traceback (most recent call last):\n  File "/venv/{file}", line 7, in {function}\nMemoryError\n'
    )
    assert incident.kind == "host"
    assert advised in " ".join(advice(incident)) and "--host-memory" not in " ".join(advice(incident))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("RuntimeError: cudaGraph pool exceeded GPU memory while it was captured", "library"),
        ("ValueError: there is not enough GPU memory for 12 slots", "library"),
        ("OSError: could not allocate 4096 MB for the shared cache", "host"),
        ("ThirdPartyError: insufficient system memory to start workers", "host"),
        ("ImportError: libgomp.so.1: cannot allocate memory in static TLS block", None),
        ("ValueError: not enough values to unpack (expected 2, got 1)", None),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", None),
        ("KeyError: 'memory'", None),
    ],
)
def test_an_error_in_words_of_its_own_is_read_too(error, kind):
    assert [incident.kind for incident in incidents(f"step 1\n{error}\n")] == ([kind] if kind else [])


ENDED = (
    "Loading checkpoint shards:  47%|####      | 7/15 [03:24<03:59, 29.97s/it]W0806 20:07:54.546301 148486 "
    "torch/distributed/elastic/multiprocessing/api.py:897] Sending process 148593 closing signal SIGTERM\n",
    "[INFO|modeling_utils.py:1770] >> loading weights file model/pytorch_model.bin\n"
    "[2023-03-04 18:21:36,276] [INFO] [launch.py:318:sigkill_handler] Killing subprocess 3689226\n",
)


@pytest.mark.parametrize("log", ENDED)
def test_a_launcher_that_ended_the_processes_is_said_with_what_ran(log: str) -> None:
    (incident,) = reported_incidents(log)
    assert (incident.kind, incident.phase) == ("unsaid", "load")
    assert describe_incident(incident).startswith("a launcher ended the processes in the load")
    assert "-9 or 137 is most often host memory" in advice(incident)[0] and "zero.Init" in advice(incident)[-1]
    with pytest.raises(InputError, match="its first error is another, in line 1: ValueError: no such column"):
        reported_incidents(f"ValueError: no such column\n{log}")


@pytest.mark.parametrize(
    "log",
    [
        "(WorkerDict pid=9238)     self.update_running_batch()\nCUDA error: an illegal memory access was encountered\n",
        " WARNING runner.py:143] Failed to pickle inputs: CUDA error: an illegal memory access was encountered\n",
    ],
)
def test_an_error_of_cuda_that_is_no_lack_of_memory_is_the_first_error(log: str) -> None:
    with pytest.raises(InputError, match=r"its first error is another, in line \d+: .*an illegal memory access"):
        reported_incidents(log)


def test_vllms_allocator_is_read_in_either_case() -> None:
    (found,) = reported_incidents("cuda error: out of memory at /workspace/csrc/cumem_allocator.cpp:62\n")
    assert found.kind == "engine_wake"


def test_a_tensor_of_4_tib_is_a_wrong_shape_and_no_lack_of_host_memory() -> None:
    (found,) = reported_incidents(
        "Loading checkpoint shards: 100%|####| 3/3 [00:06<00:00,  2.08s/it]\nRuntimeError: [enforce fail at "
        "alloc_cpu.cpp:83] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 4398046511104 "
        "bytes. Error code 12 (Cannot allocate memory)\n"
    )
    assert "wrong shape" in describe_incident(found)
    said = " ".join(advice(found))
    assert "no node holds that in one tensor" in said
    assert "--host-memory" not in said and "in the load" not in describe_incident(found)


def test_a_ray_worker_that_died_is_not_said_to_have_got_signal_9() -> None:
    (found,) = reported_incidents("(raylet) A worker died or was killed while executing a task by an unexpected error.")
    assert describe_incident(found).startswith("a Ray worker died: most often the host memory ran out, else it crashed")


def test_the_step_is_read_from_a_bar_with_the_epoch_before_it() -> None:
    (found,) = reported_incidents(
        "Epoch 1:  13%|###       | 120/900 [10:03<1:05:00,  5.01s/it]\n"
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=12.0. Some of the step tasks have been OOM Killed.\n"
    )
    assert (found.beside.step, found.beside.steps) == (121, 900)


def test_verbose_shows_what_the_answer_was_read_from(monkeypatch, capsys):
    log = (
        "$ python train.py --gradient_checkpointing true --per_device_train_batch_size 1\n" + BEGIN + "\n"
        '  File "/x/acme/loop.py", line 3, in run_validation\n    score(b)\n'
        '  File "/x/acme/nets.py", line 9, in blend\n    torch.cat(a)\n'
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    shown = {}
    for flag in ((), ("-v",)):
        monkeypatch.setattr("sys.stdin", io.StringIO(log))
        assert run(["diagnose", "-", *flag]) == 0
        shown[flag] = " ".join(capsys.readouterr().out.split())
    assert "in the evaluation" in shown[()] and "read from" not in shown[()]
    assert "the traceback: loop.py:3 in run_validation > nets.py:9 in blend" in shown["-v",]
    assert "settings in effect: a batch of 1, checkpointing" in shown["-v",]


def test_what_is_offered_needs_less_than_what_ran_out(monkeypatch, capsys):
    message = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 600.00 MiB."
    monkeypatch.setattr("sys.stdin", io.StringIO(f"{message} GPU 0 has a total capacity of 79.25 GiB.\n"))
    job = "--model Qwen2.5-7B --gpus 1xH100-80G --method dpo --lora-r 16 --set per_device_train_batch_size=2"
    assert run(["diagnose", "-", "--json", *job.split()]) == 0
    report = json.loads(capsys.readouterr().out)
    peaks = [max(gpu["peak_bytes"] for gpu in report[name]["gpus"]) for name in ("instead", "expected")]
    assert peaks[0] < peaks[1]


@pytest.mark.parametrize(("tried", "is_share"), [(("6.30", "6.30"), True), (("6.30", "5.10"), False)])
def test_the_same_request_on_several_ranks_is_a_share_of_the_model(tried, is_share):
    log = "".join(
        f"torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate {size} GiB (GPU {gpu}; 47.54 GiB total "
        "capacity; 45.45 GiB already allocated; 1.49 GiB free; 45.47 GiB reserved in total by PyTorch)\n"
        for gpu, size in enumerate(tried)
    )
    first = advice(incidents(log)[0])[0]
    assert ("the same 6.30 GiB was asked for on 2 GPUs" in first) == is_share
