"""`trainer_process` with few layers and few, narrow experts, so that a step takes a second."""

from __future__ import annotations

import dataclasses
from typing import Any

import npu_patch  # noqa: F401  # with which the simulated device comes, before torch

from . import moe_models, trainer_process
from .generation import CURRENT

FLAVORS = {"qwen3": "debugmodel_moe", "deepseek_v3": "debugmodel"}


def shrink_configs() -> None:
    from torchtitan.trainer import Trainer

    init = Trainer.__init__

    def shrunk(self: Any, config: Any) -> None:
        moe_models.shrink(moe_models.TRAINED)(config.model_spec.model)
        init(self, config)

    Trainer.__init__ = shrunk


def shrink_arguments() -> None:
    from torchtitan.models.deepseek_v3 import deepseekv3_args
    from torchtitan.models.qwen3 import qwen3_args

    for flavors, name in ((qwen3_args, "debugmodel_moe"), (deepseekv3_args, "debugmodel")):
        own = flavors[name]
        # On an NPU the trainer runs a loop over the experts; qwen3 alone does not ask for the device.
        experts = dataclasses.replace(
            own.moe_args,
            num_experts=moe_models.EXPERTS,
            top_k=min(own.moe_args.top_k, 3),
            use_grouped_mm=False,
        )
        flavors[name] = dataclasses.replace(
            own, n_layers=moe_models.TRAINED, moe_inter_dim=moe_models.HIDDEN, moe_args=experts
        )


if __name__ == "__main__":
    shrink_configs() if CURRENT else shrink_arguments()
    trainer_process.main()
