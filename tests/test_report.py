"""The reports of an estimate written by hand: JSON, table, frames and page."""

import base64
import io
import json
import re
import zipfile
from typing import get_args

import jsonschema
import pytest
from msgspec.structs import replace
from report_samples import CLUSTER, COLOCATED, ESTIMATE, JOB, MODEL, NOTHING_FITS, PLAN, TOO_LARGE

from planner.candidate import Candidate
from planner.errors import InputError
from planner.gpus.parse import parse_cluster
from planner.jobs.job import Job
from planner.methods import METHODS
from planner.models.catalogue import load_model
from planner.planning import plan
from planner.quantities import Component, Estimate, Note
from planner.report.documents.fields import PinnedSettings, Settings
from planner.report.documents.plans import COMPONENT_DESCRIPTIONS
from planner.report.documents.schema import json_schema
from planner.report.frame import breakdown, candidates
from planner.report.json import estimate_report, json_text, plan_report
from planner.report.page.answer import Origin, estimate_html, plan_html
from planner.report.table import MAX_WIDTH, MIN_WIDTH, estimate_table, nearest_refusal, plan_table
from planner.report.words import describe_candidate, describe_fit, describe_probability, describe_runs, published_like
from planner.requests.saved_report import read_plan
from planner.search.knobs import problem_of_estimate
from planner.search.what_if import what_if
from planner.units import GIB

SCHEMA = json_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def as_json(report):
    return json.loads(json_text(report))


def estimate_of(candidate: Candidate) -> Estimate:
    return replace(ESTIMATE, candidate=candidate)


class TestJson:
    def test_the_schema_is_a_schema(self):
        jsonschema.Draft202012Validator.check_schema(SCHEMA)

    @pytest.mark.parametrize(
        "report",
        [
            plan_report(PLAN),
            plan_report(NOTHING_FITS),
            estimate_report(ESTIMATE),
            estimate_report(TOO_LARGE, [Note("no_bfloat16", {"gpu": "T4"})]),
        ],
    )
    def test_reports_follow_the_schema(self, report):
        VALIDATOR.validate(as_json(report))

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("tuning", ["full", "lora"])
    def test_every_method_follows_the_schema(self, method, tuning):
        VALIDATOR.validate(as_json(estimate_report(estimate_of(Candidate(model=MODEL, method=method, tuning=tuning)))))

    @pytest.mark.parametrize("sharding", ["none", "ddp", "zero1", "zero2", "zero3", "fsdp2"])
    @pytest.mark.parametrize(
        "quantization", ["none", "nf4", "nf4-double", "int8", "nf4-experts", "gptq", "gptq-int8", "awq", "fp8", "mxfp4"]
    )
    @pytest.mark.parametrize("vllm", ["off", "colocate", "server"])
    def test_every_structure_follows_the_schema(self, sharding, quantization, vllm):
        candidate = replace(
            COLOCATED, sharding=sharding, quantization=quantization, vllm=vllm, reward_model=MODEL, teacher_model=MODEL
        )
        VALIDATOR.validate(as_json(estimate_report(estimate_of(candidate))))

    @pytest.mark.parametrize("key", ["settings", "fits", "gpus", "throughput"])
    def test_a_report_without_a_key_does_not_follow_the_schema(self, key):
        report = as_json(estimate_report(ESTIMATE))
        del report[key]
        with pytest.raises(jsonschema.ValidationError):
            VALIDATOR.validate(report)

    def test_a_key_that_the_schema_does_not_know_is_refused(self):
        with pytest.raises(jsonschema.ValidationError):
            VALIDATOR.validate(as_json(plan_report(PLAN)) | {"surprise": 1})

    def test_every_component_is_described(self):
        assert COMPONENT_DESCRIPTIONS.keys() == set(get_args(Component))

    @pytest.mark.parametrize(("component", "size"), [("weights", "1"), ("weights", -1), ("wieghts", 1)])
    def test_components_are_known_and_have_whole_bytes(self, component, size):
        report = as_json(estimate_report(ESTIMATE))
        report["gpus"][0]["phases"][0]["components"][component] = size
        with pytest.raises(jsonschema.ValidationError):
            VALIDATOR.validate(report)

    def test_every_setting_can_be_pinned(self):
        assert set(Settings.__struct_fields__) <= set(PinnedSettings.__struct_fields__) | {"environment"}

    def test_every_object_of_the_schema_is_described(self):
        objects = {name: part for name, part in SCHEMA["$defs"].items() if "properties" in part}
        assert [name for name, part in objects.items() if not part.get("description")] == []

    def test_a_plan_has_the_keys_that_are_promised(self):
        promised = {"schema", "job", "cluster", "verdict", "best", "alternatives", "warnings", "versions"}
        assert promised <= as_json(plan_report(PLAN)).keys()

    def test_an_estimate_is_shaped_as_the_best_of_a_plan(self):
        estimate = as_json(estimate_report(ESTIMATE))
        assert (
            estimate.keys() - {"schema", "summary", "warnings", "warnings_data"}
            == as_json(plan_report(PLAN))["best"].keys() - {"resources"}  # of known GPUs
        )

    def test_the_answer_comes_first_and_bytes_are_integers(self):
        text = json_text(estimate_report(ESTIMATE))
        read = json.loads(text)
        assert list(read)[:2] == ["settings", "fits"]
        assert read["gpus"][0]["peak_bytes"] == 14 * GIB + 160 * 2**20 + 20 * GIB + GIB
        assert read["gpus"][0]["peak_phase"] == "rollout"

    def test_the_same_estimate_gives_the_same_text(self):
        assert json_text(plan_report(PLAN)) == json_text(plan_report(PLAN))

    def test_pins_are_spelled_as_settings(self):
        assert as_json(plan_report(PLAN))["job"]["pinned"] == {"lora_r": 16, "use_vllm": True, "vllm_mode": "colocate"}


class TestSavedReports:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"schema": 2}, r"Invalid enum value 2 - at `\$\.schema`\.$"),
            ({"settings": {}}, r"Object missing required field `model_name_or_path` - at `\$\.settings`\.$"),
            ({"settings": 3}, r"Expected `object`, got `int` - at `\$\.settings`\.$"),
            ({"cluster": {"nodes": "2"}}, r"Expected `int`, got `str` - at `\$\.cluster\.nodes`\.$"),
        ],
    )
    def test_a_wrong_report_names_the_path_of_the_field(self, tmp_path, change, message):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(as_json(estimate_report(ESTIMATE)) | change), encoding="utf-8")
        with pytest.raises(InputError, match=rf"plan\.json is no report of plan: {message}"):
            read_plan(path, None, None, lambda model: model)

    def test_a_quoted_value_is_cut(self, tmp_path):
        path = tmp_path / "plan.json"
        report = as_json(estimate_report(ESTIMATE))
        report["settings"]["method"] = "x" * 500
        path.write_text(json.dumps(report), encoding="utf-8")
        with pytest.raises(InputError, match=r"Invalid enum value 'x{50,60}\.\.\. - at `\$\.settings\.method`\.$"):
            read_plan(path, "2xA100-40G", None, lambda model: model)

    def test_keys_of_a_later_release_are_skipped(self, tmp_path):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(as_json(plan_report(PLAN)) | {"later": 1}), encoding="utf-8")
        candidate, cluster = read_plan(path, None, None, lambda model: model)
        assert (candidate.lora_r, cluster) == (16, CLUSTER)


class TestTable:
    @pytest.mark.parametrize("width", [MIN_WIDTH, 100, MAX_WIDTH, 300])
    @pytest.mark.parametrize("plan", [PLAN, NOTHING_FITS])
    def test_no_line_is_wider_than_the_terminal(self, plan, width):
        assert max(len(line) for line in plan_table(plan, width).plain.splitlines()) <= min(width, MAX_WIDTH)

    def test_no_line_ends_in_blanks(self):
        assert [line for line in plan_table(PLAN, 100).plain.splitlines() if line != line.rstrip()] == []

    def test_the_peak_phase_is_marked_and_taken_apart(self):
        lines = plan_table(PLAN, 100).plain.splitlines()
        assert [line.split()[1] for line in lines if line.endswith("◂")] == ["rollout"]
        assert "             peak: the rollout = engine 20.0 + weights 14.0 + runtime 1.0 + adapters 0.2" in lines
        assert "             engine 20.0 = weights 14.0 + kv cache 5.0 + cuda graphs 1.0" in lines

    def test_tokens_of_a_cache_are_counts_not_bytes(self):
        gpu = replace(ESTIMATE.gpus[0], details={"engine": {"kv_cache": 5 * GIB, "tokens": 148_000, "sequences": 72}})
        lines = estimate_table(replace(ESTIMATE, gpus=(gpu,)), CLUSTER, (), 100).plain.splitlines()
        assert "             engine 5.0 = kv cache 5.0 (148,000 tokens, 72 sequences)" in lines

    def test_components_too_small_to_print_are_added_up(self):
        phase = replace(
            ESTIMATE.gpus[0].phases[0], components={"weights": GIB, "loss": 40 * 2**20, "runtime": 50 * 2**20}
        )
        text = estimate_table(
            replace(ESTIMATE, gpus=(replace(ESTIMATE.gpus[0], phases=(phase,)),)), CLUSTER, (), 100
        ).plain
        assert "peak: the load = weights 1.0 + rest 0.1" in text

    def test_a_bar_that_does_not_fit_crosses_the_end_of_the_card(self):
        fits = next(line for line in plan_table(PLAN, 100).plain.splitlines() if line.endswith("◂"))
        over = next(line for line in plan_table(NOTHING_FITS, 100).plain.splitlines() if line.endswith("◂"))
        assert fits.index("▏") > fits.rindex("░")
        assert over.index("▏") < over.rindex("▓")

    def test_the_bar_of_a_full_card_is_as_long_as_the_card(self):
        phase = replace(ESTIMATE.gpus[0].phases[0], components={"weights": CLUSTER.gpu.free_bytes})
        full = replace(ESTIMATE, gpus=(replace(ESTIMATE.gpus[0], phases=(phase,)),))
        line = next(line for line in estimate_table(full, CLUSTER, (), 100).plain.splitlines() if line.endswith("◂"))
        assert line.count("█") == 100 - 13 - 16 - 8 - 1

    @pytest.mark.parametrize("width", [80, 100, MAX_WIDTH])
    def test_a_long_name_takes_a_line_of_its_own(self, width):
        long = replace(
            ESTIMATE,
            candidate=replace(COLOCATED, model=replace(MODEL, id="organisation/" + "long-" * 8 + "name")),
        )
        lines = estimate_table(long, replace(CLUSTER, nodes=4), (), width).plain.splitlines()
        assert max(map(len, lines)) <= width
        assert lines[0].endswith("estimated")

    def test_settings_are_on_the_lines_of_their_topics(self):
        lines = plan_table(PLAN, 120).plain.splitlines()
        assert (
            "batch        per_device_train_batch_size 8 · gradient_accumulation_steps 2 · num_generations 8"
            " · 32 samples a step" in lines
        )
        assert "lengths      prompt_length 512 · max_completion_length 512" in lines
        assert any(line.startswith("vLLM         vllm_mode colocate · ") for line in lines)

    @pytest.mark.parametrize(
        ("seconds", "words"), [(0.01234, "0.012 s"), (7.534, "7.5 s"), (131.0, "130 s"), (4000.0, "67 min")]
    )
    def test_a_step_has_two_digits(self, seconds, words):
        speed = replace(ESTIMATE.throughput, step_seconds=seconds)
        assert f", {words} a step" in plan_table(replace(PLAN, best=replace(ESTIMATE, throughput=speed)), 100).plain

    def test_the_table_shows_the_evidence(self):
        assert plan_table(PLAN, 100).plain.splitlines()[0].endswith("estimated")

    def test_settings_are_named_as_they_can_be_pasted_back(self):
        text = plan_table(PLAN, 100).plain
        assert "per_device_train_batch_size 8" in text
        assert "vllm_enable_sleep_mode true" in text
        assert "launch with  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in text

    def test_defaults_of_a_chosen_structure_are_not_shown(self):
        assert "vllm_tensor_parallel_size" not in plan_table(PLAN, 100).plain

    def test_what_is_to_spare_comes_first_then_how_sure_that_is(self):
        text = " ".join(plan_table(PLAN, 120).plain.split())
        like = published_like(ESTIMATE)
        assert f"to spare: {describe_probability(ESTIMATE)} likely to run · peak " in text
        assert f"of {like.runs} published runs with as much to spare {like.ran} ran" in text
        assert "fits, 4.3 GiB (11 %) to spare" in text

    def test_a_tight_plan_says_so(self):
        tight = replace(ESTIMATE, tight=True, fit_probability=0.684)
        assert describe_fit(tight).startswith("tight, ")
        assert ": 68 % likely to run · peak" in describe_fit(tight)
        assert "published runs with less than" in describe_runs(tight)
        assert describe_probability(tight) == "tight, 68 %"

    @pytest.mark.parametrize(
        ("probability", "words"), [(1.0, "99 %"), (0.99999, "99 %"), (0.8599, "85 %"), (0.5, "50 %")]
    )
    def test_certainty_is_never_rounded_up(self, probability, words):
        estimate = replace(ESTIMATE, fit_probability=probability)
        assert describe_probability(estimate) == words
        assert f"{round(100 * plan_report(replace(PLAN, best=estimate)).best.fit_probability)} %" == words

    def test_the_memory_of_the_host_is_shown(self):
        assert (
            "host         20.0 of 64.0 GiB of memory on each node · assumed from a cloud's instances: --host-memory"
            in plan_table(PLAN, 120).plain
        )

    def test_a_refusal_names_the_missing_bytes_and_a_remedy(self):
        assert nearest_refusal(NOTHING_FITS) == (
            "No candidate fits 2 x A100-40G (39.5 GiB each). The nearest peaks at 56.0 GiB in the optimizer step, "
            "18.5 GiB too much at a risk of 0.05. To fit: --tuning lora."
        )

    def test_a_refusal_names_a_setting_that_is_left_out(self):
        without = replace(NOTHING_FITS.remedies[0], change=Note("setting_not_pinned", {"settings": {"fp16": True}}))
        refusal = nearest_refusal(replace(NOTHING_FITS, remedies=(without,)))
        assert refusal.endswith("at a risk of 0.05. To fit: without fp16=true.")

    def test_a_refusal_names_a_node_that_is_too_small_as_well(self):
        best = replace(NOTHING_FITS.best, host_capacity_bytes=16 * GIB)
        cluster = replace(CLUSTER, host=replace(CLUSTER.host, total_bytes=16 * GIB))
        assert nearest_refusal(replace(NOTHING_FITS, best=best, cluster=cluster, remedies=())) == (
            "No candidate fits 2 x A100-40G (39.5 GiB each). The nearest peaks at 56.0 GiB in the optimizer step, "
            "18.5 GiB too much at a risk of 0.05, and needs 20.0 GiB of host memory on a node of 16.0 GiB "
            "(90 % of which is planned, as it is assumed from a cloud's instances)."
        )

    def test_several_nodes_are_named(self):
        plan = replace(PLAN, cluster=replace(CLUSTER, nodes=4))
        assert "4 nodes of 2 x A100-40G" in plan_table(plan, 100).plain

    def test_trainer_and_server_have_gpus_of_their_own(self):
        train = replace(ESTIMATE.gpus[0], role="train", count=6)
        server = replace(ESTIMATE.gpus[0], role="vllm", count=2)
        text = estimate_table(replace(ESTIMATE, gpus=(train, server)), CLUSTER, (), 100).plain
        assert "GPU 0-5" in text
        assert "GPU 6-7" in text

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({}, "LoRA r 16 on a bfloat16 base · DDP · vLLM colocated, asleep while training"),
            (
                {"quantization": "nf4-double"},
                "QLoRA r 16 on a double-quantized nf4 base · DDP · vLLM colocated, asleep while training",
            ),
            (
                {"tuning": "full", "dtype": "float32", "vllm": "off"},
                "full fine-tuning of float32 weights under bf16 autocast · DDP · generates with Transformers",
            ),
            (
                {"sharding": "zero3", "offload_optimizer": True, "offload_param": True, "vllm": "server"},
                "LoRA r 16 on a bfloat16 base · ZeRO-3 with optimizer and parameters on the host"
                " · vLLM server on 1 GPU",
            ),
            ({"method": "sft", "sharding": "none"}, "LoRA r 16 on a bfloat16 base · one GPU"),
        ],
    )
    def test_a_candidate_is_described_in_words(self, changes, words):
        assert describe_candidate(replace(COLOCATED, **changes)) == words


class TestFrames:
    def test_the_breakdown_has_a_row_a_phase_and_sums_to_its_totals(self):
        frame = breakdown(ESTIMATE)
        assert list(frame.index) == [("train+vllm", phase.name) for phase in ESTIMATE.gpus[0].phases]
        assert list(frame.sum(axis=1)) == [phase.total_bytes for phase in ESTIMATE.gpus[0].phases]
        assert frame.loc[("train+vllm", "load"), "engine"] == 0

    def test_candidates_have_a_row_each_and_the_best_is_first(self):
        frame = candidates(PLAN)
        assert list(frame.index) == ["best", "full fine-tuning"]
        assert list(frame["fits"]) == [True, False]
        assert list(frame["per_device_train_batch_size"]) == [8, 8]


class TestHtml:
    def test_the_page_needs_nothing_beside_it(self):
        page = plan_html(PLAN)
        loaded = re.findall(r"""(?:src|href|action)\s*=\s*["']?([^"'\s>]+)|url\(([^)]+)|@import""", page)
        assert all(target.startswith(("#way-", "data:application/")) for target, _ in loaded)
        assert "<link" not in page

    def test_the_page_plots_speed_against_need_and_has_the_launch_files(self):
        answer = plan(Job(model=load_model("Qwen2.5-7B"), method="grpo"), parse_cluster("2xA100-40G"))
        page = plan_html(answer)
        assert page.count('<a href="#way-') == 1 + len(answer.alternatives) + len(answer.levers)
        assert "<summary><code>train.yaml</code>" in page and 'data-copy="file-1"' in page
        assert page.count('class="best"') == 1  # the plan in the what-if table

    def test_the_zip_holds_the_files_and_the_json_is_the_document(self):
        page = plan_html(PLAN)
        document = plan_report(PLAN)
        found = dict(re.findall(r'href="data:application/(zip|json);base64,([^"]+)"', page))
        with zipfile.ZipFile(io.BytesIO(base64.b64decode(found["zip"]))) as archive:
            texts = {name: archive.read(name).decode() for name in archive.namelist()}
        assert document.best.launch is not None
        assert texts == {f"run/{name}": text for name, text in document.best.launch.files.items()}
        assert json.loads(base64.b64decode(found["json"])) == as_json(document)

    def test_what_makes_a_job_fit_stands_right_under_the_verdict_and_there_is_nothing_to_start(self):
        page = plan_html(NOTHING_FITS)
        places = [page.index(text) for text in ('class="verdict over"', "To make it fit", "<h2>Settings", "<h2>Memory")]
        assert places == sorted(places)
        assert "application/zip" not in page and "<h2>Files" not in page
        assert "To make it fit" not in plan_html(PLAN)

    def test_the_first_picture_is_the_peak_beside_the_end_of_the_card(self):
        page = plan_html(PLAN)
        bar = page[page.index('class="bar"') : page.index("</section>")]
        assert "peak 35.2 of 39.5 GiB, between 34.0 and 37.0, in the rollout" in bar
        shares = [float(share) for share in re.findall(r"<i style=\"width:([0-9.]+)%", bar)]
        assert sum(shares) == pytest.approx(100 * 35.2 / 39.5, abs=0.5)
        assert page.index('class="bar"') < page.index('class="card"')

    def test_the_command_and_the_address_are_on_the_page_of_a_server_alone(self):
        page = plan_html(PLAN, Origin(command="plan --model 'a b'", address="/?model=a+b"))
        assert "plan --model &#39;a b&#39;</pre>" in page and 'href="/?model=a+b"' in page
        assert 'id="command"' not in plan_html(PLAN) and 'id="link"' not in plan_html(PLAN)

    def test_what_if_keeps_the_effective_batch_and_holds_the_plan_itself(self):
        answer = plan(Job(model=load_model("Qwen2.5-0.5B"), method="sft", tuning="lora"), parse_cluster("1xL4"))
        found = what_if(answer.best, problem_of_estimate(answer.job, answer.cluster, answer.best))
        cells = [each for _, row in found.rows for each in row if each is not None]
        assert {each.candidate.effective_batch_size for each in cells} == {answer.best.candidate.effective_batch_size}
        assert answer.best.gpus[0].peak_bytes in {each.gpus[0].peak_bytes for each in cells}
        assert found.lengths == (256, 512, 1024, 2048, 4096)

    def test_the_page_names_the_peak_and_the_card(self):
        page = plan_html(PLAN)
        assert "peak 35.2 of 39.5 GiB, between 34.0 and 37.0, in the rollout" in page
        assert "full fine-tuning" in page

    def test_an_estimate_has_a_page_with_its_warnings(self):
        note = Note("model_source", {"model": "org/model", "remark": "a word & more"})
        assert "org/model: a word &amp; more" in estimate_html(ESTIMATE, CLUSTER, (note,))

    def test_a_model_name_cannot_write_html(self):
        evil = replace(ESTIMATE, candidate=replace(COLOCATED, model=replace(MODEL, id="<b>x</b>")))
        assert "<b>x</b>" not in plan_html(replace(PLAN, best=evil, job=JOB))
