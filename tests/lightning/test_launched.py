"""Results come back to the callback that waits for them, and to no other."""

from __future__ import annotations

import copy
import logging
import pickle
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_flops import FlopsProfilerCallback
from lightning_flops.adapters.lightning_launch import send_home
from lightning_flops.config import ProfilerConfig
from tests.report.windows import build_profile, mlp_window

PROFILE = build_profile(mlp_window(), config=ProfilerConfig())


class Launcher:
    """The launcher's side in the process that has trained."""

    def get_extra_results(self, trainer: Any) -> dict[str, Any]:
        return {"callback_metrics_bytes": b""}


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def returned(callback: FlopsProfilerCallback, monkeypatch: pytest.MonkeyPatch) -> bytes:
    """What goes through the launcher's pipe when the copy of *callback* in another process has trained."""
    launcher: Any = Launcher()
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(launcher=launcher))
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr("os.getpid", lambda: -1)
        child = pickle.loads(pickle.dumps(callback))
        send_home(trainer, child._origin, profiles=[PROFILE], throughput=None)
        return pickle.dumps(launcher.get_extra_results(trainer))


def test_a_result_comes_back_and_leaves_nothing_on_its_way(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    callback = FlopsProfilerCallback()
    sent = returned(callback, monkeypatch)
    assert len(sent) < 4096  # the pipe is read when all processes have ended: what it does not hold would block them
    assert callback.profile is None
    assert pickle.loads(sent)["callback_metrics_bytes"] == b""
    assert callback.profile == PROFILE
    assert list(temporary.iterdir()) == []


def test_of_several_callbacks_each_gets_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = FlopsProfilerCallback(), FlopsProfilerCallback()
    third = copy.deepcopy(second)
    pickle.loads(returned(second, monkeypatch))
    assert [one.profile for one in (first, second, third)] == [None, PROFILE, None]


def test_a_result_for_a_callback_that_is_gone_is_let_go(monkeypatch: pytest.MonkeyPatch, temporary: Path) -> None:
    sent = returned(FlopsProfilerCallback(), monkeypatch)
    pickle.loads(sent)
    assert list(temporary.iterdir()) == []


def test_a_result_that_cannot_be_read_is_a_line_of_the_log(
    monkeypatch: pytest.MonkeyPatch, temporary: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback = FlopsProfilerCallback()
    sent = returned(callback, monkeypatch)
    for path in temporary.rglob("*.json"):
        path.unlink()
    with caplog.at_level(logging.WARNING, logger="lightning_flops"):
        assert pickle.loads(sent)["callback_metrics_bytes"] == b""
    (record,) = caplog.records
    assert record.getMessage().startswith("callback.profile stays None in this process: FileNotFoundError: ")


def test_where_the_callback_was_made_nothing_is_put_on_the_launcher() -> None:
    launcher, callback = Launcher(), FlopsProfilerCallback()
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(launcher=launcher))
    send_home(trainer, callback._origin, profiles=[PROFILE], throughput=None)
    assert vars(launcher) == {}
