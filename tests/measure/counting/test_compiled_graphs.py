"""What inductor compiles is counted from its graph's text: as the same program in eager mode, or as by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lightning_flops import count_flops, register_flop_formula
from lightning_flops.measure.counting import compiled as compiled_code, mode
from lightning_flops.measure.counting.formulas.contract import Unreadable
from lightning_flops.records import PhaseFlops

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Mixed(nn.Module):
    """Linear layers, causal attention and a convolution in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.mix = nn.Conv1d(16, 16, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Any:
        query = self.down(torch.tanh(self.up(x))).view(x.shape[0], 4, -1, x.shape[1])
        mixed = functional.scaled_dot_product_attention(query, query, query, is_causal=True)
        return self.mix(mixed.reshape(x.shape[0], 16, 32))


class Selected(nn.Module):
    """The batch that is left is as long as values say."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x[x[:, 0] > 0]))


class Alike(nn.Module):
    """One region, compiled once and called three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        @torch.compiler.nested_compile_region
        def region(layer: nn.Module, x: Tensor) -> Any:
            return torch.tanh(layer(x))

        for layer in self.layers:
            x = region(layer, x)
        return x


def counted(model: Any, *inputs: Tensor) -> tuple[PhaseFlops, int, int, list[str]]:
    with count_flops(model) as counts:
        model(*inputs).sum().backward()
    assert counts.uncounted == {}
    products = [cell for cell in counts.record.cells if cell.flops]
    return counts.total, counts.skipped, sum(one.bytes_read + one.bytes_written for one in products), list(counts.notes)


@pytest.mark.parametrize(
    ("make", "shape", "dynamic"),
    [
        (Mixed, (4, 16, 32), False),
        pytest.param(Mixed, (4, 16, 32), True, marks=pytest.mark.slow),
        pytest.param(Alike, (4, 8), False, marks=pytest.mark.slow),
    ],
)
def test_a_compiled_program_counts_as_in_eager_mode(
    make: Callable[[], nn.Module], shape: tuple[int, ...], dynamic: bool
) -> None:
    model, x = make(), torch.randn(shape, requires_grad=True)
    eager = counted(model, x)
    compiled: Any = torch.compile(model, dynamic=dynamic)
    compiled(x).sum().backward()
    assert counted(compiled, x) == eager
    if dynamic:  # the same graph, called with another size
        longer = torch.randn(7, *shape[1:], requires_grad=True)
        assert counted(compiled, longer) == counted(model, longer)


def test_where_a_graph_cannot_be_read_the_dispatcher_counts_and_a_note_says_what_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)), torch.randn(3, 8, requires_grad=True)
    total, *_ = counted(model, x)
    compiled: Any = torch.compile(model)
    compiled(x).sum().backward()

    def raises(*_: Any) -> Any:
        raise KeyError("f99")

    monkeypatch.setattr(mode, "products", raises)
    unread, *_, notes = counted(compiled, x)
    assert unread == total
    assert [note.partition(" repeats")[0] for note in notes] == ["What the compiled backward of the root"]


@pytest.mark.slow
def test_sizes_that_values_decide_are_counted_as_they_run() -> None:
    model, x = Selected(), torch.randn(20, 8)
    total, *_ = counted(model, x)
    dynamo: Any = torch._dynamo
    with dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled: Any = torch.compile(model)
        compiled(x).sum().backward()
        assert counted(compiled, x)[0] == total


@pytest.mark.slow
def test_what_the_compiler_chooses_to_repeat_is_recompute() -> None:
    """A budget of memory has it save fewer activations; which products it repeats is for it to say."""
    linear = 2 * 128 * 64 * 64
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    functorch: Any = torch._functorch
    with functorch.config.patch(activation_memory_budget=0.3):
        compiled: Any = torch.compile(model)
        x = torch.randn(128, 64)
        compiled(x).sum().backward()
        total, *_ = counted(compiled, x)
    assert (total.forward, total.backward) == (3 * linear, 5 * linear)
    assert total.recompute in (linear, 2 * linear)


@pytest.mark.slow
def test_templates_of_max_autotune_are_counted() -> None:
    """They are kernels of inductor's own, which call no operator."""
    inductor: Any = torch._inductor
    model = nn.Sequential(nn.Linear(384, 512), nn.GELU(), nn.Linear(512, 384)).eval()
    with inductor.config.patch(max_autotune=True, max_autotune_gemm_backends="CPP", freezing=True), torch.no_grad():
        compiled: Any = torch.compile(model)
        x = torch.randn(64, 384)
        compiled(x)
        with count_flops(compiled) as counts:
            compiled(x)
    assert (counts.forward, counts.uncounted) == (2 * (2 * 64 * 384 * 512), {})


def test_two_products_that_max_autotune_adds_up_are_counted() -> None:
    """As of three projections of one input, whose gradients are added: inductor calls a function of its own."""
    inductor: Any = torch._inductor
    first, second, x = nn.Linear(16, 8, bias=False), nn.Linear(16, 8, bias=False), torch.randn(4, 16)
    with inductor.config.patch(max_autotune=True, max_autotune_gemm_backends="ATEN"), torch.no_grad():

        @torch.compile
        def compiled(x: Tensor) -> Any:
            return first(x) + second(2 * x)

        compiled(x)
        with count_flops() as counts:
            compiled(x)
    assert (counts.forward, counts.uncounted) == (2 * (2 * 4 * 16 * 8), {})


def test_gradients_of_compiled_attention_that_nobody_asks_for_are_recompute() -> None:
    """Frozen keys and values: the scores' gradient and the queries' are asked for, of five products."""
    layer, x, memory = nn.Linear(4, 4, bias=False), torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4)

    @torch.compile
    def compiled(x: Tensor) -> Any:
        return functional.scaled_dot_product_attention(layer(x), memory, memory)

    compiled(x).sum().backward()
    product, linear = 2 * 2 * 2 * 5 * 5 * 4, 2 * 2 * 2 * 5 * 4 * 4
    with count_flops(layer) as counts:
        compiled(x).sum().backward()
    assert (counts.forward, counts.backward) == (2 * product + linear, 2 * product + linear)
    assert counts.recompute == 3 * product


def test_a_package_that_runs_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was compiled ahead of time calls kernels that no dispatcher shows."""
    from torch.export.pt2_archive._package import AOTICompiledModel

    monkeypatch.setattr(AOTICompiledModel, "__call__", lambda package, x: x)
    package: Any = AOTICompiledModel(None)  # type: ignore[arg-type]
    with count_flops() as counts:
        package(torch.ones(3))
    assert (list(counts.uncounted), counts.is_lower_bound) == (["inductor.package"], True)


def test_a_graph_that_cuda_replays_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor puts the replay into the graph's place: it calls no operator. Elsewhere a replay is listed."""

    class Graph:
        def replay(self) -> None:
            pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    from torch._inductor.output_code import CompiledFxGraph

    graphs: list[Any] = []
    plain = CompiledFxGraph.__call__

    def call(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return plain(graph, inputs)

    monkeypatch.setattr(CompiledFxGraph, "__call__", call)
    model, x = nn.Linear(16, 24), torch.randn(5, 16)
    compiled: Any = torch.compile(model)
    with torch.no_grad():
        out = compiled(x)
        (graph,) = graphs

        def replays(inputs: Any) -> Any:
            Graph().replay()
            return (out,)

        monkeypatch.setattr(graph, "current_callable", replays)
        with count_flops(compiled) as counts:
            assert compiled(x) is out
        assert (counts.forward, counts.uncounted) == (2 * 5 * 16 * 24, {})
        with count_flops(compiled) as counts:
            Graph().replay()
    assert (counts.forward, list(counts.uncounted)) == (0, ["cuda.graph_replay"])

    def runs_out_of_memory(inputs: Any) -> Any:
        raise torch.OutOfMemoryError("on purpose")

    monkeypatch.setattr(graph, "current_callable", runs_out_of_memory)
    with torch.no_grad(), count_flops(compiled) as counts, pytest.raises(torch.OutOfMemoryError, match="on purpose"):
        compiled(x)
    assert counts.forward == 0


TEXT = """
class GraphModule(torch.nn.Module):
    def forward(self, primals_1: "Sym(s7)", primals_2: "f32[s7, 4][4, 1]cpu", buffer: "f32[4, 4][4, 1]cpu", ...):
        # File: model.py:3 in forward, code: y = self.a(x)
        mul: "Sym(2*s7)" = primals_1 * 2
        view: "f32[4, s7][1, 4]cpu" = torch.ops.aten.permute.default(primals_2, [1, 0])
        mm: "f32[s7, 4][4, 1]cpu" = torch.ops.aten.mm.default(primals_2, buffer);  primals_2 = None
        mm_1: "bf16[4, 4][4, 1]cuda:0" = torch.ops.aten.mm.default(view, tangents_1);  view = None
        copy_: "f32[4, 4][4, 1]cpu" = torch.ops.aten.copy_.default(buffer, mm_1);  copy_ = None
        cat: "f32[2*s7, 4][4, 1]cpu" = torch.ops.aten.cat.default([mm, mm])
        mm_2: "f32[2*s7, 4][4, 1]cpu" = torch.ops.aten.mm.default(cat, buffer);  buffer = None
        return (mm_1, mm_2)
""".replace("...", 'tangents_1: "f32[s7, 4][4, 1]cpu"')


def test_a_product_of_what_a_gradient_was_written_to_is_no_repetition() -> None:
    rows = torch.randn(6, 4)
    first, second, third = compiled_code.products(TEXT, [6, rows, torch.randn(4, 4), rows])
    assert [one.repeats for one in (first, second, third)] == [True, False, False]
    assert first.args[0] is rows
    assert third.args[0].shape == third.out.shape == (12, 4)
    assert (second.out.dtype, second.on_cuda, first.on_cuda) == (torch.bfloat16, True, False)
    repeating = compiled_code.lines_that_repeat(TEXT) or ()
    assert {line.split()[0] for line in repeating} == {"mul:", "view:", "mm:", "cat:"}


def test_what_stands_in_a_text_ends_no_line_and_a_function_that_is_no_operator_is_not_passed_over() -> None:
    line = "        cat: "
    named = TEXT.replace(line, f"        qr = torch.ops.aten.linalg_qr.default(mm, 'a;  b = c');  mm_1 = None\n{line}")
    inputs = [6, torch.randn(6, 4), torch.randn(4, 4), torch.randn(6, 4)]
    assert [str(one.function) for one in compiled_code.products(named, inputs)].count("aten.linalg_qr.default") == 1
    call = "torch__inductor_fx_passes_{}(mm);  mm = None"
    for function, is_read in [("post_grad_cat_slice_cat", True), ("mkldnn_fusion_fn_1", False)]:
        text = TEXT.replace(line, f'        fn: "f32[s7, 4][4, 1]cpu" = {call.format(function)}\n{line}')
        with nullcontext() if is_read else pytest.raises(Unreadable, match="no operator"):
            assert len(compiled_code.products(text, inputs)) == 3


LAUNCH = """
class GraphModule(torch.nn.Module):
    def forward(self, arg0_1: "f32[6][1]cuda:0"):
        launch = torch.ops.higher_order.triton_kernel_wrapper_mutation(kernel_idx = KERNEL, constant_args_idx = 0, \
grid = [(1, 1, 1)], tma_descriptor_metadata = {}, kwargs = {'x': arg0_1});  arg0_1 = launch = None
        return ()
"""


@pytest.mark.parametrize(("formula", "listed"), [(96, True), (lambda args, kwargs, out: 96, True), (0, False)])
def test_a_kernel_whose_formula_no_graph_asks_for_is_listed(
    monkeypatch: pytest.MonkeyPatch, formula: Any, listed: bool
) -> None:
    """Triton is not at hand: a class that says it is from there, and the text that inductor keeps of a launch."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    table: Any = kernel_side_table
    kernel = type("JITFunction", (), {"__module__": "triton.runtime.jit", "run": lambda self, *args, **kwargs: None})()
    register_flop_formula(kernel, formula)
    text = LAUNCH.replace("KERNEL", str(table.add_kernel(kernel)))
    compiled: Any = torch.compile(nn.Linear(6, 6))
    with torch.no_grad():
        compiled(torch.ones(6))
        monkeypatch.setattr(mode, "products", lambda *_: compiled_code.products(text, [torch.ones(6)]))
        with count_flops(compiled) as counts:
            compiled(torch.ones(6))
    assert counts.forward == 0
    assert list(counts.uncounted) == ["higher_order.triton_kernel_wrapper_mutation"] * listed
