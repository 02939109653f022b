"""Which generation of torchtitan is installed: 0.3.0 has `models.common`, 0.2.2 has `models.attention`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.find_spec("torchtitan")
_folders = [Path(folder) for folder in (_spec.submodule_search_locations or ())] if _spec is not None else []
CURRENT = any((folder / "models" / "common").is_dir() for folder in _folders)
PREVIOUS = any((folder / "models" / "attention.py").is_file() for folder in _folders)

current = pytest.mark.skipif(not CURRENT, reason="needs torchtitan 0.3.0")
previous = pytest.mark.skipif(not PREVIOUS, reason="needs torchtitan 0.2.2")
