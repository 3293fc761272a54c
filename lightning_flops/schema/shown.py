"""How reports show themselves in a notebook and in a console, and how they are read from files.

``report`` makes their words and ``sinks`` reads files, which these records do not know. The root of the package, which
knows every folder and is always imported first, says here where these are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Protocol, TypeVar

from lightning_flops.schema import codec

_T = TypeVar("_T", bound="Shown")


class Renderers(Protocol):
    """What shows a report, by its class."""

    line: Callable[[Any], str]
    text: Callable[[Any], str]
    html: Callable[[Any], str]
    whole_page: Callable[[Any], str]


def _nowhere(path: str = "") -> Any:
    raise LookupError("lightning_flops/__init__.py has not run")


find: Callable[[], Renderers] = _nowhere
"""Returns the renderers, which are imported at the first call."""


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
        return find().line(self)

    def __str__(self) -> str:
        """The report as text, the short one of a profile."""
        return find().text(self)

    def _repr_html_(self) -> str:
        """For a notebook: tables of the short report."""
        return find().html(self)


read: Callable[[str], Any] = _nowhere
"""Returns the profile that a path or URL stands for."""
