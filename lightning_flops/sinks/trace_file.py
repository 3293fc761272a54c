"""Keeps the trace file of one step, so written that viewers show modules and phases as the user's annotations."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from lightning_flops.analysis.trace_marks import PREFIXES
from lightning_flops.sinks.file import free_path, write_file

# torch records the fast marks as operators. In its trace files the category stands before the name.
_NAME = re.compile(rb'"name": "(' + b"|".join(json.dumps(mark)[1:-1].encode() for mark in PREFIXES) + b")")
_CATEGORY = re.compile(rb'"cat": "cpu_op"(?=,\s*' + _NAME.pattern + b")")
_ANNOTATION = b'"cat": "user_annotation"'


def keep_trace(path: str, folder: str, *, rank: int, step: int) -> str:
    """Copy a trace file that torch wrote, marks turned into annotations, and say where it lies now.

    Args:
        path: the local file.
        folder: path or URL of the folder it goes to, under a name that is free there.
        rank: the rank it is of.
        step: the step it is of.

    Raises:
        OSError: it cannot be read or written; the message names the file.
    """
    target = free_path(f"{folder.rstrip('/')}/rank{rank}_step{step}.pt.trace.json")
    write_file(target, _annotated(path))
    return target


def _annotated(path: str) -> Iterator[bytes]:
    with open(path, "rb") as file:
        before = b""
        for line in file:
            if _NAME.search(line) is None:
                yield before
                before = line
            else:
                yield _CATEGORY.sub(_ANNOTATION, before + line)
                before = b""
        yield before
