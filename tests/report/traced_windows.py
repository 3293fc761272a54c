"""Windows whose traced steps have round numbers, so that every module's times and rates can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_flops.analysis.trace_report import analyze_trace
from lightning_flops.records import WindowRecord
from lightning_flops.schema.trace import TracedStep
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.steps import step_filling
from tests.analysis.trace_events import (
    Event,
    accumulation,
    data_loader,
    kernel,
    launch,
    made,
    module,
    node,
    operator,
    phase,
    scope,
    step,
    trace,
)  # fmt: skip
from tests.report import windows


def _traced(loaded: Trace, *, source: str = "(events)", files: tuple[str, ...] = ()) -> TracedStep:
    return windows.traced(
        files=files, tables=replace(analyze_trace(loaded), source=source), filling=step_filling(loaded)
    )


def mlp_traced() -> tuple[WindowRecord, TracedStep]:
    """A step of 22 ms on the host: 2 waiting, 5 forward, 10 backward, 3 optimizer, 2 of the loop's own.

    fc1 takes 2 ms forward and 3 backward, act 0.5 and 1, fc2 1 and 4; the root 1.5 ms forward; 0.5 ms of the backward
    are gradient accumulation and 1.5 of no module. By the counted FLOPs fc1 has 400 M / 2 ms = 200 GFLOP/s forward and
    400 M / 3 ms = 133.33 backward, fc2 200 M / 1 ms = 200 and 400 M / 4 ms = 100.
    """
    loaded = trace(
        step(8, 0, 22_000),
        phase("data_wait", 0, 2_000),
        data_loader(100, 1_800),
        phase("forward", 2_000, 5_000),
        module("fc1", 2_500, 2_000),
        made(1, 2_600, 1_800),
        module("act", 4_600, 500),
        made(2, 4_700, 300, name="aten::relu"),
        module("fc2", 5_200, 1_000),
        made(3, 5_300, 800),
        scope("loss", 6_300, 600),
        phase("backward", 7_500, 10_000),
        node(3, 8_000, 4_000),
        operator("aten::mm", 8_100, 3_700),
        accumulation(12_100, 500),
        node(2, 12_700, 1_000, name="ReluBackward0"),
        node(1, 13_900, 3_000),
        operator("aten::mm", 14_000, 2_800),
        phase("optimizer", 18_000, 3_000),
        operator("aten::_foreach_add_", 18_200, 2_500),
    )
    file = "s3://bucket/traces/rank0_step8.pt.trace.json"
    return windows.mlp_window(), _traced(loaded, source=file, files=(file,))


def transformer_traced() -> tuple[WindowRecord, TracedStep]:
    """A step on an A100: every block's qkv runs 0.4 ms forward, attention 0.2, out 0.1, up and down 0.4 each.

    So qkv does 24 G / 0.4 ms = 60 TFLOP/s, 19.23% of the 312 at most in bfloat16. Backward each takes twice as long,
    and in block 11 three times, so the mean of all blocks is 25 / 12 times the forward. The head takes 8 ms and 16.
    """
    events = [step(8, 0, 10_000), phase("forward", 0, 3_000), module("", 1, 2_998)]
    nodes: list[Event] = []
    number, device_us = 0, 4_000.0
    backward_us = 40_000.0
    parts = (("attn.qkv", 400), ("attn", 200), ("attn.out", 100), ("mlp.up", 400), ("mlp.down", 400))
    for block in range(windows.BLOCKS):
        start = 10 + 200 * block
        marks = [module(f"blocks.{block}", start, 190), module(f"blocks.{block}.attn", start + 1, 80)]
        marks.append(module(f"blocks.{block}.mlp", start + 90, 80))
        for place, (name, length) in enumerate(parts):
            number += 1
            at = start + 2 + 25 * place + (15 if place > 2 else 0)
            if name != "attn":
                marks.append(module(f"blocks.{block}.{name}", at, 20))
            marks += [made(number, at + 1, 10), launch(number, at + 2)]
            marks.append(kernel(number, device_us, length, name="ampere_bf16_s16816gemm", **_FULL))
            device_us += length
            again = length * (3 if block == windows.BLOCKS - 1 else 2)
            begin = 9_000 - 8 * number
            nodes += [node(number, begin, 5), launch(1000 + number, begin + 1)]
            nodes.append(kernel(1000 + number, backward_us, again, name="ampere_bf16_s16816gemm_bwd", **_FULL))
            backward_us += again
        events += marks
    events += [module("head", 2_900, 50), made(500, 2_905, 20), launch(500, 2_910)]
    events.append(kernel(500, device_us, 8_000, name="ampere_sgemm_128x64", **_FULL))
    events += [phase("backward", 8_000, 1_500), node(500, 8_010, 5), launch(1500, 8_011)]
    events.append(kernel(1500, backward_us, 16_000, name="ampere_sgemm_128x64", **_FULL))
    return windows.transformer_window(), _traced(trace(*events, *nodes))


_FULL: dict[str, Any] = {"blocks per SM": 2.0, "est. achieved occupancy %": 50}
