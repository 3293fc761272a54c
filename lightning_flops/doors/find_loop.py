"""Finds the training loops of a program that knows nothing of us, and profiles each in all of its turns.

torch tells of every optimizer's step. A search recognizes a loop by them; then the loop gets the door that
``profile_training`` uses. If others take turns than its optimizers (``turns.py`` has the rule), its turn is over, and
the next loop is searched for. A loop that goes on later, with the same optimizers, has a new door, whose session goes
on with what the one before has added up. In between nothing of ours is in place, and nothing holds its model.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from lightning_flops.config import ProfilerConfig
from lightning_flops.doors.loop_search import LoopSearch, objects_of
from lightning_flops.doors.optimizers import updated_by
from lightning_flops.doors.plain_context import Frame, LoopOutput, frame_of
from lightning_flops.doors.plain_loop import PlainLoop
from lightning_flops.doors.several_models import ModelWhileItLives, names_of
from lightning_flops.doors.turns import BACK, MANY_UPDATES, PATIENCE, Company, TakingTurns
from lightning_flops.instrument.border import UndoLedger
from lightning_flops.instrument.optimizer_hooks import OptimizerHooks
from lightning_flops.instrument.patches import Patches
from lightning_flops.instrument.torch_private.autograd import runs_step_in_step
from lightning_flops.schema.profile import Profile
from lightning_flops.session.border import Border, guarded
from lightning_flops.session.outcomes import OUTCOMES
from lightning_flops.session.run_so_far import RunSoFar
from lightning_flops.text.printable import package_logger
from lightning_flops.units import plural

logger = package_logger(__name__)

_ACCELERATORS = (("accelerate.accelerator", "Accelerator"),)
_FABRICS = (("lightning.fabric.fabric", "Fabric"), ("lightning_fabric.fabric", "Fabric"))

_IN_BETWEEN = (
    "{kind}, an optimizer that made no update while this loop was recognized, makes updates in some of its steps now. "
    "What it trains is work outside of the model here, and such steps are not like those before. profile_training can "
    "be given all models and optimizers."
)

_OFTEN = 2
"""After so many visits of other optimizers, the log says that they come."""

_MANY_UPDATES = 20
"""If no loop was recognized after so many updates, it is not because they were too few."""

_MOST_LOOPS = 8
"""Loops of a program that are profiled: each has a report of its own, and makes its program wait for that."""


_IN_TURN = (
    "This loop trains in turn with others. Each of its turns is recognized by its first steps: these are in no figure "
    "but the number of steps whose FLOPs are unknown."
)


@dataclass
class FoundLoop:
    """A loop that was recognized, has its turn, and is profiled."""

    known: KnownLoop
    door: PlainLoop
    optimizers: tuple[Any, ...]
    visitor: str = ""
    """The class of the latest other optimizer that has made an update."""
    visits: int = 0
    """How often it has gone on after updates of others."""


class KnownLoop:
    """A loop that was recognized. It holds neither its model nor its optimizers.

    Args:
        optimizers: in the order of their updates in a step.
        model: what it calls; None: it cannot be profiled.
        output: where its reports go.
    """

    def __init__(
        self, optimizers: tuple[Any, ...], *, model: nn.Module | None = None, output: LoopOutput | None = None
    ) -> None:
        self.name = "" if model is None else " and ".join(names_of(model))
        """The names of its models' classes."""
        self.model = _nothing if model is None else ModelWhileItLives(model)
        """Returns what it calls, if that still exists."""
        self.output = output
        self.said: list[str] = []
        """What was said of its reports."""
        self.why_not = "nothing was profiled"
        """Why there is no report, in words without a full stop."""
        self.turns = 0
        """Turns that were profiled."""
        self.so_far: RunSoFar | None = None
        """What was found in these turns, if it can go on."""
        self.steps = 0
        """Steps that it has made in turns that were not profiled."""
        self._optimizers = weakref.WeakSet(optimizers)
        self._number = len(optimizers)
        self._last = weakref.ref(optimizers[-1])

    def is_of(self, optimizers: tuple[Any, ...]) -> bool:
        """Whether these are its optimizers."""
        return len(optimizers) == self._number and all(self.has(one) for one in optimizers)

    def has(self, optimizer: Any) -> bool:
        """Whether *optimizer* is one of its."""
        return optimizer in self._optimizers

    def ends_step(self, optimizer: Any) -> bool:
        """Whether its steps end with the updates of *optimizer*."""
        return optimizer is self._last()

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """Those that still exist; the one that ends its steps comes last."""
        return tuple(sorted(self._optimizers, key=self.ends_step))

    @property
    def line(self) -> str:
        """What became of the loop, without a full stop."""
        said = f"{self.name}: {self.said[-1] if self.said else self.why_not}".rstrip(".")
        if self.turns > 1:
            said += f" (of {self.turns} turns, of each of which the first steps are in no figure)"
        if self.steps:
            said += f" (and {self.steps} {plural('step', self.steps)} in later turns, which are in no figure)"
        return said

    def write(self) -> None:
        """Write what is known of all its turns, if that is not in its reports."""
        if self.so_far is not None:
            self.so_far.write()
        if self.output is not None:
            self.output.close()


def _nothing() -> None:
    return None


def _threads_of_python() -> set[int | None]:
    """Those that Python has started; others are autograd's."""
    return {one.ident for one in threading.enumerate() if not isinstance(one, threading._DummyThread)}


class LoopFinder:
    """Watches a program's optimizers, and profiles the loops that they belong to, one after the other.

    ``begin`` puts up what it hears by. If our code fails, then or later, everything of ours is removed, and that is
    said once.

    Args:
        config: the settings of the profile.
        log_dir: a folder for TensorBoard's files and ours; None: our own folder, for our files alone.
        announce: says in a sentence where the report is.
        before: the finder of the process that this one was forked from: its loops are not ours.
    """

    def __init__(
        self,
        config: ProfilerConfig,
        *,
        log_dir: str | None,
        announce: Callable[[str], None],
        before: LoopFinder | None = None,
    ) -> None:
        self._config = config
        self._log_dir = log_dir
        self._announce = announce
        self._frameworks: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers of frameworks that have a door of their own: they are left alone."""
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet() if before is None else before._seen
        """Optimizers that have made a step: nobody waits for their first one."""
        self._had_turn: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers of loops that are over."""
        self._known: list[KnownLoop] = []
        self._frameworks_trainings = 0
        """Trainings with a door of their own that had begun when an optimizer last made a step."""
        self._own_trainings = 0
        """Trainings that began with a door from here."""
        self._heard = 0
        """Updates by optimizers that belong neither to a known loop nor to a framework."""
        self._refused = ""
        """Why the latest loop that was not profiled could not be profiled."""
        self.border = Border(take_off=self._take_off, tell=self._tell_failure)
        """Catches what our code raises."""
        self._taps = Patches()
        """On the modules that a search looks at."""
        self._search = self._new_search()
        self._loop: FoundLoop | None = None
        self._of_loop: frozenset[int] = frozenset()
        """The optimizers of the loop that is profiled, which holds them: their ids."""
        self._turn: KnownLoop | None = None
        """The known loop that has its turn; None if none has."""
        self._thread: int | None = None
        """The one whose updates are listened to; None before the first one."""
        self._elsewhere: Counter[int] = Counter()
        """Updates in each other thread since its latest."""
        self._trains_elsewhere = False
        """Another thread has trained at the same time."""
        self._company: Company | None = None
        """Hears of the updates that others make beside the loop or the turn; None if there are no others."""
        self._door: PlainLoop | None = None
        """The latest one, until nothing of it is left."""
        self._failed = ""
        """What our code has raised, in words."""
        self._over: list[KnownLoop | str] = []
        """Loops that had a turn; of others what became of them, in a sentence without a full stop."""
        self._is_full = False
        """No further loop is profiled than those that are known."""
        self._said: list[str] = []
        self._loops = 0
        self.profiles: list[Profile] = []
        """What was measured."""
        self.rank = 0
        """Of this process in the latest loop."""
        self._before = before
        self._loop_before = None if before is None else before._loop
        """It is held, because what it has opened is not ours to close."""
        self._any_optimizer = OptimizerHooks(self._update_begins, self._update_ended, failed=self.border.broke)

    @guarded
    def begin(self) -> None:
        """Hear of the program's optimizers from here on."""
        if self._before is not None:
            self._before.border.close()
        self._any_optimizer.put_up()

    @property
    def reason(self) -> str:
        """Why no loop was profiled; without a full stop."""
        if self._failed:
            return f"the FLOPs profiler failed: {self._failed}"
        if steps := self._search.steps_done or sum(self._search.missed):
            if self._trains_elsewhere:
                return "several threads trained at the same time, and no loop was recognized in the one that is watched"
            if self._heard >= _MANY_UPDATES:
                return (
                    f"no loop was recognized among {self._heard} updates, as where optimizers are made anew for a few "
                    "steps each: profile_training may be put around it"
                )
            return f"training ended after {steps} step(s), while its loop was being recognized"
        if self._refused:
            return self._refused
        if self._frameworks_trainings:
            return "its framework's own door profiles the training"
        return "no optimizer took a step in this process"

    @property
    def is_idle(self) -> bool:
        """Whether no optimizer has made a step."""
        return not (self._seen or self._frameworks)

    @property
    def has_nothing_of_its_loops(self) -> bool:
        """Whether an optimizer made steps, in no framework's training, and no report came of them."""
        return bool(self._heard) and not self.profiles

    @property
    def loops(self) -> tuple[str, ...]:
        """What became of each loop, once all are over; without full stops."""
        return tuple(one if isinstance(one, str) else one.line for one in self._over)

    @property
    def said(self) -> frozenset[str]:
        """The lines that told of the reports of these loops."""
        return frozenset(self._said)

    @guarded
    def end(self, error: BaseException | None) -> None:
        """The program is over, or *error* ends it: report what was measured."""
        self._any_optimizer.remove()
        self._search.stop()
        self._loop_is_over(error)
        for known in self._known:
            known.write()
        self._note_missed(self._search, self._search.steps_done if self._loops else 0)
        if self._trains_elsewhere:
            self._over.append("what other threads trained at the same time is in none of these")

    def _take_off(self) -> None:
        """Remove everything, and report nothing."""
        undo = UndoLedger()
        undo.add(self._any_optimizer.remove)
        undo.add(self._taps.undo)
        undo.add(self._search.stop)
        if self._door is not None:
            undo.add(self._door.border.close)
        undo.close()
        self._loop = self._door = None

    def _tell_failure(self, error: Exception) -> None:
        self._failed = f"{type(error).__name__}: {error}"
        logger.warning(
            "the FLOPs profiler failed, and looks for no loop any more; the program goes on: %s", self._failed
        )

    # ---- torch's hooks; nothing of ours may raise in them

    def _update_begins(self, optimizer: Any, *_: Any) -> None:
        if self._loop is not None or self._turn is not None or self.border.closed or self._is_full:
            return
        try:
            if optimizer in self._frameworks or runs_step_in_step() or self._is_elsewhere():
                return
            if not self._is_frameworks(optimizer):
                self._search.update_begins(optimizer)
        except BaseException as error:
            self.border.broke(error)

    def _update_ended(self, optimizer: Any, *_: Any) -> None:
        if self.border.closed:
            return
        try:
            if self._company is None and id(optimizer) in self._of_loop:
                if self._elsewhere:
                    self._elsewhere.clear()
                return
            self._seen.add(optimizer)
            if optimizer in self._frameworks or runs_step_in_step():
                return  # the optimizer whose step calls another's makes the update
            if id(optimizer) in self._of_loop:
                self._goes_on(optimizer)
            elif self._is_left_alone():
                self._trains_elsewhere = True
            elif self._is_frameworks(optimizer):
                self._loop_is_over(None)
            else:
                self._hears(optimizer)
        except BaseException as error:
            self.border.broke(error)

    def _is_elsewhere(self) -> bool:
        """Whether this is another thread than the one that is listened to, which still trains."""
        thread = threading.get_ident()
        if self._thread in (None, thread) or self._elsewhere[thread] >= MANY_UPDATES:
            return False
        return {self._thread, thread} <= _threads_of_python()

    def _is_left_alone(self) -> bool:
        """An update was made; returns whether in a thread that trains at the same time as the one that is listened to.

        Such loops take no turns, so one thread is listened to until it makes no more updates.
        """
        thread = threading.get_ident()
        if self._thread == thread:
            self._elsewhere.clear()
            return False
        self._elsewhere[thread] += 1
        if self._is_elsewhere():
            return True
        if thread not in _threads_of_python():
            return False  # autograd's: a backward makes updates
        if self._thread is not None:
            self._loop_is_over(None, replaced=True)
            search = self._take_search()
            search.stop()
            self._note_missed(search, search.steps_done)
        self._thread = thread
        self._elsewhere.clear()
        return False

    def _is_frameworks(self, optimizer: Any) -> bool:
        """Whether a training with a door of its own has made this step: then its optimizer is left alone."""
        ours = None if self._loop is None else self._loop.door.session
        known, self._frameworks_trainings = self._frameworks_trainings, len(OUTCOMES.trainings) - self._own_trainings
        running = (session() for session in OUTCOMES.trainings)
        if known == self._frameworks_trainings and not any(
            one is not None and one is not ours and not one.out for one in running
        ):
            return False
        self._frameworks.add(optimizer)
        return True

    def _hears(self, optimizer: Any) -> None:
        """An optimizer that is not of the profiled loop, nor of a framework, has made a step."""
        turn = self._turn
        if turn is not None and turn.has(optimizer):
            turn.steps += turn.ends_step(optimizer)
            if self._company is not None:
                self._goes_on(optimizer)
            return
        self._heard += 1
        if self._loop is None and turn is None:
            self._search_hears(optimizer)
        elif self._another_updates(optimizer):
            self._next_loop_begins()

    def _search_hears(self, optimizer: Any) -> None:
        recognized = self._search.update_ends(optimizer)
        if self._known_loop_begins():
            return
        if self._is_full:
            return
        if self._loops == _MOST_LOOPS:
            self._is_full = True
            self._over.append("further ones were not profiled")
            self._search.stop()
        elif recognized:
            self._open_door(self._take_search())
        elif self._search.refused:
            self._refused = self._search.refused
            self._turn = KnownLoop(self._take_search().optimizers)
            self._known.append(self._turn)

    # ---- whose turn it is

    def _another_updates(self, optimizer: Any) -> bool:
        """*optimizer*, which has no part in the loop that has its turn, has made a step; returns whether it has now."""
        in_step = False
        if self._loop is not None:
            in_step = self._loop.door.another_updates()
            self._loop.visitor = type(optimizer).__name__
        if self._company is None:
            self._company = Company(self._optimizers_of_turn())
        return self._company.another_updates(
            optimizer, in_step=in_step, patience=BACK if optimizer in self._had_turn else PATIENCE
        )

    def _optimizers_of_turn(self) -> tuple[Any, ...]:
        if self._loop is not None:
            return self._loop.optimizers
        return () if self._turn is None else self._turn.optimizers

    def _goes_on(self, optimizer: Any) -> None:
        """*optimizer* of the loop that has its turn has made a step, after some of others."""
        company, loop = self._company, self._loop
        if company is None:
            return
        if loop is not None and company.others_were_last:
            loop.visits += 1
            if loop.visits == _OFTEN:
                loop.door.session.notes.add_for_run(_IN_BETWEEN.format(kind=loop.visitor))
        if company.loop_updates(optimizer):
            self._company = None

    def _next_loop_begins(self) -> None:
        """Other optimizers take turns now: what they have done since then belongs to the next loop."""
        company, turn = self._company, self._turn
        if company is None:
            return
        taken = company.steps(self._optimizers_of_turn()[-1]) if company.joined else 0
        if turn is not None:
            turn.steps -= taken
        self._loop_is_over(None, replaced=True, taken=taken)
        self._search = self._new_search(company.turns)
        self._known_loop_begins()

    def _known_loop_begins(self) -> bool:
        """If those that take turns are the optimizers of a known loop, it has its turn; returns whether that is so."""
        known = next((one for one in self._known if one.is_of(self._search.optimizers)), None)
        if known is None:
            return False
        search = self._take_search()
        search.stop()
        self._note_missed(search)
        so_far, model = known.so_far, known.model()
        if so_far is None or model is None:
            known.steps += search.steps_done
            self._turn = known
        else:
            door = self._begin(known, model, known.optimizers, steps_before=so_far.steps_done + search.steps_done)
            door.session.flops.note(_IN_TURN)
        return True

    # ---- one loop after the other

    def _take_search(self) -> LoopSearch:
        """The search, which has come to its end; another one takes its place."""
        search, self._search = self._search, self._new_search()
        return search

    def _new_search(self, turns: TakingTurns | None = None) -> LoopSearch:
        return LoopSearch(self._seen.__contains__, taps=self._taps, failed=self.border.broke, turns=turns)

    def _open_door(self, search: LoopSearch) -> None:
        model, optimizers, steps_done = search.model(), search.optimizers, search.steps_done
        search.stop()
        self._note_missed(search)
        self._loops += 1
        output = LoopOutput(
            _frame_of(model),
            log_dir=self._log_dir,
            writer=None,
            or_own=True,
            part=f"loop{self._loops}" if self._loops > 1 else "",
        )
        known = KnownLoop(optimizers, model=model, output=output)
        self._begin(known, model, optimizers, steps_before=steps_done)

    def _begin(
        self, known: KnownLoop, model: nn.Module, optimizers: tuple[Any, ...], *, steps_before: int
    ) -> PlainLoop:
        """A turn of a loop begins, of which so many steps were made before."""
        if known.output is None:
            raise ValueError("a loop that cannot be profiled")
        frame, so_far = _frame_of(model), known.so_far
        self.rank = frame.rank
        door = PlainLoop(
            model,
            optimizers,
            config=self._config,
            publish=self.profiles.append,
            frame=frame,
            output=known.output,
            steps_before=steps_before,
            announce=lambda sentence: self._says(sentence, known.said),
            so_far=so_far,
            thread=self._thread,
        )
        self._door = door
        known.so_far = None
        known.turns += 1
        self._loop = FoundLoop(known=known, door=door, optimizers=optimizers)
        self._of_loop = frozenset(map(id, optimizers))
        if so_far is None:
            for sentence in _sentences(model, names_of(model), optimizers):
                door.session.notes.add_for_run(sentence)
        before = len(OUTCOMES.trainings)
        door.session.begin()
        self._own_trainings += len(OUTCOMES.trainings) - before
        return door

    def _says(self, sentence: str, said: list[str]) -> None:
        said.append(sentence)
        self._said.append(sentence)
        self._announce(sentence)

    def _loop_is_over(self, error: BaseException | None, *, replaced: bool = False, taken: int = 0) -> None:
        """The loop that had its turn has it no more: report what was measured of it, if it was profiled.

        The arguments are those of its door's ``end``.
        """
        loop, self._loop, self._of_loop = self._loop, None, frozenset()
        self._turn = self._company = None
        if loop is None:
            return
        known, unsaid = loop.known, len(OUTCOMES.reasons)
        self._had_turn.update(loop.optimizers)
        if known.turns == 1:
            self._known.append(known)
            self._over.append(known)
        loop.door.end(error, replaced=replaced, taken=taken)
        self._door = None
        known.so_far = loop.door.session.so_far()
        if unsaid < len(OUTCOMES.reasons):
            known.why_not = f"nothing was profiled: {OUTCOMES.reasons[-1]}"

    def _note_missed(self, search: LoopSearch, *unfinished: int) -> None:
        for steps in () if self._is_full else (*search.missed, *filter(None, unfinished)):
            self._over.append(f"one of {steps} {plural('step', steps)}, too short to be recognized, was not profiled")


def _sentences(model: nn.Module, names: list[str], optimizers: tuple[Any, ...]) -> list[str]:
    """What a report says of a model that nobody has named."""
    kinds = list(dict.fromkeys(type(one).__name__ for one in optimizers))
    updating = f"{' and '.join(kinds)} {'updates' if len(kinds) == 1 else 'update'}"
    if len(names) == 1:
        sentences = [
            f"The program said nothing of its model: {names[0]} is the module that its loop calls, and whose "
            f"parameters {updating}."
        ]
    else:
        sentences = [
            f"The program said nothing of its models: {' and '.join(names)} are the modules that its loop calls, and "
            f"whose parameters {updating}. The report is of all of them."
        ]
    updated = {one for each in optimizers for one in updated_by(each)}
    outside = len(updated - {id(one) for one in model.parameters()})
    if outside:
        sentences.append(
            f"{outside} of the {len(updated)} tensors that are updated belong to no module: what those compute is in "
            "the FLOPs, as work outside of the model, and they are not among the parameters of the report."
        )
    return sentences


def _frame_of(model: nn.Module) -> Frame:
    """The frame of a loop that trains *model*, of accelerate or Fabric if there is one."""
    accelerator = _one_of(_ACCELERATORS)
    fabric = _one_of(_FABRICS) if accelerator is None else None
    return frame_of(model, accelerator=accelerator, fabric=fabric)


def _one_of(names: tuple[tuple[str, str], ...]) -> Any:
    """An object of one of these classes, named by module and name; None where there is none."""
    kinds = [getattr(sys.modules.get(module), name, None) for module, name in names]
    classes = [kind for kind in kinds if isinstance(kind, type)]
    return next(iter(objects_of(*classes)), None) if classes else None
