from __future__ import annotations

import json
import platform
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_flops.analysis.devices import device_named, name_of_chip, why_no_peak
from lightning_flops.analysis.ranks import with_ranks
from lightning_flops.analysis.rates import COPY, measured_file, peak_for, with_given_peaks
from lightning_flops.cli import main
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import PhaseSeconds
from tests.analysis.in_memory import known
from tests.analysis.test_profile import MLP, TICK, in_ticks
from tests.report import jobs, windows
from tests.report.traced_windows import mlp_traced
from tests.report.windows import build_profile


@pytest.mark.parametrize(
    ("device", "dtype", "tflops"),
    [
        # A10, A10G and A100; L4, L40 and L40S: a shorter name must not answer for a longer one.
        ("NVIDIA A10", "bfloat16", 125.0),
        ("NVIDIA A10G", "bfloat16", 70.0),
        ("NVIDIA A100-SXM4-40GB", "bfloat16", 312.0),
        ("NVIDIA A800-SXM4-80GB", "bfloat16", 312.0),
        ("NVIDIA A800 40GB Active", "bfloat16", 311.9),
        ("NVIDIA RTX A2000 12GB", "tf32", 16.0),
        ("NVIDIA RTX 4500 Ada Generation", "float8", 317.0),
        ("NVIDIA RTX 2000 Ada Generation", "float16", 48.0),
        ("Tesla P100-PCIE-16GB", "float32", 9.3),
        ("NVIDIA GB300", "float4", 15_000.0),
        ("NVIDIA L4", "bfloat16", 121.0),
        ("NVIDIA L40", "bfloat16", 181.0),
        ("NVIDIA L40S", "bfloat16", 362.0),
        # The Hoppers, whose NVL has a lower rate and whose headline figures assume sparsity.
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989.4),
        ("NVIDIA H100 80GB HBM3", "float32", 66.9),
        ("NVIDIA H100 80GB HBM3", "float8", 1978.9),
        (" nvidia h100 pcie ", "bfloat16", 756.0),
        ("NVIDIA H200 NVL", "bfloat16", 835.5),
        ("NVIDIA GH200 480GB", "bfloat16", 989.4),
        ("NVIDIA B200", "bfloat16", 2250.0),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "bfloat16", 503.8),
        # A T4 and a V100 compute in float16; bfloat16 is emulated.
        ("Tesla T4", "float16", 65.0),
        ("Tesla V100-PCIE-16GB", "float16", 112.0),
        ("Tesla V100-DGXS-32GB", "float32", 15.7),
        ("Tesla V100-DGXS-32GB", "float16", 500 / 4),
        # One of the board's two dies, which is what a program sees.
        ("AMD Instinct MI250X", "bfloat16", 383.0 / 2),
        ("AMD Instinct MI250", "float16", 362.1 / 2),
        ("AMD Instinct MI300X", "bfloat16", 1307.4),
        # Cards: 2 x lanes x SMs x boost clock in float32, as the white papers' own tables.
        ("Quadro RTX 8000", "float16", 130.5),
        ("NVIDIA GeForce RTX 2080 Ti", "float32", 13.4),  # 2 x 64 x 68 x 1.545 GHz
        ("NVIDIA GeForce RTX 2080 Ti", "float16", 53.8),
        ("NVIDIA GeForce RTX 3080 (68 SMs)", "float32", 29.8),  # 2 x 128 x 68 x 1.710 GHz
        ("NVIDIA GeForce RTX 3080 (70 SMs)", "bfloat16", 61.3),  # 4 x 128 x 70 x 1.710 GHz
        ("NVIDIA GeForce RTX 3090 Ti", "float32", 40.0),  # 2 x 128 x 84 x 1.860 GHz
        ("NVIDIA GeForce RTX 3090 Ti", "bfloat16", 80.0),
        ("NVIDIA GeForce RTX 4080", "bfloat16", 97.5),  # 4 x 128 x 76 x 2.505 GHz
        ("NVIDIA GeForce RTX 5080", "bfloat16", 112.6),  # 4 x 128 x 84 x 2.617 GHz
        ("NVIDIA GeForce RTX 5090", "bfloat16", 209.5),
    ],
)
def test_peak_is_the_dense_one_published_of_exactly_this_device(device: str, dtype: str, tflops: float) -> None:
    assert abs(known(peak_for(device, dtype)) / 1e12 - tflops) < 0.06  # white papers print one decimal


@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        "",
        "NVIDIA L40G",
        "NVIDIA GeForce RTX 3080",  # of 10 GB and of 12 GB
        "NVIDIA A100-SXM4-80GB-4-20C",
        "GRID V100D-8C",
        "NVIDIA GeForce RTX 5090 D",
        "NVIDIA GeForce RTX 5090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A40-48Q",
        "NVIDIA H1000",
        "Not a NVIDIA H100 PCIe",
        "AMD Instinct MI250X / MI250",
    ],
)
def test_device_or_dtype_that_is_not_in_the_table_has_no_peak(device: str) -> None:
    for dtype in ("bfloat16", "float16", "tf32", "float32", "float8", "int8"):
        assert peak_for(device, dtype) is None
    for dtype in ("float64", "complex64", "int4", "", "torch.bfloat16"):
        assert peak_for("NVIDIA H100 80GB HBM3", dtype) is None


@pytest.mark.parametrize("device", ["NVIDIA A10G", "NVIDIA B200", "NVIDIA GB200"])
def test_a_rate_that_is_published_in_two_versions_is_not_known(device: str) -> None:
    assert peak_for(device, "tf32") is not None
    assert peak_for(device, "float32") is None


@pytest.mark.parametrize(
    ("name", "full"), [("NVIDIA GeForce RTX 3080", "NVIDIA GeForce RTX 3080 (70 SMs)"), *[("A40",) * 2]]
)
def test_a_name_of_two_chips_has_the_number_of_sms(name: str, full: str) -> None:
    assert name_of_chip(SimpleNamespace(name=name, multi_processor_count=70)) == full


def test_figures_of_the_user_win_and_by_dtype_leave_the_others_to_the_table() -> None:
    assert peak_for(device_name="NVIDIA A40", dtype="bfloat16", given=1e15) == 1e15
    assert peak_for(device_name="cpu", dtype="float32", given=2e11) == 2e11
    assert peak_for(device_name="cpu", dtype="float32", given=None) is None
    given = {"float32": 1e12}
    assert peak_for(device_name="NVIDIA A40", dtype="float32", given=given) == 1e12
    assert peak_for(device_name="NVIDIA A40", dtype="bfloat16", given=given) == 149.7e12
    assert peak_for(device_name="cpu", dtype="bfloat16", given=given) is None


def test_slices_and_virtual_gpus_are_said_to_be_such() -> None:
    assert "MIG slice" in why_no_peak("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bfloat16")
    assert "virtual GPU" in why_no_peak("NVIDIA A40-48Q", "bfloat16")
    assert "virtual GPU" in why_no_peak("GRID V100D-8C", "float16")
    assert why_no_peak("NVIDIA X1", "float16") == "no figure is known for a device called NVIDIA X1"
    assert why_no_peak("Tesla T4", "bfloat16") == "no rate in bfloat16 is published for Tesla T4"


@pytest.mark.parametrize(
    ("device", "gigabytes_per_sec"),
    [
        ("NVIDIA A100-SXM4-40GB", 1555),
        ("NVIDIA A100-SXM4-80GB", 2039),
        ("NVIDIA A100 80GB PCIe", 1935),
        ("NVIDIA H100 80GB HBM3", 3350),
        ("NVIDIA H200", 4800),
        ("AMD Instinct MI250X", 3276.8 / 2),  # one of the board's two dies, which is what a program sees
        # Published in two versions, or of another device.
        *((name, None) for name in ("Tesla T4", "NVIDIA B200", "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "cpu", "")),
    ],
)
def test_bandwidth_is_that_of_exactly_this_device(device: str, gigabytes_per_sec: float | None) -> None:
    row = device_named(device)
    assert (row and row.memory_bytes_per_sec) == (gigabytes_per_sec and gigabytes_per_sec * 1e9)


# ---- peaks that are given after the run, and figures that no device can reach

PLAIN = build_profile(MLP, config=ProfilerConfig())
"""1,400 MFLOPs in steps of 20 ticks."""


def test_a_peak_given_after_the_run_gives_what_it_would_have_given_in_it() -> None:
    peak = 64 * 1400e6
    assert PLAIN.rates.mfu is None
    given = with_given_peaks(PLAIN, flops_per_sec=peak, memory_bytes_per_sec=1e9)
    inside = build_profile(MLP, config=ProfilerConfig(peak_flops_per_sec=peak, memory_bytes_per_sec=1e9))
    assert given.rates == inside.rates and given.rates.mfu == 16 / 20
    assert given.unavailable == inside.unavailable
    assert given.settings.peaks_from == "given"
    assert given.budget == inside.budget is not None


def test_a_peak_given_after_the_run_holds_for_all_ranks_with_their_own_flops_and_times() -> None:
    # 1.4 G and 0.7 G FLOPs in 20 ms and 40 ms: 2.1 G of 64 GFLOP/s for 60 ms would be 54.7%.
    first, second = jobs.uneven()
    windows_of_job = [first, jobs.in_seconds(second, PhaseSeconds(forward=0.02, backward=0.02))]
    given = with_given_peaks(
        with_ranks(*jobs.job(windows_of_job, config=ProfilerConfig())), flops_per_sec=64e9, memory_bytes_per_sec=None
    )
    alike = with_given_peaks(with_ranks(*jobs.job(windows_of_job)), flops_per_sec=64e9, memory_bytes_per_sec=None)
    for ranks in (known(given.ranks), known(alike.ranks)):
        assert (ranks.rates.mfu, ranks.rates.hfu) == pytest.approx((2.1e9 / 64e9 / 0.06,) * 2, rel=1e-12)
        assert ranks.peak_flops_per_sec == pytest.approx(2 * 64e9, rel=1e-12)
        assert "mfu" not in ranks.unavailable


def test_a_given_peak_is_of_one_kind_of_device() -> None:
    *others, last = jobs.mixed_devices()
    for device in (last.context.device_name, "Abacus"):  # without a peak the job has an MFU, and none
        job = with_ranks(*jobs.job([*others, jobs.in_context(last, device_name=device)], config=ProfilerConfig()))
        assert (known(job.ranks).rates.mfu is None) == (device == "Abacus")
        ranks = known(with_given_peaks(job, flops_per_sec=1e15, memory_bytes_per_sec=None).ranks)
        assert (ranks.rates.mfu, ranks.rates.hfu, ranks.peak_flops_per_sec) == (None, None, None)
        assert ranks.unavailable["mfu"] == "a peak was given, and ranks have other kinds of devices"


def test_a_bandwidth_alone_takes_no_mfu_away() -> None:
    job = with_ranks(*jobs.job(jobs.mixed_devices(), config=ProfilerConfig()))
    given = with_given_peaks(job, flops_per_sec=None, memory_bytes_per_sec=1e12)
    assert (given.ranks, given.memory_bytes_per_sec) == (job.ranks, 1e12)
    assert known(job.ranks).rates.mfu is not None


def test_a_dtype_that_only_another_rank_uses_counts_with_the_given_peak_of_it() -> None:
    # Stage 0 multiplies in bfloat16, stage 1 in float32: 2.8 G and 1.4 G on each of two ranks, in 20 ms.
    ranks = []
    for window in jobs.pipeline():
        dtype = "bfloat16" if window.context.pp_rank == 0 else "float32"
        cells = tuple(replace(one, dtype=dtype) for one in window.flops.cells)
        ranks.append(replace(window, flops=replace(window.flops, cells=cells)))
    job = with_ranks(*jobs.job(ranks, config=ProfilerConfig()))
    given = with_given_peaks(job, flops_per_sec={"bfloat16": 1e12, "float32": 1e11}, memory_bytes_per_sec=None)
    seconds = 5.6e9 / 1e12 + 2.8e9 / 1e11
    assert known(given.ranks).rates.mfu == pytest.approx(seconds / (4 * 0.02), rel=1e-12)
    assert known(given.ranks).peak_flops_per_sec == pytest.approx(4 * 8.4e9 / seconds, rel=1e-12)
    # Without the peak of the other's dtype there is none of the job.
    one = known(with_given_peaks(job, flops_per_sec={"bfloat16": 1e12}, memory_bytes_per_sec=None).ranks)
    assert (one.rates.mfu, one.peak_flops_per_sec) == (None, None) and "no dense peak" in one.unavailable["mfu"]


def test_measured_peaks_stand_in_where_no_vendors_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    window = replace(MLP, context=replace(MLP.context, host=platform.node()))
    before = build_profile(window, config=ProfilerConfig())
    assert before.rates.mfu is None and "run lightning-flops peak, or set" in before.unavailable["mfu"]
    peak = 64 * 1400e6
    file = Path(measured_file(platform.node()))
    file.parent.mkdir()
    file.write_text(json.dumps({MLP.context.device_name: {"float32": peak, COPY: 1e9}}))
    inside = build_profile(window, config=ProfilerConfig())
    assert (inside.rates.mfu, inside.memory_bytes_per_sec, inside.settings.peaks_from) == (16 / 20, 1e9, "measured")
    assert "MFU 80.0%, HFU 80.0% of 89.6 GFLOP/s (float32), measured." in str(inside).replace("\n  ", " ")
    # Neither another machine's, nor instead of a vendor's or of a given one.
    assert build_profile(MLP, config=ProfilerConfig()).rates.mfu is None
    elsewhere = replace(window, context=replace(window.context, host="elsewhere"))
    assert build_profile(elsewhere, config=ProfilerConfig()).rates.mfu is None
    assert build_profile(window, config=ProfilerConfig(peak_flops_per_sec=2 * peak)).rates.mfu == 8 / 20


def test_peaks_by_dtype_leave_other_dtypes_theirs() -> None:
    profile = build_profile(in_ticks(windows.transformer_window()), config=ProfilerConfig())
    given = with_given_peaks(profile, flops_per_sec={"bfloat16": 624e12}, memory_bytes_per_sec=None)
    assert given.rates.mfu == (3744e9 / 624e12 + 240e9 / 19.5e12) / (100 * TICK)


def test_modules_beyond_the_peak_have_no_share_of_it_as_a_step_has_no_mfu() -> None:
    window, traced = mlp_traced()
    plain = build_profile(window, config=ProfilerConfig(), traced=traced)
    # fc1 and fc2 reach 200 GFLOP/s forward, the root 120; backward fc1 133, the other two 100.
    for profile in (
        with_given_peaks(plain, flops_per_sec=90e9, memory_bytes_per_sec=None),
        build_profile(window, config=ProfilerConfig(peak_flops_per_sec=90e9), traced=traced),
    ):
        rates = {one.name: one.times.forward_flops_per_sec for one in profile.modules if one.times is not None}
        assert (rates["fc1"], rates["fc2"], rates[""]) == (None, None, 120e9)
        shares = {one.name: one.times.forward_utilization for one in profile.modules if one.times is not None}
        assert (shares["fc1"], shares["fc2"], shares[""]) == (None, None, None)
        lines = [line for line in str(profile).splitlines() if line.startswith(("fc1", "fc2", "(root)"))]
        assert lines and not [line for line in lines if "133%" in line or "222%" in line]
    note = next(one for one in profile.notes if one.startswith("Left out, as they would be beyond"))
    assert "the root's forward (1.33 times)" in note and "fc1's forward (2.22 times)" in note


def test_the_commands_take_the_device_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, page = tmp_path / "profile.json", tmp_path / "page.html"
    path.write_text(PLAIN.to_json())
    assert main(["report", str(path), "-o", str(page), "--peak", "float32=89.6e9", "--bandwidth", "1e9"]) == 0
    assert page.exists()
    capsys.readouterr()
    assert main(["compare", "--json", "--peak", "89.6e9", str(path), str(path)]) == 0
    figures = {one["name"]: one["a"] for one in json.loads(capsys.readouterr().out)["figures"]}
    assert figures["mfu"] == pytest.approx(0.8)
