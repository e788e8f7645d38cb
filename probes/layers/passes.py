"""The passes of one layer of each kind on fake tensors: what is alive at every moment of them."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch.utils._pytree import tree_leaves

from planner.allocator.trace import Allocation, Trace
from planner.candidate import Candidate
from planner.memory.layers.autograd import Kind
from planner.memory.layers.recipe import Recipe
from planner.models.shape import ModelShape
from probes.dryrun.cuda.substitutions import WORKSPACES, cuda_ways
from probes.dryrun.dry_run import fake_weights
from probes.dryrun.fake_models import adapters_without_weights, build_model, models_stay_where_they_are
from probes.dryrun.fake_tensors import FakeArithmetic
from probes.dryrun.quiet_libraries import quiet
from probes.layers.few_layers import few_layers, layer_kinds
from probes.layers.shapes import decoder_layers
from probes.step.tracker import Tracker, collector_off

Bytes = dict[Kind, int]
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """Bytes by kind of what a `LayerMemory` is made of, at one size: moments, and passes with all of theirs in order."""

    saved: Bytes
    checkpoint: Bytes
    forward: list[Bytes]
    checkpointed_forward: list[Bytes]
    backward: list[Bytes]
    checkpointed_backward: list[Bytes]
    inference: list[Bytes]


# A layer that text alone does not pass: cross-attention to images (transformers 5.23, models/mllama/modeling_mllama.py, MllamaTextModel.forward).
SKIPPED = Seen(
    saved={},
    checkpoint={},
    forward=[{}],
    checkpointed_forward=[{}],
    backward=[{}],
    checkpointed_backward=[{}],
    inference=[{}],
)


class _Begin(torch.autograd.Function):
    """Before the layer: its input, the pass's first allocation, whose gradient ends here."""

    @staticmethod
    def forward(_: Any, begin: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(like)

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> tuple[None, None]:
        return None, None


class _End(torch.autograd.Function):
    """After the layer: the gradient of its output, which nobody but autograd's engine holds."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return x.new_empty(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.new_empty(ctx.shape, dtype=ctx.dtype)


@dataclass(frozen=True, slots=True)
class Stage:
    """A model of one layer of each kind, on fake tensors, as the recipe has it."""

    model: torch.nn.Module
    one_of_each: tuple[torch.nn.Module, ...]
    recipe: Recipe

    def layers(self, rows: int, length: int) -> list[tuple[Seen, Seen]]:
        """For each kind of layer what is seen of its passes, before any gradient exists and after."""
        calls = self._calls(rows, length)
        return [self._seen(layer, calls[layer]) if layer in calls else (SKIPPED, SKIPPED) for layer in self.one_of_each]

    def _autocast(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16) if self.recipe.autocast_width else contextlib.nullcontext()

    def _calls(self, rows: int, length: int) -> dict[torch.nn.Module, Call]:
        """What the model gives each layer besides its input: positions, masks."""
        calls: dict[torch.nn.Module, Call] = {}

        def remember(layer: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[layer] = (args, kwargs)

        handles = [layer.register_forward_pre_hook(remember, with_kwargs=True) for layer in self.one_of_each]
        ids = torch.ones((rows, length), dtype=torch.long)
        mask = torch.ones_like(ids)
        if self.recipe.kernel in ("efficient", "eager_masked"):
            mask[-1, -1] = 0
        try:
            with torch.no_grad(), self._autocast():
                self.model(input_ids=ids, attention_mask=mask, use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return calls

    def _seen(self, layer: torch.nn.Module, call: Call) -> tuple[Seen, Seen]:
        plain, _ = self._pass(layer, call, checkpointing=False)
        checkpointed, held = self._pass(layer, call, checkpointing=True)
        inference = _Watched(self._inference(layer, call)).moments("forward")
        return _seen(plain, checkpointed, held, inference, gradients_exist=False), _seen(
            plain, checkpointed, held, inference, gradients_exist=True
        )

    def _pass(self, layer: torch.nn.Module, call: Call, checkpointing: bool) -> tuple[Trace, int]:
        """Forward and backward, and the bytes of what the layer returns beside its output. No gradient exists before.

        Who calls a layer drops its input for its output; the output is gone when the backward pass begins.
        """
        layer.gradient_checkpointing = checkpointing
        learned = [parameter for parameter in layer.parameters() if parameter.requires_grad]
        begin = torch.empty((), requires_grad=True)
        with self._tracker(layer, (begin, call)) as tracker, _told_of_gradients(learned, tracker):
            with self._autocast():
                x = _Begin.apply(begin, _input(call))
                x = _called(layer, x, call)
                held = _beside(x)
                x = _output(x)
                tracker.enter_phase("loss")  # the forward pass is done, autocast's copies are still there
            loss = _End.apply(x)
            tracker.mark_saved()
            tracker.enter_phase("backward")
            del x
            loss.backward()
            tracker.mark((parameter.grad for parameter in learned if parameter.grad is not None), "gradients")
        for parameter in learned:
            parameter.grad = None
        return tracker.trace(), held

    def _inference(self, layer: torch.nn.Module, call: Call) -> Trace:
        layer.gradient_checkpointing = False
        with self._tracker(layer, call) as tracker, torch.no_grad(), self._autocast():
            x = torch.empty_like(_input(call))
            x = _called(layer, x, call)
            del x
        return tracker.trace()

    @contextlib.contextmanager
    def _tracker(self, layer: torch.nn.Module, given: Any) -> Iterator[Tracker]:
        """A tracker that knows what is there before the layer runs: weights, and what the layer is given."""
        tracker = Tracker(1, WORKSPACES)
        with tracker:
            for name, parameter in layer.named_parameters():
                tracker.add_resident(parameter, "weights", name)
            for tensor in tree_leaves(given):
                if isinstance(tensor, torch.Tensor):
                    tracker.add_resident(tensor, "transients", "")
            tracker.enter_phase("forward")
            yield tracker


@contextlib.contextmanager
def _told_of_gradients(learned: list[torch.nn.Parameter], tracker: Tracker) -> Iterator[None]:
    """The tracker hears when a parameter's gradient is whole."""

    def told(parameter: torch.Tensor) -> None:
        if parameter.grad is not None:
            tracker.mark_accumulated(parameter.grad)

    handles = [parameter.register_post_accumulate_grad_hook(told) for parameter in learned]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _seen(plain: Trace, checkpointed: Trace, held: int, inference: list[Bytes], gradients_exist: bool) -> Seen:
    """What a layer returns beside its output (bloom: attention's scores) its caller holds until the next layer has run.

    Without checkpointing the graph holds it, too. Where gradients exist already, a new one is added to its like and goes as soon as it is
    whole (torch/csrc/autograd/functions/accumulate_grad.h).
    """
    one, again = _Watched(plain, gradients_exist), _Watched(checkpointed, gradients_exist)
    return Seen(
        saved=one.at_end_of_forward(with_copies=False),
        checkpoint=again.at_end_of_forward(with_copies=True),
        forward=one.moments("forward"),
        checkpointed_forward=[
            {**moment, "transients": moment.get("transients", 0) + held} for moment in again.moments("forward")
        ],
        backward=one.moments("backward"),
        checkpointed_backward=again.moments("backward"),
        inference=inference,
    )


def _input(call: Call) -> torch.Tensor:
    args, kwargs = call
    found: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return found


def _called(layer: torch.nn.Module, x: torch.Tensor, call: Call) -> Any:
    args, kwargs = call
    return layer(x, *args[1:], **kwargs) if args else layer(**{**kwargs, "hidden_states": x})


def _beside(result: Any) -> int:
    """Bytes of the tensors that are returned behind the output."""
    behind = tree_leaves(result[1:]) if isinstance(result, tuple) else []
    return sum(tensor.nbytes for tensor in behind if isinstance(tensor, torch.Tensor))


def _output(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


class _Watched:
    """What was alive when, in one run of a layer, above its input: less than nothing once that is gone."""

    def __init__(self, trace: Trace, gradients_exist: bool = False) -> None:
        made = [allocation for allocation in trace.allocations if allocation.phase != "load"]
        self._made = [_added(each) if gradients_exist else each for each in made]
        self._input = self._made[0]
        self._starts = {phase: event for event, phase in trace.phase_starts}

    def moments(self, phase: str) -> list[Bytes]:
        """After every allocation of a pass."""
        changes = [(allocation.born, 1, allocation) for allocation in self._made] + [
            (allocation.died, -1, allocation) for allocation in self._made
        ]
        alive: Bytes = {"activations": -self._input.size_bytes}
        found = []
        for _, sign, allocation in sorted(changes, key=lambda change: change[0]):
            kind = self._kind(allocation)
            alive[kind] = alive.get(kind, 0) + sign * allocation.size_bytes
            if sign > 0 and allocation.phase == phase and allocation is not self._input:
                found.append(alive.copy())
        return found

    def at_end_of_forward(self, with_copies: bool) -> Bytes:
        """What a forward pass leaves; autocast's copies go with its context unless the graph holds them."""
        event = self._starts["loss"] if with_copies else self._starts["backward"]
        return self._alive(event - 1, born_before=self._starts["loss"])

    def _alive(self, event: int, born_before: int = 2**62) -> Bytes:
        found: Bytes = {"activations": -self._input.size_bytes}
        for allocation in self._made:
            if allocation.born <= event < allocation.died and allocation.born < born_before:
                kind = self._kind(allocation)
                found[kind] = found.get(kind, 0) + allocation.size_bytes
        return found

    def _kind(self, allocation: Allocation) -> Kind:
        if allocation.component in ("autocast_copies", "gradients"):
            return allocation.component
        stays = allocation.phase == "forward" and allocation.died >= self._starts.get("loss", 0)
        return "activations" if stays or allocation is self._input else "transients"


def _added(allocation: Allocation) -> Allocation:
    """A gradient that is added to its like; anything else as it is."""
    if allocation.component != "gradients":
        return allocation
    return replace(allocation, died=min(allocation.died, allocation.accumulated), component="transients")


def _targets(model: torch.nn.Module, layers: tuple[torch.nn.Module, ...], names: frozenset[str]) -> Iterator[str]:
    """The paths of the layers' projections that have adapters: a tower's may have names such as `0`, which layers have too."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and id(module) in inside and path.rsplit(".", 1)[-1] in names:
            yield path


@contextlib.contextmanager
def layer_stage(model: ModelShape, recipe: Recipe) -> Iterator[Stage]:
    """The model built as TRL's trainers build it, and everything that runs in CUDA's way."""
    arithmetic = FakeArithmetic()
    candidate = Candidate(
        model=model, method="sft", dtype="float32" if recipe.weight_width == 4 else "bfloat16",
        attn_implementation="eager" if recipe.kernel.startswith("eager") else "sdpa",
    )  # fmt: skip
    shape = few_layers(model, of_a_kind=1)
    with quiet(), collector_off(), models_stay_where_they_are(), cuda_ways(), adapters_without_weights():
        built: Any = build_model(shape, candidate, "fake", model.auto_class)
        built.train()
        built.gradient_checkpointing_enable()
        layers = tuple(decoder_layers(built, len(layer_kinds(dict(model.config)))))
        built.requires_grad_(recipe.trainable)
        if recipe.lora_r:
            adapted = LoraConfig(
                r=recipe.lora_r,
                target_modules="all-linear"
                if recipe.lora_experts
                else list(_targets(built, layers, recipe.lora_targets)),
                lora_dropout=0.1 if recipe.lora_dropout else 0.0,
                task_type="CAUSAL_LM",
            )
            built = get_peft_model(built, adapted, autocast_adapter_dtype=recipe.adapter_width == 4)
        if not recipe.dropout:
            for module in built.modules():
                if isinstance(module, torch.nn.Dropout):
                    module.p = 0.0
        fake_weights(built, arithmetic)
        with arithmetic:
            yield Stage(built, layers, recipe)
