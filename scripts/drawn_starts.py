"""Command lines of `plan` drawn at random, whose exported files are started (scripts/emulated_starts.py).

A draw depends on its seed and number alone, and the catalogue. On most clusters the drawn model does not fit, so that a
draw has further clusters with their schemes, of which the first with a plan is started. FlashAttention is not installed
where the starts run, so attention is pinned, and vLLM is not drawn.
"""

from functools import lru_cache

from msgspec import Struct
from msgspec.structs import replace

from planner.methods import METHODS, MethodName
from planner.models.catalogue import load_model, model_rows
from planner.models.image_tower import has_image_tower
from planner.models.shape import ModelShape
from scripts.drawn_jobs import Draw

CARDS = ("T4", "L4", "RTX-4090", "A100-40G", "A100-80G", "H100", "H200", "B200")
LENGTHS = (96, 300, 512, 1024, 2048, 4097)
SCHEMES: tuple[tuple[str, ...], ...] = (
    (),  # as the search decides
    ("distributed_type=MULTI_GPU",),
    ("zero_stage=1",),
    ("zero_stage=2",),
    ("zero_stage=3",),
    ("distributed_type=FSDP",),
)
# Chances of settings beside those that every draw has.
EVALUATION, ACCUMULATION, EAGER, PACKING, IMAGES, YAML, TORCHRUN = 0.5, 0.4, 0.1, 0.5, 0.3, 0.15, 0.4
RESUMED = 0.4  # chance of a second start, from the checkpoint; it takes as long as the first
CLUSTERS = 8  # of a draw, at most
# Draws that are proven by probes of whole models (scripts/emulated_certificates.py): one process runs there, of one GPU
# or for all of more than two.
PROVEN_CARDS = (
    "RTX-3050-Laptop-4G", "RTX-3060-8G", "RTX-3060-12G", "T4", "L4", "RTX-4090", "RTX-5090", "A100-40G", "L40S",
    "A100-80G", "H100", "H200", "B200",
)  # fmt: skip
PROVEN_SIZES = (0.45e9, 72e9)  # parameters
PROVEN_LENGTHS = (512, 1024, 2048, 4096, 8192)
LENGTH, BATCH, PROVEN_IMAGES = 0.5, 0.3, 0.1  # chances of what a user sets
SHORTEST_WITH_IMAGE = 1024  # tokens of a row: an image is up to 784 of them
LARGEST_MODEL = 36e9  # parameters; larger ones fit few of the clusters
USERS_YAML = "# my run\nlearning_rate: 1.0e-4\nwarmup_steps: 1\nlogging_steps: 1  # mine\n"


class Drawn(Struct, frozen=True, kw_only=True):
    """One draw: what follows `plan` on the command line, the launcher, and the text of the user's own train.yaml.

    The text is empty without one.
    """

    seed: int
    number: int
    options: tuple[str, ...]
    launcher: str = "accelerate"
    config: str = ""
    resumes: bool = True

    @property
    def gpus(self) -> str:
        return self.options[self.options.index("--gpus") + 1]


def _fixed(
    gpus: str,
    method: MethodName,
    tuning: str,
    *settings: str,
    launcher: str = "accelerate",
    config: str = "",
    model: str = "SmolLM2-135M",
) -> Drawn:
    """Return a start of a small model's files, which saves, evaluates and resumes."""
    words = ["--model", model, "--gpus", gpus, "--method", method, "--tuning", tuning, "--max-length", "300"]
    generates = METHODS[method].generates
    words += ["--prompt-length", "284", "--max-completion-length", "16"] if generates else []
    shown = ["attn_implementation=sdpa", *(["use_vllm=false"] if generates else []), *settings]
    shown += ["eval_strategy=steps"] if METHODS[method].evaluates else []
    words += [word for each in shown for word in ("--set", each)]
    return Drawn(seed=0, number=0, options=tuple(words), launcher=launcher, config=config)


def _chosen(model: str, gpus: str, method: MethodName, tuning: str, words: str = "", config: str = "") -> Drawn:
    """Return a start whose settings are the search's, but for a kernel that the environment has."""
    options = ["--model", model, "--gpus", gpus, "--method", method, "--tuning", tuning, *words.split()]
    options += [] if "attn_implementation" in words else ["--set", "attn_implementation=sdpa"]
    return Drawn(seed=0, number=0, options=tuple(options), config=config)


GPTQ = "Qwen2.5-0.5B-Instruct-GPTQ-Int4"

# One start for each kind of file that is written, by name. Rows name them by their place: new ones come last.
_FIXED: dict[str, Drawn] = {
    "TRL's command": _fixed("1xL4", "sft", "lora"),
    "the user's own yaml": _fixed("1xA100-40G", "dpo", "full", config=USERS_YAML),
    "python for one process": _fixed("1xH100", "reward", "lora", launcher="torchrun"),
    "torchrun for two": _fixed("2xL4", "kto", "full", "distributed_type=MULTI_GPU", launcher="torchrun"),
    "deepspeed.json beside accelerate.yaml": _fixed("4xL4", "sft", "full", "zero_stage=3"),
    "deepspeed.json beside torchrun": _fixed("4xL4", "dpo", "lora", "zero_stage=2", launcher="torchrun"),
    "FSDP2 in accelerate.yaml": _fixed("4xL4", "sft", "lora", "distributed_type=FSDP"),
    "FSDP2 in train.yaml": _fixed("4xL4", "reward", "full", "distributed_type=FSDP", launcher="torchrun"),
    "experts divided in train.yaml": _fixed(
        "2xA100-80G", "sft", "full", "distributed_config=fsdp", "ep_size=2", model="OLMoE-1B-7B-0924"
    ),
    "train.py, which saves adapters beside divided experts": _fixed(
        "2xA100-80G",
        "sft",
        "lora",
        "distributed_config=fsdp",
        "ep_size=2",
        "lora_target_modules=q_proj,v_proj",
        model="OLMoE-1B-7B-0924",
    ),
    "layers divided in train.yaml": _fixed("2xA100-80G", "sft", "full", "distributed_config=tp", model="Qwen3-0.6B"),
    "adapters on divided layers": _fixed(
        "2xA100-80G", "sft", "lora", "distributed_config=tp", "lora_target_modules=q_proj,v_proj", model="Qwen3-0.6B"
    ),
    "train.py, with a reward": _fixed("1xL4", "gmpo", "lora"),
    "train.py, which casts adapters": _fixed("1xT4", "sft", "qlora"),
    "slurm.sh": _fixed("2x8xA100-80G", "grpo", "full", "zero_stage=2"),
    "one rank of eight with divided layers": _fixed(
        "8xA100-80G", "sft", "full", "distributed_config=tp", model="Llama-3.1-8B", launcher="torchrun"
    ),
    "one rank of eight, pairs of which divide layers": _fixed(
        "8xA100-80G", "sft", "full", "distributed_config=fsdp", "tp_size=2", model="Llama-3.1-8B"
    ),
    "one rank of eight, groups of four of which divide experts": _fixed(
        "8xA100-80G", "sft", "full", "distributed_config=fsdp", "ep_size=4", model="OLMoE-1B-7B-0924"
    ),
    "slurm.sh, with divided experts": _fixed(
        "2x8xA100-80G",
        "sft",
        "lora",
        "distributed_config=fsdp",
        "ep_size=16",
        "lora_target_modules=q_proj,v_proj",
        model="OLMoE-1B-7B-0924",
    ),
    "adapters on a language model beside its vision tower": _fixed(
        "2xA100-80G",
        "sft",
        "lora",
        "distributed_type=FSDP",
        r"lora_target_modules=.*language_model.*\.(q_proj|k_proj|v_proj|o_proj)",
        model="gemma-3-4b-it",
    ),
    "FSDP 1 in accelerate.yaml": _fixed(
        "2xA100-40G", "sft", "lora", "fsdp_version=1", "dtype=bfloat16", model="Qwen3-0.6B"
    ),
    "FSDP 1 in train.yaml": _fixed(
        "2xA100-40G", "sft", "full", "fsdp_version=1", launcher="torchrun", model="Qwen3-0.6B"
    ),
    # Jobs that users have and no draw reaches.
    "FSDP 1 by TRL's own file": _chosen(
        "Qwen2.5-3B", "2xA100-40G", "sft", "lora", "--max-length 2048 --accelerate-config fsdp1"
    ),
    "KTO of a chat model under ZeRO-2": _chosen(
        "Qwen2.5-1.5B-Instruct", "2xL4", "kto", "lora", "--max-length 1024 --batch-size 2 --set zero_stage=2"
    ),
    "a reward model of long padded rows": _chosen(
        "Qwen2.5-0.5B", "1xL4", "reward", "lora", "--max-length 8192 --padded"
    ),
    "a reward model on a card of 4 GB": _chosen("Qwen2.5-0.5B", "1xRTX-3050-4G", "reward", "qlora"),
    "DPO in full, whose reference is computed before": _chosen(
        "Qwen2.5-1.5B", "1xA100-40G", "dpo", "full", "--set precompute_ref_log_probs=true --set eval_strategy=steps"
    ),
    "a hybrid of Mamba 2 and experts": _chosen(
        "ibm-granite/granite-4.0-h-tiny", "1xA100-80G", "sft", "lora", "--max-length 2048"
    ),
    "soft caps": _chosen(
        "gemma-2-2b", "1xRTX-4090", "dpo", "lora", "--max-length 2048 --set attn_implementation=eager"
    ),
    "a large vocabulary, on the host": _chosen(
        "gemma-3-270m", "2xL4", "sft", "full", "--set zero_stage=3 --set offload_optimizer_device=cpu"
    ),
    "whole logits of a large vocabulary": _chosen("gemma-3-1b-it", "1xL4", "cpo", "qlora", "--max-length 512"),
    "rows without padding": _chosen("Qwen3-1.7B", "1xRTX-3060-12G", "dpo", "lora", "--set padding_free=true"),
    "GRPO with a reward model, a reference and two iterations": _chosen(
        "Qwen2.5-0.5B-Instruct",
        "2xA100-40G",
        "grpo",
        "full",
        "--prompt-length 256 --max-completion-length 16 --set use_vllm=false --set beta=0.04 --set num_iterations=2 "
        "--set zero_stage=2 --set reward_model_name_or_path=Qwen2.5-0.5B",
    ),
    "a teacher of another size and dtype": _chosen(
        "Qwen2.5-0.5B",
        "1xA100-40G",
        "gkd",
        "lora",
        "--prompt-length 496 --max-completion-length 16 --set teacher_model_name_or_path=Qwen2.5-1.5B "
        "--set teacher_dtype=bfloat16 --set dtype=float32 --set lmbda=1.0",
    ),
    "adapters for images, of a file without use_peft": _chosen(
        "Qwen2.5-VL-3B-Instruct",
        "1xL4",
        "dpo",
        "qlora",
        "--max-length 1024 --images-per-row 1 --image-size 448x448",
        config="lora_r: 64\nlora_target_modules: '.*language_model.*\\.(q_proj|v_proj|up_proj|down_proj)'\n"
        "per_device_train_batch_size: 2\nload_in_4bit: true\n",
    ),
    "DoRA, with a trained head": _chosen(
        "Llama-3.2-1B", "1xRTX-4090", "sft", "lora", "--set use_dora=true --set lora_modules_to_save=lm_head"
    ),
    "8-bit weights whose activations wait on the host": _chosen(
        "Qwen3-1.7B", "1xRTX-3060-12G", "kto", "qlora", "--set load_in_8bit=true --set activation_offloading=true"
    ),
    "an 8-bit optimizer under ZeRO-2": _chosen(
        "Llama-3.2-1B", "2xRTX-4090", "sft", "full", "--set optim=adamw_bnb_8bit --set zero_stage=2 --set packing=true"
    ),
    "float32 without autocast": _chosen(
        "Qwen2.5-0.5B",
        "1xA100-40G",
        "rloo",
        "full",
        "--prompt-length 240 --max-completion-length 16 --set use_vllm=false --set mixed_precision=no --set tf32=true",
    ),
    "float16 under FSDP2": _chosen("Qwen2.5-0.5B", "2xT4", "dpo", "lora", "--set distributed_type=FSDP"),
    "context parallel": _chosen(
        "Llama-3.2-1B", "2xA100-40G", "sft", "full", "--max-length 16384 --set distributed_type=FSDP --set cp_size=2"
    ),
    "Ulysses": _chosen(
        "Llama-3.2-1B", "2xA100-40G", "sft", "lora", "--max-length 16384 --set zero_stage=3 --set sp_size=2"
    ),
    "a layer of every two recomputed, on the host": _chosen(
        "SmolLM2-1.7B",
        "1xRTX-4090",
        "orpo",
        "full",
        "--set optim=adafactor --set every_n_layers=2 --set checkpoint_offload=true",
    ),
    "adapters on experts": _chosen(
        "Qwen3-30B-A3B",
        "1xH200",
        "sft",
        "lora",
        "--max-length 2048 --set lora_target_modules=q_proj,k_proj,v_proj,o_proj "
        "--set lora_target_parameters=mlp.experts.gate_up_proj,mlp.experts.down_proj",
    ),
    "activations that wait on the host": _chosen(
        "Qwen3-1.7B", "1xRTX-3060-12G", "kto", "lora", "--set activation_offloading=true"
    ),
    "hybrid sharding": _chosen(
        "Llama-3.2-1B", "4xA100-40G", "dpo", "full", "--set distributed_type=FSDP --set dp_replicate_size=2"
    ),
    "the longest rows of a card": _chosen(
        "Qwen2.5-1.5B", "1xRTX-4090", "sft", "lora", "--optimize max-length --no-padded"
    ),
    "GRPO of linear attention under ZeRO-3": _chosen(
        "Qwen3.5-0.8B",
        "2xL4",
        "grpo",
        "full",
        "--prompt-length 256 --max-completion-length 16 --set use_vllm=false --set zero_stage=3",
    ),
    "a GPTQ base": _chosen(GPTQ, "1xRTX-3060-12G", "dpo", "lora"),  # needs gptqmodel and optimum, too
    "a teacher with another tokenizer": _fixed(
        "1xA100-40G", "gold", "lora", "use_uld_loss=true", "teacher_model_name_or_path=Qwen3-0.6B"
    ),
    "a teacher with another tokenizer, in full": _fixed(
        "1xA100-40G", "gold", "full", "use_uld_loss=true", "teacher_model_name_or_path=Qwen3-0.6B", launcher="torchrun"
    ),
}
STARTS = {name: replace(drawn, number=place) for place, (name, drawn) in enumerate(_FIXED.items())}

# Starts beside a vLLM server, which the environment of the others lacks: their files start it themselves.
ASYNC = ("--prompt-length", "64", "--max-completion-length", "32", "--batch-size", "8")


def _served(gpus: str, tuning: str, engine_gpus: int, *settings: str, model: str = "Qwen2.5-0.5B") -> Drawn:
    words = ["--model", model, "--gpus", gpus, "--method", "async-grpo", "--tuning", tuning, *ASYNC]
    settings = (*settings, f"vllm_tensor_parallel_size={engine_gpus}")
    return Drawn(seed=0, number=0, options=(*words, *(word for each in settings for word in ("--set", each))))


def _distilled(gpus: str, method: MethodName, tuning: str, *settings: str) -> Drawn:
    words = ["--model", "Qwen2.5-0.5B", "--gpus", gpus, "--method", method, "--tuning", tuning, *ASYNC]
    settings = ("teacher_server_model=Qwen2.5-1.5B", *settings)
    return Drawn(seed=0, number=0, options=(*words, *(word for each in settings for word in ("--set", each))))


ZERO_2, FSDP2 = "zero_stage=2", "distributed_type=FSDP"
SERVED_STARTS: dict[str, Drawn] = {
    "full, TP 1": _served("2xA100-40G", "full", 1),
    "full, ZeRO-2, TP 2": _served("4xA100-40G", "full", 2, ZERO_2, "dtype=bfloat16"),
    "full, FSDP2, TP 2": _served("4xA100-40G", "full", 2, FSDP2),
    "LoRA, TP 1": _served("2xA100-40G", "lora", 1),
    "LoRA, ZeRO-2, TP 1": _served("3xA100-40G", "lora", 1, ZERO_2),
    "LoRA, FSDP2, TP 2": _served("4xA100-40G", "lora", 2, FSDP2),
    "QLoRA, TP 2": _served("3xA100-40G", "qlora", 2),
    "QLoRA, ZeRO-2, TP 1": _served("3xA100-40G", "qlora", 1, ZERO_2),
    "QLoRA, FSDP2, TP 1": _served("3xA100-40G", "qlora", 1, FSDP2),
    "GPTQ base, TP 1": _served("2xA100-40G", "lora", 1, model=GPTQ),
    "GPTQ base, ZeRO-2, TP 2": _served("4xA100-40G", "lora", 2, ZERO_2, model=GPTQ),
    "GPTQ base, FSDP2, TP 1": _served("3xA100-40G", "lora", 1, FSDP2, model=GPTQ),
    "distillation from a server, LoRA": _distilled("2xA100-40G", "server-distillation", "lora", "use_vllm=false"),
    "async-distillation, full": _distilled("3xA100-40G", "async-distillation", "full"),
}


def drawn_start(seed: int, number: int, cluster: int = 0) -> Drawn:
    """Return one draw on one of its clusters; `plan` may refuse it, or find nothing that fits."""
    draw = Draw(f"start {seed} {number}")
    method: MethodName = draw.one(*(name for name in METHODS if _starts(name)))
    images = METHODS[method].images == "counted" and draw.happens(IMAGES)
    model = load_model(draw.one(*draw.one(*_models_by_type(images))))
    gpus, scheme = _cluster(Draw(f"cluster {seed} {number} {cluster}"))
    options = ["--model", model.id, "--gpus", gpus, "--method", method, "--tuning", draw.one("lora", "qlora", "full")]
    options += _rows(draw, method, model if images else None)
    settings = [f"attn_implementation={'eager' if draw.happens(EAGER) or not model.supports_sdpa else 'sdpa'}", *scheme]
    settings += ["use_vllm=false"] if METHODS[method].supports_vllm else []
    settings += ["eval_strategy=steps"] if draw.happens(EVALUATION) and METHODS[method].evaluates else []
    options += [word for each in settings for word in ("--set", each)]
    return Drawn(
        seed=seed,
        number=number,
        options=tuple(options),
        launcher="torchrun" if draw.happens(TORCHRUN) else "accelerate",
        config=USERS_YAML if draw.happens(YAML) else "",
        resumes=draw.happens(RESUMED),
    )


def drawn_certificate(seed: int, number: int, cluster: int = 0) -> Drawn:
    """Return one draw on one of its clusters that leaves to the search all that few users set."""
    draw, place = Draw(f"certificate {seed} {number}"), Draw(f"place {seed} {number} {cluster}")
    method: MethodName = draw.one(*(name for name in METHODS if _starts(name)))
    images = METHODS[method].images == "counted" and draw.happens(PROVEN_IMAGES)
    model = load_model(draw.one(*draw.one(*_models_by_type(images, PROVEN_SIZES))))
    options = ["--model", model.id, "--gpus", f"{place.one(1, 1, 1, 4, 8)}x{place.one(*PROVEN_CARDS)}"]
    options += ["--method", method, "--tuning", draw.one("auto", "lora", "qlora", "full")]
    options += ["--max-length", str(draw.one(*PROVEN_LENGTHS))] if draw.happens(LENGTH) or images else []
    options += ["--effective-batch-size", str(draw.one(16, 32, 64))] if draw.happens(BATCH) else []
    options += _images(model) if images else []
    options += ["--set", "use_vllm=false"] if METHODS[method].supports_vllm else []
    return Drawn(seed=seed, number=number, options=tuple(options))


def _starts(method: MethodName) -> bool:
    """Whether today's TRL has it and it needs no vLLM server, which no emulated card runs."""
    return METHODS[method].last_trl == "current" and not METHODS[method].asynchronous


def _cluster(draw: Draw) -> tuple[str, tuple[str, ...]]:
    """Return GPUs, a half of the time one, rarely of two nodes, and the settings that share their work."""
    card, count = draw.one(*CARDS), draw.one(1, 1, 1, 1, 2, 2, 4, 8)
    gpus = f"2x8x{card}" if count == 8 and draw.happens(0.5) else f"{count}x{card}"
    return gpus, (() if count == 1 else draw.one(*SCHEMES))


def _rows(draw: Draw, method: MethodName, with_images: ModelShape | None) -> list[str]:
    """The rows of the dataset and of a batch; `with_images`: the model, if each row has an image."""
    length, row = draw.one(*LENGTHS), METHODS[method]
    length = max(length, SHORTEST_WITH_IMAGE) if with_images else length
    words = ["--max-length", str(length)]
    if row.generates:
        completion = draw.one(8, 16, 32)
        words += ["--prompt-length", str(max(length - completion, 8)), "--max-completion-length", str(completion)]
    padding = draw.one(["--padded"], ["--no-padded"], [], [])
    # A group's rows have one prompt and, on an emulated card, completions of one length: such a batch holds no padding.
    words += [] if row.grouped_completions and padding == ["--padded"] else padding
    batch = draw.happens(0.3)
    words += ["--batch-size", str(draw.one(2, 4))] if batch else []
    if draw.happens(ACCUMULATION) or (batch and row.grouped_completions):  # groups are whole
        words += ["--effective-batch-size", str(draw.one(16, 32))]
    if method == "sft" and not with_images and draw.happens(PACKING):
        words += ["--set", "packing=true"]
    return words + (_images(with_images) if with_images else [])


def _images(model: ModelShape) -> list[str]:
    """The options of an image in each row."""
    size = [] if model.architecture.tower == "siglip" else ["--image-size", "448x448"]
    return ["--images-per-row", "1", *size]


@lru_cache(maxsize=4)
def _models_by_type(images: bool, sizes: tuple[float, float] = (0, LARGEST_MODEL)) -> tuple[tuple[str, ...], ...]:
    """The models of the catalogue whose published weights are not quantized, by type; so each type is as likely.

    `images`: those with an image tower only; `sizes`: the fewest and the most parameters.
    """
    types: dict[str, list[str]] = {}
    for row in model_rows():
        model = load_model(row.id)
        if not sizes[0] <= row.params <= sizes[1] or (images and not has_image_tower(model)):
            continue
        if not model.quantization_row.quantized:
            types.setdefault(row.model_type, []).append(row.id)
    return tuple(map(tuple, types.values()))
