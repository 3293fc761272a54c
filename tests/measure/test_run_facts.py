from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import HashStore

from lightning_flops.measure.module_scope import describe_modules
from lightning_flops.measure.run_facts import gather_run_facts
from lightning_flops.measure.torch_private.optional import recompilations


class OwnOptimizer(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})


def faster_with(optimizer: Any, *, device: str = "cpu") -> tuple[str, ...]:
    at = torch.device(device)
    facts = gather_run_facts(nn.Linear(2, 2), device=at, optimizers=[optimizer], loader_workers=None)
    assert facts.optimizers is not None
    return facts.optimizers[0].faster_with


@pytest.mark.parametrize(
    ("kind", "options", "on_cpu", "on_cuda"),
    [
        (torch.optim.Adam, {"foreach": False}, ("fused=True",), ("fused=True", "foreach=True")),
        (torch.optim.Adagrad, {"foreach": False}, ("fused=True",), ("foreach=True",)),  # fused on a CPU alone
        (torch.optim.RMSprop, {"foreach": False}, (), ("foreach=True",)),
        (torch.optim.LBFGS, {}, (), ()),
        (torch.optim.Adam, {}, ("fused=True",), ("fused=True",)),  # on a GPU foreach is torch's choice
        (torch.optim.Adam, {"foreach": True}, (), ("fused=True",)),
        (torch.optim.Adam, {"fused": True}, (), ()),
        (torch.optim.Adam, {"foreach": False, "differentiable": True}, (), ()),
        (OwnOptimizer, {}, (), ()),
    ],
)
def test_what_makes_an_optimizer_faster_is_what_it_takes_on_that_device(
    kind: Any, options: dict[str, Any], on_cpu: tuple[str, ...], on_cuda: tuple[str, ...]
) -> None:
    optimizer = kind([nn.Parameter(torch.ones(2))], **options)
    assert (faster_with(optimizer), faster_with(optimizer, device="cuda")) == (on_cpu, on_cuda)
    assert faster_with(optimizer, device="mps") == ()
    # In two wrappers, such as Lightning's or DeepSpeed's.
    assert faster_with(SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer))) == on_cpu


def test_facts_of_a_cpu_and_its_backend() -> None:
    gather = partial(gather_run_facts, nn.Linear(2, 2), device=torch.device("cpu"), optimizers=None, loader_workers=3)
    facts = gather()
    assert (facts.compute_capability, facts.optimizers, facts.loader_workers) == (None, None, 3)
    assert facts.process_group_backend is None
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    try:
        assert gather().process_group_backend == "gloo"
    finally:
        torch.distributed.destroy_process_group()


def test_weight_sizes_are_what_a_product_has_for_inputs_and_outputs() -> None:
    net = nn.Sequential(nn.Linear(5, 7), nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(6, 6, 3, groups=6), nn.LayerNorm(4))
    sizes = {module.name: module.weight_sizes for module in describe_modules(net)}
    assert sizes == {"": (), "0": (7, 5), "1": (8, 3), "2": (6,), "3": ()}


def test_what_was_compiled_again_is_counted_with_the_reason_that_torch_gives() -> None:
    metrics: Any = torch._dynamo.utils
    torch._dynamo.reset()  # a layer of another size, compiled before, would be why this one is compiled anew
    metrics.clear_compilation_metrics()
    model: Any = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), backend="aot_eager", dynamic=False)
    gather = partial(gather_run_facts, model, device=torch.device("cpu"), optimizers=None, loader_workers=None)
    model(torch.ones(2, 4)).sum().backward()
    assert gather().recompilations == 0  # the forward and its backward are two compilations, and the first ones
    for rows in (3, 5, 3):
        model(torch.ones(rows, 4)).sum().backward()
    with torch.no_grad():
        model.eval()(torch.ones(3, 4))  # an evaluation has code of its own, as it must
    torch._dynamo.reset()
    assert gather().recompilations == 2
    assert gather().recompilation_reason.endswith("size mismatch at index 0. expected 3, actual 5")


@pytest.mark.parametrize("is_graded", [False, True])
def test_a_shape_that_is_compiled_anew_after_an_evaluation_counts(is_graded: bool) -> None:
    """Torch says that gradients, or the model's mode, have changed: it looks at the code that ran last, first."""
    torch._dynamo.reset()
    torch._dynamo.utils.clear_compilation_metrics()
    model: Any = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Dropout()), backend="eager", dynamic=False)
    for rows in (2, 3, 5):
        model.train()(torch.ones(rows, 4))
        with torch.set_grad_enabled(is_graded):
            model.eval()(torch.ones(2, 4))
    assert len(recompilations()) == 2


def test_why_something_was_compiled_again_is_never_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no guard fails, torch gives a sentence without the numbers of a compilation before it."""
    no_reason = SimpleNamespace(recompile_reason="Unable to find recompilation reasons")
    monkeypatch.setattr("torch._dynamo.utils.get_compilation_metrics", lambda: [no_reason])
    facts = gather_run_facts(nn.Linear(4, 4), device=torch.device("cpu"), optimizers=None, loader_workers=None)
    assert facts.recompilation_reason == no_reason.recompile_reason
