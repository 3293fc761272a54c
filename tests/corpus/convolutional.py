"""Convolutions: every output element is a dot product over one group's input channels and the kernel.

forward = 2 * batch * out_channels * output positions * (in_channels / groups) * kernel positions.
Each gradient, the weight's and the input's, costs the same again, groups included. A transposed convolution is the
input gradient of an ordinary one, so its sum runs over *input* positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .case import Example, Family, Parts, forward_without_grad

FAMILY = Family("convolutional")


def convolution(
    name: str, layer: Callable[[], nn.Module], shape: tuple[int, ...], product: int, *, gradients: int = 1
) -> None:
    """Adds one layer over an input of this shape; its weight alone has a gradient, or both have."""
    FAMILY.put(
        name,
        lambda: Example(layer(), torch.randn(shape, requires_grad=gradients == 2)).costs(
            product, gradients * product, by_module={"": (product, gradients * product)}
        ),
    )


# Stride 1, no padding: 11 positions and a kernel of 4 leave 8.
convolution("conv1d", lambda: nn.Conv1d(5, 7, 4), (3, 5, 11), 2 * 3 * 7 * (11 - 4 + 1) * 5 * 4)
# (9 + 2*1 - 3) // 2 + 1 = 5 rows and (12 + 2*2 - 5) // 3 + 1 = 4 columns come out.
convolution(
    "strided_and_padded_conv2d",
    lambda: nn.Conv2d(3, 7, (3, 5), stride=(2, 3), padding=(1, 2)),
    (2, 3, 9, 12),
    2 * 2 * 7 * (5 * 4) * 3 * (3 * 5),
    gradients=2,
)
# A kernel of 3 with holes of 2 spans 5: 9 - 4 = 5 rows and 11 - 4 = 7 columns; the holes cost nothing.
convolution(
    "dilated_conv2d",
    lambda: nn.Conv2d(3, 5, 3, dilation=2, bias=False),
    (2, 3, 9, 11),
    2 * 2 * 5 * (5 * 7) * 3 * (3 * 3),
)
# Depth, height and width: 4 x 5 x 7 shrink to 3 x 3 x 6.
convolution(
    "conv3d",
    lambda: nn.Conv3d(3, 5, (2, 3, 2)),
    (2, 3, 4, 5, 7),
    2 * 2 * 5 * (3 * 3 * 6) * 3 * (2 * 3 * 2),
    gradients=2,
)
# Each filter sees 6 / 3 = 2 channels, in the forward and in both gradients.
convolution(
    "grouped_conv2d",
    lambda: nn.Conv2d(6, 9, 3, padding=1, groups=3),
    (2, 6, 5, 7),
    2 * 2 * 9 * (5 * 7) * 2 * (3 * 3),
    gradients=2,
)
# One channel for each filter.
convolution(
    "depthwise_conv2d",
    lambda: nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
    (2, 8, 5, 7),
    2 * 2 * 8 * (5 * 7) * 1 * (3 * 3),
)
# Every one of the 6 input positions is spread over the kernel; how long the output gets does not matter.
convolution(
    "transposed_conv1d",
    lambda: nn.ConvTranspose1d(3, 5, 4, stride=3, output_padding=1),
    (2, 3, 6),
    2 * 2 * 3 * 6 * 5 * 4,
)
# Each input channel reaches 6 / 2 = 3 filters.
convolution(
    "grouped_transposed_conv2d",
    lambda: nn.ConvTranspose2d(4, 6, (3, 2), stride=2, padding=1, groups=2),
    (2, 4, 5, 3),
    2 * 2 * 4 * (5 * 3) * 3 * (3 * 2),
    gradients=2,
)
convolution(
    "transposed_conv3d",
    lambda: nn.ConvTranspose3d(3, 4, (2, 2, 3), bias=False),
    (2, 3, 2, 3, 5),
    2 * 2 * 3 * (2 * 3 * 5) * 4 * (2 * 2 * 3),
    gradients=2,
)
# An image alone is a batch of one: 6 - 2 = 4 rows, 7 - 2 = 5 columns.
convolution("unbatched_conv2d", lambda: nn.Conv2d(3, 5, 3), (3, 6, 7), 2 * 1 * 5 * (4 * 5) * 3 * (3 * 3))
# The padding is copied in beforehand: 10 + 2*2 - 4 = 10 positions come out.
convolution(
    "circularly_padded_conv1d",
    lambda: nn.Conv1d(3, 5, 5, padding=2, padding_mode="circular"),
    (2, 3, 10),
    2 * 2 * 5 * 10 * 3 * 5,
)
# Channels last, no graph: the same products.
FAMILY.put(
    "conv2d_without_grad",
    lambda: Example(
        nn.Conv2d(3, 5, 3).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        torch.randn(2, 3, 6, 7).contiguous(memory_format=torch.channels_last),
        step=forward_without_grad,
    ).costs(2 * 2 * 5 * (4 * 5) * 3 * (3 * 3)),
)


@FAMILY.network
def depthwise_separable_block() -> Example:
    """A depthwise convolution with two filters a channel, then a pointwise one."""
    batch, channels, multiplier, filters = 2, 4, 2, 7
    depthwise = 2 * batch * (channels * multiplier) * (5 * 7) * 1 * (3 * 3)
    pointwise = 2 * batch * filters * (5 * 7) * (channels * multiplier) * 1
    model = nn.Sequential(
        nn.Conv2d(channels, channels * multiplier, 3, padding=1, groups=channels),
        nn.BatchNorm2d(channels * multiplier),
        nn.ReLU(),
        nn.Conv2d(channels * multiplier, filters, 1),
    )
    return Example(model, torch.randn(batch, channels, 5, 7)).costs(
        depthwise + pointwise,
        depthwise + 2 * pointwise,
        by_module={"0": (depthwise, depthwise), "3": (pointwise, 2 * pointwise)},
    )


@FAMILY.network
def functional_conv2d_with_a_frozen_kernel() -> Example:
    """A fixed blur before a learned convolution: no gradient of the kernel, and none of an image that needs none."""
    batch, channels, filters = 2, 3, 5

    def forward(self: Any, image: Tensor) -> Tensor:
        blurred = nn.functional.conv2d(image, self.kernel, groups=channels)
        return self.conv(blurred)

    blur = 2 * batch * channels * (5 * 6) * 1 * (3 * 3)
    learned = 2 * batch * filters * (4 * 5) * channels * (2 * 2)
    model = Parts(forward, kernel=nn.Buffer(torch.ones(channels, 1, 3, 3) / 9), conv=nn.Conv2d(channels, filters, 2))
    return Example(model, torch.randn(batch, channels, 7, 8)).costs(
        blur + learned, learned, by_module={"conv": (learned, learned)}
    )


@FAMILY.network
def unfolded_convolution() -> Example:
    """Patches copied out and multiplied with the kernel as a matrix: 4 x 5 patches of 2 x 2 pixels."""
    batch, channels, filters = 2, 3, 7
    product = 2 * batch * filters * (4 * 5) * channels * (2 * 2)

    def forward(self: Any, image: Tensor) -> Tensor:
        return self.kernel @ nn.functional.unfold(image, 2)

    model = Parts(forward, kernel=nn.Parameter(torch.randn(filters, channels * 2 * 2)))
    return Example(model, torch.randn(batch, channels, 5, 6)).costs(product, product)


class ResidualBlock(nn.Module):
    """Two 3 x 3 convolutions and a 1 x 1 shortcut, all downsampling by two."""

    def __init__(self, channels: int, filters: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, filters, 3, stride=2, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(filters)
        self.conv2 = nn.Conv2d(filters, filters, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(filters)
        self.shortcut = nn.Conv2d(channels, filters, 1, stride=2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(hidden)) + self.shortcut(x))


@FAMILY.network
def residual_network() -> Example:
    """A stem, one residual block that halves 8 x 10 to 4 x 5, pooling, a classifier."""
    batch, channels, width, filters, classes = 3, 2, 4, 6, 7
    stem = 2 * batch * width * (8 * 10) * channels * (3 * 3)
    conv1 = 2 * batch * filters * (4 * 5) * width * (3 * 3)
    conv2 = 2 * batch * filters * (4 * 5) * filters * (3 * 3)
    shortcut = 2 * batch * filters * (4 * 5) * width * 1
    classifier = 2 * batch * filters * classes
    block = conv1 + conv2 + shortcut
    model = nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        ResidualBlock(width, filters),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(filters, classes),
    )
    return Example(model, torch.randn(batch, channels, 8, 10)).costs(
        stem + block + classifier,
        stem + 2 * (block + classifier),
        by_module={
            "0": (stem, stem),
            "1": (block, 2 * block),
            "1.conv1": (conv1, 2 * conv1),
            "1.conv2": (conv2, 2 * conv2),
            "1.shortcut": (shortcut, 2 * shortcut),
            "4": (classifier, 2 * classifier),
        },
    )


@FAMILY.network
def encoder_decoder_with_skip() -> Example:
    """Down by a strided convolution, up by a transposed one, joined with the input's own features."""
    batch, channels, width, deep = 2, 3, 4, 5

    def forward(self: Any, image: Tensor) -> Tensor:
        skipped = torch.relu(self.enter(image))
        raised = self.up(torch.relu(self.down(skipped)))
        return self.leave(torch.cat([skipped, raised], dim=1))

    enter = 2 * batch * width * (6 * 8) * channels * (3 * 3)
    down = 2 * batch * deep * (3 * 4) * width * (2 * 2)
    up = 2 * batch * deep * (3 * 4) * width * (2 * 2)
    leave = 2 * batch * channels * (6 * 8) * (2 * width) * 1
    model = Parts(
        forward,
        enter=nn.Conv2d(channels, width, 3, padding=1),
        down=nn.Conv2d(width, deep, 2, stride=2),
        up=nn.ConvTranspose2d(deep, width, 2, stride=2),
        leave=nn.Conv2d(2 * width, channels, 1),
    )
    return Example(model, torch.randn(batch, channels, 6, 8)).costs(
        enter + down + up + leave,
        enter + 2 * (down + up + leave),
        by_module={"enter": (enter, enter), "down": (down, 2 * down), "up": (up, 2 * up), "leave": (leave, 2 * leave)},
    )
