"""Settings both ways, and TRL config files."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from report_samples import COLOCATED, MODEL

from planner.candidate import FIELDS
from planner.errors import InputError
from planner.jobs.setting_values import field_types, typed_value
from planner.jobs.settings import candidate_fields, parse_assignments, setting_names, settings_of
from planner.models.catalogue import load_model
from planner.models.lora_targets import default_targets
from planner.report.sentences import sentences
from planner.requests.launch_config import PROCESSES, PROFILES, load_launch_config
from planner.requests.train_config import ConfigFiles, load_config_files, load_train_config
from planner.settings.table import SPELLINGS

PUBLISHED = "bfloat16"


def fields_of(*assignments: str) -> dict[str, object]:
    return candidate_fields(parse_assignments(assignments), PUBLISHED)


@pytest.mark.parametrize(
    ("name", "given", "release"),
    [
        ("vllm_version", "0.30", "0.30"),
        ("vllm_version", 0.3, "0.30"),  # as YAML and JSON read 0.30
        ("vllm_version", 0.31, "0.31"),
        ("vllm_version", "0.27.12", "0.27"),
        ("torch_version", 2.1, "2.13"),  # 2.10
        ("torch_version", "2.14.1", "2.14"),
    ],
)
def test_a_release_is_read_without_its_patch(name: str, given: str | float, release: str) -> None:
    assert typed_value(name, given) == release


@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("vllm_version", "0.9", "vllm_version 0.9 is older than 0.11, the oldest release that is planned."),
        ("vllm_version", "0.3", "vllm_version 0.3 is older than 0.11, the oldest release that is planned."),  # of 2024
        ("vllm_version", "0.40", "vllm_version 0.40 is newer than 0.33, the newest release that is planned."),
        ("vllm_version", 0.4, "vllm_version 0.4 is older than 0.11, the oldest release that is planned."),
        ("vllm_version", "0.27.1.post2", "Unknown vllm_version '0.27.1.post2'.* can be newest, or 0.11 to 0.33."),
        ("torch_version", "2.5.1", "torch_version 2.5 is older than 2.6, the oldest release that is planned."),
        ("torch_version", 2.15, "torch_version 2.15 is newer than 2.14, the newest release that is planned."),
    ],
)
def test_a_release_that_is_not_planned_is_named_with_the_nearest(name: str, given: str | float, words: str) -> None:
    with pytest.raises(InputError, match=words):
        typed_value(name, given)


class TestAssignments:
    @pytest.mark.parametrize(
        ("assignments", "expected"),
        [
            (["lora_r=32"], {"lora_r": 32}),
            (["vllm_gpu_memory_utilization=0.3"], {"vllm_gpu_memory_utilization": 0.3}),
            (["gradient_checkpointing=no"], {"gradient_checkpointing": False}),
            (["activation_checkpointing=False"], {"gradient_checkpointing": False}),
            (["lora_target_modules=q_proj,v_proj"], {"lora_target_modules": ("q_proj", "v_proj")}),
            (["load_in_4bit=true"], {"quantization": "nf4"}),
            (["load_in_4bit=true", "use_bnb_nested_quant=true"], {"quantization": "nf4-double"}),
            (["load_in_8bit=true"], {"quantization": "int8"}),
            (["quantization=nf4"], {"quantization": "nf4"}),
            (["bf16=false"], {"precision": "no"}),
            (["bf16=false", "fp16=true"], {"precision": "fp16"}),
            (["fp16=true"], {"precision": "fp16"}),
            (["zero_stage=3"], {"sharding": "zero3"}),
            (["zero_stage=2", "offload_optimizer_device=cpu"], {"sharding": "zero2", "offload_optimizer": True}),
            (["reduce_bucket_size=5e8"], {"reduce_bucket_size": 500_000_000}),
            (["stage3_prefetch_bucket_size=auto"], {"stage3_prefetch_bucket_size": "auto"}),
            (["distributed_type=FSDP"], {"sharding": "fsdp2"}),
            (["distributed_type=FSDP", "fsdp_offload_params=true"], {"sharding": "fsdp2", "offload_param": True}),
            (["use_vllm=true"], {"vllm": "colocate"}),
            (["vllm_mode=server"], {"vllm": "server"}),
            (["use_vllm=false"], {"vllm": "off"}),
            (["vllm_max_model_length=none"], {"vllm_max_model_length": 0}),
            (["PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"], {"expandable_segments": True}),
            (["max_new_tokens=64"], {"max_completion_length": 64}),
            (["dtype=auto"], {"dtype": "bfloat16"}),
            (["dtype=fp32"], {"dtype": "float32"}),
            (["attn_implementation=kernels-community/flash-attn2"], {"attn_implementation": "flash_attention_2"}),
            (["every_n_layers=2"], {"checkpoint_every_n_layers": 2}),
        ],
    )
    def test_a_name_of_a_library_decides_a_field(self, assignments, expected):
        assert fields_of(*assignments) == expected

    @pytest.mark.parametrize(
        ("assignments", "message"),
        [
            (["lora_rank=8"], r"Unknown setting 'lora_rank'\. Did you mean .*lora_r.*\? Settings are named as .*\."),
            (["lora_r"], r"--set lora_r has no value\. Write it as name=value, such as --set lora_r=16\."),
            (["lora_r=many"], r"lora_r must be a whole number, not many\."),
            (["lora_r=1.5"], r"lora_r must be a whole number, not 1\.5\."),
            (["lora_r="], r"lora_r must be a whole number, not empty\."),
            (["lora_r=" + "[" * 100_000], r"lora_r must be a whole number, not \[+.*"),
            (["use_reentrant=" + "[" * 100_000], r"Unknown setting 'use_reentrant'.*"),
            (["lora_r=0"], r"lora_r must be at least 1, not 0\."),
            (["max_length=-4"], r"max_length must be at least 1, not -4\."),
            (["vllm_gpu_memory_utilization=1.5"], r"vllm_gpu_memory_utilization must be from 0\.01 to 1, not 1\.5\."),
            (["vllm_gpu_memory_utilization=nan"], r"vllm_gpu_memory_utilization must be from 0\.01 to 1, not nan\."),
            (["padded=perhaps"], r"padded must be true, false or either, not perhaps\."),
            (["zero_stage=5"], r"zero_stage=5 is not supported\. zero_stage can be 1, 2, 3\."),
            (
                ["bnb_4bit_quant_type=fp4"],
                r"bnb_4bit_quant_type=fp4 is not supported\. bnb_4bit_quant_type can be nf4\.",
            ),
            (["dtype=bfloat"], r"Unknown dtype 'bfloat'\. Did you mean .*\? dtype can be float32, bfloat16, float16\."),
            (["load_in_4bit=1", "load_in_8bit=1"], r"load_in_4bit=true and load_in_8bit=true contradict each other\."),
            (["use_vllm=no", "vllm_mode=server"], r"use_vllm=false and vllm_mode=server contradict each other\."),
            (["sharding=zero3", "zero_stage=2"], r"zero_stage=2 contradicts sharding=zero3\."),
            (["reduce_bucket_size=large"], r"reduce_bucket_size must be a whole number, not large\."),
            (["sub_group_size=auto"], r"sub_group_size must be a whole number, not auto\."),
            (["max_length=4", "max_seq_length=8"], r"max_seq_length=8 contradicts max_length=4\."),
            (["lora_r=4", "lora_r=8"], r"lora_r is set twice: 4 and 8\."),
        ],
    )
    def test_what_cannot_be_is_refused_in_a_line(self, assignments, message):
        with pytest.raises(InputError, match=f"^{message}$"):
            fields_of(*assignments)

    def test_saying_the_same_twice_is_no_contradiction(self):
        assert fields_of("sharding=zero3", "zero_stage=3", "zero_stage=3") == {"sharding": "zero3"}

    def test_every_field_of_a_candidate_can_be_set(self):
        assert set(FIELDS) - {"method", "trl_version"} <= set(setting_names())


class TestRoundTrip:
    @pytest.mark.parametrize(
        ("field", "value"), [(field, value) for field, rows in SPELLINGS.items() for value in rows]
    )
    def test_what_is_written_is_read_back(self, field, value):
        written = {name: setting for name, setting in SPELLINGS[field][value].items() if setting != ""}
        assert candidate_fields(written, PUBLISHED).get(field, False) == value

    @given(
        lora_r=st.integers(1, 512),
        batch=st.integers(1, 64),
        utilization=st.floats(0.01, 1.0),
        sharding=st.sampled_from(list(SPELLINGS["sharding"])),
        quantization=st.sampled_from(list(SPELLINGS["quantization"])),
        vllm=st.sampled_from(["colocate", "server"]),
    )
    def test_the_settings_of_a_candidate_give_the_candidate(
        self, lora_r, batch, utilization, sharding, quantization, vllm
    ):
        candidate = replace(
            COLOCATED, lora_r=lora_r, per_device_train_batch_size=batch, vllm_gpu_memory_utilization=utilization
        )
        candidate = replace(
            candidate, sharding=sharding, quantization=quantization, vllm=vllm, vllm_enable_sleep_mode=False
        )
        written = {
            name: value
            for name, value in settings_of(candidate).items()
            if name in setting_names() and not isinstance(value, (dict, list))
        }
        read = candidate_fields(written, PUBLISHED) | {"model": MODEL, "expandable_segments": True}
        assert replace(candidate, **read) == candidate

    def test_offloading_is_named_by_what_offloads(self):
        zero = settings_of(replace(COLOCATED, sharding="zero3", offload_optimizer=True))
        fsdp = settings_of(replace(COLOCATED, sharding="fsdp2", offload_param=True))
        assert (zero["offload_optimizer_device"], zero["offload_param_device"]) == ("cpu", "none")
        assert fsdp["fsdp_offload_params"] is True
        assert "offload_param_device" not in fsdp

    def test_adapters_under_zero3_are_checkpointed_reentrantly(self):
        assert settings_of(replace(COLOCATED, sharding="zero3"))["gradient_checkpointing_kwargs"] == {
            "use_reentrant": True
        }
        assert settings_of(COLOCATED)["gradient_checkpointing_kwargs"] == {"use_reentrant": False}

    def test_every_type_of_a_field_is_one_that_settings_can_have(self):
        assert {str(kind) for kind in field_types().values() if isinstance(kind, type)} == {
            str(kind) for kind in (str, int, float, bool)
        }


def config(folder: Path, text: str) -> Path:
    file = folder / "train.yaml"
    file.write_text(text)
    return file


class TestTrainConfig:
    def test_keys_of_trl_become_fields(self, tmp_path):
        file = config(
            tmp_path,
            """
            model_name_or_path: Qwen/Qwen2.5-7B
            dtype: bfloat16
            use_peft: true
            lora_target_modules: [q_proj, v_proj]
            load_in_4bit: true
            per_device_train_batch_size: 4
            learning_rate: 1.0e-5
            gradient_checkpointing_kwargs: {use_reentrant: false, every_n_layers: 2}
            env: {PYTORCH_CUDA_ALLOC_CONF: "expandable_segments:True"}
            """,
        )
        read = load_train_config(file)
        assert candidate_fields(read.settings, PUBLISHED) == {
            "model": "Qwen/Qwen2.5-7B",
            "dtype": "bfloat16",
            "tuning": "lora",
            "lora_dropout": 0.05,
            "lora_target_modules": ("q_proj", "v_proj"),
            "quantization": "nf4",
            "precision": "bf16",
            "vllm": "off",
            "per_device_train_batch_size": 4,
            "checkpoint_every_n_layers": 2,
            "expandable_segments": True,
            "sync_each_batch": False,
        }
        assert sentences(read.warnings) == ("not used by the plan: learning_rate, use_reentrant",)

    def test_fp16_turns_the_default_bf16_off(self, tmp_path):
        assert (
            candidate_fields(load_train_config(config(tmp_path, "fp16: true")).settings, PUBLISHED)["precision"]
            == "fp16"
        )

    def test_details_of_what_is_off_are_not_read(self, tmp_path):
        read = load_train_config(
            config(tmp_path, "vllm_mode: server\nlora_r: 8\nbnb_4bit_quant_type: nf4\nuse_bnb_nested_quant: true")
        )
        assert candidate_fields(read.settings, PUBLISHED) == {
            "tuning": "full",
            "vllm": "off",
            "precision": "bf16",
            "sync_each_batch": False,
        }

    def test_gradients_are_reduced_in_each_micro_step_if_the_accelerator_config_says_so(self, tmp_path):
        text = "accelerator_config: {split_batches: false, gradient_accumulation_kwargs: {sync_each_batch: true}}"
        read = load_train_config(config(tmp_path, text))
        assert read.settings["sync_each_batch"] is True
        assert sentences(read.warnings) == ("not used by the plan: split_batches",)

    def test_a_deepspeed_file_beside_the_config_is_read(self, tmp_path):
        (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}')
        read = candidate_fields(load_train_config(config(tmp_path, "deepspeed: zero.json")).settings, PUBLISHED)
        assert (read["sharding"], read["offload_param"], read["offload_optimizer"]) == ("zero3", True, False)

    def test_a_deepspeed_file_without_sizes_has_those_of_deepspeed(self, tmp_path):
        (tmp_path / "zero.json").write_text(
            '{"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": "auto"}}'
        )
        read = candidate_fields(load_train_config(config(tmp_path, "deepspeed: zero.json")).settings, PUBLISHED)
        assert (read["reduce_bucket_size"], read["stage3_prefetch_bucket_size"]) == (500_000_000, "auto")

    def test_what_may_change_memory_and_is_not_counted_is_said_first(self, tmp_path):
        read = load_train_config(config(tmp_path, "torch_compile: true\nuse_dora: false\nlearning_rate: 1"))
        assert sentences(read.warnings) == (
            "the config sets what the plan does not count: torch_compile",
            "not used by the plan: learning_rate",
        )

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("- a\n- b", r"is no TRL config: it should hold keys and values"),
            ("a: [", r"is not YAML: "),
            ("", r"is no TRL config"),
            (
                "deepspeed: missing.json",
                r"The DeepSpeed config .*missing\.json cannot be read: No such file or directory\.",
            ),
        ],
    )
    def test_a_file_that_is_none_is_refused(self, tmp_path, text, message):
        with pytest.raises(InputError, match=message):
            load_train_config(config(tmp_path, text))

    def test_a_missing_file_is_refused(self, tmp_path):
        with pytest.raises(InputError, match=r"cannot be read: No such file or directory\.$"):
            load_train_config(tmp_path / "none.yaml")

    def test_default_targets_are_pefts(self):
        assert default_targets(load_model("EleutherAI/pythia-14m")) == ("query_key_value",)

    def test_stage_0_is_no_zero(self, tmp_path):
        read = load_train_config(config(tmp_path, "deepspeed: {zero_optimization: {stage: 0}}"))
        assert candidate_fields(read.settings, PUBLISHED)["sharding"] == "ddp"

    @pytest.mark.parametrize(
        ("name", "model_type"),
        [("OLMo-2-1124-7B", "olmo2"), ("Mixtral-8x7B-v0.1", "mixtral"), ("gemma-3-4b-it", "gemma3")],
    )
    def test_a_model_without_default_targets_is_refused(self, name, model_type):
        with pytest.raises(InputError, match=rf"^PEFT has no default lora_target_modules for {model_type}\."):
            default_targets(load_model(name))


def accelerate(folder: Path, text: str) -> Path:
    file = folder / "accelerate.yaml"
    file.write_text(text)
    return file


ZERO_2 = (
    "distributed_type: DEEPSPEED\nnum_processes: 8\ndeepspeed_config: {zero_stage: 2, offload_optimizer_device: cpu}"
)


class TestLaunchConfig:
    def test_a_stage_that_is_no_number_does_not_contradict_itself(self, tmp_path):
        (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": NaN}}')
        read = load_config_files(ConfigFiles(deepspeed=tmp_path / "zero.json"))
        with pytest.raises(InputError, match=r"^zero_stage must be a whole number, not nan\.$"):
            candidate_fields(read.settings, PUBLISHED)

    def test_accelerates_file_gives_sharding_and_processes(self, tmp_path):
        read = load_config_files(ConfigFiles(accelerate=accelerate(tmp_path, ZERO_2)))
        assert candidate_fields(read.settings, PUBLISHED) == {
            "sharding": "zero2", "num_processes": 8, "offload_optimizer": True, "offload_param": False,
            "reduce_bucket_size": 500_000_000,
        }  # fmt: skip

    def test_the_mesh_of_transformers_is_read(self, tmp_path):
        file = tmp_path / "train.yaml"
        file.write_text("model_init_kwargs: {distributed_config: {fsdp_size: 8, ep_size: 4, tp_size: 1}}")
        read = load_config_files(ConfigFiles(train=file), {})
        fields = {"sharding": "distributed", "num_processes": 8, "ep_size": 4}
        assert candidate_fields(read.settings, PUBLISHED) == fields

    @pytest.mark.parametrize(
        ("mesh", "fields"),
        [
            ("tp_size: 2", {"sharding": "tensor", "num_processes": 2}),
            ("tp_size: 2, tp_plan: auto, fsdp_size: 1", {"sharding": "tensor", "num_processes": 2}),
            ("tp_size: 2, fsdp_size: 4", {"sharding": "distributed", "num_processes": 8, "tp_size": 2}),
        ],
    )
    def test_tensor_parallelism_is_read(self, mesh, fields, tmp_path):
        file = tmp_path / "train.yaml"
        file.write_text(f"model_init_kwargs: {{distributed_config: {{{mesh}}}}}")
        read = load_config_files(ConfigFiles(train=file), {})
        assert candidate_fields(read.settings, PUBLISHED) == fields

    @pytest.mark.parametrize(
        ("mesh", "named"),
        [
            (
                "ep_size: 2, tp_size: 2",
                "tp_size 2 is not planned: tensor parallelism is planned with the model's own tp_plan",
            ),
            ("tp_size: 8, tp_plan: {}", "tp_size 8 is not planned"),
            ("tp_size: 2, fsdp_size: auto", "must be whole numbers of 1 or more, not tp_size 2 and fsdp_size 'auto'"),
            ("tp_size: 2, fsdp_size: -1", "must be whole numbers of 1 or more, not tp_size 2 and fsdp_size -1"),
            (
                "tp_size: 1, enable_expert_parallel: true",
                "stops at experts without tensor parallelism",
            ),
            ("fsdp_size: 8, pp_size: 2", "trains with no pipeline"),
            ("fsdp_size: 8, fsdp_cpu_offload: true", "it was not started"),
            ("fsdp_size: 8, tensor_parallel_size: 2", "Transformers has no such key and leaves it out"),
            ("fsdp_size: 8, ep_size: 8, ep_implementation: all_reduce", "ep_implementation all_reduce is not planned"),
        ],
    )
    def test_a_mesh_that_is_not_planned_is_refused_by_name(self, mesh, named, tmp_path):
        file = tmp_path / "train.yaml"
        file.write_text(f"model_init_kwargs: {{distributed_config: {{{mesh}}}}}")
        with pytest.raises(InputError, match=re.escape(named)):
            load_config_files(ConfigFiles(train=file), {})

    def test_a_bare_no_is_one_process(self, tmp_path):
        read = load_config_files(ConfigFiles(accelerate=accelerate(tmp_path, "distributed_type: NO\nnum_processes: 8")))
        assert candidate_fields(read.settings, PUBLISHED) == {"sharding": "none", "num_processes": 1}

    def test_sections_of_fsdp_and_of_shared_rows_are_read(self, tmp_path):
        file = accelerate(
            tmp_path,
            "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_offload_params: true}\n"
            "parallelism_config: {parallelism_config_cp_size: 2, parallelism_config_tp_size: 4}",
        )
        read = load_config_files(ConfigFiles(accelerate=file))
        assert candidate_fields(read.settings, PUBLISHED) == {"sharding": "fsdp2", "offload_param": True, "cp_size": 2}
        assert sentences(read.warnings) == ("the config sets what the plan does not count: parallelism_config_tp_size",)

    @pytest.mark.parametrize(
        ("zero", "named"),
        [
            ('{"stage": 3, "zero_hpz_partition_size": 8}', "zero_optimization.zero_hpz_partition_size"),
            ('{"stage": 2, "overlap_comm": true}', "zero_optimization.overlap_comm"),
            ('{"stage": 3, "offload_optimizer": {"ratio": 0.4}}', "zero_optimization.offload_optimizer.ratio"),
            ('{"stage": 3, "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": "auto"}', ""),
        ],
    )
    def test_keys_of_deepspeed_that_are_not_counted_are_named(self, tmp_path, zero, named):
        file = tmp_path / "zero.json"
        file.write_text(f'{{"zero_optimization": {zero}}}')
        launcher = accelerate(
            tmp_path, "distributed_type: DEEPSPEED\ndeepspeed_config: {deepspeed_config_file: zero.json}"
        )
        warnings = (f"the config sets what the plan does not count: {named}",) if named else ()
        for files in (
            ConfigFiles(deepspeed=file),
            ConfigFiles(accelerate=launcher),
            ConfigFiles(train=config(tmp_path, "deepspeed: zero.json")),
        ):
            assert sentences(load_config_files(files).warnings) == warnings

    def test_a_deepspeed_config_that_another_replaces_is_not_read(self, tmp_path):
        (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 2, "overlap_comm": true}}')
        other = tmp_path / "other.json"
        other.write_text('{"zero_optimization": {"stage": 2}}')
        files = ConfigFiles(train=config(tmp_path, "deepspeed: zero.json"), deepspeed=other)
        assert load_config_files(files).warnings == ()

    @pytest.mark.parametrize(
        "keys",
        [
            "fsdp: full_shard offload",
            "fsdp: true\nfsdp_config: {cpu_offload: true, version: 2}",
            "fsdp: true\nfsdp_config: {fsdp_cpu_offload: true, fsdp_activation_checkpointing: false}",
        ],
    )
    def test_fsdp_of_the_trainer_itself_is_read(self, tmp_path, keys):
        read = load_config_files(ConfigFiles(train=config(tmp_path, keys)))
        fields = candidate_fields(read.settings, PUBLISHED)
        assert (fields["sharding"], fields["offload_param"]) == ("fsdp2", True)
        assert "gradient_checkpointing" not in fields
        assert sentences(read.warnings) == ()

    def test_a_deepspeed_file_replaces_the_one_that_accelerate_has(self, tmp_path):
        (tmp_path / "zero.json").write_text('{"zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"}}')
        read = load_config_files(
            ConfigFiles(accelerate=accelerate(tmp_path, ZERO_2), deepspeed=tmp_path / "zero.json")
        ).settings
        assert (read["zero_stage"], read["reduce_bucket_size"], read["offload_optimizer_device"]) == (3, "auto", "none")

    @pytest.mark.parametrize(("ours", "expected"), [("bf16: false", "fp16"), ("bf16: true", "bf16")])
    def test_accelerates_precision_counts_where_the_training_has_none(self, tmp_path, ours, expected):
        launch = accelerate(tmp_path, "distributed_type: MULTI_GPU\nmixed_precision: fp16")
        read = load_config_files(ConfigFiles(train=config(tmp_path, ours), accelerate=launch))
        assert candidate_fields(read.settings, PUBLISHED)["precision"] == expected

    def test_a_deepspeed_key_of_the_training_shards_what_accelerate_starts(self, tmp_path):
        launch = accelerate(tmp_path, "distributed_type: MULTI_GPU\nnum_processes: 4")
        train = config(tmp_path, "deepspeed: {zero_optimization: {stage: 3}}")
        read = candidate_fields(load_config_files(ConfigFiles(train=train, accelerate=launch)).settings, PUBLISHED)
        assert (read["sharding"], read["num_processes"]) == ("zero3", 4)

    @pytest.mark.parametrize(
        ("launch", "message"),
        [
            (
                "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2}",
                r"^zero_stage is 3 in \S*train\.yaml and 2 in \S*accelerate\.yaml\. Drop one of them\.$",
            ),
            ("- a", r"accelerate\.yaml is no accelerate config: it should hold keys and values"),
            ("adapter: qlora\nmicro_batch_size: 2", r"accelerate\.yaml is no accelerate config: it has no distributed"),
            ("distributed_type: NO\nnum_processes: -8", r"accelerate\.yaml has num_processes -8, which must be at"),
            ("distributed_type: MULTI_GPU\nnum_machines: 0", r"accelerate\.yaml has num_machines 0, which must be at"),
        ],
    )
    def test_files_that_contradict_or_are_none_are_refused(self, tmp_path, launch, message):
        train = config(tmp_path, "deepspeed: {zero_optimization: {stage: 3}}")
        with pytest.raises(InputError, match=message):
            load_config_files(ConfigFiles(train=train, accelerate=accelerate(tmp_path, launch)))

    def test_a_training_may_name_its_launch_file_and_the_processes(self, tmp_path):
        accelerate(tmp_path, ZERO_2)
        train = config(tmp_path, "accelerate_config: accelerate.yaml\nnum_processes: 4")
        read = load_config_files(ConfigFiles(train=train))
        assert (read.settings["zero_stage"], read.settings["num_processes"]) == (2, 4)
        assert sentences(read.warnings) == ()

    @pytest.mark.parametrize("name", sorted(PROFILES))
    def test_a_launch_file_of_trl_has_a_name(self, name):
        import trl

        theirs = load_launch_config(Path(trl.__file__).parent / "accelerate_configs" / f"{name}.yaml", None)
        ours = load_launch_config(Path(name), None).settings
        processes = {key: value for key, value in theirs.settings.items() if key in PROCESSES and key not in ours}
        without_offload = {"fsdp_offload_params": False} if name.startswith("fsdp") else {}
        assert ours | processes | without_offload == theirs.settings

    def test_a_deepspeed_file_that_is_not_read_is_refused(self, tmp_path):
        (tmp_path / "zero.json").write_text("{}")
        with pytest.raises(InputError, match=r"has distributed_type MULTI_GPU, so that it does not read \S*zero\.json"):
            load_config_files(
                ConfigFiles(
                    accelerate=accelerate(tmp_path, "distributed_type: MULTI_GPU"), deepspeed=tmp_path / "zero.json"
                )
            )
