"""A dataclass split into its numbers and the rest: thousands of ranks share the rest, and it is read only once."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import repeat
from typing import Any, Generic, NamedTuple, TypeVar

from lightning_flops.schema.communication import Integers

_T = TypeVar("_T")


class Numbers(NamedTuple):
    """The values left open in a template, by kind."""

    integers: Sequence[int]
    floats: Sequence[float]
    arrays: Sequence[Integers]
    texts: Sequence[str]


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a dataclass, tuple or mapping is built from what is always the same and what is left open.

    First come its own whole numbers, floats, arrays and texts, then those of each part inside it.
    """

    make: Callable[..., Any]
    """Builds the value from all its parts by key: field, place or name. Of a dataclass the parts are keyword arguments,
    which saves a call for each."""
    by_keyword: bool
    constants: dict[Any, Any]
    integers: tuple[Hashable, ...]
    floats: tuple[Hashable, ...]
    arrays: tuple[Hashable, ...]
    texts: tuple[Hashable, ...]
    inside: tuple[tuple[Hashable, _Plan], ...]

    def fill(
        self,
        integer: Callable[[], int],
        number: Callable[[], float],
        integers: Callable[[], Integers],
        text: Callable[[], str],
    ) -> Any:
        # For thousands of ranks: the fewest calls for each number.
        parts = self.constants.copy()
        for key in self.integers:
            parts[key] = integer()
        for key in self.floats:
            parts[key] = number()
        for key in self.arrays:
            parts[key] = integers()
        for key in self.texts:
            parts[key] = text()
        for key, plan in self.inside:
            parts[key] = plan.fill(integer, number, integers, text)
        return self.make(**parts) if self.by_keyword else self.make(parts)

    def open_parts(self, value: Any, kind: str) -> Iterator[Any]:
        parts = dict(_parts(value) or ())
        for key in getattr(self, kind):
            yield parts[key]
        for key, plan in self.inside:
            yield from plan.open_parts(parts[key], kind)


class Template(Generic[_T]):
    """A value in which every int, float and array is left open, and the texts of some fields.

    Args:
        value: a dataclass of ints, floats, texts, arrays, and of dataclasses, tuples and mappings of such.
        open_texts: names of the fields whose texts are left open.
    """

    def __init__(self, value: _T, *, open_texts: Collection[str] = ()) -> None:
        plan = _plan(value, open_texts)
        assert plan is not None, "a value with numbers"
        self._plan = plan
        self._lengths = tuple(map(len, self.split(value)))

    def split(self, value: _T) -> Numbers:
        """What *value*, which fits the template, has in the places that are left open."""
        return Numbers(*(list(self._plan.open_parts(value, kind)) for kind in Numbers._fields))

    def empty(self) -> _T:
        """The value with 0, 0.0, an empty array and an empty text in the places that are left open."""
        value: _T = self._plan.fill(repeat(0).__next__, repeat(0.0).__next__, lambda: array("q"), repeat("").__next__)
        return value

    def fill(self, numbers: Numbers) -> _T:
        """The value with these *numbers* in the places that are left open, in the order of ``split``.

        Raises:
            ValueError: they are more or fewer than there are places.
        """
        if tuple(map(len, numbers)) != self._lengths:
            raise ValueError("there are not as many numbers as places for them")
        value: _T = self._plan.fill(
            iter(numbers.integers).__next__,
            iter(numbers.floats).__next__,
            iter(numbers.arrays).__next__,
            iter(numbers.texts).__next__,
        )
        return value


def _plan(value: Any, open_texts: Collection[str]) -> _Plan | None:
    """None if nothing in *value* is left open."""
    parts = _parts(value)
    if parts is None:
        return None
    inside = tuple((key, plan) for key, part in parts if (plan := _plan(part, open_texts)) is not None)
    plan = _Plan(
        make=_maker(value),
        by_keyword=is_dataclass(value),
        constants={},
        integers=tuple(key for key, part in parts if type(part) is int),
        floats=tuple(key for key, part in parts if type(part) is float),
        arrays=tuple(key for key, part in parts if isinstance(part, array)),
        texts=tuple(key for key, part in parts if key in open_texts and isinstance(part, str)),
        inside=inside,
    )
    left_open = {*plan.integers, *plan.floats, *plan.arrays, *plan.texts, *(key for key, _ in inside)}
    plan.constants.update((key, part) for key, part in parts if key not in left_open)
    return plan if left_open else None


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """What *value* consists of, by key; None if it is no dataclass, tuple or mapping."""
    if isinstance(value, tuple):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


def _maker(value: Any) -> Callable[..., Any]:
    if isinstance(value, tuple):
        places = range(len(value))
        return lambda parts: tuple([parts[place] for place in places])
    if isinstance(value, Mapping):
        names = tuple(value)
        return lambda parts: {name: parts[name] for name in names}
    kind: Callable[..., Any] = type(value)
    return kind
