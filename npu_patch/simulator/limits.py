"""The SoCs that can be simulated and the limits their operator documents state.

Standard library only: the command line reads it before anything is loaded. Sources: the API documents of op-plugin
(``torch_npu.npu_*``) and the aclnn documents of ops-nn and ops-transformer; where they disagree the stricter one is
taken.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SoC:
    """One family of NPUs: how it is asked for, what torch_npu sees, and what its operators accept."""

    name: str
    #: What ``aclrtGetSocName`` answers.
    acl_name: str
    #: Head sizes of ``npu_rotary_mul`` must be at most this.
    rotary_head_dim: int
    #: Whether ``npu_rotary_mul`` takes any broadcastable table; the others know a list of layouts.
    rotary_any_broadcast: bool
    #: AI cores, which appear in one limit of ``npu_rotary_mul``.
    cores: int
    #: Whether the forward of ``npu_fusion_attention`` honours ``sink`` (torch_npu drops it on Ascend950).
    attention_sink: bool


SOCS = {
    soc.name: soc
    for soc in (
        SoC("Ascend910B", "Ascend910B1", 894, False, 24, True),
        SoC("Ascend910_93", "Ascend910_9391", 894, False, 24, True),
        SoC("Ascend950", "Ascend950PR_9589", 1024, True, 32, False),
    )
}
DEFAULT_SOC = "Ascend910B"
MAX_DEVICES = 16

# npu_rotary_mul, all but Ascend950
ROTARY_BATCH = 999
ROTARY_HEADS = 999
ROTARY_INTERLEAVE_BATCH_HEADS = 999
ROTARY_TABLE_GRADIENT_BATCH_HEADS = 1024

# npu_geglu, npu_cross_entropy_loss: the chips that their documents name
NOT_ON_950 = ("Ascend950",)

# npu_cross_entropy_loss
CROSS_ENTROPY_ROWS = 199999

# npu_fusion_attention
ATTENTION_HEAD_DIM = 768
ATTENTION_HEADS = 256
ATTENTION_TOKENS = 1 << 20
ATTENTION_COMPRESSED_MASK = 2048
ATTENTION_TND_BATCH = 2048

# npu_moe_token_permute and its family: ids and counts go through float32
MOE_TOP_K = 512
MOE_INDICES = (1 << 24) - 1
MOE_ROUTING_EXPERTS = 10240

# npu_grouped_matmul: last dimension, groups in one tensor, in a list of tensors
GMM_SIZE = 65536
GMM_GROUPS = 1024
GMM_LIST = 128

# npu_moe_gating_top_k, npu_moe_gating_top_k_softmax
MOE_EXPERTS = 2048
MOE_SOFTMAX_TOP_K = 1024

_current = SOCS[DEFAULT_SOC]


def current() -> SoC:
    """The SoC that this process simulates."""
    return _current


def select(name: str) -> SoC:
    """Makes ``name`` the SoC whose limits the kernels enforce."""
    global _current
    _current = SOCS[name]
    return _current
