"""The packed layout: a checkpoint small enough for a repository, which only we can read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod
from typing import Any

from domino_spec.checkpoints.fields import Fields, Stated, integer, required, text
from domino_spec.checkpoints.files import TensorHeader, listed
from domino_spec.errors import CheckpointError, ConfigError

# Names that no public loader knows, so that each refuses the folder instead of misreading it.
PACKED_ARCHITECTURE = "DominoPackedDraftModel"
PACKED_MODEL_TYPE = "domino_packed"
SECTION = "domino_packed"
VERSION = 1
BITS = (8, 6, 4)
GROUP_SIZE = 64
"""Numbers of a row that share a scale."""
DTYPE = "bfloat16"
"""What every tensor is rounded to when it is unpacked, and what the unpacked ones are stored as."""
CODES, SCALES = ".codes", ".scales"


@dataclass(frozen=True, kw_only=True)
class Packing:
    """Which tensors are packed, and how."""

    bits: Mapping[str, int]
    """By public name; tensors that are not named are stored as they are."""
    group_size: int

    def __post_init__(self) -> None:
        if self.group_size < 1:
            raise ConfigError(f"group_size is {self.group_size}; expected a positive number.")
        for name, bits in self.bits.items():
            if bits not in BITS or isinstance(bits, bool):
                raise ConfigError(
                    f"bits of {name} is {bits!r}; expected one of {', '.join(map(str, BITS))}."
                )

    @property
    def summary(self) -> str:
        """In words, for messages."""
        counts = Counter(self.bits.values())
        stated = ", ".join(
            f"{counts[bits]} tensors of {bits} bits" for bits in BITS if counts[bits]
        )
        return f"{stated or 'none'}, groups of {self.group_size}"

    def written(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """A drafter's config.json turned into that of a packed checkpoint."""
        hidden = {"architectures": [PACKED_ARCHITECTURE], "model_type": PACKED_MODEL_TYPE}
        section = {
            "version": VERSION,
            "dtype": DTYPE,
            "group_size": self.group_size,
            "bits": dict(self.bits),
        }
        named = hidden if "architectures" in values else {}
        return {**values, **named, "dtype": DTYPE, SECTION: section}


@dataclass(frozen=True, kw_only=True)
class PackedTensor:
    """One matrix as its codes and its scales."""

    name: str
    shape: tuple[int, ...]
    bits: int
    group_size: int
    codes: TensorHeader
    scales: TensorHeader

    @property
    def parameters(self) -> int:
        """How many numbers it stands for."""
        return prod(self.shape)

    @property
    def byte_count(self) -> int:
        """Bytes of codes and scales in the file."""
        return self.codes.byte_count + self.scales.byte_count

    @property
    def dtype(self) -> str:
        """What it is stored as, for people."""
        return f"{self.bits}-bit"


def packed_columns(columns: int, bits: int) -> int:
    """Bytes of a row: 6 bits are stored four to three bytes, 4 bits two to one."""
    return {8: columns, 6: 3 * -(-columns // 4), 4: -(-columns // 2)}[bits]


def choose_packing(
    shapes: Mapping[str, tuple[int, ...]], bits: int | Mapping[str, int], group_size: int
) -> Packing:
    """Bits for all matrices, or for those that a pattern names (the first that fits counts)."""
    matrices = [name for name, shape in shapes.items() if len(shape) == 2]
    patterns = {"*": bits} if isinstance(bits, int) else bits
    idle = [p for p in patterns if not any(fnmatchcase(name, p) for name in matrices)]
    if idle:
        raise ConfigError(
            f"no matrix is called {', '.join(map(repr, idle))}; the drafter has "
            f"{', '.join(matrices)}. Correct the pattern, or leave it out."
        )
    chosen = {}
    for name in matrices:
        fitting = [b for pattern, b in patterns.items() if fnmatchcase(name, pattern)]
        if fitting:
            chosen[name] = fitting[0]
    return Packing(bits=chosen, group_size=group_size)


def read_section(values: Mapping[str, Any]) -> Packing:
    """How a packed checkpoint's matrices are stored."""
    section = Fields(values).nested(SECTION)
    version = required(section["version"], integer)
    if version != VERSION:
        raise ConfigError(
            f"{SECTION}.version is {version}, this release reads {VERSION}; upgrade domino-spec "
            "to load this checkpoint."
        )
    if required(section["dtype"], text) != DTYPE:
        raise ConfigError(
            f"{SECTION}.dtype is {section['dtype'].value!r}; expected 'bfloat16', to which packed "
            "tensors are rounded."
        )
    stated = section.nested("bits")
    bits = {
        name: required(Stated(stated[name].label, b), integer) for name, b in stated.values.items()
    }
    return Packing(bits=bits, group_size=required(section["group_size"], integer))


def join_parts(
    found: Mapping[str, TensorHeader], shapes: Mapping[str, tuple[int, ...]], packing: Packing
) -> dict[str, TensorHeader | PackedTensor]:
    """Stored tensors with codes and scales made one; parts that do not fit are named."""
    unknown = [name for name in packing.bits if len(shapes.get(name, ())) != 2]
    if unknown:
        raise CheckpointError(
            f"{SECTION}.bits names {listed(unknown)}, which is no matrix of the drafter; "
            "config.json belongs to another checkpoint."
        )
    joined: dict[str, TensorHeader | PackedTensor] = {}
    wrong: list[str] = []
    for name, bits in packing.bits.items():
        rows, columns = shapes[name]
        parts = {
            CODES: ((rows, packed_columns(columns, bits)), "I8" if bits == 8 else "U8"),
            SCALES: ((rows, -(-columns // packing.group_size)), "F16"),
        }
        wrong += _wrong_parts(name, found, parts)
        if not wrong:
            joined[name] = PackedTensor(
                name=name,
                shape=shapes[name],
                bits=bits,
                group_size=packing.group_size,
                codes=found[name + CODES],
                scales=found[name + SCALES],
            )
    parts_of = {name + end: name for name in packing.bits for end in (CODES, SCALES)}
    rest = {name: header for name, header in found.items() if name not in parts_of}
    wrong += [f"{name!r} is there packed and plain" for name in rest if name in packing.bits]
    wrong += [f"{n!r} is {h.dtype}, expected BF16" for n, h in rest.items() if h.dtype != "BF16"]
    if wrong:
        raise CheckpointError(
            f"{listed(wrong)}. config.json and the packed weights do not belong together."
        )
    return {**joined, **rest}


def _wrong_parts(
    name: str,
    found: Mapping[str, TensorHeader],
    parts: Mapping[str, tuple[tuple[int, int], str]],
) -> list[str]:
    wrong = []
    for end, (shape, dtype) in parts.items():
        header = found.get(name + end)
        expected = f"expected {list(shape)} of {dtype}"
        if header is None:
            wrong.append(f"{name + end!r} is missing, {expected}")
        elif (header.shape, header.dtype) != (shape, dtype):
            wrong.append(f"{name + end!r} is {list(header.shape)} of {header.dtype}, {expected}")
    return wrong
