"""Operators that libraries register: found by name, counted from their arguments."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_flops.measure.counting.formulas.contract import Unreadable, Work
from lightning_flops.measure.counting.formulas.registry import lookup
from tests.measure.counting.recording import forward_and_backward, leaf, meta, operator, work_of

# What these libraries define, as far as their formulas read it; none of them is needed.
SCHEMAS = {
    "flash_attn": [
        "_flash_attn_forward(Tensor q, Tensor k, Tensor v, float dropout_p, float softmax_scale, bool causal, "
        "int window_size_left, int window_size_right, float softcap, Tensor? slopes, bool return_softmax) -> Tensor",
        "_flash_attn_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
        "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, float dropout_p, float softmax_scale, bool causal, "
        "int window_size_left, int window_size_right, float softcap, Tensor? slopes, bool deterministic) -> Tensor",
        "_flash_attn_varlen_forward(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "int max_seqlen_q, int max_seqlen_k, float dropout_p, float softmax_scale, bool causal, "
        "int window_size_left=-1, int window_size_right=-1) -> Tensor",
        "_flash_attn_varlen_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, "
        "Tensor(a!)? dq, Tensor(b!)? dk, Tensor(c!)? dv, Tensor cu_seqlens_q, Tensor cu_seqlens_k, "
        "int max_seqlen_q, int max_seqlen_k, float dropout_p, float softmax_scale, bool causal, int window_size_left, "
        "int window_size_right) -> Tensor",
    ],
    "torchvision": [
        "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias) -> Tensor",
        "_deform_conv2d_backward(Tensor grad, Tensor input, Tensor weight, Tensor offset) -> (Tensor, Tensor)",
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor",
        "_roi_align_backward(Tensor grad, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
        "SymInt batch_size, SymInt channels, SymInt height, SymInt width, int sampling_ratio, bool aligned) -> Tensor",
    ],
    "bitsandbytes": [
        "int8_linear_matmul(Tensor A, Tensor B) -> Tensor",
        "int8_linear_matmul.out(Tensor A, Tensor B, Tensor(a!) out) -> ()",
        "gemv_4bit(Tensor A, Tensor B, int[] shapeB, Tensor absmax, Tensor code, int blocksize) -> Tensor",
    ],
}


@pytest.fixture(scope="module", autouse=True)
def libraries() -> Iterator[None]:
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


def test_flash_attns_operators_count_like_torchs() -> None:
    # 2 samples of 5, 4 heads of 8; a causal mask leaves 15 of 25 entries.
    q = meta(2, 5, 4, 8)
    entries, skipped = 2 * 4 * 25, 2 * 4 * 10
    rest = (-1, -1, 0.0, None, False)
    assert work_of("flash_attn::_flash_attn_forward", q, q, q, 0.0, 1.0, False, *rest) == Work(32 * entries)
    work = work_of("flash_attn::_flash_attn_forward", q, q, q, 0.0, 1.0, True, *rest)
    assert work == Work(32 * entries, 0, 32 * skipped, True)
    call = (q, q, q, q, q, meta(2, 4, 5), None, None, None, 0.0, 1.0, True, *rest)
    assert work_of("flash_attn::_flash_attn_backward", *call) == Work(64 * entries, 16 * entries, 80 * skipped, True)


def test_flash_attns_packed_operators_count_their_own_lengths() -> None:
    ends = torch.tensor([0, 2, 5])
    q = meta(5, 4, 8)
    entries = 4 * (4 + 9)
    call = (q, q, q, ends, ends, 3, 3, 0.0, 1.0, False)
    assert work_of("flash_attn::_flash_attn_varlen_forward", *call) == Work(32 * entries, by_values=True)
    backward = (q, q, q, q, q, meta(4, 5), None, None, None, ends, ends, 3, 3, 0.0, 1.0, False, -1, -1)
    work = work_of("flash_attn::_flash_attn_varlen_backward", *backward)
    assert work == Work(64 * entries, 16 * entries, by_values=True)


def test_deformable_convolutions_count_their_products_and_say_what_is_left_out() -> None:
    values, weight, offset, out = meta(2, 4, 8, 8), meta(6, 4, 3, 3), meta(2, 18, 6, 6), meta(2, 6, 6, 6)
    one = 2 * (2 * 6 * 6 * 6) * 4 * 9
    assert work_of("torchvision::deform_conv2d", values, weight, offset, offset, meta(6), out=out).flops == one
    assert work_of("torchvision::_deform_conv2d_backward", out, values, weight, offset).flops == 2 * one
    assert "sampling" in lookup(operator("torchvision::deform_conv2d")).estimate


def test_torchvisions_pooling_of_boxes_counts_four_neighbours_a_point() -> None:
    values, boxes, pooled = meta(1, 6, 16, 16), meta(5, 5), meta(5, 6, 7, 7)
    points = 5 * 6 * 7 * 7 * 2 * 2
    forward = work_of("torchvision::roi_align", values, boxes, 0.5, 7, 7, 2, True, out=pooled)
    backward = work_of("torchvision::_roi_align_backward", pooled, boxes, 0.5, 7, 7, 1, 6, 16, 16, 2, True)
    assert forward.flops == backward.flops == 2 * 4 * points
    with pytest.raises(Unreadable, match="follows from the boxes' sizes"):
        work_of("torchvision::roi_align", values, boxes, 0.5, 7, 7, -1, True, out=pooled)
    assert lookup(operator("torchvision::nms")).kind == "free"


def test_bitsandbytes_products_count_with_and_without_a_result() -> None:
    values, weight, out = meta(3, 8, dtype=torch.int8), meta(5, 8, dtype=torch.int8), meta(3, 5, dtype=torch.int32)
    assert work_of("bitsandbytes::int8_linear_matmul", values, weight, out=out).flops == 2 * 3 * 8 * 5
    assert work_of("bitsandbytes::int8_linear_matmul.out", values, weight, out).flops == 2 * 3 * 8 * 5
    row, packed = meta(1, 8), meta(20, 1, dtype=torch.uint8)
    assert work_of("bitsandbytes::gemv_4bit", row, packed, [5, 8], meta(1), meta(16), 64, out=meta(1, 5)).flops == 80


def test_an_operator_whose_schema_has_changed_is_unknown_and_heavy() -> None:
    library: Any = torch.library.Library("flash_attn", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("_flash_attn_forward.new(Tensor qkv, float softmax_scale) -> Tensor")
    assert lookup(operator("flash_attn::_flash_attn_forward.new")).kind == "unknown"
    library._destroy()


def test_torchs_variable_length_attention_counts_its_own_lengths() -> None:
    import torch.nn.attention.varlen

    assert torch.nn.attention.varlen is not None
    ends = torch.tensor([0, 2, 5])
    q = meta(5, 4, 8)
    entries, skipped = 4 * (4 + 9), 4 * (1 + 3)
    call = (q, q, q, ends, None, 3, 3)
    assert work_of("torch_attn::_varlen_attn", *call) == Work(32 * entries, by_values=True)
    work = work_of("torch_attn::_varlen_attn", *call, True)
    assert work == Work(32 * entries, 0, 32 * skipped, causal=True, by_values=True)
    # Each query sees itself and the one before: 1 + 2 of 4 and 1 + 2 + 2 of 9.
    work = work_of("torch_attn::_varlen_attn", *call, True, None, [1, 0])
    assert work.skipped == 32 * 4 * (1 + 4)
    backward = (q, q, q, q, q, meta(4, 5), ends, ends, 3, 3, False, meta(2))
    work = work_of("torch_attn::_varlen_attn_backward", *backward)
    assert work == Work(64 * entries, 16 * entries, by_values=True)


def test_transformers_grouped_products_cost_their_forward_twice_in_the_backward() -> None:
    moe = pytest.importorskip("transformers.integrations.moe")
    assert moe is not None
    rows, weights, ends = leaf(10, 4), leaf(2, 4, 6), torch.tensor([3, 10])
    one = 2 * 10 * 4 * 6
    run = torch.ops.transformers.grouped_mm_fallback
    assert forward_and_backward(lambda: run(rows, weights, ends)) == (one, 2 * one)
