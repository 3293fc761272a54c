"""The names of modules and phases in a trace: written while a step runs, read when the trace is analysed."""

from __future__ import annotations

METADATA_KEY = "lightning_flops"
"""Key at the top of a trace under which this package keeps what torch.profiler does not write."""

_MODULE = "module: "
_PHASE = "phase: "
_ROOT = "(root)"

PREFIXES = (_MODULE, _PHASE)
"""How every mark's name begins; no operator's name does."""


def module_mark(name: str) -> str:
    """The mark around the forward of the module of this qualified name."""
    return _MODULE + (name or _ROOT)


def phase_mark(part: str) -> str:
    """The mark around this part of a step."""
    return _PHASE + part


def marked_module(mark: str) -> str | None:
    """The module's qualified name, ``""`` for the root; None if *mark* is not a module's."""
    if not mark.startswith(_MODULE):
        return None
    name = mark[len(_MODULE) :]
    return "" if name == _ROOT else name


def marked_phase(mark: str) -> str | None:
    """The part of the step; None if *mark* is not a part's."""
    return mark[len(_PHASE) :] if mark.startswith(_PHASE) else None
