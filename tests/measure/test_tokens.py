"""Which tokens are tokens: every figure is counted by hand."""

from __future__ import annotations

from collections import UserDict
from typing import Any, NamedTuple

import pytest
import torch

from lightning_flops.measure.batches import OnDeviceError, TokenReader, tokens_in
from lightning_flops.records import UNKNOWN_TOKENS, BatchTokens

IDS = torch.arange(3, 15).reshape(3, 4)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1]])


LONG, FIVE = IDS.reshape(1, 12), torch.ones(1, 5, dtype=torch.long)
LABELS = torch.tensor([[-100, -100, 5, 6], [-100, 4, -100, -100], [1, 2, 3, 4]])
PLACES = torch.tensor([[0, 1, 2, 0, 1, 0, 0, 1, 2, 3, 4, 5]])
BY_SHAPE = BatchTokens(12, None, None)


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        # Lengths 4, 2 and 3, padded on either side: 16 + 4 + 9 pairs.
        ({"input_ids": IDS, "attention_mask": MASK}, BatchTokens(12, 9, 29)),
        ({"input_ids": IDS, "attention_mask": MASK.bool()}, BatchTokens(12, 9, 29)),
        ({"attention_mask": MASK}, BatchTokens(12, 9, 29)),
        (UserDict(input_ids=IDS, attention_mask=MASK), BatchTokens(12, 9, 29)),
        # Labels tell what is trained on and no padding; a prompt has none.
        ({"input_ids": IDS, "attention_mask": MASK, "labels": LABELS}, BatchTokens(12, 9, 29)),
        ({"input_ids": IDS, "labels": LABELS}, BY_SHAPE),
        ({"input_ids": IDS, "labels": IDS}, BatchTokens(12, 12, None)),
        # Borders of three sequences of 2, 5 and 3 tokens, and 2 tokens of padding behind them: 4 + 25 + 9 pairs.
        *(
            ({"input_ids": LONG, name: torch.tensor([0, 2, 7, 10], dtype=torch.int32)}, BatchTokens(12, 10, 38))
            for name in ("cu_seqlens", "cu_seq_lens_q")
        ),
        # A sequence without tokens, and one of a single token between others: 4 + 0 + 1 + 16 + 25 pairs.
        ({"input_ids": LONG, "cu_seqlens": torch.tensor([0, 2, 2, 3, 7, 12])}, BatchTokens(12, 12, 46)),
        # Positions that begin anew after 3, 2, 1 and 6, from whatever number; those of rows are of each row alone.
        ({"input_ids": LONG, "position_ids": PLACES}, BatchTokens(12, 12, 9 + 4 + 1 + 36)),
        ({"input_ids": LONG, "position_ids": PLACES + 2}, BatchTokens(12, 12, 9 + 4 + 1 + 36)),
        (
            {"input_ids": IDS, "position_ids": torch.tensor([[0, 1, 0, 1], [0, 1, 2, 3], [0, 1, 2, 3]])},
            BatchTokens(12, 12, 4 + 4 + 16 + 16),
        ),
        # Positions that tell no sequences: of one sequence a row, of a row that goes on, of padding at the place 1.
        *(
            ({"input_ids": IDS, "position_ids": torch.tensor(places)}, BY_SHAPE)
            for places in (
                [[0, 1, 2, 3]] * 3,
                [[0, 1, 0, 1], [2, 3, 4, 5], [0, 1, 2, 3]],
                [[0, 1, 0, 1], [0, 1, 1, 1], [0, 1, 2, 3]],
            )
        ),
        # A sequence of one token where a row begins or ends may be padding, which has the place 0, too.
        *(
            (batch, BatchTokens(5, None, None))
            for places in ([0, 1, 2, 0, 0], [0, 1, 2, 3, 0], [0, 0, 0, 1, 2])
            for batch in (
                {"input_ids": FIVE, "position_ids": torch.tensor([places])},
                {"input_ids": FIVE, "cu_seqlens": torch.tensor([*(at for at in range(5) if not places[at]), 5])},
            )
        ),
        # What are no offsets.
        *(
            ({"input_ids": IDS, "cu_seqlens": torch.tensor(offsets, dtype=torch.int32)}, BY_SHAPE)
            for offsets in ([0, 5, 13], [1, 5, 12], [0, 5, 3, 12], [[0, 4], [0, 4]])
        ),
        # What tells no tokens.
        (IDS, None),
        ((IDS, MASK), None),
        ({"x": IDS}, None),
        ({"input_ids": [1, 2]}, None),
        ({"input_ids": torch.zeros(3, 4, 5)}, None),
        ({"input_ids": IDS, "attention_mask": torch.ones(3, 6, dtype=torch.long)}, None),
        (None, None),
    ],
)
def test_tokens_of_a_batch(batch: Any, expected: BatchTokens | None) -> None:
    assert tokens_in(batch) == expected


PADDED = {"input_ids": IDS, "attention_mask": MASK}
"""12 tokens, 9 of which are no padding."""


class Pair(NamedTuple):
    query: Any
    document: Any


@pytest.mark.parametrize(
    "batch",
    [(PADDED, PADDED), [PADDED, PADDED], {"a": PADDED, "b": PADDED}, Pair(PADDED, PADDED), (PADDED, IDS, PADDED)],
)
def test_batches_of_several_loaders_are_added_up(batch: Any) -> None:
    assert tokens_in(batch) == BatchTokens(24, 18, 58)


def test_a_part_that_does_not_tell_its_tokens_leaves_those_of_all_unknown() -> None:
    assert tokens_in((PADDED, {"input_ids": torch.zeros(3, 4, 5)})) is None
    assert tokens_in((PADDED, {"pixels": torch.zeros(3, 4, 5)})) == BatchTokens(12, 9, 29)


def test_what_is_not_known_of_one_batch_is_not_known_of_all_together() -> None:
    known, shapes_alone = BatchTokens(12, 9, 29), BatchTokens(5, None, None)
    assert known.plus(known, known) == BatchTokens(36, 27, 87)
    assert known.plus(shapes_alone) == shapes_alone.plus(known) == BatchTokens(17, None, None)
    assert known.plus(None, known) == UNKNOWN_TOKENS == UNKNOWN_TOKENS.plus(known) == known.plus(UNKNOWN_TOKENS)


def test_a_device_is_never_waited_for() -> None:
    on_device = {"input_ids": IDS.to("meta"), "attention_mask": MASK.to("meta")}
    with pytest.raises(OnDeviceError):
        tokens_in(on_device)
    assert tokens_in({"input_ids": IDS.to("meta")}) == BatchTokens(12, None, None)


def test_a_reader_that_has_read_tokens_is_not_put_off_by_what_tells_none() -> None:
    """A loop's batches tell their tokens, and the model is called with some of their tensors."""
    reader = TokenReader(lambda sentence: None, wanted=True)
    batch = {"input_ids": IDS, "attention_mask": MASK}
    assert reader.of(batch) is not None
    assert reader.of((IDS, MASK)) is None
    assert reader.reads and reader.of(batch) is not None
