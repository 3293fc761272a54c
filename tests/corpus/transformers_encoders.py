"""Encoders of the transformers library: small configurations, random weights, counted layer by layer.

Where everything is trained and the input is looked up in a trained embedding, every product needs both gradients: the
backward is twice the forward. Eager attention keeps its scores; fused attention (sdpa) repeats them in the backward.
The image or spectrogram needs no gradient, so the convolution that reads it computes its weight's alone.
"""

from __future__ import annotations

from typing import Any

import torch

from .case import Example, Family, forward_without_grad
from .transformers_parts import (
    attention_scores,
    convolution,
    encoder_layer,
    linear,
    reads_the_input,
    stack,
    tiny,
    tokens,
    trained,
)

FAMILY = Family("transformers_encoders")


def bert_example(model: str, attention: str, *, batch: int, sequence: int, heads: int, **more: Any) -> Example:
    """Two layers of 12, 20 between them, and 37 words."""
    made = tiny(
        model, vocab_size=37, max_position_embeddings=16, **stack(12, 2, heads, 20), attn_implementation=attention
    )
    return Example(made, kwargs={"input_ids": tokens(37, batch, sequence)}, **more)


def bert(attention: str) -> Example:
    """Encoder layers, and a head that transforms every position before it scores the vocabulary."""
    batch, sequence, hidden, heads, intermediate, layers, vocabulary = 2, 7, 12, 3, 20, 2, 37
    rows = batch * sequence
    scores = attention_scores(batch, heads, sequence, sequence, hidden // heads)
    qkv = linear(rows, hidden, hidden)
    self_attention = 3 * qkv + 2 * scores
    layer = self_attention + linear(rows, hidden, hidden) + 2 * linear(rows, hidden, intermediate)
    head = linear(rows, hidden, hidden) + linear(rows, hidden, vocabulary)
    repeated = scores if attention == "sdpa" else 0
    return bert_example("BertForMaskedLM", attention, batch=batch, sequence=sequence, heads=heads).costs(
        layers * layer + head,
        2 * (layers * layer + head),
        layers * repeated,
        by_module={
            "bert.encoder.layer.0": trained(layer, repeated),
            "bert.encoder.layer.1": trained(layer, repeated),
            "bert.encoder.layer.1.attention.self": trained(self_attention, repeated),
            "bert.encoder.layer.1.attention.self.query": trained(qkv),
            "bert.encoder.layer.1.output": trained(linear(rows, intermediate, hidden)),
            "cls": trained(head),
        },
    )


# Separate products.
FAMILY.put("bert_with_eager_attention", lambda: bert("eager"))
# One kernel, bidirectional: nothing is skipped.
FAMILY.put("bert_with_fused_attention", lambda: bert("sdpa"))


@FAMILY.network
def bert_without_grad() -> Example:
    """The encoder and its pooler, which reads the first position alone."""
    batch, sequence, hidden, heads, intermediate, layers = 3, 5, 12, 2, 20, 2
    layer = encoder_layer(batch, sequence, hidden, heads, intermediate)
    pooler = linear(batch, hidden, hidden)
    return bert_example(
        "BertModel", "sdpa", batch=batch, sequence=sequence, heads=heads, step=forward_without_grad
    ).costs(layers * layer + pooler, by_module={"encoder.layer.1": (layer,), "pooler": (pooler,)})


@FAMILY.network
def vit() -> Example:
    """8 x 12 pixels in patches of 4 are 2 x 3 patches; with the class token 7 positions, of which one is classified."""
    batch, channels, hidden, heads, intermediate, layers, classes = 3, 2, 12, 2, 20, 2, 5
    patches = (8 // 4) * (12 // 4)
    patching = convolution(batch, hidden, patches, channels, 4 * 4)
    layer = encoder_layer(batch, patches + 1, hidden, heads, intermediate)
    classifier = linear(batch, hidden, classes)
    model = tiny(
        "ViTForImageClassification",
        image_size=(8, 12),
        patch_size=4,
        num_channels=channels,
        num_labels=classes,
        **stack(hidden, layers, heads, intermediate),
    )
    return Example(model, kwargs={"pixel_values": torch.randn(batch, channels, 8, 12)}).costs(
        patching + layers * layer + classifier,
        patching + 2 * (layers * layer + classifier),
        by_module={"vit.embeddings": reads_the_input(patching), "classifier": trained(classifier)},
    )


@FAMILY.network
def clip() -> Example:
    """Five texts against three images: each tower ends in one row a sample, projected, times all others."""
    texts, sequence, text_hidden, text_heads, text_width = 5, 7, 12, 3, 20
    images, channels, image_hidden, image_heads, image_width = 3, 2, 16, 2, 28
    layers, vocabulary, projected = 2, 37, 11
    patches = (8 // 4) * (8 // 4)
    patching = convolution(images, image_hidden, patches, channels, 4 * 4)
    text_layer = encoder_layer(texts, sequence, text_hidden, text_heads, text_width)
    image_layer = encoder_layer(images, patches + 1, image_hidden, image_heads, image_width)
    text_projection = linear(texts, text_hidden, projected)
    image_projection = linear(images, image_hidden, projected)
    similarity = 2 * texts * projected * images
    behind_the_input = layers * text_layer + layers * image_layer + text_projection + image_projection + similarity
    model = tiny(
        "CLIPModel",
        text_config={
            **stack(text_hidden, layers, text_heads, text_width),
            "vocab_size": vocabulary,
            "max_position_embeddings": 16,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        },
        vision_config={
            **stack(image_hidden, layers, image_heads, image_width),
            "num_channels": channels,
            "image_size": 8,
            "patch_size": 4,
        },
        projection_dim=projected,
    )
    return Example(
        model,
        kwargs={"input_ids": tokens(vocabulary, texts, sequence), "pixel_values": torch.randn(images, channels, 8, 8)},
    ).costs(
        patching + behind_the_input,
        patching + 2 * behind_the_input,
        by_module={
            "text_model": trained(layers * text_layer),
            "vision_model.embeddings": reads_the_input(patching),
            "vision_model.encoder": trained(layers * image_layer),
            "vision_model.encoder.layers.1": trained(image_layer),
            "visual_projection": trained(image_projection),
            "text_projection": trained(text_projection),
        },
    )


@FAMILY.network
def convnext() -> Example:
    """16 x 24 pixels become 4 x 6 patches, then 2 x 3; a block is a 7 x 7 depthwise convolution, two linear layers."""
    batch, channels, first, second, classes = 2, 3, 4, 6, 5

    def block(width: int, positions: int) -> int:
        return (
            convolution(batch, width, positions, 1, 7 * 7)
            + linear(batch * positions, width, 4 * width)
            + linear(batch * positions, 4 * width, width)
        )

    patching = convolution(batch, first, 4 * 6, channels, 4 * 4)
    downsampling = convolution(batch, second, 2 * 3, first, 2 * 2)
    stages = (block(first, 4 * 6), downsampling + 2 * block(second, 2 * 3))
    classifier = linear(batch, second, classes)
    model = tiny(
        "ConvNextForImageClassification",
        num_channels=channels,
        patch_size=4,
        num_stages=2,
        hidden_sizes=[first, second],
        depths=[1, 2],
        num_labels=classes,
    )
    return Example(model, kwargs={"pixel_values": torch.randn(batch, channels, 16, 24)}).costs(
        patching + sum(stages) + classifier,
        patching + 2 * (sum(stages) + classifier),
        by_module={
            "convnext.embeddings": reads_the_input(patching),
            "convnext.encoder.stages.0": trained(stages[0]),
            "convnext.encoder.stages.1": trained(stages[1]),
            "convnext.encoder.stages.1.layers.0": trained(block(second, 2 * 3)),
            "classifier": trained(classifier),
        },
    )
