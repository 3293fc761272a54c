"""Work that no dispatcher knows of: inductor's own kernels for matrix products and attention, replayed CUDA graphs."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_flops.instrument.border import Failed, UndoLedger, listening
from lightning_flops.instrument.patches import Patches
from lightning_flops.instrument.torch_private.compiler import generated_modules

_DEFINITION = re.compile(r"^(\w+) = async_compile\.\w+\((.*?)^'''", re.MULTILINE | re.DOTALL)
"""A kernel in inductor's generated code: its name, and its source up to the closing quotes."""

_TEMPLATE = re.compile(r"triton_tem_|micro_gemm|cutlass_|flex_attention")
"""What stands in the name or the source of such a kernel, and in no other."""

_kernels_of_file: dict[str, tuple[str, ...]] = {}


class _Heard:
    """Stands for a kernel in generated code, and tells when it runs."""

    def __init__(self, kernel: Any, name: str, heard: Callable[[str], None], failed: Failed) -> None:
        self._kernel = kernel
        self._name = name
        self._heard = heard
        self._failed = failed

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            self._heard(f"inductor.{self._name}")
        except Exception as error:
            self._failed("a compiled kernel", error)
        return self._kernel(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """A Triton kernel's launch."""
        try:
            self._heard(f"inductor.{self._name}")
        except Exception as error:
            self._failed("a compiled kernel", error)
        return self._kernel.run(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)


def hear_kernels(undo: UndoLedger, heard: Callable[[str], None], failed: Failed) -> Callable[[], None]:
    """Calls *heard* with the name of each of inductor's own kernels when it runs.

    Args:
        undo: puts the generated code back.
        heard: gets the name.
        failed: is told what *heard* raised.

    Returns:
        What to call when more code was generated.
    """
    replaced: list[tuple[dict[str, Any], str, Any, Any]] = []

    def refresh() -> None:
        known = {(id(module), name) for module, name, _, _ in replaced}
        for module, name in _kernels():
            if (id(module), name) not in known:
                kernel = module[name]
                stand_in = _Heard(kernel, name, heard, failed)
                replaced.append((module, name, stand_in, kernel))
                module[name] = stand_in

    def put_back() -> None:
        while replaced:
            module, name, stand_in, kernel = replaced[-1]
            current = module.get(name)
            if current is stand_in:
                module[name] = kernel
            else:
                _take_out(current, stand_in, kernel)
            replaced.pop()

    undo.add(put_back)
    refresh()
    return refresh


def hear_replays(undo: UndoLedger, heard: Callable[[str], None], failed: Failed) -> None:
    """Calls *heard* whenever a CUDA graph is replayed, whoever captured it: inductor, or the user by hand."""
    graph = getattr(torch.cuda, "CUDAGraph", None)
    patches = Patches()

    def hear(replay: Callable[..., Any]) -> Callable[..., Any]:
        return listening(
            replay, before=lambda *args: heard("cuda.graph_replay"), failed=partial(failed, "a replayed CUDA graph")
        )

    undo.add(patches.undo)
    if graph is not None and hasattr(graph, "replay"):
        patches.replace(graph, "replay", hear)


def _take_out(outer: Any, stand_in: _Heard, kernel: Any) -> None:
    """Another counter, entered later and left later, has its stand-in around ours."""
    while isinstance(outer, _Heard):
        if outer._kernel is stand_in:
            outer._kernel = kernel
            return
        outer = outer._kernel


def _kernels() -> list[tuple[dict[str, Any], str]]:
    """The namespaces of inductor's generated modules, each with the name of such a kernel in it."""
    found: list[tuple[dict[str, Any], str]] = []
    for module in generated_modules():
        file = getattr(module, "__file__", None)
        if file is None:
            continue
        if file not in _kernels_of_file:
            _kernels_of_file[file] = _template_kernels(file)
        found.extend((vars(module), name) for name in _kernels_of_file[file] if name in vars(module))
    return found


def _template_kernels(file: str) -> tuple[str, ...]:
    try:
        source = Path(file).read_text()
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(
        match[1] for match in _DEFINITION.finditer(source) if _TEMPLATE.search(match[1]) or _TEMPLATE.search(match[2])
    )
