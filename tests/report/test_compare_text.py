"""The report on two runs, as whole files that people read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from lightning_flops import Comparison, compare_profiles, render_text
from lightning_flops.analysis.compare import compare_throughputs, compare_traces
from lightning_flops.analysis.trace_report import analyze_one
from lightning_flops.measure.counting.recorded_calls import recorded_work
from lightning_flops.records import ModuleRecord
from lightning_flops.trace.read import load_trace
from tests.analysis.in_memory import known
from tests.analysis.test_timing import run as timed_run
from tests.analysis.test_trace_compare import A, run as traced_run
from tests.analysis.trace_events import RESNET, launched, slowed
from tests.golden_files import golden
from tests.report import compared, windows
from tests.report.compared import CELLS, run
from tests.report.windows import cell


def renamed() -> Comparison:
    """fc2 is called head, norm is new, act is gone; other torch, twice the batch, and a loader that is slower."""
    modules = [one for one in windows.mlp_window().modules if one.name in ("", "fc1")]
    fc2 = next(one for one in windows.mlp_window().modules if one.name == "fc2")
    modules += [
        replace(fc2, name="head"),
        ModuleRecord(name="norm", type_name="LayerNorm", params=4000, trainable_params=4000, local_params=4000),
    ]
    b = run(
        mean_ms={"data_wait": 3, "forward": 5.5},
        traced=compared.traced_step({"": 1.5, "fc1": 2, "head": 1, "norm": 1}, {"": 0, "fc1": 3, "head": 4, "norm": 1}),
        cells=[
            *(replace(one, module="head") if one.module == "fc2" else one for one in CELLS),
            cell("norm", "forward", 0, operator="aten.native_layer_norm", bytes_read=1_600_000),
        ],
        modules=modules,
        context=replace(run().context, torch_version="2.14.0", micro_batch_size=200),
    )
    return compare_profiles(run(), b, sources=("logs/version_0/profile.json", "logs/version_1/profile.json"))


def on_device() -> Comparison:
    """On two ranks: more communication, more idle time."""
    a = compared.on_device(forward_ms=5, busy_ms=3, exposed_ms=0.5, idle_ms=1.5)
    b = compared.on_device(forward_ms=9, busy_ms=3, exposed_ms=2, idle_ms=4)
    context = replace(b.context, world_size=2, dp_size=2)
    return compare_profiles(replace(a, context=context), replace(b, context=context))


def without_times() -> Comparison:
    """One run has two timed steps and no trace; fc1 is wider in the other all the same."""
    return compare_profiles(run(traced=None, straying=(0.01, -0.01)), compared.wider())


def throughput() -> Comparison:
    """Both without a profile: half of the wait for data."""
    a, b = (known(timed_run([(wait, 0.5, 8), (wait, 0.375, 8)] * 16)) for wait in (1.0, 0.25))
    return compare_throughputs([a], [b], sources=(["before/throughput.json"], ["after/throughput.json"]))


CASES: dict[str, Callable[[], Comparison]] = {
    "throughput": throughput,
    "slow_module": lambda: compare_profiles(run(), compared.slow_module()),
    "wider": lambda: compare_profiles(run(), compared.wider()),
    "renamed": renamed,
    "on_device": on_device,
    "without_times": without_times,
}


@pytest.mark.parametrize("name", CASES)
def test_the_report_is_what_the_file_says(name: str) -> None:
    text = render_text(CASES[name]())
    golden(f"text/compare_{name}.txt", text)
    assert max(map(len, text.splitlines())) <= 120


def test_the_numbers_are_what_the_file_says() -> None:
    comparison = renamed()
    golden("json/comparison.json", comparison.to_json())
    assert Comparison.from_json(comparison.to_json()) == comparison


def test_a_comparison_shows_itself() -> None:
    comparison = compare_profiles(run(), compared.slow_loader())
    assert str(comparison) == render_text(comparison)
    assert repr(comparison) == f"<Comparison: {' '.join(str(comparison).splitlines()[1:3])}>"


def test_what_bears_on_speed_and_is_set_up_differently_is_the_second_sentence() -> None:
    a, b = (replace(run(), set_up={"optimizer": f"AdamW, {how}", "workers": "2"}) for how in ("fused", "foreach"))
    assert "\nSet up differently: AdamW: fused in A, foreach in B.\n" in render_text(compare_profiles(a, b))
    other = replace(run(), set_up={"optimizer": "SGD, fused"}, context=replace(a.context, precision="bf16-mixed"))
    text = " ".join(render_text(compare_profiles(a, other)).split())
    assert (
        "Set up differently: precision: 32-true in A, bf16-mixed in B; optimizer:" in text or "workers: 2 in A" in text
    )


# ---- traces


@pytest.fixture(scope="module")
def slow_kernel(tmp_path_factory: pytest.TempPathFactory) -> Comparison:
    """The real trace, and a copy of it in which one kernel of the backward of batch norm takes twice as long."""
    folder = tmp_path_factory.mktemp("traces")
    (folder / "before.pt.trace.json.gz").symlink_to(RESNET)
    slowed(RESNET, folder / "after.pt.trace.json.gz", kernel="void cudnn::bn_bw_1C11_kernel_new", times=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        names = ("before.pt.trace.json.gz", "after.pt.trace.json.gz")
        a, b = (analyze_one(load_trace(name), stepwise=True, formulas=recorded_work) for name in names)
    return compare_traces([a], [b], sources=names)


def test_a_slow_kernel_reads_like_its_golden_file(slow_kernel: Comparison) -> None:
    golden("trace/compare_slow_kernel.txt", render_text(slow_kernel))


def lines_of(comparison: Comparison) -> list[str]:
    return [" ".join(line.split()) for line in render_text(comparison).splitlines()]


def test_calls_of_both_runs_stand_beside_their_times() -> None:
    lines = lines_of(compare_traces([A], [traced_run(40, 40, 40, 40, relus=(16, 16))]))
    assert "relu 8.00 32.0 24.0 1 -> 2 beyond noise" in lines
    lines = lines_of(compare_traces([A], [traced_run(40, 40, 40, 40, relus=(8, 8))]))
    assert "relu 8.00 16.0 8.00 1 -> 2 beyond noise" in lines
    lines = lines_of(compare_traces([A], [traced_run(40, 40, 40, 40, relus=())]))
    assert "relu 8.00 0 -8.00 1 -> 0 gone" in lines


def test_what_only_one_run_has_is_not_called_noise() -> None:
    some = tuple(
        event
        for number, length in ((1, 1), (2, 90), (3, 1), (4, 2))
        for event in launched(10 * number + 5, 1000 * number + 40, 1000 * number + 50, length, name="odd")
    )
    comparison = compare_traces([A], [traced_run(40, 40, 40, 40, more=some)])
    odd = next(row for row in comparison.tables["kernels"] if row.name == "odd")
    assert odd.beyond_noise is False
    assert "odd 0 23.5 23.5 0 -> 1 new" in lines_of(comparison)
