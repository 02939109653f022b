"""A small model library in a temporary folder, with finders that recognise its classes by name alone."""

from __future__ import annotations

import importlib
import pathlib
import sys
import textwrap
import types
from collections.abc import Iterator

import pytest

from npu_patch.engine import Patcher
from npu_patch.registry import Library, Target, Unrecognised

SOURCES = {
    "__init__": "",
    "norms": """
        class Base:
            def forward(self, hidden_states, scale=1):
                return ("original", hidden_states, scale)

        class Norm(Base):
            pass

        class Own:
            def forward(self, hidden_states, scale=1):
                return ("original", hidden_states, scale)

            @staticmethod
            def apply(query, key):
                return ("original", query, key)

        class Strange:
            def forward(self, x):
                return ("strange", x)
    """,
    "functions": """
        def rotate(query, key, *, unsqueeze_dim=1):
            return ("original", query, key, unsqueeze_dim)

        def attend(query):
            return ("original", query)

        REGISTRY = {"sdpa": attend}
    """,
    "user": """
        from .functions import rotate
        from .functions import rotate as alias
    """,
    "late": """
        from .functions import rotate
    """,
    "circular": """
        from . import circular_partner

        class Own:
            def forward(self, hidden_states, scale=1):
                return ("original", hidden_states, scale)
    """,
    "circular_partner": """
        import npu_patch_test_hooks
        npu_patch_test_hooks.during_import()
    """,
}


def patched(original, site):
    def forward(self, x, factor):
        if x is None:
            site.fallback("x is None")
            return original(self, x, factor)
        site.hit()
        return ("patched", x, factor)

    return forward


def patched_static(original, site):
    def apply(a, b):
        site.hit()
        return ("patched", *original(a, b)[1:])

    return apply


def patched_function(original, site):
    def rotate(q, k, *, unsqueeze_dim=1):
        site.hit()
        return ("patched", *original(q, k, unsqueeze_dim=unsqueeze_dim)[1:])

    return rotate


def patched_entry(original, site):
    def attend(q):
        site.hit()
        return ("patched", *original(q)[1:])

    return attend


class FakeLibrary:
    """The library's name is fresh for every test, so that tests do not see each other's modules."""

    count = 0

    def __init__(self, folder: pathlib.Path) -> None:
        FakeLibrary.count += 1
        self.name = f"fakelib{FakeLibrary.count}"
        package = folder / self.name
        package.mkdir()
        for name, source in SOURCES.items():
            (package / f"{name}.py").write_text(textwrap.dedent(source))
        self.adapters = types.ModuleType(f"{self.name}_adapters")
        self.adapters.modules = lambda: [f"{self.name}.{m}" for m in ("norms", "functions", "circular")]
        self.adapters.find_norms = self.find_norms
        self.adapters.find_functions = self.find_functions
        self.adapters.find_attention = self.find_attention
        sys.modules[self.adapters.__name__] = self.adapters
        self.library = Library(
            self.name,
            f"{self.adapters.__name__}:modules",
            {
                "rms_norm": f"{self.adapters.__name__}:find_norms",
                "rope": f"{self.adapters.__name__}:find_functions",
                "attention": f"{self.adapters.__name__}:find_attention",
            },
        )
        self.extra: list[Target] = []

    def target(self, op: str, module: str, path: str, adapter: object, **more: object) -> Target:
        return Target(op, self.name, f"{self.name}.{module}", path, adapter, meaning="fake", **more)

    def find_norms(self, module: types.ModuleType) -> Iterator[Target | Unrecognised]:
        yield from self.extra if module.__name__.endswith("norms") else []
        for name in ("Norm", "Own"):
            if hasattr(module, name):
                yield self.target("rms_norm", module.__name__.split(".")[1], f"{name}.forward", patched)
        if hasattr(module, "Strange"):
            yield Unrecognised("rms_norm", self.name, module.__name__, "Strange.forward", "computes something else")

    def find_functions(self, module: types.ModuleType) -> Iterator[Target]:
        if hasattr(module, "rotate"):
            yield self.target("rope", "functions", "rotate", patched_function, rebind=(self.name,))
        if hasattr(module, "Strange"):
            yield self.target("rope", "norms", "Own.apply", patched_static)

    def find_attention(self, module: types.ModuleType) -> Iterator[Target]:
        if hasattr(module, "REGISTRY"):
            yield self.target("attention", "functions", "REGISTRY[sdpa]", patched_entry)
            yield self.target("attention", "functions", "REGISTRY[flash]", patched_entry)

    def load(self, module: str) -> types.ModuleType:
        return importlib.import_module(f"{self.name}.{module}")

    def patcher(self, **kwargs: object) -> Patcher:
        kwargs.setdefault("unavailable", lambda: None)
        patcher = Patcher([self.library], **kwargs)
        patcher.prepare(self.name)
        return patcher


@pytest.fixture
def fake(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    monkeypatch.syspath_prepend(str(tmp_path))
    return FakeLibrary(tmp_path)
