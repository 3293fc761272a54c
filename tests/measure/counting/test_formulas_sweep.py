"""Every operator torch has is counted, free or unknown on purpose."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from typing import Any

import torch

from lightning_flops import count_flops
from lightning_flops.measure.counting.formulas.contract import TORCH_NAMESPACES
from lightning_flops.measure.counting.formulas.registry import lookup
from lightning_flops.measure.torch_private.needed import is_composite

OF_QUANTIZATION = re.compile(r"quantized_|_?quantized::|sparse::|onednn::")
"""Layers of torch.ao.quantization, which torch no longer develops: none has a formula."""

UNKNOWN_ON_PURPOSE = {
    "_cslt_sparse_mm_search",  # tries out kernels: what it runs is not the model's work
    "_spsolve",  # a direct sparse solver: fill-in decides
    "_compute_linear_combination",  # a step of the matrix exponential, which calls it out of sight
    # Rare: listed wherever they run
    *"_pdist_forward _pdist_backward linalg_householder_product linalg_ldl_factor_ex linalg_ldl_solve ormqr".split(),
    *"linalg_lstsq linalg_matrix_exp linalg_pinv conv_tbc _sparse_sparse_matmul".split(),
    "_sparse_mm_reduce_impl_backward",
    # Kernels of Triton that nothing public calls
    "_triton_multi_head_attention",
    "_triton_scaled_dot_attention",
}


OF_TORCH = TORCH_NAMESPACES | {"_native", "_test", "debug_mode_ops", "onnx_symbolic", "torch_attn", "torch_nn"}
"""Namespaces that torch fills, those included in which nothing is on the list of free operators."""

UNKNOWN_ELSEWHERE = {
    *"prims::fft_c2c prims::fft_c2r prims::fft_r2c prims::svd".split(),
    "mkldnn_prepacked::conv2d_run",  # a convolution
    # Fused with collectives
    "symm_mem::fused_all_gather_matmul",
    "symm_mem::fused_all_gather_scaled_matmul",
    "symm_mem::fused_matmul_reduce_scatter",
    "symm_mem::fused_scaled_matmul_reduce_scatter",
    "onnx::Attention",
    "onnx_symbolic::_symbolic",  # stands for any operator of ONNX
    "onnx_symbolic::_symbolic_multi_out",
    # Products and a loss at once, in Python: what they run is counted where it runs.
    "torch_nn::_linear_cross_entropy_batch_chunked",
    "torch_nn::_linear_cross_entropy_batch_chunked_no_reduction",
}

_IMPORTED_LATE = (
    "torch._dynamo._trace_wrapped_higher_order_op",
    "torch._dynamo.variables.streams",
    "torch._functorch._activation_offloading.offload_ops",
    "torch._inductor.fx_passes.bucketing",
    "torch._inductor.inductor_prims",
    "torch._inductor.lowering",
    "torch._inductor.test_operators",
    "torch.ao.quantization.fx._decomposed",
    "torch.distributed._functional_collectives",
    "torch.distributed._symmetric_memory",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.experimental._context_parallel._cp_custom_ops",
    "torch.nn.attention.varlen",
    "torch.nn.modules.linear_cross_entropy",
)


def every_operator_of_torch() -> Iterator[tuple[str, Any]]:
    """Each overload that the dispatcher knows after torch's Python code has registered its own."""
    for module in _IMPORTED_LATE:
        importlib.import_module(module)
    for full in sorted(torch._C._dispatch_get_all_op_names()):
        qualified, _, overload = full.partition(".")
        namespace, _, name = qualified.partition("::")
        if namespace in OF_TORCH:
            yield qualified, getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


def test_every_operator_of_torch_has_a_formula_or_is_free_or_decomposes_or_is_known_to_be_unknown() -> None:
    unknown = set()
    for qualified, operator in every_operator_of_torch():
        entry = lookup(operator)
        if (
            entry.kind == "unknown"
            and not is_composite(operator)
            and not OF_QUANTIZATION.match(qualified.removeprefix("aten::"))
        ):
            unknown.add(qualified)
    assert unknown == {f"aten::{name}" for name in UNKNOWN_ON_PURPOSE} | UNKNOWN_ELSEWHERE


def test_what_multiplies_or_samples_is_never_free() -> None:
    """Read by hand: the operators whose results are sums of products, whatever they are called."""
    for name in (
        "mm bmm addmm baddbmm addbmm mv addmv dot vdot addr _addmm_activation _int_mm _scaled_mm _grouped_mm "
        "_foreach_mm bilinear _trilinear einsum tensordot matmul linear chain_matmul linalg_multi_dot linalg_matmul "
        "convolution convolution_backward _slow_conv2d_forward conv_tbc _convolution mkldnn_linear "
        "_cdist_forward _cdist_backward cdist _pdist_forward _euclidean_dist cosine_similarity pairwise_distance "
        "grid_sampler_2d grid_sampler_3d grid_sampler_2d_backward _fft_c2c _fft_r2c _fft_c2r stft istft "
        "linalg_cholesky_ex linalg_qr geqrf _linalg_svd _linalg_eigh linalg_inv_ex linalg_lu_factor_ex linalg_lstsq "
        "linalg_matrix_exp matrix_power linalg_solve_triangular triangular_solve _linalg_det "
        "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu _flash_attention_forward "
        "_efficient_attention_forward _cudnn_attention_forward _native_multi_head_attention "
        "_sparse_addmm _sparse_mm _sparse_sparse_matmul sparse_sampled_addmm "
        "_sparse_semi_structured_mm _cslt_sparse_mm _cudnn_rnn mkldnn_rnn_layer miopen_rnn lstm gru rnn_tanh "
        "_weight_int8pack_mm _weight_int4pack_mm _mixed_dtypes_linear corrcoef cov"
    ).split():
        packet = getattr(torch.ops.aten, name, None)
        for overload in () if packet is None else packet.overloads():
            assert lookup(getattr(packet, overload)).kind != "free", f"{name}.{overload}"


def test_such_an_operator_costs_what_the_one_that_it_replaces_costs() -> None:
    library: Any = torch.library.Library("_native", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("bmm_triton_90(Tensor self, Tensor mat2) -> Tensor")
    library.impl("bmm_triton_90", torch.bmm, "CPU")
    with count_flops(None) as counts:
        torch.ops._native.bmm_triton_90(torch.ones(7, 3, 4), torch.ones(7, 4, 5))
    assert (counts.forward, counts.uncounted) == (7 * 2 * 3 * 4 * 5, {})
    library._destroy()
