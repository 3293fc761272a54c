"""``lightning-flops show`` and ``Profile.load``: a profile read back from where a run wrote it."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_flops import LightningFlopsError, Profile, render_text
from lightning_flops.cli import main
from tests.report import compared

PROFILE = compared.run()


@pytest.fixture(autouse=True)
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of logs."""
    (tmp_path / "logs" / "lightning_flops").mkdir(parents=True)
    (tmp_path / "logs" / "lightning_flops" / "profile.json").write_text(PROFILE.to_json())
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("path", ["logs", "logs/lightning_flops/profile.json"])
def test_a_file_or_a_folder_of_logs_is_shown(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert Profile.load(path) == PROFILE == Profile.load(Path(path))
    assert main(["show", path]) == 0
    assert capsys.readouterr() == (str(PROFILE), "")
    assert main(["show", "--detailed", path]) == 0
    assert capsys.readouterr().out == render_text(PROFILE, detailed=True)
    assert main(["show", "--peak", "1400e9", path]) == 0
    assert "of 1.4 TFLOP/s (float32), as given." in capsys.readouterr().out.replace("\n  ", " ")


def test_what_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(LightningFlopsError, match="nowhere: there is no such file or folder"):
        Profile.load("nowhere")
    assert main(["show", "nowhere"]) == 2
    assert capsys.readouterr() == ("", "lightning-flops: nowhere: there is no such file or folder\n")
