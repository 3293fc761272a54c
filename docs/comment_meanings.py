"""An extension of griffe for the package's ``#:`` comments, which say on a field's line, or above it, what it means.

Sphinx reads such comments by itself; griffe, which the site's reference and docs/write_profile_pages.py ask, does not.
"""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import griffe

MARK = "#:"


class CommentMeanings(griffe.Extension):
    """The comments of an attribute without a docstring as its docstring."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Join the comments above *attr*, and the one on its last line."""
        if attr.docstring or attr.lineno is None or attr.endlineno is None:
            return
        lines = attr.lines_collection[attr.filepath]  # type: ignore[index]  # a folder without modules has several
        above = list(takewhile(lambda line: line.lstrip().startswith(MARK), reversed(lines[: attr.lineno - 1])))
        comments = [line.partition(MARK)[2].strip() for line in (*reversed(above), lines[attr.endlineno - 1])]
        if meaning := "\n".join(filter(None, comments)):
            attr.docstring = griffe.Docstring(meaning, parent=attr)
