"""Reads the file of a DeepSpeed config as DeepSpeed does, up to a length."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning_flops.errors import ConfigError
from lightning_flops.text.printable import shown

_LONGEST_CONFIG = 1 << 20
"""Bytes. A DeepSpeed config has some thousand."""


def read_config(path: str | Path) -> Mapping[str, Any]:
    """The JSON object in the file at *path*, which is a path or URL.

    Raises:
        ConfigError: the file cannot be read, is too long, or does not hold a JSON object.
    """
    if not isinstance(path, (str, Path)):
        raise ConfigError(f"a DeepSpeed config must be an object or the path of a JSON file, got {shown(path)}")
    place = str(path)
    try:
        with ExitStack() as stack:
            if "://" in place or "::" in place:
                fsspec = importlib.import_module("fsspec")  # it takes a tenth of a second, and few need it here
                file_system, name = fsspec.core.url_to_fs(place)
                file = stack.enter_context(file_system.open(name, "rb"))
            else:  # not by fsspec, which looks for the end of a file first and so cannot read a pipe
                file = stack.enter_context(Path(os.path.expanduser(place)).open("rb"))
            content = file.read(_LONGEST_CONFIG + 1)
        if len(content) > _LONGEST_CONFIG:
            raise ConfigError(f"the DeepSpeed config {path} is longer than {_LONGEST_CONFIG:,} bytes")
        text = content.decode("utf-8-sig")
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError) as error:  # ImportError: the URL needs a package that is not installed
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ConfigError(f"cannot read the DeepSpeed config {path}: {reason}") from error
    try:
        value = json.loads(text, object_pairs_hook=_object_of_keys)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}: {error.msg}"
        raise ConfigError(f"the DeepSpeed config {path} is not valid JSON: {where}") from error
    except (ValueError, RecursionError) as error:  # a key given twice, or brackets or digits beyond Python's bounds
        raise ConfigError(f"the DeepSpeed config {path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"the DeepSpeed config {path} must hold a JSON object, got {shown(value, chars=80)}")
    return value


def _object_of_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of *pairs*; a key that is given twice is an error, as for DeepSpeed."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice in one object")
    return found
