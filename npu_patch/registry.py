"""What can be patched, as data.  This file imports nothing but the standard library.

An `Op` is one row of the enable table.  A `Target` is one place in a foreign module that an op replaces; a
`Library` says which modules of a package are worth looking at and which finder turns such a module into
targets.  Adapters and finders are named by strings ("module:attribute"), so that reading the table imports neither
torch nor a model library.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

OptionValue = bool | int | float | str


@dataclass(frozen=True)
class Option:
    """A setting of one op: `NPU_PATCH_OPS=gmm:pack=1` or `configure("gmm", pack=True)`."""

    name: str
    default: OptionValue
    summary: str
    choices: tuple[OptionValue, ...] = ()


@dataclass(frozen=True)
class Op:
    """One row of the enable table."""

    name: str
    summary: str
    operators: tuple[str, ...]
    default: bool = True
    options: tuple[Option, ...] = ()
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """One place that an op replaces.

    Args:
        op: name of the op.
        library: root package of the model library.
        module: full name of the module that is written to.
        path: attribute path inside the module ("LlamaRMSNorm.forward", "apply_rotary_pos_emb"), or for a registry entry
            "ATTRIBUTE[key]" where ATTRIBUTE is a mutable mapping of the module.
        adapter: `adapter(original, site) -> function`; called once per installation.
        meaning: what the original was recognised as.
        rebind: package prefixes in which names bound by `from module import f` follow the change.
        only_if: name of a bool option of the op; without it the target is left alone.
        supporting: a part of an op that computes nothing itself, such as a mask builder: it has no calls to count.
        objects: the original may be a callable object, bound to a name of the module; elsewhere it must be a function.
        parts: what took part in what was recognised: each has a `name`, says whether it `changed()`, and what is there
            now, `current()`.
    """

    op: str
    library: str
    module: str
    path: str
    adapter: Callable[[Any, Any], Callable[..., Any]] = field(compare=False)
    meaning: str = ""
    rebind: tuple[str, ...] = ()
    objects: bool = False
    only_if: str = ""
    supporting: bool = False
    parts: tuple[Any, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """The target as users see it."""
        return f"{self.module}:{self.path}"

    @property
    def key(self) -> tuple[str, str]:
        return (self.module, self.path)


@dataclass(frozen=True)
class Unrecognised:
    """A candidate that a finder looked at and left alone, with the reason."""

    op: str
    library: str
    module: str
    path: str
    reason: str

    @property
    def name(self) -> str:
        return f"{self.module}:{self.path}"

    @property
    def key(self) -> tuple[str, str]:
        return (self.module, self.path)


Finder = Callable[[Any], Iterable["Target | Unrecognised"]]


@dataclass(frozen=True)
class Library:
    """A model library: which of its modules are looked at, and how.

    Args:
        name: root package.
        modules: "module:function" naming a function without arguments that lists the full names of the modules to
        look at.
            It runs when the root package is found, before it is imported.
        finders: op name → "module:function" naming a function `finder(module) -> iterable of Target | Unrecognised`.
        loader: "module:path" of the library's function that loads modules past the import system, if it has one.
        loaded: "module:function" naming a function that lists them: name → anything that changes with their content.
    """

    name: str
    modules: str
    finders: Mapping[str, str]
    loader: str = ""
    loaded: str = ""


def load(reference: str) -> Any:
    """The object that "module:attribute" names."""
    module, _, attribute = reference.partition(":")
    return getattr(importlib.import_module(module), attribute)


OPS: tuple[Op, ...] = (
    Op(
        name="rms_norm",
        summary="root mean square normalisation",
        operators=("npu_rms_norm",),
        aliases=("npu_rms_norm",),
    ),
    Op(
        name="rope",
        summary="rotary position embedding of query and key",
        operators=("npu_rotary_mul",),
        options=(
            Option(
                "tables",
                "float32",
                "torchtitan: float32 rotates in float32, as its models do; input rotates in the type of query and key, "
                "with tables rounded to it: fewer launches and bytes, more rounding",
                choices=("float32", "input"),
            ),
        ),
        aliases=("npu_rope", "npu_rotary_mul"),
    ),
    Op(
        name="attention",
        summary="scaled dot product attention: causal, padded, windowed, per document, grouped queries",
        operators=("npu_fusion_attention", "npu_fusion_attention_v3"),
        options=(
            Option(
                "dense_mask_limit",
                8192,
                "longest sequence for which a mask without a compact form is written out as a dense mask",
            ),
        ),
        aliases=("npu_fusion_attention", "flash_attention"),
    ),
    Op(
        name="swiglu",
        summary="gated activation of an MLP: silu(gate) * up, gelu(gate) * up",
        operators=("npu_swiglu", "npu_geglu"),
        options=(
            Option("separate", False, "where gate and up are two projections, too: joins their results in training"),
        ),
        aliases=("npu_swiglu", "npu_geglu"),
    ),
    Op(
        name="cross_entropy",
        summary="cross entropy of float32 logits and class indices",
        operators=("npu_cross_entropy_loss",),
        aliases=("npu_cross_entropy_loss",),
    ),
    Op(
        name="gmm",
        summary="grouped matrix multiplication of the experts of a mixture of experts",
        operators=("npu_grouped_matmul",),
        options=(
            Option(
                "main_grad",
                False,
                "in transformers 5, gradients of 16-bit parameters that have a float32 `main_grad` are summed in it",
            ),
        ),
        aliases=("npu_gmm", "npu_grouped_matmul", "grouped_matmul"),
    ),
    Op(
        name="permute",
        summary="tokens sorted by expert, and the experts' results weighted and summed back",
        operators=("npu_moe_token_permute", "npu_moe_token_unpermute"),
        aliases=("npu_permute", "npu_moe_token_permute", "npu_moe_token_unpermute"),
    ),
    Op(
        name="router",
        summary="scores and choice of experts",
        operators=("npu_moe_gating_top_k", "npu_moe_gating_top_k_softmax_v2"),
        default=False,
        aliases=(
            "npu_router",
            "npu_moe_gating_top_k",
            "npu_moe_gating_top_k_softmax",
            "npu_moe_gating_top_k_softmax_v2",
        ),
    ),
)

GROUPS: Mapping[str, tuple[str, ...]] = {"moe": ("router", "permute", "gmm")}
"""Names that stand for several ops."""

LIBRARIES: tuple[Library, ...] = (
    Library(
        name="torchtitan",
        modules="npu_patch.adapters.torchtitan:modules",
        finders={
            "rms_norm": "npu_patch.adapters.torchtitan.norms:find",
            "rope": "npu_patch.adapters.torchtitan.rope:find",
            "attention": "npu_patch.adapters.torchtitan.attention:find",
            "swiglu": "npu_patch.adapters.torchtitan.mlp:find",
            "cross_entropy": "npu_patch.adapters.torchtitan.loss:find",
            "gmm": "npu_patch.adapters.torchtitan.experts:find",
            "permute": "npu_patch.adapters.torchtitan.dispatch:find",
            "router": "npu_patch.adapters.torchtitan.routers:find",
        },
    ),
    Library(
        name="transformers",
        modules="npu_patch.adapters.transformers:modules",
        finders={
            "rms_norm": "npu_patch.adapters.transformers.norms:find",
            "rope": "npu_patch.adapters.transformers.rope:find",
            "attention": "npu_patch.adapters.transformers.attention:find",
            "swiglu": "npu_patch.adapters.transformers.mlp:find",
            "cross_entropy": "npu_patch.adapters.transformers.loss:find",
            "gmm": "npu_patch.adapters.transformers.experts:find",
            "permute": "npu_patch.adapters.transformers.dispatch:find",
            "router": "npu_patch.adapters.transformers.routers:find",
        },
        loader="transformers.dynamic_module_utils:get_class_in_module",
        loaded="npu_patch.adapters.transformers.remote_code:loaded",
    ),
)
