"""Operators that libraries register: found by name, counted from their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_flops.measure.counting.formulas.contract import Unreadable, Work
from lightning_flops.measure.counting.formulas.registry import lookup
from tests.measure.counting.recording import Call, forward_and_backward, leaf, meta, operator, work_by_name

# What these libraries define, as far as their formulas read it; none of them is needed.
SCHEMAS = {
    "flash_attn": [
        *(
            f"_flash_attn_{name}(Tensor q, Tensor k, Tensor v, bool causal, int window_size_left=-1, "
            "int window_size_right=-1) -> Tensor"
            for name in ("forward", "backward")
        ),
        *(
            f"_flash_attn_varlen_{name}(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
            "bool causal, int window_size_left=-1, int window_size_right=-1) -> Tensor"
            for name in ("forward", "backward")
        ),
    ],
    "torchvision": [
        "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias) -> Tensor",
        "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset) -> (Tensor, Tensor)",
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "roi_align(Tensor input, Tensor rois, int sampling_ratio, bool aligned) -> Tensor",
        "_roi_align_backward(Tensor grad, Tensor rois, int sampling_ratio, bool aligned) -> Tensor",
    ],
    "bitsandbytes": [
        "int8_linear_matmul(Tensor A, Tensor B) -> Tensor",
        "int8_linear_matmul.out(Tensor A, Tensor B, Tensor(a!) out) -> ()",
        "gemv_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, Tensor code, int blocksize) -> Tensor",
    ],
}


@pytest.fixture(scope="module", autouse=True)
def libraries() -> Iterator[None]:
    import torch.nn.attention.varlen

    defined: list[Any] = []
    for namespace, schemas in SCHEMAS.items():
        library: Any = torch.library.Library(namespace, "FRAGMENT")  # type: ignore[no-untyped-call]
        defined.append(library)
        known = {str(schema).partition("(")[0] for schema in torch._C._jit_get_all_schemas()}
        for schema in schemas:
            if f"{namespace}::{schema.partition('(')[0]}" not in known:  # else the library itself is here
                library.define(schema)
    yield
    for library in defined:
        library._destroy()


# 2 samples of 5, 4 heads of 8; a causal mask leaves 15 of 25 entries.
ROWS = meta(2, 5, 4, 8)
ENTRIES, SKIPPED = 2 * 4 * 25, 2 * 4 * 10
# Packed: samples of 2 and 3, of which causal masks leave out 1 and 3 entries
ENDS, PACKED = torch.tensor([0, 2, 5]), meta(5, 4, 8)
PACKED_ENTRIES, PACKED_SKIPPED = 4 * (4 + 9), 4 * (1 + 3)
FLASH = {"q": ROWS, "k": ROWS, "v": ROWS}
FLASH_CAUSAL = {**FLASH, "causal": True, "window_size_left": -1, "window_size_right": -1}
VARLEN = {"q": PACKED, "k": PACKED, "v": PACKED, "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "causal": False}
OF_TORCH = {"query": PACKED, "key": PACKED, "value": PACKED, "cu_seq_q": ENDS}
# 2 images of 4 to 6 channels, 3 × 3, and 5 boxes of 7 × 7 bins, 2 × 2 points in each
KERNEL, MADE, POOLED = meta(6, 4, 3, 3), meta(2, 6, 6, 6), meta(5, 6, 7, 7)
DEFORMED, POINTS = 2 * (2 * 6 * 6 * 6) * 4 * 9, 5 * 6 * 7 * 7 * 2 * 2
INT8 = {"A": meta(3, 8, dtype=torch.int8), "B": meta(5, 8, dtype=torch.int8)}

CALLS = {
    "flash_attn::_flash_attn_forward": Call(Work(32 * ENTRIES), **FLASH, causal=False),
    "flash_attn::_flash_attn_forward,causal": Call(Work(32 * ENTRIES, 0, 32 * SKIPPED, True), **FLASH_CAUSAL),
    "flash_attn::_flash_attn_backward": Call(Work(64 * ENTRIES, 16 * ENTRIES, 80 * SKIPPED, True), **FLASH_CAUSAL),
    "flash_attn::_flash_attn_varlen_forward": Call(Work(32 * PACKED_ENTRIES, by_values=True), **VARLEN),
    "flash_attn::_flash_attn_varlen_backward": Call(
        Work(64 * PACKED_ENTRIES, 16 * PACKED_ENTRIES, by_values=True), **VARLEN
    ),
    "torch_attn::_varlen_attn": Call(Work(32 * PACKED_ENTRIES, by_values=True), **OF_TORCH, is_causal=False),
    "torch_attn::_varlen_attn,causal": Call(
        Work(32 * PACKED_ENTRIES, 0, 32 * PACKED_SKIPPED, causal=True, by_values=True), **OF_TORCH, is_causal=True
    ),
    # Each query sees itself and the one before: 1 + 2 of 4 and 1 + 2 + 2 of 9.
    "torch_attn::_varlen_attn,window": Call(
        Work(32 * PACKED_ENTRIES, 0, 32 * 4 * (1 + 4), causal=True, by_values=True),
        **OF_TORCH,
        is_causal=True,
        window_size=[1, 0],
    ),
    "torch_attn::_varlen_attn_backward": Call(
        Work(64 * PACKED_ENTRIES, 16 * PACKED_ENTRIES, by_values=True), **OF_TORCH, cu_seq_k=ENDS, is_causal=False
    ),
    "torchvision::deform_conv2d": Call(Work(DEFORMED), out=MADE, weight=KERNEL),
    "torchvision::_deform_conv2d_backward": Call(Work(2 * DEFORMED), grad=MADE, weight=KERNEL),
    "torchvision::roi_align": Call(Work(2 * 4 * POINTS), out=POOLED, sampling_ratio=2),
    "torchvision::_roi_align_backward": Call(Work(2 * 4 * POINTS), grad=POOLED, sampling_ratio=2),
    "bitsandbytes::int8_linear_matmul": Call(Work(2 * 3 * 8 * 5), **INT8),
    "bitsandbytes::int8_linear_matmul.out": Call(Work(2 * 3 * 8 * 5), **INT8),
    "bitsandbytes::gemv_4bit": Call(Work(80), out=meta(1, 5), A=meta(1, 8), shapeB=[5, 8]),
}


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_of_a_library_counts_like_torchs(name: str) -> None:
    assert work_by_name(name, CALLS[name]) == CALLS[name].cost


def test_what_a_formula_leaves_out_is_said_and_what_it_cannot_read_is_refused() -> None:
    assert "sampling" in lookup(operator("torchvision::deform_conv2d")).estimate
    with pytest.raises(Unreadable, match="follows from the boxes' sizes"):
        work_by_name("torchvision::roi_align", Call(0, out=POOLED, sampling_ratio=-1))
    assert lookup(operator("torchvision::nms")).kind == "free"


def test_an_operator_whose_schema_has_changed_is_unknown_and_heavy() -> None:
    library: Any = torch.library.Library("flash_attn", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("_flash_attn_forward.new(Tensor qkv, float softmax_scale) -> Tensor")
    assert lookup(operator("flash_attn::_flash_attn_forward.new")).kind == "unknown"
    library._destroy()


def test_transformers_grouped_products_cost_their_forward_twice_in_the_backward() -> None:
    moe = pytest.importorskip("transformers.integrations.moe")
    assert moe is not None
    rows, weights, ends = leaf(10, 4), leaf(2, 4, 6), torch.tensor([3, 10])
    one = 2 * 10 * 4 * 6
    run = torch.ops.transformers.grouped_mm_fallback
    assert forward_and_backward(lambda: run(rows, weights, ends)) == (one, 2 * one)
