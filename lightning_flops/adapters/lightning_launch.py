"""Brings results from processes that Lightning's launcher started back to the process where the callback was made.

Under ddp_spawn, ddp_fork and in notebooks a fit runs in other processes, on copies of the callbacks. What the first of
them returns goes through a pipe that is read only when all have ended, so little fits into it: the results are in a
temporary file, as Lightning's weights are, and the pipe carries its name.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lightning_flops.schema.profile import Profile
from lightning_flops.schema.throughput import ThroughputSummary
from lightning_flops.units import package_logger

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

logger = package_logger(__name__)


Origin = tuple[int, int]  # process and number of a callback where it was made: its copies in other processes keep it
_numbers = itertools.count()
_callbacks: weakref.WeakValueDictionary[Origin, Any] = weakref.WeakValueDictionary()


def origin_of(callback: Any) -> Origin:
    """Make a new origin; the ``_receive`` of *callback* gets what copies in other processes send to it."""
    origin = os.getpid(), next(_numbers)
    _callbacks[origin] = callback
    return origin


def send_home(
    trainer: Trainer, origin: Origin, *, profiles: Sequence[Profile], throughput: ThroughputSummary | None
) -> None:
    """Have the launcher of *trainer*, if one started this process, return the results with its own."""
    launcher: Any = getattr(trainer.strategy, "launcher", None)
    collect = getattr(launcher, "get_extra_results", None)
    if origin[0] == os.getpid() or collect is None:
        return

    def with_ours(*args: Any, **kwargs: Any) -> Any:
        extra = collect(*args, **kwargs)
        try:
            path = Path(tempfile.mkdtemp(prefix="lightning_flops-"), "results.json")
            ended = None if throughput is None else throughput.to_json()
            path.write_text(json.dumps([[profile.to_json() for profile in profiles], ended]), encoding="utf-8")
            extra[f"lightning_flops {origin[1]}"] = _Parcel(origin, str(path))
        except Exception as error:  # the training is done: Lightning still gets its own results
            logger.warning("callback.profile stays None in the process that called fit: %s", error)
        return extra

    # This changes only the launcher in this process, and the process ends when it has returned its results.
    launcher.get_extra_results = with_ours


class _Parcel(NamedTuple):
    """Calls ``_deliver`` in the process that unpickles it."""

    origin: Origin
    path: str

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Origin, str]]:
        return _deliver, (self.origin, self.path)


def _deliver(origin: Origin, path: str) -> None:
    try:
        profiles, throughput = json.loads(Path(path).read_text(encoding="utf-8"))
        shutil.rmtree(Path(path).parent, ignore_errors=True)
        if (callback := _callbacks.get(origin)) is not None:
            ended = None if throughput is None else ThroughputSummary.from_json(throughput)
            callback._receive([Profile.from_json(text) for text in profiles], ended)
    except Exception as error:  # Lightning still has to read its own results
        logger.warning("callback.profile stays None in this process: %s: %s", type(error).__name__, error)
