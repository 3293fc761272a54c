"""The GPT of examples/ trains, and its report is exact, whatever the ZeRO stage."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_flops import Profile
from tests.deepspeed.launching import INSTALLED
from tests.ranks import DEEPSPEED, DEEPSPEED_ON_CPU, REPOSITORY, run_ranks

pytestmark = [pytest.mark.skipif(not INSTALLED, reason="needs deepspeed"), pytest.mark.timeout(280)]

EXAMPLE = REPOSITORY / "examples" / "deepspeed_gpt.py"
SAMPLES, ACCUMULATED, CONTEXT, WIDTH, LAYERS, BYTES = 8, 2, 128, 128, 4, 256

TOKENS = SAMPLES * ACCUMULATED * CONTEXT
LINEAR = 2 * TOKENS * WIDTH * (3 * WIDTH + WIDTH + 4 * WIDTH + 4 * WIDTH)
SCORES_AND_VALUES = 2 * (2 * SAMPLES * ACCUMULATED * CONTEXT * CONTEXT * WIDTH)
FORWARD = LAYERS * (LINEAR + SCORES_AND_VALUES) + 2 * TOKENS * WIDTH * BYTES

PARAMS_OF_A_BLOCK = (
    2 * (2 * WIDTH)  # norms
    + (WIDTH * 3 * WIDTH + 3 * WIDTH)
    + (WIDTH * WIDTH + WIDTH)
    + (WIDTH * 4 * WIDTH + 4 * WIDTH)
    + (4 * WIDTH * WIDTH + WIDTH)
)
PARAMS = (BYTES + CONTEXT) * WIDTH + LAYERS * PARAMS_OF_A_BLOCK + 2 * WIDTH + WIDTH * BYTES


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_gpt_learns_on_two_ranks_and_its_report_is_exact(tmp_path: Path, stage: int) -> None:
    config = json.loads(EXAMPLE.with_name("ds_config.json").read_text())
    config["flops_profiler"] |= {"profile_step": 1, "timing_steps": 2, "trace": False, "lines": False}
    (tmp_path / "ds_config.json").write_text(json.dumps(config))
    program = ["-m", "lightning_flops", "run", str(EXAMPLE), "--ds-config", "ds_config.json"]
    printed = run_ranks(
        [*program, "--zero", str(stage), "--steps", "8"],
        ranks=2,
        folder=tmp_path,
        timeout_sec=240.0,
        environment=DEEPSPEED_ON_CPU,
        imports=DEEPSPEED,
    )
    bits = [float(value) for value in re.findall(r"step +\d+: ([\d.]+) bits a byte", printed[0])]
    assert len(bits) == 2
    assert bits[0] > 7.9 > 6 > bits[-1]  # a byte that nothing is known of has 8 bits
    assert "Flops Profiler" in printed[0]
    assert "Flops Profiler" not in printed[1]
    (said,) = re.findall(r"^Logs are in (.+)$", printed[0], re.MULTILINE)
    assert (tmp_path / said / "lightning_flops" / "profile.json").is_file()

    (path,) = tmp_path.rglob("profile.json")
    profile = Profile.from_json(path.read_text())
    assert profile.flops.forward == FORWARD
    assert profile.flops.backward == 2 * FORWARD  # every product's two inputs need a gradient
    assert profile.params == PARAMS
    assert (profile.context.world_size, profile.context.dp_size) == (2, 2)
    assert profile.tokens == TOKENS

    assert any((tmp_path / said).glob("events.out.tfevents*"))
    read = EventAccumulator(str(tmp_path / said)).Reload()
    (scalar,) = read.Scalars("flops_profiler/fwd_flops")
    assert scalar.value == FORWARD
