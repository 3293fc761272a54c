"""Tells when the program has imported a module, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)


def when_imported(name: str, tell: Callable[[ModuleType], object]) -> None:
    """Call *tell* with the module *name*: now if the program has imported it, otherwise as soon as it has.

    If *tell* raises, this is logged and the import goes on. Looking for the module (``find_spec``) does not count as an
    import. After a failed import we wait for the next one.
    """
    module = sys.modules.get(name)
    if module is not None:
        _tell(tell, module)
    else:
        sys.meta_path.insert(0, _ImportWatch(name, tell))


def _tell(tell: Callable[[ModuleType], object], module: ModuleType) -> None:
    try:
        tell(module)
    except Exception:  # the program must get its module, whatever fails on our side
        logger.warning(
            "the FLOPs profiler could not be installed for %s; the program goes on", module.__name__, exc_info=True
        )


class _ImportWatch(MetaPathFinder):
    """A finder that finds one module through the other finders, until that module has been imported."""

    def __init__(self, name: str, tell: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._tell = tell

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find, with a loader that calls us; None for every other module."""
        try:
            if fullname != self._name:
                return None
        except Exception:  # the program must get every module, whatever fails on our side
            return None
        # Finding is not importing: transformers, for example, only asks whether deepspeed is installed.
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _TellingLoader(spec.loader, self._imported)
                return spec
        return None

    def _imported(self, module: ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            _tell(self._tell, module)


class _TellingLoader(Loader):
    """Puts a module's own loader back, loads the module with it, and then calls *tell*."""

    def __init__(self, loader: Loader, tell: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._tell = tell

    def __getattr__(self, name: str) -> Any:
        """Every other attribute is the module's own loader's."""
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the module's own loader does; then calls *tell*."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._tell(module)
