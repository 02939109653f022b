"""Which way a function branched while it was probed, and whether it could go another way elsewhere.

A condition that went one way in every probe may go the other way on another device, for another shape, without a
gradient.  What it then computes was not seen.  Such a branch is accepted only where the replacement makes sure that it
goes the same way, or where the other way ends in an error.
"""

from __future__ import annotations

import dis
import functools
import linecache
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .bracket import NotRecognised
from .watch import Watch

_SKIPPED = frozenset(("CACHE", "EXTENDED_ARG", "NOP"))
_HARMLESS = frozenset(
    (
        *("BUILD_LIST", "BUILD_TUPLE", "CALL", "CALL_FUNCTION", "COMPARE_OP", "CONTAINS_OP", "IS_OP", "LOAD_ATTR"),
        *("LOAD_CONST", "LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_GLOBAL", "LOAD_SMALL_INT", "PRECALL", "PUSH_NULL"),
        *("TO_BOOL", "UNARY_NOT"),
    )
)
_LOCAL = ("LOAD_FAST", "LOAD_FAST_BORROW")


@dataclass(frozen=True)
class Settled:
    """What is the same in every call that a replacement computes.

    Args:
        values: attributes of the instance that have the values of the probe.
        presence: attributes that are None, or are not, as in the probe.
        methods: the code in which the first parameter is the instance.
        parameters: the code whose parameters are None, or are not, as in the probe.
        open: those of its parameters that may be either.
    """

    values: frozenset[str] = frozenset()
    presence: frozenset[str] = frozenset()
    methods: frozenset[types.CodeType] = frozenset()
    parameters: frozenset[types.CodeType] = frozenset()
    open: frozenset[str] = frozenset()


def check_branches(watch: Watch, settled: Settled) -> None:
    """Check that every condition went both ways in the probes, or goes one way whenever the replacement computes.

    Raises:
        NotRecognised: one did not; the reason quotes its line.
    """
    for code, steps in watch.steps.items():
        ways: dict[int, set[int]] = {}
        for before, after in steps:
            ways.setdefault(before, set()).add(after)
        listing = _listing(code)
        for index, jump in enumerate(listing):
            if not _branches(jump) or len(ways.get(jump.offset, ())) != 1:
                continue
            (taken,) = ways[jump.offset]
            untaken = listing[index + 1].offset if taken == jump.argval else jump.argval
            if not _raises(code, untaken) and not _settled(code, listing, index, settled):
                raise NotRecognised(f"{_place(code, listing, index)} goes one way in every probe")


def _branches(instruction: dis.Instruction) -> bool:
    name = instruction.opname
    return ("JUMP" in name and "IF" in name) or name == "FOR_ITER"


@functools.lru_cache(maxsize=256)
def _listing(code: types.CodeType) -> Sequence[dis.Instruction]:
    return tuple(one for one in dis.get_instructions(code) if one.opname not in _SKIPPED)


def _place(code: types.CodeType, listing: Sequence[dis.Instruction], index: int) -> str:
    line = next(line for start, line in reversed(list(dis.findlinestarts(code))) if start <= listing[index].offset)
    text = linecache.getline(code.co_filename, line or 0).strip()
    return f"line {line} of {code.co_name}" + (f" ({text[:60]})" if text else "")


def _raises(code: types.CodeType, offset: int) -> bool:
    """Whether the code from here on raises, without a condition before."""
    position: Mapping[int, int] = {one.offset: i for i, one in enumerate(_listing(code))}
    index, seen = position[offset], set()
    while index < len(position) and index not in seen:
        seen.add(index)
        instruction = _listing(code)[index]
        if instruction.opname == "RAISE_VARARGS":
            return True
        if _branches(instruction) or instruction.opname.startswith(("RETURN", "YIELD", "STORE_ATTR", "STORE_GLOBAL")):
            return False
        index = position[instruction.argval] if instruction.opcode in dis.hasjrel + dis.hasjabs else index + 1
    return False


def _settled(code: types.CodeType, listing: Sequence[dis.Instruction], index: int, settled: Settled) -> bool:
    """Whether the condition of a jump depends on what is settled alone."""
    condition = _condition(listing, index)
    if condition is None or not all(one.opname in _HARMLESS for one in condition):
        return False
    attributes: set[str] = set()
    for before, one, after in zip((None, *condition), condition, (*condition[1:], None), strict=False):
        if one.opname in _LOCAL and code in settled.methods and one.argval == code.co_varnames[0]:
            if after is None or after.opname not in ("LOAD_ATTR", "LOAD_CONST"):
                return False
            attributes.add(str(after.argval))
        elif one.opname in _LOCAL:
            asks = _asks_for_none(condition, listing[index]) and one.argval not in settled.open
            if not asks or code not in settled.parameters or not _parameter(code, one.argval, one.offset):
                return False
        elif one.opname == "LOAD_ATTR":
            if before is None or before.opname not in _LOCAL:
                return False
        elif one.opname == "LOAD_GLOBAL" and one.argval not in ("getattr", "hasattr"):
            return False
    if attributes and not _parameter(code, code.co_varnames[0], listing[index].offset):
        return False
    if attributes <= settled.values:
        return True
    return attributes <= settled.values | settled.presence and _asks_for_none(condition, listing[index])


def _condition(listing: Sequence[dis.Instruction], index: int) -> list[dis.Instruction] | None:
    """The instructions that compute what a jump tests, if they are one straight line."""
    missing, found = 1, []
    for instruction in reversed(listing[:index]):
        if missing == 0:
            break
        if instruction.opcode in dis.hasjrel + dis.hasjabs:
            return None
        missing -= dis.stack_effect(instruction.opcode, instruction.arg)
        found.append(instruction)
    return found[::-1] if missing == 0 else None


def _asks_for_none(condition: Sequence[dis.Instruction], jump: dis.Instruction) -> bool:
    if jump.opname.endswith("NONE"):
        return True
    comparison = [one for one in condition if one.opname not in ("TO_BOOL", "UNARY_NOT")]
    return (
        len(comparison) > 2
        and comparison[-1].opname == "IS_OP"
        and comparison[-2].opname == "LOAD_CONST"
        and comparison[-2].argval is None
    )


def _parameter(code: types.CodeType, name: str, offset: int) -> bool:
    """Whether a local variable is a parameter that still has the value that it was given."""
    if name not in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        return False
    listing = _listing(code)
    backwards = any(one.opcode in dis.hasjrel + dis.hasjabs and one.argval <= one.offset for one in listing)
    stored = [
        one.offset for one in listing if one.opname.startswith(("STORE_FAST", "DELETE_FAST")) and name in one.argrepr
    ]
    return not stored or (not backwards and min(stored) > offset)
