"""A program that must not change: torch's global hooks find its loop, which the loop's adapter then profiles.

The first module that is called with gradients on, before those inside of it, and the first optimizer that steps on
parameters of its, are the loop's. From then on its adapter has hooks of its own. Where a framework's adapter has a run,
nothing is looked for.
"""

from __future__ import annotations

import threading
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_flops.adapters.loop import LoopAdapter
from lightning_flops.adapters.place import frame_of, loop_output
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.module_hooks import hear_modules, hear_steps
from lightning_flops.run.delivery import OUTCOMES
from lightning_flops.run.run import Run, close_quietly, failed, safe
from lightning_flops.run.unhooked import always_heard
from lightning_flops.signals import Undo


class LoopFinder:
    """Looks for the training loop of this process, and profiles the first; *log_dir*, or our folder, gets reports."""

    updated = False  # an optimizer has made a step in this process

    def __init__(self, config: ProfilerConfig, *, log_dir: str | None) -> None:
        self._config = config
        self._log_dir = log_dir
        self._undo = Undo()
        self._updating = 0  # steps that are: a subclass's may call its parent's, which has hooks, too
        self._called: MutableMapping[nn.Module, None] = WeakIdKeyDictionary()  # with gradients on, the outer ones first
        self._loop: LoopAdapter | None = None
        self._thread = threading.get_ident()

    @property
    def run(self) -> Run | None:
        """The run of the loop that was found."""
        return None if self._loop is None else self._loop.run

    @safe
    def begin(self) -> None:
        """The program begins."""
        hear_modules(self._undo, self._enters, None, failed=self._failed)
        hear_steps(self._undo, self._step_begins, self._step_ends, failed=self._failed)

    def _failed(self, error: Exception) -> None:
        failed(self.run, error)
        close_quietly(self._undo)

    def _enters(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() == self._thread:
            self._updating = 0  # a step that has raised has no end
            if torch.is_grad_enabled():
                self._called.setdefault(module, None)

    @safe
    def _step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if threading.get_ident() == self._thread:
            self._updating += 1
            self.updated = True
            if OUTCOMES.runs > 0:  # a framework's adapter profiles
                close_quietly(self._undo)

    @safe
    def _step_ends(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        self._updating = max(0, self._updating - 1)
        updated = {id(one) for group in optimizer.param_groups for one in group["params"]}
        model = next((one for one in self._called if any(id(each) in updated for each in one.parameters())), None)
        if model is None or self._updating > 0:
            return
        close_quietly(self._undo)
        frame = frame_of(model, accelerator=None, fabric=None)
        self._loop = LoopAdapter(
            model,
            (optimizer,),
            config=self._config,
            publish=lambda profile: None,  # its reports are what the program gets
            frame=frame,
            output=loop_output(frame, self._config, log_dir=self._log_dir, or_own=True),
            log_every_n_steps=50,
            steps_before=1,
        )
        self._loop.begin()

    @safe
    @always_heard
    def end(self, error: BaseException | None) -> None:
        """The program is over, or *error* ends it."""
        close_quietly(self._undo)
        if self._loop is not None:
            self._loop.finish(error)
