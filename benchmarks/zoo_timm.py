"""timm."""

from __future__ import annotations
import enum
import importlib.machinery
import sys
import types
from typing import Any


class _Nothing(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "InterpolationMode":
            kinds = ("NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")
            return enum.Enum(name, {kind: kind.lower() for kind in kinds})
        return type(name, (), {})


class _Finder:
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == "torchvision" or name.startswith("torchvision."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _Nothing(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_in_for_torchvision() -> None:
    from transformers.utils import import_utils

    import_utils.is_torchvision_available()  # asked once and remembered: transformers must not take it for the real one
    import_utils.is_torchvision_v2_available()
    sys.meta_path.append(_Finder())


stand_in_for_torchvision()


def architectures() -> dict[str, str]:
    """None yet."""
    return {}
