"""Padding and packing in whole runs: tokens that are tokens, and what a run without padding would have spent."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from fractions import Fraction
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback, Profile, profile_training, render_text
from lightning_flops.analysis.step_keys import StepKey
from lightning_flops.analysis.step_laws import StepLaws
from lightning_flops.instrument.batches import known_by
from lightning_flops.instrument.timing.monitor import Monitor
from lightning_flops.records import BatchTokens
from lightning_flops.report.throughput_text import render_throughput
from lightning_flops.schema.throughput import ThroughputSummary
from lightning_flops.units import plain
from tests.every_step import watched_sessions
from tests.fake_clock import FakeNow
from tests.lengths import VOCAB, WIDTH, Encoder, watch_sessions
from tests.models_by_hand import model_named

SETTINGS: dict[str, Any] = {"profile_step": 3, "timing_steps": 12, "trace": False, "peak_flops_per_sec": 1e12}


class Masked(nn.Module):
    """``Encoder`` as those of transformers are called."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:
        logits: torch.Tensor = self.encoder(input_ids)
        return logits


def one_sequence(length: int) -> int:
    """Forward and backward of one: projections, feed-forward and head for each token, attention for each pair."""
    each = 2 * WIDTH * 3 * WIDTH + 2 * WIDTH * WIDTH + 2 * 2 * WIDTH * 2 * WIDTH + 2 * WIDTH * VOCAB
    return 3 * (length * each + length**2 * 2 * 2 * WIDTH)


def padded(number: int) -> list[tuple[list[int], dict[str, torch.Tensor]]]:
    """Batches of 3 or 4 sequences, each padded to the longest; and their lengths."""
    numbers = random.Random(4)
    found = []
    for index in range(number):
        longest = numbers.randint(10, 30)
        lengths = [longest, *(numbers.randint(5, longest) for _ in range(2 + index % 2))]
        mask = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
        for row, length in enumerate(lengths):
            mask[row, :length] = 1
        found.append((lengths, {"input_ids": torch.randint(VOCAB, mask.shape), "attention_mask": mask}))
    return found


def known_as(shape: tuple[int, ...], *, real: int) -> StepKey:
    """What a step on one batch of two tensors of *shape* is known by, with so many tokens that are no padding."""
    processed = shape[0] * shape[1]
    return ((known_by((shape, shape), BatchTokens(processed, real, None, shape[0], None, None)),), 1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
    optimizer.zero_grad()
    model(**batch).square().mean().backward()
    optimizer.step()


def test_padding_of_a_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions, data, model = watch_sessions(monkeypatch), padded(150), Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile_training(model, optimizer, **SETTINGS) as profiler:
        for batch in profiler.batches([batch for _, batch in data]):
            train(model, optimizer, batch)
    summary, profile = profiler.throughput, profiler.profile
    assert summary is not None and profile is not None
    processed = sum(len(lengths) * max(lengths) for lengths, _ in data)
    real = sum(sum(lengths) for lengths, _ in data)
    assert (summary.tokens, summary.real_tokens, summary.trained_tokens) == (processed, real, None)
    assert summary.padding_ratio == (processed - real) / processed
    assert summary.tokens_per_sec is not None
    assert profile.rates.tokens_per_sec is not None
    assert [advice.rule for advice in profile.advice if advice.rule == "padding"] == ["padding"]
    # Rows at the peak of 1 TFLOP/s: what the counted steps spent on their sequences, and on padding.
    counted = [data[step][0] for step in profile.counted_steps]
    useful = sum(one_sequence(length) for lengths in counted for length in lengths)
    spent = sum(len(lengths) * one_sequence(max(lengths)) for lengths in counted)
    assert profile.budget is not None and len(counted) > 2 and profile.flops_total.model == spent > useful
    rows = {row.key: row for row in profile.budget.rows}
    assert rows["model"].time_ns == pytest.approx(useful / len(counted) / 1000, abs=1)
    assert rows["padding"].time_ns == pytest.approx((spent - useful) / len(counted) / 1000, abs=1)
    assert sum(row.time_ns for row in profile.budget.rows) == profile.budget.wall_ns
    assert (rows["model"].advice, rows["padding"].advice) == ((), ("padding",))
    assert "report" in {share.key for share in profile.budget.run}
    laws = sessions[0].flops.laws
    lengths, batch = data[0]
    shape = tuple(batch["input_ids"].shape)
    squares = sum(one**2 for one in lengths)
    tokens = BatchTokens(shape[0] * shape[1], sum(lengths), None, len(lengths), squares, max(lengths))
    key = known_as(shape, real=sum(lengths))
    assert laws.without_padding({key: 1}, tokens) == {"float32": sum(map(one_sequence, lengths))}


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> FakeNow:
    """The monitor's clock, which only the test's own loop moves."""
    now = FakeNow()
    monkeypatch.setattr("lightning_flops.session.session.Monitor", functools.partial(Monitor, now))
    return now


PEAK = 2**40
"""FLOP/s; a power of two, so that dividing by it is exact."""


def utilization(flops: int, *, steps: int) -> float:
    """The share of the peak that *flops* are in so many steps of a second each, rounded once."""
    return float(Fraction(flops, PEAK * steps))


def run_of_seconds(
    now: FakeNow, batches: Sequence[dict[str, torch.Tensor]], **settings: Any
) -> tuple[ThroughputSummary, list[int]]:
    """Trains on *batches*, one a second; also the numbers of the steps that were neither counted nor traced."""
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        watched_sessions(share=1e6) as sessions,
        profile_training(model, optimizer, **{**SETTINGS, "peak_flops_per_sec": PEAK, **settings}) as profiler,
    ):
        for batch in profiler.batches(batches):
            now.sleep(1.0)
            train(model, optimizer, batch)
    (watched,) = sessions
    assert profiler.throughput is not None and len(watched.steps) == len(batches)
    return profiler.throughput, [number for number, step in enumerate(watched.steps) if not step.slowed]


def test_useful_mfu_leaves_padding_out(now: FakeNow) -> None:
    """Both are of the same steps and seconds: those that counting did not slow down."""
    data = padded(300)
    summary, undisturbed = run_of_seconds(now, [batch for _, batch in data])
    assert summary.model_flops == sum(len(lengths) * one_sequence(max(lengths)) for lengths, _ in data)
    assert summary.batches == len(undisturbed) < 300
    lengths_of = [data[number][0] for number in undisturbed]
    spent = sum(len(lengths) * one_sequence(max(lengths)) for lengths in lengths_of)
    useful = sum(one_sequence(length) for lengths in lengths_of for length in lengths)
    assert summary.mfu == utilization(spent, steps=len(undisturbed))
    assert summary.useful_mfu == utilization(useful, steps=len(undisturbed))


def test_tokens_that_the_user_tells_are_in_the_throughput_of_the_run(now: FakeNow) -> None:
    """As they are in what is logged while it trains."""
    data = padded(60)
    summary, undisturbed = run_of_seconds(now, [batch for _, batch in data], tokens_per_sample=7)
    told = 7 * sum(len(data[number][0]) for number in undisturbed)
    assert summary.tokens_per_sec == told / len(undisturbed)
    assert (summary.tokens, summary.real_tokens, summary.padding_ratio) == (None, None, None)
    assert f"tokens/s, as tokens_per_sample tells: {plain(summary.tokens_per_sec)}" in render_throughput(summary)


def test_what_kernels_skip_without_padding_is_not_known_before_such_a_step_was_counted() -> None:
    """Every counted batch had padding, and a mask; without padding transformers tells the kernel to be causal."""
    kind = model_named("GPT-2 with padding")
    lengths = (5, 7, 8, 11, 13, 17, 18, 19, 20, 21, 22, 23)
    sizes = [((2, 5, 3)[place % 3], length, 1) for place, length in enumerate(lengths)]
    run = [*5 * sizes, (3, 8, 0), (2, 19, 0)]
    model = kind.make().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile_training(model, optimizer, **SETTINGS) as profiler:
        for batch in profiler.batches([kind.batch(*one) for one in run]):
            optimizer.zero_grad()
            model(**batch)["loss"].backward()
            optimizer.step()
    summary = profiler.throughput
    assert summary is not None and summary.law is not None
    assert (summary.steps_unknown, summary.model_flops) == (0, sum(kind.spent(*one).model for one in run))
    assert summary.hardware_flops is None
    assert "a mask may decide" in summary.unavailable["hardware_flops"]
    assert "Hardware FLOPs are n/a: steps with padding" in " ".join(render_throughput(summary).split())


class Far(torch.Tensor):
    """Stands in for a tensor on a device: work on it gives ordinary tensors, and none of its values is to be read."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return result.as_subclass(torch.Tensor) if isinstance(result, torch.Tensor) else result


@pytest.mark.parametrize("padded_rows", [(2, 2), (2, 0)], ids=["all padded", "some padded"])
def test_batches_that_are_used_again_on_a_device_have_the_padding_with_which_they_were_fetched(
    padded_rows: tuple[int, int],
) -> None:
    """From the second pass on only what the model gets is seen, and its mask is on the device."""
    masks = [torch.ones(3, 12, dtype=torch.long) for _ in range(20)]
    for index, mask in enumerate(masks):
        mask[: padded_rows[index % 2], 7:] = 0
    data = [{"input_ids": torch.randint(VOCAB, (3, 12)), "attention_mask": mask} for mask in masks]
    loader: DataLoader[Any] = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile_training(model, optimizer, **{**SETTINGS, "log_every_n_steps": 1000}) as profiler:
        for batch in islice(cycle(loader), 3 * len(data)):
            train(model, optimizer, {name: tensor.as_subclass(Far) for name, tensor in batch.items()})
    summary = profiler.throughput
    assert summary is not None
    if padded_rows == (2, 2):
        assert (summary.steps_unknown, summary.model_flops) == (0, 60 * 3 * one_sequence(12))
    else:  # of which kind a batch is that is used again, nobody knows
        assert summary.steps_unknown > 0 and summary.model_flops is None


def test_the_windows_own_report_has_the_law_in_words_and_the_steps_by_length() -> None:
    data, model = padded(150), Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile_training(model, optimizer, **SETTINGS) as profiler:
        for batch in profiler.batches([batch for _, batch in data]):
            train(model, optimizer, batch)
    profile = profiler.profile
    assert profile is not None and profile.law is not None and profile.why_no_law is None
    token = 2 * WIDTH * 3 * WIDTH + 2 * WIDTH * WIDTH + 2 * 2 * WIDTH * 2 * WIDTH + 2 * WIDTH * VOCAB
    pair = 2 * 2 * WIDTH
    by_bucket = {
        one.bucket: {(term.numerator, *sorted(term.powers.items())) for term in one.terms} for one in profile.law.sums
    }
    assert by_bucket == {
        bucket: {(times * token, ("B", 1), ("S", 1)), (times * pair, ("B", 1), ("S", 2))}
        for bucket, times in (("forward", 1), ("backward", 2))
    }
    assert sum(row.steps for row in profile.law.lengths) >= SETTINGS["timing_steps"]
    assert all(row.mfu is not None and row.step_sec > 0 for row in profile.law.lengths)
    text = render_text(profile)
    assert f"forward = B·({token:,}·S + {pair:,}·S²)" in text
    assert "length (S)" in text
    assert Profile.from_json(profile.to_json()) == profile


def test_a_batch_that_never_varied_has_no_useful_mfu_and_the_report_says_why() -> None:
    """Two products of weights alone would cost the same for any batch: nobody can tell them from a sample's work."""
    numbers, model = random.Random(4), Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = []
    for _ in range(60):
        mask = torch.ones(3, numbers.randint(10, 30), dtype=torch.long)
        mask[1, 5:] = 0
        data.append({"input_ids": torch.randint(VOCAB, mask.shape), "attention_mask": mask})
    with profile_training(model, optimizer, **SETTINGS) as profiler:
        for batch in profiler.batches(data):
            train(model, optimizer, batch)
    summary, profile = profiler.throughput, profiler.profile
    assert summary is not None and summary.law is not None and profile is not None and profile.law is not None
    assert summary.padding_ratio is not None and summary.useful_mfu is None
    reason = summary.unavailable["useful_mfu"]
    assert reason.startswith("every counted step had the same number of samples")
    assert f"n/a ({reason[:40]}" in " ".join(render_throughput(summary).split())


def test_a_window_with_too_few_sizes_says_why_it_has_no_law() -> None:
    numbers, model = random.Random(4), Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile_training(model, optimizer, **SETTINGS) as profiler:
        for batch in [torch.ones(3, numbers.randint(10, 13), dtype=torch.long) for _ in range(60)]:
            train(model, optimizer, {"input_ids": batch})
    profile = profiler.profile
    assert profile is not None and profile.variable and profile.law is None
    assert profile.why_no_law is not None
    assert "too few to find a law and check it" in profile.why_no_law
    assert f"No law of the FLOPs: {profile.why_no_law}." in " ".join(render_text(profile).split())


def test_batches_of_one_sample_have_a_useful_mfu(now: FakeNow) -> None:
    numbers, data = random.Random(4), []
    for _ in range(60):
        mask = torch.ones(1, numbers.randint(10, 20), dtype=torch.long)
        mask[0, 8:] = 0
        data.append({"input_ids": torch.randint(VOCAB, mask.shape), "attention_mask": mask})
    summary, undisturbed = run_of_seconds(now, data)
    assert "useful_mfu" not in summary.unavailable
    spent = sum(one_sequence(data[number]["input_ids"].shape[1]) for number in undisturbed)
    assert summary.mfu == utilization(spent, steps=len(undisturbed))
    assert summary.useful_mfu == utilization(len(undisturbed) * one_sequence(8), steps=len(undisturbed))


def known_steps(*steps: list[tuple[int, int]], wrong: int = 0) -> tuple[StepLaws, list[StepKey]]:
    """Laws after steps of batches of so many samples and tokens were counted; the last one spent *wrong* more."""
    laws, keys = StepLaws(lambda note: None), list[StepKey]()
    for number, batches in enumerate(steps):
        keys.append((tuple((batch,) for batch in batches), 1))
        spent = sum(rows * one_sequence(length) for rows, length in batches)
        spent += wrong if number == len(steps) - 1 else 0
        laws.counted(keys[-1], {("forward", "float32"): spent, ("optimizer", "float32"): 7})
    return laws, keys


ACCUMULATED = [[(rows, length), (rows, length + 3)] for rows in (2, 3, 4) for length in (10, 13, 17, 22, 30)]


@pytest.mark.parametrize(
    ("last", "wrong", "known"), [([(3, 20)], 0, True), ([(3, 20)], 2, False), ([(9, 20)], 0, False)]
)
def test_an_epochs_shorter_last_step_is_in_useful_flops_if_the_law_gives_what_it_spent(
    last: list[tuple[int, int]], wrong: int, known: bool
) -> None:
    """Nine samples are more than any step of two batches had."""
    laws, keys = known_steps(*ACCUMULATED, last, wrong=wrong)
    tokens = BatchTokens(0, 0, None, 0, 0, 0)
    useful = 0
    for batches in (*ACCUMULATED, last):
        for rows, length in batches:
            useful += rows * one_sequence(length - 2)
            own = BatchTokens(rows * length, rows * (length - 2), None, rows, rows * (length - 2) ** 2, length - 2)
            tokens = tokens.plus(own)
    found = laws.without_padding({**dict.fromkeys(keys, 1)}, tokens)
    if known:
        assert found == {"float32": useful}
    else:
        assert found == "the run had steps of several forms, and one law does not hold for all"


def test_packed_sequences_count_their_own_squares(monkeypatch: pytest.MonkeyPatch) -> None:
    """One row of 20 to 60 tokens holds several sequences, and attention is computed over the whole of it."""
    numbers = random.Random(2)
    sessions, model = watch_sessions(monkeypatch), Masked()
    data = []
    for _ in range(60):
        lengths = [numbers.randint(5, 15) for _ in range(4)]
        places = torch.cat([torch.arange(length) for length in lengths])[None]
        data.append((lengths, {"input_ids": torch.randint(VOCAB, places.shape), "position_ids": places}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile_training(model, optimizer, **SETTINGS) as profiler:
        for batch in profiler.batches([batch for _, batch in data]):
            train(model, optimizer, {"input_ids": batch["input_ids"]})
    summary = profiler.throughput
    assert summary is not None
    tokens = sum(sum(lengths) for lengths, _ in data)
    assert (summary.tokens, summary.real_tokens, summary.padding_ratio) == (tokens, tokens, 0.0)
    lengths, batch = data[0]
    shape = tuple(batch["input_ids"].shape)
    of_batch = BatchTokens(sum(lengths), sum(lengths), None, 4, sum(one**2 for one in lengths), max(lengths))
    useful = sessions[0].flops.laws.without_padding({known_as(shape, real=sum(lengths)): 1}, of_batch)
    assert useful == {"float32": sum(map(one_sequence, lengths))}


def test_padding_under_lightning(tmp_path: Path) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Masked()

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch).square().mean()
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    data = padded(60)
    callback = FlopsProfilerCallback(**SETTINGS)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Module(), DataLoader([batch for _, batch in data], batch_size=None))  # type: ignore[arg-type]
    assert callback.throughput is not None
    assert callback.throughput.tokens == sum(len(lengths) * max(lengths) for lengths, _ in data)
    assert callback.throughput.real_tokens == sum(sum(lengths) for lengths, _ in data)


@pytest.mark.parametrize("function", ["predict", "test", "validate"])
def test_a_loop_without_training_has_its_tokens_flops_and_scalars(
    function: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.loggers import Logger
    from torch.utils.data import DataLoader

    monkeypatch.setattr("lightning_flops.session.session.SHARE", 1.0)
    monkeypatch.setattr("lightning_flops.session.samples._GUESS", 0)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Masked()

        def predict_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            result: torch.Tensor = self.net(**batch)
            return result

        def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
            self.net(**batch)

        validation_step = test_step

    class Kept(Logger):
        name = version = "kept"

        def __init__(self) -> None:
            super().__init__()
            self.logged: list[tuple[int | None, dict[str, float]]] = []

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            self.logged.append((step, dict(metrics)))

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

    data, kept = padded(150), Kept()
    callback = FlopsProfilerCallback(**SETTINGS)
    trainer = Trainer(
        accelerator="cpu", devices=1, logger=kept, enable_checkpointing=False, log_every_n_steps=10,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path, callbacks=[callback],
    )  # fmt: skip
    getattr(trainer, function)(Module(), DataLoader([batch for _, batch in data], batch_size=None))  # type: ignore[arg-type]
    summary = callback.throughput
    assert summary is not None
    assert summary.tokens == sum(len(lengths) * max(lengths) for lengths, _ in data)
    assert summary.real_tokens == sum(sum(lengths) for lengths, _ in data)
    # A batch outside of the window is counted from where its shapes are known; the law is checked by such batches.
    assert (summary.steps_unknown, summary.law is not None) == (0, True)
    assert summary.model_flops == sum(len(lengths) * one_sequence(max(lengths)) // 3 for lengths, _ in data)
    assert summary.useful_mfu is not None
    read = {
        step or 0: scalars for step, scalars in kept.logged if f"flops_monitor/{function}/samples_per_sec" in scalars
    }
    assert sorted(read) == [step for step in range(10, 151, 10) if step in read] and len(read) >= 10
    assert f"flops_monitor/{function}/tokens_per_sec" in read[150]
    assert f"flops_monitor/{function}/padding_ratio" in read[150]
    assert f"flops_monitor/{function}/mfu" in read[150]


def test_images_are_asked_for_tokens_a_few_times_only(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions = watch_sessions(monkeypatch)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile_training(model, optimizer, **SETTINGS) as profiler:
        for images in profiler.batches([torch.randn(4, 3) for _ in range(30)]):
            optimizer.zero_grad()
            model(images).square().mean().backward()
            optimizer.step()
        assert not sessions[0].tokens.reads
    assert profiler.throughput is not None
    assert (profiler.throughput.tokens, profiler.throughput.padding_ratio) == (None, None)
