"""What a process does with its report: a table or a file at its end, and a word about ops that were never reached."""

from __future__ import annotations

from .engine import Patcher


def start(patcher: Patcher, report: str | None) -> None:
    """Arrange for the end of this process and of its forked children."""
