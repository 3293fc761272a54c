"""The dispatch mode: runs every operator, then counts it; and counts what no dispatcher shows, where it is notified."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import is_grad_enabled, nn

from lightning_flops.measure.counting.attribution import Place, Threads, Totals, operands
from lightning_flops.measure.counting.compiled import (
    Product,
    lines_that_repeat,
    multiplies,
    products,
    repeats_forward,
    templates_in,
)
from lightning_flops.measure.counting.formulas.contract import (
    COPYING,
    READS_NUMBER,
    Operator,
    Work,
    dtype_name,
    tensors_in,
    whole_flops,
)
from lightning_flops.measure.counting.formulas.registry import (
    backwards,
    counts_when_run,
    entries,
    hides_flops,
    lookup,
)
from lightning_flops.measure.memory import TensorLives
from lightning_flops.measure.module_scope import ModuleNames
from lightning_flops.measure.patches import Ends, guarded
from lightning_flops.measure.torch_private.needed import (
    DispatchMode,
    calling_modules,
    conjugates_lazily,
    current_node,
    depth,
    graph_task_id,
    hide,
    is_composite,
    is_custom_backward,
    is_fake,
    is_in_function,
    is_pushed,
    keys_of_python_kernel,
    modes_off,
    node_sequence,
    run_python_kernel,
    sequence_number,
    tree_leaves,
    unwraps_subclass,
)
from lightning_flops.measure.torch_private.optional import is_compiled, kernel_name
from lightning_flops.records import OUTSIDE
from lightning_flops.signals import words_of
from lightning_flops.units import package_logger

logger = package_logger(__name__)

_FORWARDS = ("forward", "recompute")


class Cost(NamedTuple):
    """What a call costs: two numbers each, its FLOPs, and how many of these a mask rules out."""

    dtype: str  #: Name of the dtype of its arithmetic.
    own: tuple[int, int]  #: Of the phase in which it runs.
    repeated: tuple[int, int] = (0, 0)  #: Of what a backward repeats of its forward, which is recompute.


#: A call in a graph: its operator, its cost, the bytes that it reads and writes, and whether it repeats the forward.
GraphCall = tuple[Operator, Cost | None, tuple[int, int], bool]


class CountingMode(DispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator, then adds what it cost where the thread's state says."""

    def __init__(
        self, names: ModuleNames, threads: Threads, totals: Totals, lives: TensorLives | None, *, halves: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._threads, self._totals = names, threads, totals
        self._lives, self._halves_causal = lives, halves
        self._operator_failed = partial(totals.failed, "an operator")
        self._failing: set[str] = set()
        #: Whether the user computes with fake tensors. If not, some library uses them to find a shape.
        self.counts_fake = False
        #: Products in forwards of custom autograd functions, by their operands: a backward may repeat them.
        self.forward_products: set[tuple[Any, ...]] = set()
        #: Values in tensors have decided sizes: another step of these shapes may cost something else.
        self.data_dependent = False
        #: The model's, if one was compiled in place, by ``module.compile()``: no hook fires inside such a module.
        self.in_place: frozenset[nn.Module] = frozenset()
        self.runs_in_tf32: Callable[[str], bool] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch shall wrap our handler to keep the compiler out. Not needed if the handler's code is marked."""
        return not hide(cls.__torch_dispatch__)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled: we see the kernels it calls."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            operator = entries.get(id(func)) or lookup(func)
            counts = operator.counts if self._lives is None else operator.allocates
            for kind in types:
                if unwraps_subclass(kind):
                    return NotImplemented
                if is_fake(kind) and not self.counts_fake:
                    counts = False
            conjugates_lazily()
        except Exception as error:  # nothing has run yet: run the operator as without us
            self._operator_failed(error)
            return func(*args, **kwargs)
        if counts and operator.looks_inside:
            return self._open(operator, types, args, kwargs)
        out = func(*args, **kwargs)
        if counts:  # it has run: if counting it fails, the user's step goes on
            guarded(self._operator_failed, self._add, operator, args, kwargs, out)
        return out

    def is_on(self) -> bool:
        """Whether this thread has entered the counter, or runs something now that is counted."""
        return self._threads.state.entered > 0 or is_pushed(self)

    def _open(self, operator: Operator, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator whose kernel may be in Python; if nothing is known about it, what it runs is seen."""
        function, keys = operator.function, None
        if not (operator.counted or any(one.is_nested for one in tensors_in(args))) and is_composite(function):
            with self:
                out = function.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        # If there are other modes below this one, the operator still has to go to them.
        if not (types or depth()):
            tensors = [*tensors_in((*args, *kwargs.values()))]
            keys = guarded(self._operator_failed, keys_of_python_kernel, function, tensors)
        if keys is None:
            out = function(*args, **kwargs)
        else:
            out = run_python_kernel(function, keys, args, kwargs, None if operator.counted else self)
        guarded(self._operator_failed, self._add, operator, args, kwargs, out, keys is None or operator.counted)
        return out

    # ---- counting

    def _add(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, moves: bool = True
    ) -> None:
        """Counts one call, which has run; its bytes too if it *moves* any that no operator inside it did."""
        state, totals = self._threads.state, self._totals
        if state.by_graph and operator.counted:
            return
        place = state.place(operator.counted)
        module, phase, stands, _ = place
        if self._lives is not None:
            reads = (*args, *kwargs.values()) if operator.counts else ()
            self._lives.ran(operator.name, module, phase, tensors_in(reads), tensors_in((out,)))
        if not operator.counts:
            return
        if operator.sized_by and operator.is_sized_by_values(args):
            # A number may be read for anything: only one that a model reads is taken for a size.
            self.data_dependent |= operator.short != READS_NUMBER or module != OUTSIDE
        if module in totals.unread:
            totals.read(module, tensors_in((*args, *kwargs.values())), [*tensors_in((out,))], operator.short in COPYING)
        if operator.moves_nothing:
            return
        moved = operator.moved(args, kwargs, out) if moves else (0, 0)
        place = self._with_node(place, args)
        if stands or operator.kind == "free":
            totals.add(place, operator.name, moved=moved)
        elif operator.counted:
            self._count(place, operator, args, kwargs, out, moved)
        else:
            self._spend(place, operator, None, moved, may_have_flops=hides_flops(operator.name, args, kwargs, out))

    def _count(
        self,
        place: Place,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
        moved: tuple[int, int] = (0, 0),
    ) -> None:
        """Adds one call of an operator that has a formula, or lists it."""
        place, cost = self._in_region(place), None
        try:
            cost = self._cost(operator, args, kwargs, out, any(tensor.is_cuda for tensor in tensors_in(args)))
        except Exception as error:  # a user's formula may raise anything; its operator is listed in the report
            words = words_of(error)
            if operator.name not in self._failing:
                self._failing.add(operator.name)
                logger.warning("the FLOP formula of %s failed (%s): it is listed as uncounted", operator.name, words)
        if cost is not None and place.phase == "backward" and is_custom_backward():
            again: bool | None = operands(operator.name, args) in self.forward_products
            if is_compiled(current_node()) and (again := repeats_forward()) is None:
                self._note_unread(place.module)
            place = place._replace(phase="recompute" if again else "backward")
        if not is_grad_enabled() and place.phase in _FORWARDS and is_in_function():
            self.forward_products.add(operands(operator.name, args))
        self._spend(place, operator, cost, moved)

    def _with_node(self, place: Place, args: Any) -> Place:
        """The *place* with the number of the autograd node that a call with *args* has made: see ``Place.made``."""
        if self._threads.state.stack[-1].owner is not None or not self._totals.separates_outside:
            return place
        makes = is_grad_enabled() and any(one.requires_grad for one in tensors_in(args))
        return place._replace(made=sequence_number() - 1 if makes or is_in_function() else -1)

    def _cost(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, on_cuda: bool) -> Cost:
        """What a call costs by the operator's formula, which may raise anything."""
        answer = operator.compute(args, kwargs, out)
        work = answer if isinstance(answer, Work) else Work(answer)
        flops, repeated, skipped = whole_flops(work.flops), work.recompute, work.skipped
        self.data_dependent |= work.by_values
        dtype: Any = operator.dtype_of(args, kwargs, out)
        if on_cuda and dtype is torch.float32 and self.runs_in_tf32 is not None and self.runs_in_tf32(operator.name):
            dtype = "tf32"
        # A mask skips the same share of every product over the score matrix.
        own = skipped * flops // (flops + repeated) if skipped else 0
        # Only the count is halved; what runs stays the same. So the skipped share is smaller, or even negative.
        share = 2 if self._halves_causal and work.causal else 1
        less, less_again = flops - flops // share, repeated - repeated // share
        of_phase, again = (flops - less, own - less), (repeated - less_again, skipped - own - less_again)
        return Cost(dtype_name(dtype), of_phase, again)

    def _spend(
        self,
        place: Place,
        operator: Operator,
        cost: Cost | None,
        moved: tuple[int, int] = (0, 0),
        *,
        may_have_flops: bool = True,
    ) -> None:
        """Adds one call that no formula stands for, and lists it if what it costs is not known."""
        totals = self._totals
        totals.unread.pop(place.module, None)
        if cost is None:
            totals.list(operator.name, place.module, may_have_flops)
            cost = Cost("", (0, 0))
        elif operator.estimate:
            totals.estimates[operator.name] = operator.estimate
        flops, skipped = cost.own
        totals.add(place, operator.name, cost.dtype, flops=flops, skipped=skipped, moved=moved)
        if any(cost.repeated):  # one kernel runs both: its call and its bytes stay with the backward
            flops, skipped = cost.repeated
            repeated = place._replace(phase="recompute")
            totals.add(repeated, operator.name, cost.dtype, calls=0, flops=flops, skipped=skipped)

    # ---- what no dispatcher shows

    def list_unseen(self, name: str, *_: Any, may_have_flops: bool = True, **__: Any) -> None:
        """Work of which the dispatcher sees nothing runs: it is listed under the module that is running.

        What an operator launches is the operator's, which is counted, or listed itself.
        """
        if not self._threads.state.by_graph and is_pushed(self):
            place = self._threads.state.place(True)
            if not place.stands:
                self._totals.list(name, self._in_region(place).module, may_have_flops)

    def kernel_launches(self, kernel: Any, *_: Any, warmup: bool = False, **__: Any) -> None:
        """A Triton kernel is launched by Python."""
        if not warmup:
            self.list_unseen(f"triton.{kernel_name(kernel)}", may_have_flops=multiplies(kernel))

    def graph_runs(self, graph: Any, inputs: Any) -> Ends | None:
        """A graph of inductor's is called, and counted from its text; returns what is called when it has ended."""
        state, text = self._threads.state, str(getattr(graph, "inductor_post_grad_graph_str", ""))
        if state.by_graph or not is_pushed(self):
            return None
        if self._lives is not None:
            self._lives.has_unseen = True  # what it allocates no operator shows
        try:
            with modes_off(), torch.no_grad():
                calls = [self._graph_call(one) for one in products(text, inputs)]
        except Exception as error:
            logger.debug("the text of a compiled graph could not be read: %s", words_of(error), exc_info=True)
            for kernel in templates_in(str(getattr(graph, "source_code", ""))):
                self.list_unseen(f"inductor.{kernel}")
            return None
        state.by_graph = True

        def ends(result: Any, error: BaseException | None) -> None:
            state.by_graph = False
            if error is None:
                self._count_graph(calls, lines_that_repeat(text) is not None)

        return ends

    def _graph_call(self, one: Product) -> GraphCall:
        """How a call in a graph counts.

        Raises:
            Exception: whatever a formula raises.
        """
        operator, cost = lookup(one.function), None
        try:
            if operator.counted and not counts_when_run(one.kwargs):
                cost = self._cost(operator, one.args, one.kwargs, one.out, one.on_cuda)
        except Exception:
            if operator.keywords is not None:
                raise  # it is none of higher order: the dispatcher sees it run, with all values
        return operator, cost, operator.moved(one.args, one.kwargs, one.out), one.repeats

    def _count_graph(self, calls: list[GraphCall], is_split: bool) -> None:
        place = self._with_node(self._in_region(self._threads.state.place(True)), ())
        if place.stands:
            return
        is_backward = place.phase == "backward"
        if is_backward and calls and not is_split and (current_node() is None or is_compiled(current_node())):
            self._note_unread(place.module)
        self._totals.unread.pop(place.module, None)
        for operator, cost, moved, repeats in calls:
            place_of_call = place._replace(phase="recompute") if repeats and is_backward else place
            self._spend(place_of_call, operator, cost, moved)

    def _in_region(self, place: Place) -> Place:
        """Where compiled code of the place's module may run: the running module, hooks or not."""
        if not self.in_place or place.phase not in _FORWARDS:
            return place
        region = next((module for module in calling_modules() if module in self.in_place), None)
        name = None if region is None else self._names.name_for(region, place.module)
        if name is None or name == place.module:
            return place
        if not is_grad_enabled():  # the region has only one autograd node, and it was made just before
            self._threads.state.nodes.insert(sequence_number() - 1, Place(name))
            self._threads.state.mark()
        return place._replace(module=name)

    def _note_unread(self, module: str) -> None:
        self._totals.note(
            f"What the compiled backward of {module or 'the root'} repeats of its forward could not be read apart: it "
            "counts as backward here, not as recompute."
        )

    # ---- what has a formula of its own

    def function_runs(self, operator: Operator) -> Callable[..., None]:
        """A registered autograd function, module or kernel runs: its formula stands for all that runs there.

        Returns what is called when it has ended, with its arguments, its keyword arguments, its result and, of a
        module, itself if it has returned.
        """
        state, owner, start = self._threads.state, object(), sequence_number()
        if not is_pushed(self):
            return lambda *call: None
        state.push(*state.place(True)[:2], owner, stands=True)

        def ends(*call: Any) -> None:
            if state.leave(owner) is not None:  # otherwise counting has ended meanwhile
                failed = partial(self._totals.failed, "an autograd function")
                guarded(failed, self._function_ran, operator, start, *call)

        return ends

    def _function_ran(self, operator: Operator, start: int, *call: Any) -> None:
        place = self._threads.state.place(bool(call))
        if not call:
            if operator.name in backwards and current_node() is not None:
                # A checkpoint ends a repeated forward where it has all it needs: what that cost is not known.
                self._totals.list(operator.name, place.module, True)
        elif is_pushed(self) and not place.stands:
            *call_of, owner = call
            self._count(self._with_node(place, call_of[:2]), operator, *call_of)
            if owner is not None and operator.name not in self._failing:
                self._watch_backward(operator, start, place.module, owner, *call_of)

    def _watch_backward(self, operator: Operator, start: int, module: str, owner: nn.Module, *call: Any) -> None:
        """Has the backward of a forward counted that has a formula, where it comes to what the forward returned."""
        args, kwargs, out = call
        made = {one.grad_fn for one in tensors_in(tree_leaves(out)) if one.grad_fn is not None}
        made = {node for node in made if start <= node_sequence(node) < sequence_number()}
        if not made:
            return
        compute, times = backwards[operator.name], 1
        if compute is None:  # once the forward for the parameters' gradients, once for the inputs', if these are needed
            compute = operator.compute
            input_needs_gradient = any(one.requires_grad for one in tensors_in(tree_leaves((args, kwargs))))
            times = input_needs_gradient + any(one.requires_grad for one in owner.parameters())
        # What the backward costs is known now: nothing of the call is kept until it runs.
        answer = compute(args, kwargs, out)
        flops = times * whole_flops(answer.flops if isinstance(answer, Work) else answer)
        backward = Operator(f"{operator.name}.backward", "formula")
        cost = Cost(dtype_name(operator.dtype_of(args, kwargs, out)), (flops, 0))
        tasks = set[int]()

        def begins(*_: Any) -> None:
            if is_pushed(self) and graph_task_id() not in tasks:
                tasks.add(graph_task_id())
                self._spend(self._threads.state.place(True), backward, cost)

        for node in made:
            node.register_prehook(partial(guarded, partial(self._totals.failed, "the backward of a module"), begins))
        self._threads.state.nodes.mark(Place(module, stands=True), start)
        self._threads.state.mark()
