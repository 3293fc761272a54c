"""Which batch a step of a user's own loop computes on: what loaders deliver, and what the model is called with."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_flops.instrument.batches import (
    UNKNOWN,
    beside,
    calls_on,
    hides_something,
    known_by,
    looked_at,
    samples_in,
    tensor_shapes,
    tensors_by_memory,
)
from lightning_flops.records import HIDDEN_SHAPE, Shapes
from lightning_flops.session.replayed import Replayed

if TYPE_CHECKING:
    from lightning_flops.doors.loader_taps import Fetched
    from lightning_flops.records import BatchTokens
    from lightning_flops.session.noted_calls import Seen
    from lightning_flops.session.session import Session

_FEW_TOGETHER = 16
"""If an iterator delivers more batches than that before a forward, the loop passes over them to the last one."""

_MOST_TOGETHER = 1024
"""Most batches of one step that may be fetched before its first forward, and are told apart."""

_SEVERAL_FETCHED = (
    "A loader delivered several batches before one forward, as where a generator fetches ahead or the loop passes over "
    "batches. Which of them a step computed on is not known: its shapes and samples may be those of a batch before or "
    "after it. If profiler.batches(...) is put around what hands out the batches, they are known."
)

_NOT_FETCHED = (
    "Some steps computed on batches that were not fetched for them: on pieces of one that was, or on batches that the "
    "loop has kept. Only the arguments of the model are seen of those, so such steps are not like others. If "
    "profiler.batches(...) is put around what hands out the batches, all are known alike."
)

_NOT_TOLD = (
    "A step had batches of several loaders, and the model's arguments do not tell which of them it computed on: all of "
    "them are taken for its samples, though some may have been fetched for something else."
)

_SEVERAL_FORWARDS = (
    "Steps fetch a batch, call the model on it, and go on to the next before the backward, again and again: the "
    "samples of such a step are those of all its batches. Where a step does that first, the batch is taken for one "
    "that the loop has skipped."
)

_ONE_OF_SEVERAL = (
    "Steps had batches of several loaders, and go on where one of these has no more: its batches may be used again, as "
    "itertools.cycle hands them out, and nobody sees which. So the samples of such steps are n/a. If "
    "profiler.batches(...) is put around what hands out all of them, they are known."
)


class Place(NamedTuple):
    """Where in the user's code a batch was asked for."""

    frame: int
    """The id of a frame, which may be gone."""
    instruction: int


def nobody() -> None:
    """Stands for a reference to an iterator where none is known."""


@dataclass(slots=True)
class _Delivered:
    """What the loop has fetched in one go, and may compute on."""

    kept: Any
    """The batch where a setting needs it."""
    shapes: Shapes
    tokens: BatchTokens | None
    iterator: Callable[[], Any]
    """Returns the iterator that delivered it, if that still exists and is known."""
    place: Place | None
    again: bool
    """The fetch before it was from the same iterator."""
    together: list[Fetched] = field(default_factory=list)
    """Batches that the iterator has delivered one after the other, as long as they are one batch for us."""
    is_beside: bool = False
    """It has several parts, each from another loader."""


class LoopBatches:
    """The running batch of a loop, and those that were fetched before their turn.

    A batch is known as it came from a loader. If none delivered it, the arguments of the model's forwards stand for it,
    and also for texts in it, or for whatever else shows no sizes.

    If several iterators deliver a batch each before a forward, a step computes on all of them, as of ``zip``, or they
    were fetched to be looked at: for a picture, a shape, a sample to log. ``zip`` asks all of them at one place of the
    user's code. Otherwise the arguments of the forwards tell: if one batch accounts for them, the others have no part
    in the step.

    Args:
        session: returns the loop's session, once there is one.
        keeps: a setting needs the batches themselves.
        one_pass: each batch has one backward after its forwards, as in a loop of one optimizer.
        counts_calls: batches are also known by how often the model was called on them, and how many backwards ran.
    """

    def __init__(self, session: Callable[[], Session], *, keeps: bool, one_pass: bool, counts_calls: bool) -> None:
        self.keeps = keeps
        self.batch: Any = None
        """The running one, or an empty tuple if nobody needs it; None if there is none yet."""
        self.is_fetched = False
        """It came from a loader, and not from the arguments of a forward."""
        self.is_used = False
        """A forward or a backward has run for it."""
        self.lacks_beside = False
        """Several loaders were used side by side, one of them has no more batches, and since then no batch came beside
        another."""
        self.replayed = Replayed()
        """Batches that were fetched before."""
        self.forwards = self.backwards = 0
        """How many have run for the running batch."""
        self.calls: Shapes = ()
        """What the latest batch that has ended is known by, beside its shapes."""
        self._counts_calls = counts_calls
        self._session = session
        self._one_pass = one_pass
        self._shapes: Shapes = ()
        self._tokens: BatchTokens | None = None
        self._is_replayed = False
        """The running batch was not fetched anew: it is one that was fetched before."""
        self._is_hidden = False
        """The running batch was fetched, and holds something whose sizes were not seen."""
        self.was_hidden = False
        """The same of the latest batch that has ended."""
        self._shows_all = False
        """Whatever batches hold beside tensors is not for the model, as the names of files."""
        self._was_beside = False
        """Several loaders have delivered the latest batch that has ended."""
        self._is_beside = False
        """The same of the running one."""
        self._together: list[Fetched] = []
        """Batches that one iterator has delivered since the last forward, as long as they are one batch for us."""
        self._ahead: list[_Delivered] = []
        """What was fetched while the running batch was in use: it belongs to what comes next."""
        self._rivals: list[_Delivered] = []
        """Batches that were fetched before the running one, from other iterators. All of these are unused."""
        self._looked_at: list[_Delivered] = []
        """Rivals that the first forward was not called on; a later one may be."""
        self._iterator: Callable[[], Any] = nobody
        """Returns the one that has delivered the running batch."""
        self._fed_by: Callable[[], Any] = nobody
        """The same of the latest batch that has ended."""
        self._place: Place | None = None
        self._arguments: dict[int, Shapes] = {}
        """While it is in doubt which batch is running: shapes of the tensors in the arguments of its forwards, by where
        each tensor lies in memory."""
        self._passed: list[tuple[Shapes, bool]] = []
        """Batches of the running step that had forwards, but no backward before the next batch was used; with each,
        whether gradients were on."""
        self.has_skipped = False
        """A batch that had a forward was given up in the running step."""
        self._had_passed = False
        """The step before had batches that were passed over like these, or given up."""
        self._looks = self._had_looks = False
        """For the running step, or the latest that has ended, batches were fetched that were no part of it."""
        self._others: deque[Fetched] = deque()
        """Once it is known that one iterator has delivered several batches: those that come after the running one."""
        self._has_taken = False
        """A batch was fetched in this run."""
        self._fetched = False
        """A batch was fetched since the latest step ended."""
        self._had_fetched = False
        """The same of that step."""

    # ---- loaders

    def seen_of(self, batch: Any) -> Fetched:
        """*batch* where a setting needs it, its shapes and its tokens."""
        shapes, tokens = self.sees(batch)
        if HIDDEN_SHAPE not in shapes and not self._shows_all and hides_something(batch):
            shapes = (*shapes, HIDDEN_SHAPE)
        return batch if self.keeps else (), shapes, tokens

    def sees(self, batch: Any) -> Seen:
        """The shapes and the tokens of *batch*."""
        tokens = self._session().tokens
        return tensor_shapes(batch), tokens.of(batch) if tokens.reads else None

    def is_from(self, iterator: Any) -> bool:
        """Whether *iterator* has delivered the latest of the batches that are unused."""
        latest = self._ahead[-1].iterator if self._ahead else self._iterator
        return iterator is not None and latest() is iterator

    def takes(
        self,
        kept: Any,
        shapes: Shapes,
        tokens: BatchTokens | None,
        *,
        again: bool,
        iterator: Callable[[], Any] = nobody,
        place: Place | None = None,
    ) -> None:
        """The loop has fetched a batch. If the one before it is in use, it belongs to what comes next.

        Args:
            kept: the batch where a setting needs it.
            shapes: of its tensors.
            tokens: what was found in it.
            again: the batch before it came from the same iterator, in the same pass over its loader.
            iterator: returns the one that delivered it, if that still exists.
            place: where it was asked for, if that is known.
        """
        self._has_taken = self._fetched = True
        delivered = _Delivered(kept, shapes, tokens, iterator, place, again)
        if self.is_used:
            self._ahead.append(delivered)
        else:
            self._takes_unused(delivered)

    def _takes_unused(self, one: _Delivered) -> None:
        fetched = one.kept, one.shapes, one.tokens
        if self.batch is None or not self.is_fetched:
            self._turns_to(one)
        elif one.again:
            self._takes_together(fetched)
        elif self._is_asked_beside(one):
            self._takes_beside(one)
        else:
            self._rivals.append(self._delivered())
            self._turns_to(one)

    def _is_asked_beside(self, one: _Delivered) -> bool:
        """Whether *one* was asked for where the running batch was, of another iterator that goes on, as by ``zip``.

        A frame may have the id of one that is gone, with its iterator.
        """
        iterator = self._iterator()
        same = one.place is not None and one.place == self._place
        return same and iterator is not None and iterator is not one.iterator()

    def _turns_to(self, one: _Delivered) -> None:
        self._makes_running((one.kept, one.shapes, one.tokens))
        self._iterator, self._place, self._is_beside = one.iterator, one.place, one.is_beside
        self._together = one.together or [(one.kept, one.shapes, one.tokens)]

    def _delivered(self) -> _Delivered:
        """The running batch, which was fetched."""
        return _Delivered(
            self.batch,
            self._shapes,
            self._tokens,
            self._iterator,
            self._place,
            again=False,
            together=self._together,
            is_beside=self._is_beside,
        )

    def _takes_beside(self, one: _Delivered) -> None:
        """The running batch is made of what several loaders have delivered, *one* of them last."""
        self._together = []
        self._is_beside, self.lacks_beside = True, False
        self._shapes, self._tokens = beside(self._shapes, one.shapes), self._tokens or one.tokens

    def _takes_all(self, every: list[_Delivered]) -> None:
        self._turns_to(every[0])
        for one in every[1:]:
            self._takes_beside(one)

    def _makes_running(self, fetched: Fetched) -> None:
        self.batch, self._shapes, self._tokens = fetched
        self.is_fetched = True
        self._is_hidden = HIDDEN_SHAPE in self._shapes

    def _takes_together(self, fetched: Fetched) -> None:
        """One iterator has delivered several batches before a forward.

        They may be those of several micro-steps, which the forwards will show. Otherwise the loop computes on all of
        them, or it has passed over all but the last.
        """
        together = self._together
        if together:
            together.append(fetched)
        if len(together) > _MOST_TOGETHER:
            del together[0]
        if len(together) > _FEW_TOGETHER:
            self._shapes = fetched[1]
        else:
            self._shapes = (*self._shapes, *fetched[1])
        self._tokens = None  # nobody knows which of them are in use

    def loader_is_used_up(self) -> None:
        """A loader has no more batches."""
        self.lacks_beside = self.lacks_beside or self._was_beside

    # ---- forwards

    @property
    def looks_at_arguments(self) -> bool:
        """Whether the arguments of a forward of the running batch tell anything that is not known."""
        stand_for_it = self._is_hidden or not self.is_fetched
        return stand_for_it or self.is_in_doubt or (self.replayed.looks_left > 0 and self._learns_arguments)

    @property
    def is_in_doubt(self) -> bool:
        """Whether batches were fetched of which it is not known that the running step computes on them, or does not."""
        return bool(self._rivals or self._looked_at)

    @property
    def _learns_arguments(self) -> bool:
        """Whether the running batch was fetched, and with which arguments the model is called on it is not known."""
        if self._is_hidden or not self.is_fetched or self._are_several:
            return False
        return known_by(self._shapes, self._tokens) not in self.replayed.known

    def takes_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The model is called with these, which are looked at here."""
        arguments = batch_of(args, kwargs)
        if self.is_in_doubt:
            self._decide(arguments)
        elif self._is_hidden:
            self._takes_in_place_of_hidden(self.sees(arguments))
        elif self.is_fetched:
            self.replayed.looks_left -= 1
            self.replayed.learn(self._shapes, self._tokens, tensor_shapes(arguments))
        else:
            self.takes_seen_arguments(arguments if self.keeps else (), self.sees(arguments))

    def _takes_in_place_of_hidden(self, seen: Seen) -> None:
        shapes, tokens = seen
        if not shapes:
            return
        is_first = HIDDEN_SHAPE in self._shapes
        visible = _visible(self._shapes)
        if is_first and _has_shapes(visible, shapes):
            self._shapes, self._is_hidden, self._shows_all = visible, False, True
            return
        self._shapes = (*visible, *shapes)
        if is_first:
            self._tokens = tokens or self._tokens

    def takes_seen_arguments(self, kept: Any, seen: Seen) -> None:
        """The model was called with arguments that were looked at.

        Args:
            kept: the arguments where a setting needs them.
            seen: their shapes and tokens.
        """
        if self._learns_arguments:
            self.replayed.learn(self._shapes, self._tokens, seen[0])
        elif self.is_fetched:
            return
        elif self.batch is None:
            fetched = self.replayed.fetched_as(*seen)
            self._is_replayed = fetched is not None
            self.batch, self._tokens = kept, seen[1]
            self._shapes = seen[0] if fetched is None else fetched
        elif not self._is_replayed:
            self._shapes = (*self._shapes, *seen[0])

    def _decide(self, arguments: Any) -> None:
        """Find out which of the batches in doubt the model is called on, given *arguments* of it."""
        shapes = tensor_shapes(arguments)
        found = tensors_by_memory(arguments)
        is_new = not found.keys() <= self._arguments.keys()
        self._arguments |= found
        if self._rivals:
            every, self._rivals = [*self._rivals, self._delivered()], []
            chosen = self._computed_on(every, shapes)
            if chosen is None:
                self._takes_all(every)
            else:
                self._looked_at = [one for one in every if one is not chosen]
                self._turns_to(chosen)
        elif is_new and Counter(chain.from_iterable(self._arguments.values())) - Counter(self._shapes):
            # The running batch does not account for all that the model was called with.
            known = not Counter(shapes) - Counter(self._shapes)
            for one in [one for one in self._looked_at if not Counter(shapes) - Counter(one.shapes)][:1]:
                if known:
                    self._session().notes.add_for_run(_NOT_TOLD)
                self._takes_beside(one)
                self._looked_at.remove(one)

    def _computed_on(self, every: list[_Delivered], arguments: Shapes) -> _Delivered | None:
        """The one of *every* batch that the model is called on; None if it is called on all of them."""
        if fitting := [one for one in every if self.replayed.arguments_of(one.shapes, one.tokens) == arguments]:
            return self._likeliest(fitting)
        for accounts_for in (_has_shapes, _has_sizes, _has_samples):
            if fitting := [one for one in every if accounts_for(one.shapes, arguments)]:
                return self._likeliest(fitting)
        together = every[0].shapes
        for one in every[1:]:
            together = beside(together, one.shapes)
        if _has_shapes(together, arguments) or _has_samples(together, arguments):
            return None
        living = [one for one in every if one.iterator() is not None]
        if len(living) == 1:
            return living[0]
        self._session().notes.add_for_run(_NOT_TOLD)
        return None

    def _likeliest(self, fitting: list[_Delivered]) -> _Delivered:
        """The batch that the step computes on, of several that are alike."""
        fed_before = self._fed_by()
        if fed_before is not None:
            fitting = [one for one in fitting if one.iterator() is fed_before] or fitting
        return ([one for one in fitting if one.iterator() is not None] or fitting)[-1]

    def running(self) -> Seen:
        """The shapes and the tokens of the running batch, as far as they are known."""
        return self._shapes, self._tokens

    # ---- from one batch to the next

    def steps_were_usual(self) -> None:
        """Steps have ended that were only noted: each computed on all that was fetched for it."""
        self._had_looks = False
        self.calls = ()

    @property
    def is_unused(self) -> bool:
        """Whether the running batch was fetched, and nothing has run for it."""
        return self.is_fetched and not self.is_used

    @property
    def ahead(self) -> bool:
        """Whether batches were fetched while the running one was in use: they belong to what comes next."""
        return bool(self._ahead)

    @property
    def has_left_over(self) -> bool:
        """Whether a batch was fetched alone and nothing has run for it: the running one, or the one after it."""
        return not self._are_several and (self.is_unused or self.ahead)

    @property
    def _are_several(self) -> bool:
        """The loader has delivered several batches together, and the running one is the first of them, or all."""
        return bool(self._others) or len(self._together) > 1

    @property
    def wait(self) -> bool:
        """Whether the loop has fetched batches, beside the running one, that it has not used yet."""
        return self.ahead or self._are_several

    def come_apart(self) -> bool:
        """A forward follows a backward. If several batches were fetched before them, each is a micro-step.

        Returns:
            Whether it is so: then the running batch is the first of them.
        """
        if not (self._one_pass and self._are_several):
            return False
        if not self._others:
            first, *others = self._together
            self._together = []
            self._makes_running(first)
            self._others.extend(others)
        return True

    @property
    def is_of_dropped_iterator(self) -> bool:
        """Whether the iterator that has delivered the running batch is known not to exist any more."""
        return self.is_fetched and self._iterator is not nobody and self._iterator() is None

    def pass_over(self, *, trains: bool) -> None:
        """A forward begins on what was fetched ahead, before the running batch had a backward.

        Args:
            trains: the running batch may be trained on, together with the next.
        """
        passed, forwards = [*self._passed, (self._shapes, trains)], self.forwards
        self.go_on()
        self._passed, self.forwards = passed, forwards

    def drop_left_over(self) -> None:
        """The loop does not use the batch that nothing has run for."""
        if self._ahead:
            self._ahead.clear()
        else:
            self.go_on()

    def go_on(self) -> None:
        """The running batch is over: the one that was fetched ahead, if any, is the running one now."""
        self.is_used = self._is_beside = False
        self.forwards = self.backwards = 0
        self._together, self._rivals, self._looked_at = [], [], []
        self._arguments.clear()
        self._passed = []
        if self._others:
            self._makes_running(self._others.popleft())
            return
        ahead, self._ahead = self._ahead, []
        self.batch, self._shapes, self._tokens = None, (), None
        self._is_replayed = self.is_fetched = self._is_hidden = False
        for one in ahead:
            self._takes_unused(one)

    def drop_all(self) -> None:
        """Everything that was fetched since the latest step ended is of no step."""
        self._ahead.clear()
        self._others.clear()
        self._looks = self._fetched = False
        self.go_on()

    def end(self, *, ends_step: bool) -> Fetched:
        """The running batch is through: go on to the next one.

        Args:
            ends_step: a step ends with it.

        Returns:
            It, its shapes and its tokens; the first is None if there was none.
        """
        note = self._session().notes.add_for_run
        if len(self._together) > 1:
            note(_SEVERAL_FETCHED)
        if ends_step:
            self._others.clear()
            self._had_fetched, self._fetched = self._fetched, False
            was_fetched = self._had_fetched or self.is_fetched or self._is_replayed
            if self.batch is not None and self._has_taken and not was_fetched:
                note(_NOT_FETCHED)
        if self._rivals:  # no forward of the model was seen
            self._takes_all([*self._rivals, self._delivered()])
        batch, shapes, tokens = self.batch, self._shapes, self._tokens
        self.was_hidden = self._is_hidden
        shapes = _visible(shapes) or shapes
        if self.is_fetched:
            self._was_beside, self._fed_by = self._is_beside, self._iterator
        if self._looked_at:
            self._looks = True
            if self._had_looks:  # what is fetched in each step may be used elsewhere, and what that spends depend on it
                for one in self._looked_at:
                    shapes = looked_at(shapes, one.shapes)
        if self.lacks_beside and self.is_fetched:
            shapes = beside(shapes, (UNKNOWN,))
            note(_ONE_OF_SEVERAL)
        passed, self._passed = self._passed, []
        for before, trains in passed:
            if trains and self._had_passed:
                note(_SEVERAL_FORWARDS)
                shapes = beside(before, shapes)
            else:
                shapes = looked_at(shapes, before)
        if ends_step:
            self._had_passed, self.has_skipped = bool(passed) or self.has_skipped, False
        if self._counts_calls:
            self.calls = calls_on(forwards=self.forwards, backwards=self.backwards)
            shapes = (*shapes, *self.calls)
        if ends_step:
            self._had_looks, self._looks = self._looks, False
        self.go_on()
        return batch, shapes, tokens

    @property
    def is_of_ended_step(self) -> bool:
        """Whether the running batch is the model's arguments, and was fetched for the step that ended last."""
        return self.batch is not None and not self.is_fetched and self._had_fetched and not self._fetched


def _visible(shapes: Shapes) -> Shapes:
    return tuple([shape for shape in shapes if shape != HIDDEN_SHAPE]) if HIDDEN_SHAPE in shapes else shapes


def _has_shapes(batch: Shapes, arguments: Shapes) -> bool:
    """Whether *arguments* are tensors of *batch*."""
    return bool(arguments) and not Counter(arguments) - Counter(batch)


def _has_sizes(batch: Shapes, arguments: Shapes) -> bool:
    """The same of tensors whose axes were joined or split."""
    return bool(arguments) and not Counter(map(math.prod, arguments)) - Counter(map(math.prod, batch))


def _has_samples(batch: Shapes, arguments: Shapes) -> bool:
    """Whether *arguments* may have been made of *batch*: they are not more tensors, and each has as many samples."""
    samples = samples_in(batch)
    return samples is not None and samples_in(arguments) == samples and len(arguments) <= len(batch)


def batch_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The arguments of a forward in their shortest form: the only one, the positional, the named, or both kinds."""
    if not kwargs:
        return args[0] if len(args) == 1 else args
    return kwargs if not args else (args, kwargs)
