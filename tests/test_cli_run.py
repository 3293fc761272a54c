"""``lightning-flops run``: a program under it is what it is under Python itself."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

REPOSITORY = Path(__file__).parent.parent

# What a program can see of how it was started.
SHOW = """
import sys
main = sys.modules["__main__"]
print(__name__, __file__, __package__, __cached__, __doc__, __builtins__, sorted(globals()))
print(__spec__ and (__spec__.name, __spec__.origin), type(__loader__).__name__)
print(sys.argv, sys.path[0], main.__dict__ is globals())
"""

PROGRAMS = {
    "show.py": SHOW,
    "package/__init__.py": "",
    "package/module.py": SHOW,
    "package/__main__.py": "from package import module\n" + SHOW,
    "folder/__main__.py": SHOW,
    "folder/no_program.txt": "",
    "nothing_to_run/__init__.py": "",
    "broken_package/__init__.py": "import a_package_that_it_misses",
    "raises.py": "def inner():\n    return 1 / 0\n\ndef outer():\n    inner()\n\nouter()\n",
    "chains.py": "try:\n    1 / 0\nexcept ArithmeticError as error:\n    raise RuntimeError('no') from error\n",
    "imports_broken.py": "import raises\n",
    "no_syntax.py": "def f(\n",
    "interrupted.py": "raise KeyboardInterrupt\n",
    "exits.py": "import sys\nprint(sys.argv)\nsys.exit(int(sys.argv[1]) if sys.argv[1].isdigit() else sys.argv[1])\n",
    "exits_at_once.py": "import os\nos._exit(7)\n",
    "own_hook.py": (
        "import sys\n"
        "def hook(kind, error, traceback):\n"
        "    print('hook', kind, error, traceback.tb_frame.f_code.co_filename, error.__traceback__ is traceback)\n"
        "sys.excepthook = hook\n"
        "raise ValueError('mine')\n"
    ),
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
    "no_future.py": "def f(x: print('evaluated')): pass\nx: int = 1\nprint(__annotations__)\n",
    "loads_little.py": (
        "import sys\n"
        "print([name for name in ('torch', 'deepspeed', 'lightning', 'pytorch_lightning') if name in sys.modules])\n"
    ),
    "switch.py": "import os\nprint(os.environ['LIGHTNING_FLOPS'])\n",
}


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
    with zipfile.ZipFile(folder / "archive.zip", "w") as archive:
        archive.writestr("__main__.py", SHOW)
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


NOTHING = "lightning-flops: nothing was profiled: the program did not import torch\n"


def run(folder: Path, *arguments: str, **environment: str) -> Ended:
    """How it ends under ``python -m lightning_flops run``, without the line that says that nothing was profiled."""
    ended = python(folder, "-m", "lightning_flops", "run", *arguments, **environment)
    return ended._replace(err=ended.err.replace(NOTHING, "", 1))


def test_a_program_that_trains_nothing_does_not_end_silently(folder: Path) -> None:
    ended = python(folder, "-m", "lightning_flops", "run", "exits.py", "3")
    assert (ended.status, ended.err) == (3, NOTHING)
    assert python(folder, "-m", "lightning_flops", "run", "exits.py", "3", RANK="1").err == ""


def test_where_a_program_has_started_others_it_is_said_that_these_are_not_followed(folder: Path) -> None:
    (folder / "starts.py").write_text(
        "import resource, types\n"
        "used = types.SimpleNamespace(ru_utime=1.0, ru_stime=0.1)\n"
        "resource.getrusage = lambda who: used if who == resource.RUSAGE_CHILDREN else None\n"
    )
    ended = python(folder, "-m", "lightning_flops", "run", "starts.py")
    assert ended.err == (
        "lightning-flops: nothing was profiled: the program did not import torch, and programs that it started are not "
        "followed: the command goes before each of them, as in torchrun --nproc-per-node 2 -m lightning_flops run "
        "train.py\n"
    )


def test_a_wrong_setting_is_named_before_the_program_begins(folder: Path) -> None:
    ended = python(folder, "-m", "lightning_flops", "run", "--timing-steps", "0", "exits.py", "3")
    assert (ended.status, ended.out) == (2, "")
    assert ended.err == "lightning-flops run: error: --timing-steps must be an integer >= 1, got 0\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["show.py", "--version", "-m", "x", "--", "-h", "--local_rank=1"],
        ["./folder/../show.py"],
        ["folder/link.py"],
        ["folder", "a"],
        ["archive.zip", "a"],
        ["-m", "package.module", "--rows", "1"],
        ["-m", "package", "--", "a"],
        ["raises.py"],
        ["chains.py"],
        ["imports_broken.py"],
        ["no_syntax.py"],
        ["interrupted.py"],
        ["exits.py", "0"],
        ["exits.py", "3"],
        ["exits.py", "a message"],
        ["exits_at_once.py"],
        ["own_hook.py"],
        ["lives_on.py"],
        ["spawns.py"],
        ["no_future.py"],
        ["loads_little.py"],
    ],
    ids=" ".join,
)
def test_a_program_sees_prints_and_ends_as_under_python_itself(folder: Path, arguments: list[str]) -> None:
    alone = python(folder, *arguments)
    assert alone.out or alone.status  # it told something
    assert run(folder, *arguments) == alone


def test_an_installed_command_does_the_same(folder: Path) -> None:
    command = "import sys; from lightning_flops.cli import main; sys.argv[0] = 'lightning-flops'; sys.exit(main())"
    for program in (["show.py", "a"], ["-m", "package.module"], ["raises.py"], ["exits.py", "3"]):
        ended = python(folder, "-c", command, "run", *program)
        assert ended._replace(err=ended.err.replace(NOTHING, "", 1)) == python(folder, *program)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.11 brought it")
def test_a_path_that_is_kept_safe_stays_safe(folder: Path) -> None:
    for program in ("show.py", "folder"):
        alone = python(folder, program, PYTHONSAFEPATH="1")
        assert run(folder, program, PYTHONSAFEPATH="1") == alone
    assert str(folder) not in python(folder, "show.py", PYTHONSAFEPATH="1").out.splitlines()[-1].split()[1]


def test_a_traceback_of_a_module_begins_with_the_programs_own_frames(folder: Path) -> None:
    alone, ended = python(folder, "-m", "raises"), run(folder, "-m", "raises")
    assert ended.status == alone.status == 1
    machinery = [line for line in alone.err.splitlines() if "<frozen runpy>" in line]
    assert ended.err == "".join(f"{line}\n" for line in alone.err.splitlines() if line not in machinery)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["nowhere.py"], 2, "can't open file '{folder}/nowhere.py': [Errno 2] No such file or directory\n"),
        (["nothing_to_run"], 1, "can't find '__main__' module in 'nothing_to_run'\n"),
        (["-m", "nowhere"], 1, "No module named nowhere\n"),
        (["-m", "package.nowhere"], 1, "No module named package.nowhere\n"),
        (
            ["-m", "nothing_to_run"],
            1,
            "No module named nothing_to_run.__main__; 'nothing_to_run' is a package and cannot be directly executed\n",
        ),
    ],
)
def test_a_program_that_is_not_there_is_named(folder: Path, arguments: list[str], status: int, said: str) -> None:
    ended = run(folder, *arguments)
    assert ended == Ended(status, "", "lightning-flops: " + said.format(folder=folder))
    assert ended.status == python(folder, *arguments).status


def test_what_a_package_misses_itself_is_an_error_of_its_own(folder: Path) -> None:
    ended = run(folder, "-m", "broken_package.module")
    assert ended.status == 1
    assert "ModuleNotFoundError: No module named 'a_package_that_it_misses'" in ended.err
    assert "run_program.py" not in ended.err


def test_without_a_program_the_usage_is_shown(folder: Path) -> None:
    for arguments in ([], ["-m"]):
        ended = run(folder, *arguments)
        assert ended.status == 2
        assert ended.err.startswith(
            "usage: lightning-flops run [-h] [--profile-step N] [--log-dir DIR] [...] [-m] PROGRAM "
        )


def test_what_a_launcher_puts_first_is_the_programs(folder: Path) -> None:
    """DeepSpeed's launcher starts ``python -m lightning_flops --local_rank=1 run show.py a``."""
    alone = python(folder, "show.py", "--local_rank=1", "a")
    launched = python(folder, "-m", "lightning_flops", "--local_rank=1", "run", "show.py", "a", RANK="1")
    assert launched == alone
    alone = python(folder, "-m", "package.module", "--local-rank=0")
    launched = python(folder, "-m", "lightning_flops", "--local-rank=0", "run", "-m", "package.module", RANK="1")
    assert launched == alone
    assert python(folder, "-m", "lightning_flops", "--local_rank=1", "trace", "show.py").status == 2


def test_the_switch_for_lightning_is_on_unless_the_user_has_set_it(folder: Path) -> None:
    assert run(folder, "switch.py").out == "1\n"
    assert run(folder, "switch.py", LIGHTNING_FLOPS="0").out == "0\n"


def test_a_failing_import_has_the_traceback_it_has_alone(folder: Path, tmp_path: Path) -> None:
    for text in ("import a_package_that_it_misses\n", "1 / 0\n"):
        (tmp_path / "deepspeed.py").write_text(text)
        (tmp_path / "program.py").write_text("def f():\n    import deepspeed\n\nf()\n")
        assert run(tmp_path, "program.py") == python(tmp_path, "program.py")
        assert python(tmp_path, "program.py").status == 1
