"""The ``aten::`` kernels of the simulated device: the CPU's own kernels, run on CPU views of device memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

from . import special
from .memory import cpu_view, is_npu, to_npu
from .rng import draw


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Metadata and allocation: torch_npu's own kernels need no device.
NATIVE = _names(
    "_reshape_alias as_strided squeeze squeeze.dim unfold unsqueeze view view_as_complex view_as_real _pin_memory "
    "is_pinned empty.memory_format empty_like empty_strided new_empty_strided record_stream resize_ resize_as_ "
    "set_ set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor _has_compatible_shallow_copy_type"
)
#: Operators that take tensors of the CPU beside tensors of the device (indices, lengths); all others refuse that.
MIXED_DEVICES = _names(
    "index index_put index_put_ _index_put_impl_ _unsafe_index _pack_padded_sequence copy_ _copy_from "
    "_copy_from_and_resize _ctc_loss ctc_loss"
)

#: torch_npu has kernels of its own above autograd, which hide those below; without a gradient they can be skipped.
ABOVE_AUTOGRAD = _names("one_hot")

_registrations: list[torch.library.Library] = []  # a collected Library takes its kernels with it


def register() -> None:
    """Replaces torch_npu's ``aten::`` kernels. Initialises nothing. A second call does nothing."""
    if _registrations:
        return
    library, above = (torch.library.Library("aten", "IMPL", key) for key in ("PrivateUse1", "AutogradPrivateUse1"))
    _registrations.extend((library, above))
    known = {
        name.removeprefix("aten::")
        for name in torch._C._dispatch_get_registrations_for_dispatch_key("PrivateUse1")
        if name.startswith("aten::")
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "overriding a previously registered kernel": that is the purpose
        for name in sorted(known - NATIVE | special.KERNELS.keys()):
            op = _find(name)
            if name in special.KERNELS:
                library.impl(name, special.KERNELS[name])
            elif op is not None and torch._C._dispatch_has_computed_kernel_for_dispatch_key("aten::" + name, "CPU"):
                library.impl(name, make_kernel(op))
            # What the CPU cannot compute keeps torch_npu's kernel, which the simulated runtime refuses by name.
        for name in ABOVE_AUTOGRAD:
            above.impl(name, torch.library.fallthrough_kernel)


def _find(name: str) -> Any:
    base, _, overload = name.partition(".")
    try:
        return getattr(getattr(torch.ops.aten, base), overload or "default")
    except (AttributeError, RuntimeError):
        return None


def make_kernel(op: Any) -> Callable[..., Any]:
    """A device kernel that runs ``op`` on CPU views; in-place and out= results are written straight through them."""
    schema = op._schema
    names = [argument.name for argument in schema.arguments]
    base = schema.name.partition("::")[2]
    random = torch.Tag.nondeterministic_seeded in op.tags
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    # For each result the name of the argument that it is, or None for a fresh one.
    returned = [
        next((a.name for a in schema.arguments if _aliases(a.alias_info, r.alias_info)), None) for r in schema.returns
    ]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | kwargs
        device = _device_of(base, given)
        converted = {name: _to_cpu(value) for name, value in given.items()}
        if converted.get("pin_memory"):
            converted["pin_memory"] = False
        # An empty out= may be resized: the CPU kernel gets memory of its own to resize.
        fresh = {
            name: torch.empty(value.size(), dtype=value.dtype)
            for name in written
            if isinstance(value := given.get(name), torch.Tensor) and is_npu(value) and value.numel() == 0
        }
        converted |= fresh
        positional = [converted.pop(name) for name in names[: len(args)]]
        if random:
            result = draw(given.get("generator"), device, lambda: op(*positional, **converted))
        else:
            result = op(*positional, **converted)
        for name, value in fresh.items():
            if value.numel():
                given[name].resize_(value.size())
                cpu_view(given[name]).copy_(value)
        if not returned:
            return None
        results = result if len(returned) > 1 else (result,)
        outputs = [
            given[name] if name is not None else _to_device(value, device)
            for name, value in zip(returned, results, strict=True)
        ]
        return tuple(outputs) if len(returned) > 1 else outputs[0]

    return kernel


def _aliases(argument: Any, result: Any) -> bool:
    if argument is None or result is None or not result.is_write:
        return False
    return bool(argument.before_set & result.before_set)


def _to_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return cpu_view(value) if value.device.type == "npu" else value
    if isinstance(value, (list, tuple)):
        return type(value)(_to_cpu(item) for item in value)
    if isinstance(value, torch.device) and value.type == "npu":
        return torch.device("cpu")
    if isinstance(value, torch.Generator) and value.device.type == "npu":
        return None
    return value


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return to_npu(value, device)
    if isinstance(value, (list, tuple)):
        return tree_map(lambda item: to_npu(item, device) if isinstance(item, torch.Tensor) else item, value)
    return value


def _device_of(base: str, given: dict[str, Any]) -> torch.device:
    """The device of the call; refuses tensors of several devices, as hardware would."""
    asked = given.get("device")
    found: torch.device | None = torch.device(asked) if asked is not None else None
    for value in given.values():
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(tensor, torch.Tensor):
                continue
            if tensor.device.type == "npu":
                if found is None:
                    found = tensor.device
                elif asked is None and found != tensor.device:
                    raise _mixture(base, found, tensor.device)
            elif tensor.dim() and base not in MIXED_DEVICES:
                raise _mixture(base, "npu", tensor.device)
    return found if found is not None else torch.device("npu", torch.get_device_module("npu").current_device())


def _mixture(base: str, first: Any, second: Any) -> RuntimeError:
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {first} and {second}! "
        f"(simulated npu, aten::{base})"
    )
