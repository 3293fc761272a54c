"""One class for both import roots, which imports neither; asked in fresh interpreters."""

from __future__ import annotations

import pytest

from tests.forks import REPOSITORY, run_fork
from tests.lightning.nets import ROOTS

START = """
import importlib, logging, pickle, sys
root, other = {root!r}, {other!r}

def ours():
    from lightning_flops import FlopsProfilerCallback
    return FlopsProfilerCallback

def theirs():
    return importlib.import_module(root)

if {ours_first}:
    FlopsProfilerCallback = ours()
    assert root not in sys.modules
    early = FlopsProfilerCallback(timing_steps=1)
    pl = theirs()
else:
    pl = theirs()
    FlopsProfilerCallback = ours()
    early = FlopsProfilerCallback(timing_steps=1)

def only_one_root():
    assert other not in sys.modules and other.partition(".")[0] not in sys.modules
"""

FACTS = {
    "only the program's root is loaded": """
from lightning_flops.entry_points import callbacks_factory
import os
os.environ["LIGHTNING_FLOPS"] = "1"
(switched_on,) = callbacks_factory()
del os.environ["LIGHTNING_FLOPS"]
assert isinstance(switched_on, pl.Callback)
only_one_root()
""",
    "the callback is the root's, and of its own class": """
class Mine(FlopsProfilerCallback):
    pass

for callback in (early, FlopsProfilerCallback(), Mine(), pickle.loads(pickle.dumps(early))):
    assert isinstance(callback, pl.Callback) and isinstance(callback, FlopsProfilerCallback)
    assert pl.Trainer(callbacks=callback, logger=False, accelerator="cpu").callbacks.count(callback) == 1
assert issubclass(Mine, pl.Callback)
only_one_root()
""",
    "the root's log is the user's": """
logging.getLogger(root).setLevel(logging.ERROR)
said = []
class Listener(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger().addHandler(Listener())
logging.getLogger(root).addHandler(Listener())
pl.Trainer(logger=False, accelerator="cpu", callbacks=[early])
assert said == [], said
""",
    "the command line knows it by its short name and by its path": """
from importlib import import_module
cli = import_module(f"{root}.cli").LightningCLI
demo = import_module(f"{root}.demos.boring_classes").BoringModel
path = {"class_path": "lightning_flops.FlopsProfilerCallback", "init_args": {"timing_steps": 3}}
for given in (
    ["--trainer.logger=false", "--trainer.accelerator=cpu", "--trainer.callbacks+=FlopsProfilerCallback",
        "--trainer.callbacks.timing_steps=3"],
    {"trainer": {"logger": False, "accelerator": "cpu", "callbacks": [path]}},
):
    made = cli(demo, run=False, args=given)
    (callback,) = [one for one in made.trainer.callbacks if isinstance(one, FlopsProfilerCallback)]
    assert callback.config.timing_steps == 3
only_one_root()
""",
    "the second root takes it, too": """
second = importlib.import_module(other)
assert isinstance(early, second.Callback) and isinstance(early, pl.Callback)
assert FlopsProfilerCallback.__bases__.count(second.Callback) == FlopsProfilerCallback.__bases__.count(pl.Callback) == 1
assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("lightning_flops")]
""",
}


@pytest.mark.parametrize("ours_first", [True, False], ids=["ours first", "theirs first"])
def test_only_the_programs_own_root_is_loaded_and_takes_the_callback_for_its_own(ours_first: bool) -> None:
    program = START.format(root=ROOTS[0], other=ROOTS[1], ours_first=ours_first)
    for fact, question in FACTS.items():
        program += f"\nprint({fact!r})\n{question}"
    child = run_fork(["-W", "ignore", "-c", program], folder=REPOSITORY)
    assert child.returncode == 0, f"{child.stdout}\n{child.stderr}"
