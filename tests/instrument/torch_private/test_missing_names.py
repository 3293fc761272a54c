"""Under a torch that lacks one of its private names: what is imported, counted, trained and said."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest

from lightning_flops.instrument import torch_private
from lightning_flops.instrument.torch_private import names
from tests.forks import BEFORE_LIGHTNING, REPOSITORY, TORCH, run_fork, start_fork
from tests.instrument.torch_private.without import FORWARD, ROOM, TRAINING, USED_OFFLINE
from tests.ranks import environment_of_ranks

for module in iter_modules(torch_private.__path__, f"{ROOM}."):
    import_module(module.name)
PATHS = sorted(names.TABLE)

MODE = "torch.utils._python_dispatch:TorchDispatchMode"
"""The one that nothing can be counted without."""

WITHOUT = "tests.instrument.torch_private.without"

QUICK = {
    MODE,
    "torch._C:_current_graph_task_id",
    "torch._C:_push_on_torch_dispatch_stack",
    "torch._ops:OpOverload._schema",
    "torch.nn:Module._wrapped_call_impl.__code__",
    "torch.optim:Optimizer.profile_hook_step",
    "torch.utils._python_dispatch:_disable_current_modes",
}
"""Of each kind some; the others are ``slow`` together, not one by one."""

assert set(PATHS) >= QUICK


@pytest.fixture(scope="module")
def without() -> Iterator[Callable[[str], dict[str, Any]]]:
    """Answers with what happens without the name of a path."""
    (given, asks), (answers, output) = os.pipe(), os.pipe()
    with open(asks, "w") as stdin, open(answers) as stdout:
        process = start_fork(
            ["-m", WITHOUT],
            imports=BEFORE_LIGHTNING,
            folder=REPOSITORY,
            environment=environment_of_ranks({}),
            place={},
            output=output,
            errors=2,
            given=given,
        )
        os.close(given)
        os.close(output)
        assert stdout.readline() == "ready\n"

        def ask(path: str) -> dict[str, Any]:
            stdin.write(f"{path}\n")
            stdin.flush()
            found: dict[str, Any] = json.loads(stdout.readline())
            return found

        yield ask
        stdin.close()
        process.wait()


@pytest.mark.parametrize("path", [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in PATHS])
def test_without_a_private_name_training_is_untouched_and_what_is_lost_is_said(
    path: str, without: Callable[[str], dict[str, Any]]
) -> None:
    found = without(path)
    assert "error" not in found, found["error"]
    assert found["identical"]
    assert found["missing"] and found["logged"] == 1
    if path == MODE:
        assert found["refused"] == found["sentence"] and found["profile_notes"] is None
    else:
        # Where FLOPs stand may be lost; none of them is.
        assert found["flops"] == TRAINING and found["profile_flops"] == TRAINING
        for run, notes in (("count", "notes"), ("profile", "profile_notes")):
            assert (found["sentence"] in found[notes]) == (found["reported"] and found[f"needed_to_{run}"])
    if path.startswith(USED_OFFLINE):
        offline = found["offline"]
        assert offline == FORWARD or found["sentence"] in offline


def test_a_torch_that_has_them_all_loses_none() -> None:
    # In a process of its own: in this one tests have looked names up in stand-ins of torch's objects.
    program = (
        "import pkgutil, importlib, lightning_flops.instrument.torch_private as room, lightning_flops.pytorch\n"
        "for one in pkgutil.iter_modules(room.__path__): importlib.import_module(f'{room.__name__}.{one.name}')\n"
        "from lightning_flops.instrument.torch_private import names\n"
        "assert names.LOST == [] and len(names.TABLE) > 80\n"
        "assert not [name.path for name in names.TABLE.values() if name.missing]\n"
    )
    done = run_fork(["-c", program], imports=TORCH, folder=REPOSITORY)
    assert done.returncode == 0, done.stderr


def test_what_is_lost_goes_on_after_the_words_this_torch_and_ends_without_a_full_stop() -> None:
    for name in names.TABLE.values():
        assert name.loss.split()[0] in ("does", "cannot", "has"), name.loss
        assert not name.loss.endswith(".")
