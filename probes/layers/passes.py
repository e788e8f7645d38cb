"""Passes of one layer of each kind on fake tensors: the bytes alive at every moment, by kind."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from msgspec import Struct
from msgspec.structs import replace
from peft import LoraConfig, get_peft_model
from torch.utils._pytree import tree_leaves

from planner.candidate import AttentionImplementation, Candidate
from planner.memory.layers.autograd import MemoryKind
from planner.memory.layers.recipe import Kernel, Recipe
from planner.models.lora_targets import expert_parameters
from planner.models.shape import ModelShape
from planner.quantizations import Quantization, QuantizedLinear
from probes.layers.cuda.liger import decoder, liger_kernels
from probes.layers.cuda.substitutions import cuda_substitutions, kernel_workspaces
from probes.layers.fake_tensors.arithmetic import FakeArithmetic
from probes.layers.fake_tensors.models import (
    adapters_without_weights,
    fake_weights,
    models_stay_where_they_are,
    policy,
    quiet,
)
from probes.layers.fake_tensors.tracker import Allocation, Trace, Tracker
from probes.layers.few_layers import few_layers, layer_kinds, without_window
from probes.layers.shapes import decoder_layers
from probes.step.collector import collector_off

BytesByKind = dict[MemoryKind, int]
Call = tuple[tuple[Any, ...], dict[str, Any]]


class MeasuredPass(Struct, frozen=True, kw_only=True):
    """The parts of a `LayerMemory` at one batch size: bytes by kind, at one moment or at every moment of a pass."""

    saved: BytesByKind
    checkpoint: BytesByKind
    forward: list[BytesByKind]
    checkpointed_forward: list[BytesByKind]
    backward: list[BytesByKind]
    checkpointed_backward: list[BytesByKind]
    inference: list[BytesByKind]


IMPLEMENTATIONS: dict[Kernel, AttentionImplementation] = {
    "eager": "eager", "eager_masked": "eager", "flash_varlen": "flash_attention_2",
}  # fmt: skip
PADDED: tuple[Kernel, ...] = ("efficient", "eager_masked", "flash_varlen")  # kernels of rows with padding
# A quantization whose projections compute as the recipe says.
QUANTIZATION_OF_LINEAR: dict[QuantizedLinear, Quantization] = {"none": "none", "4bit": "nf4", "8bit": "int8"}
# Kernels that run without a mask. sdpa has a mask in rows that are as long as a sliding window, see
# `planner.memory.stack_recipe.kernel`: there the windows are set beyond every measured row.
UNMASKED: tuple[Kernel, ...] = ("flash", "efficient_unmasked")
# A layer that text does not pass: cross-attention to images (transformers 5.23, models/mllama/modeling_mllama.py,
# MllamaTextModel.forward).
SKIPPED = MeasuredPass(
    saved={},
    checkpoint={},
    forward=[{}],
    checkpointed_forward=[{}],
    backward=[{}],
    checkpointed_backward=[{}],
    inference=[{}],
)


class _Begin(torch.autograd.Function):
    """Allocate the layer's input, the first allocation of the pass; stop the gradient behind it."""

    @staticmethod
    def forward(_: Any, begin: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None


class _End(torch.autograd.Function):
    """Allocate the gradient of the layer's output in the backward pass, where only autograd's engine holds it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x.new_empty(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.new_empty(ctx.shape, dtype=ctx.dtype)


class LayerHarness(Struct, frozen=True):
    """A model with one layer of each kind on fake tensors, built as the recipe says."""

    model: torch.nn.Module
    one_of_each: tuple[torch.nn.Module, ...]
    recipe: Recipe
    workspaces: Mapping[Any, Callable[..., int]]  # bytes that an operator allocates inside its CUDA kernel

    def measure_kinds(
        self, rows: int, length: int, kinds: frozenset[int]
    ) -> dict[int, tuple[MeasuredPass, MeasuredPass]]:
        """Run the passes of some kinds of layers; return them without and with existing gradients of the weights."""
        calls, layers = self._record_calls(rows, length), {kind: self.one_of_each[kind] for kind in kinds}
        return {
            kind: self._measure(layer, calls[layer]) if layer in calls else (SKIPPED, SKIPPED)
            for kind, layer in layers.items()
        }

    def _autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self.recipe.autocast_width else contextlib.nullcontext()

    def _record_calls(self, rows: int, length: int) -> dict[torch.nn.Module, Call]:
        """Run the model and record the arguments of each layer: its input, positions, masks."""
        calls: dict[torch.nn.Module, Call] = {}

        def remember(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[layer] = (args, kwargs)

        handles = [layer.register_forward_pre_hook(remember, with_kwargs=True) for layer in self.one_of_each]
        ids = torch.ones((rows, length), dtype=torch.long)
        mask = torch.ones_like(ids)
        if self.recipe.kernel in PADDED:
            mask[-1, -1] = 0
        try:
            with torch.no_grad(), self._autocast():
                self.model(input_ids=ids, attention_mask=mask, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return calls

    def _measure(self, layer: torch.nn.Module, call: Call) -> tuple[MeasuredPass, MeasuredPass]:
        plain, _ = self._train(layer, call, checkpointing=False)
        checkpointed, extra_bytes = self._train(layer, call, checkpointing=True)
        alone = _LiveMemory(self._infer(layer, call)).moments("forward")
        inference = _beside(alone, extra_bytes) if extra_bytes else alone
        return (
            _measured_pass(plain, checkpointed, extra_bytes, inference, gradients_exist=False),
            _measured_pass(plain, checkpointed, extra_bytes, inference, gradients_exist=True),
        )

    def _train(self, layer: torch.nn.Module, call: Call, checkpointing: bool) -> tuple[Trace, int]:
        """Run forward and backward; return the trace and the bytes of the tensors returned after the layer's output.

        No gradient exists before. The caller of a layer replaces its input by its output, and the output is freed
        before the backward pass begins.
        """
        layer.gradient_checkpointing = checkpointing
        trained = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        begin = torch.empty((), requires_grad=True)
        with self._tracker(layer, (begin, call)) as tracker, _accumulation_marked(trained, tracker):
            with self._autocast():
                x = _Begin.apply(begin, _input(call))
                x = _call(layer, x, call)
                extra_bytes = _extra_bytes(x)
                x = x[0] if isinstance(x, tuple) else x
                tracker.enter_phase("loss")  # the forward pass has ended, autocast's copies are still alive
            loss = _End.apply(x)
            tracker.enter_phase("backward")
            del x
            loss.backward()
            tracker.mark((parameter.grad for parameter in trained if parameter.grad is not None), "gradients")
        for parameter in trained:
            parameter.grad = None
        return tracker.trace(), extra_bytes

    def _infer(self, layer: torch.nn.Module, call: Call) -> Trace:
        layer.gradient_checkpointing = False
        with self._tracker(layer, call) as tracker, torch.no_grad(), self._autocast():
            x = torch.empty_like(_input(call))
            x = _call(layer, x, call)
            del x
        return tracker.trace()

    @contextlib.contextmanager
    def _tracker(self, layer: torch.nn.Module, arguments: Any) -> Iterator[Tracker]:
        """A tracker that counts the weights and the layer's arguments as resident: they exist before the layer runs."""
        tracker = Tracker(self.workspaces)
        with tracker:
            for parameter in layer.parameters():
                tracker.add_resident(parameter, "weights")
            for tensor in tree_leaves(arguments):
                if isinstance(tensor, torch.Tensor):
                    tracker.add_resident(tensor, "transients")
            tracker.enter_phase("forward")
            yield tracker


@contextlib.contextmanager
def _accumulation_marked(trained: list[torch.nn.Parameter], tracker: Tracker) -> Iterator[None]:
    """Mark in the trace when each parameter's gradient is complete."""

    def mark(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            tracker.mark_accumulated(parameter.grad)

    handles = [parameter.register_post_accumulate_grad_hook(mark) for parameter in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _measured_pass(
    plain: Trace, checkpointed: Trace, extra_bytes: int, inference: list[BytesByKind], gradients_exist: bool
) -> MeasuredPass:
    """Read the parts of a `LayerMemory` off the traces of a plain and a checkpointed pass.

    `extra_bytes` are the tensors that a layer returns after its output (bloom: attention's probabilities). Its caller
    holds them until the next layer has run, as in `inference`; in a plain pass the graph holds them, too. With
    `gradients_exist` a new gradient is added to the existing one and freed as soon as it is complete
    (torch/csrc/autograd/functions/accumulate_grad.h).
    """
    one, again = _LiveMemory(plain, gradients_exist), _LiveMemory(checkpointed, gradients_exist)
    return MeasuredPass(
        saved=one.at_end_of_forward(with_copies=False),
        checkpoint=again.at_end_of_forward(with_copies=True),
        forward=one.moments("forward"),
        checkpointed_forward=_beside(again.moments("forward"), extra_bytes),
        backward=one.moments("backward"),
        checkpointed_backward=again.moments("backward"),
        inference=inference,
    )


def _beside(moments: list[BytesByKind], extra_bytes: int) -> list[BytesByKind]:
    """Moments of a layer that runs while its caller holds what the layer before returned after its output."""
    return [{**moment, "transients": moment.get("transients", 0) + extra_bytes} for moment in moments]


def _input(call: Call) -> torch.Tensor:
    args, kwargs = call
    hidden_states: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden_states


def _call(layer: torch.nn.Module, x: torch.Tensor, call: Call) -> Any:
    args, kwargs = call
    return layer(x, *args[1:], **kwargs) if args else layer(**{**kwargs, "hidden_states": x})


def _extra_bytes(result: Any) -> int:
    """Bytes of the tensors that a layer returns after its output."""
    extra = tree_leaves(result[1:]) if isinstance(result, tuple) else []
    return sum(tensor.nbytes for tensor in extra if isinstance(tensor, torch.Tensor))


class _LiveMemory:
    """Bytes alive at every moment of one run of a layer, above its input: negative once the input is freed."""

    def __init__(self, trace: Trace, gradients_exist: bool = False) -> None:
        allocations = [allocation for allocation in trace.allocations if allocation.phase != "load"]
        self._allocations = [_freed_when_added(each) if gradients_exist else each for each in allocations]
        self._input = self._allocations[0]
        self._starts = {phase: event for event, phase in trace.phase_starts}

    def moments(self, phase: str) -> list[BytesByKind]:
        """Bytes by kind after every allocation of a pass."""
        changes = [(allocation.born, 1, allocation) for allocation in self._allocations] + [
            (allocation.died, -1, allocation) for allocation in self._allocations
        ]
        alive: BytesByKind = {"activations": -self._input.size_bytes}
        found = []
        for _, sign, allocation in sorted(changes, key=lambda change: change[0]):
            kind = self._kind(allocation)
            alive[kind] = alive.get(kind, 0) + sign * allocation.size_bytes
            if sign > 0 and allocation.phase == phase and allocation is not self._input:
                found.append(alive.copy())
        return found

    def at_end_of_forward(self, with_copies: bool) -> BytesByKind:
        """Bytes left by the forward pass. Autocast's copies are freed with its context unless the graph holds them."""
        event = self._starts["loss"] if with_copies else self._starts["backward"]
        return self._alive(event - 1, born_before=self._starts["loss"])

    def _alive(self, event: int, born_before: int = 2**62) -> BytesByKind:
        found: BytesByKind = {"activations": -self._input.size_bytes}
        for allocation in self._allocations:
            if allocation.born <= event < allocation.died and allocation.born < born_before:
                kind = self._kind(allocation)
                found[kind] = found.get(kind, 0) + allocation.size_bytes
        return found

    def _kind(self, allocation: Allocation) -> MemoryKind:
        if allocation.component in ("autocast_copies", "gradients"):
            return allocation.component
        stays = allocation.phase == "forward" and allocation.died >= self._starts.get("loss", 0)
        return "activations" if stays or allocation is self._input else "transients"


def _freed_when_added(allocation: Allocation) -> Allocation:
    """A gradient as a transient that is freed once it is added to the existing one; other allocations unchanged."""
    if allocation.component != "gradients":
        return allocation
    return replace(allocation, died=min(allocation.died, allocation.accumulated), component="transients")


def _targets(model: torch.nn.Module, layers: tuple[torch.nn.Module, ...], names: frozenset[str]) -> Iterator[str]:
    """Paths of the layers' projections named in `names`.

    Names alone would also match in towers for images, whose modules can have names such as `0`.
    """
    inside = {id(module) for layer in layers for module in layer.modules()}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and id(module) in inside and path.rsplit(".", 1)[-1] in names:
            yield path


@contextlib.contextmanager
def layer_harness(model: ModelShape, recipe: Recipe) -> Iterator[LayerHarness]:
    """Build the model with one layer of each kind as TRL's trainers do; run it on fake tensors with CUDA's kernels."""
    arithmetic = FakeArithmetic()
    candidate = Candidate(
        model=model, method="sft", dtype="float32" if recipe.weight_width == 4 else "bfloat16",
        attn_implementation=IMPLEMENTATIONS.get(recipe.kernel, "sdpa"),
        quantization=QUANTIZATION_OF_LINEAR[recipe.quantized],
    )  # fmt: skip
    shape = few_layers(model, of_a_kind=1)
    if recipe.kernel in UNMASKED:
        shape = replace(shape, config=without_window(dict(shape.config)))
    flash = recipe.kernel != "efficient_unmasked"  # else the card has no FlashAttention kernels
    with quiet(), collector_off(), models_stay_where_they_are(), cuda_substitutions(candidate, flash):
        with adapters_without_weights():
            built: Any = policy(replace(candidate, model=shape))
            layers = tuple(decoder_layers(built, len(layer_kinds(dict(model.config)))))
            final_norm = decoder(built).norm if recipe.liger_blocks else None
            built = _trained_as(recipe, built, layers, model)
        fake_weights(built, arithmetic)
        if candidate.quantization_row.quantized:
            from probes.layers.cuda.quantized import fake_statistics

            fake_statistics(built, arithmetic.fake)
        with arithmetic, liger_kernels(model.model_type, recipe.liger_blocks, layers, final_norm):
            yield LayerHarness(built, layers, recipe, kernel_workspaces(candidate))


def _trained_as(recipe: Recipe, built: Any, layers: tuple[torch.nn.Module, ...], model: ModelShape) -> Any:
    """Prepare a model for training: checkpointing, frozen weights, adapters, dropout.

    Adapters of 16 bits are cast here: PEFT creates them in float32, and gives them a 16-bit base's dtype only where it
    moves them to a device, which these have not. TRL casts those on a bitsandbytes base (trl 1.16,
    trainer/sft_trainer.py, `SFTTrainer.__init__`); DeepSpeed and FSDP2 compute with all of them in 16 bits.
    """
    built.train()
    built.gradient_checkpointing_enable()
    built.requires_grad_(recipe.trainable)
    if recipe.lora_r:
        targets = "all-linear" if recipe.lora_experts else list(_targets(built, layers, recipe.lora_targets))
        fused = [name for part, name in expert_parameters(model).items() if part in recipe.expert_parts]
        adapted = LoraConfig(
            r=recipe.lora_r,
            target_modules=targets,
            target_parameters=fused or None,
            lora_dropout=0.1 if recipe.lora_dropout else 0.0,
            task_type="CAUSAL_LM",
        )
        built = get_peft_model(built, adapted, autocast_adapter_dtype=recipe.adapter_width == 4)
        if recipe.adapter_width == 2:
            for parameter in built.parameters():
                if parameter.requires_grad:
                    parameter.data = parameter.data.to(torch.bfloat16)
    if not recipe.dropout:
        for module in built.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
    return built
