"""Front door for Lightning: ``FlopsProfilerCallback``, one class for both import roots.

It checks the settings and passes the Trainer's events on; a ``FitProfiler`` holds what lives as long as one call of
``Trainer.fit``.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lightning_flops.config import ProfilerConfig
from lightning_flops.lightning_fit import FitProfiler

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer

    from lightning_flops.analysis.profile import Profile

    _CallbackBases = Callback
else:

    def _callback_classes() -> tuple[type, ...]:
        """``Callback`` of every installed import root, so that either's Trainer and CLI take our class for its own."""
        found = []
        for root in ("lightning.pytorch", "pytorch_lightning"):
            if importlib.util.find_spec(root.partition(".")[0]) is None:
                continue
            callback = importlib.import_module(root).Callback
            if callback not in found:
                found.append(callback)
        if not found:
            raise ImportError(
                "FlopsProfilerCallback needs Lightning: install lightning-flops[lightning] or "
                "lightning-flops[pytorch-lightning]"
            )
        return tuple(found)

    class _CallbackBases(*_callback_classes()):
        pass


logger = logging.getLogger(__name__)

_RUNTIME_ATTRIBUTES = ("_fit", "log", "log_dict")
"""Not part of the pickled callback: a running fit, and the bound methods a Trainer puts on its callbacks."""


class FlopsProfilerCallback(_CallbackBases):
    """Counts and times one step of training, and reports it to the run's loggers.

    Add it to a ``Trainer``; nothing else changes. The step that begins after ``profile_step`` steps of the fit is
    counted, the steps after it are timed, and the report goes to the loggers, the console's log and ``profile.json``.

    Args:
        profile_step: the step to count, by the number of steps of this fit before it. Default 1.
        module_depth: deepest module level in the report; -1 for all. Default -1.
        top_modules: modules listed at each level of the aggregated profile. Default 1.
        detailed: print every module in a tree. Default True.
        output_file: path or URL for the text report too. Default None.
        recompute_fwd_factor: forward passes repeated in the backward, for the *estimated* backward only. Default 0.0.
        timing_steps: how many steps to time.
        monitor: log throughput for as long as training runs.
        batch_size: samples in a batch, or a function of the batch; None reads it from the tensors' first dimension.
        tokens_per_sample: tokens in a sample, or a function from a batch to its number of tokens; None: no tokens/s.
        causal_attention: ``"full"`` counts the whole score matrix, ``"half"`` half of it in calls flagged causal.
        peak_flops_per_sec: dense peak of one device in FLOP/s, or a mapping from dtype name; None looks the device up.
        tag_prefix: prefix of the scalars' and texts' tags.

    Raises:
        ConfigError: a setting breaks its rule.
    """

    def __init__(
        self,
        profile_step: int | None = None,
        module_depth: int | None = None,
        top_modules: int | None = None,
        detailed: bool | None = None,
        output_file: str | Path | None = None,
        recompute_fwd_factor: float | None = None,
        *,
        timing_steps: int = 20,
        monitor: bool = True,
        batch_size: int | Callable[[Any], int] | None = None,
        tokens_per_sample: int | Callable[[Any], int] | None = None,
        causal_attention: Literal["full", "half"] = "full",
        peak_flops_per_sec: float | Mapping[str, float] | None = None,
        tag_prefix: str = "flops_profiler",
    ) -> None:
        block = {
            "profile_step": profile_step,
            "module_depth": module_depth,
            "top_modules": top_modules,
            "detailed": detailed,
            "output_file": str(output_file) if isinstance(output_file, Path) else output_file,
            "recompute_fwd_factor": recompute_fwd_factor,
        }
        self._set_up(
            ProfilerConfig(
                # None means "not given": a command line passes every default explicitly.
                **{name: value for name, value in block.items() if value is not None},  # type: ignore[arg-type]
                timing_steps=timing_steps,
                monitor=monitor,
                batch_size=batch_size,
                tokens_per_sample=tokens_per_sample,
                causal_attention=causal_attention,
                peak_flops_per_sec=peak_flops_per_sec,
                tag_prefix=tag_prefix,
            )
        )

    def _set_up(self, config: ProfilerConfig) -> None:
        self._config = config
        self._profile: Profile | None = None
        self._fit: FitProfiler | None = None

    @classmethod
    def from_deepspeed_config(cls, config: Mapping[str, Any] | str | Path) -> FlopsProfilerCallback:
        """A callback with the settings of a DeepSpeed config's ``"flops_profiler"`` block.

        Args:
            config: the config as a dict, or the path or URL of its JSON file. DeepSpeed need not be installed.

        Returns:
            A callback that does nothing if the block is absent or not enabled, as in DeepSpeed.

        Raises:
            ConfigError: the file cannot be read, is no JSON object, or a setting breaks its rule.
        """
        callback = cls.__new__(cls)
        callback._set_up(ProfilerConfig.from_deepspeed_config(config))
        return callback

    @property
    def config(self) -> ProfilerConfig:
        """The settings in force."""
        return self._config

    @property
    def profile(self) -> Profile | None:
        """What the latest window measured; None until one has closed."""
        return self._profile

    def __getstate__(self) -> dict[str, Any]:
        """Settings and result; what belongs to a running fit stays behind."""
        return {name: value for name, value in self.__dict__.items() if name not in _RUNTIME_ATTRIBUTES}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A callback that is not in a fit."""
        self.__dict__.update(state)
        self._fit = None

    # ---- the training loop's events

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """A fit begins: open a new window."""
        self._end_fit()
        if not self._config.enabled:
            logger.info("flops_profiler.enabled is false: this fit is not profiled")
            return
        self._profile = None
        self._fit = FitProfiler.start(trainer, pl_module, config=self._config, publish=self._publish)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A batch has been fetched and transferred."""
        if self._fit is not None:
            self._fit.batch_starts(batch)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """A batch is done, and with it perhaps a step."""
        if self._fit is not None:
            self._fit.batch_ends(batch)
            if self._fit.out:
                self._fit = None

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The fit is over: report what there is."""
        if self._fit is not None:
            self._fit.finish()
        self._end_fit()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """The fit was interrupted: report what there is, and leave nothing behind."""
        if self._fit is not None:
            self._fit.finish(interrupted_by=exception)
        self._end_fit()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """The Trainer is done with us."""
        self._end_fit()

    def _end_fit(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.take_out()

    def _publish(self, profile: Profile) -> None:
        self._profile = profile
