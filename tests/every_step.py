"""Whole runs of one model under one door: what the profiler knows of every step, held to what the step spends.

A step's truth is worked out by hand from the model's sizes, and counted by itself on a model of the same kind, which
must give the same. What a run says of the step, at its end and while it trains, is the truth or nothing.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from lightning_flops import Profile, count_flops
from lightning_flops.analysis.step_keys import StepKey, without_lengths
from lightning_flops.analysis.step_laws import Foretold
from lightning_flops.records import BucketFlops
from lightning_flops.schema.throughput import ThroughputSummary
from lightning_flops.session.session import Session
from tests.models_by_hand import Batch, ByHand, Sizes, Spent

STEPS = 500
LOG_EVERY = 10
SETTINGS: dict[str, Any] = {"profile_step": 3, "timing_steps": 12, "trace": False, "peak_flops_per_sec": 1e12}

COUNTED_IN_WINDOW: int = SETTINGS["timing_steps"]
MOST_COUNTED_OUTSIDE = 64


# ---- what a run trains on, and the truth of it


@dataclass(frozen=True, slots=True)
class Data:
    """Batches in the order in which a run trains on them."""

    sizes: tuple[Sizes, ...]
    batches: tuple[Batch, ...]
    epochs: int = 1
    """So often the batches are gone through; not under DeepSpeed."""


@functools.cache
def data_of(model: ByHand, steps: int) -> Data:
    """The same for each run."""
    numbers = random.Random(7)
    sizes = tuple(model.sizes(numbers) for _ in range(steps))
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return Data(sizes, tuple(model.batch(*one) for one in sizes))


@functools.cache
def truths_of(model: ByHand, steps: int) -> dict[Sizes, Spent]:
    """What a step of each sizes spends: by hand, and counted by itself, which must be the same."""
    found: dict[Sizes, Spent] = {}
    data, net = data_of(model, steps), model.make().train()
    for sizes, batch in zip(data.sizes, data.batches, strict=True):
        if sizes in found:
            continue
        with count_flops(net) as counts:
            net(**batch)["loss"].backward()
        total = counts.total
        counted = Spent(total.forward, total.backward, total.recompute, counts.causal_skipped)
        found[sizes] = model.spent(*sizes)
        assert (counted, total.optimizer) == (found[sizes], 0), f"{model.name} {sizes}"
    return found


# ---- what a run knows


@dataclass(slots=True)
class SeenStep:
    """One step, as the session has booked it."""

    key: StepKey
    slowed: bool
    counted: BucketFlops | None = None
    """What was counted in this very step."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The monitor's figure of some steps, as it was logged while the run trained."""

    steps: tuple[int, ...]
    """Numbers of those that it is of."""
    model_flops: int | None


@dataclass(slots=True)
class Watched:
    """One session, and what it has said."""

    session: Session
    steps: list[SeenStep] = field(default_factory=list)
    readings: list[Reading] = field(default_factory=list)

    def known(self, step: SeenStep) -> Foretold | None:
        """What the run knows of *step* at its end."""
        return self.session.flops.laws.known(step.key) if step.counted is None else Foretold(step.counted, whole=True)

    def _watch(self) -> None:
        books, output = self.session.flops.books, self.session.reports.output
        book, book_each, book_slowed = books.book, books.book_one_batch_each, books.book_slowed
        counted, drop_lengths, write = books.counted, books.drop_lengths, output.write_reading

        def booked(keys: Sequence[StepKey], *columns: Any) -> None:
            self.steps += [SeenStep(key, slowed=False) for key in keys]
            book(keys, *columns)

        def each_booked(batches: Sequence[Any], updates: Sequence[int], *columns: Any) -> None:
            of_each = zip(batches, updates, strict=True)
            self.steps += [SeenStep(((batch,), its), slowed=False) for batch, its in of_each]
            book_each(batches, updates, *columns)

        def was_slowed(key: StepKey) -> None:
            self.steps.append(SeenStep(key, slowed=True))
            book_slowed(key)

        def was_counted(key: StepKey, flops: BucketFlops) -> None:
            assert self.steps[-1].key == key
            self.steps[-1].counted = flops
            counted(key, flops)

        def dropped() -> None:
            for step in self.steps:
                step.key = without_lengths(step.key)
            drop_lengths()

        def written(reading: Any, **more: Any) -> None:
            undisturbed = [number for number, step in enumerate(self.steps) if not step.slowed]
            self.readings.append(Reading(tuple(undisturbed[-reading.steps :]), more["model_flops"]))
            write(reading, **more)

        for owner, name, function in (
            (books, "book", booked),
            (books, "book_one_batch_each", each_booked),
            (books, "book_slowed", was_slowed),
            (books, "counted", was_counted),
            (books, "drop_lengths", dropped),
            (output, "write_reading", written),
        ):
            setattr(owner, name, function)


def model_flops(watched: Watched) -> list[int | None]:
    """What the run knows of each step at its end."""
    found = [watched.known(step) for step in watched.steps]
    return [
        None if one is None else sum(flops for (part, _), flops in one.flops.items() if part in ("forward", "backward"))
        for one in found
    ]


@contextlib.contextmanager
def watched_sessions(*, share: float | None) -> Iterator[list[Watched]]:
    """Every session that begins inside.

    Args:
        share: of the wall time that counting outside of windows may take; None leaves it as it is. A run of a few
            seconds could not count a single step.
    """
    kept: list[Watched] = []
    begin = Session.begin

    def watch(session: Session) -> None:
        begin(session)
        kept.append(Watched(session))
        kept[-1]._watch()

    with contextlib.ExitStack() as patches:
        patches.enter_context(patch.object(Session, "begin", watch))
        if share is not None:
            patches.enter_context(patch("lightning_flops.session.session.SHARE", share))
            patches.enter_context(patch("lightning_flops.session.samples._GUESS", 0))
        yield kept


# ---- the doors


@dataclass(frozen=True, slots=True)
class Trained:
    """What came of one training."""

    losses: list[str]
    """To the last bit, as the weights are."""
    weights: list[str]
    summary: ThroughputSummary | None = None
    profile: Profile | None = None


Train = Callable[[nn.Module, Data, Path, bool], Trained]
"""Trains a model on data, with files in a folder, under the profiler or without it."""


def bits(values: torch.Tensor) -> str:
    """*values* to the last bit."""
    return values.detach().double().flatten().numpy().tobytes().hex()


def weights_of(model: nn.Module) -> list[str]:
    """The parameters of *model* to the last bit."""
    return [bits(parameter) for parameter in model.parameters()]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Of the parameters that need a gradient."""
    return torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.01)


def plain(model: nn.Module, data: Data, folder: Path, profiled: bool) -> Trained:
    """A loop as people write it."""
    from lightning_flops import profile_training

    optimizer, losses = sgd(model), []

    def train(batches: Any) -> None:
        for batch in batches:
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(bits(loss))

    if not profiled:
        for _ in range(data.epochs):
            train(data.batches)
        return Trained(losses, weights_of(model))
    with profile_training(model, optimizer, log_every_n_steps=LOG_EVERY, **SETTINGS) as profiler:
        for _ in range(data.epochs):
            train(profiler.batches(data.batches))
    return Trained(losses, weights_of(model), profiler.throughput, profiler.profile)


def under_lightning(model: nn.Module, data: Data, folder: Path, profiled: bool) -> Trained:
    """A LightningModule that calls the model."""
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader

    from lightning_flops import FlopsProfilerCallback

    losses = []

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch)["loss"]
            losses.append(bits(loss))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    callback = FlopsProfilerCallback(**SETTINGS)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=data.epochs, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, log_every_n_steps=LOG_EVERY,
        callbacks=[callback] if profiled else [],
    )  # fmt: skip
    trainer.fit(Module(), DataLoader(data.batches, batch_size=None))  # type: ignore[arg-type]
    return Trained(losses, weights_of(model), callback.throughput, callback.profile)


def under_transformers(model: nn.Module, data: Data, folder: Path, profiled: bool) -> Trained:
    """The Trainer of transformers, with batches that are made before."""
    from torch.utils.data import Dataset, Sampler, SequentialSampler
    from transformers import Trainer, TrainingArguments

    from lightning_flops import FlopsProfilerTrainerCallback

    losses = []

    class Rows(Dataset[Batch]):
        def __len__(self) -> int:
            return len(data.batches)

        def __getitem__(self, index: int) -> Batch:
            return data.batches[index]

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any) -> Sampler[int]:
            return SequentialSampler(data.batches)

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            losses.append(bits(loss := super().training_step(*args, **kwargs)))
            return loss

    callback = FlopsProfilerTrainerCallback(**SETTINGS)
    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=1, num_train_epochs=data.epochs, use_cpu=True, report_to=[],
        save_strategy="no", disable_tqdm=True, logging_steps=LOG_EVERY, remove_unused_columns=False, seed=11,
        dataloader_pin_memory=False,
    )  # fmt: skip
    InOrder(
        model=model,
        args=arguments,
        train_dataset=Rows(),
        data_collator=_the_only_one,
        callbacks=[callback] if profiled else [],
    ).train()
    return Trained(losses, weights_of(model), callback.throughput, callback.profile)


def _the_only_one(batches: list[Batch]) -> Batch:
    (batch,) = batches
    return dict(batch)


def under_deepspeed(model: nn.Module, data: Data, folder: Path, profiled: bool) -> Trained:
    """An engine; its process is a rank of a process group of DeepSpeed's."""
    import deepspeed

    from lightning_flops.deepspeed import attach

    losses = []
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "steps_per_print": LOG_EVERY,
        "zero_allow_untested_optimizer": True,
    }
    engine = deepspeed.initialize(model=model, optimizer=sgd(model), config=settings)[0]
    handle = attach(engine, SETTINGS) if profiled else None
    for batch in data.batches:
        loss = engine(**batch)["loss"]
        engine.backward(loss)
        engine.step()
        losses.append(bits(loss))
    if handle is None:
        return Trained(losses, weights_of(model))
    handle.detach()
    return Trained(losses, weights_of(model), handle.throughput, handle.profile)


DOORS: dict[str, Train] = {
    "plain loop": plain,
    "Lightning": under_lightning,
    "transformers": under_transformers,
    "DeepSpeed": under_deepspeed,
}


# ---- one run


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one run under one door came to."""

    model: str
    door: str
    steps: int
    counted: int
    """Steps that were counted themselves."""
    outside: int
    """Those of them that were counted outside of the window."""
    predicted: int
    unknown: int
    model_alone: int
    """Those of the predicted ones of which model FLOPs alone are known."""
    wrong: int
    """Steps of which the run's end says something else than the truth."""
    readings: int
    """Figures that were logged while the run trained."""
    readings_wrong: int
    readings_unknown: int
    """Those of them that were n/a."""
    readings_unknown_late: int
    """Those of them that were n/a in the second half of the run."""
    sums_agree: bool
    """The run's own sums over all of its steps are those of the truth, or n/a because a step is."""
    in_order: bool
    """The session has booked the steps that ran, one by one, by their shapes."""
    identical: bool
    """Losses and weights are those of the same training without the profiler, to the last bit."""
    seconds: float
    """Of the run's wall time, from the session's begin to the last step."""
    outside_sec: float
    """Of that, in steps counted outside of the window."""
    law: bool
    """The run's summary has a law."""
    why_no_law: str
    """Otherwise why, as the summary says it."""
    report_says: str
    """Why, as the window's report says it."""

    def as_json(self) -> dict[str, Any]:
        """By field."""
        return asdict(self)


def run(model: ByHand, door: str, folder: Path, *, steps: int = STEPS, share: float | None = 1.0) -> Cell:
    """Train *model* under *door* with the profiler and without it, and hold what was said to the truth.

    Args:
        model: the model.
        door: the door's name.
        folder: for files of the run.
        steps: how many there are.
        share: as for ``watched_sessions``.
    """
    data, truth, train = data_of(model, steps), truths_of(model, steps), DOORS[door]
    bare = train(_net(model), data, folder, False)
    with watched_sessions(share=share) as sessions:
        trained = train(_net(model), data, folder, True)
        (watched,) = sessions
        return _cell(model, door, data, truth, bare, trained, watched)


def _net(model: ByHand) -> nn.Module:
    torch.manual_seed(3)
    return model.make().train()


def _cell(
    model: ByHand,
    door: str,
    data: Data,
    truth: dict[Sizes, Spent],
    bare: Trained,
    trained: Trained,
    watched: Watched,
) -> Cell:
    summary, profile, samples = trained.summary, trained.profile, watched.session.flops.samples
    assert summary is not None and profile is not None
    spent = [truth[sizes] for sizes in data.sizes]
    known = [watched.known(step) for step in watched.steps]
    readings = [(one, sum(spent[number].model for number in one.steps)) for one in watched.readings if one.steps]
    unknown = [one for one, _ in readings if one.model_flops is None]
    model_flops = None if None in known else sum(one.model for one in spent)
    whole = all(one is not None and one.whole for one in known)
    hardware_flops = sum(one.hardware for one in spent) if whole else None
    counts = Counter("counted" if step.counted is not None else "else" for step in watched.steps)
    law = profile.why_no_law or ""
    return Cell(
        model=model.name,
        door=door,
        steps=len(data.sizes),
        counted=summary.steps_counted,
        outside=samples.taken,
        predicted=summary.steps_predicted,
        unknown=summary.steps_unknown,
        model_alone=sum(one is not None and not one.whole for one in known),
        wrong=wrong_steps(watched, spent),
        readings=len(readings),
        readings_wrong=sum(one.model_flops not in (None, true) for one, true in readings),
        readings_unknown=len(unknown),
        readings_unknown_late=sum(one.steps[0] >= len(data.sizes) // 2 for one in unknown),
        sums_agree=(summary.model_flops, summary.hardware_flops) == (model_flops, hardware_flops)
        and summary.steps_counted == counts["counted"]
        and summary.steps_unknown == known.count(None)
        and summary.steps_counted + summary.steps_predicted + summary.steps_unknown == len(data.sizes),
        in_order=[step.key for step in watched.steps] == _keys(data.batches),
        identical=(bare.losses, bare.weights) == (trained.losses, trained.weights),
        seconds=samples.elapsed_sec,
        outside_sec=samples.seconds,
        law=summary.law is not None,
        why_no_law=summary.unavailable.get("law", ""),
        report_says=law,
    )


def wrong_steps(watched: Watched, spent: Sequence[Spent]) -> int:
    """Of how many steps the run says something else than what they have *spent*, one by one."""
    known = [watched.known(step) for step in watched.steps]
    return sum(one is not None and not _agrees(one, true) for one, true in zip(known, spent, strict=True))


def _agrees(known: Foretold, true: Spent) -> bool:
    """Whether what is *known* is the truth, bucket by bucket; everything is computed in float32."""
    names = true._fields if known.whole else ("forward", "backward")
    buckets = {(name, "float32"): amount for name in names if (amount := getattr(true, name))}
    return {key: amount for key, amount in known.flops.items() if amount} == buckets


def _keys(batches: Sequence[Batch]) -> list[StepKey]:
    """What each step must have been booked by: the shapes of its one batch, if it is padded, and one update."""
    return [(((*(tuple(one.shape) for one in batch.values()), *_padding(batch)),), 1) for batch in batches]


def _padding(batch: Batch) -> list[tuple[int, int]]:
    """Whether every token is one, where a mask tells."""
    mask = batch.get("attention_mask")
    return [] if mask is None else [(-3, int(bool(mask.all())))]


def what_must_hold(cell: Cell, model: ByHand) -> list[str]:
    """Every promise that *cell* breaks, in words; none if all is well. The run was one without a limit of its time."""
    promises = {
        "a step is wrong": cell.wrong == 0,
        "a figure that was logged is wrong": cell.readings_wrong == 0,
        "the run's sums are not those of its steps": cell.sums_agree,
        "the steps were not booked one by one": cell.in_order,
        "training is another than without the profiler": cell.identical,
        "too many steps were counted": cell.outside <= MOST_COUNTED_OUTSIDE
        and cell.counted <= COUNTED_IN_WINDOW + MOST_COUNTED_OUTSIDE,
        # Of those that nobody gets none is left out before twenty in a row had the FLOPs of all their steps.
        "nothing was logged": cell.readings >= min(cell.steps // LOG_EVERY // 2, 20),
    }
    if model.has_law:
        promises["there is no law"] = cell.law
        promises["a step is n/a though there is a law"] = (cell.unknown, cell.model_alone) == (0, 0)
        # A size beyond those that were counted, such as the longest of all, may come late.
        promises["figures of the second half were n/a"] = cell.readings_unknown_late * LOG_EVERY <= cell.steps // 20
    else:
        promises["there is a law"] = not cell.law
        promises["the summary does not say why there is no law"] = "no polynomial" in cell.why_no_law
        promises["the report does not say why there is no law"] = bool(cell.report_says)
    return [words for words, holds in promises.items() if not holds]
