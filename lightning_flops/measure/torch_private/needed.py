"""The private names of torch without which nothing can be counted: autograd's, the dispatcher's, the compiler's marks.

They are looked up when this file is loaded. Counting is refused in one sentence where one is missing.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from importlib import import_module
from types import FrameType, SimpleNamespace
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_flops.errors import LightningFlopsError
from lightning_flops.signals import Undo

MISSING: list[str] = []  #: Names, as ``module:attribute``, that counting needs and this torch lacks.


def take(path: str, *stand_in: Any) -> Any:
    """What torch has under *path*, ``module:attribute``.

    If it has nothing there: *stand_in*, or None, where counting is then refused.
    """
    module, _, attributes = path.partition(":")
    try:
        return operator.attrgetter(attributes)(import_module(module))
    except Exception:  # importing a part of torch may raise anything
        if stand_in:
            return stand_in[0]
        MISSING.append(path)
        return None


#: What only this file uses.
_NAMES = {
    # Autograd: the code of the engine and of a module's call, and what a node has, of every kind or of none.
    "engine_code": "torch.autograd.graph:_engine_run_backward.__code__",
    "call_code": "torch.nn:Module._wrapped_call_impl.__code__",
    "Context": "torch.autograd.function:BackwardCFunction",
    "sequence": "torch._C:_functions.AccumulateGrad._sequence_nr",
    # Marks on code that is not to be compiled
    "mark": "torch._C._dynamo.eval_frame:set_code_exec_strategy",
    "Action": "torch._C._dynamo.eval_frame:_FrameAction",
    "Strategy": "torch._C._dynamo.eval_frame:_FrameExecStrategy",
    # Modes
    "push": "torch._C:_push_on_torch_dispatch_stack",
    "pop": "torch._C:_pop_torch_dispatch_stack",
    "mode_at": "torch._C:_get_dispatch_stack_at",
    "set_excluded": "torch._C:_dispatch_tls_set_dispatch_key_excluded",
    "keys": "torch._C:_TorchDispatchModeKey",
    "mode_of_key": "torch._C:_get_dispatch_mode",
    "FakeTensorMode": "torch._subclasses.fake_tensor:FakeTensorMode",
    # Kernels; those registered from Python by ``namespace/operator/key``
    "has_kernel": "torch._C:_dispatch_has_kernel_for_dispatch_key",
    "written_in_python": "torch.library:_impls",
    "key_of_device": "torch._C:_dispatch_key_for_device",
    "key_set": "torch._C:DispatchKeySet",
    # Inside, the dispatcher is as when the operator was called.
    "as_before_modes": "torch._C:_RestorePythonTLSSnapshot",
    "below_autograd": "torch._C:_AutoDispatchBelowAutograd",
    "include_key": "torch._C:_dispatch_tls_set_dispatch_key_included",
}
_C: Any = SimpleNamespace(**{name: take(path) for name, path in _NAMES.items()})


def require_all() -> None:
    """Checks that torch has all that counting needs.

    Raises:
        LightningFlopsError: it does not.
    """
    if MISSING:
        raise LightningFlopsError(
            f"FLOPs cannot be counted: this torch ({torch.__version__}) has no {', '.join(MISSING)}."
        )


# ---- autograd: which backward runs, and which node of it. The hot path calls the first three as they are.

#: Number of the backward that is running on this thread; ``NO_GRAPH_TASK`` when none is.
graph_task_id: Callable[[], int] = take("torch._C:_current_graph_task_id")

#: The autograd node whose backward is running on this thread, or None.
current_node: Callable[[], Any] = take("torch._C:_current_autograd_node")

#: Number that the next autograd node made on this thread will have.
sequence_number: Callable[[], int] = take("torch.autograd:_get_sequence_nr")

NO_GRAPH_TASK = -1  #: Id of the graph task outside any backward.

ACCUMULATES_GRADIENT = 1 << 63  #: From this sequence number on, a node is no call's: it accumulates a leaf's gradient.

ENGINE_ENTRY = "_engine_run_backward"  #: The function of ``torch.autograd`` through which every backward goes.


#: None from torch 2.14 on, where no code of Python's calls a function's forward.
_APPLY_CODE: Any = take("torch.autograd:Function.apply.__func__.__code__", None)


def node_sequence(node: Any) -> int:
    """Sequence number of an autograd node; ``ACCUMULATES_GRADIENT`` or more when it has none."""
    try:
        return node._sequence_nr()  # type: ignore[no-any-return]
    except AttributeError:
        return ACCUMULATES_GRADIENT


def frames_outwards(frame: FrameType | None) -> Iterator[FrameType]:
    """*frame*, what has called it, and so on."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_in_function() -> bool:
    """Whether the running code is in the forward of an ``autograd.Function``.

    Such code runs with grad disabled although a backward will follow: custom functions, compiled regions, and the
    first pass of reentrant checkpointing.
    """
    for frame in frames_outwards(sys._getframe()):
        code = frame.f_code
        # No other frame's variables are looked at: in a user's they would be kept beyond their time.
        may_be = _APPLY_CODE is None and code.co_name == "forward" and code.co_varnames[:1] == ("ctx",)
        if code is _APPLY_CODE or (may_be and isinstance(frame.f_locals.get("ctx"), _C.Context)):
            return True
        if code is _C.engine_code:
            return False  # what is further out is the code that called backward()
    return False


def is_custom_backward() -> bool:
    """Whether the backward that is running on this thread is that of a custom ``autograd.Function``."""
    return isinstance(current_node(), _C.Context)


def calling_modules() -> Iterator[nn.Module]:
    """The modules whose calls are on this thread's stack, innermost first."""
    for frame in frames_outwards(sys._getframe()):
        if frame.f_code is _C.call_code and isinstance(module := frame.f_locals.get("self"), nn.Module):
            yield module


# ---- torch.compile: functions of ours kept out of it


def hide(function: Callable[..., Any], *, alone: bool = False) -> bool:
    """Marks one of our functions, so that its calls, and what they call, are not compiled. Returns whether it could.

    The mark is on the function's code and stays there: it is for code of this package only. *alone*: what it calls, as
    the user's functions, is compiled as it would be without it.
    """
    try:
        inside = _C.Action.DEFAULT if alone else _C.Action.SKIP
        _C.mark(function.__code__, _C.Strategy(_C.Action.SKIP, inside))
    except (AttributeError, TypeError):  # it has no code of its own, such as a callable object; or torch has no marks
        return False
    return True


# ---- dispatch modes: a thread's stack of them, and how to hide work from them. On one thread ``with mode:`` is enough.
# But it keeps flags for the whole process, and these end up wrong if several threads enter and leave in turn.

#: How many modes are on this thread's stack, without those whose handlers run now.
depth: Callable[[], int] = take("torch._C:_len_torch_dispatch_stack")

#: Inside, or in a function that this decorates, no dispatch mode sees what runs: neither ours, nor the user's, nor a
#: tracer.
modes_off: Callable[[], Any] = take("torch.utils._python_dispatch:_disable_current_modes")


def set_flag_of_modes() -> None:
    """Has torch's flag say whether modes are on this thread's stack.

    Operators go past those, or fail for want of one, if it is wrong.
    """
    if depth():
        _C.push(_C.pop(None))
    else:
        _C.pop(_C.push(_NOOP_MODE))  # to push returns None; in one line, so that Ctrl-C leaves nothing pushed


#: Torch's guard of an inference mode. It sets the flag at its end to what it was at its begin.
InferenceMode: Any = take("torch._C:_InferenceMode")

#: A module of the compiler, and its function that a compiled call, which sets it so, too, calls at last.
EVAL_FRAME, ENDS_CALL = "torch._dynamo.eval_frame", "_maybe_set_eval_frame"


def is_in_compiled_call(ending: int) -> bool:
    """Whether we run inside a function given to ``torch.compile``; so many of the compiler's calls are over."""
    frames = frames_outwards(sys._getframe())
    names = [one.f_code.co_name for one in frames if one.f_globals.get("__name__") == EVAL_FRAME]
    return "compile_wrapper" in names[ending:]


def push(mode: TorchDispatchMode, *, under_others: bool = False) -> None:
    """Puts *mode* on top of this thread's stack.

    *under_others*: under all that were pushed by others since the latest of ours. Whoever leaves a mode takes the
    topmost one off, which may be another one if that was pushed meanwhile.
    """
    above = []
    while under_others and depth() and not type(_C.mode_at(depth() - 1)).__module__.startswith("lightning_flops."):
        above.append(_C.pop(None))
    for each in (mode, *reversed(above)):
        _C.push(each)


def is_pushed(mode: TorchDispatchMode) -> bool:
    """Whether *mode* is on this thread's stack, under whatever other modes."""
    return any(_C.mode_at(place) is mode for place in range(depth()))


def remove(mode: TorchDispatchMode) -> None:
    """Removes the topmost *mode* from this thread's stack; modes above it stay in place."""
    if not is_pushed(mode):
        return
    above = []
    while (popped := _C.pop(None)) is not mode:
        above.append(popped)
    for other in reversed(above):
        _C.push(other)


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that ``with`` puts on top of this thread's stack, also within its own handler, where it is not on it."""

    supports_higher_order_operators = True

    def __enter__(self) -> Any:
        push(self)

    def __exit__(self, *exc: object) -> None:
        remove(self)


#: Is pushed and taken off again, which sets torch's flag for modes.
_NOOP_MODE = DispatchMode()  # type: ignore[no-untyped-call]


_CONJUGATE, _NEGATIVE = torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative


def conjugates_lazily() -> None:
    """Has the operator that a mode's handler runs next resolve lazy conjugates and negatives, as it does without modes.

    Torch switches these keys off for a handler, and itself puts them back when the handler ends.
    """
    _C.set_excluded(_CONJUGATE, False)
    _C.set_excluded(_NEGATIVE, False)


# ---- operators: their kinds, their schemas, and how a kernel that is written in Python is called

# The classes of public operators: no private name is needed for them.
OpOverload: Any = type(torch.ops.aten.mm.default)
OpOverloadPacket: Any = type(torch.ops.aten.mm)
HigherOrderOperator: Any = take("torch._ops:HigherOrderOperator")

schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")  #: The schema of an operator that has one.


def overloads_named(qualified_name: str) -> list[Any]:
    """All overloads of the operator ``namespace::name``; empty where this torch knows no such operator."""
    found = []
    with suppress(AttributeError, RuntimeError):
        packet = operator.attrgetter(qualified_name.replace("::", ".", 1))(torch.ops)
        for overload in packet.overloads() if isinstance(packet, OpOverloadPacket) else ():
            with suppress(AttributeError, RuntimeError):  # one that only TorchScript knows
                found.append(getattr(packet, overload))
    return found


def is_composite(function: Any) -> bool:
    """Whether the operator is no more than others, which ``function.decompose`` runs; False if torch does not say."""
    try:
        # Some have a kernel too, of other bits.
        return bool(function._can_decompose()) and not _C.has_kernel(function.name(), "CPU")
    except (AttributeError, RuntimeError):
        return False


def keys_of_python_kernel(function: Any, tensors: list[torch.Tensor]) -> Any:
    """The dispatch key of an operator's Python kernel for the device that a call's *tensors* are on.

    None if there is no such kernel, or where it takes more than ordinary tensors.
    """
    if any(one.layout is not torch.strided or one.is_quantized or one.is_nested or one.is_meta for one in tensors):
        return None
    devices = {one.device.type for one in tensors}
    if len(devices) > 1:
        devices.discard("cpu")  # single numbers may lie there
    if len(devices) != 1 or ("cuda" in devices and torch.cuda.is_current_stream_capturing()):
        return None
    with suppress(AttributeError, RuntimeError):  # a device that the dispatcher has no key for
        key = _C.key_of_device(devices.pop())
        own = _is_in_python(function, key)
        if own or (_is_in_python(function, "CompositeExplicitAutograd") and not _C.has_kernel(function.name(), key)):
            return _C.key_set(getattr(torch._C.DispatchKey, key))
    return None


def _is_in_python(function: Any, key: str) -> bool:
    return f"{function.name().replace('::', '/', 1)}/{key}" in _C.written_in_python


def run_python_kernel(
    function: Any, keys: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: DispatchMode | None
) -> Any:
    """Calls the kernel from within a mode's handler as torch would without any mode; *mode* sees what it runs."""
    # What a custom operator has for autograd switches autograd off for the kernel. It is off from where it is made on.
    # Torch begins that where its guard is made, so it is made inside of the other one.
    below_autograd = _C.below_autograd if _is_in_python(function, "Autograd") else nullcontext
    with _C.as_before_modes(), below_autograd():
        if mode is None:
            for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
                _C.include_key(key, False)
        with mode or nullcontext():
            return function.redispatch(keys, *args, **kwargs)


# ---- fake tensors, tracers and subclasses


def new_fake_mode() -> Any:
    """A mode in which operators make tensors without values."""
    return _C.FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode() -> Any:
    """Torch's mode in which operators make fake tensors, as while something is traced; None: none is on."""
    return _C.mode_of_key(_C.keys.FAKE)


@functools.cache
def is_fake(tensor_type: type) -> bool:
    """Whether tensors of this type hold no data: fake and functional ones; known by name, so nothing is imported."""
    return any(
        cls.__name__ in ("FakeTensor", "FunctionalTensor") and cls.__module__.startswith("torch._subclasses")
        for cls in tensor_type.__mro__
    )


@functools.cache
def unwraps_subclass(tensor_type: type) -> bool:
    """Whether operators on this tensor subclass are counted on the tensors inside it.

    A DTensor's local shard, a nested tensor's values, a quantized tensor's parts: what runs are the operators that its
    ``__torch_dispatch__`` calls, on their shapes. A fake tensor has nothing inside.
    """
    dispatch = getattr(tensor_type, "__torch_dispatch__", None)
    if dispatch is None or dispatch is cast("Any", torch.Tensor).__torch_dispatch__:  # plain tensors: no such method
        return False
    return not is_fake(tensor_type)


tree_leaves: Any = take("torch.utils._pytree:tree_leaves")
tree_map_only: Any = take("torch.utils._pytree:tree_map_only")  #: Maps a function over what containers hold of a type.


#: By what a tensor that is not dense has its pieces, as the gradient of an embedding with sparse=True; the last are the
#: elements that it stores.
PIECES: Mapping[torch.layout, tuple[str, ...]] = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


# ---- torch before 2.9, whose compiler leaves out of compiled code what a dispatch mode would see, and whose operators
# of higher order refuse a mode that they have no rule for. It goes when these versions are no longer served.

IS_BEFORE_2_9 = not hasattr(TorchDispatchMode, "ignore_compile_internals")


def run_uncompiled(undo: Undo, mode: type[DispatchMode]) -> None:
    """Torch before 2.9 runs what is compiled as its Python until *undo* is closed; a newer one stays as it is.

    Operators of higher order (flex attention, ``torch.cond``) get a rule for modes of the class *mode* for so long.
    """
    if not IS_BEFORE_2_9:
        return
    undo.enter_context(torch.compiler.set_stance("force_eager"))
    for higher in take("torch._ops:_higher_order_ops", {}).values():
        if mode not in higher.python_key_table:  # a counter around this one has it there, and takes it out
            higher.python_key_table[mode] = functools.partial(_run_through, higher)
            undo.callback(higher.python_key_table.pop, mode, None)


def _run_through(higher: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
    return mode.__torch_dispatch__(higher, (), args, kwargs)


hide(_run_through)
