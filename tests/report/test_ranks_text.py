from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from lightning_flops.analysis.ranks import RankRecord, with_ranks
from lightning_flops.config import ProfilerConfig
from lightning_flops.report.compare_text import ranks_section
from lightning_flops.report.document import VIEW, draw
from lightning_flops.report.text import render_text
from lightning_flops.schema.profile import Profile
from tests.golden_files import golden
from tests.report import jobs


def ranks_lines(profile: Profile) -> list[str]:
    """The section of all ranks, its title first; none if there is none."""
    section = ranks_section(profile)
    return [] if section is None else list(draw(section, VIEW))[1:]


JOBS = {
    **{name: jobs.job(getattr(jobs, name)()) for name in ("uneven", "slow_loader", "pipeline")},
    "mixed_devices": jobs.job(jobs.mixed_devices(), config=ProfilerConfig(detailed=False)),
    "missing": jobs.missing(),
    "thousands": jobs.thousands(),
}
CASES = {name: with_ranks(*job) for name, job in JOBS.items()}


@pytest.mark.parametrize("name", CASES)
def test_section_of_all_ranks_is_the_file_people_read(name: str) -> None:
    golden(f"text/ranks_{name}.txt", "\n".join(ranks_lines(CASES[name])) + "\n")


def test_whole_report_of_a_pipeline_is_the_file_people_read() -> None:
    golden("text/pipeline.txt", render_text(CASES["pipeline"], detailed=True))


def test_report_of_thousands_of_ranks_is_as_long_as_that_of_four() -> None:
    few = ranks_lines(with_ranks(*jobs.thousands(18)))
    assert len(ranks_lines(CASES["thousands"])) == len(few)


def test_every_line_of_the_job_says_so_when_a_rank_is_missing() -> None:
    assert "2 OF 4 RANKS ANSWERED, and every figure here is of those." in ranks_lines(CASES["missing"])
    summary = render_text(CASES["missing"], detailed=True)
    assert "2 ranks did not answer" in summary
    assert "FLOPs   2 of 4 ranks      one model" in summary
    assert "params of model = params per GPU * mp_size:                             (2 of 4 ranks) 3 M" in summary


def test_times_of_collectives_are_of_one_step_however_many_were_traced() -> None:
    whole = with_ranks(*jobs.thousands(4))
    ranks = whole.ranks
    assert ranks is not None and ranks.communication is not None
    twice = tuple(replace(one, steps=2 * one.steps) for one in ranks.communication.ranks)
    of_two = replace(ranks, communication=replace(ranks.communication, ranks=twice))
    rows = [
        next(line.split() for line in ranks_lines(replace(whole, ranks=of)) if line.startswith("allreduce"))
        for of in (ranks, of_two)
    ]
    # Calls of 2 and 11 ms, of which 5 are the transfer, in one step or in two.
    assert [[float(one) for one in row[-3:]] for row in rows] == [[13.0, 5.0, 8.0], [6.5, 2.5, 4.0]]


def test_what_the_ranks_know_and_the_report_does_not_is_said() -> None:
    profile, answers = jobs.job(jobs.slow_loader())
    noting = [replace(answer, is_shortened=answer.rank < 3) for answer in answers if isinstance(answer, RankRecord)]
    lines = ranks_lines(with_ranks(profile, noting))
    words = "Left out of the record of ranks 0-2: the times of its modules and of each single call of a collective."
    assert " ".join(" ".join(lines[-2:]).split()) == f"- {words}"


def test_that_nobody_is_late_is_said_only_as_far_as_it_is_known() -> None:
    def said(*traced: bool, chance_sec: Mapping[str, float] | None = None) -> str:
        ranks = CASES["uneven"].ranks
        assert ranks is not None and ranks.stragglers == ()
        figures = tuple(replace(one, traced=was) for one, was in zip(ranks.ranks, traced, strict=True))
        text = "\n".join(
            ranks_lines(replace(CASES["uneven"], ranks=replace(ranks, ranks=figures, chance_sec=chance_sec or {})))
        )
        return " ".join(text[text.index("Straggler: ") : text.index("Peak of ")].split())

    assert said(True, True) == "Straggler: none beyond chance."
    chance = {"forward": 0.002, "backward": 0.012, "optimizer": 0.001}
    assert said(True, True, chance_sec=chance) == (
        "Straggler: none beyond chance (± 12 ms in backward, the least steady part)."
    )
    assert said(True, False).startswith("Straggler: none was found in data wait and transfer; ")
