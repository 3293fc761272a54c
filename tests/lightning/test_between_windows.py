"""What a fit leaves for the monitor's next reading comes to the same as what it tells at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback
from lightning_flops.analysis.step_keys import StepKey
from lightning_flops.session.session import Session
from tests.lengths import watch_sessions

ROWS = [4, 2, 4, 3, 4, 4, 1, 4, 4, 2, 4, 4, 3, 4, 4, 4, 2, 4, 4, 1]
"""Samples in each batch."""


class Net(LightningModule):
    """A layer; it asks to stop in the step of this number."""

    def __init__(self, stops_at: int | None = None) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.stops_at = stops_at

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        self.trainer.should_stop = self.trainer.should_stop or self.global_step == self.stops_at
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Manual(Net):
    """Updates by itself, in every second batch twice; the first time by an optimizer that Lightning does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:  # type: ignore[override]
        for own in (True, False)[: 1 + batch_idx % 2]:
            optimizer: Any = self.optimizers(use_pl_optimizer=not own)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()


class Changing(Net):
    """Leaves half of its batch."""

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        batch[0] = batch[0][::2]
        return loss


class Masked(Net):
    """Its batches tell their tokens."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step([batch["x"]], batch_idx)


def found(
    net: type[Net], monkeypatch: pytest.MonkeyPatch, folder: Path, *, arguments: dict[str, Any], **settings: Any
) -> dict[str, Any]:
    """What the monitor has found in a fit, times apart."""
    settings = dict(settings)
    sessions = watch_sessions(monkeypatch)
    read: list[int] = []
    write = Session._write_reading

    def writes(session: Session, *args: Any) -> None:
        read.append(session._door.x_axis())
        write(session, *args)

    monkeypatch.setattr(Session, "_write_reading", writes)
    torch.manual_seed(0)
    module = net(**settings)
    batches: list[Any] = [[torch.ones(rows, 3)] for rows in ROWS]
    if net is Masked:
        mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
        batches = [{"x": torch.ones(rows, 3), "attention_mask": mask[:rows]} for rows in ROWS]
    loader: DataLoader[Any] = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    trainer = Trainer(
        accelerator="cpu", max_epochs=3, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder,
        callbacks=[FlopsProfilerCallback(timing_steps=2, trace=False)], **{"log_every_n_steps": 7, **arguments},
    )  # fmt: skip
    trainer.fit(module, loader)
    (session,) = sessions
    assert session.monitor is not None
    totals, books = session.monitor.totals(), session.flops.books.totals()
    return {
        "keys": dict(books.keys),
        "timed": {key: its.steps for key, its in session.flops.books.seconds_by_key().items()},
        "waits": None if totals.reader_sec is None else totals.reader_sec.number,
        "batches": totals.batches,
        "samples": totals.samples,
        "tokens": totals.tokens,
        "known": (books.steps_counted, books.steps_predicted, books.steps_unknown, books.model_flops),
        "steps": session.steps.steps_done,
        "readings": read,
        "notes": session.notes.of_report(),
        "weights": [weight.tolist() for weight in module.parameters()],
    }


FITS: dict[str, tuple[type[Net], dict[str, Any], dict[str, Any]]] = {
    "usual": (Net, {}, {}),
    "groups of three and a short one": (Net, {}, {"accumulate_grad_batches": 3}),
    "read seldom": (Net, {}, {"log_every_n_steps": 1000}),
    "never read": (Net, {}, {"log_every_n_steps": 0}),
    "asked to stop, and goes on": (Net, {"stops_at": 24}, {"min_epochs": 3}),
    "manual": (Manual, {}, {}),
    "steps that change their batches": (Changing, {}, {}),
    "with tokens": (Masked, {}, {}),
}


@pytest.mark.parametrize("fit", FITS)
def test_what_is_noted_comes_to_what_is_told_at_once(fit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    net, settings, arguments = FITS[fit]
    with monkeypatch.context() as patched:
        noted = found(net, patched, tmp_path, arguments=arguments, **settings)
    with monkeypatch.context() as patched:
        patched.setattr(Session, "_batches_to_spare", lambda session: 0)
        at_once = found(net, patched, tmp_path, arguments=arguments, **settings)
    assert noted == at_once


def test_the_steps_of_a_fit_are_those_of_its_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = found(Net, monkeypatch, tmp_path, arguments={})
    # Step 1 of 60 is counted, and in no figure of the monitor.
    assert (run["steps"], run["batches"], run["samples"]) == (60, 59, 3 * sum(ROWS) - ROWS[1])
    keys: dict[StepKey, int] = {((((rows, 3),),), 1): 3 * ROWS.count(rows) for rows in (1, 2, 3, 4)}
    keys[((((ROWS[1], 3),),), 1)] -= 1
    assert run["keys"] == run["timed"] == keys
