"""What Fabric's launcher starts runs under our command, and runs in any case."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lightning_flops.doors import fabric_launch
from tests.private_names_in import private_names_in


def launcher(**functions: Any) -> ModuleType:
    """A module that makes command lines by these functions."""
    made = ModuleType("launcher")
    vars(made).update(functions)
    return made


def test_our_command_stands_before_the_program() -> None:
    ours = launcher(
        _basic_subprocess_cmd=lambda: ["python", "train.py", "--log-dir", "mine"],
        _hydra_subprocess_cmd=lambda local_rank: (["python", "-m", "train", str(local_rank)], "folder"),
    )
    fabric_launch.tap(ours, log_dir="logs")
    run = ["-m", "lightning_flops", "run", "--log-dir", "logs"]
    assert ours._basic_subprocess_cmd() == ["python", *run, "train.py", "--log-dir", "mine"]
    assert ours._hydra_subprocess_cmd(local_rank=3) == (["python", *run, "-m", "train", "3"], "folder")


def test_a_command_that_we_cannot_read_is_left_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    ours = launcher(_basic_subprocess_cmd=list, _hydra_subprocess_cmd=lambda: None)
    fabric_launch.tap(ours, log_dir=None)
    assert ours._basic_subprocess_cmd() == []
    assert ours._hydra_subprocess_cmd() is None
    assert [message.partition(":")[0] for message in caplog.messages] == [
        "the processes that Fabric starts are not profiled"
    ] * 2


@pytest.mark.parametrize("name", fabric_launch.LOST)
def test_a_name_that_is_missing_is_said_and_the_other_is_tapped(name: str, caplog: pytest.LogCaptureFixture) -> None:
    (other,) = fabric_launch.LOST.keys() - {name}
    ours = launcher(**{other: lambda: ["python", "train.py"]})
    with caplog.at_level(logging.WARNING, logger="lightning_flops"):
        fabric_launch.tap(ours, log_dir=None)
    assert vars(ours)[other]() == ["python", "-m", "lightning_flops", "run", "train.py"]
    assert caplog.messages == [f"This Fabric keeps no {name}: {fabric_launch.LOST[name]}."]


def test_every_private_name_of_fabrics_is_listed() -> None:
    assert private_names_in([Path(fabric_launch.__file__)]) == {*fabric_launch.LOST}


@pytest.mark.parametrize("name", fabric_launch.LAUNCHERS)
def test_the_fabrics_that_are_installed_have_them(name: str) -> None:
    module = pytest.importorskip(name)
    assert module._basic_subprocess_cmd()[0] == sys.executable
    assert all(callable(vars(module)[one]) for one in fabric_launch.LOST)
