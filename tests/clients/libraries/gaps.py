"""Stands in for parts of the libraries' needs that no wheel brings for this torch or NumPy; batches do not use them.

torchvision and torchaudio have wheels for torch with CUDA only: beside a CPU build of torch their compiled parts cannot
be loaded, and to import them fails although their Python works. RecBole 1.2 names scalar types that NumPy 2 left out.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types

import numpy as np
import torch


def fill_torchvision() -> None:
    """Declare the two operators that torchvision's Python describes without asking whether they are there."""
    if torch.version.cuda is None:
        torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def fill_torchaudio() -> None:
    """A module with a version, which is all that SpeechBrain's data loading asks for."""
    if torch.version.cuda is None:
        module = types.ModuleType("torchaudio")
        module.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
        module.__dict__["__version__"] = "2.11.0"
        sys.modules["torchaudio"] = module


def fill_numpy() -> None:
    """NumPy 1's names."""
    for name, kind in {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_}.items():
        np.__dict__.setdefault(name, kind)
