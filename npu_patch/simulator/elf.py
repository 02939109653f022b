"""The little of the ELF format that the build needs: which libraries and symbols a shared object asks for."""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass, field

_SHT_DYNAMIC, _SHT_DYNSYM, _DT_NEEDED, _SHN_UNDEF = 6, 11, 1, 0


@dataclass
class SharedObject:
    """``needed``: DT_NEEDED names. ``undefined``, ``defined``: names of dynamic symbols."""

    needed: set[str] = field(default_factory=set)
    undefined: set[str] = field(default_factory=set)
    defined: set[str] = field(default_factory=set)


def read(path: str | os.PathLike[str]) -> SharedObject:
    """Reads a 64-bit little-endian ELF file; ``ValueError`` for anything else."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{os.fspath(path)} is not a 64-bit little-endian ELF file")
        (table,) = struct.unpack_from("<Q", data, 40)
        entry_size, count = struct.unpack_from("<HH", data, 58)
        # type, offset, size, link of every section
        sections = []
        for i in range(count):
            at = table + i * entry_size
            (kind,) = struct.unpack_from("<I", data, at + 4)
            offset, size = struct.unpack_from("<QQ", data, at + 24)
            (link,) = struct.unpack_from("<I", data, at + 40)
            sections.append((kind, offset, size, link))
        result = SharedObject()
        for kind, offset, size, link in sections:
            if kind not in (_SHT_DYNAMIC, _SHT_DYNSYM):
                continue
            _, strings, strings_size, _ = sections[link]
            names = data[strings : strings + strings_size]
            content = data[offset : offset + size]
            if kind == _SHT_DYNAMIC:
                for tag, value in struct.iter_unpack("<QQ", content):
                    if tag == _DT_NEEDED:
                        result.needed.add(_string(names, value))
            else:
                for name, _info, _other, section, _value, _size in struct.iter_unpack("<IBBHQQ", content):
                    if name:
                        target = result.undefined if section == _SHN_UNDEF else result.defined
                        target.add(_string(names, name).partition("@")[0])
        return result


def _string(table: bytes, offset: int) -> str:
    return table[offset : table.index(b"\0", offset)].decode("utf-8", "replace")
