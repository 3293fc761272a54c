"""How a private name of torch is looked up: once, with a stand-in, and a sentence on what is lost without it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)

TABLE: dict[str, PrivateName] = {}
"""The private names that were declared so far, by path."""

LOST: list[str] = []
"""What this torch lacks, in sentences for the report of every run that counts."""


@dataclass(slots=True, eq=False)
class PrivateName:
    """One private name of torch."""

    path: str
    """``module:attribute``, such as ``torch._C:_current_graph_task_id``; a class's attribute has the class in front."""
    loss: str
    """What is lost without it: goes on after "This torch (2.13.0) ", and has no full stop."""
    reported: bool
    """Reports say what is lost; else the log alone does, because no number changes."""
    attempt: Callable[[], object]
    """Looks it up if nobody has yet."""
    missing: bool = False
    """It was looked up in vain."""

    @property
    def sentence(self) -> str:
        """What is lost, as people read it."""
        return f"This torch ({torch.__version__}) {self.loss}."

    def lose(self) -> None:
        """Says that this torch does not have it, once."""
        if self.missing:
            return
        self.missing = True
        if self.reported and self.sentence not in LOST:
            LOST.append(self.sentence)
        level = logging.WARNING if self.reported else logging.INFO
        logger.log(level, "%s (%s is missing)", self.sentence, self.path, exc_info=True)


def look_up(path: str) -> Any:
    """What torch has under *path*.

    Raises:
        Exception: it has nothing there; importing a part of torch may raise anything.
    """
    module, _, attributes = path.partition(":")
    found: Any = import_module(module)
    for name in attributes.split("."):
        found = getattr(found, name)
    return found


def take(
    path: str,
    stand_in: Any,
    loss: str,
    *,
    works: Callable[[Any], object] | None = None,
    reported: bool = True,
) -> Any:
    """What torch has under *path*, looked up now; *stand_in* where it has nothing there.

    For names in modules that ``import torch`` has imported anyway.

    Args:
        path: as ``PrivateName`` has it.
        stand_in: is used instead.
        loss: as ``PrivateName`` has it.
        works: tries what was found, and raises if it is not what it should be.
        reported: as ``PrivateName`` has it.
    """
    return take_later(path, stand_in, loss, works=works, reported=reported)()


def take_later(
    path: str,
    stand_in: Any,
    loss: str,
    *,
    works: Callable[[Any], object] | None = None,
    reported: bool = True,
) -> Callable[[], Any]:
    """A function that returns the same, and looks it up at its first call: for names that few runs need."""

    @functools.cache
    def found() -> Any:
        try:
            there = look_up(path)
            if works is not None:
                works(there)
        except Exception:
            name.lose()
            return stand_in
        return there

    name = TABLE[path] = PrivateName(path, loss, reported, found)
    return found


class Attribute:
    """A private attribute of torch's objects that their class does not show: it is looked up on each object.

    Args:
        owner: path of the class, or of the module where it is an attribute of that.
        attribute: the attribute's name.
        loss: as ``PrivateName`` has it.
        reported: as ``PrivateName`` has it.
    """

    def __init__(self, owner: str, attribute: str, loss: str, *, reported: bool = True) -> None:
        path = f"{owner}.{attribute}" if ":" in owner else f"{owner}:{attribute}"
        self._attribute = attribute
        self.name = TABLE[path] = PrivateName(path, loss, reported, self._attempt)

    def of(self, owner: Any) -> Any:
        """The attribute's value on *owner*, which should have it.

        Raises:
            AttributeError: it has none. What is lost has been said then.
        """
        try:
            return getattr(owner, self._attribute)
        except AttributeError:
            self.name.lose()
            raise

    def get(self, owner: Any, stand_in: Any) -> Any:
        """The same; *stand_in* where *owner* has none."""
        try:
            return self.of(owner)
        except AttributeError:
            return stand_in

    def _attempt(self) -> object:
        return self.get(object(), None)
