"""What a loop's events mean: where a batch begins, where a step ends, and what belongs to no step. No torch, no clock.

Events come in the order in which they are seen. docs/loops.md has the rules; what they cannot know is never a guess.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from enum import Enum

_MOST_AHEAD = 2  # batches that stay fetched ahead from step to step; a loop that skips some at a resume leaves more


class Part(Enum):
    """What an event is to the loop's steps."""

    MICRO_STEP = "micro-step"  #: Samples begin: a fetched batch, a piece of one, or what the model is called with.
    STEP = "step"  #: Something else of the step.
    OUTSIDE = "outside"  #: Of no step: an evaluation.
    INNER = "inner"  #: Inside of another part.


@dataclass(frozen=True, slots=True)
class StepEnd:
    """A step that is over."""

    rows: tuple[int | None, ...]  #: Samples of each micro-step; at least one.
    why: str = ""  #: Why the samples are not known, if they are not.


@dataclass(frozen=True, slots=True)
class Decision:
    """What an event is, and the step that ended just before it."""

    part: Part = Part.STEP
    ended: StepEnd | None = None


@dataclass(slots=True)
class _Fetched:
    """A batch that a loader has handed out."""

    source: Hashable
    loader: Hashable
    rows: int | None
    parts: int  # alike elements of a list, of which each may be a batch of its own
    left: int = 0  # rows that nothing was trained on so far
    looked: bool = False  # a model has looked at it before anything trained


@dataclass(slots=True)
class _Step:
    """The running step."""

    begun: bool = False  # something was fetched for it, or has trained
    looked: bool = False  # a forward without gradients came first
    computed: bool = False  # anything was seen to compute
    lookers: set[Hashable] = field(default_factory=set)  # models in evaluation mode that did, before any trained
    forwards: int = 0  # with gradients
    in_round: bool = False  # one has run, and its backward has not
    sources: set[Hashable] = field(default_factory=set)  # iterators of whose batches the round has taken
    rows: list[int | None] = field(default_factory=list)  # of each micro-step
    own_model: Hashable = None  # whose forwards the rows are, where nothing was fetched
    is_fetched: bool = False  # the rows are a loader's
    updates: Counter[Hashable] = field(default_factory=Counter)
    looked_rows: set[int | None] = field(default_factory=set)  # of evaluations since the step before
    why: str = ""

    def add(self, rows: int | None, *, micro_step: bool) -> None:
        """Add *rows* to the micro-step that runs, or as a *micro_step*."""
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
class Says:
    """What the loop itself says, so that it is not read from its events."""

    ends: bool = False  # where its steps end
    outside: bool = False  # what belongs to none of them
    batches: bool = False  # what its batches are


@dataclass(slots=True)
class _Heard:
    """What was heard so far, in all steps."""

    feeders: set[Hashable] = field(default_factory=set)  # iterators and loaders whose batches were trained on
    looked_at: set[Hashable] = field(default_factory=set)  # and those whose batches a model has only looked at
    latest: Hashable = None  # iterator that was asked
    trainees: set[Hashable] = field(default_factory=set)  # models that were called with gradients
    usual_lookers: set[Hashable] | None = None  # models that have looked first in each step so far
    in_training_mode: bool = False  # a model was called with gradients in it, once
    calls: bool = False  # a model was called


@dataclass(slots=True)
class _Rows:
    """What loaders have handed out, and nothing was trained on yet."""

    waiting: list[_Fetched] = field(default_factory=list)
    current: _Fetched | None = None  # what the latest micro-step is of
    rest: int = 0  # rows of earlier batches that no forward got
    evaluated: _Fetched | None = None  # what a model that does not train has looked at since the latest step

    def leave_current(self) -> None:
        """No further piece of the latest batch comes: its other rows were handed out, too."""
        if self.current is not None:
            self.rest += self.current.left
            self.current = None


class Steps:
    """The machine of one loop, which updates these *optimizers*; with none of them, steps end where the loop says so.

    Models, optimizers, iterators and loaders are known by any hashable name; nothing of them is held.
    """

    def __init__(self, optimizers: Iterable[Hashable] = ()) -> None:
        self._optimizers = frozenset(optimizers)
        self._step = _Step()
        self._rows = _Rows()
        self._heard = _Heard()
        self.says = Says()
        self.inside = Depths()
        self.away = False  # for an evaluation, until the loop goes on

    @property
    def outside(self) -> bool:
        """Whether what runs now belongs to no step."""
        return self.away or self.inside.left_out > 0

    @property
    def leaves_out(self) -> bool:
        """Whether it does not because the loop says so."""
        return self.inside.left_out > 0

    @property
    def is_inside(self) -> bool:
        """Whether a call of a model now would be a part of something else."""
        return self.inside.forwards + self.inside.backwards + self.inside.fetches + self.inside.left_out > 0

    @property
    def awaits_backward(self) -> bool:
        """Whether a model was called with gradients, and autograd has not run since."""
        return self._step.in_round and not self.inside.left_out

    def is_fed_by(self, source: Hashable) -> bool:
        """Whether steps were trained on batches of *source*."""
        return source in self._heard.feeders

    @property
    def fetches(self) -> bool:
        """Whether steps were trained on fetched batches."""
        return bool(self._heard.feeders)

    @property
    def has_begun(self) -> bool:
        """Whether anything of the running step was seen to compute."""
        return self._step.computed

    @property
    def is_blind(self) -> bool:
        """Whether no model was ever called: compiled code may hide its calls."""
        return not self._heard.calls

    # ---- fetches

    def fetch_begins(
        self, source: Hashable, loader: Hashable = None, *, grads: bool = True, training: bool = True
    ) -> Decision:
        """The iterator *source* of *loader* is asked for a batch; *training*: a model is in training mode."""
        self.inside.updates = 0  # no update runs where a batch is asked for: it has raised
        self.inside.fetches += 1
        if self.inside.fetches > 1 or self.inside.left_out:
            return Decision(Part.INNER)
        ended = self._end() if self._step.updates and self._ends_by_itself else None
        # A new iterator of a loader that feeds steps begins an epoch; asked again before it fed one, it evaluates.
        is_known = source in self._heard.feeders or (loader in self._heard.feeders and source != self._heard.latest)
        self._heard.latest = source
        if self.says.outside or self.inside.phases:
            self.away &= not is_known
        else:
            is_looked_at = self._is_looked_at(source, loader) and not is_known
            may_train = is_known or training or not self._heard.in_training_mode
            self.away = is_looked_at or not (grads and may_train)
        return Decision(Part.OUTSIDE if self.away else Part.STEP, ended)

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
        self.inside.fetches = max(0, self.inside.fetches - 1)
        self.says.batches |= explicit
        if self.inside.fetches or self.outside or explicit < self.says.batches:
            return
        if not self._step.begun:
            self._rows.leave_current()
        self._rows.waiting.append(_Fetched(source, source if loader is None else loader, rows, parts))
        self._step.begun = True

    def _is_looked_at(self, source: Hashable, loader: Hashable) -> bool:
        """Whether batches of *source* or *loader* were only looked at; all that were, before anything trains."""
        if self._step.looked and not self._heard.trainees:
            self._look_at_waiting()
        return not self._heard.looked_at.isdisjoint((source, loader))

    def _look_at_waiting(self) -> None:
        """What waits was looked at, so that its loader may be one for evaluations."""
        for one in self._rows.waiting:
            one.looked = True
            self._heard.looked_at |= {one.source, one.loader}
        self._step.looked = self._step.begun = False

    def fetch_fails(self, source: Hashable = None) -> None:
        """It is at its end, or has raised: what it has brought without feeding a step was for something else."""
        self.inside.fetches = max(0, self.inside.fetches - 1)
        if source is not None and source not in self._heard.feeders:
            self._rows.waiting = [one for one in self._rows.waiting if one.source != source]

    def expect(self, source: Hashable) -> None:
        """The loop says that *source* feeds its steps."""
        self._heard.feeders.add(source)

    # ---- forwards

    def forward_begins(
        self, model: Hashable, rows: int | None, *, grads: bool = True, training: bool = True, same: bool = False
    ) -> Decision:
        """*model* is called with *rows*; *same*: with the very tensor that a forward of this step was called with."""
        self.inside.forwards += 1
        if self.inside.left_out:
            return Decision(Part.OUTSIDE)
        if self.inside.forwards > 1 or self.inside.backwards or self.inside.fetches:
            return Decision(Part.INNER)
        self._heard.calls = True
        if not grads:
            return self._look(model, rows, training=training)
        self.away = False
        ended = self._end() if self._is_complete and not self._ends_at_fetch else None
        step = self._step
        if not step.forwards and (self._rows.waiting or not self._heard.feeders):
            usual = self._heard.usual_lookers
            self._heard.usual_lookers = step.lookers if usual is None else usual & step.lookers
        self._heard.trainees.add(model)
        self._heard.in_training_mode |= training
        begins = not (same or step.updates) and self._trains(model, rows, starts=not step.in_round)
        step.begun = step.in_round = step.computed = True
        step.forwards += 1
        return Decision(Part.MICRO_STEP if begins else Part.STEP, ended)

    def forward_ends(self) -> None:
        """A call of a model is over, or has raised."""
        self.inside.forwards = max(0, self.inside.forwards - 1)

    def _look(self, model: Hashable, rows: int | None, *, training: bool) -> Decision:
        """A forward without gradients: a teacher, a rollout or an evaluation."""
        ended = self._end() if self._is_complete and not self.away else None
        step = self._step
        step.computed = True
        step.looked |= not training or step.begun
        if self.says.outside or self.inside.phases:
            return Decision(self._looked_at(rows), ended)
        if not (training or step.forwards):
            step.lookers.add(model)
        evaluates = not (training or self._is_looked_at_by(model))
        if self._rows.waiting and (self._heard.feeders or evaluates) and not (step.forwards or self._is_fed):
            self._look_at_waiting()  # of a loader that never fed a step
            self._rows.evaluated = self._rows.waiting[-1] if model not in self._heard.trainees else None
            self._rows.waiting, evaluates = [], True
        self.away |= evaluates
        return Decision(self._looked_at(rows), ended)

    def _looked_at(self, rows: int | None) -> Part:
        """What a forward without gradients on *rows* is."""
        if not self.away:
            return Part.STEP
        self._step.looked_rows.add(rows)
        return Part.OUTSIDE

    def _is_looked_at_by(self, model: Hashable) -> bool:
        """Whether a forward of *model* in evaluation mode belongs to the step."""
        usual = model in (self._heard.usual_lookers or ())
        if self._step.begun:
            return self._step.forwards > 0 or usual or model not in self._heard.trainees
        return usual and not self._heard.feeders

    @property
    def _is_fed(self) -> bool:
        return any(one.loader in self._heard.feeders for one in self._rows.waiting)

    def _trains(self, model: Hashable, rows: int | None, *, starts: bool) -> bool:
        """A forward on new rows; *starts*: the first since a backward. Returns whether a micro-step begins."""
        step, now = self._step, self._rows.current
        if now is not None and rows is not None and rows <= now.left:  # a piece
            now.left -= rows
            self._add_fetched(rows, micro_step=starts)
            return starts
        if self.inside.updates and step.rows:  # a closure that is called once more
            return False
        if starts and now is not None and now.parts > 1 and now.rows in (rows, None):  # a part
            now.parts -= 1
            self._add_fetched(rows, micro_step=True)
            return True
        if self._take(rows, micro_step=starts):
            if model in step.lookers and (step.rows[-1] or 0) < (rows or 0):
                step.why = "the model was evaluated on a batch, and then trained on more samples than that has"
            return starts
        return (
            self._trains_once_more(now, rows, starts=starts)
            if step.is_fetched
            else self._trains_alone(model, rows, starts=starts)
        )

    def _trains_once_more(self, now: _Fetched | None, rows: int | None, *, starts: bool) -> bool:
        """A forward on what was fetched already, as *now* was; no micro-step begins."""
        step = self._step
        if starts and now is not None and now.rows is None:
            step.why = "a batch of unknown size was trained in several forwards"
        if rows in step.looked_rows and now is not None and rows != now.rows:
            step.why = "a batch may have been trained on that was taken for one of an evaluation"
        return False

    def _trains_alone(self, model: Hashable, rows: int | None, *, starts: bool) -> bool:
        """A forward in a step for which nothing was fetched: after a backward, gradients are accumulated."""
        step, evaluated = self._step, self._rows.evaluated
        if not step.rows:
            step.own_model = model
            self._heard.looked_at.clear()  # it may be what was looked at
            if evaluated is not None and self._heard.feeders and evaluated.rows == rows:
                self._heard.feeders |= {evaluated.source, evaluated.loader}  # by a teacher
        elif not starts or model != step.own_model:
            return False
        step.add(rows, micro_step=True)
        return True

    def _add_fetched(self, rows: int | None, *, micro_step: bool) -> None:
        step = self._step
        if not step.is_fetched:
            step.rows, step.is_fetched = [], True
        step.add(rows, micro_step=micro_step)

    def _take(self, rows: int | None, *, micro_step: bool) -> bool:
        """Take a batch that waits, of other iterators one more each until *rows* are there; whether one was there."""
        step, got = self._step, 0
        for one in self._by_likelihood(rows):
            if one.source in step.sources or (one.looked and (got or one.rows != rows)):
                continue
            if one.parts == rows != one.rows:  # its parts were samples
                one.rows, one.parts = rows, 1
            self._rows.leave_current()
            self._rows.waiting.remove(one)
            self._heard.feeders |= {one.source, one.loader}
            step.sources.add(one.source)
            used = rows if one.rows is None else one.rows if rows is None else min(one.rows, rows - got)
            one.left = 0 if one.rows is None or used is None else one.rows - used
            self._rows.current = one
            self._add_fetched(used, micro_step=micro_step and not got)
            step.add(self._rows.rest, micro_step=False)  # of the batches before
            self._rows.rest = 0
            got += used or 0
            if one.rows is None or rows is None or got >= rows:
                return True
        return got > 0

    def _by_likelihood(self, rows: int | None) -> list[_Fetched]:
        """What waits: of loaders that feed steps, and what nothing looked at first, of others first what has *rows*."""

        def unlikely(one: _Fetched) -> tuple[bool, bool, bool]:
            is_new = one.source not in self._heard.feeders
            return one.looked, is_new, is_new and one.rows != rows

        waiting = [*self._rows.waiting]
        if len(waiting) > 1:
            waiting.sort(key=unlikely)
        return waiting

    # ---- backwards and updates

    def backward_begins(self, *, grad_only: bool = False) -> Decision:
        """Autograd is about to run; *grad_only*: it accumulates nothing."""
        if self.inside.left_out:
            return Decision(Part.OUTSIDE)
        self.away = False
        self.inside.backwards += 1
        if self.inside.backwards > 1:
            return Decision(Part.INNER)
        step, ended = self._step, None
        step.computed = True
        if self._is_complete and not (step.in_round or self.inside.updates or self._heard.feeders):
            ended = self._end()
        if self.is_blind and not (grad_only or step.updates) and self._take(None, micro_step=True):
            return Decision(Part.MICRO_STEP, ended)
        return Decision(Part.STEP, ended)

    def backward_ends(self, *, grad_only: bool = False) -> None:
        """Autograd has run, or has raised."""
        if self.inside.left_out:
            return
        self.inside.backwards = max(0, self.inside.backwards - 1)
        if not self.inside.backwards:
            self._step.in_round &= grad_only
            self._step.sources = self._step.sources if grad_only else set()

    def update_begins(self) -> Decision:
        """An optimizer's step begins, perhaps inside of another one's."""
        self.away &= self.inside.left_out > 0
        self.inside.updates += 1
        return Decision(Part.STEP if self.inside.updates == 1 else Part.INNER)

    def update_ends(self, optimizer: Hashable, *, later: bool = False) -> Decision:
        """It is over, and with it a step of a single optimizer, or *later*: where the next thing begins."""
        self.inside.updates = max(0, self.inside.updates - 1)
        if self.inside.updates or self.inside.left_out:
            return Decision(Part.INNER)
        self._step.updates[optimizer] += 1
        self._step.in_round &= self.inside.backwards > 0
        ends_here = len(self._optimizers) == 1 and self._is_complete and not later
        return Decision(Part.STEP, self._end() if ends_here else None)

    # ---- ends

    def mark(self, *, updated: bool | None = None) -> Decision:
        """The loop says that a batch is through, and with it a step if that was *updated*; None: if anything was."""
        step = self._step
        self.says.ends, step.in_round, step.sources = True, False, set()
        if updated is None:
            updated = bool(step.updates or not self._optimizers) and bool(step.rows or step.forwards or step.updates)
        return Decision(Part.STEP, self._end() if updated else None)

    def leave_out(self) -> Decision:
        """What comes belongs to no step, until ``take_in``; calls may nest."""
        ended = self._end() if self._is_complete and not self.inside.left_out else None
        self.inside.left_out += 1
        return Decision(Part.OUTSIDE, ended)

    def take_in(self) -> None:
        """End of what the loop left out."""
        self.inside.left_out = max(0, self.inside.left_out - 1)

    def finish(self) -> Decision:
        """The loop is over."""
        is_over = self._is_complete or (self._heard.feeders and self._step.updates and self._ends_by_itself)
        return Decision(Part.STEP, self._end() if is_over else None)

    @property
    def _ends_by_itself(self) -> bool:
        return bool(self._optimizers) and not self.says.ends

    @property
    def _ends_at_fetch(self) -> bool:
        """Whether a step of several optimizers ends where a batch is fetched, and not where a model is called."""
        return bool(self._heard.feeders) and len(self._optimizers) > 1

    @property
    def _is_complete(self) -> bool:
        """Whether every optimizer has made its update."""
        updated = self._optimizers and self._optimizers <= self._step.updates.keys()
        return bool(updated) and not (self.says.ends or self.inside.backwards)

    def _end(self) -> StepEnd:
        step = self._step
        if self.is_blind and not step.rows:
            self._take(None, micro_step=True)  # compiled code has made the whole step
        self._step, self._rows.evaluated = _Step(), None
        self._rows.waiting = [one for one in self._rows.waiting if one.loader in self._heard.feeders][-_MOST_AHEAD:]
        if self._rows.waiting:
            self._rows.leave_current()
        if self._rows.current is not None:
            self._rows.current.parts = 1
        if not step.rows:
            return StepEnd((None,), step.why or "no batch was fetched for a step, and no model called")
        if not step.is_fetched and len(self._optimizers) > 1 and max(step.updates.values(), default=0) > 1:
            step.why = "no batch was fetched, and an optimizer made several updates in one step"
        if not step.why and None in step.rows:
            step.why = "the size of a batch is not known"
        return StepEnd((None,) * len(step.rows) if step.why else tuple(step.rows), step.why)
