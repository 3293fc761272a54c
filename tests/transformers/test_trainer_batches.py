"""Batches of transformers' own packing, each sequence with attention of its own, and batches on a device."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen as varlen
from accelerate import data_loader
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DataCollatorWithFlattening,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
)

from lightning_flops import FlopsProfilerTrainerCallback
from tests.results import profile_of, throughput_of
from tests.transformers.tiny import BATCH, LENGTH, Sentences, arguments, length_of, new_trainer

HIDDEN, INSIDE, LAYERS, HEADS, KEY_HEADS, VOCAB = 32, 64, 2, 4, 2, 64
PROFILE_STEP = 3


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **more: Any
) -> tuple[torch.Tensor, None]:
    """As transformers calls flash attention on one packed row, with (1, heads, length, size)."""
    repeated = [one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (query, key, value)]
    queries, keys, values = (one[0].transpose(0, 1) for one in repeated)
    bounds = more.get("cu_seq_lens_q")
    if bounds is None:
        begins = (more["position_ids"].flatten() == 0).nonzero().flatten()
        bounds = torch.cat([begins, begins.new_tensor([query.shape[2]])])
    longest = int(bounds.diff().max())
    out: Any = varlen.varlen_attn(queries, keys, values, bounds, bounds, longest, longest, window_size=(-1, 0))
    return out[None], None


def _forward(query: torch.Tensor, *rest: Any, **more: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return query.clone(), query.new_zeros(query.shape[1], query.shape[0]), torch.zeros(2, dtype=torch.uint64)


def _backward(grad_out: torch.Tensor, *given: torch.Tensor, **more: Any) -> tuple[torch.Tensor, ...]:
    return tuple(one.clone() for one in given[:3])


@pytest.fixture(autouse=True)
def attention() -> Iterator[None]:
    """Attention by ``varlen_attn``, with kernels for the processor that compute nothing: shapes tell what they cost."""
    AttentionInterface.register("packed_here", attend)
    AttentionMaskInterface.register("packed_here", lambda *_, **__: None)
    operators: Any = varlen  # for which torch has kernels for CUDA alone
    pairs = ((operators._varlen_attn, _forward), (operators._varlen_attn_backward, _backward))
    for operator, kernel in pairs:
        operator.register_kernel("cpu")(kernel)
    yield
    for operator, _ in pairs:
        operator._backend_fns.pop("cpu")


def cost_of(lengths: list[int]) -> int:
    """Forward and backward: linear layers for each token, two products of attention for each pair of a sequence."""
    size = HIDDEN // HEADS
    projections = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEY_HEADS * size  # of queries and the result, of keys and values
    linear = LAYERS * 2 * (projections + 3 * HIDDEN * INSIDE) + 2 * HIDDEN * VOCAB
    return 3 * (linear * sum(lengths) + LAYERS * 2 * 2 * HIDDEN * sum(one**2 for one in lengths))


@pytest.mark.parametrize("bounds", [False, True], ids=["position_ids", "cu_seq_lens"])
def test_packed_steps_are_counted_and_the_run_is_the_sum_of_its_sequences(bounds: bool, tmp_path: Path) -> None:
    numbers, packed = random.Random(0), []
    texts = [[numbers.randrange(VOCAB) for _ in range(numbers.randint(2, 30))] for _ in range(40 * BATCH)]
    flatten: Any = DataCollatorWithFlattening(return_flash_attn_kwargs=bounds)  # type: ignore[no-untyped-call]

    def collate(features: Any) -> Any:
        packed.append([len(one["input_ids"]) for one in features])
        return flatten(features)

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INSIDE}
    sizes |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS}
    sizes |= {"attn_implementation": "packed_here", "use_cache": False}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    callback = FlopsProfilerTrainerCallback(profile_step=PROFILE_STEP, timing_steps=6, trace=False)
    given = {"remove_unused_columns": False, "train_sampling_strategy": "sequential"}
    data: Any = [{"input_ids": one, "labels": one} for one in texts]
    Trainer(
        model, arguments(tmp_path, **given), train_dataset=data, data_collator=collate, callbacks=[callback]
    ).train()
    profile, summary = profile_of(callback), throughput_of(callback)
    timed = [cost_of(packed[step]) for step in profile.timed_steps]
    assert PROFILE_STEP in profile.counted_steps
    assert profile.flops_of in ("formula", "estimate")  # some may be longer than all that were counted
    mean, half = Fraction(sum(timed), 3 * len(timed)), Fraction(1, 2)  # of a forward; to the nearest whole number
    assert (profile.flops.forward, profile.flops.backward) == (math.floor(mean + half), math.floor(2 * mean + half))
    assert summary.real_tokens == summary.tokens == sum(map(sum, packed))
    assert summary.model_flops == sum(map(cost_of, packed))


# ---- tokens of batches that are moved to a device are read before, so that no step waits for it

READS = {"item", "tolist", "numpy", "cpu", "__int__", "__bool__", "__float__", "__iter__", "__contains__"}


class Far(torch.Tensor):
    """Work on it is done and gives ordinary tensors; reading it is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in READS:
            raise AssertionError("this waits for the device")
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(torch.Tensor) if isinstance(result, torch.Tensor) else result


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every batch that a loader has moved to the device."""
    batches: list[Any] = []

    def send(batch: Any, *args: Any, **kwargs: Any) -> Any:
        batches.append({name: tensor.as_subclass(Far) for name, tensor in batch.items()})
        return batches[-1]

    monkeypatch.setattr(data_loader, "send_to_device", send)
    return batches


@pytest.mark.parametrize("accumulated", [1, 3])
def test_tokens_of_batches_that_are_moved_are_known(accumulated: int, moved: list[Any], tmp_path: Path) -> None:
    callback = FlopsProfilerTrainerCallback(timing_steps=2, trace=False)
    data: dict[str, Any] = {"data": Sentences(10 * BATCH), "eval_dataset": Sentences(2 * BATCH)}
    how: dict[str, Any] = {"gradient_accumulation_steps": accumulated, "num_train_epochs": 2, "eval_strategy": "epoch"}
    trainer = new_trainer(tmp_path, callback, **data, **how)
    before = data_loader.send_to_device
    trainer.train()
    assert data_loader.send_to_device is before
    summary, profile = throughput_of(callback), profile_of(callback)
    real = 2 * sum(length_of(index) for index in range(10 * BATCH))
    assert (summary.tokens, summary.real_tokens) == (2 * 10 * BATCH * LENGTH, real)
    assert summary.tokens_per_sec is not None
    assert not any("on the device before" in note for note in profile.notes)
    assert len(moved) == 2 * (10 + 2)
    assert summary.padding_ratio == pytest.approx(1 - real / (2 * 10 * BATCH * LENGTH))
