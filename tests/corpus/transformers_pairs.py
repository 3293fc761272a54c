"""Encoders with decoders of the transformers library: small configurations, random weights, counted layer by layer.

Where everything is trained and the input is looked up in a trained embedding, every product needs both gradients: the
backward is twice the forward. Eager attention keeps its scores; fused attention (sdpa) repeats them in the backward.
The image or spectrogram needs no gradient, so the convolution that reads it computes its weight's alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .case import Example, Family
from .transformers_parts import (
    attention,
    convolution,
    decoder_layer,
    encoder_layer,
    linear,
    reads_the_input,
    side,
    tiny,
    tokens,
    trained,
)

FAMILY = Family("transformers_pairs")


@FAMILY.network
def t5() -> Example:
    """An encoder, and a decoder that also attends to it; keys and values of the latter are as long as the former."""
    batch, source, target, hidden, heads, head_dim = 2, 7, 5, 12, 3, 5
    intermediate, encoder_layers, decoder_layers, vocabulary = 20, 2, 3, 37
    inner = heads * head_dim
    encoding = encoder_layer(batch, source, hidden, heads, intermediate, inner)
    own_attention = attention(batch, target, target, hidden, heads, inner)
    cross_attention = attention(batch, target, source, hidden, heads, inner)
    decoding = own_attention + cross_attention + 2 * linear(batch * target, hidden, intermediate)
    head = linear(batch * target, hidden, vocabulary)
    forward = encoder_layers * encoding + decoder_layers * decoding + head
    model = tiny(
        "T5ForConditionalGeneration",
        vocab_size=vocabulary,
        d_model=hidden,
        d_kv=head_dim,
        d_ff=intermediate,
        num_layers=encoder_layers,
        num_decoder_layers=decoder_layers,
        num_heads=heads,
        decoder_start_token_id=0,
    )
    return Example(
        model,
        kwargs={
            "input_ids": tokens(vocabulary, batch, source),
            "decoder_input_ids": tokens(vocabulary, batch, target),
            "use_cache": False,
        },
    ).costs(
        forward,
        2 * forward,
        by_module={
            "encoder": trained(encoder_layers * encoding),
            "encoder.block.1": trained(encoding),
            "decoder.block.0.layer.0": trained(own_attention),
            "decoder.block.0.layer.1": trained(cross_attention),
            "decoder.block.2": trained(decoding),
            "lm_head": trained(head),
        },
    )


@FAMILY.network
def whisper() -> Example:
    """Two convolutions halve 14 frames to 7; the decoder attends to those from every one of its layers."""
    batch, mels, frames, target, hidden, heads, vocabulary = 2, 8, 14, 5, 12, 3, 37
    encoder_layers, decoder_layers, encoder_width, decoder_width = 2, 3, 20, 28
    source = frames // 2
    conv1 = convolution(batch, hidden, frames, mels, 3)
    conv2 = convolution(batch, hidden, source, hidden, 3)
    encoding = encoder_layer(batch, source, hidden, heads, encoder_width)
    decoding = decoder_layer(batch, target, source, hidden, heads, decoder_width)
    head = linear(batch * target, hidden, vocabulary)
    behind_the_input = conv2 + encoder_layers * encoding + decoder_layers * decoding + head
    model = tiny(
        "WhisperForConditionalGeneration",
        vocab_size=vocabulary,
        num_mel_bins=mels,
        d_model=hidden,
        **side("encoder", encoder_layers, heads, encoder_width),
        **side("decoder", decoder_layers, heads, decoder_width),
        max_source_positions=source,
        max_target_positions=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return Example(
        model,
        kwargs={
            "input_features": torch.randn(batch, mels, frames),
            "decoder_input_ids": tokens(vocabulary, batch, target),
            "use_cache": False,
        },
    ).costs(
        conv1 + behind_the_input,
        conv1 + 2 * behind_the_input,
        by_module={
            "model.encoder.conv1": reads_the_input(conv1),
            "model.encoder.conv2": trained(conv2),
            "model.encoder.layers.1": trained(encoding),
            "model.decoder.layers.0": trained(decoding),
            "model.decoder.layers.2": trained(decoding),
            "proj_out": trained(head),
        },
    )


@FAMILY.network
def detr() -> Example:
    """A frozen convolutional body sees 32 x 48 pixels; a transformer turns 4 x 6 features into 5 objects.

    The decoder starts from zeros with learned positions: in its first layer the values' input needs no gradient.
    """
    batch, hidden, heads, queries, classes = 2, 12, 3, 5, 7
    encoder_width, decoder_width, encoder_layers = 20, 28, 2
    features = 4 * 6

    def stage(filters: int, positions: int, channels: int) -> int:
        """Two convolutions, and a shortcut around them."""
        first, shortcut = (convolution(batch, filters, positions, channels, taps) for taps in (3 * 3, 1))
        return first + convolution(batch, filters, positions, filters, 3 * 3) + shortcut

    body = convolution(batch, 4, 16 * 24, 3, 7 * 7) + stage(6, 8 * 12, 4) + stage(10, features, 6)
    projection = convolution(batch, hidden, features, 10, 1)
    encoding = encoder_layer(batch, features, hidden, heads, encoder_width)
    decoding = decoder_layer(batch, queries, features, hidden, heads, decoder_width)
    values_of_zeros = linear(batch * queries, hidden, hidden)
    rows = batch * queries
    class_head = linear(rows, hidden, classes + 1)
    box_head = 2 * linear(rows, hidden, hidden) + linear(rows, hidden, 4)
    trained_parts = encoder_layers * encoding + decoding + class_head + box_head
    model = tiny(
        "DetrForObjectDetection",
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
        backbone_config={
            "model_type": "resnet",
            "embedding_size": 4,
            "hidden_sizes": [6, 10],
            "depths": [1, 1],
            "layer_type": "basic",
            "out_features": ["stage2"],
        },
        num_queries=queries,
        num_labels=classes,
        d_model=hidden,
        **side("encoder", encoder_layers, heads, encoder_width),
        **side("decoder", 1, heads, decoder_width),
    )
    model.model.freeze_backbone()  # type: ignore[operator, union-attr]
    return Example(model, kwargs={"pixel_values": torch.randn(batch, 3, 32, 48)}, step=boxes_and_classes).costs(
        body + projection + trained_parts,
        projection + 2 * trained_parts - values_of_zeros,
        by_module={
            "model.backbone": (body,),
            "model.input_projection": reads_the_input(projection),
            "model.encoder.layers.0": trained(encoding),
            "model.encoder.layers.1": trained(encoding),
            "model.decoder": (decoding, 2 * decoding - values_of_zeros),
            "class_labels_classifier": trained(class_head),
            "bbox_predictor": trained(box_head),
        },
    )


def boxes_and_classes(example: Example) -> None:
    """The backward of everything a detection loss reads."""
    output = example.forward()
    loss: Tensor = output.logits.sum() + output.pred_boxes.sum()
    loss.backward()  # type: ignore[no-untyped-call]
