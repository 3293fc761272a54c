"""The account of a step that ran out of memory, made when the run is over and nothing of ours is left in it."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from lightning_flops.analysis.memory import MemoryPrediction
from lightning_flops.measure.predicted_memory.failed_step import failed_steps, is_out_of_memory
from lightning_flops.records import RunContext
from lightning_flops.report.predicted_document import headline
from lightning_flops.report.text import render_text
from lightning_flops.run.adapter import Adapter
from lightning_flops.signals import words_of
from lightning_flops.sinks.file import shown_path
from lightning_flops.units import package_logger, plain

logger = package_logger(__name__)

_QUICK_SEC = 5.0  # a prediction that took longer is not repeated for other batches: the user waits for the exception
_BY_HAND = "predict_memory(model, batch, optimizer) says what a step takes"


def account_for(error: BaseException | None, adapter: Adapter, context: Callable[[], RunContext]) -> None:
    """If *error* is of an allocator, say and write what the step takes that it ended. It raises nothing of ours."""
    if error is None or not is_out_of_memory(error) or adapter.facts.rank:
        return
    try:
        logger.warning("out of memory: %s", _account(error, adapter, context()))
    except Exception as failed:
        logger.warning("out of memory: the step is not accounted for: %s", words_of(failed))


def _account(error: BaseException, adapter: Adapter, context: RunContext) -> str:
    facts = adapter.facts
    if facts.world_size > 1:
        return f"of several ranks no step is predicted; {_BY_HAND}"
    steps = failed_steps(error, facts.root, adapter.optimizers(), precision=context.precision)
    if steps is None:
        return f"it was not raised in the model's forward; {_BY_HAND}"
    began = time.monotonic()
    prediction = MemoryPrediction(steps)
    quick = time.monotonic() - began < _QUICK_SEC
    cuda = facts.device.type == "cuda"
    available = torch.cuda.get_device_properties(facts.device).total_memory if cuda else None
    report = prediction.report(available_bytes=available, largest=quick and cuda, checkpoints=quick)
    path = facts.output.files.account(render_text(report))
    fits = "" if report.largest is None else f"; the largest batch that fits is {plain(report.largest.size)}"
    return f"a step would take this. {headline(report)}{fits}{f'. All of it: {shown_path(path)}' if path else ''}"
