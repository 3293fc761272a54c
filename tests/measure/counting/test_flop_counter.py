"""Which module and which phase an operator's FLOPs fall into."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_flops.analysis.counts import FlopCounts, bytes_by_phase
from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.measure.counting.formulas.registry import register_flop_formula
from lightning_flops.pytorch import count_flops
from lightning_flops.records import OUTSIDE, PhaseBytes, PhaseFlops
from tests.corpus import case
from tests.corpus.case import BATCH, FIRST, INPUTS, OUTPUTS, SECOND


def two_layers() -> nn.Sequential:
    return case.two_layers(nn.Tanh())


def batch() -> Tensor:
    return torch.randn(BATCH, INPUTS)


def on_a_thread(work: Callable[..., None], *args: Any) -> None:
    thread = threading.Thread(target=work, args=args)
    thread.start()
    thread.join()


def test_work_in_root_that_no_module_call_owns_is_the_roots_own() -> None:
    class Task(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = two_layers()

        def training_step(self, x: Tensor) -> Tensor:
            result: Tensor = self.net(x)
            return (result @ result.T).sum()

    task = Task()
    counter = FlopCounter(task)
    with counter:
        with counter.in_root():
            loss = task.training_step(batch())
        loss.backward()  # type: ignore[no-untyped-call]
    own = FlopCounts(counter.record()).own_by_module()
    gram = 2 * BATCH * OUTPUTS * BATCH
    assert own[""] == PhaseFlops(forward=gram, backward=2 * gram)
    assert own["net.2"] == PhaseFlops(forward=SECOND, backward=2 * SECOND)
    assert OUTSIDE not in own


def test_a_step_that_raises_does_not_make_the_rest_the_optimizers() -> None:
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> float:
        raise ValueError("no loss today")

    with count_flops(model) as counts:
        with pytest.raises(ValueError, match="no loss today"):
            optimizer.step(closure)
        model(batch())
    assert counts.total == PhaseFlops(forward=FIRST + SECOND)


def test_replicas_on_threads_of_their_own_are_the_roots_and_a_note_says_so() -> None:
    model = two_layers()

    def work() -> None:
        replica: Any = model._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        for name, child in model.named_children():
            copy: Any = child._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
            copy._former_parameters = {}
            for key, parameter in child._parameters.items():
                setattr(copy, key, parameter)
            replica._modules[name] = copy
        replica(batch())

    with count_flops(model) as counts:
        on_a_thread(work)
    assert counts.by_module() == {"": PhaseFlops(forward=FIRST + SECOND)}
    assert "DataParallel" in counts.notes[0]


def test_bytes_are_inputs_and_outputs_and_views_are_free() -> None:
    x, y = torch.zeros(4, 6), torch.zeros(4, 6)
    with count_flops() as sums:
        x + y  # 96 read twice, 96 written
        x.t().reshape(24)[:8].view(2, 4)  # one copy: 96 read, 96 written
        x.add_(y)  # in place: 96 read twice, 96 written
        x.copy_(y)  # the target is not read: 96 read, 96 written
        x.zero_()  # 96 written
        torch.empty(1000)  # memory that nobody touched
    assert sum(cell.bytes_read for cell in sums.record.cells) == 96 * (2 + 1 + 2 + 1)
    assert sum(cell.bytes_written for cell in sums.record.cells) == 96 * (1 + 1 + 1 + 1 + 1)
    assert bytes_by_phase(one for one in sums.record.cells if one.module == OUTSIDE) == PhaseBytes(forward=96 * 11)


def test_an_embedding_reads_the_rows_it_looks_up() -> None:
    table, rows = torch.zeros(1000, 4), torch.tensor([1, 5])
    with count_flops() as counts:
        nn.functional.embedding(rows, table)
    assert sum(cell.bytes_read for cell in counts.record.cells) == 2 * 4 * 4 + 2 * 8


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("compiled_before", [True, False])
def test_compiled_flex_attention_is_counted_from_its_graph(compiled_before: bool) -> None:
    """It calls a kernel of its own, which no dispatcher sees."""
    from torch._inductor.output_code import CompiledFxGraph
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")

    class Attention(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Any:
            return flex_attention(query, key, value, block_mask=mask)

    plain = CompiledFxGraph.__call__
    torch._dynamo.reset()
    compiled: Any = torch.compile(Attention())
    model = nn.ModuleDict({"attention": compiled})
    inputs = [torch.randn(1, 2, 256, 16) for _ in range(3)]
    with torch.no_grad():
        if compiled_before:
            compiled(*inputs)
        with count_flops(model) as counts:
            compiled(*inputs)
        compiled(*inputs)
    assert CompiledFxGraph.__call__ is plain
    # Of 2 × 2 blocks of 128 a causal mask leaves out one.
    assert counts.by_module()["attention"].forward == 2 * 2 * (2 * 256 * 256 * 16)
    assert (counts.skipped, counts.uncounted) == (2 * 2 * (2 * 128 * 128 * 16), {})


@pytest.mark.parametrize("answer", [-5, 2.5, float("nan")])
def test_an_operator_whose_formula_gives_no_number_is_uncounted(answer: Any, caplog: pytest.LogCaptureFixture) -> None:
    @torch.library.custom_op("lightning_flops_tests::answers", mutates_args=())
    def answers(x: Tensor) -> Tensor:
        return x.clone()

    register_flop_formula("lightning_flops_tests::answers", lambda args, kwargs, out: answer)
    with count_flops() as counts:
        answers(torch.zeros(3))
    assert counts.total == PhaseFlops()
    assert counts.uncounted["lightning_flops_tests.answers"].may_have_flops
    assert any("lightning_flops_tests.answers" in entry.getMessage() for entry in caplog.records)


def test_a_counter_entered_while_it_is_entered_counts_once() -> None:
    model = two_layers()
    counter, other = FlopCounter(model), FlopCounter(model)
    with counter, other:
        with counter:
            model(batch())
        model(batch())
    for each in (counter, other):
        assert FlopCounts(each.record()).forward == 2 * (FIRST + SECOND)
        assert each.record().module_calls == dict.fromkeys(("", "0", "1", "2"), 2)


def test_what_another_thread_trains_is_not_counted_whenever_it_runs() -> None:
    """Also while a backward of ours is running, and with what a backward can call: repeated forwards, optimizers."""
    model, other = two_layers(), nn.Linear(4, 4)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)

    def trains() -> None:
        rows = torch.ones(2, 4, requires_grad=True)
        for _ in range(2):
            hidden: Any = checkpoint(other, checkpoint(other, rows, use_reentrant=True), use_reentrant=True)
            hidden.sum().backward()
            hidden = checkpoint(other, rows, use_reentrant=False)
            slope: Any = torch.autograd.grad(hidden.square().sum(), other.weight, create_graph=True)[0]
            slope.sum().backward()
            optimizer.step()

    with count_flops(model) as alone:
        model(batch()).sum().backward()
    with count_flops(model) as beside:
        on_a_thread(trains)
        hidden = model(batch())
        on_a_thread(trains)
        hidden.register_hook(lambda gradient: on_a_thread(trains))
        hidden.sum().backward()
        on_a_thread(trains)
    assert (beside.by_module(), beside.by_operator(), beside.notes) == (
        alone.by_module(), alone.by_operator(), alone.notes
    )  # fmt: skip


def test_a_backward_of_the_root_is_counted_on_whatever_thread_it_is_called() -> None:
    model = two_layers()
    with count_flops(model) as here:
        model(batch()).sum().backward()
    with count_flops(model) as there:
        loss = model(batch()).sum()
        on_a_thread(lambda: loss.backward())
    assert there.total == here.total and there.total.backward > 0


def test_threads_that_follow_each_other_do_not_get_each_others_backwards() -> None:
    """Each numbers its autograd nodes from zero."""
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    model = nn.ModuleDict({"first": first, "second": second})
    counter = FlopCounter(model)

    def work(order: tuple[nn.Module, nn.Module]) -> None:
        with counter:
            order[1](order[0](torch.ones(1, 5))).sum().backward()

    for order in ((first, second), (second, first)):
        on_a_thread(work, order)
    product = 2 * 5 * 5
    by_module = FlopCounts(counter.record()).by_module()
    # The layer that comes first, in one thread the one and in the other the other, needs no gradient of its input.
    assert by_module["first"] == by_module["second"] == PhaseFlops(forward=2 * product, backward=(1 + 2) * product)


def test_kept_counts_keep_no_model_and_no_garbage_collection_is_needed_for_it() -> None:
    model = two_layers()
    with FlopCounter(model):
        pass  # what a first time imports leaves frames behind
    gc.collect()
    gc.disable()
    try:
        with count_flops(model) as counts:
            model(batch()).sum().backward()
        alive = weakref.ref(model)
        del model
        assert alive() is None
        assert counts.forward == FIRST + SECOND
    finally:
        gc.enable()


ROWS, WIDTH = 5, 8
LAYER = 2 * ROWS * WIDTH * WIDTH


def test_an_exception_in_a_repetition_ends_it() -> None:
    """The next backward's products are the backward's."""
    layer = nn.Linear(WIDTH, WIDTH)
    fails = [False, True, False, False]

    def block(x: Tensor) -> Tensor:
        if fails.pop(0):
            raise ZeroDivisionError
        return torch.sigmoid(layer(x))

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with count_flops(layer) as counts:
        with pytest.raises(ZeroDivisionError):
            checkpoint(block, x, use_reentrant=False).sum().backward()
        checkpoint(block, x, use_reentrant=False).sum().backward()
        layer(x).sum().backward()
    assert counts.total == PhaseFlops(forward=3 * LAYER, backward=2 * 2 * LAYER, recompute=LAYER)
    assert not counts.notes


def test_bytes_and_calls_of_what_is_repeated_without_grad_are_recompute() -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def block(x: Tensor) -> Tensor:
        with torch.no_grad():
            kept = (x @ weight).relu()
        return torch.sigmoid(x + kept)

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with count_flops() as counts:
        checkpoint(block, x, use_reentrant=False).sum().backward()
    cells = {(cell.operator, cell.phase): cell for cell in counts.record.cells}
    for operator in ("aten.mm", "aten.relu"):
        forward, again = cells[operator, "forward"], cells[operator, "recompute"]
        assert (again.calls, again.flops) == (1, LAYER if operator == "aten.mm" else 0)
        assert (again.bytes_read, again.bytes_written) == (forward.bytes_read, forward.bytes_written)
        assert (operator, "backward") not in cells


class Reversible(torch.autograd.Function):
    """Adds a layer of one half to the other half; its backward works its input out of its output, and runs it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        left, right = x.chunk(2, -1)
        y = torch.cat([left, right + layer(left)], -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        left, right = ctx.saved_tensors[0].chunk(2, -1)
        with torch.no_grad():
            x = torch.cat([left, right - ctx.layer(left)], -1)
        with torch.enable_grad():
            left, right = x.requires_grad_().chunk(2, -1)
            y = torch.cat([left, right + ctx.layer(left)], -1)
        return *torch.autograd.grad(y, (x, *ctx.layer.parameters()), grads)[:1], None


def test_the_inverse_that_a_reversible_layer_runs_in_its_backward_is_recompute() -> None:
    layer = nn.Linear(8, 8, bias=False)
    with FlopCounter(layer) as counter:
        Reversible.apply(torch.randn(4, 16, requires_grad=True), layer).sum().backward()  # type: ignore[no-untyped-call]
    product = 2 * 4 * 8 * 8
    assert counter.total() == PhaseFlops(forward=product, backward=2 * product, recompute=2 * product)


def test_counts_are_by_module_and_operator_together_and_bytes_of_all() -> None:
    """A convolution of 1 x 8 x 8 by two 3 x 3 filters, and a layer of its 72 values, each with what is around it."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3, bias=False), nn.Flatten(), nn.Linear(72, 10, bias=False))
    values = torch.randn(1, 1, 8, 8)
    with count_flops(model) as counts:
        model(values)
    convolution, product = 2 * (2 * 36) * 9, 2 * 72 * 10
    assert counts.by_module_and_operator() == {
        "": {"aten.convolution": PhaseFlops(forward=convolution), "aten.mm": PhaseFlops(forward=product)},
        "0": {"aten.convolution": PhaseFlops(forward=convolution)},
        "2": {"aten.mm": PhaseFlops(forward=product)},
    }
    # Each reads its values and weights and writes its result, 4 bytes each.
    assert counts.bytes == PhaseBytes(forward=4 * (64 + 18 + 72) + 4 * (72 + 720 + 10))


class AnswersOddly(nn.Module):
    """Looks its parts up in a table of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(3, 5)

    def __getattr__(self, name: str) -> Any:
        if name == "part":
            return self._modules[name]
        raise KeyError(name)

    def forward(self, x: torch.Tensor) -> Any:
        return self.part(x)


def test_a_module_that_answers_oddly_to_unknown_names_is_counted_as_any_other() -> None:
    model = AnswersOddly()
    with count_flops(model) as counts:
        model(torch.randn(2, 3))
    assert (counts.forward, counts.notes) == (2 * 2 * 3 * 5, ())


def test_a_part_of_a_replica_is_no_call_of_the_root() -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
    replica: Any = copy.deepcopy(layers)
    for one in replica.modules():
        one._is_replica = True  # as ``torch.nn.parallel.replicate`` marks each
    with count_flops(layers) as counts:
        for layer in replica:
            layer(torch.ones(1, 4))
    assert counts.forward == 6 * 2 * 4 * 4
    assert counts.record.module_calls.get("", 0) == 0
