"""How a process that the program starts hears of us, and that it does its work whatever fails on our side."""

from __future__ import annotations

import logging
import multiprocessing
from collections.abc import Iterator
from multiprocessing import spawn, util
from multiprocessing.process import BaseProcess
from typing import Any

import pytest

from lightning_flops.doors import processes
from lightning_flops.instrument.border import UndoLedger

told: list[object] = []


def told_of(**arguments: object) -> None:
    """What a spawned process is to call."""
    told.append(arguments)


def fails(**arguments: object) -> None:
    """The same, broken."""
    raise RuntimeError("broken on purpose")


class Own(BaseProcess):
    """A process of the program's, with a ``run`` of its own."""

    def run(self) -> None:
        """Tell that it runs."""
        told.append("ran")


@pytest.fixture(autouse=True)
def nothing_told() -> Iterator[None]:
    """Nothing is told yet, and afterwards the methods of processes are as they were."""
    before = dict(vars(BaseProcess)), dict(vars(Own))
    told.clear()
    yield
    assert (dict(vars(BaseProcess)), dict(vars(Own))) == before


def spawned(process: BaseProcess, function: str = "told_of") -> Any:
    """What Python calls of *process* in a process that was spawned for it."""
    processes._is_spawned(__name__, function, {"word": "here"})
    bootstrap: Any = process
    assert bootstrap._bootstrap.__func__ is vars(BaseProcess)["_bootstrap"]
    return process.run


@pytest.mark.parametrize("kind", [BaseProcess, Own])
def test_a_spawned_process_tells_before_it_runs_and_runs_by_its_own_method(kind: type[BaseProcess]) -> None:
    process = kind(target=told.append, args=("ran",))
    run = spawned(process)
    assert run.__func__ is vars(kind)["run"]  # no frame of ours in its tracebacks
    run()
    assert told == [{"word": "here"}, "ran"]


def test_a_daemon_tells_nothing() -> None:
    run = spawned(Own(daemon=True))
    run()
    assert told == ["ran"]


def test_a_failure_of_ours_is_said_and_the_process_runs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lightning_flops"):
        spawned(Own(name="Own-1"), "fails")()
        spawned(Own(name="Own-1"), "no_such_function")()
    assert told == ["ran", "ran"]
    assert caplog.messages == ["the FLOPs profiler does not follow into Own-1"] * 2


class Owner:
    """May be called when a process was forked."""


def test_the_command_line_of_a_spawned_process_is_ours_until_the_end() -> None:
    make = spawn.get_command_line
    undo = UndoLedger()
    processes.follow(Owner(), lambda _: None, undo=undo, then=told_of, word="a'b")
    command = spawn.get_command_line(pipe_handle=3)
    plain = make(pipe_handle=3)
    (place,) = [place for place, word in enumerate(command) if word != plain[place]]
    ours = command[place].removesuffix(plain[place])
    assert f"{told_of.__module__!r}, 'told_of', {{'word': \"a'b\"}}" in ours
    compile(ours, "command line", "exec")
    undo.close()
    assert spawn.get_command_line is make


@pytest.mark.parametrize("command", [["frozen", "--multiprocessing-fork"], ("python", "-c"), None])
def test_a_command_line_that_we_cannot_read_is_left_as_it_is(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "get_command_line", lambda **_: command)
    undo = UndoLedger()
    processes.follow(Owner(), lambda _: None, undo=undo, then=told_of)
    assert spawn.get_command_line() == command
    undo.close()


def test_what_waits_for_children_is_called_at_once_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [Own(daemon=True)])
    processes.after_children(lambda: told.append("at once"))
    assert told == ["at once"]


def test_what_waits_for_children_is_called_after_python_has_waited_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting: list[tuple[Any, ...]] = []
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [Own()])
    monkeypatch.setattr(util, "Finalize", lambda *arguments, exitpriority: waiting.append((*arguments, exitpriority)))
    processes.after_children(lambda: told.append("late"))
    ((_, call, priority),) = waiting
    assert told == [] and priority < 0
    call()
    assert told == ["late"]
