"""Frozen dataclasses to JSON text and back, by msgspec, and how reports show themselves."""

from __future__ import annotations

import importlib
import json
from array import array
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from lightning_flops.errors import ProfileFormatError

_T = TypeVar("_T")

LONGEST_PROFILE = 1 << 28  #: Most characters that are read; one of 1,000 modules and a traced step has a million.


def dump(value: object, *, indented: bool = True) -> str:
    """JSON of the dataclass *value*, the same text for equal values, *indented* for people; ends with a line break.

    Raises:
        ProfileFormatError: a number in it is not finite.
    """
    plain = msgspec.to_builtins(value, enc_hook=_plain)
    try:
        text = json.dumps(plain, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise ProfileFormatError(f"a number of it is not finite, which JSON cannot hold: {error}") from error
    # A lone surrogate, which a module's description may contain, has no form in a file.
    text = text.encode("utf-8", "replace").decode()
    return (msgspec.json.format(text, indent=2) if indented else text) + "\n"


class Json:
    """A dataclass that has a JSON form, with its own version as the default of its field ``schema_version``.

    It goes up whenever a field of the class or of its records changes.
    """

    __slots__ = ()

    def to_json(self) -> str:
        """Indented JSON with the fields' names as keys; a ProfileFormatError if a number of it is not finite."""
        return dump(self)


class Printed:
    """What ``report`` draws, which is found by its name when something is first shown."""

    __slots__ = ()

    def __str__(self) -> str:
        """The report as text, the short one of a profile, ending in a line break."""
        return str(above("report.text").render_text(self, detailed=False))

    def _repr_html_(self) -> str:
        """The short report as tables, for a notebook."""
        return str(above("report.text").render_html(self))


class Shown(Json, Printed):
    """A report that is read back from its JSON."""

    __slots__ = ()

    @classmethod
    def from_json(cls: type[_T], text: str) -> _T:
        """What ``to_json`` wrote as *text*. Fields that the class does not have are passed over.

        Raises:
            ProfileFormatError: *text* is no JSON, has another schema version, or a field is missing or wrong.
        """
        if len(text) > LONGEST_PROFILE:
            raise ProfileFormatError(f"the profile is longer than {LONGEST_PROFILE:,} characters")
        known = {one.name: one.default for one in fields(cast("Any", cls))}
        found, version = _decoded(_Versioned, text).schema_version, known["schema_version"]
        if found != version:
            which = "a newer lightning-flops, so update this one" if found > version else "an older lightning-flops"
            raise ProfileFormatError(
                f"the profile has schema version {found}, and {version} is read here: it was written by {which}"
            )
        return _decoded(cls, text)

    def __repr__(self) -> str:
        """One line; ``to_json`` has every field."""
        return str(above("report.text").line(self))


def above(module: str) -> Any:
    """The *module* of this package that knows these records, loaded at the first call."""
    return importlib.import_module(f"lightning_flops.{module}")


_Versioned: Any = msgspec.defstruct("_Versioned", [("schema_version", int)])  # what a text says of its own form
_decoder: Any = cache(lambda cls: msgspec.json.Decoder(cls, dec_hook=_from_plain))


def _decoded(cls: type[_T], text: str) -> _T:
    try:
        return cast("_T", _decoder(cls).decode(text))
    except RecursionError as error:
        raise ProfileFormatError("the profile is nested too deep") from error
    except (msgspec.MsgspecError, ValueError) as error:
        raise ProfileFormatError(f"the profile cannot be read: {error}") from error


def _plain(value: object) -> object:
    # Also what is of a class below one of these, as torch's version is a text.
    kinds: Any = {array: list, str: str, int: int, float: float, Mapping: dict}
    for kind, plain in kinds.items():
        if isinstance(value, kind):
            return cast("object", plain(value))
    raise NotImplementedError(f"{type(value).__name__} has no JSON form here")


def _from_plain(kind: type, plain: Any) -> object:
    if kind is array and isinstance(plain, list) and all(type(item) is int for item in plain):
        return array("q", plain)
    raise ValueError("Expected `array` of integers")
