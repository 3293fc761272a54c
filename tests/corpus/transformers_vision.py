"""Vision, audio and two-tower models of the transformers library: small configurations, random weights, counted by layers.

The image or spectrogram needs no gradient, so the convolution that reads it computes its weight's alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_flops.records import PhaseFlops

from .case import Example, Expected, Family, Network
from .transformers_text import attention_scores, linear, tokens, trained

FAMILY = Family("transformers_vision")


def convolution(batch: int, filters: int, positions: int, channels: int, taps: int) -> int:
    """A convolution: for every output position and filter a dot product over channels and taps."""
    return 2 * batch * filters * positions * channels * taps


def reads_the_input(forward: int) -> PhaseFlops:
    """A layer whose input needs no gradient: its weight's is all that is computed."""
    return PhaseFlops(forward=forward, backward=forward)


def encoder_layer(batch: int, sequence: int, hidden: int, heads: int, intermediate: int) -> int:
    """Self-attention with four square projections, and a two-layer perceptron."""
    rows = batch * sequence
    attention = 4 * linear(rows, hidden, hidden) + 2 * attention_scores(
        batch, heads, sequence, sequence, hidden // heads
    )
    return attention + 2 * linear(rows, hidden, intermediate)


def decoder_layer(batch: int, target: int, source: int, hidden: int, heads: int, intermediate: int) -> int:
    """Self-attention, attention to a source, and a two-layer perceptron."""
    target_rows, source_rows = batch * target, batch * source
    cross = (
        2 * linear(target_rows, hidden, hidden)
        + 2 * linear(source_rows, hidden, hidden)
        + 2 * attention_scores(batch, heads, target, source, hidden // heads)
    )
    return encoder_layer(batch, target, hidden, heads, intermediate) + cross


@FAMILY.network
def vit() -> Network:
    """8 x 12 pixels in patches of 4 are 2 x 3 patches; with the class token 7 positions, of which one is classified."""
    batch, channels, hidden, heads, intermediate, layers, classes = 3, 2, 12, 2, 20, 2, 5
    patches = (8 // 4) * (12 // 4)
    patching = convolution(batch, hidden, patches, channels, 4 * 4)
    layer = encoder_layer(batch, patches + 1, hidden, heads, intermediate)
    classifier = linear(batch, hidden, classes)

    def build() -> Example:
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=intermediate,
            image_size=(8, 12),
            patch_size=4,
            num_channels=channels,
            num_labels=classes,
            attn_implementation="eager",
        )
        return Example(
            model=ViTForImageClassification(config).eval(), kwargs={"pixel_values": torch.randn(batch, channels, 8, 12)}
        )

    return Network(
        build=build,
        expected=Expected(
            forward=patching + layers * layer + classifier,
            backward=patching + 2 * (layers * layer + classifier),
            by_module={
                "vit.embeddings": reads_the_input(patching),
                "classifier": trained(classifier),
            },
        ),
    )


@FAMILY.network
def whisper() -> Network:
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

    def build() -> Example:
        from transformers import WhisperConfig, WhisperForConditionalGeneration

        config = WhisperConfig(
            vocab_size=vocabulary,
            num_mel_bins=mels,
            d_model=hidden,
            encoder_layers=encoder_layers,
            encoder_attention_heads=heads,
            encoder_ffn_dim=encoder_width,
            decoder_layers=decoder_layers,
            decoder_attention_heads=heads,
            decoder_ffn_dim=decoder_width,
            max_source_positions=source,
            max_target_positions=16,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
            attn_implementation="eager",
        )
        return Example(
            model=WhisperForConditionalGeneration(config).eval(),
            kwargs={
                "input_features": torch.randn(batch, mels, frames),
                "decoder_input_ids": tokens(vocabulary, batch, target),
                "use_cache": False,
            },
        )

    return Network(
        build=build,
        expected=Expected(
            forward=conv1 + behind_the_input,
            backward=conv1 + 2 * behind_the_input,
            by_module={
                "model.encoder.conv1": reads_the_input(conv1),
                "model.encoder.conv2": trained(conv2),
                "model.encoder.layers.1": trained(encoding),
                "model.decoder.layers.0": trained(decoding),
                "model.decoder.layers.2": trained(decoding),
                "proj_out": trained(head),
            },
        ),
    )


@FAMILY.network
def clip() -> Network:
    """Five texts against three images: each tower ends in one row a sample, projected and multiplied with all others."""
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
    behind_the_input = (
        layers * text_layer + layers * image_layer + text_projection + image_projection + similarity
    )

    def build() -> Example:
        from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig

        config = CLIPConfig(
            text_config=CLIPTextConfig(
                vocab_size=vocabulary,
                hidden_size=text_hidden,
                intermediate_size=text_width,
                num_hidden_layers=layers,
                num_attention_heads=text_heads,
                max_position_embeddings=16,
                bos_token_id=0,
                eos_token_id=1,
                pad_token_id=2,
            ).to_dict(),
            vision_config=CLIPVisionConfig(
                hidden_size=image_hidden,
                intermediate_size=image_width,
                num_hidden_layers=layers,
                num_attention_heads=image_heads,
                num_channels=channels,
                image_size=8,
                patch_size=4,
            ).to_dict(),
            projection_dim=projected,
            attn_implementation="eager",
        )
        return Example(
            model=CLIPModel(config).eval(),
            kwargs={
                "input_ids": tokens(vocabulary, texts, sequence),
                "pixel_values": torch.randn(images, channels, 8, 8),
            },
        )

    return Network(
        build=build,
        expected=Expected(
            forward=patching + behind_the_input,
            backward=patching + 2 * behind_the_input,
            by_module={
                "text_model": trained(layers * text_layer),
                "vision_model.embeddings": reads_the_input(patching),
                "vision_model.encoder": trained(layers * image_layer),
                "vision_model.encoder.layers.1": trained(image_layer),
                "visual_projection": trained(image_projection),
                "text_projection": trained(text_projection),
            },
        ),
    )


@FAMILY.network
def convnext() -> Network:
    """16 x 24 pixels become 4 x 6 patches, then 2 x 3; each block is a 7 x 7 depthwise convolution and two linear layers."""
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

    def build() -> Example:
        from transformers import ConvNextConfig, ConvNextForImageClassification

        config = ConvNextConfig(
            num_channels=channels,
            patch_size=4,
            num_stages=2,
            hidden_sizes=[first, second],
            depths=[1, 2],
            num_labels=classes,
        )
        return Example(
            model=ConvNextForImageClassification(config).eval(),
            kwargs={"pixel_values": torch.randn(batch, channels, 16, 24)},
        )

    return Network(
        build=build,
        expected=Expected(
            forward=patching + sum(stages) + classifier,
            backward=patching + 2 * (sum(stages) + classifier),
            by_module={
                "convnext.embeddings": reads_the_input(patching),
                "convnext.encoder.stages.0": trained(stages[0]),
                "convnext.encoder.stages.1": trained(stages[1]),
                "convnext.encoder.stages.1.layers.0": trained(block(second, 2 * 3)),
                "classifier": trained(classifier),
            },
        ),
    )


@FAMILY.network
def detr() -> Network:
    """A frozen convolutional body sees 32 x 48 pixels; a transformer turns 4 x 6 features into 5 objects.

    The decoder starts from zeros with learned positions: in its first layer the values' input needs no gradient.
    """
    batch, hidden, heads, queries, classes = 2, 12, 3, 5, 7
    encoder_width, decoder_width, encoder_layers = 20, 28, 2
    features = 4 * 6
    stem = convolution(batch, 4, 16 * 24, 3, 7 * 7)
    stage0 = (
        convolution(batch, 6, 8 * 12, 4, 3 * 3)
        + convolution(batch, 6, 8 * 12, 6, 3 * 3)
        + convolution(batch, 6, 8 * 12, 4, 1)
    )
    stage1 = (
        convolution(batch, 10, features, 6, 3 * 3)
        + convolution(batch, 10, features, 10, 3 * 3)
        + convolution(batch, 10, features, 6, 1)
    )
    body = stem + stage0 + stage1
    projection = convolution(batch, hidden, features, 10, 1)
    encoding = encoder_layer(batch, features, hidden, heads, encoder_width)
    decoding = decoder_layer(batch, queries, features, hidden, heads, decoder_width)
    values_of_zeros = linear(batch * queries, hidden, hidden)
    rows = batch * queries
    class_head = linear(rows, hidden, classes + 1)
    box_head = 2 * linear(rows, hidden, hidden) + linear(rows, hidden, 4)
    trained_parts = encoder_layers * encoding + decoding + class_head + box_head

    def build() -> Example:
        from transformers import DetrConfig, DetrForObjectDetection, ResNetConfig

        config = DetrConfig(
            use_timm_backbone=False,
            use_pretrained_backbone=False,
            backbone=None,
            backbone_config=ResNetConfig(
                embedding_size=4, hidden_sizes=[6, 10], depths=[1, 1], layer_type="basic", out_features=["stage2"]
            ),
            d_model=hidden,
            num_queries=queries,
            num_labels=classes,
            encoder_layers=encoder_layers,
            encoder_attention_heads=heads,
            encoder_ffn_dim=encoder_width,
            decoder_layers=1,
            decoder_attention_heads=heads,
            decoder_ffn_dim=decoder_width,
            attn_implementation="eager",
        )
        model = DetrForObjectDetection(config).eval()
        model.model.freeze_backbone()
        return Example(model=model, kwargs={"pixel_values": torch.randn(batch, 3, 32, 48)}, step=boxes_and_classes)

    return Network(
        build=build,
        expected=Expected(
            forward=body + projection + trained_parts,
            without_backward=body,
            backward=projection + 2 * trained_parts - values_of_zeros,
            by_module={
                "model.backbone": PhaseFlops(forward=body),
                "model.input_projection": reads_the_input(projection),
                "model.encoder.layers.0": trained(encoding),
                "model.encoder.layers.1": trained(encoding),
                "model.decoder": PhaseFlops(forward=decoding, backward=2 * decoding - values_of_zeros),
                "class_labels_classifier": trained(class_head),
                "bbox_predictor": trained(box_head),
            },
        ),
    )


def boxes_and_classes(example: Example) -> None:
    """The backward of everything a detection loss reads."""
    output = example.forward()
    loss: Tensor = output.logits.sum() + output.pred_boxes.sum()
    loss.backward()  # type: ignore[no-untyped-call]
