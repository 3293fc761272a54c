"""What a Trainer's batches leave for the monitor's next reading comes to the same as what is told at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lightning_flops import FlopsProfilerTrainerCallback
from lightning_flops.records import BatchTokens
from lightning_flops.session.session import Session
from tests.lengths import watch_sessions
from tests.transformers.tiny import BATCH, LENGTH, Sentences, new_trainer


def found(monkeypatch: pytest.MonkeyPatch, folder: Path, **given: Any) -> dict[str, Any]:
    """What the monitor has found in two epochs of 22 batches, of which the last has 2 sentences; times apart."""
    sessions = watch_sessions(monkeypatch)
    read: list[int] = []
    write = Session._write_reading

    def writes(session: Session, *args: Any) -> None:
        read.append(session._door.x_axis())
        write(session, *args)

    monkeypatch.setattr(Session, "_write_reading", writes)
    profiler = FlopsProfilerTrainerCallback(timing_steps=2, trace=False)
    trainer = new_trainer(
        folder, profiler, data=Sentences(21 * BATCH + 2), num_train_epochs=2, **{"logging_steps": 7, **given}
    )
    trainer.train()
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
    }


TRAININGS: dict[str, dict[str, Any]] = {
    "usual": {},
    "groups of three and a short one": {"gradient_accumulation_steps": 3, "logging_steps": 4},
    "read seldom": {"logging_steps": 1000},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 9, "eval_dataset": Sentences(2 * BATCH)},
}


@pytest.mark.parametrize("training", TRAININGS)
def test_what_is_noted_comes_to_what_is_told_at_once(
    training: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with monkeypatch.context() as patched:
        noted = found(patched, tmp_path, **TRAININGS[training])
    with monkeypatch.context() as patched:
        patched.setattr(Session, "_batches_to_spare", lambda session: 0)
        at_once = found(patched, tmp_path, **TRAININGS[training])
    assert noted == at_once


def test_the_steps_of_a_training_are_those_of_its_batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = found(monkeypatch, tmp_path)
    # Twice 86 sentences; step 0 is counted, and in no figure of the monitor.
    assert (run["steps"], run["batches"], run["samples"]) == (44, 43, 2 * 86 - BATCH)
    tokens: BatchTokens = run["tokens"]
    assert tokens.processed == 168 * LENGTH
    assert {shapes[0][0] for (shapes,), _ in run["keys"]} == {BATCH, 2}
    assert sum(run["timed"].values()) == 43
