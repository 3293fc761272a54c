"""Dispatch modes: their class, a thread's stack of them, and how to hide work from them.

On one thread ``with mode:`` is enough. But it keeps flags for the whole process, and these end up wrong if several
threads enter and leave in turn.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_flops.measure.torch_private.compiler import hide
from lightning_flops.measure.torch_private.names import take

DispatchMode: TypeAlias = TorchDispatchMode

_push: Any = take("torch._C:_push_on_torch_dispatch_stack")
_pop: Any = take("torch._C:_pop_torch_dispatch_stack")
_length: Any = take("torch._C:_len_torch_dispatch_stack")
_mode_at: Any = take("torch._C:_get_dispatch_stack_at")
_set_excluded: Any = take("torch._C:_dispatch_tls_set_dispatch_key_excluded")

modes_off: Callable[[], AbstractContextManager[Any]] = take("torch.utils._python_dispatch:_disable_current_modes")
"""Inside, no dispatch mode sees what runs: neither ours, nor the user's, nor a tracer."""

out_of_sight: Callable[[], AbstractContextManager[Any]] = take("torch._C:_DisableTorchDispatch")
"""Inside, no dispatch mode sees the operators: neither other counters nor the user's modes."""

_InferenceMode: Any = take("torch._C:_InferenceMode")

_NOBODYS = DispatchMode()  # type: ignore[no-untyped-call]
"""Is pushed and taken off again, which sets torch's flag for modes."""


class _After:
    """Sets torch's flag for a thread's dispatch modes right where the end of something sets it wrong.

    The flag says whether there are modes on the stack; operators go past those, or fail for want of one, if it is
    wrong. When an inference mode ends, or the call of a compiled function, torch sets it to what it was when that
    began, whatever was pushed or removed in between. It ends with the function *name* of what *owner* returns, if there
    is one; *is_inside* says whether a frame runs inside of it.
    """

    def __init__(
        self, owner: Callable[[], Any], name: str, is_inside: Callable[[types.FrameType | None], bool]
    ) -> None:
        self._owner = owner
        self._name = name
        self._is_inside = is_inside
        self._threads: set[int] = set()
        """In these the stack was changed inside of one that has not ended."""
        self._end: Any = None
        """The function, without us."""

    def stack_changes(self, frame: types.FrameType) -> None:
        """*frame* has changed the stack of this thread."""
        if not hasattr(self._owner(), self._name) or not self._is_inside(frame):
            return
        self._threads.add(threading.get_ident())
        if self._end is None:
            self._end = end = vars(self._owner())[self._name]

            def ends(*args: Any) -> Any:
                try:
                    return end(*args)
                finally:
                    self._has_ended(sys._getframe(1))

            setattr(self._owner(), self._name, ends)

    def _has_ended(self, frame: types.FrameType) -> None:
        """What *frame* had begun is over."""
        thread = threading.get_ident()
        if thread not in self._threads:
            return
        if _length():
            _push(_pop(None))
        else:
            _push(_NOBODYS)
            _pop(None)
        if self._is_inside(frame.f_back):  # it was inside another one
            return
        self._threads.discard(thread)
        if not self._threads:
            setattr(self._owner(), self._name, self._end)
            self._end = None


hide(_After._has_ended)

_EVAL_FRAME = "torch._dynamo.eval_frame"


def _is_in_compiled_call(frame: types.FrameType | None) -> bool:
    """Whether *frame*, or what has called it, runs inside a function that was given to ``torch.compile``."""
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__") == _EVAL_FRAME:
            return True
        frame = frame.f_back
    return False


_inside_which_torch_restores_its_flag = (
    _After(lambda: _InferenceMode, "__exit__", lambda _: torch.is_inference_mode_enabled()),
    _After(lambda: sys.modules.get(_EVAL_FRAME), "_maybe_set_eval_frame", _is_in_compiled_call),
)


def _stack_changes() -> None:
    frame = sys._getframe(1)
    for each in _inside_which_torch_restores_its_flag:
        each.stack_changes(frame)


def push(mode: DispatchMode) -> None:
    """Puts *mode* on top of this thread's stack."""
    _push(mode)
    _stack_changes()


def push_under_others(mode: DispatchMode) -> None:
    """Puts *mode* on this thread's stack, under all that were pushed by others since the latest of ours.

    Whoever leaves a mode takes the topmost one off, which may be another one if that was pushed meanwhile.
    """
    above = []
    while _length() and not type(_mode_at(_length() - 1)).__module__.startswith("lightning_flops."):
        above.append(_pop(None))
    for each in (mode, *reversed(above)):
        _push(each)
    _stack_changes()


def depth() -> int:
    """How many modes are on this thread's stack, without those whose handlers run now."""
    return int(_length())


def is_pushed(mode: DispatchMode) -> bool:
    """Whether *mode* is on this thread's stack, under whatever other modes."""
    return any(_mode_at(place) is mode for place in range(_length()))


def remove(mode: DispatchMode) -> None:
    """Removes the topmost *mode* from this thread's stack; modes above it stay in place."""
    if not is_pushed(mode):
        return
    above = []
    while (popped := _pop(None)) is not mode:
        above.append(popped)
    for other in reversed(above):
        _push(other)
    _stack_changes()


@contextmanager
def pushed(mode: Any) -> Iterator[None]:
    """Inside, *mode* is on top of the stack: within its own handler it would not be."""
    push(mode)
    try:
        yield
    finally:
        remove(mode)


_LAZY_KEYS = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative)


def conjugates_lazily() -> None:
    """Has the operator that a mode's handler runs next resolve lazy conjugates and negatives, as it does without modes.

    Torch switches these keys off for a handler, and itself puts them back when the handler ends.
    """
    for key in _LAZY_KEYS:
        _set_excluded(key, False)


# ---- tracers and fake tensors: modes that torch keeps apart from the stack

_keys: Any = take("torch._C:_TorchDispatchModeKey")
_mode_of_key: Any = take("torch._C:_get_dispatch_mode")


def is_traced() -> bool:
    """Whether a tracer may be recording what runs."""
    return any(_mode_of_key(key) is not None for key in (_keys.FAKE, _keys.PROXY, _keys.FUNCTIONAL))


def new_fake_mode() -> Any:
    """A mode in which operators make tensors without values; it loads more of torch than most runs need."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


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
def hands_over(tensor_type: type) -> bool:
    """Whether operators on this tensor subclass are counted on the tensors inside it.

    A DTensor's local shard, a nested tensor's values, a quantized tensor's parts: what runs are the operators that its
    ``__torch_dispatch__`` calls, on their shapes. A fake tensor has nothing inside.
    """
    dispatch = getattr(tensor_type, "__torch_dispatch__", None)
    if dispatch is None or dispatch is cast("Any", torch.Tensor).__torch_dispatch__:  # plain tensors: no such method
        return False
    return not is_fake(tensor_type)


# ---- kernels that are written in Python: which operator has one, and how to call it as if no mode were active

_written_in_python: Any = take("torch.library:_impls")
"""Kernels registered from Python, by ``namespace/operator/key``."""
_key_of_device: Any = take("torch._C:_dispatch_key_for_device")
_has_kernel: Any = take("torch._C:_dispatch_has_kernel_for_dispatch_key")
_key_set: Any = take("torch._C:DispatchKeySet")
_as_before_modes: Any = take("torch._C:_RestorePythonTLSSnapshot")
"""Inside, the dispatcher is as it was when the operator was called, above any mode."""
_below_autograd: Any = take("torch._C:_AutoDispatchBelowAutograd")
_include_key: Any = take("torch._C:_dispatch_tls_set_dispatch_key_included")


def keys_of_python_kernel(function: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """The dispatch key of an operator's Python kernel for the device that a call's *tensors* are on.

    None if there is no such kernel, or where it takes more than ordinary tensors.
    """
    devices = set()
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            return None
        devices.add(tensor.device.type)
    if len(devices) > 1:
        devices.discard("cpu")  # single numbers may lie there
    if len(devices) != 1 or ("cuda" in devices and torch.cuda.is_current_stream_capturing()):
        return None
    try:
        key = _key_of_device(devices.pop())
        own = _is_in_python(function, key)
        if own or (_is_in_python(function, "CompositeExplicitAutograd") and not _has_kernel(function.name(), key)):
            return _key_set(getattr(torch._C.DispatchKey, key))
    except (AttributeError, RuntimeError):
        pass  # a device that the dispatcher has no key for
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
