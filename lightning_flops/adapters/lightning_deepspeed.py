"""DeepSpeed under Lightning: the ``"flops_profiler"`` block of a ``DeepSpeedStrategy``, and the strategy's engine.

The callback's ``setup`` reads the block, before the strategy makes its engine from it. Until the engine is made, the
strategy's config says that DeepSpeed's own profiler is off. Afterwards it is again as the user wrote it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_flops.config import BLOCK

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class _SwitchedOff(dict[str, Any]):
    """A block that tells DeepSpeed not to profile."""

    def __init__(self, block: Mapping[str, Any]) -> None:
        super().__init__({**block, "enabled": False})
        self.original = block


class BuiltinProfiler:
    """DeepSpeed's own profiler in one Trainer: switched off until the engine is made."""

    def __init__(self) -> None:
        self._config: dict[str, Any] = {}

    def switch_off(self, trainer: Trainer) -> None:
        """Switch it off in the config that the strategy will make its engine from."""
        self._config = trainer.strategy.config  # type: ignore[attr-defined]
        if not isinstance(self._config[BLOCK], _SwitchedOff):  # another callback of ours was here
            self._config[BLOCK] = _SwitchedOff(self._config[BLOCK])

    def put_back(self) -> None:
        """Make the config, which may be the user's own dict, as the user wrote it."""
        if isinstance(block := self._config.get(BLOCK), _SwitchedOff):
            self._config[BLOCK] = block.original
        self._config = {}


def is_deepspeed(trainer: Trainer) -> bool:
    """Whether *trainer* uses a DeepSpeedStrategy, of either import root, or a subclass of it."""
    return any(kind.__name__ == "DeepSpeedStrategy" for kind in type(trainer.strategy).__mro__)


def engine_of(trainer: Trainer) -> Any:
    """The engine that *trainer* uses in a fit; None without DeepSpeed."""
    return trainer.strategy.deepspeed_engine if is_deepspeed(trainer) else None  # type: ignore[attr-defined]


def block_of(trainer: Trainer) -> object | None:
    """The ``"flops_profiler"`` block of *trainer*'s DeepSpeed config as the user wrote it; None if there is none."""
    config = getattr(trainer.strategy, "config", None) if is_deepspeed(trainer) else None
    block = config.get(BLOCK) if isinstance(config, Mapping) else None
    return block.original if isinstance(block, _SwitchedOff) else block
