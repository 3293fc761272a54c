"""How reports get to the user: from a thread of their own, whatever else happens, and never into a timed step."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import distributed as torch_distributed, nn
from torch.utils.data import DataLoader

from lightning_flops import Profile, ProfilerConfig, profile_training
from lightning_flops.adapters.loop import LoopAdapter
from lightning_flops.adapters.place import Frame, loop_output
from lightning_flops.analysis.ranks import with_ranks
from lightning_flops.pytorch import TrainingProfiler
from lightning_flops.records import BatchTokens
from lightning_flops.run import delivery
from lightning_flops.run.delivery import Worker, finish_dropped
from lightning_flops.run.ranks import Ranks
from lightning_flops.run.throughput import Batch, Monitor
from tests.fake_clock import FakeNow
from tests.listening import warnings_in
from tests.prompt_worker import PromptWorker
from tests.report import jobs
from tests.report.windows import build_profile
from tests.results import profile_of, throughput_of

distributed: Any = torch_distributed  # which does not say that its stores are public

SETTINGS: dict[str, Any] = {"profile_step": 1, "timing_steps": 2, "trace": False, "lines": False}
CLOSES_AFTER = 6
"""Step 1 is counted, 2 and 3 settle, 4 and 5 are timed."""


pytestmark = pytest.mark.usefixtures("no_checks")


def rows_of(steps: int) -> DataLoader[Any]:
    rows: Any = torch.ones(steps * 2, 4)  # a tensor is a dataset, too
    return DataLoader(rows, batch_size=2)


def in_a_loop(
    steps: int, *, at: Callable[[TrainingProfiler, int], object] = lambda profiler, done: None, **given: Any
) -> TrainingProfiler:
    """A loop of so many steps that was profiled; *at* is called after each with the steps that are done."""
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with profile_training(net, optimizer, **{**SETTINGS, **given}) as profiler:
        for done, rows in enumerate(rows_of(steps), 1):
            net(rows).sum().backward()
            optimizer.step()
            at(profiler, done)
    return profiler


class SlowWorker(PromptWorker):
    """Has its jobs done when it is told to go on, or at the end."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], None]] = []

    @property
    def is_busy(self) -> bool:  # type: ignore[override]
        return bool(self.jobs)

    def submit(self, job: Callable[[], None], what: str = "a report") -> None:
        self.jobs.append(job)

    def go_on(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()

    def finish(self, within_sec: float = 10.0) -> bool:
        self.go_on()
        return True


def make_slow(monkeypatch: pytest.MonkeyPatch) -> SlowWorker:
    """The worker of the next run."""
    worker = SlowWorker()
    monkeypatch.setattr("lightning_flops.run.delivery.Worker", lambda: worker)
    return worker


# ---- no step is timed beside a report


@pytest.mark.parametrize("made_after", [8, 20])
def test_no_step_of_a_second_window_is_timed_while_the_first_report_is_made(
    made_after: int, monkeypatch: pytest.MonkeyPatch, monitor_now: FakeNow
) -> None:
    """The second window counts step 8 and settles for 9 and 10; a step is slower by 5 s while the worker works."""
    worker = make_slow(monkeypatch)

    def step(profiler: TrainingProfiler, done: int) -> None:
        if done == made_after:
            worker.go_on()
        monitor_now.sleep(6.0 if worker.is_busy else 1.0)

    first, second = in_a_loop(30, at=step, profile_step=[1, 8], monitor=True).profiles
    begins = max(made_after + 1, 11)
    assert (first.timed_steps, second.timed_steps) == ((4, 5), (begins, begins + 1))
    assert second.timing is not None and second.timing.global_step_sec == pytest.approx(1.0)


def test_no_batch_beside_a_report_is_in_the_throughput(monkeypatch: pytest.MonkeyPatch, monitor_now: FakeNow) -> None:
    worker = make_slow(monkeypatch)

    def step(profiler: TrainingProfiler, done: int) -> None:
        if done == 10:
            worker.go_on()
        monitor_now.sleep(6.0 if worker.is_busy else 1.0)

    summary = throughput_of(in_a_loop(20, at=step, monitor=True))
    beside = 10 - CLOSES_AFTER
    assert summary.batches == 20 - 1 - beside  # nor is the counted one
    assert summary.batch_cost_sec is not None and summary.batch_cost_sec.maximum == pytest.approx(1.0)


def test_a_job_that_hangs_for_a_minute_slows_nothing_down(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, hangs = FakeNow(), threading.Event()
    monkeypatch.setattr("lightning_flops.run.delivery.host_clock.now", clock)
    worker, begun = Worker(), threading.Event()

    def job() -> None:
        begun.set()
        hangs.wait(60)

    worker.submit(job)
    assert begun.wait(60)
    clock.sleep(59.0)
    assert worker.is_busy
    clock.sleep(2.0)
    assert not worker.is_busy
    hangs.set()
    worker.finish()


# ---- where the loggers show it


@pytest.mark.parametrize("made_after", [7, 13, 40])
def test_scalars_stand_at_the_last_step_of_the_window_whenever_the_report_is_ready(
    made_after: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    worker, written = make_slow(monkeypatch), list[tuple[str, int]]()

    def step(profiler: TrainingProfiler, done: int) -> None:
        if done == made_after:
            worker.go_on()

    writer = lambda scalars, step: written.extend((tag, step) for tag in scalars)  # noqa: E731
    profiler = in_a_loop(30, at=step, log_dir=tmp_path, writer=writer, initial_step=100)
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0, "tensors": 0}).Reload()
    of_window = [tag for tag in events.Tags()["scalars"] if tag.startswith("flops_profiler/")]
    assert len(of_window) > 10
    assert {one.step for tag in of_window for one in events.Scalars(tag)} == {100 + CLOSES_AFTER}
    (text,) = events.Tensors("flops_profiler/profile/text_summary")
    assert (text.step, profile_of(profiler).report_step) == (100 + CLOSES_AFTER, 100 + CLOSES_AFTER)
    # A function may be ``wandb.log``, which drops what is behind its latest step: it gets the run's own.
    ready_at = 100 + min(made_after + 1, 30)
    assert {step for tag, step in written if tag.startswith("flops_profiler/")} == {ready_at}


@pytest.mark.lines
@pytest.mark.timeout(300, method="thread")  # by itself pytest-timeout takes SIGALRM
@pytest.mark.parametrize(("steps", "step_sec"), [(70, 0.0), (20, 0.07)])
def test_scalars_stand_at_the_last_step_that_was_timed_however_many_more_have_their_lines_sampled(
    steps: int, step_sec: float
) -> None:
    profile = profile_of(in_a_loop(steps, at=lambda profiler, done: time.sleep(step_sec), lines=True))
    assert profile.lines is not None
    assert profile.report_step == CLOSES_AFTER


# ---- who reads waits


class SlowAnalysis:
    """Analyzes a window when it is let go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()
        analyze = delivery.profile_of_window

        def slowly(*args: Any, **kwargs: Any) -> Profile:
            self.begun.set()
            assert self.goes_on.wait(60)
            return analyze(*args, **kwargs)

        monkeypatch.setattr(delivery, "profile_of_window", slowly)


def test_whoever_reads_profile_waits_for_the_report_that_is_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    analysis, found = SlowAnalysis(monkeypatch), dict[int, Profile | None]()

    def step(profiler: TrainingProfiler, done: int) -> None:
        if done < CLOSES_AFTER:
            found[done] = profiler.profile
        elif done == CLOSES_AFTER:
            assert analysis.begun.wait(60)
            threading.Timer(0.05, analysis.goes_on.set).start()
            found[done] = profiler.profile

    in_a_loop(8, at=step)
    *before, last = found.values()
    assert before == [None] * (CLOSES_AFTER - 1)
    assert last is not None and last.profile_step == 1


def test_a_report_that_hangs_holds_a_reader_up_for_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    analysis = SlowAnalysis(monkeypatch)

    def step(profiler: TrainingProfiler, done: int) -> None:
        if done == CLOSES_AFTER:
            assert profiler._delivery is not None
            profiler._delivery.await_profiles(0.01)
            assert profiler._profiles == type(profiler._profiles)([])
            analysis.goes_on.set()

    assert profile_of(in_a_loop(8, at=step)).profile_step == 1


# ---- several ranks


@dataclass
class Watched:
    """A store that keeps which of its methods each thread has called."""

    store: Any = field(default_factory=lambda: distributed.HashStore())
    calls: list[tuple[str, str]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.calls.append((threading.current_thread().name, name))
            return getattr(self.store, name)(*arguments)

        return call

    def of_training(self) -> set[str]:
        return {name for thread, name in self.calls if thread == threading.current_thread().name}


@contextmanager
def rank_0_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Watched, Ranks]]:
    """Loops inside are rank 0's; the store, and rank 1, which a test speaks for."""
    store = Watched()
    with monkeypatch.context() as patch:
        patch.setattr(delivery, "Ranks", partial(Ranks, find_store=lambda: store, number=0))
        frame = Frame(framework="torch", rank=0, world_size=2, strategy="", precision=lambda _: "fp32")
        patch.setattr("lightning_flops.pytorch.frame_of", lambda model, **_: frame)
        yield store, Ranks(rank=1, world_size=2, config=ProfilerConfig(), number=0, find_store=lambda: store.store)


def test_the_worker_waits_for_other_ranks_reads_and_merges_and_the_training_thread_asks_the_store_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    merged_on = list[str]()

    def merging(*given: Any, **settings: Any) -> Profile:
        merged_on.append(threading.current_thread().name)
        return with_ranks(*given, **settings)

    monkeypatch.setattr("lightning_flops.run.ranks.with_ranks", merging)
    with rank_0_of_two(monkeypatch) as (store, one):

        def step(profiler: TrainingProfiler, done: int) -> None:
            if done == CLOSES_AFTER + 2:
                threading.Timer(0.1, one.say_absent, (1, "it is a test's")).start()
                assert profile_of(profiler).ranks is not None  # waits
                assert store.of_training() == set()

        profiler = in_a_loop(30, at=step)
    assert merged_on == ["lightning_flops"]
    (profile,) = profiler.profiles
    assert profile.ranks is not None and profile.ranks.absences == {"it is a test's": (1,)}


def test_the_model_of_a_run_that_was_dropped_is_free_while_other_ranks_are_awaited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rank_0_of_two(monkeypatch) as (_, one):
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        profiler = profile_training(net, optimizer, **SETTINGS)
        profiler.start()
        for rows in rows_of(CLOSES_AFTER + 2):
            net(rows).sum().backward()
            optimizer.step()
        run, profiles, alive = profiler.run, profiler._profiles, weakref.ref(net)
        while not run.delivery.worker.is_paused:
            time.sleep(0.01)
        run.finish(waits=False)
        profiler._end_run()
        del net, optimizer, run, profiler
        gc.collect()
        assert alive() is None
        one.say_absent(1, "it is a test's")
        finish_dropped()
        assert [one.ranks is not None for one in profiles] == [True]


def test_a_wait_for_other_ranks_slows_no_batch_down_and_lets_no_window_be_timed() -> None:
    worker, waits, goes_on = Worker(), threading.Event(), threading.Event()

    def job() -> None:
        while not goes_on.is_set():
            waits.set()
            worker.pause(0.02)

    worker.submit(job)
    assert waits.wait(60)
    while not worker.is_paused:
        pass
    assert not worker.is_busy
    threading.Timer(0.3, goes_on.set).start()
    assert worker.finish(0.2)  # as long as it computes; it has waited longer


def test_between_two_looks_nothing_can_be_timed_and_no_step_is_timed_beside_the_merge(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, worker, store = FakeNow(), Worker(), distributed.HashStore()
    looking, merging = set[tuple[bool, bool]](), list[tuple[bool, bool]]()

    def look() -> Any:
        if clock() > 100.0:  # it has waited once
            looking.add((worker.is_paused, worker.is_busy))
        return store

    def sleep(seconds: float) -> None:
        clock.sleep(seconds)
        if clock() >= 200.0:  # longer than any job computes
            other.say_absent(None, "it is a test's")

    def merged(profile: Profile, *_: Any, **__: Any) -> Profile:
        merging.append((worker.is_paused, worker.is_busy))
        return profile

    monkeypatch.setattr("lightning_flops.host_clock.now", clock)
    monkeypatch.setattr("lightning_flops.host_clock.sleep", sleep)
    monkeypatch.setattr("lightning_flops.run.ranks.with_ranks", merged)
    how: dict[str, Any] = {
        "world_size": 2,
        "config": ProfilerConfig(ranks_timeout_sec=300.0),
        "number": 0,
        "clock": clock,
    }
    other = Ranks(rank=1, find_store=lambda: store, **how)
    zero = Ranks(rank=0, find_store=look, pause=worker.pause, **how)
    worker.submit(partial(zero.exchange, build_profile(jobs.slow_loader()[0], config=jobs.CONFIG)))
    assert worker.finish()
    assert clock() >= 200.0
    assert (looking, merging) == ({(True, False)}, [(False, True)])


def test_a_failure_of_ours_keeps_the_window_that_is_being_analyzed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    analysis = SlowAnalysis(monkeypatch)
    with rank_0_of_two(monkeypatch) as (_, one):

        def step(profiler: TrainingProfiler, done: int) -> None:
            if done == CLOSES_AFTER:
                assert analysis.begun.wait(60) and profiler.run is not None
                one.say_absent(1, "it is a test's")
                profiler.run.throughput.monitor = None  # the next batch of ours raises
                threading.Timer(0.05, analysis.goes_on.set).start()

        profiler = in_a_loop(9, at=step, log_dir=tmp_path)
    failed = "the FLOPs profiler failed and is off; the program goes on: AttributeError"
    assert any(one.startswith(failed) for one in warnings_in(caplog))
    assert profile_of(profiler).ranks is not None
    assert Profile.from_json((tmp_path / "lightning_flops" / "profile.json").read_text()) == profile_of(profiler)


def test_a_rank_whose_run_fails_before_it_begins_says_so_and_its_next_run_is_the_others_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = distributed.HashStore()
    monkeypatch.setattr(delivery, "Ranks", partial(Ranks, find_store=lambda: store))
    frame = Frame(framework="torch", rank=1, world_size=2, strategy="", precision=lambda _: "fp32")
    monkeypatch.setattr("lightning_flops.pytorch.frame_of", lambda model, **_: frame)
    with monkeypatch.context() as patch:
        patch.setattr(LoopAdapter, "begin", lambda self: 1 // 0)
        in_a_loop(2)
    in_a_loop(8)
    ours = sorted(key.partition("/")[2] for key in store.list_keys() if key.startswith("lightning_flops/"))
    failed, begun = sorted({int(one.partition("/")[0]) for one in ours})
    assert begun == failed + 1
    assert b"ZeroDivisionError" in delivery_of(store, failed) and f"{begun}/1/1" in ours


def delivery_of(store: Any, number: int) -> bytes:
    """Why rank 1 is out of the run of that *number*."""
    import zlib

    return zlib.decompress(store.get(f"lightning_flops/{number}/out/1"))


# ---- a run that was dropped


def test_a_run_that_is_collected_hands_over_and_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The analysis would go on for a minute: only who asks at the program's end waits for it."""
    analysis, profiles = SlowAnalysis(monkeypatch), list[Profile]()
    config = ProfilerConfig(**SETTINGS)
    frame = Frame(framework="torch", rank=0, world_size=1, strategy="", precision=lambda _: "fp32")
    output = loop_output(frame, config, log_dir=tmp_path)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given: dict[str, Any] = {"config": config, "publish": profiles.append, "frame": frame, "output": output}
    loop = LoopAdapter(net, (optimizer,), **given, ends_when_dropped=True)
    loop.begin()
    for rows in rows_of(4):
        net(rows).sum().backward()
        optimizer.step()
    del loop, rows
    gc.collect()
    assert analysis.begun.wait(60) and profiles == []  # the window was closed by the collection
    analysis.goes_on.set()
    finish_dropped()
    assert [one.profile_step for one in profiles] == [1]
    assert (tmp_path / "lightning_flops" / "throughput.json").exists()
    assert b"flops_profiler/fwd_flops" in next(tmp_path.glob("events*")).read_bytes()


# ---- micro-batches that go through the loop together


def test_tokens_of_all_micro_batches_are_added_up(monitor_now: FakeNow) -> None:
    def step(profiler: TrainingProfiler, done: int) -> None:
        if done == 1 and (run := profiler.run) is not None:
            before, run.throughput.monitor = run.throughput.monitor, Monitor()
            micro_batches = [Batch(((2, 4),), BatchTokens(8, real, real)) for real in (5, 6, 7)]
            run.batch_done(*micro_batches, updates=1, ends_step=True)
            assert run.throughput.monitor.all_tokens == BatchTokens(24, 18, 18)
            run.throughput.monitor = before

    in_a_loop(3, at=step, profile_step=50)
