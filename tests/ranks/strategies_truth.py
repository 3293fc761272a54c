"""What the nets of ``tests.ranks.strategies`` cost, by hand from the sizes of their layers; needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

BATCH = 6
"""Samples of one rank's micro-batch."""

PEAK_FLOPS_PER_SEC = 1e9
"""Of one device, taken for granted."""

IN, HIDDEN, WIDTH, OUT = 8, 16, 8, 4
TOKENS, HEADS = 10, 2
"""Of the attention's sequences; a head is four wide."""


def product(samples: int, inputs: int, outputs: int) -> int:
    """FLOPs of a linear layer's forward; a multiply-add is two."""
    return 2 * samples * inputs * outputs


@dataclass(frozen=True, slots=True)
class Cost:
    """FLOPs of one rank in one global step."""

    forward: int
    backward: int


def net_cost(samples: int = BATCH, *, hidden: int = HIDDEN, head: int = OUT) -> Cost:
    """Of ``Net`` where this rank has so many rows of ``first``, as many columns of ``second``, and rows of ``head``.

    Each layer costs its forward once more for its weights, and again for its inputs, which those of ``first`` do not
    need.
    """
    first, second = product(samples, IN, hidden), product(samples, hidden, WIDTH)
    last = product(samples, WIDTH, head)
    return Cost(first + second + last, first + 2 * second + 2 * last)


def net_params(*, hidden: int = HIDDEN) -> int:
    """Parameters of ``Net``: three layers with biases, and a norm with two vectors."""
    return (IN * hidden + hidden) + (hidden * WIDTH + WIDTH) + 2 * WIDTH + (WIDTH * OUT + OUT)


def attention_cost(samples: int, *, tokens: int, of: int) -> Cost:
    """Of ``Attention`` on a rank that has *tokens* of the *of* tokens of each sequence.

    Queries of its own meet the keys and values of all; both products of the attention cost as much again for each of
    their two inputs.
    """
    projection = product(samples * tokens, WIDTH, 3 * WIDTH)
    scores = 2 * samples * tokens * of * WIDTH
    return Cost(projection + 2 * scores, projection + 2 * 2 * scores)
