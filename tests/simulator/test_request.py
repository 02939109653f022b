from __future__ import annotations

import pytest

from npu_patch.simulator import parse_request
from npu_patch.simulator.request import from_environment


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1", (1, "Ascend910B")),
        (" 16 ", (16, "Ascend910B")),
        ("2:Ascend950", (2, "Ascend950")),
        ("4:ascend910_93", (4, "Ascend910_93")),
    ],
)
def test_request_is_a_number_and_maybe_a_soc(text: str, expected: tuple[int, str]) -> None:
    assert parse_request(text) == expected


@pytest.mark.parametrize("text", ["0", "17", "-1"])
def test_number_outside_1_to_16_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=f"cannot simulate {text} devices: expected a number from 1 to 16"):
        parse_request(text)


@pytest.mark.parametrize("text", ["", "two", "1.5", ":Ascend910B", "Ascend910B"])
def test_what_is_no_number_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="expected N or N:SOC, N a number of devices from 1 to 16"):
        parse_request(text)


@pytest.mark.parametrize(
    ("text", "near"), [("1:Ascend910", "Ascend910B"), ("1:Ascend95", "Ascend950"), ("1:910_93", "Ascend910_93")]
)
def test_unknown_soc_lists_the_known_ones_and_the_nearest(text: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"expected one of Ascend910B, Ascend910_93, Ascend950; did you mean {near}"):
        parse_request(text)


def test_environment_gives_the_request_or_one_910b(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NPU_PATCH_SIMULATE", raising=False)
    assert from_environment() == (1, "Ascend910B")
    monkeypatch.setenv("NPU_PATCH_SIMULATE", "3:Ascend950")
    assert from_environment() == (3, "Ascend950")
    monkeypatch.setenv("NPU_PATCH_SIMULATE", "none")
    with pytest.raises(ValueError, match=r"NPU_PATCH_SIMULATE=none: .*expected N"):
        from_environment()
