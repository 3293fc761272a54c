"""What a loop's events mean: where a batch begins, where a step ends, and what belongs to no step. No torch, no clock.

Events come in the order in which they are seen. docs/loops.md has the rules; what they cannot know is never a guess.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

_DOUBTFUL = "a batch may have been trained on that was taken for one of an evaluation"
_PARTLY = "the model was called without gradients on a batch, and trained on a part of it"
_MOST_AHEAD = 2  # batches that stay fetched ahead from step to step; a loop that skips some at a resume leaves more


#: What an event is to the loop's steps. With a micro-step samples begin: a fetched batch, a piece of one, or what the
#: model is called with. Outside is an evaluation. Inner is what is inside of another part.
Part = Literal["micro-step", "step", "outside", "inner"]


@dataclass(frozen=True, slots=True)
class StepEnd:
    """A step that is over."""

    rows: tuple[int | None, ...]  #: Samples of each micro-step; at least one.
    why: str = ""  #: Why the samples are not known, if they are not.


@dataclass(slots=True)
class _Fetched:
    """A batch that a loader has handed out."""

    source: Hashable
    loader: Hashable
    rows: int | None
    parts: int  # alike elements of a list, of which each may be a batch of its own
    left: int = 0  # rows that nothing was trained on so far
    looker: Hashable = None  # model that was called with as many rows, without gradients, before anything trained

    def use(self, rows: int | None, got: int) -> int | None:
        """Its rows that a forward on *rows* is on, of which that has *got* some from another batch."""
        if self.parts == rows != self.rows:  # its parts were samples
            self.rows, self.parts = rows, 1
        used = self.rows
        if rows is not None:
            used = rows if used is None else min(used, rows - got)
        self.left = 0 if self.rows is None or used is None else self.rows - used
        return used


@dataclass(slots=True)
class _Step:
    """The running step."""

    begun: bool = False  # something was fetched for it, or has trained
    computed: bool = False  # anything was seen to compute
    lookers: set[Hashable] = field(default_factory=set)  # models in evaluation mode that did, before any trained
    forwards: int = 0  # with gradients
    in_round: bool = False  # one has run, and its backward has not
    sources: set[Hashable] = field(default_factory=set)  # iterators of whose batches the round has taken
    rows: list[int | None] = field(default_factory=list)  # of each micro-step
    own_model: Hashable = None  # whose forwards the rows are, where nothing was fetched
    is_fetched: bool = False  # the rows are a loader's
    updates: Counter[Hashable] = field(default_factory=Counter)
    evaluated: list[int | None] = field(default_factory=list)  # rows of each call that was taken for an evaluation's
    why: str = ""

    def add(self, rows: int | None, *, micro_step: bool, fetched: bool = True) -> None:
        """Add *rows* to the micro-step that runs, or as a *micro_step*; the first *fetched* ones replace others."""
        if fetched and not self.is_fetched:
            self.rows, self.is_fetched = [], True
        if micro_step or not self.rows:
            self.rows.append(rows)
        else:
            last = self.rows[-1]
            self.rows[-1] = None if last is None or rows is None else last + rows


@dataclass(slots=True)
class Depths:
    """How deep the loop is in each kind of call."""

    fetches: int = 0
    forwards: int = 0
    backwards: int = 0
    updates: int = 0
    left_out: int = 0  # what the loop itself says to be of no step
    phases: int = 0  # what it names in a step


@dataclass(slots=True)
class _Known:
    """What is known of the loop, as it says itself or was heard in all steps so far."""

    says_ends: bool = False  # it says itself where its steps end,
    says_outside: bool = False  # and what belongs to none of them,
    says_batches: bool = False  # and what its batches are
    feeders: set[Hashable] = field(default_factory=set)  # iterators and loaders whose batches were trained on
    evaluators: set[Hashable] = field(default_factory=set)  # loaders whose batches models have only looked at
    trainees: set[Hashable] = field(default_factory=set)  # models that were called with gradients
    usual_lookers: set[Hashable] | None = None  # models that have looked first in each step so far
    in_training_mode: bool = False  # a model was called with gradients in it, once
    calls: bool = False  # a model was called


class Steps:
    """The machine of one loop, which updates these *optimizers*; with none of them, steps end where the loop says so.

    Models, optimizers, iterators and loaders are known by any hashable name; nothing of them is held. Each event
    returns what it is, and ``ended`` has the step that ended just before it, until it is taken.
    """

    def __init__(self, optimizers: Iterable[Hashable] = ()) -> None:
        self._optimizers = frozenset(optimizers)
        self.step = _Step()
        self._waiting: list[_Fetched] = []  # what loaders have handed out, and nothing was trained on yet
        self._current: _Fetched | None = None  # what the latest micro-step is of
        self._rest = 0  # rows of earlier batches that no forward got
        self._rest_looker: Hashable = None  # as of the batch that had them
        self.known = _Known()
        self.inside = Depths()
        self.away = False  # for an evaluation, until the loop goes on
        self.ended: StepEnd | None = None

    def is_at_rest(self) -> bool:
        """Whether nothing of the loop runs here, and all that was fetched is used up."""
        is_used_up = self._current is None or not self._current.left
        return self.inside == Depths() and not self._waiting and is_used_up

    # ---- fetches

    def fetch_begins(
        self, source: Hashable, loader: Hashable = None, *, grads: bool = True, training: bool = True
    ) -> Part:
        """The iterator *source* of *loader* is asked for a batch; *training*: a model is in training mode."""
        inside, known = self.inside, self.known
        inside.updates = 0  # no update runs where a batch is asked for: it has raised
        inside.fetches += 1
        if inside.fetches > 1 or inside.left_out:
            return "inner"
        if self.step.updates and self._optimizers and not known.says_ends:
            self._end()
        if source in known.feeders or known.says_outside or inside.phases:
            self.away &= source not in known.feeders
        else:
            for one in self._waiting:  # asked again, though nothing was trained on what it has brought
                if one.looker is not None and one.loader == loader:
                    known.evaluators.add(loader)
            may_train = training or not known.in_training_mode
            self.away = loader in known.evaluators - known.feeders or not (grads and may_train)
        return "outside" if self.away else "step"

    def fetch_ends(
        self,
        source: Hashable,
        rows: int | None = None,
        parts: int = 1,
        *,
        loader: Hashable = None,
        explicit: bool = False,
    ) -> None:
        """It has brought *rows* in *parts* alike tensors; *explicit*: the loop itself says that this is a batch."""
        inside, known = self.inside, self.known
        inside.fetches = max(0, inside.fetches - 1)
        known.says_batches |= explicit
        if inside.fetches or self.away or inside.left_out or explicit < known.says_batches:
            return
        if not self.step.begun:
            self._leave_current()
        self._waiting.append(_Fetched(source, source if loader is None else loader, rows, parts))
        self.step.begun = True

    def fetch_fails(self, source: Hashable = None, *, over: bool = True) -> None:
        """It is *over*, or has raised: what it has brought without feeding a step was for something else."""
        self.inside.fetches = max(0, self.inside.fetches - 1)
        if over and source not in self.known.feeders:
            self._drop({source})

    def _leave_current(self) -> None:
        """No further piece of the latest batch comes: its other rows were handed out, too."""
        current, self._current = self._current, None
        if current is not None and current.left:
            self._rest += current.left
            self._rest_looker = current.looker

    def _drop(self, sources: set[Hashable]) -> None:
        """Nothing will be trained on what waits of *sources*; what was looked at was an evaluation's."""
        for one in [*self._waiting]:
            if one.source in sources:
                self._waiting.remove(one)
                if one.looker is not None:
                    self.known.evaluators.add(one.loader)

    # ---- forwards

    def forward_begins(
        self, model: Hashable, rows: int | None, *, grads: bool = True, training: bool = True, same: bool = False
    ) -> Part:
        """*model* is called with *rows*; *same*: with the very tensor that a forward of this step was called with."""
        inside, known = self.inside, self.known
        inside.forwards += 1
        if inside.left_out:
            return "outside"
        if inside.forwards > 1 or inside.backwards or inside.fetches:
            return "inner"
        known.calls = True
        if not grads:
            return self._look(model, rows, training=training)
        self.away = False
        # Of several optimizers a step ends where a batch is fetched.
        if self.step.updates and (len(self._optimizers) == 1 or not known.feeders):
            self._end_if_complete()
        step, same = self.step, same & (self.ended is None)  # the same as in the step that is over is new to this one
        if not step.forwards and (self._waiting or not known.feeders):
            usual = known.usual_lookers
            known.usual_lookers = step.lookers if usual is None else usual & step.lookers
        known.trainees.add(model)
        known.in_training_mode |= training
        begins = not (same or step.updates) and self._trains(model, rows, starts=not step.in_round)
        step.begun = step.in_round = step.computed = True
        step.forwards += 1
        return "micro-step" if begins else "step"

    def forward_ends(self) -> None:
        """A call of a model is over, or has raised."""
        self.inside.forwards = max(0, self.inside.forwards - 1)

    def _look(self, model: Hashable, rows: int | None, *, training: bool) -> Part:
        """A forward without gradients: a teacher, a rollout or an evaluation."""
        if not self.away:
            self._end_if_complete()
        step, waiting = self.step, self._waiting
        step.computed = True
        if not (self.known.says_outside or self.inside.phases):
            self.away |= not (training or self._is_looked_at_by(model))
            if not (training or step.forwards):
                step.lookers.add(model)
            if len(waiting) == 1 and rows == waiting[0].rows and not step.forwards:  # of two loaders both feed the step
                waiting[0].looker = model
        if self.away:
            step.evaluated.append(rows)
        return "outside" if self.away else "step"

    def _is_looked_at_by(self, model: Hashable) -> bool:
        """Whether a forward of *model* in evaluation mode belongs to the step."""
        usual = model in (self.known.usual_lookers or ())
        if self.step.begun:
            return self.step.forwards > 0 or usual or model not in self.known.trainees
        return usual and not self.known.feeders

    def _trains(self, model: Hashable, rows: int | None, *, starts: bool) -> bool:
        """A forward on new rows; *starts*: the first since a backward. Returns whether a micro-step begins."""
        step, now = self.step, self._current
        if now is not None and rows is not None and rows <= now.left:  # a piece
            now.left -= rows
            step.add(rows, micro_step=starts)
            return starts
        if self.inside.updates and step.rows:  # a closure that is called once more
            return False
        if starts and now is not None and now.parts > 1 and now.rows in (rows, None):  # a part
            now.parts -= 1
            step.add(rows, micro_step=True)
            return True
        if self._take(rows, model, micro_step=starts):
            return starts
        if step.is_fetched:
            if step.evaluated == [rows]:  # what seemed to be for an evaluation may have been for this
                step.why = _DOUBTFUL
            elif starts and now is not None and now.rows is None:
                step.why = "a batch of unknown size was trained in several forwards"
            return False
        if not step.rows:
            step.own_model = model
        elif not starts or model != step.own_model:
            return False
        step.add(rows, micro_step=True, fetched=False)  # after a backward, gradients are accumulated
        return True

    def _take(self, rows: int | None, model: Hashable = None, *, micro_step: bool) -> bool:
        """Take a batch that waits, of other iterators one more each until *rows* are there; whether one was there."""
        step, got = self.step, 0
        waiting = [*self._waiting]
        if waiting and (waiting[0].source != waiting[-1].source or waiting[0].source not in self.known.feeders):
            waiting.sort(key=partial(self._unlikely, rows=rows))  # those of one loader are alike
        for one in waiting:
            if one.source in step.sources or (one.looker is not None and self._was_evaluated(one, rows, got, model)):
                continue
            self._leave_current()
            self._current = one
            self._waiting.remove(one)
            self.known.feeders |= {one.source, one.loader}
            step.sources.add(one.source)
            used = one.use(rows, got)
            step.add(used, micro_step=micro_step)
            micro_step = False  # what follows is of the same one
            if self._rest:  # of the batches before
                step.add(self._rest, micro_step=False)
                step.why = _PARTLY if self._rest_looker == model else step.why
                self._rest = 0
            got += used or 0
            if rows is None or got >= rows:
                return True
        if got and rows is not None and step.evaluated == [rows - got]:
            step.why = _DOUBTFUL
        return got > 0

    def _was_evaluated(self, one: _Fetched, rows: int | None, got: int, model: Hashable) -> bool:
        """Whether *one*, which was looked at, is not what *model* trains on with *rows*, of which it has *got* some."""
        if one.loader in self.known.feeders or rows is None or one.rows is None:
            return False
        if not (got or self.step.is_fetched):  # the step was seen to train on nothing else
            return rows > one.rows
        if one.rows == rows - got and one.looker == model:
            self.step.why = _DOUBTFUL
        return one.rows != rows - got or one.looker == model

    def _unlikely(self, one: _Fetched, rows: int | None) -> tuple[bool, bool, bool]:
        """Of loaders that feed no step so far, what was looked at comes last, and first what has *rows*."""
        is_new = one.source not in self.known.feeders
        return is_new and one.looker is not None, is_new, is_new and one.rows != rows

    # ---- backwards and updates

    def backward_begins(self, *, grad_only: bool = False) -> Part:
        """Autograd is about to run; *grad_only*: it accumulates nothing."""
        self.inside.backwards += 1
        if self.inside.backwards > 1 or self.inside.left_out:
            return "inner"
        self.away, self.step.computed = False, True
        is_blind = not (self.known.calls or grad_only or self.step.updates)  # compiled code has called the model
        return "micro-step" if is_blind and self._take(None, micro_step=True) else "step"

    def backward_ends(self, *, grad_only: bool = False) -> None:
        """Autograd has run, or has raised."""
        self.inside.backwards = max(0, self.inside.backwards - 1)
        if not (self.inside.backwards or self.inside.left_out):
            self.step.in_round &= grad_only
            self.step.sources = self.step.sources if grad_only else set()

    def update_begins(self) -> Part:
        """An optimizer's step begins, perhaps inside of another one's."""
        self.inside.updates += 1
        if self.inside.updates > 1 or self.inside.left_out:
            return "inner"
        self.away = False
        return "step"

    def update_ends(self, optimizer: Hashable, *, later: bool = False) -> Part:
        """It is over, and with it a step of a single optimizer, or *later*: where the next thing begins."""
        self.inside.updates = max(0, self.inside.updates - 1)
        if self.inside.updates or self.inside.left_out:
            return "inner"
        self.step.updates[optimizer] += 1
        self.step.in_round &= self.inside.backwards > 0
        if len(self._optimizers) == 1 and not later:
            self._end_if_complete()
        return "step"

    # ---- ends

    def mark(self, *, updated: bool | None = None) -> None:
        """The loop says that a batch is through, and with it a step if that was *updated*; None: if anything was."""
        step = self.step
        self.known.says_ends, step.in_round, step.sources = True, False, set()
        if updated is None:
            updated = bool(step.updates or not self._optimizers) and bool(step.rows or step.forwards or step.updates)
        if updated:
            self._end()

    def leave_out(self) -> None:
        """What comes belongs to no step, until ``take_in``; calls may nest."""
        if not self.inside.left_out:
            self._end_if_complete()
        self.inside.left_out += 1

    def take_in(self) -> None:
        """End of what the loop left out."""
        self.inside.left_out = max(0, self.inside.left_out - 1)

    def finish(self) -> None:
        """The loop is over."""
        self._end_if_complete()
        known = self.known
        if known.feeders and self.step.updates and self._optimizers and not known.says_ends:
            self._end()

    def _end_if_complete(self) -> None:
        """End the step if every optimizer has made its update."""
        optimizers = self._optimizers
        says_end = self.known.says_ends or self.inside.backwards
        if optimizers and optimizers <= self.step.updates.keys() and not says_end:
            self._end()

    def _end(self) -> None:
        step, known = self.step, self.known
        if not (known.calls or step.rows):
            self._take(None, micro_step=True)  # compiled code has made the whole step
        self.step = _Step()
        self._drop({one.source for one in self._waiting if one.loader not in known.feeders})
        del self._waiting[:-_MOST_AHEAD]
        if not step.rows:
            step.rows, step.why = [None], step.why or "no batch was fetched for a step, and no model called"
        elif not step.is_fetched and len(self._optimizers) > 1 and max(step.updates.values(), default=0) > 1:
            step.why = "no batch was fetched, and an optimizer made several updates in one step"
        elif not step.why and None in step.rows:
            step.why = "the size of a batch is not known"
        self.ended = StepEnd((None,) * len(step.rows) if step.why else tuple(step.rows), step.why)
