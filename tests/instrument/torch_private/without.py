"""Trains with and without the profiler under a torch that lacks one private name, each time in a process of its own.

Run as a program it reads paths of names, one a line, and answers each with a line of JSON. Torch and Lightning take
seconds to import, so this is done once: each name is removed in a fork, which has imported nothing of lightning_flops.

A name is removed from torch itself where torch trains without it, and trains to the same weights. Torch needs the
others for its own work, or keeps them in C where nothing can be removed, or only its objects have them and no class:
for these the room's look-up is made to fail, which is the one place that all its names go through.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import lightning.pytorch as pl
import torch
import torch._dynamo.compiled_autograd
import torch._inductor.codecache
import torch.distributed.fsdp
import torch.distributed.tensor
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

ROOM = "lightning_flops.instrument.torch_private"
BATCH, INPUTS, OUTPUTS = 2, 3, 5
FORWARD = 2 * BATCH * INPUTS * OUTPUTS
"""One multiply-add for each weight and row."""
TRAINING = 2 * FORWARD
"""Forward and the weight's gradient; the batch needs none."""

USED_OFFLINE = ("torch._subclasses.", "torch.utils.")
"""Starts of the paths of names that ``count_offline`` cannot do without."""


class Model(pl.LightningModule):
    """One linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(INPUTS, OUTPUTS)

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


_FOLDER = tempfile.TemporaryDirectory()


def trained(*callbacks: Any) -> list[float]:
    """Weights after a few batches."""
    torch.manual_seed(0)
    model = Model()
    rows: Any = torch.randn(6 * BATCH, INPUTS)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=_FOLDER.name,
        callbacks=list(callbacks),
    )
    trainer.fit(model, DataLoader(rows, batch_size=BATCH))
    return [value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()]


class Passing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that does nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def torch_works() -> bool:
    """Whether torch can still do, without us, what it does for us: run a step under a mode, and on fake tensors."""
    for mode in (Passing(), FakeTensorMode()):  # type: ignore[no-untyped-call]
        with mode:
            model = nn.Linear(INPUTS, OUTPUTS)
            parameters: dict[str, Tensor] = dict(model.named_parameters())
            torch.func.functional_call(model, parameters, torch.randn(BATCH, INPUTS)).sum().backward()
    return True


def remove_from_torch(path: str) -> Callable[[], None] | None:
    """Removes the name; what puts it back, or None where it cannot be removed."""
    module, _, attributes = path.partition(":")
    *owners, name = attributes.split(".")
    try:
        owner: Any = import_module(module)
        for one in owners:
            owner = getattr(owner, one)
        value = vars(owner)[name]
        delattr(owner, name)
    except (AttributeError, KeyError, TypeError):
        return None
    return lambda: setattr(owner, name, value)


def remove(path: str, weights: list[float]) -> str:
    """Removes the name in one way or the other; which way it was."""
    put_back = remove_from_torch(path)
    if put_back is not None:
        try:
            if trained() == weights and torch_works():
                return "torch"
        except Exception:
            pass  # torch, or Lightning, cannot do without it
        put_back()
    names: Any = import_module(f"{ROOM}.names")
    look_up, of = names.look_up, names.Attribute.of

    def failing_look_up(wanted: str) -> Any:
        if wanted == path:
            raise AttributeError(f"{path} was removed")
        return look_up(wanted)

    def failing_of(attribute: Any, owner: Any) -> Any:
        if attribute.name.path == path:
            attribute.name.lose()
            raise AttributeError(f"{path} was removed")
        return of(attribute, owner)

    names.look_up, names.Attribute.of = failing_look_up, failing_of
    return "look-up"


def outcome(path: str) -> dict[str, Any]:
    """What happens without the name."""
    offline = path.startswith(USED_OFFLINE)
    weights = trained()
    found: dict[str, Any] = {"way": remove(path, weights)}
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lightning_flops").addHandler(handler)
    logging.getLogger("lightning_flops").setLevel(logging.INFO)

    import lightning_flops

    model = nn.Linear(INPUTS, OUTPUTS)
    try:
        with lightning_flops.count_flops(model) as counts:
            model(torch.randn(BATCH, INPUTS)).sum().backward()
        found["flops"] = counts.forward + counts.backward + counts.optimizer
        found["notes"] = list(counts.notes)
    except lightning_flops.LightningFlopsError as error:
        found["refused"] = str(error)
    table = import_module(f"{ROOM}.names").TABLE
    found["needed_to_count"] = path in table and table[path].missing
    if offline:
        try:
            found["offline"] = lightning_flops.count_offline(model, torch.randn(BATCH, INPUTS)).forward
        except lightning_flops.LightningFlopsError as error:
            found["offline"] = str(error)
    callback = lightning_flops.FlopsProfilerCallback(profile_step=1, timing_steps=2)
    found["identical"] = trained(callback) == weights
    profile = callback.profile
    found["profile_notes"] = None if profile is None else list(profile.notes)
    if profile is not None:
        flops = profile.flops
        found["profile_flops"] = flops.forward + flops.backward + flops.recompute + flops.optimizer

    found["needed_to_profile"] = path in table and table[path].missing

    for module in iter_modules(import_module(ROOM).__path__, f"{ROOM}."):
        import_module(module.name)
    name = table[path]
    name.attempt()  # a run as small as this needs not every name
    found.update(missing=name.missing, sentence=name.sentence, reported=name.reported)
    found["logged"] = sum(name.sentence in one and path in one for one in said)
    return found


def answer(path: str) -> str:
    """The outcome in a fork, as JSON; with ``error`` where it raised."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = outcome(path)
        except BaseException:
            found = {"error": traceback.format_exc()}
        with open(writer, "w") as pipe:
            pipe.write(json.dumps(found))
        os._exit(0)
    os.close(writer)
    with open(reader) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return text or json.dumps({"error": f"the process ended with status {status}"})


def main() -> None:
    """Answers every line of stdin, and says first that all is imported."""
    assert "lightning_flops" not in sys.modules
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints
    answers.write("ready\n")
    for line in sys.stdin:
        answers.write(f"{answer(line.strip())}\n")


if __name__ == "__main__":
    main()
