"""Single calls of patched gated MLPs: activations, guards, packed and separate projections."""

from __future__ import annotations

import importlib
import inspect

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import npu_patch
from npu_patch import functions
from npu_patch.adapters.transformers import mlp
from npu_patch.discovery.mlp import recognise_activation
from npu_patch.registry import Target
from npu_patch.sites import Site

from ...ops.tools import Ran, compiled
from ...support.numerics import relative_error
from .call import found

HIDDEN, INNER = 8, 12


class Packed(nn.Module):
    def __init__(self, act: nn.Module | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_up_proj = nn.Linear(HIDDEN, 2 * INNER, bias=False)
        self.down_proj = nn.Linear(INNER, HIDDEN)
        self.act_fn = act or nn.SiLU()
        self.to("npu", dtype)


class PackedMLP(Packed):
    def forward(self, hidden_states):
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(up * self.act_fn(gate))


class UpFirstMLP(Packed):
    def forward(self, x):
        up, gate = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class Separate(nn.Module):
    def __init__(self, act: nn.Module | None = None, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gate_proj, self.up_proj = (nn.Linear(HIDDEN, INNER, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(INNER, HIDDEN)
        self.act_fn = act or nn.SiLU()
        self.drop = nn.Identity()
        self.to("npu", dtype)


class SeparateMLP(Separate):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class UpBeforeGateMLP(Separate):
    def forward(self, x):
        up = self.up_proj(x)
        return self.down_proj(self.drop(up * F.silu(self.gate_proj(x))))


def site_of(cls, **options):
    """(what the engine would install, its counters)."""
    (target,) = found(mlp.find, **{cls.__name__: cls}).values()
    assert isinstance(target, Target), target
    site = Site(target.name, target.op, options)
    return functions.clone(target.adapter(cls.forward, site), cls.forward), site


def inputs(*shape, dtype=torch.float32, seed=2):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).to("npu").requires_grad_()


def gradients(function, module, x):
    y = function(module, x)
    g = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y.dtype).to("npu")
    return [y.detach(), *torch.autograd.grad(y, [x, *module.parameters()], g)]


# ---- single calls ----------------------------------------------------------------------------------------------------


ACTIVATIONS = [nn.SiLU(), nn.GELU(), nn.GELU("tanh")]


@pytest.mark.parametrize("shape", [(7, HIDDEN), (2, 5, HIDDEN), (HIDDEN,)])
@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("cls", [PackedMLP, UpFirstMLP])
def test_float32_result_and_gradients_are_the_originals(cls, act, shape):
    forward, site = site_of(cls)
    module, x = cls(act), inputs(*shape)
    for ours, theirs in zip(gradients(forward, module, x), gradients(cls.forward, module, x), strict=True):
        assert ours.dtype is theirs.dtype
        assert relative_error(ours, theirs) < 2e-6
    swiglu_of_the_second_half = cls is UpFirstMLP and isinstance(act, nn.SiLU)
    assert site.hits == (not swiglu_of_the_second_half)
    assert site.fallbacks == ({"npu_swiglu activates the first half": 1} if swiglu_of_the_second_half else {})


def test_an_activation_that_is_no_silu_never_runs_as_swiglu():
    forward, site = site_of(PackedMLP)
    x = inputs(3, HIDDEN)
    for act, operator in ((nn.GELU("tanh"), "npu_geglu"), (nn.GELU(), "npu_geglu"), (nn.SiLU(), "npu_swiglu")):
        with Ran() as ran:
            forward(PackedMLP(act), x)
        assert {name for name in ran.counts if "glu" in name} == {operator}
    for act in (nn.ReLU(), nn.Tanh(), nn.Sigmoid()):
        module = PackedMLP(act)
        assert torch.equal(forward(module, x), PackedMLP.forward(module, x))
        assert site.fallbacks[f"the activation {type(act).__name__} is not known"] == 1


class MySiLU(nn.Module):
    def forward(self, x):
        return F.silu(x) * 2


def test_an_activation_is_known_by_its_class_and_attributes_and_must_be_untouched():
    forward, site = site_of(PackedMLP)
    x = inputs(3, HIDDEN)

    def falls_back(act, reason):
        module = PackedMLP(act)
        before = sum(site.fallbacks.values())
        assert torch.equal(forward(module, x), PackedMLP.forward(module, x))
        assert site.fallbacks[reason] == 1
        assert sum(site.fallbacks.values()) == before + 1

    falls_back(MySiLU(), "the activation MySiLU is not known")
    odd = nn.GELU()
    odd.approximate = "tanh "
    with pytest.raises(RuntimeError):  # not ours to mend
        forward(PackedMLP(odd), x)
    site.fallbacks.clear()
    hooked = nn.SiLU()
    calls = []
    hooked.register_forward_hook(lambda *_: calls.append(1))
    falls_back(hooked, "the activation has hooks")
    assert calls == [1, 1]
    bound = nn.SiLU()
    bound.forward = lambda x: x
    falls_back(bound, "the forward of the activation was replaced")
    site.fallbacks.clear()
    stock = nn.SiLU.forward
    nn.SiLU.forward = lambda self, x: x * 3
    try:
        falls_back(nn.SiLU(), "the forward of the activation was replaced")
    finally:
        nn.SiLU.forward = stock


@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("silu", "npu_swiglu"),
        ("swish", "npu_swiglu"),
        ("gelu", "npu_geglu"),
        ("gelu_pytorch_tanh", "npu_geglu"),
        ("gelu_new", None),
        ("quick_gelu", None),
        ("relu", None),
        ("gelu_10", None),
    ],
)
def test_the_librarys_activations(name, operator):
    from transformers.activations import ACT2FN

    forward, site = site_of(PackedMLP)
    module, x = PackedMLP(ACT2FN[name]), inputs(3, HIDDEN)
    with Ran() as ran:
        y = forward(module, x)
    assert {n for n in ran.counts if "glu" in n} == ({operator} if operator else set())
    assert site.hits == bool(operator)
    assert relative_error(y, PackedMLP.forward(module, x)) < 2e-6


def test_sub_modules_are_called_once_each_and_in_order():
    forward, site = site_of(PackedMLP)

    class Adapted(nn.Linear):  # adapters and quantised layers compute something else than their weight says
        def forward(self, x):
            return super().forward(x) * 2 + 1

    for x, hits in ((inputs(3, HIDDEN), 1), (inputs(3, HIDDEN).double(), 1)):
        module = PackedMLP(dtype=x.dtype)
        torch.manual_seed(1)
        module.gate_up_proj = Adapted(HIDDEN, 2 * INNER).to("npu", x.dtype)
        calls = []
        for name in ("gate_up_proj", "down_proj"):
            getattr(module, name).register_forward_hook(lambda *_, name=name, calls=calls: calls.append(name))
        y = forward(module, x)
        assert calls == ["gate_up_proj", "down_proj"]
        assert relative_error(y, PackedMLP.forward(module, x)) < 2e-6
        assert site.hits == hits
    assert site.fallbacks == {"projections of type float64": 1}


class Subclass(torch.Tensor):
    pass


def test_other_devices_subclasses_and_transforms_run_the_original():
    forward, site = site_of(PackedMLP)
    module, x = PackedMLP(), inputs(3, HIDDEN)
    on_cpu = PackedMLP().cpu()
    assert torch.equal(forward(on_cpu, x.cpu()), PackedMLP.forward(on_cpu, x.cpu()))
    ours, theirs = (torch.vmap(lambda row, f=f: f(module, row))(x) for f in (forward, PackedMLP.forward))
    assert torch.equal(ours, theirs)
    forward(module, x.detach().as_subclass(Subclass))
    assert site.hits == 0
    assert len(site.fallbacks) == 3


def test_the_signature_is_the_originals():
    forward, _ = site_of(PackedMLP)
    assert inspect.signature(forward) == inspect.signature(PackedMLP.forward)
    module, x = PackedMLP(), inputs(3, HIDDEN)
    assert torch.equal(forward(module, hidden_states=x), forward(module, x))


def test_autocast_keeps_dtypes():
    forward, site = site_of(PackedMLP)
    module, x = PackedMLP(), inputs(3, HIDDEN)
    with torch.autocast("npu", torch.bfloat16):
        ours, theirs = forward(module, x), PackedMLP.forward(module, x)
    assert ours.dtype is theirs.dtype is torch.bfloat16
    assert relative_error(ours, theirs) < 2e-2
    assert (site.hits, site.fallbacks) == (1, {})


def test_fullgraph_compilation_keeps_the_operator_for_silu():
    forward, site = site_of(PackedMLP)
    x = inputs(3, HIDDEN)
    for act, kept in ((nn.SiLU(), True), (nn.GELU(), False)):
        module = PackedMLP(act)
        traced, operators = compiled(lambda x, module=module: forward(module, x))
        ours = torch.autograd.grad(traced(x).square().sum(), x)
        theirs = torch.autograd.grad(PackedMLP.forward(module, x).square().sum(), x)
        torch.testing.assert_close(ours, theirs)
        assert any("glu" in name for name in operators) == kept
    assert site.compiled
    assert (site.hits, site.fallbacks) == (0, {})


# ---- separate projections --------------------------------------------------------------------------------------------


def test_separate_projections_are_left_alone_unless_asked_for():
    llama = importlib.import_module("transformers.models.llama.modeling_llama")
    original = llama.LlamaMLP.forward
    name = "transformers.models.llama.modeling_llama:LlamaMLP.forward"
    with npu_patch.scope("swiglu"):
        assert llama.LlamaMLP.forward is original
        (row,) = (row for row in npu_patch.status() if row.target == name)
        assert (row.state, row.reason) == ("off", "needs the option separate: swiglu:separate=1")
        try:
            npu_patch.configure("swiglu", separate=True)
            assert llama.LlamaMLP.forward is not original
        finally:
            npu_patch.configure("swiglu", separate=False)
        assert llama.LlamaMLP.forward is original


@pytest.mark.parametrize("cls", [SeparateMLP, UpBeforeGateMLP])
def test_separate_projections_are_joined_in_training(cls):
    forward, site = site_of(cls, separate=True)
    module, x = cls(), inputs(2, 5, HIDDEN)
    with Ran() as ran:
        ours = gradients(forward, module, x)
    assert (ran["npu_swiglu"], ran["npu_swiglu_backward"]) == (1, 1)
    for mine, theirs in zip(ours, gradients(cls.forward, module, x), strict=True):
        assert relative_error(mine, theirs) < 2e-6
    with torch.no_grad():
        forward(module, x)
    assert site.hits == 1
    assert site.fallbacks == {"joining gate and up moves more bytes without a gradient": 1}


def test_separate_projections_of_two_types_are_multiplied_as_the_original_does():
    forward, site = site_of(SeparateMLP, separate=True)
    module, x = SeparateMLP(), inputs(3, HIDDEN)
    module.up_proj.register_forward_hook(lambda _, __, out: out.bfloat16().float().half())
    assert torch.equal(forward(module, x), SeparateMLP.forward(module, x))
    assert site.fallbacks == {"gate and up differ in type, shape or device": 1}


@pytest.mark.parametrize("act", ACTIVATIONS, ids=str)
def test_joining_moves_no_more_bytes_forward_and_backward_and_more_without_backward(act):
    from npu_patch.ops import swiglu

    forward, _ = site_of(SeparateMLP, separate=True)
    kind = recognise_activation(act)

    def joined(module, x):
        both = torch.cat((module.gate_proj(x), module.up_proj(x)), -1)
        return module.down_proj(swiglu.gated(both, kind))

    def count(function, backward):
        module, x = SeparateMLP(act, torch.bfloat16), inputs(64, HIDDEN, dtype=torch.bfloat16)
        parameters = list(module.parameters())
        with npu_patch.simulator.trace(parameters) as trace, torch.set_grad_enabled(backward):
            y = function(module, x).sum()
            if backward:
                y.backward()
        return trace, trace.bytes_read + trace.bytes_written

    (ours, moved), (theirs, stock) = count(forward, True), count(SeparateMLP.forward, True)
    assert moved < stock if kind == "silu" else moved == stock
    assert ours.launches < theirs.launches
    assert ours.saved_bytes <= theirs.saved_bytes
    assert count(joined, False)[1] > count(SeparateMLP.forward, False)[1] == count(forward, False)[1]
