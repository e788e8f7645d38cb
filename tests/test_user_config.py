"""The user's own train.yaml with the plan's changes: nothing of it is lost, and TRL and plan read the plan from it."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_launch import CASES, candidate, each_case, parsed, plain

from planner.commands.main import run
from planner.errors import InputError
from planner.files.edit_yaml import Edits, KeyChange, edit_yaml
from planner.files.write import write_files
from planner.jobs.settings import candidate_fields
from planner.launch.files import launch_files
from planner.launch.torchrun import sharding_settings
from planner.launch.trl_config import trl_config
from planner.launch.user_config import merged_yaml
from planner.methods import MethodName
from planner.models.catalogue import load_model
from planner.requests.train_config import load_train_config

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

# Twenty keys that no plan decides, and comments, quotes and an order of their own.
OWN = """\
# -- our team's run, see the wiki
run_name: "night 7"          # shown in the dashboard
dataset_name: ours/rows
learning_rate: 2.0e-5        # 1e-4 diverged
lr_scheduler_type: cosine
warmup_steps: 25
weight_decay: 0.01

# logging
logging_steps: 5
report_to: [none]
save_strategy: "steps"
save_steps: 250
save_total_limit: 2
seed: 7
max_grad_norm: 0.5
num_train_epochs: 2
adam_beta2: 0.95
output_dir: 'out/night 7'
dataloader_num_workers: 4
disable_tqdm: true
log_level: error
data_seed: 11
hub_model_id: ours/night-7
"""
# Keys that plans decide, in spellings, types and places that people use.
PLANNED = """\
model_name_or_path: Qwen/Qwen2.5-7B  # to be changed
per_device_train_batch_size: 64   # too large
gradient_checkpointing: false
gradient_checkpointing_kwargs:
  use_reentrant: true
  every_n_layers: 3   # a third
use_peft: true
lora_target_modules:
  # attention only
  - q_proj   # q
  - v_proj

load_in_4bit: true
bf16: yes
deepspeed: old.json
num_processes: 3
model_init_kwargs: {attn_implementation: flash_attention_2, dtype: float16}
env:
  TOKENIZERS_PARALLELISM: "false"
"""


# TRL's parser reads every third case, and the others in the nightly run.
each_selected_case = pytest.mark.parametrize(
    ("method", "settings"),
    [
        pytest.param(method, settings, id=f"{method} {name}", marks=pytest.mark.nightly if index % 3 else ())
        for index, (method, name, settings) in enumerate(CASES)
    ],
)


class TestTrl:
    @each_selected_case
    def test_it_reads_the_plan_and_the_user_s_keys(
        self, method: MethodName, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "TOKENIZERS_PARALLELISM"):
            monkeypatch.setenv(name, "")  # the parser sets them, and the test takes them back
        held = candidate(method, **settings)
        write_files(launch_files(held, config=OWN + PLANNED), tmp_path, overwrite=False)
        arguments = parsed(held, tmp_path)
        for name, value in trl_config(held).items():
            if name in ("env", "accelerator_config"):
                continue
            if name == "model_init_kwargs":  # the file's own has other keys
                assert getattr(arguments, name).items() >= value.items()
                continue
            assert plain(getattr(arguments, name)) == value, name
        own = yaml.safe_load(OWN)
        assert {
            name: plain(getattr(arguments, name)) for name in own if name not in ("report_to", "learning_rate")
        } == {name: value for name, value in own.items() if name not in ("report_to", "learning_rate")}
        assert arguments.learning_rate == 2e-5

    @each_selected_case
    def test_keys_that_the_plan_left_at_their_defaults_are_trl_s(
        self, method: MethodName, settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
        held = candidate(method, **settings)
        write_files(launch_files(held, config="learning_rate: 1.0e-5\n"), tmp_path, overwrite=False)
        arguments = parsed(held, tmp_path)
        for name, value in trl_config(held).items():
            if name.endswith("checkpointing_kwargs") and getattr(arguments, name) is None:
                assert value == {"use_reentrant": False}  # as the trainers have it: trl 1.16, trainer/sft_trainer.py
            elif name not in ("env", "accelerator_config"):
                assert plain(getattr(arguments, name)) == value, name


@each_case
def test_plan_reads_the_same_candidate_from_it(method: MethodName, settings: dict[str, Any], tmp_path: Path) -> None:
    held = candidate(method, **settings)
    read = []
    for folder, config in ((tmp_path / "own", OWN + PLANNED), (tmp_path / "new", None)):
        write_files(launch_files(held, config=config), folder, overwrite=False)
        found = load_train_config(folder / "train.yaml")
        fields: dict[str, Any] = dict(candidate_fields(found.settings, "bfloat16"))
        assert fields.pop("model") == held.model.id
        fields = {field: value for field, value in fields.items() if field not in held.method_row.fixed}
        fields |= {role: load_model(str(fields[role])) for role in ("reward_model", "teacher_model") if role in fields}
        read.append((found.method, found.trl_version, candidate(method, **fields)))
    assert read[0] == read[1]


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
@pytest.mark.parametrize("method", ["sft", "grpo"])
def test_twenty_keys_of_the_user_and_every_comment_come_back(method: MethodName, launcher: Any) -> None:
    held = candidate(method, num_processes=4, sharding="zero3")
    merged = launch_files(held, launcher, config=OWN + PLANNED)["train.yaml"]
    own = yaml.safe_load(OWN)
    assert len(own) >= 20
    assert yaml.safe_load(merged).items() >= own.items()
    assert OWN in merged  # untouched: bytes, order and comments
    for comment in ("# to be changed", "# too large", "# a third", "# attention only", "# q"):
        assert comment in merged
    assert yaml.safe_load(merged)["env"]["TOKENIZERS_PARALLELISM"] == "false"
    if launcher == "torchrun":
        assert yaml.safe_load(merged).items() >= sharding_settings(held).items()


def test_each_change_is_marked_where_it_stands() -> None:
    lines = merged_yaml(PLANNED, candidate("sft", per_device_train_batch_size=2)).splitlines()
    assert "per_device_train_batch_size: 2   # too large  # plan: was 64" in lines
    assert "activation_checkpointing: true  # plan: was gradient_checkpointing: false" in lines
    assert lines[lines.index("# deepspeed: old.json") - 1] == "# plan: accelerate.yaml says this:"
    place = next(index for index, line in enumerate(lines) if line.startswith("activation_checkpointing_kwargs:"))
    assert lines[place].endswith("# plan: instead of the lines below")
    assert lines[place + 1 : place + 3] == ["#   use_reentrant: true", "#   every_n_layers: 3   # a third"]
    assert "bf16: yes" in lines  # it means what the plan says
    assert all(
        line.endswith(("# plan: added", "# FILL IN"))
        for line in lines[lines.index('  TOKENIZERS_PARALLELISM: "false"') + 1 :]
    )


@pytest.mark.parametrize("value", [True, False])
def test_kernels_of_the_hub_stand_where_the_file_has_the_other_ways_to_load(value: bool) -> None:
    text = "model_name_or_path: ours\nmodel_init_kwargs:\n  use_kernels: true\n  trust_remote_code: true\n"
    merged = yaml.safe_load(merged_yaml(text, candidate("sft", use_kernels=value)))
    assert merged["model_init_kwargs"] == {"trust_remote_code": True, **({"use_kernels": True} if value else {})}


def test_a_second_export_changes_nothing_more() -> None:
    held = candidate("grpo", tuning="lora", per_device_train_batch_size=2)
    once = merged_yaml(OWN + PLANNED, held)
    assert merged_yaml(once, held) == once


@pytest.mark.parametrize(
    "text",
    [
        "bf16: &yes true\nfp16: false\nown: *yes\nuse_peft: &on true\nother: *on\n",
        "{use_peft: true, bf16: true}\n",
    ],
)
def test_what_cannot_be_changed_in_place_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(
        InputError, match=r"^train\.yaml cannot be changed in place \(.*use_peft.*\): .* Write one key a line\.$"
    ):
        merged_yaml(text, candidate("sft"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# nothing yet\n",
        "---\nseed: 1\n...\n",
        "seed: 1",
        "seed: 1\r\nbf16: false\r\n",
        "base: &b {use_peft: true}\n<<: *b\nseed: 1\n",
        "  seed: 1\n  bf16: false\n",
        "use_peft:\nseed: 1\n",
    ],
)
def test_files_of_any_form_say_the_plan(text: str) -> None:
    held = candidate("sft")
    read = yaml.safe_load(merged_yaml(text, held))
    assert {name: read.get(name, False) for name in ("use_peft", "fp16")} == {"use_peft": False, "fp16": False}
    assert read.get("bf16", True) is True
    assert read.get("seed", 1) == 1


# -- the editor --------------------------------------------------------------------------------------------------------

SCALARS = st.one_of(
    st.integers(-9, 9),
    st.booleans(),
    st.none(),
    st.text(st.sampled_from("ab #:-'\"\n{}[]é"), max_size=8),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("pqr"), inner, max_size=3),
    max_leaves=6,
)


def _one_key(key: str, value: object, flow: bool) -> str:
    """A key with its value as a block, or in brackets."""
    if not flow:
        return str(yaml.safe_dump({key: value}, default_flow_style=False, sort_keys=False, width=20))
    return f"{key}: {yaml.safe_dump([value], default_flow_style=True, width=20).strip()[1:-1]}\n"


MAPPINGS = st.dictionaries(st.sampled_from(["k1", "k2", "k3", "k4", "k5"]), VALUES, min_size=1, max_size=5)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    MAPPINGS,
    MAPPINGS,
    st.sets(st.sampled_from(["k1", "k2", "k3"])),
    st.booleans(),
    st.booleans(),
)
def test_edits_of_any_mapping_give_what_they_say(
    before: dict[str, Any], new: dict[str, Any], dropped: set[str], flow: bool, comments: bool
) -> None:
    text = "".join(_one_key(key, value, flow) for key, value in before.items())
    if comments:
        text = "# first\n\n" + text + "\n# last\n"
    if yaml.safe_load(text) != before:
        return  # brackets on several lines cannot be taken apart so
    edits = Edits(
        changed={key: KeyChange(name=key, value=new[key]) for key in new if key in before and key not in dropped},
        dropped={key: "for a reason" for key in dropped if key in before},
        added={key: new[key] for key in new if key not in before},
    )
    assert (yaml.safe_load(edit_yaml(text, before, edits, "a.yaml")) or {}) == edits.result(before)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.yaml").write_text(OWN + "model_name_or_path: Qwen/Qwen2.5-0.5B\nmax_length: 2048  # long\n")
    return tmp_path


NO_NAME_IS_TRLS = ("activation_checkpointing_kwargs", "attn_implementation")  # left out, they mean what the plan says


class TestCommand:
    JOB = "--config train.yaml --gpus 1xL4 --method sft --quiet"

    def test_one_step_writes_the_user_s_file_with_the_plan_in_it(self, folder: Path) -> None:
        assert run(shlex.split(f"{self.JOB} --set learning_rate=1 --max-length 1024 --export run")) == 0
        merged = (folder / "run" / "train.yaml").read_text()
        assert OWN in merged
        assert "max_length: 1024  # long  # plan: was 2048\n" in merged
        page = (folder / "run" / "README.md").read_text()
        assert "It is the file that was given" in page and "there is none" in page

    def test_two_steps_write_the_same(self, folder: Path) -> None:
        assert run(shlex.split(f"{self.JOB} --out saved --export one")) == 0
        assert run(shlex.split("export saved two --config train.yaml")) == 0
        assert {path.name: path.read_text() for path in (folder / "one").iterdir()} == {
            path.name: path.read_text() for path in (folder / "two").iterdir()
        }

    def test_the_files_are_not_overwritten_unless_that_is_said(self, folder: Path, capsys: Any) -> None:
        assert run(shlex.split(f"estimate {self.JOB} --export run")) == 0
        (folder / "run" / "train.yaml").write_text("mine")
        assert run(shlex.split(f"estimate {self.JOB} --export run")) == 2
        assert "Use --overwrite" in capsys.readouterr().err
        assert run(shlex.split(f"estimate {self.JOB} --export run --overwrite")) == 0

    @pytest.mark.parametrize("export", ["/dev/null/x", "file", "file/deeper"])
    def test_a_folder_that_cannot_be_written_is_refused_before_the_search(
        self, folder: Path, capsys: Any, export: str
    ) -> None:
        (folder / "file").write_text("")
        assert run(shlex.split(f"{self.JOB} --json --out saved --export {export}")) == 2
        said = capsys.readouterr()
        assert json.loads(said.out)["error"]["message"].endswith("is no folder.") and not (folder / "saved").exists()
        assert run(shlex.split(f"estimate {self.JOB} --json --export {export}")) == 2
        assert json.loads(capsys.readouterr().out).keys() == {"error"}

    def test_what_cannot_be_exported_is_one_error_and_no_report(self, folder: Path, capsys: Any) -> None:
        (folder / "run").mkdir()
        (folder / "run" / "train.yaml").write_text("mine")
        assert run(shlex.split(f"{self.JOB} --json --out saved --export run")) == 2
        assert json.loads(capsys.readouterr().out).keys() == {"error"}
        assert not (folder / "saved").exists()

    def test_what_does_not_fit_is_not_written(self, folder: Path) -> None:
        assert run(shlex.split(f"estimate {self.JOB} --set per_device_train_batch_size=512 --export run")) == 3
        assert not (folder / "run").exists()

    def test_settings_alone_are_pasted_into_a_file_and_behind_trl(
        self, folder: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from trl.scripts.sft import make_parser

        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "")
        texts = {}
        for form in ("yaml", "flags", "json"):
            capsys.readouterr()
            assert run(shlex.split(f"{self.JOB} --format {form}")) == 0
            texts[form] = capsys.readouterr().out
        (folder / "pasted.yaml").write_text(texts["yaml"])
        from_file = make_parser().parse_args_and_config(["--config", "pasted.yaml", "--use_cpu"])
        from_flags = make_parser().parse_args_and_config([*shlex.split(texts["flags"]), "--use_cpu"])
        by_library = json.loads(texts["json"])
        assert list(by_library) == ["trl", "peft", "accelerate", "deepspeed", "vllm", "env", "facts"]
        for name, value in by_library["trl"].items():
            for parsed_by in (from_file, from_flags):
                found = next(getattr(part, name) for part in parsed_by if hasattr(part, name))
                assert plain(found) == value or (name in NO_NAME_IS_TRLS and found is None), name

    @pytest.mark.parametrize("form", ["yaml", "flags", "json"])
    def test_settings_of_trl_are_not_printed_for_another_tools_config(
        self, folder: Path, capsys: Any, form: str
    ) -> None:
        (folder / "axolotl.yml").write_text("base_model: Qwen/Qwen2.5-0.5B\nadapter: lora\nlora_target_linear: true\n")
        job = f"estimate --config {folder / 'axolotl.yml'} --gpus 1xL4 --out {folder / 'out'}"
        assert run(shlex.split(f"{job} --format {form}")) == 2
        printed = capsys.readouterr()
        assert "which Axolotl does not read. Use --export" in printed.err and printed.out == ""
        assert not (folder / "out").exists()

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ("--format yaml --json", "give one of them"),
            ("--overwrite", "give --export too"),
            ("--format xml", "'xml'"),
            ("--export ''", "--export is empty"),
        ],
    )
    def test_contradicting_options_are_refused(self, folder: Path, capsys: Any, words: str, said: str) -> None:
        assert run(shlex.split(f"{self.JOB} {words}")) == 2
        assert said in capsys.readouterr().err
