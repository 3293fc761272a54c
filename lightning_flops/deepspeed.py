"""Front door for DeepSpeed: the ``"flops_profiler"`` block of its config, working, and ``attach`` for one engine.

``install()`` takes the block over: DeepSpeed's own profiler stands down, and every engine whose block is enabled gets
a profiler of ours when it has been made. What it replaces are two names below ``deepspeed.runtime``; both lie under
config parsing and under every way of importing ``deepspeed.initialize``, so the user's code stays as it is.
"""

from __future__ import annotations

import atexit
import functools
import logging
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

try:
    from deepspeed.runtime import config as deepspeed_config
    from deepspeed.runtime.base_optimizer import ZeROOptimizer
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine
except ModuleNotFoundError as missing:
    if str(missing.name).partition(".")[0] != "deepspeed":
        raise
    raise ImportError("lightning_flops.deepspeed needs DeepSpeed: install lightning-flops[deepspeed]") from missing

from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from lightning_flops.config import BLOCK, ProfilerConfig, TakenBlock
from lightning_flops.doors.deepspeed_block import log_mistakes
from lightning_flops.doors.deepspeed_context import private_names
from lightning_flops.doors.deepspeed_engine import EngineDoor
from lightning_flops.doors.deepspeed_pipeline import PipelineSteps
from lightning_flops.doors.deepspeed_steps import EngineSteps
from lightning_flops.errors import ConfigError, LightningFlopsError
from lightning_flops.instrument.patches import Patches
from lightning_flops.instrument.torch_private.modules import holds
from lightning_flops.session.private_names import PrivateNames
from lightning_flops.session.results import ProfiledRun
from lightning_flops.text.printable import package_logger

__all__ = ["Handle", "attach", "install", "uninstall"]

logger = package_logger(__name__)

_ENGINES = (PipelineEngine, DeepSpeedHybridEngine, DeepSpeedEngine)
"""Every class of engine that ``deepspeed.initialize`` makes; the first two call the third's ``__init__``."""


class Handle(ProfiledRun):
    """A profiler on one engine, and what it has measured."""

    def __init__(self, config: ProfilerConfig) -> None:
        self._config = config
        self._start_anew()
        self._detached = False
        # Weak, because the table of handles must not keep an engine alive: the engine's taps hold the door.
        self._door: Callable[[], EngineDoor | None] = lambda: None

    def detach(self) -> None:
        """Report what there is if a window is open, and leave nothing on the engine; the profiles stay."""
        try:
            self._detached = True
            door = self._door()
            if door is not None and not door.session.out:
                door.end()
                self._throughput = door.session.reports.throughput
        except BaseException as error:
            door = self._door()
            if door is not None:
                door.border.broke(error)
            elif not isinstance(error, Exception):
                raise


# By identity: an engine and what DeepSpeed reads are others' objects, which may be equal to others or have no hash.
_handles: MutableMapping[Any, Handle] = WeakIdKeyDictionary()
_installed = Patches()
_blocks: MutableMapping[Any, TakenBlock] = WeakIdKeyDictionary()
"""The block by the object in which DeepSpeed keeps what it read of it."""


def install(*, keep_builtin: bool = False) -> None:
    """Take over the ``"flops_profiler"`` block of every engine that is made from here on.

    Engines whose config has no such block, or one that is not enabled, stay untouched. What DeepSpeed takes, trains: a
    key that is no setting is a warning, a value that breaks its rule a warning and no profile. A second call changes
    nothing.

    Args:
        keep_builtin: leave DeepSpeed's own profiler on beside ours, to compare them.
    """
    try:
        if _installed:
            return
        _installed.replace(
            deepspeed_config,
            "DeepSpeedFlopsProfilerConfig",
            functools.partial(_reading_the_block, keep_builtin=keep_builtin),
        )
        for engine_class in _ENGINES:
            _installed.replace(
                engine_class, "__init__", functools.partial(_attaching_at_the_end, keep_builtin=keep_builtin)
            )
    except BaseException as error:
        _installed.undo()
        if not isinstance(error, Exception):
            raise
        logger.warning("no engine is profiled: %s: %s", type(error).__name__, error)


def uninstall() -> None:
    """Give the block back to DeepSpeed; engines that are profiled already stay so until they are detached."""
    try:
        _installed.undo()
    except BaseException as error:
        _installed.undo()  # for what it did not get to
        if not isinstance(error, Exception):
            raise


def attach(
    engine: DeepSpeedEngine,
    config: ProfilerConfig | Mapping[str, Any] | str | Path | None = None,
    *,
    keep_builtin: bool = False,
) -> Handle:
    """Profile *engine* from here on; its steps are counted from the one that begins now or next.

    Args:
        engine: what ``deepspeed.initialize`` returned.
        config: the settings: a ``"flops_profiler"`` block, or a DeepSpeed config (object, path or URL) that has one.
            None takes the block of the engine's own config, in which a mistake is a warning, or the defaults if it has
            none.
        keep_builtin: leave DeepSpeed's own profiler on, if the engine's config has it enabled.

    Returns:
        The engine's handle: the same one when it is asked for again, a new one after ``detach()``.

    Raises:
        ConfigError: a setting given here breaks its rule, or the engine is profiled already with other settings.
        LightningFlopsError: *engine* is no engine, has no module, or was destroyed.
    """
    if not isinstance(engine, DeepSpeedEngine):
        raise LightningFlopsError(f"attach needs what deepspeed.initialize returns first, got {type(engine).__name__}")
    if not holds(engine, "module"):
        raise LightningFlopsError("attach needs an engine with a module; this one has none, or was not made to its end")
    handle = _handles.get(engine)
    attached = handle is not None and not handle._detached
    if handle is not None and attached and config is None:
        return handle
    names = private_names()
    settings = _settings(engine, config, names)
    if handle is not None and attached:
        if handle.config == settings:
            return handle
        if _is_running(handle):
            raise ConfigError("this engine is profiled already with other settings: detach() its handle first")
    if _is_destroyed(engine, names):
        raise LightningFlopsError("attach needs an engine that can train; this one was destroyed")
    handle = Handle(settings)
    _handles[engine] = handle
    if not settings.enabled:
        logger.info("flops_profiler.enabled is false: the engine is not profiled")
        return handle
    _start(engine, handle, names=names, keep_builtin=keep_builtin)
    return handle


def _start(engine: Any, handle: Handle, *, names: PrivateNames, keep_builtin: bool) -> None:
    if not _at_exit_is_known:
        atexit.register(_end_all)
        _at_exit_is_known.append(True)
    for other in list(_handles.values()):
        if (running := other._door()) is not None:
            running.end_if_left()
    staged = isinstance(engine, PipelineEngine)
    try:
        door = EngineDoor(
            engine,
            config=handle.config,
            publish=handle._profiles.append,
            steps=PipelineSteps if staged else EngineSteps,
            names=names,
            whole_steps=staged,  # a stage's micro-batches overlap, and are looked at together
            keep_builtin=keep_builtin,
        )
    except Exception as error:
        _say_not_profiled(error)
        return
    handle._door = weakref.ref(door)
    door.session.begin()


_at_exit_is_known: list[bool] = []


def _end_all() -> None:
    """The program ends: profilers whose window is still open report what they have."""
    for handle in list(_handles.values()):
        handle.detach()


def _is_destroyed(engine: Any, names: PrivateNames) -> bool:
    """Whether ``destroy`` has taken the hooks off by which ZeRO reduces gradients; without ZeRO an engine trains on."""
    optimizer = vars(engine).get("optimizer")
    hooks = names.get(optimizer, "_grad_acc_hooks", ()) if isinstance(optimizer, ZeROOptimizer) else ()
    return any(isinstance(hook, RemovableHandle) and hook.id not in (hook.hooks_dict_ref() or ()) for hook in hooks)


def _is_running(handle: Handle) -> bool:
    door = handle._door()
    return door is not None and not door.session.out


def _settings(
    engine: Any, config: ProfilerConfig | Mapping[str, Any] | str | Path | None, names: PrivateNames
) -> ProfilerConfig:
    if isinstance(config, ProfilerConfig):
        return config
    if config is None:
        taken = _block_of(engine, names)
        if taken is None:
            return ProfilerConfig()
        _say_what_is_wrong(engine, taken)
        return taken.settings
    if isinstance(config, Mapping) and BLOCK not in config:
        return ProfilerConfig.from_block({"enabled": True, **config})
    return ProfilerConfig.from_deepspeed_config(config)


def _block_of(engine: Any, names: PrivateNames) -> TakenBlock | None:
    """The block of *engine*'s own config, as it was before DeepSpeed's own profiler stood down; None without one."""
    config = names.get(engine, "_config", None)
    if config is None:
        return None
    taken = _blocks.get(config.flops_profiler_config)
    if taken is None and BLOCK in (as_written := names.get(config, "_param_dict", {})):
        taken = ProfilerConfig.taken_over(as_written[BLOCK])  # it was read before install()
    return taken


def _say_what_is_wrong(engine: Any, taken: TakenBlock) -> None:
    if engine.global_rank == 0:
        log_mistakes(taken, run="engine")


def _reading_the_block(original: Callable[[Any], Any], *, keep_builtin: bool) -> Callable[[Any], Any]:
    """What reads the block in place of DeepSpeed's class, below every form in which a config can be given."""

    def read(param_dict: Any) -> Any:
        result = original(param_dict)  # first: what DeepSpeed refuses ends in its own error
        try:
            if BLOCK in param_dict:
                taken = ProfilerConfig.taken_over(param_dict[BLOCK])
                _blocks[result] = taken
                if taken.builtin_on and not keep_builtin:
                    result.enabled = False
        except Exception as error:  # no object of ours; training goes on without us
            logger.warning("engines of this config are not profiled: %s: %s", type(error).__name__, error)
        return result

    return read


def _attaching_at_the_end(original: Callable[..., None], *, keep_builtin: bool) -> Callable[..., None]:
    """An engine's ``__init__`` after which the engine is profiled, if its block says so."""

    def make(engine: Any, *args: Any, **kwargs: Any) -> None:
        outermost = False
        try:
            outermost = engine not in _being_made
            _being_made[engine] = True
        except Exception as error:
            outermost = False
            _say_not_profiled(error)
        try:
            original(engine, *args, **kwargs)
        finally:
            try:
                if outermost:
                    _being_made.pop(engine, None)
            except Exception as error:
                outermost = False
                _say_not_profiled(error)
        try:
            if outermost:
                _attach_by_block(engine, keep_builtin=keep_builtin)
        except Exception as error:
            _say_not_profiled(error)

    return make


def _say_not_profiled(error: Exception) -> None:
    """Our side raised *error*: training goes on without us."""
    logger.warning("this engine is not profiled: %s: %s", type(error).__name__, error)


_being_made: MutableMapping[Any, bool] = WeakIdKeyDictionary()


def _attach_by_block(engine: Any, *, keep_builtin: bool) -> None:
    if engine in _handles:
        return
    names = private_names()
    taken = _block_of(engine, names)
    if taken is not None and taken.settings.enabled:
        attach(engine, keep_builtin=keep_builtin)
        return
    if taken is not None:
        _say_what_is_wrong(engine, taken)
        if taken.wrong:
            return
    # Off is what somebody wrote, or the block was forgotten, or its name misspelt.
    level = logging.INFO if taken is not None and taken.says_enabled else logging.WARNING
    if engine.global_rank == 0:
        names.tell(logger.warning)
        logger.log(level, 'this engine is not profiled: its config has no "flops_profiler" block that is enabled')
