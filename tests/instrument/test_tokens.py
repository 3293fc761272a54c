"""Which tokens are tokens: every figure is counted by hand."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_flops.instrument.tokens import OnDeviceError, tokens_in
from lightning_flops.records import BatchTokens

IDS = torch.arange(3, 15).reshape(3, 4)
MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1]])


def test_a_mask_tells_padding_on_either_side() -> None:
    # Lengths 4, 2 and 3: 16 + 4 + 9 pairs.
    assert tokens_in({"input_ids": IDS, "attention_mask": MASK}) == BatchTokens(12, 9, None, 3, 29)
    assert tokens_in({"input_ids": IDS, "attention_mask": MASK.bool()}) == BatchTokens(12, 9, None, 3, 29)
    assert tokens_in({"attention_mask": MASK}) == BatchTokens(12, 9, None, 3, 29)
    assert tokens_in(UserDict(input_ids=IDS, attention_mask=MASK)) == BatchTokens(12, 9, None, 3, 29)


def test_every_number_of_a_mask_but_zero_is_a_token() -> None:
    assert tokens_in({"attention_mask": -MASK}) == BatchTokens(12, 9, None, 3, 29)
    mixed = torch.tensor([[-1, 1, 0, 0], [-7, 1, 1, 0], [0, 0, 0, 0]])  # lengths 2 and 3
    assert tokens_in({"attention_mask": mixed}) == BatchTokens(12, 5, None, 2, 13)


def test_no_mode_sees_what_is_asked_of_a_batch() -> None:
    class Sees(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(func)

    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": IDS}
    with Sees():  # type: ignore[no-untyped-call]
        assert tokens_in(batch) == BatchTokens(12, 9, 12, 3, 29)


def test_a_mask_that_numbers_packed_sequences_tells_them_apart() -> None:
    """Rows of 2 and 1, and of 1 and 3 tokens: 4 + 1 + 1 + 9 pairs. A row of a collator that packs need not be full."""
    mask = torch.tensor([[1, 1, 2, 0], [1, 2, 2, 2]])
    assert tokens_in({"input_ids": IDS[:2], "attention_mask": mask}) == BatchTokens(8, 7, None, 4, 15)


def test_labels_tell_what_is_trained_on_and_no_padding() -> None:
    labels = torch.tensor([[-100, -100, 5, 6], [-100, 4, -100, -100], [1, 2, 3, 4]])
    assert tokens_in({"input_ids": IDS, "attention_mask": MASK, "labels": labels}) == BatchTokens(12, 9, 7, 3, 29)
    assert tokens_in({"input_ids": IDS, "labels": labels}) == BatchTokens(12, None, 7, None, None)


def test_labels_of_samples_are_no_labels_of_tokens() -> None:
    batch = {"input_ids": IDS, "attention_mask": MASK, "labels": torch.tensor([1, 0, 1])}
    assert tokens_in(batch) == BatchTokens(12, 9, None, 3, 29)


@pytest.mark.parametrize("name", ["cu_seqlens", "cu_seq_lens_q"])
def test_borders_of_packed_sequences(name: str) -> None:
    """Three sequences of 2, 5 and 3 tokens, and 2 tokens of padding behind them: 4 + 25 + 9 pairs."""
    batch = {"input_ids": IDS.reshape(1, 12), name: torch.tensor([0, 2, 7, 10], dtype=torch.int32)}
    assert tokens_in(batch) == BatchTokens(12, 10, None, 3, 38)


def test_positions_that_begin_anew() -> None:
    places = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 5, 0]])  # 3, 2, 6 and 1
    batch = {"input_ids": IDS.reshape(1, 12), "position_ids": places}
    assert tokens_in(batch) == BatchTokens(12, 12, None, 4, 9 + 4 + 36 + 1)


def test_a_packed_sequence_has_no_padding() -> None:
    batch = pack_sequence([torch.zeros(length, 7) for length in (2, 5, 3)], enforce_sorted=False)
    expected = BatchTokens(10, 10, None, 3, 4 + 25 + 9)
    assert tokens_in(batch) == expected
    assert tokens_in((batch, torch.zeros(3))) == expected


@pytest.mark.parametrize(
    "batch",
    [
        IDS,
        (IDS, MASK),
        {"x": IDS},
        {"input_ids": [1, 2]},
        {"input_ids": torch.zeros(3, 4, 5)},
        {"input_ids": IDS, "attention_mask": torch.ones(3, 6, dtype=torch.long)},
        None,
    ],
)
def test_what_tells_no_tokens(batch: Any) -> None:
    assert tokens_in(batch) is None


def test_a_mask_of_who_sees_whom_tells_no_padding() -> None:
    batch = {"input_ids": IDS, "attention_mask": torch.ones(3, 1, 4, 4, dtype=torch.long)}
    assert tokens_in(batch) == BatchTokens(12, None, None, None, None)


def test_a_device_is_never_waited_for() -> None:
    on_device = {"input_ids": IDS.to("meta"), "attention_mask": MASK.to("meta")}
    with pytest.raises(OnDeviceError):
        tokens_in(on_device)
    assert tokens_in({"input_ids": IDS.to("meta")}) == BatchTokens(12, None, None, None, None)


def test_sums_are_known_only_where_every_part_is() -> None:
    known = BatchTokens(12, 9, None, 3, 29)
    assert known.plus(known) == BatchTokens(24, 18, None, 6, 58)
    assert known.plus(None) == BatchTokens(None, None, None, None, None)
