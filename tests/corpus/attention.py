"""Attention, in every form torch has for it.

With B samples, H query heads, Sq queries, Sk keys, head size D and value head size Dv, the scores Q K^T cost
``2 * B * H * Sq * Sk * D`` and the weighted values ``2 * B * H * Sq * Sk * Dv``, masked or not. Each has two gradients.
A fused kernel does not keep the scores: its backward computes Q K^T once more, which is recompute. Where it knows its
mask is causal it leaves out the scores above the diagonal, in all seven products: 2 forward, 4 backward, 1 recompute.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from lightning_flops.records import PhaseFlops

from .case import Example, Expected, Family, Network, forward_without_grad

FAMILY = Family("attention")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Attention between tensors that already are queries, keys and values."""

    def __init__(self, attend: Attend) -> None:
        """Calls *attend* on its three inputs."""
        super().__init__()
        self.attend = attend

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """What *attend* returns."""
        return self.attend(query, key, value)


def example_of(attend: Attend, query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> Example:
    """Attention over inputs of these shapes, each of which needs its gradient."""
    return Example(
        model=Attention(attend), args=tuple(torch.randn(shape, requires_grad=True) for shape in (query, key, value))
    )


def with_math_backend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Scaled dot-product attention as separate products."""
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(query, key, value, **options)


def with_flash_backend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Scaled dot-product attention as one fused kernel."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(query, key, value, **options)


@FAMILY.network
def attention_from_matmuls() -> Network:
    """softmax(Q K^T) V, written out."""
    batch, heads, sequence, head_dim = 2, 3, 7, 5
    scores = 2 * batch * heads * sequence * sequence * head_dim

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.softmax(query @ key.transpose(-2, -1) * head_dim**-0.5, dim=-1) @ value

    shape = (batch, heads, sequence, head_dim)
    return Network(
        build=lambda: example_of(attend, shape, shape, shape),
        expected=Expected(
            forward=2 * scores,
            backward=4 * scores,
            by_module={"": PhaseFlops(forward=2 * scores, backward=4 * scores)},
        ),
    )


@FAMILY.network
def attention_from_einsum() -> Network:
    """Heads behind the sequence, keys of another length."""
    batch, heads, queries, keys, head_dim = 2, 3, 7, 11, 5
    scores = 2 * batch * heads * queries * keys * head_dim

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", query, key), dim=-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, value)

    return Network(
        build=lambda: example_of(
            attend, (batch, queries, heads, head_dim), (batch, keys, heads, head_dim), (batch, keys, heads, head_dim)
        ),
        expected=Expected(forward=2 * scores, backward=4 * scores),
    )


@FAMILY.network
def linear_attention() -> Network:
    """K^T V first: no score matrix, two products with a (head_dim, value_dim) state."""
    batch, heads, sequence, head_dim, value_dim = 2, 3, 7, 5, 4
    state = 2 * batch * heads * sequence * head_dim * value_dim

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        memory = torch.einsum("bhsd,bhse->bhde", torch.softmax(key, dim=-2), value)
        return torch.einsum("bhsd,bhde->bhse", torch.softmax(query, dim=-1), memory)

    shape = (batch, heads, sequence, head_dim)
    return Network(
        build=lambda: example_of(attend, shape, shape, (batch, heads, sequence, value_dim)),
        expected=Expected(forward=2 * state, backward=4 * state),
    )


@FAMILY.network
def math_attention() -> Network:
    """Separate products keep the scores, so nothing is computed twice."""
    batch, heads, sequence, head_dim = 2, 3, 7, 5
    scores = 2 * batch * heads * sequence * sequence * head_dim
    shape = (batch, heads, sequence, head_dim)
    return Network(
        build=lambda: example_of(with_math_backend, shape, shape, shape),
        expected=Expected(forward=2 * scores, backward=4 * scores),
    )


@FAMILY.network
def causal_math_attention() -> Network:
    """Separate products compute the masked half too: nothing is skipped."""
    batch, heads, sequence, head_dim = 2, 3, 7, 5
    scores = 2 * batch * heads * sequence * sequence * head_dim
    shape = (batch, heads, sequence, head_dim)
    return Network(
        build=lambda: example_of(partial(with_math_backend, is_causal=True), shape, shape, shape),
        expected=Expected(forward=2 * scores, backward=4 * scores),
    )


@FAMILY.network
def flash_attention() -> Network:
    """The fused kernel repeats Q K^T in its backward."""
    batch, heads, sequence, head_dim = 2, 3, 7, 5
    scores = 2 * batch * heads * sequence * sequence * head_dim
    shape = (batch, heads, sequence, head_dim)
    return Network(
        build=lambda: example_of(with_flash_backend, shape, shape, shape),
        expected=Expected(
            forward=2 * scores,
            backward=4 * scores,
            recompute=scores,
            by_module={"": PhaseFlops(forward=2 * scores, backward=4 * scores, recompute=scores)},
        ),
    )


@FAMILY.network
def causal_flash_attention() -> Network:
    """Of 7 x 7 scores, 6 + 5 + 4 + 3 + 2 + 1 = 21 lie above the diagonal and are skipped in all seven products."""
    batch, heads, sequence, head_dim = 2, 3, 7, 5
    scores = 2 * batch * heads * (sequence * sequence) * head_dim
    skipped = 2 * batch * heads * (6 + 5 + 4 + 3 + 2 + 1) * head_dim
    shape = (batch, heads, sequence, head_dim)
    return Network(
        build=lambda: example_of(partial(with_flash_backend, is_causal=True), shape, shape, shape),
        expected=Expected(
            forward=2 * scores, backward=4 * scores, recompute=scores, causal_skipped=(2 + 4 + 1) * skipped
        ),
    )


@FAMILY.network
def causal_flash_attention_without_grad() -> Network:
    """Only the forward's two products run, and skip."""
    batch, heads, sequence, head_dim = 3, 2, 5, 7
    scores = 2 * batch * heads * (sequence * sequence) * head_dim
    skipped = 2 * batch * heads * (4 + 3 + 2 + 1) * head_dim
    shape = (batch, heads, sequence, head_dim)

    def build() -> Example:
        example = example_of(partial(with_flash_backend, is_causal=True), shape, shape, shape)
        example.step = forward_without_grad
        return example

    return Network(build=build, expected=Expected(forward=2 * scores, causal_skipped=2 * skipped))


@FAMILY.network
def causal_flash_cross_attention() -> Network:
    """Query i sees keys 0 to i, counted from the first key: 5 queries see 1 + 2 + 3 + 4 + 5 of their 8 keys each."""
    batch, heads, queries, keys, head_dim = 2, 3, 5, 8, 7
    scores = 2 * batch * heads * (queries * keys) * head_dim
    skipped = 2 * batch * heads * (queries * keys - (1 + 2 + 3 + 4 + 5)) * head_dim
    return Network(
        build=lambda: example_of(
            partial(with_flash_backend, is_causal=True),
            (batch, heads, queries, head_dim),
            (batch, heads, keys, head_dim),
            (batch, heads, keys, head_dim),
        ),
        expected=Expected(
            forward=2 * scores, backward=4 * scores, recompute=scores, causal_skipped=(2 + 4 + 1) * skipped
        ),
    )


@FAMILY.network
def flash_attention_with_a_mask_tensor() -> Network:
    """A mask that is a tensor is added to scores that are all computed, also when it happens to be causal."""
    batch, heads, sequence, head_dim = 2, 3, 7, 5
    scores = 2 * batch * heads * sequence * sequence * head_dim
    shape = (batch, heads, sequence, head_dim)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        mask = torch.ones(sequence, sequence, dtype=torch.bool).tril()
        return with_flash_backend(query, key, value, attn_mask=mask)

    return Network(
        build=lambda: example_of(attend, shape, shape, shape),
        expected=Expected(forward=2 * scores, backward=4 * scores, recompute=scores),
    )


@FAMILY.network
def flash_cross_attention() -> Network:
    """Queries and keys of different lengths."""
    batch, heads, queries, keys, head_dim = 2, 3, 7, 11, 5
    scores = 2 * batch * heads * queries * keys * head_dim
    return Network(
        build=lambda: example_of(
            with_flash_backend,
            (batch, heads, queries, head_dim),
            (batch, heads, keys, head_dim),
            (batch, heads, keys, head_dim),
        ),
        expected=Expected(forward=2 * scores, backward=4 * scores, recompute=scores),
    )


@FAMILY.network
def grouped_query_flash_attention() -> Network:
    """Six query heads share two key heads; every query head has its own scores."""
    batch, heads, key_heads, sequence, head_dim = 3, 6, 2, 7, 5
    scores = 2 * batch * heads * sequence * sequence * head_dim
    return Network(
        build=lambda: example_of(
            partial(with_flash_backend, enable_gqa=True),
            (batch, heads, sequence, head_dim),
            (batch, key_heads, sequence, head_dim),
            (batch, key_heads, sequence, head_dim),
        ),
        expected=Expected(forward=2 * scores, backward=4 * scores, recompute=scores),
    )


@FAMILY.network
def grouped_query_math_attention() -> Network:
    """The same model FLOPs when the key heads are repeated for separate products."""
    batch, heads, key_heads, sequence, head_dim = 3, 6, 2, 7, 5
    scores = 2 * batch * heads * sequence * sequence * head_dim
    return Network(
        build=lambda: example_of(
            partial(with_math_backend, enable_gqa=True),
            (batch, heads, sequence, head_dim),
            (batch, key_heads, sequence, head_dim),
            (batch, key_heads, sequence, head_dim),
        ),
        expected=Expected(forward=2 * scores, backward=4 * scores),
    )


@FAMILY.network
def attention_with_a_narrower_value() -> Network:
    """Values of another size than the keys run as separate products."""
    batch, heads, sequence, head_dim, value_dim = 2, 3, 7, 5, 4
    scores = 2 * batch * heads * sequence * sequence * head_dim
    values = 2 * batch * heads * sequence * sequence * value_dim
    shape = (batch, heads, sequence, head_dim)
    return Network(
        build=lambda: example_of(with_math_backend, shape, shape, (batch, heads, sequence, value_dim)),
        expected=Expected(forward=scores + values, backward=2 * (scores + values)),
    )


@FAMILY.network
def attention_with_a_learned_mask() -> Network:
    """No fused kernel on a CPU gives a mask its gradient, so torch falls back to separate products."""
    batch, heads, sequence, head_dim = 2, 3, 7, 5
    scores = 2 * batch * heads * sequence * sequence * head_dim

    class Biased(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(sequence, sequence))

        def forward(self, query: Tensor) -> Tensor:
            return scaled_dot_product_attention(query, query, query, attn_mask=self.bias)

    return Network(
        build=lambda: Example(
            model=Biased(), args=(torch.randn(batch, heads, sequence, head_dim, requires_grad=True),)
        ),
        expected=Expected(forward=2 * scores, backward=4 * scores),
    )


@FAMILY.network
def flex_attention_over_blocks() -> Network:
    """A causal block mask keeps 1 + 2 + 3 + 4 = 10 of 4 x 4 blocks; a CPU runs the forward only."""
    batch, heads, sequence, head_dim, block = 2, 3, 128, 8, 32

    def causal(batch_index: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    class FlexAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask = create_block_mask(causal, None, None, sequence, sequence, device="cpu", BLOCK_SIZE=block)

        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            result = flex_attention(query, key, value, block_mask=self.mask)
            assert isinstance(result, Tensor)
            return result

    kept = (1 + 2 + 3 + 4) * block * block
    shape = (batch, heads, sequence, head_dim)
    return Network(
        build=lambda: Example(
            model=FlexAttention(),
            args=(torch.randn(shape), torch.randn(shape), torch.randn(shape)),
            step=forward_without_grad,
        ),
        expected=Expected(forward=2 * (2 * batch * heads * kept * head_dim)),
    )


@FAMILY.network
def multi_head_attention_with_weights() -> Network:
    """Asked for its weights, it runs separate products: 3 projections in, attention, 1 out."""
    batch, sequence, hidden = 2, 7, 12
    projection = 2 * batch * sequence * hidden * hidden
    # The heads' sizes add up to hidden, so all heads' scores together cost the same as one head of that size.
    scores = 2 * batch * sequence * sequence * hidden

    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(hidden, num_heads=3, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.attention(x, x, x)[0]
            return result

    forward = 4 * projection + 2 * scores
    # The input needs no gradient: the 3 input projections have their weights' alone.
    backward = 3 * projection + 2 * projection + 4 * scores
    return Network(
        build=lambda: Example(model=SelfAttention(), args=(torch.randn(batch, sequence, hidden),)),
        expected=Expected(
            forward=forward,
            backward=backward,
            by_module={"attention": PhaseFlops(forward=forward, backward=backward)},
        ),
    )


def without_weights(example: Example) -> None:
    """A forward that does not ask for attention weights, and its backward."""
    output, _ = example.forward()
    output.sum().backward()


@FAMILY.network
def multi_head_cross_attention() -> Network:
    """Keys and values of their own widths and length, projected apart; fused, so the scores are repeated."""
    batch, queries, keys, hidden, key_width, value_width = 2, 7, 11, 12, 5, 9
    query_projection = 2 * batch * queries * hidden * hidden
    key_projection = 2 * batch * keys * key_width * hidden
    value_projection = 2 * batch * keys * value_width * hidden
    out_projection = 2 * batch * queries * hidden * hidden
    scores = 2 * batch * queries * keys * hidden
    return Network(
        build=lambda: Example(
            model=nn.MultiheadAttention(hidden, 3, batch_first=True, kdim=key_width, vdim=value_width),
            args=(
                torch.randn(batch, queries, hidden),
                torch.randn(batch, keys, key_width),
                torch.randn(batch, keys, value_width),
            ),
            kwargs={"need_weights": False},
            step=without_weights,
        ),
        expected=Expected(
            forward=query_projection + key_projection + value_projection + 2 * scores + out_projection,
            backward=query_projection + key_projection + value_projection + 4 * scores + 2 * out_projection,
            recompute=scores,
        ),
    )


@FAMILY.network
def multi_head_attention_on_its_fast_path() -> Network:
    """In eval mode without gradients the whole layer is one operator."""
    batch, sequence, hidden = 3, 7, 12
    projection = 2 * batch * sequence * hidden * hidden
    scores = 2 * batch * sequence * sequence * hidden

    def build() -> Example:
        x = torch.randn(batch, sequence, hidden)
        return Example(
            model=nn.MultiheadAttention(hidden, 2, batch_first=True).eval(), args=(x, x, x), step=forward_without_grad
        )

    return Network(build=build, expected=Expected(forward=4 * projection + 2 * scores))


@FAMILY.network
def transformer_encoder_layer() -> Network:
    """Self-attention and two linear layers, trained."""
    batch, sequence, hidden, intermediate = 2, 7, 12, 20
    projection = 2 * batch * sequence * hidden * hidden
    scores = 2 * batch * sequence * sequence * hidden
    linear = 2 * batch * sequence * hidden * intermediate
    attention_forward = 4 * projection + 2 * scores
    attention_backward = 8 * projection + 4 * scores
    return Network(
        build=lambda: Example(
            model=nn.TransformerEncoderLayer(hidden, 3, intermediate, dropout=0.0, batch_first=True),
            args=(torch.randn(batch, sequence, hidden, requires_grad=True),),
        ),
        expected=Expected(
            forward=attention_forward + 2 * linear,
            backward=attention_backward + 4 * linear,
            recompute=scores,
            by_module={
                "self_attn": PhaseFlops(forward=attention_forward, backward=attention_backward, recompute=scores),
                "linear1": PhaseFlops(forward=linear, backward=2 * linear),
                "linear2": PhaseFlops(forward=linear, backward=2 * linear),
            },
        ),
    )


@FAMILY.network
def transformer_encoder_layer_on_its_fast_path() -> Network:
    """In eval mode without gradients the whole layer is one operator, and belongs to the layer."""
    batch, sequence, hidden, intermediate = 3, 7, 12, 20
    projection = 2 * batch * sequence * hidden * hidden
    scores = 2 * batch * sequence * sequence * hidden
    linear = 2 * batch * sequence * hidden * intermediate
    layer = 4 * projection + 2 * scores + 2 * linear
    return Network(
        build=lambda: Example(
            model=nn.Sequential(
                nn.TransformerEncoderLayer(hidden, 2, intermediate, batch_first=True), nn.Linear(hidden, 5)
            ).eval(),
            args=(torch.randn(batch, sequence, hidden),),
            step=forward_without_grad,
        ),
        expected=Expected(
            forward=layer + 2 * batch * sequence * hidden * 5,
            by_module={
                "0": PhaseFlops(forward=layer),
                "1": PhaseFlops(forward=2 * batch * sequence * hidden * 5),
            },
        ),
    )


@FAMILY.network
def transformer_encoder_over_nested_samples() -> Network:
    """Padding is dropped before the layers: 7 + 4 + 6 rows are multiplied, the scores over the longest sample's 7."""
    lengths, hidden, intermediate, layers = (7, 4, 6), 12, 20, 2
    batch, longest, rows = len(lengths), max(lengths), sum(lengths)
    layer = (
        4 * (2 * rows * hidden * hidden)
        + 2 * (2 * batch * longest * longest * hidden)
        + 2 * (2 * rows * hidden * intermediate)
    )

    def build() -> Example:
        padding = torch.arange(longest) >= torch.tensor(lengths).unsqueeze(1)
        encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(hidden, 2, intermediate, batch_first=True), num_layers=layers
        )
        return Example(
            model=encoder.eval(),
            args=(torch.randn(batch, longest, hidden),),
            kwargs={"src_key_padding_mask": padding},
            step=forward_without_grad,
        )

    return Network(
        build=build,
        expected=Expected(
            forward=layers * layer,
            by_module={"layers.0": PhaseFlops(forward=layer), "layers.1": PhaseFlops(forward=layer)},
        ),
    )


@FAMILY.network
def transformer_decoder_layer() -> Network:
    """Causal self-attention over the target, cross-attention to a memory that needs no gradient, two linear layers."""
    batch, target, memory, hidden, intermediate = 2, 5, 11, 12, 20
    own_projection = 2 * batch * target * hidden * hidden
    own_scores = 2 * batch * (target * target) * hidden
    own_skipped = 2 * batch * (4 + 3 + 2 + 1) * hidden
    memory_projection = 2 * batch * memory * hidden * hidden
    cross_scores = 2 * batch * target * memory * hidden
    linear = 2 * batch * target * hidden * intermediate

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.TransformerDecoderLayer(hidden, 3, intermediate, dropout=0.0, batch_first=True)
            self.causal: Tensor = nn.Transformer.generate_square_subsequent_mask(target)

        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            result: Tensor = self.layer(x, context, tgt_mask=self.causal, tgt_is_causal=True)
            return result

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
    return Network(
        build=lambda: Example(
            model=Decoder(), args=(torch.randn(batch, target, hidden), torch.randn(batch, memory, hidden))
        ),
        expected=Expected(
            forward=self_attention.forward + cross_attention.forward + 2 * linear,
            backward=self_attention.backward + cross_attention.backward + 4 * linear,
            recompute=own_scores + cross_scores,
            causal_skipped=(2 + 4 + 1) * own_skipped,
            by_module={"layer.self_attn": self_attention, "layer.multihead_attn": cross_attention},
        ),
    )


@FAMILY.network
def linear_over_jagged_rows() -> Network:
    """A jagged batch of 3 + 7 + 5 rows: a projection over the rows, without any padding."""
    lengths, inputs, outputs = (3, 7, 5), 6, 11
    product = 2 * sum(lengths) * inputs * outputs

    class OverRows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.projection = nn.Linear(inputs, outputs)

        def forward(self, samples: Tensor) -> Tensor:
            result: Tensor = self.projection(samples).values()
            return result

    def build() -> Example:
        samples = [torch.randn(length, inputs) for length in lengths]
        return Example(model=OverRows(), args=(torch.nested.nested_tensor(samples, layout=torch.jagged),))

    return Network(
        build=build,
        expected=Expected(
            forward=product,
            backward=product,
            by_module={"projection": PhaseFlops(forward=product, backward=product)},
        ),
    )
