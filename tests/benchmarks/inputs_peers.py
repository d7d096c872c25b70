"""Peers with formats or datasets of their own: Hugging Face datasets, LitData, Zephon, turboloader; SPDL's decoder.

Data path: files -> [peer] -> batches.

Each is set up as its documentation advises, named beside it. Where a peer has a format of its own, it reads the same
samples in that format, written before anything is measured.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.utils.data import default_collate

from .inputs_data import (
    IMAGES,
    INPUTS,
    TABLE_ROWS,
    TEXTS,
    Batch,
    Endless,
    Sequences,
    augmented,
    line_files,
    padded,
    row_sample,
    table_files,
    text_sample,
)
from .inputs_plan import HUGGING, HUGGING_STREAM, LITDATA, LITDATA_RAW, SPDL_DECODER, TURBO, WORKERS, ZEPHON
from .inputs_video import RATE, STEPS, Episodes
from .peers import IN_FLIGHT, Stream

OPTIONS: dict[str, Any] = {"num_workers": WORKERS, "persistent_workers": True}
CHUNK = "8MB"  # of LitData's files: some for each worker

Open = Callable[[str, Path, list[list[int]]], Any]


def open_own_format(name: str, row: str, folder: Path, batches: list[list[int]]) -> Any:
    """The peer called `name` over an input.

    Args:
        name: a key of `OWN_FORMATS`.
        row: a key of `INPUTS`.
        folder: the input's files.
        batches: the samples of each batch of an epoch; none for a stream.
    """
    return OWN_FORMATS[name](row, folder, batches)


# ------------------------------------------------------------------------------------------ Hugging Face datasets


def _hugging(row: str, folder: Path, batches: list[list[int]]) -> Any:
    # https://huggingface.co/docs/datasets/use_with_pytorch: Arrow on disk, `with_format` or `with_transform`, and
    # torch's DataLoader, whose workers read batches at once (`__getitems__`).
    datasets = importlib.import_module("datasets")
    place = folder / "hugging"
    if not place.exists():
        given = _image_table(datasets, folder) if row == "images" else _token_table(datasets, folder)
        given.save_to_disk(str(place))
    table = datasets.load_from_disk(str(place))
    if row == "images":
        dataset, collate = table.with_transform(_augment_columns), default_collate
    else:
        dataset, collate = table.with_format("torch"), _padded_column
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=Endless(batches), collate_fn=collate, **OPTIONS)
    return Stream(len(batches), loader)


def _image_table(datasets: Any, folder: Path) -> Any:
    files = sorted(map(str, folder.glob("*.jpg")))
    table = datasets.Dataset.from_dict({"image": files, "label": list(range(len(files)))})
    return table.cast_column("image", datasets.Image())


def _token_table(datasets: Any, folder: Path) -> Any:
    sequences = Sequences(folder)
    return datasets.Dataset.from_dict({"tokens": [sequences[number].numpy() for number in range(len(sequences))]})


def _augment_columns(columns: Batch) -> Batch:
    pairs = zip(columns["image"], columns["label"], strict=True)
    return {"image": [augmented(image.convert("RGB"), label) for image, label in pairs], "label": columns["label"]}


def _padded_column(samples: list[Batch]) -> Batch:
    return padded([sample["tokens"] for sample in samples])


def _hugging_stream(row: str, folder: Path, batches: list[list[int]]) -> Any:
    # https://huggingface.co/docs/datasets/stream: local files without a conversion; workers share the files.
    datasets = importlib.import_module("datasets")
    packaged, files, sample, size = STREAMED[row]
    options = {"data_files": list(map(str, files(folder))), "split": "train", "streaming": True}
    stream = datasets.load_dataset(packaged, **options)
    stream = stream.map(sample, remove_columns=stream.column_names)
    return torch.utils.data.DataLoader(stream, batch_size=size, **OPTIONS)


STREAMED: dict[str, tuple[str, Callable[[Path], list[Path]], Callable[[Batch], Batch], int]] = {
    "table": ("parquet", table_files, row_sample, TABLE_ROWS),
    "lines": ("json", line_files, text_sample, TEXTS),
}

# -------------------------------------------------------------------------------------------------------- LitData


def _litdata(row: str, folder: Path, batches: list[list[int]]) -> Any:
    # https://github.com/Lightning-AI/litData#speed-up-model-training, option 2: chunks, `transform`, its own loader.
    litdata = importlib.import_module("litdata")
    place = folder / "litdata"
    if not place.exists():
        files = sorted(map(str, folder.glob("*.jpg")))
        inputs = list(enumerate(files))
        litdata.optimize(_litdata_item, inputs, str(place), num_workers=WORKERS, chunk_bytes=CHUNK, verbose=False)
    dataset = litdata.StreamingDataset(str(place), transform=_litdata_sample)
    return litdata.StreamingDataLoader(dataset, batch_size=IMAGES, **OPTIONS)


def _litdata_item(numbered: tuple[int, str]) -> Batch:
    number, file = numbered
    return {"number": number, "jpeg": Path(file).read_bytes()}


def _litdata_sample(item: Batch) -> Batch:
    return _jpeg_sample(item["jpeg"], item["number"])


def _jpeg_sample(content: bytes, number: int) -> Batch:
    with Image.open(io.BytesIO(content)) as image:
        return {"image": augmented(image.convert("RGB"), number), "label": number}


def _litdata_raw(row: str, folder: Path, batches: list[list[int]]) -> Any:
    # The same page, option 1: the files as they are, and torch's DataLoader, whose batches are read asynchronously.
    raw = importlib.import_module("litdata.raw")

    class Numbered(raw.StreamingRawDataset):  # type: ignore[misc, name-defined]
        """Its `transform` gets bytes alone, and the crop follows from the file's number."""

        def __getitems__(self, numbers: list[int]) -> list[Batch]:
            return list(map(_jpeg_sample, super().__getitems__(numbers), numbers))

        def setup(self, files: list[Any]) -> list[Any]:
            return sorted(files, key=lambda file: file.path)

    index = importlib.import_module("litdata.raw.indexer").FileIndexer(extensions=[".jpg"])
    dataset = Numbered(str(folder), cache_dir=str(folder / "litdata-index"), indexer=index)
    loader: Any = torch.utils.data.DataLoader(dataset, batch_sampler=Endless(batches), **OPTIONS)
    return Stream(len(batches), loader)


# --------------------------------------------------------------------------------------------------------- Zephon


def _zephon(row: str, folder: Path, batches: list[list[int]]) -> Any:
    # https://datologyai.github.io/zephon/pipelines/how_pipelines_run.html: the default runner, threads, was faster here
    # than "process" and than `mtp_mode`; building_training_batches.html: what is no token sequence is read as records.
    work, given = importlib.import_module("zephon.work"), importlib.import_module("zephon.io")
    packaged, files, sample, size = STREAMED[row]
    place = folder / "zephon"  # a folder with nothing but the shards
    if not place.exists():
        place.mkdir()
        for file in files(folder):
            (place / file.name).hardlink_to(file)
    dataset = given.Dataset.from_path(row, str(place), fmt="jsonl" if packaged == "json" else packaged)
    source = work.StaticMixtureWorkSource(
        datasets=[dataset],
        mixture=work.MixtureSpec({row: 1.0}),
        chunk_size=TABLE_ROWS,
        shuffle_shards=False,
        exhausted_policy="repeat",
        reshuffle_on_repeat=False,
    )
    pipeline = importlib.import_module("zephon").Pipeline(source)
    pipeline = pipeline.map_transform(sample, parallelism=WORKERS).batch(microbatch_size=size)
    pipeline = pipeline.options(max_workers=WORKERS, shutdown_mode="hard")
    samples = sum(1 for file in files(folder) for _ in file.open("rb")) if packaged == "json" else _rows(files(folder))
    return Stream(samples // size, _collated(pipeline), keep=pipeline)


def _collated(pipeline: Any) -> Iterator[Batch]:
    for batch in pipeline:
        yield default_collate([record.payload for record in batch.records])


def _rows(files: list[Path]) -> int:
    parquet = importlib.import_module("pyarrow.parquet")
    return sum(parquet.read_metadata(file).num_rows for file in files)


# ---------------------------------------------------------------------------------------------------- turboloader


def _turbo(row: str, folder: Path, batches: list[list[int]]) -> Any:
    # https://github.com/ALJainProjects/TurboLoader, "Which loader do I use?": "Anything with __getitem__". Its loader
    # of tar files decodes and crops in C++, with crops that it draws itself: other content than the others have.
    given = INPUTS[row]
    dataset = _Ordered(given.dataset(folder), [number for batch in batches for number in batch])
    return importlib.import_module("turboloader").MapDataLoader(
        dataset, batch_size=len(batches[0]), num_workers=WORKERS, collate_fn=given.collate
    )


class _Ordered:
    """The samples in the order of the epoch, which it reads from the first to the last."""

    def __init__(self, dataset: Any, order: list[int]) -> None:
        self.dataset = dataset
        self.order = order

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, place: int) -> Any:
        return self.dataset[self.order[place]]


# ------------------------------------------------------------------------------------------------- SPDL's decoder


def _spdl_decoder(row: str, folder: Path, batches: list[list[int]]) -> Any:
    # https://facebookresearch.github.io/spdl/main/io_basic.html: demux a window, decode, convert, in threads.
    pipelines, codec = importlib.import_module("spdl.pipeline"), importlib.import_module("spdl.io")
    dataset = Episodes(folder)
    rgb = codec.get_video_filter_desc(pix_fmt="rgb24")

    def sample(number: int) -> Batch:
        clip, frame = dataset.place(number)
        window = (frame + STEPS[0] - 0.5) / RATE, (frame + 0.5) / RATE
        packets = codec.demux_video(dataset.files[clip], timestamp=window)
        frames = codec.to_torch(codec.convert_frames(codec.decode_packets(packets, filter_desc=rgb)))
        wanted = frames[[step - STEPS[0] for step in STEPS]].permute(0, 3, 1, 2)
        return dataset.sample(clip, frame, wanted)

    def batch(numbers: list[int]) -> Batch:
        collated: Batch = default_collate([sample(number) for number in numbers])
        return collated

    builder = pipelines.PipelineBuilder().add_source(Endless(batches))
    builder = builder.pipe(batch, concurrency=WORKERS, output_order="input").add_sink(IN_FLIGHT)
    pipeline = builder.build(num_threads=WORKERS)
    pipeline.start()
    return Stream(len(batches), pipeline.get_iterator(), keep=pipeline)


OWN_FORMATS: dict[str, Open] = {
    HUGGING: _hugging,
    HUGGING_STREAM: _hugging_stream,
    LITDATA: _litdata,
    LITDATA_RAW: _litdata_raw,
    ZEPHON: _zephon,
    TURBO: _turbo,
    SPDL_DECODER: _spdl_decoder,
}
