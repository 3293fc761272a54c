"""``FlopsProfilerCallback`` for Lightning: one class for both import roots.

It is a ``Callback`` of each root that the program imports, before this module or after it, so that the Trainer and the
CLI of either root accept it. It imports neither root: importing the second one would change the log of the first.
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.context import get_spawning_popen
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from lightning_flops.adapters.deepspeed import make_without_builtin, settings_of
from lightning_flops.adapters.lightning import IMPORT_ROOTS, LightningAdapter, block_of, is_deepspeed
from lightning_flops.adapters.program import when_imported
from lightning_flops.config import (
    OWN_FOLDER,
    SETTINGS,
    ProfilerConfig,
    given_settings,
    refuse_unknown,
    with_settings_described,
)
from lightning_flops.errors import LightningFlopsError
from lightning_flops.run.delivery import ProfiledRun
from lightning_flops.run.run import safe
from lightning_flops.schema.profile import Profile
from lightning_flops.signals import Quiet, Undo

if TYPE_CHECKING:
    from lightning_flops.adapters.lightning import Callback, LightningModule, Trainer
    from lightning_flops.records import Loop

    _CallbackBases = Callback
else:

    class _CallbackBases:
        """Stands for ``Callback`` until the program has imported it from either root."""


_LOOPS: dict[str | None, Loop] = {"fit": "training", "validate": "validate", "test": "test", "predict": "predict"}

# What is not pickled: what belongs to a run, and the bound methods that a Trainer sets on the callback.
_RUNTIME_ATTRIBUTES = ("_adapter", "_delivery", "_pipe", "_to_parent", "_making_engine", "log", "log_dict")


class FlopsProfilerCallback(ProfiledRun, _CallbackBases):
    """Counts and times one step of training, and reports it to the run's loggers.

    Add it to a ``Trainer``; nothing else changes. The step that begins after ``profile_step`` steps of the fit is
    counted, and the steps after it are timed. The report goes to the loggers, to the console's log and to files in
    ``lightning_flops`` beside the logs, or below ``default_root_dir`` if no logger has a folder.

    ``Trainer.predict``, ``test`` and ``validate`` are profiled, too: a step is one batch there, and tags and names of
    files say which loop it was. Validation inside a fit belongs to no step.

    An argument that is None has not been given. Under a DeepSpeedStrategy it has the value from the
    ``"flops_profiler"`` block of the DeepSpeed config, if that has one, and otherwise the default. DeepSpeed's own
    profiler is switched off. A block that says ``"enabled": false`` switches this callback off, too.

    Raises:
        ConfigError: a setting breaks its rule, or an argument is not a setting. In the block of a DeepSpeed config
            both are warnings only: a value that breaks its rule means no profile, an unknown key is ignored.
    """

    _for_any_trainer = False
    _folder: str | None = None  # takes reports in the place of one below the Trainer's
    _making_engine = Undo()  # ends when the strategy has made its engine
    _pipe: tuple[Connection, Connection] | None = None  # from the processes that train in the place of this one
    _to_parent: Connection | None = None  # to the process that waits while this one trains

    def __init__(
        self,
        profile_step: int | Sequence[int] | None = None,
        module_depth: int | None = None,
        top_modules: int | None = None,
        detailed: bool | None = None,
        output_file: str | os.PathLike[str] | None = None,
        recompute_fwd_factor: float | None = None,
        *,
        timing_steps: int | None = None,
        every: int | None = None,
        timer_only: bool | None = None,
        trace_schedule: Mapping[str, int] | None = None,
        trace: bool | None = None,
        trace_dir: str | os.PathLike[str] | None = None,
        record_shapes: bool | None = None,
        profile_memory: bool | None = None,
        with_stack: bool | None = None,
        lines: bool | None = None,
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
        self._given = given_settings(arguments)
        self._config = ProfilerConfig(**self._given)
        self._start_anew()

    @classmethod
    def from_deepspeed_config(cls, config: Mapping[str, Any] | str | os.PathLike[str]) -> FlopsProfilerCallback:
        """A callback with the settings of a DeepSpeed config's ``"flops_profiler"`` block; without one it does nothing.

        *config* is a dict, or the path of a JSON file; a ConfigError says what is wrong in it.
        """
        callback = cls()
        callback._config = settings = ProfilerConfig.from_deepspeed_config(config)
        callback._given = {field.name: getattr(settings, field.name) for field in fields(settings)}
        return callback

    @classmethod
    def for_any_trainer(cls, settings: Mapping[str, Any], *, folder: str | None = None) -> FlopsProfilerCallback:
        """A callback that the user has not written: it does nothing if the Trainer has another one.

        If no logger has a folder, the files go to *folder*, if there is one. A DeepSpeed config's block decides.
        """
        callback = cls(**settings)
        callback._for_any_trainer, callback._folder = True, folder
        return callback

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _RUNTIME_ATTRIBUTES}
        if get_spawning_popen() is not None:  # for a process that trains, while this one waits for it
            self._pipe = self._pipe or Pipe(duplex=False)
            state["_to_parent"] = self._pipe[1]
        return state

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """As those of any run; the latest alone where the Trainer has trained in processes that it spawned."""
        while self._pipe is not None and self._pipe[0].poll():
            with Quiet(OSError, LightningFlopsError):  # the file is gone
                self._profiles.append(Profile.load(self._pipe[0].recv()))
        return super().profiles

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end_run()  # of an earlier one that no event has ended
        self._making_engine = Undo()
        self._take_settings(trainer, "fit" if stage == "fit" else f"{stage} loop")

    @safe
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._making_engine.close()

    @safe
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end_run()
        if not self._config.enabled:
            return
        self._start_anew()
        # Who did not ask for a profile gets no new folder.
        asked_for = not self._for_any_trainer or block_of(trainer) is not None
        folder = f"{str(trainer.default_root_dir).rstrip('/')}/{OWN_FOLDER}" if asked_for else self._folder
        to: dict[str, Any] = {"config": self._config, "publish": self._profiles.append, "own_folder": folder}
        self._begin_run(LightningAdapter(self, trainer, pl_module, _LOOPS[trainer.state.fn], **to))

    on_predict_start = on_test_start = on_train_start

    @safe
    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self.on_train_start(trainer, pl_module)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if self._adapter is not None:
            self._adapter.batch_starts(batch)

    on_predict_batch_start = on_test_batch_start = on_train_batch_start

    def on_validation_batch_start(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.state.fn == "validate":
            self.on_train_batch_start(trainer, *args, **kwargs)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._adapter is not None:
            self._adapter.batch_ends(batch, outputs)

    on_predict_batch_end = on_test_batch_end = on_train_batch_end

    def on_validation_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.state.fn == "validate":
            self.on_train_batch_end(trainer, *args, **kwargs)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._adapter is not None:
            self._adapter.saves()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish()

    on_predict_end = on_test_end = on_train_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._finish()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._finish(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end_run()

    @safe
    def _take_settings(self, trainer: Trainer, run: str) -> None:
        """Take the settings for a *run* of *trainer*, whose strategy has not made its engine yet."""
        ours = [one for one in trainer.callbacks if isinstance(one, FlopsProfilerCallback)]  # type: ignore[attr-defined]
        if self._for_any_trainer and not all(one._for_any_trainer for one in ours):
            self._config = ProfilerConfig(enabled=False)
            return
        self._config = settings_of(
            block_of(trainer),
            self._given,
            enabled=not self._for_any_trainer,
            run=run,
            logs=trainer.is_global_zero,
            # A user who wrote the callback into the program expects a profile.
            level=logging.INFO if self._for_any_trainer else logging.WARNING,
        )
        if run == "fit" and is_deepspeed(trainer) and self._given.get("enabled", True):
            make_without_builtin(self._making_engine)

    def _end_run(self) -> None:
        self._making_engine.close()
        run = self.run
        super()._end_run()
        if (
            run is not None
            and self._to_parent is not None
            and (path := run.adapter.facts.output.files.profile_path) is not None
        ):
            with Quiet(OSError):  # the other process is gone
                self._to_parent.send(os.path.abspath(path))


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
        "FlopsProfilerCallback needs Lightning: pip install '.[lightning]' or '.[pytorch-lightning]' in a clone"
    )
for _root in IMPORT_ROOTS:
    when_imported(_root, _be_a_callback_of)
