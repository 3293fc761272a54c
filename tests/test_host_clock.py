"""The clock that everything here is timed by is the host's, whatever has become of ``time``."""

from __future__ import annotations

import ast
import importlib.util
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import lightning_flops
from lightning_flops import host_clock

PACKAGE = Path(lightning_flops.__file__).parent
REPLACED_BY_TESTS = {"datetime", "time", "uuid"}
"""Where people who test take what is different each time, and put something else in its place."""


def test_it_is_the_hosts_also_if_it_is_first_imported_while_those_of_time_are_replaced() -> None:
    before = time.perf_counter(), time.process_time()
    with mock.patch("time.perf_counter", return_value=0.0), mock.patch("time.process_time", return_value=0.0):
        spec = importlib.util.spec_from_file_location("imported_now", host_clock.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        now = module.now(), module.processor_sec()
    after = time.perf_counter(), time.process_time()
    assert before[0] <= now[0] <= after[0]
    assert before[1] <= now[1] <= after[1]


def test_time_itself_is_left_as_it_is() -> None:
    # Libraries that stop time look in every module for what is one and the same as a function of ``time``.
    assert host_clock.now is not time.perf_counter
    assert host_clock._own_copy(time) is not time
    assert time is importlib.import_module("time")


def test_no_other_file_asks_what_tests_replace() -> None:
    asking = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if _imports(path)}
    assert asking == {"host_clock.py"}


def _imports(path: Path) -> set[str]:
    return REPLACED_BY_TESTS.intersection(_imported(ast.parse(path.read_text(encoding="utf-8"))))


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module is not None:
            yield node.module.partition(".")[0]
