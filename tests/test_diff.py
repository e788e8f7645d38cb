"""`plan diff`: the facts that differ between releases, and one job under two of them."""

import json
import os
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from planner import PlanError, estimate
from planner.candidate import Candidate, known_torch
from planner.commands.exit_codes import EXIT_NOTHING_FITS, EXIT_PLANNED, EXIT_WRONG_INPUT
from planner.commands.main import run
from planner.errors import InputError
from planner.gpus.parse import parse_cluster
from planner.jobs.releases import FACTS, changes, read_releases, trl_releases
from planner.methods import NEWEST_TRL, OLDEST_TRL
from planner.models.catalogue import load_model
from planner.settings.vllm_releases import SINCE_VLLM, VLLM_VERSIONS, VllmVersion
from planner.training_stack import complete_models
from planner.units import GIB
from scripts.compare_commits import job_of_words
from scripts.freeze_estimates import arguments

ROOT = Path(__file__).resolve().parents[1]
SFT = ["--model", "Qwen2.5-0.5B", "--gpus", "1xL4", "--method", "sft"]
KNOWN = ["Qwen2.5-0.5B", "TinyLlama-1.1B", "gemma-3-270m", "Llama-3.2-1B"]
# A job for each row of FACTS, the release before, and the words of what changed.
EXAMPLES: tuple[tuple[dict[str, object], tuple[str, str], str], ...] = (
    ({"method": "dpo"}, ("1.14", "1.15"), "in chunks that build no logits, not with whole logits"),
    ({"method": "sft", "tuning": "lora", "quantization": "nf4", "use_dora": True}, ("1.14", "1.15"), "DoRA"),
    ({"method": "sdft", "tuning": "full", "dtype": "bfloat16"}, ("1.15", "1.16"), "policy's dtype, not float32"),
    ({"method": "rloo"}, ("1.9", "1.10"), "max_completion_length is 512 where nothing sets it, not 256"),
    ({"method": "grpo", "tuning": "lora", "quantization": "nf4", "vllm": "colocate"}, ("1.12", "1.13"), "bitsandbytes"),
)
# A job with a vLLM engine for each row of vLLM's FACTS, the release before and the one with it, the words.
ENGINE = {"method": "grpo", "vllm": "colocate"}
SERVER = {"method": "grpo", "vllm": "server"}
QWEN, MIXTURE, GRANITE = "Qwen2.5-7B", "Qwen3-30B-A3B", "granite-4.0-h-micro"
ENGINE_EXAMPLES: tuple[tuple[str, dict[str, object], tuple[VllmVersion, VllmVersion], str], ...] = (
    (QWEN, ENGINE, ("0.19", "0.20"), "CUDA graphs are inside vllm_gpu_memory_utilization"),
    (QWEN, ENGINE, ("0.24", "0.25"), "CUDA graphs are beside vllm_gpu_memory_utilization"),  # model runner 2
    (QWEN, ENGINE, ("0.28", "0.29"), "CUDA graphs are inside vllm_gpu_memory_utilization"),
    (QWEN, ENGINE, ("0.30", "0.31"), "on which kernels are timed, is freed"),
    (QWEN, ENGINE, ("0.24", "0.25"), "by model runner v2, not v1"),
    (MIXTURE, ENGINE, ("0.28", "0.29"), "by model runner v2, not v1"),
    ("Qwen3-8B", ENGINE, ("0.21", "0.22"), "by model runner v2, not v1"),
    ("Llama-3.1-8B", ENGINE, ("0.22", "0.23"), "by model runner v2, not v1"),
    ("Qwen2.5-7B-Instruct-GPTQ-Int4", ENGINE, ("0.24", "0.25"), "by model runner v2, not v1"),
    (QWEN, ENGINE, ("0.16", "0.17"), "the sampler sorts no logits"),
    ("gemma-3-1b-it", ENGINE, ("0.25", "0.26"), "two batches in flight, not one, in layers with a window"),
    (GRANITE, ENGINE, ("0.27", "0.28"), "prefix caching is on for models with recurrent states"),
    (MIXTURE, ENGINE, ("0.13", "0.14"), "experts compute in a buffer that stays"),
    (MIXTURE, ENGINE, ("0.31", "0.32"), "is discarded while the engine sleeps"),
    (QWEN, {**ENGINE, "vllm_tensor_parallel_size": 2}, ("0.11", "0.12"), "NCCL's buffers are outside"),
    (QWEN, ENGINE, ("0.19", "0.20"), "torch.compile times kernels at the start"),
    (QWEN, ENGINE, ("0.26", "0.27"), "on which kernels are timed, is taken from the KV cache"),
    ("Llama-3.2-1B", {**ENGINE, "vllm_enable_sleep_mode": True}, ("0.26", "0.27"), "a tied head that vLLM drops"),
    (QWEN, ENGINE, ("0.27", "0.28"), "on B200 and B300 CUDA graphs"),
    (QWEN, ENGINE, ("0.30", "0.31"), "a CUDA graph is captured for max_num_seqs sequences"),
    (QWEN, SERVER, ("0.27", "0.28"), "on cards of 160 GiB and more a server"),
    (QWEN, SERVER, ("0.32", "0.33"), "on a DGX Spark a server"),
    (QWEN, {**ENGINE, "tuning": "lora", "quantization": "nf4"}, ("0.27", "0.28"), "no bitsandbytes any more"),
    (QWEN, ENGINE, ("0.32", "0.33"), "vLLM requires torch 2.14, not 2.13"),
    (QWEN, ENGINE, ("0.30", "0.31"), "vLLM takes transformers below 5.18, not without an upper bound"),
)


def candidate(trl_version: str, **settings: object) -> Candidate:
    return Candidate(model=load_model("TinyLlama-1.1B"), trl_version=trl_version, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("settings", "releases", "words"), EXAMPLES)
def test_a_fact_of_trl_is_named_at_its_release(
    settings: dict[str, object], releases: tuple[str, str], words: str
) -> None:
    old, new = (candidate(each, **settings) for each in releases)
    found = [each for each in changes(old, new) if words in each.words]
    assert [each.since for each in found] == [releases[1]]
    far = [each for each in changes(candidate(NEWEST_TRL, **settings), candidate(OLDEST_TRL, **settings))]
    assert found[0] in far


def test_a_fact_of_torch_is_named_at_its_release() -> None:
    old = candidate(NEWEST_TRL, method="sft", torch_version="2.13", attn_implementation="sdpa")
    new = candidate(NEWEST_TRL, method="sft", torch_version="2.14", attn_implementation="sdpa")
    assert [(each.library, each.since) for each in changes(old, new)] == [("torch", "2.14")]


@pytest.mark.parametrize(("model", "settings", "releases", "words"), ENGINE_EXAMPLES)
def test_a_fact_of_vllm_is_named_at_its_release(
    model: str, settings: dict[str, object], releases: tuple[VllmVersion, VllmVersion], words: str
) -> None:
    job = Candidate(model=complete_models(print)(load_model(model)), **settings)  # type: ignore[arg-type]
    old, new = (replace(job, vllm_version=each) for each in releases)
    found = [(each.library, each.since) for each in changes(new, old) if words in each.words]
    assert found == [("vllm", releases[1])]
    assert not [*changes(*(replace(each, vllm="off") for each in (old, new)))]
    older = replace(job, vllm_version=VLLM_VERSIONS[max(0, VLLM_VERSIONS.index(releases[0]) - 1)])
    assert not any(words in each.words for each in changes(older, old))


def test_every_fact_of_vllm_has_an_example() -> None:
    walked: set[str] = set()
    for model, settings, releases, _ in ENGINE_EXAMPLES:
        job = Candidate(model=complete_models(print)(load_model(model)), **settings)  # type: ignore[arg-type]
        old, new = (replace(job, vllm_version=each) for each in releases)
        walked |= {fact.words for fact in FACTS if fact.library == "vllm" and fact.value(old) != fact.value(new)}
    assert walked == {fact.words for fact in FACTS if fact.library == "vllm"}
    # 0.24: quantized models of the listed types, which 0.25 has with all others.
    assert set(SINCE_VLLM.values()) <= {new for _, _, (_, new), _ in ENGINE_EXAMPLES} | {"0.24"}


# Every TRL wheel's extra `vllm`, METADATA.
@pytest.mark.parametrize(
    ("trl", "vllm"),
    [
        ("1.0", "0.17"), ("1.1", "0.17"), ("1.2", "0.18"), ("1.5", "0.18"), ("1.6", "0.19"), ("1.7", "0.23"),
        ("1.8", "0.23"), ("1.9", "0.25"), ("1.10", "0.26"), ("1.11", "0.27"), ("1.12", "0.27"), ("1.13", "0.28"),
        ("1.14", "0.30"), ("1.15", "0.31"), ("1.16", "0.31"),
    ],
)  # fmt: skip
def test_the_engine_is_the_newest_that_trl_takes(trl: str, vllm: str) -> None:
    assert candidate(trl, **ENGINE).vllm_release == vllm
    quantized = candidate(trl, **ENGINE, tuning="lora", quantization="nf4")
    assert quantized.vllm_release == min(vllm, "0.27")
    assert candidate(trl, **ENGINE).vllm_taken and not candidate(trl, **ENGINE, vllm_version="0.33").vllm_taken


def test_two_releases_of_vllm_are_compared(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--model", "Qwen2.5-7B", "--gpus", "2xA100-80G", "--method", "grpo", "--tuning", "lora"]
    engine = ["--set", "use_vllm=true", "--set", "vllm_mode=colocate", "--set", "vllm_max_model_length=2500"]
    engine += ["--set", "vllm_gpu_memory_utilization=0.4"]
    assert run(["diff", "vllm==0.19.1", "trl==1.16.0,vllm==0.31.0", *job, *engine, "--json"]) == EXIT_PLANNED
    found = json.loads(capsys.readouterr().out)
    assert [each["settings"]["vllm_version"] for each in found["estimates"]] == ["0.19", "0.31"]
    assert {each["library"] for each in found["changes"]} == {"vllm"}
    peaks = [each["gpus"][0]["peak_bytes"] for each in found["estimates"]]
    assert peaks[0] > peaks[1]  # graphs beside the share, not inside
    assert run(["diff", "vllm==0.27", "vllm==0.31", *job, *engine, "--vllm-version", "0.30"]) == EXIT_WRONG_INPUT
    assert "--vllm-version names one release" in capsys.readouterr().err


CARDS = [
    ("2xA100-80G", ENGINE, set()),
    ("2xB200", ENGINE, {"on B200 and B300"}),
    ("2xB200", SERVER, {"on B200 and B300", "on cards of 160 GiB"}),
    ("2xDGX-Spark", SERVER, {"on a DGX Spark"}),
]


@pytest.mark.parametrize(("gpus", "engine", "said"), CARDS)
def test_what_another_card_has_is_not_said_of_a_job(gpus: str, engine: dict[str, object], said: set[str]) -> None:
    gpu = parse_cluster(gpus, None).gpu
    old, new = (candidate(NEWEST_TRL, **engine, vllm_version=each) for each in ("0.27", "0.33"))
    found = {each.words for each in changes(old, new) if each.concerns(old, new, gpu)}
    of_cards = {words for words in found if words.startswith("on ")}
    assert len(of_cards) == len(said) and all(any(words.startswith(each) for words in of_cards) for each in said)


def test_what_does_not_concern_the_job_is_said_with_v(capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--model", "Qwen2.5-7B", "--gpus", "2xA100-80G", "--method", "grpo", "--tuning", "lora"]
    words = ["diff", "vllm==0.27", "vllm==0.28", *job, "--set", "use_vllm=true", "--set", "vllm_mode=colocate"]
    run(words)
    short = capsys.readouterr().out
    assert "B200" not in short and "add -v: 1 more" in short
    run([*words, "-v"])
    assert "on B200 and B300 CUDA graphs" in capsys.readouterr().out


@pytest.mark.parametrize(("given", "said"), [([], True), (["--set", "max_completion_length=128"], False)])
def test_a_default_that_the_job_sets_is_no_change(
    given: list[str], said: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["diff", "1.9", "1.10", "--model", "Qwen2.5-0.5B", "--gpus", "1xA100-40G", "--method", "rloo", *given])
    assert ("where nothing sets it" in capsys.readouterr().out) is said


@pytest.mark.parametrize(
    ("vllm", "version", "torch"),
    [("colocate", "0.32", "2.13"), ("colocate", "0.33", "2.14"), ("server", "0.33", "2.13"), ("off", "0.33", "2.13")],
)
def test_a_colocated_engine_brings_the_torch_that_it_requires(vllm: str, version: str, torch: str) -> None:
    job = candidate(NEWEST_TRL, method="grpo", vllm=vllm, vllm_version=version, attn_implementation="sdpa")
    assert (job.torch_release, job.groups_efficiently) == (torch, torch == "2.14")


# A thread on GitHub of "the same config, a new release", and the words of its command in docs/examples.md.
THREADS = {
    "trl#6263, #5697: completions of 512 tokens": "diff 1.9 1.10",
    "trl#5575: half the memory of long rows": "diff 1.6 1.7",
    "vllm#30515, #45178: fewer tokens in the cache": "diff vllm==0.19.1",
}
THREAD_ROWS = re.compile(
    r"(?<=\| thread \| releases \| peak, GiB \| what `plan diff` says \|\n\|---\|---\|---\|---\|\n)(?:\|.*\n)*"
)


def test_the_page_shows_the_changes_of_real_threads(capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs" / "examples.md"
    text, rows = page.read_text(encoding="utf-8"), []
    for thread, words in THREADS.items():
        line = next(line.strip() for line in text.splitlines() if line.startswith(f"    plan {words}"))
        assert run([*line.removeprefix("plan ").split(), "--json"]) == EXIT_PLANNED
        found = json.loads(capsys.readouterr().out)
        peaks = " -> ".join(f"{each['gpus'][0]['peak_bytes'] / GIB:.1f}" for each in found["estimates"])
        said = "; ".join(f"since {each['library']} {each['since']}: {each['text']}" for each in found["changes"])
        rows.append(f"| {thread} | {' -> '.join(line.split()[2:4])} | {peaks} | {said} |\n")
    if os.environ.get("PLAN_REWRITE_GOLDEN") == "1":
        page.write_text(THREAD_ROWS.sub(lambda _: "".join(rows), text), encoding="utf-8")
    shown = THREAD_ROWS.search(page.read_text(encoding="utf-8"))
    assert shown is not None and shown[0] == "".join(rows)


def test_sdft_is_planned_as_the_first_trl_whose_trainer_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    run(["--model", "Qwen2.5-0.5B", "--gpus", "1xL4", "--method", "sdft", "--trl-version", "1.5"])
    assert "sdft came to TRL with 1.6" in capsys.readouterr().out


def test_a_torch_that_an_engine_requires_and_is_not_planned_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """The table's head has torch 2.13 for both."""
    words = ["--model", "Qwen2.5-0.5B", "--gpus", "1xH100", "--method", "grpo", "--set", "use_vllm=true"]
    run(["diff", "trl==1.10,vllm==0.25", "trl==1.16,vllm==0.31", *words])
    said = [line for line in capsys.readouterr().out.splitlines() if "is counted as" in line]
    assert said == ["torch 2.11, which vllm 0.25 requires, is counted as torch 2.13."]


@pytest.mark.parametrize(("method", "said"), [("grpo", "then: --set use_vllm=true adds one."), ("sft", "then.")])
def test_a_job_without_an_engine_says_why_two_vllms_are_alike(
    method: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(["diff", "vllm==0.27", "vllm==0.31", "--model", "Qwen2.5-0.5B", "--gpus", "1xL4", "--method", method])
    assert f"The job has no vLLM engine, whose releases change nothing {said}" in capsys.readouterr().out


def test_a_requirements_file_pins_vllm(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("trl[vllm]==1.12.0\nvllm==0.27.1\n", encoding="utf-8")
    found = read_releases(str(file))
    assert (found.trl, found.vllm, found.torch) == ("1.12", "0.27", None)
    with pytest.raises(InputError, match="pins none of trl, torch and vllm"):
        read_releases("peft==0.21")


def test_a_compatible_release_is_a_pin_on_the_command_line() -> None:
    assert read_releases("vllm~=0.30.0,trl~=1.15.0").vllm == "0.30"


def test_every_fact_has_an_example() -> None:
    found = {each.words.split("{")[0] for each in FACTS if each.library != "vllm"}
    shown = [
        each.words for settings, pair, _ in EXAMPLES for each in changes(*(candidate(v, **settings) for v in pair))
    ]
    shown += ["on a card without FlashAttention's kernels, sdpa has one for fewer heads of keys than of queries"]
    assert all(any(words.startswith(start) for words in shown) for start in found)


@pytest.mark.slow
def test_an_estimate_that_moves_between_releases_has_a_fact_that_says_why() -> None:
    draw, moved = random.Random(5), 0
    for _ in range(40):
        job = job_of_words(arguments(draw, KNOWN))
        job.pop("trl_version", None)
        model, gpus = job.pop("model"), job.pop("gpus")
        try:
            answers = [estimate(model, gpus, trl_version=each, **job) for each in trl_releases(OLDEST_TRL, NEWEST_TRL)]
        except PlanError:
            continue
        for old, new in pairwise(answers):
            if [gpu.phases for gpu in old.gpus] != [gpu.phases for gpu in new.gpus]:
                moved += 1
                assert [*changes(old.candidate, new.candidate)], (job, old.candidate.trl_version)
    assert moved > 4


def test_releases_are_read_from_a_requirements_file(tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("# ours\ntrl[vllm]==1.12.0\ntorchvision==0.20\ntorch==2.9.1\n", encoding="utf-8")
    found = read_releases(str(file))
    assert (found.trl, found.torch) == ("1.12", "2.13")
    assert (known_torch("2.13.1"), known_torch("2.15")) == ("2.13", "2.14")


def test_the_document_has_both_estimates_and_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", "1.4", "1.16", *SFT, "--json"]) == EXIT_PLANNED
    found = json.loads(capsys.readouterr().out)
    assert [each["settings"]["trl_version"] for each in found["estimates"]] == ["1.4", "1.16"]
    assert [each["since"] for each in found["changes"]] == ["1.7", "1.13", "1.15"]


def test_the_table_has_the_change_of_each_phase(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(["diff", "1.4", "1.16", *SFT, "--max-length", "4096", "--batch-size", "4"])
    text = capsys.readouterr().out
    assert code == EXIT_PLANNED
    assert "trl 1.4, torch 2.13: does not fit" in text
    assert "since trl 1.7: the loss is computed 256 labelled tokens at a time" in text


def test_a_job_without_a_change_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diff", "1.15", "1.16", *SFT]) == EXIT_PLANNED
    assert "No known change applies to this job." in capsys.readouterr().out


def test_a_pinned_torch_says_as_which_it_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text("trl==1.16.0\ntorch==2.5.1\n", encoding="utf-8")
    assert run(["diff", str(file), "1.16", *SFT]) == EXIT_PLANNED
    assert capsys.readouterr().out.count("torch 2.5 is counted as torch 2.13.") == 1


@pytest.mark.parametrize(
    ("line", "release"),
    [("trl===1.12.0", "1.12"), ("trl~=1.12.0", "1.12"), ("trl == 1.12", "1.12"), ("trl~=1.12", ""), ("trl>=1.12", "")],
)
def test_a_line_that_leaves_one_minor_release_pins_it(line: str, release: str, tmp_path: Path) -> None:
    file = tmp_path / "requirements.txt"
    file.write_text(line, encoding="utf-8")
    if release:
        assert read_releases(str(file)).trl == release
    else:
        with pytest.raises(InputError, match="pins no release"):
            read_releases(str(file))


def test_a_job_that_does_not_fit_under_the_second_ends_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--max-length", "4096", "--batch-size", "4"]
    assert run(["diff", "1.16", "1.4", *SFT, *words]) == EXIT_NOTHING_FITS


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["1.12", "1.17"], "newer than 1.16"),
        (["0.9", "1.16"], "older than 1.0"),
        (["1.12", "no-such-file"], "cannot be read"),
        (["v1.4", "1.16"], "Name a release of TRL, such as 1.16, pins such as vllm==0.31, or a requirements file"),
        (
            ["vllm~=0.30", "1.16"],
            "such as vllm==0.31 or vllm~=0.31.0 (~=0.31 takes later releases, too)",
        ),
        (["1.12", "README.md"], "pins no release of TRL"),
        (["1.12", "1.16", "--trl-version", "1.14"], "plan diff takes two"),
    ],
)
def test_what_names_no_release_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).parents[1])
    assert run(["diff", *words, *SFT]) == EXIT_WRONG_INPUT
    assert said in capsys.readouterr().err
