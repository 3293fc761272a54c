"""Torch's own attention and transformer layers, step by step and on their fused fast paths.

The heads' sizes add up to the hidden size, so all heads' scores together cost what one head of that size would:
``2 * batch * queries * keys * hidden``. See ``attention.py`` for what fused attention repeats and skips.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from lightning_flops.records import PhaseFlops

from .case import Example, Family, Parts, forward_without_grad

FAMILY = Family("attention_layers")


class SelfAttention(nn.Module):
    """Three heads of 4, asked for their weights."""

    def __init__(self, **options: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(12, num_heads=3, batch_first=True, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


@FAMILY.network
def multi_head_attention_with_weights() -> Example:
    """Asked for its weights, it runs separate products: 3 projections in, attention, 1 out."""
    batch, sequence, hidden = 2, 7, 12
    projection = 2 * batch * sequence * hidden * hidden
    scores = 2 * batch * sequence * sequence * hidden
    forward = 4 * projection + 2 * scores
    # The input needs no gradient: the 3 input projections have their weights' alone.
    backward = 3 * projection + 2 * projection + 4 * scores
    return Example(SelfAttention(), torch.randn(batch, sequence, hidden)).costs(
        forward, backward, by_module={"attention": (forward, backward)}
    )


def without_weights(example: Example) -> None:
    """A forward that does not ask for attention weights, and its backward."""
    output, _ = example.forward()
    output.sum().backward()


@FAMILY.network
def multi_head_cross_attention() -> Example:
    """Keys and values of their own widths and length, projected apart; fused, so the scores are repeated."""
    batch, queries, keys, hidden, key_width, value_width = 2, 7, 11, 12, 5, 9
    query_projection = 2 * batch * queries * hidden * hidden
    key_projection = 2 * batch * keys * key_width * hidden
    value_projection = 2 * batch * keys * value_width * hidden
    out_projection = 2 * batch * queries * hidden * hidden
    scores = 2 * batch * queries * keys * hidden
    model = nn.MultiheadAttention(hidden, 3, batch_first=True, kdim=key_width, vdim=value_width)
    return Example(
        model,
        torch.randn(batch, queries, hidden),
        torch.randn(batch, keys, key_width),
        torch.randn(batch, keys, value_width),
        kwargs={"need_weights": False},
        step=without_weights,
    ).costs(
        query_projection + key_projection + value_projection + 2 * scores + out_projection,
        query_projection + key_projection + value_projection + 4 * scores + 2 * out_projection,
        scores,
    )


@FAMILY.network
def multi_head_attention_with_extra_keys() -> Example:
    """A learned key and value, and a zero one, are put behind the sequence's own: two more columns of scores."""
    batch, sequence, hidden = 2, 7, 12
    projection = 2 * batch * sequence * hidden * hidden
    scores = 2 * batch * sequence * (sequence + 2) * hidden
    model = SelfAttention(add_bias_kv=True, add_zero_attn=True)
    return Example(model, torch.randn(batch, sequence, hidden, requires_grad=True)).costs(
        4 * projection + 2 * scores, 8 * projection + 4 * scores
    )


@FAMILY.network
def multi_head_attention_on_its_fast_path() -> Example:
    """In eval mode without gradients the whole layer is one operator."""
    batch, sequence, hidden = 3, 7, 12
    projection = 2 * batch * sequence * hidden * hidden
    scores = 2 * batch * sequence * sequence * hidden
    x = torch.randn(batch, sequence, hidden)
    return Example(nn.MultiheadAttention(hidden, 2, batch_first=True).eval(), x, x, x, step=forward_without_grad).costs(
        4 * projection + 2 * scores
    )


@FAMILY.network
def transformer_encoder_layer() -> Example:
    """Self-attention and two linear layers, trained."""
    batch, sequence, hidden, intermediate = 2, 7, 12, 20
    projection = 2 * batch * sequence * hidden * hidden
    scores = 2 * batch * sequence * sequence * hidden
    linear = 2 * batch * sequence * hidden * intermediate
    attention_forward = 4 * projection + 2 * scores
    attention_backward = 8 * projection + 4 * scores
    model = nn.TransformerEncoderLayer(hidden, 3, intermediate, dropout=0.0, batch_first=True)
    return Example(model, torch.randn(batch, sequence, hidden, requires_grad=True)).costs(
        attention_forward + 2 * linear,
        attention_backward + 4 * linear,
        scores,
        by_module={
            "self_attn": (attention_forward, attention_backward, scores),
            "linear1": (linear, 2 * linear),
            "linear2": (linear, 2 * linear),
        },
    )


@FAMILY.network
def transformer_encoder_layer_on_its_fast_path() -> Example:
    """In eval mode without gradients the whole layer is one operator, and belongs to the layer."""
    batch, sequence, hidden, intermediate = 3, 7, 12, 20
    projection = 2 * batch * sequence * hidden * hidden
    scores = 2 * batch * sequence * sequence * hidden
    linear = 2 * batch * sequence * hidden * intermediate
    layer = 4 * projection + 2 * scores + 2 * linear
    model = nn.Sequential(
        nn.TransformerEncoderLayer(hidden, 2, intermediate, batch_first=True), nn.Linear(hidden, 5)
    ).eval()
    return Example(model, torch.randn(batch, sequence, hidden), step=forward_without_grad).costs(
        layer + 2 * batch * sequence * hidden * 5, by_module={"0": (layer,), "1": (2 * batch * sequence * hidden * 5,)}
    )


@FAMILY.network
def transformer_encoder_over_nested_samples() -> Example:
    """Padding is dropped before the layers: 7 + 4 + 6 rows are multiplied, the scores over the longest sample's 7."""
    lengths, hidden, intermediate, layers = (7, 4, 6), 12, 20, 2
    batch, longest, rows = len(lengths), max(lengths), sum(lengths)
    layer = (
        4 * (2 * rows * hidden * hidden)
        + 2 * (2 * batch * longest * longest * hidden)
        + 2 * (2 * rows * hidden * intermediate)
    )
    padding = torch.arange(longest) >= torch.tensor(lengths).unsqueeze(1)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(hidden, 2, intermediate, batch_first=True), num_layers=layers
    )
    return Example(
        encoder.eval(),
        torch.randn(batch, longest, hidden),
        kwargs={"src_key_padding_mask": padding},
        step=forward_without_grad,
    ).costs(layers * layer, by_module={"layers.0": (layer,), "layers.1": (layer,)})


@FAMILY.network
def transformer_decoder_layer() -> Example:
    """Causal self-attention over the target, cross-attention to a memory that needs no gradient, two linear layers."""
    batch, target, memory, hidden, intermediate = 2, 5, 11, 12, 20
    own_projection = 2 * batch * target * hidden * hidden
    own_scores = 2 * batch * (target * target) * hidden
    own_skipped = 2 * batch * (4 + 3 + 2 + 1) * hidden
    memory_projection = 2 * batch * memory * hidden * hidden
    cross_scores = 2 * batch * target * memory * hidden
    linear = 2 * batch * target * hidden * intermediate

    def forward(self: Any, x: Tensor, context: Tensor) -> Tensor:
        return self.layer(x, context, tgt_mask=self.causal, tgt_is_causal=True)

    self_attention = PhaseFlops(
        forward=4 * own_projection + 2 * own_scores,
        backward=3 * own_projection + 2 * own_projection + 4 * own_scores,
        recompute=own_scores,
    )
    cross_attention = PhaseFlops(
        forward=2 * own_projection + 2 * memory_projection + 2 * cross_scores,
        backward=4 * own_projection + 2 * memory_projection + 4 * cross_scores,
        recompute=cross_scores,
    )
    model = Parts(
        forward,
        layer=nn.TransformerDecoderLayer(hidden, 3, intermediate, dropout=0.0, batch_first=True),
        causal=nn.Transformer.generate_square_subsequent_mask(target),
    )
    return Example(model, torch.randn(batch, target, hidden), torch.randn(batch, memory, hidden)).costs(
        self_attention.forward + cross_attention.forward + 2 * linear,
        self_attention.backward + cross_attention.backward + 4 * linear,
        own_scores + cross_scores,
        skipped=(2 + 4 + 1) * own_skipped,
        by_module={"layer.self_attn": self_attention, "layer.multihead_attn": cross_attention},
    )


@FAMILY.network
def linear_over_jagged_rows() -> Example:
    """A jagged batch of 3 + 7 + 5 rows: a projection over the rows, without any padding."""
    lengths, inputs, outputs = (3, 7, 5), 6, 11
    product = 2 * sum(lengths) * inputs * outputs

    def forward(self: Any, samples: Tensor) -> Tensor:
        return self.projection(samples).values()

    samples = [torch.randn(length, inputs) for length in lengths]
    return Example(
        Parts(forward, projection=nn.Linear(inputs, outputs)), torch.nested.nested_tensor(samples, layout=torch.jagged)
    ).costs(product, product, by_module={"projection": (product, product)})


@FAMILY.network
def attention_over_jagged_samples() -> Example:
    """Samples of 3, 7 and 5 rows attend each to itself alone; the projections run over all 15 rows."""
    lengths, heads, head_dim = (3, 7, 5), 2, 4
    hidden = heads * head_dim
    scores = sum(2 * heads * length * length * head_dim for length in lengths)
    projection = 2 * sum(lengths) * hidden * hidden

    def forward(self: Any, samples: Tensor) -> Tensor:
        projected = (layer(samples) for layer in (self.query, self.key, self.value))
        query, key, value = (part.unflatten(-1, (heads, head_dim)).transpose(1, 2) for part in projected)
        with sdpa_kernel(SDPBackend.MATH):
            mixed = nn.functional.scaled_dot_product_attention(query, key, value)
        return mixed.transpose(1, 2).values()

    model = Parts(forward, **{name: nn.Linear(hidden, hidden) for name in ("query", "key", "value")})
    samples = [torch.randn(length, hidden) for length in lengths]
    return Example(model, torch.nested.nested_tensor(samples, layout=torch.jagged)).costs(
        3 * projection + 2 * scores, 3 * projection + 4 * scores, by_module={"key": (projection, projection)}
    )
