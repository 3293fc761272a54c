"""The console is the program's own logging."""

from __future__ import annotations

import logging

import pytest

from lightning_flops.sinks.console import ConsoleSink
from lightning_flops.sinks.sink import TextSink


def test_a_text_is_one_info_record_of_the_packages_logger(caplog: pytest.LogCaptureFixture) -> None:
    sink: TextSink = ConsoleSink()
    with caplog.at_level(logging.INFO, "lightning_flops"):
        assert sink.write_text("flops_profiler/profile", "100 % of\ntwo lines", step=5) is True
    assert caplog.record_tuples == [("lightning_flops", logging.INFO, "100 % of\ntwo lines")]


def test_a_text_below_the_programs_level_is_said_to_be_unwritten(capfd: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("lightning_flops")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        assert ConsoleSink().write_text("flops_profiler/profile", "text", step=5) is False
    finally:
        logger.setLevel(level)
    assert capfd.readouterr() == ("", "")
