"""Dtypes of the unquantized parameters of a bitsandbytes model after PEFT's k-bit preparation.

`prepare_model_for_kbit_training` casts all of them to float32; CPO and ORPO, which call it, then cast some back to
bfloat16; so did SFT, DPO, GRPO and RLOO before TRL 1.0. Other trainers do not call it: everything keeps the dtype in
which the model is loaded, unless the training script calls it before (the setting of that name).
"""

from typing import NamedTuple

from planner.cache_keys import StateInput
from planner.memory.dtypes import FLOAT32_BYTES, SIXTEEN_BIT_BYTES
from planner.memory.parameters.tensors import Part
from planner.methods import KbitPreparation


class PreparedBytes(NamedTuple):
    """Bytes of one parameter of a part of the model."""

    embedding: int
    position: int
    head: int
    rest: int  # norms, biases, routers, fused experts, projections that bitsandbytes does not convert

    def of(self, part: Part) -> int:
        """Bytes of one parameter of `part`."""
        return {"embedding": self.embedding, "position": self.position, "head": self.head}.get(part, self.rest)


ALL_FLOAT32 = PreparedBytes(FLOAT32_BYTES, FLOAT32_BYTES, FLOAT32_BYTES, FLOAT32_BYTES)
ALL_SIXTEEN_BIT = PreparedBytes(SIXTEEN_BIT_BYTES, SIXTEEN_BIT_BYTES, SIXTEEN_BIT_BYTES, SIXTEEN_BIT_BYTES)

# Bytes after the trainer's casts on a 4-bit base with bf16. On an 8-bit base, and without bf16, everything stays as it
# is: in float32 with CPO and ORPO, as loaded with online DPO, which calls a function of TRL of the same name that casts
# nothing (trl 1.16, experimental/utils.py). Source: see `Method.kbit_preparation` (`peft_module_casting_to_bf16` casts
# modules named lm_head, embed_tokens, wte, wpe).
AFTER_CASTS: dict[KbitPreparation, PreparedBytes] = {
    "embeddings_and_head": PreparedBytes(SIXTEEN_BIT_BYTES, SIXTEEN_BIT_BYTES, SIXTEEN_BIT_BYTES, FLOAT32_BYTES),
    "everything_unquantized": ALL_SIXTEEN_BIT,
}


def prepared_bytes(candidate: StateInput) -> PreparedBytes | None:
    """Return the dtypes after k-bit preparation; None if it is not called.

    DeepSpeed then casts all of them to 16 bits (deepspeed 0.19.8, runtime/engine.py, `_cast_module_mixed_precision`).
    """
    prepared = _prepared_by_trainer(candidate)
    return ALL_SIXTEEN_BIT if prepared is not None and candidate.casts == "module" else prepared


def bytes_while_prepared(candidate: StateInput) -> int:
    """Return the bytes of each unquantized parameter before casts back: 4, or 0 where the function casts nothing."""
    casts = candidate.method_row.kbit_preparation != "everything_unquantized"
    return FLOAT32_BYTES if casts and prepared_bytes(candidate) is not None else 0


def prepared_in_passes(candidate: StateInput) -> PreparedBytes | None:
    """`prepared_bytes` of the weights as a pass reads them; None also where mixed precision casts sharded ones.

    Source: torch 2.13, distributed/fsdp/_fully_shard/_fsdp_param.py, `init_dtype_attrs`, _fsdp_state.py,
    `_post_forward` (casts outputs too).
    """
    return None if candidate.casts_weights else prepared_bytes(candidate)


def autocasts_loss(candidate: StateInput) -> bool:
    """Return whether the trainer's own autocast, to float16 on GPUs, spans model and loss.

    Its copies of weights live until the loss is there.
    Source: trl 1.16, experimental/cpo/cpo_trainer.py and orpo_trainer.py, `compute_loss`
    (`_peft_has_been_casted_to_bf16`).
    """
    casts = candidate.method_row.kbit_preparation == "embeddings_and_head" and candidate.precision == "bf16"
    return casts and candidate.quantization_row.four_bit


def _prepared_by_trainer(candidate: StateInput) -> PreparedBytes | None:
    row = candidate.method_row
    preparation = "none" if row.shards_qlora and candidate.scheme_row.shards_weights else row.kbit_preparation
    if not candidate.quantization_row.bitsandbytes:
        return None
    if preparation == "none":
        return ALL_FLOAT32 if candidate.prepare_model_for_kbit_training else None
    if candidate.quantization_row.eight_bit or candidate.precision != "bf16":
        return ALL_FLOAT32 if preparation == "embeddings_and_head" else None
    left = AFTER_CASTS[preparation]
    if left.rest == SIXTEEN_BIT_BYTES:
        return left
    return left._replace(**dict.fromkeys(candidate.model.architecture.uncast_parts, FLOAT32_BYTES))
