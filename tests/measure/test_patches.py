from __future__ import annotations

from typing import Any

from lightning_flops.measure.patches import listen
from lightning_flops.signals import Undo


class Base:
    def run(self, what: str) -> str:
        """Run it."""
        return what


def test_somebody_who_wrapped_us_in_turn_is_left_alone_and_we_are_silent() -> None:
    spied: list[str] = []
    with Undo() as undo:
        listen(undo, Base, "run", lambda self, what: spied.append(what))
        ours = Base.run
        theirs: Any = lambda self, what: ours(self, what).upper()  # noqa: E731
        Base.run = theirs  # type: ignore[method-assign]
        assert (Base().run("a"), spied) == ("A", ["a"])
    assert Base.run is theirs
    assert (Base().run("a"), spied) == ("A", ["a"])
