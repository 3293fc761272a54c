"""No line of any command's text is wider than the terminal that it is shown in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import count_flops, predict_memory, render_text
from lightning_flops.records import PhaseFlops
from lightning_flops.schema.plan import (
    FormulaReport,
    FormulaSize,
    FormulaTerm,
    MemoryReport,
    Plan,
    PlannedCollective,
    PlannedRun,
    SizedFlops,
)
from tests.report.test_compare_text import CASES
from tests.report.test_text import RUNS


class Deep(nn.Module):
    """Modules of long names, one inside the other."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.first_projection_of_the_decoder = nn.Linear(8, 8)
        if levels:
            self.transformer_decoder_layer = Deep(levels - 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first_projection_of_the_decoder(x)
        return self.transformer_decoder_layer(x) if hasattr(self, "transformer_decoder_layer") else x


@cache
def memory() -> MemoryReport:
    return predict_memory(Deep(6), torch.empty(4, 8)).report(available_bytes=80e9, largest=True)


def plan() -> Plan:
    run = PlannedRun(at="the floor", steps=1_000_000, hours=1234.5, device_hours=79_008.0, price=158_016.0)
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    return Plan(
        mesh={"pp": 4, "dp_replicate": 8, "dp_shard": 16, "cp": 2, "tp": 8},
        rank=4095,
        at={"batch": 8, "sequence": 131_072},
        flops=PhaseFlops(forward=10**17, backward=2 * 10**17, recompute=10**17, optimizer=10**12),
        lower_bound=True,
        params=671_000_000_000,
        local_params=163_818_359,
        memory=memory(),
        unused=(),
        collectives=tuple(
            PlannedCollective(
                kind=kind, dim="dp_replicate+dp_shard+cp", size=256, calls=12_345, bytes=10**15, floor_sec=12.345
            )
            for kind in kinds
        ),
        device="NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",
        peaks_flops_per_sec={"bfloat16": 438.9e12, "tf32": 219.4e12, "float32": 109.7e12, "float8": 877.8e12},
        memory_bytes_per_sec=1792e9,
        arithmetic_sec=123.4,
        operators_sec=234.5,
        communication_sec=None,
        floor_sec=None,
        exposed_floor_sec=None,
        mfu_at_most=0.4,
        stages=(PhaseFlops(forward=10**17, backward=2 * 10**17),) * 4,
        bubble=0.27,
        runs=(run,),
        unavailable={"communication_sec": "no bandwidth was given for dp_replicate+dp_shard+cp: --links net=50e9"},
        notes=("What a rank receives is taken to be as large as what it sends.",),
    )


def formula() -> FormulaReport:
    powers: list[dict[str, int]] = [{"batch": 1, "encoder_sequence": 2, "decoder_sequence": 1}, {"batch": 1}]
    names = ("batch", "encoder_sequence", "decoder_sequence")
    return FormulaReport(
        reason=None,
        sizes=tuple(FormulaSize(name=name, least=2, greatest=131_072, apart=64) for name in names),
        terms=tuple(
            FormulaTerm(bucket=bucket, dtype=dtype, numerator=123_456_789_012, denominator=3, powers=one)
            for bucket in ("forward", "backward")
            for dtype in ("bfloat16", "float32")
            for one in powers
        ),
        counted=40,
        checks=10,
        lower_bound=True,
        asked=(
            SizedFlops(
                sizes=dict.fromkeys(names, 131_072), source="formula", forward=10**18, backward=10**18, recompute=10**18
            ),
        ),
    )


REPORTS: dict[str, Callable[[], Iterable[Any]]] = {
    "compare": lambda: [make() for make in CASES.values()],
    "throughput": RUNS.values,
    "memory": lambda: [memory()],
    "plan": lambda: [plan()],
    "formula": lambda: [formula()],
    "count_flops": lambda: [counts()],
}


def counts() -> Any:
    with count_flops(model := Deep(6)) as found:
        model(torch.empty(4, 8)).sum().backward()
    return found


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("command", REPORTS)
def test_no_line_is_wider_than_the_terminal(command: str, width: int) -> None:
    for report in REPORTS[command]():
        lines = render_text(report, width=width).split("\n")
        assert [line for line in lines if len(line) > width] == []
