"""What the trace knows of an operator, from its schema and its registered kernels, and how many bytes tensors have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Allocation and metadata: no kernel runs on a device.
NO_KERNEL = _names(
    "empty empty_like empty_strided new_empty new_empty_strided resize_ resize_as_ set_ _unsafe_view _reshape_alias "
    "lift lift_fresh record_stream is_pinned _pin_memory pin_memory is_same_size sym_size sym_stride sym_numel "
    "sym_storage_offset size stride empty_quantized _has_compatible_shallow_copy_type empty_with_format _version "
    "detach_ dim numel storage_offset is_contiguous npu_change_data_ptr"
)
#: The written argument is not read.
WRITE_ONLY = _names("fill_ zero_ copy_ normal_ uniform_ random_ bernoulli_ exponential_ trunc_normal_ arange")
#: Only the gathered elements of the first tensor are read.
GATHERS = _names("embedding index_select index gather")
COPIES = _names("_to_copy to copy_ _copy_from _copy_from_and_resize")
#: The shape or value of the result must reach the host.
SYNCS = _names(
    "_local_scalar_dense nonzero masked_select _unique _unique2 unique_dim unique_consecutive bincount equal is_nonzero"
)
INDEXING = _names("index index_put index_put_ _index_put_impl_")


class Operator:
    """What the trace needs to know of an operator, from its schema and its registered kernels."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        self.namespace, self.base = schema.name.split("::")
        self.arguments = [a.name for a in schema.arguments]
        self.written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        self.only_written = frozenset(a.name for a in schema.arguments if a.is_out)
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
        if explicit and not self.is_view and self.base not in NO_KERNEL and self.namespace == "aten":
            # The computed kernel of the device is the composite one.
            composite = torch.library.get_kernel(self.name, "PrivateUse1")
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
            self.expand = lambda args, kwargs: composite.call_boxed(keys, *args, **kwargs)


_described: dict[Any, Operator] = {}


def describe(func: Any) -> Operator:
    """The ``Operator`` of an overload, made once."""
    op = _described.get(func)
    if op is None:
        op = _described[func] = Operator(func)
    return op


def nbytes(tensor: torch.Tensor) -> int:
    """Bytes that a kernel has to touch: expanded dimensions count once."""
    count = tensor.element_size()
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        if stride != 0 or size == 0:
            count *= size
    return count


def key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Equal for tensors that are the same elements of the same memory."""
    address = tensor.untyped_storage().data_ptr()
    return address, tensor.storage_offset(), tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype


def unique(tensors: Iterable[torch.Tensor]) -> dict[Any, torch.Tensor]:
    """Each tensor once, by its ``key``."""
    return {key(tensor): tensor for tensor in tensors}


def total(tensors: dict[Any, torch.Tensor]) -> int:
    """Bytes of all of them."""
    return sum(map(nbytes, tensors.values()))


def shares_memory(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
    """``to``, ``contiguous`` and ``reshape`` have the schema of a view but may copy, so look."""
    addresses = {x.untyped_storage().data_ptr() for x in inputs}
    return all(x.untyped_storage().data_ptr() in addresses or x.numel() == 0 for x in outputs)
