"""The pages on DeepSpeed say what the code says, and the script that writes one leaves out what it says it does."""

from __future__ import annotations

import json
import re
from dataclasses import fields

from benchmarks.deepspeed_rows import ROWS
from benchmarks.deepspeed_side_by_side import BEGIN, PAGE, command_of
from benchmarks.machine import ROOT
from lightning_flops import ProfilerConfig

BY_HAND = (ROOT / "docs" / "deepspeed.md").read_text()


def test_every_row_is_on_the_page_with_both_commands_and_its_count() -> None:
    sections = re.split(r"^## ", PAGE.read_text().partition(BEGIN)[2], flags=re.MULTILINE)[1:]
    for (name, row), section in zip(ROWS.items(), sections, strict=True):
        for ours in (False, True):
            assert f"`{' '.join(['python', *command_of(name, ours=ours)])}`" in section
        assert section.count("```text\n") == 2, name
        assert row.flops is None or f"{row.flops:,} forward FLOPs" in section, name


def test_the_keys_and_defaults_on_the_page_are_those_of_the_block() -> None:
    rows = re.findall(r"^\| (`.*?`) \| `(.*?)` \|", BY_HAND.partition("## What a step is")[0], flags=re.MULTILINE)
    written = {key: json.loads(default) for keys, default in rows for key in re.findall(r"`(\w+)`", keys)}
    off = ProfilerConfig.from_block({})
    assert set(written) == {field.name for field in fields(ProfilerConfig)}
    assert ProfilerConfig.from_block(written) == off
