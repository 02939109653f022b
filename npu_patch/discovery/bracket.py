"""Where probes run: plain CPU tensors, whatever the code that triggered the import has switched on around it."""

from __future__ import annotations

import contextlib
import types
import warnings
from collections.abc import Iterator

import torch
from torch.utils._python_dispatch import _disable_current_modes


class NotRecognised(Exception):
    """A candidate computes nothing that is known; the message is the reason that `status()` shows."""


class Signal(BaseException):
    """Raised through a probed function; not an Exception, so that the function cannot swallow it."""


def reason_of(error: Exception) -> str:
    """Why something was not recognised, for a row of the status: what was said of it, or how running it failed."""
    return str(error) if isinstance(error, NotRecognised) else f"{type(error).__name__}: {error}"


def failure(error: BaseException) -> NotRecognised:
    """What an error of foreign code means for recognising it: also one that is meant to end the process.

    Raises:
        KeyboardInterrupt, Signal, NotRecognised: the error itself, if it is one of these.
    """
    if isinstance(error, (KeyboardInterrupt, Signal, NotRecognised)):
        raise error
    try:
        text = str(error)[:80]
    except Exception:
        text = ""
    return NotRecognised(f"fails on a small input: {type(error).__name__}: {text}")


@contextlib.contextmanager
def foreign_code() -> Iterator[None]:
    """Inside: whatever is raised, but for an interrupt, becomes NotRecognised.

    Classes may have a metaclass that raises where nobody expects it, or a forward that leaves the process.
    """
    try:
        yield
    except (KeyboardInterrupt, NotRecognised):
        raise
    except Signal as error:
        raise NotRecognised(f"fails on a small input: {error}") from None
    except BaseException as error:
        raise failure(error) from None


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside: CPU tensors, float32 by default, autograd on; no mode, no autocast, no inference mode, no warnings.

    Modules get imported under `torch.device("meta")`, fake tensors, autocast, inference mode, other default dtypes.
    """
    dtype = torch.get_default_dtype()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(torch.inference_mode(False))  # which also switches gradients on
        stack.enter_context(torch.autocast("cpu", enabled=False))
        if dtype is not torch.float32:
            torch.set_default_dtype(torch.float32)
            stack.callback(torch.set_default_dtype, dtype)
        yield


@contextlib.contextmanager
def no_random_draws() -> Iterator[None]:
    """Undo and refuse draws from the global generator.

    Raises:
        NotRecognised: something inside drew.
    """
    before = torch.random.get_rng_state()
    try:
        yield
    finally:
        drew = not torch.equal(before, torch.random.get_rng_state())
        if drew:
            torch.random.set_rng_state(before)
    if drew:
        raise NotRecognised("draws random numbers")


def plain(function: object) -> types.FunctionType:
    """The function itself, below replacements of this package.

    Raises:
        NotRecognised: it is no plain Python function, a wrapper around another one, or writes global variables.
    """
    while isinstance(function, types.FunctionType) and _ours(function) and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    if not isinstance(function, types.FunctionType):
        raise NotRecognised(f"is a {type(function).__name__}, not a plain function")
    if hasattr(function, "__wrapped__") or hasattr(function, "_torchdynamo_orig_callable"):
        raise NotRecognised("is a wrapper around another function")
    if _writes_globals(function.__code__):
        raise NotRecognised("writes global variables")
    return function


def _ours(function: types.FunctionType) -> bool:
    return str(function.__globals__.get("__name__", "")).startswith("npu_patch.")


def _writes_globals(code: types.CodeType) -> bool:
    import dis

    writes = {dis.opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    return any(operation in writes for operation in code.co_code[::2])


def same(value: torch.Tensor, reference: torch.Tensor, loose: bool = False) -> bool:
    """Whether two results of one computation on this host are equal, up to the rounding that its order leaves open.

    Args:
        value, reference: float32 within 2e-6; half types equal but for one unit in the last place in 0.1 % of elements.
        loose: for gradients, whose sums half types round on the way: within a few units of the largest in the row.
    """
    if value.dtype is not reference.dtype or value.shape != reference.shape:
        return False
    a, b = value.detach().float(), reference.detach().float()
    gap = (a - b).abs()
    if value.dtype is torch.float32:
        room = 2e-6 * b.abs().clamp_min(1.0) if not loose else 4e-6 * b.abs().amax(-1, keepdim=True).clamp_min(1e-6)
        return bool((gap <= room).all())
    ulp = torch.finfo(value.dtype).eps
    if loose:
        return bool((gap <= 4 * ulp * b.abs().amax(-1, keepdim=True).clamp_min(1e-6)).all())
    off = gap > 0
    if not bool(off.any()):
        return True
    few = max(2, a.numel() // 1000)
    return int(off.sum()) <= few and bool((gap <= 1.01 * ulp * b.abs().clamp_min(1e-30)).all())
