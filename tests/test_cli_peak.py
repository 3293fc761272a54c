"""``lightning-flops peak``: what it measures, and where reports find it."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from lightning_flops.analysis.peaks import COPY, measured_file, measured_peaks
from lightning_flops.cli import main
from lightning_flops.measure.timing.processor_wait import ProcessorWatch
from lightning_flops.records import ProcessorLoss


def measure(waited: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """The command on a machine where this process waited so much of the time for a processor, and short."""
    loss = ProcessorLoss(seconds=1.0, batches_sec=(), waited_share=waited)
    monkeypatch.setattr(ProcessorWatch, "loss", lambda watch: loss)
    monkeypatch.setattr("lightning_flops.measure.peaks._SIZES", (64,))
    monkeypatch.setattr("lightning_flops.measure.peaks._SEC_EACH", 0.001)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return main(["peak"])


def test_products_of_each_dtype_and_a_copy_are_measured_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(0.0, tmp_path, monkeypatch) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.endswith(f"It is kept in {measured_file(platform.node())}.\n")
    assert Path(measured_file(platform.node())).is_relative_to(tmp_path)
    found = measured_peaks(platform.node(), platform.machine())
    assert {"float32", "float64", COPY} <= set(found) and min(found.values()) > 1e6
    assert measured_peaks("elsewhere", platform.machine()) == {} == measured_peaks("", platform.machine())


def test_what_was_measured_beside_other_programs_is_told_or_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure(0.6, tmp_path, monkeypatch) == 1
    assert "for 60% of the time it waited for processors, so the figures are too low. They are not kept" in (
        capsys.readouterr().err
    )
    assert not Path(measured_file(platform.node())).exists()
    assert measure(0.1, tmp_path, monkeypatch) == 0
    assert "for 10% of the time it waited for processors" in capsys.readouterr().err
