"""Counts FLOPs and bytes by module, phase, operator and dtype while a model runs, and lists what it could not count.

A dispatch mode sees every operator. Torch's global module hooks say which module's forward is running. In a backward,
the sequence number of the running autograd node says which module made it. Nothing is put on the user's modules. The
steps of a window are counted part by part: what belongs to a part, and which parts cannot be separated.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from lightning_flops.measure import patches
from lightning_flops.measure.counting.attribution import Backward, Running, Threads, reaches
from lightning_flops.measure.counting.formulas.contract import tensors_in
from lightning_flops.measure.counting.formulas.registry import formulas_without_operator, watch_functions
from lightning_flops.measure.counting.mode import CountingMode
from lightning_flops.measure.counting.totals import Totals, tf32_operators
from lightning_flops.measure.memory import MemoryWatch, TensorLives
from lightning_flops.measure.module_hooks import FlagOfModes, around_compilations, hear_modules, hear_steps
from lightning_flops.measure.module_scope import ModuleNames
from lightning_flops.measure.parts import Parts
from lightning_flops.measure.torch_private.before_2_9 import run_uncompiled
from lightning_flops.measure.torch_private.needed import (
    ENGINE_ENTRY,
    NO_GRAPH_TASK,
    fake_mode,
    graph_task_id,
    is_fake,
    is_pushed,
    push,
    remove,
    require_all,
    sequence_number,
)
from lightning_flops.measure.torch_private.optional import (
    class_of_generated_graphs,
    class_of_triton_kernels,
    is_compiled_in_place,
    is_replica,
)
from lightning_flops.records import OUTSIDE, BucketFlops, FlopPhase, FlopRecord, PhaseFlops, TimePhase, phase_of
from lightning_flops.signals import Undo

CausalAttention = Literal["full", "half"]

_OWN_THREAD = (
    "Modules of the model ran on Python threads of their own (as torch.nn.DataParallel runs its replicas): what they "
    "cost is counted, and that of their backward may stand under other modules."
)


class FlopCounter:
    """Counts what runs while it is entered. It may be entered several times; the counts add up.

    Args:
        root: the model whose modules own the work; None: all work is ``(outside)``.
        looks: gets each model that is called without gradients, and not inside of another module.
        causal_attention: ``"full"`` counts attention over the full score matrix. ``"half"`` counts half of it where a
            fused kernel is called with the causal flag; hardware FLOPs are the same as with ``"full"``. Attention that
            is computed as separate products does not show the flag, and counts in full.
        lives: follows the storages that operators make and read.

    Raises:
        ValueError: *causal_attention* is neither.
    """

    def __init__(
        self,
        root: nn.Module | None,
        *,
        causal_attention: CausalAttention = "full",
        lives: TensorLives | None = None,
        looks: Callable[[nn.Module], None] | None = None,
    ) -> None:
        if causal_attention not in ("full", "half"):
            raise ValueError(f'causal_attention must be "full" or "half", got {causal_attention!r}')
        halve = causal_attention == "half"
        self._root, self._looks = root, looks
        self._names = ModuleNames(root)
        self._totals = Totals()
        self._failed = self._totals.failed
        self._threads = Threads([], [], set(), OUTSIDE if root is None else "")
        self._mode = CountingMode(self._names, self._threads, self._totals, lives, halve_causal=halve)
        self._lock = threading.RLock()
        self._flag = FlagOfModes()
        self._undo = Undo()  #: Removes everything that this counter puts on torch, when no thread is inside any more.
        self._graphs = Undo()  #: Of it, what hears of inductor's graphs, as soon as there are any.

    # ---- on and off

    def __enter__(self) -> FlopCounter:
        """Starts counting on this thread.

        Raises:
            LightningFlopsError: this torch lacks a private name that counting needs.
            Exception: whatever fails here; nothing of ours is then left on torch.
        """
        require_all()
        state = self._threads.state
        with self._lock:
            is_first = not self._is_entered()
            state.entered += 1
            try:
                if is_first:
                    self._install(self._undo)
                if state.entered == 1:
                    self._threads.forget()
                    state.nodes.mark(state.stack[-1].module)
                if not is_pushed(self._mode):  # if it were on the stack twice, it would count twice
                    # A step may begin inside a mode of the user's, and end outside of it.
                    push(self._mode, under_others=True)
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Stops counting and removes everything from torch. A failure here is noted, and the user's code goes on.

        Does nothing if this thread has not entered the counter.
        """
        patches.guarded(partial(self._failed, "the end of counting"), self._leave)

    def _leave(self) -> None:
        state = self._threads.state
        with self._lock:
            if self._is_entered() and not state.entered:
                return  # where no thread is inside we go on: an interrupt may have left something of an earlier end
            try:
                if state.entered <= 1:
                    remove(self._mode)  # first, so that it is off whatever fails afterwards
                    self._mode.forward_products.clear()
                    state.stop()
            finally:
                state.entered = max(0, state.entered - 1)
                if not self._is_entered():
                    self._undo.close()

    def _is_entered(self) -> bool:
        return any(state.entered for state in list(self._threads.states))

    def sweep(self) -> None:
        """Removes the mode, which torch puts back if the counter was left in a backward's node, or a mode's handler."""
        if not self._is_entered():
            remove(self._mode)

    def _install(self, undo: Undo) -> None:
        """Puts up the hooks. They are global, because hooks on modules recompile blocks and switch off fused paths."""
        self._mode.runs_in_tf32 = tf32_operators()
        # The user may run the model on fake tensors, to learn its shapes or its FLOPs without the work.
        first = None if self._root is None else next(self._root.parameters(), None)
        kinds: list[type] = [type(first), type(getattr(first, "data", None))]
        self._mode.counts_fake = fake_mode() is not None or any(is_fake(kind) for kind in kinds)
        run_uncompiled(undo, CountingMode)
        self._mode.in_place = frozenset(self._names.known if any(map(is_compiled_in_place, self._names.known)) else ())
        self._flag.keep_right(undo)
        undo.callback(self._graphs.close)
        self._watch_graphs()
        failed = partial(self._failed, "a module's hook")
        hear_modules(undo, self._on_module_enter, self._on_module_leave, failed=failed)
        watch = partial(patches.guarded, failed, self._watch_graphs)
        around_compilations(undo, watch, watch)
        failed = partial(self._failed, "an optimizer's hook")
        hear_steps(undo, self._on_optimizer_enter, self._on_leave, failed=failed)
        watch_functions(undo, self._mode.function_runs)
        heard: list[tuple[Any, str, Any, str]] = [
            (torch.autograd, ENGINE_ENTRY, self._backward_begins, "the beginning of a backward")
        ]
        for manager in (torch.enable_grad, torch.set_grad_enabled):
            heard += [(manager, "__enter__", self._repetition_begins, "the beginning of a repeated forward")]
            heard += [(manager, "__exit__", self._repetition_ends, "the end of a repeated forward")]
        if hasattr(graph := getattr(torch.cuda, "CUDAGraph", None), "replay"):
            replays = lambda graph: self._mode.list_unseen("cuda.graph_replay")  # noqa: E731
            heard += [(graph, "replay", replays, "a replayed CUDA graph")]
        kernels = class_of_triton_kernels()
        if "run" in vars(kernels):
            heard += [(kernels, "run", self._mode.kernel_launches, "the launch of a Triton kernel")]
        for owner, name, begins, where in heard:
            patches.listen(undo, owner, name, begins, failed=partial(self._failed, where))

    def _watch_graphs(self, *_: Any) -> None:
        """From now on, what inductor has made is counted, if there is anything."""
        kind = class_of_generated_graphs()
        if kind is not None and not self._graphs:
            failed = partial(self._failed, "a compiled graph")
            patches.listen(self._graphs, kind, "__call__", self._mode.graph_runs, failed=failed)

    # ---- what the loop says

    def pause(self) -> Undo:
        """Until this is undone, nothing on this thread is counted: for data loading, metrics, logging."""
        state, undo = self._threads.state, Undo()
        undo.callback(setattr, state, "paused", state.paused)
        state.paused += 1
        return undo

    def in_root(self) -> Undo:
        """Until then, work outside of module calls is the root's: for a ``training_step``, which is no module call."""
        return self._running(self._threads.unknown, "forward")

    def in_optimizer(self) -> Undo:
        """Until then, work is the optimizer's: for engines whose steps do not fire torch's optimizer hooks."""
        return self._running(OUTSIDE, "optimizer")

    def _running(self, module: str, phase: FlopPhase) -> Undo:
        state, undo = self._threads.state, Undo()
        undo.callback(self._on_leave, undo)
        state.push(Running(module, phase, undo, state.task()))
        return undo

    def decide(self, *, is_forward: bool) -> None:
        """Whether what ran in no module, backward or update since this was last said is a forward: a loss.

        If not, it is one if a backward goes through it, and else, such as a callback's, outside the model.
        """
        self._totals.divides = True
        self._totals.decide(is_forward=is_forward)

    def settle(self) -> None:
        """No backward will go through what has run."""
        self._totals.settle(self._threads.ran)

    # ---- hooks. They run in the user's step: what they raise is noted for the report

    def _on_module_enter(self, module: nn.Module, args: Any) -> None:
        state = self._threads.state
        caller = state.stack[-1]
        name = self._names.name_for(module, caller.module)
        if len(state.stack) == 1 and not self._mode.is_on():
            if name is not None:
                self._totals.note(_OWN_THREAD)
                push(self._mode)
                state.push(Running(name, "forward", module, state.task(), pushed=True))
            return
        task = state.task()
        # Some of Lightning's strategies run a training step as the forward of its module, inside their wrapper.
        is_step = hasattr(type(caller.owner), "training_step") and "forward" in vars(caller.owner)
        is_outermost = (isinstance(caller.owner, Undo | None) or is_step) and task == NO_GRAPH_TASK and not state.paused
        if self._looks is not None and is_outermost and not torch.is_grad_enabled():
            self._looks(module)
        if name is None:  # a loss function, or another model
            # A closure is running; or the other model is trained, too.
            if caller.phase == "optimizer" or (
                caller.owner is None and torch.is_grad_enabled() and task == NO_GRAPH_TASK
            ):
                state.push(Running(OUTSIDE, "forward", module, task))
            return
        # A wrapper and the module in it have one name, and count as one call.
        is_wrapped = caller.module == name and isinstance(caller.owner, nn.Module) and module in caller.owner.children()
        is_copy = is_replica(module)  # what it computes is the root's, but it is no call of the root
        if task == NO_GRAPH_TASK and not (state.paused or is_wrapped or is_copy):
            self._totals.called(name, module)
        state.push(Running(name, "forward", module, task, start=0 if is_copy else sequence_number()))

    def _on_module_leave(self, module: nn.Module, args: Any, output: Any) -> None:
        state = self._threads.state
        if depth := state.depth_of(module):
            running, end = state.stack[depth], sequence_number()
            if running.module in self._totals.unread:
                self._totals.read(running.module, tensors_in((output,)))
            if state.task() == NO_GRAPH_TASK and 0 < running.start < end and running.task == NO_GRAPH_TASK:
                state.nodes.graphs.append((running.module, running.start, end))
            if any(running.pushed for running in state.stack[depth:]):
                remove(self._mode)
            state.pop_to(depth)

    def _on_optimizer_enter(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._on_leave(optimizer)  # its last step may have raised, and then no hook is called
        if self._mode.is_on():
            state = self._threads.state
            state.push(Running(OUTSIDE, "optimizer", optimizer, state.task()))

    def _on_leave(self, owner: Any, *_: Any) -> None:
        state = self._threads.state
        if depth := state.depth_of(owner):
            state.pop_to(depth)

    def _backward_begins(self, roots: Any, gradients: Any = None, *options: Any, **others: Any) -> patches.Ends | None:
        """A backward begins; that of another Python thread is counted if it comes to a parameter of the root."""
        pushes = not self._mode.is_on()
        parameters = () if self._root is None or not pushes else self._root.parameters()
        if pushes and (graph_task_id() != NO_GRAPH_TASK or not reaches(roots, frozenset(map(id, parameters)))):
            return None
        call = Backward(self._threads.state, create_graph=len(options) > 1 and bool(options[1]))
        self._threads.backwards.append(call)
        if pushes:
            push(self._mode)

        def ends(result: Any, error: BaseException | None) -> None:
            self._threads.backwards.remove(call)
            if pushes:
                remove(self._mode)

        return ends

    # Activation checkpoints, and whatever works like one, must enable grad inside a backward, whoever wrote them.

    def _repetition_begins(self, manager: Any) -> None:
        """Grad is enabled, inside a backward so that a part of a forward is repeated."""
        if graph_task_id() != NO_GRAPH_TASK and getattr(manager, "mode", True) and self._mode.is_on():
            state = self._threads.state
            state.repetitions.append((manager, state.task()))

    def _repetition_ends(self, manager: Any, *exception: Any) -> None:
        repetitions = self._threads.state.repetitions
        if graph_task_id() != NO_GRAPH_TASK and any(one is manager for one, _ in repetitions):
            while repetitions.pop()[0] is not manager:
                pass

    # ---- results

    def where(self) -> tuple[str, FlopPhase]:
        """The module and the phase of the operator that has just run on this thread."""
        return self._threads.state.place(counted=False)

    def take_data_dependent(self) -> bool:
        """Whether values in tensors have decided sizes since this was last asked."""
        found, self._mode.data_dependent = self._mode.data_dependent, False
        return found

    def total(self) -> PhaseFlops:
        """FLOPs by phase so far, on all threads; cheaper than ``record``."""
        return PhaseFlops.summed((phase, flops) for (phase, _), flops in self.buckets().items())

    def buckets(self) -> Counter[tuple[str, str]]:
        """The same by phase and dtype."""
        return self._totals.flops.copy()

    def record(self) -> FlopRecord:
        """What was counted so far, on all threads."""
        record = self._totals.record(
            f"A FLOP formula is registered for {name}, and torch knows no operator of that name."
            for name in formulas_without_operator()
        )
        return replace(record, unused_calls=self._threads.unused_calls())


#: Parts of a step whose work counts as it comes; a forward's counts as the root's, that of anything else not at all.
_COUNTED_PARTS = ("backward", "optimizer", "transfer", "other")


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedStep:
    """FLOPs of one step, without those outside the model, which its shapes say nothing of."""

    flops: BucketFlops
    by_phase: PhaseFlops
    lower_bound: bool  #: An operator that may have FLOPs was not counted.
    #: Values in its tensors decided sizes: another step of its shapes may have other FLOPs.
    data_dependent: bool = False


class PartCounter(Parts):
    """Counts whole steps; they add up. *memory* follows their parts, too."""

    def __init__(self, counter: FlopCounter, memory: MemoryWatch | None = None) -> None:
        super().__init__()
        self._memory = memory
        self.counter = counter  # counts what runs inside of it
        counter.decide(is_forward=True)  # from here on it is asked
        self._open: list[tuple[str, Undo]] = []
        self._phase = ""
        self._seen = self._before_step = Counter[tuple[str, str]]()  # counted until the last look, and the last step
        self._spent: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)  # what of it each phase did
        self.flops = FlopRecord()  # what was counted until the last step ended
        self.phases: dict[str, BucketFlops] = {}  # what of that each phase did
        self.mixed: set[TimePhase] = set()  # phases whose work ran, in part, while the loop was in another of them

    def enter(self, part: str, *, counts: bool = True) -> None:
        """*part* of a step begins, inside whatever part is running."""
        super().enter(part, counts=counts)
        if self._memory is not None:
            self._memory.enter(part, counts=counts)
        self._look()
        begins: dict[str, Callable[[], Undo]] = {**dict.fromkeys(_COUNTED_PARTS, Undo), "forward": self.counter.in_root}
        self._open.append((part, begins.get(part, self.counter.pause)()))

    def leave(self) -> None:
        """The part entered last ends."""
        if self._open:
            self._look()
            self._open[-1][1].close()
            del self._open[-1:]  # last: what an interrupt leaves of a part, the next call undoes
            if self._memory is not None:
                self._memory.leave()

    def phase(self, name: str) -> None:
        """What runs from here on is of this phase, whatever its parts; an empty *name* ends it."""
        self._look()
        self._phase = name

    def claim(self, part: str) -> None:
        """What ran since the last part was left, if none is running now, was *part* too."""
        if not self._open:
            self._look(outside=part)

    def step_ends(self) -> CountedStep:
        """What was counted of the step that ends here."""
        self._look()
        self.counter.settle()
        self._look()
        self.flops = self.counter.record()
        self.phases = {name: dict(spent) for name, spent in self._spent.items()}
        new, self._before_step = self._seen - self._before_step, self._seen
        flops = {key: number for key, number in new.items() if key[0] != "outside"}
        return CountedStep(
            flops=flops,
            by_phase=PhaseFlops.summed((phase, number) for (phase, _), number in flops.items()),
            lower_bound=any(one.may_have_flops for one in self.flops.uncounted.values()),
            data_dependent=self.counter.take_data_dependent(),
        )

    def give_up(self) -> None:
        """Every part that is still open ends."""
        while self._open:
            self._open[-1][1].close()
            del self._open[-1:]

    def _look(self, outside: str = "other") -> None:
        """Whose work ran since the last look: a phase's, and perhaps of another part than the loop is in."""
        part = self._open[-1][0] if self._open else outside
        self.counter.decide(is_forward=part == "forward" or bool(self._phase))
        before, self._seen = self._seen, self.counter.buckets()
        new = self._seen - before
        self._spent[phase_of(part, self._phase)].update(new)
        ran = {"backward" if phase == "recompute" else phase for phase, _ in new} - {"outside"}  # whose time it takes
        if ran - {part}:
            self.mixed.update(one for one in get_args(TimePhase) if one in ran | {part})
