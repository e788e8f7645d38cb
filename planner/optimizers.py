"""The table of Transformers' optimizers (`OPTIMIZERS`): states, temporaries of a step, packages."""

from typing import Literal, get_args

from msgspec import Struct

Optimizer = Literal[
    "adamw_torch_fused", "adamw_torch", "adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit",
    "lion_8bit", "lion_32bit", "paged_lion_8bit", "paged_lion_32bit", "rmsprop_bnb", "rmsprop_bnb_8bit",
    "rmsprop_bnb_32bit", "ademamix", "ademamix_8bit", "paged_ademamix_32bit", "paged_ademamix_8bit", "adafactor", "sgd",
    "adagrad", "rmsprop", "stable_adamw", "adamw_torch_8bit", "adamw_torch_4bit", "galore_adamw", "apollo_adamw",
    "lomo", "adalomo", "grokadamw", "schedule_free_adamw", "schedule_free_radam", "schedule_free_sgd",
    "adamw_anyprecision",
]  # fmt: skip


class OptimizerRow(Struct, frozen=True, kw_only=True):
    """One row of the table `OPTIMIZERS`: states per parameter, copies that a step makes, and how it is installed.

    Leaves out scalars per tensor (AdamW's `step`, Adafactor's RMS) that are on the host or small, except `step_tensor`.
    """

    # How states are stored: in the shape of the parameter (dense), as codes with block scales (bitsandbytes, torchao),
    # as sums of rows and columns (factored), or of low rank (galore, apollo).
    kind: Literal["dense", "bitsandbytes", "torchao", "factored", "galore", "apollo"]
    package: str  # on PyPI; empty: on no index

    # states
    buffers: int = 0  # in the shape and dtype of the parameter
    buffers_16bit: int = 0  # further ones, for 16-bit parameters only
    float32_buffers: int = 0  # in the shape of the parameter, always float32
    codes: int = 0  # quantized states of `bits` bits with block scales
    bits: int = 8
    step_tensor: bool = False  # each parameter has a `step` count on the GPU, an allocation of its own
    paged: bool = False  # large states are in CUDA managed memory
    host_buffers: int = 0  # in the shape and dtype of the parameter, on the host

    # the step
    step_copies: int = 0  # copies of all parameters at once (foreach)
    step_largest: int = 0  # float32 copies of the largest parameter
    step_largest_16bit: int = 0  # further ones, for 16-bit parameters only
    # The parameter is updated inside the backward pass, and its gradient dropped.
    fused_backward: bool = False
    # accelerate replaces it by DeepSpeed's CPU Adam when its states are offloaded. Another optimizer runs on the host
    # itself. Source: accelerate 1.15, utils/deepspeed.py, `map_pytorch_optim_to_deepspeed`.
    cpu_adam: bool = False

    @property
    def projects(self) -> bool:
        """True if gradients of matrices are projected to a low rank, which requires `optim_target_modules`.

        Source: transformers 5.23, trainer_optimizer.py, `_setup_low_rank_optimizer`.
        """
        return self.kind in ("galore", "apollo")


# Source of the packages: transformers 5.23, trainer_optimizer.py.
OPTIMIZERS: dict[Optimizer, OptimizerRow] = {
    # torch 2.13, optim/adam.py, `_init_group` (exp_avg, exp_avg_sq; `step` on the GPU when fused), `_multi_tensor_adam`
    # (foreach: exp_avg_sq_sqrt)
    "adamw_torch_fused": OptimizerRow(kind="dense", package="torch", buffers=2, step_tensor=True, cpu_adam=True),
    "adamw_torch": OptimizerRow(kind="dense", package="torch", buffers=2, step_copies=1, cpu_adam=True),
    # torch 2.13, optim/sgd.py (no momentum); adagrad.py, `_multi_tensor_adagrad` (sum; std and numerator); rmsprop.py,
    # `_multi_tensor_rmsprop` (square_avg; avg)
    "sgd": OptimizerRow(kind="dense", package="torch"),
    "adagrad": OptimizerRow(kind="dense", package="torch", buffers=1, step_copies=2),
    "rmsprop": OptimizerRow(kind="dense", package="torch", buffers=1, step_copies=1),
    # bitsandbytes 0.50.2, optim/optimizer.py `Optimizer2State`, `Optimizer1State`, optim/ademamix.py,
    # `AdEMAMix.init_state` (state1 is twice as large); bits and paging from the name: transformers 5.23,
    # trainer_optimizer.py, `_get_bitsandbytes_optimizer`
    "adamw_8bit": OptimizerRow(kind="bitsandbytes", package="bitsandbytes", codes=2),
    "adamw_bnb_8bit": OptimizerRow(kind="bitsandbytes", package="bitsandbytes", codes=2),
    "paged_adamw_8bit": OptimizerRow(kind="bitsandbytes", package="bitsandbytes", codes=2, paged=True),
    "paged_adamw_32bit": OptimizerRow(kind="bitsandbytes", package="bitsandbytes", float32_buffers=2, paged=True),
    "lion_8bit": OptimizerRow(kind="bitsandbytes", package="bitsandbytes", codes=1),
    "lion_32bit": OptimizerRow(kind="bitsandbytes", package="bitsandbytes", float32_buffers=1),
    "paged_lion_8bit": OptimizerRow(kind="bitsandbytes", package="bitsandbytes", codes=1, paged=True),
    "paged_lion_32bit": OptimizerRow(kind="bitsandbytes", package="bitsandbytes", float32_buffers=1, paged=True),
    "rmsprop_bnb": OptimizerRow(kind="bitsandbytes", package="bitsandbytes", float32_buffers=1),
    "rmsprop_bnb_8bit": OptimizerRow(kind="bitsandbytes", package="bitsandbytes", codes=1),
    "rmsprop_bnb_32bit": OptimizerRow(kind="bitsandbytes", package="bitsandbytes", float32_buffers=1),
    "ademamix": OptimizerRow(kind="bitsandbytes", package="bitsandbytes", float32_buffers=3),
    "ademamix_8bit": OptimizerRow(kind="bitsandbytes", package="bitsandbytes", codes=3),
    "paged_ademamix_32bit": OptimizerRow(kind="bitsandbytes", package="bitsandbytes", float32_buffers=3, paged=True),
    "paged_ademamix_8bit": OptimizerRow(kind="bitsandbytes", package="bitsandbytes", codes=3, paged=True),
    # transformers 5.23, optimization.py, `Adafactor.step` (row and column sums, float32; the squared gradient and the
    # update; for 16-bit parameters float32 copies of gradient and parameter)
    "adafactor": OptimizerRow(kind="factored", package="transformers", step_largest=2, step_largest_16bit=2),
    # torch-optimi 0.3.3, stableadamw.py (Kahan compensation for 16-bit parameters unless switched off)
    "stable_adamw": OptimizerRow(kind="dense", package="torch-optimi", buffers=2, buffers_16bit=1),
    # torchao 0.18, optim/subclass_8bit.py, subclass_4bit.py; adam.py `single_param_adam` (both moments in
    # float32)
    "adamw_torch_8bit": OptimizerRow(kind="torchao", package="torchao", codes=2, step_largest=2),
    "adamw_torch_4bit": OptimizerRow(kind="torchao", package="torchao", codes=2, bits=4, step_largest=2),
    # galore-torch 1.0, adamw.py, galore_projector.py; apollo-torch 1.0.3, apollo.py, random_projector.py
    "galore_adamw": OptimizerRow(kind="galore", package="galore-torch"),
    "apollo_adamw": OptimizerRow(kind="apollo", package="apollo-torch"),
    # lomo-optim 0.1.1, lomo.py (no state; 16-bit parameters: float32 copies of gradient and parameter), adalomo.py (row
    # and column sums of every parameter, frozen or not; two tensors of the update, 16-bit: and a float32 gradient);
    # both: `fuse_update`
    "lomo": OptimizerRow(kind="dense", package="lomo-optim", step_largest_16bit=2, fused_backward=True),
    "adalomo": OptimizerRow(
        kind="factored", package="lomo-optim", step_largest=2, step_largest_16bit=1, fused_backward=True
    ),
    # grokadamw 0.1.2, grokadamw.py (three states, kept on the host between steps)
    "grokadamw": OptimizerRow(kind="dense", package="grokadamw", host_buffers=3, step_largest=5),
    # schedulefree 1.4.1, adamw_schedulefree.py and radam_schedulefree.py, `step` (z, exp_avg_sq; denom),
    # sgd_schedulefree.py (z)
    "schedule_free_adamw": OptimizerRow(kind="dense", package="schedulefree", buffers=2, step_copies=1),
    "schedule_free_radam": OptimizerRow(kind="dense", package="schedulefree", buffers=2, step_copies=1),
    "schedule_free_sgd": OptimizerRow(kind="dense", package="schedulefree", buffers=1),
    # torchdistx, optimizers/anyprecision_optimizer.py with transformers' defaults: momentum and variance in float32;
    # torchdistx is on no index
    "adamw_anyprecision": OptimizerRow(kind="dense", package="", float32_buffers=2, step_largest=2),
}  # fmt: skip
assert set(OPTIMIZERS) == set(get_args(Optimizer)), "every optimizer has one row"
