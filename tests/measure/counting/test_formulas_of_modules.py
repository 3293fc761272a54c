"""Formulas of whole classes of modules: what their kernels run is counted once, held to counts by hand."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_flops import count_flops, register_flop_formula


class Unseen(torch.autograd.Function):
    """A product that no dispatcher sees."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.from_numpy(x.detach().numpy() @ weight.detach().numpy().T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = (one.detach().numpy() for one in ctx.saved_tensors)
        grad = grads[0].numpy()
        return torch.from_numpy(grad @ weight), torch.from_numpy(grad.T @ x)


class Bound(nn.Module):
    """A product that torch does not see, and one of the same size that it does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.seen = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        out: Tensor = self.seen(Unseen.apply(x, self.weight)) * scale  # type: ignore[no-untyped-call]
        return out


class Fixed(Bound):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        out: Tensor = self.seen(x) * scale
        return out


ONE = 2 * 3 * 4 * 4
before = copy.deepcopy(model := nn.Sequential(nn.Linear(4, 4), Bound(), nn.Linear(4, 4)))
register_flop_formula(Bound, lambda args, kwargs, out: 2 * 2 * args[0].numel() * out.shape[-1])
register_flop_formula(Fixed, 1000, backward=lambda args, kwargs, out: 7 + args[0].numel())


def losses(one: nn.Module, x: Tensor) -> list[Any]:
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    values = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = one(x).square().sum()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return [*values, *(parameter.tolist() for parameter in one.parameters())]


@pytest.mark.parametrize(
    ("frozen", "backward"),
    [(False, (1 + 2 * 2 + 2) * ONE), (True, (2 + 2) * ONE)],
)
def test_a_module_s_formula_stands_for_its_forward_and_backward(frozen: bool, backward: int) -> None:
    """Frozen, the first Linear has no backward, and the input of the module needs no gradient."""
    one = copy.deepcopy(model)
    one[0].requires_grad_(not frozen)
    with count_flops(one) as counts:
        one(torch.randn(3, 4)).sum().backward()
    assert counts.forward == (1 + 2 + 1) * ONE
    assert counts.backward == backward
    assert counts.by_module()["1"].forward == 2 * ONE
    assert counts.recompute == 0
    assert not counts.uncounted


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_repeats_its_forward(reentrant: bool) -> None:
    """Where the repeated forward is ended early, what it cost is not known, and a lower bound says so."""
    x = torch.randn(3, 4, requires_grad=True)
    with count_flops(one := Bound()) as counts:
        checkpoint(one, x, use_reentrant=reentrant).sum().backward()
    assert (counts.forward, counts.backward) == (2 * ONE, 4 * ONE)
    assert counts.recompute == 2 * ONE or counts.is_lower_bound
    assert counts.is_lower_bound is not reentrant


class Outer(nn.Module):
    """Has a formula, and a module inside whose product no dispatcher sees."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Hidden()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = Unseen.apply(x, self.weight)  # type: ignore[no-untyped-call]
        return out


register_flop_formula(Outer, lambda args, kwargs, out: 2 * args[0].numel() * out.shape[-1])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("compiled", [False, True])
def test_what_is_inside_of_a_module_with_a_formula_is_not_listed(compiled: bool) -> None:
    """Compiled code leaves the call to Python, where the formula is heard."""
    one: Any = nn.Sequential(Outer(), nn.Linear(4, 4))
    called = torch.compile(one, backend="eager") if compiled else one
    x = torch.randn(3, 4)
    called(x)
    with count_flops(one) as counts:
        called(x).sum().backward()
    assert (counts.forward, counts.backward, counts.uncounted) == (2 * ONE, 3 * ONE, {})
    torch._dynamo.reset()


def test_a_backward_formula_sees_the_forward_s_call() -> None:
    one = Fixed()
    with count_flops(one) as counts:
        one(torch.randn(3, 4), scale=2.0).sum().backward()
        one(torch.randn(3, 4)).detach()  # has no backward
    assert (counts.forward, counts.backward) == (2000, 7 + 12)


def test_counters_inside_of_one_another_each_hear_a_formula() -> None:
    one = copy.deepcopy(model)
    with count_flops(one) as outer, count_flops(one) as inner:
        one(torch.randn(3, 4)).sum().backward()
    assert outer.forward == inner.forward == (1 + 2 + 1) * ONE


def test_training_is_as_without_and_leaves_nothing() -> None:
    x, one, other = torch.randn(3, 4), copy.deepcopy(before), copy.deepcopy(before)
    with count_flops(one) as counts:
        assert losses(one, x) == losses(other, x)
    assert counts.forward > 0
    kept = (pickle.loads(pickle.dumps(each)).modules() for each in (one, other))
    for ours, theirs in zip(*kept, strict=True):
        assert (type(ours), vars(ours).keys()) == (type(theirs), vars(theirs).keys())
    assert pickle.loads(pickle.dumps(counts)).backward == counts.backward
