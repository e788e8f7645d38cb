"""The callback in real runs of a small trainer on the CPU, with a function instead of torch.cuda's counters."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from msgspec.structs import replace

torch = pytest.importorskip("torch")
trl = pytest.importorskip("trl")

import accelerate  # noqa: E402
import datasets  # noqa: E402
import peft  # noqa: E402
import transformers  # noqa: E402

from planner import PlanError, job_from_trainer  # noqa: E402
from planner.candidate import Candidate  # noqa: E402
from planner.errors import InputError  # noqa: E402
from planner.estimation import estimate  # noqa: E402
from planner.gpus.catalogue import load_gpu  # noqa: E402
from planner.gpus.cluster import Cluster  # noqa: E402
from planner.jobs.base_candidate import base_candidate  # noqa: E402
from planner.jobs.job import Job  # noqa: E402
from planner.measurements.fingerprint import candidate_key, model_key  # noqa: E402
from planner.measurements.own_results import read_own_results, results_file  # noqa: E402
from planner.models.catalogue import load_model  # noqa: E402
from planner.models.from_config import shape_of  # noqa: E402
from planner.quantities import Estimate  # noqa: E402
from planner.report.json import estimate_report, json_text  # noqa: E402
from planner.units import GIB, MIB  # noqa: E402
from probes import MemoryPlanCallback  # noqa: E402
from probes.callback import candidate_of_run as run_module  # noqa: E402
from probes.callback.candidate_of_run import candidate_of_run, method_of, plain, zero_of  # noqa: E402
from probes.callback.memory_of_run import RunMemory, RunMemoryReading, gpu_of, reading_of  # noqa: E402
from probes.worker.random_weights import tokenizer  # noqa: E402

pytestmark = [  # the libraries' own warnings
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
GPU = load_gpu("RTX-3090")
LENGTH, BATCH, STEPS = 16, 2, 4
Settings = dict[str, Any]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PLAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Use one thread: such a small model takes longer on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small_model() -> Any:
    config = transformers.Qwen2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return transformers.Qwen2ForCausalLM(config)


def arguments(tmp_path: Path, **settings: Any) -> Any:
    usual = {
        "output_dir": str(tmp_path / "run"), "max_steps": STEPS, "per_device_train_batch_size": BATCH,
        "max_length": LENGTH, "report_to": "none", "save_strategy": "no", "use_cpu": True, "logging_strategy": "no",
        "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return trl.SFTConfig(**(usual | settings))


def sft_arguments(tmp_path: Path, **settings: Any) -> Any:
    """Arguments of a run with its accelerator, as when training begins."""
    args = arguments(tmp_path, **settings)
    accelerate.Accelerator(cpu=True)
    return args


def trainer(tmp_path: Path, callback: MemoryPlanCallback, lora: bool = False) -> Any:
    rows = [{"input_ids": [3 + (row + place) % 60 for place in range(LENGTH)]} for row in range(BATCH * STEPS)]
    return trl.SFTTrainer(
        model=small_model(),
        args=arguments(tmp_path),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(64),
        peft_config=peft.LoraConfig(r=4, target_modules="all-linear") if lora else None,
        callbacks=[callback],
    )


def memory(peaks: Callable[[int], int], outside: int = 500 * MIB) -> RunMemory:
    """A card whose peak follows `peaks` from reading to reading: one when training begins, then two for each step."""
    readings = iter(range(10**6))

    def read() -> RunMemoryReading:
        allocated = peaks(next(readings))
        return RunMemoryReading(
            peak_allocated_bytes=allocated,
            peak_reserved_bytes=allocated + 2 * MIB,
            outside_bytes=outside,
            allocator={"num_ooms": 0},
        )

    return RunMemory(gpu=GPU, read=read)


def expected_of(peak: int, interval: tuple[int, int], candidate: Candidate) -> Estimate:
    """An estimate of exactly these bytes."""
    answer = estimate(candidate, Cluster(gpu=GPU, nodes=1, gpus_per_node=1), 0.01)
    return replace(answer, gpus=(replace(answer.gpus[0], interval_bytes=interval),))


@pytest.fixture(scope="module")
def candidate(tmp_path_factory: pytest.TempPathFactory) -> Candidate:
    """The candidate that describes the small trainer."""
    return candidate_of_run(sft_arguments(tmp_path_factory.mktemp("candidate")), small_model(), {})


@pytest.fixture
def said() -> Iterator[list[str]]:
    yield []


@pytest.mark.slow
class TestRuns:
    def test_a_run_within_the_plan_is_silent_and_kept(self, tmp_path, said, candidate):
        plan = expected_of(8 * GIB, (7 * GIB, 9 * GIB), candidate)
        callback = MemoryPlanCallback(plan, memory=memory(lambda number: 7 * GIB + number * 100 * MIB), say=said.append)
        trainer(tmp_path, callback).train()
        assert said == []
        (kept,) = read_own_results().results
        seen = kept.decode()
        assert (kept.source, kept.gpu, seen.outcome, seen.device) == ("run", "RTX-3090", "fits", "cuda")
        assert [peak.name for peak in seen.ranks[0].phases] == ["load", "backward", "optimizer_step"]
        assert seen.ranks[0].allocated_bytes == 7 * GIB + 600 * MIB  # of the reading after the third step
        assert seen.ranks[0].driver_bytes == seen.ranks[0].reserved_bytes + 500 * MIB
        assert seen.step_seconds > 0 and seen.versions["gpu"] == "RTX-3090"

    def test_a_run_above_the_plan_says_so_once_and_goes_on(self, tmp_path, said, candidate):
        plan = expected_of(8 * GIB, (7 * GIB, 9 * GIB), candidate)
        run = trainer(
            tmp_path, MemoryPlanCallback(plan, memory=memory(lambda number: 10 * GIB + number * MIB), say=said.append)
        )
        run.train()
        assert run.state.global_step == STEPS
        (line,) = said
        assert line.startswith("the first step needed 10.5 GiB of RTX-3090, more than the 7.0 GiB to 9.0 GiB ")
        assert len(read_own_results().results) == 1

    def test_a_run_below_the_plan_says_so_when_the_steps_are_over(self, tmp_path, said, candidate):
        plan = expected_of(8 * GIB, (7 * GIB, 9 * GIB), candidate)
        trainer(tmp_path, MemoryPlanCallback(plan, memory=memory(lambda number: GIB + number), say=said.append)).train()
        (line,) = said
        assert line.startswith("the first 3 steps needed 1.5 GiB of RTX-3090, less than the ")

    def test_without_a_plan_the_estimate_is_made_from_the_trainer(self, tmp_path, said):
        trainer(
            tmp_path, MemoryPlanCallback(memory=memory(lambda number: 20 * GIB + number), say=said.append), lora=True
        ).train()
        (line,) = said
        assert "more than the" in line and "GiB estimated" in line
        kept = read_own_results().results[0].decode().candidate
        assert (kept.tuning, kept.lora_r, kept.lora_target_modules, kept.model.num_layers) == (
            "lora",
            4,
            ("all-linear",),
            2,
        )

    def test_a_plan_is_read_from_its_file(self, tmp_path, said):
        model = "Qwen2.5-0.5B"
        planned = Candidate(
            model=load_model(model), method="sft", dtype="bfloat16", max_length=LENGTH, per_device_train_batch_size=4
        )
        path = tmp_path / "estimate.json"
        path.write_text(
            json_text(estimate_report(estimate(planned, Cluster(gpu=GPU, nodes=1, gpus_per_node=1), 0.01))),
            encoding="utf-8",
        )
        callback = MemoryPlanCallback(
            str(path), gpus="1xRTX-3090", memory=memory(lambda number: 4 * GIB + number), say=said.append
        )
        trainer(tmp_path, callback).train()
        assert said[0].startswith("the run is not what was planned: ") and "per_device_train_batch_size=2" in said[0]

    @pytest.mark.parametrize("plan", ["none.json", None])
    def test_on_a_cpu_there_is_nothing_to_measure(self, tmp_path, said, plan):
        run = trainer(tmp_path, MemoryPlanCallback(plan, say=said.append))
        run.train()
        assert said == ["this run is not watched: there is no GPU whose memory could be measured"]
        assert run.state.global_step == STEPS and not results_file().exists()


@pytest.mark.slow
class TestNothingIsRaised:
    def test_a_plan_that_cannot_be_read_ends_the_watching(self, tmp_path, said):
        run = trainer(
            tmp_path, MemoryPlanCallback(tmp_path / "none.json", memory=memory(lambda number: GIB), say=said.append)
        )
        run.train()
        (line,) = said
        assert line.startswith("this run is not watched: ") and "none.json cannot be read" in line
        assert run.state.global_step == STEPS and not results_file().exists()

    @pytest.mark.parametrize("broken", [0, 1, 4])
    def test_counters_that_fail_at_any_moment_do_too(self, tmp_path, said, candidate, broken):
        def peaks(number: int) -> int:
            if number == broken:
                raise RuntimeError("the driver is gone")
            return GIB + number

        run = trainer(tmp_path, MemoryPlanCallback(memory=memory(peaks), say=said.append))
        run.train()
        assert said[-1] == "this run is not watched: RuntimeError: the driver is gone"
        assert run.state.global_step == STEPS and not results_file().exists()

    def test_results_that_cannot_be_written_are_said(self, tmp_path, said, monkeypatch):
        (tmp_path / "file").write_text("", encoding="utf-8")
        monkeypatch.setenv("PLAN_CACHE", str(tmp_path / "file"))
        run = trainer(tmp_path, MemoryPlanCallback(memory=memory(lambda number: 20 * MIB + number), say=said.append))
        run.train()
        assert "cannot be written" in said[-1] and run.state.global_step == STEPS

    def test_only_the_first_process_speaks(self, said, candidate):
        callback = MemoryPlanCallback(tmp_plan(candidate), memory=memory(lambda number: 90 * GIB), say=said.append)
        state = transformers.TrainerState(is_world_process_zero=False)
        control = transformers.TrainerControl()
        args = transformers.TrainingArguments(output_dir="unused", use_cpu=True, report_to="none")
        callback.on_train_begin(args, state, control, model=small_model())
        callback.on_pre_optimizer_step(args, state, control)
        callback.on_step_end(args, state, control)
        callback.on_train_end(args, state, control)
        assert said == [] and not results_file().exists()


def tmp_plan(candidate: Candidate) -> Estimate:
    return expected_of(8 * GIB, (7 * GIB, 9 * GIB), candidate)


class TestCandidate:
    def test_a_trainer_is_the_candidate_of_its_arguments_and_its_model(self, candidate):
        assert (candidate.method, candidate.tuning, candidate.dtype, candidate.precision) == (
            "sft",
            "full",
            "float32",
            "bf16",
        )
        assert (candidate.per_device_train_batch_size, candidate.max_length, candidate.optim) == (
            BATCH,
            LENGTH,
            "adamw_torch_fused",
        )
        assert (candidate.gradient_checkpointing, candidate.attn_implementation, candidate.sharding) == (
            True,
            "sdpa",
            "none",
        )
        assert candidate.model.params == sum(parameter.numel() for parameter in small_model().parameters())

    @pytest.mark.parametrize(
        ("settings", "field", "value"),
        [
            ({"gradient_checkpointing": False}, "gradient_checkpointing", False),
            ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps", 2),
            (
                {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": True}}},
                "sync_each_batch",
                True,
            ),
            ({"optim": "adafactor"}, "optim", "adafactor"),
            ({"bf16": False}, "precision", "no"),
            ({"packing": True}, "packing", True),
        ],
    )
    def test_an_argument_is_a_setting(self, tmp_path, settings, field, value):
        assert getattr(candidate_of_run(sft_arguments(tmp_path, **settings), small_model(), {}), field) == value

    def test_a_run_as_planned_is_the_planned_candidate(self, candidate):
        pinned = {"tuning": "full", "per_device_train_batch_size": BATCH, "max_length": LENGTH}
        job = Job(model=candidate.model, method="sft", pinned=pinned)
        assert candidate_key(base_candidate(job, Cluster(gpu=GPU, nodes=1, gpus_per_node=1))) == candidate_key(
            candidate
        )

    def test_the_config_of_a_model_in_memory_makes_its_checkpoints_layers(self):
        """Transformers adds keys to a config that are not in its file."""
        known = load_model("Qwen2.5-0.5B")
        fields = dict(known.config)
        config = transformers.AutoConfig.for_model(str(fields.pop("model_type")), **fields)
        assert model_key(shape_of(plain(config), id="in memory")) == model_key(known)

    def test_what_the_user_knows_wins(self, candidate, tmp_path):
        assert (
            candidate.padded and not candidate_of_run(sft_arguments(tmp_path), small_model(), {"padded": False}).padded
        )

    @pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
    def test_the_job_of_a_trainer_pins_what_the_trainer_runs(self, tmp_path, lora):
        rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3]] * 4})
        adapters = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]) if lora else None
        trainer = trl.SFTTrainer(
            model=small_model(), args=arguments(tmp_path), train_dataset=rows, processing_class=tokenizer(64),
            peft_config=adapters,
        )  # fmt: skip
        found = candidate_of_run(trainer.args, trainer.model, {})
        job = job_from_trainer(trainer)
        cluster = Cluster(gpu=GPU, nodes=1, gpus_per_node=1)
        assert candidate_key(base_candidate(job, cluster)) == candidate_key(found)
        assert job.pinned["per_device_train_batch_size"] == BATCH

    @pytest.mark.parametrize("given", [3, None, trl.SFTConfig])
    def test_what_is_no_trainer_is_refused(self, given):
        with pytest.raises(PlanError, match="takes a TRL trainer, such as SFTTrainer"):
            job_from_trainer(given)

    @pytest.mark.parametrize("targets", [["q_proj", "v_proj"], r".*\.(q|v)_proj"])
    def test_adapters_on_some_kinds_of_layers_are_those(self, tmp_path, targets):
        args = sft_arguments(tmp_path)
        model = peft.get_peft_model(small_model(), peft.LoraConfig(r=2, target_modules=targets))
        found = candidate_of_run(args, model, {})
        assert (found.lora_r, found.lora_target_modules) == (2, ("q_proj", "v_proj"))

    def test_copied_modules_are_those_of_the_adapters(self, tmp_path):
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])
        found = candidate_of_run(sft_arguments(tmp_path), peft.get_peft_model(small_model(), lora), {})
        assert found.lora_modules_to_save == ("embed_tokens", "lm_head")

    def test_named_experts_are_those_of_the_adapters(self, tmp_path):
        config = transformers.GptOssConfig(
            vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            head_dim=16, num_key_value_heads=2, num_local_experts=4, layer_types=["full_attention"] * 2,
        )  # fmt: skip
        lora = peft.LoraConfig(r=2, target_modules=["q_proj"], target_parameters=["1.mlp.experts.down_proj"])
        model = peft.get_peft_model(transformers.GptOssForCausalLM(config), lora)
        found = candidate_of_run(sft_arguments(tmp_path), model, {})
        assert (found.lora_target_modules, found.lora_target_parameters) == (("q_proj",), ("1.mlp.experts.down_proj",))

    @pytest.mark.parametrize(
        ("config", "message"),
        [
            (
                peft.LoraConfig(modules_to_save=["lm_head"], target_modules=["q_proj"], ensure_weight_tying=True),
                "LoRA with ensure_weight_tying is not counted",
            ),
            (
                peft.LoraConfig(target_modules=["q_proj"], rank_pattern={"q_proj": 4}),
                "LoRA with rank_pattern is not counted",
            ),
            (
                peft.LoraConfig(target_modules="model.layers.0.self_attn.q_proj"),
                "Adapters on some layers only .q_proj. are not counted",
            ),
            (
                peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
                "Adapters of IA3Config are not counted",
            ),
        ],
    )
    def test_adapters_that_are_not_counted_are_refused(self, tmp_path, config, message):
        with pytest.raises(InputError, match=message):
            candidate_of_run(sft_arguments(tmp_path), peft.get_peft_model(small_model(), config), {})

    @pytest.mark.parametrize(
        ("quantized", "name"),
        [
            ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "nf4"),
            ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, "nf4-double"),
            ({"load_in_8bit": True}, "int8"),
        ],
    )
    def test_a_base_that_was_quantized_while_loading_is_a_setting_of_the_run(self, tmp_path, quantized, name):
        model = peft.get_peft_model(small_model(), peft.LoraConfig(target_modules="all-linear"))
        model.config.quantization_config = transformers.BitsAndBytesConfig(**quantized)
        found = candidate_of_run(sft_arguments(tmp_path), model, {})
        assert (found.quantization, found.model.quantization) == (name, "none")

    def test_a_part_that_is_frozen_by_hand_is_refused(self, tmp_path):
        model = small_model()
        model.model.layers[0].requires_grad_(False)
        with pytest.raises(InputError, match="A part of the model is frozen without adapters"):
            candidate_of_run(sft_arguments(tmp_path), model, {})

    def test_a_plain_trainer_is_refused(self, tmp_path):
        args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none")
        with pytest.raises(InputError, match="TrainingArguments is no config of a TRL method"):
            candidate_of_run(args, small_model(), {})

    def test_the_length_of_prompts_must_be_said(self, tmp_path):
        args = trl.GRPOConfig(output_dir=str(tmp_path), use_cpu=True, report_to="none", per_device_train_batch_size=8)
        with pytest.raises(InputError, match="A GRPOConfig has no setting for the length of prompts"):
            candidate_of_run(args, small_model(), {})
        accelerate.Accelerator(cpu=True)
        found = candidate_of_run(args, small_model(), {"prompt_length": 20})
        assert (found.method, found.prompt_length, found.vllm, found.steps_per_generation) == ("grpo", 20, "off", 1)

    def test_a_subclass_of_a_config_is_of_its_method(self, tmp_path):
        class Mine(trl.DPOConfig):
            pass

        assert method_of(Mine(output_dir=str(tmp_path), use_cpu=True, report_to="none")) == "dpo"

    def test_a_deepspeed_config_says_where_states_are(self):
        assert zero_of({}) == {"sharding": "ddp", "offload_optimizer": False, "offload_param": False}
        zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "none"}}
        assert zero_of({"zero_optimization": zero}) == {
            "sharding": "zero3",
            "offload_optimizer": True,
            "offload_param": False,
            "reduce_bucket_size": 500_000_000,
            "stage3_prefetch_bucket_size": 50_000_000,
            "stage3_param_persistence_threshold": 100_000,
            "stage3_max_live_parameters": 10**9,
            "stage3_max_reuse_distance": 10**9,
            "sub_group_size": 10**9,
        }
        zero = {"stage": 2, "reduce_bucket_size": 10**6}
        assert zero_of({"zero_optimization": zero})["reduce_bucket_size"] == 10**6


class TestCounters:
    STATS: ClassVar = {
        "allocated_bytes.all.peak": 30,
        "reserved_bytes.all.peak": 40,
        "reserved_bytes.all.current": 36,
        "num_ooms": 0,
        "other": 1,
    }

    def test_what_is_outside_pytorch_is_what_the_driver_counts_more_than_is_reserved_then(self):
        reading = reading_of(self.STATS, 50)
        assert (reading.peak_allocated_bytes, reading.peak_reserved_bytes, reading.outside_bytes) == (30, 40, 14)
        assert reading.allocator == {"num_ooms": 0, "allocated_bytes.all.peak": 30, "reserved_bytes.all.peak": 40}

    def test_a_driver_that_does_not_say_leaves_it_out(self):
        assert reading_of(self.STATS, 0).outside_bytes == 0

    def test_a_card_that_is_in_no_catalogue_has_its_size_and_its_name(self):
        known, unknown = gpu_of("NVIDIA A100-SXM4-80GB", 85 * 10**9, (8, 0)), gpu_of("Some Card 3000", 24 * GIB, (9, 9))
        assert (known.name, known.total_bytes) == ("A100-80G", 85 * 10**9)
        assert (unknown.name, unknown.free_bytes, unknown.compute_capability) == ("Some Card 3000", 24 * GIB, (9, 9))


def test_to_import_probes_imports_no_training_stack() -> None:
    script = (
        "import sys, probes; assert not {'torch', 'transformers'} & set(sys.modules); print(sorted(probes.__all__))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "['MemoryPlanCallback']\n"


def test_probes_has_nothing_else() -> None:
    import probes

    with pytest.raises(AttributeError, match="module 'probes' has no attribute 'nothing'"):
        probes.nothing  # noqa: B018


@pytest.mark.slow
def test_a_kept_run_is_told_in_the_next_plan(tmp_path: Path, candidate: Candidate) -> None:
    from planner.measurements.own_results import own_result_notes
    from planner.report.sentences import sentence

    plan = tmp_plan(candidate)
    trainer(
        tmp_path, MemoryPlanCallback(plan, memory=memory(lambda number: 7 * GIB + number), say=lambda line: None)
    ).train()
    notes = own_result_notes(plan, GPU, read_own_results())
    assert sentence(notes[0]).startswith(
        "1 run of your own on RTX-3090 needed 7.5 GiB in the first steps, with your data"
    )
    assert json.loads(results_file().read_text(encoding="utf-8"))["source"] == "run"


@pytest.mark.parametrize(("installed", "planned"), [("0.33.0", "0.33"), ("0.99.1", "newest")])
def test_the_vllm_of_a_run_is_the_installed_one(installed: str, planned: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "version", lambda name: installed)
    assert run_module._vllm_version() == planned
