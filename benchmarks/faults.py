"""An exception at a random line of this package while something trains: training must not notice.

``make bench-faults`` runs this. The line is drawn among those that run inside a hook of ours (below ``run.run.safe``)
in the same training, but for the function that removes everything. The same training without the profiler says what is
right: losses, weights and random state to the last bit, nothing raised, nothing left on torch, and at most one warning.
Each trial draws from a generator seeded by its number, which is printed with its faults.
"""

from __future__ import annotations

import itertools
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader

import lightning_flops
from lightning_flops.run.run import close_quietly, safe
from tests.left_on_torch import torch_state

from .machine import RESULTS
from .page import described, table, write_page
from .runner import Answer, answer_of, heard, start
from .workloads import quiet_trainer

_FOLDER = f"{Path(lightning_flops.__file__).resolve().parent}{os.sep}"
_TRIAL_SEC = 300.0
_STEPS = 12
"""Enough for one step that is counted, two that settle, two that are timed, one warm-up, one traced, and the rest."""
_WORDS = "injected on purpose"
_SHOWN = 40
"""Kinds and places of faults that the page lists."""
_SETTINGS: dict[str, Any] = {"profile_step": 1, "timing_steps": 2}


class Fault(NamedTuple):
    """Something of ours that the training noticed."""

    kind: str
    where: str  # The place in our code
    words: str = ""


class Tripwire:
    """Counts the lines of ours that run inside a hook, and raises at the one numbered *at*; traces one thread."""

    def __init__(self, at: int | None = None) -> None:
        self.lines, self.place = 0, ""  # Lines that ran, and where it raised
        self._at = at

    def __enter__(self) -> Tripwire:
        sys.settrace(self)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A function is called: watch its lines if it is ours and below a hook's boundary."""
        removes = frame.f_code is close_quietly.__code__  # what removes everything cannot remove itself
        return self._line if not (self.place or removes) and _is_inside_a_hook(frame) else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line" and not self.place:
            self.lines += 1
            if self.lines - 1 == self._at:
                self.place = f"{frame.f_code.co_filename.removeprefix(_FOLDER)}: {frame.f_code.co_name}"
                raise RuntimeError(f"{_WORDS} at line {frame.f_lineno}")
        return self._line


_BOUNDARY = safe(lambda hook: None).__code__
"""Of every hook's wrapper."""


def _is_inside_a_hook(frame: FrameType | None) -> bool:
    """Whether *frame* and all frames up to a ``safe`` hook's boundary are ours: what it raises stops there."""
    while frame is not None and frame.f_code.co_filename.startswith(_FOLDER):
        if frame.f_code is _BOUNDARY:
            return False
        frame = frame.f_back
        if frame is not None and frame.f_code is _BOUNDARY:
            return True
    return False


def _net() -> nn.Sequential:
    torch.manual_seed(11)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))


def _loader() -> DataLoader[torch.Tensor]:
    return DataLoader(torch.randn(4 * _STEPS, 8, generator=torch.Generator().manual_seed(3)), batch_size=4)  # type: ignore[arg-type]


def train_loop(profiled: bool) -> nn.Module:
    """A loop of one's own, with an evaluation in between."""
    from lightning_flops import profile_training

    model = _net()
    optimizer = torch.optim.AdamW(model.parameters())
    with profile_training(model, optimizer, log_dir="logs", **_SETTINGS) if profiled else nullcontext():
        for number, batch in enumerate(_loader()):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 5:
                with torch.no_grad():
                    model(batch)
    return model


def train_lightning(profiled: bool, *, manual: bool = False) -> nn.Module:
    """A fit of two epochs with validation and checkpoints."""
    from lightning.pytorch import LightningModule
    from lightning.pytorch.loggers import CSVLogger

    from lightning_flops import FlopsProfilerCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = _net()
            self.automatic_optimization = not manual

        def training_step(self, batch: torch.Tensor, index: int) -> Any:
            loss = self.net(batch).square().mean()
            if manual:
                optimizer: Any = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

        def validation_step(self, batch: torch.Tensor, index: int) -> None:
            self.net(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters())

    module = Module()
    callbacks = [FlopsProfilerCallback(**_SETTINGS)] if profiled else []
    settings = {"enable_checkpointing": True, "log_every_n_steps": 3, "val_check_interval": 5}
    trainer = quiet_trainer(".", *callbacks, max_epochs=2, logger=CSVLogger("."), **settings)
    trainer.fit(module, _loader(), _loader())
    return module


def train_transformers(profiled: bool) -> nn.Module:
    """The Trainer of transformers, with accumulation and an evaluation."""
    from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

    from lightning_flops.transformers import FlopsProfilerTrainerCallback

    torch.manual_seed(11)
    sizes: dict[str, Any] = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertForSequenceClassification(BertConfig(vocab_size=32, hidden_size=16, **sizes))
    ids = torch.randint(0, 32, (8 * _STEPS, 6), generator=torch.Generator().manual_seed(3))
    data: Any = [{"input_ids": row, "labels": int(row[0]) % 2} for row in ids]
    quiet: dict[str, Any] = {"report_to": [], "disable_tqdm": True, "use_cpu": True}
    evaluates: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 5, "logging_steps": 3}
    batches: dict[str, Any] = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": _STEPS}
    arguments = TrainingArguments(output_dir="out", **batches, **evaluates, **quiet)
    callbacks: Any = [FlopsProfilerTrainerCallback(**_SETTINGS)] if profiled else []
    Trainer(model, arguments, train_dataset=data, eval_dataset=data[:4], callbacks=callbacks).train()
    return model


_LIGHTNING = ("lightning.pytorch", "lightning_flops.lightning")
RUNS: dict[str, tuple[Callable[[bool], nn.Module], tuple[str, ...]]] = {
    "loop": (train_loop, ("lightning_flops",)),
    "lightning": (train_lightning, _LIGHTNING),
    "lightning-manual": (partial(train_lightning, manual=True), _LIGHTNING),
    "transformers": (train_transformers, ("lightning_flops.transformers", "transformers.models.bert.modeling_bert")),
}
"""Each training, and what its first one in a process imports, which takes longer than the training."""


def _outcome(run: Callable[[bool], nn.Module], *, profiled: bool, at: int | None) -> dict[str, Any]:
    """Everything that can be seen of one training, in a process of its own."""
    torch.set_num_threads(1)
    wire, raised, weights = Tripwire(at), "", b""
    with heard() as said, tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        before = torch_state()
        try:
            with wire:
                model = run(profiled)
            weights = torch.cat([one.detach().flatten() for one in model.parameters()]).numpy().tobytes()
        except BaseException as error:
            raised = f"{type(error).__name__}: {error}"[:300]
        left = {name for name, value in torch_state().items() if value != before[name]}
        os.chdir("/")
    state = {"weights": weights, "random": torch.get_rng_state().numpy().tobytes()}
    return {"raised": raised, "left": left, "said": said, "place": wire.place, "lines": wire.lines, **state}


class Lines:
    """The trials of one training."""

    def __init__(self, name: str, run: Callable[[bool], nn.Module] | None = None) -> None:
        self._run, imported = (run, ()) if run else RUNS[name]
        for module in ("torch._dynamo", "torch.utils.tensorboard", *imported):  # once, not in each trial's process
            import_module(module)
        plain, profiled = (self._answer(profiled=one, at=None) for one in (False, True))
        for answer in (plain, profiled):
            if why := answer.words or answer.value["raised"]:
                raise RuntimeError(f"{name} does not train at all: {why}")
        self._plain = plain.value
        self._words = len(profiled.value["said"])
        self.lines: int = profiled.value["lines"]
        """So many lines of ours run inside hooks."""

    def _answer(self, *, profiled: bool, at: int | None) -> Answer:
        return answer_of(lambda: _outcome(self._run, profiled=profiled, at=at), timeout_sec=_TRIAL_SEC)

    def trial(self, generator: random.Random) -> list[Fault]:
        """Raise at a line that is drawn."""
        answer = self._answer(profiled=True, at=generator.randrange(self.lines))
        if answer.words:
            return [Fault("the training hung or died", "?", answer.words)]
        seen, place = answer.value, answer.value["place"]
        if not place:
            return []  # that line did not come: what ran before it differed
        if seen["raised"]:
            return [Fault("it was raised into the training", place, seen["raised"])]
        left, said = sorted(seen["left"] - self._plain["left"]), seen["said"]
        found = [Fault("something stayed behind", place, ", ".join(left))] if left else []
        differs = [name for name in ("weights", "random") if seen[name] != self._plain[name]]
        found += [Fault("the training differs", place, name) for name in differs]
        if len(said) > self._words + 1:
            found.append(Fault("more than one warning", place, " | ".join(said)[:300]))
        return found


def _rows(name: str, seed: int, faults: Sequence[tuple[int, Fault]]) -> list[list[object]]:
    """Each kind of fault at each place: how often, and the first of them; the most frequent first."""
    places = Counter((fault.kind, fault.where) for _, fault in faults)
    first = {(fault.kind, fault.where): (number, fault.words[:160]) for number, fault in reversed(faults)}
    return [
        [
            kind,
            where,
            times,
            f"`--trainings {name} --seed {seed} --only {first[kind, where][0]}`",
            first[kind, where][1],
        ]
        for (kind, where), times in places.most_common(_SHOWN)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the trainings that were asked for, print what came out and write it; 0 whatever came out."""
    options = start(
        __file__, __doc__, RESULTS / "faults.md", arguments, trainings=list(RUNS), seconds=900.0, seed=1, only=-1
    )
    figures, lists = list[list[object]](), list[str]()
    for name in options.trainings:
        lines, faults, tried = Lines(name), list[tuple[int, Fault]](), 0
        end = time.monotonic() + options.seconds / len(options.trainings)
        for number in [options.only] if options.only >= 0 else itertools.count():
            if time.monotonic() > end:
                break
            tried += 1
            faults += [(number, fault) for fault in lines.trial(random.Random(f"{options.seed}/{number}"))]
        figures.append([name, f"{tried:,}", f"{len({number for number, _ in faults}):,}"])
        if faults:
            lists += [
                "",
                f"## {name}",
                "",
                *table(["fault", "where", ">times", "again", "for example"], _rows(name, options.seed, faults)),
            ]
    page = [
        *described(__doc__, "torch", "lightning", "transformers"),
        *table(["training", ">failures raised", ">with a fault"], figures),
        *lists,
    ]
    print("\n".join(page))
    if options.only < 0:
        write_page(options.output, page)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
