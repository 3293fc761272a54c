"""Watches torch's DataLoaders in a training loop that is the user's own, and so are its loaders.

We wrap the class of the loaders' iterators, so we see every loader, whoever made it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from torch.utils.data import DataLoader

from lightning_flops.doors.read_ahead import ReadAhead
from lightning_flops.instrument.border import on_deletion
from lightning_flops.instrument.patches import Patches
from lightning_flops.instrument.timing.settling import steps_to_settle
from lightning_flops.instrument.torch_private import dispatch
from lightning_flops.instrument.torch_private.loading import fetched_ahead, iterator_class
from lightning_flops.session.border import guarded_on_deletion
from lightning_flops.session.noted_calls import NotedCalls, Seen

if TYPE_CHECKING:
    from lightning_flops.instrument.patches import Make
    from lightning_flops.records import BatchTokens, Shapes
    from lightning_flops.session.border import Border
    from lightning_flops.session.session import Session

T = TypeVar("T")

Fetched = tuple[Any, "Shapes", "BatchTokens | None"]
"""A batch where a setting needs it, its shapes, and its tokens."""


class Loop(Protocol):
    """The loop that may be waiting for a loader."""

    def on_its_thread(self) -> bool:
        """Whether this is the thread that trains, as far as that is known."""

    def fetch_begins(self, iterator: Any) -> bool:
        """The loop asks *iterator* for a batch; returns whether the batch is for a step. It may be told twice.

        It is for none if this is not the thread that trains.
        None stands for an iterator that is being made.
        """

    def batch_fetched(self, iterator: Any, batch: Any) -> None:
        """*iterator* has delivered *batch*, which is for a step."""

    def nothing_fetched(self, iterator: Any) -> None:
        """*iterator* was asked for a batch, which was for a step, and has raised."""

    def loader_is_used_up(self) -> None:
        """An iterator has no more batches: what follows may be the end of an epoch."""

    def loader_is_left(self) -> None:
        """The iterator that fed the latest steps was dropped: what follows may be the end of an epoch."""

    def looks_left(self, sign: str, in_words: str) -> None:
        """Something happens that suggests that the loop has left a step unfinished."""

    def interrupted(self, error: BaseException) -> None:
        """The user's code raised *error* in a step."""


@dataclass(slots=True)
class _Known:
    """An iterator that was asked for a batch."""

    reference: weakref.ref[Any]
    """Tells when the iterator is dropped. There is one for each iterator: if a Ctrl-C arrives while it tells, we raise
    it again afterwards, and Python would drop that in a second one."""
    batches: int = 0
    """Batches that it has delivered for steps; only none, one and several are told apart."""


class _StandsForIterator:
    """Stands for an iterator that nothing can refer to without holding it; lives as long as what fetches from that."""


def _can_be_referred_to(iterator: Any) -> bool:
    """Whether something can refer to *iterator* without holding it: not to one of a list, for one, nor to a ``map``."""
    try:
        return weakref.ref(iterator) in {weakref.ref(iterator)}
    except TypeError:
        return False


class LoaderTaps:
    """Tells a session when its loop waits for a loader.

    Args:
        session: is told of the waits.
        loop: the loop that uses the loaders.
        batches_a_step: returns how many batches a step takes.
        takes_batches: the loop must be told of every batch, also if nothing is monitored.
        calls: holds the fetches that are noted; None: the loop notes none.
    """

    def __init__(
        self,
        session: Session,
        loop: Loop,
        *,
        batches_a_step: Callable[[], int],
        takes_batches: bool = False,
        calls: NotedCalls | None = None,
    ) -> None:
        self.fetches = 0
        """Batches that were fetched while the parts of steps are marked."""
        self.in_use = False
        """A batch has been fetched in this run."""
        self._session = session
        self._loop = loop
        self._takes_batches = takes_batches
        self._batches_a_step = batches_a_step
        self._fetching = False
        self._monitored_fetch = False
        self._calls = NotedCalls(lambda kinds, facts: None, tokens=session.tokens) if calls is None else calls
        self.ahead: ReadAhead[Fetched] = ReadAhead()
        """Which batch the loop gets, if that is not the one that was fetched."""
        self._iterator: weakref.ref[Any] | None = None
        self._iterator_is_used_up = False
        self._known: weakref.WeakKeyDictionary[Any, _Known] = weakref.WeakKeyDictionary()
        self._feeder: _Known | None = None
        """The iterator that has delivered the latest batch; None if nothing tells when it is dropped."""
        self._modes_outside = 0
        self._on_class = Patches()

    @property
    def border(self) -> Border:
        """Catches what our code raises."""
        return self._session.border

    def tap_run(self) -> None:
        """Tell the monitor of every wait. The class is shared by all loaders, and must not keep the session alive."""
        wanted = self._takes_batches or self._session.monitor is not None
        if wanted and (kind := iterator_class()) is not None:
            self._on_class.replace_function(kind, "__next__", self._around_fetch_of_run())
            weakref.finalize(self, on_deletion(self._on_class.undo)).atexit = False

    def _around_fetch_of_run(self) -> Make:
        return self._session.taps.noted.fetch(
            self,
            LoaderTaps._monitored_fetch_begins,
            LoaderTaps._monitored_fetch_ends,
            LoaderTaps._no_more,
            calls=self._calls,
        )

    def _around_fetch_of_window(self) -> Make:
        return self._session.taps.around(self._fetch_begins, self._fetch_ends, fails=self._fetch_fails)

    def watched(self, iterator: Iterator[T]) -> Callable[[], T]:
        """What fetches the next batch of *iterator*, which may be of any kind, and tells of it as of a DataLoader's."""
        kind = iterator_class()
        if kind is not None and isinstance(iterator, kind):
            return functools.partial(next, iterator)  # the class tells
        fetch = self._around_fetch_of_window()(self._around_fetch_of_run()(lambda _: next(iterator)))
        told_of = iterator if _can_be_referred_to(iterator) else _StandsForIterator()
        return lambda: cast(T, fetch(told_of))

    def tap_parts(self, taps: Patches) -> None:
        """Tell the window of every wait, and of every loader that starts."""
        make = self._session.taps
        if (kind := iterator_class()) is not None:
            taps.replace(kind, "__next__", self._around_fetch_of_window())
        taps.replace(DataLoader, "__iter__", make.around(self._loader_starts, lambda _: self._session.leave()))

    def take_out(self) -> None:
        """Remove everything from torch's class."""
        self._on_class.undo()
        self._feeder = self._iterator = None
        self._known.clear()

    def iterators(self) -> list[Any]:
        """The iterator that was asked for a batch last, if it still exists."""
        iterator = None if self._iterator is None else self._iterator()
        return [] if iterator is None else [iterator]

    def scope_is_entered(self) -> None:
        """The counted step's scope has been entered, with our mode on torch's stack: note how deep the stack is."""
        self._modes_outside = dispatch.depth()

    # ---- for the monitor: called for every batch of the run, so kept short

    def _monitored_fetch_begins(self, iterator: Any) -> bool:
        """A fetch begins; returns whether it is for a step."""
        if self._monitored_fetch or self.border.closed or not self._loop.fetch_begins(iterator):
            return False
        self._monitored_fetch = True
        self._session.log.fetch_begins()
        return True

    def looks_at(self, iterator: Any) -> None:
        """*iterator* is asked for its first batch that is for a step."""
        self.ahead.looks_at(iterator)
        if self.ahead.is_needed:
            self._calls.hands_over = self._hands_over

    def _hands_over(self, seen: Seen | None) -> Seen | None:
        found = self.ahead.handed_over(self._calls.feeds(), None if seen is None else ((), *seen))
        return None if found is None else found[1:]

    def _monitored_fetch_ends(self, call: tuple[Any, ...], batch: Any, failed: bool) -> None:
        self._monitored_fetch = False
        self.in_use = True
        self._session.log.fetch_ends()
        if not failed:
            self._has_fed(call[0])
        if self._takes_batches and failed:
            self._loop.nothing_fetched(call[0])
        elif self._takes_batches:
            self._loop.batch_fetched(call[0], batch)

    def _no_more(self) -> None:
        """An iterator was asked for a batch for a step, and has no more."""
        if not self._fetching:  # or its end will tell, when the wait is over
            self._loop.loader_is_used_up()

    # ---- iterators that are dropped

    def _has_fed(self, iterator: Any) -> None:
        """*iterator* has delivered a batch for a step."""
        feeder = self._feeder
        if feeder is None or feeder.reference() is not iterator:
            self._feeder = feeder = self._knows(iterator)
        if feeder is not None:
            feeder.batches += 1

    def _knows(self, iterator: Any) -> _Known | None:
        """What is known of *iterator*; None if it cannot be told when it is dropped: of C, or without references."""
        try:
            known = self._known.get(iterator)
            if known is None:
                self._known[iterator] = known = _Known(weakref.ref(iterator, self._iterator_is_dropped))
        except TypeError:
            return None
        return known

    def has_fed_again(self) -> None:
        """The iterator that has delivered the latest batch has delivered another one."""
        if self._feeder is not None:
            self._feeder.batches += 1

    @guarded_on_deletion
    def _iterator_is_dropped(self, reference: object) -> None:
        """A DataLoader's iterator is deleted when its loop ends. Python may call this anywhere, in any thread."""
        in_handler = dispatch.depth() < self._modes_outside  # torch would put back the mode that we remove
        if reference is self._iterator and not self._iterator_is_used_up and not in_handler:
            self._loop.looks_left("loader", "the DataLoader's iterator was dropped")
        feeder = self._feeder
        # Code of ours in which Python has called this could not go on.
        if feeder is None or reference is not feeder.reference or _code_of_ours_runs():
            return
        if self._loop.on_its_thread():
            self._calls.stop()
            self._feeder = None
            if feeder.batches > 1:  # whoever takes one batch of a new iterator in each step leaves none
                self._loop.loader_is_left()

    # ---- for the window

    def _fetch_begins(self, iterator: Any) -> bool | None:
        if self._fetching or not self._loop.on_its_thread():
            return None
        self._loop.fetch_begins(iterator)
        known = self._knows(iterator)
        self._iterator = None if known is None else known.reference
        self._iterator_is_used_up = False
        recorder = self._session.window.recorder
        if recorder.counting:
            recorder.settle_for(
                steps_to_settle(batches_ahead=fetched_ahead(iterator), batches_a_step=self._batches_a_step())
            )
        self._session.enter("data_wait")
        self._fetching = True
        return True

    def _fetch_ends(self, _: bool) -> None:
        self._fetching = False
        self._session.leave()
        self.fetches += 1
        self.in_use = True

    def _fetch_fails(self, _: bool, error: BaseException) -> None:
        self._fetching = False
        self._session.leave()
        if isinstance(error, StopIteration):
            self._iterator_is_used_up = True
            self._loop.loader_is_used_up()
        else:
            self._loop.interrupted(error)

    def _loader_starts(self, loader: Any) -> bool | None:
        if not self._loop.on_its_thread():
            return None
        if not self._iterator_is_used_up:
            self._loop.looks_left("loader", "a DataLoader was started")
        self._loop.fetch_begins(None)  # its first fetch may begin right here
        self._session.enter("epoch restart")
        return True


def _code_of_ours_runs() -> bool:
    """Whether it was code of ours in which Python called the border of our caller."""
    frame = sys._getframe(3)
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == __name__.partition(".")[0]
