"""Reads what a CUDA binary says of its kernels: registers, local memory, static shared memory, threads of a block.

A cubin is an ELF file. Its section ``.nv.info`` lists facts about functions, ``.nv.info.<kernel>`` facts about one
kernel, each as a format byte, an attribute byte and two bytes of size or value; ``.nv.shared.<kernel>`` is as large as
the kernel's static shared memory.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

_SIZED = 4  # the format whose two bytes are the size of what follows
_FRAME_SIZE, _REGISTERS, _REQUIRED_THREADS = 0x11, 0x2F, 0x10
_INFO, _INFO_OF, _SHARED_OF = ".nv.info", ".nv.info.", ".nv.shared."


class Resources(NamedTuple):
    """What one kernel takes.

    Attributes:
        registers: Per thread at launch; ``setmaxnreg`` moves them afterwards.
        frame_bytes: Local memory per thread, which a kernel without local arrays uses for spills only.
        static_shared_bytes: Shared memory per block beside the dynamic one.
        threads: Of a block, where the kernel fixes them.
    """

    registers: int
    frame_bytes: int
    static_shared_bytes: int
    threads: int | None


class _Section(NamedTuple):
    name: str
    data: bytes
    size: int


def resources(cubin: bytes) -> dict[str, Resources]:
    """The resources of each kernel in a cubin, by its symbol.

    Raises:
        ValueError: These bytes are no 64-bit cubin, or one without the facts read here.
    """
    try:
        sections = {section.name: section for section in _sections(cubin)}
        symbols = _symbols(sections[".symtab"].data, sections[".strtab"].data)
        facts: dict[tuple[str, int], int] = {}
        for attribute, value in _attributes(sections[_INFO].data):
            if attribute in (_FRAME_SIZE, _REGISTERS):
                symbol, number = struct.unpack("<II", value)
                facts[symbols[symbol], attribute] = number
        found = {}
        for kernel in [name.removeprefix(_INFO_OF) for name in sections if name.startswith(_INFO_OF)]:
            own = dict(_attributes(sections[_INFO_OF + kernel].data))
            shared = sections.get(_SHARED_OF + kernel)
            shape = own.get(_REQUIRED_THREADS)
            found[kernel] = Resources(
                registers=facts[kernel, _REGISTERS],
                frame_bytes=facts[kernel, _FRAME_SIZE],
                static_shared_bytes=shared.size if shared is not None else 0,
                threads=_product(struct.unpack("<III", shape)) if shape is not None else None,
            )
    except (struct.error, LookupError, OverflowError, ValueError) as error:
        raise ValueError(f"cubin: expected a 64-bit cubin with {_INFO} sections ({error})") from error
    return found


def _sections(elf: bytes) -> Iterator[_Section]:
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError("no 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + size * i) for i in range(count)]
    text = elf[headers[names][4] :]
    for name, kind, _, _, offset, length in headers:
        no_bits = kind == 8
        yield _Section(_text(text, name), b"" if no_bits else elf[offset : offset + length], length)


def _symbols(table: bytes, names: bytes) -> list[str]:
    return [_text(names, symbol[0]) for symbol in struct.iter_unpack("<IBBHQQ", table)]


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < len(data):
        kind, attribute, size = struct.unpack_from("<BBH", data, position)
        position += 4
        if kind == _SIZED:
            yield attribute, data[position : position + size]
            position += size


def _text(data: bytes, start: int) -> str:
    return data[start : data.index(b"\0", start)].decode()


def _product(numbers: tuple[int, ...]) -> int:
    x, y, z = numbers
    return x * y * z
