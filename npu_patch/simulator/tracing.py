"""Counting what a stretch of code does on device ``npu``: launches, bytes, host syncs, memory kept for backward.

It works on the simulated device and on hardware: a dispatch mode sees every operator below autograd, forward and
backward. Counts are properties of the program, not of the machine; they are not a measure of speed.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._C import DispatchKey
from torch._ops import HigherOrderOperator
from torch._subclasses import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .memory import is_npu
from .trace_memory import Peak
from .trace_operators import (
    COPIES,
    GATHERS,
    INDEXING,
    NO_KERNEL,
    SYNCS,
    WRITE_ONLY,
    Operator,
    describe,
    key,
    nbytes,
    shares_memory,
    total,
    unique,
)


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
        torch_npu's fallback: one launch and one host sync. ``npu::`` operators appear as ``npu.NAME``. Of a DTensor the
        operators on its local tensors are counted, collectives included; FakeTensors count nothing.
    ``bytes_read``, ``bytes_written``
        Per launch the unique input tensors, and the unique outputs. A tensor's bytes are its element size times the
        sizes whose stride is not 0: a view counts its elements, an expanded dimension counts once. Gathers (embedding,
        index_select, index, gather) read as many bytes of data as they write. What is written only (the target of
        fill_, zero_, copy_, normal_, ..., and ``out``) is not read; an in-place target is read and written. An output
        that is an input is not written.
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

    # Counted as what they are composed of.  With a gradient PyTorch 2.13 traces flex attention under the mode, and ends
    # the process there: compile it, or trace it without a gradient.
    supports_higher_order_operators = True

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.ops: dict[str, OpCount] = collections.defaultdict(OpCount)
        self.host_syncs_by_op: collections.Counter[str] = collections.Counter()
        self.copies_to_device = 0
        self.bytes_to_device = 0
        self._parameters = {t.untyped_storage().data_ptr() for p in parameters for t in _plain_tensors(p)}
        self._saved: list[tuple[int, int]] = []  # address and bytes of each saved storage
        self._alive: dict[int, StorageWeakRef] = {}
        self._hooks = contextlib.ExitStack()
        self._peak = Peak()

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
        for plain in _plain_tensors(tensor):
            storage = plain.untyped_storage()
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
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented  # a DTensor or the like: what it does with its local tensors comes here again
        if isinstance(func, HigherOrderOperator):
            with self._inside():
                return func.py_kernels[DispatchKey.CompositeExplicitAutograd](*args, **kwargs)
        op = describe(func)
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        self._parameters |= {
            t.untyped_storage().data_ptr() for t in inputs if isinstance(t, nn.Parameter) and is_npu(t)
        }
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
        # A collective's result may come as a tensor that waits when it is used; it has no memory of its own.
        outputs = [held for x in tree_leaves(result) if isinstance(x, torch.Tensor) for held in _inner_tensors(x)]
        fake = any(isinstance(x, FakeTensor) for x in (*inputs, *outputs))  # shapes only: nothing runs
        if not fake and (on_device or any(is_npu(x) for x in outputs)):
            self._count(op, args, kwargs, inputs, outputs)
        return result

    def _count(
        self, op: Operator, args: Any, kwargs: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]
    ) -> None:
        if op.base in NO_KERNEL or (op.is_view and shares_memory(inputs, outputs)):
            return
        if op.base in COPIES and self._count_copy(op.base, args, outputs):
            return
        if op.base in ("contiguous", "to") and key(outputs[0]) == key(args[0]):
            return
        self._count_syncs(op, args, kwargs)
        if op.base == "_local_scalar_dense":
            return
        bound = dict(zip(op.arguments, args, strict=False)) | kwargs
        written = unique(x for name in op.written for x in tree_leaves(bound.get(name)) if is_npu(x))
        given = (value for name, value in bound.items() if name not in op.only_written)
        read = unique(x for value in given for x in tree_leaves(value) if is_npu(x))
        fresh = {k: x for k, x in unique(x for x in outputs if is_npu(x)).items() if k not in written and k not in read}
        count = self.ops[op.base if op.namespace == "aten" else f"{op.namespace}.{op.base}"]
        count.bytes_written += total(written) + total(fresh)
        if op.base == "matmul_backward":
            grad, left, right, mask = args[:4]
            count.launches += sum(map(bool, mask))
            count.bytes_read += mask[0] * (nbytes(grad) + nbytes(right)) + mask[1] * (nbytes(grad) + nbytes(left))
            return
        count.launches += 1
        if op.base in GATHERS:
            count.bytes_read += sum(nbytes(x) for x in outputs if is_npu(x))
            count.bytes_read += total(unique(x for x in inputs[1:] if is_npu(x)))
        elif op.base in WRITE_ONLY:
            count.bytes_read += total({k: x for k, x in read.items() if k not in written})
        else:
            count.bytes_read += total(read)

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
            self.bytes_to_device += nbytes(target)
        return True

    def _count_syncs(self, op: Operator, args: Any, kwargs: Any) -> None:
        if op.base in SYNCS:
            self.host_syncs_by_op[op.base] += 1
        if op.name == "aten::repeat_interleave.Tensor" and kwargs.get("output_size") is None:
            self.host_syncs_by_op["repeat_interleave"] += 1
        if op.base in INDEXING and any(
            isinstance(x, torch.Tensor) and x.dtype in (torch.bool, torch.uint8) for x in tree_leaves(args[1])
        ):
            self.host_syncs_by_op[op.base + "[bool]"] += 1
        if op.falls_back:
            self.host_syncs_by_op["cpu_fallback:" + op.base] += 1


def _plain_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The NPU tensors that hold the data of ``tensor``: itself, or the inner ones of a DTensor and its like."""
    return [inner for inner in _inner_tensors(tensor) if is_npu(inner)]


def _inner_tensors(tensor: torch.Tensor) -> list[torch.Tensor]:
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [inner for name in names for inner in _inner_tensors(getattr(tensor, name))]
    return [tensor]
