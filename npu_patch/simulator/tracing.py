"""Counting what a stretch of code does on device ``npu``: launches, bytes, host syncs, memory kept for backward.

It works on the simulated device and on hardware: a dispatch mode sees every operator below autograd, forward and
backward. Counts are properties of the program, not of the machine; they are not a measure of speed.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .memory import is_npu


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Allocation and metadata: no kernel runs on a device.
_NO_KERNEL = _names(
    "empty empty_like empty_strided new_empty new_empty_strided resize_ resize_as_ set_ _unsafe_view _reshape_alias "
    "lift lift_fresh record_stream is_pinned _pin_memory pin_memory is_same_size sym_size sym_stride sym_numel "
    "sym_storage_offset size stride empty_quantized _has_compatible_shallow_copy_type empty_with_format _version "
    "detach_ dim numel storage_offset is_contiguous npu_change_data_ptr"
)
#: The written argument is not read.
_WRITE_ONLY = _names("fill_ zero_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ trunc_normal_ arange")
#: Only the gathered elements of the first tensor are read.
_GATHERS = _names("embedding index_select index gather")
_COPIES = _names("_to_copy to copy_ _copy_from _copy_from_and_resize")
#: The shape or value of the result must reach the host.
_SYNCS = _names(
    "_local_scalar_dense nonzero masked_select _unique _unique2 unique_dim unique_consecutive bincount equal is_nonzero"
)
_INDEXING = _names("index index_put index_put_ _index_put_impl_")


@dataclass
class OpCount:
    """What one operator did."""

    launches: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


class Trace(TorchDispatchMode):
    """Counts over a ``with`` block, forward and backward (PyTorch carries the mode to its autograd threads).

    ``launches``, ``launches_by_op``
        Dispatched operators with an NPU tensor among arguments or results. Not counted: views (every result aliases an
        argument that is not written), allocation and metadata, copies between devices, ``contiguous`` of a contiguous
        tensor, ``_local_scalar_dense``. ``matmul_backward`` counts one per gradient asked for: torch_npu gives
        ``aten::matmul`` one autograd node, the device computes one product per gradient. An operator that has no kernel
        for the device but is composed of others is counted as those. One that has neither runs on the CPU in
        torch_npu's fallback: one launch and one host sync. ``npu::`` operators appear as ``npu.NAME``.
    ``bytes_read``, ``bytes_written``
        Per launch the unique input tensors, and the unique outputs. A tensor's bytes are its element size times the
        sizes whose stride is not 0: a view counts its elements, an expanded dimension counts once. Gathers (embedding,
        index_select, index, gather) read as many bytes of data as they write. What is written only (the target of
        fill_, zero_, copy_, normal_, ...) is not read; an in-place target is read and written.
    ``host_syncs``, ``host_syncs_by_op``
        ``_local_scalar_dense`` (``.item()``), copies from NPU to host ("copy to host"), nonzero, masked_select, unique,
        bincount, equal, repeat_interleave without output_size, index and index_put with a bool mask ("index[bool]"),
        CPU fallbacks ("cpu_fallback:NAME").
    ``saved_bytes``
        Bytes of the unique NPU storages that autograd saved for backward, parameters left out: those given as
        ``parameters``, and every ``nn.Parameter`` that reaches an operator. A view of a parameter is the parameter.
    ``copies_to_device``, ``bytes_to_device``
        Copies from host to NPU, which count neither as launches nor as syncs.
    ``peak_bytes``
        The most memory in use above what was in use at the start, from ``torch.npu`` memory statistics of the current
        device. Entering resets that peak statistic (traces may be nested; a reset by the traced code loses its past).
    """

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.ops: dict[str, OpCount] = collections.defaultdict(OpCount)
        self.host_syncs_by_op: collections.Counter[str] = collections.Counter()
        self.copies_to_device = 0
        self.bytes_to_device = 0
        self._parameters = {p.untyped_storage().data_ptr() for p in parameters if is_npu(p)}
        self._saved: list[tuple[int, int]] = []  # address and bytes of each saved storage
        self._alive: dict[int, StorageWeakRef] = {}
        self._hooks = contextlib.ExitStack()
        self._peak = _Peak()

    @property
    def launches(self) -> int:
        return sum(op.launches for op in self.ops.values())

    @property
    def launches_by_op(self) -> dict[str, int]:
        return {name: op.launches for name, op in self.ops.items()}

    @property
    def bytes_read(self) -> int:
        return sum(op.bytes_read for op in self.ops.values())

    @property
    def bytes_written(self) -> int:
        return sum(op.bytes_written for op in self.ops.values())

    @property
    def host_syncs(self) -> int:
        return sum(self.host_syncs_by_op.values())

    @property
    def saved_bytes(self) -> int:
        return sum(size for address, size in self._saved if address not in self._parameters)

    @property
    def peak_bytes(self) -> int:
        return self._peak.bytes()

    def to_dict(self) -> dict[str, Any]:
        """Every count, for JSON."""
        return {
            "launches": self.launches,
            "launches_by_op": self.launches_by_op,
            "bytes_read": self.bytes_read,
            "bytes_written": self.bytes_written,
            "host_syncs": self.host_syncs,
            "host_syncs_by_op": dict(self.host_syncs_by_op),
            "saved_bytes": self.saved_bytes,
            "peak_bytes": self.peak_bytes,
            "copies_to_device": self.copies_to_device,
            "bytes_to_device": self.bytes_to_device,
        }

    def __enter__(self) -> Trace:
        self._peak.start()
        self._hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor))
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._hooks.close()
        self._peak.stop()

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        """The mode is off while it handles an operator; on again for what that operator is composed of."""
        super().__enter__()
        try:
            yield
        finally:
            super().__exit__(None, None, None)

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor:
        if is_npu(tensor):
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            known = self._alive.get(address)
            # The same address is the same storage only while that storage lives. It is not kept alive here, since that
            # would raise the peak.
            if address and (known is None or known.expired()):
                self._alive[address] = StorageWeakRef(storage)
                self._saved.append((address, storage.nbytes()))
        # Returned as it came, an operator's saved output would refer to itself through its node and never be freed.
        return tensor.detach()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        op = _describe(func)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        for tensor in inputs:
            if isinstance(tensor, torch.nn.Parameter) and is_npu(tensor):
                self._parameters.add(tensor.untyped_storage().data_ptr())
        on_device = any(is_npu(x) for x in inputs)
        if on_device and op.expand is not None:
            with self._inside():
                return op.expand(args, kwargs)
        if on_device and op.decomposes:  # reached only from inside an expanded operator
            with self._inside():
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        outputs = [x for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if on_device or any(is_npu(x) for x in outputs):
            self._count(op, args, kwargs, inputs, outputs)
        return result

    def _count(self, op: _Op, args: Any, kwargs: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        if op.base in _NO_KERNEL or (op.is_view and _shares(inputs, outputs)):
            return
        if op.base in _COPIES and self._count_copy(op.base, args, outputs):
            return
        if op.base in ("contiguous", "to") and _key(outputs[0]) == _key(args[0]):
            return
        self._count_syncs(op, args, kwargs)
        if op.base == "_local_scalar_dense":
            return
        bound = dict(zip(op.arguments, args, strict=False)) | kwargs
        written = _unique(x for name in op.written for x in tree_leaves(bound.get(name)) if is_npu(x))
        fresh = {key: x for key, x in _unique(x for x in outputs if is_npu(x)).items() if key not in written}
        count = self.ops[op.base if op.namespace == "aten" else f"{op.namespace}.{op.base}"]
        count.bytes_written += _total(written) + _total(fresh)
        if op.base == "matmul_backward":
            grad, left, right, mask = args[:4]
            count.launches += sum(map(bool, mask))
            count.bytes_read += mask[0] * (_nbytes(grad) + _nbytes(right)) + mask[1] * (_nbytes(grad) + _nbytes(left))
            return
        count.launches += 1
        read = _unique(x for x in inputs if is_npu(x))
        if op.base in _GATHERS:
            count.bytes_read += sum(_nbytes(x) for x in outputs if is_npu(x))
            count.bytes_read += _total(_unique(x for x in inputs[1:] if is_npu(x)))
        elif op.base in _WRITE_ONLY:
            count.bytes_read += _total({key: x for key, x in read.items() if key not in written})
        else:
            count.bytes_read += _total(read)

    def _count_copy(self, base: str, args: Any, outputs: list[torch.Tensor]) -> bool:
        """Whether it was a copy between devices, which is no launch."""
        if base == "copy_":
            target, source = args[0], args[1]
        else:
            source = args[0]
            target = args[1] if base in ("_copy_from", "_copy_from_and_resize") and len(args) > 1 else outputs[0]
        if is_npu(source) == is_npu(target):
            return False
        if is_npu(source):
            self.host_syncs_by_op["copy to host"] += 1
        else:
            self.copies_to_device += 1
            self.bytes_to_device += _nbytes(target)
        return True

    def _count_syncs(self, op: _Op, args: Any, kwargs: Any) -> None:
        if op.base in _SYNCS:
            self.host_syncs_by_op[op.base] += 1
        if op.name == "aten::repeat_interleave.Tensor" and kwargs.get("output_size") is None:
            self.host_syncs_by_op["repeat_interleave"] += 1
        if op.base in _INDEXING and any(
            isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1])
        ):
            self.host_syncs_by_op[op.base + "[bool]"] += 1
        if op.falls_back:
            self.host_syncs_by_op["cpu_fallback:" + op.base] += 1


def _npu() -> Any:
    return torch.get_device_module("npu")


class _Peak:
    """Peak memory over a block; blocks nest although the statistic has one reset."""

    _open: ClassVar[list[_Peak]] = []

    def __init__(self) -> None:
        self._device: int | None = None
        self._start = 0
        self._most = 0

    def start(self) -> None:
        if not _npu().is_initialized():
            _npu().init()
        self._flush()
        self._device = _npu().current_device()
        _npu().reset_peak_memory_stats(self._device)
        self._start = self._most = _npu().memory_allocated(self._device)
        _Peak._open.append(self)

    def stop(self) -> None:
        self._flush()
        _Peak._open.remove(self)

    def bytes(self) -> int:
        self._flush()
        return self._most - self._start

    @classmethod
    def _flush(cls) -> None:
        """Notes the peak so far in every open block, before somebody resets it."""
        for peak in cls._open:
            peak._most = max(peak._most, _npu().max_memory_allocated(peak._device))


class _Op:
    """What the trace needs to know of an operator, from its schema and its registered kernels."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        self.namespace, self.base = schema.name.split("::")
        self.arguments = [a.name for a in schema.arguments]
        self.written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        returns = schema.returns
        self.is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        has = torch._C._dispatch_has_kernel_for_dispatch_key
        native = has(self.name, "PrivateUse1")
        explicit = not native and (
            has(self.name, "CompositeExplicitAutograd") or has(self.name, "CompositeExplicitAutogradNonFunctional")
        )
        self.decomposes = not native and not explicit and has(self.name, "CompositeImplicitAutograd")
        self.falls_back = not (native or explicit or self.decomposes) and self.namespace == "aten"
        self.expand = None
        if explicit and not self.is_view and self.base not in _NO_KERNEL and self.namespace == "aten":
            # The computed kernel of the device is the composite one.
            composite = torch.library.get_kernel(self.name, "PrivateUse1")
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
            self.expand = lambda args, kwargs: composite.call_boxed(keys, *args, **kwargs)


_described: dict[Any, _Op] = {}


def _describe(func: Any) -> _Op:
    op = _described.get(func)
    if op is None:
        op = _described[func] = _Op(func)
    return op


def _nbytes(tensor: torch.Tensor) -> int:
    count = tensor.element_size()
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        if stride != 0 or size == 0:
            count *= size
    return count


def _key(tensor: torch.Tensor) -> tuple[Any, ...]:
    address = tensor.untyped_storage().data_ptr()
    return address, tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype


def _unique(tensors: Iterable[torch.Tensor]) -> dict[Any, torch.Tensor]:
    return {_key(tensor): tensor for tensor in tensors}


def _total(tensors: dict[Any, torch.Tensor]) -> int:
    return sum(map(_nbytes, tensors.values()))


def _shares(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """``to``, ``contiguous`` and ``reshape`` have the schema of a view but may copy, so look."""
    addresses = {x.untyped_storage().data_ptr() for x in inputs}
    return all(x.untyped_storage().data_ptr() in addresses or x.numel() == 0 for x in outputs)
