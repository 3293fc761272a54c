"""Under a torch that lacks one of its private names: what is imported, counted, trained and said."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import pytest

from lightning_flops.instrument import torch_private
from lightning_flops.instrument.torch_private import names
from tests.instrument.torch_private.without import FORWARD, ROOM, TRAINING, USED_OFFLINE

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
    "torch.nn:Module._call_impl.__code__",
    "torch.nn:Module._wrapped_call_impl.__code__",
    "torch.optim:Optimizer.profile_hook_step",
    "torch.utils._python_dispatch:_disable_current_modes",
    "torch.utils.data.dataloader:_MultiProcessingDataLoaderIter",
}
"""Of each kind some; the others are ``slow`` together, not one by one."""

assert set(PATHS) >= QUICK


@pytest.fixture(scope="module")
def without() -> Iterator[Callable[[str], dict[str, Any]]]:
    """Answers with what happens without the name of a path."""
    process = subprocess.Popen(
        [sys.executable, "-m", WITHOUT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout
    assert stdout.readline() == "ready\n"

    def ask(path: str) -> dict[str, Any]:
        stdin.write(f"{path}\n")
        stdin.flush()
        found: dict[str, Any] = json.loads(stdout.readline())
        return found

    yield ask
    stdin.close()
    process.wait()
    stdout.close()


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
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_lost_goes_on_after_the_words_this_torch_and_ends_without_a_full_stop() -> None:
    for name in names.TABLE.values():
        assert name.loss.split()[0] in ("does", "cannot", "has"), name.loss
        assert not name.loss.endswith(".")
