"""Activation through torchtitan's own flag, for torchtitan 0.3.0 and later:

    --override.imports npu_patch.adapters.torchtitan.override.fused
    --override.imports 'npu_patch.adapters.torchtitan.override.fused={"ops": "default,-rope"}'

The flag imports this module before the model is built, and importing npu_patch activates it, as NPU_PATCH_OPS says
or with every op whose default is on.  torchtitan 0.2.2 has another flag, --experimental.custom_import npu_patch.
"""

from __future__ import annotations

from typing import TypeVar

from torchtitan.config.override import override
from torchtitan.tools.profiler import Profiler

import npu_patch

from ...settings import parse_ops

Config = TypeVar("Config")


@override(
    target=Profiler.Config,  # every trainer has one, and nobody replaces it: a model's own overrides stay possible
    description="fused operators of Ascend NPUs, patched in; the configuration stays as it is",
)
def fused(config: Config, ops: str | None = None) -> Config:
    """The configuration unchanged.

    Args:
        config: of the profiler.
        ops: what is on, in the grammar of NPU_PATCH_OPS; None: what the variable says.

    Raises:
        SettingsError (a ValueError): an unknown name or option.
    """
    if ops is not None:
        chosen = parse_ops(ops)
        for op, options in chosen.options.items():
            npu_patch.configure(op, **options)
        npu_patch.disable()
        if chosen.enabled:
            npu_patch.enable(*chosen.enabled)
    return config
