"""How an ``npu::`` kernel is declared and run.

    @kernel("npu_swiglu", models=("input", "dim"))
    def npu_swiglu(call, input, dim):
        call.require(input.shape[dim] % 2 == 0, "input", "the size of dim must be even")
        return ...

A call goes through four steps: torch_npu's own C++ kernel runs with the device answering "done", so its argument checks
and output shapes are real; an argument that differs from its schema default and is not in ``models`` is refused; the
function checks the documented limits; its results fill torch_npu's outputs. It gets CPU views of the arguments in
``models``, by name. For an output that the operator leaves undefined it returns ``UNDEFINED``: NaN, or the smallest
integer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from .. import device, limits
from ..memory import cpu_view, is_npu


class _Undefined:
    def __repr__(self) -> str:
        return "UNDEFINED"


#: Stands for an output whose content the documents leave undefined.
UNDEFINED = _Undefined()

_declared: list[Kernel] = []
_registrations: list[torch.library.Library] = []
_PRIVATE_USE = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)


class Call:
    """One call of an operator: how its kernel refuses, and what the CPU views do not tell."""

    def __init__(self, op: str, given: dict[str, Any]) -> None:
        self.op = op
        self.soc = limits.current()
        #: What torch_npu's own C++ kernel returned: outputs without content, and numbers that the host makes.
        self.outputs: Any = None
        self._given = given

    def refuse(self, argument: str, reason: str) -> NoReturn:
        """Raises the ``RuntimeError`` that names operator and argument."""
        raise RuntimeError(f"npu::{self.op} (simulated {self.soc.name}): {argument}: {reason}")

    def require(self, condition: bool, argument: str, reason: str) -> None:
        """Refuses unless ``condition``."""
        if not condition:
            self.refuse(argument, reason)

    def needs_grad(self, argument: str) -> bool:
        """Whether the caller's tensor requires a gradient (the CPU view never does)."""
        return self._given[argument].requires_grad


class Kernel:
    """A declared kernel; ``bind()`` connects it with torch_npu's operator."""

    def __init__(self, name: str, models: Sequence[str], cpu: Sequence[str], function: Callable[..., Any]) -> None:
        self.name = name
        self.models = tuple(models)
        self.cpu = frozenset(cpu)
        self.function = function
        self.arguments: list[str] = []
        self.defaults: dict[str, Any] = {}
        self.real: Any = None

    def bind(self) -> None:
        schema = getattr(torch.ops.npu, self.name).default._schema
        self.arguments = [a.name for a in schema.arguments]
        self.defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
        unknown = set(self.models) - set(self.arguments)
        if unknown:
            raise TypeError(f"the kernel of npu::{self.name} models arguments that do not exist: {sorted(unknown)}")
        self.real = torch.library.get_kernel("npu::" + self.name, "PrivateUse1")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = self.defaults | dict(zip(self.arguments, args, strict=False)) | kwargs
        call = Call(self.name, given)
        call.outputs = outputs = self._host_check(args, kwargs)
        for name in self.arguments:
            if name not in self.models and not _same(given[name], self.defaults.get(name)):
                call.refuse(name, "this argument is not simulated")
        self._check_devices(call, given)
        views = {name: _view(given[name]) for name in self.models}
        with torch._C._DisableAutocast():  # torch_npu's would round the CPU's operands, too
            results = self.function(call, **views)
        self._fill(outputs, results)
        return outputs

    def _host_check(self, args: Any, kwargs: Any) -> Any:
        library = device.library()
        library.npu_patch_host_check_begin()
        try:
            return self.real.call_boxed(_PRIVATE_USE, *args, **kwargs)
        finally:
            library.npu_patch_host_check_end()

    def _check_devices(self, call: Call, given: dict[str, Any]) -> None:
        first = None
        for name, value in given.items():
            for tensor in tree_leaves(value):
                if not isinstance(tensor, torch.Tensor) or name in self.cpu:
                    continue
                first = tensor.device if first is None else first
                call.require(is_npu(tensor), name, f"must be on the NPU, is on {tensor.device}")
                call.require(tensor.device == first, name, f"is on {tensor.device}, other arguments are on {first}")

    def _fill(self, outputs: Any, results: Any) -> None:
        """Writes the results into the outputs that torch_npu allocated; both must agree in number, shape and dtype."""
        allocated = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        computed = results if isinstance(results, tuple) else (results,)
        if len(allocated) != len(computed):
            raise AssertionError(f"npu::{self.name}: {len(allocated)} outputs, the reference made {len(computed)}")
        for index, (output, result) in enumerate(zip(allocated, computed, strict=True)):
            if not isinstance(output, torch.Tensor):
                continue
            target = cpu_view(output) if is_npu(output) else output
            if result is UNDEFINED:
                poison(target)
            elif result is None:
                if target.numel():
                    raise AssertionError(f"npu::{self.name}: output {index} is missing")
            elif result.shape != target.shape or result.dtype != target.dtype:
                raise RuntimeError(
                    f"npu::{self.name} output {index}: torch_npu allocates {target.dtype}{list(target.shape)}, the "
                    f"arguments mean {result.dtype}{list(result.shape)}"
                )
            else:
                target.copy_(result)


def kernel(name: str, *, models: Sequence[str], cpu: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Kernel]:
    """Declares the function below as the meaning of ``npu::name``.

    ``models``: the arguments that the function honours. ``cpu``: those of them that are tensors on the CPU.
    """

    def declare(function: Callable[..., Any]) -> Kernel:
        declared = Kernel(name, models, cpu, function)
        _declared.append(declared)
        return declared

    return declare


def register() -> None:
    """Replaces torch_npu's kernels by the declared ones; operators that this torch_npu does not have are left out."""
    if _registrations:
        return
    library = torch.library.Library("npu", "IMPL", "PrivateUse1")
    _registrations.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "overriding a previously registered kernel": that is the purpose
        for declared in _declared:
            if hasattr(torch.ops.npu, declared.name):
                declared.bind()
                library.impl(declared.name, declared)


def poison(tensor: torch.Tensor) -> None:
    """Fills a tensor with what no computation gives by accident."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype is not torch.bool:
        tensor.fill_(torch.iinfo(tensor.dtype).min)


def _view(value: Any) -> Any:
    return cpu_view(value) if is_npu(value) else value


def _same(value: Any, default: Any) -> bool:
    if value is None or default is None or isinstance(value, torch.Tensor):
        return value is default
    if isinstance(value, (list, tuple)):
        return list(value) == list(default)
    return bool(value == default)
