"""Frames of a traceback that only older releases of TRL have, whose memory may differ from the planned release's."""

import re
from collections.abc import Sequence

from msgspec import Struct

from planner.diagnose.frames import Frame


class OlderFrames(Struct, frozen=True, kw_only=True):
    """Functions of a file of TRL that release `last` was the last to have; no functions: the whole file."""

    last: str
    path: str
    functions: frozenset[str] = frozenset()


# Source: the wheels of TRL from 0.8.6 to 1.16.0, one of each minor release: the last one that has the file or function.
OLDER_FRAMES = (
    OlderFrames(last="0.12.2", path=r"trl/trainer/ppov2_trainer"),
    OlderFrames(last="0.19.1", path=r"trl/trainer/grpo_trainer", functions=frozenset({"_get_per_token_logps"})),
    OlderFrames(last="0.23.1", path=r"trl/trainer/(?:ddpo|alignprop|iterative_sft)_trainer"),
    OlderFrames(last="0.23.1", path=r"trl/trainer/reward_trainer", functions=frozenset({"prediction_step"})),
    OlderFrames(
        last="0.25.1",
        path=r"trl/trainer/kto_trainer",
        functions=frozenset({"forward", "get_batch_logps", "get_batch_loss_metrics", "kto_loss"}),
    ),
    OlderFrames(
        last="0.28.0",
        path=r"trl/trainer/dpo_trainer",
        functions=frozenset({"concatenated_forward", "get_batch_loss_metrics", "dpo_loss"}),
    ),
    OlderFrames(last="0.28.0", path=r"trl/trainer/(?:ppo|cpo|orpo|bco|gkd|online_dpo|nash_md|xpo|prm)_trainer"),
    OlderFrames(last="1.13.0", path=r"trl/trainer/grpo_trainer", functions=frozenset({"compute_liger_loss"})),
    OlderFrames(last="1.13.0", path=r"trl/trainer/(?:dpo|kto)_trainer", functions=frozenset({"_compute_loss_liger"})),
    OlderFrames(last="1.14.1", path=r"trl/trainer/sft_trainer", functions=frozenset({"_chunked_cross_entropy_loss"})),
)


def last_trl(frames: Sequence[Frame]) -> str:
    """The last release of TRL that prints these frames, such as "0.28.0"; empty if the newest may."""
    return next(
        (
            row.last
            for row in OLDER_FRAMES
            if any(
                re.search(row.path, frame.path) and (not row.functions or frame.function in row.functions)
                for frame in frames
            )
        ),
        "",
    )
