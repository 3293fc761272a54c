from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_flops.config import ProfilerConfig
from lightning_flops.report.headline import figures, headline, throughput_headline
from lightning_flops.schema.advice import Advice
from lightning_flops.schema.throughput import Spread, ThroughputSummary
from tests.report import windows
from tests.report.test_ranks_text import CASES as JOBS
from tests.report.test_text import CASES
from tests.report.windows import build_profile

# Model FLOPs, milliseconds and samples are worked out where the windows are made; MFU is FLOPs / time / peak.
FIGURES = {
    "mlp": "1.4 GFLOPs and 20 ms a step, 5,000 samples/s, MFU 10.00%",
    # 3744 G of bfloat16 at 312 T/s and 240 G of float32 at 19.5 T/s take 24.31 ms of 100.
    "transformer": "3.98 TFLOPs and 100 ms a step, 80 samples/s, MFU 24.31%",
    "energy": "3.98 TFLOPs and 100 ms a step, 80 samples/s, MFU 24.31%",  # the same step
    "untimed": "1.4 GFLOPs a step",
    # 700 M forward and 800 M backward in 20 ms are 75 G/s, of 1 T/s.
    "lower_bound": "at least 1.5 GFLOPs and 20 ms a step, 5,000 samples/s, MFU at least 7.50%",
    # 700 M of tf32 in 20 ms are 35 G/s, of 156 T/s; 100 samples on each of 4 ranks.
    "parallel": "700 MFLOPs and 20 ms a step on rank 2 of 8, 20,000 samples/s in all, MFU 0.02% of this rank",
    "stage": "1.4 GFLOPs and 20 ms a step on rank 2 of 4, 10,000 samples/s in all",
    "variable": "1.05 GFLOPs and 20 ms a step, 5,000 samples/s",
    # 600 M in 20 ms are 30 G/s, of 700 G/s.
    "predict": "600 MFLOPs and 20 ms a batch, 5,000 samples/s, MFU 4.29%",
    "unknown": "0 FLOPs a step",
}

DATA_WAIT = (
    "The step waits 2 ms a batch for data (10.00%). Raise the DataLoader's num_workers, with persistent_workers=True."
)


@pytest.mark.parametrize("name", CASES)
def test_figures_are_those_of_a_step_as_far_as_they_are_known(name: str) -> None:
    window, config = CASES[name]
    assert figures(build_profile(window, config=config)) == FIGURES[name]


def test_a_headline_ends_with_the_first_advice() -> None:
    window, config = CASES["mlp"]
    assert headline(build_profile(window, config=config)) == f"{FIGURES['mlp']}. First advice: {DATA_WAIT}"


def test_without_advice_it_is_the_figures_and_why_some_are_missing() -> None:
    line = headline(build_profile(windows.unknown_window(), config=ProfilerConfig()))
    assert line == "0 FLOPs a step. n/a: samples/second, MFU: no step was timed."


def test_of_a_job_it_has_the_figures_of_all_ranks() -> None:
    # 4 ranks do 5.6 G in 24 ms at 2.8 T/s: 8.33%; 400 samples in 24 ms are 16,666.67 a second.
    assert headline(JOBS["slow_loader"]) == (
        "1.4 GFLOPs and 24 ms a step on rank 0 of 4, 16,666.67 samples/s in all, MFU 8.33% of all ranks. First advice: "
        "The other ranks wait 8 ms a step (33.33% of it) for rank 2: its data wait takes 8 ms longer than theirs. "
        "Look at how …"
    )


def test_a_long_advice_is_cut_between_words_and_no_line_is_much_longer_than_200() -> None:
    window, config = CASES["mlp"]
    long = Advice(rule="x", fact="word " * 100, threshold="", remedy="word " * 100, source="", unless="", ceiling=None)
    profile = replace(build_profile(window, config=config), advice=(long,))
    line = headline(profile)
    assert len(line) <= 200 and line.endswith("word word …")
    profiles = [build_profile(window, config=config) for window, config in CASES.values()]
    assert max(len(headline(one)) for one in (*profiles, *JOBS.values())) <= 280


def test_names_in_it_stay_on_the_line() -> None:
    window, config = CASES["mlp"]
    evil = Advice(rule="x", fact="a\n\x1b[2Jb", threshold="", remedy="c\u202ed", source="", unless="", ceiling=None)
    line = headline(replace(build_profile(window, config=config), advice=(evil,)))
    assert line.isprintable()
    assert line.endswith(r"First advice: a\n\x1b[2Jb c\u202ed")


def test_the_throughput_of_a_run_in_a_line() -> None:
    costs = Spread(average=0.02, maximum=0.03, minimum=0.01)
    known = ThroughputSummary(
        schema_version=1,
        batches=1200,
        reader_ratio=0.5,
        reader_cost_sec=costs,
        batch_cost_sec=costs,
        ips=Spread(average=5000.0, maximum=10000.0, minimum=3333.0),
        ips_unit="samples/s",
    )
    assert throughput_headline(known) == (
        "1,200 batches, 5,000 samples/s, 20 ms a batch, of it in the data loader 50.00%"
    )
    unknown = replace(known, batches=1, reader_ratio=None, reader_cost_sec=None, ips=None, ips_unit="batches/s")
    assert throughput_headline(unknown) == "1 batch, n/a batches/s, 20 ms a batch, of it in the data loader n/a"
