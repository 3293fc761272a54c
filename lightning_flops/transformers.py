"""``FlopsProfilerTrainerCallback`` for the Trainer of transformers, and for TRL's trainers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from transformers import TrainerCallback

    from lightning_flops.adapters.transformers import TrainerAdapter, block_of, trainer_of
except ModuleNotFoundError as missing:
    if str(missing.name).partition(".")[0] not in ("transformers", "accelerate"):
        raise
    raise ImportError(
        f"FlopsProfilerTrainerCallback needs {missing.name}: pip install '.[transformers]' in a clone"
    ) from missing

from lightning_flops.adapters.deepspeed import settings_of
from lightning_flops.config import ProfilerConfig, SettingArguments, config_from, given_settings, takes_settings
from lightning_flops.run.delivery import ProfiledRun
from lightning_flops.run.run import safe
from lightning_flops.units import package_logger

if TYPE_CHECKING:
    from transformers import Trainer
    from typing_extensions import Unpack

__all__ = ["FlopsProfilerTrainerCallback"]

logger = package_logger(__name__)

_RUNTIME_ATTRIBUTES = ("_adapter", "_delivery", "_has_begun")


class FlopsProfilerTrainerCallback(ProfiledRun, TrainerCallback):
    """Counts and times one step of training, and reports it to the Trainer's log.

    Add it to the ``callbacks`` of a ``transformers.Trainer``, or of a trainer of TRL; nothing else changes. The step
    that begins after ``profile_step`` steps of this training is counted, and the steps after it are timed. The scalars
    go along with the Trainer's next own log, and so to everything in ``report_to``; the report goes to TensorBoard, if
    that is one of them, to the console's log, and to files in a folder ``lightning_flops``, which is beside
    TensorBoard's logs, or below ``output_dir``.

    An argument that is None has not been given: with DeepSpeed it has the value from the ``"flops_profiler"`` block of
    the config, whose ``"enabled": false`` switches this callback off, too, and otherwise the default.

    Raises:
        ConfigError: a setting breaks its rule, or an argument is not a setting. In the block of a DeepSpeed config
            both are warnings only: a value that breaks its rule means no profile, an unknown key is ignored.
    """

    _adapter: TrainerAdapter | None = None
    _has_begun = False

    @takes_settings
    def __init__(self, **settings: Unpack[SettingArguments]) -> None:
        self._config = config_from(settings, owner="FlopsProfilerTrainerCallback")
        self._given = given_settings(settings)
        self._start_anew()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in _RUNTIME_ATTRIBUTES}

    # ---- the Trainer's events

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self._end_run()  # of one before that was left by an exception that we did not see
        self._start_anew()
        self._has_begun = False

    def on_epoch_begin(self, *args: Any, train_dataloader: Any = None, **kwargs: Any) -> None:
        if not self._has_begun:  # with the first epoch, the Trainer has its engine, its optimizer and its loader
            self._has_begun = True
            self._begin(train_dataloader)
        elif self._adapter is not None:
            self._adapter.epoch_begins()

    @safe
    def _begin(self, loader: Any) -> None:
        trainer = trainer_of(self)
        if trainer is None:
            logger.warning("this training is not profiled: no Trainer of transformers calls this callback")
            return
        config = self._config = self._settings_in(trainer)
        if config.enabled:
            publish, over = self._profiles.append, self._end_run
            self._begin_run(TrainerAdapter(trainer, loader, config=config, publish=publish, over=over))

    def _settings_in(self, trainer: Trainer) -> ProfilerConfig:
        """The settings for a training of *trainer*; the log says where they come from."""
        ours = [one for one in trainer.callback_handler.callbacks if isinstance(one, FlopsProfilerTrainerCallback)]
        if isinstance(self, CallbackOfAnyTrainer) and not all(isinstance(one, CallbackOfAnyTrainer) for one in ours):
            return ProfilerConfig(enabled=False)
        logs = trainer.is_world_process_zero()
        return settings_of(block_of(trainer), self._given, enabled=True, run="training", logs=logs)

    def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
        if self._adapter is not None:
            self._adapter.end_step(updated=False)

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self._adapter is not None:
            self._adapter.end_step(updated=True)

    def on_epoch_end(self, *args: Any, **kwargs: Any) -> None:
        if self._adapter is not None:
            self._adapter.epoch_ends()

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        self._finish()


class CallbackOfAnyTrainer(FlopsProfilerTrainerCallback):
    """A callback that the user has not written: it does nothing if the Trainer has another one."""
