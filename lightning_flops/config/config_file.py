"""Reads the file of a DeepSpeed config as DeepSpeed does."""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_flops.errors import ConfigError
from lightning_flops.units import shown


def read_config(path: str | Path) -> Mapping[str, Any]:
    """The JSON object in the file at *path*, which is a path or URL.

    Raises:
        ConfigError: the file cannot be read or does not hold a JSON object.
    """
    if not isinstance(path, (str, Path)):
        raise ConfigError(f"a DeepSpeed config must be an object or the path of a JSON file, got {shown(path)}")
    try:
        with _opened(str(path)) as file:
            value = json.loads(file.read().decode("utf-8-sig"), object_pairs_hook=_object_of_keys)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}: {error.msg}"
        raise ConfigError(f"the DeepSpeed config {path} is not valid JSON: {where}") from error
    except (OSError, ValueError, ImportError, RecursionError) as error:  # ImportError: a URL may need a package
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ConfigError(f"cannot read the DeepSpeed config {path}: {reason}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"the DeepSpeed config {path} must hold a JSON object, got {shown(value, chars=80)}")
    return value


def _opened(place: str) -> Any:
    if "://" in place or "::" in place:
        fsspec = importlib.import_module("fsspec")  # it takes a tenth of a second, and few need it here
        file_system, name = fsspec.core.url_to_fs(place)
        return file_system.open(name, "rb")
    return Path(place).expanduser().open("rb")  # not by fsspec, which cannot read a pipe


def _object_of_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of *pairs*; a key that is given twice is an error, as for DeepSpeed."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is given twice in one object")
    return found
