"""The tables of settings in docs/deepspeed.md are what the settings' fields say."""

from __future__ import annotations

from docs import write_settings_tables
from lightning_flops.config import SETTINGS


def test_the_tables_are_what_the_fields_say() -> None:
    text = write_settings_tables.PAGE.read_text(encoding="utf-8")
    assert text == write_settings_tables.page(text), "make docs-profile writes them anew"


def test_a_row_has_the_name_the_default_and_the_help_of_a_setting() -> None:
    text = write_settings_tables.PAGE.read_text(encoding="utf-8")
    help_of_it = "How many modules the aggregated profile lists at each level."
    assert SETTINGS["top_modules"].help == help_of_it
    assert text.count(f"| `top_modules` | `1` | {help_of_it} |\n") == 1
    # A block that does not say so is not enabled; nothing is `null` in JSON.
    assert "| `enabled` | `false` |" in text
    assert "| `trace_dir` | `null` |" in text and "`null` keeps no file. |\n" in text


def test_a_stale_row_is_written_anew() -> None:
    text = write_settings_tables.PAGE.read_text(encoding="utf-8")
    stale = text.replace("| `timing_steps` | `20` |", "| `timing_steps` | `50` |")
    assert stale != text and write_settings_tables.page(stale) == text
