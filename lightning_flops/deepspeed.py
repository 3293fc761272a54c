"""DeepSpeed: the ``"flops_profiler"`` block of its config, working, and ``attach`` for one engine.

After ``install()`` DeepSpeed's own profiler stays off, and every engine whose block is enabled gets one of ours when it
has been made. The user's code stays as it is.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import weakref
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

try:
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.hybrid_engine import DeepSpeedHybridEngine
    from deepspeed.runtime.pipe.engine import PipelineEngine
except ModuleNotFoundError as missing:
    if str(missing.name).partition(".")[0] != "deepspeed":
        raise
    raise ImportError("lightning_flops.deepspeed needs DeepSpeed: pip install '.[deepspeed]' in a clone") from missing

from torch.utils.weak import WeakIdKeyDictionary

from lightning_flops.adapters.deepspeed import EngineAdapter, engine_run, make_without_builtin, settings_of
from lightning_flops.config import BLOCK, ProfilerConfig
from lightning_flops.errors import ConfigError, LightningFlopsError
from lightning_flops.measure.patches import Ends, listen
from lightning_flops.measure.torch_private.optional import children_of
from lightning_flops.run.delivery import OUTCOMES, ProfiledRun, finish_dropped
from lightning_flops.signals import Undo, words_of
from lightning_flops.units import package_logger

__all__ = ["Handle", "attach", "install", "uninstall"]

logger = package_logger(__name__)

# Every class of engine that ``deepspeed.initialize`` makes; the first two call the third's ``__init__``.
_ENGINES = (PipelineEngine, DeepSpeedHybridEngine, DeepSpeedEngine)


class Handle(ProfiledRun):
    """A profiler on one engine, and what it has measured."""

    def __init__(self, config: ProfilerConfig) -> None:
        self._config = config
        self._start_anew()
        self._detached = False
        # Weak, because the table of handles must not keep an engine alive: the engine keeps its adapter.
        self._kept: Callable[[], EngineAdapter | None] = lambda: None

    @property
    def run(self) -> Any:
        """The engine's run; None when it is over."""
        adapter = self._kept()
        return None if adapter is None else adapter.run

    def detach(self) -> None:
        """Report what there is if a window is open, and leave nothing on the engine; the profiles stay."""
        self._detached = True
        adapter = self._kept()
        if adapter is not None:
            adapter.finish()
        self._keep_results()


# By identity: an engine may be equal to others or have no hash.
_handles: MutableMapping[Any, Handle] = WeakIdKeyDictionary()
_installed = Undo()


def install() -> None:
    """Take over the ``"flops_profiler"`` block of every engine that is made from here on.

    A key that is no setting is a warning, a value that breaks its rule a warning and no profile.
    """
    if not _installed:
        make_without_builtin(_installed)
        for kind in _ENGINES:
            listen(_installed, kind, "__init__", functools.partial(_begins, kind))


def uninstall() -> None:
    """Give the block back to DeepSpeed; engines that are profiled already stay so until they are detached."""
    _installed.close()


def attach(
    engine: DeepSpeedEngine, config: ProfilerConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None
) -> Handle:
    """Profile *engine* from here on; its steps are counted from the one that begins now or next.

    *config* is a ``"flops_profiler"`` block, or a DeepSpeed config (object or path) that has one. None takes the
    block of the engine's own config, in which a mistake is a warning, or the defaults if it has none. Asked again, this
    returns the same handle, and a new one after ``detach()``.

    Raises:
        ConfigError: a setting given here breaks its rule, or the engine is profiled already with other settings.
        LightningFlopsError: *engine* is no engine, or has no module.
    """
    if not isinstance(engine, DeepSpeedEngine) or children_of(engine).get("module") is None:
        raise LightningFlopsError(f"attach needs what deepspeed.initialize returns first, got {type(engine).__name__}")
    handle = _handles.get(engine)
    if handle is not None and not handle._detached:
        if config is None or handle.config == _settings(engine, config):
            return handle
        if (adapter := handle._kept()) is not None and not adapter.run.closed:
            raise ConfigError("this engine is profiled already with other settings: detach() its handle first")
    settings = _settings(engine, config)
    handle = Handle(settings)
    if settings.enabled:
        adapter = engine_run(engine, settings, handle._profiles.append)
        handle._kept = weakref.ref(adapter)
        handle._delivery = adapter.run.delivery
        adapter.begin()
    elif config is not None:
        logger.info("flops_profiler.enabled is not true in what attach was given: the engine is not profiled")
    _handles[engine] = handle
    return handle


@atexit.register
def end_all() -> None:
    """The program ends: profilers whose window is still open report what they have."""
    for handle in list(_handles.values()):
        handle.detach()
    finish_dropped()


def _settings(
    engine: Any, config: ProfilerConfig | Mapping[str, Any] | str | os.PathLike[str] | None
) -> ProfilerConfig:
    if isinstance(config, ProfilerConfig):
        return config
    if config is None:
        return _block_of(engine)
    if isinstance(config, Mapping) and BLOCK not in config:
        return ProfilerConfig.from_block({"enabled": True, **config})
    return ProfilerConfig.from_deepspeed_config(config)


def _block_of(engine: Any, without: object = None) -> ProfilerConfig:
    """The block of *engine*'s own config, as the user wrote it, or this; rank 0 logs its mistakes."""
    block = getattr(getattr(engine, "_config", None), "_param_dict", {}).get(BLOCK, without)
    # Off is what the config says, or the block was forgotten, or its name misspelt.
    level = logging.INFO if isinstance(block, Mapping) and "enabled" in block else logging.WARNING
    return settings_of(block, {}, enabled=False, run="engine", logs=engine.global_rank == 0, level=level)


def _begins(kind: type, engine: Any, *_: Any, **__: Any) -> Ends | None:
    """The ``__init__`` of an engine begins, as one of this *kind*, after which it is profiled if its block says so."""
    if next(one for one in type(engine).__mro__ if one in _ENGINES) is not kind:
        return None  # a part of another's

    def ends(_: Any, error: BaseException | None) -> None:
        try:
            if error is None and (settings := _block_of(engine, without={})).enabled:
                attach(engine, settings)
            elif error is None:
                OUTCOMES.reasons.append(f'the DeepSpeed config has no "{BLOCK}" block that is enabled')
        except Exception as ours:  # training goes on without us
            logger.warning("this engine is not profiled: %s", words_of(ours))

    return ends
