"""What a training raises reaches the user; what we raise is one warning. Nothing of the profiler is left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainerCallback

from tests.left_on_torch import torch_state
from tests.transformers.tiny import ROWS, Rows, footprint, new_net_trainer, profiler


class Broken(Exception):
    pass


def raises_at(place: str, step: int, error: BaseException) -> tuple[type[Trainer], TrainerCallback]:
    """A Trainer, or a callback of one, that raises *error* at *place* after *step* steps."""

    def due(state: Any) -> bool:
        return bool(state.global_step >= step)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if due(self.state):
            raise error
        return getattr(Trainer, place)(self, *args, **kwargs)

    def event(self: Any, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if due(state):
            raise error

    if place.startswith("on_"):
        return Trainer, type("Raises", (TrainerCallback,), {place: event})()
    return type("Raises", (Trainer,), {place: method}), TrainerCallback()


PLACES = ("get_batch_samples", "compute_loss", "log", "evaluate", "_save_checkpoint", "on_step_end", "on_epoch_begin")


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("step", [1, 4], ids=["while counted", "while timed"])
def test_an_exception_leaves_nothing_behind(place: str, step: int, tmp_path: Path) -> None:
    def left(*callbacks: Any) -> dict[str, Any]:
        kind, raises = raises_at(place, step, Broken(place))
        trainer = new_net_trainer(
            tmp_path, *callbacks, raises, kind=kind, gradient_accumulation_steps=2, num_train_epochs=2,
            eval_strategy="steps", eval_steps=1, eval_dataset=Rows(ROWS), save_strategy="steps", save_steps=1,
            logging_steps=1,
        )  # fmt: skip
        before = torch_state()
        with pytest.raises(Broken, match=place):
            trainer.train()
        assert torch_state() == before
        return footprint(trainer)

    callback = profiler()
    assert left(callback) == left()
    if step == 4:
        assert callback.profile is not None
        assert "Training was interrupted by Broken." in callback.profile.notes
