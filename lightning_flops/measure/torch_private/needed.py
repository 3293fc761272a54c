"""The private names of torch without which nothing can be counted: autograd's, the dispatcher's, the compiler's marks.

They are looked up when this file is loaded. Counting is refused in one sentence where one is missing.
"""

from __future__ import annotations

import functools
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from types import CodeType, FrameType
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_flops.errors import LightningFlopsError
from lightning_flops.units import package_logger

logger = package_logger(__name__)

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


_ENGINE_CODE: CodeType | None = take("torch.autograd.graph:_engine_run_backward.__code__")
#: None from torch 2.14 on, where no code of Python's calls a function's forward.
_APPLY_CODE: CodeType | None = take("torch.autograd:Function.apply.__func__.__code__", None)
_CALL_CODE: CodeType | None = take("torch.nn:Module._wrapped_call_impl.__code__")
_Context: Any = take("torch.autograd.function:BackwardCFunction")
take("torch._C:_functions.AccumulateGrad._sequence_nr")  # every kind of node has it, or none


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


def function_in_forward() -> Any:
    """The ``autograd.Function`` in whose forward the running code is; None where in none.

    Such code runs with grad disabled although a backward will follow: custom functions, compiled regions, and the
    first pass of reentrant checkpointing.
    """
    for frame in frames_outwards(sys._getframe()):
        code = frame.f_code
        if code is _APPLY_CODE:
            return frame.f_locals.get("cls", torch.autograd.Function)
        # No other frame's variables are looked at: in a user's they would be kept beyond their time.
        if _APPLY_CODE is None and code.co_name == "forward" and code.co_varnames[:1] == ("ctx",):
            context = frame.f_locals.get("ctx")
            if isinstance(context, _Context):
                return context._forward_cls
        if code is _ENGINE_CODE:
            return None  # what is further out is the code that called backward()
    return None


def is_custom_backward() -> bool:
    """Whether the backward that is running on this thread is that of a custom ``autograd.Function``."""
    return isinstance(current_node(), _Context)


def calling_modules() -> Iterator[nn.Module]:
    """The modules whose calls are on this thread's stack, innermost first."""
    for frame in frames_outwards(sys._getframe()):
        if frame.f_code is _CALL_CODE and isinstance(module := frame.f_locals.get("self"), nn.Module):
            yield module


# ---- torch.compile: functions of ours kept out of it

_mark: Any = take("torch._C._dynamo.eval_frame:set_code_exec_strategy")
_Action: Any = take("torch._C._dynamo.eval_frame:_FrameAction")
_Strategy: Any = take("torch._C._dynamo.eval_frame:_FrameExecStrategy")

_EVAL_FRAME = "torch._dynamo.eval_frame"


def hide(function: Callable[..., Any], *, alone: bool = False) -> bool:
    """Marks one of our functions, so that its calls, and what they call, are not compiled. Returns whether it could.

    The mark is on the function's code and stays there: it is for code of this package only. *alone*: what it calls, as
    the user's functions, is compiled as it would be without it.
    """
    try:
        _mark(function.__code__, _Strategy(_Action.SKIP, _Action.DEFAULT if alone else _Action.SKIP))
    except (AttributeError, TypeError):  # it has no code of its own, such as a callable object; or torch has no marks
        logger.debug("%r could not be marked as not to be compiled", function, exc_info=True)
        return False
    return True


# ---- dispatch modes: a thread's stack of them, and how to hide work from them. On one thread ``with mode:`` is enough.
# But it keeps flags for the whole process, and these end up wrong if several threads enter and leave in turn.

DispatchMode: TypeAlias = TorchDispatchMode

_push: Any = take("torch._C:_push_on_torch_dispatch_stack")
_pop: Any = take("torch._C:_pop_torch_dispatch_stack")
#: How many modes are on this thread's stack, without those whose handlers run now.
depth: Callable[[], int] = take("torch._C:_len_torch_dispatch_stack")
_mode_at: Any = take("torch._C:_get_dispatch_stack_at")
_set_excluded: Any = take("torch._C:_dispatch_tls_set_dispatch_key_excluded")
_InferenceMode: Any = take("torch._C:_InferenceMode")

#: Inside, no dispatch mode sees what runs: neither ours, nor the user's, nor a tracer.
modes_off: Callable[[], AbstractContextManager[Any]] = take("torch.utils._python_dispatch:_disable_current_modes")

_threads_with_ours: set[int] = set()  #: Threads on whose stack is a mode of ours.

#: Is pushed and taken off again, which sets torch's flag for modes.
_NOOP_MODE = DispatchMode()  # type: ignore[no-untyped-call]


class _After:
    """Sets torch's flag for a thread's dispatch modes right where the end of something sets it wrong.

    The flag says whether there are modes on the stack; operators go past those, or fail for want of one, if it is
    wrong. When an inference mode ends, or the call of a compiled function, torch sets it to what it was when that
    began, whatever was pushed or removed in between. It ends with the function *end* of what *owner* returns, if there
    is one; *is_inside* says whether a frame runs inside of it. Inside an inference mode that is off nothing says so:
    with *begin*, the function that it begins with, all are watched while a mode of ours is on the stack.
    """

    def __init__(
        self, owner: Callable[[], Any], end: str, is_inside: Callable[[FrameType | None], bool], begin: str = ""
    ) -> None:
        self._owner, self._is_inside = owner, is_inside
        self._end, self._begin = end, begin
        #: In these the stack was changed inside of one that has not ended; how many have begun since.
        self._threads: dict[int, int] = {}
        self._open: dict[int, Any] = {}  #: These, by their ids: one that is dropped without its end has ended, too.
        self._without_us: dict[str, Any] = {}  #: The functions.

    def stack_changes(self, frame: FrameType | None) -> None:
        """*frame* has changed the stack of this thread, or what it had begun is over."""
        thread, owner = threading.get_ident(), self._owner()
        watches = bool(self._begin) and thread in _threads_with_ours
        if watches or self._threads.get(thread) or self._is_inside(frame):
            if hasattr(owner, self._end):
                self._threads.setdefault(thread, 0)
                self._watch(owner)
            return
        self._threads.pop(thread, None)
        if not self._threads:
            for name, function in self._without_us.items():
                setattr(owner, name, function)
            self._without_us = {}

    def _watch(self, owner: Any) -> None:
        if self._without_us:
            return
        self._without_us = {name: vars(owner)[name] for name in (self._end, self._begin) if name}
        end, begin = self._without_us[self._end], self._without_us.get(self._begin, nullcontext)

        def ends(*args: Any) -> Any:
            try:
                return end(*args)
            finally:
                self._open.pop(id(args[0]), None)
                self._has_ended(sys._getframe(1))

        def begins(context: Any) -> Any:
            result, key = begin(context), id(context)

            def dropped(_: Any) -> None:
                if self._open.pop(key, None):
                    self._has_ended(None)

            if (thread := threading.get_ident()) in self._threads:
                self._threads[thread] += 1
                self._open[key] = weakref.ref(context, dropped)  # torch's compiler ends none where it gives up
            return result

        setattr(owner, self._end, ends)
        if self._begin:
            setattr(owner, self._begin, begins)

    def _has_ended(self, frame: FrameType | None) -> None:
        """What *frame* had begun is over."""
        thread = threading.get_ident()
        if thread not in self._threads:
            return
        if depth():
            _push(_pop(None))
        else:
            _push(_NOOP_MODE)
            _pop(None)
        self._threads[thread] = max(0, self._threads[thread] - 1)
        self.stack_changes(frame and frame.f_back)  # it may have been inside another one


hide(_After._has_ended)


def _is_in_compiled_call(frame: FrameType | None) -> bool:
    """Whether *frame*, or what has called it, runs inside a function that was given to ``torch.compile``."""
    wrappers = (one for one in frames_outwards(frame) if one.f_code.co_name == "compile_wrapper")
    return any(one.f_globals.get("__name__") == _EVAL_FRAME for one in wrappers)


_inside_which_torch_restores_its_flag = (
    _After(lambda: _InferenceMode, "__exit__", lambda _: torch.is_inference_mode_enabled(), "__enter__"),
    _After(lambda: sys.modules.get(_EVAL_FRAME), "_maybe_set_eval_frame", _is_in_compiled_call),
)


def _stack_changes() -> None:
    frame = sys._getframe(1)
    has_ours = any(map(_is_ours, map(_mode_at, range(depth()))))
    (_threads_with_ours.add if has_ours else _threads_with_ours.discard)(threading.get_ident())
    for each in _inside_which_torch_restores_its_flag:
        each.stack_changes(frame)


def _is_ours(mode: Any) -> bool:
    return type(mode).__module__.startswith("lightning_flops.")


def push(mode: DispatchMode, *, under_others: bool = False) -> None:
    """Puts *mode* on top of this thread's stack.

    *under_others*: under all that were pushed by others since the latest of ours. Whoever leaves a mode takes the
    topmost one off, which may be another one if that was pushed meanwhile.
    """
    above = []
    while under_others and depth() and not _is_ours(_mode_at(depth() - 1)):
        above.append(_pop(None))
    for each in (mode, *reversed(above)):
        _push(each)
    _stack_changes()


def is_pushed(mode: DispatchMode) -> bool:
    """Whether *mode* is on this thread's stack, under whatever other modes."""
    return any(_mode_at(place) is mode for place in range(depth()))


def remove(mode: DispatchMode) -> None:
    """Removes the topmost *mode* from this thread's stack; modes above it stay in place."""
    _pop_mode(mode)
    _stack_changes()


def _pop_mode(mode: DispatchMode) -> None:
    if not is_pushed(mode):
        return
    above = []
    while (popped := _pop(None)) is not mode:
        above.append(popped)
    for other in reversed(above):
        _push(other)


@contextmanager
def pushed(mode: Any) -> Iterator[None]:
    """Inside, *mode* is on top of the stack: within its own handler it would not be."""
    _push(mode)
    try:
        yield
    finally:
        _pop_mode(mode)


_CONJUGATE, _NEGATIVE = torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative


def conjugates_lazily() -> None:
    """Has the operator that a mode's handler runs next resolve lazy conjugates and negatives, as it does without modes.

    Torch switches these keys off for a handler, and itself puts them back when the handler ends.
    """
    _set_excluded(_CONJUGATE, False)
    _set_excluded(_NEGATIVE, False)


# ---- operators: their kinds, their schemas, and how a kernel that is written in Python is called

# The classes of public operators: no private name is needed for them.
OpOverload: Any = type(torch.ops.aten.mm.default)
OpOverloadPacket: Any = type(torch.ops.aten.mm)
HigherOrderOperator: Any = take("torch._ops:HigherOrderOperator")

_has_kernel: Any = take("torch._C:_dispatch_has_kernel_for_dispatch_key")
#: Kernels registered from Python, by ``namespace/operator/key``.
_written_in_python: Any = take("torch.library:_impls")
_key_of_device: Any = take("torch._C:_dispatch_key_for_device")
_key_set: Any = take("torch._C:DispatchKeySet")
#: Inside, the dispatcher is as it was when the operator was called, above any mode.
_as_before_modes: Any = take("torch._C:_RestorePythonTLSSnapshot")
_below_autograd: Any = take("torch._C:_AutoDispatchBelowAutograd")
_include_key: Any = take("torch._C:_dispatch_tls_set_dispatch_key_included")


schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")  #: The schema of an operator that has one.


def overloads_named(qualified_name: str) -> list[Any]:
    """All overloads of the operator ``namespace::name``; empty where this torch knows no such operator."""
    namespace, _, name = qualified_name.partition("::")
    try:
        packet = getattr(getattr(torch.ops, namespace), name)
    except (AttributeError, RuntimeError):
        return []
    if not isinstance(packet, OpOverloadPacket):
        return []
    found = []
    for overload in packet.overloads():
        with suppress(AttributeError, RuntimeError):  # one that only TorchScript knows
            found.append(getattr(packet, overload))
    return found


def is_composite(function: Any) -> bool:
    """Whether the operator is no more than others, which ``function.decompose`` runs; False if torch does not say."""
    try:
        # Some have a kernel too, of other bits.
        return bool(function._can_decompose()) and not _has_kernel(function.name(), "CPU")
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
        key = _key_of_device(devices.pop())
        own = _is_in_python(function, key)
        if own or (_is_in_python(function, "CompositeExplicitAutograd") and not _has_kernel(function.name(), key)):
            return _key_set(getattr(torch._C.DispatchKey, key))
    return None


def _is_in_python(function: Any, key: str) -> bool:
    return f"{function.name().replace('::', '/', 1)}/{key}" in _written_in_python


def run_python_kernel(
    function: Any, keys: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: DispatchMode | None
) -> Any:
    """Calls the kernel from within a mode's handler as torch would without any mode; *mode* sees what it runs."""
    # What a custom operator has for autograd switches autograd off for the kernel. It is off from where it is made on.
    # Torch begins that where its guard is made, so it is made inside of the other one.
    with _as_before_modes(), _below_autograd() if _is_in_python(function, "Autograd") else nullcontext():
        if mode is None:
            for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
                _include_key(key, False)
        with nullcontext() if mode is None else pushed(mode):
            return function.redispatch(keys, *args, **kwargs)


# ---- fake tensors, tracers and subclasses

_keys: Any = take("torch._C:_TorchDispatchModeKey")
_mode_of_key: Any = take("torch._C:_get_dispatch_mode")
_FakeTensorMode: Any = take("torch._subclasses.fake_tensor:FakeTensorMode")


def new_fake_mode() -> Any:
    """A mode in which operators make tensors without values."""
    return _FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode() -> Any:
    """Torch's mode in which operators make fake tensors, as while something is traced; None: none is on."""
    return _mode_of_key(_keys.FAKE)


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


#: The elements that a COO tensor stores.
stored: Callable[[torch.Tensor], torch.Tensor] = operator.methodcaller("_values")
