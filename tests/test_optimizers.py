"""Optimizer states and step temporaries, against the real optimizers on the CPU."""

import weakref
from collections.abc import Callable
from typing import Any

import pytest
from msgspec import Struct

from planner.candidate import Candidate
from planner.gpus.parse import parse_cluster
from planner.memory.optimizer import (
    gradient_before_bytes,
    held_gradients,
    host_states_bytes,
    optimizer_states_bytes,
    paged_states_bytes,
    step_temporaries_bytes,
    update_in_backward_bytes,
)
from planner.memory.parameters.optimizer_states import state_bytes, step_bytes
from planner.memory.parameters.tensors import EqualTensors, TensorSet, rounded_bytes
from planner.memory.schemes.table import scheme_of
from planner.memory.step import training_phases
from planner.models.catalogue import load_model
from planner.optimizers import OPTIMIZERS, Optimizer, OptimizerRow

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")

# One tensor of each kind that a rule distinguishes: an embedding, matrices, a vector below 4096 elements, one above
# that is no whole number of blocks, experts.
TENSORS = TensorSet(
    kinds=(
        EqualTensors(part="embedding", shape=(1000, 64)),
        EqualTensors(part="linear", shape=(256, 512), count=2),
        EqualTensors(part="linear", shape=(512, 300)),
        EqualTensors(part="vector", shape=(64,), count=3),
        EqualTensors(part="vector", shape=(5000,)),
        EqualTensors(part="expert", shape=(4, 96, 40)),
        EqualTensors(part="linear", shape=(640, 640)),
    )
)
H100 = parse_cluster("1xH100").gpu
SCALAR_BYTES = 8  # counts and norms that an optimizer keeps beside its states
# A few scalars, 512 bytes each; Adafactor's update of the tensor before the largest, which a variable still holds.
STEP_WITHIN = 16 * 512 + 4 * 4 * 96 * 40


def trained(dtype: Any) -> list[Any]:
    found = []
    for kind in TENSORS.kinds:
        for _ in range(kind.count):
            parameter = torch.nn.Parameter(torch.randn(*kind.shape).to(dtype))
            parameter.grad = torch.randn(*kind.shape).to(dtype)
            parameter.part = kind.part
            found.append(parameter)
    return found


def state_storages(optimizer: Any) -> dict[int, int]:
    """Bytes of every distinct storage in the state, scalars left out."""
    found: dict[int, int] = {}

    def add(value: Any) -> None:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage.nbytes() > SCALAR_BYTES:
                found[storage._cdata] = rounded_bytes(storage.nbytes())
        elif isinstance(value, dict):
            for item in value.values():
                add(item)

    for state in optimizer.state.values():
        add(state)
    return found


def bitsandbytes(name: str, bits: int) -> Callable[[list[Any]], Any]:
    """A bitsandbytes optimizer as Trainer creates it: embeddings in 32 bits (transformers 5.23, trainer.py:1328)."""

    def build(parameters: list[Any]) -> Any:
        optim = pytest.importorskip("bitsandbytes.optim")
        manager = optim.GlobalOptimManager.get_instance()
        manager.initialize()
        for parameter in parameters:
            if parameter.part == "embedding":
                manager.override_config(parameter, "optim_bits", 32)
        manager.register_parameters(parameters)
        return getattr(optim, name)(parameters, lr=1e-3, optim_bits=bits)

    return build


def adafactor(parameters: list[Any]) -> Any:
    optimization = pytest.importorskip("transformers.optimization")
    return optimization.Adafactor(parameters, lr=1e-3, scale_parameter=False, relative_step=False)


def schedule_free(name: str) -> Callable[[list[Any]], Any]:
    """An optimizer of schedulefree, past RAdam's first steps, which are SGD's."""

    def build(parameters: list[Any]) -> Any:
        optimizer = getattr(pytest.importorskip("schedulefree"), name)(parameters, lr=1e-3, foreach=True)
        optimizer.train()
        optimizer.param_groups[0]["k"] = 10
        return optimizer

    return build


REAL: dict[Optimizer, Callable[[list[Any]], Any]] = {
    "adamw_torch": lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.0, foreach=True),
    "adamw_torch_fused": lambda parameters: torch.optim.AdamW(parameters, weight_decay=0.0, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, foreach=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, foreach=True),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, foreach=True),
    "adafactor": adafactor,
    "adamw_8bit": bitsandbytes("AdamW", 8),
    "adamw_bnb_8bit": bitsandbytes("AdamW", 8),
    "lion_8bit": bitsandbytes("Lion", 8),
    "lion_32bit": bitsandbytes("Lion", 32),
    "rmsprop_bnb": bitsandbytes("RMSprop", 32),
    "rmsprop_bnb_8bit": bitsandbytes("RMSprop", 8),
    "rmsprop_bnb_32bit": bitsandbytes("RMSprop", 32),
    "ademamix": bitsandbytes("AdEMAMix", 32),
    "ademamix_8bit": bitsandbytes("AdEMAMix", 8),
    "schedule_free_adamw": schedule_free("AdamWScheduleFree"),
    "schedule_free_radam": schedule_free("RAdamScheduleFree"),
    "schedule_free_sgd": schedule_free("SGDScheduleFree"),
}
STEPS_ON_CPU = (
    "adamw_torch",
    "adamw_torch_fused",
    "sgd",
    "adagrad",
    "rmsprop",
    "adafactor",
    "schedule_free_adamw",
    "schedule_free_radam",
)


class Peak(Struct):
    """Peak of the live bytes of new storages, without the storages that it was given."""

    known: dict[int, Any]  # by address, which a later storage may have again
    live: int = 0
    highest: int = 0

    def see(self, storage: Any) -> None:
        key = storage._cdata
        if key in self.known and self.known[key]() is storage:
            return
        size = rounded_bytes(storage.nbytes())
        self.known[key] = weakref.ref(storage)
        self.live += size
        self.highest = max(self.highest, self.live)
        weakref.finalize(storage, self.gone, size)

    def gone(self, size: int) -> None:
        self.live -= size


def step_peak(optimizer: Any, parameters: list[Any]) -> int:
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    known = [tensor.untyped_storage() for parameter in parameters for tensor in (parameter, parameter.grad)]
    known += [
        value.untyped_storage()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    peak = Peak(known={storage._cdata: weakref.ref(storage) for storage in known})

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            for tensor in tree_leaves(result):
                if isinstance(tensor, torch.Tensor):
                    peak.see(tensor.untyped_storage())
            return result

    with Watch():
        optimizer.step()
    return peak.highest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
class TestAgainstTheLibraries:
    @pytest.mark.parametrize("optim", REAL)
    def test_states_are_those_of_the_real_optimizer(self, optim: Optimizer, dtype: str) -> None:
        parameters = trained(getattr(torch, dtype))
        optimizer = REAL[optim](parameters)
        optimizer.step()
        step_counts = rounded_bytes(4) * len(parameters) if OPTIMIZERS[optim].step_tensor else 0
        assert (
            state_bytes(TENSORS, parameters[0].element_size(), optim, False)
            == sum(state_storages(optimizer).values()) + step_counts
        )

    @pytest.mark.parametrize("optim", STEPS_ON_CPU)
    def test_temporaries_are_those_of_the_real_step(self, optim: Optimizer, dtype: str) -> None:
        parameters = trained(getattr(torch, dtype))
        optimizer = REAL[optim](parameters)
        optimizer.step()  # creates the states
        real = step_peak(optimizer, parameters)
        assert 0 <= real - step_bytes(TENSORS, parameters[0].element_size(), optim) <= STEP_WITHIN


def candidate(**settings: object) -> Candidate:
    return Candidate(**({"model": load_model("Qwen/Qwen2.5-7B"), "method": "sft"} | settings))  # type: ignore[arg-type]


class TestFacts:
    def test_a_row_without_a_package_cannot_be_made(self) -> None:
        with pytest.raises(TypeError, match="package"):
            OptimizerRow(kind="dense")  # type: ignore[call-arg]

    def test_names_are_those_of_transformers(self) -> None:
        names = pytest.importorskip("transformers.training_args").OptimizerNames
        assert set(OPTIMIZERS) <= {name.value for name in names}

    def test_adam_doubles_the_parameters(self) -> None:
        assert optimizer_states_bytes(candidate(optim="adamw_torch")) == 2 * 30_462_466_048

    def test_eight_bits_keep_the_embedding_in_32(self) -> None:
        tied = candidate(optim="adamw_8bit")
        embedding = 152_064 * 3584
        assert optimizer_states_bytes(tied) - 8 * embedding == pytest.approx(
            2.03125 * (7_615_616_512 - embedding), rel=1e-3
        )  # small vectors: 8

    def test_paged_states_are_counted_on_the_host(self) -> None:
        paged, plain = candidate(optim="paged_adamw_8bit"), candidate(optim="adamw_8bit")
        assert optimizer_states_bytes(paged) + paged_states_bytes(paged) == optimizer_states_bytes(plain)
        assert paged_states_bytes(paged) > 30 * optimizer_states_bytes(paged)

    def test_kahan_sums_are_for_16_bits(self) -> None:
        sizes = [
            optimizer_states_bytes(candidate(optim="stable_adamw", dtype=dtype)) for dtype in ("float32", "bfloat16")
        ]
        assert sizes[0] // 4 // 2 == sizes[1] // 2 // 3

    def test_grokadamw_keeps_its_states_on_the_host(self) -> None:
        grok = candidate(optim="grokadamw")
        assert (optimizer_states_bytes(grok), host_states_bytes(grok)) == (0, 3 * 4 * 7_615_616_512)

    def test_galore_keeps_a_whole_factor_in_float32(self) -> None:
        kind = TensorSet(kinds=(EqualTensors(part="linear", shape=(4096, 1024)),))
        assert state_bytes(kind, 4, "galore_adamw", False) == 4 * (2 * 128 * 4096 + 1024 * 1024)
        assert state_bytes(kind, 2, "galore_adamw", False) == 2 * (2 * 128 * 4096 + 128 * 1024)

    @pytest.mark.parametrize("optim", [name for name, row in OPTIMIZERS.items() if row.fused_backward])
    def test_a_fused_backward_holds_one_gradient_at_its_end(self, optim: Optimizer) -> None:
        held = held_gradients(candidate(optim=optim))
        assert (held.after_backward, held.accumulated, held.at_step) == (4 * 152_064 * 3584, 0, 0)
        for dtype, width in (("float32", 4), ("bfloat16", 2)):
            assert gradient_before_bytes(candidate(optim=optim, dtype=dtype)) == width * 18_944 * 3584

    def test_a_usual_optimizer_updates_nothing_within_the_backward_pass(self) -> None:
        usual = candidate()
        assert gradient_before_bytes(usual) == 0
        assert [update_in_backward_bytes(usual, outside_layers=each) for each in (False, True)] == [0, 0]

    @pytest.mark.parametrize(
        ("optim", "dtype", "bytes_each"),
        [("lomo", "float32", 0), ("lomo", "bfloat16", 6), ("adalomo", "float32", 8), ("adalomo", "bfloat16", 10)],
    )
    def test_an_update_within_the_backward_pass_takes_copies(
        self, optim: Optimizer, dtype: str, bytes_each: int
    ) -> None:
        fused = candidate(optim=optim, dtype=dtype)
        assert update_in_backward_bytes(fused, outside_layers=True) == bytes_each * 152_064 * 3584
        assert update_in_backward_bytes(fused, outside_layers=False) == bytes_each * 18_944 * 3584
        assert step_temporaries_bytes(fused) == 0

    @pytest.mark.parametrize("accumulated", [1, 4])
    @pytest.mark.parametrize("optim", [name for name, row in OPTIMIZERS.items() if row.fused_backward])
    def test_a_fused_backward_never_holds_more_gradients_than_two_of_the_largest(
        self, optim: Optimizer, accumulated: int
    ) -> None:
        fused = candidate(optim=optim, gradient_accumulation_steps=accumulated)
        gradients = [phase.components.get("gradients", 0) for phase in training_phases(fused, H100)]
        assert max(gradients) <= 2 * 4 * 152_064 * 3584

    def test_frozen_parameters_have_no_gradients_and_no_states(self) -> None:
        lora = candidate(tuning="lora")
        assert held_gradients(lora).after_backward == 4 * 40_370_176
        assert optimizer_states_bytes(lora) == 2 * 4 * 40_370_176 + 392 * 512  # and a step count for each matrix

    def test_the_fused_default_needs_nothing_for_its_step(self) -> None:
        assert step_temporaries_bytes(candidate()) == 0
        assert step_temporaries_bytes(candidate(tuning="lora", optim="adamw_torch")) == 4 * 40_370_176

    def test_adafactor_does_not_factor_what_zero_flattened(self) -> None:
        flat = candidate(optim="adafactor", sharding="zero2", num_processes=8)
        assert optimizer_states_bytes(flat) - scheme_of(flat).masters(flat).kept == rounded_bytes(
            4 * 7_615_616_512 // 8
        )
        assert optimizer_states_bytes(candidate(optim="adafactor")) < 14_000_000
