"""How reports show themselves: ``report``, which makes their words, is found by its name when one is first shown."""

from __future__ import annotations

import importlib
from typing import Any, ClassVar, TypeVar

from lightning_flops.schema import codec

_T = TypeVar("_T", bound="Shown")


def above(module: str) -> Any:
    """The *module* of this package that knows these records, loaded at the first call."""
    return importlib.import_module(f"lightning_flops.{module}")


class Shown(codec.Json):
    """A report that shows itself."""

    __slots__ = ()
    VERSION: ClassVar[int]

    @classmethod
    def from_json(cls: type[_T], text: str) -> _T:
        """What ``to_json`` wrote as *text*.

        Raises:
            ProfileFormatError: *text* is no JSON, has another schema version, or a field is missing or wrong.
        """
        return codec.load(cls, text, version=cls.VERSION)

    def __repr__(self) -> str:
        """One line; ``to_json`` has every field."""
        return str(above("report.text").line(self))

    def __str__(self) -> str:
        """The report as text, the short one of a profile."""
        return str(above("report.text").render_text(self, detailed=False))

    def _repr_html_(self) -> str:
        """For a notebook: tables of the short report."""
        return str(above("report.text").render_html(self))
