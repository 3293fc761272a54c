"""A machine of which nothing is known, so that no report of a test names what else runs where it runs."""

from __future__ import annotations

import pytest

from lightning_flops.measure.timing.processor_wait import Counters, ProcessorWatch


def unwatched(**_: object) -> ProcessorWatch:
    """In place of what looks at this machine's processors."""
    unknown = Counters({})
    return ProcessorWatch(lambda: unknown, processor_sec=lambda: 0.0)


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """For every test of a folder whose conftest imports it."""
    monkeypatch.setattr("lightning_flops.run.window.ProcessorWatch", unwatched)
