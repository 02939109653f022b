"""Answers that depend on static facts alone, remembered by those facts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .availability import soc_name

Answer = TypeVar("Answer")

MOST = 4096


class Verdicts(dict[tuple[Any, ...], Answer]):
    """`verdicts[facts]` is `judge(*facts)`, asked once.

    The judge is given the facts and nothing else, so that an answer cannot depend on what is not in its key.  Facts are
    shapes, dtypes, devices, names and flags: values, never tensors or other objects that compare by identity.  Beside
    them a judge may ask for the chip, which is one for the process; nothing is remembered before its name is known.

    While torch.compile traces, and for fake tensors, whose sizes may be symbols, call `judge` instead.  Threads need no
    lock: at worst two of them judge the same facts.

    Args:
        judge: a function of the facts.
    """

    def __init__(self, judge: Callable[..., Answer]) -> None:
        super().__init__()
        self.judge = judge

    def __missing__(self, facts: tuple[Any, ...]) -> Answer:
        answer = self.judge(*facts)
        if soc_name():
            if len(self) >= MOST:  # sequence lengths that never come again
                self.clear()
            self[facts] = answer
        return answer
