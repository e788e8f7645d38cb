"""How a layer computes: everything but its shape and the size of the batch."""

from dataclasses import dataclass
from typing import Literal

from planner.memory.layers.autograd import Size

Kernel = Literal["eager", "eager_masked", "flash", "flash_varlen", "efficient", "efficient_unmasked", "math"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How a layer computes: everything but its shape and the size of the batch. Widths in bytes.

    `autocast_width` is 0 without autocast. `quantized`: the kind of quantized `nn.Linear`, "none" for plain ones.
    `device` selects where CPU and CUDA kernels keep different things; plans are for "cuda", tests can run "cpu".
    """

    weight_width: int
    autocast_width: int
    trainable: bool
    quantized: Literal["none", "4bit", "8bit", "dequantized"] = "none"
    lora_r: int = 0
    lora_targets: frozenset[str] = frozenset()
    lora_experts: bool = False  # adapters on the fused experts and their router (peft 0.21 `ParamWrapper`, what all-linear means for mixtral)
    adapter_width: int = 4
    lora_dropout: bool = False
    dropout: bool = (
        True  # the model's own dropout where its config has some; DPO, KTO and reward trainers switch it off
    )
    kernel: Kernel = "flash"
    several_rows: bool = True  # one row lets views stand where several need copies
    liger: bool = False
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def compute_width(self) -> int:
        return self.autocast_width or self.weight_width

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"


def tokens(features: int) -> Size:
    """Elements of a `[rows, length, features]` tensor."""
    return (features, 0, 0)


def scores(heads: int) -> Size:
    """Elements of a `[rows, heads, length, length]` tensor."""
    return (0, heads, 0)
