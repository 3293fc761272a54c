"""Finds the training loop of a program that knows nothing of us, and profiles it.

torch tells of every optimizer's step. From the first round of updates we know which optimizers the loop has. The model
is the module, of all that exist, that holds the parameters they update. During one more step we see which of its
wrappers the loop calls. Then the loop gets the door that ``profile_training`` uses.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from lightning_flops.config import ProfilerConfig
from lightning_flops.doors.plain_context import LoopOutput, frame_of
from lightning_flops.doors.plain_loop import PlainLoop
from lightning_flops.instrument.module_scope import unwrapped
from lightning_flops.instrument.optimizer_hooks import OptimizerHooks
from lightning_flops.instrument.patches import Patches
from lightning_flops.instrument.torch_private.modules import children_of
from lightning_flops.schema.profile import Profile
from lightning_flops.session.outcomes import OUTCOMES
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)

_STEPS_WATCHED = 4
"""If the loop has called none of the modules by then, the outermost is taken, and its forward has no time."""

_FABRICS = ("lightning.fabric.fabric.Fabric", "lightning_fabric.fabric.Fabric")


class LoopFinder:
    """Watches a program's optimizers until it has found the loop that they belong to.

    Args:
        config: the settings of the profile.
        log_dir: a folder for TensorBoard's files and ours; None: our own folder, for our files alone.
        announce: says in a sentence where the report is.
    """

    def __init__(self, config: ProfilerConfig, *, log_dir: str | None = None, announce: Callable[[str], None]) -> None:
        self._config = config
        self._log_dir = log_dir
        self._announce = announce
        self._steps_done = 0
        self._in_update = False
        self._optimizers: list[Any] = []
        self._round_is_known = False
        self._candidates: list[nn.Module] = []
        self._called: list[nn.Module] = []
        self._calls = Patches()
        self._loop: PlainLoop | None = None
        self._given_up = ""
        self.profiles: list[Profile] = []
        """What was measured."""
        self._any_optimizer = OptimizerHooks(self._update_begins, self._update_ended, failed=self._fail)
        self._any_optimizer.put_up()

    @property
    def reason(self) -> str:
        """Why no loop was profiled; without a full stop."""
        if self._given_up:
            return self._given_up
        if not self._steps_done:
            return "no optimizer took a step"
        return f"training ended after {self._steps_done} step(s), while its loop was being recognized"

    def end(self, error: BaseException | None) -> None:
        """The program is over, or *error* ends it: report what was measured."""
        self._any_optimizer.remove()
        self._calls.undo()
        if self._loop is not None:
            self._loop.end(error)

    # ---- torch's hooks; nothing of ours may raise in them

    def _update_begins(self, optimizer: Any, *_: Any) -> None:
        # The hooks fire twice if a subclass's step calls its parent's: we hear the outer begin and the inner end.
        again, self._in_update = self._in_update, True
        if again or self._loop is not None or self._given_up:
            return
        try:
            if OUTCOMES.sessions:
                self._given_up = "its framework's own door profiles the training"
            elif self._optimizers and optimizer is self._optimizers[0] and not self._round_is_known:
                self._round_is_known = True
                self._watch_calls()
        except Exception as error:
            self._fail(error)

    def _update_ended(self, optimizer: Any, *_: Any) -> None:
        again, self._in_update = not self._in_update, False
        if again or self._loop is not None or self._given_up:
            return
        try:
            if not self._round_is_known:
                if not any(optimizer is one for one in self._optimizers):
                    self._optimizers.append(optimizer)
                self._steps_done = 1
            elif optimizer is self._optimizers[-1]:
                self._steps_done += 1
                if self._called or self._steps_done == _STEPS_WATCHED:
                    self._open_door((self._called or self._candidates)[0])
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        self._given_up = f"the FLOPs profiler failed: {type(error).__name__}: {error}"
        self._calls.undo()

    # ---- which model it is

    def _watch_calls(self) -> None:
        """See which module the loop calls, of those that hold all parameters that are updated."""
        self._candidates = candidates = list(
            holders_of([one for each in self._optimizers for one in _parameters_of(each)])
        )
        if not candidates:
            self._given_up = "no module holds the parameters that the optimizer updates"
            return
        if any(type(one).__module__.startswith("deepspeed.") for one in candidates):
            self._given_up = 'the DeepSpeed config has no "flops_profiler" block that is enabled'
            return
        for module in candidates:
            self._calls.replace_calls(module, self._noting(module))

    def _noting(self, module: nn.Module) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def make(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                if not any(module is one for one in self._called):
                    self._called.append(module)  # the outermost comes first
                return call(*args, **kwargs)

            return run

        return make

    def _open_door(self, model: nn.Module) -> None:
        self._calls.undo()
        self._candidates, self._called = [], []
        objects = gc.get_objects()
        accelerator = next((one for one in objects if _is(one, ("accelerate.accelerator.Accelerator",))), None)
        fabric = next((one for one in objects if _is(one, _FABRICS)), None) if accelerator is None else None
        del objects
        frame = frame_of(model, accelerator=accelerator, fabric=fabric)
        self._loop = loop = PlainLoop(
            model,
            tuple(self._optimizers),
            config=self._config,
            publish=self.profiles.append,
            frame=frame,
            output=LoopOutput(frame, log_dir=self._log_dir, writer=None, or_own=True),
            steps_before=self._steps_done,
            announce=self._announce,
        )
        names = " and ".join(type(one).__name__ for one in self._optimizers)
        updated = {one for each in self._optimizers for one in _parameters_of(each)}
        outside = len(updated - {id(one) for one in model.parameters()})
        if outside:
            rest = (
                f"{outside} of the {len(updated)} tensors that are updated belong to other modules: what those compute "
                "is in the FLOPs, as work outside of the model, and their parameters are not in the report."
            )
        loop.session.notes.add_for_run(
            f"The program said nothing of its model: {type(unwrapped(model)).__name__} is the module that its loop "
            f"calls, and whose parameters {names} updates."
        )
        if outside:
            loop.session.notes.add_for_run(rest)
        loop.session.begin()


def _is(thing: object, names: tuple[str, ...]) -> bool:
    return any(f"{kind.__module__}.{kind.__qualname__}" in names for kind in type(thing).__mro__)


def _parameters_of(optimizer: Any) -> Iterator[int]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                yield id(parameter)


def holders_of(parameters: list[int]) -> Iterator[nn.Module]:
    """The modules that hold most of these parameters, of all that exist; the outermost first.

    Args:
        parameters: their ids.
    """
    wanted = set(parameters)
    modules = {id(one): one for one in gc.get_objects() if issubclass(type(one), nn.Module)}
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

    most = max((len(holds(module)) for module in modules.values()), default=0)
    if not most:
        return
    full = [module for module in modules.values() if len(held[id(module)]) == most]
    yield from sorted(full, key=lambda module: sum(1 for _ in module.modules()), reverse=True)
