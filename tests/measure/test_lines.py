"""Whose line a sample is, in which part of a step, and that the program meets none of the signals."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import profile_training
from lightning_flops.measure import lines
from lightning_flops.measure.lines import LineSampler, Place, place_of
from tests.fake_clock import FakeNow

pytestmark = [
    pytest.mark.lines,
    pytest.mark.timeout(300, method="thread"),  # by itself pytest-timeout takes SIGALRM
    pytest.mark.skipif(sys.gettrace() is not None or sys.getprofile() is not None, reason="a tracer is on"),
]

TORCH = os.path.dirname(torch.__file__)
LIGHTNING = os.path.join(os.path.dirname(TORCH), "lightning/pytorch/trainer/call.py")
OURS = os.path.dirname(os.path.dirname(lines.__file__))


def function(file: str, text: str, **known: Any) -> Any:
    """The function ``f`` of *text* as if it stood in *file*."""
    names: dict[str, Any] = {"__file__": file, **known}
    exec(compile(text, file, "exec"), names)
    return names["f"]


def here() -> Place | None:
    """Where the function is that has called this one."""
    return place_of(sys._getframe(1))


here.__code__ = here.__code__.replace(co_filename=f"{TORCH}/here.py")  # it stands for an operator of torch's


def user(text: str, **known: Any) -> Any:
    return function("/home/anna/train.py", text, **known)


def test_a_sample_is_the_innermost_line_of_the_users_with_the_function_that_it_has_called() -> None:
    norm = function(f"{TORCH}/functional.py", "def f(): return here()", here=here)
    log = user("def f():\n    x = 1\n    return norm()", norm=norm)
    train = user("def f():\n    return log()", log=log)
    assert train() == Place("/home/anna/train.py", 3, "f", "torch.f", "")


@pytest.mark.parametrize(
    ("file", "whose"),
    [
        ("/home/anna/train.py", "user"),
        ("/tmp/ipykernel_12/345.py", "user"),
        ("<stdin>", "user"),
        ("<ipython-input-3-abc>", "user"),
        (f"{TORCH}/nn/functional.py", "library"),
        (LIGHTNING, "library"),
        (threading.__file__, "library"),
        ("<frozen importlib._bootstrap>", "library"),
        (f"{OURS}/run/run.py", "ours"),
    ],
)
def test_code_is_the_users_where_it_is_not_installed(file: str, whose: str) -> None:
    assert lines.owner_of(file) == whose


def test_an_instruction_that_has_no_line_is_of_the_line_before() -> None:
    """Python compiles the way back to the head of an inner loop that ends in an ``if`` to a jump of no line."""
    f = user("def f():\n  for row in [[0, 2], [3]]:\n    for one in row:\n      if one:\n        one += 1")
    found = list[Place | None]()

    def trace(frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code is f.__code__:
            frame.f_trace_opcodes = True
            if event == "opcode" and frame.f_lineno is None:
                found.append(place_of(frame))
        return trace

    sys.settrace(trace)
    try:
        f()
    finally:
        sys.settrace(None)
    assert set(found) <= {Place("/home/anna/train.py", 5, "f", "", "")}
    assert found or sys.version_info >= (3, 12)  # which gives that jump a line


def test_code_without_any_line_is_at_its_first() -> None:
    f = user("\n\ndef f(): return place_of(_getframe())", place_of=place_of, _getframe=sys._getframe)
    f.__code__ = f.__code__.replace(co_linetable=b"")
    assert f() == Place("/home/anna/train.py", 3, "f", "", "")


def test_code_of_ours_is_no_sample_but_where_it_only_calls_on() -> None:
    ours = function(f"{OURS}/run/run.py", "def f(): return here()", here=here)
    assert user("def f(): return ours()", ours=ours)() is None
    wrapper = function(f"{OURS}/measure/patches.py", "def call(): return here()\nf = call", here=here)
    assert user("def f(): return wrapper()", wrapper=wrapper)() == Place("/home/anna/train.py", 1, "f", "", "")


def test_below_a_frameworks_callback_a_sample_has_the_hook() -> None:
    hook = user("class Ema:\n    def on_train_batch_end(self): return here()\nf = Ema().on_train_batch_end", here=here)
    call = function(LIGHTNING, "def _call_callback_hooks(fn): return fn()\nf = _call_callback_hooks")
    found = user("def f(): return call(hook)", call=call, hook=hook)()
    name = "Ema.on_train_batch_end" if sys.version_info >= (3, 11) else "on_train_batch_end"
    assert found == Place("/home/anna/train.py", 2, name, "", name)


def test_a_comprehension_is_its_functions_line() -> None:
    found = user("def f():\n    return [here() for _ in range(1)][0]", here=here)()
    assert found is not None and (found.line, found.function) == (2, "f")


def test_generated_code_is_its_modules() -> None:
    made = function("<string>", "def f(): return here()", here=here)
    made = type(made)(made.__code__, {"__file__": f"{TORCH}/x.py", "here": here})
    assert user("def f(): return made()", made=made)() == Place("/home/anna/train.py", 1, "f", "f", "")


def test_what_torch_compiled_is_no_line_of_the_users() -> None:
    cache = "/tmp/torchinductor_anna/ar/cark.py"
    call = function(cache, "def f(): return here()", here=here, __name__="torch._inductor.runtime.compile_tasks.cark")
    assert user("def f(): return call()", call=call)() == Place("/home/anna/train.py", 1, "f", "f", "")


# ---- parts, seconds


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch, now: FakeNow) -> Iterator[LineSampler]:
    """A sampler whose samples the test takes, of frames that it hands in, by a clock in its hands."""
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    one = LineSampler(now=now)
    one.timer._stamp = now
    one.begin()
    one.resume()
    yield one
    one.stop()


def frame_at(line: int, callee: str = "") -> FrameType:
    """The frame of a line of the user's that has called *callee* of torch's, or of an operator there."""
    inner = function(
        f"{TORCH}/x.py", f"def {callee or 'f'}(): return get()\nf = {callee or 'f'}", get=lambda: sys._getframe(1)
    )
    text = "\n" * (line - 2) + "def f():\n    return inner()"
    if not callee:
        return user(text, inner=lambda: sys._getframe(1))()  # type: ignore[no-any-return]
    return user(text, inner=inner)()  # type: ignore[no-any-return]


def test_each_sample_has_the_time_since_the_last_and_belongs_to_the_part_that_runs(
    sampler: LineSampler, now: FakeNow
) -> None:
    for _ in range(5):
        sampler.resume()
        for line, seconds, part in (
            (10, 0.020, ""),
            (20, 0.030, "forward"),
            (30, 0.010, "validation"),
            (10, 0.040, ""),
        ):
            if part:
                sampler.timer.enter(part)
            now.sleep(seconds)
            sampler.take(frame_at(line))
            if part:
                sampler.timer.leave()
        sampler.pause()
        sampler.step_ends()
        now.sleep(5.0)  # what is between two steps is in no sample
    assert sampler.over  # 0.5 s in five steps
    record = sampler.record()
    found = {(one.part, one.line): (round(one.seconds, 9), one.samples) for one in record.lines}
    assert record.steps == 5
    assert found == {("other", 10): (0.3, 10), ("forward", 20): (0.15, 5), ("validation", 30): (0.05, 5)}


@pytest.mark.parametrize(("step_sec", "steps"), [(1.0, 5), (0.0301, 10), (0.0001, 50)])
def test_steps_are_sampled_until_300_ms_at_least_five_and_at_most_fifty(
    sampler: LineSampler, now: FakeNow, step_sec: float, steps: int
) -> None:
    taken = 0
    while not sampler.over:
        sampler.resume()
        now.sleep(step_sec)
        sampler.pause()
        sampler.step_ends()
        taken += 1
    assert taken == steps


def test_a_line_that_only_calls_the_model_the_loader_or_the_framework_says_so(
    sampler: LineSampler, now: FakeNow
) -> None:
    enter = function(f"{TORCH}/y.py", "def f(): timer.enter('forward')", timer=sampler.timer)
    user("\n\ndef f(): enter()", enter=enter)()  # line 3
    samples = ((3, "_call_impl"), (3, ""), (7, "_wrapped_call_impl"), (8, "max_pool2d"), (9, ""))
    for line, callee in samples:
        now.sleep(0.1)
        sampler.take(frame_at(line, callee))
    sampler.timer.leave()
    sampler.step_ends()
    lines_ = {one.line: one.only_enters for one in sampler.record().lines}
    assert lines_ == {3: True, 7: True, 8: False, 9: False}


# ---- the program does not notice


@pytest.fixture
def running() -> Iterator[LineSampler]:
    """A sampler that samples this thread by signals."""
    one = LineSampler()
    one.begin()
    assert one.why == ""
    one.resume()
    yield one
    one.stop()
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def busy(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(50))


def test_a_line_that_dominates_is_the_first(running: LineSampler) -> None:
    for _ in range(5):
        running.resume()
        sum(range(100))
        busy(0.02)
        running.pause()
        running.step_ends()
    first = running.record().lines[0]
    assert first.function == "busy" and first.part == "other"
    assert first.text in ("sum(range(50))", "while time.perf_counter() < until:")
    assert sum(one.seconds for one in running.record().lines if one.function == "busy") > 0.07


def test_sleeps_and_reads_last_as_long_as_without_us(running: LineSampler) -> None:
    reader, writer = os.pipe()
    threading.Timer(0.05, os.write, (writer, b"late")).start()
    assert os.read(reader, 4) == b"late"
    began = time.perf_counter()
    time.sleep(0.05)
    assert time.perf_counter() - began >= 0.05
    os.close(reader)
    os.close(writer)
    running.pause()
    running.step_ends()
    assert sum(one.samples for one in running.record().lines) > 10


def test_no_frame_and_no_variable_of_the_users_is_kept(running: LineSampler) -> None:
    class Large:
        pass

    def works() -> weakref.ref[Large]:
        held, gone = Large(), None
        gone = weakref.ref(held)
        busy(0.01)
        del held
        assert gone() is None
        return gone

    works()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_the_program_raises_leaves_nothing_of_ours(error: type[BaseException], running: LineSampler) -> None:
    with pytest.raises(error):
        busy(0.003)
        raise error
    running.stop()


def test_an_exception_in_our_handler_is_not_the_programs(running: LineSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(frame: object) -> None:
        raise ValueError("broken")

    monkeypatch.setattr(lines, "place_of", broken)
    busy(0.01)
    running.pause()
    running.step_ends()
    assert (running.over, running.why) == (True, "ValueError: broken")


def test_a_handler_that_the_program_puts_in_meanwhile_stays() -> None:
    one = LineSampler()
    one.begin()
    one.resume()
    own: list[int] = []
    signal.signal(signal.SIGALRM, lambda number, frame: own.append(number))
    try:
        one.pause()
        one.resume()
        assert one.over and "itself" in one.why
        one.stop()
        assert callable(signal.getsignal(signal.SIGALRM))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


# ---- off, with its reason


def profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "getprofile", lambda: print)


def monitored(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = SimpleNamespace(get_tool=lambda number: "cProfile" if number == 2 else None)
    monkeypatch.setattr(sys, "monitoring", tools, raising=False)


def no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "setitimer")


def alarmed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getsignal", lambda number: print)


def timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "getitimer", lambda which: (3.0, 0.0))


@pytest.mark.parametrize(
    ("used", "why"),
    [
        (profiled, "a profiler, tracer or debugger is on"),
        (monitored, "a profiler, tracer or debugger is on"),
        (no_timer, "this system has no timer that signals"),
        (alarmed, "the program uses SIGALRM, or its timer, itself"),
        (timed, "the program uses SIGALRM, or its timer, itself"),
    ],
)
def test_what_is_the_users_is_left_alone(
    used: Callable[[pytest.MonkeyPatch], None], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        used(patched)
        one = LineSampler()
        one.begin()
        assert (one.over, one.why) == (True, why)
        assert one.record().why == why


def test_on_another_thread_nothing_is_sampled() -> None:
    one = LineSampler()
    thread = threading.Thread(target=one.begin)
    thread.start()
    thread.join()
    assert one.over and one.why.startswith("training does not run on the main thread")


# ---- a run


def train(folder: Path, **settings: Any) -> Any:
    net = nn.Linear(8, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    batches: Any = torch.utils.data.DataLoader(torch.randn(200, 8), batch_size=2)  # type: ignore[arg-type]
    with profile_training(net, optimizer, profile_step=1, timing_steps=8, log_dir=folder, **settings) as profiler:
        for batch in batches:
            net(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.004)  # planted
    return profiler.profile


def test_a_run_names_the_planted_line_in_its_report(tmp_path: Path) -> None:
    profile = train(tmp_path)
    assert profile.lines.why == ""
    first = profile.lines.rows[0]
    assert (first.function, first.text) == ("train", "time.sleep(0.004)  # planted")
    assert first.link == f"vscode://file{__file__}:{first.line}"
    assert first.part == "transfer + other" and first.share > 0.5 and first.seconds > 0.004
    assert f"train test_lines.py:{first.line}" in str(profile)
    assert type(profile).from_json(profile.to_json()).lines == profile.lines


def test_a_run_that_does_not_want_it_says_so(tmp_path: Path) -> None:
    profile = train(tmp_path, lines=False)
    assert profile.lines.rows == () and "n/a: lines=False." in str(profile)


def trained(profiled: bool) -> tuple[list[float], list[torch.Tensor], torch.Tensor]:
    """Losses, weights and random state of a training with dropout, with the samples of some of its steps or without."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.Linear(16, 2))
    optimizer, losses = torch.optim.AdamW(net.parameters(), lr=0.01), list[float]()

    def loop() -> None:
        for _ in range(60):
            loss = net(torch.randn(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    if profiled:
        with profile_training(net, optimizer, profile_step=1, timing_steps=4, trace=False) as profiler:
            loop()
        profile: Any = profiler.profile
        assert profile.lines.why == ""
    else:
        loop()
    return losses, [one.detach().clone() for one in net.parameters()], torch.get_rng_state()


def test_losses_weights_and_random_state_of_sampled_steps_are_the_same_bits() -> None:
    before = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)
    (losses, weights, state), (own_losses, own_weights, own_state) = trained(True), trained(False)
    assert losses == own_losses
    assert all(map(torch.equal, weights, own_weights)) and torch.equal(state, own_state)
    assert (signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)) == before
