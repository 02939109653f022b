"""Rope functions are recognised whatever form their tables have."""

from __future__ import annotations

import pytest

from npu_patch.discovery import NotRecognised, recognise_rotary

from . import rope_forms as functions

FORMS = {
    functions.rows: ("rows", "half", "given", 2),
    functions.last_tokens: ("patches", "half", "given", 2),
    functions.by_position: ("positions, dim", "half", "given", 2),
    functions.in_sections: ("sections, dim", "half", "given", 2),
    functions.complex_heads_first: ("complex", "interleave", "repeated", 2),
    functions.complex_tokens_first: ("complex", "interleave", "repeated", 2),
    functions.complex_rows: ("complex rows", "interleave", "repeated", 2),
    functions.ready_tables: ("ready tables", "half", "given", 1),
    functions.ready_half_tables: ("ready tables", "half", "twice", 1),
    functions.sine_first: ("sine first", "interleave", "repeated", 1),
    functions.single_heads_first: ("tables", "half", "given", 1),
    functions.single_with_positions: ("unused positions, dim", "half", "given", 1),
    functions.of_angles: ("angles", "half", "twice", 1),
    functions.query_alone: ("dim", "half", "given", 2),
    functions.backwards: ("dim", "half", "given", 2),
    functions.last_channels: ("dim", "interleave", "repeated", 1),
}


@pytest.mark.parametrize("function", FORMS, ids=lambda f: f.__name__)
def test_a_form_is_recognised(function):
    meaning = recognise_rotary(function)
    assert (meaning.form, meaning.mode, meaning.table, meaning.tensors) == FORMS[function]
    assert meaning.negated == (function is functions.backwards)
    assert (meaning.partial, meaning.trailing) == (
        (True, True) if function is functions.last_channels else (False,) * 2
    )


@pytest.mark.parametrize("function", functions.IMPOSTORS, ids=lambda f: f.__name__)
def test_an_impostor_is_refused(function):
    with pytest.raises(NotRecognised) as error:
        recognise_rotary(function)
    assert str(error.value)
