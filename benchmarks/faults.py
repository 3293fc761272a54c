"""An exception at a random line of this package while something trains: training must not notice.

``make bench-faults`` runs this. The line is drawn among those that run inside a hook of ours (below ``run.run.safe``)
in the same training, but for the function that removes everything. The same training without the profiler says what is
right: losses, weights and random state to the last bit, nothing raised, nothing left on torch, and at most one warning.
A KeyboardInterrupt, and what a signal handler raises, come between any two instructions of what runs there, torch's own
code too: they must come out of the training, whose process lives on, and nothing may be left on torch.
Each trial draws from a generator seeded by its number, which is printed with its faults.
"""

from __future__ import annotations

import gc
import itertools
import logging
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

import lightning_flops
from lightning_flops.run.run import close_quietly, safe
from tests.left_on_torch import torch_state
from tests.listening import listening
from tests.same_training import SEAMED, Kind

from .machine import RESULTS
from .page import described, table, write_page
from .runner import Answer, answer_of, start

_FOLDER = f"{Path(lightning_flops.__file__).resolve().parent}{os.sep}"
_TORCH = f"{Path(torch.__file__).resolve().parent}{os.sep}"
_TRIAL_SEC = 300.0
_WORDS = "injected on purpose"
_SHOWN = 40
"""Kinds and places of faults that the page lists."""
_SETTINGS: dict[str, Any] = {"profile_step": 1, "timing_steps": 2}
_LEFT = ("left on torch", "marks")
TRAININGS = {name.replace(" ", "-"): kind for name, kind in SEAMED.items()}


FAILURE, CTRL_C, HANDLERS = RAISES = ("RuntimeError", "KeyboardInterrupt", "TimeoutError")
"""Of ours; of Ctrl-C; of a signal handler of the user's."""


class Fault(NamedTuple):
    """Something of ours that the training noticed."""

    kind: str
    where: str  # The place in our code
    words: str = ""


class Tripwire:
    """Counts the lines of ours that run inside a hook, and raises at the one numbered *at*; traces one thread.

    What a signal *raises* comes between any two instructions, and in torch's code as well.
    """

    def __init__(self, at: int | None = None, raises: str = FAILURE) -> None:
        self.lines, self.place = 0, ""  # Lines, or instructions, that ran, and where it raised
        self._at, self._raises = at, raises
        self._event = "line" if raises == FAILURE else "opcode"

    def __enter__(self) -> Tripwire:
        sys.settrace(self)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        """A function is called: watch its lines if it is ours and below a hook's boundary."""
        removes = frame.f_code is close_quietly.__code__  # what removes everything cannot remove itself
        if self.place or removes or not _is_inside_a_hook(frame, torchs=self._raises != FAILURE):
            return None
        frame.f_trace_opcodes = self._raises != FAILURE
        return self._line

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == self._event and not self.place:
            self.lines += 1
            if self.lines - 1 == self._at:
                self.place = f"{frame.f_code.co_filename.removeprefix(_FOLDER)}: {frame.f_code.co_name}"
                if self._raises == FAILURE:
                    raise RuntimeError(f"{_WORDS} at line {frame.f_lineno}")
                signal.raise_signal(signal.SIGINT if self._raises == CTRL_C else signal.SIGALRM)
        return self._line


_BOUNDARY = safe(lambda hook: None).__code__
"""Of every hook's wrapper."""


def _timed_out(number: int, frame: object) -> None:
    raise TimeoutError(_WORDS)


def _is_inside_a_hook(frame: FrameType | None, *, torchs: bool) -> bool:
    """Whether *frame* and all frames up to a ``safe`` hook's boundary are ours, or *torchs*: it is raised inside."""
    folders = (_FOLDER, _TORCH) if torchs else (_FOLDER,)
    while frame is not None and frame.f_code.co_filename.startswith(folders):
        if frame.f_code is _BOUNDARY:
            return False
        frame = frame.f_back
        if frame is not None and frame.f_code is _BOUNDARY:
            return True
    return False


def _outcome(kind: Kind, *, profiled: bool, at: int | None, raises: str) -> dict[str, Any]:
    """All that can be seen of one training, what this package said, and the line of ours at which it failed."""
    torch.set_num_threads(1)
    logging.getLogger("lightning_flops").setLevel(logging.WARNING)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGALRM, _timed_out)
    wire, raised, seen, before = Tripwire(at, raises), "", dict[str, Any](), torch_state()
    # A report that a thread still writes may come into the folder while that is removed.
    cleared = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with listening("lightning_flops", level=logging.WARNING) as said, cleared as folder:
        os.chdir(folder)
        try:
            with wire:
                seen = kind.outcome(Path(folder), _SETTINGS if profiled else None)
        except BaseException as error:
            raised = f"{type(error).__name__}: {error}"[:300]
        os.chdir("/")
    seen.pop("profiles", None)
    gc.collect()  # a framework that says nothing of an exception has dropped the run
    left = [name for name, state in torch_state().items() if state != before[name]] if raised else []
    return {"raised": raised, "seen": seen, "said": said, "place": wire.place, "lines": wire.lines, "left": left}


class Lines:
    """The trials of one training."""

    def __init__(self, kind: Kind, raises: str = FAILURE) -> None:
        self._kind, self._raises = kind, raises
        for module in ("torch._dynamo", "torch.utils.tensorboard"):  # once, not in each trial's process
            import_module(module)
        plain, profiled = (self._answer(profiled=one, at=None) for one in (False, True))
        for answer in (plain, profiled):
            if why := answer.words or answer.value["raised"]:
                raise RuntimeError(f"it does not train at all: {why}")
        self._plain = plain.value["seen"]
        self._words = len(profiled.value["said"])
        self.lines: int = profiled.value["lines"]
        """So many lines of ours run inside hooks."""

    def _answer(self, *, profiled: bool, at: int | None) -> Answer:
        return answer_of(
            lambda: _outcome(self._kind, profiled=profiled, at=at, raises=self._raises), timeout_sec=_TRIAL_SEC
        )

    def trial(self, generator: random.Random) -> list[Fault]:
        """Raise at a line that is drawn."""
        answer = self._answer(profiled=True, at=generator.randrange(self.lines))
        if answer.words:
            return [Fault("the training hung or died", "?", answer.words)]
        found, place = answer.value, answer.value["place"]
        if not place:
            return []  # that line did not come: what ran before it differed
        if self._raises != FAILURE:
            # Lightning ends the program at a Ctrl-C.
            passed = found["raised"].startswith((self._raises, "SystemExit"))
            faults = [] if passed else [Fault("it did not come out of the training", place, found["raised"])]
            return faults + [Fault("something stayed behind", place, one) for one in found["left"]]
        if found["raised"]:
            return [Fault("it was raised into the training", place, found["raised"])]
        differs = [name for name, right in self._plain.items() if found["seen"][name] != right]
        kinds = {name: "something stayed behind" if name in _LEFT else "the training differs" for name in differs}
        faults = [Fault(kind, place, f"{name}: {found['seen'][name]}") for name, kind in kinds.items()]
        if len(found["said"]) > self._words + 1:
            faults.append(Fault("more than one warning", place, " | ".join(found["said"])[:300]))
        return faults


def _rows(name: str, raises: str, seed: int, faults: Sequence[tuple[int, Fault]]) -> list[list[object]]:
    """Each kind of fault at each place: how often, and the first of them; the most frequent first."""
    places = Counter((fault.kind, fault.where) for _, fault in faults)
    first = {(fault.kind, fault.where): (number, fault.words[:160]) for number, fault in reversed(faults)}
    return [
        [kind, where, times, f"`--trainings {name} --raises {raises} --seed {seed} --only {number}`", words]
        for (kind, where), times in places.most_common(_SHOWN)
        for number, words in [first[kind, where]]
    ]


def main() -> None:
    """Try the trainings that were asked for, print what came out and write it."""
    options = start(
        __file__,
        __doc__,
        RESULTS / "faults.md",
        trainings=list(TRAININGS),
        raises=list(RAISES),
        seconds=900.0,
        seed=1,
        only=-1,
    )
    figures, lists = list[list[object]](), list[str]()
    arms = list(itertools.product(options.trainings, options.raises))
    for name, raises in arms:
        lines, faults, tried = Lines(TRAININGS[name], raises), list[tuple[int, Fault]](), 0
        end = time.monotonic() + options.seconds / len(arms)
        for number in [options.only] if options.only >= 0 else itertools.count():
            if time.monotonic() > end:
                break
            tried += 1
            faults += [(number, fault) for fault in lines.trial(random.Random(f"{options.seed}/{number}"))]
        figures.append([name, raises, f"{tried:,}", f"{len({number for number, _ in faults}):,}"])
        if faults:
            columns = ["fault", "where", ">times", "again", "for example"]
            lists += ["", f"## {name}, {raises}", "", *table(columns, _rows(name, raises, options.seed, faults))]
    page = [
        *described(__doc__, "torch", "lightning", "transformers"),
        *table(["training", "raised", ">times", ">with a fault"], figures),
        *lists,
    ]
    print("\n".join(page))
    if options.only < 0:
        write_page(options.output, page)


if __name__ == "__main__":
    main()
