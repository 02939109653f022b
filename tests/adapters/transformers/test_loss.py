"""`fixed_cross_entropy`: recognising it, single calls, and whole models."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import npu_patch
from npu_patch import functions
from npu_patch.adapters.transformers import loss
from npu_patch.discovery import NotRecognised
from npu_patch.registry import Unrecognised
from npu_patch.sites import Site

from ...ops.tools import Ran
from ...support.numerics import assert_no_worse, assert_same_training, recording, relative_error
from . import tiny
from .call import found

LOSSES = "transformers.loss.loss_utils"


def stock():
    from transformers.loss import loss_utils

    return loss_utils.fixed_cross_entropy


def installed():
    original = stock()
    site = Site("module:fixed_cross_entropy", "cross_entropy", {})
    return functions.clone(loss.adapter(original, site), original), site, original


def logits(rows=9, classes=13, seed=0, dtype=torch.float32):
    x = torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed))
    return x.to(dtype).to("npu").requires_grad_()


def labels(rows=9, classes=13, ignored=0.3, ignore_index=-100, seed=1):
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(0, classes, (rows,), generator=generator)
    return target.masked_fill(torch.rand(rows, generator=generator) < ignored, ignore_index).to("npu")


def both(*args, **kwargs):
    """(loss, gradient) of ours and of the original."""
    forward, site, original = installed()
    x = args[0]
    for function in (forward, original):
        value = function(*args, **kwargs)
        yield value.detach(), torch.autograd.grad(value * 1.3, x)[0]
    assert (site.hits, site.fallbacks) == (1, {})


# ---- recognising -----------------------------------------------------------------------------------------------------


def test_the_librarys_function_is_the_target():
    from transformers.loss import loss_utils

    (target,) = loss.find(loss_utils)
    assert target.name == f"{LOSSES}:fixed_cross_entropy"
    assert target.meaning == "cross entropy of class indices"


def of(body):
    def fixed_cross_entropy(source, target, num_items_in_batch=None, ignore_index=-100, **kwargs):
        reduction = "sum" if num_items_in_batch is not None else "mean"
        value = body(source, target, ignore_index, reduction)
        return value / num_items_in_batch if reduction == "sum" else value

    return fixed_cross_entropy


OTHERS = {
    "ignores nothing else": lambda x, t, i, r: F.cross_entropy(x, t, reduction=r) if i == -100 else x.sum() * 0,
    "smoothed": lambda x, t, i, r: F.cross_entropy(x, t, ignore_index=i, reduction=r, label_smoothing=1e-3),
    "scaled": lambda x, t, i, r: F.cross_entropy(x, t, ignore_index=i, reduction=r) * (1 + 1e-4),
    "always a mean": lambda x, t, i, r: F.cross_entropy(x, t, ignore_index=i),
    "zero for nothing": lambda x, t, i, r: F.cross_entropy(x, t, ignore_index=i, reduction=r).nan_to_num(),
    "with a z-loss": lambda x, t, i, r: (
        F.cross_entropy(x, t, ignore_index=i, reduction=r) + 1e-4 * x.logsumexp(-1).sum()
    ),
    "a list": lambda x, t, i, r: [],
    "a number for each row": lambda x, t, i, r: F.cross_entropy(x, t, ignore_index=i, reduction=r).expand(1),
    "cut off": lambda x, t, i, r: F.cross_entropy(x.detach(), t, ignore_index=i, reduction=r).requires_grad_(),
    "without a gradient": lambda x, t, i, r: F.cross_entropy(x.detach(), t, ignore_index=i, reduction=r) + x.sum() * 0,
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_loss_is_not_recognised(name):
    with pytest.raises(NotRecognised):
        loss.recognise(of(OTHERS[name]))
    (target,) = found(loss.find, fixed_cross_entropy=of(OTHERS[name])).values()
    assert isinstance(target, Unrecognised)
    loss.recognise(of(lambda x, t, i, r: F.cross_entropy(x, t, ignore_index=i, reduction=r)))


def test_another_signature_is_not_recognised():
    def swapped(target, source, num_items_in_batch=None, ignore_index=-100, **kwargs):
        return stock()(source, target, num_items_in_batch, ignore_index)

    def other_default(source, target, num_items_in_batch=None, ignore_index=0, **kwargs):
        return stock()(source, target, num_items_in_batch, ignore_index)

    def without_keywords(source, target, num_items_in_batch=None, ignore_index=-100):
        return stock()(source, target, num_items_in_batch, ignore_index)

    def with_one_keyword(source, target, num_items_in_batch=None, ignore_index=-100, *, scale=1.0, **kwargs):
        return stock()(source, target, num_items_in_batch, ignore_index) * scale

    def with_one_more(source, target, num_items_in_batch=None, ignore_index=-100, weight=None, **kwargs):
        return stock()(source, target, num_items_in_batch, ignore_index, weight=weight)

    for function in (swapped, other_default, without_keywords, with_one_keyword, with_one_more):
        with pytest.raises(NotRecognised):
            loss.recognise(function)


# ---- single calls ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("items", [None, 4, 4.5, torch.tensor(7), torch.tensor(7.0), "on the device"])
@pytest.mark.parametrize("ignore_index", [-100, 5, 13])
def test_loss_and_gradient_are_the_originals(items, ignore_index):
    items = torch.tensor(7, device="npu") if items == "on the device" else items
    target = labels(ignore_index=ignore_index)
    (ours, gradient), (theirs, expected) = both(logits(), target, items, ignore_index)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) == (torch.float32, ())
    assert relative_error(ours, theirs) < 1e-6
    assert relative_error(gradient, expected) < 1e-6


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 20),
    classes=st.integers(1, 30),
    ignored=st.sampled_from([0.0, 0.4, 0.9, 1.0]),
    items=st.sampled_from([None, 3]),
    seed=st.integers(0, 50),
)
def test_any_labels_give_the_originals_loss_and_gradient(rows, classes, ignored, items, seed):
    x, target = logits(rows, classes, seed), labels(rows, classes, ignored, seed=seed)
    ours, theirs = both(x, target, items)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_where_all_labels_are_ignored_the_mean_is_nan_and_the_gradient_zero():
    (ours, gradient), (theirs, _) = both(logits(), labels(ignored=2.0))
    assert math.isnan(ours.item())
    assert math.isnan(theirs.item())
    assert not gradient.any()


def test_keywords_that_the_original_drops_change_nothing():
    both(logits(), labels(), use_cache=False, position_ids=None, cu_seq_lens_q=torch.zeros(2))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"weight": torch.ones(13)}, "keyword weight"),
        ({"label_smoothing": 0.1}, "keyword label_smoothing"),
        ({"reduction": "none"}, "keyword reduction"),
        ({"source": logits(dtype=torch.bfloat16)}, "logits of type bfloat16"),
        ({"source": logits().detach().cpu(), "target": labels().cpu()}, "not on an NPU"),
        (
            {"source": logits(4).reshape(2, 13, 2), "target": torch.zeros(2, 2, dtype=torch.int64, device="npu")},
            "logits and labels are not (rows, classes) and (rows,)",
        ),
        ({"target": logits().detach().softmax(-1)}, "labels of type float32"),
        ({"source": logits().detach().as_subclass(type("Mine", (torch.Tensor,), {}))}, "Mine is not a plain tensor"),
    ],
)
def test_what_the_operator_cannot_honour_runs_the_original(change, reason):
    forward, site, original = installed()
    given = {"source": logits(), "target": labels(), **change}
    ours, theirs = forward(**given), original(**given)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    assert (site.hits, site.fallbacks) == (0, {reason: 1})


def test_an_ignored_class_that_is_no_number_runs_the_original():
    forward, site, original = installed()
    x, target = logits(), labels()
    for ignored in (True, None, torch.tensor(-100)):
        outcomes = []
        for function in (forward, original):
            try:
                outcomes.append(function(x, target, None, ignored).item())
            except (TypeError, RuntimeError) as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1]
    assert (site.hits, site.fallbacks) == (0, {"ignore_index is not a number": 3})


def test_under_a_function_transform_the_original_runs():
    forward, site, original = installed()
    x, target = logits().detach(), labels()
    ours, theirs = (torch.func.grad(lambda x, f=f: f(x, target))(x) for f in (forward, original))
    torch.testing.assert_close(ours, theirs)
    assert site.hits == 0


def test_the_signature_is_the_originals():
    forward, _, original = installed()
    assert inspect.signature(forward) == inspect.signature(original)


def test_names_imported_from_the_module_follow_and_come_back():
    import transformers.loss.loss_utils as home
    from transformers.loss import loss_utils

    original = home.fixed_cross_entropy
    borrowed = type(home)("transformers.borrowed")
    borrowed.fixed_cross_entropy = original
    import sys

    sys.modules[borrowed.__name__] = borrowed
    try:
        with npu_patch.scope("cross_entropy"):
            assert borrowed.fixed_cross_entropy is loss_utils.fixed_cross_entropy is not original
        assert borrowed.fixed_cross_entropy is loss_utils.fixed_cross_entropy is original
    finally:
        del sys.modules[borrowed.__name__]


# ---- models ----------------------------------------------------------------------------------------------------------


def hits():
    return npu_patch.status().hits("cross_entropy")


@pytest.mark.parametrize("items", [None, 11])
@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_models_train_the_same_with_ignored_labels(family, items):
    built, ids = tiny.model(family), tiny.tokens()
    target = ids.clone()
    target[0, :9] = -100
    extra = {} if items is None else {"num_items_in_batch": torch.tensor(items)}
    unpatched = tiny.step(built, ids, labels=target, **extra)
    with npu_patch.scope("cross_entropy"):
        before = hits()
        patched = tiny.step(built, ids, labels=target, **extra)
        assert hits() == before + 1
    assert_same_training(unpatched, patched)


def test_logits_are_still_returned_beside_the_loss():
    built, ids = tiny.model("llama"), tiny.tokens()
    with torch.no_grad():
        unpatched = built(input_ids=ids, labels=ids)
        with npu_patch.scope("cross_entropy"):
            patched = built(input_ids=ids, labels=ids)
    assert torch.equal(patched.logits, unpatched.logits)
    assert relative_error(patched.loss, unpatched.loss) < 1e-6


def test_bfloat16_models_hand_over_float32_logits_and_each_call_is_no_worse():
    from transformers.loss import loss_utils

    built = tiny.model("llama", torch.bfloat16)
    original = stock()
    with recording(loss_utils, "fixed_cross_entropy") as calls:
        for shift in range(16):  # one number per call: a single one says nothing
            ids = (tiny.tokens(length=40) + shift) % tiny.VOCABULARY
            built(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert calls[0].args[0].dtype is torch.float32
    with npu_patch.scope("cross_entropy"):
        assert_no_worse(stock(), original, original, calls)


def test_classification_and_masked_models_reach_it_too():
    from transformers.loss import loss_utils

    class Config:
        num_labels = 7
        problem_type = "single_label_classification"

    pooled, target = logits(5, 7), labels(5, 7, ignored=0.0)
    unpatched = loss_utils.ForSequenceClassificationLoss(target, pooled, Config)
    masked = loss_utils.ForMaskedLMLoss(logits(6, 9), labels(6, 9), 9)
    answers = loss_utils.ForQuestionAnsweringLoss(logits(3, 8), logits(3, 8, 1), labels(3, 12, 0), labels(3, 12, 0))
    with npu_patch.scope("cross_entropy"):
        before = hits()
        torch.testing.assert_close(loss_utils.ForSequenceClassificationLoss(target, pooled, Config), unpatched)
        torch.testing.assert_close(loss_utils.ForMaskedLMLoss(logits(6, 9), labels(6, 9), 9), masked)
        again = loss_utils.ForQuestionAnsweringLoss(logits(3, 8), logits(3, 8, 1), labels(3, 12, 0), labels(3, 12, 0))
        torch.testing.assert_close(again, answers)
        assert hits() == before + 4


def test_a_loss_on_top_of_a_softmax_leaves_its_saved_result_alone():
    """An in-place backward would overwrite what the softmax below has saved."""
    head = nn.Linear(8, 13).to("npu")
    x, target = torch.randn(9, 8, generator=torch.Generator().manual_seed(0)).to("npu"), labels()

    def run():
        head.zero_grad()
        value = stock()(head(x).softmax(-1), target)
        value.backward(retain_graph=True)
        value.backward()
        return head.weight.grad.clone()

    unpatched = run()
    with npu_patch.scope("cross_entropy"), Ran() as ran:
        patched = run()
    assert ran["npu_cross_entropy_loss_backward"] == 2
    assert relative_error(patched, unpatched) < 1e-6


def test_nothing_more_is_saved_and_fewer_bytes_are_moved():
    built, ids = tiny.model("llama", torch.bfloat16), tiny.tokens()

    def count():
        tiny.step(built, ids)
        with npu_patch.simulator.trace(list(built.parameters())) as trace:
            built(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        return trace

    unpatched = count()
    with npu_patch.scope("cross_entropy"):
        patched = count()
    assert patched.saved_bytes <= unpatched.saved_bytes
    assert patched.bytes_read + patched.bytes_written < unpatched.bytes_read + unpatched.bytes_written
    assert patched.host_syncs <= unpatched.host_syncs


def test_a_loss_that_leaves_the_process_is_not_recognised():
    def leaves(x, target, ignore_index, reduction):
        raise SystemExit(3)

    (target,) = found(loss.find, fixed_cross_entropy=of(leaves)).values()
    assert isinstance(target, Unrecognised)


def test_an_interrupt_while_a_loss_is_looked_at_gets_through():
    def interrupted(x, target, ignore_index, reduction):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        found(loss.find, fixed_cross_entropy=of(interrupted))
