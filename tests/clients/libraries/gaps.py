"""Replaces parts that the libraries need and no wheel has for this torch or NumPy; batches do not use these parts.

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
    """Declare the two operators that torchvision's Python describes without testing whether they exist."""
    if torch.version.cuda is None:
        torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def fill_torchaudio() -> None:
    """Insert a module with only a version: SpeechBrain's data loading needs nothing else of torchaudio."""
    if torch.version.cuda is None:
        module = types.ModuleType("torchaudio")
        module.__spec__ = importlib.machinery.ModuleSpec("torchaudio", None)
        module.__dict__["__version__"] = "2.11.0"
        sys.modules["torchaudio"] = module


def fill_numpy() -> None:
    """Define names of NumPy 1."""
    for name, kind in {"float_": np.float64, "complex_": np.complex128, "unicode_": np.str_}.items():
        np.__dict__.setdefault(name, kind)
