"""Windows whose traced steps have round numbers, so that every module's times and rates can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning_flops.analysis.traced_step import traced_operators
from lightning_flops.records import WindowRecord, module_mark, phase_mark
from lightning_flops.schema.trace import TracedStep
from lightning_flops.trace import analyze_trace, step_filling, typical_operators
from tests.analysis.trace_events import Event, data_loader, kernel, launch, operator, scope, step, trace
from tests.report import windows

_NODE = "autograd::engine::evaluate_function: "


def _module(name: str, start: float, length: float) -> Event:
    return operator(module_mark(name), start, length)


def _phase(part: str, start: float, length: float) -> Event:
    return operator(phase_mark(part), start, length)


def _made(sequence: int, start: float, length: float, name: str = "aten::addmm") -> Event:
    return operator(name, start, length, **{"Sequence number": sequence, "Fwd thread id": 0})


def _node(sequence: int, start: float, length: float, name: str = "AddmmBackward0") -> Event:
    return operator(_NODE + name, start, length, **{"Sequence number": sequence, "Fwd thread id": 1})


def mlp_traced() -> tuple[WindowRecord, TracedStep]:
    """A step of 22 ms on the host: 2 waiting, 5 forward, 10 backward, 3 optimizer, 2 of the loop's own.

    fc1 takes 2 ms forward and 3 backward, act 0.5 and 1, fc2 1 and 4; the root 1.5 ms forward; 0.5 ms of the backward
    are gradient accumulation and 1.5 nobody's. With the counted FLOPs fc1 does 400 M / 2 ms = 200 GFLOP/s forward and
    400 M / 3 ms = 133.33 backward, fc2 200 M / 1 ms = 200 and 400 M / 4 ms = 100.
    """
    loaded = trace(
        step(8, 0, 22_000),
        _phase("data_wait", 0, 2_000),
        data_loader(100, 1_800),
        _phase("forward", 2_000, 5_000),
        _module("fc1", 2_500, 2_000),
        _made(1, 2_600, 1_800),
        _module("act", 4_600, 500),
        _made(2, 4_700, 300, "aten::relu"),
        _module("fc2", 5_200, 1_000),
        _made(3, 5_300, 800),
        scope("loss", 6_300, 600),
        _phase("backward", 7_500, 10_000),
        _node(3, 8_000, 4_000),
        operator("aten::mm", 8_100, 3_700),
        operator(_NODE + "torch::autograd::AccumulateGrad", 12_100, 500),
        _node(2, 12_700, 1_000, "ReluBackward0"),
        _node(1, 13_900, 3_000),
        operator("aten::mm", 14_000, 2_800),
        _phase("optimizer", 18_000, 3_000),
        operator("aten::_foreach_add_", 18_200, 2_500),
    )
    report = analyze_trace(loaded)
    traced = TracedStep(
        index=8,
        like_counted=True,
        files=("s3://bucket/traces/rank0_step8.pt.trace.json",),
        tables=replace(report, source="s3://bucket/traces/rank0_step8.pt.trace.json"),
        own_forward_sec=None,
        filling=step_filling(loaded),
        operators=traced_operators(typical_operators(loaded)),
    )
    return windows.mlp_window(), traced


def transformer_traced() -> tuple[WindowRecord, TracedStep]:
    """A step on an A100: every block's qkv runs 0.4 ms forward, attention 0.2, out 0.1, up and down 0.4 each.

    So qkv does 24 G / 0.4 ms = 60 TFLOP/s, 19.23% of the 312 at most in bfloat16. Backward each takes twice as long,
    and in block 11 three times, so the mean of all blocks is 25 / 12 times the forward. The head takes 8 ms and 16.
    """
    events = [step(8, 0, 10_000), _phase("forward", 0, 3_000), _module("", 1, 2_998)]
    nodes: list[Event] = []
    number, device_us = 0, 4_000.0
    backward_us = 40_000.0
    parts = (("attn.qkv", 400), ("attn", 200), ("attn.out", 100), ("mlp.up", 400), ("mlp.down", 400))
    for block in range(windows.BLOCKS):
        start = 10 + 200 * block
        marks = [_module(f"blocks.{block}", start, 190), _module(f"blocks.{block}.attn", start + 1, 80)]
        marks.append(_module(f"blocks.{block}.mlp", start + 90, 80))
        for place, (name, length) in enumerate(parts):
            number += 1
            at = start + 2 + 25 * place + (15 if place > 2 else 0)
            if name != "attn":
                marks.append(_module(f"blocks.{block}.{name}", at, 20))
            marks += [_made(number, at + 1, 10), launch(number, at + 2)]
            marks.append(kernel(number, device_us, length, name="ampere_bf16_s16816gemm", **_FULL))
            device_us += length
            again = length * (3 if block == windows.BLOCKS - 1 else 2)
            begin = 9_000 - 8 * number
            nodes += [_node(number, begin, 5), launch(1000 + number, begin + 1)]
            nodes.append(kernel(1000 + number, backward_us, again, name="ampere_bf16_s16816gemm_bwd", **_FULL))
            backward_us += again
        events += marks
    events += [_module("head", 2_900, 50), _made(500, 2_905, 20), launch(500, 2_910)]
    events.append(kernel(500, device_us, 8_000, name="ampere_sgemm_128x64", **_FULL))
    events += [_phase("backward", 8_000, 1_500), _node(500, 8_010, 5), launch(1500, 8_011)]
    events.append(kernel(1500, backward_us, 16_000, name="ampere_sgemm_128x64", **_FULL))
    loaded = trace(*events, *nodes)
    traced = TracedStep(
        index=8,
        like_counted=True,
        files=(),
        tables=analyze_trace(loaded),
        own_forward_sec=None,
        filling=step_filling(loaded),
        operators=traced_operators(typical_operators(loaded)),
    )
    return windows.transformer_window(), traced


_FULL: dict[str, Any] = {"blocks per SM": 2.0, "est. achieved occupancy %": 50}
