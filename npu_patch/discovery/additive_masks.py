"""Recognise functions that write a mask out as numbers: 0 where a key is seen, the type's lowest number elsewhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .bracket import NotRecognised, foreign_code, no_random_draws, plain, quiet

_LOWEST = torch.finfo(torch.float32).min
_PADDING = ((1, 1, 1, 1), (0, 0, 1, 1), (1, 0, 1, 0))


def _hard() -> Tensor:
    hidden = torch.ones(4, 4).triu(1).bool()
    hidden[0] = True  # a query that sees nothing
    return torch.zeros(3, 1, 4, 4).masked_fill(hidden, _LOWEST)


_ARGUMENTS: dict[str, Callable[[], Any]] = {
    "attention_mask": lambda: torch.tensor(_PADDING),
    "batch_size": lambda: 3,
    "cache_position": lambda: torch.arange(4),
    "device": lambda: torch.device("cpu"),
    "dtype": lambda: torch.float32,
    "expanded_mask": _hard,
    "input_shape": lambda: (3, 4),
    "inputs_embeds": lambda: torch.zeros(3, 4, 2),
    "mask": lambda: torch.tensor(_PADDING),
    "min_dtype": lambda: _LOWEST,
    "past_key_values_length": lambda: 0,
    "sequence_length": lambda: 4,
    "sliding_window": lambda: None,
    "target_length": lambda: 4,
    "tgt_len": lambda: 4,
}
_SHAPED_BY = ({"attention_mask", "dtype"}, {"attention_mask", "input_shape"}, {"dtype", "input_shape"})
_OTHERS = ({"mask", "dtype", "tgt_len"}, {"expanded_mask", "min_dtype"})


def recognise_additive_mask(function: object) -> bool:
    """Whether a function, by its parameters one that prepares a (B, 1, Sq, Skv) mask, returns those two numbers only.

    A mask of four dimensions that it is given is handed on, or changed where it holds these two numbers itself.
    """
    try:
        with foreign_code():
            original = plain(function)
            parameters = list(inspect.signature(original).parameters.values())
            named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
            if named - _ARGUMENTS.keys() or not any(wanted <= named for wanted in (*_SHAPED_BY, *_OTHERS)):
                return False
            with quiet(), no_random_draws():
                result = original(**{name: _ARGUMENTS[name]() for name in named})
            if not isinstance(result, Tensor) or result.dtype is not torch.float32 or result.shape != (3, 1, 4, 4):
                return False
            hidden = result == _LOWEST
            return bool(hidden.any()) and bool(((result == 0) | hidden).all())
    except NotRecognised:
        return False
