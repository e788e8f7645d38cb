"""The DeepSpeed configuration, which sets the bucket sizes that the estimate assumes."""

import json

from planner.candidate import Candidate
from planner.settings.table import STAGE_3_SIZES

FILE = "deepspeed.json"

# Transformers replaces "auto" by values from its arguments and the model's hidden_size (transformers 5.23,
# integrations/deepspeed.py, `HfTrainerDeepSpeedConfig`). Buckets that are not set have DeepSpeed's default, 5e8
# elements (1 GB), for any model.
AUTO = "auto"

# Settings of zero_optimization that are the same for every candidate. overlap_comm would double the bucket of stages 1
# and 2 (deepspeed 0.19.8, zero/stage_1_and_2.py, `setup_buckets`).
EVERY_STAGE: dict[str, object] = {"contiguous_gradients": True}
BY_STAGE: dict[int, dict[str, object]] = {
    1: {"overlap_comm": False},
    2: {"overlap_comm": False},
    3: {"overlap_comm": True, "stage3_gather_16bit_weights_on_model_save": True},
}


def deepspeed_config(candidate: Candidate) -> dict[str, object]:
    """The configuration of a candidate with ZeRO, as DeepSpeed reads it; empty for others."""
    stage = candidate.scheme_row.stage
    if not stage:
        return {}
    sizes = ("reduce_bucket_size", *(STAGE_3_SIZES if stage == 3 else ()))
    zero: dict[str, object] = {
        "stage": stage, **EVERY_STAGE, **BY_STAGE[stage], **{name: getattr(candidate, name) for name in sizes}
    }  # fmt: skip
    host = {"device": "cpu", "pin_memory": True}
    if candidate.offload_optimizer:
        zero["offload_optimizer"] = host
    if candidate.offload_param:
        zero["offload_param"] = host
    # An optimizer that accelerate does not replace runs on the host itself, which DeepSpeed refuses otherwise
    # (accelerate 1.15, accelerator.py, `_prepare_deepspeed`).
    own = candidate.offload_optimizer and not candidate.optimizer_row.cpu_adam
    forced = {"zero_force_ds_cpu_optimizer": False} if own else {}
    return {
        "bf16": {"enabled": AUTO},
        "fp16": {"enabled": AUTO},
        "zero_optimization": zero,
        "gradient_accumulation_steps": AUTO,
        "gradient_clipping": AUTO,
        "train_batch_size": AUTO,
        "train_micro_batch_size_per_gpu": AUTO,
        **forced,
    }


def deepspeed_json(candidate: Candidate) -> str:
    """The text of the file."""
    return json.dumps(deepspeed_config(candidate), indent=2) + "\n"
