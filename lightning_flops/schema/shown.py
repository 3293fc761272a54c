"""How reports show themselves in a notebook and in a console, and how they are read from files.

``report`` makes their words and ``sinks`` reads files, which these records do not know. The root of the package, which
knows every folder and is always imported first, says here where these are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


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

read: Callable[[str], Any] = _nowhere
"""Returns the profile that a path or URL stands for."""
