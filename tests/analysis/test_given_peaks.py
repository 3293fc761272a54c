"""Peaks that are given after the run, and figures that no device can reach."""

from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_flops.analysis.peaks import COPY, measured_file, with_given_peaks, with_measured_peaks
from lightning_flops.cli import main
from lightning_flops.config import ProfilerConfig
from tests.analysis.test_profile import MLP, TICK, in_ticks
from tests.report import windows
from tests.report.traced_windows import mlp_traced
from tests.report.windows import build_profile

PLAIN = build_profile(MLP, config=ProfilerConfig())
"""1,400 MFLOPs in steps of 20 ticks."""


def test_a_peak_given_after_the_run_gives_what_it_would_have_given_in_it() -> None:
    peak = 64 * 1400e6
    assert PLAIN.rates.mfu is None
    given = with_given_peaks(PLAIN, flops_per_sec=peak, memory_bytes_per_sec=1e9)
    inside = build_profile(MLP, config=ProfilerConfig(peak_flops_per_sec=peak, memory_bytes_per_sec=1e9))
    assert given.rates == inside.rates and given.rates.mfu == 16 / 20
    assert given.unavailable == inside.unavailable
    assert given.settings.peaks_from == "given"
    assert given.budget == inside.budget is not None


def test_peaks_that_were_measured_on_the_machine_stand_in_where_no_vendors_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    window = replace(MLP, context=replace(MLP.context, host=platform.node()))
    before = build_profile(window, config=ProfilerConfig())
    assert before.rates.mfu is None and "run lightning-flops peak, or set" in before.unavailable["mfu"]
    peak = 64 * 1400e6
    file = Path(measured_file(platform.node()))
    file.parent.mkdir()
    file.write_text(json.dumps({MLP.context.device_name: {"float32": peak, COPY: 1e9}}))
    inside = build_profile(window, config=ProfilerConfig())
    assert (inside.rates.mfu, inside.memory_bytes_per_sec, inside.settings.peaks_from) == (16 / 20, 1e9, "measured")
    since = with_measured_peaks(before)
    assert (since.rates, since.settings, since.budget) == (inside.rates, inside.settings, inside.budget)
    assert "MFU 80.00%, HFU 80.00% of 89.6 GFLOP/s (float32), measured." in str(inside).replace("\n  ", " ")
    # Neither another machine's, nor instead of a vendor's or of a given one.
    assert build_profile(MLP, config=ProfilerConfig()).rates.mfu is None
    elsewhere = replace(before, context=replace(before.context, host="elsewhere"))
    assert with_measured_peaks(elsewhere) is elsewhere and with_measured_peaks(inside) is inside
    assert build_profile(window, config=ProfilerConfig(peak_flops_per_sec=2 * peak)).rates.mfu == 8 / 20


def test_peaks_by_dtype_leave_other_dtypes_theirs() -> None:
    profile = build_profile(in_ticks(windows.transformer_window()), config=ProfilerConfig())
    given = with_given_peaks(profile, flops_per_sec={"bfloat16": 624e12}, memory_bytes_per_sec=None)
    assert given.rates.mfu == (3744e9 / 624e12 + 240e9 / 19.5e12) / (100 * TICK)


def test_modules_beyond_twice_the_peak_are_left_out_and_listed() -> None:
    window, traced = mlp_traced()
    plain = build_profile(window, config=ProfilerConfig(), traced=traced)
    # fc1 and fc2 reach 200 GFLOP/s forward, the root 120; backward fc1 133, the other two 100.
    for profile in (
        with_given_peaks(plain, flops_per_sec=90e9, memory_bytes_per_sec=None),
        build_profile(window, config=ProfilerConfig(peak_flops_per_sec=90e9), traced=traced),
    ):
        rates = {one.name: one.times.forward_flops_per_sec for one in profile.modules if one.times is not None}
        assert (rates["fc1"], rates["fc2"], rates[""]) == (None, None, 120e9)
    note = next(one for one in profile.notes if one.startswith("Left out, as they would be beyond"))
    assert "FLOP/s of fc1's forward (2.2 times), fc2's forward (2.2 times)" in note


def test_the_commands_take_the_device_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "profile.json", tmp_path / "page.html"
    path.write_text(PLAIN.to_json())
    assert main(["report", str(path), "-o", str(page), "--peak", "float32=89.6e9", "--bandwidth", "1e9"]) == 0
    assert page.exists()
    capsys.readouterr()
    assert main(["compare", "--json", "--peak", "89.6e9", str(path), str(path)]) == 0
    figures = {one["name"]: one["a"] for one in json.loads(capsys.readouterr().out)["figures"]}
    assert figures["mfu"] == pytest.approx(0.8)
    assert main(["report", str(tmp_path / "none.json")]) == 2
