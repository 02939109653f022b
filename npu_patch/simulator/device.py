"""Bringing the simulated device up inside this process: the libraries before torch, the kernels after torch_npu."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from typing import Any

import wrapt

import npu_patch_startup

from . import build, installed, limits, request
from .errors import SimulatorError

_lock = threading.RLock()
_libraries: list[ctypes.CDLL] = []
_loaded: tuple[int, str] | None = None


def is_loaded() -> bool:
    """Whether this process has the simulated device (its kernels follow when torch_npu is imported)."""
    return _loaded is not None


def check(devices: int | None = None, soc: str | None = None) -> None:
    """Raises what :func:`load` would raise because of the machine, without building or loading anything.

    ``SimulatorError``: no torch or torch_npu, torch_npu of a version that was not tested, a CUDA or ROCm build of torch
    beside it, real CANN libraries, no C compiler where the libraries are not built yet. ``ValueError``: a bad request.
    """
    _resolve(devices, soc)
    if is_loaded():
        return
    installed.check_versions()
    installed.check_no_cann(build.MARKER)
    if not build.is_built():
        build.find_compiler()


def load(devices: int | None = None, soc: str | None = None) -> None:
    """Makes this process, and the processes it starts, see ``devices`` simulated NPUs of type ``soc``.

    Call it before torch is imported. What is not given comes from ``NPU_PATCH_SIMULATE=N[:SOC]``, else one Ascend910B.
    The libraries are compiled on first use (a few seconds, once per user). The kernels are registered right after
    torch_npu is imported; the device is not initialised: ``torch.npu.is_initialized()`` stays False until the first
    tensor, so forked children can use it. A second call does nothing, but raises where it asks for something else.

    Sets ``NPU_PATCH_SIMULATE`` to the request, so that child processes in which npu_patch is active are simulated as
    well, and ``TASK_QUEUE_ENABLE=0`` where it is unset, so that errors come at the call. ``NPU_PATCH_SIM_LOG=1`` logs
    what reaches the simulated runtime to stderr.

    Raises ``SimulatorError`` as :func:`check` does, and where torch was imported before without the simulated device;
    ``ValueError`` for a bad request.
    """
    global _loaded
    with _lock:
        if _loaded is not None:
            if devices not in (None, _loaded[0]) or soc not in (None, _loaded[1]):
                raise SimulatorError(
                    f"{_loaded[0]} devices of type {_loaded[1]} are simulated in this process already: "
                    "load() can ask for something else only in a new process"
                )
            return
        wanted = _resolve(devices, soc)
        if "torch" in sys.modules:
            raise SimulatorError(
                "torch is already imported: call npu_patch.simulator.load(), or set NPU_PATCH_SIMULATE, before "
                "anything imports torch"
            )
        check(*wanted)
        _load_libraries(*wanted)
        os.environ[request.VARIABLE] = f"{wanted[0]}:{wanted[1]}"
        os.environ.setdefault("TASK_QUEUE_ENABLE", "0")
        wrapt.register_post_import_hook(_skip_cann_check, "torch_npu._init.registry.registry_manager")
        wrapt.register_post_import_hook(_register_kernels, "torch_npu")
        _loaded = wanted


def library() -> ctypes.CDLL:
    """The library that has the simulated runtime."""
    return _libraries[0]


def _resolve(devices: int | None, soc: str | None) -> tuple[int, str]:
    if devices is None or soc is None:
        default_devices, default_soc = request.from_environment()
        devices = default_devices if devices is None else devices
        soc = default_soc if soc is None else soc
    return request.check_devices(devices), request.check_soc(soc)


def _load_libraries(devices: int, soc: str) -> None:
    """By path and globally: their sonames then satisfy torch_npu's own dlopen of the CANN libraries."""
    for path in build.libraries(build.build()):
        _libraries.append(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL))
    chosen = limits.select(soc)
    if library().npu_patch_configure(devices, chosen.acl_name.encode()):
        raise SimulatorError(f"the simulated runtime refused {devices} devices of type {chosen.acl_name}")


def _skip_cann_check(registry: Any) -> None:
    """Every process would print to stdout that there is no CANN package, which is the point of a simulation."""
    if hasattr(registry, "_cann_package_check"):
        registry._cann_package_check = lambda: None


def _register_kernels(_torch_npu: Any) -> None:
    with npu_patch_startup.for_simulator():
        from . import aten, kernels

        aten.register()
        kernels.register()
