"""Formulas for work that only its author can count: custom operators, autograd functions, modules, Triton kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

import torch
from torch import nn

from lightning_flops.measure.counting.formulas.contract import Entry, Formula, no_flops
from lightning_flops.measure.counting.formulas.registry import forget_entries, heard_kernels, user_formulas
from lightning_flops.measure.torch_private.needed import HigherOrderOperator, OpOverload, OpOverloadPacket, schema_of
from lightning_flops.measure.torch_private.optional import custom_operator_name
from lightning_flops.signals import Undo

F = TypeVar("F", bound=Formula | int)

Listener = Callable[[Entry], Callable[..., None]]
"""Called before each call of a registered autograd function, module or Triton kernel. What it returns is called after
it, with nothing, or if the call has returned: with the arguments without autograd's ``ctx``, the keyword arguments, the
result and the module. Neither raises anything."""

_entries: dict[tuple[int, str], tuple[Any, Entry]] = {}
"""Functions and kernels, which must live on, by the id of the class or kernel and the attribute that runs them."""

backwards: dict[str, Formula | None] = {}
"""The backward formulas of registered classes of modules, by the names of their entries."""

_listeners: list[Listener] = []


@overload
def register_flop_formula(target: Any, formula: F, *, backward: Formula | int | None = None) -> F: ...
@overload
def register_flop_formula(
    target: Any, formula: None = None, *, backward: Formula | int | None = None
) -> Callable[[F], F]: ...
def register_flop_formula(
    target: Any, formula: Formula | int | None = None, *, backward: Formula | int | None = None
) -> Any:
    """Register the FLOPs of a call of *target* for every counter; a multiply-add is two.

    The formula takes ``(args, kwargs, out)``: positional arguments as a tuple, keyword arguments as a mapping, and what
    the call returned. It returns a whole number (or a ``Work``), and should read shapes only. A second registration
    replaces the first. The operator may be made later::

        @torch.library.custom_op("mylib::pair_product", mutates_args=())
        def pair_product(a: Tensor, b: Tensor) -> Tensor: ...

        @register_flop_formula("mylib::pair_product")
        def pair_product_flops(args, kwargs, out):
            a, b = args
            return 2 * a.shape[0] * a.shape[1] * b.shape[1]

    For an operator that multiplies nothing, register 0: ``register_flop_formula("mylib::rms_norm", 0)``. An operator on
    floating-point tensors that has neither makes every count a lower bound. What a kernel that is a Python function
    calls of torch's operators is counted without a formula; a formula (or 0) stands for all that the kernel runs.

    Args:
        target: an operator (``torch.ops.mylib.op`` for all its overloads, ``torch.ops.mylib.op.default`` for one), its
            name ``"mylib::op"`` or ``"mylib::op.overload"``, what ``torch.library.custom_op`` or ``triton_op``
            returned, a subclass of ``torch.autograd.Function`` or of ``torch.nn.Module``, or a Triton kernel (what
            ``@triton.jit`` returned). A module's formula stands for all that its ``forward`` runs, and its backward.
            A function's formula sees the arguments of ``apply`` and stands for all operators its ``forward`` runs; a
            kernel's sees the launch's arguments, and None for *out*. So that counters hear of its calls, ``forward``
            (``backward``, ``run``) is wrapped here, once, and stays wrapped: register before compiling. Code that
            ``torch.compile`` made calls none of them; there the operators that were compiled are counted.
        formula: the formula, or the whole number of FLOPs of every call; left out, ``register_flop_formula`` is a
            decorator.
        backward: for an autograd function, the same for its ``backward``: a formula sees the incoming gradients, and
            the outgoing ones as *out*. Without it the operators that ``backward`` runs count as they are. For a
            module, a formula of what its ``forward`` was called with and returned. Without it a backward is once the
            forward if a parameter of the module needs a gradient, and once more if an input does.

    Returns:
        The formula.

    Raises:
        TypeError: *target* or *formula* is none of the above, or *backward* is given for something that has none.
        ValueError: *formula* or *backward* is a number below zero.
    """
    if formula is None:
        return lambda given: register_flop_formula(target, given, backward=backward)
    compute, its_backward = _as_formula(formula), None if backward is None else _as_formula(backward)
    is_function = isinstance(target, type) and issubclass(target, torch.autograd.Function)
    is_module = isinstance(target, type) and issubclass(target, nn.Module)
    if backward is not None and not (is_function or is_module):
        raise TypeError(f"only an autograd.Function and a module have a backward formula, got {target!r}")
    if is_function or is_module:
        name = f"{target.__module__}.{target.__qualname__}"
        # A forward that leaves the context to setup_context does not get it.
        base = getattr(torch.autograd.Function, "setup_context", None)
        skips_first = is_module or getattr(target, "setup_context", base) is base
        _watch(target, "forward", name, compute, skipped=int(skips_first))
        if is_module:
            backwards[name] = its_backward
        elif its_backward is not None:
            _watch(target, "backward", f"{name}.backward", its_backward, skipped=1)
    elif type(target).__module__.partition(".")[0] == "triton" and callable(getattr(target, "run", None)):
        # A Triton kernel, or one in an autotuner or ``wrap_triton``
        inner = getattr(target, "fn", target)
        name = getattr(inner, "__name__", None) or type(target).__name__
        heard_kernels[id(target)] = compute is not no_flops
        _watch(target, "run", f"triton.{name}", compute, hidden=("grid", "warmup"))
    else:
        user_formulas[_operator_name(target)] = compute
        forget_entries()
    return formula


def _as_formula(given: Formula | int) -> Formula:
    if callable(given):
        return given
    if type(given) is not int:
        raise TypeError(f"a FLOP formula is a function or a whole number, got {given!r}")
    if given < 0:
        raise ValueError(f"a FLOP formula's number must be >= 0, got {given}")
    return no_flops if given == 0 else lambda args, kwargs, out: given


def _operator_name(target: Any) -> str:
    """``namespace::name`` of an operator in any of its forms."""
    if isinstance(target, OpOverload):
        schema = schema_of(target)
        return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)
    if isinstance(target, OpOverloadPacket):
        return str(target).replace(".", "::", 1)  # it prints as namespace.name
    if isinstance(target, HigherOrderOperator):
        return f"higher_order::{target.name()}"
    if isinstance(target, str):
        if all(target.partition("::")):
            return target.removesuffix(".default")
        raise TypeError(f"an operator's name is 'namespace::name', got {target!r}")
    if (custom := custom_operator_name(target)) is not None:
        return custom
    raise TypeError(
        "a FLOP formula is registered for an operator, its name, a custom operator, an autograd.Function or a Triton "
        f"kernel, got {target!r}"
    )


def _watch(
    owner: Any, attribute: str, name: str, formula: Formula, *, skipped: int = 0, hidden: tuple[str, ...] = ()
) -> None:
    """Wraps one attribute of a class or kernel, so that listeners hear of its calls.

    The formula does not see the first *skipped* arguments (autograd's ``ctx``), nor the *hidden* keywords (a launch's).
    """
    key = (id(owner), attribute)
    known = key in _entries
    _entries[key] = (owner, Entry(name, "formula", formula))
    if known:
        return  # wrapped already
    original = getattr(owner, attribute)
    is_module = isinstance(owner, type) and issubclass(owner, nn.Module)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        # The compiler follows the first branch alone, so what it compiles does not depend on who listens.
        if torch.compiler.is_compiling() or not _listeners:
            return original(*args, **kwargs)
        hearing = [listener(_entries[key][1]) for listener in list(_listeners)]
        returned: tuple[Any, ...] = ()
        try:
            out = original(*args, **kwargs)
            shown = {name: value for name, value in kwargs.items() if name not in hidden}
            returned = args[skipped:], shown, out, args[0] if is_module else None
        finally:
            for ends in hearing:
                ends(*returned)
        return out

    setattr(owner, attribute, staticmethod(call) if isinstance(owner, type) and not is_module else call)


def watch_functions(undo: Undo, listener: Listener) -> None:
    """Until *undo* is closed, *listener*, which raises nothing, is entered around each call of what is registered."""

    def drop() -> None:
        _listeners[:] = [one for one in _listeners if one is not listener]

    undo.callback(drop)
    _listeners.append(listener)
