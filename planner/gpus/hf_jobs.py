"""The machines of Hugging Face Jobs (`hf jobs run --flavor`): cards, host memory, disk and price."""

from collections.abc import Collection
from pathlib import Path

import msgspec
from msgspec import Struct

GB = 10**9
TABLE = Path(__file__).resolve().parents[1] / "data" / "hf_jobs.jsonl"
HF_JOBS = "hf-jobs"  # all machines, as a value of --gpus


class Flavor(Struct, frozen=True, kw_only=True):
    """One machine: `price` in US dollars an hour, of all its GPUs."""

    name: str
    card: str
    gpus: int
    host_gb: int
    disk_gb: int
    price: float

    @property
    def host_bytes(self) -> int:
        return self.host_gb * GB

    @property
    def disk_bytes(self) -> int:
        return self.disk_gb * GB


# Source: huggingface/hub-docs, docs/hub/jobs-pricing.md, at commit 0b8c07f; names: huggingface_hub 2.4.0, _jobs_api.py,
# `JobHardware`. `hf jobs hardware` prints today's.
FLAVORS_OF = "hub-docs 0b8c07f"
FLAVORS = tuple(msgspec.json.Decoder(Flavor).decode_lines(TABLE.read_bytes()))
CLUSTERS = {flavor.name: f"{flavor.gpus}x{flavor.card}" for flavor in FLAVORS}  # as --gpus names them
CARDS = tuple(dict.fromkeys(flavor.card for flavor in FLAVORS))


def cheapest_flavor(cards: Collection[str], gpus: int, host_bytes: int, disk_bytes: int) -> Flavor | None:
    """Return the cheapest machine with at least these GPUs of one of `cards`, host memory and disk; None: none has."""
    enough = (
        flavor
        for flavor in FLAVORS
        if flavor.card in cards
        and flavor.gpus >= gpus
        and flavor.host_bytes >= host_bytes
        and flavor.disk_bytes >= disk_bytes
    )
    return min(enough, key=lambda flavor: flavor.price, default=None)
