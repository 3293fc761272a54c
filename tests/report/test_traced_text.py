from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_flops.config import ProfilerConfig
from lightning_flops.records import WindowRecord
from lightning_flops.report.text import render_text
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace import TracedStep
from tests.golden_files import golden
from tests.report.traced_windows import mlp_traced, transformer_traced
from tests.report.windows import build_profile

CASES: dict[str, Callable[[], tuple[WindowRecord, TracedStep]]] = {
    "traced": mlp_traced,
    "traced_on_device": transformer_traced,
}
CONFIG = {"traced": ProfilerConfig(peak_flops_per_sec=700e9), "traced_on_device": ProfilerConfig(top_modules=2)}


def profile_of(name: str) -> Profile:
    window, traced = CASES[name]()
    return build_profile(window, config=CONFIG.get(name, ProfilerConfig()), traced=traced)


@pytest.mark.parametrize("name", CASES)
def test_report_with_a_traced_step_is_the_file_people_read(name: str) -> None:
    golden(f"text/{name}.txt", render_text(profile_of(name), detailed=True))


@pytest.mark.parametrize("name", CASES)
def test_json_gives_the_profile_back(name: str) -> None:
    profile = profile_of(name)
    assert Profile.from_json(profile.to_json()) == profile
