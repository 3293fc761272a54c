"""Operators of torch's own database have the bits in a counted step that they have without the counter."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from lightning_flops import count_flops

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

NOT_THE_SAME = {
    # Torch computes them in another way under any dispatch mode, even an empty one: docs/limits.md names them.
    "linalg.cond",
    "linalg.eigvalsh",
    "linalg.lstsq",
    "linalg.matrix_norm",
    "linalg.svdvals",
    "norm",
    "prod",
}

NO_VALUES = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}

SAMPLES = 3
"""Of each operator, dtype and way; more take minutes."""


def database() -> list[Any]:
    pytest.importorskip("expecttest")  # the database needs it
    from torch.testing._internal.common_methods_invocations import op_db

    return [operator for operator in op_db if operator.name not in NO_VALUES]


def calls(operator: Any) -> Iterator[Any]:
    """Samples of its arguments, with gradients and without."""
    for dtype, needs_grad in product((torch.float32, torch.complex64), (False, True)):
        supported = operator.supported_backward_dtypes("cpu") if needs_grad else operator.supported_dtypes("cpu")
        if dtype in supported and (operator.supports_autograd or not needs_grad):
            try:
                yield from list(islice(operator.sample_inputs("cpu", dtype, requires_grad=needs_grad), SAMPLES))
            except Exception:  # it needs a package that is not here
                continue


def tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def results(operator: Any, sample: Any) -> list[torch.Tensor]:
    """What a call returns, and the gradients of its sum."""
    torch.manual_seed(0)
    random.seed(0)

    def fresh(value: Any) -> Any:
        return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value

    given, args, kwargs = tree_map(fresh, (sample.input, sample.args, sample.kwargs))
    made = tensors(operator(given, *args, **kwargs))
    wanted = [one for one in tensors((given, args, kwargs)) if one.requires_grad]
    roots = [one for one in made if one.requires_grad]
    gradients: Any = ()
    if wanted and roots:
        gradients = torch.autograd.grad(roots, wanted, [torch.ones_like(one) for one in roots], allow_unused=True)
    return [one.detach() for one in (*made, *gradients) if one is not None]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    if (left.layout, left.shape, left.dtype) != (right.layout, right.shape, right.dtype):
        return False
    left, right = (one if one.layout is torch.strided else one.to_dense() for one in (left, right))
    if left.dtype is torch.complex32:  # there is no comparison of these
        left, right = (torch.view_as_real(one.resolve_conj()) for one in (left, right))
    return torch.equal(left, right) or torch.allclose(left, right, rtol=0, atol=0, equal_nan=True)


def differs(operator: Any, sample: Any) -> bool:
    """Whether a counted call has other bits than a plain one."""
    try:
        plain, again = results(operator, sample), results(operator, sample)
    except Exception:  # a sample that this build cannot run
        return False
    if not all(map(same, plain, again)):
        return False  # it is not the same twice without us
    with count_flops():
        counted = results(operator, sample)
    return len(plain) != len(counted) or not all(map(same, plain, counted))


def test_every_operator_has_the_bits_that_it_has_without_the_counter_or_is_named_in_the_docs() -> None:
    found = {operator.name for operator in database() if any(differs(operator, one) for one in calls(operator))}
    assert found <= NOT_THE_SAME
