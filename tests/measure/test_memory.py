from __future__ import annotations

import torch
from torch import nn

from lightning_flops.measure.memory import MemoryReading, MemoryWatch, memory_reader


class Allocator:
    """Books that a test writes; a peak only rises."""

    def __init__(self, current: int, peak: int) -> None:
        self.current, self.peak = current, peak

    def change(self, size: int) -> None:
        self.current += size
        self.peak = max(self.peak, self.current)

    def read(self) -> MemoryReading:
        return MemoryReading(current=self.current, peak=self.peak, reserved_peak=2 * self.peak)


def test_phase_has_what_it_held_at_its_end_also_inside_another() -> None:
    """Lightning's closure runs forward and backward inside the optimizer's step; the second forward held less."""
    books = Allocator(current=100, peak=400)
    watch = MemoryWatch(nn.Linear(2, 2), read=books.read, on_device=True)
    assert watch.record(optimizers=None) is None
    for kept, freed in ((300, 250), (200, 150)):
        watch.enter("optimizer")
        watch.enter("forward")
        books.change(kept + 50)  # 450 at first
        books.change(-50)
        watch.leave()
        watch.enter("optimizer", counts=False)  # drops the gradients
        watch.leave()
        watch.enter("backward")
        books.change(-freed)
        watch.leave()
        books.change(-50)
        watch.leave()
    record = watch.record(optimizers=None)
    assert record is not None
    assert list(record.held_bytes.items()) == [("forward", 400), ("backward", 150), ("optimizer", 100)]
    assert (record.run_peak_bytes, record.run_reserved_peak_bytes) == (450, 900)
    assert record.kept_by_forward_bytes == 300


def test_bytes_are_those_of_each_kind_of_tensor() -> None:
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7)).to(torch.float64)
    optimizer = torch.optim.Adam(model.parameters())
    watch = MemoryWatch(model, read=Allocator(0, 0).read, on_device=True)
    watch.enter("backward")
    model(torch.ones(3, 5, dtype=torch.float64)).sum().backward()
    watch.leave()
    optimizer.step()
    record = watch.record(optimizers=[optimizer])
    assert record is not None
    # 5*7 + 7 + 7 + 7 = 56 parameters of 8 bytes; running mean and variance of 7, and an int64 number of batches.
    assert record.parameter_bytes == record.gradient_bytes == 448
    assert record.buffer_bytes == 7 * 8 + 7 * 8 + 8
    # Two moments each, and a float32 step for each of the four parameters.
    assert record.optimizer_bytes == 2 * 448 + 4 * 4


def test_resident_memory_of_this_process_grows_with_what_it_holds() -> None:
    read = memory_reader(torch.device("cpu"))
    before = read()
    held = bytearray(64 * 2**20)
    held[::4096] = b"x" * len(held[::4096])  # touched, so that it is resident
    after = read()
    assert before.current is not None and after.current is not None and after.peak is not None
    assert after.current - before.current >= 60 * 2**20
    assert after.peak >= after.current
