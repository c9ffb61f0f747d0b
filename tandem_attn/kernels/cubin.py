"""What a cubin says about its kernel: registers a thread, and bytes of stack, where ptxas keeps what it spills.

A cubin is a 64-bit little-endian ELF file. Its section ``.nv.info`` is a list of attributes: a byte of format, a byte of kind, two bytes of
size or value, then (format 4 alone) so many bytes. Those read here hold a symbol's number and a value. The layout is not documented by
NVIDIA; ``cuobjdump --dump-resource-usage`` prints the same numbers, and a test compares them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_SIZED = 4
_REGISTERS, _FRAME = 0x2F, 0x11


@dataclass(frozen=True)
class Usage:
    """Registers a thread starts with (roles then share them out anew) and bytes of stack a thread."""

    registers: int
    stack_bytes: int


def usage(cubin: bytes) -> Usage:
    """The largest of each over the functions of a cubin.

    Raises:
        ValueError: this is no such file.
    """
    found = {_REGISTERS: 0, _FRAME: 0}
    for kind, content in _attributes(_section(cubin, b".nv.info")):
        if kind in found:
            found[kind] = max(found[kind], struct.unpack("<2I", content)[1])
    return Usage(found[_REGISTERS], found[_FRAME])


def _section(elf: bytes, name: bytes) -> bytes:
    if elf[:5] != b"\x7fELF\x02":
        raise ValueError(f"cubin must be a 64-bit ELF file, got one that starts with {elf[:5]!r}")
    table = struct.unpack_from("<Q", elf, 0x28)[0]
    size, count, names = struct.unpack_from("<3H", elf, 0x3A)
    headers = [struct.unpack_from("<2I4Q", elf, table + i * size) for i in range(count)]
    texts = headers[names][4]
    for label, _, _, _, offset, length in headers:
        if elf[texts + label : elf.index(b"\0", texts + label)] == name:
            return elf[offset : offset + length]
    raise ValueError(f"cubin must have a section {name.decode()}, got none")


def _attributes(section: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + 4 <= len(section):
        form, kind, size = struct.unpack_from("<2BH", section, at)
        length = size if form == _SIZED else 0
        yield kind, section[at + 4 : at + 4 + length]
        at += 4 + length
