"""A call as soon as the program has imported a module, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_flops.units import package_logger

logger = package_logger(__name__)


def when_imported(name: str, notify: Callable[[ModuleType], object]) -> None:
    """Call *notify* with the module *name*: now if the program has imported it, otherwise as soon as it has.

    If *notify* raises, this is logged; the import goes on. Looking for the module (``find_spec``) does not count as an
    import: transformers, for example, asks whether deepspeed is installed. After a failed import we wait for the next.
    """

    def imported(module: ModuleType) -> None:
        try:
            notify(module)
        except Exception:  # the program must get its module, whatever fails on our side
            logger.warning("the FLOPs profiler could not be installed for %s; the program goes on", name, exc_info=True)

    if (module := sys.modules.get(name)) is not None:
        imported(module)
    else:
        sys.meta_path.insert(0, _ImportWatch(name, imported))


@dataclass(eq=False)
class _ImportWatch(MetaPathFinder):
    """A finder that finds one module through the other finders, until that module has been imported."""

    name: str
    imported: Callable[[ModuleType], None]

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """What the other finders find, with a loader that notifies us; None for every other module."""
        if fullname != self.name:
            return None
        finders = [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]
        spec = next(filter(None, (one.find_spec(fullname, path, target) for one in finders)), None)
        loader: Any = getattr(spec, "loader", None)
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == self.name and self in sys.meta_path:  # a zip file's modules have one loader
                vars(loader).pop("exec_module", None)
                sys.meta_path.remove(self)
                self.imported(module)

        loader.exec_module = exec_module
        return spec
