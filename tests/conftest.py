"""What a run of tests says at its end: how many were skipped for want of a tool, a line for each reason."""

from __future__ import annotations

from collections import Counter
from typing import Any

_TOOLS = "tests.page.install_tools"
"""Stands in the reason of every test that needs a tool which only this installs."""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Count them."""
    reasons = Counter(
        str(report.longrepr[2]).removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", ())
        if isinstance(report.longrepr, tuple) and _TOOLS in str(report.longrepr[2])
    )
    for reason, number in sorted(reasons.items()):
        terminalreporter.write_line(f"Skipped {number} {'test' if number == 1 else 'tests'}: {reason}")
