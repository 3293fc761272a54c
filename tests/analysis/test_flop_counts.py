"""Sums over a hand-built record."""

from __future__ import annotations

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.records import OUTSIDE, FlopRecord, OperatorCell, PhaseFlops

RECORD = FlopRecord(
    cells=(
        OperatorCell(module="", phase="forward", operator="aten.mm", dtype="float32", flops=1, bytes_read=10),
        OperatorCell(
            module="a.b",
            phase="forward",
            operator="aten.mm",
            dtype="float32",
            flops=20,
            without_backward=8,
            bytes_read=5,
        ),
        OperatorCell(module="a.b", phase="backward", operator="aten.mm", dtype="bfloat16", flops=40, bytes_written=6),
        OperatorCell(module="a", phase="recompute", operator="aten.addmm", dtype="float32", flops=300, skipped=7),
        OperatorCell(module=OUTSIDE, phase="optimizer", operator="aten.bmm", dtype="float32", flops=4000),
        OperatorCell(module="a", phase="forward", operator="aten.relu", dtype="", bytes_read=1, bytes_written=2),
    ),
    module_calls={"": 1, "a": 2, "a.b": 2, "c": 1},
)


def test_buckets_and_what_is_derived_from_them() -> None:
    counts = FlopCounts(RECORD)
    assert counts.total == PhaseFlops(forward=21, backward=40, recompute=300, optimizer=4000)
    assert (counts.forward, counts.backward, counts.recompute, counts.optimizer) == (21, 40, 300, 4000)
    assert counts.model_flops == 21 + 40
    assert counts.skipped == 7
    assert counts.hardware_flops == 21 + 40 + 300 + 4000 - 7


def test_a_name_that_begins_with_anothers_is_not_below_it() -> None:
    cell = OperatorCell(module="layer10", phase="forward", operator="aten.mm", dtype="float32", flops=5)
    by_module = FlopCounts(FlopRecord(cells=(cell,), module_calls={"layer1": 1})).by_module()
    assert by_module["layer1"].total == 0
    assert by_module["layer10"].total == 5


def test_the_estimated_backward_leaves_out_forwards_that_need_none() -> None:
    counts = FlopCounts(RECORD)
    assert counts.estimated_backward() == 2 * (21 - 8)
    assert counts.estimated_backward(1.0) == 3 * (21 - 8)
    assert counts.estimated_backward(0.5) == 32  # 32.5, and Python rounds a half to the even number


def test_the_estimate_is_exact_for_counts_that_a_float_cannot_hold() -> None:
    cell = OperatorCell(module="", phase="forward", operator="aten.mm", dtype="float32", flops=2**60 + 1)
    assert FlopCounts(FlopRecord(cells=(cell,))).estimated_backward() == 2**61 + 2
