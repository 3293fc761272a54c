"""How rank 0 gets what the other ranks measured: through the key-value store of the process group.

We never use a collective: if one rank is absent, a collective waits, and after its timeout the group is broken for
training, too. A key that nobody wrote is just not there. Every errand runs on a thread of ours, which lives as long as
there are errands. It has a client of its own, because a client serves one call at a time: if we waited in training's
client, training would wait, too. No errand waits inside the store, because a wait that times out prints torch's
warnings. It looks, and looks again later.

A store may outlive its job. When a new job starts on it, it may still hold messages of ranks that have died. So the
keys of a run's messages contain a random word that rank 0 makes when its run begins. The other ranks look it up.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import distributed

from lightning_flops import host_clock
from lightning_flops.instrument.torch_private.distributed import store_getter
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)

_FOLDER = "lightning_flops"
"""Every key of ours begins with this."""

_FIRST_PAUSE_SEC = 0.005
_LONGEST_PAUSE_SEC = 0.25
"""Pauses between two looks at the store: short at first, because most ranks end a window at the same time."""

_SEC_FOR_LAST_LOOK = 2.0
"""How long the last look at a store may take."""

_SEC_TO_STOP = 1.0
"""At the end of the process we wait at most this long for our thread to end."""

_run_numbers = itertools.count()

_Answer = TypeVar("_Answer")


class KeyValueStore(Protocol):
    """What we need of a ``torch.distributed.Store``."""

    def set(self, key: str, value: bytes, /) -> None:
        """Write *key*."""

    def get(self, key: str, /) -> bytes:
        """Read *key*, waiting for it."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all *keys* are there."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter, which begins at 0."""

    def delete_key(self, key: str, /) -> bool:
        """Remove *key*."""

    def list_keys(self) -> list[str]:
        """Every key."""

    def clone(self) -> KeyValueStore:
        """Another client of the same store."""


class NoExchangeError(RuntimeError):
    """The ranks cannot tell each other anything; the message says why, in words that end a sentence."""


def next_run_number() -> int:
    """Number of the run of training that begins now in this process; all ranks of one program number theirs alike."""
    return next(_run_numbers)


def default_store() -> KeyValueStore:
    """The store of the default process group.

    Raises:
        NoExchangeError: there is none, or this torch keeps it in another way.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise NoExchangeError("torch.distributed has no process group")
    getter = store_getter()
    if getter is None:
        raise NoExchangeError(f"torch {torch.__version__} keeps its key-value store in another way")
    try:
        store: KeyValueStore | None = getter()
    except Exception as error:  # the function is private: a changed one may raise anything
        raise NoExchangeError(f"the key-value store was not found: {type(error).__name__}: {error}") from error
    if store is None:
        raise NoExchangeError("the process group has no key-value store")
    return store


class Errand:
    """One task for the store, which may take several looks at it.

    Args:
        look: does what it can without waiting; returns whether the task is done.
    """

    def __init__(self, look: Callable[[KeyValueStore], bool]) -> None:
        self._look = look
        self._wake = threading.Event()
        self._over = threading.Event()
        self._stopped = False
        self.failure: str | None = None
        """Why the task could not be done; None as long as nothing went wrong."""

    @property
    def over(self) -> bool:
        """Whether the errand has ended, done or not."""
        return self._over.is_set()

    def wait(self, timeout_sec: float) -> bool:
        """Wait until the errand is over, at most *timeout_sec*; return whether it is."""
        return self._over.wait(max(0.0, timeout_sec))

    def refuse(self, reason: str) -> None:
        """End the errand before it begins."""
        self.failure = reason
        self._over.set()

    def look_soon(self) -> None:
        """Let it look again without waiting for the rest of its pause."""
        self._wake.set()

    def stop(self) -> None:
        """Let it look at most once more."""
        self._stopped = True
        self._wake.set()

    def run(self, open_store: Callable[[], KeyValueStore]) -> None:
        """Do it, on this thread."""
        pause_sec = _FIRST_PAUSE_SEC
        try:
            store = open_store()
            while not self._look(store) and not self._stopped:
                self._wake.wait(pause_sec)
                self._wake.clear()
                pause_sec = min(2 * pause_sec, _LONGEST_PAUSE_SEC)
        except Exception as error:  # the store's server may be gone, with the process that held it
            logger.debug("an exchange between ranks failed", exc_info=True)
            self.failure = f"the key-value store failed: {type(error).__name__}: {error}"
        finally:
            self._over.set()


class Collection(Generic[_Answer]):
    """The other ranks' answers about one window, as they come in; complete when ``over``."""

    def __init__(
        self,
        *,
        keys: _Keys,
        step: int,
        world_size: int,
        timeout_sec: float,
        clock: Callable[[], float],
        read: Callable[[int, bytes], _Answer],
    ) -> None:
        self.errand = Errand(self.look_for_answers)
        """The errand that looks for the answers."""
        self._keys = keys
        self._step = step
        self._world_size = world_size
        self._clock = clock
        self._began = clock()
        self._deadline = self._began + timeout_sec
        self._hurried = False
        self._ended: float | None = None
        self._awaited = collections.deque(range(1, world_size))
        self._read = read
        self.answers: dict[int, _Answer] = {}
        """What each rank sent, as *read* returned it."""

    @property
    def over(self) -> bool:
        """Whether no more answers will come."""
        return self.errand.over

    @property
    def failure(self) -> str | None:
        """Why collecting failed; None as long as nothing went wrong."""
        return self.errand.failure

    def wait(self, timeout_sec: float) -> bool:
        """Wait until it is over, at most *timeout_sec*; return whether it is."""
        return self.errand.wait(timeout_sec)

    @property
    def ready(self) -> bool:
        """Whether to wait no longer: it is over, or the store hangs in a call, which no timeout of ours can end."""
        return self.over or self._clock() > self._deadline + _SEC_FOR_LAST_LOOK

    def wait_until_ready(self) -> None:
        """Wait until it is ``ready``."""
        self.wait(self.seconds_left + _SEC_FOR_LAST_LOOK)

    @property
    def why_missing(self) -> str:
        """Why some ranks have not answered, in words that end a sentence."""
        if self.failure is not None:
            return self.failure
        waited_sec = self._deadline - self._began
        return f"no answer within {waited_sec:.3g} s" + (", when training ended" if self._hurried else "")

    @property
    def missing(self) -> tuple[int, ...]:
        """The ranks that have not answered."""
        return tuple(rank for rank in range(1, self._world_size) if rank not in self.answers)

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return max(0.0, self._deadline - self._clock())

    @property
    def waited_sec(self) -> float:
        """Seconds from its beginning until all had answered, or until now."""
        return (self._clock() if self._ended is None else self._ended) - self._began

    def hurry(self, seconds: float) -> None:
        """Wait no longer than *seconds* from now."""
        deadline = self._clock() + seconds
        if deadline < self._deadline:
            self._deadline, self._hurried = deadline, True
        self.errand.look_soon()

    def look_for_answers(self, store: KeyValueStore) -> bool:
        """Take the answers that are there; return whether no more are awaited."""
        # Rank by rank, so that a look costs the same in a job of any size; at the deadline, look once for every rank.
        late = self._clock() >= self._deadline
        while self._awaited:
            answer = self._keys.answer_of(self._awaited[0], step=self._step, store=store)
            if answer is not None:
                self.answers[self._awaited[0]] = self._read(self._awaited[0], answer)
            elif not late:
                return False
            self._awaited.popleft()
        self._ended = self._clock()
        return True


@dataclass(frozen=True, slots=True)
class _Keys:
    """The keys in the store for the messages of one run's ranks: all below *folder*."""

    folder: str

    @property
    def left(self) -> str:
        return f"{self.folder}/left"

    def of(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def answer_of(self, rank: int, *, step: int, store: KeyValueStore) -> bytes | None:
        """The answer of *rank* about the window of *step*, given only once; None if there is none yet."""
        # The order matters: before a rank says that it is out, it has sent everything that it had to send.
        out, key = self.of(_out(rank)), self.of(_window(step, rank))
        is_out = store.check([out])
        if store.check([key]):
            answer = store.get(key)
            store.delete_key(key)
            return answer
        return store.get(out) if is_out else None


def _window(step: int, rank: int) -> str:
    return f"{step}/{rank}"


def _out(rank: int) -> str:
    return f"out/{rank}"


def _fact(name: str) -> str:
    return f"fact/{name}"


class RankExchange:
    """Carries messages from every rank of one run to rank 0, and holds facts that all ranks may read.

    Args:
        rank: this rank.
        world_size: how many ranks there are.
        run_number: from ``next_run_number``.
        timeout_sec: how long rank 0 waits for the answers about a window.
        find_store: finds the store; we do not keep a reference to it.
        clock: tells seconds.

    Raises:
        NoExchangeError: there is no store.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        run_number: int,
        timeout_sec: float,
        find_store: Callable[[], KeyValueStore] = default_store,
        clock: Callable[[], float] = host_clock.now,
    ) -> None:
        find_store()  # an unsuitable torch or launcher shows now
        self.rank = rank
        self.world_size = world_size
        self.timeout_sec = timeout_sec
        self._folder = f"{_FOLDER}/{run_number}"
        self._begun = f"{self._folder}/begun"
        self._word = os.urandom(16).hex()
        self._keys: _Keys | None = _Keys(f"{self._folder}/{self._word}") if rank == 0 else None
        # Sent again if rank 0 begins its run after this rank has sent something: the latest two, as it begins soon.
        self._said: collections.deque[tuple[str, bytes]] = collections.deque(maxlen=2)
        self._find_store = find_store
        self._clock = clock
        self._client: KeyValueStore | None = None
        self._errands: collections.deque[Errand] = collections.deque()
        self._errand: Errand | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._running = False
        self._gone = False
        _exchanges.add(self)
        self._submit(Errand(lambda store: True))  # open our client now: training's process group may be gone later

    def send(self, step: int, packed: bytes) -> Errand:
        """Send rank 0 this rank's answer about the window of *step*."""
        return self._write(_window(step, self.rank), packed)

    def send_out(self, packed: bytes) -> Errand:
        """Send rank 0 this rank's answer about every window that it has not answered and never will."""
        return self._write(_out(self.rank), packed)

    def collect(self, step: int, *, read: Callable[[int, bytes], _Answer]) -> Collection[_Answer]:
        """Begin to collect, on rank 0, the other ranks' answers about the window of *step*.

        Args:
            step: of the window.
            read: gets a rank's number and what it sent, and returns the answer. It runs on the exchange's thread, so
                that training does not wait for that either. It never raises.
        """
        if self._keys is None:
            raise RuntimeError("rank 0 alone collects")
        collection = Collection(
            keys=self._keys,
            step=step,
            world_size=self.world_size,
            timeout_sec=self.timeout_sec,
            clock=self._clock,
            read=read,
        )
        self._submit(collection.errand)
        return collection

    def tell(self, name: str, text: str) -> Errand:
        """Let all ranks know *text* as *name*."""
        return self._write(_fact(name), text.encode())

    def ask(self, name: str, *, within_sec: float) -> str | None:
        """The text that some rank has told as *name*; None if it did not come within *within_sec*."""
        deadline = self._clock() + within_sec
        found: list[str] = []

        def look(store: KeyValueStore) -> bool:
            keys = self._find_keys(store)
            if keys is not None and store.check([keys.of(_fact(name))]):
                found.append(store.get(keys.of(_fact(name))).decode())
            return bool(found) or self._clock() >= deadline

        self._submit(Errand(look)).wait(within_sec)
        return found[0] if found else None

    def leave(self, *, within_sec: float) -> None:
        """End the exchange; wait at most *within_sec* until all is sent. The last rank to leave deletes the keys."""
        if self._gone:
            return
        deadline = self._clock() + within_sec
        errand, thread = self._submit(Errand(self._look_around_and_leave)), self._thread
        self._gone = True
        # Wait for the thread: a process that ends while its thread closes a client is aborted.
        if errand.wait(within_sec) and thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - self._clock()))

    def stop(self) -> None:
        """The process ends: send what can be sent at once, and wait shortly for the thread to end."""
        with self._lock:
            self._gone = True
            for errand in (self._errand, *self._errands):
                if errand is not None:
                    errand.stop()
            thread = self._thread
        if thread is not None:
            thread.join(_SEC_TO_STOP)

    def _look_around_and_leave(self, store: KeyValueStore) -> bool:
        keys = self._find_keys(store)
        if keys is not None and store.add(keys.left, 1) == self.world_size:
            for key in store.list_keys():
                if key.startswith(f"{self._folder}/"):
                    store.delete_key(key)
        self._client = None
        return True

    def _find_keys(self, store: KeyValueStore) -> _Keys | None:
        """The keys of this run; None if rank 0 has not begun it."""
        if self.rank and store.check([self._begun]):
            keys = _Keys(f"{self._folder}/{store.get(self._begun).decode()}")
            if keys != self._keys:
                # What this rank wrote below the word of an earlier run is written again.
                for name, value in self._said:
                    store.set(keys.of(name), value)
                self._keys = keys
        return self._keys

    def _write(self, name: str, value: bytes) -> Errand:
        deadline = self._clock() + self.timeout_sec

        def look(store: KeyValueStore) -> bool:
            keys = self._find_keys(store)
            if keys is None and self._clock() >= deadline:
                raise NoExchangeError("rank 0 has not begun this run")
            if keys is not None:
                store.set(keys.of(name), value)
                self._said.append((name, value))
            return keys is not None

        return self._submit(Errand(look))

    def _submit(self, errand: Errand) -> Errand:
        with self._lock:
            if self._gone:
                errand.refuse("this rank has left")
                return errand
            self._errands.append(errand)
            if self._running:
                return errand
            self._running = True
            thread = threading.Thread(target=self._run_errands, name="lightning_flops ranks", daemon=True)
            # From Python 3.12 on, no thread starts while the process ends. Then this thread has to do it.
            with contextlib.suppress(RuntimeError):
                thread.start()
                self._thread = thread
                return errand
        self._run_errands()
        return errand

    def _run_errands(self) -> None:
        while True:
            with self._lock:
                if not self._errands:
                    self._errand, self._running = None, False
                    return
                self._errand = errand = self._errands.popleft()
            errand.run(self._open_client)
            if errand.failure is not None:
                self._client = None  # there may be another store by now

    def _open_client(self) -> KeyValueStore:
        if self._client is None:
            store = self._find_store()
            # A store of the user's own may have no second client. Then we use its only one, for short calls only.
            with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):
                self._client = store = store.clone()
            if self.rank == 0:
                store.set(self._begun, self._word.encode())
            return store
        return self._client


_exchanges: weakref.WeakSet[RankExchange] = weakref.WeakSet()


def _stop_all() -> None:
    for exchange in list(_exchanges):
        exchange.stop()


# Registered before anything that reports when the process ends: what is registered first runs last.
atexit.register(_stop_all)
