"""Every model that is counted by hand, trained on 500 batches of random sizes by an engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.every_step import run
from tests.models_by_hand import MODELS, ByHand


def trains(model: ByHand) -> dict[str, Any]:
    """What was said of the run."""
    return run(model, "DeepSpeed", Path.cwd()).as_json()


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {model.name: functools.partial(trains, model) for model in MODELS}
