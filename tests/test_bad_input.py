"""A wrong question gets one line that names what works, on stdout nothing but an asked-for document, exit code 2."""

import json
import sys
from pathlib import Path
from typing import get_args

import jsonschema
import pytest

from planner.commands.main import run
from planner.errors import ErrorCode, InputError, PlanError, UnknownName
from planner.report.documents.schema import json_schema

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 100,
}


def asked(model: str = "Qwen2.5-7B", gpus: str = "2xA100-40G", method: str = "grpo") -> list[str]:
    return ["--model", model, "--gpus", gpus, "--method", method]


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The single line of a refusal."""
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert (json.loads(out).keys() == {"error"}) if "--json" in arguments else out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    return err.removeprefix("Error: ").rstrip("\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["foo"], "No such command 'foo'. There are "),
        (["estimat"], "No such command 'estimat'. Did you mean"),
        ([*asked(), "estimate"], "--model stands before estimate."),
        (["schema", "--json"], "No such option: --json. plan schema --help lists all."),
        (["--bogus"], "No such option: --bogus. plan --help lists all."),
        (["--modle", "x"], "No such option: --modle. Did you mean --model?"),
        (["models", "zzz"], "No model has 'zzz' in its name: plan models lists all"),
        (["gpus", "zzz"], "No GPU has 'zzz' in its name: plan gpus lists all"),
        ([*asked(), "--set", "learnin_rate=1e-4"], "Unknown setting 'learnin_rate'. Did you mean learning_rate?"),
        (asked(model=""), "--model is empty."),
        (asked(model=" "), "--model is empty."),
        (asked(model="Qwen2.5-7BB"), "Unknown model 'Qwen2.5-7BB'. Did you mean Qwen/Qwen2.5-7B"),
        (asked(model="漢字🙂"), "Unknown model '漢字🙂'. `plan models` lists the catalogue"),
        (asked(model="a" * 5000), "Unknown model 'aaa"),
        (asked(model="/" + "a" * 5000), "/aaa"),
        (asked(model="x/" + "a" * 300), "Unknown model 'x/aaa"),
        (asked(gpus=""), "--gpus is empty."),
        (asked(gpus="0xH100"), "--gpus '0xH100' has 0 GPUs"),
        (asked(gpus="3xFoo"), "Unknown GPU 'Foo'."),
        (asked(gpus="2xA100"), "Unknown GPU 'A100'. Did you mean A100-40G or A100-80G"),
        (asked(gpus="4xH100+8xL40S"), "--gpus '4xH100+8xL40S' is not one cluster of one kind of card."),
        (["estimate", *asked(gpus="1xL4,8xH100")], "--gpus '1xL4,8xH100' is not one cluster of one kind of card."),
        (["estimate", *asked(gpus="hf-jobs")], "--gpus 'hf-jobs' is not one cluster of one kind of card."),
        (asked(gpus="HF-Jobs:a10g"), "--gpus 'HF-Jobs:a10g' is not one cluster of one kind of card."),
        (asked(gpus="2x"), "--gpus '2x' names no GPU. Write it as 2xA100-40G"),
        (asked(gpus="99999999999xH100"), "--gpus '99999999999xH100' puts 99999999999 GPUs in one node."),
        (asked(gpus="1x24"), "--gpus '24' is no card. A capacity needs its unit: 24GiB."),
        (
            asked(model="ibm-granite/granite-3.3-2b-instruct", method="reward"),
            "ibm-granite/granite-3.3-2b-instruct cannot be a reward model: Transformers has no sequence classifier of "
            "type granite. Use another model, such as",
        ),
        (
            [*asked(method="ppo"), "--set", "reward_model=aya-expanse-8b"],
            "CohereForAI/aya-expanse-8b cannot be a reward model: Transformers has no sequence classifier of type",
        ),
        (asked(method="pretrain"), "Unknown method 'pretrain'. It can be sft, dpo"),
        ([*asked(), "--tuning", ""], "--tuning is empty."),
        ([*asked(), "--tuning", "adapter"], "Unknown tuning class 'adapter'. It can be auto, full, lora, qlora."),
        (
            [*asked(), "--risk", "nan"],
            "Invalid value for '--risk': Input should be less than or equal to 0.499999",
        ),
        (
            [*asked(), "--risk", "1e-300"],
            "Invalid value for '--risk': Input should be greater than or equal to 0.000001",
        ),
        (
            [*asked(), "--free-memory", "30"],
            "--free-memory 30 is not between 1 GiB and the 39.49 GiB of A100-40G. Did you mean 30GiB?",
        ),
        ([*asked(), "--trl-version", "nonsense"], "'nonsense' is no TRL release."),
        ([*asked(), "--trl-version", "99.9"], "--trl-version 99.9 is newer than 1.16, the newest"),
        ([*asked(), "--max-length", "many"], "Invalid value for '--max-length': 'many' is no number of tokens"),
        (
            [*asked(), "--max-length", "99999999999999999999"],
            "Invalid value for '--max-length': 99,999,999,999,999,999,999 is not",
        ),
        (
            [*asked(), "--batch-size", "0"],
            "Invalid value for '--batch-size': Input should be greater than or equal to 1",
        ),
        (
            [*asked(), "--batch-size", "99999999"],
            "Invalid value for '--batch-size': Input should be less than or equal to 1000000",
        ),
        ([*asked(), "--lora-r", "0"], "lora_r must be at least 1, not 0."),
        ([*asked(), "--lora-r", "16,x,64"], "--lora-r 16,x,64 is no list of ranks. Write them as 16,32,64."),
        (
            [*asked(), "--effective-batch-size", "7"],
            "--effective-batch-size 7 is not made of whole samples on 2 GPUs and groups of 8. Use 8.",
        ),
        (
            [*asked(method="sft"), "--effective-batch-size", "7"],
            "--effective-batch-size 7 is not made of whole samples on 2 GPUs. Use 6 or 8.",
        ),
        (
            [*asked(method="sft"), "--effective-batch-size", "8", "--batch-size", "3"],
            "--effective-batch-size 8 is not made of whole micro-batches of 3 on 2 GPUs. Use 6 or 12.",
        ),
        ([*asked(), "--out", ""], "--out is empty."),
    ],
)
def test_a_flag_that_cannot_be_is_refused(arguments, message, capsys):
    assert refused(arguments, capsys).startswith(message)


CONTRADICTIONS = [  # question, settings and how the error begins
    (asked(), "foo=1", "Unknown setting 'foo'."),
    (asked(), "foo", "--set foo has no value."),
    (asked(), "method=sft", "method has a flag of its own: --method."),
    (asked(), "model=gpt2", "--model Qwen2.5-7B contradicts --set model=gpt2."),
    (asked(), "optim=adam", "Unknown optim 'adam'."),
    (asked(), "beta=nan", "beta must be at least 0, not nan."),
    (asked(), "beta=inf", "beta must be at most 1,000,000,000, not inf."),
    (asked(), "num_generations=1", "num_generations must be at least 2, not 1."),
    (
        asked(),
        "num_generations=7",
        "num_generations 7 does not divide the 16 completions of an optimizer step (8 on each of 2 GPUs). "
        "Use --effective-batch-size 112, or --set num_generations=4 instead of --set num_generations=7.",
    ),
    (asked(), "packing=true", "grpo has no packing, which is a setting of sft."),
    (asked(method="kto"), "padding_free=true", "kto has no padding_free, which is a setting of sft, dpo."),
    (
        asked(method="sft"),
        "teacher_model_name_or_path=gpt2",
        "sft has no teacher_model_name_or_path, which is a setting of gkd, gold, iw-opd, distillation. Drop it.",
    ),
    (asked(method="sft"), "teacher_model=gpt2", "sft has no teacher_model, which is a setting of gkd, gold, iw-opd"),
    (
        asked(method="server-distillation"),
        "teacher_model_name_or_path=Qwen/Qwen2.5-7B",
        "server-distillation has no teacher_model_name_or_path, which is a setting of gkd, gold, iw-opd, distillation. "
        "Use --set teacher_server_model.",
    ),
    (asked(method="sft"), "vllm_mode=colocate", "sft does not generate with vLLM."),
    (
        asked(method="sft"),
        "vllm_enable_sleep_mode=true",
        "sft has no vllm_enable_sleep_mode, which is a setting of grpo",
    ),
    (
        asked(gpus="1xH100"),
        "vllm_mode=server",
        "A vLLM server on 1 of 1 GPUs leaves none for the trainer. Use --set vllm_mode=colocate instead of",
    ),
    (
        asked(gpus="8xH100"),
        "vllm_mode=server num_processes=8",
        "num_processes 8 and a vLLM server on 1 of the same 8 GPUs would share cards",
    ),
    (
        asked(gpus="8xH100"),
        "vllm_mode=server vllm_tensor_parallel_size=3",
        "The 28 heads (4 for keys) of Qwen/Qwen2.5-7B do not divide over 3 GPUs. Use --set vllm",
    ),
    (
        asked(gpus="3xH100"),
        "vllm_mode=colocate vllm_tensor_parallel_size=2 num_generations=2",
        "vllm_tensor_parallel_size 2 does not divide the 3 processes. Use --set vllm_tensor_parallel_size=1 instead of",
    ),
    (
        asked(gpus="8xH100"),
        "vllm_mode=server vllm_enable_sleep_mode=true",
        "vllm_enable_sleep_mode is for a colocated engine",
    ),
    (
        asked(),
        "use_vllm=false vllm_gpu_memory_utilization=0.5",
        "vllm_gpu_memory_utilization is read with vLLM only",
    ),
    (asked("gpt2", "1xT4", "sft"), "bf16=true", "T4 has no bfloat16"),
    (
        asked("gpt2", "1xT4", "sft"),
        "dtype=bfloat16",
        "T4 has no bfloat16, so dtype=bfloat16 cannot be had there. Use --set dtype=float16",
    ),
    (
        asked("gpt2", "1xV100-16G", "sft"),
        "attn_implementation=flash_attention_2",
        "flash_attention_2 does not run on V100-16G.",
    ),
    (
        asked("gemma-4-31B", "8xH100", "sft"),
        "attn_implementation=flash_attention_2",
        "flash_attention_2 does not run google/gemma-4-31B: gemma4 has none in Transformers, or heads above 256.",
    ),
    (
        asked("gpt-oss-20b", "8xH100", "sft"),
        "attn_implementation=sdpa",
        "Transformers has no sdpa for openai/gpt-oss-20b (gpt_oss).",
    ),
    (
        asked("gemma-2-2b", "8xH100", "sft"),
        "attn_implementation=sdpa",
        "Transformers has no sdpa for google/gemma-2-2b (gemma2).",
    ),
    (
        asked("gemma-2-2b", "8xH100", "sft"),
        "cp_size=2 distributed_type=FSDP",
        "google/gemma-2-2b does not run with sdpa, which cp_size 2 needs.",
    ),
    (asked(method="gkd"), "ds3_gather_for_generation=false zero_stage=3", "gkd has no ds3_gather_for_generation"),
    (
        [*asked(gpus="2xA100-40G", method="grpo"), "--tuning", "qlora"],
        "use_vllm=true vllm_mode=server",
        "A vLLM server has 16-bit weights, and TRL would send it packed 4-bit ones, at which it stops.",
    ),
    (
        asked(gpus="2xA100-40G", method="grpo"),
        "use_vllm=true vllm_mode=colocate load_in_8bit=true",
        'vLLM "does not support in-flight 8-bit quantization", which TRL says of an int8 base.',
    ),
    (
        asked(method="gkd"),
        "sharding=fsdp2",
        "gkd stops under FSDP, where accelerate does not place the teacher or the reference.",
    ),
    (asked(method="sft"), "fp16=true bf16=true", "fp16=true and bf16=true contradict each other."),
    (
        [*asked(method="sft"), "--tuning", "full"],
        "fp16=true bf16=false dtype=bfloat16 distributed_type=MULTI_GPU",
        "fp16 cannot train bfloat16 parameters here: their gradients cannot be unscaled.",
    ),
    (
        [*asked(method="sft", gpus="1xT4"), "--tuning", "lora"],
        "dtype=float16 autocast_adapter_dtype=false distributed_type=NO",
        "fp16 cannot train float16 parameters here: their gradients cannot be unscaled.",
    ),
    (
        [*asked(method="sft"), "--tuning", "full"],
        "fp16=true bf16=false dtype=float16 distributed_type=MULTI_GPU",
        "fp16 cannot train float16 parameters here: their gradients cannot be unscaled. Use --set dtype=float32",
    ),
    ([*asked(method="sft"), "--tuning", "full"], "load_in_4bit=true", "--tuning full cannot be quantized"),
    (
        [*asked(method="sft"), "--tuning", "full"],
        "lora_r=8",
        "lora_r needs adapters, and full fine-tuning has none.",
    ),
    ([*asked(method="sft"), "--tuning", "lora"], "use_peft=false", "--tuning lora contradicts use_peft=false."),
    (
        [*asked(method="sft"), "--tuning", "lora"],
        "load_in_4bit=true",
        "--tuning lora contradicts a quantized load. Use --tuning qlora.",
    ),
    (
        asked(method="sft"),
        "load_in_4bit=true load_in_8bit=true",
        "load_in_4bit=true and load_in_8bit=true contradict each other.",
    ),
    (asked(method="sft"), "quant_method=gptq", "Qwen/Qwen2.5-7B is no GPTQ checkpoint"),
    (
        asked("Qwen2.5-7B-Instruct-GPTQ-Int4", method="sft"),
        "load_in_4bit=true",
        "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4 is quantized already (gptq)",
    ),
    (
        asked("Qwen2.5-7B-Instruct-GPTQ-Int4", method="sft"),
        "use_peft=false",
        "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4 is quantized (gptq)",
    ),
    (
        asked(method="sft"),
        "offload_param=true sharding=ddp",
        "Only ZeRO-3 and FSDP move parameters to the host (here: DDP). Use --set sharding=zero3 instead",
    ),
    (
        asked(method="sft"),
        "bnb_4bit_quant_storage=bfloat16",
        "bnb_4bit_quant_storage=bfloat16 is how 4-bit weights are stored. Use --tuning qlora, or drop it.",
    ),
    (
        [*asked(method="sft"), "--tuning", "qlora"],
        "bnb_4bit_quant_storage=float32 distributed_type=FSDP",
        "bnb_4bit_quant_storage=float32 does not survive FSDP's cast to bf16. Use --set bnb_4bit_quant_storage=bf",
    ),
    (
        [*asked(method="sft"), "--tuning", "qlora"],
        "bnb_4bit_quant_storage=bfloat16 zero_stage=2",
        "bnb_4bit_quant_storage=bfloat16 shards nothing under ZeRO-2. Use --set zero_stage=3 instead of",
    ),
    (
        asked(method="sft"),
        "prepare_model_for_kbit_training=true",
        "prepare_model_for_kbit_training is about a base that bitsandbytes quantizes. Use --tuning qlora, or drop",
    ),
    (
        [*asked(method="sft"), "--tuning", "lora"],
        "use_dora=true zero_stage=3",
        "use_dora is planned for whole models, not with ZeRO-3. Use --set distributed_type=MULTI_GPU instead",
    ),
    (
        [*asked(method="sft"), "--tuning", "lora"],
        "lora_modules_to_save=lm_head distributed_type=FSDP",
        "lora_modules_to_save is planned for whole models, not with FSDP2. Use --set distributed_type=MULTI_GPU",
    ),
    (
        [*asked(method="sft"), "--tuning", "lora"],
        "lora_modules_to_save=norm,lm_head",
        "lora_modules_to_save norm is not counted. Of Qwen/Qwen2.5-7B it can be embed_tokens and lm_head.",
    ),
    (
        [*asked(method="reward"), "--tuning", "lora"],
        "lora_modules_to_save=lm_head",
        "lora_modules_to_save lm_head is not counted. Of Qwen/Qwen2.5-7B it can be embed_tokens and score.",
    ),
    (
        [*asked(method="sft"), "--tuning", "lora"],
        "lora_modules_to_save=lm_head lora_target_modules=q_proj,lm_head",
        "lm_head in lora_modules_to_save is copied, without adapters. Drop it from lora_target_modules.",
    ),
    (
        [*asked(method="sft"), "--tuning", "lora"],
        "lora_target_modules=(q_proj",
        "lora_target_modules (q_proj is no regular expression: missing ), unterminated subpattern at position 0.",
    ),
    (
        [*asked(method="sft"), "--tuning", "lora"],
        r"lora_target_modules=.*\.[0-3]\..*q_proj",
        r"lora_target_modules .*\.[0-3]\..*q_proj matches q_proj in some layers only of Qwen/Qwen2.5-7B.",
    ),
    (
        [*asked(method="sft"), "--tuning", "lora"],
        "lora_target_modules=.*foo",
        "lora_target_modules .*foo matches no module of Qwen/Qwen2.5-7B. Name modules out of down_proj, gate_proj",
    ),
    (
        [*asked(method="sft", model="Qwen3-30B-A3B"), "--tuning", "lora"],
        "lora_target_modules=.*(q|gate)_proj",
        "lora_target_modules .*(q|gate)_proj reaches fused experts of Qwen/Qwen3-30B-A3B. Name modules out",
    ),
    (
        [*asked(method="sft", model="gemma-3-4b-it"), "--tuning", "lora"],
        "lora_target_modules=.*(language_model.*q_proj|v_proj)",
        "lora_target_modules .*(language_model.*q_proj|v_proj) leaves out only q_proj of the vision tower of",
    ),
    (
        [*asked(method="sft", model="Llama-4-Scout-17B-16E-Instruct"), "--tuning", "lora"],
        "lora_target_modules=all-linear",
        "all-linear includes router of meta-llama/Llama-4-Scout-17B-16E-Instruct, at which PEFT stops. Use",
    ),
    (
        asked(method="sft", gpus="4xL4"),
        "load_in_8bit=true sharding=fsdp2",
        "FSDP does not shard int8 weights: PyTorch makes no parameters of a bitsandbytes Int8Params. Use --set",
    ),
    (
        asked(method="sft", gpus="4xL4"),
        "load_in_8bit=true zero_stage=3",
        "load_in_8bit is planned for whole models, not with ZeRO-3. Use --set distributed_type=MULTI_GPU instead",
    ),
    (
        asked(method="dpo"),
        "every_n_layers=2",
        "dpo has no every_n_layers, which is a setting of sft, orpo, cpo, tpo, reward. Drop it.",
    ),
    (
        [*asked(method="sft"), "--tuning", "lora"],
        "lora_target_parameters=mlp.experts.down_proj",
        "lora_target_parameters mlp.experts.down_proj reaches no experts of Qwen/Qwen2.5-7B: it has no fused exp",
    ),
    (
        [*asked(method="sft", model="Qwen3-30B-A3B"), "--tuning", "lora"],
        "lora_target_parameters=mlp.experts.gate_proj",
        "lora_target_parameters mlp.experts.gate_proj reaches no experts of Qwen/Qwen3-30B-A3B: it has mlp.exp",
    ),
    (
        [*asked(method="sft", model="Qwen3-30B-A3B"), "--tuning", "lora"],
        "lora_dropout=0.05",
        "PEFT has no dropout for adapters on the fused experts of Qwen/Qwen3-30B-A3B. Change lora_dropout to 0, or",
    ),
    (
        [*asked(method="sft"), "--tuning", "qlora"],
        "use_dora=true load_in_8bit=true",
        "use_dora is planned on 4-bit and 16-bit weights, not on int8 ones. Use --set load_in_4bit=true instead",
    ),
    (
        [*asked(method="sft"), "--tuning", "qlora"],
        "prepare_model_for_kbit_training=true zero_stage=3",
        "prepare_model_for_kbit_training is planned for whole models, not with ZeRO-3. Use --set distributed_type=M",
    ),
    (
        [*asked(method="orpo"), "--tuning", "qlora"],
        "bnb_4bit_quant_storage=bfloat16 distributed_type=FSDP",
        "FSDP with bnb_4bit_quant_storage=bfloat16 is planned for sft, dpo, kto, tpo, reward, not for orpo.",
    ),
    (
        asked(method="sft"),
        "cp_size=2 zero_stage=3",
        "cp_size 2 is planned with FSDP2 only. Use --set fsdp_version=2 instead of --set zero_stage=3.",
    ),
    (
        asked(method="sft"),
        "sub_group_size=5e8 sharding=zero2",
        "sub_group_size is read by DeepSpeed's stage 3 only (here: ZeRO-2). Use --set sharding=zero3 instead of",
    ),
    (
        asked(method="sft"),
        "offload_param_device=cpu",
        "Only ZeRO-3 and FSDP move parameters to the host. Use --set zero_stage=3.",
    ),
    (
        asked(method="sft"),
        "offload_optimizer=true sharding=fsdp2",
        "Only DeepSpeed moves the optimizer alone to the host (here: FSDP2). Use --set offload_param_device=cpu",
    ),
    (asked(method="sft"), "distributed_type=NO", "distributed_type=NO is one process, and there are 2 GPUs."),
    (asked(method="sft"), "num_processes=3", "num_processes 3 needs as many GPUs, and there are 2."),
    (asked(gpus="2x8xH100", method="sft"), "num_machines=3", "num_machines 3 contradicts --gpus, which has 2"),
    (
        asked(method="sft"),
        "lora_target_modules=foo",
        "lora_target_modules foo match no module of Qwen/Qwen2.5-7B: it has down_proj",
    ),
    (
        asked(method="sft"),
        "every_n_layers=4 gradient_checkpointing=false",
        "every_n_layers is a detail of gradient_checkpointing, which is false.",
    ),
    (
        asked(method="sft"),
        "activation_offloading=true gradient_checkpointing=false",
        "activation_offloading is planned where every layer is checkpointed: TRL keeps on the GPU what several",
    ),
    (
        asked(method="sft"),
        "activation_offloading=true every_n_layers=2",
        "activation_offloading is planned where every layer is checkpointed: TRL keeps on the GPU what several",
    ),
    (
        asked("gpt2", method="sft"),
        "max_length=4096",
        "max_length 4,096 is longer than the 1,024 positions of openai-community/gpt2.",
    ),
    (
        asked("gpt-neo-125m", method="sft"),
        "max_length=4096",
        "max_length 4,096 is longer than the 2,048 positions of EleutherAI/gpt-neo-125m.",
    ),
    (
        asked("gpt-j-6b", "1xA100-80G", "sft"),  # whose config names them `n_positions`
        "max_length=4096",
        "max_length 4,096 is longer than the 2,048 positions of EleutherAI/gpt-j-6b.",
    ),
    (
        asked("Qwen2.5-VL-3B-Instruct", method="gkd"),
        "teacher_model=Qwen2.5-VL-7B-Instruct",
        "GKDTrainer loads its teacher with AutoModelForCausalLM, which has no qwen2_5_vl. Use --method",
    ),
    (
        asked("Llama-3.2-1B", "1xT4", "distillation"),
        "teacher_model=Llama-3.2-1B teacher_dtype=bfloat16 distributed_type=NO",
        "T4 has no bfloat16, in which the teacher is loaded. Use --set teacher_dtype=float16 instead of",
    ),
]


@pytest.mark.parametrize(("question", "settings", "message"), CONTRADICTIONS)
def test_a_setting_that_contradicts_is_refused(question, settings, message, capsys):
    arguments = [*question, *(part for setting in settings.split() for part in ("--set", setting))]
    assert refused(arguments, capsys).startswith(message)
    assert refused(["estimate", *arguments], capsys).startswith(message)


def test_ddp_of_a_tower_without_images_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """The search takes another sharding, or no checkpoints, where DDP is pinned."""
    arguments = [*asked(method="sft", model="gemma-3-4b-it"), "--tuning", "full", "--set", "sharding=ddp"]
    assert refused(["estimate", *arguments], capsys).startswith(
        "DDP stops at google/gemma-3-4b-it in full, whose vision tower gets no gradients from text. Use --set sharding"
    )
    with_images = ["--set", "images_per_row=1"]
    assert run(["estimate", *arguments, *with_images]) in (0, 3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[1]", "is no JSON object, so it is not a model's config.json."),
        ("", "is no JSON: "),
        (bytes(range(256)), "cannot be read: it is no UTF-8 text (byte 128)."),
        ("{}", "has no model_type, so it is not a Hugging Face model config."),
        ('{"tokenizer_class": "LlamaTokenizer"}', "has no model_type"),
        ('{"model_type": "llama"}', "has no 'num_hidden_layers', which its model type 'llama' needs."),
        (json.dumps(LLAMA | {"hidden_size": -64}), "has 'hidden_size': -64, which is not a whole number."),
        (json.dumps(LLAMA | {"num_attention_heads": 0}), "has 'num_attention_heads': 0, which must be positive."),
        (json.dumps(LLAMA | {"hidden_size": float("nan")}), "has 'hidden_size': nan"),
    ],
)
def test_a_file_that_is_no_config_json_is_refused(content, message, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert message in refused(asked(model=str(tmp_path)), capsys)


def test_a_model_without_formulas_needs_the_extra_that_measures_its_layers(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "probes.layers.coefficients", None)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "bamba"}), encoding="utf-8")
    said = refused(asked(model=str(tmp_path), method="sft"), capsys)
    assert (
        f"{tmp_path.name} (bamba) has no formulas here, and measuring its layers needs the extra training (pip install"
        in said
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"- a\n- b\n", "is no TRL config: it should hold keys and values"),
        (b"", "is no TRL config"),
        (b"hello", "is no TRL config"),
        (b"a: [1", "is not YAML: "),
        (bytes(range(256)), "cannot be read: it is no UTF-8 text (byte 128)."),
        (b"!!python/object/apply:os.system [ls]", "is not YAML: "),
        (b"per_device_train_batch_size: many", "per_device_train_batch_size must be a whole number, not many."),
        (b"max_length: {a: 1}", "max_length must be a whole number"),
        (b"bf16: true\nfp16: true", "contradict each other."),
        (b"load_in_4bit: true", "--tuning lora"),
        (b"deepspeed: none.json", "none.json cannot be read: No such file or directory."),
        (b"deepspeed: {zero_optimization: {stage: 7}}", "zero_stage=7 is not supported. zero_stage can be 1, 2, 3."),
        (b"max_length: 12\nmax_seq_length: 13", "max_seq_length=13 contradicts max_length=12."),
    ],
)
def test_a_file_that_is_no_trl_config_is_refused(content, message, tmp_path, capsys):
    file = tmp_path / "train.yaml"
    file.write_bytes(content)
    assert message in refused(["estimate", "--config", str(file), *asked(method="sft")], capsys)


@pytest.mark.parametrize(
    ("model", "model_type"), [("gemma-3-4b-it", "gemma3"), ("Mixtral-8x7B-v0.1", "mixtral"), ("Phi-4", "phi3")]
)
def test_adapters_that_peft_has_no_default_for_are_refused(model, model_type, tmp_path, capsys):
    file = tmp_path / "train.yaml"
    file.write_text("use_peft: true\n")
    message = refused(["estimate", "--config", str(file), *asked(model=model, method="sft")], capsys)
    assert (
        message == f"PEFT has no default lora_target_modules for {model_type}. Name them in the config, such as "
        f"lora_target_modules: all-linear."
    )


@pytest.mark.parametrize("path", ["/", "none.yaml"])
def test_a_config_that_cannot_be_read_is_refused(path, capsys):
    assert f"{path} cannot be read: " in refused(["estimate", "--config", path, *asked(method="sft")], capsys)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--out", "file"], "file cannot be written: file is no folder."),
        (["--out", "file/deeper/still"], "file/deeper/still cannot be written: file is no folder."),
        (["--html", "folder"], "--html folder is a folder. Give a file, such as folder/plan.html."),
        (["--out", "new", "--html", "file/page.html"], "file cannot be written: file is no folder."),
        (["--out", "a" * 300], "cannot be written: File name too long."),
        (["--export", "file/run"], "file/run cannot be written: file is no folder."),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_is(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    Path("folder").mkdir()
    assert refused([*asked(model="gpt2", method="sft"), *flags], capsys).endswith(message)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder"]


@pytest.mark.parametrize(
    ("arguments", "code", "nearest"),
    [
        (asked(method="grp"), "unknown_name", "grpo"),
        ([*asked(), "--set", "zerostage=3"], "unknown_name", "zero_stage"),
        (["estimate", *asked(gpus="2xA100")], "unknown_name", "A100-40G"),
        (["diagnose", "no-such.log"], "wrong_input", ""),
        ([*asked(), "--risk", "2"], "wrong_input", ""),
        ([*asked(), "--export", "/dev/null/x"], "wrong_input", ""),  # the plan was printed before the error
    ],
)
def test_an_error_with_json_is_a_document_beside_the_line(
    arguments: list[str], code: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    document = json.loads(out)
    jsonschema.Draft202012Validator(json_schema()).validate(document)
    assert document["error"]["code"] == code
    assert err == f"Error: {document['error']['message']}\n"
    assert document["error"]["nearest"][:1] == ([nearest] if nearest else [])


def test_a_message_is_one_line() -> None:
    assert str(InputError("a\nb\x1b")) == "a b\\x1b"
    assert str(UnknownName("model", "a\nb", ())) == "Unknown model 'a\\nb'."


def test_every_error_of_the_tree_has_a_code_of_its_own() -> None:
    def tree(kind: type[PlanError]) -> list[type[PlanError]]:
        return [kind, *(below for child in kind.__subclasses__() for below in tree(child))]

    kinds = [kind for kind in tree(PlanError) if kind.__module__ == "planner.errors"]
    assert [kind.code for kind in kinds] == list(dict.fromkeys(kind.code for kind in kinds))
    assert {kind.code for kind in kinds} == set(get_args(ErrorCode))
