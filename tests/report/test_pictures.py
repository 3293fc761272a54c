"""The pictures of a profile, read back: their bars are as long as what they show."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from lightning_flops.config import ProfilerConfig
from lightning_flops.report.pictures import Picture, draw_profile
from tests.page import samples
from tests.report.windows import build_profile, mlp_window

WIDTH, EDGE = 720, 20
BAR = WIDTH - 2 * EDGE
BACKWARD, FORWARD, OPTIMIZER = (0x56, 0xB4, 0xE9), (0x00, 0x72, 0xB2), (0x00, 0x9E, 0x73)
DATA_WAIT, OTHER, TRANSFER = (0xD5, 0x5E, 0x00), (0x9A, 0xA2, 0xAD), (0xE6, 0x9F, 0x00)
BAR_ROWS = 72


def pixels(picture: Picture) -> Any:
    from PIL import Image

    image = Image.open(io.BytesIO(picture.png))
    assert image.format == "PNG" and image.mode == "RGB" and image.size == (picture.width, picture.height)
    return image


def rows_of(image: Any) -> list[Counter[tuple[int, int, int]]]:
    """How often each colour stands in each row."""
    return [Counter(image.getpixel((x, y)) for x in range(image.width)) for y in range(image.height)]


def test_a_step_is_one_bar_whose_parts_are_as_long_as_their_shares() -> None:
    # 100 ms: backward 50, forward 30, optimizer 10, data wait 5, other 4, transfer 1.
    picture = draw_profile(samples.decoder(), prefix="flops_profiler")["flops_profiler/step"]
    bars = [row for row in rows_of(pixels(picture)) if row[BACKWARD] > 100]
    assert len(bars) == BAR_ROWS
    shares = {BACKWARD: 0.5, FORWARD: 0.3, OPTIMIZER: 0.1, DATA_WAIT: 0.05, OTHER: 0.04, TRANSFER: 0.01}
    for row in bars:
        assert {colour: abs(row[colour] - share * BAR) <= 1 for colour, share in shares.items()} == dict.fromkeys(
            shares, True
        )
        assert sum(row[colour] for colour in shares) == BAR


def test_modules_are_bars_in_the_ratio_of_their_shares() -> None:
    # 4 / 7 and 3 / 7 of the FLOPs, in the network of tests.report.windows.
    picture = draw_profile(
        replace(build_profile(mlp_window(), config=ProfilerConfig()), traced=None), prefix="flops_profiler"
    )["flops_profiler/modules"]
    lengths = sorted({row[FORWARD] for row in rows_of(pixels(picture)) if row[FORWARD]}, reverse=True)
    first, second = lengths
    assert abs(second - first * 3 / 4) <= 1


def test_names_of_any_length_and_without_letters_are_drawn() -> None:
    profile = samples.hostile()
    renamed = tuple(
        replace(module, name=f"{module.name}{'.very_long' * 40}" if module.name else "") for module in profile.modules
    )
    short, long = (draw_profile(one, prefix="p")["p/modules"] for one in (profile, replace(profile, modules=renamed)))
    assert (short.width, short.height) == (long.width, long.height)


def test_what_was_not_timed_has_no_picture_of_a_step() -> None:
    assert set(draw_profile(replace(samples.decoder(), timing=None), prefix="p")) == {"p/modules"}


@pytest.mark.parametrize("part", ["bubble", "forward + backward"])
def test_every_part_has_its_row(part: str) -> None:
    profile = samples.decoder()
    assert profile.timing is not None
    parts = (*profile.timing.parts, replace(profile.timing.parts[0], name=part))
    before, after = (
        draw_profile(one, prefix="p")["p/step"].height
        for one in (profile, replace(profile, timing=replace(profile.timing, parts=parts)))
    )
    assert after > before
