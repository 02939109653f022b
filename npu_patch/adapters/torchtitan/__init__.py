"""torchtitan: which of its modules hold targets."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

LIBRARY = "torchtitan"
# Beside the models; which of them an installed version has is looked up, too.
_OTHERS = ("components/dataloader.py", "components/loss.py", "distributed/activation_checkpoint.py")
_MODEL_CODE = re.compile(
    rb"^class \w+\(.*(Module|Norm|RoPE)\b|^[ \t]*def (forward|apply_ro\w*|_local_reorder)\(|^def _permute\(",
    re.MULTILINE,
)


def modules() -> tuple[str, ...]:
    """Full names of the torchtitan modules to look at, of whatever version is installed, without importing any.

    The generations keep their models in different files, so that a file counts if it has a model's code in it.
    """
    spec = importlib.util.find_spec(LIBRARY)
    folders = spec.submodule_search_locations if spec is not None else None
    return tuple(dict.fromkeys(name for folder in folders or () for name in _below(Path(folder))))


def _below(root: Path) -> Iterator[str]:
    files = [file for file in sorted((root / "models").rglob("*.py")) if _MODEL_CODE.search(file.read_bytes())]
    for file in (*files, *(root / other for other in _OTHERS)):
        if file.is_file():
            parts = file.relative_to(root.parent).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
