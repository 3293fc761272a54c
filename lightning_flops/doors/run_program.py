"""Runs a user's program unchanged.

``run`` does for a script, a module, a directory or a zip file what the Python command itself does. The program is
``__main__``, has its own ``sys.argv`` and ``sys.path[0]``, and its exit status and tracebacks are the same as under
Python.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import os
import pkgutil
import sys
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType, TracebackType

from lightning_flops.doors.when_imported import when_imported
from lightning_flops.errors import LightningFlopsError

_MAIN = "__main__"

_OUR_FILES = (__file__, when_imported.__code__.co_filename)
"""Files whose frames we remove from a program's traceback."""


class ProgramNotFoundError(LightningFlopsError):
    """There is no such program to run."""

    exit_status: int
    """Python's own exit status in this case."""

    def __init__(self, message: str, exit_status: int = 1) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def run(target: str, arguments: Sequence[str], *, as_module: bool = False) -> None:
    """Run *target* as ``python target ARGUMENTS`` would.

    The program's exceptions leave this function, ``SystemExit`` too, so that Python ends as it would have ended. The
    traceback that Python prints does not show our frames. Call it last: afterwards ``__main__``, ``sys.argv`` and
    ``sys.path`` are still the program's.

    Args:
        target: path of a script, or of a directory or zip file with a ``__main__.py``; or a module's name.
        arguments: the program's own.
        as_module: *target* is the name of a module or package, as after ``python -m``.

    Raises:
        ProgramNotFoundError: there is no such program.
    """
    sys.argv = [target, *arguments]
    try:
        main, code = _module_to_run(target) if as_module else _file_to_run(target)
        sys.modules[_MAIN] = main
        exec(code, vars(main))
    except (SystemExit, ProgramNotFoundError):
        raise
    except BaseException:
        _hide_our_frames()
        raise


# ---- what is run


def _file_to_run(path: str) -> tuple[ModuleType, CodeType]:
    """The main module and the code of the file, directory or zip file at *path*."""
    if pkgutil.get_importer(path) is not None:
        spec = importlib.machinery.PathFinder.find_spec(_MAIN, [os.path.abspath(path)])
        if spec is None:
            raise ProgramNotFoundError(f"can't find {_MAIN!r} module in {path!r}")
        _set_first_path(os.path.abspath(path), always=True)
        return _main_module(spec), _code_of(spec)
    absolute = os.path.join(os.getcwd(), path)  # as Python has it: not normalized
    try:
        with io.open_code(absolute) as file:
            source = file.read()
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        raise ProgramNotFoundError(f"can't open file {absolute!r}: {reason}", exit_status=2) from error
    _set_first_path(os.path.dirname(os.path.realpath(path)))
    main = _main_module(None)
    vars(main).update(__file__=absolute, __loader__=importlib.machinery.SourceFileLoader(_MAIN, absolute))
    return main, compile(source, absolute, "exec", dont_inherit=True)


def _module_to_run(name: str) -> tuple[ModuleType, CodeType]:
    """The main module and the code of the module or package *name*."""
    _set_first_path(os.getcwd())
    spec = _find_spec(name)
    if spec.submodule_search_locations is not None:
        try:
            spec = _find_spec(f"{name}.{_MAIN}")
        except ProgramNotFoundError as error:
            raise ProgramNotFoundError(f"{error}; {name!r} is a package and cannot be directly executed") from error
    code = _code_of(spec)
    sys.argv[0] = spec.origin or name
    return _main_module(spec), code


def _find_spec(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # a package above it could not import something itself
        raise ProgramNotFoundError(f"No module named {name} ({error})") from error
    if spec is None:
        raise ProgramNotFoundError(f"No module named {name}")
    return spec


def _code_of(spec: ModuleSpec) -> CodeType:
    get_code = getattr(spec.loader, "get_code", None)
    code: CodeType | None = get_code(spec.name) if get_code is not None else None
    if code is None:
        raise ProgramNotFoundError(f"No code object available for {spec.name}")
    return code


def _main_module(spec: ModuleSpec | None) -> ModuleType:
    """A new ``__main__`` with the attributes that Python gives it; *spec* is None for a script."""
    main = types.ModuleType(_MAIN)
    ours = vars(sys.modules[_MAIN])
    vars(main).update({name: ours[name] for name in ("__builtins__", "__annotations__") if name in ours})
    vars(main).update(__spec__=spec, __cached__=None, __package__=None)
    if spec is not None:
        vars(main).update(__file__=spec.origin, __loader__=spec.loader, __cached__=spec.cached, __package__=spec.parent)
    return main


def _set_first_path(folder: str, *, always: bool = False) -> None:
    """Put *folder* first in ``sys.path``, in place of the folder that Python put there for us."""
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):  # safe_path: Python 3.11
        sys.path[0] = folder
    elif always:
        sys.path.insert(0, folder)


# ---- how it ends


def _hide_our_frames() -> None:
    """When the exception that ends this process is printed, show only the program's own frames."""
    program_hook = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        sys.excepthook = program_hook
        shown = _program_frames(traceback)
        sys.last_traceback = shown
        program_hook(kind, error.with_traceback(shown), shown)

    sys.excepthook = show


def _program_frames(traceback: TracebackType | None) -> TracebackType | None:
    """*traceback* without our frames: those above the program, and those of ``when_imported`` below it."""
    frames: list[TracebackType] = []
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if name in _OUR_FILES:
            # Above the program every frame is ours. Below it only the frame that waits for an import is ours. We also
            # remove the frames of the import machinery that led there: Python hides them in an ordinary import.
            above = traceback.tb_frame.f_code is run.__code__
            while frames and (above or frames[-1].tb_frame.f_code.co_filename.startswith("<frozen importlib")):
                frames.pop()
        else:
            frames.append(traceback)
        traceback = traceback.tb_next
    below: TracebackType | None = None
    for frame in reversed(frames):
        frame.tb_next = below
        below = frame
    return below
