"""The user's lines, sampled by a timer signal on the training thread inside some steps that are in no figure.

A sample is the innermost line that is the user's: not torch's, the framework's, the standard library's or ours. Below a
callback of a framework it also has the hook. The marks of a step's parts say which part a sample is of.
"""

from __future__ import annotations

import functools
import linecache
import os
import random
import re
import signal
import sys
import sysconfig
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any, Literal, NamedTuple

import torch

from lightning_flops import host_clock
from lightning_flops.measure.timing.phase_timer import PhaseTimer, WallClock
from lightning_flops.measure.torch_private.needed import frames_outwards, hide
from lightning_flops.records import LineRecord, LinesRecord

LEAST_STEPS, LEAST_SEC, MOST_STEPS = 5, 0.3, 50
INTERVAL_SEC, JITTER = 0.0005, 0.4  # a fixed interval would lock onto what repeats in steps of its length
_DENSE = 1000  # after as many samples of one step they become rarer, so that a long step does not fill the memory
_MOST_LINES = 500  # of one record

_TORCH = os.path.dirname(torch.__file__) + os.sep
# The folders of the standard library and of torch, and those of what is installed.
_LIBRARIES = tuple(
    os.path.realpath(one) + os.sep
    for one in (
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        os.path.dirname(os.__file__),
        _TORCH,
    )
)
_OWN = os.path.dirname(os.path.dirname(os.path.realpath(__file__))) + os.sep
_PASSES_ON = os.path.join(_OWN, "measure", "patches.py"), "call"
# The functions of Lightning and transformers that call a callback's hooks, or a module's.
_CALL_HOOKS = ("_call_callback_hooks", "_call_lightning_module_hook", "call_event")
_HOOKS = ("on_", "configure_gradient", "lr_scheduler_step")
_CALL_MODULE = ("_wrapped_call_impl", "_call_impl")
_LONG_SEC = 0.002  # a sample in which the thread ran for longer is of one long operator, and not of many calls
_INLINE = ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>")

Owner = Literal["user", "library", "ours"]


class Place(NamedTuple):
    """Where one sample is."""

    file: str  # empty: nothing of the user's is on the stack
    line: int
    function: str
    callee: str  # the Python function that the line has called, with "torch." before torch's; empty: none
    hook: str  # ``Class.hook`` of a framework's callback; empty: in none
    in_module: bool = False  # a module's call is around it


@functools.cache
def owner_of(file: str) -> Owner:
    """Whose the code of *file* is."""
    if file.startswith("<"):
        return "user" if file.startswith(("<stdin", "<ipython", "<cell")) else "library"
    real = os.path.realpath(file)
    if real.startswith(_OWN):
        return "ours"
    # A package that runs by ``python -m`` is the user's, wherever it is installed.
    name = getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "").partition(".")[0]
    main = getattr(sys.modules.get(name), "__file__", None) or ""
    if main.endswith("__init__.py") and real.startswith(os.path.dirname(os.path.realpath(main)) + os.sep):
        return "user"
    return "library" if real.startswith(_LIBRARIES) or re.search(r"[/\\](site|dist)-packages[/\\]", real) else "user"


def _owner(frame: FrameType) -> Owner:
    """Whose the code of *frame* is; generated code is its module's: a dataclass's ``__init__``, what torch compiles."""
    file = frame.f_code.co_filename
    if file == "<string>" or file.startswith("<frozen"):
        return owner_of(frame.f_globals.get("__file__") or "<string>")
    # Its cache lies anywhere, as in /tmp.
    return "library" if str(frame.f_globals.get("__name__")).startswith("torch.") else owner_of(file)


def _name(code: CodeType) -> str:
    return str(getattr(code, "co_qualname", code.co_name)).replace("<locals>.", "")  # Python 3.10 has the short name


def _callee(code: CodeType | None) -> str:
    if code is None:
        return ""
    of_torch = code.co_filename.startswith(_TORCH) and code.co_name not in _CALL_MODULE
    return f"torch.{code.co_name}" if of_torch else code.co_name


def _line(frame: FrameType) -> int:
    """The last line up to the instruction of *frame*, which has none itself, as many a jump to a loop's head."""
    code = frame.f_code
    lines = [line for start, _, line in code.co_lines() if start <= frame.f_lasti and line is not None]
    return lines[-1] if lines else code.co_firstlineno


def _hook_in(stack: Sequence[tuple[CodeType, int, Owner]]) -> str:
    """The callback's hook that a framework has called, innermost; empty if it has called none."""
    calls = (one for (one, *_), (by, *_) in pairwise(stack) if by.co_name in _CALL_HOOKS)
    return next((_name(one) for one in calls if one.co_name.startswith(_HOOKS)), "")


def place_of(innermost: FrameType | None) -> Place | None:
    """Where the code of the *innermost* frame is; None in code of ours. No frame is kept."""
    stack = [(one.f_code, one.f_lineno or _line(one), _owner(one)) for one in frames_outwards(innermost)]
    at = next((place for place, (*_, owner) in enumerate(stack) if owner == "user"), len(stack))
    if any(owner == "ours" and (code.co_filename, code.co_name) != _PASSES_ON for code, _, owner in stack[:at]):
        return None
    called = next((code for code, _, owner in reversed(stack[:at]) if owner == "library"), None)
    if at == len(stack):
        return Place("", 0, "", _callee(called), _hook_in(stack))
    code, line, _ = stack[at]
    function = code
    for outer, *_ in stack[at + 1 :]:
        if function.co_name in _INLINE and outer.co_filename == function.co_filename:
            function = outer  # the function around a comprehension
    in_module = any(one.co_name in _CALL_MODULE and owner == "library" for one, _, owner in stack[at:])
    return Place(code.co_filename, line, _name(function), _callee(called), _hook_in(stack), in_module)


def why_not(handler: object = signal.SIG_DFL) -> str:
    """Why nothing can be sampled now, as the end of a sentence; empty: it can. SIGALRM must have this *handler*."""
    if threading.current_thread() is not threading.main_thread():
        return "training does not run on the main thread, which alone gets signals"
    if not hasattr(signal, "setitimer"):
        return "this system has no timer that signals"
    if signal.getsignal(signal.SIGALRM) is not handler or signal.getitimer(signal.ITIMER_REAL)[0]:
        return "the program uses SIGALRM, or its timer, itself"
    monitoring = getattr(sys, "monitoring", None)  # from Python 3.12 on
    tools = () if monitoring is None else map(monitoring.get_tool, range(6))
    if sys.getprofile() is not None or sys.gettrace() is not None or any(tools):
        return "a profiler, tracer or debugger is on"
    return ""


class _LineTimer(PhaseTimer):
    """The parts of a sampled step, and the lines of the user's at which they were entered."""

    def __init__(self) -> None:
        super().__init__(WallClock())
        self.entries: dict[tuple[str, int], set[str]] = defaultdict(set)  # what each of these lines has called

    def enter(self, part: str, *, counts: bool = True) -> None:
        """As of every timer; a line that has called the model, say, is not what takes its time."""
        outside = next((one for one in frames_outwards(sys._getframe()) if _owner(one) != "ours"), None)
        if (place := place_of(outside)) is not None:
            self.entries[place[:2]].add(place.callee)
        super().enter(part, counts=counts)

    def only_enters(self, part: str, place: Place) -> bool:
        """Whether the line of *place* only calls what the time of *part* is of."""
        called = self.entries.get(place[:2], set())
        if place.callee in called or not place.file:
            return True
        calls_module = part in ("forward", "backward") and place.callee in _CALL_MODULE
        # Operators without a function of Python's, on the line that has called the model, are the model's too.
        return calls_module or (bool(called) and (part != "other" or not place.callee))


class LineSampler:
    """Samples of the training thread in one step after the other, from ``resume`` to ``step_ends``.

    Between these, and after ``stop``, no timer runs. The handler is in place from ``begin`` to ``stop``.
    """

    def __init__(
        self,
        *,
        asked: bool = True,
        now: Callable[[], float] = host_clock.now,
        ran: Callable[[], float] = time.thread_time,
    ) -> None:
        self.why = "" if asked else "lines=False"  # why there is nothing, or nothing more, to sample
        self.timer = _LineTimer()
        self.over = not asked
        # Of what ran: where a thread waits for a processor, no operator is long.
        self._now, self._ran, self._last, self._last_ran = now, ran, 0.0, 0.0
        self._jitter = random.Random(0).uniform  # a generator of our own
        #: Of the running step, each with the number of the interval between its marks.
        self._samples: list[tuple[int, float, float, Place]] = []
        #: Of each part and place the seconds of each sample, and of each that is of one long operator, else 0.
        self._found: defaultdict[tuple[str, Place], list[tuple[float, float]]] = defaultdict(list)
        self._step_sec: list[float] = []
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._runs = False

    def begin(self) -> None:
        """The first step begins here, unless ``over`` says that nothing can be sampled."""
        self.why = self.why or why_not()
        self.over |= bool(self.why)
        if self.over:
            return
        self.timer.begin()

        def handler(number: int, frame: FrameType | None) -> None:
            try:
                self.take(frame)
            except Exception as error:  # never into the user's program
                self.why, self.over, self._runs = f"{type(error).__name__}: {error}", True, False
            if self._runs:
                self._arm()

        for function in (handler, LineSampler.take, LineSampler._arm, place_of, _line, _owner):
            hide(function)  # torch would compile them where they interrupt what it compiles
        self._handler = handler
        signal.signal(signal.SIGALRM, handler)
        signal.siginterrupt(signal.SIGALRM, False)  # a library's call of the system is taken up again

    def resume(self) -> None:
        """A step begins, or goes on."""
        if self.over or self._runs:
            return
        if why_not(self._handler):
            self.why, self.over = "the program has begun to use a profiler, or SIGALRM, itself", True
            return
        self.timer.go_on()
        self._runs, self._last, self._last_ran = True, self._now(), self._ran()
        self._arm()

    def _arm(self) -> None:
        rarer = 1 + len(self._samples) // _DENSE
        signal.setitimer(signal.ITIMER_REAL, INTERVAL_SEC * rarer * self._jitter(1 - JITTER, 1 + JITTER))

    def take(self, frame: FrameType | None) -> None:
        """One sample: what ran since the last one is where the *frame* is."""
        now, ran = self._now(), self._ran()
        if (place := place_of(frame)) is not None:
            seconds, is_long = now - self._last, ran - self._last_ran > _LONG_SEC
            self._samples.append((len(self.timer.marks) - 1, seconds, seconds * is_long, place))
        self._last, self._last_ran = now, ran

    def pause(self) -> None:
        """What runs from here on is in no sample."""
        runs, self._runs = self._runs, False
        if runs and signal.getsignal(signal.SIGALRM) is self._handler:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def step_ends(self) -> None:
        """A step is over; ``over`` says whether there are enough."""
        if self.over:  # it has ended in the middle of this step, or before
            return
        self.pause()
        *marks, (*_, end) = self.timer.cut()
        self._step_sec.append(end - marks[0][2])
        for interval, seconds, long_sec, place in self._samples:
            part, *_ = marks[min(interval, len(marks) - 1)]
            self._found[part, place].append((seconds, long_sec))
        self._samples.clear()
        enough = len(self._step_sec) >= LEAST_STEPS and sum(self._step_sec) >= LEAST_SEC
        self.over |= enough or len(self._step_sec) >= MOST_STEPS

    def stop(self) -> None:
        """Put back what was there before."""
        self.over = True
        self.pause()
        handler, self._handler = self._handler, None
        if handler is not None and signal.getsignal(signal.SIGALRM) is handler:  # else it is the user's
            signal.signal(signal.SIGALRM, signal.SIG_DFL)

    def record(self) -> LinesRecord:
        """What the whole steps have shown, the line with most time first."""
        longest = sorted(self._found.items(), key=lambda found: -sum(seconds for seconds, _ in found[1]))
        lines = (
            LineRecord(
                part=part,
                file=place.file,
                line=place.line,
                function=place.function,
                hook=place.hook,
                text=linecache.getline(place.file, place.line).strip()[:200] if place.file else "",
                callee=place.callee,
                only_enters=self.timer.only_enters(part, place),
                seconds=sum(seconds for seconds, _ in samples),
                long_sec=sum(long_sec for _, long_sec in samples),
                in_module=place.in_module,
                samples=len(samples),
            )
            for (part, place), samples in longest[:_MOST_LINES]
        )
        why = self.why or ("" if self._step_sec else "the run ended before steps were sampled")
        return LinesRecord(steps=len(self._step_sec), lines=tuple(lines), why=why)
