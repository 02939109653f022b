"""Where torchtitan builds its attention masks.

The stock builders run a compiled `create_block_mask`, which needs an inductor back end.  These build a `NpuBlockMask`:
its meaning is found once per step, on the host, and nothing is launched on the device.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention.flex_attention import create_block_mask

from ...discovery.bracket import quiet
from ...registry import OptionValue, Target, Unrecognised
from ...sites import Site
from .block_mask import NpuBlockMask, Source
from .mask_meaning import recognise
from .positions import facts

_OP, _LIBRARY = "attention", "torchtitan"


def find(module: ModuleType) -> Iterator[Target | Unrecognised]:
    """Compiled mask builders of a module, and its factories of mask_mods from positions."""
    for name, value in list(vars(module).items()):
        if not isinstance(value, FunctionType):
            continue
        if _compiled_builder(value) and not name.startswith("_"):
            # Vision encoders compile the builder itself.  Their masks hide rows, for pictures are padded, and have no
            # compact form: looking at one on the device would wait for it in vain.
            looks = not _is_compiled(value)
            if value.__module__ != module.__name__ if looks else create_block_mask not in vars(module).values():
                continue  # made elsewhere, where it is replaced for its importers, too
            yield Target(
                _OP,
                _LIBRARY,
                module.__name__,
                name,
                functools.partial(_builder_adapter, looks),
                "builds a block mask",
                ("torchtitan",),
                supporting=True,
            )
        elif value.__module__ == module.__name__ and _makes_mods(value):
            meaning = "makes a mask_mod from positions"
            yield Target(
                _OP, _LIBRARY, module.__name__, name, _factory_adapter, meaning, ("torchtitan",), supporting=True
            )


def _compiled_builder(function: FunctionType) -> bool:
    """A torch.compile of `create_block_mask`, or a function of any arguments whose body calls nothing but one."""
    if _is_compiled(function):
        return True
    code = function.__code__
    if code.co_argcount or code.co_kwonlyargcount or code.co_flags & 0x0C != 0x0C or len(code.co_names) != 1:
        return False
    inner = function.__globals__.get(code.co_names[0])
    # With TORCHDYNAMO_DISABLE=1 torch.compile hands back what it was given.
    return inner is create_block_mask or _is_compiled(inner)


def _is_compiled(function: Any) -> bool:
    return getattr(function, "_torchdynamo_orig_callable", None) is create_block_mask


def _makes_mods(factory: Callable[..., Any]) -> bool:
    """Whether the function makes a function of four arguments of positions, or of tokens and what ends a document."""
    names = list(inspect.signature(factory).parameters)
    if names != ["positions"] and not (len(names) == 2 and names[1] == "eos_id"):
        return False
    try:
        with quiet():
            positions = torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3]])
            mods = [factory(rows, *(0,) * (len(names) - 1)) for rows in (positions, positions[:1])]
    except Exception:
        return False
    return all(isinstance(mod, FunctionType) and mod.__code__.co_argcount == 4 for mod in mods)


@functools.cache
def _builder_signature() -> inspect.Signature:
    return inspect.signature(create_block_mask)


def _builder_adapter(looks: bool, original: Any, site: Site) -> Callable[..., Any]:
    def create(*args: Any, **kwargs: Any) -> Any:
        mask = None if is_compiling() else _build(args, kwargs, site.options, looks)
        return original(*args, **kwargs) if mask is None else mask

    return create


def _build(args: Any, kwargs: Any, options: Any, looks: bool) -> NpuBlockMask | None:
    """The mask that create_block_mask would make of these arguments; None where the original has to see them.

    Args:
        looks: a mask_mod that only works on the device is looked at there, which waits for it.

    Raises:
        DenseMaskError: the mask has no compact form and is longer than the option dense_mask_limit.
    """
    try:
        bound = _builder_signature().bind(*args, **kwargs)
    except TypeError:
        return None
    bound.apply_defaults()
    given = dict(bound.arguments)
    mod, batch, heads, q_len, kv_len, device, size = (
        given.pop(name) for name in ("mask_mod", "B", "H", "Q_LEN", "KV_LEN", "device", "BLOCK_SIZE")
    )
    device = _device(device)
    if device is None or not callable(mod) or min(q_len, kv_len) < 1:
        return None
    meaning = None
    if q_len == kv_len and heads in (None, 1):
        meaning = recognise(mod, batch or 1, q_len, device if looks else torch.device("cpu"))
    source = Source(mod, batch, heads, (q_len, kv_len), device, given, meaning)
    source.prepare(limit_of(options))
    return NpuBlockMask.of(source, size)


def limit_of(options: Any) -> int:
    """The option dense_mask_limit."""
    value: OptionValue = options["dense_mask_limit"]
    return int(value)


def _device(device: Any) -> torch.device | None:
    """The NPU that is meant, with its index; None for another device."""
    chosen = torch.accelerator.current_accelerator() if device is None else torch.device(device)
    if chosen is None or chosen.type != "npu":
        return None
    if chosen.index is None:
        return torch.device("npu", torch.npu.current_device())  # type: ignore[attr-defined]
    return chosen


def _factory_adapter(original: Any, site: Site) -> Callable[..., Any]:
    first = next(iter(inspect.signature(original).parameters))

    def make(*args: Any, **kwargs: Any) -> Any:
        given: Any = args[0] if args else kwargs.get(first)
        known = None
        if isinstance(given, Tensor) and given.device.type == "npu" and not is_compiling():
            known = facts(given)
        if known is None:
            return original(*args, **kwargs)
        rest, options = args[1:], {name: value for name, value in kwargs.items() if name != first}
        return _everywhere(lambda positions: original(positions, *rest, **options), known.host)

    return make


def _everywhere(factory: Callable[[Tensor], Any], positions: Tensor) -> Callable[..., Tensor]:
    """The factory's mask_mod for indices on any device; on a device it is made when first asked there.

    So it can be evaluated on the host, and costs nothing on the device as long as only its meaning is wanted.
    """
    made: dict[torch.device, Any] = {positions.device: factory(positions)}

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        mod = made.get(q_idx.device)
        if mod is None:
            mod = made[q_idx.device] = factory(positions.to(q_idx.device))
        return mod(b, h, q_idx, kv_idx)

    return functools.update_wrapper(mask_mod, made[positions.device], updated=())
