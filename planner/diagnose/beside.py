"""Facts of a log beside its error: the step that ran, memory that grew from step to step, memory of the host."""

import re
from collections import deque
from collections.abc import Sequence
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from planner.diagnose.phase_words import SAID_WORDS, purpose_of_line
from planner.diagnose.shown_settings import (
    SETTING_WORDS,
    batch_of,
    in_effect,
    parameters_of,
    purposes_of,
    serves,
    utilization_of,
)
from planner.quantities import Phase
from planner.units import GIB, KIB, MIB

# Commands that merge adapters into a model on a disk, and what LLaMA-Factory prints after it has merged some.
EXPORTS = (
    *("export_model.py", "llamafactory-cli export", "swift export", "axolotl merge-lora"),
    *(" adapter(s).", " model checkpoint(s)."),
)
SaidActivity = Literal["", "merges", "predicts", "prepares", "offloads", "sglang", "trains"]
# Lines that say what a run does, by a word. Source: transformers 5.23, trainer.py, modeling_utils.py and
# core_model_loading.py; releases before 5 print "Loading checkpoint shards", those before 4.31 a file. vllm 0.31,
# model_executor/model_loader/weight_utils.py and entrypoints/offline_utils.py. deepspeed 0.19.8, runtime/engine.py
# ("Creating torch.bfloat16 ZeRO stage 2 optimizer"), runtime/zero/stage3.py (`see_memory_usage`),
# runtime/checkpoint_engine/torch_checkpoint_engine.py. torch 2.13, distributed/fsdp/_state_dict_utils.py, which only
# warns. trl 1.16, trainer/dpo_trainer.py and kto_trainer.py. peft 0.21, helpers.py. unsloth_zoo, saving_utils.py.
# llama's and fairscale's initialize_model_parallel; litgpt, finetune/lora.py; verl,
# utils/checkpoint/fsdp_checkpoint_manager.py; llama-recipes, model_checkpointing/; LLaMA-Factory, model/loader.py;
# Lightning's and ms-swift's bars; sglang, srt/model_executor/cuda_graph_runner.py; ColossalAI's launch.
SAID_PHASES: dict[str, Phase | None] = {
    **dict.fromkeys(
        (
            "Loading checkpoint shards",
            "Loading weights",
            "loading weights file",
            "Loading safetensors checkpoint shards",
            "Loading pt checkpoint shards",
            "Multi-thread loading shards",
            "Starting to load model",
            "> initializing ",
            "environment is initialized, data parallel size",
            "Instantiating ",
            "Computing SVD",
            " ZeRO stage ",
            "After creating fp32 partitions",
            "Before initializing optimizer states",
            "After initializing optimizer states",
            "Time to load cpu_adam",
            "Attempting to resume from",
            "ZeRO state_dicts for rank",
            "[Torch] Loading checkpoint from",
            "Capture cuda graph failed",
            "Capture CUDA graph failed",
        ),
        "load",
    ),
    "***** Running training *****": None,
    **dict.fromkeys(
        (
            "***** Running Evaluation *****",
            "***** Running evaluation *****",
            "Validation DataLoader",
            "Sanity Checking DataLoader",
            "Val: ",
        ),
        "evaluation",
    ),
    "Computing reference log probs": "score",
    "Processed prompts": "rollout",
    **dict.fromkeys(
        (
            "Saving model checkpoint to",
            "Saving sharded model checkpoint to",
            "Saving LoRA weights to",
            "Writing model shards",
            "[Torch] Saving ",
            "Saving the FSDP model checkpoints",
            "we are about to save the PEFT modules",
            "Failed to clone() tensor",
            ": Saving model to ",
            ": Saving optim to ",
            ": Saving extra_state to ",
            "Saved model to ",
        ),
        "save",
    ),
    **dict.fromkeys(("Unsloth: Merging", "running merge of LoRA", "Merge LoRA", "INFO:hf-to-gguf"), "save"),
    **dict.fromkeys(EXPORTS, "save"),
    "***** Running Prediction *****": "evaluation",
}
# The same for what runs, where it decides more than the phase. datasets 5.2, arrow_dataset.py and builder.py; trl 1.16,
# trainer/sft_trainer.py and others, data_utils.py; LLaMA-Factory, data/loader.py; axolotl, utils/data/.
SAID_ACTIVITIES: dict[str, SaidActivity] = {
    **dict.fromkeys(("Unsloth: Merging", "running merge of LoRA", "Merge LoRA"), "merges"),
    **dict.fromkeys(EXPORTS, "merges"),
    **dict.fromkeys(("Time to load cpu_adam", "Before initializing optimizer states"), "offloads"),
    "***** Running Prediction *****": "predicts",
    **dict.fromkeys(("Capture cuda graph failed", "Capture CUDA graph failed"), "sglang"),
    **dict.fromkeys(
        (
            "Map: ",
            "Map (num_proc",
            "Filter: ",
            "Filter (num_proc",
            " split: ",
            "Saving the dataset (",
            "Loading dataset from disk",
            "Flattening the indices",
            "Running tokenizer on",
            "Tokenizing ",
            "Applying chat template",
            "Applying formatting function",
            "Extracting prompt",
            "Adding EOS",
            "Truncating ",
            "Packing ",
            "Dropping ",
            "Converting train dataset",
            "Converting format of dataset",
        ),
        "prepares",
    ),
}
# kubectl describe, of a container's limits
LIMIT = re.compile(r"^\s*memory: +(\d{1,9})([KMG])i?\s*$")
UNITS = {"K": KIB, "M": MIB, "G": GIB}
BARS, MEMORY, HOST = ("it]", "it/s]", "it/s, Epoch", "'loss': "), "emory", "CPU Virtual Memory"
TRAINER = re.compile(
    r"(?<![a-z])(?:trl|verl|openrlhf|swift|unsloth|skyrl|nemo_rl|slime|areal|\w*train\w*|grpo)(?![a-z])", re.I
)
LOADED = "trainable params: "  # peft 0.21, `print_trainable_parameters`, after the model has loaded
EVALUATED = "eval_runtime"  # transformers 5.23, trainer_utils.py, `speed_metrics`
# bitsandbytes 0.50, cextension.py; releases before 0.43 too
WITHOUT_CUDA = frozenset({"compiled without GPU support", "libbitsandbytes_cpu", "CUDA Setup failed"})
COLOCATED = "colocate"  # TRL's vllm_mode, and the names of SkyRL's, OpenRLHF's and verl's settings and tests
RANKS = frozenset({"torchrun", "accelerate launch", "deepspeed ", "distributed.launch", "local_rank", "local-rank"})
# An engine that has started. Source: vllm 0.31, entrypoints/openai/ and v1/metrics/loggers.py; uvicorn.
SERVING = frozenset({"200 OK", "Received request", "Avg prompt throughput", "Application startup complete"})
# transformers 5.23, configuration_utils.py, which each rank prints as it begins to load; one line may be of a file that
# something else reads
INSTANTIATES = "to instantiate a model of type"
WORDS = (
    *(*RANKS, *SERVING, INSTANTIATES),
    *(*SAID_PHASES, *SAID_ACTIVITIES, *WITHOUT_CUDA, *BARS, *SETTING_WORDS),
    *(EVALUATED, MEMORY, HOST, "mem(", "mem_", COLOCATED, LOADED, *SAID_WORDS),
)
# The bar of transformers' Trainer has no title, as those of loading and of datasets have; ms-swift, verl, Lightning and
# loops of one's own give one.
STEP = re.compile(
    r"^\s*(?:(?:Train|Training|Training Progress|[Ee]poch:? \d{1,6}(?:/\d{1,6})?): *)?"
    r"\d{1,3}%\|[^|]{0,200}\| *(\d{1,9})/(\d{1,9}) \["
)
# In a notebook, which counts the step that runs. Source: transformers 5.23, utils/notebook.py.
NOTEBOOK_STEP = re.compile(r"^\s*\[ *(\d{1,9})/(\d{1,9}) [\d:]{1,12} < [\d:]{1,12}, ")
# The step in a checkpoint's folder, of transformers, verl, OpenRLHF and Megatron.
SAVED_STEP = re.compile(r"(?:checkpoint-|global_step_?|iter_)(\d{1,9})\b")
# Figures of a step: ms-swift "memory(GiB)", axolotl "memory/max_allocated (GiB)", verl "max_memory_allocated_gb". Not
# those of a message, which follow words.
GROWING = re.compile(r"mem(?:ory)?[\w/]{0,30} ?\(?(?:GiB|GB|gib|gb)\)?['\"]? ?[:=] ?['\"]?(\d{1,6}(?:\.\d{1,6})?)")
# deepspeed 0.19.8, runtime/utils.py, `see_memory_usage`, whose GB are 2**30 bytes.
HOST_USED = re.compile(r"CPU Virtual Memory: +used = (\d{1,6}(?:\.\d{1,3})?) GB, percent = (\d{1,3}(?:\.\d)?)%")
NEAR = 40  # lines of the log after one that says in words of its own what runs, in which that counts. Judged
KEPT = 200  # figures of memory, the last ones
LEAST_GROWTH = 1.1  # last over first figure. Judged: below, the allocator's rounding explains it
LEAK_FIGURES = 6  # figures from which a constant growth is one


class Beside(Struct, frozen=True, kw_only=True):
    """Facts of a log before its error. Sizes in bytes; 0 and empty: the log does not have them."""

    step: int = 0  # of the optimizer, the one that ran, from 1
    steps: int = 0
    memory: tuple[int, ...] = ()  # of the GPU, by step, if it grew
    host_used: int = 0
    host_total: int = 0
    limit: int = 0  # of the container's memory, as Kubernetes describes it
    phase: Phase | None = None
    activity: SaidActivity = ""
    said_line: int = 0  # of the log, that says the phase or what ran
    without_cuda: bool = False  # bitsandbytes was built, or started, without it
    batch: int = 0  # of a GPU, as the command or the configuration says
    commands: frozenset[str] = frozenset()  # what the command runs: NAMED, OPTIONS
    serves: str = ""  # the engine that the command starts, of SERVES; empty if it trains
    serving: bool = False  # an engine says that it has started, or that it answers
    utilization: float = 0.0  # of a GPU, which the command grants vLLM; 0: it does not say
    own_words: bool = False  # the phase is that of a line in words of its own
    parameters: frozenset[float] = frozenset()  # of models that the log names, in billions
    step_line: int = 0  # of the log, with the last bar of a training
    trainer: bool = False  # a line names a trainer that may run the engine
    ranks: bool = False  # a line names a launcher of several ranks, or a rank
    colocated: bool = False  # the log names an engine that shares the trainer's GPUs
    in_effect: frozenset[str] = frozenset()  # of IN_EFFECT

    @property
    def leaks(self) -> bool:
        """True if memory grew by about the same in every step.

        Rows of other lengths make it grow in jumps that become rare: each is a new longest row.
        """
        grown = [after - before for before, after in zip(self.memory, self.memory[1:], strict=False)]
        if len(self.memory) < LEAK_FIGURES or min(grown) <= 0:
            return False
        half = len(grown) // 2
        return sum(grown[-half:]) >= sum(grown[:half]) / 2

    def with_settings(self, later: "Beside") -> "Beside":
        """These facts with the settings that lines after the error show."""
        return replace(
            self,
            batch=self.batch or later.batch,
            ranks=self.ranks or later.ranks,
            utilization=self.utilization or later.utilization,
            parameters=self.parameters | later.parameters,
            commands=self.commands | later.commands,
            in_effect=self.in_effect | later.in_effect,
        )


class BesideReader:
    """Reads a log line by line, and keeps what `Beside` says."""

    def __init__(self, phase: Phase | None = None) -> None:
        self._memory: deque[float] = deque(maxlen=KEPT)
        self._phase = phase
        self._line = self._said_line = 0
        self._own_words: tuple[Phase | None, SaidActivity, int] = (None, "", 0)  # what they say, and their line
        self._activity: SaidActivity = ""
        self._without_cuda = False
        self._step = (0, 0)
        self._saved_step = 0  # of the last checkpoint that was written
        self._evaluates = False  # the last bar was another than that of `_step`
        self._host = (0.0, 0.0)
        self._limit = 0
        self._batch = 0
        self._commands: set[str] = set()
        self._serves = ""
        self._serving = False
        self._parameters: set[float] = set()
        self._utilization = 0.0
        self._step_line = 0
        self._instantiated = 0  # lines of INSTANTIATES
        self._trainer = False
        self._colocated = False
        self._ranks = False
        self._in_effect: set[str] = set()

    def read(self, text: str, words: Sequence[str], line: int) -> None:
        """Take one line with its number, and the WORDS that it has."""
        self._line = line
        self._read_signs(text, words)
        self._read_settings(text, words)
        said = [word for word in words if word in SAID_PHASES or word in SAID_ACTIVITIES]
        if said and (match := SAVED_STEP.search(text)):
            self._saved_step = int(match[1])
        for word in said:
            self._phase, self._activity = SAID_PHASES.get(word), SAID_ACTIVITIES.get(word, "")
            self._said_line = line
            self._step = self._step if self._phase else (0, 0)
        if not said and not set(SAID_WORDS).isdisjoint(words):
            self._read_own_words(text)
        if not said and not set(BARS).isdisjoint(words):
            if self._phase == "load" or self._activity == "prepares":  # what has a bar of its own comes later
                self._phase, self._activity = None, ""
            self._read_bar(text)
        if LOADED in words:
            self._own_words = (None, "", 0)
        if EVALUATED in words:
            self._phase = None if self._phase == "evaluation" else self._phase
            self._step, self._evaluates = self._step if self._evaluates else (0, 0), False
        self._read_sizes(text, words)

    def _read_signs(self, text: str, words: Sequence[str]) -> None:
        """Take what a line shows by a word alone."""
        self._trainer = self._trainer or TRAINER.search(text) is not None
        self._without_cuda = self._without_cuda or not WITHOUT_CUDA.isdisjoint(words)
        self._colocated = self._colocated or COLOCATED in words
        self._ranks = self._ranks or not RANKS.isdisjoint(words)
        self._serving = self._serving or not SERVING.isdisjoint(words)
        if INSTANTIATES in words:
            self._instantiated += text.count(INSTANTIATES)
            self._own_words = ("load", "", self._line) if self._instantiated > 1 else self._own_words

    def _read_own_words(self, text: str) -> None:
        """Take what a line says in words of its own that runs now."""
        purpose = purpose_of_line(text)
        if purpose == "trains" or purpose == "program":
            self._own_words = (None, "trains", self._line)
        elif purpose is not None:
            self._own_words = (purpose, "merges" if "erging" in text and purpose == "save" else "", self._line)

    def _read_settings(self, text: str, words: Sequence[str]) -> None:
        """Take what the run's command, or its printed configuration, says of it."""
        if set(SETTING_WORDS).isdisjoint(words):
            return
        self._commands.update(purposes_of(text))
        self._serves = self._serves or serves(text)
        self._utilization = self._utilization or utilization_of(text)
        self._in_effect.update(in_effect(text))
        self._batch = batch_of(text) or self._batch
        self._parameters.update(parameters_of(text))

    def _read_sizes(self, text: str, words: Sequence[str]) -> None:
        """Take the figures of memory of a line."""
        if HOST in words and (match := HOST_USED.search(text)) and float(match[2]):
            used = float(match[1])
            self._host = (used, 100 * used / float(match[2]))
        elif match := LIMIT.match(text):
            self._limit = self._limit or int(match[1]) * UNITS[match[2]]  # requests follow it
        elif match := GROWING.search(text):
            self._memory.append(float(match[1]))

    def _read_bar(self, text: str) -> None:
        """Take the step of a training's bar. An evaluation has one of its own, with another number of steps."""
        in_notebook = NOTEBOOK_STEP.match(text)
        match = in_notebook or STEP.match(text)
        if match is None or (self._phase == "evaluation" and int(match[2]) != self._step[1]):
            return
        steps = int(match[2])
        if self._phase == "save" and int(match[1]) < self._saved_step:  # printed again, or late
            self._step = (min(int(match[1]) + 1, steps), steps)
            return
        self._evaluates = self._step[1] not in (0, steps)
        if not self._evaluates:
            self._step = (min(int(match[1]) + (0 if in_notebook else 1), steps), steps)
            self._own_words, self._step_line = (None, "", 0), self._line
            self._phase, self._activity = "save" if 1 < int(match[1]) == steps else None, ""  # all steps are done

    def said(self) -> Beside:
        """Return the facts of the lines that were read."""
        phase, activity, said_line = self._phase, self._activity, self._said_line
        own_words = False
        if phase is None and not activity and self._own_words[2] and self._line <= self._own_words[2] + NEAR:
            phase, activity, said_line = self._own_words
            own_words = True
        grew = len(self._memory) > 2 and self._memory[-1] >= LEAST_GROWTH * self._memory[0]
        return Beside(
            step=self._step[0],
            steps=self._step[1],
            memory=tuple(round(size * GIB) for size in self._memory) if grew else (),
            host_used=round(self._host[0] * GIB),
            host_total=round(self._host[1] * GIB),
            limit=self._limit,
            phase=phase,
            activity=activity,
            said_line=said_line if phase or activity else 0,
            without_cuda=self._without_cuda,
            batch=self._batch,
            commands=frozenset(self._commands),
            serves="" if "trains" in self._commands else self._serves,
            colocated=self._colocated,
            ranks=self._ranks,
            serving=self._serving,
            parameters=frozenset(self._parameters),
            utilization=self._utilization,
            own_words=own_words,
            step_line=self._step_line,
            trainer=self._trainer,
            in_effect=frozenset(self._in_effect),
        )
