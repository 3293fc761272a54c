"""Front door for the Trainer of transformers: ``FlopsProfilerTrainerCallback``, for TRL's trainers as well.

It checks the settings and passes the Trainer's events on. An ``HfTraining`` holds what lives as long as one call of
``Trainer.train``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

try:
    from transformers import TrainerCallback

    from lightning_flops.doors.hf_context import block_of, trainer_of
    from lightning_flops.doors.hf_trainer import HfTraining
except ModuleNotFoundError as missing:
    if str(missing.name).partition(".")[0] not in ("transformers", "accelerate"):
        raise
    raise ImportError(
        f"FlopsProfilerTrainerCallback needs {missing.name}: install lightning-flops[transformers]"
    ) from missing

from lightning_flops.config import ProfilerConfig, SettingArguments, config_from, given_settings, takes_settings
from lightning_flops.doors.deepspeed_block import log_settings
from lightning_flops.session.border import event
from lightning_flops.session.results import ProfiledRun
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from transformers import Trainer, TrainerControl, TrainerState, TrainingArguments
    from typing_extensions import Unpack

__all__ = ["FlopsProfilerTrainerCallback"]

logger = package_logger(__name__)

_RUNTIME_ATTRIBUTES = ("_training", "_has_begun")
"""What is not pickled: what belongs to a running training."""


class FlopsProfilerTrainerCallback(ProfiledRun, TrainerCallback):
    """Counts and times one step of training, and reports it to the Trainer's log.

    Add it to the ``callbacks`` of a ``transformers.Trainer``, or of a trainer of TRL; nothing else changes. The step
    that begins after ``profile_step`` steps of this training is counted, and the steps after it are timed. The scalars
    go along with the Trainer's next own log, and so to everything in ``report_to``. The report goes to TensorBoard, if
    that is one of them, to the console's log, and to ``profile.json`` in ``lightning_flops`` below ``output_dir``.

    Tokens are counted where ``tokens_per_sample`` is not given: those with an ``attention_mask``, or without a mask
    those with a label, so without padding.

    An argument that is None has not been given. With DeepSpeed it has the value from the ``"flops_profiler"`` block of
    the config, if that has one, and otherwise the default. DeepSpeed's own profiler is switched off. A block that says
    ``"enabled": false`` switches this callback off, too.

    Raises:
        ConfigError: a setting breaks its rule, or an argument is not a setting. In the block of a DeepSpeed config
            both are warnings only: a value that breaks its rule means no profile, an unknown key is ignored.
    """

    @takes_settings
    def __init__(self, **settings: Unpack[SettingArguments]) -> None:
        self._config = config_from(settings, owner="FlopsProfilerTrainerCallback")
        self._given = given_settings(settings)
        self._start_anew()
        self._training: HfTraining | None = None
        self._has_begun = False

    def __getstate__(self) -> dict[str, Any]:
        """The settings and the result, without what belongs to a running training."""
        return {name: value for name, value in self.__dict__.items() if name not in _RUNTIME_ATTRIBUTES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a callback that is in no training."""
        self.__dict__.update(state)
        self._training = None
        self._has_begun = False

    # ---- the Trainer's events

    @event
    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A training begins; where one before it was left by an exception that nobody saw, that one ends."""
        self._end()
        self._start_anew()

    @event
    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """An epoch begins: with the first, everything is ready, and open a new window.

        Not earlier: from here on we see what the training raises. Before, the events of other callbacks may raise.
        """
        if self._has_begun:
            return
        self._has_begun = True
        trainer = trainer_of(self)
        if trainer is None:
            logger.warning("this training is not profiled: no Trainer of transformers calls this callback")
            return
        self._config = self._settings_in(trainer)
        if self._config.enabled:
            self._training = HfTraining(
                trainer,
                kwargs.get("train_dataloader"),
                config=self._config,
                publish=self._profiles.append,
                over=self._end,
            )
            self._training.session.begin()

    def _settings_in(self, trainer: Trainer) -> ProfilerConfig:
        """The settings for a training of *trainer*, and words about where they come from."""
        for_any = isinstance(self, CallbackOfAnyTrainer)
        others = (one for one in trainer.callback_handler.callbacks if isinstance(one, FlopsProfilerTrainerCallback))
        if for_any and not all(isinstance(other, CallbackOfAnyTrainer) for other in others):
            return ProfilerConfig(enabled=False)
        block = block_of(trainer)
        taken = None
        config = ProfilerConfig(**self._given)
        if block is not None:
            taken = ProfilerConfig.taken_over(block, given=self._given, enabled=True)
            config = taken.settings
        if trainer.is_world_process_zero():
            log_settings(
                block,
                taken,
                enabled=config.enabled,
                given=self._given,
                owner="FlopsProfilerTrainerCallback",
                run="training",
            )
        return config

    # The Trainer calls the next two for every batch of the run: they have no wrapper, and their own border.

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """A batch is done whose gradients are only accumulated."""
        try:
            if self._training is not None:
                self._training.batch_ends(ends_step=False)
        except BaseException as error:
            self._broke(error)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """A batch is done, and with it a step."""
        try:
            if self._training is not None:
                self._training.batch_ends(ends_step=True)
        except BaseException as error:
            self._broke(error)

    @event
    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """An epoch is over."""
        if self._training is not None:
            self._training.epoch_ends()

    @event
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The training is over: report what there is."""
        if self._training is not None:
            self._training.finish()
        self._end()

    def _end(self) -> None:
        training = self._training
        if training is not None:  # let go of it last, so that a second try finds it
            training.session.take_out()
            self._throughput = training.session.reports.throughput
        self._training = None
        self._has_begun = False

    def _broke(self, error: BaseException) -> None:
        """An event of ours raised *error*: the training goes on without us, unless it is the user's Ctrl-C."""
        training = self._training
        try:
            if training is not None:
                training.session.border.broke(error)
            elif isinstance(error, Exception):
                logger.warning("this training is not profiled: %s: %s", type(error).__name__, error)
                self._config = replace(self._config, enabled=False)
        finally:
            begun = self._has_begun
            self._end()
            self._has_begun = begun  # not again in this training
            if not isinstance(error, Exception):
                raise error


class CallbackOfAnyTrainer(FlopsProfilerTrainerCallback):
    """A callback that the user has not written: it does nothing if the Trainer has another one."""
