"""FLOPs from a trace's shapes are those that the counter counts, to the FLOP."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_flops.analysis.trace_report import analyze_trace
from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.measure.counting.recorded_calls import recorded_work
from lightning_flops.schema.tables import TraceFlops
from lightning_flops.trace.columns import RecordedInputs, RecordedWork
from lightning_flops.trace.read import load_trace
from tests.analysis.in_memory import known
from tests.corpus import all_networks

NAMES = """
two_layers two_layers_without_grad embedding_and_classifier addmm baddbmm addbmm broadcast_matmul addmv addr
einsum_of_matrices tensordot_over_two_axes multi_dot_in_the_cheaper_order integer_matrix_product
strided_and_padded_conv2d grouped_conv2d conv3d grouped_transposed_conv2d transposed_conv3d circularly_padded_conv1d
residual_network bidirectional_two_layer_lstm gru lstm_cell_in_a_loop math_attention causal_flash_attention
grouped_query_flash_attention multi_head_attention_with_weights transformer_encoder_layer frozen_body repeated_module
gradient_accumulation autocast muon_optimizer reentrant_blocks checkpointed_sequence reentrant_in_other gradient_penalty
gpt2_with_fused_attention llama_with_gradient_checkpointing mixtral_with_a_loop_over_experts vit
""".split()
"""Networks of the corpus whose shapes tell all of their FLOPs."""

NETWORKS = {network.name: network for network in all_networks()}

PHASES = ("forward", "backward", "recompute", "optimizer")


def traced(step: Callable[[], None], path: Path) -> TraceFlops:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        step()
    profiler.export_chrome_trace(str(path))
    return known(analyze_trace(load_trace(path), formulas=recorded_work).flops)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NAMES)
def test_a_trace_has_flops_worked_out_by_hand_and_operators_and_bytes_of_the_counter(name: str, tmp_path: Path) -> None:
    network = NETWORKS[name]
    example = network.example()
    example.run()  # what is only done once, as laying out weights anew, belongs to neither
    example.model.zero_grad()
    with FlopCounter(example.model) as counter:
        example.run()
    example.model.zero_grad()
    flops = traced(example.run, tmp_path / "trace.json")
    assert flops.uncounted == ()
    (whole,) = flops.steps
    assert not whole.lower_bound
    assert {phase: getattr(whole, phase) for phase in PHASES} == {
        phase: getattr(network.expected.phases, phase) for phase in PHASES
    }
    expected: Counter[tuple[str, str, str]] = Counter()
    moved: Counter[str] = Counter()
    cells = counter.record().cells
    for cell in cells:
        expected[cell.operator, cell.dtype, cell.phase] += cell.flops
    multiply = {operator for (operator, _, _), spent in expected.items() if spent}
    for cell in cells:
        if cell.operator in multiply:
            moved[cell.operator] += cell.bytes_read + cell.bytes_written
    rows = {(row.name, row.dtype, phase): getattr(row, phase) for row in flops.operators for phase in PHASES}
    assert {key: value for key, value in rows.items() if value} == {key: one for key, one in expected.items() if one}
    sizes: Counter[str] = Counter()
    for row in flops.operators:
        sizes[row.name] += row.bytes or 0
    # What oneDNN's recurrent layers keep for their backward has a size of its own, which no shape tells.
    for found in (sizes, moved):
        found.pop("aten.mkldnn_rnn_layer", None)
    assert sizes == moved


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
    assert (work.role, work.reason) == ("unread", "the shape of its result is not in the file") and work.may_have_flops
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


def test_operator_of_somebody_elses_is_listed_where_it_may_multiply() -> None:
    assert ask("mylib::fused_mlp", [[4, 5]], ["float"]).may_have_flops
    assert ask("mylib::count", [[4, 5]], ["float"]).may_have_flops  # it takes floating-point numbers
    assert not ask("mylib::count", [[4, 5]], ["long int"]).may_have_flops
    assert ask("aten::relu", [[4, 5]], ["float"]).role == "free"


def trace_of_products(path: Path, *sizes: int) -> Path:
    """A trace of products of square matrices."""
    events = [
        {
            **{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 10 * place, "dur": 5},
            "args": {
                "Input Dims": [[size, size]] * 2,
                "Input type": ["float"] * 2,
                "Input Strides": [[size, 1]] * 2,
                "Concrete Inputs": ["", ""],
            },
        }
        for place, size in enumerate(sizes)
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def test_large_products_are_summed_exactly(tmp_path: Path) -> None:
    # 2 x 2^19 x 2^19 x 2^19, and 2 x 4 x 4 x 4.
    path = trace_of_products(tmp_path / "one.json", 2**19, 4)
    flops = known(analyze_trace(load_trace(path), formulas=recorded_work).flops)
    assert flops.steps[0].forward == 2**58 + 128
    assert not flops.uncounted


@pytest.mark.parametrize("sizes", [(2**20, 2**20, 4), (2**31, 4)], ids=str)
def test_products_that_no_trace_can_have_are_listed(sizes: tuple[int, ...], tmp_path: Path) -> None:
    path = trace_of_products(tmp_path / "huge.json", *sizes)
    flops = known(analyze_trace(load_trace(path), formulas=recorded_work).flops)
    assert flops.steps[0].forward == 2 * 4 * 4 * 4
    assert flops.steps[0].lower_bound
    (row,) = flops.uncounted
    assert (row.name, row.calls) == ("aten.mm", len(sizes) - 1)
    assert row.reason == "its shapes give more FLOPs or bytes than a trace can have"
