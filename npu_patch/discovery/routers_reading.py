"""What a router computed, compared with what is known."""

from __future__ import annotations

import itertools
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .bracket import NotRecognised, same
from .outside import Part
from .routers_probes import Choice, Probe
from .routers_roles import CONSTANTS

OWN, FLOAT32, WEIGHT, MODULE = "own", "float32", "weight", "module"
PROJECTIONS = (OWN, FLOAT32, WEIGHT)
"""x and weight as they are, both in float32, x in the type of the weight; or a module of its own."""


@dataclass(frozen=True)
class RouterMeaning:
    """What a router computes.  Names are attributes of the instance, with a dot of what these hold.

    Args:
        projection: how logits are computed: one of PROJECTIONS, or "module".
        weight: of the projection, or the module.
        autocast: the module is called under autocast to float32.
        choice: what is done with the logits, where it is not left to an attribute.
        roles: what else is read: role → attribute ("top_k", "scale", "divides", "groups", "bias", ...).
        correction: the bias of the choice: an attribute, "argument" or None.
        optional: no argument is as good as one.
        weights: the type of the weights: "float32", "hidden" (that of x) or "logits".
        half: logits of a half type are understood, too.
        outputs: what is returned: "logits", "logits in float32", "weights", "experts", "scores", "counts".
        dims: how many dimensions x may have.
        flat: results have one row per token.
        ungrouped: `groups` may be None.
        conditions: attribute values that all of this depends on.
        methods: methods of the class that take part.
        parts: functions of the library that take part.
    """

    projection: str
    weight: str
    autocast: bool
    choice: Choice
    roles: Mapping[str, str]
    correction: str | None
    optional: bool
    weights: str
    half: bool
    outputs: tuple[str, ...]
    dims: tuple[int, ...]
    flat: bool
    ungrouped: bool = False
    conditions: tuple[tuple[str, Any], ...] = ()
    methods: tuple[tuple[str, Any], ...] = ()
    parts: tuple[Part, ...] = field(default=(), compare=False)

    def __str__(self) -> str:
        choice, roles = self.choice, self.roles
        text = choice.score or f"{roles['score']}"
        if self.correction is not None:
            text += " + bias"
        if "groups" in roles:
            text += f", groups by their {'best two' if choice.of_group == 'top2' else 'best'}"
        if choice.divides or "divides" in roles:
            text += f", divided if {roles['divides']}" if choice.divides is None else ", divided"
        return text + (", scaled" if "scale" in roles else "")


@dataclass(frozen=True)
class Run:
    """What the class made of one probe: results, or an error."""

    probe: Probe
    outputs: tuple[Tensor, ...] = ()
    failed: bool = False


class Seen:
    """What was seen beside results: methods, modules that were called, under autocast to float32, on casted tokens."""

    def __init__(self) -> None:
        self.methods: dict[str, types.FunctionType] = {}
        self.called: set[str] = set()
        self.autocast = False
        self.cast = False
        self.error = ""


class Reading:
    """Compares what a class computed with what is known."""

    def __init__(
        self, assignment: Mapping[str, str], roles: dict[str, str], seen: Seen, takes: bool, optional: bool
    ) -> None:
        self.assignment, self.roles, self.seen = assignment, roles, seen
        self.takes, self.optional = takes, optional

    def meaning(self, runs: list[Run], bare: list[Run], loose: list[Run]) -> RouterMeaning:
        """What all runs have in common.

        Args:
            runs: one for each probe.
            bare: those without the optional argument.
            loose: that without groups.

        Raises:
            NotRecognised: nothing.
        """
        roles = self.roles
        if "top_k" not in roles or ("groups" in roles) != ("kept" in roles):
            raise NotRecognised("chooses no number of experts that it reads")
        if not self.seen.called and "weight" not in roles:
            raise NotRecognised("projects nothing by a weight that it reads")
        if self.seen.autocast and self.seen.cast:
            raise NotRecognised("casts tokens under autocast")
        correction = "argument" if self.takes else roles.get("correction")
        outputs = _kinds(runs[0])
        for half, projection, choice in itertools.product(
            (True, False), self._projections(), tuple(self._choices(runs[0]))
        ):
            divided = choice if choice.divides is False else self._with_eps(choice, projection, runs[0])
            if divided is None:
                continue
            meaning = RouterMeaning(
                projection=projection,
                weight=next(iter(self.seen.called)) if projection == MODULE else roles["weight"],
                autocast=self.seen.autocast,
                choice=divided,
                roles={role: name for role, name in roles.items() if role not in ("weight", "correction")},
                correction=correction,
                optional=self.optional,
                weights="float32",
                half=half,
                outputs=outputs,
                dims=(),
                flat=runs[0].outputs[outputs.index("experts")].dim() < runs[0].probe.x.dim(),
                conditions=tuple((n, CONSTANTS[r]) for n, r in self.assignment.items() if r in CONSTANTS),
            )
            for found in self._completed(meaning, runs):
                if bare and bare[0].failed:
                    found = replace(found, optional=False)
                elif not all(self._agrees(found, run, False) for run in bare if half or _wide(run)):
                    raise NotRecognised("computes something else without a bias")
                if loose and not loose[0].failed:
                    if not self._agrees(found, loose[0], True):
                        raise NotRecognised("computes something else without groups")
                    found = replace(found, ungrouped=True)
                return found
        raise NotRecognised("computes no known choice of experts")

    def _completed(self, meaning: RouterMeaning, runs: list[Run]) -> Iterator[RouterMeaning]:
        """The meaning with the kind of its results, if all runs agree with it, or all in float32."""
        kinds = ("logits", "logits in float32", "scores") if "logits" in meaning.outputs else ("",)
        for logits, weights in itertools.product(kinds, ("float32", "logits", "hidden")):
            outputs = tuple(logits if kind == "logits" else kind for kind in meaning.outputs)
            found = replace(meaning, outputs=outputs, weights=weights)
            if self.holds(found, runs):
                yield found

    def holds(self, meaning: RouterMeaning, runs: list[Run]) -> bool:
        return all(
            self._agrees(meaning, run, True) for run in runs if meaning.half or run.probe.x.dtype is torch.float32
        )

    def _projections(self) -> tuple[str, ...]:
        if self.seen.called:
            if len(self.seen.called) > 1:
                raise NotRecognised("calls more than one module")
            return (MODULE,)
        return PROJECTIONS

    def _choices(self, run: Run) -> Iterator[Choice]:
        scores = (None,) if "score" in self.roles else ("sigmoid", "softmax")
        divides = (None,) if "divides" in self.roles else (True, False)
        groups = (
            itertools.product(("top2", "max"), (-torch.inf, 0.0)) if "groups" in self.roles else (("top2", -torch.inf),)
        )
        for score, divided, (of_group, hidden) in itertools.product(scores, divides, tuple(groups)):
            yield Choice(score, divided, 0.0, of_group, hidden)

    def _with_eps(self, choice: Choice, projection: str, run: Run) -> Choice | None:
        """The same with the number beside the sum of the weights, as the last row of the first probe tells it."""
        probe = run.probe
        logits = self._logits(projection, probe)
        if logits is None:
            return None
        scores = choice.scores(logits, probe).reshape(-1, probe.experts)
        kinds = _kinds(run)
        experts = run.outputs[kinds.index("experts")].reshape(-1, probe.top_k)
        weights = run.outputs[kinds.index("weights")].reshape(-1, probe.top_k)
        chosen = scores.gather(-1, experts)[-1].detach().double()
        scale = probe.scale if "scale" in self.roles else 1.0
        eps = (chosen * scale / weights[-1].detach().double() - chosen.sum()).mean().item()
        if not abs(eps) > 1e-5 * chosen.sum().item():
            return choice
        return replace(choice, eps=float(f"{eps:.2e}"))

    def _logits(self, projection: str, probe: Probe) -> Tensor | None:
        rows, weight = probe.x, probe.weight
        bias = probe.bias if "bias" in self.roles else None
        if projection == FLOAT32:
            return F.linear(rows.float(), weight.float(), None if bias is None else bias.float())
        if projection == WEIGHT:
            rows = rows.to(weight.dtype)
        return F.linear(rows, weight, bias) if rows.dtype is weight.dtype else None

    def _agrees(self, meaning: RouterMeaning, run: Run, given: bool) -> bool:
        """Whether results and gradients of a run are what a meaning says."""
        probe = run.probe
        logits = self._logits(meaning.projection, probe)
        if logits is None or run.failed:
            return logits is None and run.failed
        if len(run.outputs) != len(meaning.outputs):
            return False
        logits = logits.reshape(-1, probe.experts)
        grouped = "groups" in meaning.roles and ("limited" not in meaning.roles or probe.limited)
        scores = meaning.choice.scores(logits, probe)
        experts = meaning.choice.chosen(scores, probe, meaning.correction is not None and given, grouped)
        weights = meaning.choice.weights(scores, experts, probe, "scale" in meaning.roles)
        dtype = {"float32": torch.float32, "logits": logits.dtype, "hidden": probe.x.dtype}[meaning.weights]
        expected = {
            "logits": logits,
            "logits in float32": logits.float(),
            "scores": scores,
            "weights": weights.to(dtype),
            "experts": experts,
            "counts": torch.bincount(experts.flatten(), minlength=probe.experts),
        }
        bias = (probe.bias,) if "bias" in meaning.roles else ()
        return _equal(meaning, run, expected, (probe.x, probe.weight, *bias))


def _equal(meaning: RouterMeaning, run: Run, expected: Mapping[str, Tensor], leaves: tuple[Tensor, ...]) -> bool:
    """Whether results and gradients are the expected ones, in whatever order the experts of a token come."""
    dims = 2 if meaning.flat else run.probe.x.dim()
    found = dict(zip(meaning.outputs, run.outputs, strict=True))
    if any(one.dim() != dims for kind, one in found.items() if kind != "counts"):
        return False
    (ours, our_loss), (theirs, their_loss) = (_sorted(results, meaning, run.probe) for results in (found, expected))
    if not all(_same_rows(one, two) for one, two in zip(ours, theirs, strict=True)):
        return False
    gradients = [
        torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True) for loss in (our_loss, their_loss)
    ]
    return all(_same_gradient(ours, theirs) for ours, theirs in zip(*gradients, strict=True))


def _sorted(results: Mapping[str, Tensor], meaning: RouterMeaning, probe: Probe) -> tuple[list[Tensor], Tensor]:
    """Results with the experts of every token in rising order, and a number whose gradient is that of all of them."""
    experts = results["experts"].reshape(-1, probe.top_k)
    order = experts.argsort(-1)
    rows, loss = [], torch.zeros(())
    for kind in meaning.outputs:
        one = results[kind]
        if kind == "counts":
            rows.append(one.long())
            continue
        one = one.reshape(-1, one.shape[-1])
        rows.append(one.gather(-1, order) if one.shape[-1] == probe.top_k else one)
        if kind != "experts":
            loss = loss + (rows[-1].float() * _head(rows[-1], experts, order, probe)).sum()
    return rows, loss


def _same_gradient(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return same(ours, theirs, loose=True)


def _same_rows(ours: Tensor, theirs: Tensor) -> bool:
    return torch.equal(ours, theirs) if ours.dtype is torch.int64 else same(ours, theirs)


def _head(rows: Tensor, experts: Tensor, order: Tensor, probe: Probe) -> Tensor:
    """An incoming gradient that goes by expert, and leaves out the row whose weights are divided by 1e-35."""
    table = torch.linspace(-1.0, 1.3, probe.experts)
    if rows.shape[-1] == probe.experts:
        head = table.flip(0).expand(rows.shape).clone()
    else:
        head = table[experts.gather(-1, order)]
    if probe.x.dtype is torch.float32:
        head[-1] = 0.0
    return head


def _wide(run: Run) -> bool:
    return run.probe.x.dtype is torch.float32


def _kinds(run: Run) -> tuple[str, ...]:
    """What each result is, by its shape and type.

    Raises:
        NotRecognised: one is none of them, or two are the same.
    """
    probe, kinds = run.probe, []
    tokens = probe.x.numel() // probe.x.shape[-1]
    for one in run.outputs:
        if one.shape == (probe.experts,) and not one.requires_grad:
            kinds.append("counts")
        elif one.dim() < 2 or one.numel() != tokens * one.shape[-1]:
            raise NotRecognised("returns something else than logits, weights and experts")
        elif one.dtype is torch.int64 and one.shape[-1] == probe.top_k:
            kinds.append("experts")
        elif one.is_floating_point() and one.shape[-1] == probe.top_k:
            kinds.append("weights")
        elif one.is_floating_point() and one.shape[-1] == probe.experts:
            kinds.append("logits")
        else:
            raise NotRecognised("returns something else than logits, weights and experts")
    if "experts" not in kinds or "weights" not in kinds or len(set(kinds)) < len(kinds):
        raise NotRecognised("returns something else than logits, weights and experts")
    return tuple(kinds)
