"""The terms that sizes are products of: rows and lengths, with the roundings that kernels make, times the widths of a model."""

from collections.abc import Callable, Mapping

Values = Mapping[str, int]

# TRL scores so many tokens at a time, against so many words: TOKEN_CHUNK_SIZE and VOCAB_CHUNK_SIZE, trl/kernels/chunked_logprob.py.
TOKEN_CHUNK = 4096
VOCAB_CHUNK = 32768

FLASH_BLOCK, WIDE_HEAD = 128, 128  # tokens, features: probes/fake/flash_attention.py, LENGTH_BLOCK and WIDE_HEAD

FURTHER_LAYERS = "further layers"  # periods of layers beyond those that a profile was traced with; not a term of sizes
ONE = "1"


def _up(multiple: int) -> Callable[[int], int]:
    return lambda length: -(-length // multiple) * multiple


# Of one length: as it is, one less (labels are shifted), and as kernels round it (probes/fake/substitutions.py).
LENGTH_FACTORS: dict[str, Callable[[int], int]] = {
    "tokens": lambda length: length,
    "tokens-1": lambda length: length - 1,
    "tokens up to 16": _up(16),
    "tokens up to 32": _up(32),
    "tokens up to 128": _up(128),
}


def _chunk(scored: int) -> int:
    return min(scored, TOKEN_CHUNK)


def last_part(whole: int, part: int) -> int:
    """What is left for the last of the parts that a whole is taken in."""
    return whole - part * ((whole - 1) // part)


def _of_real_tokens(name: str, rows: int, length: int) -> dict[str, int]:
    """Rows without their padding, laid end to end: a batch has one token of it (probes/step/phases.py); the flash kernel's sums are of a block more a row."""
    real = rows * length - 1
    return {f"real {name}": real, f"real {name} and a block a row": real + FLASH_BLOCK * rows}


def size_terms(values: Values) -> dict[str, int]:
    """Every product of rows and lengths.

    `rows` and `tokens`; `accumulation` where it is not 1; where a method generates also `prompt`, `completion`, `generated` and `groups`.
    """
    rows, tokens = values["rows"], values["tokens"]
    lengths = {name: factor(tokens) for name, factor in LENGTH_FACTORS.items()}
    terms = {ONE: 1, "rows": rows, "rows x accumulation": rows * values.get("accumulation", 1)}
    for name, length in lengths.items():
        terms[f"rows x {name}"] = rows * length
    for name, length in lengths.items():
        terms[name] = length
    terms["rows x tokens x tokens"] = rows * tokens * tokens
    terms["rows x tokens x tokens up to 16"] = rows * tokens * lengths["tokens up to 16"]
    terms["tokens x tokens"] = tokens * tokens
    terms["tokens x tokens up to 16"] = tokens * lengths["tokens up to 16"]
    for name, scored in (
        ("rows x tokens-1", rows * (tokens - 1)), ("rows x tokens", rows * tokens),
        ("pairs x tokens-1", 2 * rows * (tokens - 1)), ("pairs x tokens", 2 * rows * tokens),
    ):  # fmt: skip
        terms[f"chunk of {name}"] = _chunk(scored)
        terms[f"last chunk of {name}"] = last_part(scored, TOKEN_CHUNK)
    terms |= _of_real_tokens("rows x tokens", rows, tokens) | _of_real_tokens("pairs x tokens", 2 * rows, tokens)
    return terms | _generating_terms(values) if "completion" in values else terms


def _generating_terms(values: Values) -> dict[str, int]:
    """Of a rollout and of the completions that are scored."""
    rows, tokens, prompt, completion = values["rows"], values["tokens"], values["prompt"], values["completion"]
    generated, groups = values["generated"], values["groups"]
    terms = {"generated": generated, "groups": groups}
    lengths = {
        "prompt": prompt, "prompt+1": prompt + 1, "prompt+2": prompt + 2, "prompt+3": prompt + 3, "completion": completion,
        "completion+1": completion + 1, "completion-1": completion - 1, "completion-3": completion - 3, "tokens": tokens, "tokens-1": tokens - 1,
        "tokens-2": tokens - 2, "tokens+1": tokens + 1,
    }  # fmt: skip
    for name, length in lengths.items():
        terms[f"generated x {name}"] = generated * length
        terms[f"rows x {name}"] = rows * length
        terms[name] = length
    for name in ("prompt", "prompt+1", "prompt+2", "tokens", "tokens-1"):
        rounded = _up(16)(lengths[name])
        terms[f"{name} up to 16"] = rounded
        terms[f"generated x {name} up to 16"] = generated * rounded
    for name in ("prompt", "prompt+1", "tokens", "tokens-1"):  # one more and one less: the second token and the last, where nothing is cached
        length = lengths[name]
        terms[f"generated x {name} x {name}"] = generated * length * length
        terms[f"generated x {name} x {name} up to 16"] = generated * length * _up(16)(length)
        terms[f"{name} x {name}"] = length * length
        for multiple in (32, 128):
            terms[f"generated x {name} up to {multiple}"] = generated * _up(multiple)(length)
    for name in ("prompt", "prompt+1", "tokens", "tokens-1"):
        terms |= _of_real_tokens(f"generated x {name}", generated, lengths[name])
    for name, scored in (("rows x completion", rows * completion), ("real rows x completion", rows * completion - 1)):
        terms[f"chunk of {name}"] = _chunk(scored)
        terms[f"last chunk of {name}"] = last_part(scored, TOKEN_CHUNK)
    return terms | _of_real_tokens("rows x completion", rows, completion)


def rounded_head(head: int) -> int:
    """As the flash kernel rounds it: probes/fake/flash_attention.py."""
    return _up(32)(head) if head <= WIDE_HEAD else _up(64)(head)


WIDTHS = ("hidden", "intermediate", "heads", "key heads", "head", "vocabulary", "rank")


def width_terms(values: Values) -> dict[str, int]:
    """Every product of a model's widths that a tensor has for its other dimensions; only 1 where the values name no widths."""
    if "hidden" not in values:
        return {ONE: 1}
    hidden, intermediate, heads, key_heads, head, vocabulary, rank = (values[name] for name in WIDTHS)
    query, key = heads * head, key_heads * head
    last_tile = last_part(vocabulary, VOCAB_CHUNK)
    features = {
        "hidden": hidden, "intermediate": intermediate, "query": query, "key": key, "query and keys": query + 2 * key, "twice intermediate": 2 * intermediate,
    }  # fmt: skip
    terms = {ONE: 1, **features, "heads": heads, "key heads": key_heads, "head": head, "vocabulary": vocabulary, "rank": rank}
    terms["vocabulary tile"], terms["last vocabulary tile"] = min(vocabulary, VOCAB_CHUNK), last_tile
    terms["heads and query"] = heads + query  # the memory-efficient kernel's backward
    terms["heads x rounded head"] = heads * rounded_head(head)  # the flash kernel's backward: sums of the query's gradient; with a number a head
    terms["heads of the flash kernel"] = heads * (1 + rounded_head(head))
    for name, width in (*features.items(), ("vocabulary", vocabulary), ("vocabulary tile", terms["vocabulary tile"]), ("last vocabulary tile", last_tile)):
        terms[f"hidden x {name}"] = hidden * width
        terms[f"rank x {name}"] = rank * width
    return terms


def term_values(values: Values) -> dict[tuple[str, str], int]:
    """Every product of a size term and a width term, the simplest first."""
    widths = width_terms(values)
    return {(size, width): number * factor for size, number in size_terms(values).items() for width, factor in widths.items()}
