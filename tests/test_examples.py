"""The examples run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_flops import Profile
from tests.forks import LIGHTNING, REPOSITORY, run_fork

BATCH = 32


def print_of(example: str, folder: Path, *flags: str) -> str:
    """What *example* prints when it is run in *folder*."""
    run = run_fork([str(REPOSITORY / "examples" / example), *flags], folder=folder, imports=LIGHTNING)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_convolutional_demo_learns_and_reports(tmp_path: Path) -> None:
    printed = print_of("train_digits.py", tmp_path, "--model", "conv", "--augment", "--max-steps", "132")
    accuracies = [float(value) for value in re.findall(r"step +\d+: +([\d.]+)%", printed)]
    assert accuracies[-1] > 80 > 30 > accuracies[0]
    assert "Time of a typical global step" in printed and "Flops Profiler" not in printed
    assert "Logs are in logs/digits-conv/version_0" in printed
    assert "--logdir logs" in printed

    first = 2 * BATCH * 8 * 8 * 32 * 1 * 9
    second = 2 * BATCH * 4 * 4 * 64 * 32 * 9
    third = 2 * BATCH * 4 * 4 * 64 * 64 * 9
    last = 2 * BATCH * 64 * 10
    flops = Profile.load(tmp_path).flops
    assert flops.forward == first + second + third + last
    assert flops.backward == 2 * flops.forward - first  # images need no gradient

    read = EventAccumulator(str(tmp_path / "logs" / "digits-conv" / "version_0")).Reload()
    (scalar,) = read.Scalars("flops_profiler/fwd_flops")
    assert scalar.value == flops.forward
    assert read.Tensors("flops_profiler/profile/text_summary")


def test_the_demo_of_transformers_reports(tmp_path: Path) -> None:
    printed = print_of("train_hf.py", tmp_path, "--max-steps", "40", "--profile-step", "3")
    profile = Profile.load(tmp_path / "out")
    assert (profile.profile_step, profile.micro_steps, profile.samples) == (3, 3, 48)
    tokens, width, layers, symbols = 48 * 7, 32, 2, 14  # the longest sentence is "9+9=18."
    projections = 2 * tokens * width * (3 * width + width)
    scores_and_values = 2 * (2 * tokens * 7 * width)
    feed_forward = 2 * (2 * tokens * width * 4 * width)
    head = 2 * tokens * width * symbols
    assert profile.flops.forward == layers * (projections + scores_and_values + feed_forward) + head
    assert profile.flops.backward == 2 * profile.flops.forward
    assert profile.tokens is not None and 48 * 6 <= profile.tokens < 48 * 7  # without padding; "1+2=3." has six
    assert "tokens/s over the wall clock" in " ".join(printed.split())
    assert "'flops_profiler/fwd_flops'" not in printed


def test_the_demo_of_a_loop_of_ones_own_reports(tmp_path: Path) -> None:
    printed = print_of("train_plain.py", tmp_path, "--epochs", "1")
    profile = Profile.load(tmp_path / "logs" / "plain")
    first, second = 2 * BATCH * 64 * 32 * 9, 2 * BATCH * 64 * 64 * 32 * 9
    last = 2 * BATCH * 64 * 64 * 10
    assert profile.flops.forward == first + second + last
    assert profile.flops.backward == 2 * profile.flops.forward - first  # images need no gradient
    assert (profile.counted_steps, profile.samples) == ((10,), BATCH)
    assert "Logs are in logs/plain" in printed
    assert EventAccumulator(str(tmp_path / "logs" / "plain")).Reload().Scalars("flops_profiler/fwd_flops")
