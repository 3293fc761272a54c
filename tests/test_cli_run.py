"""``lightning-flops run``: a program under it sees, prints and ends as under Python itself."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from lightning_flops.cli import main

REPOSITORY = Path(__file__).parent.parent

SHOW = """
import sys
print(__name__, __file__, __package__, __doc__, __spec__ and (__spec__.name, __spec__.origin))
print(sys.argv, sys.path[0], sys.modules["__main__"].__dict__ is globals())
"""
"""What a program can see of how it was started."""

PROGRAMS = {
    "show.py": SHOW,
    "package/__init__.py": "",
    "package/module.py": SHOW,
    "package/__main__.py": "from package import module\n" + SHOW,
    "folder/other.py": SHOW,
    "nothing_to_run/__init__.py": "",
    "broken_package/__init__.py": "import a_package_that_it_misses",
    "raises.py": "def inner():\n    return 1 / 0\n\ninner()\n",
    "no_syntax.py": "def f(\n",
    "interrupted.py": "raise KeyboardInterrupt\n",
    "exits.py": "import sys\nprint(sys.argv)\nsys.exit(int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1])\n",
    "exits_at_once.py": "import os\nos._exit(7)\n",
    "lives_on.py": (
        "import atexit, threading, sys, pickle\n"
        "class Mine: pass\n"
        "def later():\n"
        "    threading.main_thread().join()\n"
        "    print(type(pickle.loads(pickle.dumps(Mine()))) is Mine, sys.modules['__main__'].Mine is Mine)\n"
        "threading.Thread(target=later).start()\n"
        "atexit.register(lambda: print('exit', Mine.__module__))\n"
    ),
    "spawns.py": (
        "import multiprocessing\n"
        "class Mine: pass\n"
        "def work(mine, queue): queue.put((type(mine) is Mine, __name__))\n"
        "if __name__ == '__main__':\n"
        "    context = multiprocessing.get_context('spawn')\n"
        "    queue = context.Queue()\n"
        "    child = context.Process(target=work, args=(Mine(), queue))\n"
        "    child.start()\n"
        "    print(queue.get(timeout=60))\n"
        "    child.join()\n"
    ),
    "loads_little.py": (
        "import sys\n"
        "print([name for name in ('torch', 'deepspeed', 'lightning', 'pytorch_lightning') if name in sys.modules])\n"
    ),
    "settings.py": "import os\nprint(os.environ['LIGHTNING_FLOPS_SETTINGS'])\n",
    "has_an_option.py": "import argparse\nargparse.ArgumentParser().add_argument('--every')\n",
    "switch.py": "import os\nprint(os.environ['LIGHTNING_FLOPS'])\n",
}

NOTHING = "lightning-flops: nothing was profiled: the program did not import torch\n"


class Ended(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of programs."""
    folder = tmp_path_factory.mktemp("programs").resolve()
    for name, text in PROGRAMS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "folder" / "link.py").symlink_to(folder / "show.py")
    return folder


def python(folder: Path, *arguments: str, **environment: str) -> Ended:
    """How Python ends when it is started in *folder* with *arguments*."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1", **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def run(folder: Path, *arguments: str, **environment: str) -> Ended:
    """How it ends under ``python -m lightning_flops run``, without the line that says that nothing was profiled."""
    ended = python(folder, "-m", "lightning_flops", "run", *arguments, **environment)
    return ended._replace(err=ended.err.replace(NOTHING, "", 1))


@pytest.mark.parametrize(
    "arguments",
    """
    show.py --version -m x -- -h --local_rank=1
    ./folder/../show.py
    folder/link.py
    -m package.module --rows 1
    -m package -- a
    exits.py 3
    exits.py 'a message'
    exits_at_once.py
    spawns.py
    lives_on.py
    loads_little.py
    """.strip().splitlines(),
    ids=str.strip,
)
def test_a_program_sees_prints_and_ends_as_under_python_itself(folder: Path, arguments: str) -> None:
    program = shlex.split(arguments)
    alone = python(folder, *program)
    assert alone.out or alone.status  # it told something
    assert run(folder, *program) == alone


@pytest.mark.parametrize("program", ["raises.py", "no_syntax.py", "interrupted.py"])
def test_what_a_program_raises_is_its_own(folder: Path, program: str) -> None:
    alone, ended = python(folder, program), run(folder, program)
    assert ended.status == alone.status != 0
    assert ended.err.splitlines()[-1] == alone.err.splitlines()[-1]


def test_a_program_that_trains_nothing_does_not_end_silently(folder: Path) -> None:
    ended = python(folder, "-m", "lightning_flops", "run", "exits.py", "3")
    assert (ended.status, ended.err) == (3, NOTHING)
    assert python(folder, "-m", "lightning_flops", "run", "exits.py", "3", RANK="1").err == ""


def test_a_wrong_setting_is_named_before_the_program_begins(folder: Path) -> None:
    ended = python(folder, "-m", "lightning_flops", "run", "--timing-steps", "0", "exits.py", "3")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.endswith("run: error: argument --timing-steps: must be an integer >= 1, got 0\n")
    ended = python(folder, "-m", "lightning_flops", "run", "--trace", "false", "--trace-dir", "x", "exits.py", "3")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == "lightning-flops run: error: --trace must be true where trace_dir is given, got False\n"


def test_each_setting_is_written_in_one_way(folder: Path) -> None:
    options = """
    --profile-step 1,5 --trace-schedule active=3,repeat=2,wait=1 --peak-flops-per-sec bf16=312e12
    --memory-bytes-per-sec 2e12 --every 20 --html false --detailed True --output-file 1,5 --causal-attention half
    --advice-thresholds data_wait=0.25
    """
    assert json.loads(run(folder, *shlex.split(options), "settings.py").out) == {
        "profile_step": [1, 5],
        "trace_schedule": {"active": 3, "repeat": 2, "wait": 1},
        "peak_flops_per_sec": {"bf16": 312e12},
        "memory_bytes_per_sec": 2e12,
        "every": 20,
        "html": False,
        "detailed": True,
        "output_file": "1,5",
        "causal_attention": "half",
        "advice_thresholds": {"data_wait": 0.25},
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--profile-step [1,5]", "must be an integer >= 0, or a list of such, written 1,5, got [1,5]"),
        ("--profile-step ''", "must be an integer >= 0, or a list of such, written 1,5, got "),
        (
            """--trace-schedule '{"active": 3}'""",
            "must be a mapping from wait, warmup (>= 0), active and repeat (>= 1) to integers, written "
            """active=3,repeat=2, got {"active": 3}""",
        ),
        ("--trace-schedule active=3,wait", "written active=3,repeat=2, got active=3,wait"),
        ("--timing-steps 1,2", "argument --timing-steps: must be an integer >= 1, got 1,2"),
        ("--html yes", "argument --html: must be true or false, got yes"),
        ("--peak-flops-per-sec bf16=0", "written 312e12 for all, or bfloat16=312e12,float32=67e12, got bf16=0"),
    ],
)
def test_another_way_of_writing_a_setting_is_refused_with_the_right_one(
    options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", *shlex.split(options), "no_program.py"])
    assert said in capsys.readouterr().err


def test_options_of_ours_behind_the_program_are_named(folder: Path) -> None:
    behind = ["--profile-step", "3", "--timing_steps=5", "--batch-size", "8", "--own", "--profile-step=4"]
    ended = run(folder, "show.py", *behind)
    assert ended.out == python(folder, "show.py", *behind).out
    assert ended.err == (
        "lightning-flops run: --profile-step, --timing-steps stand behind show.py, which gets what follows it: options "
        "of this command stand before it\n"
    )
    assert run(folder, "show.py", *behind, RANK="1").err == ""  # the first process has said it
    assert run(folder, "has_an_option.py", "--every", "8").err == ""  # the program's own
    module = run(folder, "-m", "package.module", "--every", "8")
    assert "run: --every stands behind package.module, which gets" in module.err


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["nowhere.py"], 2, "can't open file 'nowhere.py': No such file or directory"),
        (["-m", "nowhere"], 1, "No module named nowhere"),
        (["-m", "nothing_to_run"], 1, "'nothing_to_run' is a package and cannot be directly executed"),
        (["-m", "broken_package.module"], 1, "No module named 'a_package_that_it_misses'"),
    ],
)
def test_a_program_that_is_not_there_is_named(folder: Path, arguments: list[str], status: int, said: str) -> None:
    ended = run(folder, *arguments)
    assert (ended.status, ended.out) == (status, "")
    assert said in ended.err
    assert ended.status == python(folder, *arguments).status


def test_without_a_program_the_usage_is_shown(folder: Path) -> None:
    for arguments in ([], ["-m"]):
        ended = run(folder, *arguments)
        assert ended.status == 2
        assert ended.err.startswith("usage: lightning-flops run [-h] [--profile-step N] ")


def test_what_a_launcher_puts_first_is_the_programs(folder: Path) -> None:
    """DeepSpeed's launcher starts ``python -m lightning_flops --local_rank=1 run show.py a``."""
    alone = python(folder, "show.py", "--local_rank=1", "a")
    launched = python(folder, "-m", "lightning_flops", "--local_rank=1", "run", "show.py", "a", RANK="1")
    assert launched == alone
    assert python(folder, "-m", "lightning_flops", "--local_rank=1", "trace", "show.py").status == 2


def test_the_switch_for_lightning_is_on_unless_the_user_has_set_it(folder: Path) -> None:
    assert run(folder, "switch.py").out == "1\n"
    assert run(folder, "switch.py", LIGHTNING_FLOPS="0").out == "0\n"
