"""Numbers as text, and names as printable text on one line, also where they are no report, log line or error."""

from __future__ import annotations

import logging
import math

import pytest

from lightning_flops import ConfigError, Profile, ProfilerConfig
from lightning_flops.units import (
    bytes_by_dtype,
    duration,
    package_logger,
    percent,
    plain,
    printable,
    run_text,
    runs_of,
    shown,
    si,
)


def test_count_has_three_digits_and_its_prefix() -> None:
    texts = {336_230_000: "336 M", 6_279_860_000_000: "6.28 T", 0: "0", 999: "999", 999_499: "999 K", 999_500: "1 M"}
    texts |= {1_000: "1 K", 12_600_000: "12.6 M", 2**60: "1.15 E", 10**21: "1 Z", -5_000_000: "-5 M"}
    assert {value: si(value) for value in texts} == texts
    assert [si(0.5), si(0.0123)] == ["0.5", "0.0123"]


def test_duration_keeps_the_number_above_one() -> None:
    texts = {0.07667: "76.7 ms", 34.09e-6: "34.1 us", 1.89: "1.89 s", 90.0: "90 s", 0.0: "0 s", 2e-9: "2 ns"}
    texts |= {0.000_999_4: "999 us", 0.000_999_999: "1 ms", 1e-12: "0.001 ns"}
    assert {seconds: duration(seconds) for seconds in texts} == texts


def test_percent_has_three_digits_and_two_decimals_at_most() -> None:
    assert [percent(share) for share in (0.4125, 0.0504, 0.0005, 1, 0)] == ["41.2%", "5.04%", "0.05%", "100%", "0%"]
    assert [percent(share) for share in (0.0001, 0.00004)] == ["0.01%", "<0.01%"]


def test_plain_number_has_its_thousands_apart_and_ints_in_full() -> None:
    assert plain(6_279_860_000_001) == "6,279,860,000,001"
    assert [plain(number) for number in (1234.4, 433.0712, 31.5, 32.0)] == ["1,234", "433", "31.5", "32"]


@pytest.mark.parametrize("value", [None, math.nan, math.inf, -math.inf])
def test_what_is_not_known_is_not_available(value: float | None) -> None:
    assert [si(value, "FLOPS"), duration(value), percent(value), plain(value)] == ["n/a"] * 4


def test_of_several_dtypes_the_one_with_most_bytes_is_first_and_of_equal_ones_the_first_by_name() -> None:
    sizes = {"int8": 8_000, "bfloat16": 8_000, "float32": 408_000}
    assert bytes_by_dtype(sizes) == "408 KB of float32, 8 KB of bfloat16, 8 KB of int8"


def test_numbers_that_follow_one_another_are_drawn_together() -> None:
    assert [run_text(run) for run in runs_of([9, 3, 5, 4])] == ["3-5", "9"]
    assert [len(run) for run in runs_of([9, 3, 5, 4])] == [3, 1]
    assert runs_of([]) == []


# ---- what does not print

HOSTILE = "\x1b[2J\x1b]0;title\x07\u202e\n"
ESCAPED = r"\x1b[2J\x1b]0;title\x07\u202e\n"


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("encoder.layers.0", "encoder.layers.0"),
        ("größer 層 é 🙂", "größer 層 é 🙂"),
        ("a\nb\r\tc", r"a\nb\r\tc"),
        (HOSTILE, ESCAPED),
        ("\x85\u2028\u2029\u200b\ufeff", r"\x85\u2028\u2029\u200b\ufeff"),
        ("\ud800\udcff", r"\ud800\udcff"),
        (r"C:\new", r"C:\new"),
        ("", ""),
    ],
)
def test_what_does_not_print_is_escaped_as_python_writes_it(text: str, escaped: str) -> None:
    assert printable(text) == escaped
    assert printable(escaped) == escaped


def test_a_record_of_the_packages_log_is_one_printable_line(caplog: pytest.LogCaptureFixture) -> None:
    logger = package_logger("lightning_flops.anything")
    with caplog.at_level(logging.INFO, logger="lightning_flops"):
        logger.info("wrote %s after %d step(s)", HOSTILE, 3)
        logger.info("an ordinary line: %s", "encoder")
    assert [record.getMessage() for record in caplog.records] == [
        f"wrote {ESCAPED} after 3 step(s)",
        "an ordinary line: encoder",
    ]


def test_a_handler_that_raises_is_no_matter_and_records_name_the_line_that_logged() -> None:
    class Raises(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            seen.append(f"{record.funcName}: {record.getMessage()}")
            raise OSError("the disk is full")

    seen: list[str] = []
    handler, log = Raises(), logging.getLogger("lightning_flops")
    log.addHandler(handler)
    try:
        for _ in range(2):  # each module that is imported again asks again
            logger = package_logger("lightning_flops.anything")
        logger.warning("the training goes on")
        logger.log(logging.ERROR, "%d of %d", 1, 2)
    finally:
        log.removeHandler(handler)
    here = "test_a_handler_that_raises_is_no_matter_and_records_name_the_line_that_logged"
    assert seen == [f"{here}: the training goes on", f"{here}: 1 of 2"]


def test_what_cannot_be_written_is_named_by_its_type() -> None:
    class Broken:
        def __repr__(self) -> str:
            raise RuntimeError("no")

    assert shown(Broken()) == "a value of type Broken"
    assert shown(10**5_000) == "a value of type int"
    assert shown("x" * 20, chars=10) == "'xxxxxxxx…"
    assert shown("\x1b[2J\u202e") == "'\\x1b[2J\\u202e'"


def test_an_error_quotes_on_one_printable_line_and_keeps_what_it_was_given() -> None:
    with pytest.raises(ConfigError) as caught:
        ProfilerConfig.from_block({f"top{HOSTILE}": 1})
    assert str(caught.value).isprintable()
    error = ConfigError(f"no such file: {HOSTILE}")
    assert (str(error), error.args) == (f"no such file: {ESCAPED}", (f"no such file: {HOSTILE}",))
    with pytest.raises(Exception, match="profile") as unread:
        Profile.from_json(f'{{"schema{HOSTILE!r}": 1}}')
    assert str(unread.value).isprintable()
