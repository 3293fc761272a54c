"""Finds the training loops of a program that knows nothing of us, and profiles each.

torch tells of every optimizer's step. A search recognizes a loop by them; then the loop gets the door that
``profile_training`` uses. If other optimizers go on without it, the loop is over, and the next one is searched for.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_flops.config import ProfilerConfig
from lightning_flops.doors.loop_search import PATIENCE, LoopSearch, objects_of, parameters_of
from lightning_flops.doors.plain_context import LoopOutput, frame_of
from lightning_flops.doors.plain_loop import PlainLoop
from lightning_flops.doors.several_models import names_of
from lightning_flops.instrument.optimizer_hooks import OptimizerHooks
from lightning_flops.schema.profile import Profile
from lightning_flops.session.outcomes import OUTCOMES
from lightning_flops.text.printable import package_logger
from lightning_flops.units import plural

logger = package_logger(__name__)

_ACCELERATORS = (("accelerate.accelerator", "Accelerator"),)
_FABRICS = (("lightning.fabric.fabric", "Fabric"), ("lightning_fabric.fabric", "Fabric"))

_BACK = 2
"""Steps in a row after which a loop that had been over is taken to have its turn again."""

_IN_BETWEEN = (
    "{kind}, an optimizer that made no update while this loop was recognized, makes updates in its steps now. What it "
    "trains is work outside of the model here, and such steps are others than those before. profile_training can be "
    "given all models and optimizers."
)

_MANY_UPDATES = 20
"""Updates after which it is not for their number that no loop was recognized."""

_MOST_LOOPS = 8
"""Loops of a program that are profiled: each has a report of its own, and makes its program wait for that."""


@dataclass
class FoundLoop:
    """A loop that was recognized."""

    name: str
    """Of its models' classes."""
    door: PlainLoop
    optimizers: tuple[Any, ...]
    said: list[str] = field(default_factory=list)
    """What was said of its reports."""


class LoopFinder:
    """Watches a program's optimizers, and profiles the loops that they belong to, one after the other.

    Args:
        config: the settings of the profile.
        log_dir: a folder for TensorBoard's files and ours; None: our own folder, for our files alone.
        announce: says in a sentence where the report is.
    """

    def __init__(self, config: ProfilerConfig, *, log_dir: str | None = None, announce: Callable[[str], None]) -> None:
        self._config = config
        self._log_dir = log_dir
        self._announce = announce
        self._in_update = False
        self._left_alone: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers of loops that are over, and of frameworks that have a door of their own."""
        self._seen: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers that have made a step: nobody waits for their first one."""
        self._had_turn: weakref.WeakSet[Any] = weakref.WeakSet()
        """Optimizers of loops that are over."""
        self._goes_on: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """The optimizers that end the steps of loops that are over and were reported: which of ``_over`` is theirs."""
        self._later_steps: dict[int, int] = {}
        """Steps that these loops have made since, by the same number."""
        self._frameworks_trainings = 0
        """Trainings with a door of their own that had begun when an optimizer last made a step."""
        self._own_trainings = 0
        """Trainings that began with a door from here."""
        self._heard = 0
        """Updates by optimizers of no known loop, nor of a framework."""
        self._refused = ""
        """Why the latest loop that was not profiled could not be."""
        self._search = LoopSearch(self._seen.__contains__)
        self._unheard: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        """Steps of optimizers while another loop was not over yet: the search has not heard of them."""
        self._loop: FoundLoop | None = None
        self._of_loop: frozenset[int] = frozenset()
        """The optimizers of the loop that is profiled, which holds them: their ids."""
        self._strangers = 0
        """Steps in a row that other optimizers have made since."""
        self._stranger = ""
        """The class of the latest of these."""
        self._in_between = 0
        """How often the loop has gone on after such steps."""
        self._given_up = ""
        self._over: list[str] = []
        """What became of loops that are over, in a sentence without a full stop."""
        self._said: list[str] = []
        self._loops = 0
        self.profiles: list[Profile] = []
        """What was measured."""
        self._any_optimizer = OptimizerHooks(self._update_begins, self._update_ended, failed=self._fail)
        self._any_optimizer.put_up()

    @property
    def reason(self) -> str:
        """Why no loop was profiled; without a full stop."""
        if self._given_up:
            return self._given_up
        if steps := self._search.steps_done or sum(self._search.missed):
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
        return "no optimizer took a step"

    @property
    def loops(self) -> tuple[str, ...]:
        """What became of each loop, once all are over; without full stops."""
        return tuple(line + self._in_later_turns(place) for place, line in enumerate(self._over))

    def _in_later_turns(self, place: int) -> str:
        """What is said of the steps that a loop made after its report."""
        steps = self._later_steps.get(place, 0)
        return f" (and {steps} {plural('step', steps)} in later turns, which are in no figure)" if steps else ""

    @property
    def said(self) -> frozenset[str]:
        """The lines that told of the reports of these loops."""
        return frozenset(self._said)

    def end(self, error: BaseException | None) -> None:
        """The program is over, or *error* ends it: report what was measured."""
        self._any_optimizer.remove()
        self._search.stop()
        self._loop_is_over(error)
        self._note_missed(self._search)
        if self._loops and (steps := self._search.steps_done):
            self._over.append(f"one of {steps} {plural('step', steps)}, too short to be recognized, was not profiled")

    # ---- torch's hooks; nothing of ours may raise in them

    def _update_begins(self, optimizer: Any, *_: Any) -> None:
        # The hooks fire twice if a subclass's step calls its parent's: we hear the outer begin and the inner end.
        again, self._in_update = self._in_update, True
        if again:
            return
        of_loop = id(optimizer) in self._of_loop
        if self._given_up or (self._loop is not None and not (of_loop and self._strangers)):
            return
        try:
            if of_loop:
                self._stranger_was_in_between()
            elif optimizer not in self._left_alone and not self._is_frameworks(optimizer):
                self._search.update_begins(optimizer)
        except Exception as error:
            self._fail(error)

    def _update_ended(self, optimizer: Any, *_: Any) -> None:
        again, self._in_update = not self._in_update, False
        if again or id(optimizer) in self._of_loop:
            return
        try:
            if (place := self._goes_on.get(optimizer)) is not None:
                self._later_steps[place] = self._later_steps.get(place, 0) + 1
            if self._given_up:
                return
            self._seen.add(optimizer)
            if optimizer not in self._left_alone:
                self._looks_at(optimizer)
            elif optimizer in self._had_turn:  # of a loop that is not profiled again
                self._goes_on_without_loop(optimizer, _BACK)
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._given_up = f"the FLOPs profiler failed: {type(error).__name__}: {error}"
        self._search.stop()

    def _is_frameworks(self, optimizer: Any) -> bool:
        """Whether a training with a door of its own has made this step: then its optimizer is left alone."""
        ours = None if self._loop is None else self._loop.door.session
        known, self._frameworks_trainings = self._frameworks_trainings, len(OUTCOMES.trainings) - self._own_trainings
        running = (session() for session in OUTCOMES.trainings)
        if known == self._frameworks_trainings and not any(
            one is not None and one is not ours and not one.out for one in running
        ):
            return False
        self._left_alone.add(optimizer)
        return True

    def _looks_at(self, optimizer: Any) -> None:
        """An optimizer has made a step that belongs to no known loop."""
        if self._is_frameworks(optimizer):
            self._loop_is_over(None)
            return
        self._heard += 1
        if not self._goes_on_without_loop(optimizer, _BACK if optimizer in self._had_turn else PATIENCE):
            self._unheard[optimizer] = self._unheard.get(optimizer, 0) + 1
            return
        if self._loops == _MOST_LOOPS:
            self._given_up = f"only the first {_MOST_LOOPS} loops of a program are profiled"
            self._over.append("further ones were not profiled")
        elif self._search.update_ends(optimizer):
            self._open_door(self._take_search())
        elif self._search.refused:
            self._refused = self._search.refused
            self._left_alone.update(self._take_search().optimizers)

    def _stranger_was_in_between(self) -> None:
        """The loop goes on after another optimizer's updates, which may be a part of it that was not there before."""
        self._strangers = 0
        self._in_between += 1
        if self._in_between == _BACK and self._loop is not None:
            self._loop.door.session.notes.add_for_run(_IN_BETWEEN.format(kind=self._stranger))

    def _goes_on_without_loop(self, optimizer: Any, patience: int) -> bool:
        """*optimizer*, which is not of the profiled loop, has made a step; returns whether no loop is profiled now."""
        if self._loop is None:
            return True
        self._loop.door.another_updates()
        self._strangers += 1
        self._stranger = type(optimizer).__name__
        if self._strangers < patience:
            return False
        self._loop_is_over(None, replaced=True)
        return True

    # ---- one loop after the other

    def _take_search(self) -> LoopSearch:
        """The search, which has come to its end; another one takes its place."""
        search, self._search = self._search, LoopSearch(self._seen.__contains__)
        return search

    def _open_door(self, search: LoopSearch) -> None:
        model, optimizers, steps_done = search.model(), search.optimizers, search.steps_done
        search.stop()
        self._note_missed(search)
        steps_done += self._unheard.get(optimizers[-1], 0)
        self._unheard.clear()
        self._loops += 1
        accelerator = _one_of(_ACCELERATORS)
        fabric = _one_of(_FABRICS) if accelerator is None else None
        frame = frame_of(model, accelerator=accelerator, fabric=fabric)
        output = LoopOutput(
            frame,
            log_dir=self._log_dir,
            writer=None,
            or_own=True,
            part=f"loop{self._loops}" if self._loops > 1 else "",
        )
        said: list[str] = []
        door = PlainLoop(
            model,
            optimizers,
            config=self._config,
            publish=self.profiles.append,
            frame=frame,
            output=output,
            steps_before=steps_done,
            announce=lambda sentence: self._says(sentence, said),
        )
        models = names_of(model)
        self._loop = FoundLoop(name=" and ".join(models), door=door, optimizers=optimizers, said=said)
        self._of_loop = frozenset(map(id, optimizers))
        self._strangers = self._in_between = 0
        for sentence in _sentences(model, models, optimizers):
            door.session.notes.add_for_run(sentence)
        before = len(OUTCOMES.trainings)
        door.session.begin()
        self._own_trainings += len(OUTCOMES.trainings) - before

    def _says(self, sentence: str, said: list[str]) -> None:
        said.append(sentence)
        self._said.append(sentence)
        self._announce(sentence)

    def _loop_is_over(self, error: BaseException | None, *, replaced: bool = False) -> None:
        """Report what was measured of the loop that is profiled; the arguments are those of its door's ``end``."""
        loop, self._loop, self._of_loop = self._loop, None, frozenset()
        if loop is None:
            return
        self._had_turn.update(loop.optimizers)
        unsaid = len(OUTCOMES.reasons)
        loop.door.end(error, replaced=replaced)
        if loop.said:  # otherwise it may have its turn again, and be long enough then
            self._left_alone.update(loop.optimizers)
            self._goes_on[loop.optimizers[-1]] = len(self._over)
        said = loop.said or ["nothing was profiled: " + reason for reason in OUTCOMES.reasons[unsaid:]]
        self._over.append(f"{loop.name}: {said[-1] if said else 'nothing was profiled'}".rstrip("."))

    def _note_missed(self, search: LoopSearch) -> None:
        for steps in search.missed:
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
    updated = {one for each in optimizers for one in parameters_of(each)}
    outside = len(updated - {id(one) for one in model.parameters()})
    if outside:
        sentences.append(
            f"{outside} of the {len(updated)} tensors that are updated belong to no module: what those compute is in "
            "the FLOPs, as work outside of the model, and they are not among the parameters of the report."
        )
    return sentences


def _one_of(names: tuple[tuple[str, str], ...]) -> Any:
    """An object of one of these classes, named by module and name; None where there is none."""
    kinds = [getattr(sys.modules.get(module), name, None) for module, name in names]
    classes = [kind for kind in kinds if isinstance(kind, type)]
    return next(iter(objects_of(*classes)), None) if classes else None
