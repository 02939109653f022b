"""The ``npu::`` kernels of the simulated device, one file per family."""

from __future__ import annotations


def register() -> None:
    """Registers every kernel with torch_npu's operators. Initialises nothing. A second call does nothing."""
    from . import (  # noqa: F401  (importing declares the kernels)
        activation,
        attention,
        base,
        cast,
        grouped_matmul,
        loss,
        moe_gating,
        moe_permute,
        moe_routing,
        moe_routing_map,
        norm,
        repeat,
        rope,
    )

    base.register()
