"""Names that are not settings, and the setting that each is most like."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from lightning_flops.config.values import BLOCK
from lightning_flops.errors import ConfigError
from lightning_flops.text.json_text import shown

_LONGEST = 300
"""Characters of a warning about a block. A value in it may be as long as a file."""


def clipped(text: str) -> str:
    """*text*, cut short where it is too long for a warning."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def nearest(name: object, known: Iterable[str]) -> str:
    """The one of *known* that is most like *name*; the first one if several are."""
    text = clipped(name if isinstance(name, str) else shown(name))
    return max(known, key=lambda other: difflib.SequenceMatcher(None, text, other).ratio())


def refuse_unknown(names: Iterable[object], *, known: Iterable[str], owner: str = "") -> None:
    """Raise an error if one of *names* is not in *known*.

    Raises:
        ConfigError: one is not. The message names the nearest setting, and *owner*, which knows only some settings.
    """
    known = list(known)
    for name in names:
        if name not in known:
            named = str(name) if isinstance(name, str) and re.fullmatch(r"[ -~]{1,60}", name) else shown(name, chars=60)
            near = difflib.get_close_matches(named, known, n=1)
            hint = f", did you mean {near[0]}?" if near else f"; the settings are {', '.join(known)}"
            raise ConfigError(f"{BLOCK}.{named} is not a setting{f' of {owner}' if owner else ''}{hint}")
