"""DDP's broadcast of the model before the first step, beside runs on emulated GPUs (results/emulated.md)."""

import pytest
from msgspec.structs import replace

from planner.candidate import Candidate
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.memory.schemes.whole import Whole
from planner.models.catalogue import load_model
from planner.models.from_config import NOT_COUNTED, shape_of
from scripts.emulated_grid import ran, torch_bytes

LOAD_WITHIN = 0.006  # two workspaces of cuBLAS, 8 MiB, are CUDA's in the formulas: 0.5 % of the smallest run

WHOLE = Whole()


def job(model: str, tuning: str, ranks: int) -> Candidate:
    return Candidate(
        model=load_model(model),
        method="sft",
        tuning="lora" if tuning == "lora" else "full",
        dtype="bfloat16",
        sharding="ddp",
        num_processes=ranks,
        max_length=1024,
        per_device_train_batch_size=1,
        padded=False,
    )


class TestParameterBroadcast:
    @pytest.mark.parametrize(
        ("model", "tuning", "ranks", "load_bytes"),
        [
            ("Qwen2.5-0.5B", "lora", 2, 1_478_904_832),
            ("Qwen2.5-7B", "lora", 8, 16_823_365_632),
            ("Qwen2.5-0.5B", "full", 2, 1_984_422_912),
            ("Qwen2.5-1.5B", "full", 8, 6_175_810_560),
        ],
    )
    def test_the_load_of_ddp_holds_two_buckets_of_weights(
        self, model: str, tuning: str, ranks: int, load_bytes: int
    ) -> None:
        candidate, cluster = job(model, tuning, ranks), parse_cluster(f"{ranks}xA100-80G", None)
        load = estimate(candidate, cluster).gpus[0].phases[0]
        assert load.name == "load"
        assert torch_bytes(candidate, cluster, load) == pytest.approx(load_bytes, rel=LOAD_WITHIN)

    def test_a_tower_is_sent_in_one_bucket_with_the_embedding(self) -> None:
        """677 MiB of weights, beside the adapters, whose first ones lie on the tower: the load was 9.5 % too small."""
        rows = ran(model="Qwen/Qwen3.5-0.8B", sharding="ddp")
        assert len(rows) == 2
        for row in rows:
            estimated, emulated = row.phases["load"]
            assert estimated == pytest.approx(emulated, rel=LOAD_WITHIN)

    def test_layers_that_bitsandbytes_does_not_convert_are_sent_in_16_bits(self) -> None:
        """The files of a start: results/emulated_starts.jsonl, seed 1, number 14."""
        falcon = load_model("tiiuae/falcon-7b")
        two_layers = shape_of({**falcon.config, "num_hidden_layers": 2}, id="falcon-7b", counts=NOT_COUNTED)
        candidate = replace(
            job("Qwen2.5-0.5B", "lora", 8),
            model=two_layers,
            quantization="nf4",
            lora_target_modules=("query_key_value",),
        )
        cluster = parse_cluster("8xA100-40G", None)
        load = estimate(candidate, cluster).gpus[0].phases[0]
        assert torch_bytes(candidate, cluster, load) == pytest.approx(
            2_250_890_240, rel=0.01
        )  # as above, of a small model

    def test_gradients_buckets_of_full_fine_tuning_are_larger(self) -> None:
        assert WHOLE.buffers(job("Qwen2.5-0.5B", "full", 2)).broadcast == 0

    def test_one_process_broadcasts_nothing(self) -> None:
        assert WHOLE.buffers(job("Qwen2.5-7B", "lora", 1)).broadcast == 0
