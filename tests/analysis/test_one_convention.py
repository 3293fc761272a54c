"""MFU and HFU of causal attention by one convention, in every place that prints them; executed FLOPs by themselves."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_flops import profile_training
from lightning_flops.analysis.trace_report import analyze_one
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.counting.recorded_calls import recorded_work
from lightning_flops.report.scalars import profile_scalars
from lightning_flops.report.text import render_text
from tests.analysis.in_memory import known
from tests.analysis.trace_events import kernel, launch, operator, shapes, step, trace

BATCH, HEADS, LENGTH, SIZE = 2, 2, 16, 8
WIDE = HEADS * SIZE
LINEAR = 2 * BATCH * LENGTH * WIDE * WIDE
"""Of one projection."""
PRODUCT = 2 * BATCH * HEADS * LENGTH * LENGTH * SIZE
"""Of one product over the full score matrix. The forward has two, the backward four, and it repeats one."""
MASKED = PRODUCT * (LENGTH - 1) // (2 * LENGTH)
"""What lies above the diagonal."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projections = nn.ModuleList(nn.Linear(WIDE, WIDE) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            one(x).view(BATCH, LENGTH, HEADS, SIZE).transpose(1, 2) for one in list(self.projections)[:3]
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.projections[3](mixed.transpose(1, 2).reshape(BATCH, LENGTH, WIDE))  # type: ignore[no-any-return]


@pytest.mark.parametrize("setting", ["full", "half"])
def test_hfu_of_a_causal_gpt_is_that_of_its_mfu_and_what_is_repeated(setting: Literal["full", "half"]) -> None:
    model = nn.Sequential(Block(), Block())
    optimizer, share = torch.optim.SGD(model.parameters()), 1 if setting == "full" else 2
    with profile_training(
        model, optimizer, peak_flops_per_sec=1e9, causal_attention=setting, trace=False, lines=False
    ) as profiler:
        for _ in range(30):
            model(torch.randn(BATCH, LENGTH, WIDE)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    profile = known(profiler.profile)
    # The first block's input needs no gradient: three projections have one product less in the backward.
    model_flops, repeated = (24 - 3) * LINEAR + 12 * PRODUCT, 2 * PRODUCT
    counted = (24 - 3) * LINEAR + 12 * PRODUCT // share
    masked = 14 * PRODUCT // share - 14 * (PRODUCT - MASKED)
    flops, step_sec = profile.flops, known(profile.timing).global_step_sec
    assert (flops.model, flops.hardware) == (counted, counted + repeated // share)
    assert (flops.skipped, flops.executed) == (masked, model_flops + repeated - 14 * MASKED)
    assert profile.rates.mfu == pytest.approx(flops.model / 1e9 / step_sec)
    assert profile.rates.hfu == pytest.approx(flops.hardware / 1e9 / step_sec)
    rows = known(profile.budget).rows_ns
    assert (rows["model"], rows["other_flops"]) == (model_flops - 12 * MASKED, repeated - 2 * MASKED)
    scalars, text = profile_scalars(profile), render_text(profile)
    assert scalars["flops_profiler/hfu"] / scalars["flops_profiler/mfu"] == pytest.approx(flops.hardware / flops.model)
    assert scalars["flops_profiler/iter_flops"] == flops.hardware
    assert ("of all FLOPs are masked" in " ".join(text.split())) == (setting == "full")


def test_hfu_of_a_trace_is_not_below_its_mfu_and_a_kernel_is_held_to_what_it_executes() -> None:
    """One causal flash attention forward: 2 x 2 heads of 16 x 16 scores, of which 120 in 256 are masked."""
    sizes = [BATCH, HEADS, LENGTH, SIZE]
    inputs: dict[str, Any] = shapes(sizes, sizes, sizes, [], [], [], [], dtype="c10::Half")
    inputs["Input type"] = ["c10::Half"] * 3 + ["Scalar"] * 3 + [""]
    inputs["Concrete Inputs"] = ["", "", "", "0.", "True", "False", ""]
    events = (
        step(1, 0, 1000),
        operator("aten::_scaled_dot_product_flash_attention", 5, 10, **inputs),
        launch(1, 8),
        kernel(1, 20, 100, name="flash_fwd_kernel"),
    )
    report = analyze_one(trace(*events), formulas=recorded_work, given=ProfilerConfig(peak_flops_per_sec=1e9)).report
    (of_step,), (row,) = known(report.flops).steps, known(report.kernels)
    assert (of_step.forward, of_step.total, of_step.skipped) == (2 * PRODUCT, 2 * PRODUCT, 2 * MASKED)
    assert of_step.mfu == of_step.hfu == pytest.approx(2 * PRODUCT / 1e9 / 1e-3)
    assert known(row.flops).of_peak == pytest.approx(2 * (PRODUCT - MASKED) / 1e9 / 100e-6)
