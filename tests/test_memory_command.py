from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_flops import predict_memory
from lightning_flops.cli import main
from lightning_flops.report.predicted_document import predicted_section
from lightning_flops.report.text import render_text

EXAMPLE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(self.up(x).relu())

def example():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 64), *(Block() for _ in range(4)))
        return model, torch.empty(16, 64), torch.optim.AdamW(model.parameters())

def chooses():
    return nn.Sequential(nn.Linear(4, 4), nn.Threshold(0, 0)), {"other": torch.empty(2, 4)}
"""


@pytest.fixture
def where(tmp_path: Path) -> str:
    (tmp_path / "models.py").write_text(EXAMPLE)
    return f"{tmp_path}/models.py"


def test_the_command_says_what_fits_and_what_checkpoints_save(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", f"{where}:example", "--bytes", "20e6", "--largest"]) == 0
    printed = capsys.readouterr().out
    # 136,512 parameters, their gradients, AdamW's two states, and on a GPU the square roots of one: 20 bytes each
    assert "Peak 2.75 MB of 20 MB with a batch of 16, in the optimizer's step (aten._foreach_sqrt)." in printed
    assert "Largest batch in 20 MB: " in printed
    assert "With a checkpoint around each of the 4 blocks *: " in printed
    assert main(["memory", f"{where}:example", "--bytes", "20e6", "--largest", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    size, peak = (report["largest"][name] for name in ("size", "peak_bytes"))
    peaks = []
    for rows in (size, size + 1):
        assert main(["memory", f"{where}:example", "--batch", str(rows), "--json"]) == 0
        peaks.append(json.loads(capsys.readouterr().out)["peak_bytes"])
    assert peaks[0] == peak <= 20e6 < peaks[1]
    # A block multiplies 16 rows by 64 x 256 weights twice; the second product is not repeated, as no backward needs it.
    assert report["checkpointed"]["recompute_flops"] == 4 * 2 * 16 * 64 * 256
    assert report["checkpointed"]["names"] == ["1", "2", "3", "4"]


@pytest.mark.parametrize(("name", "available"), [("H100", 80e9), ("NVIDIA A100-SXM4-40GB", 40e9), ("MI300X", 192e9)])
def test_a_device_has_the_memory_of_its_name(
    name: str, available: float, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory", f"{where}:example", "--device", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["available_bytes"] == available


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["example", "--largest"], "--largest needs --bytes, or a --device whose memory is known, as H100"),
        (["example", "--device", "A100"], "--device A100 has no one size of memory here"),
        (["example", "--batch", "0"], "batch must be an integer >= 1, got 0"),
        (["example", "--bytes", "-1", "--largest"], "available_bytes must be a number above 0, got -1.0"),
        (["chooses"], "the step cannot be predicted: Sequential fails on tensors without values: TypeError"),
        (["none"], "models.py has no function none, but example, chooses"),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: list[str], words: str, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["memory", f"{where}:{arguments[0]}", *arguments[1:]]) == 2
    assert words in capsys.readouterr().err


def test_not_one_sample_fits_into_a_byte(where: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", f"{where}:example", "--bytes", "1", "--largest"]) == 0
    assert "Largest batch in 1 B: none, not one sample fits." in capsys.readouterr().out


def test_repeated_blocks_are_one_row_and_layers_of_a_list_are_not() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    report = predict_memory(Blocks(), torch.empty(4, 8)).report()
    table = predicted_section(report).items[1]
    assert not isinstance(table, str)
    assert [row[:3] for row in getattr(table, "rows", ())][:1] == [("blocks.*.1", 3, 3 * 4 * 4 * 8)]
    assert render_text(report).startswith("-")
