"""From an operator to what is known about it, and what only its author knows: formulas that users register."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch
from torch import nn

from lightning_flops.measure.counting.formulas.attention import ATTENTION_RULES, HIGHER_ORDER_FORMULAS
from lightning_flops.measure.counting.formulas.contract import (
    TORCH_NAMESPACES,
    Arguments,
    Formula,
    Keywords,
    Operator,
    Rule,
    Unreadable,
    Work,
    bind,
    makes_views,
    no_flops,
    tensors_in,
    whole_flops,
)
from lightning_flops.measure.counting.formulas.products import CONVOLUTION_RULES, ESTIMATE_RULES, PRODUCT_RULES
from lightning_flops.measure.torch_private.needed import (
    HigherOrderOperator,
    OpOverload,
    OpOverloadPacket,
    hide,
    is_composite,
    overloads_named,
    schema_of,
)
from lightning_flops.measure.torch_private.optional import custom_operator_name, kernel_name, triton_kernel
from lightning_flops.signals import Undo

#: Rules of whole operators, all overloads alike: ``aten::mm``.
RULES: Mapping[str, Rule] = {**PRODUCT_RULES, **CONVOLUTION_RULES, **ATTENTION_RULES, **ESTIMATE_RULES}

#: Formulas users registered, by ``namespace::name`` or ``namespace::name.overload``.
user_formulas: dict[str, Formula] = {}

#: Higher-order operators that call the operator they are handed, with something set up around it.
_CALLS_ANOTHER: Mapping[str, tuple[int, int, int | None]] = {
    # position of the operator that is called, where its arguments start, where its result is in what comes out
    "out_dtype": (0, 2, None),
    "run_and_save_rng_state": (0, 1, 1),
    "run_with_rng_state": (1, 2, None),
    "graphsafe_run_with_rng_state": (0, 1, None),
    "with_effects": (1, 2, 1),
}

#: What was looked up, by the ids of operators, which it keeps: torch hashes one by code in Python. All is looked up
#: again where a formula is registered.
entries: dict[int, Operator] = {}


def lookup(operator: Any) -> Operator:
    """What is known about *operator*, an ``OpOverload`` or a higher-order operator; the same object at every call.

    A user's formula wins over ours, ours over one registered with ``torch.utils.flop_counter``, any over "free". Ours
    stand in for torch's own, which count complex numbers, sparse operands, groups and masks like everything else.
    """
    find = _find if isinstance(operator, OpOverload) else _find_higher_order
    return entries.get(id(operator)) or entries.setdefault(id(operator), find(operator))


def _stands_for(name: str) -> str:
    """The operator of that name; ``aten::bmm`` for ``_native::bmm_triton_0``, which torch runs in its place.

    Where an overload is replaced, its name stands between the operator's and what it is written in.
    """
    if (named := re.fullmatch(r"_native::(.+)_[a-z0-9]+_[0-9]+", name)) is None:
        return name
    replaced = f"aten::{named[1]}"
    return replaced if overloads_named(replaced) else replaced.rpartition("_")[0]


def _find(operator: Any) -> Operator:
    schema = schema_of(operator)
    known = functools.partial(Operator, schema.name.replace("::", ".", 1), function=operator)  # "aten.mm"
    qualified = _stands_for(schema.name)  # "aten::mm"
    user = user_formulas.get(f"{qualified}.{schema.overload_name}") or user_formulas.get(qualified)
    if user is not None:
        return known("formula", user)
    if (rule := RULES.get(qualified)) is not None:
        try:
            return known("formula", *bind(rule, schema), rule.estimate)
        except LookupError:
            # A torch version whose schema has other arguments: better listed as uncounted than counted wrong.
            return known("unknown")
    # A formula registered with torch.utils.flop_counter.register_flop_formula; not imported: nothing is registered
    of_torch = getattr(sys.modules.get("torch.utils.flop_counter"), "flop_registry", {}).get(operator.overloadpacket)
    if of_torch is not None:
        return known("formula", lambda args, kwargs, out: whole_flops(of_torch(*args, **kwargs, out_val=out)))
    is_known = makes_views(operator) or (not is_composite(operator) and is_free(qualified, operator))
    return known("free" if is_known else "unknown")


def _find_higher_order(operator: Any) -> Operator:
    short = str(operator.name())
    formula = user_formulas.get(f"higher_order::{short}") or HIGHER_ORDER_FORMULAS.get(short)
    if formula is None and short in _CALLS_ANOTHER:
        formula = functools.partial(_flops_of_called, *_CALLS_ANOTHER[short])
    elif formula is None and short.startswith("triton_kernel_wrapper"):
        formula = _no_flops_if_heard
    name, compute = f"higher_order.{short}", formula or no_flops
    return Operator(name, "formula" if formula else "unknown", compute, function=operator)


def _flops_of_called(
    place: int, start: int, result: int | None, args: Arguments, kwargs: Keywords, out: Any
) -> int | Work:
    """FLOPs of the operator that a call hands over at *place*."""
    called = lookup(args[place])
    if called.kind == "unknown":
        raise Unreadable(f"it calls {called.name}, which has no formula")
    return called.compute(args[start:], kwargs, out if result is None else out[result])


def _no_flops_if_heard(args: Arguments, kwargs: Keywords, out: Any) -> int:
    """Zero for a launch of a Triton kernel with a formula, because its ``run`` is counted."""
    kernel = triton_kernel(kwargs["kernel_idx"])
    if (id(kernel), "run") not in _watched:
        raise Unreadable(f"no formula is registered for the Triton kernel {kernel_name(kernel)}")
    return 0


def counts_when_run(kwargs: Keywords) -> bool:
    """Whether this launches a Triton kernel that counts when its ``run`` is called: no graph of inductor's calls it."""
    heard = _watched.get((id(triton_kernel(kwargs["kernel_idx"])), "run")) if "kernel_idx" in kwargs else None
    return heard is not None and heard.compute is not no_flops


def hides_flops(name: str, args: Arguments, kwargs: Keywords, out: Any) -> bool:
    """Whether a call of an operator that nothing is known about may have FLOPs, so that counts are lower bounds.

    It may if it takes or makes a floating-point, complex or quantized tensor. One that works on integers alone does
    not, unless its name (``namespace.name``) speaks of a product (mm, conv, attention …).
    """
    tensors = tensors_in((*args, *kwargs.values(), *(out if isinstance(out, (list, tuple)) else (out,))))
    return name_says_flops(name) or any(
        one.dtype.is_floating_point or one.dtype.is_complex or one.is_quantized for one in tensors
    )


# ---- operators that have no FLOPs as this package counts them, and what shows it. An operator of torch's own is free
# unless its name speaks of a product, a transform or a solver (``name_says_flops``); a test holds this to every one
# that torch has. Of anybody else's neither the name nor the schema shows anything: it is free if it takes and makes no
# tensor, or if its author has registered 0.

_WORDS_OF_PRODUCTS = re.compile(
    # Short words stand alone or next to an underscore, a digit or their usual neighbours; long ones anywhere.
    r"(?:^|[_\d:.])(?:s|sp|add|badd|addb|b|int|f16|grouped|qk|av)?(?:mm|bmm|mv)(?:$|[_\d])"
    r"|matmul|gemm|gemv|conv(?!ert)|attention|attn|flash|(?:^|_)sdpa?(?:$|_)|(?<!bi)(?<!tri)linear(?!1d)|einsum"
    r"|lstm|(?:^|_)gru|(?:^|_|\d)rnn|(?:^|_)dot(?:$|_)|outer_?prod|tensordot|bilinear(?!2d)|trilinear(?!3d)"
    r"|cholesky|householder|ormqr|pinv|pdist|(?:^|_)ldl|lstsq|(?:^|_)svd"
    r"|(?:^|_)qr(?:$|_)|(?<!w)eig(?:h|vals)|(?<!re)solve|(?:^|_)fft|matrix_(?:exp|power)"
    r"|ssm|selective_scan|triton|(?:^|_)moe(?:$|_)|(?:^|_)mlp(?:$|_)|fused_(?:dense|experts)",
    re.IGNORECASE,
)

_FREE_IN_SPITE_OF_THE_NAME = re.compile(
    # Weights packed, unpacked or laid out anew; the gates of a recurrent cell; sample frequencies; what checks,
    # converts or moves. None multiplies.
    r"(?:pre|un|_)?pack|reorder|flatten_weight|_thnn_fused_(?:gru|lstm)_cell|fft_r?fftfreq|_fused_sdp_choice"
    r"|_linalg_check_errors|_fill_mem_eff_dropout_mask|_transform_bias_rescale_qkv|inductor_random"
)

#: Operators of libraries that people have read: they convert, compare, pool, update parameters or communicate.
_LIBRARIES_FREE = frozenset(
    "bitsandbytes::dequantize_4bit bitsandbytes::dequantize_blockwise bitsandbytes::int8_double_quant "
    "bitsandbytes::int8_mm_dequant bitsandbytes::int8_vectorwise_dequant bitsandbytes::int8_vectorwise_quant "
    "bitsandbytes::optimizer_update_32bit bitsandbytes::optimizer_update_8bit_blockwise "
    "bitsandbytes::quantize_4bit bitsandbytes::quantize_blockwise deepspeed::dim_zero_all_to_all "
    "torchvision::_ps_roi_pool_backward torchvision::_roi_pool_backward torchvision::nms "
    "torchvision::ps_roi_pool torchvision::roi_pool".split()
)


def name_says_flops(name: str) -> bool:
    """Whether a name (without namespace) speaks of a product: mm, conv, attention, lstm, solve and the like."""
    return _WORDS_OF_PRODUCTS.search(name) is not None


def is_free(qualified_name: str, operator: Any) -> bool:
    """Whether *operator*, an ``OpOverload`` named ``namespace::name``, is known to have no FLOPs."""
    namespace, _, name = qualified_name.partition("::")
    if name_says_flops(name) and not (namespace in TORCH_NAMESPACES and _FREE_IN_SPITE_OF_THE_NAME.search(name)):
        return qualified_name in _LIBRARIES_FREE
    schema = schema_of(operator)
    values = (*schema.arguments, *schema.returns)
    # "(...)": it takes or returns anything
    has_tensors = "(...)" in str(schema) or any("Tensor" in str(value.type) for value in values)
    return namespace in TORCH_NAMESPACES or qualified_name in _LIBRARIES_FREE or not has_tensors


F = TypeVar("F", bound=Formula | int)

#: Called before each call of a registered autograd function, module or Triton kernel. What it returns is called after
#: it, with nothing, or if the call has returned: with the arguments without autograd's ``ctx``, the keyword arguments,
#: the result and the module. Neither raises anything.
Listener = Callable[[Operator], Callable[..., None]]

#: Functions and kernels, which these keep, by the id of the class or kernel and the attribute that runs them.
_watched: dict[tuple[int, str], Operator] = {}

#: The backward formulas of registered classes of modules, by the names of their entries.
backwards: dict[str, Formula | None] = {}

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
    calls of torch's operators is counted without a formula, unless compiled code calls it; a formula (or 0) stands for
    all that the kernel runs.

    Args:
        target: an operator (``torch.ops.mylib.op`` for all its overloads, ``torch.ops.mylib.op.default`` for one), its
            name ``"mylib::op"`` or ``"mylib::op.overload"``, what ``torch.library.custom_op`` or ``triton_op``
            returned, a subclass of ``torch.autograd.Function`` or of ``torch.nn.Module``, or a Triton kernel (what
            ``@triton.jit`` returned). A module's formula stands for all that its ``forward`` runs, and its backward.
            A function's formula sees the arguments of ``apply`` and stands for all operators its ``forward`` runs; a
            kernel's sees the launch's arguments, and None for *out*. So that counters hear of its calls, ``forward``
            (``backward``, ``run``) is wrapped here, once, and stays wrapped: register before compiling. Code that
            ``torch.compile`` made calls none of them, but where it leaves the call to Python; the operators that were
            compiled are counted. TorchScript cannot compile such a module.
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
    kind = target if isinstance(target, type) else object
    is_function, is_module = issubclass(kind, torch.autograd.Function), issubclass(kind, nn.Module)
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
        _watch(target, "run", f"triton.{kernel_name(target)}", compute, hidden=("grid", "warmup"))
    else:
        user_formulas[_operator_name(target)] = compute
        entries.clear()
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
        "a FLOP formula is registered for an operator, its name, a custom operator, an autograd.Function, a class of "
        f"modules or a Triton kernel, got {target!r}"
    )


def _watch(
    owner: Any, attribute: str, name: str, formula: Formula, *, skipped: int = 0, hidden: tuple[str, ...] = ()
) -> None:
    """Wraps one attribute of a class or kernel, so that listeners hear of its calls.

    The formula does not see the first *skipped* arguments (autograd's ``ctx``), nor the *hidden* keywords (a launch's).
    """
    key = (id(owner), attribute)
    known = key in _watched
    _watched[key] = Operator(name, "formula", formula, function=owner)
    if known:
        return  # wrapped already
    original = getattr(owner, attribute)
    is_module = isinstance(owner, type) and issubclass(owner, nn.Module)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        # The compiler follows the first branch alone, so what it compiles does not depend on who listens.
        if torch.compiler.is_compiling() or not _listeners:
            return original(*args, **kwargs)
        hearing = [listener(_watched[key]) for listener in list(_listeners)]
        returned: tuple[Any, ...] = ()
        try:
            out = original(*args, **kwargs)
            shown = {name: value for name, value in kwargs.items() if name not in hidden}
            returned = args[skipped:], shown, out, args[0] if is_module else None
        finally:
            for ends in hearing:
                ends(*returned)
        return out

    hide(call, alone=True)  # where the compiler leaves the call to Python, it is heard
    setattr(owner, attribute, staticmethod(call) if isinstance(owner, type) and not is_module else call)


def watch_functions(undo: Undo, listener: Listener) -> None:
    """Until *undo* is closed, *listener*, which raises nothing, is entered around each call of what is registered."""

    def drop() -> None:
        _listeners[:] = [one for one in _listeners if one is not listener]

    undo.callback(drop)
    _listeners.append(listener)
