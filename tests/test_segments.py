"""Blocks that PyTorch's caching allocator leaves unsplit (memory/parameters/segments.py) beside the emulated card."""

import pytest

from planner.candidate import Candidate
from planner.estimation import estimate
from planner.gpus.parse import parse_cluster
from planner.memory.parameters.segments import unsplit_bytes
from planner.models.catalogue import load_model
from planner.units import MIB
from scripts import emulated_grid

KIB = 1024
RESTS_WITHIN = 0.008  # some saved tensors get freed blocks of other sizes


class TestUnsplitBytes:
    @pytest.mark.parametrize(
        ("sizes", "unsplit"),
        [
            ((19 * MIB,), MIB),  # a segment of 20 MiB of its own
            ((18 * MIB + 512 * KIB,), 0),  # 1.5 MiB of its segment are left, a block for others
            ((19 * MIB + 512 * KIB, 38 * MIB), 512 * KIB),
            ((9728 * KIB,) * 2, MIB),  # two of 9.5 MiB share a segment
            ((9728 * KIB,), 0),
            ((5 * MIB,) * 4, 0),
            ((6 * MIB,) * 3, 0),  # 2 MiB are left
            ((6 * MIB, 6 * MIB, 6 * MIB, 1536 * KIB), 512 * KIB),  # and taken by the last
            ((MIB,) * 40, 0),  # small tensors have segments of 2 MiB, whose blocks are split
        ],
    )
    def test_a_tensor_has_a_rest_of_at_most_one_mebibyte(self, sizes: tuple[int, ...], unsplit: int) -> None:
        assert unsplit_bytes(sizes) == unsplit

    def test_the_smallest_rest_with_room_is_taken(self) -> None:
        """Rests of 8 and 4 MiB: a tensor of 3 MiB goes to the second and leaves 1 MiB, which it has."""
        assert unsplit_bytes((6 * MIB, 6 * MIB, 6 * MIB, 8 * MIB, 8 * MIB, 3 * MIB)) == MIB


class TestEstimates:
    @pytest.mark.parametrize(
        ("settings", "emulated"),
        [
            ({"tuning": "lora", "quantization": "nf4-double"}, 3276),
            ({"tuning": "lora"}, 4155),
            ({"tuning": "full"}, 6569),
        ],
    )
    def test_saved_activations_are_counted_with_their_rests(self, settings: dict[str, str], emulated: int) -> None:
        """Rows of results/emulated.jsonl, MiB: 24 layers save four tensors of 19 MiB each, which take 20.

        Without the rests the estimates were 3.0, 1.6 and 1.6 % too low.
        """
        candidate = Candidate(
            model=load_model("Qwen2.5-0.5B"), method="sft", dtype="bfloat16", max_length=2048, padded=False,
            per_device_train_batch_size=1, gradient_checkpointing=False, **settings,
        )  # fmt: skip
        gpu = estimate(candidate, parse_cluster("1xA100-40G", None)).gpus[0]
        outside = gpu.context_bytes + gpu.nccl_bytes
        found = max(phase.total_bytes - phase.components.get("fragmentation", 0) for phase in gpu.phases) - outside
        assert found / MIB == pytest.approx(emulated, rel=RESTS_WITHIN)

    @pytest.mark.slow
    def test_rows_without_checkpoints_have_no_bias(self) -> None:
        """0.8 % too low in the mean before rests were counted."""
        rows = [
            row.error
            for row in emulated_grid.ran(gradient_checkpointing=False)
            if row.candidate.scheme_row.whole and not row.candidate.expandable_segments
        ]
        assert len(rows) > 150
        assert abs(sum(rows) / len(rows)) < 0.002
        assert sum(map(abs, rows)) / len(rows) < 0.0035
