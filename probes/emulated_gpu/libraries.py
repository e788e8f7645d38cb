"""NVIDIA's libraries that the installed packages need, and the functions that they take from each of them."""

import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from msgspec import Struct

NVIDIA = ("libcu", "libnv", "libnccl")  # beginnings of their names
# Beginnings of functions without a version, which say which library has them; the longest that fits counts.
PREFIXES = {
    "cuFile": "libcufile",
    "cusparseLt": "libcusparseLt",
    "nccl": "libnccl",
    "nvshmem": "libnvshmem_host",
    "nvml": "libnvidia-ml",
    "cu": "libcuda",
}
# Types of sections and entries. Source: System V ABI, "Object Files"; Linux Standard Base, "Symbol Versioning".
DYNAMIC, DYNAMIC_SYMBOLS, VERSION_NEEDS, VERSION_OF_SYMBOL, NEEDED = 6, 11, 0x6FFFFFFE, 0x6FFFFFFF, 1
# As in Elf64_Shdr and Elf64_Sym.
SECTION = np.dtype(
    {
        "names": ("type", "offset", "size", "link"),
        "formats": ("u4", "u8", "u8", "u4"),
        "offsets": (4, 24, 32, 40),
        "itemsize": 64,
    }
)
SYMBOL = np.dtype({"names": ("name", "section"), "formats": ("u4", "u2"), "offsets": (0, 6), "itemsize": 24})
HEADER_BYTES, UNDEFINED = 64, 0


class Needs(Struct, frozen=True, kw_only=True):
    """Functions that one shared object takes from others, with the library and the version that it asks for, if any."""

    libraries: tuple[str, ...]
    functions: tuple[tuple[str, "SymbolVersion"], ...]


class SymbolVersion(NamedTuple):
    """A version of symbols: `libcudart.so.13` calls its own by its name, `libnvshmem_host.so.3` by `NVSHMEM`."""

    library: str = ""
    name: str = ""


ANY = SymbolVersion()
Functions = frozenset[tuple[str, str]]  # names, with the version that is asked for; empty: none


def needed_functions() -> dict[str, Functions]:
    """Return the functions that installed packages take from NVIDIA's libraries, by library: `libcudart.so.13`."""
    folders = [Path(path) for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    found: dict[str, set[tuple[str, str]]] = {}
    for path in sorted(path for folder in folders for path in folder.rglob("*.so*")):
        if "/nvidia/" in path.as_posix() or not path.is_file():
            continue
        needs = needs_of(path)
        ours = {name.partition(".")[0]: name for name in needs.libraries if name.startswith(NVIDIA)}
        for library in ours.values():
            found.setdefault(library, set())
        for function, version in needs.functions if ours else ():
            library = version.library or ours.get(_library_of(function), "")
            if library.startswith(NVIDIA):
                found.setdefault(library, set()).add((function, version.name))
    found.setdefault("libcuda.so.1", set()).update(
        (name, "") for folder in folders for name in _called_by_triton(folder)
    )
    return {library: frozenset(functions) for library, functions in sorted(found.items())}


def _called_by_triton(packages: Path) -> set[str]:
    """Return the functions of the driver that Triton's launcher calls, which is compiled while it runs."""
    source = packages / "triton" / "backends" / "nvidia" / "driver.c"
    return set(re.findall(r"\b(cu[A-Z]\w+)\(", source.read_text(encoding="utf-8"))) if source.is_file() else set()


def _library_of(function: str) -> str:
    fitting = [prefix for prefix in PREFIXES if function.startswith(prefix)]
    return PREFIXES[max(fitting, key=len)] if fitting else ""


def needs_of(path: Path) -> Needs:
    """Return what a shared object of 64-bit ELF needs; nothing for any other file."""
    nothing = Needs(libraries=(), functions=())
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
        if header[:5] != b"\x7fELF\x02":
            return nothing
        (offset,), (size, count) = struct.unpack_from("<Q", header, 40), struct.unpack_from("<HH", header, 58)
        file.seek(offset)
        sections = np.frombuffer(file.read(size * count), dtype=SECTION)

        def content(section: np.void) -> bytes:
            file.seek(int(section["offset"]))
            return file.read(int(section["size"]))

        by_type = {int(section["type"]): section for section in sections}
        if DYNAMIC not in by_type or DYNAMIC_SYMBOLS not in by_type:
            return nothing
        names = content(sections[by_type[DYNAMIC_SYMBOLS]["link"]])
        symbols = np.frombuffer(content(by_type[DYNAMIC_SYMBOLS]), dtype=SYMBOL)
        entries = struct.iter_unpack("<qQ", content(by_type[DYNAMIC]))
        libraries = tuple(_text(names, value) for kind, value in entries if kind == NEEDED)
        if not any(name.startswith(NVIDIA) for name in libraries):
            return Needs(libraries=libraries, functions=())
        known, numbers = dict[int, SymbolVersion](), None
        if VERSION_NEEDS in by_type:
            known = dict(_versions(content(by_type[VERSION_NEEDS]), names))
            numbers = np.frombuffer(content(by_type[VERSION_OF_SYMBOL]), dtype="u2") & 0x7FFF
    return Needs(
        libraries=libraries,
        functions=tuple(
            (_text(names, symbols["name"][i]), known.get(int(numbers[i]), ANY) if numbers is not None else ANY)
            for i in np.nonzero(symbols["section"] == UNDEFINED)[0]
        ),
    )


def _versions(table: bytes, names: bytes) -> Iterator[tuple[int, SymbolVersion]]:
    """Yield the number of each version that symbols may have, and the version."""
    at, following = 0, 1
    while following:
        _, count, file, first, following = struct.unpack_from("<HHIII", table, at)
        auxiliary = at + first
        for _ in range(count):
            _, _, number, name, step = struct.unpack_from("<IHHII", table, auxiliary)
            yield number, SymbolVersion(_text(names, file), _text(names, name))
            auxiliary += step
        at += following


def _text(names: bytes, offset: int) -> str:
    return names[offset : names.index(b"\0", offset)].decode()
