"""The contract of every scheme: what it stores, gathers, steps, offloads, saves and waits for; and what one lacks."""

from collections.abc import Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from planner import plan
from planner.cache_keys import StateInput, training_settings
from planner.candidate import Candidate
from planner.errors import InputError
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.jobs.base_candidate import single_candidate
from planner.jobs.job import Job, effective_batch_size
from planner.launch.accelerate import accelerate_config
from planner.launch.script import needs_script, train_script
from planner.memory.host import saving_bytes
from planner.memory.optimizer import held_gradients, host_states_bytes, optimizer_states_bytes
from planner.memory.parameters.policy import policy_parameters
from planner.memory.parameters.tensors import EqualTensors, TensorSet, tensor_bytes
from planner.memory.parameters.trained import trained_groups
from planner.memory.schemes.contract import Gradients, Scheme, Traffic
from planner.memory.schemes.fsdp2_units import gathered_units, kept_tail_bytes
from planner.memory.schemes.table import SCHEME_OF, scheme_of
from planner.memory.schemes.tensor import of_one_gpu, piece_of, summing_seconds
from planner.memory.schemes.whole import Whole
from planner.memory.weights import policy_weights_bytes
from planner.models.catalogue import load_model
from planner.schemes import SCHEMES, SchemeRow, Sharding
from planner.units import GIB
from scripts.emulated_grid import ran

MODEL = load_model("Qwen2.5-0.5B")
GPUS = 4
PADDED_BYTES = 2 * 1024 * 1024  # of 290 tensors, each rounded up to 512 bytes and to whole shares
ENDS_BYTES = 3 * 2 * MODEL.embed_params  # whole tensors at both ends of a partition, the largest of them


class Mesh(Whole):
    """A toy: every GPU keeps its piece of each row, as with tensor parallelism, and its optimizer's states of that."""

    def stored(self, tensors: TensorSet, bytes_per_param: int, candidate: StateInput, *, trained: bool) -> int:
        return tensor_bytes(self.piece(tensors, candidate), bytes_per_param)

    def optimized(self, candidate: StateInput) -> tuple[tuple[TensorSet, int], ...]:
        return tuple((self.piece(tensors, candidate), size) for tensors, size in trained_groups(candidate))

    def gradients(self, candidate: StateInput) -> Gradients:
        size = sum(tensor_bytes(tensors, size) for tensors, size in self.optimized(candidate))
        return Gradients(after_backward=size, accumulated=size, at_step=size, norm_of_offloaded=0)

    def saving(self, candidate: StateInput, processes: int, policy_bytes: int, adapters_bytes: int) -> int:
        return processes * (adapters_bytes if candidate.tuning == "lora" else policy_bytes)

    @staticmethod
    def piece(tensors: TensorSet, candidate: StateInput) -> TensorSet:
        return TensorSet(
            kinds=tuple(
                EqualTensors(part=kind.part, shape=(-(-kind.elements // candidate.num_processes),), count=kind.count)
                for kind in tensors.kinds
            )
        )


MESH = SchemeRow(words="toy mesh", spelling={"distributed_type": "MULTI_GPU"}, shards_gradients=True, units=False)


@pytest.fixture(params=[*SCHEMES, "mesh"])
def sharding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Sharding:
    """Each scheme, and the toy, which costs a class and a row."""
    monkeypatch.setitem(SCHEMES, "mesh", MESH)  # type: ignore[misc]
    monkeypatch.setitem(SCHEME_OF, "mesh", Mesh())  # type: ignore[misc]
    found: Sharding = request.param
    return found


@pytest.fixture
def full(sharding: Sharding) -> Candidate:
    processes = GPUS if SCHEMES[sharding].launched else 1
    return Candidate(model=MODEL, method="sft", dtype="bfloat16", sharding=sharding, num_processes=processes)


@pytest.fixture(params=["full", "lora"])
def held(full: Candidate, request: pytest.FixtureRequest) -> Candidate:
    return replace(full, tuning=request.param)


def offloaded(candidate: Candidate) -> Iterator[Candidate]:
    """The candidate with its optimizer on the host, if its scheme can."""
    changes: tuple[dict[str, Any], ...] = ({"offload_optimizer": True}, {"offload_param": True})
    for changed in (replace(candidate, **change) for change in changes):
        if scheme_of(changed).steps_on_host(changed):
            yield changed


class TestContract:
    def test_pieces_of_all_gpus_cover_the_model(self, held: Candidate) -> None:
        tensors = policy_parameters(held).base_tensors
        whole, stored = tensor_bytes(tensors, 2), scheme_of(held).stored(tensors, 2, held, trained=False)
        assert stored * held.num_processes >= whole
        assert stored <= whole + PADDED_BYTES
        assert scheme_of(held).stored(tensors, 4, held, trained=False) > stored

    def test_the_optimizers_of_all_gpus_update_every_trained_parameter(self, held: Candidate) -> None:
        optimized = sum(tensors.params for tensors, _ in scheme_of(held).optimized(held))
        trained = sum(tensors.params for tensors, _ in trained_groups(held))
        assert trained <= optimized * held.num_processes
        assert optimized <= trained + PADDED_BYTES

    def test_gradients_are_most_at_the_end_of_a_backward_pass(self, held: Candidate) -> None:
        found = held_gradients(held)
        assert 0 < found.at_step <= found.after_backward
        assert found.accumulated <= found.after_backward
        accumulating = held_gradients(replace(held, gradient_accumulation_steps=4))
        assert accumulating.after_backward >= found.after_backward

    def test_more_gpus_never_hold_more(self, held: Candidate) -> None:
        if held.num_processes == 1:
            pytest.skip("one GPU")
        more = replace(held, num_processes=2 * GPUS)
        assert policy_weights_bytes(more) <= policy_weights_bytes(held) + PADDED_BYTES
        assert optimizer_states_bytes(more) <= optimizer_states_bytes(held) + PADDED_BYTES
        assert held_gradients(more).at_step <= held_gradients(held).at_step + ENDS_BYTES

    def test_a_gpu_gathers_at_most_what_others_have_and_a_buffer_of_it(self, held: Candidate) -> None:
        gathers = scheme_of(held).gathered(held)
        whole = tensor_bytes(policy_parameters(held).base_tensors, 4)
        row = held.scheme_row
        assert set(gathers.at.values()) == {0} or row.stage or row.shards_weights or row.divides_layers
        for size in (*gathers.at.values(), *gathers.in_backward, *gathers.beside, *gathers.generation):
            assert 0 <= size <= 2 * whole
        if row.shards_weights:
            assert gathers.at["forward"] > 0
            assert set(scheme_of(held).gathered(replace(held, num_processes=1)).at.values()) == {0}

    def test_states_on_the_host_leave_the_gpu(self, held: Candidate) -> None:
        on_gpu = optimizer_states_bytes(held)
        assert on_gpu > 0
        for changed in offloaded(held):
            assert optimizer_states_bytes(changed) == 0
            assert host_states_bytes(changed) >= on_gpu
            assert held_gradients(changed).at_step == 0
        if not any(offloaded(held)):
            assert scheme_of(held).offloaded_states(held) == 0

    def test_offloaded_parameters_are_on_the_host_instead(self, held: Candidate) -> None:
        changed = replace(held, offload_param=True)
        kept = policy_weights_bytes(held) - policy_weights_bytes(changed)
        assert scheme_of(held).offloaded_parameters(held) == 0
        assert scheme_of(changed).offloaded_parameters(changed) >= kept

    def test_master_weights_are_those_of_a_module_that_is_cast(self, held: Candidate) -> None:
        masters = scheme_of(held).masters(held)
        optimized = sum(tensors.params for tensors, _ in scheme_of(held).optimized(held))
        if held.scheme_row.casts == "module":
            assert 0 <= masters.kept - 4 * optimized <= PADDED_BYTES
            assert 0 < masters.copy <= masters.kept
        else:
            assert masters == (0, 0)

    def test_loading_never_takes_more_than_all_of_the_model_at_once(self, held: Candidate) -> None:
        scheme = scheme_of(held)
        extra = scheme.unsharded_while_loading(held, policy_weights_bytes(held))
        assert 0 <= extra <= 2 * tensor_bytes(policy_parameters(held).base_tensors, 4)
        assert scheme.buffers(held).broadcast >= 0
        assert scheme.buffers(held).kept >= 0

    def test_what_is_trained_is_saved(self, held: Candidate) -> None:
        trained = sum(tensors.params for tensors, _ in trained_groups(held))
        assert saving_bytes(held, held.num_processes) >= 2 * trained

    def test_slower_links_never_save_time(self, held: Candidate) -> None:
        fast = Traffic(
            gradient_bytes=1e9, stored_bytes=1e9, embedding_bytes=1e8, gathers=2.0, link=1e11, shard_link=1e11,
            layer_link=1e11, memory=1e12, layers=24, adapter_only=False, forward=0.1, backward=0.2,
        )  # fmt: skip
        slow = fast._replace(link=1e10, shard_link=1e10, layer_link=1e10)
        trained = training_settings(held)
        if held.num_processes > 1:
            assert 0 < scheme_of(held).seconds(trained, fast) < scheme_of(held).seconds(trained, slow)

    def test_every_phase_of_a_step_is_estimated(self, held: Candidate) -> None:
        found = estimate(held, parse_cluster(f"{held.num_processes}xA100-80G", None))
        names = [phase.name for phase in found.gpus[0].phases]
        assert names == ["load", "forward", "loss", "backward", "optimizer_step"]
        assert all(0 < sum(phase.components.values()) < 80 * GIB for phase in found.gpus[0].phases)

    def test_the_launch_file_names_it(self, held: Candidate) -> None:
        if held.scheme_row is not MESH:
            assert accelerate_config(held)["distributed_type"] == held.scheme_row.spelling["distributed_type"]


def test_copies_of_a_sharded_model_hold_larger_pieces_and_reduce_them() -> None:
    whole = Candidate(model=MODEL, method="sft", dtype="bfloat16", sharding="fsdp2", num_processes=GPUS)
    hybrid, scheme = replace(whole, dp_replicate_size=2), scheme_of(whole)
    assert policy_weights_bytes(hybrid) > 1.9 * policy_weights_bytes(whole)
    assert optimizer_states_bytes(hybrid) > 1.9 * optimizer_states_bytes(whole)
    assert scheme.gathered(hybrid).copied_gradients > scheme.gathered(whole).copied_gradients == 0


def test_axolotl_trains_shards_of_fsdp2_in_the_dtype_of_the_load() -> None:
    """A tied Llama on two emulated GPUs allocates 3.730 GiB, estimated at 3.730, and at 5.371 as TRL has it."""
    settings: dict[str, Any] = {"method": "sft", "dtype": "bfloat16", "sharding": "fsdp2", "num_processes": GPUS}
    trl, axolotl = (Candidate(model=MODEL, tool=tool, **settings) for tool in ("trl", "axolotl"))
    for size in (policy_weights_bytes, optimizer_states_bytes, lambda each: scheme_of(each).gradients(each).at_step):
        assert 1.99 < size(trl) / size(axolotl) < 2.01
    assert policy_weights_bytes(replace(axolotl, dtype="float32")) == policy_weights_bytes(trl)


def test_embedding_and_head_of_axolotl_are_in_the_root_and_gathered_to_the_end() -> None:
    """TinyLlama of 6 layers on two emulated GPUs, with LoRA: 1.152 GiB, 1.128 estimated."""
    model = load_model("TinyLlama-1.1B-Chat-v1.0")
    settings: dict[str, Any] = {"method": "sft", "dtype": "bfloat16", "sharding": "fsdp2", "num_processes": 2}
    trl, axolotl = (
        gathered_units(Candidate(model=model, tool=tool, tuning="lora", **settings)) for tool in ("trl", "axolotl")
    )
    root = 2 * (2 * 32_000 * 2048 + 2048)  # embedding, head and norm in 16 bits
    assert axolotl["forward"] - trl["forward"] == axolotl["backward"] - trl["backward"] == root
    whole = gathered_units(Candidate(model=model, tool="axolotl", **settings))
    assert whole["backward"] - whole["forward"] == 2 * model.layers[0].params
    waiting = 2 * 32_000 * 2048 // 2  # the head's gradient, less its shard
    assert whole["embedding_backward"] - root - waiting == 2 * model.layers[0].params


def test_each_value_of_sharding_has_a_row_and_a_scheme() -> None:
    assert set(SCHEMES) == set(SCHEME_OF)


def test_no_answer_is_a_default_of_the_contract() -> None:
    questions = {name for name in vars(Scheme) if not name.startswith("_")}
    assert questions == Scheme.__abstractmethods__
    assert all(not type(scheme).__abstractmethods__ for scheme in SCHEME_OF.values())


def test_a_scheme_without_an_answer_is_told_which() -> None:
    class Unfinished(Scheme):
        def steps_on_host(self, candidate: StateInput) -> bool:
            return False

    with pytest.raises(TypeError, match=r"abstract methods? .*gathered.*gradients.*seconds.*stored"):
        Unfinished()  # type: ignore[abstract]


@pytest.mark.parametrize(("tuning", "model", "mib"), [("full", "pythia-410m", 98), ("lora", "pythia-410m", 196)])
def test_the_head_stays_gathered_while_fsdp2_generates(tuning: Any, model: str, mib: int) -> None:
    """Seen on emulated GPUs: see `kept_tail_bytes`. A tied head is the embedding, which is gathered again."""
    untied = Candidate(
        model=load_model(model), method="grpo", tuning=tuning, dtype="bfloat16", sharding="fsdp2", num_processes=2
    )
    assert kept_tail_bytes(untied) / 2**20 == pytest.approx(mib, rel=0.01)
    assert kept_tail_bytes(replace(untied, model=MODEL)) == 0


def test_adapters_beside_divided_experts_are_saved_alone_by_the_exported_script() -> None:
    """PEFT 0.21 gathers the whole model on every process for them: GLM-4.6 on 2 nodes asked 5.3 TB of each."""
    full = Candidate(
        model=load_model("OLMoE-1B-7B-0924"), method="sft", tuning="full", dtype="bfloat16", sharding="distributed",
        num_processes=2, ep_size=2,
    )  # fmt: skip
    lora = replace(full, tuning="lora", lora_target_modules=("q_proj",))
    assert scheme_of(full).saving(full, 2, 0, 0) == pytest.approx(2 * full.model.params, rel=0.001)
    assert scheme_of(lora).saving(lora, 2, 0, 4096) == 4096
    assert not needs_script(full)
    assert "_tp_size = None" in train_script(lora)


def test_a_piece_is_a_model_of_fewer_heads_features_and_words() -> None:
    whole = load_model("Qwen3-0.6B")
    piece = piece_of(whole, 2)
    ((layer, count),) = piece.layer_kinds
    assert (layer.attention.num_attention_heads, layer.attention.num_key_value_heads, count) == (8, 4, 28)
    assert {linear.name: linear.split for linear in layer.linears} == {
        **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "out"),
        **dict.fromkeys(("o_proj", "down_proj"), "in"),
    }
    norms = 28 * (2 * 1024 + 2 * 128) + 1024  # on every GPU
    assert piece.params - norms == (whole.params - norms) / 2
    assert (piece.vocab_size, piece.embed_params) == (whole.vocab_size, whole.embed_params / 2)


def test_an_untied_embedding_has_a_gradient_of_all_words_on_each_gpu() -> None:
    """Llama-3.1-8B on one of 8 emulated cards held 8,681.7 MiB in the optimizer's step, 1,005.3 more than in pieces."""
    whole = Candidate(
        model=load_model("Llama-3.1-8B"), method="sft", dtype="bfloat16", sharding="tensor", num_processes=8
    )
    piece = of_one_gpu(whole)
    words = piece.model.vocab_size * piece.model.hidden_size * 2
    trained = sum(tensor_bytes(tensors, 2) for tensors, _ in trained_groups(piece))
    assert held_gradients(piece).at_step == trained + words * 7 // 8
    assert scheme_of(piece).step_temporaries(piece) == words // 8


def test_a_tied_head_is_gathered_and_reduced_by_two_units_of_transformers_fsdp2() -> None:
    """Llama-3.2-1B on one of 8 emulated cards, pairs of which divide layers: 20 % more in the forward pass (250.5 MiB
    are a piece of the head, of which four are held when the embedding is gathered), 5 % in the optimizer's step.
    """
    whole = Candidate(
        model=load_model("Llama-3.2-1B"), method="sft", dtype="bfloat16", sharding="distributed", tp_size=2,
        num_processes=8,
    )  # fmt: skip
    piece = of_one_gpu(whole)
    head = piece.model.vocab_size * piece.model.hidden_size // 2 * 2
    norm = piece.model.hidden_size * 2
    assert scheme_of(piece).gathered(piece).at["embedding"] == 4 * head + 3 * norm
    shards = sum(tensor_bytes(tensors, 2) for tensors, _ in trained_groups(piece)) // 4
    assert held_gradients(piece).at_step == pytest.approx(shards + head // 4, rel=1e-4)


def test_gpus_that_share_layers_have_one_batch() -> None:
    pinned: dict[str, Any] = {"distributed_config": "tp", "effective_batch_size": 1}
    best = plan("Qwen3-0.6B", "2xA100-80G", method="sft", **pinned).best
    assert (best.candidate.num_processes, best.candidate.effective_batch_size) == (2, 1)


@pytest.mark.parametrize("sharding", SCHEMES)
@pytest.mark.parametrize("sizes", [{}, {"tp_size": 2}, {"cp_size": 2, "tp_size": 2}], ids=str)
def test_a_job_has_the_batches_of_its_candidate(sharding: Sharding, sizes: dict[str, int]) -> None:
    """A `tp_size` that the scheme does not read halved the effective batch that a plan keeps."""
    pinned = {"sharding": sharding, "num_processes": 8, **sizes}
    model = load_model("Qwen3-8B")
    held = Candidate(model=model, method="sft", per_device_train_batch_size=8, **pinned)  # type: ignore[arg-type]
    assert effective_batch_size(Job(model=model, method="sft", pinned=pinned), parse_cluster("8xH100")) == (
        held.effective_batch_size
    )


def test_more_gpus_to_a_layer_than_there_are_is_refused() -> None:
    """`plan estimate` divided the effective batch by no batches."""
    job = Job(
        model=load_model("Qwen3-8B"), method="sft", effective_batch_size=8,
        pinned={"sharding": "distributed", "tp_size": 16},
    )  # fmt: skip
    with pytest.raises(InputError, match="divides evenly: 16 GPUs"):
        single_candidate(job, parse_cluster("8xH100"))


def test_the_units_around_a_layer_are_those_beside_it_not_the_models_largest() -> None:
    """Moonlight's first layer is dense and larger than the others without their experts: one of 8 emulated GPUs."""
    (row,) = ran(kind="divided experts", model="Moonlight-16B-A3B")
    estimated, emulated = row.phases["backward"]
    assert estimated == pytest.approx(emulated, rel=0.001)


def test_generation_without_a_cache_receives_the_embedding_under_fsdp2() -> None:
    """Seen in start 9-14: the buffer of a tied embedding and of the first layer beside both (6,777 MiB allocated)."""
    held = Candidate(
        model=MODEL, method="online-dpo", tuning="lora", sharding="fsdp2", num_processes=2, gradient_checkpointing=True,
        per_device_train_batch_size=2, max_length=64, prompt_length=56, max_completion_length=8, vllm="off",
    )  # fmt: skip
    assert held.generates_without_cache
    phases = {phase.name: phase for phase in estimate(held, parse_cluster("2xRTX-4090", None)).gpus[0].phases}
    nccl = phases["optimizer_step"].components["communication"]
    assert phases["rollout"].components["communication"] - nccl == gathered_units(held)["embedding"]


@pytest.mark.parametrize("kind", ["orpo fsdp2", "cpo fsdp2"])
def test_no_layer_is_gathered_beside_a_loss_outside_of_the_model(kind: str) -> None:
    """FSDP2 gathers the last layer for the backward pass when the gradient of the logits is there."""
    rows = ran(kind=kind, model="Qwen2.5-0.5B")
    assert len(rows) == 2
    for row in rows:
        for phase in ("loss", "backward"):
            estimated, emulated = row.phases[phase]
            assert estimated == pytest.approx(emulated, rel=0.001)


def test_the_norm_of_experts_is_computed_beside_gradients_that_wait() -> None:
    """Seen in start 9-65: 660 MiB in float64 of the shard of one tensor of experts, and 165 MiB in 16 bits."""
    held = Candidate(
        model=load_model("Qwen1.5-MoE-A2.7B"), method="dpo", dtype="bfloat16", sharding="zero3", num_processes=4,
        offload_optimizer=True, precision="bf16",
    )  # fmt: skip
    norm = scheme_of(held).gradients(held).norm_in_layers
    assert norm / 2**20 == pytest.approx(660 + 165, rel=0.01)


def test_a_head_that_is_left_is_not_beside_the_layers_of_a_rollout_without_a_cache() -> None:
    """Under FSDP2 it is there until the embedding of the next token is gathered: +5.3 % in this run before."""
    (row,) = [
        each
        for each in ran(kind="rollouts under FSDP2 with an untied head")
        if each.job.settings.get("method") == "online-dpo"
    ]
    estimated, emulated = row.phases["rollout"]
    assert estimated == pytest.approx(emulated, rel=0.002)


@pytest.mark.parametrize(
    ("name", "sums"),
    [
        ("Qwen3-8B", 36 * (2 + 2 + 5)),
        ("Qwen3-30B-A3B", 48 * (2 + 2 + 4)),
        ("zai-org/GLM-4.5-Air", 9 + 45 * (3 + 3 + 6)),
    ],
)
def test_hidden_states_are_summed_for_experts_too(name: str, sums: int) -> None:
    """In each layer: forward, again for its checkpoint, backward. Fused experts read and write hidden states once."""
    whole = Candidate(
        model=load_model(name), method="sft", tuning="full", dtype="bfloat16", precision="bf16", sharding="tensor",
        num_processes=8, max_length=1024, gradient_checkpointing=True,
    )  # fmt: skip
    held = of_one_gpu(whole)
    link, size = 1e9, 2  # bytes a second, bytes of a number
    settings = training_settings(held)
    traffic = Traffic(*(0.0,) * len(Traffic._fields))._replace(layer_link=link)
    hidden = settings.tokens * held.model.hidden_size * size
    head = held.model.vocab_size * held.model.hidden_size * size
    expected = 7 / 8 * (2 * (1 + sums) * hidden + head) / link
    assert summing_seconds(settings, traffic) == pytest.approx(expected)
