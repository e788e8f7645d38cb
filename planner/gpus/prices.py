"""Prices of GPUs, from a file of the user's: none are shipped, since they go stale."""

import sys
from pathlib import Path

from planner.errors import InputError, shortened
from planner.files.read import read_text
from planner.gpus.catalogue import load_gpu

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def read_prices(path: Path) -> dict[str, float]:
    """Return the prices of a file, per GPU and hour, by the catalogue's names: `H100 = 2.5` in TOML.

    Raises:
        InputError: the file is no TOML, a price is no positive number, or a name is no GPU's.
    """
    try:
        read = tomllib.loads(read_text(path))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise InputError(f"{path} is no TOML of prices, such as H100 = 2.5: {shortened(error)}.") from error
    for name, price in read.items():
        if isinstance(price, bool) or not isinstance(price, (int, float)) or not 0 < price < float("inf"):
            wrong = f"{shortened(name)} = {shortened(repr(price))}"
            raise InputError(f"{path} has {wrong}, which is no price for an hour of a GPU, such as 2.5.")
    return {load_gpu(name).name: float(price) for name, price in read.items()}
