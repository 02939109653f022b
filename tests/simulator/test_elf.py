from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from npu_patch.simulator import build, elf


def test_reads_what_a_library_needs_and_defines() -> None:
    library = elf.read(build.libraries(build.build())[-1])
    assert "libascendcl.so" in library.needed
    main = elf.read(build.build() / build.MAIN_LIBRARY)
    assert {"aclrtMalloc", "HcclAllReduce", "npu_patch_configure"} <= main.defined
    assert "malloc" in main.undefined


def test_every_acl_symbol_that_torch_npu_links_against_is_defined() -> None:
    main = elf.read(build.build() / build.MAIN_LIBRARY)
    folder = Path(importlib.util.find_spec("torch_npu").origin).parent  # type: ignore[union-attr, arg-type]
    wanted = {s for s in elf.read(folder / "lib" / "libtorch_npu.so").undefined if s.startswith(("aclrt", "Hccl"))}
    assert wanted
    assert wanted <= main.defined


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("not a library, but long enough to look at")
    with pytest.raises(ValueError, match="not a 64-bit little-endian ELF file"):
        elf.read(path)
