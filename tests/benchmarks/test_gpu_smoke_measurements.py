"""The benchmark on a card, its measurements, with the CPU in the place of a card: content, checks, processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
import torch

import asyncloader
from tests.delivery.fake import installed

from . import gpu, gpu_plan, gpu_slot
from .gpu_card import Card
from .gpu_content import (
    IMAGE_SHAPE,
    POOL,
    SOAK_DTYPES,
    ImageCheck,
    ReadyImages,
    SoakBatches,
    WrongContent,
    checksum,
    flat_bytes,
    image_pool,
    image_sums,
    soak_shapes,
    weights,
)
from .gpu_end import Window
from .gpu_loaders import Indices, moved, prefetched
from .gpu_plan import LOADERS, PINNED, SPDLS, STAGES, TORCHES, GpuJob, Outcome
from .gpu_slot import Feed, FilledRing, PinnedCopies, feeding
from .gpu_soak import Comparison, soak
from .harness import JobFailed
from .plan import FACADE

NBYTES = 10_000
BATCH = 4


@pytest.fixture(scope="module")
def card() -> Card:
    return Card("cpu")


@pytest.fixture(scope="module")
def images() -> ReadyImages:
    return ReadyImages(torch.uint8)


def test_images(images: ReadyImages) -> None:
    """A sample is an image of the pool and its position; images differ, and their sums are exact and differ."""
    assert torch.equal(images.pool, image_pool(torch.uint8))
    assert len(pickle.dumps(images)) < 1.1 * images.pool.nbytes
    for index in (0, 1, POOL - 1, POOL, 12_345_678_901):
        image, label = images[index]
        assert torch.equal(image, images.pool[index % POOL])
        assert (label, tuple(image.shape), image.dtype) == (index, IMAGE_SHAPE, torch.uint8)
    assert len(images) > 1 << 39
    for dtype in (torch.uint8, torch.float32):
        pool = image_pool(dtype)
        words = pool.numpy().reshape(POOL, -1).view(np.int32).astype(np.int64).sum(1)
        assert image_sums(pool).tolist() == words.tolist()
        assert len(set(words.tolist())) == POOL


def image_batch(images: ReadyImages, first: int, size: int = BATCH) -> list[torch.Tensor]:
    labels = torch.arange(first, first + size)
    return [images.pool[labels % POOL], labels]


def test_right_images_settle(images: ReadyImages) -> None:
    """Batches that came in their order, as they should be, are counted."""
    check = ImageCheck(images.pool, BATCH)
    check.compare(image_batch(images, 0))
    for number in range(1, 40):
        check.note(image_batch(images, number * BATCH))
    assert check.settle() == 40


def other_image(batch: list[torch.Tensor]) -> None:
    batch[0][1] = batch[0][2]


def one_bit(batch: list[torch.Tensor]) -> None:
    batch[0][3, 2, 100, 100] ^= 1


def order_of_labels(batch: list[torch.Tensor]) -> None:
    batch[1][:2] = batch[1][:2].flip(0)


def repeated(batch: list[torch.Tensor]) -> None:
    batch[1] -= BATCH


def same_sum(batch: list[torch.Tensor]) -> None:
    batch[0][0, 0, 0, :8] = torch.roll(batch[0][0, 0, 0, :8], 4)


@pytest.mark.thorough
@pytest.mark.parametrize("spoil", [other_image, one_bit, order_of_labels, repeated, same_sum])
def test_wrong_images_are_found(images: ReadyImages, spoil: Callable[[list[torch.Tensor]], None]) -> None:
    """Another image, another bit, another place, a batch that comes twice; two words that change places when whole."""
    check = ImageCheck(images.pool, BATCH)
    check.compare(image_batch(images, 0))
    batch = image_batch(images, BATCH)
    spoil(batch)
    check.compare(batch)
    with pytest.raises(WrongContent):
        check.settle()


def test_soak_batches_are_various() -> None:
    """Shapes follow from the number; all dtypes, empty tensors, scalars, strided and large ones are among them."""
    shapes = [soak_shapes(index) for index in range(2000)]
    assert shapes == [soak_shapes(index) for index in range(2000)]
    flat = [each for batch in shapes for each in batch]
    assert {each.dtype for each in flat} == set(SOAK_DTYPES)
    assert {len(each.shape) for each in flat} == {0, 1, 2, 3}
    assert any(0 in each.shape for each in flat)
    assert any(each.transposed for each in flat)
    sizes = [sum(each.dtype.itemsize * int(np.prod(each.shape)) for each in batch) for batch in shapes]
    assert max(sizes) > 300_000
    assert sorted(sizes)[1000] < 16_384


def test_soak_checksum() -> None:
    """It is the weighted sum modulo 2**64 of all bytes in order, whatever the strides; one bit or place changes it."""
    dataset, factors = SoakBatches(300), weights()
    for index in range(0, 300, 7):
        batch = dataset[index]
        tensors, (number, total) = batch["tensors"], batch["what"].tolist()
        assert [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors] == [
            (each.dtype, each.shape) for each in soak_shapes(index)
        ]
        content = b"".join(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes() for tensor in tensors)
        if len(content) < 5000:
            by_hand = sum(byte * (place * 0x5851F42D4C957F2E + 1) for place, byte in enumerate(content)) % 2**64
            assert total % 2**64 == by_hand
        assert number == index
        flat = flat_bytes(tensors)
        assert int(checksum(flat, factors)) == total
        if len(flat) > 1:
            assert int(checksum(flat.flip(0), factors)) != total or torch.equal(flat, flat.flip(0))
            flat[len(flat) // 2] ^= 1
            assert int(checksum(flat, factors)) != total


def test_soak_counts_what_differs(card: Card) -> None:
    """A flipped bit, and a batch in another batch's place with its checksum, are counted; other shapes are refused."""
    dataset, comparison = SoakBatches(200), Comparison(card)
    for number in range(8):
        comparison.add(number, dataset[number])
    assert (comparison.wrong(), comparison.batches) == (0, 8)
    batch = dataset[8]
    batch["tensors"][0].view(-1).view(torch.uint8)[0] ^= 1
    comparison.add(8, batch)
    batch = dataset[9]
    batch["what"][0] += 1
    comparison.add(9, batch)
    assert (comparison.wrong(), comparison.batches) == (2, 10)
    with pytest.raises(WrongContent, match="batch 10: "):
        comparison.add(10, dataset[11])


# ------------------------------------------------------------------------------------------------ measurements


@pytest.mark.thorough
def test_window(card: Card, images: ReadyImages) -> None:
    """It begins after the warm-up, ends where all workers gave equal numbers, and gives a rate. Batches are checked."""
    check = ImageCheck(images.pool, BATCH)
    window = Window(card, check, workers=3, seconds=0.0)
    count = 0
    while not window.take(image_batch(images, count * BATCH)):
        count += 1
    assert count + 1 == check.settle() >= 12 + 3
    assert (count + 1) % 3 == 0
    assert window.batches_a_second > 0
    assert window.cpu > 0


def test_stage_delivers_slots(card: Card) -> None:
    """The batches of the stage equal the slots' contents, each many times; a difference is found."""
    filled = FilledRing(NBYTES)
    assert len(set(filled.sums)) == gpu_slot.SLOTS
    seen: list[int] = []

    def look(slot: int, batch: torch.Tensor) -> None:
        assert torch.equal(batch, filled.contents[slot])
        seen.append(slot)

    for ahead in STAGES.values():
        with feeding(filled, card, ahead) as feed:
            count, seconds = feed.copies(0.0, look)
        assert count >= 2 * gpu_slot.SLOTS
        assert seconds > 0
    assert len(seen) >= 4 * gpu_slot.SLOTS
    filled.sums = [total + 1 for total in filled.sums]
    with feeding(filled, card, 1) as feed, pytest.raises(WrongContent, match="differ from their slots"):
        gpu_slot.check(feed, filled)


def test_pinned_copies(card: Card) -> None:
    """The other side copies the same content, and says so if not."""
    filled = FilledRing(NBYTES)
    copies = PinnedCopies(filled, card)
    copies.check()
    count, seconds = copies.copies(0.0)
    assert count >= 2 * gpu_slot.SLOTS
    assert seconds > 0
    filled.contents[0].zero_()
    copies.check()  # they were copies
    filled.sums.reverse()
    with pytest.raises(WrongContent, match="pinned tensor"):
        copies.check()


def test_stage_errors_end_a_measurement(card: Card) -> None:
    """A slot with a broken descriptor raises, and hangs nothing."""
    filled = FilledRing(NBYTES)
    filled.nbytes = 1 << 40
    feed = Feed(filled, card, 1)
    try:
        with pytest.raises(ValueError, match="a worker's answer is broken"):
            feed.copies(0.0)
    finally:
        feed.close()


def test_stage_over_a_device(card: Card) -> None:
    """Where copies come later, from locked memory, the same is measured: every batch comes straight from its slot."""
    with installed() as machine:
        filled = FilledRing(NBYTES)
        with feeding(filled, card, 1) as feed:
            gpu_slot.check(feed, filled)
            assert feed.copies(0.0)[0] >= 2 * gpu_slot.SLOTS
            assert feed.locks
            assert feed.statistics.staged_batches == 0
        assert set(machine.device.sources) == {"ring"}
        del feed, filled
    assert [each.undone for each in machine.locks] == [1]


def test_locks_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds a GB of a ring by itself and of a loader's rings; every lock is undone. No locks, no figures."""
    job = GpuJob("lock", "uint8", workers=(1,), size=1 << 20, device="cpu")
    assert gpu_slot.lock(job) == Outcome({}, [])
    monkeypatch.setattr(gpu_slot, "BATCH", 2)
    with installed() as machine:
        figures = gpu_slot.lock(job).figures
    assert set(figures) == {gpu_plan.LOCK, gpu_plan.PAGES, gpu_plan.UNLOCK, gpu_plan.LOADER_LOCK}
    assert all(value[FACADE] >= 0 for value in figures.values())
    assert machine.locks[0].nbytes == 4 << 20
    assert len(machine.locks) > 1
    assert {each.undone for each in machine.locks} == {1}


def test_soak_over_a_device() -> None:
    """All batches come as they were made, straight from rings but for the first batches of each."""
    with installed() as machine:
        figures, failures = soak(GpuJob("soak", loader=FACADE, workers=(2,), count=80, device="cpu"))
    assert (failures, figures[gpu_plan.WRONG], figures[gpu_plan.COMPARED]) == ([], {FACADE: 0}, {FACADE: 80})
    assert "ring" in machine.device.sources


def test_soak_finds_copies_that_are_late(card: Card) -> None:
    """Batches that are looked at before their copies have come are counted, each of them."""
    count = 8
    comparison = Comparison(card)
    with (
        installed(manual=True) as machine,
        asyncloader.DataLoader(
            SoakBatches(count), batch_size=None, num_workers=1, device="cpu", multiprocessing_context="fork"
        ) as loader,
    ):
        for number, batch in enumerate(loader):
            comparison.add(number, batch)
            machine.device.advance()
        machine.device.go()
    assert (comparison.wrong(), comparison.batches) == (count, count)


def test_prefetchers_pass_everything_on() -> None:
    """Both of torch's ways give the loader's batches, in order, on the device."""
    batches = [[torch.full((2,), number), torch.tensor([number])] for number in range(5)]
    for way in (moved, prefetched):
        came = list(way(batches, torch.device("cpu")))
        assert [int(batch[1]) for batch in came] == list(range(5))
    assert list(Indices(10, 4)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


JOBS = [
    GpuJob("slot", seconds=0.05, size=NBYTES, device="cpu"),
    GpuJob("soak", loader=FACADE, count=80, device="cpu"),
    GpuJob("step", "uint8", ";".join((FACADE, TORCHES[0])), seconds=0.05, batch=2, workers=(1,), device="cpu"),
    *(GpuJob("end", "uint8", name, seconds=0.05, batch=BATCH, workers=(2,), device="cpu") for name in LOADERS),
    GpuJob("end", "float32", FACADE, seconds=0.05, batch=BATCH, workers=(1, 2), device="cpu"),
]


@pytest.mark.slow
@pytest.mark.parametrize("job", JOBS, ids=lambda job: f"{job.probe} {job.workload} {job.loader}".strip())
def test_measurement_in_its_process(job: GpuJob) -> None:
    """Every measurement, on the CPU in the place of a card, gives numbers of the right kind, its content checked."""
    if job.loader in SPDLS:
        pytest.importorskip("spdl.pipeline")
    figures, failures = gpu.run_apart(job, 120.0)
    assert failures == []
    if job.probe == "slot":
        assert set(figures) == {f"slot/{NBYTES}"}
        assert set(figures[f"slot/{NBYTES}"]) == {PINNED, *STAGES}
    elif job.probe == "soak":
        assert figures[gpu_plan.WRONG] == {FACADE: 0}
        assert figures[gpu_plan.COMPARED] == {FACADE: 80}
    elif job.probe == "step":
        assert set(figures[gpu_plan.CACHED]) == set(figures[gpu_plan.FED]) == set(job.loader.split(";"))
        assert set(figures[gpu_plan.BATCH_TIME]) == {FACADE}
    else:
        for workers in job.workers:
            assert set(figures[gpu_plan.end_metric(job.workload, workers)]) == {job.loader}
            assert set(figures[gpu_plan.cpu_metric(job.workload, workers)]) == {job.loader}
    # A soak may find nothing wrong, and the host-only loaders may stage nothing.
    assert all(value > 0 for metric, each in figures.items() for value in each.values() if metric not in ZEROS)


ZEROS = {gpu_plan.WRONG, *(gpu_plan.staged_metric(dtype, count) for dtype in gpu_plan.DTYPES for count in (1, 2))}


@pytest.mark.thorough
def test_failure_has_the_reason() -> None:
    """A measurement that fails in its process is an error with the reason in it, not a number."""
    with pytest.raises(JobFailed, match="no attribute 'nonsense'") as raised:
        gpu.run_apart(GpuJob("end", "nonsense", FACADE, device="cpu"), 60.0)
    assert gpu._reason(str(raised.value)).startswith("AttributeError: ")


def test_one_number_of_workers_may_fail() -> None:
    """A loader that fails with one number of workers is measured with the others, and the failure is reported."""
    from .gpu_end import end

    outcome = end(GpuJob("end", "uint8", "no such loader", batch=BATCH, workers=(1, 2), device="cpu"))
    assert outcome.figures == {}
    assert [each.partition(":")[0] for each in outcome.failures] == ["1 workers", "2 workers"]
