"""Recognizes one training loop of a program that knows nothing of us: its optimizers, and the models that they update.

From the first round of updates we know which optimizers the loop has. The models are the modules, of all that exist,
that hold the parameters which these update. During one more step we see which of their wrappers the loop calls.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_flops.doors.optimizers import updated_by
from lightning_flops.doors.several_models import together
from lightning_flops.doors.turns import PATIENCE, TakingTurns
from lightning_flops.instrument.patches import Patches
from lightning_flops.instrument.torch_private.compiler import hide
from lightning_flops.instrument.torch_private.modules import children_of

_ROUNDS_WATCHED = 3
"""If the loop has called none of a model's wrappers by then, the outermost is taken, and its forward has no time."""

_LIBRARIES = ("accelerate.", "deepspeed.", "lightning.", "lightning_fabric.", "pytorch_lightning.")
"""Where classes come from that put optimizers of their own around another one."""

_MOST_MODELS = 16
"""Most models of one loop; what others compute is work outside of them."""


class LoopSearch:
    """Hears of the updates of a program until it knows one loop.

    Args:
        knows: tells whether an optimizer has made a step before.
        taps: what it puts on modules, and removes again.
        failed: is told what our code has raised in one of these.
        turns: those that optimizers take already.
    """

    def __init__(
        self,
        knows: Callable[[Any], bool],
        *,
        taps: Patches,
        failed: Callable[[BaseException], object],
        turns: TakingTurns | None = None,
    ) -> None:
        self.missed: list[int] = []
        """How many steps each loop had made that was over before it was recognized."""
        self.refused = ""
        """Why the loop cannot be profiled; without a full stop."""
        self._knows = knows
        self._turns = TakingTurns() if turns is None else turns
        self._awaited: list[Any] | None = None
        """Optimizers that had made no step yet when another one made its second."""
        self._round_is_known = False
        self._rounds_watched = 0
        self._models: list[list[nn.Module]] = []
        """Of each model the modules that hold its parameters, the outermost first."""
        self._called: dict[int, nn.Module] = {}
        """By id, those that the loop has called; of those that call each other the outermost comes first."""
        self._taps = taps
        self._failed = failed

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """Those of the loop, in the order of their updates in a step."""
        return tuple(one.optimizer for one in self._turns.in_order)

    @property
    def steps_done(self) -> int:
        """Steps that the loop has made."""
        members = self._turns.in_order
        return members[-1].number if members else 0

    def update_begins(self, optimizer: Any) -> None:
        """*optimizer* begins a step."""
        if self._round_is_known or optimizer not in self.optimizers[:1]:
            return
        if not self._waits_for_others():
            self._round_is_known = True
            self._watch_calls()

    def update_ends(self, optimizer: Any) -> bool:
        """*optimizer* has made a step; returns whether the loop is known."""
        if self._changes(optimizer) and self._round_is_known:
            self.stop()  # and look at another round
        if not self._round_is_known or optimizer not in self.optimizers[-1:]:
            return False
        self._rounds_watched += 1
        all_called = all(any(id(one) in self._called for one in each) for each in self._models)
        return not self.refused and (all_called or self._rounds_watched == _ROUNDS_WATCHED)

    def model(self) -> nn.Module:
        """What the loop calls; of several models the one that it calls first comes first."""
        places = {key: place for place, key in enumerate(self._called)}

        def first_called(module: nn.Module) -> int:
            return places.get(id(module), len(places))

        return together(sorted((min(each, key=first_called) for each in self._models), key=first_called))

    def stop(self) -> None:
        """Remove everything of ours from the modules, and let go of them."""
        self._taps.undo()
        self._models, self._called, self._awaited = [], {}, []
        self._round_is_known, self._rounds_watched = False, 0

    # ---- the optimizers

    def _changes(self, optimizer: Any) -> bool:
        """Note that *optimizer* has made a step; returns whether the loop has others now, or in another order."""
        before = self.optimizers
        self.missed += [one.number for one in self._turns.hears(optimizer)]
        return self.optimizers != before

    def _waits_for_others(self) -> bool:
        """Whether an optimizer exists that may still make its first step in this loop."""
        if self._awaited is None:
            self._awaited = [one for one in optimizers_that_exist() if not self._knows(one)]
        members = self._turns.members
        self._awaited = [one for one in self._awaited if self._turns.of(one) is None]
        return bool(self._awaited) and max(one.number for one in members) < PATIENCE

    # ---- the models

    def _watch_calls(self) -> None:
        """See which modules the loop calls, of those that hold the parameters that are updated."""
        self._models = models_holding({one for each in self.optimizers for one in updated_by(each)})
        if _is_an_engines(self._models):
            self.refused = 'the DeepSpeed config has no "flops_profiler" block that is enabled'
        elif not self._models:
            self.refused = "no module holds the parameters that the optimizer updates"
        else:
            for module in (one for candidates in self._models for one in candidates):
                self._taps.replace_calls(module, self._noting(module))

    def _noting(self, module: nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                try:
                    self._called.setdefault(id(module), module)
                except BaseException as error:
                    self._failed(error)
                return call(*args, **kwargs)

            hide(run, alone=True)  # torch.compile(model) calls the model so, and would compile this
            return run

        return make


def _is_an_engines(models: list[list[nn.Module]]) -> bool:
    """Whether an engine of DeepSpeed makes the updates. No module holds what ZeRO updates: its own partitions."""
    if models:
        return any(type(one).__module__.startswith("deepspeed.") for candidates in models for one in candidates)
    kind = getattr(sys.modules.get("deepspeed.runtime.engine"), "DeepSpeedEngine", None)
    return isinstance(kind, type) and bool(objects_of(kind))


def objects_of(*kinds: type) -> list[Any]:
    """Every object of this process that is of one of these classes, or of one that inherits from it.

    A process of torch has half a million objects, and its training waits for this.
    """
    wanted: set[int] = set()
    found = list(kinds)
    while found:
        kind = found.pop()
        if id(kind) not in wanted:
            wanted.add(id(kind))
            found += type.__subclasses__(kind)
    return [one for one in gc.get_objects() if id(type(one)) in wanted]


def optimizers_that_exist() -> Iterator[Any]:
    """Every optimizer of this process that may make a step itself; not those that libraries put around another."""
    for one in objects_of(Optimizer):
        of_a_library = any(kind.__module__.startswith(_LIBRARIES) for kind in type(one).__mro__)
        if not of_a_library and next(updated_by(one), None) is not None:
            yield one


def models_holding(parameters: set[int]) -> list[list[nn.Module]]:
    """The fewest modules that hold as many of these parameters as any do; each with others that hold the same.

    Args:
        parameters: their ids.
    """
    found: list[list[nn.Module]] = []
    left = set(parameters)
    while left and len(found) < _MOST_MODELS and (holders := holders_of(left)):
        found.append(holders)
        left -= set(map(id, holders[0].parameters()))
    return found


def holders_of(parameters: Iterable[int]) -> list[nn.Module]:
    """The modules that hold most of these parameters, and the same ones, of all that exist; the outermost first.

    Args:
        parameters: their ids.
    """
    wanted = set(parameters)
    modules = {id(one): one for one in objects_of(nn.Module)}
    held: dict[int, set[int]] = {}

    def holds(module: nn.Module) -> set[int]:
        key = id(module)
        if key not in held:
            held[key] = set()  # a module may contain itself
            found = {id(one) for one in module.parameters(recurse=False)} & wanted
            for child in children_of(module).values():
                if child is not None:
                    found |= holds(child)
            held[key] = found
        return held[key]

    most = max((holds(module) for module in modules.values()), key=len, default=set())
    full = [module for module in modules.values() if most and held[id(module)] == most]
    return sorted(full, key=lambda module: sum(1 for _ in module.modules()), reverse=True)
