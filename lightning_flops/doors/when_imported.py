"""Says when somebody has imported a module, without importing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)


def when_imported(name: str, tell: Callable[[ModuleType], object]) -> None:
    """Call *tell* with the module *name*: now if the program has imported it, else when it has."""
    module = sys.modules.get(name)
    if module is not None:
        tell(module)
    else:
        sys.meta_path.insert(0, _Waiting(name, tell))


class _Waiting(MetaPathFinder):
    """Finds nothing itself: what the others find for one name tells us when it has been executed."""

    def __init__(self, name: str, tell: Callable[[ModuleType], object]) -> None:
        self._name = name
        self._tell = tell

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find for our name; nothing for any other."""
        if fullname != self._name:
            return None
        for finder in sys.meta_path:
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(fullname, path, target)
            if spec is not None:
                self._listen(spec.loader)
                return spec
        return None

    def _listen(self, loader: Any) -> None:
        """Hear of the module when *loader*, made for it alone, has executed it; who only asks executes nothing."""
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            self._heard(module)

        try:
            loader.exec_module = exec_module
        except AttributeError:
            logger.debug("the loader of %s does not tell when it is done", self._name)

    def _heard(self, module: ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        try:
            self._tell(module)
        except Exception:  # the import is the program's own
            logger.warning("%s could not be prepared for", self._name, exc_info=True)
