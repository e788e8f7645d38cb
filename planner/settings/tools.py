"""The tools whose configs are planned: the loss of the methods that they train with a trainer of their own.

TRL's trainers train the other methods. Source: axolotl 0.21, core/builders/causal.py (`AxolotlTrainer`: transformers'
Trainer), core/builders/rl.py (TRL's trainers), pyproject.toml (trl 1.14.1); llamafactory 0.9.5, train/sft/trainer.py
(`CustomSeq2SeqTrainer`: transformers' Seq2SeqTrainer), train/dpo/trainer.py (`CustomDPOTrainer`), train/kto/trainer.py
(`CustomKTOTrainer`).
"""

from collections.abc import Callable, Mapping
from typing import Literal, get_args

from msgspec import Struct, field

from planner.methods import NEWEST_TRL, OLDEST_TRL, Loss, MethodName
from planner.schemes import SchemeRow

Tool = Literal["trl", "axolotl", "llamafactory"]


class ToolRow(Struct, frozen=True, kw_only=True):
    """One row of `TOOLS`.

    `losses`: of the methods that its own trainer runs, which casts no adapters and logs no metric of the logits. `trl`:
    the release that it trains other methods with. `cuts_cross_entropy`: its own trainer has Cut Cross Entropy.
    `reentrant`: checkpoints of its own trainer are, under a scheme. `casts_frozen`: a model that does not learn is
    loaded in 16 bits beside a policy in float32.
    `own_fsdp2`: a `fsdp2_prepare_model` in place of accelerate's, which trains shards in the dtype of the load.
    """

    name: str
    release: str  # the one that is read
    trl: str = NEWEST_TRL
    losses: Mapping[MethodName, Loss] = field(default_factory=dict)
    cuts_cross_entropy: bool = False
    reentrant: Callable[[SchemeRow], bool] = lambda scheme: False
    casts_frozen: bool = False
    own_fsdp2: bool = False  # source: axolotl 0.21, monkeypatch/accelerate/fsdp2.py, `patch_accelerate_fsdp2`
    package: str = "trl"
    start: str = ""  # the command, with a file and a number of processes; empty: TRL's, of planner/launch/command.py

    @property
    def requirement(self) -> str:
        """Return the line of requirements.txt: the tool brings the releases that it takes."""
        return f"{self.package}=={self.release}.*"


TOOLS: dict[Tool, ToolRow] = {
    "trl": ToolRow(name="TRL", release=NEWEST_TRL),
    "axolotl": ToolRow(
        name="Axolotl",
        release="0.21",
        trl="1.14",
        losses={"sft": "causal_lm"},
        cuts_cross_entropy=True,
        reentrant=lambda scheme: scheme.creates_sharded,  # utils/config/__init__.py, `normalize_config`
        own_fsdp2=True,
        package="axolotl",
        start="axolotl train {file} -- --num_processes {processes}",
    ),
    "llamafactory": ToolRow(
        name="LLaMA-Factory",
        release="0.9.5",
        trl=OLDEST_TRL,  # it runs trl 0.18 to 0.24, of which it has the losses of no method that is planned
        losses={"sft": "causal_lm", "dpo": "preference", "kto": "unpaired"},
        casts_frozen=True,  # model/loader.py, `load_model` (`compute_dtype`)
        # model/model_utils/checkpointing.py, `prepare_model_for_training` (but under FSDP2)
        reentrant=lambda scheme: not scheme.dtensors,
        package="llamafactory",
        start="FORCE_TORCHRUN=1 NPROC_PER_NODE={processes} llamafactory-cli train {file}",
    ),
}
assert tuple(TOOLS) == get_args(Tool), "every tool has one row, in the order of Tool"
