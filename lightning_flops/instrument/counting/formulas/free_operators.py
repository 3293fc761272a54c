"""Which operators have no FLOPs as this package counts them, and what shows it.

An operator of torch's own is free unless its name speaks of a product, a transform or a solver (``says_heavy``); a
test holds this to every operator that torch has. Of anybody else's neither the name nor the schema shows anything: it
is free if it takes and makes no tensor, or if its author has registered 0.
"""

from __future__ import annotations

import re
from typing import Any

from lightning_flops.instrument.torch_private.operators import schema_of

TORCH_NAMESPACES = frozenset(
    (
        "aten prim prims profiler quantized _quantized quantized_decomposed quantization sparse inductor "
        "inductor_prims _inductor_test mkl mkldnn mkldnn_prepacked onednn prepacked rngprims static_runtime "
        "streams symm_mem fsdp ao bucketing c10d _c10d_functional _c10d_functional_autograd c10d_functional "
        "_dtensor cplib debugprims export flex_lib onnx"
    ).split()
)
"""Namespaces that torch itself fills."""

_HEAVY_WORDS = re.compile(
    # Short words stand alone or next to an underscore, a digit or their usual neighbours; long ones anywhere.
    r"(?:^|[_\d:.])(?:s|sp|add|badd|addb|b|int|f16|grouped|qk|av)?(?:mm|bmm|mv)(?:$|[_\d])"
    r"|matmul|gemm|gemv|conv(?!ert)|attention|attn|flash|(?:^|_)sdpa?(?:$|_)|(?<!bi)(?<!tri)linear(?!1d)|einsum"
    r"|lstm|(?:^|_)gru|(?:^|_|\d)rnn|(?:^|_)dot(?:$|_)|outer_?prod|tensordot|bilinear(?!2d)|trilinear(?!3d)"
    r"|cholesky|lstsq|(?:^|_)svd|(?:^|_)qr(?:$|_)|(?<!w)eig(?:h|vals)|(?<!re)solve|(?:^|_)fft|matrix_(?:exp|power)"
    r"|ssm|selective_scan|triton|(?:^|_)moe(?:$|_)|(?:^|_)mlp(?:$|_)|fused_(?:dense|experts)",
    re.IGNORECASE,
)

_FREE_IN_SPITE_OF_THE_NAME = re.compile(
    # Weights packed, unpacked or laid out anew; the gates of a recurrent cell; sample frequencies; what checks,
    # converts or moves. None multiplies.
    r"(?:pre|un|_)?pack|reorder|flatten_weight|_thnn_fused_(?:gru|lstm)_cell|fft_r?fftfreq|_fused_sdp_choice"
    r"|_linalg_check_errors|_fill_mem_eff_dropout_mask|_transform_bias_rescale_qkv|inductor_random"
)

_LIBRARIES_FREE = frozenset(
    (
        "bitsandbytes::dequantize_4bit bitsandbytes::dequantize_blockwise bitsandbytes::int8_double_quant "
        "bitsandbytes::int8_mm_dequant bitsandbytes::int8_vectorwise_dequant bitsandbytes::int8_vectorwise_quant "
        "bitsandbytes::optimizer_update_32bit bitsandbytes::optimizer_update_8bit_blockwise "
        "bitsandbytes::quantize_4bit bitsandbytes::quantize_blockwise deepspeed::dim_zero_all_to_all "
        "torchvision::_ps_roi_pool_backward torchvision::_roi_pool_backward torchvision::nms "
        "torchvision::ps_roi_pool torchvision::roi_pool"
    ).split()
)
"""Operators of libraries that people have read: they convert, compare, pool, update parameters or communicate."""


def says_heavy(name: str) -> bool:
    """Whether a name (without namespace) speaks of a product: mm, conv, attention, lstm, solve and the like."""
    return _HEAVY_WORDS.search(name) is not None


def is_free(qualified_name: str, operator: Any) -> bool:
    """Whether *operator*, an ``OpOverload`` named ``namespace::name``, is known to have no FLOPs."""
    namespace, _, name = qualified_name.partition("::")
    if says_heavy(name) and not (namespace in TORCH_NAMESPACES and _FREE_IN_SPITE_OF_THE_NAME.search(name)):
        return qualified_name in _LIBRARIES_FREE
    return namespace in TORCH_NAMESPACES or qualified_name in _LIBRARIES_FREE or not _has_tensors(operator)


def makes_views(operator: Any) -> bool:
    """Whether all that the operator returns are views of what it is given, and it writes nothing."""
    schema = schema_of(operator)
    aliases = [value.alias_info for value in schema.returns]
    written = any(value.alias_info is not None and value.alias_info.is_write for value in schema.arguments)
    return bool(aliases) and not written and all(alias is not None and not alias.is_write for alias in aliases)


def _has_tensors(operator: Any) -> bool:
    schema = schema_of(operator)
    if "(...)" in str(schema):  # it takes or returns anything
        return True
    return any("Tensor" in str(value.type) for value in (*schema.arguments, *schema.returns))
