"""The machines of Hugging Face Jobs (`hf jobs run --flavor`): cards, host memory, disk and price."""

from collections.abc import Collection

from msgspec import Struct

GB = 10**9
HF_JOBS = "hf-jobs"  # all machines, as a value of --gpus


class Flavor(Struct, frozen=True, kw_only=True):
    """One machine: `price` in US dollars an hour, of all its GPUs."""

    name: str
    card: str
    gpus: int
    host_bytes: int
    disk_bytes: int
    price: float


# Source: huggingface/hub-docs, docs/hub/jobs-pricing.md, at commit 0b8c07f; names: huggingface_hub 2.4.0, _jobs_api.py,
# `JobHardware`. `hf jobs hardware` prints today's.
FLAVORS_OF = "hub-docs 0b8c07f"
FLAVORS = tuple(
    Flavor(name=name, card=card, gpus=gpus, host_bytes=host * GB, disk_bytes=disk * GB, price=price)
    for name, card, gpus, host, disk, price in (
        ("t4-small", "T4", 1, 15, 50, 0.40),
        ("t4-medium", "T4", 1, 30, 100, 0.60),
        ("l4x1", "L4", 1, 30, 400, 0.80),
        ("l4x4", "L4", 4, 186, 3200, 3.80),
        ("l40sx1", "L40S", 1, 62, 380, 1.80),
        ("l40sx4", "L40S", 4, 382, 3200, 8.30),
        ("l40sx8", "L40S", 8, 1534, 6500, 23.50),
        ("a10g-small", "A10G", 1, 15, 110, 1.00),
        ("a10g-large", "A10G", 1, 46, 200, 1.50),
        ("a10g-largex2", "A10G", 2, 92, 1000, 3.00),
        ("a10g-largex4", "A10G", 4, 184, 2000, 5.00),
        ("a100-large", "A100-80G", 1, 142, 1000, 2.50),
        ("a100x4", "A100-80G", 4, 568, 4000, 10.00),
        ("a100x8", "A100-80G", 8, 1136, 8000, 20.00),
        ("h200", "H200", 1, 256, 3000, 5.00),
        ("h200x2", "H200", 2, 512, 6000, 10.00),
        ("h200x4", "H200", 4, 1024, 12000, 20.00),
        ("h200x8", "H200", 8, 2048, 24000, 40.00),
        ("rtx-pro-6000", "RTX-PRO-6000", 1, 256, 475, 2.75),
        ("rtx-pro-6000x2", "RTX-PRO-6000", 2, 512, 950, 5.50),
        ("rtx-pro-6000x4", "RTX-PRO-6000", 4, 1024, 1900, 11.00),
        ("rtx-pro-6000x8", "RTX-PRO-6000", 8, 2048, 3800, 22.00),
    )
)
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
