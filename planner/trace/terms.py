"""The terms that sizes are sums of: products of rows and lengths, with the roundings that kernels make."""

from collections.abc import Callable, Mapping

Values = Mapping[str, int]

# TRL scores so many tokens at a time: TOKEN_CHUNK_SIZE, trl/kernels/chunked_logprob.py.
TOKEN_CHUNK = 4096

FURTHER_LAYERS = "further layers"  # layers beyond those that a profile was traced with; not a term of sizes


def _up(multiple: int) -> Callable[[int], int]:
    return lambda length: -(-length // multiple) * multiple


# Of one length: as it is, one less (labels are shifted), and as kernels round it (probes/substitutions.py).
LENGTH_FACTORS: dict[str, Callable[[int], int]] = {
    "tokens": lambda length: length,
    "tokens-1": lambda length: length - 1,
    "tokens up to 16": _up(16),
    "tokens up to 32": _up(32),
    "tokens up to 128": _up(128),
}


def _chunk(scored: int) -> int:
    return min(scored, TOKEN_CHUNK)


def _last_chunk(scored: int) -> int:
    return scored - TOKEN_CHUNK * ((scored - 1) // TOKEN_CHUNK)


def term_values(values: Values) -> dict[str, int]:
    """Every term's value at given sizes. `rows` and `tokens`; where a method generates also `prompt` and `completion`."""
    rows, tokens = values["rows"], values["tokens"]
    lengths = {name: factor(tokens) for name, factor in LENGTH_FACTORS.items()}
    terms = {"1": 1, "rows": rows}
    for name, length in lengths.items():
        terms[f"rows x {name}"] = rows * length
    for name, length in lengths.items():
        terms[name] = length
    terms["rows x tokens x tokens"] = rows * tokens * tokens
    terms["rows x tokens x tokens up to 16"] = rows * tokens * lengths["tokens up to 16"]
    terms["tokens x tokens"] = tokens * tokens
    scored = rows * (tokens - 1)
    terms["chunk of rows x tokens-1"] = _chunk(scored)
    terms["last chunk of rows x tokens-1"] = _last_chunk(scored)
    terms["chunk of rows x tokens"] = _chunk(rows * tokens)
    terms["last chunk of rows x tokens"] = _last_chunk(rows * tokens)
    return terms


TERMS: tuple[str, ...] = tuple(term_values({"rows": 2, "tokens": 3}))
