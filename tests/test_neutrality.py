"""Counting leaves no trace on torch, on the model or in compiled code; ``tests/corpus`` holds the numbers to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch._dynamo  # adds to the warning filters when it is first imported, which is not ours to undo
from torch import Tensor, nn

from lightning_flops.measure.counting.mode import CountingMode
from lightning_flops.measure.torch_private import needed
from lightning_flops.measure.torch_private.needed import take
from lightning_flops.pytorch import count_flops
from tests.left_on_torch import torch_state_and_warnings
from tests.standalone.nets import model_state


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 7))


def run_step(model: nn.Module, *, seed: int = 1) -> None:
    torch.manual_seed(seed)
    model(torch.randn(2, 3)).square().sum().backward()


def test_nothing_is_left_on_torch_or_on_the_model_also_when_the_block_raises() -> None:
    model = small_model()
    before, model_before = torch_state_and_warnings(), model_state(model)
    with pytest.raises(KeyError, match="mine"), count_flops(model) as counts:
        run_step(model)
        raise KeyError("mine")
    assert counts.forward > 0
    assert torch_state_and_warnings() == before
    assert model_state(model) == model_before


def test_a_users_hook_that_raises_raises_as_it_would_without_counting() -> None:
    model = small_model()

    def refuse(module: nn.Module, args: Any) -> None:
        raise ValueError("refused")

    before = torch_state_and_warnings()
    with model[3].register_forward_pre_hook(refuse), count_flops(model) as counts:
        with pytest.raises(ValueError, match="refused"):
            model(torch.randn(2, 3))
        counted = counts.by_module()
    assert counted["0"].forward == 2 * 2 * 3 * 5
    assert torch_state_and_warnings() == before


def test_a_formula_that_raises_lists_its_operator_and_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lightning_flops.measure.counting.formulas import registry

    def broken(args: Any, kwargs: Any, out: Any) -> int:
        raise ZeroDivisionError("no such shape")

    monkeypatch.setitem(registry.user_formulas, "aten::addmm", broken)
    registry.entries.clear()
    try:
        model = small_model()
        with count_flops(model) as counts:
            run_step(model)
            run_step(model)
    finally:
        monkeypatch.undo()
        registry.entries.clear()
    assert counts.uncounted["aten.addmm"].calls == 4
    assert counts.uncounted["aten.addmm"].modules == ("0", "3")
    assert counts.is_lower_bound
    warned = [record.getMessage() for record in caplog.records if "aten.addmm" in record.getMessage()]
    assert len(warned) == 1


def test_a_thread_that_ran_modules_has_no_mode_left() -> None:
    model = small_model()
    left: list[int] = []

    def work() -> None:
        run_step(model)
        left.append(torch._C._len_torch_dispatch_stack())

    with count_flops(model) as counts:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert left == [0]
    assert counts.forward == 2 * 2 * 3 * 5 + 2 * 2 * 5 * 7


def eager_backend_counting_compilations(compilations: list[int]) -> Callable[..., Any]:
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd

    def compile_graph(graph: Any, inputs: Any) -> Any:
        compilations.append(len(list(graph.graph.nodes)))
        return make_boxed_func(graph)

    backend: Callable[..., Any] = aot_autograd(fw_compiler=compile_graph)
    return backend


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize(
    "way",
    [
        "module",
        "submodules",
        "block in place",
        pytest.param(
            "in place",
            marks=pytest.mark.skipif(
                tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14),
                reason="torch 2.14 compiles a class of its own again where a global module hook comes (limits.md)",
            ),
        ),
    ],
)
def test_compiled_code_is_neither_compiled_again_nor_left_uncompiled(way: str) -> None:
    torch._dynamo.reset()
    compilations: list[int] = []
    backend = eager_backend_counting_compilations(compilations)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = small_model()

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)  # type: ignore[no-any-return]

    def build() -> nn.Module:
        model: nn.Module = Block() if way == "block in place" else small_model()
        if way == "module":
            return torch.compile(model, backend=backend)  # type: ignore[return-value]
        if way == "submodules":
            assert isinstance(model, nn.Sequential)
            for place in (0, 3):
                compiled: Any = torch.compile(model[place], backend=backend)
                model[place] = compiled
        else:
            model.compile(backend=backend)
        return model

    def train(*, counted: bool) -> tuple[list[float], Tensor]:
        model = build()
        torch.manual_seed(7)
        losses = []
        for step in range(5):
            model.zero_grad()
            if step == 2:
                before = len(compilations), sum(torch._dynamo.utils.counters["graph_break"].values())
            with count_flops(model) if counted and step == 2 else nullcontext() as counts:
                loss = model(torch.randn(2, 3)).square().sum()
                loss.backward()
            losses.append(loss.item())
            if counts is not None:
                assert counts.forward == 2 * 2 * 3 * 5 + 2 * 2 * 5 * 7
                assert counts.backward == 2 * 2 * 3 * 5 + 2 * 2 * 2 * 5 * 7
                assert not counts.uncounted
        assert (len(compilations), sum(torch._dynamo.utils.counters["graph_break"].values())) == before
        return losses, torch.get_rng_state()

    losses, random = train(counted=False)
    counted_losses, counted_random = train(counted=True)
    assert counted_losses == losses
    assert torch.equal(counted_random, random)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning")
def test_compiled_code_runs_compiled_after_counting() -> None:
    """A mode that compiled code does not ignore would leave the later steps eager: the backend's graph never called."""
    torch._dynamo.reset()
    calls: list[str] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            calls.append("compiled")
            return graph(*args)

        return run

    model: Any = torch.compile(small_model(), backend=backend)
    x = torch.randn(2, 3)
    model(x)
    for expected in (2, 3, 4):
        with count_flops(model) if expected == 3 else nullcontext():
            model(x)
        assert len(calls) == expected


def test_before_torch_2_9_compiled_code_runs_as_its_python_in_the_counted_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needed, "IS_BEFORE_2_9", True)
    torch._dynamo.reset()
    compilations: list[int] = []
    model: Any = torch.compile(small_model(), backend=eager_backend_counting_compilations(compilations))
    before = torch_state_and_warnings()
    tables = [higher.python_key_table for higher in take("torch._ops:_higher_order_ops").values()]
    with count_flops(model) as counts:
        with count_flops(model):
            run_step(model)
        assert compilations == [] and all(CountingMode in table for table in tables)
    assert torch_state_and_warnings() == before
    assert not any(CountingMode in table for table in tables)
    assert counts.forward == 2 * 2 * 3 * 5 + 2 * 2 * 5 * 7
    run_step(model)
    assert compilations


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute of a Tensor:UserWarning")
def test_a_model_first_compiled_in_the_counted_step_is_not_compiled_again_later() -> None:
    torch._dynamo.reset()
    compilations: list[int] = []
    model: Any = torch.compile(small_model(), backend=eager_backend_counting_compilations(compilations))
    with count_flops(model) as counts:
        run_step(model)
    first = len(compilations)
    run_step(model)
    assert first == len(compilations) > 0
    assert counts.forward == 2 * 2 * 3 * 5 + 2 * 2 * 5 * 7


def test_an_inference_mode_that_is_dropped_without_its_end_leaves_nothing() -> None:
    model, before = small_model(), torch_state_and_warnings()
    with count_flops(model):
        left_open = torch._C._InferenceMode(False)
        left_open.__enter__()  # type: ignore[no-untyped-call]  # the compiler ends none where it gives up
    assert torch_state_and_warnings() != before
    del left_open
    assert torch_state_and_warnings() == before
    run_step(model)
