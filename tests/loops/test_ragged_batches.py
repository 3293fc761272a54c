"""Batches whose tensors do not show their rows, as of detection: the rows are those that the loader was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

from lightning_flops import profile_training
from lightning_flops.measure.torch_private.optional import rows_fetched
from lightning_flops.pytorch import TrainingProfiler
from tests.results import profile_of, throughput_of

BATCH, IMAGES = 8, 43  # five full batches and one of 3

Target = dict[str, Tensor]


class Images(Dataset[tuple[Tensor, Target]]):
    """Images of different widths, with some boxes each; in the third batch each has three, as an image has channels."""

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, place: int) -> tuple[Tensor, Target]:
        boxes = 3 if place // BATCH == 2 else place % 4 + 1
        return torch.ones(3, 6, 6 + place % 5), {"boxes": torch.ones(boxes, 4)}


class Stream(IterableDataset[tuple[Tensor, Target]]):
    """The same, of no known length."""

    def __iter__(self) -> Iterator[tuple[Tensor, Target]]:
        yield from (Images()[place] for place in range(IMAGES))


class Detector(nn.Module):
    """Looks at one image after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 3)

    def forward(self, images: Any, targets: Any = None) -> Tensor:
        return torch.stack([self.conv(one[None]).mean() for one in images]).sum()


def together(items: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*items, strict=True))


def of_images(dataset: Any = None, **more: Any) -> DataLoader[Any]:
    return DataLoader(Images() if dataset is None else dataset, collate_fn=together, **more)


def loop_over(
    loader: Any, forward: Callable[[Detector, Any, Any], Tensor], **settings: Any
) -> tuple[TrainingProfiler, int]:
    """A loop's profiler, and the images that it was trained on, by its own count."""
    net, images_seen = Detector(), 0
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    settings = {"profile_step": 1, "timing_steps": 1, "trace": False, **settings}
    with profile_training(net, optimizer, **settings) as profiler:
        for images, targets in loader:
            forward(net, images, targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            images_seen += len(images)
    return profiler, images_seen


def moved(net: Detector, images: Any, targets: Any) -> Tensor:
    result: Tensor = net([one.clone() for one in images], [{**one} for one in targets])
    return result


WAYS: dict[str, Callable[[Detector, Any, Any], Tensor]] = {
    "as torchvision": moved,
    "images alone": lambda net, images, targets: net(list(images)),
    "one tensor": lambda net, images, targets: net(torch.stack([one[:, :, :6] for one in images])),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_samples_of_a_list_of_images_are_what_the_loader_was_asked_for(way: str, workers: int) -> None:
    profiler, seen = loop_over(of_images(batch_size=BATCH, num_workers=workers), WAYS[way])
    profile, run = profile_of(profiler), throughput_of(profiler)
    assert (profile.samples, profile.context.micro_batch_size, seen) == (BATCH, BATCH, IMAGES)
    assert run.ips is not None and run.ips_unit == "samples/s"
    assert [one for one in profile.notes if "samples/s" in one] == []


@pytest.mark.parametrize("step", [2, 5])  # that of three boxes in each image, and the last, smaller one
def test_every_batch_has_its_own_number_of_samples(step: int) -> None:
    profiler, _ = loop_over(of_images(batch_size=BATCH), moved, profile_step=step)
    assert profile_of(profiler).samples == {2: BATCH, 5: IMAGES - 5 * BATCH}[step]


def test_samples_stay_unknown_where_the_model_gets_something_else() -> None:
    """Half of a batch, and all of two batches in one."""
    profiler, _ = loop_over(of_images(batch_size=BATCH), lambda net, images, targets: net(images[:4]))
    assert profile_of(profiler).samples is None

    def pairs() -> Iterator[Any]:
        loader = iter(of_images(batch_size=BATCH, drop_last=True))
        for (first, some), (second, more) in zip(loader, loader, strict=False):
            yield first + second, some + more

    profiler, _ = loop_over(pairs(), moved, profile_step=0)
    assert profile_of(profiler).samples is None


class OneByOne(BatchSampler):
    """Hands out what its parent does not."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([place] for place in self.sampler)


IN_ORDER = SequentialSampler(range(IMAGES))
LOADERS: dict[str, tuple[Callable[[], DataLoader[Any]], Sequence[int | None]]] = {
    "the last is smaller": (lambda: of_images(batch_size=BATCH), [BATCH] * 5 + [3]),
    "the last is left out": (lambda: of_images(batch_size=BATCH, drop_last=True), [BATCH] * 5),
    "workers": (lambda: of_images(batch_size=20, num_workers=2, shuffle=True), [20, 20, 3]),
    "one of two ranks": (
        lambda: of_images(batch_size=BATCH, sampler=DistributedSampler(Images(), num_replicas=2, rank=1)),
        [BATCH, BATCH, 6],  # of 44 images, one of them twice, each has 22
    ),
    "a stream": (lambda: of_images(Stream(), batch_size=20), [None] * 3),
    "a batch sampler of another class": (lambda: of_images(batch_sampler=OneByOne(IN_ORDER, 20, False)), [None] * 43),
    "torch's own batch sampler": (lambda: of_images(batch_sampler=BatchSampler(IN_ORDER, 20, False)), [20, 20, 3]),
    "one item": (lambda: of_images(batch_size=1), [None] * 43),
    "no batches": (lambda: DataLoader(Images(), batch_size=None), [None] * 43),
}


@pytest.mark.parametrize("name", LOADERS)
def test_rows_are_known_where_torch_itself_divides_a_known_number(name: str) -> None:
    make, rows = LOADERS[name]
    iterator, found = iter(make()), []
    assert rows_fetched(iterator) is None  # it has brought nothing
    for batch in iterator:
        found.append(rows_fetched(iterator))
        assert found[-1] in (None, len(batch[0]))
    assert found == rows and rows_fetched(None) is None
