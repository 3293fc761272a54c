"""What rank 0 makes of what the other ranks send, whatever that is."""

from __future__ import annotations

import threading
import zlib
from typing import Any
from unittest import mock

import pytest
from torch import distributed as torch_distributed

from lightning_flops.analysis.rank_record import make_rank_record, pack, unpack
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.ranks import RankAbsence
from lightning_flops.session.rank_exchange import RankExchange
from lightning_flops.session.ranks import RankReports
from tests.analysis.test_rank_record import deflated_spaces, forged
from tests.report import jobs

distributed: Any = torch_distributed  # which does not say that its stores are public


def reported(packed: bytes) -> Profile:
    """The job's profile where rank 1 sends *packed*, and ranks 2 and 3 what they should."""
    profile, answers = jobs.job(jobs.slow_loader())
    store = distributed.HashStore()
    zero, one, *others = (
        RankExchange(rank=rank, world_size=4, run_number=0, timeout_sec=60.0, find_store=lambda: store)
        for rank in range(4)
    )
    shown: list[Profile] = []
    reports = RankReports(zero, config=jobs.CONFIG, show=shown.append)
    one.send(profile.profile_step, packed)
    for other, answer in zip(others, answers[2:], strict=True):
        other.send(profile.profile_step, pack(answer))
    reports.hand_over(profile)
    reports.show_all()
    for exchange in (zero, one, *others):
        exchange.leave(within_sec=60.0)
    (whole,) = shown
    return whole


BOMB = forged(deflated_spaces(60))


@pytest.mark.parametrize(
    ("packed", "reason"),
    [
        (BOMB, "what it sent cannot be read: its form is larger than 1,048,576 bytes"),
        (b"", "what it sent cannot be read: it is no record of a rank"),
        (b"\0" * 2**20, "what it sent cannot be read: it is larger than any record: 1,048,576 bytes of 65,536"),
        (forged(zlib.compress(b"[]")), "what it sent cannot be read: "),
        (pack(RankAbsence(rank=2, reason="another's")), "what it sent is of rank 2"),
    ],
    ids=["inflates", "empty", "large", "list", "another's"],
)
def test_a_rank_whose_record_cannot_be_read_is_named_and_the_others_are_reported(packed: bytes, reason: str) -> None:
    whole = reported(packed)
    assert whole.ranks is not None
    assert whole.ranks.answered == 3
    (absence,) = whole.ranks.absences
    assert (absence.rank, absence.reason[: len(reason)]) == (1, reason)


def test_whatever_a_record_brings_about_costs_its_rank_alone() -> None:
    def fails(data: bytes) -> Any:
        if data == b"worst":
            raise MemoryError("nobody thought of this")
        return unpack(data)

    with mock.patch("lightning_flops.session.ranks.unpack", fails):
        whole = reported(b"worst")
    assert whole.ranks is not None
    assert [(one.rank, one.reason) for one in whole.ranks.absences] == [
        (1, "what it sent cannot be read: MemoryError: nobody thought of this")
    ]


def test_training_waits_for_no_record_to_be_read() -> None:
    readers: set[int] = set()

    def noted(data: bytes) -> Any:
        readers.add(threading.get_ident())
        return unpack(data)

    profile, _ = jobs.job(jobs.slow_loader())
    with mock.patch("lightning_flops.session.ranks.unpack", noted):
        whole = reported(pack(make_rank_record(profile)))  # of rank 0, whoever sends it
    assert whole.ranks is not None
    assert [one.reason for one in whole.ranks.absences] == ["what it sent is of rank 0"]
    assert readers
    assert threading.get_ident() not in readers
