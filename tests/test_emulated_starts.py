"""Exported files that are started as a user would, on an emulated card; and the draws and pages of such starts.

The starts need an environment of scripts/emulated_environment.sh (`make emulated`).
"""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.jobs.base_candidate import single_candidate
from planner.jobs.job import Job
from planner.methods import METHODS
from planner.models.catalogue import load_model
from probes.runner.host import with_environment
from scripts import emulated_certificates, user_start
from scripts.drawn_starts import PROVEN_SIZES, SCHEMES, STARTS, USERS_YAML, drawn_certificate, drawn_start
from scripts.emulated_starts import MISSED, draws_of, is_close, load_rows, page
from scripts.user_process.sitecustomize import AfterImport, trust_tokenizer_class
from scripts.user_start import (
    Files,
    as_yaml,
    cut_model,
    error_in,
    resume_arguments,
    trial_arguments,
    with_names,
)

TORCH = find_spec("torch")
ON_CUDA_BUILD = TORCH is not None and Path(str(TORCH.origin)).with_name("lib").joinpath("libtorch_cuda.so").exists()

IN_CI = ("FSDP2 in accelerate.yaml",)  # a minute; the others are nightly


@pytest.mark.slow
@pytest.mark.skipif(not ON_CUDA_BUILD, reason="needs PyTorch's CUDA build: make emulated")
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in IN_CI else pytest.mark.nightly) for kind in STARTS]
)
def test_exported_files_train_save_evaluate_and_resume_with_the_memory_that_is_estimated(
    kind: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "scripts.emulated_starts", "one", kind, str(tmp_path / "start")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[1])
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["outcome"] == "passed", found
    assert found["evaluated"] == ("eval_strategy=steps" in STARTS[kind].options)


# -- what needs no card ------------------------------------------------------------------------------------------------


def test_a_draw_depends_on_its_seed_and_number_alone() -> None:
    assert drawn_start(7, 3) == drawn_start(7, 3) != drawn_start(8, 3)


def test_a_draw_is_the_same_job_on_each_of_its_clusters() -> None:
    draws = draws_of("99-3")  # it has no row
    schemes = {f"--set {setting}" for scheme in SCHEMES for setting in scheme}
    jobs = {re.sub("|".join([r"--gpus \S+", *schemes]), "", " ".join(each.options)) for each in draws}
    assert len({" ".join(job.split()) for job in jobs}) == 1
    assert len({each.gpus for each in draws}) > 1


def test_a_start_that_has_a_row_is_started_again_as_its_row_says() -> None:
    row = next(each for each in load_rows() if each["own_yaml"])
    (draw,) = draws_of(f"{row['seed']}-{row['number']}")
    assert (list(draw.options), draw.launcher, draw.config) == (row["options"], row["launcher"], USERS_YAML)


def test_a_hundred_draws_have_every_method_and_30_model_types() -> None:
    drawn = [drawn_start(1, number) for number in range(100)]
    methods = {each.options[each.options.index("--method") + 1] for each in drawn}
    models = {each.options[each.options.index("--model") + 1] for each in drawn}
    assert methods == {n for n, row in METHODS.items() if row.last_trl == "current" and not row.asynchronous}
    assert len(models) >= 30
    assert {each.launcher for each in drawn} == {"accelerate", "torchrun"}
    assert any("--images-per-row" in each.options for each in drawn)


@pytest.mark.filterwarnings("ignore:CUDA initialization")  # PyTorch for CUDA, which has no card in this process
@pytest.mark.skipif(TORCH is None, reason="writes a model")
def test_a_model_whose_images_are_not_planned_has_a_tokenizer_for_its_processor(tmp_path: Path) -> None:
    """TRL loads its processor, whose parts a folder of ours does not have: results/emulated_starts.md, seed 1, 7."""
    folder = cut_model(load_model("gemma-4-12B"), tmp_path)
    from transformers import AutoProcessor, PreTrainedTokenizerFast

    assert isinstance(AutoProcessor.from_pretrained(folder), PreTrainedTokenizerFast)


@pytest.mark.filterwarnings("ignore:CUDA initialization")  # PyTorch for CUDA, which has no card in this process
@pytest.mark.skipif(TORCH is None, reason="writes a model")
def test_a_cut_model_keeps_the_quantization_of_its_checkpoint(tmp_path: Path) -> None:
    """A start's server loaded 16-bit weights, and its trainer stopped: "You need to pass `dataset`"."""
    folder = cut_model(load_model("Qwen2.5-0.5B-Instruct-GPTQ-Int4"), tmp_path)
    found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (found["quantization_config"]["quant_method"], found["num_hidden_layers"]) == ("gptq", 2)


@pytest.mark.filterwarnings("ignore:CUDA initialization")  # PyTorch for CUDA, which has no card in this process
@pytest.mark.skipif(TORCH is None, reason="reads a tokenizer")
def test_the_words_of_a_prompt_are_read_by_types_whose_folders_transformers_distrusts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it their prompts are empty: seed 4, number 11."""
    folder = cut_model(load_model("Qwen2.5-0.5B"), tmp_path)
    from transformers import AutoTokenizer
    from transformers.models.auto import tokenization_auto

    name = "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS"
    monkeypatch.setattr(tokenization_auto, name, {*getattr(tokenization_auto, name)})
    assert AutoTokenizer.from_pretrained(folder)("w10 w11")["input_ids"] == []
    trust_tokenizer_class(tokenization_auto)
    assert AutoTokenizer.from_pretrained(folder)("w10 w11")["input_ids"] == [10, 11]


LOG = """Traceback (most recent call last):
  File "train.py", line 3, in main
ValueError: rows are missing
E1127 failed (exitcode: 1)
subprocess.CalledProcessError: Command '['python']' returned non-zero exit status 1.
"""


def test_the_error_of_a_log_is_that_of_the_program_and_not_of_its_launcher() -> None:
    assert error_in(LOG) == "ValueError: rows are missing"


def test_names_are_replaced_as_a_whole_and_not_in_comments() -> None:
    text = "# a/b\nmodel: a/b\nother: a/b-Instruct\nthird: x/a/b\n"
    assert with_names(text, {"a/b": "/c"}) == "# a/b\nmodel: /c\nother: a/b-Instruct\nthird: x/a/b\n"


def test_arguments_of_a_script_that_takes_none_are_lines_of_yaml() -> None:
    assert as_yaml(("--max_steps", "3", "--save_strategy", "no")) == 'max_steps: 3\nsave_strategy: "no"\n'


def test_a_start_that_takes_too_long_leaves_nothing_running_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun's processes have sessions of their own: that of seed 12, number 6, ran on for 20 minutes."""
    monkeypatch.setattr(user_start, "SECONDS", 0.5)
    (tmp_path / "train.yaml").write_text("", encoding="utf-8")
    (tmp_path / "launch.sh").write_text("setsid sleep 60 & wait\n", encoding="utf-8")
    candidate = single_candidate(Job(model=load_model("SmolLM2-135M"), method="sft"), parse_cluster("1xL4"))
    files = Files(folder=tmp_path, gpus="1xL4", estimate=estimate(candidate, parse_cluster("1xL4")))
    ended = user_start.started(files, (), tmp_path, "train")
    assert ended.message.startswith("it was ended after 0 s")
    assert not with_environment(user_start.RECORDS, str(tmp_path / "train-records"))


@pytest.mark.parametrize(("padded", "ordered"), [(True, True), (False, False), ("either", False)])
def test_rows_keep_their_order_where_each_batch_holds_padding(padded: Any, ordered: bool, tmp_path: Path) -> None:
    """Two rows of 511 tokens between rows of 512 are a batch without padding: seed 4, number 6."""
    cluster, pinned = parse_cluster("1xL4"), {"padded": padded}
    candidate = single_candidate(Job(model=load_model("SmolLM2-135M"), method="sft", pinned=pinned), cluster)
    files = Files(folder=tmp_path, gpus="1xL4", estimate=estimate(candidate, cluster))
    for arguments in (trial_arguments(files), resume_arguments(files)):
        assert ("--train_sampling_strategy" in arguments) is ordered


@pytest.mark.parametrize(("generations", "padded"), [(2, "either"), (4, False)])
def test_a_start_that_samples_for_one_prompt_has_no_padding(generations: int, padded: Any, tmp_path: Path) -> None:
    """Starts 8-25, 8-63, 8-85 and 8-88 were 3.3 to 3.5 % below a plan that counts with padding."""
    pinned = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "num_generations": generations}
    job = Job(model=load_model("SmolLM2-135M"), method="gmpo", pinned=pinned)
    candidate = single_candidate(job, parse_cluster("1xL4"))
    files = Files(folder=tmp_path, gpus="1xL4", estimate=estimate(candidate, parse_cluster("1xL4")))
    assert files.as_run.padded == padded


def test_a_function_is_called_after_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "imported_late.py").write_text("value = 1\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    seen: list[Any] = []
    monkeypatch.setattr(sys, "meta_path", [AfterImport({"imported_late": seen.append}), *sys.meta_path])
    import imported_late  # type: ignore[import-not-found]

    assert seen == [imported_late]
    assert imported_late.value == 1
    del sys.modules["imported_late"]


def test_a_start_that_passed_is_close_to_its_estimate() -> None:
    passed = [each for each in load_rows() if each["outcome"] == "passed"]
    assert passed
    assert all(map(is_close, passed))


def test_the_page_names_every_start_that_did_not_pass() -> None:
    rows = load_rows()
    text = page(rows)
    misses = [each for each in rows if each["outcome"] in MISSED]
    assert all(f"| {each['seed']}, {each['number']} |" in text for each in misses)


def test_a_certificate_is_drawn_of_a_real_size_on_any_of_its_clusters() -> None:
    draws = [drawn_certificate(1, number, cluster) for number in range(20) for cluster in range(2)]
    sizes = {load_model(each.options[1]).params for each in draws}
    assert PROVEN_SIZES[0] <= min(sizes) < 2e9 < 20e9 < max(sizes) <= PROVEN_SIZES[1]
    for one, other in zip(draws[::2], draws[1::2], strict=True):
        assert (*one.options[:3], *one.options[4:]) == (*other.options[:3], *other.options[4:])


def test_the_page_of_certificates_names_every_draw_that_was_left_open() -> None:
    rows = emulated_certificates.load_rows()
    newest = {(each["seed"], each["number"]): each for each in rows}
    text = emulated_certificates.page(rows)
    assert all(
        (f"| {seed}, {number} |" in text) == (each["outcome"] in ("denied", "open", "failed"))
        for (seed, number), each in newest.items()
    )
