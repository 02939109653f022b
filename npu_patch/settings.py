"""From NPU_PATCH_* variables and API arguments to one `Settings` value.  The grammar and its errors live only here.

    NPU_PATCH_OPS = token , token , …
    token         = "default" | "all" | "none" | name | "+"name | "-"name, each name may carry ":option=value"…

A list of plain names means exactly these ops.  `default`, `all` and `none` set the starting point; a list that
begins with an edit ("+router", "-rope") starts from `default`.  Tokens are read from left to right.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from .registry import GROUPS, OPS, Op, Option, OptionValue

OFF = frozenset({"", "0", "off", "none", "false", "no"})
ON = frozenset({"1", "on", "true", "yes"})
BY_NAME: Mapping[str, Op] = {op.name: op for op in OPS}
_ALIASES: Mapping[str, tuple[str, ...]] = {
    **{alias: (op.name,) for op in OPS for alias in op.aliases},
    **GROUPS,
}
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


class SettingsError(ValueError):
    """A name, option or value that the settings do not know; the message lists what they do know."""


@dataclass(frozen=True)
class Settings:
    """Everything that the environment decides.

    Args:
        enabled: the ops that are on.
        named: the ops that the user spelled out; one of them that is never reached is worth a warning.
        options: op → option → value, only what was set.
        strict: raise instead of falling back.
        report: None, "1" (table at exit) or a folder that takes one JSON file per process.
        log: level name of the `npu_patch` logger, None to leave it alone.
    """

    enabled: frozenset[str] = frozenset()
    named: frozenset[str] = frozenset()
    options: Mapping[str, Mapping[str, OptionValue]] = field(default_factory=dict)
    strict: bool = False
    report: str | None = None
    log: str | None = None


def default_ops() -> frozenset[str]:
    return frozenset(op.name for op in OPS if op.default)


def _nearest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""


def resolve(name: str) -> tuple[str, ...]:
    """The ops that a name, alias or group stands for.

    Raises:
        SettingsError: nothing has that name.
    """
    word = name.strip().lower()
    if word in BY_NAME:
        return (word,)
    if word in _ALIASES:
        return _ALIASES[word]
    known = [*BY_NAME, *GROUPS]
    if word in ("default", "all", "none") or word in ON:
        raise SettingsError(f"{name!r} is not an op: enable() and disable() without names mean all of them")
    if len(parts := re.split(r"[\s,;]+", word)) > 1 and all(part.lstrip("+-") in known for part in parts if part):
        raise SettingsError(
            f"{name!r} is several names: pass each on its own, or separate them by commas in NPU_PATCH_OPS"
        )
    raise SettingsError(f"unknown op {name!r}; known ops: {', '.join(known)}{_nearest(word, [*known, *_ALIASES])}")


def option(op: str, name: str) -> Option:
    """The declaration of one option.

    Raises:
        SettingsError: the op has no such option.
    """
    options = {o.name: o for o in BY_NAME[op].options}
    if name not in options:
        known = f"its options: {', '.join(options)}{_nearest(name, options)}" if options else "it has no options"
        raise SettingsError(f"op {op!r} has no option {name!r}; {known}")
    return options[name]


def option_value(op: str, name: str, value: object) -> OptionValue:
    """`value`, a string or already of the right type, as the type that the option declares.

    Raises:
        SettingsError: unknown option, wrong type, or not one of the option's choices.
    """
    declared = option(op, name)
    kind = type(declared.default)
    result: OptionValue | None = None
    if kind is bool:
        if isinstance(value, (bool, int)) and value in (0, 1):
            result = bool(value)
        elif isinstance(value, str) and value.lower() in ON | (OFF - {""}):
            result = value.lower() in ON
    elif isinstance(value, kind) and not isinstance(value, bool):
        result = value
    elif isinstance(value, (int, str)) and not isinstance(value, bool) and kind in (int, float):
        try:
            result = kind(value)
        except ValueError:
            result = None
    if result is None or (declared.choices and result not in declared.choices):
        expected = " or ".join(map(repr, declared.choices)) if declared.choices else f"a value of type {kind.__name__}"
        raise SettingsError(f"option {name!r} of op {op!r}: expected {expected}, got {value!r}")
    if kind in (int, float) and result < 0:  # type: ignore[operator]
        raise SettingsError(f"option {name!r} of op {op!r}: expected a value of at least 0, got {result!r}")
    return result


@dataclass(frozen=True)
class Selection:
    """What a NPU_PATCH_OPS value says."""

    enabled: frozenset[str]
    named: frozenset[str]
    options: Mapping[str, Mapping[str, OptionValue]]


def parse_ops(text: str) -> Selection:
    """Read a NPU_PATCH_OPS value.

    Raises:
        SettingsError: an unknown op or option, or a malformed token.
    """
    tokens = [token.strip() for token in text.split(",")]
    enabled: set[str] = set(default_ops()) if tokens[0][:1] in ("+", "-") else set()
    named: set[str] = set()
    options: dict[str, dict[str, OptionValue]] = {}
    for token in tokens:
        word = token.lower()
        if word in OFF:
            if word or len(tokens) == 1:  # an empty token between commas says nothing
                enabled.clear()
                named.clear()
        elif word == "default" or word in ON:
            enabled |= default_ops()
        elif word == "all":
            enabled |= set(BY_NAME)
        else:
            sign = word[0] if word[0] in "+-" else ""
            name, *assignments = token[len(sign) :].split(":")
            ops = resolve(name)
            for assignment in assignments:
                key, equals, value = assignment.partition("=")
                if not equals or sign == "-":
                    raise SettingsError(f"cannot read {token!r}: expected name, +name, -name or name:option=value")
                for op in ops:
                    options.setdefault(op, {})[key.strip()] = option_value(op, key.strip(), value.strip())
            if sign == "-":
                enabled -= set(ops)
                named -= set(ops)
            else:
                enabled |= set(ops)
                named |= set(ops)
    return Selection(frozenset(enabled), frozenset(named), options)


def _flag(name: str, text: str) -> bool:
    word = text.strip().lower()
    if word in OFF:
        return False
    if word in ON:
        return True
    raise SettingsError(f"{name}={text!r}: expected 1 or 0")


def from_environment(environ: Mapping[str, str] | None = None) -> Settings:
    """The settings that NPU_PATCH_* variables make; without NPU_PATCH_OPS the default ops are on.

    Raises:
        SettingsError: the message begins with the variable's name.
    """
    env = os.environ if environ is None else environ
    text = env.get("NPU_PATCH_OPS", "default")
    try:
        selection = parse_ops(text)
    except SettingsError as error:
        raise SettingsError(f"NPU_PATCH_OPS={text!r}: {error}") from None
    level = env.get("NPU_PATCH_LOG", "").strip().lower() or None
    if level is not None and level not in LOG_LEVELS:
        raise SettingsError(
            f"NPU_PATCH_LOG={level!r}: expected one of {', '.join(LOG_LEVELS)}{_nearest(level, LOG_LEVELS)}"
        )
    report = env.get("NPU_PATCH_REPORT", "").strip()
    if report.lower() in OFF:
        chosen: str | None = None
    else:
        chosen = "1" if report.lower() in ON else report
    return Settings(
        enabled=selection.enabled,
        named=selection.named,
        options=selection.options,
        strict=_flag("NPU_PATCH_STRICT", env.get("NPU_PATCH_STRICT", "")),
        report=chosen,
        log=level,
    )
