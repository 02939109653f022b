"""The few functions of torchvision by which torchtitan reads pictures, for environments where torchvision is missing.

(The wheel on PyPI is for CUDA builds of torch, beside which torch_npu does not load.)
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import importlib.util
import io
import sys
import types
from collections.abc import Iterator
from typing import Any

import numpy
import PIL.Image
import torch
from torch import Tensor


def pil_to_tensor(picture: PIL.Image.Image) -> Tensor:
    return torch.from_numpy(numpy.array(picture)).permute(2, 0, 1).contiguous()


def decode_image(raw: Tensor, mode: Any) -> Tensor:
    """JPEG bytes → uint8 [3, height, width]."""
    return pil_to_tensor(PIL.Image.open(io.BytesIO(raw.numpy().tobytes())).convert("RGB"))


def resize(picture: Tensor, size: list[int], **_: Any) -> Tensor:
    return torch.nn.functional.interpolate(picture[None].float(), size, mode="bicubic").clamp(0, 255)[0].to(torch.uint8)


def pad(picture: Tensor, padding: list[int]) -> Tensor:
    left, top, right, bottom = padding
    return torch.nn.functional.pad(picture, (left, right, top, bottom))


def to_dtype(picture: Tensor, dtype: torch.dtype, scale: bool) -> Tensor:
    return picture.to(dtype) / 255 if scale else picture.to(dtype)


def normalize(picture: Tensor, mean: list[float], std: list[float], inplace: bool = False) -> Tensor:
    shape = (-1, 1, 1)
    return (picture - torch.tensor(mean).view(shape)) / torch.tensor(std).view(shape)


@contextlib.contextmanager
def stand_in_for_torchvision() -> Iterator[None]:
    """Inside, `import torchvision` gives the functions above, unless it is installed."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    io_module, functional = _module("torchvision.io"), _module("torchvision.transforms.v2.functional")
    io_module.decode_image, io_module.ImageReadMode = decode_image, types.SimpleNamespace(RGB="RGB")
    for function in (pil_to_tensor, resize, pad, to_dtype, normalize):
        setattr(functional, function.__name__, function)
    functional.InterpolationMode = types.SimpleNamespace(BICUBIC="bicubic")
    try:
        yield
    finally:  # transformers, which asks for it too, would expect more of it
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


def _module(name: str) -> Any:
    """A new module, and its parents where they are missing."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules.get(parent) or _module(parent), child, module)
    return module
