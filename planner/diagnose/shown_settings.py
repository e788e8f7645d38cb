"""Settings that a log shows: in the run's command, in a launcher's print of it, in a printed configuration."""

import re
from collections.abc import Iterator

# Of Trainer's scripts, ms-swift, axolotl, Unsloth.
BATCH = re.compile(
    r"(?:--(?:per[_-]device[_-]train[_-]|micro[_-]|train[_-])?batch[_-]size(?:[= ]+|['\"], ?['\"])|"
    r"\b(?:per_device_train|micro)_batch_size['\"]?\s?[=:]\s?['\"]?)(\d{1,6})\b(?!\s?[*/+])"
)
OPTIONS = {"--do_train": "trains", "--do_predict": "predicts", "--do_eval": "evaluates"}
OPTION = re.compile(r"(--do_(?:train|predict|eval))\b(?!(?:[= ]{1,3}|['\"], ?['\"])(?:[Ff]alse|0)\b)")
# A command, after a prompt and variables of the environment.
RUNS = re.compile(
    r"^(?:.{0,80}[$#] |[$#>% ]{0,4})(?:[A-Z]\w*[= ]\S+ ){0,9}"
    r"(?:\S{0,99}/)?(?:python[\d.]{0,5}|torchrun|accelerate launch|deepspeed|[\w-]{1,30}-cli|swift|axolotl|xtuner|ilab|"
    r"tune run|litgpt|colossalai run) (?P<rest>.{0,500})"
)
# The names of a script, or of the subcommands before the first option.
PROGRAM = re.compile(r"[\w-]{1,99}(?=\.py\b)|(?<![\w/.-])[a-z]{2,20}(?=\s|$)")
NAMED = {
    "trains": r"\w*(?:train|finetun|fine_tun|fine-tun|sft|dpo|kto|grpo|ppo|rlhf)\w*",
    "infers": r"\w*(?:_completion|infer|generat|chat|sampl|demo|serve)\w*",
    "evaluates": r"\w*eval\w*",
}
# Commands and options with which an engine serves, which is not a trainer's (TRL's option has "vllm_") -> the engine.
SERVES = {
    "vllm": r"\bvllm serve\b|vllm\.entrypoints|--gpu-memory-utilization|--backend vllm\b",
    "sglang": r"sglang[./]launch_server|--mem-fraction-static",
}
IS = r"['\"]?[=:, '\"]{1,4}"
ON = rf"{IS}(?:[Tt]rue|1|unsloth|on)\b"
FLAG = r"(?=['\" ,]*(?:--|\\|$))"
SCRIPT = r"^[$#> ]{0,4}(?:bash|sh|python3?) \S{0,60}(?:train|tun|sft)\S{0,40}?[_-]"  # its name says what it does
# The share of a GPU that vLLM may take.
UTILIZATION = re.compile(r"--gpu[-_]memory[-_]utilization(?:[= ]+|['\"], ?['\"])([01]?\.?\d{1,4})\b")
PARAMETERS = re.compile(r"(?<![\w.])(\d{1,3}(?:\.\d{1,2})?)[bB](?![\w.])")  # as in Llama-2-7b-hf
# Settings that are in effect. An option counts, and no rank that a configuration prints whether adapters train or not.
IN_EFFECT = {
    "checkpointing": rf"(?:gradient|activation)[_-]checkpointing(?:{ON}|{FLAG})",
    "adapters": rf"(?:finetuning|sft|train|tuner|peft)_type{IS}q?lora\b|--use_peft{FLAG}|use_(?:peft|lora){ON}|"
    rf"--lora_(?:r|rank|alpha){IS}[1-9]|^\s*adapter: q?lora|"
    rf"{SCRIPT}lora",
    "4-bit": rf"load_in_4bit{ON}|{SCRIPT}(?:int4|4bit|qlora)|quantization_bit{IS}4|^\s*adapter: qlora|--qlora{FLAG}",
    "eager": r"--enforce[-_]eager\b|\benforce_eager['\"]?[=:] ?True",
    "float32": r"--dtype(?:[= ]+|['\"], ?['\"])float(?:32)?\b",
    "sharding": r"zero[_-]?(?:stage[_-]?)?3(?!_)|stage['\"]?: ?3\b|full_shard",
}
FRAME = re.compile(r"\s*File \"|[│|]")  # a line of code, which says only what a program can do
# The lines with a setting have one of these.
SETTING_WORDS = (
    *("batch_size", "batch-size", "--do_", "_checkpointing", "-checkpointing", "lora", "use_peft", "4bit"),
    *("quantization_bit", "zero", "stage", "full_shard", "python", "torchrun", "accelerate launch", "deepspeed "),
    *("vllm serve", "vllm.entrypoints", "--gpu-memory-utilization", "--backend vllm", "launch_server"),
    *("--enforce", "enforce_eager", "--dtype", "model_name", "--model ", "--gpu_memory_utilization", "int4"),
    *("-cli ", "swift ", "axolotl ", "xtuner ", "ilab ", "tune run", "litgpt ", "colossalai run"),
)


def batch_of(text: str) -> int:
    """The rows of a GPU's batch in a training that a line shows; 0 if it shows none."""
    match = BATCH.search(text)
    return int(match[1]) if match else 0


def utilization_of(text: str) -> float:
    """The share of a GPU that a line grants vLLM; 0 if it shows none."""
    match = UTILIZATION.search(text)
    return float(match[1]) if match else 0.0


def parameters_of(text: str) -> Iterator[float]:
    """The parameters, in billions, of the models that a line names."""
    if "model" in text:
        yield from (float(number) for number in PARAMETERS.findall(text) if float(number))


def purposes_of(text: str) -> Iterator[str]:
    """What a command runs, by its options and the names of its script and subcommands."""
    yield from (OPTIONS[option] for option in OPTION.findall(text))
    if match := RUNS.match(text):
        command = match["rest"] if ".py" in match["rest"] else match["rest"].partition(" -")[0]
        names = PROGRAM.findall(command)
        yield from (purpose for purpose, of in NAMED.items() if any(re.fullmatch(of, name) for name in names))


def serves(text: str) -> str:
    """The engine that a command starts to serve; empty if it starts none."""
    return next((engine for engine, pattern in SERVES.items() if re.search(pattern, text)), "")


def in_effect(text: str) -> Iterator[str]:
    """The settings of IN_EFFECT that a line shows."""
    if not FRAME.match(text):
        yield from (name for name, pattern in IN_EFFECT.items() if re.search(pattern, text))
