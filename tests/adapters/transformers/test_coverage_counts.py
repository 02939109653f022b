"""How much of transformers is recognised, and as what: the counts of a census of its source by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter

import pytest
import transformers

from tests.packaging.environments import ROOT, clean_environment

NORMS = {
    "5.24.0": {
        "llama": 154,  # weight * n.to(x.dtype), T5's kind among them
        "fp32": 18,
        "gemma": 13,
        "gemma if group_size is None": 1,
        "fp32 if with_scale is True": 8,
        "none": 7,
        "llama, silu gate if activation is 'silu'": 5,
        "fp32, silu gate if activation is 'silu'": 4,
        "silu gate, llama in groups": 5,
        "fp32 in groups, silu gate if norm_before_gate is True": 1,
        "llama if bias is False and force_float32_reductions is True": 1,
    },
    "4.57.6": {
        "llama": 85,
        "fp32": 8,
        "gemma": 7,
        "none": 1,
        "llama, silu gate": 1,
        "silu gate, llama": 3,
        "silu gate, llama in groups": 1,
        "llama if bias is False and force_float32_reductions is True": 1,
    },
}
ROPES = {
    "5.24.0": {
        "half": 161,
        "half, partial": 25,
        "interleaved in, half out, table first half twice": 12,
        "interleaved": 10,
        "interleaved, partial": 2,
        "interleaved, table first half repeated": 7,
        "interleaved, partial, table first half repeated": 4,
        "interleaved, table repeated": 4,
        "interleaved, table repeated, complex table": 3,
        "interleaved, last channels, table repeated": 1,
        "half, last tokens": 3,
        "half, table twice": 2,
        "half, sine negated": 1,
    },
    "4.57.6": {
        "half": 74,
        "half, partial": 7,
        "interleaved in, half out": 2,
        "interleaved": 7,
        "interleaved, table first half repeated": 3,
        "interleaved, partial, table first half repeated": 3,
        "interleaved, table repeated": 2,
        "interleaved, table repeated, complex table": 3,
        "half, tables in sections": 3,
        "half, partial, tables in sections": 1,
        "interleaved, partial, table first half repeated, tables in sections": 1,
        "half, rows by position": 2,
        "half, last tokens": 1,
        "half, table twice": 2,
        "half, table twice, from angles": 1,
    },
}
NOT_RECOGNISED = {
    "5.24.0": {
        "AXK2GatedRMSNorm.forward": "calls other modules",
        "DeepseekV4UnweightedRMSNorm.forward": "computes no known norm",  # multiplies in the input's type
        "HYV4UnweightedRMSNorm.forward": "returns (2, 3, 1) for (2, 3, 16)",  # the factor alone
        "MuseSparkTextInputScaledRMSNorm.forward": "computes no known norm",  # scales before it normalises
        "apply_rotary_time_emb": "computes in float64",
        "RoFormerSelfAttention.apply_rotary_position_embeddings": "is a method, not a function of the module",
    },
    "4.57.6": {
        "FalconH1RMSNormGated.forward": "returns (4, 4, 32) for (4, 1, 32)",  # loses the dimension of one token
        "apply_rotary_unpadded": "takes (qkv, cos, sin, cu_seqlens, max_seqlen)",
    },
}


@pytest.mark.slow
@pytest.mark.skipif(transformers.__version__ not in NORMS, reason="another version than those that were counted")
def test_as_many_as_the_census_counts_are_recognised_each_as_what_it_is() -> None:
    version = transformers.__version__
    command = [sys.executable, "-m", "npu_patch", "coverage", "--library", "transformers", "--json"]
    environment = clean_environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    rows = json.loads(done.stdout)
    for op, expected in (("rms_norm", NORMS[version]), ("rope", ROPES[version])):
        found = Counter(
            row["meaning"].partition(" | ")[0] for row in rows if (row["op"], row["state"]) == (op, "recognised")
        )
        assert dict(found) == expected
    reasons = {row["target"].rpartition(":")[2]: row["reason"] for row in rows if row["state"] == "unrecognised"}
    assert NOT_RECOGNISED[version].items() <= reasons.items()
    assert all(row["reason"] for row in rows if row["state"] != "recognised")
