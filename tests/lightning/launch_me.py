"""Trains two ranks by the launcher that the command line names; run by test_launchers."""

from __future__ import annotations

import sys

from lightning_flops import FlopsProfilerCallback
from lightning_flops.measure.timing.phase_timer import WallClock
from lightning_flops.run import window
from tests.fake_clock import FakeNow
from tests.lightning.nets import loader, logger_in, new_net, new_trainer

NOW = FakeNow()
"""This rank's clock: each row it loads takes half a second, a forward two, a backward four and an update eight."""


def load() -> None:
    NOW.sleep(0.5)


def main(root: str, strategy: str, folder: str) -> None:
    callback = FlopsProfilerCallback(profile_step=1, timing_steps=2)
    run = new_trainer(root, folder, callback, strategy=strategy, devices=2, logger=logger_in(folder, "CSVLogger", root))
    run.fit(new_net(root, now=NOW), loader(24, on_fetch=load))


if __name__ == "__main__":
    window.clock_for = lambda device: WallClock(NOW)  # type: ignore[attr-defined]
    main(*sys.argv[1:])
