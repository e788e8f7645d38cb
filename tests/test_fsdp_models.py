"""What FSDP2's launch files say of a model, compared with the model that Transformers builds of its config."""

import gc

import pytest
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.launch.accelerate import wrapped_classes
from planner.models.catalogue import load_model, model_rows
from planner.models.shape import ModelShape

pytest.importorskip("trl")

import torch
import transformers
from torch.distributed.fsdp import FullyShardedDataParallel

from probes.layers.few_layers import few_layers
from probes.trainers import transformers_config

SMALLEST = {row.model_type: row.id for row in sorted(model_rows(), key=lambda row: -row.params)}
ALWAYS = (
    "google/gemma-3-4b-pt", "google/paligemma-3b-pt-224", "llava-hf/llava-1.5-7b-hf", "google/gemma-4-E2B",
    "google/gemma-4-31B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "moonshotai/Moonlight-16B-A3B",
    "Qwen/Qwen3-VL-2B-Instruct",
)  # fmt: skip


def named_and_built(model: ModelShape) -> tuple[set[str], set[str], torch.nn.Module]:
    """The classes that FSDP2 is told to wrap, those of its own list that a model has, and the model with few layers."""
    config = transformers_config(few_layers(model).config)
    with torch.device("meta"):
        built = getattr(transformers, model.loading_class).from_config(config)
    own = set(built._no_split_modules or ())
    has = {type(module).__name__ for module in built.modules()}
    return set(wrapped_classes(Candidate(model=model, method="sft"))) or own, own & has, built


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=() if each in ALWAYS else pytest.mark.nightly)
        for each in sorted({*SMALLEST.values(), *ALWAYS})
    ],
)
def test_the_launch_files_name_what_the_model_has(name: str) -> None:
    """accelerate stops at a class that the model lacks, and at a saved buffer where one process loads for all."""
    model = load_model(name)
    named, has, built = named_and_built(model)
    assert named == has
    parameters = {each for each, _ in built.named_parameters(remove_duplicate=False)}
    assert model.has_saved_buffers == bool(built.state_dict().keys() - parameters)


@pytest.mark.parametrize(("text", "tower"), [("gemma2", "siglip_vision_model"), ("mistral", "pixtral")])
def test_parts_that_the_catalogue_does_not_pair_are_wrapped_by_their_own_classes(text: str, tower: str) -> None:
    wrapper = "paligemma" if text == "gemma2" else "llava"
    config = {
        "model_type": wrapper,
        "text_config": {"model_type": text, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                        "num_key_value_heads": 4, "head_dim": 16, "intermediate_size": 64, "vocab_size": 300},
        "vision_config": {"model_type": tower, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                          "intermediate_size": 64, "image_size": 56, "patch_size": 14, "projection_dim": 64,
                          "vision_use_head": False},
        "image_token_index": 299,
    }  # fmt: skip
    model = replace(load_model("google/paligemma-3b-pt-224"), model_type=wrapper, config=config)
    named, has, _ = named_and_built(model)
    assert named == has


class Checkpointed(torch.nn.Sequential):
    """Frozen layers, each in a checkpoint."""

    reentrant = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("reentrant", [True, False])
def test_frozen_units_of_fsdp_1_keep_reentrant_checkpoints_and_their_gradients(reentrant: bool) -> None:
    """Published LoRA under FSDP 1 took 30 hidden states a token more (scripts/compare_published.py, `layer_gradients`).

    At the end of the backward pass there are the inputs of all eight layers and their gradients, else one layer's.
    """
    shape, cpu, counts = (7, 11), torch.device("cpu"), list[int]()

    def count(_: torch.Tensor) -> None:
        gc.collect()
        tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
        tensors += [each.grad for each in tensors if each.is_leaf and each.grad is not None]
        counts.append(len({each.untyped_storage().data_ptr() for each in tensors if each.shape == shape}))

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        layers = [torch.nn.Linear(11, 11).requires_grad_(False) for _ in range(8)]
        model = Checkpointed(*(FullyShardedDataParallel(layer, device_id=cpu) for layer in layers))
        model.reentrant = reentrant
        x = torch.zeros(shape, requires_grad=True)
        x.register_hook(count)
        FullyShardedDataParallel(model, device_id=cpu)(x).sum().backward()
    finally:
        torch.distributed.destroy_process_group()
    assert counts[0] >= 15 if reentrant else counts[0] < 5
