"""What the section on memory says where something is not known."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from lightning_flops.config import ProfilerConfig
from lightning_flops.records import MemoryRecord, PhaseMemory
from lightning_flops.report.device_document import memory_section
from tests.report import windows
from tests.report.drawn import drawn
from tests.report.windows import build_profile


def record(*, gradient_bytes: int | None, optimizer_bytes: int | None) -> MemoryRecord:
    return MemoryRecord(
        kind="resident",
        phases=(),
        run_peak_bytes=1,
        run_reserved_peak_bytes=None,
        parameter_bytes=1,
        buffer_bytes=0,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        kept_by_forward_bytes=None,
    )


def memory_lines(memory: MemoryRecord) -> list[str]:
    profile = build_profile(windows.mlp_window(), config=ProfilerConfig())
    return drawn(memory_section(replace(profile, memory=memory)))


def test_gradients_and_states_that_could_not_be_read_say_why() -> None:
    lines = memory_lines(record(gradient_bytes=None, optimizer_bytes=None))
    (gradients,) = [line for line in lines if line.startswith("gradients:")]
    (states,) = [line for line in lines if line.startswith("optimizer states:")]
    assert gradients.endswith("  n/a (on no parameter, as under ZeRO)")
    assert states.endswith("  n/a (not where torch's optimizers keep them)")
    assert all(len(line) <= 120 for line in lines)


def test_gradients_and_states_that_were_read_stand_alone() -> None:
    lines = memory_lines(record(gradient_bytes=448, optimizer_bytes=0))
    assert next(line for line in lines if line.startswith("gradients:")).endswith("  448 B")
    assert next(line for line in lines if line.startswith("optimizer states:")).endswith("  0 B")


@pytest.mark.parametrize(("run_peak_bytes", "said"), [(500, "<= 500 B"), (None, "n/a")])
def test_a_phase_that_set_no_new_peak_went_no_higher_than_the_one_before(run_peak_bytes: int | None, said: str) -> None:
    phase = PhaseMemory(name="forward", current_bytes=300, peak_bytes=None)
    seen = record(gradient_bytes=1, optimizer_bytes=1)
    seen = replace(seen, kind="allocated", phases=(phase,), run_peak_bytes=run_peak_bytes)
    (row,) = [line for line in memory_lines(seen) if line.startswith("fwd")]
    assert re.split("  +", row) == ["fwd", "300 B", said]
