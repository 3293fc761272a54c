"""Models that are counted by hand, trained on 500 batches of random sizes by an engine; each part is a launch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.every_step import run
from tests.models_by_hand import MODELS, ByHand

PARTS = 4
"""One launch of all would take longer than a test may."""


def trains(model: ByHand) -> dict[str, Any]:
    """What was said of the run."""
    return run(model, "DeepSpeed", Path.cwd()).as_json()


def of_part(part: int) -> dict[str, Callable[[], dict[str, Any]]]:
    """The scenarios of every fourth model."""
    return {model.name: functools.partial(trains, model) for model in MODELS[part::PARTS]}
