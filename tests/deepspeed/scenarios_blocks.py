"""Blocks of every kind: what DeepSpeed says to each by itself, and what comes of it with the hook."""

from __future__ import annotations

import argparse
import base64
import contextlib
import io
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepspeed.runtime.config import DeepSpeedConfig

from lightning_flops.deepspeed import attach
from tests.deepspeed.engines import BLOCK, Net, config, engine_of, installed, left_on, logged, train

STEPS = 4


VALUES: dict[str, Any] = {
    "true": True,
    "0": 0,
    "1": 1,
    "-2": -2,
    "0.5": 0.5,
    "nan": math.nan,
    "'1'": "1",
    "null": None,
    "[1]": [1],
}
DEEPSPEEDS = (
    "enabled",
    "profile_step",
    "module_depth",
    "top_modules",
    "detailed",
    "output_file",
    "recompute_fwd_factor",
)
OURS = ("timing_steps", "trace", "trace_dir", "monitor", "every", "batch_size", "peak_flops_per_sec", "tag_prefix")
FIRST: dict[str, Any] = {**BLOCK, "profile_step": 1}
BLOCKS: dict[str, Any] = {
    **{f"{name}={words}": {**FIRST, name: value} for name in DEEPSPEEDS for words, value in VALUES.items()},
    **{f"{name}=0": {**FIRST, name: 0} for name in OURS},
    "step=1": {**FIRST, "step": 1},
    "off, enable=0": {"enabled": False, "enable": 0},
    "trace_dir without trace": {**FIRST, "trace_dir": "traces"},
    "none": {},
    **{f"block={words}": value for words, value in VALUES.items()},
}


def _read(block: Any) -> str:
    """What reading a config with *block* ends in."""
    try:
        read = DeepSpeedConfig({**config(block=None), "flops_profiler": block})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return f"read, {'on' if read.flops_profiler_config.enabled else 'off'}"


def read_alike() -> list[tuple[str, str, str]]:
    """Of each block, what DeepSpeed makes of it by itself and with the hook."""
    alone = {name: _read(block) for name, block in BLOCKS.items()}
    with installed():
        return [(name, alone[name], _read(block)) for name, block in BLOCKS.items()]


def _trained(block: Any, *, hook: bool) -> dict[str, Any]:
    """What training with *block* ends in: with the hook, or with DeepSpeed's own profiler."""
    file = Path("report.txt")
    file.unlink(missing_ok=True)
    found: dict[str, Any] = {"made": False, "raised": None, "losses": None, "profiled": None, "left": []}
    with (
        installed() if hook else contextlib.nullcontext(),
        logged() as lines,
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        try:
            engine = engine_of({**config(block=None), "flops_profiler": block})
            found["made"] = True
            found["losses"] = train(engine, STEPS)
            if hook and not any("not profiled" in line for line in lines):
                handle = attach(engine)
                handle.detach()
                found["profiled"] = handle.profile is not None and handle.profile.counted_steps
            found["left"] = left_on(engine)
            found["builtin"] = hasattr(engine, "flops_profiler")
        except Exception as error:
            found["raised"] = f"{type(error).__name__}: {error}"
    text = printed.getvalue() + (file.read_text() if file.exists() else "")
    said = [line for line in lines if "flops_profiler" in line]
    return {**found, "logged": said, "printed": "Flops Profiler" in text}


def trained() -> dict[str, Any]:
    """Of each block, training with it: with DeepSpeed's own profiler, and with ours."""
    return {
        "plain": _trained({"enabled": False}, hook=False),
        "blocks": {
            name: {"ours": _trained(block, hook=True), "alone": _trained(block, hook=False)}
            for name, block in BLOCKS.items()
        },
    }


def in_every_form() -> dict[str, Any]:
    """A block as DeepSpeed's own test has it, in every form in which DeepSpeed takes a config."""
    block = {**BLOCK, "step": 1, "top_modules": 3}
    del block["profile_step"]
    settings = config(block=block)
    Path("ds_config.json").write_text(json.dumps(settings), encoding="utf-8")
    Path("ds_config.hjson").write_text(
        "# with a comment\n" + json.dumps(settings, indent=1).replace('"flops_profiler"', "flops_profiler")
    )
    given: dict[str, dict[str, Any]] = {
        "dict": {"settings": settings},
        "path": {"settings": "ds_config.json"},
        "hjson": {"settings": "ds_config.hjson"},
        "base64": {"settings": base64.urlsafe_b64encode(json.dumps(settings).encode()).decode()},
        "arguments": {
            "settings": None,
            "args": argparse.Namespace(deepspeed_config="ds_config.hjson", local_rank=0),
        },
    }
    found = {}
    for form, more in given.items():
        with installed(), logged() as lines:
            engine = engine_of(**more)
            train(engine, STEPS)
            handle = attach(engine)
            handle.detach()
            assert handle.profile is not None
            found[form] = {
                "counted": handle.profile.counted_steps,
                "top_modules": handle.config.top_modules,
                "logged": [line for line in lines if "flops_profiler" in line],
            }
    return found


def attached_to_a_wrong_block() -> dict[str, Any]:
    """An engine made without the hook, whose own block is wrong; and the same block handed to us."""
    block = {**FIRST, "top_modules": 0, "step": 1}
    engine = engine_of(config(block={**block, "enabled": False}), Net())
    with logged() as lines:
        handle = attach(engine)
    try:
        attach(engine_of(config(block=None)), block)
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
    return {"enabled": handle.config.enabled, "logged": lines, "raised": message}


SCENARIOS: dict[str, Callable[[], Any]] = {
    "read_alike": read_alike,
    "trained": trained,
    "in_every_form": in_every_form,
    "attached_to_a_wrong_block": attached_to_a_wrong_block,
}
