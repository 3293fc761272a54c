"""What ranks tell rank 0 by a key-value store: when it is there, who is waited for, and what is left behind."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as torch_distributed

from lightning_flops.session import rank_exchange
from lightning_flops.session.rank_exchange import (
    Collection,
    Errand,
    NoExchangeError,
    RankExchange,
    default_store,
    next_run_number,
)
from tests.fake_clock import FakeNow
from tests.forks import run_fork
from tests.ranks import REPOSITORY

distributed: Any = torch_distributed  # which does not say that its stores are public


def hash_store(folder: Path) -> Any:
    return distributed.HashStore()


def file_store(folder: Path) -> Any:
    return distributed.FileStore(str(folder / "store"), 1)


def tcp_store(folder: Path) -> Any:
    return distributed.PrefixStore(
        "default_pg", distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    )


@pytest.fixture(params=[hash_store, file_store, tcp_store])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return request.param(tmp_path)


def keys(store: Any) -> set[str]:
    """Every key but training's, and those by which a FileStore counts its clients (less their first letter)."""
    return {*store.list_keys()} - {"training's", "efcount/", "leanup/"}


def ranks(store: Any, number: int, *, timeout_sec: float = 60.0, **settings: Any) -> list[RankExchange]:
    return [
        RankExchange(
            rank=rank,
            world_size=number,
            run_number=0,
            timeout_sec=timeout_sec,
            find_store=lambda: store,
            **settings,
        )
        for rank in range(number)
    ]


def begin(store: Any, rank: int, *, timeout_sec: float = 60.0, find_store: Any = None) -> RankExchange:
    """One of two ranks begins its run, and has been to the store, if it could."""
    exchange = RankExchange(
        rank=rank, world_size=2, run_number=0, timeout_sec=timeout_sec, find_store=find_store or (lambda: store)
    )
    assert exchange._submit(Errand(lambda store: True)).wait(60.0)
    return exchange


def as_sent(rank: int, packed: bytes) -> bytes:
    """What rank 0 makes of an answer: nothing else."""
    return packed


def all_leave(exchanges: list[RankExchange]) -> None:
    for exchange in exchanges:
        exchange.leave(within_sec=60.0)


def test_rank_0_has_what_every_other_rank_sent_and_nothing_is_left_in_the_store(store: Any) -> None:
    store.set("training's", b"1")
    exchanges = zero, one, two = ranks(store, 3)
    collection = zero.collect(7, read=as_sent)
    one.send(7, b"\0first\xff")
    two.send(7, b"second")
    assert collection.wait(60.0)
    assert collection.ready
    assert collection.answers == {1: b"\0first\xff", 2: b"second"}
    assert (collection.missing, collection.failure) == ((), None)
    all_leave(exchanges)
    assert keys(store) == set()
    assert store.get("training's") == b"1"


def test_what_ranks_sent_is_read_on_the_thread_of_the_exchange_and_not_of_training() -> None:
    zero, one, two = exchanges = ranks(distributed.HashStore(), 3)
    readers: list[str] = []

    def read(rank: int, packed: bytes) -> tuple[int, str]:
        readers.append(threading.current_thread().name)
        return rank, packed.decode()

    collection = zero.collect(7, read=read)
    one.send(7, b"first")
    two.send(7, b"second")
    assert collection.wait(60.0)
    assert collection.answers == {1: (1, "first"), 2: (2, "second")}
    assert readers == ["lightning_flops ranks"] * 2
    all_leave(exchanges)


def test_what_nobody_read_is_cleared_by_the_last_rank_to_leave(store: Any) -> None:
    store.set("training's", b"1")
    exchanges = _, one, two = ranks(store, 3)
    one.send(7, b"rank 0 never asked for it")
    two.send_out(b"ended early")
    one.tell("folder", "logs")
    all_leave(exchanges[:2])
    assert keys(store) != set()
    all_leave(exchanges[2:])
    assert keys(store) == set()
    assert store.get("training's") == b"1"


def test_windows_and_runs_do_not_get_each_others_answers() -> None:
    store = distributed.HashStore()
    (zero, one), (later_zero, later_one) = (
        [
            RankExchange(rank=rank, world_size=2, run_number=run, timeout_sec=60.0, find_store=lambda: store)
            for rank in range(2)
        ]
        for run in range(2)
    )
    collections = [later_zero.collect(7, read=as_sent), zero.collect(9, read=as_sent), zero.collect(7, read=as_sent)]
    one.send(7, b"run 0, step 7")
    one.send(9, b"run 0, step 9")
    later_one.send(7, b"run 1, step 7")
    assert all(collection.wait(60.0) for collection in collections)
    assert [collection.answers[1] for collection in collections] == [
        b"run 1, step 7",
        b"run 0, step 9",
        b"run 0, step 7",
    ]
    assert next_run_number() < next_run_number()


def test_a_job_that_is_started_anew_on_a_store_hears_nothing_of_the_one_that_died(store: Any) -> None:
    died = ranks(store, 3)
    assert died[1].send(7, b"of the job that died").wait(60.0)
    assert died[2].send_out(b"interrupted").wait(60.0)
    died[1].leave(within_sec=60.0)
    exchanges = zero, one, two = ranks(store, 3)
    assert zero.tell("begun", "anew").wait(60.0)
    assert one.send(7, b"measured").wait(60.0)
    first = zero.collect(7, read=as_sent)
    assert two.send(7, b"measured, too").wait(60.0)
    assert first.wait(60.0)
    assert first.answers == {1: b"measured", 2: b"measured, too"}
    all_leave(exchanges)
    assert keys(store) == set()


def test_what_was_said_before_rank_0_began_the_run_anew_is_heard() -> None:
    store = distributed.HashStore()
    begin(store, 0)
    one = begin(store, 1)
    assert one.send(7, b"measured").wait(60.0)
    assert one.send_out(b"over").wait(60.0)
    zero = begin(store, 0)
    one.leave(within_sec=60.0)
    collections = [zero.collect(7, read=as_sent), zero.collect(9, read=as_sent)]
    assert all(collection.wait(60.0) for collection in collections)
    assert [collection.answers for collection in collections] == [{1: b"measured"}, {1: b"over"}]


def test_who_has_something_to_say_waits_for_rank_0_to_begin_the_run_and_no_longer_than_the_time() -> None:
    store = distributed.HashStore()
    early, late = begin(store, 1), begin(store, 1, timeout_sec=0.0)
    sent = early.send(7, b"measured")
    never = late.send(9, b"measured")
    assert never.wait(60.0)
    assert never.failure == "the key-value store failed: NoExchangeError: rank 0 has not begun this run"
    assert not sent.over
    collection = begin(store, 0).collect(7, read=as_sent)
    assert collection.wait(60.0)
    assert collection.answers == {1: b"measured"}


def test_answers_come_when_the_group_that_led_to_the_store_is_gone() -> None:
    store, gone = distributed.HashStore(), threading.Event()

    def find_store() -> Any:
        if gone.is_set():
            raise NoExchangeError("torch.distributed has no process group")
        return store

    zero, one = (begin(store, rank, find_store=find_store) for rank in range(2))
    gone.set()
    one.send(7, b"measured")
    collection = zero.collect(7, read=as_sent)
    assert collection.wait(60.0)
    assert collection.answers == {1: b"measured"}


def test_after_a_failure_the_ranks_find_each_other_in_the_store_that_is_there_then() -> None:
    class Broken:
        def clone(self) -> Any:
            return self

        def __getattr__(self, name: str) -> Any:
            raise distributed.DistNetworkError("Connection reset by peer")

    stores = [Broken()]
    zero, one = (begin(None, rank, find_store=lambda: stores[-1]) for rank in range(2))
    assert one.send(7, b"lost").wait(60.0)
    assert zero.collect(7, read=as_sent).wait(60.0)
    stores.append(distributed.HashStore())
    one.send(9, b"measured")
    collection = zero.collect(9, read=as_sent)
    assert collection.wait(60.0)
    assert (collection.answers, collection.failure) == ({1: b"measured"}, None)


def test_where_no_thread_can_start_any_more_the_caller_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot_start(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", cannot_start)
    store = distributed.HashStore()
    exchanges = zero, one = ranks(store, 2)
    assert one.send(7, b"measured").over
    collection = zero.collect(7, read=as_sent)
    assert (collection.over, collection.answers) == (True, {1: b"measured"})
    all_leave(exchanges)
    assert keys(store) == set()


def test_a_process_that_ends_waits_for_nobody() -> None:
    store = distributed.HashStore()
    zero, _ = ranks(store, 2)
    collection = zero.collect(7, read=as_sent)
    zero.stop()
    assert collection.over and collection.missing == (1,)
    assert zero.collect(9, read=as_sent).failure == "this rank has left"


def test_a_process_that_ends_has_sent_what_it_had_to_say() -> None:
    store = distributed.HashStore()
    zero, one = begin(store, 0), begin(store, 1)
    hold, held = threading.Event(), threading.Event()

    def keep_busy(store: Any) -> bool:
        held.set()
        return hold.wait(60.0)

    one._submit(Errand(keep_busy))
    assert held.wait(60.0)
    one.send(7, b"measured")
    threading.Timer(0.05, hold.set).start()
    one.stop()  # finds it in the queue
    collection = zero.collect(7, read=as_sent)
    assert collection.wait(60.0)
    assert collection.answers == {1: b"measured"}


ENDS_WHILE_IT_LOOKS = """
import time
from torch import distributed
from lightning_flops.session import rank_exchange

rank_exchange._FIRST_PAUSE_SEC = rank_exchange._LONGEST_PAUSE_SEC = 0.0  # in a call of the store all the time
store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
exchange = rank_exchange.RankExchange(
    rank=0, world_size=2, run_number=0, timeout_sec=60.0, find_store=lambda: store
)
collection = exchange.collect(7, read=lambda rank, packed: packed)
time.sleep(0.2)
assert not collection.over
"""


def test_a_process_that_ends_while_its_thread_is_in_the_store_ends_well() -> None:
    # Python ends a thread that comes out of C++ after it: the C++ aborts the process, and the job has failed.
    done = run_fork(["-c", ENDS_WHILE_IT_LOOKS], folder=REPOSITORY)
    assert (done.returncode, done.stderr) == (0, "")


class Looks:
    """A collection whose looks the test takes itself, by a clock that the test sets."""

    def __init__(self, store: Any, *, world_size: int = 4, timeout_sec: float = 30.0) -> None:
        self.now = FakeNow()
        self.store = store
        self.exchanges = ranks(store, world_size, timeout_sec=timeout_sec, clock=self.now)
        # The thread's part, without the thread.
        submitted: list[Errand] = []
        self.exchanges[0]._submit = submitted.append  # type: ignore[assignment, method-assign]
        self.collection: Collection[bytes] = self.exchanges[0].collect(7, read=as_sent)
        assert submitted == [self.collection.errand]

    def look(self) -> bool:
        return self.collection.look_for_answers(self.store)

    def send(self, rank: int, packed: bytes = b"there") -> None:
        assert self.exchanges[rank].send(7, packed).wait(60.0)


def test_a_rank_that_never_answers_is_waited_for_until_the_time_is_over_and_named() -> None:
    looks = Looks(distributed.HashStore())
    looks.send(1)
    looks.send(3)
    looks.now.sleep(29.5)
    assert not looks.look()
    assert not looks.collection.ready
    assert looks.collection.seconds_left == 0.5
    looks.now.sleep(0.5)
    assert looks.look()
    assert looks.collection.answers == {1: b"there", 3: b"there"}
    assert looks.collection.missing == (2,)
    assert looks.collection.why_missing == "no answer within 30 s"
    assert looks.collection.waited_sec == 30.0


def test_who_answers_in_the_last_moment_is_in() -> None:
    looks = Looks(distributed.HashStore())
    looks.now.sleep(31.0)
    for rank in (1, 2, 3):
        looks.send(rank)
    assert looks.look()
    assert looks.collection.missing == ()


def test_a_rank_that_is_out_is_waited_for_in_no_window_but_what_it_sent_before_counts() -> None:
    store = distributed.HashStore()
    zero, one = ranks(store, 2)
    one.send(7, b"measured")
    assert one.send_out(b"failed").wait(60.0)
    first, second, third = zero.collect(7, read=as_sent), zero.collect(9, read=as_sent), zero.collect(11, read=as_sent)
    assert third.wait(60.0)
    assert [collection.answers[1] for collection in (first, second, third)] == [b"measured", b"failed", b"failed"]


def test_a_collection_in_a_hurry_takes_what_is_there() -> None:
    looks = Looks(distributed.HashStore())
    looks.send(2)
    looks.collection.hurry(2.0)
    assert not looks.look()
    looks.now.sleep(2.0)
    assert looks.look()
    assert looks.collection.answers == {2: b"there"}
    assert looks.collection.why_missing == "no answer within 2 s, when training ended"
    looks.collection.hurry(40.0)
    assert looks.collection.seconds_left == 0.0  # a hurry never makes it longer


def test_a_look_asks_about_one_rank_however_many_there_are() -> None:
    asked: list[str] = []

    class Counting:
        def check(self, names: list[str]) -> bool:
            asked.extend(names)
            return False

    looks = Looks(distributed.HashStore(), world_size=4096)
    assert not looks.collection.look_for_answers(Counting())  # type: ignore[arg-type]
    assert len(asked) == 2  # its answer, and whether it is out


def test_a_store_that_fails_ends_the_wait_with_what_was_there_and_the_reason() -> None:
    class Failing:
        def __init__(self) -> None:
            self.store = distributed.HashStore()

        def clone(self) -> Any:
            return self

        def set(self, key: str, value: bytes) -> None:
            self.store.set(key, value)

        def check(self, names: list[str]) -> bool:
            if names[0].endswith("/2"):
                raise distributed.DistNetworkError("Connection reset by peer")
            return bool(self.store.check(names))

        def get(self, key: str) -> bytes:
            return bytes(self.store.get(key))

        def delete_key(self, key: str) -> bool:
            return bool(self.store.delete_key(key))

    failing = Failing()
    zero, one, _ = ranks(failing, 3)
    assert one.send(7, b"there").wait(60.0)
    collection = zero.collect(7, read=as_sent)
    assert collection.wait(60.0)
    assert (collection.answers, collection.missing) == ({1: b"there"}, (2,))
    assert collection.why_missing == "the key-value store failed: DistNetworkError: Connection reset by peer"


def test_a_store_that_hangs_keeps_nobody_longer_than_the_time_and_a_moment() -> None:
    looks = Looks(distributed.HashStore())
    looks.now.sleep(30.0)
    assert not looks.collection.ready  # a last look may take a moment
    looks.now.sleep(2.5)
    assert looks.collection.ready


def test_the_training_thread_waits_for_nothing_and_its_client_is_free(tmp_path: Path) -> None:
    store = tcp_store(tmp_path)
    zero, one = ranks(store, 2)
    collection = zero.collect(7, read=as_sent)
    threads = [thread for thread in threading.enumerate() if thread.name == "lightning_flops ranks"]
    assert threads and all(thread.daemon for thread in threads)
    # As long as the thread waits, training's own calls go through: a blocked client would not come back.
    for index in range(50):
        store.set("training's", str(index))
        assert store.get("training's") == str(index).encode()
    assert not collection.over
    one.send(7, b"there")
    assert collection.wait(60.0)


def test_no_thread_is_left_when_there_is_nothing_to_do(store: Any) -> None:
    before = {thread for thread in threading.enumerate() if thread.name == "lightning_flops ranks"}
    exchanges = zero, one = ranks(store, 2)
    one.send(7, b"there")
    assert zero.collect(7, read=as_sent).wait(60.0)
    all_leave(exchanges)
    assert {thread for thread in threading.enumerate() if thread.name == "lightning_flops ranks"} <= before


def test_what_one_rank_tells_all_may_ask_for_and_who_asks_for_what_nobody_told_gets_nothing(store: Any) -> None:
    zero, one, two = ranks(store, 3)
    zero.tell("folder", "logs/é")
    assert [one.ask("folder", within_sec=60.0), two.ask("folder", within_sec=60.0)] == ["logs/é", "logs/é"]
    assert one.ask("nothing", within_sec=0.01) is None


def test_who_has_left_sends_nothing_any_more(store: Any) -> None:
    (one,) = ranks(store, 2)[1:]
    one.leave(within_sec=60.0)
    late = one.send(7, b"late")
    assert late.over and late.failure is not None
    one.leave(within_sec=60.0)  # again: nothing
    assert not any(store.get(key) == b"late" for key in keys(store))


def test_without_a_process_group_there_is_no_exchange() -> None:
    with pytest.raises(NoExchangeError, match="has no process group"):
        RankExchange(rank=0, world_size=2, run_number=0, timeout_sec=1.0)


@pytest.mark.parametrize(
    ("getter", "reason"),
    [
        (None, "keeps its key-value store in another way"),
        (lambda: None, "the process group has no key-value store"),
        (lambda: dict[str, Any]()["renamed"], "the key-value store was not found: KeyError: 'renamed'"),
    ],
)
def test_a_torch_that_keeps_its_store_in_another_way_is_a_reason_in_words(
    getter: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(rank_exchange, "store_getter", lambda: getter)
    with pytest.raises(NoExchangeError) as raised:
        default_store()
    assert reason in str(raised.value)


def test_a_store_without_a_second_client_serves_too() -> None:
    class Own(distributed.Store):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.kept: dict[str, bytes] = {}

        def set(self, key: str, value: Any) -> None:
            self.kept[key] = value

        def get(self, key: str) -> bytes:
            return self.kept[key]

        def check(self, names: list[str]) -> bool:
            return all(name in self.kept for name in names)

        def delete_key(self, key: str) -> bool:
            return self.kept.pop(key, None) is not None

    store = Own()
    zero, one = ranks(store, 2)
    one.send(7, b"there")
    collection = zero.collect(7, read=as_sent)
    assert collection.wait(60.0)
    assert collection.answers == {1: b"there"}
