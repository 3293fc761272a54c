"""What rank 0 reports of the others by a key-value store: who is waited for, who is named, and what is left behind."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch import distributed as torch_distributed

from lightning_flops.analysis.ranks import RankAbsence, pack
from lightning_flops.run import ranks as ranks_module
from lightning_flops.run.ranks import Ranks
from lightning_flops.schema.profile import Profile
from tests.fake_clock import FakeNow
from tests.ranks.launching import absences
from tests.report import jobs
from tests.report.windows import build_profile

distributed: Any = torch_distributed  # which does not say that its stores are public

WORLD_SIZE = 4
STEP = 3
PROFILES = [build_profile(window, config=jobs.CONFIG) for window in jobs.slow_loader()]
CONFIG = replace(jobs.CONFIG, ranks_timeout_sec=30.0)


class Careful:
    """A store that fails the test where a call would wait."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        assert name in ("set", "add", "check", "delete_key", "list_keys"), name
        return getattr(self.store, name)

    def get(self, key: str) -> Any:
        assert self.store.check([key]), f"{key} is waited for"
        return self.store.get(key)

    def keys(self) -> set[str]:
        """Every key but training's."""
        return {*self.store.list_keys()} - {"training's"}


@pytest.fixture(params=["hash", "tcp"])
def store(request: pytest.FixtureRequest) -> Careful:
    if request.param == "hash":
        store = Careful(distributed.HashStore())
    else:
        server = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        store = Careful(distributed.PrefixStore("default_pg", server))
    store.store.set("training's", b"1")
    return store


def never(seconds: float) -> None:
    assert not seconds, "nobody is waited for"


def join(rank: int, store: Any, **changed: Any) -> Ranks:
    settings: dict[str, Any] = {"world_size": WORLD_SIZE, "number": 0, "config": CONFIG, "pause": never, **changed}
    return Ranks(rank=rank, find_store=lambda: store, **settings)


def job(store: Any, **changed: Any) -> list[Ranks]:
    return [join(rank, store, **changed) for rank in range(WORLD_SIZE)]


def send(others: Sequence[Ranks], step: int = STEP) -> None:
    """Send the records of ranks 1, 2, ... of the window of *step*."""
    for rank, other in enumerate(others, start=1):
        other.exchange(of_step(PROFILES[rank], step))


def of_step(profile: Profile, step: int) -> Profile:
    return replace(profile, profile_step=step)


class Meanwhile:
    """Time that goes by while rank 0 waits, and what the others do *at* so many seconds after it has begun."""

    def __init__(self) -> None:
        self.clock = FakeNow()
        self.at: dict[float, Callable[[], object]] = {}

    def pause(self, seconds: float) -> None:
        self.clock.sleep(seconds)
        for when in [one for one in self.at if self.clock() >= 100.0 + one]:
            self.at.pop(when)()


def closed(all_ranks: list[Ranks]) -> None:
    for one in all_ranks:
        one.close()


def test_a_rank_that_never_answers_is_waited_for_and_named(store: Careful, caplog: pytest.LogCaptureFixture) -> None:
    time = Meanwhile()
    zero, one, _, three = all_ranks = job(store, clock=time.clock, pause=time.pause)
    one.exchange(PROFILES[1])
    time.at[29.9] = lambda: three.exchange(PROFILES[3])
    with caplog.at_level(logging.WARNING):
        merged = zero.exchange(PROFILES[0])
    assert time.clock() == pytest.approx(130.0, abs=2 * ranks_module.PAUSE_SEC)
    assert absences(merged) == {2: "no answer within 30 s"}
    step = PROFILES[0].profile_step
    assert caplog.messages == [f"the report of step {step} is of 3 of 4 ranks; rank 2: no answer within 30 s"]
    all_ranks[2].exchange(PROFILES[2])  # late: deleted in the end
    closed(all_ranks)
    assert (store.keys(), store.store.get("training's")) == (set(), b"1")


def test_several_late_ranks_are_named_together_and_who_came_before_the_deadline_counts(
    store: Careful, caplog: pytest.LogCaptureFixture
) -> None:
    time = Meanwhile()
    zero, one, two, three = all_ranks = job(store, clock=time.clock, pause=time.pause)
    time.at[29.0] = lambda: three.exchange(of_step(PROFILES[3], STEP))
    with caplog.at_level(logging.WARNING):
        merged = zero.exchange(of_step(PROFILES[0], STEP))
    assert absences(merged) == dict.fromkeys((1, 2), "no answer within 30 s")
    assert caplog.messages == [
        f"the report of step {STEP} is of 2 of 4 ranks; rank 1: no answer within 30 s; rank 2: no answer within 30 s"
    ]
    one.exchange(of_step(PROFILES[1], STEP))  # too late for that window
    time.at[40.0] = lambda: send((one, two, three), step=STEP + 4)
    second = zero.exchange(of_step(PROFILES[0], STEP + 4))
    assert (second.profile_step, absences(second)) == (STEP + 4, {})
    assert time.clock() == pytest.approx(140.0, abs=2 * ranks_module.PAUSE_SEC)
    closed(all_ranks)
    assert store.keys() == set()


def test_a_rank_that_is_out_is_waited_for_in_no_window_but_what_it_sent_before_counts(store: Careful) -> None:
    time = Meanwhile()
    zero, *others = job(store, clock=time.clock, pause=time.pause)
    send(others, step=7)
    others[0].say_absent(None, "its profiler failed: RuntimeError: no")
    others[0].say_absent(None, "this is said too late")
    others[1].say_absent(9, "it passed this step over")
    first = zero.exchange(of_step(PROFILES[0], 7))
    assert (first.profile_step, absences(first), time.clock()) == (7, {}, 100.0)
    time.at[5.0] = lambda: others[2].exchange(of_step(PROFILES[3], 9))
    second = zero.exchange(of_step(PROFILES[0], 9))  # two are out or absent: rank 3 is waited for all the same
    assert time.clock() == pytest.approx(105.0, abs=2 * ranks_module.PAUSE_SEC)
    assert absences(second) == {1: "its profiler failed: RuntimeError: no", 2: "it passed this step over"}


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (b"", "what it sent cannot be read: DecodeError: "),
        (b"no record", "what it sent cannot be read: error: Error -3 while decompressing data"),
        (pack(RankAbsence(rank=2, reason="another's")), "what it sent is of rank 2"),
    ],
    ids=["empty", "noise", "another's"],
)
def test_a_rank_whose_record_cannot_be_read_is_named_and_the_others_are_reported(
    sent: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    zero, *others = job(distributed.HashStore())
    with monkeypatch.context() as patch:
        patch.setattr(ranks_module, "pack", lambda answer: sent)
        others[0].exchange(PROFILES[1])
    for rank in (2, 3):
        others[rank - 1].exchange(PROFILES[rank])
    merged = zero.exchange(PROFILES[0])
    assert list(absences(merged)) == [1]
    assert absences(merged)[1].startswith(reason)


def test_what_cannot_be_put_together_leaves_the_report_of_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "with_ranks", mock.Mock(side_effect=ValueError("broken on purpose")))
    zero, *others = job(distributed.HashStore())
    send(others)
    alone = zero.exchange(PROFILES[0])
    assert alone.ranks is None
    assert "What the ranks sent could not be put together: ValueError: broken on purpose." in alone.notes


class Failing:
    """A store whose server goes away in the middle of what rank 0 reads."""

    def __init__(self) -> None:
        self.store = distributed.HashStore()
        self.calls_of_a_failed_store = 0
        self.gone = False

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.gone = self.gone or (name == "check" and arguments[0][0].endswith("/2"))
            if self.gone:
                self.calls_of_a_failed_store += 1
                raise distributed.DistNetworkError("Connection reset by peer")
            return getattr(self.store, name)(*arguments)

        return call


def test_a_store_that_fails_is_the_reason_why_ranks_are_missing_and_is_asked_nothing_more() -> None:
    store = Failing()
    zero, *others = all_ranks = job(store)
    send(others)
    reason = "the key-value store failed: DistNetworkError: Connection reset by peer"
    assert absences(zero.exchange(PROFILES[0])) == dict.fromkeys((2, 3), reason)
    assert absences(zero.exchange(of_step(PROFILES[0], 9))) == dict.fromkeys((1, 2, 3), reason)
    for other in others:
        other.exchange(PROFILES[1])
    closed(all_ranks)
    assert store.calls_of_a_failed_store == WORLD_SIZE  # one each


def test_a_torch_that_keeps_its_store_in_another_way_is_a_reason_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "store_getter", None)
    failure = str(Ranks(rank=1, world_size=2, config=CONFIG).failure)
    assert failure.startswith("the key-value store failed: ") and "keeps it in another way" in failure


def test_all_ranks_time_a_later_window_from_a_step_that_rank_0_names(store: Careful) -> None:
    """Rank 0 is ready after step 40; rank 1 looks in time, rank 2 is ten steps ahead, and rank 3 more than that."""
    zero, one, two, three = all_ranks = job(store)
    assert not any(rank.may_time(30, 40, ready=True) for rank in (one, two, three))
    assert not zero.may_time(30, 40, ready=False)  # its report is being made
    assert [zero.may_time(30, done, ready=True) for done in (42, 51, 52, 53)] == [False, False, True, True]
    assert [one.may_time(30, done, ready=True) for done in (42, 51, 52)] == [False, False, True]
    assert two.may_time(30, 52, ready=True)
    assert three.may_time(30, 55, ready=True)
    for rank in (one, two, three):
        rank.exchange(of_step(PROFILES[1], 30))  # each has its own number in a job
    merged = zero.exchange(of_step(PROFILES[0], 30))
    assert absences(merged)[3] == "it timed the steps from 55 on, the others from 52 on"
    closed(all_ranks)
    assert store.keys() == set()


@pytest.mark.parametrize(
    ("ends_at", "within_sec", "waited", "why"),
    [
        (0.0, 100.0, 30.0, "no answer within 30 s"),
        (0.0, 5.0, 5.0, "no answer within 5 s, when training ended"),
        (10.0, 2.0, 12.0, "no answer within 12 s, when training ended"),
    ],
)
def test_a_run_that_ends_waits_no_longer_than_the_setting_allows_and_no_longer_than_its_end(
    ends_at: float, within_sec: float, waited: float, why: str, store: Careful
) -> None:
    time = Meanwhile()
    zero, *others = job(store, clock=time.clock, pause=time.pause)
    time.at[ends_at] = lambda: zero.hurry(within_sec)
    merged = zero.exchange(PROFILES[0])
    assert time.clock() - 100.0 == pytest.approx(waited, abs=2 * ranks_module.PAUSE_SEC)
    assert {one.partition(" s")[0][:17] for one in absences(merged).values()} == {why[:17]}
    assert all(("when training ended" in one) is ("when" in why) for one in absences(merged).values())
    closed(others)


def test_of_what_a_run_has_left_one_wait_alone_is_made(store: Careful) -> None:
    time = Meanwhile()
    zero, *others = job(store, clock=time.clock, pause=time.pause)
    time.at[1.0] = lambda: zero.hurry(5.0)
    first = zero.exchange(of_step(PROFILES[0], 3))
    others[0].exchange(of_step(PROFILES[1], 7))
    second = zero.exchange(of_step(PROFILES[0], 7))  # of those that have not answered in time, nothing comes later
    assert time.clock() == pytest.approx(106.0, abs=2 * ranks_module.PAUSE_SEC)
    assert (sorted(absences(first)), sorted(absences(second))) == ([1, 2, 3], [2, 3])
    closed(others)
