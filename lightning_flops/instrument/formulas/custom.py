"""Formulas for work that only its author can count: custom operators, autograd functions, Triton kernels."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, overload

import torch

from lightning_flops.instrument.formulas.contract import Entry, Formula, dtype_of_first_tensor
from lightning_flops.instrument.formulas.registry import forget_entries, user_formulas

F = TypeVar("F", bound=Formula)


class FunctionListener(Protocol):
    """What a counter does around a registered autograd function or Triton kernel while ``watch_functions`` is on.

    Neither method may raise. Operators that run between the two belong to the function: its formula stands for them.
    """

    def enter_function(self, entry: Entry) -> None:
        """The function starts."""

    def leave_function(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, ok: bool) -> None:
        """The function returned *out*, or raised if not *ok*; *args* and *kwargs* are without autograd's ``ctx``."""


@dataclass(frozen=True, slots=True)
class _Callable:
    """One attribute of a class or kernel that is replaced while somebody listens."""

    owner: Any
    attribute: str
    entry: Entry
    skipped: int
    """Leading arguments the formula does not see: autograd's ``ctx``."""
    hidden: tuple[str, ...] = ()
    """Keyword arguments the formula does not see: a kernel launch's own."""


_callables: dict[tuple[int, str], _Callable] = {}
_listeners: list[FunctionListener] = []
_originals: dict[tuple[int, str], tuple[Any, str, bool, Any]] = {}
_lock = threading.RLock()


@overload
def register_flop_formula(target: Any, formula: F, *, backward: Formula | None = None) -> F: ...
@overload
def register_flop_formula(
    target: Any, formula: None = None, *, backward: Formula | None = None
) -> Callable[[F], F]: ...
def register_flop_formula(
    target: Any, formula: F | None = None, *, backward: Formula | None = None
) -> F | Callable[[F], F]:
    """Tell every counter how many FLOPs a call of *target* spends; a multiply-add is two.

    The formula takes ``(args, kwargs, out)``: positional arguments as a tuple, keyword arguments as a mapping, and what
    the call returned. It returns an int (or a ``Work``). It should read shapes only; one that raises turns the
    operator into an uncounted one, with a warning. A second registration replaces the first::

        @torch.library.custom_op("mylib::pair_product", mutates_args=())
        def pair_product(a: Tensor, b: Tensor) -> Tensor: ...

        @register_flop_formula("mylib::pair_product")
        def pair_product_flops(args, kwargs, out):
            a, b = args
            return 2 * a.shape[0] * a.shape[1] * b.shape[1]

    Args:
        target: an operator (``torch.ops.mylib.op`` for all its overloads, ``torch.ops.mylib.op.default`` for one), its
            name ``"mylib::op"`` or ``"mylib::op.overload"``, what ``torch.library.custom_op`` or ``triton_op``
            returned, a subclass of ``torch.autograd.Function``, or a Triton kernel (what ``@triton.jit`` returned).
            A function's formula sees the arguments of ``apply`` and stands for all operators its ``forward`` runs; a
            kernel's sees the launch's arguments, and None for *out*. Code that ``torch.compile`` has made runs neither
            of the two: there their work is what the compiled operators are.
        formula: the formula; left out, ``register_flop_formula`` is a decorator.
        backward: for an autograd function, the formula of its ``backward``: it sees the incoming gradients, and the
            outgoing ones as *out*. Without it the operators that ``backward`` runs count as they are.

    Returns:
        The formula.

    Raises:
        TypeError: *target* is none of the above, or *backward* is given for something that has none.
    """
    if formula is None:
        return lambda given: register_flop_formula(target, given, backward=backward)
    is_function = isinstance(target, type) and issubclass(target, torch.autograd.Function)
    if backward is not None and not is_function:
        raise TypeError(f"only an autograd.Function has a backward formula, got {target!r}")
    with _lock:
        if is_function:
            _register_function(target, formula, backward)
        elif _is_kernel(target):
            _register_kernel(target, formula)
        else:
            user_formulas[_operator_name(target)] = formula
            forget_entries()
    return formula


def _operator_name(target: Any) -> str:
    """``namespace::name`` of an operator in any of its forms."""
    if isinstance(target, torch._ops.OpOverload):
        schema = target._schema
        return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher_order::{target._name}"
    if isinstance(target, str):
        namespace, separator, name = target.partition("::")
        if namespace and separator and name:
            return target.removesuffix(".default")
        raise TypeError(f"an operator's name is 'namespace::name', got {target!r}")
    qualified = getattr(target, "_qualname", None)  # what torch.library.custom_op and triton_op return
    if isinstance(qualified, str) and "::" in qualified:
        return qualified
    raise TypeError(
        "a FLOP formula is registered for an operator, its name, a custom operator, an autograd.Function or a Triton "
        f"kernel, got {target!r}"
    )


def _is_kernel(target: Any) -> bool:
    """Whether *target* is a Triton kernel, or one in an autotuner or ``wrap_triton``."""
    return type(target).__module__.partition(".")[0] == "triton" and callable(getattr(target, "run", None))


def _watched(name: str, formula: Formula) -> Entry:
    return Entry(name, "formula", formula, dtype_of_first_tensor)


def _register_function(function: type, formula: Formula, backward: Formula | None) -> None:
    name = f"{function.__module__}.{function.__qualname__}"
    # A forward that leaves the context to setup_context does not get it.
    base = getattr(torch.autograd.Function, "setup_context", None)
    takes_context = getattr(function, "setup_context", base) is base
    _add(_Callable(function, "forward", _watched(name, formula), skipped=int(takes_context)))
    if backward is not None:
        _add(_Callable(function, "backward", _watched(f"{name}.backward", backward), skipped=1))


def _register_kernel(kernel: Any, formula: Formula) -> None:
    inner = getattr(kernel, "fn", kernel)
    name = f"triton.{getattr(inner, '__name__', None) or type(kernel).__name__}"
    _add(_Callable(kernel, "run", _watched(name, formula), skipped=0, hidden=("grid", "warmup")))


def _add(target: _Callable) -> None:
    key = (id(target.owner), target.attribute)
    _uninstall(key)
    _callables[key] = target
    if _listeners:
        _install(key)


def _install(key: tuple[int, str]) -> None:
    target = _callables[key]
    own = vars(target.owner)
    was_own = target.attribute in own
    original = getattr(target.owner, target.attribute)
    wrapper: Any = _around(target, original)
    _originals[key] = (target.owner, target.attribute, was_own, own[target.attribute] if was_own else None)
    setattr(target.owner, target.attribute, staticmethod(wrapper) if isinstance(target.owner, type) else wrapper)


def _uninstall(key: tuple[int, str]) -> None:
    saved = _originals.pop(key, None)
    if saved is None:
        return
    owner, attribute, was_own, value = saved
    if was_own:
        setattr(owner, attribute, value)
    else:
        delattr(owner, attribute)


def _around(target: _Callable, original: Callable[..., Any]) -> Callable[..., Any]:
    entry, skipped, hidden = target.entry, target.skipped, target.hidden

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        listeners = tuple(_listeners)
        for listener in listeners:
            listener.enter_function(entry)
        out, ok = None, False
        try:
            out = original(*args, **kwargs)
            ok = True
            return out
        finally:
            shown = {name: value for name, value in kwargs.items() if name not in hidden}
            for listener in reversed(listeners):
                listener.leave_function(entry, args[skipped:], shown, out, ok)

    return call


@contextmanager
def watch_functions(listener: FunctionListener) -> Iterator[None]:
    """While this is entered, *listener* hears of every call of a registered autograd function or Triton kernel.

    The classes and kernels that users registered are wrapped by the first listener and restored by the last, in
    whatever order listeners leave.
    """
    with _lock:
        if not _listeners:
            for key in _callables:
                _install(key)
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)
            if not _listeners:
                for key in tuple(_originals):
                    _uninstall(key)
