"""Where the reports of several windows of one engine lie."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_flops.analysis.profile import build_profile
from lightning_flops.config import ProfilerConfig
from lightning_flops.deepspeed_run import EngineOutput, StageOutput
from tests.report.windows import mlp_window


@pytest.mark.parametrize("stage", [0, 1])
def test_reports_of_later_windows_lie_beside_the_first(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    off = SimpleNamespace(enabled=False)
    monitors = SimpleNamespace(tensorboard=off, csv_monitor=off)
    engine: Any = SimpleNamespace(
        monitor=SimpleNamespace(), global_samples=8, _config=SimpleNamespace(monitor_config=monitors)
    )
    config = ProfilerConfig(output_file=str(tmp_path / "flops.txt"))
    profile = build_profile(mlp_window(), config=config)
    for _ in range(2):  # a second run takes the place of the first one's first report
        output = StageOutput(engine, config, stage=stage) if stage else EngineOutput(engine, config)
        output.write_profile(profile, step=1)
    assert len(list(tmp_path.glob("flops*"))) == 1
    output.write_profile(profile, step=2)
    name = f"flops_stage{stage}" if stage else "flops"
    assert {path.name for path in tmp_path.glob("flops*")} == {f"{name}.txt", f"{name}-2.txt"}
