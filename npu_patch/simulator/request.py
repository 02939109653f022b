"""What to simulate: the grammar of ``NPU_PATCH_SIMULATE`` and of ``--simulate``."""

from __future__ import annotations

import difflib
import os

from .limits import DEFAULT_SOC, MAX_DEVICES, SOCS

VARIABLE = "NPU_PATCH_SIMULATE"


def check_devices(devices: int) -> int:
    """``devices`` if that many can be simulated, else ``ValueError``."""
    if isinstance(devices, bool) or not isinstance(devices, int) or not 1 <= devices <= MAX_DEVICES:
        raise ValueError(f"cannot simulate {devices!r} devices: expected a number from 1 to {MAX_DEVICES}")
    return devices


def check_soc(soc: str) -> str:
    """The canonical name of ``soc``, else ``ValueError`` with the known names and the nearest one."""
    by_lower = {name.lower(): name for name in SOCS}
    name = by_lower.get(soc.strip().lower())
    if name is None:
        near = difflib.get_close_matches(soc.strip().lower(), by_lower, n=1, cutoff=0.0)
        hint = f"; did you mean {by_lower[near[0]]}?" if near else ""
        raise ValueError(f"cannot simulate the SoC {soc!r}: expected one of {', '.join(SOCS)}{hint}")
    return name


def parse_request(text: str) -> tuple[int, str]:
    """``"N"`` or ``"N:SOC"`` as ``(devices, soc)``.

    N is 1 to 16; SOC one of Ascend910B (the default), Ascend910_93, Ascend950, in any case of letters.
    Raises ``ValueError`` that names what is wrong and what is expected.
    """
    number, colon, soc = text.strip().partition(":")
    try:
        devices = int(number)
    except ValueError:
        raise ValueError(
            f"cannot simulate {text!r}: expected N or N:SOC, N a number of devices from 1 to {MAX_DEVICES}"
        ) from None
    return check_devices(devices), check_soc(soc) if colon else DEFAULT_SOC


def from_environment() -> tuple[int, str]:
    """The request in ``NPU_PATCH_SIMULATE``, or one Ascend910B where it is unset or empty."""
    text = os.environ.get(VARIABLE, "").strip()
    if not text:
        return 1, DEFAULT_SOC
    try:
        return parse_request(text)
    except ValueError as error:
        raise ValueError(f"{VARIABLE}={text}: {error}") from None
