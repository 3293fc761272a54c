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
from lightning_flops.measure.counting.attribution import (
    Backward,
    Place,
    Shared,
    Threads,
    Totals,
    reaches,
    tf32_operators,
)
from lightning_flops.measure.counting.formulas.contract import tensors_in
from lightning_flops.measure.counting.formulas.registry import watch_functions
from lightning_flops.measure.counting.mode import CountingMode
from lightning_flops.measure.memory import MemoryWatch, TensorLives
from lightning_flops.measure.module_hooks import FlagOfModes, around_compilations, hear_modules, hear_steps
from lightning_flops.measure.module_scope import ModuleNames
from lightning_flops.measure.parts import Parts
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
    run_uncompiled,
    sequence_number,
)
from lightning_flops.measure.torch_private.optional import (
    class_of_generated_graphs,
    class_of_packages,
    class_of_triton_kernels,
    is_compiled_in_place,
    is_replica,
)
from lightning_flops.records import (
    OUTSIDE,
    SCORING,
    BucketFlops,
    FlopPhase,
    FlopRecord,
    PhaseFlops,
    TimePhase,
    phase_of,
    summed,
)
from lightning_flops.signals import Undo

CausalAttention = Literal["full", "half"]
_LOSS = object()  # owns what follows a forward in an optimizer's closure, up to its backward


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
        self._root, self._looks = root, looks
        self._names = ModuleNames(root)
        self._totals = Totals()
        self.flops = self._totals.flops  #: By phase and dtype so far, on all threads.
        self._threads = Threads(Shared(Place(OUTSIDE if root is None else "")))
        self._mode = CountingMode(self._names, self._threads, self._totals, lives, halves=causal_attention == "half")
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
            is_first = not state.shared.entered
            state.entered += 1
            try:
                state.shared.entered.add(threading.get_ident())
                if is_first:
                    self._install(self._undo)
                if state.entered == 1:
                    state.nodes.forget()
                    state.mark()
                self._resume()
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *exc: object) -> None:
        """Stops counting and removes everything from torch. A failure here is noted, and the user's code goes on.

        Does nothing if this thread has not entered the counter.
        """
        patches.guarded(partial(self._totals.failed, "the end of counting"), self._leave)

    def _leave(self) -> None:
        state, entered = self._threads.state, self._threads.state.shared.entered
        with self._lock:
            if entered and not state.entered:
                return  # where no thread is inside we go on: an interrupt may have left something of an earlier end
            try:
                if state.entered <= 1:
                    remove(self._mode)  # first, so that it is off whatever fails afterwards
                    self._mode.forward_products.clear()
                    del state.stack[1:]
                    state.nodes.mark(None, sequence_number())
                    state.paused, state.by_graph = 0, False
            finally:
                if state.entered <= 1:
                    entered.discard(threading.get_ident())
                state.entered = max(0, state.entered - 1)
                if not entered:
                    self._undo.close()

    def _resume(self) -> None:
        """Has this thread's operators counted; on the stack twice, the mode would count twice."""
        state = self._threads.state
        if state.entered and not state.paused and not is_pushed(self._mode):
            # A step may begin inside a mode of the user's, and end outside of it.
            push(self._mode, under_others=True)

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
        failed = partial(self._totals.failed, "a module's hook")
        hear_modules(undo, self._on_module_enter, self._on_module_leave, failed=failed)
        watch = partial(patches.guarded, failed, self._watch_graphs)
        around_compilations(undo, watch, watch)
        hear_steps(
            undo,
            self._on_optimizer_enter,
            self._on_leave,
            failed=partial(self._totals.failed, "an optimizer's hook"),
        )
        watch_functions(undo, self._mode.function_runs)
        heard: list[tuple[Any, str, Any, str]] = [
            (torch.autograd, ENGINE_ENTRY, self._backward_begins, "the beginning of a backward"),
            (
                getattr(torch.cuda, "CUDAGraph", None),
                "replay",
                partial(self._mode.list_unseen, "cuda.graph_replay"),
                "a replayed CUDA graph",
            ),
            (class_of_packages(), "__call__", partial(self._mode.list_unseen, "inductor.package"), "compiled code"),
            (class_of_triton_kernels(), "run", self._mode.kernel_launches, "the launch of a Triton kernel"),
            (torch.enable_grad, "__enter__", self._repetition_begins, "the beginning of a repeated forward"),
            (torch.enable_grad, "__exit__", self._on_leave, "the end of a repeated forward"),
            (torch.set_grad_enabled, "__enter__", self._repetition_begins, "the beginning of a repeated forward"),
            (torch.set_grad_enabled, "__exit__", self._on_leave, "the end of a repeated forward"),
        ]
        for owner, name, begins, where in heard:
            if hasattr(owner, name):
                patches.listen(undo, owner, name, begins, failed=partial(self._totals.failed, where))

    def _watch_graphs(self, *_: Any) -> None:
        """From now on, what inductor has made is counted, if there is anything."""
        kind = class_of_generated_graphs()
        if kind is not None and not self._graphs:
            patches.listen(
                self._graphs,
                kind,
                "__call__",
                self._mode.graph_runs,
                failed=partial(self._totals.failed, "a compiled graph"),
            )

    # ---- what the loop says

    def pause(self) -> Undo:
        """Until this is undone, nothing on this thread is counted: for data loading, metrics, logging."""
        state, undo = self._threads.state, Undo()
        undo.callback(self._resume)
        undo.callback(setattr, state, "paused", state.paused)
        state.paused += 1
        remove(self._mode)
        return undo

    def in_root(self) -> Undo:
        """Until then, work outside of module calls is the root's: for a ``training_step``, which is no module call."""
        return self._running(self._threads.state.shared.unknown.module, "forward")

    def in_optimizer(self) -> Undo:
        """Until then, work is the optimizer's: for engines whose steps do not fire torch's optimizer hooks."""
        return self._running(OUTSIDE, "optimizer")

    def _running(self, module: str, phase: FlopPhase) -> Undo:
        undo = Undo()
        undo.callback(self._on_leave, undo)
        self._threads.state.push(module, phase, undo)
        return undo

    def decide(self, *, is_forward: bool) -> None:
        """Say whether what ran in no module, backward or update since the last call of this is a forward, as a loss is.

        What is said to be none is one if a backward goes through it; else it is outside the model, as a callback's.
        """
        self._totals.separates_outside = True
        self._totals.decide(is_forward=is_forward)

    def settle(self) -> None:
        """No backward will go through what has run on this thread: others have numbered nodes of their own alike."""
        self._totals.settle(self._threads.state.nodes.ran)

    # ---- hooks. They run in the user's step: what they raise is noted for the report

    def _on_module_enter(self, module: nn.Module, args: Any) -> None:
        state = self._threads.state
        caller = state.stack[-1]
        # In this order: a backward that another thread runs is not ours to be asked for.
        is_seen = self._mode.is_on() and not state.paused and state.task() == NO_GRAPH_TASK
        # The innermost module, also where a part of the step begins inside it: a checkpoint's forward is the model's.
        around = next((one.owner for one in reversed(state.stack) if isinstance(one.owner, nn.Module)), None)
        name = self._names.name_for(module, caller.place.module)
        if is_seen and self._looks is not None and not torch.is_grad_enabled() and _is_loop(around):
            self._totals.asked.add(OUTSIDE if name is None else name)
            self._looks(module)
        if name is None:  # a loss function, or another model
            is_trained = is_seen and caller.owner is None and torch.is_grad_enabled()
            if is_trained or caller.place.phase == "optimizer":  # the other model, too; or a closure is running
                state.push(OUTSIDE, "forward", module)
            return
        if len(state.stack) == 1 and not self._mode.is_on():
            self._totals.note(
                "Modules of the model ran on Python threads of their own (as torch.nn.DataParallel runs its replicas): "
                "what they cost is counted, and that of their backward may stand under other modules."
            )
            push(self._mode)
        # A wrapper and the module in it have one name, and count as one call, also where a part begins between them.
        is_copy = is_replica(module)  # what it computes is the root's, but it is no call of the root
        is_wrapped = caller.place.module == name and around is not None and module in around.children()
        if is_seen and not is_copy and not is_wrapped:
            self._totals.called(name, module, caller.place.stands)
        state.push(name, "forward", module, start=0 if is_copy else sequence_number())

    def _on_module_leave(self, module: nn.Module, args: Any, output: Any) -> None:
        state, end = self._threads.state, sequence_number()
        if (running := state.leave(module)) is None:
            return
        name = running.place.module
        if name in self._totals.unread:
            self._totals.read(name, tensors_in((output,)))
        if state.stack[-1].place.phase == "optimizer" and torch.is_grad_enabled():
            state.push(OUTSIDE, "forward", _LOSS)
        if state.task() == NO_GRAPH_TASK:
            # A reentrant checkpoint numbers a node also where none is made.
            makes_graph = torch.is_grad_enabled() and 0 < running.start < end
            if makes_graph and running.task == NO_GRAPH_TASK:
                state.nodes.graphs.append((name, running.start, end))
            if len(state.stack) == 1 and not state.entered:  # it was a thread of its own
                remove(self._mode)

    def _on_optimizer_enter(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._on_leave(optimizer)  # its last step may have raised, and then no hook is called
        if self._mode.is_on():
            self._threads.state.push(OUTSIDE, "optimizer", optimizer)

    def _on_leave(self, owner: Any, *_: Any) -> None:
        self._threads.state.leave(owner)

    def _backward_begins(self, roots: Any, gradients: Any = None, *options: Any, **others: Any) -> patches.Ends | None:
        """A backward begins; that of another Python thread is counted if it comes to a parameter of the root."""
        self._on_leave(_LOSS)
        pushes = not self._mode.is_on()
        parameters = () if self._root is None or not pushes else self._root.parameters()
        if pushes and (graph_task_id() != NO_GRAPH_TASK or not reaches(roots, frozenset(map(id, parameters)))):
            return None
        call = Backward(self._threads.state.nodes, create_graph=len(options) > 1 and bool(options[1]))
        self._threads.state.shared.backwards.append(call)
        if pushes:
            push(self._mode)

        def ends(result: Any, error: BaseException | None) -> None:
            self._threads.state.shared.backwards.remove(call)
            if pushes:
                remove(self._mode)

        return ends

    # Activation checkpoints, and whatever works like one, must enable grad inside a backward, whoever wrote them.

    def _repetition_begins(self, manager: Any) -> None:
        """Grad is enabled, inside a backward so that a part of a forward is repeated."""
        if graph_task_id() != NO_GRAPH_TASK and getattr(manager, "mode", True) and self._mode.is_on():
            place, around = self._threads.state.place(True), self._threads.state.stack[-1].place
            phase: FlopPhase = "forward" if place.phase == "backward" else place.phase
            self._threads.state.push(place.module, phase, manager, stands=place.stands and place is not around)

    # ---- results

    def take_data_dependent(self) -> bool:
        """Whether values in tensors have decided sizes since this was last asked."""
        found, self._mode.data_dependent = self._mode.data_dependent, False
        return found

    def total(self) -> PhaseFlops:
        """FLOPs by phase so far, on all threads; cheaper than ``record``."""
        return PhaseFlops(**summed(((phase, flops) for (phase, _), flops in self.flops.items()), 0))

    def record(self) -> FlopRecord:
        """What was counted so far, on all threads."""
        return replace(self._totals.record(), unused_calls=self._threads.state.shared.unused_calls())


def _is_loop(owner: Any) -> bool:
    """Whether what *owner* runs is no module's forward, but the code that calls the model.

    Some of Lightning's strategies run a training step as the forward of its module, inside their wrapper.
    """
    return owner is None or (hasattr(type(owner), "training_step") and "forward" in vars(owner))


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
        counter.decide(is_forward=True)  # from here on forwards are separated from what is outside the model
        self._open: list[tuple[str, Undo]] = []
        self._phase = ""
        # FLOPs by phase and dtype: until the last look, until the last step ended, and those of each named phase.
        self._seen = self._before_step = Counter[tuple[str, str]]()
        self._spent: defaultdict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
        self.flops = FlopRecord()  # what was counted until the last step ended
        self.phases: dict[str, BucketFlops] = {}  # what of that each phase did
        self.mixed: set[TimePhase] = set()  # phases whose work ran, in part, while the loop was in another of them

    def enter(self, part: str, *, counts: bool = True) -> None:
        """*part* of a step begins, inside whatever part is running."""
        super().enter(part, counts=counts)
        if self._memory is not None:
            self._memory.enter(part, counts=counts)
        self._look()
        # The work of a forward counts as the root's, that of these as it comes, and that of anything else not at all.
        begins: dict[str, Callable[[], Undo]] = {
            **dict.fromkeys(("backward", "optimizer", "transfer", "other"), Undo),
            "forward": self.counter.in_root,
        }
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
        # An evaluation between steps is scoring until its adapter has heard what it is, before it computes anything.
        self.phases = {name: dict(spent) for name, spent in self._spent.items() if spent or name != SCORING}
        new, self._before_step = self._seen - self._before_step, self._seen
        flops = {key: number for key, number in new.items() if key[0] != "outside"}
        return CountedStep(
            flops=flops,
            by_phase=PhaseFlops(**summed(((phase, number) for (phase, _), number in flops.items()), 0)),
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
        before, self._seen = self._seen, self.counter.flops.copy()
        new = self._seen - before
        self._spent[phase_of(part, self._phase)].update(new)
        ran = {"backward" if phase == "recompute" else phase for phase, _ in new} - {"outside"}  # whose time it takes
        if ran - {part}:
            self.mixed.update(one for one in get_args(TimePhase) if one in ran | {part})
