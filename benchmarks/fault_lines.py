"""Failures at random lines of this package while something trains: what the training notices, and what stays behind.

A line is drawn among those that ran in the same training before, and one of the times that it ran; there an exception
is raised, as a bug of ours (RuntimeError) or as the user's Ctrl-C that happens to arrive there (KeyboardInterrupt).
The same training without the profiler says what is right.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dis
import functools
import gc
import logging
import os
import pkgutil
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType, SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import torch
from tensorboard.summary.writer import event_file_writer
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import lightning_flops
from lightning_flops.instrument.border import UndoLedger
from lightning_flops.instrument.timing import gpu_counters
from lightning_flops.session import session
from tests.fake_nvml import FakeGpu, FakeNvml
from tests.left_on_objects import left_on_object
from tests.left_on_torch import torch_state_and_warnings

from .fault_campaign import Answer, Fault, Forked, answer_of, fork, stream_of
from .machine import code_in_words

PACKAGE = Path(lightning_flops.__file__).resolve().parent
_FOLDER = f"{PACKAGE}{os.sep}"
ERRORS: dict[str, type[BaseException]] = {"RuntimeError": RuntimeError, "KeyboardInterrupt": KeyboardInterrupt}
TRIAL_SEC = 300.0
STEPS = 12
"""Enough for one step that is counted, two that settle, two that are timed, one warm-up, one traced, and the rest."""
WORDS = "injected on purpose"


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """One execution of one line."""

    file: str
    """Path below the package."""
    line: int
    hit: int
    """The first time is 1."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.hit}"

    @classmethod
    def parse(cls, text: str) -> Site:
        """The site that ``str`` wrote as *text*."""
        file, line, hit = text.rsplit(":", 2)
        return cls(file=file, line=int(line), hit=int(hit))

    @property
    def place(self) -> str:
        """Its line, as ``file:number``."""
        return f"{self.file}:{self.line}"

    @property
    def function(self) -> str:
        """The name of the function that the line is in, with its module."""
        path = PACKAGE / self.file
        code = compile(path.read_text(), str(path), "exec")
        return f"{self.file}: {list(_names_of(code, self.line))[-1]}"


def _names_of(code: CodeType, line: int, outer: str = "") -> Iterator[str]:
    """The functions that have *line* among their own, the outer one first."""
    name = code.co_name if code.co_name == "<module>" or outer in ("", "<module>") else f"{outer}.{code.co_name}"
    if any(number == line for _, _, number in code.co_lines()):
        yield name
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_of(inner, line, name)


@functools.cache
def lines_that_cannot_fail(file: str) -> frozenset[int]:
    """Lines of a file of ours on which nothing is done that could raise, nor does Python look for signals there.

    ``try:``, ``pass``, ``raise`` alone (it passes on what was raised), giving a name to a name or a constant, returning
    one of them, asking whether one or several are true, and asking whether what was raised is of a class that has a
    name.
    """
    tree = ast.parse(Path(file).read_text())
    found = set()
    for node in ast.walk(tree):
        if (
            isinstance(node, (ast.Try, ast.Pass))
            or (isinstance(node, ast.Raise) and node.exc is None)
            or (isinstance(node, (ast.Assign, ast.AnnAssign, ast.Return, ast.If)) and _only_names(node))
            or (isinstance(node, ast.ExceptHandler) and _is_name(node.type))
        ):
            found.add(node.lineno)
    return frozenset(found)


def can_fail(place: str) -> bool:
    """Whether something of ours can go wrong on the line ``file:number``."""
    file, _, line = place.rpartition(":")
    return int(line) not in lines_that_cannot_fail(str(PACKAGE / file))


def _only_names(node: ast.Assign | ast.AnnAssign | ast.Return | ast.If) -> bool:
    if isinstance(node, ast.If):
        return _is_name(node.test)
    if isinstance(node, ast.Assign) and not all(isinstance(target, ast.Name) for target in node.targets):
        return False
    return (not isinstance(node, ast.AnnAssign) or isinstance(node.target, ast.Name)) and _is_name(node.value)


def _is_name(node: ast.expr | None) -> bool:
    """Whether it is a name or a constant, or asks whether a name is one of them."""
    if isinstance(node, ast.Compare):
        return all(isinstance(operator, (ast.Is, ast.IsNot)) for operator in node.ops) and all(
            map(_is_name, (node.left, *node.comparators))
        )
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return _is_name(node.operand)
    if isinstance(node, ast.BoolOp):
        return all(map(_is_name, node.values))
    return node is None or isinstance(node, (ast.Name, ast.Constant))


@functools.cache
def lines_of(code: CodeType) -> frozenset[int | None]:
    """The lines of a function itself, without those of functions in it."""
    return frozenset(line for _, _, line in code.co_lines())


@functools.cache
def entries_of_with(code: CodeType) -> dict[int, int]:
    """Where ``with`` blocks of *code* are entered: the instruction, by line.

    They are left on the same line. An error raised there by a tracing function keeps the manager from being left, which
    nothing else can do: no code of ours is run but the manager's own, and Python looks for no signals.
    """
    lines = {start: line for start, _, line in code.co_lines() if line is not None}
    found: dict[int, int] = {}
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        line = lines.get(instruction.offset, line)
        if instruction.opname in ("BEFORE_WITH", "SETUP_WITH", "LOAD_SPECIAL"):
            found.setdefault(line, instruction.offset)
    return found


_CALLS = "call(*args, **kwargs) if kwargs else call(*args)"

HANDS_OVER: dict[str, tuple[str, ...]] = {
    "deepspeed.py": (
        "result = original(param_dict)  # first: what DeepSpeed refuses ends in its own error",
        "original(engine, *args, **kwargs)",
    ),
    "doors/loop_search.py": ("return call(*args, **kwargs)",),
    "instrument/border.py": ("result = original(*args, **kwargs)",),
    "instrument/counting/counting_mode.py": (
        f"return {_CALLS}",
        f"out = {_CALLS}",
        "out = func.decompose(*args, **kwargs)",
        "booked, out = self._open(operator, func, types, args, kwargs or {})",
        "return False, operator.call(*args, **kwargs)",
        "return False, run_python_kernel(func, keys, args, kwargs)",
        "out = run_python_kernel(func, keys, args, kwargs, self, watch)",
    ),
    "instrument/counting/opaque_bodies.py": ("out = func(*args, **kwargs)",),
    "instrument/torch_private/dispatch.py": ("result = end(*args)", "yield"),
    "instrument/torch_private/kernels.py": ("return function.redispatch(keys, *args, **kwargs)",),
    "instrument/patches.py": (
        "return (self._inner or original)(*args, **kwargs)",
        "return self._original(*args, **kwargs)",
        "return self.__get__(instance, type(instance))(*args, **kwargs)",
        "return run(*args, **kwargs)",
        # What binds an attribute of the user's class, as Python does it.
        'return attribute.__get__(instance, owner) if hasattr(type(attribute), "__get__") else attribute',
        "return _bound(self._original, instance, owner)",
    ),
    "pytorch.py": (
        "yield",
        "iterator = iter(self._loader)",
        "while True:",
        "batch = next(iterator) if fetch is None else fetch()",
        "yield batch",
    ),
    "session/noted_taps.py": (
        "return tell(*args, **kwargs)",
        "return original(*args, **kwargs) if is_aside else tell(*args, **kwargs)",
        "result = original(*args, **kwargs)",
        "return original(*args, **kwargs)",
    ),
    "session/taps.py": (
        "return tell(*args, **kwargs)",
        "result = original(*args, **kwargs)",
        "return (result := original(*args, **kwargs))",
        "return original(*args, **kwargs)",
        "return call(*args, **kwargs)",
    ),
}
"""Lines on which a function of ours does nothing but call the user's, or give the user what that has returned, by file:
what is raised there is the user's.

An error of ours could not be told from one of the user's there. A Ctrl-C that arrives there is judged as everywhere.
"""


def hands_over(place: str) -> bool:
    """Whether the line ``file:number`` is one of them."""
    file, _, line = place.rpartition(":")
    return (PACKAGE / file).read_text().splitlines()[int(line) - 1].strip() in HANDS_OVER.get(file, ())


class Tripwire:
    """Counts the lines of ours that run and raises at one of them; a tracing function.

    Args:
        site: where; None: nowhere.
        error: what is raised.
        choose: is asked each time that a line runs, with ``file:number`` and that time's number, what is raised there;
            None: nothing. It stands in place of *site*.
    """

    def __init__(
        self,
        site: Site | None = None,
        error: type[BaseException] = RuntimeError,
        *,
        choose: Callable[[str, int], type[BaseException] | None] | None = None,
    ) -> None:
        self.hits: Counter[tuple[str, int]] = Counter()
        self.fired = False
        self._error = error
        self._at = None if site is None else (str(PACKAGE / site.file), site.line)
        self._hit = 0 if site is None else site.hit
        self._choose = choose

    def __enter__(self) -> Tripwire:
        """Watches this thread and those that begin from now on."""
        threading.settrace(self)
        sys.settrace(self)
        return self

    def __exit__(self, *exc: object) -> None:
        """Watches no more."""
        sys.settrace(None)
        threading.settrace(None)

    def by_place(self) -> dict[str, int]:
        """How often each line has run, by ``file:number``."""
        return {f"{file.removeprefix(_FOLDER)}:{line}": count for (file, line), count in self.hits.items()}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A function is called: watch its lines if it is ours, or, where one line is meant, if that is among them."""
        code = frame.f_code
        if self.fired or not code.co_filename.startswith(_FOLDER) or code.co_name == "<module>":
            return None
        if self._at is not None and (code.co_filename != self._at[0] or self._at[1] not in lines_of(code)):
            return None
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            place = (frame.f_code.co_filename, frame.f_lineno)
            if self._at is None or place == self._at:
                entry = entries_of_with(frame.f_code).get(frame.f_lineno, frame.f_lasti)
                self.hits[place] += frame.f_lasti <= entry
                error = self._due(place)
                if error is not None and not self.fired:
                    self.fired = True
                    raise error(WORDS)
        return self._line

    def _due(self, place: tuple[str, int]) -> type[BaseException] | None:
        if self._choose is not None:
            return self._choose(f"{place[0].removeprefix(_FOLDER)}:{place[1]}", self.hits[place])
        return self._error if place == self._at and self.hits[place] == self._hit else None


class Heard:
    """What the package warns of, and what Python could not raise anywhere, as long as it is entered."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __enter__(self) -> Heard:
        """Listens."""
        heard = self.lines

        class Hear(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                heard.append(record.getMessage())

        self._handler = Hear(logging.WARNING)
        logging.getLogger("lightning_flops").addHandler(self._handler)
        sys.unraisablehook = lambda unraisable: heard.append(f"unraisable: {unraisable.exc_value!r}")
        return self

    def __exit__(self, *exc: object) -> None:
        """Listens no more."""
        logging.getLogger("lightning_flops").removeHandler(self._handler)
        sys.unraisablehook = sys.__unraisablehook__


Train = Callable[[bool, Tripwire, dict[str, Any]], None]
"""Trains, with the profiler or without, under the tripwire, and fills in losses, weights and what is left."""


def outcome(train: Train, profiled: bool, wire: Tripwire, folder: str) -> dict[str, Any]:
    """Everything that can be seen of one training, which writes to *folder*; runs in a process of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(11)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore Ctrl-C
    seen: dict[str, Any] = {"raised": None, "left": []}
    os.chdir(folder)
    tempfile.tempdir = folder
    with Heard() as heard, patch.object(event_file_writer, "_AsyncWriter", _WritesAtOnce):
        before = torch_state_and_warnings()
        try:
            train(profiled, wire, seen)
        except BaseException as raised:
            chain, link = [], raised
            while link is not None and link not in chain:
                chain.append(link)
                link = link.__cause__ or link.__context__  # type: ignore[assignment]
            seen["raised"] = [f"{type(each).__name__}: {each}"[:300] for each in chain]
        seen["left"] += [
            f"torch: {name}" for name, value in torch_state_and_warnings().items() if value != before[name]
        ]
    random_state = torch.get_rng_state().numpy().tobytes().hex()
    return {**seen, "random": random_state, "said": heard.lines, "fired": wire.fired}


# ---- many trials in one training


class Branches:
    """Raises at many sites of one training.

    At each a fork of its process raises and goes on, and the process itself goes on as if nothing had been. So a trial
    costs what comes after its site, and not what comes before it. A fork has but the thread that made it. So nothing is
    tried where another thread is needed, and those sites are left for trials of their own.

    Args:
        sites: where, and the errors to raise there.
        say: gets each site, its error, and what came of it.
    """

    def __init__(self, sites: Sequence[tuple[Site, str]], say: Callable[[Site, str, Answer], None]) -> None:
        self.forked: Forked | None = None
        """In a fork: what answers for it."""
        self._sites: dict[tuple[str, int], list[tuple[Site, str]]] = {}
        for site, error in sites:
            self._sites.setdefault((site.place, site.hit), []).append((site, error))
        self._say = say

    def choose(self, place: str, hit: int) -> type[BaseException] | None:
        """What is raised in this process; for ``Tripwire``."""
        for site, error in self._sites.pop((place, hit), ()):
            if needs_its_threads():
                continue
            files = Files(Path(tempfile.gettempdir()))
            forked = fork(timeout_sec=TRIAL_SEC)
            if isinstance(forked, Forked):
                self.forked = forked
                self._sites.clear()
                return ERRORS[error]
            files.restore()
            self._say(site, error, forked)
        return None


def needs_its_threads() -> bool:
    """Whether this process has a thread that its training needs.

    Of Python's threads each may be needed. Of those that libraries start, a process group's have names. torch.profiler
    starts one without, which looks for a configuration file now and then.
    """
    if threading.active_count() > 1:
        return True
    names = {Path(f"/proc/self/task/{number}/comm").read_text() for number in os.listdir("/proc/self/task")}
    return len(names) > 1


class _WritesAtOnce:
    """What TensorBoard's writer of events does, which has a thread of its own for it."""

    def __init__(self, record_writer: Any, max_queue_size: int = 20, flush_secs: int = 120) -> None:
        self.write = record_writer.write
        self.flush = record_writer.flush
        self.close = record_writer.close


class Files:
    """The files in a folder as they are now, and how far those that are open were read or written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files = {path: path.read_bytes() if path.is_file() else None for path in self._paths()}
        self._places: dict[int, int] = {}
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # a pipe, or what listed them
                self._places[int(name)] = os.lseek(int(name), 0, os.SEEK_CUR)

    def restore(self) -> None:
        """Undo what another process has done to them."""
        for path in reversed(self._paths()):
            if path not in self._files:
                path.unlink() if path.is_file() else path.rmdir()
        for path, content in self._files.items():
            if content is None:
                path.mkdir(exist_ok=True)
            elif not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
        for number, place in self._places.items():
            with contextlib.suppress(OSError):
                os.lseek(number, place, os.SEEK_SET)

    def _paths(self) -> list[Path]:
        """A folder comes before what is in it."""
        return sorted(self._folder.rglob("*"))


# ---- what trains


def bits(values: Any) -> list[str]:
    """Numbers to the last bit."""
    return [float(value).hex() for tensor in values for value in tensor.detach().double().flatten().tolist()]


def train_lightning(profiled: bool, wire: Tripwire, seen: dict[str, Any], *, manual: bool = False) -> None:
    """A fit of two epochs with validation, checkpoints and a logger."""
    from lightning.pytorch.loggers import CSVLogger

    from lightning_flops import FlopsProfilerCallback
    from tests.lightning.footprint import footprint
    from tests.lightning.nets import ROOTS, loader, new_gan, new_net, new_trainer

    net = new_gan(ROOTS[0]) if manual else new_net(ROOTS[0], validates=True)
    callbacks = [FlopsProfilerCallback(profile_step=1, timing_steps=2)] if profiled else []
    run = new_trainer(
        ROOTS[0], ".", *callbacks, logger=CSVLogger("."), enable_checkpointing=True, max_epochs=2, log_every_n_steps=3
    )
    try:
        with wire:
            run.fit(net, loader(STEPS - 2), None if manual else loader(2))
    finally:
        seen["weights"] = bits(net.parameters())
        seen["losses"] = [loss.hex() for loss in getattr(net, "losses", ())]
        # Attributes that a plain run has as well; what a hook or a tap of ours is called is in none of its names.
        seen["footprint"] = footprint(run, net)
        from .lightning_suite_door import left_on_trainers

        seen["left"] += left_on_trainers()


def evaluate_with_lightning(profiled: bool, wire: Tripwire, seen: dict[str, Any]) -> None:
    """A validation, a test and a prediction of one Trainer, none of which trains."""
    from lightning.pytorch.loggers import CSVLogger

    from lightning_flops import FlopsProfilerCallback
    from tests.lightning.evaluations import new_evaluated_net
    from tests.lightning.evaluations import run as run_loop
    from tests.lightning.footprint import footprint
    from tests.lightning.nets import ROOTS, loader, new_trainer

    net = new_evaluated_net(ROOTS[0])
    callbacks = [FlopsProfilerCallback(profile_step=1, timing_steps=2)] if profiled else []
    run = new_trainer(ROOTS[0], ".", *callbacks, logger=CSVLogger("."))
    results: list[Any] = []
    try:
        with wire:
            for function in ("validate", "test", "predict"):
                results.append(run_loop(run, function, net, loader(STEPS - 2)))
    finally:
        seen["weights"], seen["losses"] = bits(net.parameters()), [str(result) for result in results]
        seen["footprint"] = footprint(run, net)


def train_deepspeed(profiled: bool, wire: Tripwire, seen: dict[str, Any]) -> None:
    """Steps of a DeepSpeed engine, one process, with the block of its config.

    The model returns its loss, and losses are read at the end. So no operator runs between two calls of the engine: a
    Ctrl-C that arrives there goes from our code to the user's loop, and no call of the engine tells us of it.
    """
    from lightning_flops.deepspeed import install, uninstall
    from tests.deepspeed.engines import BLOCK, Net, batches, config, engine_of, left_on, weights

    class WithLoss(Net):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = super().forward(inputs).square().sum()
            return loss

    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)  # it has no threads
    block = {**BLOCK, "profile_step": 1, "monitor": True, "trace": True} if profiled else None
    torch.manual_seed(1)
    model = WithLoss()
    losses: list[torch.Tensor] = []
    # An operator for several ranks, which DeepSpeed may compile here, under a lock that a killed trial would leave.
    try:
        with patch("deepspeed.comm.torch.build_shm_op", lambda: None), wire:
            if profiled:
                install()
            try:
                engine = engine_of(config(block=block), model)
                try:
                    for batch in batches(STEPS):
                        loss = engine(batch)
                        engine.backward(loss)
                        engine.step()
                        losses.append(loss)
                finally:
                    seen["left"] += left_on(engine) if len(losses) < STEPS else []
            finally:
                if profiled:
                    uninstall()
    finally:
        if len(losses) == STEPS:  # otherwise nobody knows that the training is over
            engine.destroy()
    seen["weights"], seen["losses"] = weights(engine), [float(loss.item()).hex() for loss in losses]
    seen["left"] += left_on(engine)


def train_plainly(profiled: bool, wire: Tripwire, seen: dict[str, Any]) -> None:
    """Two steps of a loop under ``count_flops``, with a checkpoint, a second model without grad and two optimizers."""
    from contextlib import nullcontext, suppress

    from torch.utils.checkpoint import checkpoint

    from lightning_flops import count_flops

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    teacher = nn.Linear(4, 3)
    optimizers = [torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.Adam(model[2].parameters())]
    losses: list[float] = []
    seen["refused"] = True  # until the block begins an error may say that there will be no counts
    with wire:
        counting = count_flops(model) if profiled else nullcontext()
        with counting as counts:
            seen["refused"] = False
            for _ in range(2):
                x = torch.randn(6, 4)
                with torch.no_grad():
                    target = teacher(x)
                hidden = checkpoint(model[0], x, use_reentrant=False)
                loss = nn.functional.mse_loss(model[2](model[1](hidden)), target)
                loss.backward()  # type: ignore[no-untyped-call]
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append(loss.item())
        seen["weights"], seen["losses"] = bits(model.parameters()), [loss.hex() for loss in losses]
        seen["left"] += left_on(model, teacher, *optimizers)
        if counts is not None:
            with suppress(RuntimeError):  # a question, which may be answered by an error
                seen["counts"] = [counts.forward, counts.backward]


def train_under_deepspeeds_name(profiled: bool, wire: Tripwire, seen: dict[str, Any]) -> None:
    """Two steps of a loop with the profiler of DeepSpeed's name around each forward, once to count and once to time."""
    from contextlib import suppress

    from lightning_flops import FlopsProfiler
    from lightning_flops.errors import LightningFlopsError

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[float] = []
    seen["refused"] = True  # until the training begins an error may say that there is no profiler
    with wire:
        profiler = FlopsProfiler(model) if profiled else None
        seen["refused"] = False
        try:
            for step in range(2):
                if profiler is not None:
                    profiler.start_profile([nn.ReLU], count=step == 0)
                loss = model(torch.randn(6, 4)).square().mean()
                if profiler is not None:
                    profiler.stop_profile()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        finally:  # a Ctrl-C between start and stop: nobody but the user can know that there will be no stop
            if profiler is not None:
                profiler.end_profile()
        seen["weights"], seen["losses"] = bits(model.parameters()), [loss.hex() for loss in losses]
        seen["left"] += left_on(model, optimizer)
        if profiler is not None:
            with suppress(RuntimeError, LightningFlopsError):  # questions, which may be answered by an error
                seen["counts"] = [profiler.get_total_flops(), profiler.get_total_macs(as_string=True)]


def train_a_loop_of_your_own(profiled: bool, wire: Tripwire, seen: dict[str, Any]) -> None:
    """Steps of a loop under ``profile_training``, of batches of several lengths, with an evaluation in between.

    It is told that it runs on a GPU whose counters can be read.
    """
    from contextlib import nullcontext, suppress

    from torch.utils.data import DataLoader

    from lightning_flops import profile_training

    torch.manual_seed(3)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rows = [torch.arange(2 + step % 4).repeat(2, 1) for step in range(2 * STEPS)]
    losses: list[float] = []
    nvml = FakeNvml(FakeGpu("GPU-0", violation_ns={0: 0, 1: 0}))
    seen["refused"] = True  # until the block begins an error may say that there will be no profile
    settings: dict[str, Any] = {"profile_step": 1, "timing_steps": 2, "log_dir": "logs"}
    try:
        with _gpu_of(nvml), wire:
            profiling = profile_training(model, optimizer, **settings) if profiled else nullcontext()
            with profiling as profiler:
                seen["refused"] = False
                data: Any = DataLoader(rows, batch_size=None)  # type: ignore[arg-type]
                for number, ids in enumerate(data if profiler is None else profiler.batches(data)):
                    loss = model(ids).square().mean()
                    loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    losses.append(loss.item())
                    if number % 5 == 4:
                        apart = nullcontext() if profiler is None or number % 2 else profiler.outside_of_steps()
                        with torch.no_grad(), apart:
                            losses.append(model(ids).sum().item())
            if profiler is not None:
                with suppress(RuntimeError):  # a question, which may be answered by an error
                    seen["counts"] = profiler.profile and profiler.profile.flops_total.forward
    finally:
        seen["weights"], seen["losses"] = bits(model.parameters()), [loss.hex() for loss in losses]
        seen["left"] += left_on(model, optimizer) + ["NVML is held"] * bool(nvml.users)


def train_a_loop_that_breaks(profiled: bool, wire: Tripwire, seen: dict[str, Any]) -> None:
    """Steps of a loop under ``profile_training`` that leaves its loader by ``break``, and whose epochs end there.

    In its first epochs it drops the last batch with the loader, then it makes a step on it, and then none is over; or
    it is dropped where a step of two batches has begun. Then the loop keeps one iterator, which outlives a pass over
    another loader, and drops it in the end. An evaluation breaks off its loader as well.
    """
    from contextlib import nullcontext, suppress

    from torch.utils.data import DataLoader

    from lightning_flops import profile_training

    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    loader: Any = DataLoader(torch.randn(80, 4), batch_size=2, shuffle=True)  # type: ignore[arg-type]
    losses: list[float] = []

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    def backward(batch: torch.Tensor) -> None:
        loss = model(batch).square().mean()
        loss.backward()
        losses.append(loss.item())

    def step(batch: torch.Tensor) -> None:
        backward(batch)
        update()

    def epoch(*, drops: bool = False, uses: bool = False) -> None:
        for number, batch in enumerate(loader):
            if number == 4 and (drops or uses):
                break
            step(batch)
            if number == 3 and not (drops or uses):
                break
        if uses:
            step(batch)

    def pairs() -> None:
        for number, batch in enumerate(loader):
            if number == 3:
                break
            backward(batch)
            if number % 2:
                update()
        update()

    def evaluate() -> None:
        model.eval()
        with torch.no_grad():
            for number, batch in enumerate(loader):
                losses.append(model(batch).sum().item())
                if number:
                    break
        model.train()

    seen["refused"] = True  # until the block begins an error may say that there will be no profile
    try:
        with wire:
            profiling = (
                profile_training(model, optimizer, profile_step=1, timing_steps=2, log_dir="logs")
                if profiled
                else nullcontext()
            )
            with profiling as profiler:
                seen["refused"] = False
                for number in range(10):
                    epoch(drops=number in (0, 1, 5), uses=number in (3, 6))
                    if number % 4 == 1:
                        evaluate()
                        pairs()
                kept = iter(loader)
                for _ in range(4):
                    step(next(kept))
                epoch()
                for _ in range(4):
                    step(next(kept))
                del kept
                epoch()
            if profiler is not None:
                with suppress(RuntimeError):  # a question, which may be answered by an error
                    seen["counts"] = profiler.profile and profiler.profile.flops_total.forward
    finally:
        seen["weights"], seen["losses"] = bits(model.parameters()), [loss.hex() for loss in losses]
        seen["left"] += left_on(model, optimizer)


def train_loops_that_are_found(profiled: bool, wire: Tripwire, seen: dict[str, Any]) -> None:
    """Loops that know nothing of us, as ``lightning-flops run`` finds them: of two models in turns, one by itself.

    Then one whose optimizer calls the step of another one, and one too short to be recognized.
    """
    from lightning_flops.commands.run import Doors

    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    torch.manual_seed(3)
    models = [nn.Sequential(nn.Linear(4, width), nn.Dropout(0.2), nn.Linear(width, 3)) for width in (8, 6, 5, 2)]
    first, second, last = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (*models[:2], models[3]))
    third = Around(torch.optim.SGD(models[2].parameters(), lr=0.1))
    losses: list[float] = []

    def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            loss = model(torch.randn(2, 4)).square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())

    finders = list(sys.meta_path)
    seen["refused"] = True  # until the program begins an error may say that it is not run
    error: BaseException | None = None
    try:
        with wire:
            doors = Doors({"timing_steps": 2}, log_dir="logs") if profiled else None
            seen["refused"] = False
            try:
                if doors is not None:
                    doors.begin()
                train(models[0], first, steps=STEPS)
                train(models[1], second, steps=STEPS)
                train(models[0], first, steps=STEPS)
                train(models[2], third, steps=STEPS)
                train(models[3], last, steps=2)
            except BaseException as raised:
                error = raised
                raise
            finally:
                if doors is not None:
                    doors.end(error)
    finally:
        sys.meta_path[:] = finders  # a program's process ends with it
        seen["weights"] = bits(one for model in models for one in model.parameters())
        seen["losses"] = [loss.hex() for loss in losses]
        seen["left"] += [left for model in models for left in left_on(model)] + left_on(models[0], first, second, third)


@contextlib.contextmanager
def _gpu_of(nvml: FakeNvml) -> Iterator[None]:
    """Inside, sessions read the counters of *nvml*'s GPU, though they run on a CPU."""

    def open_meter(device: torch.device, undo: UndoLedger) -> gpu_counters.GpuMeter | None:
        return gpu_counters.open_meter(torch.device("cuda", 0), undo)

    sys.modules["pynvml"] = cast(Any, nvml)
    with (
        patch.object(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="0")),
        patch.object(session, "open_meter", open_meter),
        patch.object(gpu_counters, "LEAST_SEC", 0.0),
    ):
        yield
    del sys.modules["pynvml"]


def train_with_transformers(profiled: bool, wire: Tripwire, seen: dict[str, Any]) -> None:
    """A training of transformers with accumulation, an evaluation and a callback of ours."""
    from lightning_flops import FlopsProfilerTrainerCallback
    from tests.transformers.footprint import footprint
    from tests.transformers.tiny import ROWS, Rows, new_net_trainer

    callbacks = [FlopsProfilerTrainerCallback(profile_step=1, timing_steps=2)] if profiled else []
    trainer = new_net_trainer(
        Path(), *callbacks, rows=Rows(2 * STEPS * ROWS), eval_dataset=Rows(ROWS),
        gradient_accumulation_steps=2, logging_steps=3, eval_strategy="steps", eval_steps=4,
    )  # fmt: skip
    net: Any = trainer.model
    try:
        with wire:
            trainer.train()
    finally:
        seen["weights"], seen["losses"] = bits(net.parameters()), [float(loss).hex() for loss in net.losses]
        seen["footprint"] = {name: str(value) for name, value in footprint(trainer).items()}


def left_on(model: nn.Module, *others: object) -> list[str]:
    """What is ours on the modules of *model* and on *others*."""
    return [name for thing in (*model.modules(), *others) for name in left_on_object(thing)]


RUNS: dict[str, Train] = {
    "lightning": train_lightning,
    "lightning-manual": partial(train_lightning, manual=True),
    "lightning-evaluation": evaluate_with_lightning,
    "deepspeed": train_deepspeed,
    "count_flops": train_plainly,
    "FlopsProfiler": train_under_deepspeeds_name,
    "profile_training": train_a_loop_of_your_own,
    "profile_training-break": train_a_loop_that_breaks,
    "run": train_loops_that_are_found,
    "transformers": train_with_transformers,
}


# ---- trials


_OF_TORCH = ("torch._dynamo", "torch.profiler", "torch.utils.checkpoint")

_OF_LIGHTNING = (
    "fsspec.implementations.local",
    "lightning.pytorch.loggers",
    "torch.utils.tensorboard",
    "tests.lightning.evaluations",
    "tests.lightning.footprint",
    "tests.lightning.nets",
    "benchmarks.lightning_suite_door",
)

# A loader may be accelerate's: a loop looks there, where it is imported.
_OF_LOOP = ("accelerate.data_loader", "fsspec.implementations.local", "torch.utils.tensorboard")

_OF_RUN: dict[str, tuple[str, ...]] = {
    "lightning": _OF_LIGHTNING,
    "lightning-manual": _OF_LIGHTNING,
    "lightning-evaluation": _OF_LIGHTNING,
    "deepspeed": (
        "fsspec.implementations.local",
        "setuptools",
        "torch.utils.cpp_extension",
        "torch.utils.tensorboard",
        "deepspeed.comm",
        "deepspeed.module_inject",
        "deepspeed.moe.layer",
        "deepspeed.ops.adam",
        "tests.deepspeed.engines",
    ),
    "profile_training": _OF_LOOP,
    "profile_training-break": _OF_LOOP,
    "run": _OF_LOOP,
    "transformers": ("fsspec.implementations.local", "tests.transformers.footprint", "tests.transformers.tiny"),
}


_FRAMEWORKS_MODULES = {
    "deepspeed": ("lightning_flops.deepspeed", "lightning_flops.doors.deepspeed_"),
    "transformers": ("lightning_flops.transformers", "lightning_flops.doors.hf_"),
}
"""How the names of our modules begin that import a framework, by the run of its training."""


def import_for(run: str) -> None:
    """Load what a training and its trials need, so that a trial's process finds it there.

    And nothing of another framework: each trial is a fork, which costs the more the more is loaded.
    """
    others = tuple(name for of, names in _FRAMEWORKS_MODULES.items() if of != run for name in names)
    not_meant = ("lightning_flops.__main__", "lightning_flops.tensorboard", *others)
    for module in pkgutil.walk_packages([str(PACKAGE)], "lightning_flops."):
        if not module.name.startswith(not_meant):
            import_module(module.name)
    for name in (*_OF_TORCH, *_OF_RUN.get(run, ())):
        import_module(name)
    for optimizer in (torch.optim.SGD, torch.optim.Adam):  # torch wraps a class's step when it makes the first of it
        optimizer([nn.Parameter(torch.zeros(1))], lr=0.1)
    gc.collect()
    gc.freeze()  # a trial neither copies what is here by collecting it, nor goes through it in search of its Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One failure that was tried."""

    site: Site
    alone: bool
    """It had a training of its own."""
    faults: list[Fault]


class Lines:
    """The trials of one training: what is right, which lines run, and what a failure at one of them does."""

    def __init__(self, run: str) -> None:
        self.run = run
        self._train = RUNS[run]
        plain, profiled = (self._outcome(profiled=profiled) for profiled in (False, True))
        for answer in (plain, profiled):
            if answer.failed or answer.value["raised"]:
                raise RuntimeError(f"{run} does not train at all: {answer.failed or answer.value['raised']}")
        self.plain: dict[str, Any] = plain.value
        self.expected_words = len(profiled.value["said"])
        self.sites: dict[str, int] = {
            place: hits for place, hits in sorted(profiled.value["hits"].items()) if hits and can_fail(place)
        }

    def _outcome(self, *, profiled: bool, wire: Tripwire | None = None) -> Answer:
        counted = wire or Tripwire()
        with tempfile.TemporaryDirectory() as folder:
            trial = partial(outcome, self._train, profiled, counted, folder)
            return answer_of(lambda: {**trial(), "hits": counted.by_place()}, timeout_sec=TRIAL_SEC)

    def trial(self, generator: random.Random, again: str) -> list[Fault]:
        """Raise at a line that is drawn, and in one of its first times or any of them."""
        place = generator.choice(list(self.sites))
        hits = self.sites[place]
        hit = generator.choice([1, generator.randint(1, hits)])
        file, _, line = place.rpartition(":")
        error = generator.choice(list(ERRORS))
        return self.faults_at(Site(file=file, line=int(line), hit=hit), error)

    def sweep(self, generator: random.Random, lines: int | None, *, last: bool = False) -> Iterator[Trial]:
        """Raise both errors at each line that runs, in its first time, its last and any other.

        Or at so many *lines* that are drawn, in the first time of each, the last or any other; or only in the last.
        """
        places, sites = list(self.sites), []
        for place in places if lines is None else generator.sample(places, min(lines, len(places))):
            file, _, line = place.rpartition(":")
            for error in ERRORS:
                end = self.sites[place]
                hits = [end] if last else sorted({1, generator.randint(1, end), end})  # all is taken off at the end
                sites += [
                    (Site(file=file, line=int(line), hit=hit), error)
                    for hit in (hits if lines is None else [generator.choice(hits)])
                ]
        yield from self.try_all(sites)

    def try_all(self, sites: Sequence[tuple[Site, str]]) -> Iterator[Trial]:
        """Raise at each of these *sites*: together in one training where that can be, and then the others alone."""
        left = dict.fromkeys(sites)
        with tempfile.TemporaryDirectory() as folder:
            for told in stream_of(partial(self._branch, sites, folder), timeout_sec=2 * TRIAL_SEC):
                site = Site.parse(told["site"])
                del left[site, told["error"]]
                yield Trial(site=site, alone=False, faults=[Fault(**fault) for fault in told["faults"]])
        for site, error in left:
            yield Trial(site=site, alone=True, faults=self.faults_at(site, error))

    def _branch(self, sites: Sequence[tuple[Site, str]], folder: str, say: Callable[[Any], None]) -> None:
        def tell(site: Site, error: str, answer: Answer) -> None:
            faults = [asdict(fault) for fault in self._faults(site, error, answer)]
            say({"site": str(site), "error": error, "faults": faults})

        branches = Branches(sites, tell)
        seen = outcome(self._train, True, Tripwire(choose=branches.choose), folder)
        if branches.forked is not None:
            branches.forked.end_with(lambda: seen)

    def faults_at(self, site: Site, error: str) -> list[Fault]:
        """What a failure at *site* does that it must not do."""
        return self._faults(site, error, self._outcome(profiled=True, wire=Tripwire(site, ERRORS[error])))

    def _faults(self, site: Site, error: str, answer: Answer) -> list[Fault]:
        again = f"--run {self.run} --error {error} --at {site}"
        return [
            Fault(kind=f"{error}: {kind}", where=site.function, again=again, words=words)
            for kind, words in self._judge(answer, site, error)
        ]

    def _judge(self, answer: Answer, site: Site, error: str) -> list[tuple[str, str]]:
        if answer.failed:
            return [("the training hung or died", answer.failed)]
        seen = answer.value
        if not seen["fired"]:
            return []  # that time of the line did not come: what ran before it differed
        found = []
        if left := sorted(set(seen["left"]) - set(self.plain["left"])):
            found.append(("something stayed behind", ", ".join(left)))
        if error == "KeyboardInterrupt":
            # The user's: it ends the training, as the first or, where Lightning makes an exit of it, as its cause.
            # Where Python would drop it, it comes again without our words (``on_deletion``).
            if not any(words.startswith("KeyboardInterrupt:") for words in seen["raised"] or ()):
                found.append(("the user's interrupt was lost", str(seen["raised"] or "nothing was raised")))
            return found
        if seen["raised"] and (seen.get("refused") or hands_over(site.place)):
            return found
        if seen["raised"]:
            found.append(("it was raised into the training", seen["raised"][0]))
            return found
        for name in ("losses", "weights", "random"):
            if seen.get(name) != self.plain.get(name):
                found.append(("the training differs", name))
        if not left and seen.get("footprint") != self.plain.get("footprint"):
            found.append(("something stayed behind", _first_difference(self.plain["footprint"], seen["footprint"])))
        if len(seen["said"]) > self.expected_words + 1:
            found.append(("more than one warning", " | ".join(seen["said"])[:300]))
        return found


def _first_difference(expected: dict[str, Any], found: dict[str, Any]) -> str:
    name = next(name for name in {**expected, **found} if expected.get(name) != found.get(name))
    return f"{name}: {found.get(name)} in place of {expected.get(name)}"[:300]


def main(arguments: Sequence[str] | None = None) -> int:
    """Raise at every line of one training, or at a sample, and print each fault; 1 where there is one."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fault_lines", description=main.__doc__)
    parser.add_argument("run", choices=RUNS)
    parser.add_argument("--lines", type=int, help="so many lines, drawn (default: every line)")
    parser.add_argument("--last", action="store_true", help="only in the last time that each line runs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--below", nargs="*", metavar="PATH", help="only lines of files whose path begins so")
    parser.add_argument("--without", nargs="*", metavar="PATH", help="no lines of files whose path begins so")
    parser.add_argument("--beyond", nargs="*", choices=RUNS, help="no lines that these trainings reach as well")
    parser.add_argument("--since", default="", metavar="COMMIT", help="only lines that were written after this commit")
    parser.add_argument("--output", type=Path, help="the page in which this training's row is written anew")
    options = parser.parse_args(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import_for(options.run)
    lines = Lines(options.run)
    if options.below:
        below = tuple(options.below)
        lines.sites = {place: hits for place, hits in lines.sites.items() if place.startswith(below)}
    if options.without:
        others = tuple(options.without)
        lines.sites = {place: hits for place, hits in lines.sites.items() if not place.startswith(others)}
    for other in options.beyond or ():
        reached = lines_of_run(other)
        lines.sites = {place: hits for place, hits in lines.sites.items() if place not in reached}
    if options.since:
        new = lines_since(options.since)
        lines.sites = {place: hits for place, hits in lines.sites.items() if place in new}
    if not lines.sites:
        parser.error("the training runs no such line")
    print(f"{len(lines.sites)} lines of ours run; seed {options.seed}", flush=True)
    tried, alone, found = 0, 0, 0
    for trial in lines.sweep(random.Random(options.seed), options.lines, last=options.last):
        tried, alone, found = tried + 1, alone + trial.alone, found + len(trial.faults)
        if not tried % 100:
            print(f"{tried} trials", file=sys.stderr, flush=True)
        for fault in trial.faults:
            print(f"{fault.where}: {fault.kind}: {fault.words} (python -m benchmarks.faults {fault.again})", flush=True)
    print(f"{found} faults in {tried} trials, {alone} of them in a training of their own")
    if options.output:
        where = _listed(options.below) or "everything"
        where += f" but {_listed(options.without)}" if options.without else ""
        where += f" beyond {_listed(options.beyond)}" if options.beyond else ""
        where += f" that is newer than {options.since}" if options.since else ""
        where += ", in their last time" if options.last else ""
        swept = f"{len(lines.sites):,}" if options.lines is None else f"{options.lines:,} of {len(lines.sites):,}"
        when = f"{date.today()}, {code_in_words()}"
        row = f"| {options.run} | {where} | {swept} | {tried:,} | {alone:,} | {found} | {when} |"
        before = options.output.read_text() if options.output.exists() else ""
        options.output.write_text(page_with(row, before))
    return int(bool(found))


def _listed(paths: Sequence[str] | None) -> str:
    return ", ".join(f"`{path}`" for path in paths or ())


def lines_of_run(run: str) -> frozenset[str]:
    """Lines of ours that run in *run*, as ``file:number``; what it imports stays in another process."""

    def reached() -> list[str]:
        import_for(run)
        return list(Lines(run).sites)

    answer = answer_of(reached, timeout_sec=TRIAL_SEC)
    if answer.failed:
        raise RuntimeError(answer.failed)
    return frozenset(answer.value)


def lines_since(commit: str) -> frozenset[str]:
    """Lines of ours that were written or changed after *commit*, as ``file:number``."""
    command = ["git", "diff", "--unified=0", "--no-color", commit, "--", str(PACKAGE)]
    difference = subprocess.run(command, cwd=PACKAGE.parent, capture_output=True, text=True, check=True).stdout
    found: set[str] = set()
    file = ""
    for line in difference.splitlines():
        if line.startswith("+++ "):
            file = line.partition(f"/{PACKAGE.name}/")[2]
        elif hunk := re.match(r"@@ \S+ \+(\d+)(?:,(\d+))? @@", line):
            first, count = int(hunk[1]), int(hunk[2] or 1)
            found.update(f"{file}:{number}" for number in range(first, first + count))
    return frozenset(found)


_PAGE = """# Failures at every line

Written by `python -m benchmarks.fault_lines TRAINING --output PAGE`; each row by a run of its own.

At each line of this package that runs in the training, in its first time, its last and one that is drawn, a
RuntimeError is raised, and then a KeyboardInterrupt. Then losses, weights and random state are to the last bit those
without the profiler, nothing is raised but the interrupt, nothing is left, and there is at most one warning. What is
excepted, and why, stands in `benchmarks/fault_lines.py`. Most failures are raised in forks of one training; those that
cannot be, for there was another thread, in a training of their own.

A row says what was found at its commit. "300 of 1,834" lines were drawn, and each was tried in one of its times.
"Beyond" a training are the lines that it does not reach. What no row of a training names was not tried in it by these
runs. Until commit bccf427 a line's last time was not tried, but where it was drawn or was the first.

| training | lines of | lines | failures | alone | faults | when |
|---|---|---:|---:|---:|---:|---|
"""


def page_with(row: str, before: str) -> str:
    """The page *before* with *row* in place of the one of the same training and lines."""
    _, _, rows_before = before.partition(_PAGE.splitlines()[-1])
    rows = [line for line in rows_before.split("\n") if line and _of_row(line) != _of_row(row)]
    return _PAGE + "".join(f"{line}\n" for line in sorted([*rows, row]))


def _of_row(row: str) -> list[str]:
    return row.split("|")[1:3]


if __name__ == "__main__":
    raise SystemExit(main())
