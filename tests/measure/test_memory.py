from __future__ import annotations

import gc
import mmap
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile

from lightning_flops import predict_memory, profile_training
from lightning_flops.analysis.plan import build_memory_report
from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.measure.memory import MemoryReading, MemoryWatch, memory_reader
from lightning_flops.records import OUTSIDE, PhaseFlops, StepRecord, StepSignature, StepTensors
from lightning_flops.report.text import render_text
from tests.analysis.in_memory import known
from tests.results import profile_of


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
    watch = MemoryWatch(nn.Linear(2, 2), read=books.read, device=torch.device("cuda"))
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
    watch = MemoryWatch(model, read=Allocator(0, 0).read, device=torch.device("cuda"))
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


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_what_is_sparse_takes_what_its_indices_and_values_do() -> None:
    """By hand: of 100 rows of 3 float32 numbers, rows 2, 7 and 9 were looked up; a graph of 3 nodes has 3 edges."""
    model = nn.Embedding(100, 3, sparse=True)
    model.register_buffer("graph", torch.eye(3).to_sparse_csr())
    watch = MemoryWatch(model, read=Allocator(0, 0).read, device=torch.device("cuda"))
    watch.enter("backward")
    model(torch.tensor([2, 7, 9])).sum().backward()
    watch.leave()
    record = known(watch.record(optimizers=None))
    # A row's number of 8 bytes for each row of values.
    assert (record.parameter_bytes, record.gradient_bytes) == (100 * 3 * 4, 3 * 8 + 3 * 3 * 4)
    # Where each of the rows begins and the last one ends; for each value its column's number.
    assert record.buffer_bytes == 4 * 8 + 3 * 8 + 3 * 4


def test_tied_parameters_take_memory_once() -> None:
    """Of two layers of 4 x 4 float32 numbers that share their weight."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    optimizer, batch = torch.optim.Adam(model.parameters()), torch.ones(8, 4)
    assert predict_memory(model, batch, optimizer).at_peak["parameters"] == 64
    with profile_training(model, optimizer, profile_step=1, timing_steps=1, trace=False) as profiler:
        for _ in range(8):
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    memory, tensors = profile_of(profiler).memory, profile_of(profiler).tensors
    assert memory is not None and tensors is not None
    assert (memory.parameter_bytes, tensors.at_peak["parameters"]) == (64, 64)
    assert memory.optimizer_bytes == 2 * 64 + 4  # two moments, and a number of steps


def test_resident_memory_of_this_process_grows_with_what_it_holds() -> None:
    read = memory_reader(torch.device("cpu"))
    before = read()
    with mmap.mmap(-1, 64 * 2**20) as held:  # from the system: a heap may have as much that is free, and resident
        for page in range(0, len(held), 4096):
            held[page] = 1  # touched, so that it is resident
        after = read()
    assert before.current is not None and after.current is not None and after.peak is not None
    assert after.current - before.current >= 60 * 2**20
    assert after.peak >= after.current


# ---- every allocation of a counted step

SIGNATURE = StepSignature(batches=(), forwards=1, backwards=1, updates=1)
STEP = StepRecord(index=0, signature=SIGNATURE, micro_steps=1, samples=None, tokens=None)


def followed(model: nn.Module, batch: torch.Tensor, labels: torch.Tensor, optimizer: Any) -> tuple[StepTensors, int]:
    """The second step, and what the CPU's allocator says of its peak above what was held before."""

    def step() -> None:
        watch.enter("forward")
        scores = model(batch)
        watch.leave()
        loss = cross_entropy(scores, labels)  # a loop's own, outside of every part
        del scores
        watch.enter("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        watch.leave()
        del loss
        watch.enter("optimizer")
        optimizer.step()
        watch.leave()
        optimizer.zero_grad()

    def made() -> MemoryWatch:
        return MemoryWatch(model, read=Allocator(0, 0).read, device=torch.device("cpu"))

    watch = made()
    step()
    watch = made()
    gc.collect()
    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded,
        FlopCounter(model, lives=watch),
    ):
        step()
    assert recorded.profiler is not None
    events = [one for one in recorded.profiler.kineto_results.events() if one.name() == "[memory]"]
    now = peak = 0
    for one in sorted(events, key=lambda one: one.start_ns()):
        now += one.nbytes()
        peak = max(peak, now)
    tensors = watch.tensors(optimizers=[optimizer], step=STEP, samples=len(batch))
    assert tensors is not None
    return tensors, peak


@pytest.mark.parametrize("rows", [64, 2048])
def test_the_peak_of_a_followed_step_is_the_allocators_and_the_prediction(rows: int) -> None:
    """The peak is in the optimizer's step at first, and in the backward of the larger batch."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    batch, labels = torch.randn(rows, 64), torch.randint(0, 10, (rows,))
    tensors, grown = followed(model, batch, labels, optimizer)
    report = build_memory_report(tensors)
    own = sum(one.nbytes for one in model.parameters())
    states = sum(one.nbytes for state in optimizer.state.values() for one in state.values())
    before = own + states + batch.nbytes + labels.nbytes
    assert report.peak_bytes == pytest.approx(before + grown, abs=16)  # numbers that Python makes tensors of
    assert report.at_peak["parameters"] == own
    assert report.at_peak["optimizer"] == pytest.approx(states, abs=16)
    assert report.at_peak["batch"] == batch.nbytes + labels.nbytes
    predicted = predict_memory(model, batch, optimizer, loss=lambda scores: cross_entropy(scores, labels))
    assert report.when.part == predicted.when.part == ("backward" if rows == 2048 else "optimizer")
    kept = {one.name: one.kept_bytes for one in report.modules}
    assert {name: kept[name] for name in "123"} == dict.fromkeys("123", 4 * rows * 256)
    assert predicted.peak_bytes == pytest.approx(report.peak_bytes, abs=16)  # the loss's labels are a batch's, too


def test_a_run_has_activations_by_module_and_kind_at_the_peak_beside_what_the_process_held() -> None:
    """By hand: the backward of the second layer makes the gradient of what the first one's ReLU has put out."""
    model = nn.Sequential(nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 4))
    optimizer, hidden = torch.optim.SGD(model.parameters()), 4 * 4096 * 512
    with profile_training(model, optimizer, profile_step=1, timing_steps=1, trace=False) as profiler:
        for _ in range(8):
            model(torch.randn(4096, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    profile = profile_of(profiler)
    memory, tensors = profile.memory, profile.tensors
    assert memory is not None and tensors is not None
    assert (tensors.when.part, tensors.when.module) == ("backward", "1")
    kinds, modules = tensors.at_peak, {one.name: one for one in tensors.modules}
    assert (modules["1"].kept_bytes, modules["1"].peak_bytes) == (hidden, 2 * hidden)
    assert modules["2"].peak_bytes == hidden  # the gradient of what the ReLU has put out
    assert kinds["activations"] >= hidden and kinds["temporary"] >= 2 * hidden
    assert sum(kinds.values()) == tensors.peak_bytes
    assert kinds["batch"] == 4 * 4096 * 8  # made after a zero_grad with which the step had begun
    text = render_text(profile, detailed=True)
    assert "peak resident, of this process so far" in text and "Of tensors: Peak " in text
    assert "kept for backward" in text


def test_the_batch_that_fits_is_what_a_followed_step_has_room_for() -> None:
    """Where the peak goes with the batch, and where it is the optimizer's step whatever the batch is."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters())
    tensors, _ = followed(model, torch.randn(512, 64), torch.randint(0, 10, (512,)), optimizer)
    report = build_memory_report(tensors)
    for available in (3 * report.peak_bytes, report.peak_bytes, report.peak_bytes // 2):
        largest = build_memory_report(replace(tensors, available_bytes=available)).largest
        assert largest is not None
        again, _ = followed(model, torch.randn(largest.size, 64), torch.randint(0, 10, (largest.size,)), optimizer)
        assert 0.9 * available <= build_memory_report(again).peak_bytes <= available


def test_what_is_free_is_asked_of_the_device_of_the_run_wherever_its_parameters_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """DeepSpeed's offload keeps them on the host; a model may have none of its own."""
    free = {torch.device("cuda", 1): 700}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device], 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 300)
    seen = StepTensors(lives=[], before_forward=0, flops=PhaseFlops(), batch_size=1, notes=())
    monkeypatch.setattr(MemoryWatch, "taken", lambda *_: seen)  # of storages on a GPU, which no CPU has
    signature = StepSignature(batches=(), forwards=1, backwards=1, updates=1)
    step = StepRecord(index=0, signature=signature, micro_steps=1, samples=1)
    for model in (nn.Linear(2, 2), nn.Identity()):
        watch = MemoryWatch(model, read=Allocator(0, 0).read, device=torch.device("cuda", 1))
        taken = watch.tensors(optimizers=None, step=step, samples=1)
        assert taken is not None and taken.available_bytes == 900  # nine tenths: the rest is for what is no tensor


def test_what_is_freed_after_the_step_does_not_reach_its_account() -> None:
    """Which another thread may be reading."""
    model = nn.Linear(8, 8)
    watch = MemoryWatch(model, read=Allocator(0, 0).read, device=torch.device("cpu"))
    with FlopCounter(model, lives=watch):
        watch.enter("forward")
        kept = model(torch.randn(4, 8))
        watch.leave()
        tensors = watch.tensors(optimizers=(), step=STEP, samples=4)
    assert tensors is not None
    before = [(life.born, life.died) for life in tensors.lives]
    del kept
    assert [(life.born, life.died) for life in tensors.lives] == before


def test_a_step_whose_storages_change_their_sizes_has_no_account() -> None:
    """As FSDP's do, which torch.ops do not show."""
    model = nn.Linear(8, 8)
    watch = MemoryWatch(model, read=Allocator(0, 0).read, device=torch.device("cpu"))
    with FlopCounter(model, lives=watch):
        watch.enter("forward")
        kept = model(torch.randn(4, 8))
        watch.leave()
        assert watch.tensors(optimizers=(), step=STEP, samples=4) is not None
        kept.untyped_storage().resize_(0)
    assert watch.tensors(optimizers=(), step=STEP, samples=4) is None


@pytest.mark.parametrize("first", [nn.Linear(8, 4), nn.LazyLinear(4)], ids=["some are lazy", "all are lazy"])
def test_what_lazy_layers_make_in_the_counted_forward_is_parameters(first: nn.Module) -> None:
    """By hand: weights of 8 x 4 and 4 x 2 with their biases; the second layer's input and the loss are kept."""
    model, batch = nn.Sequential(first, nn.LazyLinear(2)), torch.randn(4, 8)
    watch = MemoryWatch(model, read=Allocator(0, 0).read, device=torch.device("cpu"))
    with FlopCounter(model, lives=watch):
        watch.enter("forward")
        loss = model(batch).sum()
        watch.leave()
        watch.enter("backward")
        loss.backward()
        watch.leave()
    tensors = watch.tensors(optimizers=(), step=STEP, samples=4)
    assert tensors is not None
    report = build_memory_report(tensors)
    assert report.at_peak["parameters"] == 4 * (8 * 4 + 4 + 4 * 2 + 2)
    assert {one.name: one.kept_bytes for one in report.modules if one.kept_bytes} == {"0": 4 * 4 * 4, OUTSIDE: 4}


def test_the_peak_grew_in_the_part_that_ran_when_it_did() -> None:
    books = Allocator(current=100, peak=400)
    watch = MemoryWatch(nn.Linear(2, 2), read=books.read, device=torch.device("cpu"))
    for part, size in (("forward", 200), ("backward", 150), ("optimizer", -50)):
        watch.enter(part)
        books.change(size)
        watch.leave()
    record = watch.record(optimizers=None)
    assert record is not None and record.peak_grew_in == "backward"
