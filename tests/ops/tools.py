"""Which operators ran, and how far results are from a reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.numerics import relative_error


class Ran(TorchDispatchMode):
    """Counts the operators that reach the device, forward and backward; `ran["npu_rms_norm"]`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name.split("::")[1]] += 1
        return func(*args, **(kwargs or {}))

    def __getitem__(self, name: str) -> int:
        return self.counts[name]


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[str]]:
    """The function under torch.compile(fullgraph=True) with the `aot_eager` steps, and the operators of its graphs."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    operators: list[str] = []

    def take(graph: torch.fx.GraphModule, _: Any) -> Any:
        operators.extend(str(n.target) for n in graph.graph.nodes if n.op == "call_function")
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    return torch.compile(function, backend=aot_autograd(fw_compiler=take), fullgraph=True), operators


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, grad: bool = True) -> Tensor:
    """The same numbers on every device: drawn on the CPU."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).npu().requires_grad_(grad)


def wide(tensor: Tensor) -> Tensor:
    """A float64 copy on the CPU that wants the same gradient."""
    return tensor.detach().cpu().double().requires_grad_(tensor.requires_grad)


def results(function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The output and the gradients of all inputs that want one, for one fixed incoming gradient."""
    output = function(*inputs)
    leaves = [x for x in inputs if x.requires_grad]
    generator = torch.Generator().manual_seed(1)
    head = torch.randn(output.shape, generator=generator).to(torch.bfloat16)  # exact in every dtype
    gradients = torch.autograd.grad(output, leaves, head.to(device=output.device, dtype=output.dtype))
    return [output.detach(), *gradients]


def second_order(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    """Gradients, for all inputs, of a function of the first gradients; the last input is the incoming gradient."""
    *leaves, head = inputs
    first = torch.autograd.grad(function(*leaves), leaves, head, create_graph=True)
    return list(torch.autograd.grad(sum(x.square().sum() for x in first), [x for x in inputs if x.requires_grad]))


def assert_close(
    ours: Callable[..., Tensor], formula: Callable[..., Tensor], *inputs: Tensor, most: float = 1e-5
) -> None:
    """float32: output and gradients within `most` of the float64 formula, relative, in norm."""
    found, exact = results(ours, inputs), results(formula, [wide(x) for x in inputs])
    errors = [relative_error(a, b) for a, b in zip(found, exact, strict=True)]
    assert max(errors) <= most, errors
    assert [x.dtype for x in found[1:]] == [x.dtype for x in inputs if x.requires_grad]


def assert_no_worse(
    ours: Callable[..., Tensor],
    original: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    make: Callable[[int], Sequence[Tensor]],
    samples: int = 6,
) -> None:
    """bfloat16: the RMS error of output and gradients, pooled over samples, at most 1.05 times the original's."""
    sums: list[list[float]] = []
    for seed in range(samples):
        inputs = make(seed)
        exact = results(formula, [wide(x) for x in inputs])
        both = [results(ours, inputs), results(original, inputs)]
        assert [x.dtype for x in both[0]] == [x.dtype for x in both[1]]
        sums.append(
            [(x.cpu().double() - e).square().sum().item() for row in both for x, e in zip(row, exact, strict=True)]
        )
    pooled = [sum(column) ** 0.5 for column in zip(*sums, strict=True)]
    half = len(pooled) // 2
    for mine, theirs in zip(pooled[:half], pooled[half:], strict=True):
        assert mine <= 1.05 * theirs, (pooled[:half], pooled[half:])
