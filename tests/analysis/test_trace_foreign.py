"""What other people's trace files hold, each kind in a small file made by hand, with its right value."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lightning_flops.analysis.trace_report import analyze_one, join_analyses
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.counting.recorded_calls import recorded_work
from lightning_flops.report.trace_document import summary
from lightning_flops.schema.tables import TraceFlops
from lightning_flops.schema.trace import TraceReport
from lightning_flops.trace.columns import Trace, TraceFormatError
from lightning_flops.trace.read import load_trace
from tests.analysis.in_memory import known
from tests.analysis.trace_events import (
    A100,
    Event,
    kernel,
    launch,
    launched,
    node,
    operator,
    product,
    shapes,
    span,
    step,
    trace,
)


def mm_with(arguments: str) -> str:
    """The text of a product with these arguments."""
    return f'{{"ph":"X","cat":"cpu_op","name":"aten::mm","pid":1,"tid":1,"ts":12,"dur":20,"args":{arguments}}}'


def loaded(text: str, folder: Path) -> Trace:
    path = folder / "trace.json"
    path.write_text(text)
    return load_trace(path)


def report_of(found: Trace, given: ProfilerConfig | None = None) -> TraceReport:
    return analyze_one(found, formulas=recorded_work, given=given).report


def flops_of(*events: Event, given: ProfilerConfig | None = None, **head: Any) -> TraceFlops:
    return known(report_of(trace(*events, **head), given).flops)


def test_arguments_of_a_call_by_torchscript_are_the_last_of_its_stack() -> None:
    # linear of [2048, 2400] and [256, 2400]; what stands before is left over of another call.
    linear = operator("aten::linear", 0, 50, **shapes([2048, 160, 72], [2048, 2400], [256, 2400], [256]))
    inner = shapes([256], [2048, 2400], [2400, 256], [], [], types=["float"] * 3 + ["Scalar"] * 2)
    inner["Concrete Inputs"] = ["", "", "", "1", "1"]
    for events in ([linear], [linear, operator("aten::addmm", 5, 40, **inner)]):
        assert flops_of(*events).steps[0].forward == 2 * 2048 * 2400 * 256
    # Three tensors of a bmm are no bmm.out: the last two fit together.
    found = flops_of(operator("aten::bmm", 0, 5, **shapes([8, 6, 4], [8, 5, 6], [8, 6, 2])))
    assert found.steps[0].forward == 2 * 8 * 5 * 6 * 2


def test_operators_within_a_stream_capture_run_nothing() -> None:
    def mm(start: float, **more: Any) -> Event:
        return operator("aten::mm", start, 5, **shapes([10, 10], [10, 10]), **more)

    def call(name: str, start: float) -> Event:
        return span("cuda_runtime", name, start, 1)

    flops = flops_of(
        mm(0), call("cudaStreamBeginCapture", 10), mm(12), mm(13, thread=2), call("cudaStreamEndCapture", 20), mm(30),
        call("hipStreamBeginCapture_spt", 40), mm(50),
    )  # fmt: skip
    assert (flops.steps[0].forward, flops.uncounted) == (3 * 2000, ())


def test_a_repeated_call_at_the_end_of_a_file_does_not_make_the_forward_repeated() -> None:
    def mm(start: float, **more: Any) -> Event:
        return operator("aten::mm", start, 5, **shapes([10, 10], [10, 10]), **more)

    # In the backward of a checkpoint one call runs with gradients, which repeats the forward, and one without them.
    repeated = mm(120, **{"Sequence number": 9})
    (flops,) = flops_of(mm(0, **{"Sequence number": 3}), node(3, 100, 50), mm(110), repeated).steps
    assert (flops.forward, flops.backward, flops.recompute) == (2000, 2000, 2000)


def test_without_kernels_the_time_of_the_runtimes_calls_is_told_all_the_same() -> None:
    synchronize = span("cuda_runtime", "cudaDeviceSynchronize", 100, 900)
    report = report_of(trace(operator("aten::mm", 0, 100), launch(1, 20, 5), synchronize))
    mean = report.step_times.mean
    assert (mean.runtime_us, mean.cpu_us, mean.other_us, mean.kernel_us) == (905, 95, 0, None)
    assert any("launched no kernel" in note for note in report.notes)
    # That, and not that nothing is wrong, is what the summary begins with.
    first, *rest = summary(join_analyses([analyze_one(trace(operator("aten::mm", 0, 100), synchronize))]))
    assert "no kernel, copy or memset was recorded" in first
    assert not any("above its threshold" in words for words in rest)


def test_a_file_without_events_says_so(tmp_path: Path) -> None:
    with pytest.raises(TraceFormatError, match="it has no events: nothing was recorded"):
        loaded('{"schemaVersion": 1, "traceEvents": []}', tmp_path)


def test_an_operator_with_other_arguments_than_this_torchs_is_not_one_that_it_lacks() -> None:
    def why(name: str) -> str:
        return flops_of(operator(name, 0, 5, **shapes([8, 8, 8]))).uncounted[0].reason

    assert why("aten::bmm").startswith("this torch has an operator of this name with other arguments")
    assert why("aten::no_such_matmul").startswith("this torch has no such operator")


def test_a_kernel_that_runs_over_its_successors_ends_where_the_next_begins() -> None:
    late: dict[str, Any] = {"stream": 7}
    events = [
        operator("aten::mm", 0, 1), kernel(1, 10, 1_600_000, **late),
        *(kernel(2 + place, 200 + 200 * place, 100, **late) for place in range(4)),
    ]  # fmt: skip
    found = trace(*events)
    assert found.duration_ns.tolist()[1] == 190_000
    (note,) = found.notes
    assert "kernels that seem to run over their successors on the same stream: 1, by 1,599,810 us" in note
    # On streams of their own, or as one graph, they may well run beside it.
    for changed, stream in (({"stream": 8}, 8), ({"correlation": 9}, 7)):
        beside = json.loads(json.dumps(events))
        for event in beside[1 + ("stream" in changed) :]:
            event["args"] |= changed
            event["tid"] = stream
        assert trace(*beside).notes == ()


def test_amds_device_numbers_count_processors_too() -> None:
    mi300x = {"id": 0, "name": "AMD Instinct MI300X", "computeMajor": 9, "computeMinor": 4, "numSms": 304}
    call = operator("aten::mm", 0, 20, **shapes([8192, 8192], [8192, 8192], dtype="c10::BFloat16"))
    flops = flops_of(call, launch(1, 5, 5), kernel(1, 30, 2000, device=2, name="Cijk_B"), deviceProperties=[mi300x])
    assert flops.device == "AMD Instinct MI300X"
    assert flops.mfu == pytest.approx(2 * 8192**3 / (2030e-6 * 1307.4e12))  # 41.43%
    other = {**mi300x, "id": 1, "name": "AMD Instinct MI210", "numSms": 104}
    two = flops_of(call, launch(1, 5, 5), kernel(1, 30, 2000, device=5), deviceProperties=[mi300x, other])
    assert two.device is None


@pytest.mark.parametrize(
    ("time", "start_ns"),
    [('"1704161511420306.491"', 1704161511420306491), ('"12"', 12000), ('"-1.5"', -1500), ('" 7.0004 "', 7000)],
)
def test_times_may_be_text_and_are_exact(time: str, start_ns: int, tmp_path: Path) -> None:
    found = loaded(f"[{mm_with('{}')}]".replace('"ts":12', f'"ts":{time}'), tmp_path)
    assert (found.start_ns.tolist(), found.duration_ns.tolist()) == ([start_ns], [20_000])


@pytest.mark.parametrize("bare", ["inf", "-inf", "nan", "NaN", "Infinity", "-Infinity", "N/A", "nan(ind)"])
def test_numbers_that_json_does_not_have_are_none(bare: str, tmp_path: Path) -> None:
    copy = (
        '{"ph":"X","cat":"Memcpy","name":"Memcpy HtoD","pid":0,"tid":"stream 7","ts":14,"dur":1,"args":'
        '{"device":0,"stream":7,"bytes":200,"blocks per SM":BARE,"memory bandwidth (GB/s)": BARE}}'
    )
    mm = mm_with('{"Call stack": BARE}')
    text = f'{{"x": BARE, "traceEvents": [{mm}, {copy}], "y": [BARE]}}'
    found = loaded(text.replace("BARE", bare), tmp_path)
    assert (found.bytes.tolist(), found.names) == ([-1, 200], ("aten::mm", "Memcpy HtoD"))
    assert found.blocks_per_sm[1] != found.blocks_per_sm[1]


def test_backslashes_that_nobody_escaped_are_read(tmp_path: Path) -> None:
    mm = mm_with("{}")
    named = mm.replace("aten::mm", r"C:\logs\x\u.py(3): \"f\" \\ end")
    text = f'{{"traceEvents": [{mm}, {named}], "traceName": "C:\\logs\\x.json"}}'
    found = loaded(text, tmp_path)
    assert found.names == ("aten::mm", r'C:\logs\x\u.py(3): "f" \ end')


def test_torch_18_has_other_keys_and_no_dtypes() -> None:
    def old(name: str, start: float, *dims: list[int], **more: Any) -> Event:
        return span("Operator", name, start, 5, **{"Input dims": list(dims), "Input type": [], **more})

    mm = old("aten::mm", 0, [64, 32], [32, 16])
    assert flops_of(mm).steps[0].forward == 2 * 64 * 32 * 16
    (note,) = trace(mm).notes
    assert note == "Dtypes are not in the file, as in those of torch 1.8: every tensor is taken for float32."
    # No number joins a convolution with its backward: the sizes of values and weights do. 6 x 6 of 8 x 8 by 3 x 3.
    flops = flops_of(
        old("aten::cudnn_convolution", 0, [2, 3, 8, 8], [4, 3, 3, 3], [], [], [], [], [], [], []),
        old("CudnnConvolutionBackward", 20, [2, 4, 6, 6], thread=2),
        old("aten::cudnn_convolution_backward", 21, [2, 3, 8, 8], [2, 4, 6, 6], [4, 3, 3, 3], *[[]] * 7, thread=2),
    )
    assert flops.steps[0].forward == 2 * (2 * 4 * 6 * 6) * (3 * 3 * 3)


def test_an_occupancy_of_zero_is_worked_out_from_the_launch() -> None:
    launched: dict[str, Any] = {
        "grid": [100, 50, 1], "block": [256, 1, 1], "registers per thread": 234, "shared memory": 147456,
        "blocks per SM": 46.3, "est. achieved occupancy %": 0,
    }  # fmt: skip
    mm = operator("aten::mm", 0, 20)

    def occupancy(*devices: Mapping[str, Any], **changed: Any) -> float | None:
        report = report_of(trace(mm, kernel(1, 30, 100, **{**launched, **changed}), deviceProperties=list(devices)))
        (row,), (device,) = known(report.kernels), known(report.device_metrics)
        assert row.occupancy_percent == device.occupancy_percent
        return row.occupancy_percent

    # 234 registers are given as 240 to each of 32 threads of 8 warps: one block of 65,536 registers, 8 of 64 warps.
    assert occupancy(A100) == 12.5
    # With few registers two blocks of 74 KB fit into 164 KB; with 54 blocks half a block a multiprocessor is there.
    assert occupancy(A100, **{"registers per thread": 32, "shared memory": 75000}) == 25
    assert occupancy(A100, grid=[54, 1, 1]) == 6.25
    # 24 warps fit twice into 64; 41 registers are given as 48, so that one block is left; one runs, whatever it takes.
    small: dict[str, Any] = {"block": [768], "registers per thread": None, "shared memory": 50000}
    assert occupancy(A100, **small) == occupancy(A100, **small, grid="N/A") == 75
    assert occupancy(A100, **{**small, "registers per thread": 41}) == 37.5
    assert occupancy(A100, **{**small, "registers per thread": 255, "block": [1024]}) == 50
    assert (occupancy(), occupancy({"id": 0, "numSms": 108}), occupancy(A100, block=[])) == (None, None, None)
    # With less shared memory 0 is what a small grid rounds to.
    assert [occupancy(A100, **{"shared memory": size}) for size in (1024, 48 << 10, None)] == [0, 0, 0]


def test_kernels_of_a_device_that_is_not_described_are_left_out_of_its_occupancy_and_said() -> None:
    much: dict[str, Any] = {
        "block": [256], "blocks per SM": 46.3, "est. achieved occupancy %": 0, "shared memory": 147456
    }  # fmt: skip
    half: dict[str, Any] = {"block": [256], "blocks per SM": 2.0, "est. achieved occupancy %": 50}
    mm, events = operator("aten::mm", 0, 20), (kernel(1, 30, 100, **much), kernel(2, 200, 50, **half))
    report = report_of(trace(mm, *events))
    assert known(report.device_metrics)[0].occupancy_percent == 50
    words = "Occupancy is written as 0 for 1 kernels with much shared memory: worked out"
    assert report.notes[0] == f"{words} for 0 of them, the others are left out."
    assert report_of(trace(mm, *events, deviceProperties=[A100])).notes[0] == f"{words}."


def test_events_of_mtia_are_on_a_device() -> None:
    fc = {**span("mtia_ccp_events", "fc-dtype_Float", 30, 400, thread=801), "pid": 9}
    report = report_of(trace(operator("aten::addmm", 0, 20), fc))
    assert (known(report.device_metrics)[0].device, known(report.kernels)[0].device.total_us) == (9, 400)


def test_a_share_of_more_than_twice_the_peak_is_no_figure() -> None:
    # 195 MFLOPs in 10 us are all of 19.5 TFLOP/s; in the 1 us of the kernel whose name multiplies they are ten times.
    events = [*product(1, 10, rows=975_000, kernel_us=1), launch(2, 12), kernel(2, 30, 9, name="fill")]
    report = report_of(trace(*events), ProfilerConfig(peak_flops_per_sec=19.5e12))
    assert known(report.flops).operators[0].of_peak == pytest.approx(1)
    assert known(known(report.kernels)[1].flops).of_peak is None


def test_what_no_device_can_do_is_left_out_and_listed() -> None:
    """2 GFLOPs in 1 us are 2 PFLOP/s: over twice the 156 TFLOP/s of tf32."""
    fast, slow = product(1, 10, rows=10**7, kernel_us=1), product(2, 100, rows=10**4, kernel_us=20)
    flops = flops_of(step(1, 0, 1000), *fast, *slow, deviceProperties=[A100])
    assert (flops.steps[0].forward, flops.steps[0].lower_bound) == (2 * 10**6, True)
    (row,) = flops.uncounted
    assert (row.name, row.calls) == ("aten.mm", 1) and "times the peak: impossible" in row.reason
    # A V100 has no TF32: 2 MFLOPs in 20 ns are 6 times its 15.7 TFLOP/s.
    v100 = {"id": 0, "name": "Tesla V100-SXM2-16GB", "computeMajor": 7, "computeMinor": 0}
    assert flops_of(*product(1, 10, rows=10**4, kernel_us=0.02), deviceProperties=[v100]).steps[0].forward == 0
    # A step whose kernels are not in the trace may have too little time; its MFU is no figure.
    unlaunched, *_ = product(2, 20, rows=10**10)
    short = flops_of(step(1, 0, 400), *product(1, 10, rows=10**7, kernel_us=300), unlaunched, deviceProperties=[A100])
    assert (short.mfu, short.hfu) == (None, None)
    assert any(row.name == "step 1" and "no MFU" in row.reason for row in short.uncounted)


def test_a_users_own_figures_win_and_need_no_device_of_a_known_name() -> None:
    events = [step(1, 0, 100), *product(1, 10, rows=5)]  # 1,000 FLOPs
    given = ProfilerConfig(peak_flops_per_sec={"float32": 1e9}, memory_bytes_per_sec=1e6)
    flops = flops_of(*events, given=given)
    assert flops.device is None and flops.mfu == pytest.approx(1000 / (100e-6 * 1e9))
    # 4 bytes of 5 x 10, 10 x 10 and 5 x 10: 1.25 FLOPs a byte.
    assert flops.operators[0].attainable_flops_per_sec == pytest.approx(1.25e6)
    assert flops_of(*events, given=ProfilerConfig(peak_flops_per_sec=1e9), deviceProperties=[A100]).peaks == {
        "float32": 1e9
    }


@pytest.mark.parametrize("name", ["", "Graphics Device", "NVIDIA A100-SXM4-80GB MIG 3g.40gb"])
def test_a_device_of_an_unknown_name_has_no_peak_whatever_its_capability_is(name: str) -> None:
    assert flops_of(*product(1, 10, rows=5), deviceProperties=[{**A100, "name": name}]).peaks == {}


@pytest.mark.parametrize("given", [None, ProfilerConfig(peak_flops_per_sec={"float32": 19.5e12})])
@pytest.mark.parametrize("name", ["ampere_sgemm_tn", "s1688gemm_tf32", "gemm"])
def test_float32_may_have_run_in_tf32(name: str, given: ProfilerConfig | None) -> None:
    """2 MFLOPs in 20 ns are 100 TFLOP/s: 5 times the 19.5 of float32, no share to print; of the 156 of tf32 64.1%."""
    mm, call, gemm = product(1, 10, rows=10**4, kernel_us=0.02)
    head = {} if given else {"deviceProperties": [A100]}
    flops = flops_of(mm, call, gemm | {"name": name}, given=given, **head)
    share = pytest.approx(100 / 156) if name == "s1688gemm_tf32" and not given else None
    assert (flops.steps[0].forward, flops.operators[0].of_peak) == (2 * 10**6, share)


def test_a_repeated_call_that_launched_nothing_never_ran() -> None:
    def mm(start: float, **more: Any) -> Event:
        return operator("aten::mm", start, 5, **shapes([10, 10], [10, 10]), **more)

    # Checkpointing without reentry raises inside of the last call that it repeats, before that launches its kernel.
    repeated, backward = mm(120, **{"Sequence number": 9}), mm(110)
    events = [
        mm(0, **{"Sequence number": 3}), *launched(1, 1, 10, 5), node(3, 100, 50), backward, *launched(2, 111, 115, 5)
    ]  # fmt: skip
    (flops,) = flops_of(*events, repeated).steps
    assert (flops.forward, flops.backward, flops.recompute) == (2000, 2000, 0)
    (flops,) = flops_of(*events, repeated, *launched(3, 121, 130, 5)).steps
    assert (flops.forward, flops.backward, flops.recompute) == (2000, 2000, 2000)
