"""Routers are told by what they choose and weigh; what does anything else is left alone."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from npu_patch.discovery import NotRecognised
from npu_patch.discovery.routers import recognise_router

LIMIT = 3


class Sigmoid(nn.Module):
    """The common form, in parts that the classes below change."""

    eps = 1e-20

    def forward(self, tokens):
        rows = tokens.reshape(-1, self.hidden_dim)
        logits = F.linear(rows.float(), self.weight.float())
        scores = logits.sigmoid()
        experts = torch.topk(scores + self.score_correction_bias, self.top_k, dim=-1, sorted=False)[1]
        weights = scores.gather(1, experts)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return logits, weights * self.scaling, experts


def router(function, **more):
    """A class with this forward."""
    return type("Router", (nn.Module,), {"forward": function, "__module__": __name__, **more})


def refused(function, **more):
    with pytest.raises(NotRecognised) as error:
        recognise_router(router(function, **more))
    return str(error.value)


# ---- what is recognised ----------------------------------------------------------------------------------------------


def test_the_common_form():
    meaning = recognise_router(Sigmoid)
    assert (meaning.projection, meaning.choice.score, meaning.choice.eps) == ("float32", "sigmoid", 1e-20)
    assert meaning.roles["divides"] == "norm_topk_prob"
    assert meaning.roles["scale"] == "scaling"
    assert meaning.correction == "score_correction_bias"
    assert (meaning.outputs, meaning.flat, meaning.dims) == (("logits", "weights", "experts"), True, (2, 3))
    assert str(meaning) == "sigmoid + bias, divided if norm_topk_prob, scaled"


@pytest.mark.parametrize("eps", [0.0, 1e-20, 1e-15, 1e-9, 1e-6])
def test_the_number_beside_the_sum_is_found(eps):
    def forward(self, x):
        scores = F.linear(x.float(), self.weight.float()).sigmoid()
        weights, experts = scores.topk(self.top_k)
        return experts, weights / (weights.sum(-1, keepdim=True) + eps)

    forward = _with_constant(forward, eps)
    meaning = recognise_router(router(forward))
    assert meaning.choice.eps == pytest.approx(eps, rel=1e-3)
    assert (meaning.outputs, meaning.correction) == (("experts", "weights"), None)


def _with_constant(function, value):
    """The function with its free variable written into it: what a closure holds may change."""
    source = (
        "def forward(self, x):\n"
        "    scores = F.linear(x.float(), self.weight.float()).sigmoid()\n"
        "    weights, experts = scores.topk(self.top_k)\n"
        f"    return experts, weights / (weights.sum(-1, keepdim=True) + {value!r})\n"
    )
    names = {"F": F, "torch": torch, "__name__": __name__}
    exec(source, names)
    return names["forward"]


def test_names_say_nothing():
    def forward(self, x):
        scores = F.linear(x, self.a).softmax(-1, dtype=torch.float32)
        weights, experts = scores.topk(self.b, dim=-1)
        return experts, (weights * self.c).to(x.dtype)

    meaning = recognise_router(router(forward))
    assert (meaning.weight, meaning.roles) == ("a", {"top_k": "b", "scale": "c"})
    assert meaning.choice.score == "softmax"
    assert meaning.choice.divides is False


def test_names_that_mislead_do_not():
    def forward(self, x):
        scores = F.linear(x, self.weight).softmax(-1, dtype=torch.float32)
        weights, experts = scores.topk(self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights * weights
        return experts, weights

    assert "computes no known choice" in refused(forward)


@pytest.mark.parametrize("best", ["top2", "max"])
def test_how_groups_count_and_what_hides_the_others(best):
    def with_two(self, x):
        logits = F.linear(x.reshape(-1, self.hidden_dim).float(), self.weight.float())
        scores = logits.softmax(-1)
        parts = scores.view(-1, self.n_group, self.num_experts // self.n_group)
        of_group = parts.topk(2, -1)[0].sum(-1)
        kept = torch.zeros_like(of_group).scatter_(1, of_group.topk(self.topk_group, -1)[1], 1).bool()
        choice = parts.masked_fill(~kept.unsqueeze(-1), 0.0).flatten(1)
        experts = choice.topk(self.top_k, -1)[1]
        return logits, scores.gather(1, experts), experts

    def with_one(self, x):
        logits = F.linear(x.reshape(-1, self.hidden_dim).float(), self.weight.float())
        scores = logits.softmax(-1)
        parts = scores.view(-1, self.n_group, self.num_experts // self.n_group)
        of_group = parts.amax(-1)
        kept = torch.zeros_like(of_group).scatter_(1, of_group.topk(self.topk_group, -1)[1], 1).bool()
        choice = parts.masked_fill(~kept.unsqueeze(-1), 0.0).flatten(1)
        experts = choice.topk(self.top_k, -1)[1]
        return logits, scores.gather(1, experts), experts

    meaning = recognise_router(router(with_two if best == "top2" else with_one))
    assert meaning.choice.of_group == best
    assert (meaning.roles["groups"], meaning.roles["kept"]) == ("n_group", "topk_group")


def test_a_zero_in_place_of_minus_infinity_is_noticed_where_scores_may_be_negative():
    def forward(self, x):
        scores = F.linear(x.reshape(-1, self.hidden_dim).float(), self.weight.float()).sigmoid()
        parts = (scores + self.correction).view(-1, self.n_group, self.num_experts // self.n_group)
        of_group = parts.topk(2, -1)[0].sum(-1)
        kept = torch.zeros_like(of_group).scatter_(1, of_group.topk(self.topk_group, -1)[1], 1).bool()
        experts = parts.masked_fill(~kept.unsqueeze(-1), 0.0).flatten(1).topk(self.top_k, -1)[1]
        return experts, scores.gather(1, experts)

    assert recognise_router(router(forward)).choice.hidden == 0.0


def test_a_gate_that_is_a_module_is_called_as_it_is():
    def plain(self, x):
        scores = F.softmax(self.gate(x).float(), dim=-1)
        weights, experts = scores.topk(self.top_k, dim=-1)
        return weights, experts, scores

    def in_float32(self, x):
        with torch.autocast(device_type=x.device.type, dtype=torch.float32):
            logits = self.gate(x)
        scores = F.softmax(logits, dim=-1)
        weights, experts = scores.topk(self.top_k, dim=-1)
        return weights, experts, scores

    meaning = recognise_router(router(plain))
    assert (meaning.projection, meaning.weight, meaning.autocast, meaning.half) == ("module", "gate", False, True)
    assert (meaning.outputs, meaning.flat) == (("weights", "experts", "scores"), False)
    meaning = recognise_router(router(in_float32))
    assert (meaning.autocast, meaning.half) == (True, False)


def test_a_method_without_a_gradient_takes_part():
    def forward(self, x):
        logits = F.linear(x.reshape(-1, self.hidden_dim).float(), self.weight.float())
        scores = logits.sigmoid()
        experts = self.best(scores)
        return logits, scores.gather(1, experts), experts

    @torch.no_grad()
    def best(self, scores):
        return (scores + self.correction_bias).topk(self.top_k, dim=-1)[1]

    cls = router(forward, best=best)
    assert [name for name, _ in recognise_router(cls).methods] == ["best"]


# ---- what is not -----------------------------------------------------------------------------------------------------


def _base(change):
    """A forward in which one step is another one."""
    lines = {
        "rows": "rows = x.reshape(-1, self.hidden_dim)",
        "logits": "logits = F.linear(rows.float(), self.weight.float())",
        "scores": "scores = logits.sigmoid()",
        "choice": "choice = scores + self.correction_bias",
        "experts": "experts = choice.topk(self.top_k, dim=-1)[1]",
        "weights": "weights = scores.gather(1, experts)",
        "divided": "weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)",
        "scaled": "weights = weights * self.scaling",
        "result": "return logits, weights, experts",
    }
    lines |= change
    names = {"F": F, "torch": torch, "__name__": __name__, "LIMIT": LIMIT}
    exec("def forward(self, x):\n" + "".join(f"    {line}\n" for line in lines.values()), names)
    return names["forward"]


def test_the_form_below_is_recognised_before_it_is_changed():
    assert recognise_router(router(_base({}))).choice.score == "sigmoid"


@pytest.mark.parametrize(
    "change",
    [
        {"scores": "scores = logits.tanh()"},
        {"scores": "scores = logits.sigmoid().sqrt()"},
        {"logits": "logits = F.linear(rows.float(), self.weight.float()) * 2.0"},
        {"logits": "logits = F.linear(rows.float(), self.weight.float()).clamp(-5, 5)"},
        {"choice": "choice = scores * self.correction_bias"},
        {"choice": "choice = logits + self.correction_bias"},
        {"choice": "choice = scores - self.correction_bias"},
        {"experts": "experts = choice.topk(self.top_k, dim=-1, largest=False)[1]"},
        {"weights": "weights = choice.gather(1, experts)"},
        {"weights": "weights = scores.detach().gather(1, experts)"},
        {"weights": "weights = scores.gather(1, experts.flip(-1))"},
        {"divided": "weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-3)"},
        {"divided": "weights = weights / weights.amax(-1, keepdim=True)"},
        {"divided": "weights = weights / weights.square().sum(-1, keepdim=True).sqrt()"},
        {"divided": "weights = weights / (scores.sum(-1, keepdim=True) + 1e-20)"},
        {"scaled": "weights = weights + self.scaling"},
        {"result": "return logits, weights, experts.int()"},
        {"result": "return logits, weights.sort(-1)[0], experts"},
        {"result": "return logits.softmax(-1), weights, experts"},
        {"result": "return logits.detach(), weights, experts"},
        {"result": "return weights, logits"},
        {"result": "return {'weights': weights, 'experts': experts}"},
    ],
    ids=lambda change: next(iter(change.values())),
)
def test_anything_else_is_left_alone(change):
    refused(_base(change))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logits": "logits = F.linear(rows.float() + 0 * torch.rand(rows.shape), self.weight.float())"}, "random"),
        ({"experts": "experts = choice.topk(LIMIT if x.is_cpu else self.top_k)[1]"}, ""),
        ({"scaled": "weights = weights * self.scaling * (LIMIT - 2)"}, "LIMIT"),
        (
            {"divided": "weights = weights / weights.sum(-1, keepdim=True) if x.shape[0] < 99 else weights"},
            "one way in every probe",
        ),
        ({"scaled": "weights = weights * self.scaling if self.training else weights"}, ""),
        ({"rows": "rows = x.mul_(1.0).reshape(-1, self.hidden_dim)"}, ""),
        ({"scores": "scores = logits.sigmoid(); self.seen = scores"}, "writes its attribute"),
    ],
)
def test_what_depends_on_more_is_left_alone(change, words):
    assert words in refused(_base(change))


def test_the_softmax_of_what_was_chosen_is_left_alone_for_it_saves_nothing():
    def forward(self, x):
        logits = F.linear(x.reshape(-1, self.hidden_dim), self.weight)
        best, experts = logits.topk(self.top_k, dim=-1)
        return logits, best.softmax(-1), experts

    assert "softmax of chosen logits alone" in refused(forward)


def test_a_block_that_holds_experts_is_no_router():
    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        weights, experts = scores.topk(self.top_k, dim=-1)
        return self.experts(x, experts, weights)

    refused(forward)
