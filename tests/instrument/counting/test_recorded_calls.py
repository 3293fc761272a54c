"""FLOPs from a trace's shapes are those that the counter counts, to the FLOP."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from lightning_flops.instrument.counting.flop_counter import FlopCounter
from lightning_flops.instrument.counting.recorded_calls import recorded_work
from lightning_flops.schema.trace_flops import TraceFlops
from lightning_flops.trace import analyze_trace, load_trace
from lightning_flops.trace.flops import trace_flops
from lightning_flops.trace.recorded import RecordedInputs, RecordedWork
from tests.analysis.trace_events import operator, trace

Step = Callable[[], None]
Spent = dict[tuple[str, str, str], int]


def backward(out: torch.Tensor) -> None:
    torch.autograd.backward(out.float().square().mean())


def of_module(
    module: nn.Module, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Step]:
    module.to(dtype)
    values = [torch.randn(shape, dtype=dtype) for shape in shapes]

    def step() -> None:
        out = module(*values)
        backward(out[0] if isinstance(out, tuple) else out)

    return module, step


class Calls(nn.Module):
    """A module that is one function of its input."""

    def __init__(self, function: Callable[..., torch.Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.parts = nn.ModuleList(parts)

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return self.function(*self.parts, *(value.requires_grad_() for value in values))


def convolutions() -> tuple[nn.Module, Step]:
    return of_module(
        nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, groups=4, dilation=2, padding=2, bias=False),
            nn.ConvTranspose2d(12, 4, 3, stride=2, groups=2, output_padding=1),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(16, 5),
        ),
        (2, 3, 15, 14),
    )


def linear() -> tuple[nn.Module, Step]:
    return of_module(nn.Sequential(nn.Linear(7, 11), nn.ReLU(), nn.Linear(11, 3, bias=False)), (4, 6, 7))


def attention() -> tuple[nn.Module, Step]:
    layer = nn.MultiheadAttention(12, 3, batch_first=True)
    return of_module(Calls(lambda layer, x: layer(x, x, x, need_weights=False)[0], layer), (2, 9, 12))


def causal_attention() -> tuple[nn.Module, Step]:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return of_module(Calls(function), *[(2, 3, 10, 8)] * 3)


def masked_attention() -> tuple[nn.Module, Step]:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return functional.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(10, 12).bool())

    return of_module(Calls(function), (2, 3, 10, 8), (2, 3, 12, 8), (2, 3, 12, 8))


def products() -> tuple[nn.Module, Step]:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = torch.bmm(a, b)
        d = torch.einsum("bik,bjk->bij", c, c) + torch.baddbmm(c, a, b, beta=0.5) @ b.transpose(1, 2)[..., :4]
        return d + torch.einsum("bij,bj->bi", d, d[:, 0]).sum() + torch.dot(d.flatten(), d.flatten())

    return of_module(Calls(function), (3, 4, 5), (3, 5, 4))


def recurrent() -> tuple[nn.Module, Step]:
    return of_module(nn.Sequential(nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True)), (2, 5, 4))


def experts() -> tuple[nn.Module, Step]:
    rows, ends = torch.randn(24, 32, dtype=torch.bfloat16), torch.tensor([8, 16, 24], dtype=torch.int32)
    weights = nn.Parameter(torch.randn(3, 32, 16, dtype=torch.bfloat16))
    return nn.ParameterList([weights]), lambda: backward(torch._grouped_mm(rows, weights, offs=ends))


def eight_bits() -> tuple[nn.Module, Step]:
    a, b = torch.ones(32, 16), torch.ones(48, 16)
    scale = torch.tensor(1.0)
    whole = (a.to(torch.int8), b.to(torch.int8).t())
    floating = (a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).t())

    def step() -> None:
        torch._int_mm(*whole)
        torch._scaled_mm(*floating, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

    return nn.Identity(), step


def without_reentry() -> tuple[nn.Module, Step]:
    def function(block: nn.Module, head: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return head(checkpoint(block, x, use_reentrant=False))  # type: ignore[no-any-return]

    block = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
    return of_module(Calls(function, block, nn.Linear(6, 2)), (5, 6))


def with_reentry() -> tuple[nn.Module, Step]:
    def function(block: nn.Module, head: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return head(checkpoint(block, x, use_reentrant=True))  # type: ignore[no-any-return]

    block = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6))
    return of_module(Calls(function, block, nn.Linear(6, 2)), (5, 6))


def checkpointed_attention() -> tuple[nn.Module, Step]:
    def attend(x: torch.Tensor) -> torch.Tensor:
        return functional.scaled_dot_product_attention(x, x, x)

    return of_module(Calls(lambda x: checkpoint(attend, x, use_reentrant=False)), (2, 3, 10, 8))


def autocast() -> tuple[nn.Module, Step]:
    def function(layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)  # type: ignore[no-any-return]

    return of_module(Calls(function, nn.Linear(6, 4)), (5, 6))


def second_derivative() -> tuple[nn.Module, Step]:
    """A gradient penalty: the first backward keeps its graph, and so has gradients on."""
    layer = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))
    x = torch.randn(5, 6, requires_grad=True)

    def step() -> None:
        (gradient,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
        backward(gradient)

    return layer, step


class Orthogonalizes(torch.optim.Optimizer):
    """Multiplies in its step, as Muon does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.dim() == 2:
                    parameter.sub_(parameter @ parameter.T @ parameter.grad, alpha=0.01)


def multiplying_optimizer() -> tuple[nn.Module, Step]:
    module = nn.Linear(6, 4)
    optimizer = Orthogonalizes(module.parameters())
    values = torch.randn(5, 6)

    def step() -> None:
        backward(module(values))
        optimizer.step()

    return module, step


NETS = (
    convolutions,
    linear,
    attention,
    causal_attention,
    masked_attention,
    products,
    recurrent,
    experts,
    eight_bits,
    without_reentry,
    with_reentry,
    checkpointed_attention,
    autocast,
    second_derivative,
    multiplying_optimizer,
)


def counted(module: nn.Module, step: Step) -> tuple[Spent, dict[str, int]]:
    counter = FlopCounter(module)
    with counter:
        step()
    record = counter.record()
    assert not record.uncounted, record.uncounted
    spent: defaultdict[tuple[str, str, str], int] = defaultdict(int)
    size: defaultdict[str, int] = defaultdict(int)
    for cell in record.cells:
        if cell.flops:
            spent[cell.operator, cell.dtype, cell.phase] += cell.flops
    for cell in record.cells:
        if any(cell.operator == operator for operator, _, _ in spent):
            size[cell.operator] += cell.bytes_read + cell.bytes_written
    return dict(spent), dict(size)


def traced(step: Step, path: Path) -> TraceFlops:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    profiler.export_chrome_trace(str(path))
    flops, _ = trace_flops(load_trace(path), recorded_work)
    assert flops is not None
    return flops


@pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__)
def test_trace_has_the_flops_that_the_counter_counts(net: Callable[[], tuple[nn.Module, Step]], tmp_path: Path) -> None:
    torch.manual_seed(0)
    module, step = net()
    step()  # what is only done once, as laying out weights anew, belongs to neither
    module.zero_grad()
    expected, size = counted(module, step)
    assert expected
    flops = traced(step, tmp_path / "trace.json")
    assert flops.uncounted == ()
    found = {
        (row.name, row.dtype, phase): value
        for row in flops.operators
        for phase in ("forward", "backward", "recompute", "optimizer")
        if (value := getattr(row, phase))
    }
    assert found == expected
    (step_flops,) = flops.steps
    for phase in ("forward", "backward", "recompute", "optimizer"):
        whole = sum(value for (_, _, of), value in expected.items() if of == phase)
        assert getattr(step_flops, phase) == whole
    assert not step_flops.lower_bound
    moved: defaultdict[str, int] = defaultdict(int)
    for row in flops.operators:
        assert row.bytes is not None
        moved[row.name] += row.bytes
    # What oneDNN's recurrent layers keep for their backward has a size of its own, which no shape tells.
    assert {name: value for name, value in moved.items() if name != "aten.mkldnn_rnn_layer"} == {
        name: value for name, value in size.items() if name != "aten.mkldnn_rnn_layer"
    }


def test_inference_has_the_same_flops_by_the_operators_inside(tmp_path: Path) -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(36, 5))
    values = torch.randn(2, 3, 5, 5)

    def step() -> None:
        with torch.inference_mode():
            module(values)

    flops = traced(step, tmp_path / "trace.json")
    # 2 x (2 x 4 x 3 x 3 results) x (3 x 3 x 3 products), and 2 x 2 x 36 x 5.
    assert {row.name: row.forward for row in flops.operators} == {"aten.convolution": 3888, "aten.addmm": 720}


def ask(operator: str, dims: list[Any], types: list[Any], **more: Any) -> RecordedWork:
    return recorded_work(operator, RecordedInputs(dims=dims, types=types, **more))


def test_file_without_strides_of_a_convolution_needs_the_size_of_its_result() -> None:
    dims: list[Any] = [[32, 3, 224, 224], [64, 3, 7, 7], [], [], [], [], [], []]
    types = ["float", "float", "GenericList", "GenericList", "GenericList", "Int", "Bool", "Bool", "Bool"]
    work = ask("aten::cudnn_convolution", dims, types)
    assert (work.role, work.heavy, work.reason) == ("unread", True, "the shape of its result is not in the file")
    # It does not say whether it is transposed: what it called does.
    work = ask("aten::_convolution", [*dims, [], [], [], []], [*types[:2], "", *types[2:5], *["Bool"] * 7])
    assert work.role == "unread"


def test_sparse_tensor_is_listed_and_not_taken_for_a_dense_one() -> None:
    work = ask("aten::mm", [[4, 5], [5, 6]], ["float", "float"], concrete=["", ""], strides=[[], [6, 1]])
    assert (work.role, work.flops) == ("unread", 0)


def test_values_that_only_scale_are_not_needed_and_those_that_shape_are() -> None:
    assert ask("aten::addmm", [[5], [4, 3], [3, 5], [], []], ["float"] * 3 + ["Scalar"] * 2).flops == 2 * 4 * 3 * 5
    types = ["c10::Half"] * 3 + ["ScalarList"] * 3 + ["Scalar", "ScalarList", "Scalar"]
    assert ask("aten::convolution", [[1, 3, 8, 8], [4, 3, 3, 3], [4], *[[]] * 6], types).role == "unread"


@pytest.mark.parametrize(
    ("operator", "dims", "types"),
    [
        ("aten::mm", [[4, -5], [5, 6]], ["float", "float"]),
        ("aten::mm", [[4, "x"], [5, 6]], ["float", "float"]),
        ("aten::mm", [[2**62, 2**62], [2**62, 6]], ["float", "float"]),
        ("aten::mm", [[4, 5], [7, 6]], ["int128", "float"]),
        ("aten::mm", [], ["float", "float"]),
        ("aten::mm", ["", {}], [None, 3]),
        ("aten::mm", [[4, 5]], ["float"] * 7),
        ("aten::convolution", [[1], [1], [1], *[[]] * 6], ["float"] * 3 + ["ScalarList"] * 6),
        ("aten::lstm", [[1], [1], [1], *[[]] * 6], ["float", "TensorList", "TensorList", *["Scalar"] * 6]),
    ],
)
def test_nothing_in_a_file_makes_it_raise(operator: str, dims: list[Any], types: list[Any]) -> None:
    work = ask(operator, dims, types)
    assert work.role in ("unread", "unknown", "composite")
    assert work.flops == 0


@pytest.mark.parametrize("name", ["__class__::__init__", "aten::__init__", "AddmmBackward0", "aten::", "a::b::c", ""])
def test_names_that_are_no_operators_are_none(name: str) -> None:
    assert ask(name, [], []).flops == 0


def test_operator_of_somebody_elses_is_listed_where_it_may_multiply() -> None:
    assert ask("mylib::fused_mlp", [[4, 5]], ["float"]).heavy
    assert ask("mylib::count", [[4, 5]], ["float"]).heavy  # it takes floating-point numbers
    assert not ask("mylib::count", [[4, 5]], ["long int"]).heavy
    assert ask("aten::relu", [[4, 5]], ["float"]).role == "free"


@pytest.mark.parametrize("sizes", [(2**19, 4), (2**20, 2**20, 4), (2**30, 4)], ids=str)
def test_large_products_are_summed_exactly_and_those_that_no_trace_can_have_are_listed(sizes: tuple[int, ...]) -> None:
    inputs: list[dict[str, Any]] = [{"Input Dims": [[size, size]] * 2, "Input type": ["float"] * 2} for size in sizes]
    events = [operator("aten::mm", 10 * place, 5, **one) for place, one in enumerate(inputs)]
    flops = analyze_trace(trace(*events), formulas=recorded_work).flops
    assert flops is not None
    # 2 x 2^19 x 2^19 x 2^19, and 2 x 4 x 4 x 4.
    assert flops.steps[0].forward == sum(2 * size**3 for size in sizes if size < 2**20)
    reason = "its shapes give more FLOPs or bytes than a trace can have"
    listed = sum(size >= 2**20 for size in sizes)
    assert [(row.name, row.calls, row.reason) for row in flops.uncounted] == [("aten.mm", listed, reason)][:listed]


def test_modules_of_a_trace_with_their_calls_have_the_flops_of_their_layers(tmp_path: Path) -> None:
    _module, step = linear()
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True) as profiler:
        step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    flops = analyze_trace(load_trace(tmp_path / "trace.json"), formulas=recorded_work).flops
    assert flops is not None
    assert flops.modules is not None
    found = {row.name: (row.forward, row.backward, row.own) for row in flops.modules}
    # 24 rows through 7 x 11, whose input needs no gradient, and through 11 x 3.
    first, last = 2 * 24 * 7 * 11, 2 * 24 * 11 * 3
    assert found == {
        "": (first + last, first + 2 * last, 0),
        "Sequential_0": (first + last, first + 2 * last, 0),
        "Sequential_0.Linear_0": (first, first, 2 * first),
        "Sequential_0.Linear_1": (last, 2 * last, 3 * last),
    }
