"""Gated norms are recognised by what they compute: the order, where it rounds, the activation, the groups."""

from __future__ import annotations

import pytest

from npu_patch.discovery import NotRecognised, recognise_gated_norm, recognise_norm

from . import gated as classes


@pytest.mark.parametrize(
    ("cls", "formula", "groups"),
    [
        (classes.GatedRMSNorm, "llama, silu gate", ()),
        (classes.GateFirstRMSNorm, "silu gate, llama", ()),
        (classes.GateFirstGroupedRMSNorm, "silu gate, llama in groups", (("group_size", "group size"),)),
    ],
)
def test_a_gated_norm_is_recognised(cls, formula, groups):
    (meaning,) = recognise_gated_norm(cls)
    assert (meaning.formula, meaning.weight, meaning.eps) == (formula, "weight", "variance_epsilon")
    assert (meaning.groups, meaning.conditions) == (groups, ())


def test_an_activation_by_name_and_a_flag_are_conditions():
    found = {m.conditions[0][1]: m.formula for m in recognise_gated_norm(classes.ActivatedGateRMSNorm)}
    assert found == {"silu": "fp32, silu gate", "swish": "fp32, silu gate", "sigmoid": "fp32, sigmoid gate"}
    found = {m.conditions[0][1]: m.formula for m in recognise_gated_norm(classes.EitherOrderRMSNorm)}
    assert (found[True], found[False]) == ("fp32 in groups, silu gate", "silu gate, fp32 in groups")


@pytest.mark.parametrize("cls", classes.IMPOSTORS)
def test_an_impostor_is_refused(cls):
    with pytest.raises(NotRecognised) as error:
        recognise_gated_norm(cls)
    assert str(error.value)
    with pytest.raises(NotRecognised, match="its forward takes"):
        recognise_norm(cls)
