"""A dataclass without its numbers, and the numbers: what thousands of ranks have in common is then read only once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import repeat
from typing import Any, Generic, TypeVar

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Plan:
    """How a dataclass, tuple or mapping is put together of what is always the same and of numbers that come in a row.

    First its own whole numbers, then its own floats, then those of each part inside it.
    """

    make: Callable[[dict[Any, Any]], Any]
    """Of all parts by key: field, place or name."""
    constants: dict[Any, Any]
    integers: tuple[Hashable, ...]
    floats: tuple[Hashable, ...]
    inside: tuple[tuple[Hashable, _Plan], ...]

    def fill(self, next_integer: Callable[[], int], next_float: Callable[[], float]) -> Any:
        # For thousands of ranks: the fewest calls for each number.
        parts = self.constants.copy()
        for key in self.integers:
            parts[key] = next_integer()
        for key in self.floats:
            parts[key] = next_float()
        for key, plan in self.inside:
            parts[key] = plan.fill(next_integer, next_float)
        return self.make(parts)


class NumberTemplate(Generic[_T]):
    """A value whose numbers are left open.

    Args:
        value: frozen dataclasses, tuples and mappings of each other; every int and every float in it is open.
    """

    def __init__(self, value: _T) -> None:
        self._plan = _plan(value)

    def fill(self, integers: Sequence[int], floats: Sequence[float]) -> _T:
        """The value with these numbers, as ``split_numbers`` orders them.

        Raises:
            ValueError: they are more or fewer than there are places.
        """
        left_integers, left_floats = iter(integers), iter(floats)
        try:
            value: _T = self._plan.fill(left_integers.__next__, left_floats.__next__)
        except StopIteration:
            raise ValueError("there are fewer numbers than places for them") from None
        if any(True for _ in left_integers) or any(True for _ in left_floats):
            raise ValueError("there are more numbers than places for them")
        return value


def split_numbers(value: _T) -> tuple[_T, list[int], list[float]]:
    """*value* with 0 in place of each int and 0.0 in place of each float, and those numbers in a row each."""
    plan = _plan(value)
    empty = plan.fill(repeat(0).__next__, repeat(0.0).__next__)
    return empty, list(_numbers(value, plan, "integers")), list(_numbers(value, plan, "floats"))


def _numbers(value: Any, plan: _Plan, which: str) -> Iterator[Any]:
    parts = dict(_parts(value) or ())
    for key in getattr(plan, which):
        yield parts[key]
    for key, inside in plan.inside:
        yield from _numbers(parts[key], inside, which)


def _plan(value: Any) -> _Plan:
    parts = _parts(value)
    assert parts is not None, "a value with parts"
    inside = tuple((key, _plan(part)) for key, part in parts if _parts(part) is not None)
    open_keys = {key for key, _ in inside} | {key for key, part in parts if type(part) in (int, float)}
    return _Plan(
        make=_maker(value),
        constants={key: part for key, part in parts if key not in open_keys},
        integers=tuple(key for key, part in parts if type(part) is int),
        floats=tuple(key for key, part in parts if type(part) is float),
        inside=inside,
    )


def _parts(value: Any) -> list[tuple[Any, Any]] | None:
    """What *value* consists of, by key; None if it is no dataclass, tuple or mapping."""
    if isinstance(value, tuple):
        return list(enumerate(value))
    if isinstance(value, Mapping):
        return list(value.items())
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return None


def _maker(value: Any) -> Callable[[dict[Any, Any]], Any]:
    if isinstance(value, tuple):
        places = range(len(value))
        return lambda parts: tuple([parts[place] for place in places])
    if isinstance(value, Mapping):
        names = tuple(value)
        return lambda parts: {name: parts[name] for name in names}
    kind = type(value)
    return lambda parts: kind(**parts)
