"""An exception anywhere in a step, whatever the profiler does then: it arrives as it is, and nothing of ours stays."""

from __future__ import annotations

import functools
import gc
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback
from lightning_flops.run.delivery import Delivery
from lightning_flops.run.run import Run
from tests.left_on_torch import torch_state
from tests.lightning.nets import BACKWARD, BATCH, FORWARD, ROOT, Rows, footprint, net_class, new_trainer
from tests.results import profile_of

SETTINGS = {"profile_step": 1, "timing_steps": 2}
DOING = {"counted": 1, "timed": 4, "traced": 7}
"""Step 1 is counted, 2 and 3 settle, 4 and 5 are timed, 6 warms up for 7, which is traced."""
BATCHES = 9

HOOKS = {
    "transfer": "on_before_batch_transfer",
    "batch start": "on_train_batch_start",
    "before update": "on_before_optimizer_step",
    "zero grad": "optimizer_zero_grad",
    "batch end": "on_train_batch_end",
}
PARTS = ("loader", "step", "layer", "loss", "backward", "update", *HOOKS)
ONLY_AUTOMATIC = ("zero grad",)
"""Hooks that manual optimization does not call."""


class Tripwire:
    """Raises *error* when the run is in *part* of batch *at*; once only."""

    def __init__(self, part: str | None = None, at: int = -1, error: BaseException | None = None) -> None:
        self.part, self.at, self.error = part, at, error
        self.batch = -1

    def __call__(self, part: str) -> None:
        if (part, self.batch) == (self.part, self.at) and self.error is not None:
            self.part = None
            raise self.error


def net_with(wire: Tripwire, *, manual: bool) -> Any:
    """A net whose steps and hooks *wire* is called in."""
    base = net_class(ROOT)

    def hook(part: str, original: Any) -> Any:
        def run(self: Any, *args: Any) -> Any:
            wire(part)
            return original(self, *args)

        return run

    hooks = {name: hook(part, getattr(base, name)) for part, name in HOOKS.items()}
    torch.manual_seed(3)
    return type("Net", (base,), hooks)(now=None, at=wire, manual=manual)


def batches(wire: Tripwire) -> DataLoader[Any]:
    """The data, which counts the batches for *wire*."""
    rows = iter(range(BATCHES * BATCH))

    def fetched() -> None:
        row = next(rows)
        wire.batch = row // BATCH
        if row % BATCH == 0:
            wire("loader")

    return DataLoader(Rows(BATCHES * BATCH, on_fetch=fetched), batch_size=BATCH)


def fit(
    folder: Path, wire: Tripwire, *callbacks: Any, manual: bool
) -> tuple[BaseException | None, dict[str, Any], dict[str, Any]]:
    """Train until *wire* raises; what came out of the Trainer, and what is left on it, the net and torch."""
    net = net_with(wire, manual=manual)
    run = new_trainer(ROOT, folder, *callbacks)
    raised: BaseException | None = None
    before = torch_state()
    try:
        run.fit(net, batches(wire))
    except BaseException as error:
        raised = error
    left = {name: value for name, value in torch_state().items() if value != before[name]}
    return raised, footprint(run, net), left


def what_came_out(raised: BaseException | None, error: BaseException) -> tuple[type[BaseException], bool, bool]:
    """Its type, and whether it is *error* itself or comes of it: Lightning turns an interrupt into an exit."""
    assert raised is not None
    return type(raised), raised is error, raised.__context__ is error


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """What happens without the profiler, found out once."""
    folder = tmp_path_factory.mktemp("without")

    @functools.cache
    def found(part: str, kind: type[BaseException], manual: bool) -> Any:
        error = kind("the user's own")
        raised, marks, left = fit(folder, Tripwire(part, 4, error), manual=manual)
        assert left == {}
        return what_came_out(raised, error), marks

    yield found
    found.cache_clear()


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("doing", DOING)
@pytest.mark.parametrize(
    ("part", "manual"),
    [(part, manual) for part in PARTS for manual in (False, True) if not (manual and part in ONLY_AUTOMATIC)],
)
def test_an_exception_in_any_part_of_a_step_arrives_and_leaves_nothing(
    part: str, doing: str, kind: type[BaseException], manual: bool, without: Callable[..., Any], tmp_path: Path
) -> None:
    expected, marks = without(part, kind, manual)
    error = kind("the user's own")
    callback = FlopsProfilerCallback(**SETTINGS)  # type: ignore[arg-type]
    raised, found_marks, left = fit(tmp_path, Tripwire(part, DOING[doing], error), callback, manual=manual)
    assert what_came_out(raised, error) == expected
    assert left == {}
    assert found_marks == marks
    # The net hears of a batch's end after its callbacks: the step is whole then.
    assert (callback.profile is not None) == (doing != "counted" or part == "batch end")
    if doing == "timed":  # a step that was cut off has no time
        assert profile_of(callback).timed_steps == ((4,) if part == "batch end" else ())
    again, _, left = fit(tmp_path, Tripwire(), callback, manual=manual)
    assert again is None and left == {}
    profile = profile_of(callback)
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert len(profile.timed_steps) == 2 and profile.traced is not None


class Preempted(Exception):
    """What a batch system's users raise in a signal's handler."""


@pytest.mark.parametrize(
    ("kind", "method"), [(Run, "begin"), (Run, "batch_done"), (Delivery, "report"), (Run, "enter")]
)
def test_what_a_signals_handler_raises_in_our_code_is_the_users(
    kind: type, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def handler(number: int, frame: Any) -> None:
        signal.signal(signal.SIGUSR2, before)
        raise Preempted("save a checkpoint now")

    original = getattr(kind, method)
    arrived: list[str] = []
    gc.collect()  # the run of another test would close its window when it is collected, and take the signal

    def interrupted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not arrived:  # the handler is there for one signal; the system's own ends the process
            arrived.append(method)
            signal.raise_signal(signal.SIGUSR2)
        return original(self, *args, **kwargs)

    before = signal.signal(signal.SIGUSR2, handler)
    monkeypatch.setattr(kind, method, interrupted)
    callback = FlopsProfilerCallback(**SETTINGS)  # type: ignore[arg-type]
    raised, _, left = fit(tmp_path, Tripwire(), callback, manual=False)
    assert isinstance(raised, Preempted) and left == {}
    assert [one.getMessage() for one in caplog.records if one.name.startswith("lightning_flops.")] == []
