"""Compiles the stand-in CANN libraries on first use, into the user's cache folder.

``libascendcl.so`` holds the simulated runtime and collectives (``runtime/*.c``) and answers 0 to every other C symbol
that torch_npu links against; ``libopapi.so`` holds one entry per aclnn name found in torch_npu; every further CANN
library that torch_npu asks for is empty. torch_npu is read as files, never imported.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from . import elf
from .errors import SimulatorError
from .installed import Installation, find_torch_npu

RUNTIME = Path(__file__).parent / "runtime"
#: The library that has everything; the others are linked against it. Loaded first.
MAIN_LIBRARY = "libascendcl.so"
OPERATOR_LIBRARY = "libopapi.so"
#: A file in every finished folder, by which the CANN search recognises our own libraries.
MARKER = "npu_patch_simulator"

_ANSWERED = re.compile(r"^(acl|Msprof|rt[A-Z]|Hccl|Hcom|aml|ge[A-Z]|prof[A-Z]|tdt|hal|drv|dlog|Dlog|mspti|shmem|atb)")
_CANN_LIBRARY = re.compile(
    r"^lib(hccl|acl_op_compiler|ge_runner|graph|acl_tdt_channel|atb|ge_executor|register|error_manager|exe_graph|runtime"
    r"|platform|metadef|opapi|nnopbase|ascend_hal|lowering|aihac.*|fmk.*|.*parser|ascendalog|c_sec|profapi|msprofiler)\.so"
)
#: Absent on purpose: without them torch_npu takes its aclop path, which acl_operators.c computes.
_ABSENT_ACLNN = {"aclnnConstantPadNd", "aclnnInplaceZero", "aclnnInplaceFillScalar", "aclnnInplaceFillTensor"}


def cache_root() -> Path:
    """``$NPU_PATCH_CACHE/simulator``, else ``npu_patch/simulator`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    override = os.environ.get("NPU_PATCH_CACHE")
    if override:
        return Path(override).expanduser().absolute() / "simulator"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser().absolute() / "npu_patch" / "simulator"


def find_compiler() -> str:
    """The C compiler: ``$CC``, else cc, gcc or clang on the PATH. ``SimulatorError`` without one."""
    tried = []
    for name in filter(None, (os.environ.get("CC"), "cc", "gcc", "clang")):
        tried.append(name)
        path = shutil.which(name)
        if path:
            return path
    raise SimulatorError(
        f"the simulated NPU needs a C compiler, and none was found (tried {', '.join(tried)}): install gcc or set CC"
    )


def folder_for(installation: Installation) -> Path:
    """Where the libraries for this torch_npu are or will be. The name changes with everything that the build reads."""
    digest = hashlib.sha256()
    for source in [*sorted(RUNTIME.glob("*.[ch]")), Path(__file__), Path(elf.__file__)]:
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    for library in _shared_objects(installation.folder):
        digest.update(f"{library.name} {library.stat().st_size}".encode())
    return cache_root() / f"{installation.version}-{platform.machine()}-{digest.hexdigest()[:16]}"


def is_built() -> bool:
    """Whether ``build()`` would only return a folder."""
    return (folder_for(find_torch_npu()) / MARKER).is_file()


def build() -> Path:
    """The folder of the stand-in libraries, compiled now if they are not there.

    Safe against several processes starting at once: one builds, the others wait. A folder appears only complete.
    Raises ``SimulatorError`` without a compiler or torch_npu, with an unsafe cache folder, or when compiling fails.
    """
    installation = find_torch_npu()
    folder = folder_for(installation)
    if not (folder / MARKER).is_file():
        _make_folder(folder.parent)
        compiler = find_compiler()
        with _lock(folder.parent / "lock"):
            if not (folder / MARKER).is_file():
                _build_into(folder, compiler, installation)
    for checked in (folder, folder.parent, folder.parent.parent):
        _check_owner(checked)
    return folder


def libraries(folder: Path) -> list[Path]:
    """The libraries in the order in which they are to be loaded."""
    rest = sorted(path for path in folder.glob("*.so*") if path.name != MAIN_LIBRARY)
    return [folder / MAIN_LIBRARY, *rest]


# ---- the cache folder


def _make_folder(folder: Path) -> None:
    """Makes ``folder`` and its parent with mode 0700 where they are missing; refuses what others could write to."""
    try:
        folder.parent.parent.mkdir(parents=True, exist_ok=True)
        for made in (folder.parent, folder):
            made.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise SimulatorError(
            f"cannot make the cache folder {folder} ({error.strerror}): set NPU_PATCH_CACHE to a writable folder"
        ) from error
    for checked in (folder, folder.parent):
        _check_owner(checked)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SimulatorError(f"the cache folder {folder} is not writable: set NPU_PATCH_CACHE to a writable folder")


def _check_owner(folder: Path) -> None:
    """Libraries in this folder are loaded into the process, so nobody else may be able to put them there."""
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise SimulatorError(
            f"the cache folder {folder} belongs to another user (uid {status.st_uid}): set NPU_PATCH_CACHE to your own"
        )
    if stat.S_IMODE(status.st_mode) & 0o022:
        raise SimulatorError(
            f"the cache folder {folder} is writable by others: run chmod go-w on it, or set NPU_PATCH_CACHE"
        )


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# ---- compiling


def _build_into(folder: Path, compiler: str, installation: Installation) -> None:
    work = Path(tempfile.mkdtemp(prefix="building-", dir=folder.parent))
    try:
        _compile_all(work, compiler, installation)
        (work / MARKER).write_text(f"torch_npu {installation.version}\n")
        if folder.exists():  # an unfinished folder cannot come from us: folders appear complete
            shutil.rmtree(folder)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _compile_all(work: Path, compiler: str, installation: Installation) -> None:
    def run(*arguments: str | Path) -> None:
        command = [compiler, "-O1", "-shared", "-fPIC", *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            lines = [line for line in result.stderr.splitlines() if "error" in line] or result.stderr.splitlines()
            raise SimulatorError(
                f"compiling the simulated NPU with {compiler} failed: {lines[0] if lines else result.returncode}"
            )

    objects = [elf.read(path) for path in _shared_objects(installation.folder)]
    needed = set().union(*(o.needed for o in objects))
    wanted = {symbol for o in objects for symbol in o.undefined if _ANSWERED.match(symbol)}

    include = installation.folder / "include"
    headers = [f"-I{include}", f"-I{include / 'third_party' / 'acl' / 'inc'}", "-Wno-deprecated-declarations"]
    sources = sorted(RUNTIME.glob("*.c"))
    main = work / MAIN_LIBRARY
    soname = f"-Wl,-soname,{MAIN_LIBRARY}"
    # Linked twice: the first result tells which of the wanted symbols the sources define.
    run(*headers, soname, "-o", main, *sources, "-lpthread", "-lrt")
    rest = work / "rest.c"
    rest.write_text("".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(wanted - elf.read(main).defined)))
    run(*headers, soname, "-o", main, *sources, rest, "-lpthread", "-lrt")

    def against_main(name: str, source: Path) -> None:
        link = [f"-L{work}", "-Wl,--no-as-needed", "-lascendcl", "-Wl,-rpath,$ORIGIN", f"-Wl,-soname,{name}"]
        run("-o", work / name, source, *link)

    empty = work / "empty.c"
    empty.write_text("typedef int nothing;\n")
    for name in sorted(needed | {"libacl_op_compiler.so"}):
        if _CANN_LIBRARY.match(name) and name != OPERATOR_LIBRARY:
            against_main(name, empty)
    operators = work / "operators.c"
    operators.write_text(_operator_entries(_aclnn_names(installation.folder)))
    against_main(OPERATOR_LIBRARY, operators)
    for source in (rest, empty, operators):
        source.unlink()


def _shared_objects(torch_npu: Path) -> list[Path]:
    return sorted(
        path for pattern in ("*.so", "lib/*.so", "dynamo/torchair/core/*.so") for path in torch_npu.glob(pattern)
    )


def _aclnn_names(torch_npu: Path) -> set[str]:
    """The aclnn operators that torch_npu looks up by name at run time."""
    names: set[str] = set()
    for path in sorted(torch_npu.glob("lib/libtorch_npu.so")) + sorted(torch_npu.glob("lib/libop_plugin*.so")):
        found = re.findall(rb"(?<=\0)aclnn[A-Z]\w*(?=\0)", path.read_bytes())
        names.update(name.decode().removesuffix("GetWorkspaceSize") for name in found)
    return names - _ABSENT_ACLNN


def _operator_entries(names: Iterable[str]) -> str:
    lines = ["long npu_patch_aclnn_workspace(const char *);", "long npu_patch_aclnn_launch(const char *);"]
    for name in sorted(names):
        lines.append(f'long {name}GetWorkspaceSize(void) {{ return npu_patch_aclnn_workspace("{name}"); }}')
        lines.append(f'long {name}(void) {{ return npu_patch_aclnn_launch("{name}"); }}')
    return "\n".join(lines) + "\n"
