"""Every config that DeepSpeed takes, trains: what is wrong in a block that was taken over is said, not raised."""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import math
from pathlib import Path
from typing import Any

from lightning_flops.deepspeed import attach
from tests.deepspeed.engines import BLOCK, config, engine_of, installed, left_on, logged, train
from tests.deepspeed.scenario import scenario

STEPS = 4
UNKNOWN = "in the DeepSpeed config, flops_profiler.step is not a setting, did you mean profile_step?"

FIRST: dict[str, Any] = {**BLOCK, "profile_step": 1}
VALUES = {"true": True, "0": 0, "-2": -2, "0.5": 0.5, "nan": math.nan, "'1'": "1", "null": None, "[1]": [1]}
NAMES = "enabled profile_step module_depth top_modules detailed output_file recompute_fwd_factor"
BLOCKS: dict[str, Any] = {
    **{f"{name}={words}": {**FIRST, name: value} for name in NAMES.split() for words, value in VALUES.items()},
    **{f"{name}=0": {**FIRST, name: 0} for name in ("timing_steps", "trace", "trace_dir", "monitor", "every")},
    "step=1": {**FIRST, "step": 1},
    "off, enable=0": {"enabled": False, "enable": 0},
    "trace_dir without trace": {**FIRST, "trace_dir": "traces"},
    "none": {},
    **{f"block={words}": value for words, value in VALUES.items()},
}


def _trained(block: Any, *, hook: bool) -> tuple[bool, str | None, list[str], Any, list[str]]:
    """Whether an engine was made, what was raised, the losses, the counted steps, and what was logged of the block."""
    made, raised, losses, counted = False, None, list[str](), None
    with (
        installed() if hook else contextlib.nullcontext(),
        logged() as lines,
        contextlib.redirect_stdout(io.StringIO()),
    ):
        try:
            engine = engine_of({**config(block=None), "flops_profiler": block})
            made = True
            losses = train(engine, STEPS)
            if hook and not any("not profiled" in line for line in lines):
                handle = attach(engine)
                handle.detach()
                counted = handle.profile is not None and handle.profile.counted_steps
            assert not hook or (left_on(engine) == [] and not hasattr(engine, "flops_profiler"))
        except AssertionError:
            raise
        except Exception as error:
            raised = f"{type(error).__name__}: {error}"
    return made, raised, losses, counted, [line for line in lines if "flops_profiler" in line]


@scenario()
def every_block_that_deepspeed_takes_trains_as_without_any_with_a_profile_or_a_word_of_why_not() -> None:
    _, nothing, plain, _, _ = _trained({"enabled": False}, hook=False)
    assert nothing is None and len(plain) == STEPS
    said: dict[str, list[str]] = {}
    refusals = 0
    for name, block in BLOCKS.items():
        alone, refused, _, _, _ = _trained(block, hook=False)
        made, raised, losses, counted, said[name] = _trained(block, hook=True)
        if not alone:  # in DeepSpeed's own words
            assert (made, raised) == (False, refused) and refused, name
            refusals += 1
            continue
        assert (raised, losses) == (None, plain), name
        assert name.startswith("enabled=") or counted or said[name], name
        assert name != "step=1" or counted == (1,)
    assert refusals > 3
    unknown = "in the DeepSpeed config, flops_profiler.{} is not a setting, did you mean {}?"
    not_profiled = "this engine is not profiled: flops_profiler."
    assert said["profile_step='1'"] == [
        f"{not_profiled}profile_step must be an integer >= 0, or a list of such, got '1'"
    ]
    assert said["timing_steps=0"] == [f"{not_profiled}timing_steps must be an integer >= 1, got 0"]
    assert said["trace_dir without trace"] == [f"{not_profiled}trace must be true where trace_dir is given, got False"]
    assert said["step=1"] == [unknown.format("step", "profile_step")]
    assert said["off, enable=0"][0] == unknown.format("enable", "enabled")
    assert max(len(line) for lines in said.values() for line in lines) < 400


@scenario()
def deepspeeds_own_test_config_is_profiled_in_every_form() -> None:
    block = {**BLOCK, "step": 1, "top_modules": 3}
    del block["profile_step"]
    settings = config(block=block)
    Path("ds_config.hjson").write_text(
        "# with a comment\n" + json.dumps(settings, indent=1).replace('"flops_profiler"', "flops_profiler")
    )
    arguments = argparse.Namespace(deepspeed_config="ds_config.hjson", local_rank=0)
    given: tuple[dict[str, Any], ...] = (
        {"settings": settings},
        {"settings": base64.urlsafe_b64encode(json.dumps(settings).encode()).decode()},
        {"settings": None, "args": arguments},
    )
    for form in given:
        with installed(), logged() as lines:
            engine = engine_of(**form)
            train(engine, STEPS)
            handle = attach(engine)
            handle.detach()
        assert handle.profile is not None
        assert (handle.profile.counted_steps, handle.config.top_modules) == ((1,), 3), form
        assert [line for line in lines if "flops_profiler" in line] == [UNKNOWN], form
