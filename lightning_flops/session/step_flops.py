"""What the steps of one run spend, and which further steps are worth counting to know it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter
from typing import TYPE_CHECKING

from lightning_flops.analysis.flops_law import step_law
from lightning_flops.analysis.idle_values import IdleValues
from lightning_flops.analysis.run_books import RunFlops
from lightning_flops.analysis.step_keys import StepKey, without_lengths
from lightning_flops.analysis.step_laws import (
    MORE,
    NOT_COUNTED,
    OTHERS_TRAIN,
    StepLaws,
    StepSeconds,
)
from lightning_flops.instrument.batches import known_by, known_by_lengths
from lightning_flops.instrument.torch_private.modules import trained_parameters
from lightning_flops.records import NO_TOKENS
from lightning_flops.session.checks import Checks
from lightning_flops.session.samples import Samples
from lightning_flops.units import plain

if TYPE_CHECKING:
    import torch
    from torch import nn

    from lightning_flops.instrument.window_states import CountedStep
    from lightning_flops.records import BatchTokens, Shapes
    from lightning_flops.schema.law import StepLaw
    from lightning_flops.session.step_book import StepBook


_NEEDS_GRADIENT: attrgetter[bool] = attrgetter("requires_grad")

_BEFORE_LAST = 2
"""So many steps before the end of an epoch we look at its steps again: the last ones may be like no others."""

_IN_VAIN = 20
"""After so many looks at steps that were not worth counting, we stop looking for a while."""

_REST = 19 * _IN_VAIN
"""How many steps that while lasts at most, if no step can be worth counting before a check has met a step that is
foretold. It is doubled each time, so at most one step in twenty is looked at in vain. Otherwise it lasts until the
monitor finds a step of unknown FLOPs."""


def _nothing() -> Iterable[torch.Tensor]:
    return ()


class StepFlops:
    """Knows the FLOPs of a run's steps: of those that were counted, and of those that follow from them.

    Args:
        root: the model that is trained.
        updated: returns the parameters that the run's own optimizers update.
        note: adds a sentence to every report of the run.
        shown: somebody sees what this rank's steps spend one by one.
        share: of the wall time, what counting outside of windows may take.
        padding_counts: as for ``StepLaws``.
    """

    def __init__(
        self,
        root: nn.Module,
        note: Callable[[str], None],
        *,
        updated: Callable[[], Iterable[torch.Tensor]],
        shown: bool,
        share: float,
        padding_counts: bool,
    ) -> None:
        self.notes: dict[str, None] = {}
        """Sentences about the run's FLOPs, each once."""
        self._add_note = note
        self.laws = StepLaws(self.note, padding_counts=padding_counts)
        """Foretell what was not counted."""
        self.books = RunFlops(self.laws)
        """Every step of the run."""
        self.known_by: Callable[[Shapes, BatchTokens | None], Shapes] = known_by_lengths
        """What a batch of these shapes and tokens is known by. Until steps were counted, nobody knows whether what is
        spent depends on the lengths of sequences."""
        self._values = IdleValues()
        self.wants_shapes = False
        """Whether the door must tell of the batches of a step before it runs.

        It costs more than all else that is done in a step between windows. So it is true only while a step could be
        counted, and may be worth it.
        """
        self.look_from = math.inf
        """From this time on, ``look`` may find that a step could be counted."""
        self.look_at = math.inf
        """From this number of steps on, ``look`` may find the same."""
        self.at_border = True
        """The next batch begins a step."""
        self.lower_bound = False
        """Something is missing in the FLOPs of some steps."""
        self._root: nn.Module | None = root
        self._updated = updated
        self._shown = shown
        self.samples = Samples(share=share)
        """Steps that are counted outside of windows."""
        self.checks = Checks(self.laws, self.samples, wanted=shown)
        """Those of them that show whether steps spend what is foretold."""
        self._in_vain = 0
        self._rest = _REST
        self._rests_until = 0
        """Before this step we look at none, but for those that are known to be like no others."""
        self._missed = False
        """There were steps whose FLOPs nobody knew."""
        self._epoch_began: int | None = None
        """How many steps were done when the latest epoch began; None before the first one that was seen to begin."""
        self._epoch_steps = 0
        """How many steps the latest epoch had that was seen whole; 0 before there was one."""
        self._last_is_unknown = False
        """Nobody knew what the last step of that epoch spent."""
        self._first_was_counted = False
        """The first step of an epoch was counted; that of the run's first epoch does not count here."""
        self._samples_too = False
        """Steps of unknown shapes are counted outside of windows, where that can be done."""
        self._trained: int | None = None
        """How many parameters needed a gradient when the first step was counted."""
        self._trained_of_run = 0
        """How many of these parameters the run's own optimizers update."""
        self._window_began = 0
        """How many steps were done when the latest window began to count."""
        self._first_counted: StepKey | None = None
        self._counted_in_window: Counter[StepKey] = Counter()
        self._tokens_in_window = NO_TOKENS

    # ---- a run that goes on later

    def let_go(self, *, steps_done: int) -> None:
        """Let go of the model: the run stops after *steps_done* steps, and may go on later."""
        if self.checks.running:
            self.checks.ends(steps_done=steps_done)
        self.samples.leave()
        self.at_border = True
        self._root, self._updated = None, _nothing

    def goes_on(self, root: nn.Module, *, updated: Callable[[], Iterable[torch.Tensor]]) -> None:
        """The run goes on; the arguments are as at its beginning."""
        self.samples.come_back()
        self._root, self._updated = root, updated

    # ---- windows

    def window_opens(self, *, steps_done: int) -> None:
        """The step that begins now, when so many of the run are done, is the first that a window counts."""
        self._window_began = steps_done
        self._first_counted = None
        self._counted_in_window.clear()
        self._tokens_in_window = NO_TOKENS
        self.samples.window_begins()

    def window_counts(self, tokens: BatchTokens | None) -> None:
        """A batch with these *tokens* was counted in a window."""
        self._tokens_in_window = self._tokens_in_window.plus(tokens)

    def without_padding(self) -> Mapping[str, int] | None:
        """By dtype, the model FLOPs that the steps which the window counted would have spent without padding.

        None where that is not known.
        """
        useful = self.laws.without_padding(self._counted_in_window, self._tokens_in_window)
        return None if isinstance(useful, str) else useful

    def window_closes(self, *, shapes_deceive: bool, variable: bool, steps_done: int) -> None:
        """A window has measured what it was to measure.

        Args:
            shapes_deceive: steps with the shapes of its first counted one spent something else.
            variable: shapes keep changing.
            steps_done: steps of the run so far.
        """
        if shapes_deceive and self._first_counted is not None:
            self.laws.doubt(self._first_counted)
        if variable and self._shown:
            self._want_shapes()
        self.checks.window_closes(self._counted_in_window, steps_done=steps_done)

    def law(
        self,
        seconds: Mapping[StepKey, StepSeconds],
        *,
        last: StepKey | None,
        peak_sec: Callable[[Mapping[str, int]], float | None],
    ) -> StepLaw | str:
        """The law of the run's steps so far; in words, why there is none.

        Args:
            seconds: how long the steps of each key took.
            last: the key of the step that ended last, which is used if nobody has timed any step.
            peak_sec: as for ``step_law``.
        """
        if not seconds and last is not None:
            seconds = {last: StepSeconds(0, 0.0)}
        found = self.laws.report(seconds)
        return found if isinstance(found, str) else step_law(found, peak_sec=peak_sec)

    def was_counted(self, key: StepKey, step: CountedStep) -> StepKey:
        """The step of this *key* was counted, in a window or outside. Returns what it is known by from now on."""
        if not (self.laws.has_counted or step.values.decide):
            self._drop_lengths()
        if self.known_by is known_by:
            key = without_lengths(key)
        by_values = step.values.decide and not self._values.are_idle(key, step.values)
        if self._book_counted(key, step, by_values=by_values) and (by_values or self.known_by is known_by_lengths):
            self._values.add(key, step.flops, step.values)
            self.laws.trust_shapes(self._values.are_idle)
            if self.known_by is known_by_lengths and self._values.lengths_are_idle:
                self._drop_lengths()
        return without_lengths(key) if self.known_by is known_by else key

    def _drop_lengths(self) -> None:
        """What steps spend does not depend on the lengths of sequences, as the steps that were counted have shown."""
        if self.known_by is known_by:
            return
        self.known_by = known_by
        self.laws.drop_lengths()
        self.books.drop_lengths()
        in_window, self._counted_in_window = self._counted_in_window, Counter()
        for key, steps in in_window.items():
            self._counted_in_window[without_lengths(key)] += steps
        if self._first_counted is not None:
            self._first_counted = without_lengths(self._first_counted)

    def _book_counted(self, key: StepKey, step: CountedStep, *, by_values: bool) -> bool:
        """Returns whether the step is known to be counted whole."""
        if step.lower_bound and not self.lower_bound:
            self.lower_bound = True
            self.notes[NOT_COUNTED] = None  # the report of a window names the operators
        self.samples.compiled(step.compile_sec)
        if not step.sampled:
            self.samples.window_has_counted()
            if self._trained is None and self._root is not None:
                self._trained, self._trained_of_run = trained_parameters(self._root), self._trained_by_run()
            self._first_counted = self._first_counted or key
            self.checks.counted(steps_done=self._window_began + self._counted_in_window.total())
            self._counted_in_window[key] += 1
        if not step.sampled or self.checks.running:
            self.checks.counts(key)
            if self.checks.running and not self.checks.was_new:
                self._rests_until = 0  # steps come that are foretold, and one of them shows whether samples are whole
            self._first_was_counted |= self.checks.running and self.checks.began == self._epoch_began
            self._learn(key, step, by_values=by_values)
        else:
            self.laws.sampled(key, step.flops, by_values=by_values)
            if not self.laws.believes_samples:
                return False
        self.books.counted(key, step.flops)
        return True

    def note(self, sentence: str) -> None:
        """Say *sentence* in every report of the run, and with what its steps spend."""
        self.notes[sentence] = None
        self._add_note(sentence)

    def _learn(self, key: StepKey, step: CountedStep, *, by_values: bool) -> None:
        """A step was counted from its first moment to its last."""
        checks = self.checks
        more = self.laws.beyond(key, step.flops) if checks.running and checks.looks_for_more else 0
        if not more:
            self.laws.counted(key, step.flops, by_values=by_values)
            return
        # The others do not spend that: what is foretold of them stays.
        self.lower_bound = True
        checks.found_more()
        self.note(MORE.format(step=checks.began, flops=plain(more)))

    # ---- steps that are counted outside of windows

    def is_worth_counting(self, batches: tuple[Shapes, ...], steps: StepBook) -> bool:
        """Whether the step that begins now should be counted: nobody knows what it spends, and the run can afford it.

        Args:
            batches: the shapes of its first batches.
            steps: the run's steps so far.
        """
        if not self.at_border:
            return False
        self.at_border = False
        last = steps.last
        if last is None or len(batches) > len(last[0]):
            return False
        samples, done, believed = self.samples, steps.steps_done, self.laws.believes_samples
        if believed is False or samples.exhausted:
            self.wants_shapes = self._samples_too = False
            return False
        if not samples.affords(steps_done=done):
            self.wants_shapes, self.look_from = False, samples.affords_from(steps_done=done)
            return False
        # What the step is known by, if its further batches and its updates are like those of the step before.
        key = ((*batches, *last[0][len(batches) :]), last[1])
        settled = self.laws.is_settled(key)
        # The first sample must be one that is foretold: it shows whether samples are counted whole.
        wanted = settled and self.laws.known(key) is not None if believed is None else not settled
        self._in_vain += not wanted
        if self._in_vain == _IN_VAIN:
            self.wants_shapes = False
            if believed is None:
                # No step comes that is foretold, so no sample shows whether samples are whole. A check is whole.
                self._rests_until = done + self._rest
                self._rest *= 2
                self.checks.hurry(steps_done=done)
        return wanted

    def look(self, *, steps_done: int) -> None:
        """Think again whether a step could be counted; called now and then, and when ``look_from`` has come."""
        samples = self.samples
        if self.wants_shapes or not self._samples_too or samples.exhausted:
            return
        if steps_done >= self.look_at:
            self.look_at = math.inf
            self._want_shapes()
        elif self.look_from < math.inf and samples.affords(steps_done=steps_done):
            self._want_shapes()

    def _want_shapes(self) -> None:
        self.wants_shapes = self._samples_too = True
        self.look_from = math.inf
        self._in_vain = 0

    def sample_begins(self) -> None:
        """The step that begins now is counted outside of windows, from its batch on."""
        self.samples.begins()

    def sample_ends(self, *, steps_done: int) -> None:
        """The sample has ended, or the loop has left it unfinished."""
        self.samples.ends()
        if self.laws.wants_check:
            self.checks.hurry(steps_done=steps_done)

    def misses(self, keys: Iterable[StepKey], *, steps_done: int) -> None:
        """Have steps counted outside of windows from now on, if nobody knows what some of these spend."""
        self._missed = True
        looks = self.wants_shapes or self.look_from < math.inf
        if looks or steps_done < self._rests_until or not self._shown or self.samples.exhausted:
            return
        if all(map(self.laws.is_settled, keys)):
            return
        if self.laws.believes_samples is not False:
            self._want_shapes()
        else:  # work before the batch is in no sample, and which step comes next is not known before it has begun
            self.checks.hurry(steps_done=steps_done)

    def epoch_begins(self, *, steps_done: int) -> None:
        """An epoch begins. Its first step and its last ones may be like no others.

        Once in a run the first step of an epoch is counted: people draw pictures and save samples there. If the FLOPs
        of some steps were not known, these may have been the last of an epoch: steps with a short last batch, or with
        fewer batches than others.
        """
        self._epoch_began = steps_done
        if steps_done and not self._first_was_counted:
            self.checks.expect(after=steps_done)
        if self._missed and self._epoch_steps:
            self.look_at = steps_done + max(0, self._epoch_steps - _BEFORE_LAST)
        if self._last_is_unknown and self._epoch_steps:
            self.checks.expect(after=steps_done + self._epoch_steps - 1)

    def epoch_ends(self, last: StepKey | None, *, steps_done: int) -> None:
        """An epoch is over, whose *last* step is known by this."""
        began = 0 if self._epoch_began is None else self._epoch_began
        if steps_done > began:
            self._epoch_steps = steps_done - began
            self._last_is_unknown = last is not None and not self.laws.is_settled(last)

    # ---- the parameters

    def look_at_parameters(self, *, replaced: bool = False) -> None:
        """Give up what was foretold if other parameters are trained than when the first step was counted.

        Args:
            replaced: another run has begun on the same model, with optimizers of its own, for which it may have chosen
                other parameters. Only those that this run's optimizers update tell of this run.
        """
        if self._trained is None or self._root is None:
            return
        is_as_it_was = (
            self._trained_of_run == self._trained_by_run()
            if replaced
            else self._trained == trained_parameters(self._root)
        )
        if not is_as_it_was:
            self._trained = None
            self.laws.foretell_nothing(OTHERS_TRAIN)

    def _trained_by_run(self) -> int:
        return sum(map(_NEEDS_GRADIENT, self._updated()))
