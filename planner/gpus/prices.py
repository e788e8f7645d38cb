"""Prices of GPUs, read from a file of the user. None are shipped, because they go stale."""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from planner.errors import InputError, shortened
from planner.files.read import read_text
from planner.gpus.catalogue import load_gpu

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MILLION = 10**6
MOST_PRICE = 10**9  # for an hour, in any currency
COUNT_UNITS = {"": 1, "k": 10**3, "m": MILLION, "b": 10**9, "t": 10**12}


def parse_tokens(text: str) -> int:
    """Return a number of tokens: `300000000`, `300M`, `1.5B`.

    Raises:
        InputError: the text is no such number, or it is not between 1 and 1e15.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,6})?)\s*([kKmMbBtT]?)\s*", text)
    tokens = round(float(match[1]) * COUNT_UNITS[match[2].lower()]) if match else 0
    if not 1 <= tokens <= 10**15:
        raise InputError(f"--tokens {shortened(text)!r} is no number of tokens. Write it as 300M or 1.5B.")
    return tokens


def is_price(price: float) -> bool:
    """Return whether a number can be the price of an hour: positive and at most `MOST_PRICE`."""
    return 0 < price <= MOST_PRICE


def read_prices(path: Path) -> dict[str, float]:
    """Return the prices of a file, per GPU and hour, by the catalogue's names: `H100 = 2.5` in TOML.

    Raises:
        InputError: the file is no TOML, a price is no positive number, or a name is no GPU's.
    """
    try:
        read = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # ValueError: tomllib's error, or an integer of 5,000 digits
        raise InputError(f"{path} is no TOML of prices, such as H100 = 2.5: {shortened(error)}.") from error
    return checked_prices(read, str(path))


def parse_prices(text: str) -> dict[str, float]:
    """Return the prices of a text such as `L4=0.8, H100=2.5`, as `read_prices`.

    Raises:
        InputError: a price is no positive number, or a name is no GPU's.
    """
    pairs = [part.partition("=") for part in text.split(",") if part.strip()]
    return checked_prices({name.strip(): _number(price) for name, _, price in pairs}, "Prices")


def checked_prices(prices: Mapping[str, object], source: str) -> dict[str, float]:
    """Return prices per GPU and hour by the catalogue's names.

    Raises:
        InputError: a price is no positive number, or a name is no GPU's.
    """
    known = {}
    for name, price in prices.items():
        if isinstance(price, bool) or not isinstance(price, (int, float)) or not is_price(price):
            wrong = f"{shortened(name)} = {shortened(repr(price))}"
            raise InputError(f"{source} has {wrong}, which is no price for an hour of a GPU, such as 2.5.")
        known[load_gpu(name).name] = float(price)
    return known


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text.strip()
