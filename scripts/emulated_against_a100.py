"""The emulated GPU against an A100: rows of fms-acceleration's benchmark, with the releases that were measured.

    python -m scripts.emulated_against_a100 run      appends lines to results/emulated_gpu_a100.jsonl
    python -m scripts.emulated_against_a100 table    prints the table of results/emulated_gpu.md

The measured releases are older than those that probes need: `run` needs scripts/emulated_environment.sh, and before its
packages those of `RELEASES` on PYTHONPATH. It runs the rows of the installed Transformers, each in a process of its
own: three steps on full rows of 4,096 tokens with the Trainer of Transformers, to which TRL added nothing at that time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from planner.gpus.catalogue import load_gpu
from planner.models.catalogue import load_model
from planner.units import GIB
from probes.emulated_gpu.machine import Machine, read_processes
from probes.emulated_gpu.start import MACHINE_FILE, machine_environment
from scripts.emulated_against_t4 import ONE_BY_ONE, write_checkpoint

ROWS = Path(__file__).resolve().parents[1] / "results" / "emulated_gpu_a100.jsonl"
PACKAGES = ("torch", "transformers", "peft", "accelerate", "bitsandbytes")
# Releases of Transformers by model. Source: fms-acceleration, scripts/benchmarks/refs,
# requirements_update_cross_entropy_and_deps.txt and requirements_granite.txt; torch 2.4.1 in both.
MISTRAL, POWERLM = "mistralai/Mistral-7B-v0.1", "ibm/PowerLM-3b"
RELEASES = {MISTRAL: "4.48", POWERLM: "4.45"}
# FlashAttention 2 was measured, which has no build without NVIDIA's compiler. PyTorch's own takes the same memory,
# but under a sliding window Transformers makes a mask for it: the window is as long as the rows, and left out.
CHANGES: dict[str, object] = {"sliding_window": None}
CONFIGS: dict[str, dict[str, object]] = {
    MISTRAL: {**load_model("Mistral-7B-v0.1", paths=False, hub=False).config, **CHANGES},
    POWERLM: {  # 3.51 B parameters, which agrees with the bytes of its weights
        "model_type": "granite",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_attention_heads": 36,
        "num_key_value_heads": 36,
        "num_hidden_layers": 40,
        "vocab_size": 49152,
        "tie_word_embeddings": True,
        "max_position_embeddings": 4096,
    },
}
LENGTH, STEPS, RANK = 4096, 3, 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj"]


class Published(Struct, frozen=True, kw_only=True):
    """A row of refs/a100_80gb.csv or a100_80gb_granite.csv, in GiB. qlora: without weights cast to float32."""

    model: str
    tuning: str
    batch: int
    allocated: float
    driver: float  # nvidia-smi, less its first reading


def _published(model: str, figures: dict[tuple[str, int], tuple[float, float]]) -> list[Published]:
    return [
        Published(model=model, tuning=tuning, batch=batch, allocated=allocated, driver=driver)
        for (tuning, batch), (allocated, driver) in figures.items()
    ]


# fmt: off
PUBLISHED = (
    *_published(MISTRAL, {
        ("full", 4): (67.460, 75.445), ("full", 8): (67.461, 71.277), ("lora", 4): (24.871, 28.883),
        ("lora", 8): (36.082, 42.219), ("qlora", 4): (15.249, 19.445), ("qlora", 8): (26.461, 33.219),
    }),
    *_published(POWERLM, {
        ("full", 4): (32.722, 46.565), ("full", 8): (43.827, 51.687), ("lora", 4): (18.785, 24.015),
        ("lora", 8): (30.876, 40.271), ("qlora", 4): (14.111, 18.925), ("qlora", 8): (26.202, 34.997),
    }),
)
# fmt: on


def train(row: Published, folder: Path) -> None:
    """Train for three steps in this process, and print the peak of what PyTorch allocated."""
    import torch
    import transformers
    from peft import LoraConfig, get_peft_model

    from probes.emulated_gpu.values import small_values_on_host

    ids = torch.arange(LENGTH) % 1000
    rows = [{"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}] * (STEPS * row.batch)
    dtype, settings = torch.bfloat16, {}
    if row.tuning == "qlora":
        settings["device_map"] = {"": 0}
        settings["quantization_config"] = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=dtype,
        )
    write_checkpoint(CONFIGS[row.model], folder)
    with small_values_on_host():
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, torch_dtype=dtype, attn_implementation="sdpa", **settings
        )
        if row.tuning != "full":
            lora = LoraConfig(r=RANK, lora_alpha=RANK, lora_dropout=0.1, target_modules=TARGETS, task_type="CAUSAL_LM")
            model = get_peft_model(model, lora)
            model.enable_input_require_grads()
        arguments = transformers.TrainingArguments(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=row.batch,
            max_steps=STEPS,
            gradient_checkpointing=True,
            optim="adamw_torch",
            bf16=row.tuning == "qlora",
            report_to=[],
            save_strategy="no",
        )
        transformers.Trainer(model=model, args=arguments, train_dataset=rows).train()
    print(torch.cuda.max_memory_allocated())


def emulated(index: int) -> dict[str, float]:
    """Return the row's figures on the emulated A100, in GiB."""
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(gpu=load_gpu("A100-80G"), cards=1)
        ran = subprocess.run(
            [sys.executable, "-m", "scripts.emulated_against_a100", "row", str(index), folder],
            env=os.environ | ONE_BY_ONE | machine_environment(machine, Path(folder)),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        driver = max(process.peak_bytes[0] for process in read_processes(Path(folder) / MACHINE_FILE))
    return {"allocated": round(int(ran.stdout.split()[-1]) / GIB, 3), "driver": round(driver / GIB, 3)}


def run() -> None:
    """Run the rows of the installed Transformers; append them."""
    versions = {package: version(package) for package in PACKAGES}
    for index, row in enumerate(PUBLISHED):
        if versions["transformers"].startswith(RELEASES[row.model]):
            found = {"published": asdict(row), "versions": versions, "emulated": emulated(index)}
            with ROWS.open("a") as file:
                file.write(json.dumps(found) + "\n")


def table() -> str:
    lines = ["| model | tuning | rows x tokens | allocated GiB | emulated | driver GiB | emulated |", "|---" * 7 + "|"]
    for found in map(json.loads, ROWS.read_text().splitlines()):
        row, cells = Published(**found["published"]), []
        for name, measured in (("allocated", row.allocated), ("driver", row.driver)):
            cells += [f"{measured:.2f}", f"{100 * (found['emulated'][name] / measured - 1):+.2f} %"]
        lines.append(f"| {row.model} | {row.tuning} | {row.batch} x {LENGTH:,} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mode", choices=("run", "table", "row"))  # row: of `run`, for one process
    parser.add_argument("rest", nargs="*")
    args = parser.parse_args()
    if args.mode == "run":
        run()
    elif args.mode == "row":
        train(PUBLISHED[int(args.rest[0])], Path(args.rest[1]))
    else:
        print(table())


if __name__ == "__main__":
    main()
