"""Short video clips, read as robot learning reads them: frames at timestamps, beside a state and the actions to come.

Data path: seed -> H.264 clips -> [torchcodec] -> frames of a sample.

The samples are LeRobot's: `delta_timestamps` behind a sample's own, decoded from the episode's MP4 file (30 frames a
second, a key frame every second frame) by torchcodec, whose decoders each thread keeps open, and a chunk of actions.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

SEED = 20_253
WIDTH, HEIGHT, RATE, FRAMES = 320, 240, 30, 90
"""Of a clip: pixels, frames a second, and frames."""
STEPS = (-9, -6, -3, 0)
"""Frames of a sample, relative to its own: LeRobot's `delta_timestamps` of -0.3 to 0 seconds."""
STATE, CHUNK = 14, 16
BATCH, EACH = 8, 20
"""Samples in a batch, and of each clip in an epoch."""
SAMPLES = FRAMES - CHUNK + STEPS[0]
"""Samples of a clip: those whose frames and actions lie within it."""


class Episodes(Dataset[dict[str, Any]]):
    """A sample for each frame of the clips: "frames", float32 of (4, 3, 240, 320), "state", "actions", "timestamp"."""

    def __init__(self, folder: Path) -> None:
        self.files = sorted(map(str, folder.glob("*.mp4")))
        self.states = np.load(folder / "states.npy")
        self._decoders = _Decoders()

    def __len__(self) -> int:
        return len(self.files) * SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        clip, frame = self.place(index)
        decoder = self._decoders.open(self.files[clip])
        frames = decoder.get_frames_played_at([(frame + step) / RATE for step in STEPS]).data
        return self.sample(clip, frame, frames)

    def place(self, index: int) -> tuple[int, int]:
        """The clip of a sample, and its frame there."""
        clip, frame = divmod(index, SAMPLES)
        return clip, frame - STEPS[0]

    def sample(self, clip: int, frame: int, frames: torch.Tensor) -> dict[str, Any]:
        """A sample of its decoded frames, uint8 of (4, 3, 240, 320)."""
        return {
            "frames": frames.to(torch.float32) / 255,
            "state": torch.from_numpy(self.states[clip, frame].copy()),
            "actions": torch.from_numpy(self.states[clip, frame : frame + CHUNK].copy()),
            "timestamp": frame / RATE,
        }


class _Decoders:
    """Open decoders, as LeRobot keeps them: one of each file in each thread that reads it. Copies begin without any."""

    def __init__(self) -> None:
        self._open = threading.local()

    def open(self, path: str) -> Any:
        if path not in self._open.__dict__:
            decoders = importlib.import_module("torchcodec.decoders")
            # One thread: the workers share the cores, as torchcodec's "Parallel video decoding" advises.
            decoder = decoders.VideoDecoder(path, seek_mode="approximate", num_ffmpeg_threads=1)
            self._open.__dict__[path] = decoder
        return self._open.__dict__[path]

    def __reduce__(self) -> Any:
        return _Decoders, ()


def make(folder: Path, samples: int) -> list[list[int]]:
    """Write the clips and states; gives the batches of an epoch."""
    draw = np.random.default_rng(SEED)
    clips = -(-samples // EACH)
    for number in range(clips):
        _write(folder / f"{number:04}.mp4", draw)
    np.save(folder / "states.npy", draw.normal(size=(clips, FRAMES, STATE)).astype(np.float32))
    order = draw.permutation(clips * SAMPLES)[:samples].tolist()
    return [order[at : at + BATCH] for at in range(0, samples, BATCH)]


def _write(path: Path, draw: np.random.Generator) -> None:
    """A scene that moves by three pixels a frame, with noise."""
    av = importlib.import_module("av")
    wide = WIDTH + 3 * FRAMES
    coarse = Image.fromarray(draw.integers(0, 256, (HEIGHT // 12, wide // 12, 3), dtype=np.uint8))
    scene = np.asarray(coarse.resize((wide, HEIGHT), Image.Resampling.BICUBIC), np.int16)
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=RATE, options={"g": "2", "crf": "28", "preset": "veryfast"})
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for number in range(FRAMES):
            noise = draw.integers(-6, 7, (HEIGHT, WIDTH, 1), dtype=np.int16)
            pixels = (scene[:, 3 * number : 3 * number + WIDTH] + noise).clip(0, 255).astype(np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        file.mux(stream.encode())


@contextlib.contextmanager
def ffmpeg_libraries(folder: Path) -> Generator[None]:
    """Let processes that are started meanwhile find FFmpeg's libraries: those in PyAV's wheel, under their own names.

    torchcodec and SPDL's decoder bring no FFmpeg. A wheel's libraries have a hash in their names, and find each other
    beside themselves.
    """
    place = folder / "ffmpeg"
    place.mkdir()
    for library in Path(importlib.import_module("av").__file__ or "").parent.with_suffix(".libs").iterdir():
        (place / library.name).symlink_to(library)
        stem, _, version = library.name.partition(".so.")
        if stem.startswith(("libav", "libsw")):
            name = f"{stem.rpartition('-')[0]}.so.{version.partition('.')[0]}"
            (place / name).symlink_to(library)
    before = os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = f"{place}:{before}" if before else str(place)
    try:
        yield
    finally:
        if before is None:
            del os.environ["LD_LIBRARY_PATH"]
        else:
            os.environ["LD_LIBRARY_PATH"] = before
