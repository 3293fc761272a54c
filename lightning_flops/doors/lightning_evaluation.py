"""The door of one ``Trainer.predict``, ``test`` or ``validate``: a loop that only runs the model forward.

A step of such a loop is one batch, from the end of the batch before it to its own end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from lightning_flops.doors.lightning_context import (
    LOST_WITHOUT_TRAINING,
    batches_fetched_ahead,
    fetches_can_be_wrapped,
    loader_iterators,
    loader_workers,
    private_names,
    reset_fetcher,
    run_context,
    run_output,
    settle_steps,
)
from lightning_flops.instrument.batches import BatchMeter, from_loader, tensor_shapes
from lightning_flops.instrument.timing.loader_queue import LoaderQueue, backlogs_of
from lightning_flops.records import Shapes
from lightning_flops.session.door import RunPlan
from lightning_flops.session.session import Session
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from torch import nn

    from lightning_flops.config import ProfilerConfig
    from lightning_flops.instrument.patches import Patches
    from lightning_flops.instrument.timing.loader_queue import Feed
    from lightning_flops.records import BatchTokens, RunContext
    from lightning_flops.schema.profile import Profile

logger = package_logger(__name__)

Evaluation = Literal["predict", "test", "validate"]
"""The functions of a Trainer that run such a loop."""

_BEFORE = "start of the loop"
"""What runs before the loop asks for its first batch."""


class LightningEvaluation:
    """The door of one loop without training, on one rank.

    Args:
        trainer: about to fetch the first batch of the loop.
        pl_module: the root of the module tree.
        function: of the Trainer, which runs the loop.
        config: the settings.
        publish: gets each profile when its window has closed.
        own_folder: of the reports if no logger has a folder; None: then they have none.
    """

    def __init__(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        function: Evaluation,
        *,
        config: ProfilerConfig,
        publish: Callable[[Profile], None],
        own_folder: str | None,
    ) -> None:
        self._trainer = trainer
        self._module = pl_module
        self._function: Evaluation = function
        self._own_folder = own_folder
        loops: dict[Evaluation, Any] = {
            "predict": trainer.predict_loop,
            "test": trainer.test_loop,
            "validate": trainer.validate_loop,
        }
        self._loop = loops[function]
        self._names = private_names(trainer, lost=LOST_WITHOUT_TRAINING)
        self._several_loaders = self._loop.num_dataloaders > 1
        self._moved = ""
        self._batches = self._number_of_batches()
        self._config = self._within_the_loop(config)
        self._waits_for_first_batch = True
        self._in_step = False
        self._batches_done = 0
        self._batch: Any = None
        self._shapes: Shapes = ()
        self._tokens: BatchTokens | None = None
        self.session = Session(
            self,
            pl_module,
            config=self._config,
            publish=publish,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
            loop=function,
        )
        self._names.tell(self.session.notes.add_for_run)

    def _number_of_batches(self) -> int | None:
        """How many batches the loop has; None if not known."""
        length = getattr(self._names.get(self._loop, "_data_fetcher", None), "length", None)
        if length is None and not self._several_loaders:
            length = sum(self._loop.max_batches)
        return int(length) if length is not None and math.isfinite(length) else None

    def _within_the_loop(self, config: ProfilerConfig) -> ProfilerConfig:
        """*config*; if the loop is too short for its first batch to profile, with one that leaves some to time."""
        asked, batches = config.next_profile_step(steps_done=0), self._batches
        if asked is None or batches is None or asked < batches:
            return config
        instead = max(0, batches - 1 - self._settle_steps() - config.timing_steps)
        self._moved = (
            f"Batch {instead} was profiled in place of batch {asked} (profile_step), because this {self._function} "
            f"loop has {batches} batch(es)."
        )
        logger.info(self._moved)
        return replace(config, profile_step=instead)

    def _settle_steps(self) -> int:
        return settle_steps(self._loop, names=self._names, batches_a_step=1)

    # ---- how the run begins

    def plan(self) -> RunPlan:
        """How the loop begins."""
        self._context = run_context(self._trainer, loop=self._function)
        settle = self._settle_steps()
        profile_step = self._config.next_profile_step(steps_done=0)
        fetched_ahead = batches_fetched_ahead(self._loop, names=self._names)
        if self._batches is not None and profile_step is not None and not fetched_ahead:
            # No queue has to drain: rather time a batch than none.
            settle = max(0, min(settle, self._batches - profile_step - 2))
        return RunPlan(
            profile_step=profile_step,
            settle_steps=settle,
            device=self._trainer.strategy.root_device,
            dp_size=self._context.dp_size,
            output=run_output(self._trainer, self._config, own_folder=self._own_folder, loop=self._function),
        )

    def meter(self, note: Callable[[str], None]) -> BatchMeter:
        """Finds samples and tokens from the tensors of a batch and the settings."""
        return BatchMeter.by_settings(self._config, note)

    # ---- taps of the loop

    def tap_run(self, taps: Patches) -> None:
        """Wrap what shows waiting for data."""
        session, make, loop = self.session, self.session.taps, self._loop
        session.training_stops(_BEFORE)
        strategy = self._trainer.strategy
        if session.tokens.reads and strategy.root_device.type != "cpu":
            taps.replace(strategy, "batch_to_device", make.around(self._batch_is_on_host, None))
        if fetches_can_be_wrapped(loop, loop, names=self._names):
            taps.replace(loop, "_on_before_fetch", make.before(self._fetch_begins))
            taps.replace(loop, "_on_after_fetch", make.after(self._fetch_ends, also_failed=True))
            reset_fetcher(loop, loop, names=self._names)
        else:
            self._first_batch_begins()

    def _batch_is_on_host(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        """A batch is going to be moved: what its tokens are can still be read without waiting for the device."""
        if self.session.tokens.reads:
            self._tokens = self.session.tokens.of(batch)

    def tap_parts(self, taps: Patches) -> None:
        """Wrap the parts of a batch's way through the loop."""
        strategy, make = self._trainer.strategy, self.session.taps
        name = "_predict_step" if self._function == "predict" else "_evaluation_step"
        if self._names.has(self._loop, name):
            taps.replace(
                self._loop,
                name,
                make.around(self._step_begins, self._step_ends, fails=lambda _, error: self._step_failed()),
            )
        taps.replace(strategy, "batch_to_device", make.part("transfer"))
        step = {"predict": "predict_step", "test": "test_step", "validate": "validation_step"}[self._function]
        taps.replace(strategy, step, make.part("forward"))

    def _first_batch_begins(self) -> None:
        self._waits_for_first_batch = False
        self.session.training_goes_on(_BEFORE)

    def _fetch_begins(self) -> None:
        if self._waits_for_first_batch:
            self._first_batch_begins()
        self._enter_scope()
        self.session.fetch_begins()

    def _fetch_ends(self) -> None:
        self.session.fetch_ends()
        fetcher = self._names.get(self._loop, "_data_fetcher", None)
        if not self._in_step and getattr(fetcher, "done", False):
            self._leave_scope()  # there may be no further batch, and what follows the loop is in none

    def _enter_scope(self) -> None:
        """A batch begins, with the wait for it if that is seen."""
        window = self.session.window
        if window.marking and not window.in_scope:
            window.enter_scope()

    def _leave_scope(self) -> None:
        window = self.session.window
        if window.in_scope:
            window.leave_scope()

    def _step_begins(self, *args: Any, **kwargs: Any) -> bool:
        self._in_step = True
        self._enter_scope()
        return True

    def _step_ends(self, _: bool) -> None:
        self._in_step = False
        self._end_scope()

    def _end_scope(self) -> None:
        """A batch's way through the loop is over."""
        window = self.session.window
        was_counting = window.recorder.counting
        self._leave_scope()
        self.session.after_batch()
        if was_counting and (timer := self.session.window.recorder.timer) is not None:
            timer.go_on()  # in a short loop the next batch is timed at once, without what we did here

    def _step_failed(self) -> None:
        self._in_step = False
        self._leave_scope()

    # ---- events of the callback; their caller catches errors

    def batch_starts(self, batch: Any, dataloader_idx: int) -> None:
        """A batch has been fetched and transferred: if it matters, take its shapes before the step may change it."""
        session = self.session
        if session.window.is_open:
            self._enter_scope()
        elif not session.flops.wants_shapes:
            return
        self._batch = batch
        self._shapes = tensor_shapes(batch)
        if session.flops.wants_shapes:
            if self._tokens is None and session.tokens.reads:
                self._tokens = session.tokens.of(batch)
            session.step_begins((self._of_loader(self._shapes, dataloader_idx),), (self._tokens,))

    def _of_loader(self, shapes: Shapes, dataloader_idx: int) -> Shapes:
        """*shapes*, so that batches of two loaders are never alike."""
        return from_loader(shapes, dataloader_idx) if self._several_loaders else shapes

    def batch_ends(self, batch: Any, dataloader_idx: int) -> None:
        """A batch is done."""
        started, self._batch = self._batch, None
        shapes = self._shapes if started is not None and batch is started else tensor_shapes(batch)
        tokens, self._tokens = self._tokens, None
        if tokens is None and self.session.tokens.reads:
            tokens = self.session.tokens.of(batch)
        self._batches_done += 1
        shapes = self._of_loader(shapes, dataloader_idx)
        self.session.batch(batch, shapes, updates=0, ends_step=True, logs=self._reading_is_due(), tokens=tokens)
        if not self._in_step and self.session.window.in_scope:  # this Lightning's step could not be wrapped
            self._end_scope()

    def window_opens(self) -> None:
        """The batch that begins now is counted: if it is not the one that was asked for, the report says so."""
        if self._moved:
            self.session.notes.add(self._moved)

    # ---- what the session asks

    def context(self) -> RunContext:
        """Where the loop runs."""
        return self._context

    def optimizers(self) -> Iterable[Any]:
        """None take part, whatever a fit before has left in the Trainer."""
        return []

    def whole_model(self) -> nn.Module:
        """The module in the strategy's wrappers."""
        model = self._trainer.strategy.model
        return self._module if model is None else model

    def loader_workers(self) -> int | None:
        """Fewest worker processes of the loop's loaders."""
        return loader_workers(self._loop, names=self._names)

    def feed(self) -> Feed:
        """The queues of the loop's loaders."""
        loop, note = self._loop, self.session.notes.add_for_run
        return LoaderQueue(lambda: backlogs_of(loader_iterators(loop, names=self._names), note=note), batches_a_step=1)

    def x_axis(self) -> int:
        """Batches of this loop until now: Lightning has no step of its own in it."""
        return self._batches_done

    def _reading_is_due(self) -> bool:
        """Every ``log_every_n_steps`` batches: Lightning itself logs nothing while such a loop runs."""
        every = getattr(self._trainer, "log_every_n_steps", 0)
        return bool(every) and self._batches_done % every == 0

    # ---- removal

    def take_out(self) -> None:
        """Remove our wrappers that the data fetcher keeps."""
        reset_fetcher(self._loop, self._loop, names=self._names)
