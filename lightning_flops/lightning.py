"""Front door for Lightning: ``FlopsProfilerCallback``, one class for both import roots.

It is a ``Callback`` of each root that the program imports, before this module or after it, so that the Trainer and the
CLI of either root accept it. It imports neither root: importing the second one would change the log of the first.

It checks the settings and passes the Trainer's events on. A ``LightningFit`` holds what lives as long as one call of
``Trainer.fit``, a ``LightningEvaluation`` what lives as long as one of ``predict``, ``test`` or ``validate``.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from lightning_flops.config import SETTINGS, ProfilerConfig, given_settings, refuse_unknown, with_settings_described
from lightning_flops.doors.deepspeed_block import log_settings
from lightning_flops.doors.lightning_context import IMPORT_ROOTS, folder_of_trainer
from lightning_flops.doors.lightning_deepspeed import BuiltinProfiler, block_of
from lightning_flops.doors.lightning_evaluation import Evaluation, LightningEvaluation
from lightning_flops.doors.lightning_fit import LightningFit
from lightning_flops.doors.lightning_launch import origin_of, send_home
from lightning_flops.doors.when_imported import when_imported
from lightning_flops.session.border import event
from lightning_flops.session.outcomes import OUTCOMES
from lightning_flops.session.results import ProfiledRun
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from lightning_flops.doors.lightning_types import Callback, LightningModule, Trainer
    from lightning_flops.schema.profile import Profile
    from lightning_flops.schema.throughput import ThroughputSummary
    from lightning_flops.session.session import Session

    _CallbackBases = Callback
else:

    class _CallbackBases:
        """Stands for ``Callback`` until the program has imported it from either root."""


logger = package_logger(__name__)

_IDLE_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
"""Hooks of a training step that this callback inherits and does not use."""

_RUNTIME_ATTRIBUTES = ("_fit", "_evaluation", "_builtin", "log", "log_dict", "on_train_batch_start", *_IDLE_HOOKS)
"""What is not pickled: what belongs to a run, and the bound methods that a Trainer sets on the callback."""


class FlopsProfilerCallback(ProfiledRun, _CallbackBases):
    """Counts and times one step of training, and reports it to the run's loggers.

    Add it to a ``Trainer``; nothing else changes. The step that begins after ``profile_step`` steps of the fit is
    counted, and the steps after it are timed. The report goes to the loggers, to the console's log, to ``profile.json``
    and to a page, ``profile.html``. These files lie beside the logs, or in ``lightning_flops_logs`` below
    ``default_root_dir`` if no logger has a folder. W&B and MLflow keep the page as an artifact.

    ``Trainer.predict``, ``test`` and ``validate`` are profiled, too. There a step is one batch, without a backward and
    an optimizer. Tags and names of files say which loop it was, such as ``flops_profiler/predict/fwd_flops`` and
    ``profile.predict.json``. Validation inside a fit belongs to no step, and has no report of its own.

    An argument that is None has not been given. Under a DeepSpeedStrategy it has the value from the
    ``"flops_profiler"`` block of the DeepSpeed config, if that has one, and otherwise the default. DeepSpeed's own
    profiler is switched off. A block that says ``"enabled": false`` switches this callback off, too.

    The arguments are settings of ``ProfilerConfig``, where each is described.

    Raises:
        ConfigError: a setting breaks its rule, or an argument is not a setting. In the block of a DeepSpeed config
            both are warnings only: a value that breaks its rule means no profile, an unknown key is ignored.
    """

    def __init__(
        self,
        profile_step: int | Sequence[int] | None = None,
        module_depth: int | None = None,
        top_modules: int | None = None,
        detailed: bool | None = None,
        output_file: str | Path | None = None,
        recompute_fwd_factor: float | None = None,
        *,
        timing_steps: int | None = None,
        every: int | None = None,
        timer_only: bool | None = None,
        trace_schedule: Mapping[str, int] | None = None,
        trace: bool | None = None,
        trace_dir: str | Path | None = None,
        record_shapes: bool | None = None,
        profile_memory: bool | None = None,
        with_stack: bool | None = None,
        monitor: bool | None = None,
        batch_size: int | Callable[[Any], int] | None = None,
        tokens_per_sample: int | Callable[[Any], int] | None = None,
        causal_attention: Literal["full", "half"] | None = None,
        peak_flops_per_sec: float | Mapping[str, float] | None = None,
        memory_bytes_per_sec: float | None = None,
        advice_thresholds: Mapping[str, float] | None = None,
        ranks_timeout_sec: float | None = None,
        all_ranks: bool | None = None,
        html: bool | None = None,
        tag_prefix: str | None = None,
        **unknown: NoReturn,
    ) -> None:
        arguments = {name: value for name, value in locals().items() if name not in ("self", "unknown")}
        refuse_unknown(unknown, known=arguments, owner="FlopsProfilerCallback")
        # None means "not given", because a command line passes every default.
        self._set_up(given_settings(arguments))

    def _set_up(self, given: Mapping[str, Any], *, for_any_trainer: bool = False, folder: str | None = None) -> None:
        self._given = dict(given)
        self._for_any_trainer = for_any_trainer
        self._folder = folder
        self._config = ProfilerConfig(**self._given)
        self._origin = origin_of(self)
        self._start_anew()
        self._fit: LightningFit | None = None
        self._evaluation: LightningEvaluation | None = None
        self._run_word = "fit"
        self._builtin = BuiltinProfiler()

    @classmethod
    def from_deepspeed_config(cls, config: Mapping[str, Any] | str | Path) -> FlopsProfilerCallback:
        """A callback with the settings of a DeepSpeed config's ``"flops_profiler"`` block.

        Args:
            config: the config as a dict, or the path or URL of its JSON file. DeepSpeed need not be installed.

        Returns:
            A callback. As in DeepSpeed, it does nothing if the block is absent or not enabled.

        Raises:
            ConfigError: the file cannot be read, is no JSON object, or a setting breaks its rule.
        """
        callback = cls.__new__(cls)
        settings = ProfilerConfig.from_deepspeed_config(config)
        callback._set_up({field.name: getattr(settings, field.name) for field in fields(settings)})
        return callback

    @classmethod
    def for_any_trainer(cls, settings: Mapping[str, Any], *, folder: str | None = None) -> FlopsProfilerCallback:
        """A callback that the user has not written, with these *settings*: nothing if the Trainer has another one.

        If no logger has a folder, the files go to *folder*; None: then there are none.

        If the Trainer's DeepSpeed config has a ``"flops_profiler"`` block, the block decides, also whether anything is
        profiled. A wrong block is a warning, and nothing is profiled.
        """
        callback = cls.__new__(cls)
        callback._set_up(given_settings(settings), for_any_trainer=True, folder=folder)
        return callback

    def __getstate__(self) -> dict[str, Any]:
        """The settings and the result, without what belongs to a run."""
        return {name: value for name, value in self.__dict__.items() if name not in _RUNTIME_ATTRIBUTES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a callback that is in no run."""
        self.__dict__.update(state)
        if self._origin.is_here:  # a copy beside the callback that was made here, and not in a launcher's process
            self._origin = origin_of(self)
        self._fit = self._evaluation = None
        self._builtin = BuiltinProfiler()

    # ---- the events of a fit

    @event
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The Trainer knows its strategy, which has not made its engine yet: settle the settings."""
        self._run_word = "fit" if stage == "fit" else f"{stage} loop"
        self._config = self._settings_in(trainer)

    def _settings_in(self, trainer: Trainer) -> ProfilerConfig:
        """The settings for a run of *trainer*, and words about where they come from."""
        if self._for_any_trainer and any(
            isinstance(other, FlopsProfilerCallback) and not other._for_any_trainer
            for other in trainer.callbacks  # type: ignore[attr-defined]
        ):
            return ProfilerConfig(enabled=False)
        block = block_of(trainer)
        taken = None
        config = ProfilerConfig(**self._given)
        if block is not None:
            taken = ProfilerConfig.taken_over(block, given=self._given, enabled=not self._for_any_trainer)
            config = taken.settings
            if self._run_word == "fit" and taken.builtin_on and (config.enabled or taken.wrong):
                self._builtin.stand_down(trainer)
        if trainer.is_global_zero:
            log_settings(
                block,
                taken,
                enabled=config.enabled,
                given=self._given,
                owner="FlopsProfilerCallback",
                run=self._run_word,
                # Somebody who wrote the callback into the program expects a profile.
                level_if_off=logging.INFO if self._for_any_trainer else logging.WARNING,
            )
        return config

    @event
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The strategy has made its engine."""
        self._builtin.put_back()

    @event
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A fit begins: open a new window."""
        self._end_run()
        if not self._config.enabled:
            return
        self._start_anew()
        self._fit = LightningFit(
            trainer,
            pl_module,
            config=self._config,
            publish=self._profiles.append,
            hear_starts=self._hear_starts,
            own_folder=self._own_folder(trainer),
        )
        self._fit.session.begin()
        self._drop_idle_hooks()

    def _own_folder(self, trainer: Trainer) -> str | None:
        """Where the files go if no logger has a folder. Who did not ask for a profile gets no new folder."""
        asked_for = not self._for_any_trainer or block_of(trainer) is not None
        return folder_of_trainer(trainer) if asked_for else self._folder

    @event
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A batch has been fetched and transferred."""
        if self._fit is not None:
            self._fit.batch_starts(batch)

    # It is called for every batch of the run: it has no wrapper, and a border of its own.
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is done, and with it perhaps a step."""
        try:
            fit = self._fit
            if fit is not None and fit.batch_ends(batch, outputs):
                self._fit = None
        except BaseException as error:
            self._broke(error)

    @event
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The fit is over: report what there is."""
        if self._fit is not None:
            self._fit.session.finish()
        self._end_run()

    # ---- the events of a loop without training

    @event
    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A prediction begins: open a new window."""
        self._begin_evaluation(trainer, pl_module, "predict")

    @event
    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A test begins: open a new window."""
        self._begin_evaluation(trainer, pl_module, "test")

    @event
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A validation begins: open a new window, unless it is a part of a fit."""
        self._begin_evaluation(trainer, pl_module, "validate")

    def _begin_evaluation(self, trainer: Trainer, pl_module: LightningModule, function: Evaluation) -> None:
        if trainer.state.fn != function:
            return
        self._end_run()
        if not self._config.enabled:
            return
        self._start_anew()
        self._evaluation = LightningEvaluation(
            trainer,
            pl_module,
            function,
            config=self._config,
            publish=self._profiles.append,
            own_folder=self._own_folder(trainer),
        )
        self._evaluation.session.begin()

    @event
    def on_predict_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """A batch has been fetched and transferred."""
        if self._evaluation is not None:
            self._evaluation.batch_starts(batch, dataloader_idx)

    on_test_batch_start = on_validation_batch_start = on_predict_batch_start

    @event
    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """A batch is done."""
        if self._evaluation is not None:
            self._evaluation.batch_ends(batch, dataloader_idx)
            if self._evaluation.session.out:
                self._evaluation = None

    on_test_batch_end = on_validation_batch_end = on_predict_batch_end

    @event
    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The loop is over: report what there is."""
        if self._evaluation is not None:
            self._evaluation.session.finish()
            self._end_run()

    on_test_end = on_validation_end = on_predict_end

    # ---- the end of any of them

    @event
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The run was interrupted: report what there is, and leave nothing behind."""
        session = self._session
        if session is not None:
            session.finish(interrupted_by=exception)
        self._end_run()

    @event
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The Trainer is done with us."""
        self._end_run()
        send_home(trainer, self._origin, profiles=self._profiles, throughput=self._throughput)

    @property
    def _session(self) -> Session | None:
        """The session of the run that goes on."""
        running = self._fit or self._evaluation
        return None if running is None else running.session

    def _receive(self, profiles: Sequence[Profile], throughput: ThroughputSummary | None) -> None:
        """A run in processes that a launcher started, such as ddp_spawn's, has measured this on rank 0."""
        self._profiles, self._throughput = list(profiles), throughput
        for profile in profiles:
            OUTCOMES.reports(profile)

    def _end_run(self) -> None:
        self._builtin.put_back()
        session = self._session
        if session is not None:  # let go of it last, so that a second try finds it
            session.take_out()
            self._throughput = session.reports.throughput
        self._fit = self._evaluation = None
        for name in (*_IDLE_HOOKS, "on_train_batch_start"):
            self.__dict__.pop(name, None)

    def _broke(self, error: BaseException) -> None:
        """A hook of ours raised *error*: the run goes on without us, unless it is the user's Ctrl-C."""
        session = self._session
        try:
            if session is not None:
                session.border.broke(error)
            elif isinstance(error, Exception):
                logger.warning("this %s is not profiled: %s: %s", self._run_word, type(error).__name__, error)
                self._config = replace(self._config, enabled=False)
        finally:
            self._end_run()
            if not isinstance(error, Exception):
                raise error

    def _drop_idle_hooks(self) -> None:
        """Let the Trainer pass over hooks that do nothing: it takes some microseconds to call each, at every step."""
        for name in _IDLE_HOOKS:
            if getattr(type(self), name) in [getattr(base, name, None) for base in FlopsProfilerCallback.__bases__]:
                self.__dict__[name] = None

    def _hear_starts(self, wanted: bool) -> None:
        """Have ``on_train_batch_start`` called, or let the Trainer pass over it like an idle hook."""
        if wanted:
            self.__dict__.pop("on_train_batch_start", None)
        elif type(self).on_train_batch_start is FlopsProfilerCallback.on_train_batch_start:
            self.__dict__["on_train_batch_start"] = None


FlopsProfilerCallback.__doc__ = with_settings_described(
    FlopsProfilerCallback.__doc__,
    [name for name in inspect.signature(FlopsProfilerCallback).parameters if name in SETTINGS],
)


def _be_a_callback_of(root: ModuleType) -> None:
    """Have the class, and what users have derived from it, inherit the ``Callback`` of *root*."""
    callback = getattr(root, "Callback", None)
    bases = FlopsProfilerCallback.__bases__
    if callback is not None and callback not in bases:
        FlopsProfilerCallback.__bases__ = (*(base for base in bases if base is not _CallbackBases), callback)


if not any(importlib.util.find_spec(root.partition(".")[0]) for root in IMPORT_ROOTS):
    raise ImportError(
        "FlopsProfilerCallback needs Lightning: install lightning-flops[lightning] or "
        "lightning-flops[pytorch-lightning]"
    )
for _root in IMPORT_ROOTS:
    when_imported(_root, _be_a_callback_of)
