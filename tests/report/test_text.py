from __future__ import annotations

import pytest

from lightning_flops.analysis.profile import Profile, build_profile
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import WindowRecord
from lightning_flops.report.text import render_text
from tests.golden_files import golden
from tests.report import windows

CASES = {
    "mlp": (windows.mlp_window(), ProfilerConfig(peak_flops_per_sec=700e9)),
    "transformer": (windows.transformer_window(), ProfilerConfig(top_modules=3)),
    "untimed": (windows.untimed_window(), ProfilerConfig()),
    "lower_bound": (
        windows.lower_bound_window(),
        ProfilerConfig(recompute_fwd_factor=1.0, peak_flops_per_sec={"float32": 1e12}),
    ),
    "parallel": (windows.parallel_window(), ProfilerConfig(detailed=False)),
    "variable": (windows.variable_window(), ProfilerConfig(module_depth=0)),
    "unknown": (windows.unknown_window(), ProfilerConfig()),
}


@pytest.mark.parametrize("name", CASES)
def test_report_is_the_file_people_read(name: str) -> None:
    window, config = CASES[name]
    golden(f"text/{name}.txt", render_text(build_profile(window, config=config)))
