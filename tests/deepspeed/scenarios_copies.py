"""What comes of pickling and copying an engine, and what it trains with, in every state of the profiler."""

from __future__ import annotations

import copy
import functools
import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_flops.deepspeed import Handle, attach
from tests.deepspeed.engines import BLOCK, SAMPLES, config, engine_of, left_on
from tests.left_on_objects import is_ours
from tests.made_of import made_of
from tests.window_state import window_state

STEPS = 8


def _through(dumps: Callable[[Any], bytes], thing: Any) -> Any:
    written = dumps(thing)
    if b"lightning_flops" in written:
        return "something of ours is in the pickle"
    return pickle.loads(written)


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": functools.partial(_through, pickle.dumps),
    "cloudpickle": functools.partial(_through, cloudpickle.dumps),
    "deepcopy": copy.deepcopy,
}


class Run:
    """A run in which somebody pickles and copies all there is after each forward, backward and step."""

    def __init__(self, stage: int, *, profiled: bool) -> None:
        self.engine = engine_of(config(stage=stage, block=None))
        self.handle: Handle | None = None
        if profiled:
            self.handle = attach(self.engine, {**BLOCK, "trace": True, "monitor": True})
        self.loader = DataLoader(TensorDataset(torch.ones(STEPS * SAMPLES, 8)), batch_size=SAMPLES)
        self.iterator: Any = None
        self.found: dict[str, Any] = {}
        self.states: set[str] = set()
        self.losses: list[str] = []
        # A copy that goes would have its engine destroy the optimizer that both have.
        self.kept: list[Any] = []

    def whole(self) -> Iterator[tuple[str, Any]]:
        """What somebody may pickle or copy, bound methods among it."""
        engine = self.engine
        yield "engine", engine
        yield "module", engine.module
        yield "optimizer", engine.optimizer
        yield "loader", self.loader
        for name in ("forward", "backward", "step", "train", "save_checkpoint", "destroy"):
            yield f"engine.{name}", getattr(engine, name)
        yield "iterator", self.iterator
        yield "loader.__iter__", self.loader.__iter__
        yield "module.forward", engine.module.forward

    def look(self, when: str) -> None:
        door = None if self.handle is None else self.handle._door()
        self.states.add("nothing" if door is None else window_state(door.session.window.recorder))
        for name, thing in self.whole():
            for way, through in WAYS.items():
                self.found[f"{when}: {way} of {name}"] = self.outcome(through, thing)
        kind = type(self.engine)
        functions = (torch.autograd.backward, DataLoader.__iter__, kind.step, kind.train, kind.destroy)
        for dumps in (pickle.dumps, cloudpickle.dumps):  # their names, whatever stands there
            self.found[f"{when}: {dumps.__module__} of functions"] = dumps(functions).hex()
        for name in ("engine", "module", "optimizer"):
            self.found[f"{when}: copy of {name}"] = self.copied(getattr(self.engine, name, self.engine))

    def outcome(self, through: Callable[[Any], Any], thing: Any) -> Any:
        try:
            copied = through(thing)
        except Exception as error:
            return f"{type(error).__name__}: {re.sub('0x[0-9a-f]+', '', str(error))}"
        self.kept.append(copied)
        # torch numbers the hooks of a process as they come
        found = {re.sub(r"(_hooks\w*)\[\d+\]", r"\1[]", path): kind for path, kind in made_of(copied).items()}
        return found if not (ours := [path for path, kind in found.items() if "lightning_flops" in kind]) else ours

    def copied(self, thing: Any) -> Any:
        """What a copy has of its own; all below it is the original's, too."""
        copied = copy.copy(thing)
        self.kept.append(copied)
        ours = [name for name, value in vars(copied).items() if is_ours(value)]
        return ours or {name: type(value).__qualname__ for name, value in vars(copied).items()}

    def go(self) -> Run:
        self.look("before")
        self.iterator = iter(self.loader)
        for index, (batch,) in enumerate(self.iterator):
            loss = self.engine(batch).square().sum()
            self.losses.append(loss.item().hex())
            self.look(f"forward {index}")
            self.engine.backward(loss)
            self.look(f"backward {index}")
            self.engine.step()
            self.look(f"step {index}")
        if self.handle is not None:
            self.handle.detach()
        self.look("after")
        return self


def copied_in_every_state(stage: int) -> dict[str, Any]:
    plain = Run(stage, profiled=False).go()
    profiled = Run(stage, profiled=True).go()
    assert profiled.handle is not None and profiled.handle.profile is not None
    differences = [what for what, found in plain.found.items() if profiled.found[what] != found]
    return {
        "profile": profiled.handle.profile.to_json(),
        "same": profiled.found.keys() == plain.found.keys() and profiled.losses == plain.losses,
        "differences": [f"{what}: {_difference(plain.found[what], profiled.found[what])}" for what in differences[:20]],
        "looked at": len(plain.found),
        "copied": sorted({what.partition(": ")[2] for what, found in plain.found.items() if isinstance(found, dict)}),
        "states": sorted(profiled.states),
        "left": left_on(profiled.engine),
    }


def _difference(plain: Any, profiled: Any) -> str:
    if isinstance(plain, dict) and isinstance(profiled, dict):
        differ = sorted(set(plain.items()) ^ set(profiled.items()))
        return f"{len(differ)} ways, among them {differ[:4]}"
    return " / ".join("a copy" if isinstance(found, dict) else str(found)[:300] for found in (plain, profiled))


SCENARIOS: dict[str, Callable[[], Any]] = {
    f"copied_in_every_state_{stage}": functools.partial(copied_in_every_state, stage) for stage in (0, 1)
}
