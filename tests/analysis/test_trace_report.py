from __future__ import annotations

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_flops.report.trace_text import render_traces
from lightning_flops.schema import codec
from lightning_flops.schema.trace import SCHEMA_VERSION, TracesReport
from tests.analysis.in_memory import analyze_traces
from tests.analysis.trace_events import Event, kernel, launch, memory, on_device, operator, scope, step, trace

NAMES = (
    "aten::mm",
    "aten::add",
    "autograd::engine::evaluate_function: MmBackward0",
    "gloo:all_reduce",
    "forward",
    "backward",
    "Optimizer.step#SGD.step",
    "enumerate(DataLoader)#x.__next__",
    "mine",
)


def event(shape: int, name: str, start: int, length: int, number: int, lane: int) -> Event:
    """Some event; *number* is its correlation or step, *lane* its thread or stream."""
    more = {"Sequence number": number, "External id": number, "Fwd thread id": number % 2}
    others = ("gpu_memcpy", "gpu_memset", "python_function")
    events = (
        operator(name, start, length, thread=lane, **more),
        scope(name, start, length, thread=lane),
        step(number, start, length),
        launch(number, start, length, thread=lane),
        kernel(number, start, length, stream=lane, device=number % 2),
        kernel(number, start, length, stream=lane, name="ncclDevKernel_Broadcast_RING_LL"),
        memory(start, number - 3, thread=lane, device=None if lane == 1 else 0),
        *(on_device(kind, number, start, length, name=kind, stream=lane) for kind in others),
    )
    return events[shape]


NUMBERS = (st.integers(0, 40), st.integers(0, 20), st.integers(0, 5), st.integers(1, 3))
TRACES = st.lists(st.builds(event, st.integers(0, 9), st.sampled_from(NAMES), *NUMBERS), max_size=20)


@given(st.lists(TRACES, min_size=1, max_size=2))
@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
def test_any_traces_are_analysed_rendered_and_kept(drawn: list[list[Event]]) -> None:
    report = analyze_traces([trace(operator("aten::mm", 3, 1), *events) for events in drawn])
    assert render_traces(report).endswith("-\n")
    kept = codec.load(TracesReport, report.to_json(), version=SCHEMA_VERSION)
    assert kept == report
    for one in report.traces:
        for row in one.operators or ():
            assert row.host.min_us <= row.host.mean_us <= row.host.max_us
            assert row.host_self.total_us <= row.host.total_us
        for device in one.device_metrics or ():
            assert 0 <= device.utilization <= 1
        assert one.phases[-1].host is not None and one.phases[-1].host.min_us >= 0
        for times in one.step_times.steps:
            assert times.other_us >= 0
