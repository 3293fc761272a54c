"""The tables of settings in docs/deepspeed.md are what the settings' fields say."""

from __future__ import annotations

from docs import write_settings_tables


def test_the_tables_are_what_the_fields_say() -> None:
    text = write_settings_tables.PAGE.read_text(encoding="utf-8")
    assert text == write_settings_tables.page(text), "make docs-profile writes them anew"
