"""Whoever pickles, copies or walks through a run in a hook finds what there would be without the profiler.

Every hook is looked at in every state of the window, each time in one of the three ways, which take turns; in all three
ways, and under both import roots, in the slow tests.
"""

from __future__ import annotations

import copy
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_flops import FlopsProfilerCallback
from tests.lightning import seen
from tests.lightning.nets import ROOTS, batch_flops

MakeTrainer = Callable[..., Any]
Moment = tuple[str, int]
"""A hook, and the how manieth call of it."""

WINDOWS: dict[str, tuple[type, dict[str, Any], set[str]]] = {
    "one window": (seen.Net, {"timing_steps": 2}, {"waiting", "counting", "settling", "timing", "tracing"}),
    "by hand": (seen.ManualNet, {"timing_steps": 2}, {"waiting", "counting", "settling", "timing", "tracing"}),
    "several windows": (seen.Net, {"timing_steps": 1, "every": 4, "trace": False}, {"waiting", "counting", "timing"}),
    "monitor only": (seen.Net, {"timer_only": True}, {"waiting"}),
}

FIRST, SECOND = ROOTS
SLOW = [pytest.mark.slow]
IN_TURN = [(FIRST, "one window"), (SECOND, "by hand"), (FIRST, "several windows"), (SECOND, "monitor only")]
under_both_roots = pytest.mark.parametrize("root", [FIRST, pytest.param(SECOND, marks=pytest.mark.slow)])


def state_of(callback: FlopsProfilerCallback) -> str:
    """What the profiler is doing, in a word."""
    run = callback.run
    return "nothing" if run is None else run.window.recorder.state.value.replace("sampling", "waiting")


@pytest.fixture
def fit(root: str, trainer: MakeTrainer, tmp_path: Path) -> Callable[..., Any]:
    """Trains with validation and checkpoints among the steps; *look* is called in every hook."""

    def run(
        profiler: Any, look: Any, *, half: type = seen.Net, batches: int = 12, loading: Any = None, **settings: Any
    ) -> Any:
        torch.manual_seed(1)
        probe = seen.new(seen.Probe, root, look)
        settings = {"enable_checkpointing": True, "val_check_interval": 3, **settings}
        made = trainer(probe, profiler, default_root_dir=tmp_path / type(profiler).__name__, **settings)
        made.fit(seen.new(half, root), datamodule=seen.new(seen.Data, root, batches, **(loading or {})))
        return made

    return run


@pytest.mark.parametrize(("root", "window"), IN_TURN)
def test_what_is_pickled_or_copied_in_any_hook_is_the_same_with_and_without_the_profiler(
    root: str, fit: Callable[..., Any], window: str
) -> None:
    turns: Counter[str] = Counter({hook: index for index, hook in enumerate(seen.HOOKS, [*WINDOWS].index(window))})

    def next_way(hook: str) -> list[str]:
        turns[hook] += 1
        return [[*seen.WAYS][turns[hook] % len(seen.WAYS)]]

    compare(root, fit, window, next_way)


@pytest.mark.slow
@pytest.mark.parametrize("window", WINDOWS)
def test_what_is_pickled_and_copied_in_any_hook_is_the_same_with_and_without_the_profiler_in_every_way(
    root: str, fit: Callable[..., Any], window: str
) -> None:
    compare(root, fit, window, lambda hook: [*seen.WAYS])


def compare(root: str, fit: Callable[..., Any], window: str, ways: Callable[[str], list[str]]) -> None:
    """Look at the run in *ways* of a hook, the first time it is called in each state, and at a plain run then, too."""
    half, settings, states = WINDOWS[window]
    callback = FlopsProfilerCallback(**settings)
    profiled: dict[Moment, dict[str, Any]] = {}
    calls: Counter[str] = Counter()
    known: set[tuple[str, str]] = set()

    def look(hook: str, trainer: Any, module: Any) -> None:
        calls[hook] += 1
        if (hook, state_of(callback)) in known:
            return
        known.add((hook, state_of(callback)))
        assert seen.ours_within(trainer) == [], hook
        whole = seen.whole(trainer, module)
        profiled[hook, calls[hook]] = {way: seen.outcome(way, whole) for way in ways(hook)}

    fit(callback, look, half=half)
    assert {state for _, state in known} >= states
    assert {hook for hook, _ in known} >= set(seen.HOOKS) - {"on_sanity_check_start", "on_sanity_check_end"} - (
        {"on_before_zero_grad"} if half is seen.ManualNet else set()
    )

    plain: dict[Moment, dict[str, Any]] = {}
    calls = Counter()

    def look_again(hook: str, trainer: Any, module: Any) -> None:
        calls[hook] += 1
        if (hook, calls[hook]) in profiled:
            whole = seen.whole(trainer, module)
            plain[hook, calls[hook]] = {way: seen.outcome(way, whole) for way in profiled[hook, calls[hook]]}

    fit(seen.new(seen.Nobody, root), look_again, half=half)
    assert profiled == plain
    assert not any(isinstance(found, str) for outcomes in plain.values() for found in outcomes.values())  # no errors


def taken_while(profiler: Any, fit: Callable[..., Any], batches: set[int]) -> tuple[list[Any], list[float]]:
    """Copies of the Trainer taken at the end of *batches* of a fit, and the losses of that fit."""
    copies: list[Any] = []
    ends: Counter[str] = Counter()

    def look(hook: str, trainer: Any, module: Any) -> None:
        ends[hook] += 1
        if hook == "on_train_batch_end" and ends[hook] - 1 in batches:
            copies.append(copy.deepcopy(trainer))

    made = fit(profiler, look)
    return copies, list(made.lightning_module.losses)


def trains_on(copied: Any) -> list[float]:
    """The losses of one more epoch of a copy, and those before."""
    torch.manual_seed(2)
    copied.fit_loop.max_epochs += 1
    copied.fit(copied.lightning_module, datamodule=copied.datamodule)
    return list(copied.lightning_module.losses)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")  # the first fit's, in the second as in any Trainer
@under_both_roots
def test_a_copy_trains_on_like_a_copy_of_a_plain_trainer_and_is_profiled_anew(
    root: str, fit: Callable[..., Any]
) -> None:
    batches = {0, 1, 3, 5, 11}  # before the counted step, after it, among the timed ones, in the trace, at the end
    callback = FlopsProfilerCallback(timing_steps=2)
    copies, losses = taken_while(callback, fit, batches)
    plain, plain_losses = taken_while(seen.new(seen.Nobody, root), fit, batches)
    assert losses == plain_losses and len(copies) == len(plain) == len(batches)
    for copied, copied_plain in zip(copies, plain, strict=True):
        (of_copy,) = [one for one in copied.callbacks if isinstance(one, FlopsProfilerCallback)]
        of_copy._profiles.clear()
        on, on_plain = trains_on(copied), trains_on(copied_plain)
        assert on == on_plain and len(on) >= len(losses)
        assert of_copy.profile is not None and of_copy.profile.flops.forward == batch_flops().forward


@pytest.fixture
def root_in_the_server_of_forks(root: str) -> Iterator[None]:
    """A server of forks that begins now imports it once, for all of its workers."""
    multiprocessing.set_forkserver_preload([root])
    yield
    multiprocessing.set_forkserver_preload([])


@pytest.mark.usefixtures("root_in_the_server_of_forks")
@pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers")  # whose iterators no Trainer can pickle
@pytest.mark.parametrize(
    ("root", "method"),
    [
        pytest.param(root, method, marks=() if (root, method) == (SECOND, "forkserver") else SLOW)
        for root in ROOTS
        for method in ("spawn", "forkserver")
    ],
)
def test_workers_that_are_started_afresh_get_a_method_of_the_datamodule(
    root: str, fit: Callable[..., Any], method: str
) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    callback = FlopsProfilerCallback(timing_steps=2, trace=False)
    states: list[str] = []

    def look(hook: str, trainer: Any, module: Any) -> None:
        if hook == "on_validation_start":
            states.append(state_of(callback))

    loading = {"num_workers": 1, "multiprocessing_context": method}
    made = fit(callback, look, batches=4, loading=loading, num_sanity_val_steps=0)
    assert states == ["settling"]  # step 1 is counted, validation comes after step 2
    assert callback.profile is not None and callback.profile.flops.forward == batch_flops().forward
    assert made.global_step == 4
