"""Every operator torch has is counted, free or unknown on purpose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_flops.instrument.counting.formulas import heavy_hint, lookup
from lightning_flops.instrument.counting.formulas.free_operators import FREE_NAMES
from lightning_flops.instrument.counting.formulas.registry import OVERLOAD_RULES, RULES

UNKNOWN_ON_PURPOSE = {
    "_cslt_sparse_mm_search",  # tries out kernels: what it runs is not the model's work
    "_spsolve",  # a direct sparse solver: fill-in decides
    "_foobar",  # torch's own tests
    "_test_autograd_multiple_dispatch",
    "_test_autograd_multiple_dispatch_view_copy",
    "_test_functorch_fallback",
    "_test_optional_filled_intlist",
    "_test_optional_floatlist",
    "_test_optional_intlist",
    "_test_parallel_materialize",
    "_test_warn_in_autograd",
}

FREE_IN_SPITE_OF_THE_NAME = {
    # Pack, convert or check; none multiplies.
    "_cudnn_rnn_flatten_weight",
    "_dyn_quant_pack_4bit_weight",
    "_fill_mem_eff_dropout_mask",
    "_fused_sdp_choice",
    "_linalg_check_errors",
    "mkldnn_reorder_conv2d_weight",
    "mkldnn_reorder_conv3d_weight",
    # The gates after the products
    "_thnn_fused_gru_cell",
    "_thnn_fused_gru_cell_backward",
    "_thnn_fused_lstm_cell",
    "_thnn_fused_lstm_cell_backward_impl",
    "_transform_bias_rescale_qkv",
    # Sample frequencies, resizing, an elementwise product, norms
    "fft_fftfreq",
    "fft_rfftfreq",
    "linalg_cross",
    "linalg_vector_norm",
    "linalg__powsum",
    "linalg_diagonal",
    "lu_unpack",
    "_upsample_bilinear2d_aa",
    "_upsample_bilinear2d_aa_backward",
    "upsample_bilinear2d",
    "upsample_bilinear2d_backward",
    "upsample_linear1d",
    "upsample_linear1d_backward",
    "upsample_trilinear3d",
    "upsample_trilinear3d_backward",
}

PRODUCT = re.compile(
    r"mm(_|$)|_mv|^mv(_|$)|matmul|gemm|conv(?!ert)|attention|attn|flash|linear|lstm|gru|rnn|einsum|bilinear|multi_head"
    r"|(?<!cu)fft|linalg|cholesky|_dot|^dot|^lu_|(?<!re)solve|encoder_layer|cdist|sdp",
)


def dispatched_operators(namespace: str) -> Iterator[Any]:
    """Overloads of a namespace that the dispatcher knows; TorchScript has some that never reach it."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas() if schema.name.startswith(f"{namespace}::")}
    for name in sorted(names):
        packet = getattr(getattr(torch.ops, namespace), name.partition("::")[2])
        for overload in packet.overloads():
            operator = getattr(packet, overload)
            try:
                torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "CPU")
            except RuntimeError:
                continue
            yield operator


def test_every_aten_operator_is_counted_free_composite_or_unknown_on_purpose() -> None:
    unknown = set()
    for operator in dispatched_operators("aten"):
        entry = lookup(operator)
        if entry.kind == "unknown" and not entry.composite:
            unknown.add(operator._schema.name.partition("::")[2])
    assert unknown == UNKNOWN_ON_PURPOSE


@pytest.mark.parametrize(
    "namespace", ["aten", "prims", "quantized", "_quantized", "mkldnn", "mkl", "onednn", "inductor"]
)
def test_no_operator_whose_name_speaks_of_a_product_is_free(namespace: str) -> None:
    free = {
        operator._schema.name.partition("::")[2].rstrip("_")
        for operator in dispatched_operators(namespace)
        if lookup(operator).kind == "free" and PRODUCT.search(operator._schema.name.partition("::")[2])
    }
    packing = {name for name in free if re.search(r"pack|reorder", name)}
    assert free - packing <= FREE_IN_SPITE_OF_THE_NAME
    assert namespace != "aten" or free - packing == FREE_IN_SPITE_OF_THE_NAME - {
        name for name in FREE_IN_SPITE_OF_THE_NAME if not PRODUCT.search(name) or re.search(r"pack|reorder", name)
    }


def test_unknown_operators_that_speak_of_a_product_are_heavy() -> None:
    for operator in dispatched_operators("aten"):
        entry = lookup(operator)
        name = operator._schema.name.partition("::")[2]
        if entry.kind == "unknown" and re.search(r"mm(_|$)|matmul|conv|attention|lstm|solve", name):
            assert heavy_hint(entry.name, (), None), name


def test_every_rule_fits_the_operator_it_is_for() -> None:
    for name in (*RULES, *OVERLOAD_RULES):
        qualified, _, overload = name.partition(".")
        namespace, _, short = qualified.partition("::")
        packet = getattr(getattr(torch.ops, namespace), short, None)
        if packet is None:
            continue  # not in this torch
        for each in [overload] if overload else packet.overloads():
            assert lookup(getattr(packet, each)).kind == "formula", f"{name} {each}"


def test_torchs_own_formulas_are_all_overridden() -> None:
    from torch.utils.flop_counter import flop_registry

    for target in flop_registry:
        if isinstance(target, torch._ops.OpOverloadPacket) and str(target).startswith("aten."):
            assert target._qualified_op_name in RULES


def test_free_names_are_names_of_operators_that_torch_had_or_has() -> None:
    known = {schema.name for schema in torch._C._jit_get_all_schemas()}
    stripped = {name.rstrip("_") for name in known}
    # In other versions of torch, or made by Python code that is not loaded here.
    elsewhere = {"aten::_compute_contiguous_strides_offsets", "aten::coalesce", "aten::native_dropout_backward"}
    assert {name for name in FREE_NAMES if name not in known and name not in stripped} <= elsewhere


def test_what_runs_in_every_step_is_free() -> None:
    aten = torch.ops.aten
    for operator in (
        aten.add.Tensor,
        aten.add_.Tensor,
        aten.add.out,
        aten.view.default,
        aten.t.default,
        aten.detach.default,
        aten.native_layer_norm_backward.default,
        aten._softmax.default,
        aten.embedding.default,
        aten.embedding_dense_backward.default,
        aten.max_pool2d_with_indices_backward.default,
        aten.nll_loss_forward.default,
        aten._foreach_addcdiv_.ScalarList,
        aten._fused_adamw_.default,
        aten.uniform_.default,
        aten.native_dropout.default,
        aten._local_scalar_dense.default,
        torch.ops.profiler._record_function_enter_new.default,
        torch.ops._c10d_functional.all_reduce.default,
    ):
        assert lookup(operator).kind == "free", operator


def test_lookup_answers_with_the_same_entry_every_time() -> None:
    assert lookup(torch.ops.aten.mm.default) is lookup(torch.ops.aten.mm.default)
