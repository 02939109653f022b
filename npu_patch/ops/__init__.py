"""Library-neutral fused operators, one file each: `unsupported(...) -> reason | None` and the call.

Nothing here knows a model library, and nothing imports torch_npu: operators are reached through `torch.ops.npu`.
"""
