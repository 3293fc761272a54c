from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_flops.measure.module_hooks import _Hooks
from lightning_flops.signals import Undo


class Table:
    """Torch's table of hooks, in which another thread begins to hear while the first hook is being put up."""

    def __init__(self) -> None:
        self.callbacks: list[Callable[..., None]] = []
        self.meanwhile: list[Callable[[], None]] = []

    def register(self, callback: Callable[..., None]) -> Any:
        while self.meanwhile:
            self.meanwhile.pop()()
        self.callbacks.append(callback)
        return Handle(self, callback)


class Handle:
    def __init__(self, table: Table, callback: Callable[..., None]) -> None:
        self.id, self._table, self._callback = id(callback), table, callback

    def hooks_dict_ref(self) -> dict[int, Any]:
        return {id(one): one for one in self._table.callbacks}

    def remove(self) -> None:
        self._table.callbacks.remove(self._callback)


def test_two_that_begin_to_hear_at_the_same_moment_are_called_once_each_by_one_pair_of_hooks() -> None:
    table, heard, undo = Table(), list[str](), Undo()
    hooks = _Hooks(table.register, table.register, are_copied=True)

    def hear(name: str) -> None:
        hooks.hear(undo, lambda: heard.append(f"{name} begins"), lambda: heard.append(f"{name} ends"), None)

    table.meanwhile.append(lambda: hear("second"))
    hear("first")
    assert len(table.callbacks) == 2
    for callback in [*table.callbacks]:
        callback()
    assert heard == ["first begins", "second begins", "first ends", "second ends"]
    undo.close()
    assert table.callbacks == []
