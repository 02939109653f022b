"""Recognising what the classes and functions of a model library compute, by running them on small CPU inputs.

Nothing here knows a model library, an operator or a model name.  A recogniser takes the original, runs it inside
`bracket.quiet()` and returns what it means, or raises `NotRecognised` with the reason.
"""

from __future__ import annotations

from .bracket import NotRecognised, foreign_code, reason_of
from .gated_norms import recognise_gated_norm
from .norms import NormMeaning, is_norm_class, recognise_norm, says_rms
from .outside import joined
from .rotary import RotaryMeaning, recognise_rotary

__all__ = [
    "NormMeaning",
    "NotRecognised",
    "RotaryMeaning",
    "foreign_code",
    "is_norm_class",
    "joined",
    "reason_of",
    "recognise_gated_norm",
    "recognise_norm",
    "recognise_rotary",
    "says_rms",
]
