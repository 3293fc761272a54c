"""What looks for us on other people's objects sees what comes and goes."""

from __future__ import annotations

import pytest

from tests.left_on_objects import left_on_classes, left_on_object


class Theirs:
    def step(self) -> None:
        """Steps."""


def of_ours() -> None:
    """Stands for a wrapper."""


of_ours.__module__ = "lightning_flops.somewhere"


def test_what_is_put_on_a_class_that_was_looked_at_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    thing = Theirs()
    assert left_on_object(thing) == left_on_classes(thing) == []
    with monkeypatch.context() as patching:
        patching.setattr(Theirs, "step", of_ours)
        assert left_on_classes(thing) == ["Theirs.step"]
        assert left_on_object(thing) == ["Theirs.step"]
    assert left_on_classes(thing) == []
    with monkeypatch.context() as patching:
        patching.setattr(Theirs, "new", of_ours, raising=False)
        assert left_on_classes(thing) == ["Theirs.new"]


def test_what_is_put_on_an_object_is_seen() -> None:
    thing = Theirs()
    thing.step = of_ours  # type: ignore[method-assign]
    thing.number, thing.words = 1, "lightning_flops"  # type: ignore[attr-defined]
    assert left_on_object(thing) == ["step"]
