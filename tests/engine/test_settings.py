"""The grammar of NPU_PATCH_OPS and its errors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from npu_patch import settings
from npu_patch.registry import OPS
from npu_patch.settings import SettingsError, from_environment, parse_ops

EVERY = {op.name for op in OPS}
DEFAULT = {op.name for op in OPS if op.default}


@pytest.mark.parametrize(
    ("text", "enabled", "named"),
    [
        ("rms_norm,rope", {"rms_norm", "rope"}, {"rms_norm", "rope"}),
        (" RMS_NORM , rope ", {"rms_norm", "rope"}, {"rms_norm", "rope"}),
        ("default", DEFAULT, set()),
        ("1", DEFAULT, set()),
        ("all", EVERY, set()),
        ("none", set(), set()),
        ("0", set(), set()),
        ("off", set(), set()),
        ("", set(), set()),
        ("default,-rope", DEFAULT - {"rope"}, set()),
        ("-rope", DEFAULT - {"rope"}, set()),
        ("none,+rope", {"rope"}, {"rope"}),
        ("all,-rope,-rms_norm", EVERY - {"rope", "rms_norm"}, set()),
        ("rms_norm,rope,", {"rms_norm", "rope"}, {"rms_norm", "rope"}),
        ("npu_rms_norm,npu_rope", {"rms_norm", "rope"}, {"rms_norm", "rope"}),
        ("attention:dense_mask_limit=64", {"attention"}, {"attention"}),
    ],
)
def test_what_a_value_switches_on(text, enabled, named):
    selection = parse_ops(text)
    assert (set(selection.enabled), set(selection.named)) == (enabled, named)


def test_options_take_the_declared_type():
    assert parse_ops("attention:dense_mask_limit=64").options == {"attention": {"dense_mask_limit": 64}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rms_nrom", "unknown op 'rms_nrom'; known ops: .*rms_norm.*did you mean 'rms_norm'"),
        ("rms_norm,nonsense_xyz", "unknown op 'nonsense_xyz'; known ops:"),
        ("attention:mask_limit=1", "no option 'mask_limit'.*did you mean 'dense_mask_limit'"),
        ("rms_norm:pack=1", "op 'rms_norm' has no option 'pack'; it has no options"),
        ("attention:dense_mask_limit=many", "expected a value of type int, got 'many'"),
        ("attention:dense_mask_limit=-4", "at least 0, got -4"),
        ("attention:dense_mask_limit", "cannot read 'attention:dense_mask_limit'"),
        ("-attention:dense_mask_limit=4", "cannot read"),
    ],
)
def test_a_mistake_names_what_is_known(text, message):
    with pytest.raises(SettingsError, match=message):
        parse_ops(text)
    with pytest.raises(ValueError, match="NPU_PATCH_OPS="):
        from_environment({"NPU_PATCH_OPS": text})


@given(st.lists(st.sampled_from(["default", "all", "none", *EVERY, *(s + n for s in "+-" for n in EVERY)]), min_size=1))
def test_tokens_are_read_from_left_to_right(tokens):
    enabled = set(DEFAULT) if tokens[0][0] in "+-" else set()
    for token in tokens:
        if token in ("default", "all", "none"):
            enabled = enabled | (DEFAULT if token == "default" else EVERY) if token != "none" else set()
        elif token.startswith("-"):
            enabled -= {token[1:]}
        else:
            enabled |= {token.lstrip("+")}
    assert set(parse_ops(",".join(tokens)).enabled) == enabled


@given(st.text(max_size=30))
def test_any_text_is_understood_or_refused_with_a_settings_error(text):
    try:
        enabled = set(parse_ops(text).enabled)
    except SettingsError:
        enabled = set()
    assert enabled <= EVERY


def test_the_other_variables():
    values = from_environment(
        {"NPU_PATCH_STRICT": "1", "NPU_PATCH_REPORT": "some/folder", "NPU_PATCH_LOG": "DEBUG", "NPU_PATCH_OPS": "rope"}
    )
    assert (values.strict, values.report, values.log) == (True, "some/folder", "debug")
    assert from_environment({"NPU_PATCH_REPORT": "yes"}).report == "1"
    assert from_environment({"NPU_PATCH_REPORT": "0"}).report is None
    assert from_environment({}).enabled == settings.default_ops()


@pytest.mark.parametrize(("variable", "value"), [("NPU_PATCH_STRICT", "maybe"), ("NPU_PATCH_LOG", "loud")])
def test_a_bad_value_names_its_variable(variable, value):
    with pytest.raises(SettingsError, match=f"{variable}='{value}': expected"):
        from_environment({variable: value})
