"""Watches torch's DataLoaders while a DeepSpeed engine trains. With DeepSpeed the loop and its loaders are the user's.

We wrap the class of the loaders' iterators, so we see every loader, whoever made it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from torch.utils.data import DataLoader

from lightning_flops.instrument.patches import Patches
from lightning_flops.instrument.timing.loader_queue import batches_ahead
from lightning_flops.instrument.timing.settling import steps_to_settle
from lightning_flops.instrument.torch_private import dispatch
from lightning_flops.instrument.torch_private.loading import iterator_class
from lightning_flops.session.border import guarded

if TYPE_CHECKING:
    from lightning_flops.session.border import Border
    from lightning_flops.session.session import Session


class Loop(Protocol):
    """The loop that may be waiting for a loader."""

    evaluating: bool
    """What runs now belongs to no step."""

    def on_its_thread(self) -> bool:
        """Whether this is the thread that trains, as far as that is known."""

    def turns_to_loader(self) -> None:
        """The loop asks a loader for a batch: what runs next is not the loss."""

    def looks_left(self, sign: str, in_words: str) -> None:
        """Something happens that suggests that the loop has left a step unfinished."""

    def interrupted(self, error: BaseException) -> None:
        """The user's code raised *error* in a step."""


class LoaderTaps:
    """Tells a session when the loop of one engine waits for a loader.

    Args:
        session: is told of the waits.
        loop: the loop that uses the loaders.
        batches_a_step: returns how many batches a step takes.
    """

    def __init__(self, session: Session, loop: Loop, *, batches_a_step: Callable[[], int]) -> None:
        self.fetches = 0
        """Batches that were fetched in the running step."""
        self._session = session
        self._loop = loop
        self._batches_a_step = batches_a_step
        self._fetching = False
        self._monitored_fetch = False
        self._iterator: Callable[[], Any] | None = None
        self._iterator_is_used_up = False
        self._modes_outside = 0
        self._on_class = Patches()

    @property
    def border(self) -> Border:
        """Catches what our code raises."""
        return self._session.border

    def tap_run(self) -> None:
        """Tell the monitor of every wait. The class is shared by all loaders, and must not keep the engine alive."""
        if self._session.monitor is not None and (kind := iterator_class()) is not None:
            around = self._session.taps.around_weakly(self._monitored_fetch_begins, self._monitored_fetch_ends)
            self._on_class.replace(kind, "__next__", around)
            weakref.finalize(self, self._on_class.undo).atexit = False

    def tap_parts(self, taps: Patches) -> None:
        """Tell the window of every wait, and of every loader that starts."""
        make = self._session.taps
        if (kind := iterator_class()) is not None:
            taps.replace(kind, "__next__", make.around(self._fetch_begins, self._fetch_ends, fails=self._fetch_fails))
        taps.replace(DataLoader, "__iter__", make.around(self._loader_starts, lambda _: self._session.leave()))

    def take_out(self) -> None:
        """Remove everything from torch's class."""
        self._on_class.undo()

    def iterators(self) -> list[Any]:
        """The iterator that was asked for a batch last, if it still exists."""
        iterator = None if self._iterator is None else self._iterator()
        return [] if iterator is None else [iterator]

    def scope_is_entered(self) -> None:
        """The counted step's scope has been entered, with our mode on torch's stack: note how deep the stack is."""
        self._modes_outside = dispatch.depth()

    # ---- for the monitor: called for every batch of the run, so kept short

    def _monitored_fetch_begins(self, iterator: Any) -> bool | None:
        monitor, loop = self._session.monitor, self._loop
        if monitor is None or self._monitored_fetch or loop.evaluating or not loop.on_its_thread():
            return None
        self._monitored_fetch = True
        monitor.fetch_begins()
        return True

    def _monitored_fetch_ends(self, _: bool) -> None:
        self._monitored_fetch = False
        if self._session.monitor is not None:
            self._session.monitor.fetch_ends()

    # ---- for the window

    def _fetch_begins(self, iterator: Any) -> bool | None:
        if self._fetching or not self._loop.on_its_thread():
            return None
        self._loop.turns_to_loader()
        self._iterator = weakref.ref(iterator, self._iterator_is_gone)
        self._iterator_is_used_up = False
        recorder = self._session.window.recorder
        if recorder.counting:
            recorder.settle_for(
                steps_to_settle(batches_ahead=batches_ahead(iterator), batches_a_step=self._batches_a_step())
            )
        self._session.enter("data_wait")
        self._fetching = True
        return True

    def _fetch_ends(self, _: bool) -> None:
        self._fetching = False
        self._session.leave()
        self.fetches += 1

    def _fetch_fails(self, _: bool, error: BaseException) -> None:
        if not isinstance(error, StopIteration):
            self._loop.interrupted(error)
            return
        self._fetching = False
        self._session.leave()
        self._iterator_is_used_up = True

    def _loader_starts(self, loader: Any) -> bool | None:
        if not self._loop.on_its_thread():
            return None
        if not self._iterator_is_used_up:
            self._loop.looks_left("loader", "a DataLoader was started")
        self._session.enter("epoch restart")
        return True

    @guarded
    def _iterator_is_gone(self, iterator: object) -> None:
        """A DataLoader's iterator is deleted when its loop ends. Python may call this anywhere, in any thread."""
        in_handler = dispatch.depth() < self._modes_outside  # torch would put back the mode that we remove
        if iterator is self._iterator and not self._iterator_is_used_up and not in_handler:
            self._loop.looks_left("loader", "the DataLoader's iterator was dropped")
