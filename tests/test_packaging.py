"""What is installed, what importing it costs, and that the set-up files agree with one another."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import lightning_flops

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="Python 3.10 has no reader of TOML")

REPOSITORY = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
LARGE = {"torch", "numpy", "lightning", "pytorch_lightning", "tensorboard", "deepspeed", "transformers"}


@pytest.mark.parametrize(
    ("statements", "loaded"),
    [
        ("import lightning_flops; dir(lightning_flops); lightning_flops.__version__", set()),
        ("from lightning_flops import ConfigError, LightningFlopsError, Profile, ProfilerConfig", set()),
        ("import lightning_flops.report.text, lightning_flops.report.html_page, lightning_flops.report.scalars", set()),
        (
            "from lightning_flops.schema.profile import *\n"
            "costs = Spread(average=1.0, maximum=1.0, minimum=1.0)\n"
            "known = dict(schema_version=1, batches=1, batch_cost_sec=costs, ips_unit='samples/s')\n"
            "summary = ThroughputSummary(reader_ratio=None, reader_cost_sec=None, ips=None, **known)\n"
            "repr(summary), summary._repr_html_()",
            set(),
        ),
        ("import lightning_flops.sinks.services, lightning_flops.sinks.file, lightning_flops.sinks.console", set()),
        ("import lightning_flops.tensorboard", {"numpy", "tensorboard"}),
        ("from lightning_flops import count_flops", {"numpy", "torch"}),
    ],
)
def test_no_more_of_what_is_large_is_loaded_than_is_needed(statements: str, loaded: set[str]) -> None:
    program = f"{statements}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True
    )
    assert {name.partition(".")[0] for name in json.loads(run.stdout.splitlines()[-1])} & LARGE == loaded


def test_a_star_import_takes_what_is_there_without_the_extras() -> None:
    program = (
        "import sys\nfor name in ('lightning', 'pytorch_lightning', 'transformers'): sys.modules[name] = None\n"
        "from lightning_flops import *\n"
        "assert profile_training and 'FlopsProfilerCallback' not in dir()"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], cwd=REPOSITORY, check=True)


def test_every_public_name_can_be_imported_and_is_listed_in_order() -> None:
    names = lightning_flops.__all__
    assert names == sorted(names)
    for name in names:
        assert name in dir(lightning_flops)
        assert getattr(lightning_flops, name) is getattr(lightning_flops, name)
    assert set(names) == {"__version__", *lightning_flops._MODULES}


def imported() -> set[str]:
    """The packages of others that files of this one name in an import."""
    names = set[str]()
    for path in Path(lightning_flops.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names |= {name.partition(".")[0].replace("_", "-") for name in named}
    return names - {name.replace("_", "-") for name in sys.stdlib_module_names} - {"lightning-flops"}


def test_the_core_requires_torch_and_what_reports_and_traces_are_read_with_and_every_import_is_declared() -> None:
    required = [Requirement(one).name for one in PROJECT["dependencies"]]
    assert required == ["torch", "msgspec", "numpy", "fsspec"]
    optional = {Requirement(one).name for extra in PROJECT["optional-dependencies"].values() for one in extra}
    of_these = {"tqdm", "werkzeug"}  # where transformers and tensorboard are there, which need them
    assert imported() - {*required, *optional} == {*of_these, "pynvml", "typing-extensions"}  # done without; types


# ---- what is built


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the sdist and the wheel of this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=REPOSITORY, capture_output=True, check=True, timeout=120)
    return folder


def printed(folder: Path, *command: object, **environment: str) -> str:
    """What *command* prints in *folder*."""
    words, variables = list(map(str, command)), {**os.environ, "PYTHONPATH": "", **environment}
    run = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return run.stdout


def needed(requirements: Iterable[str], extras: Iterable[str] = ("",)) -> set[str]:
    """Names of what these *requirements* with *extras* need here, with what that needs, as torch for CUDA does."""

    def wanted(one: Requirement) -> bool:
        return one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras)

    found = list(filter(wanted, map(Requirement, requirements)))
    of_these = (needed(metadata.requires(one.name) or (), ("", *one.extras)) for one in found)
    return {one.name for one in found}.union(*of_these)


def test_the_wheel_installs_in_a_new_environment_of_what_it_declares_and_counts(built: Path, tmp_path: Path) -> None:
    (wheel,), environment = built.glob("*.whl"), tmp_path / "new"
    venv.create(environment)
    python, packages = environment / "bin" / "python", next(environment.glob("lib/*/site-packages"))
    declared = (file for name in needed(PROJECT["dependencies"]) for file in metadata.files(name) or ())
    for part in {file.parts[0] for file in declared} - {"..", "__pycache__"}:  # nothing else can be imported there
        (packages / part).symlink_to(Path(pytest.__file__).parents[1] / part)
    printed(tmp_path, sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", wheel)
    program = (
        "import lightning_flops, torch\n"
        "layer = torch.nn.Linear(3, 4)\n"
        "with lightning_flops.count_flops(layer) as counts: layer(torch.ones(8, 3))\n"
        "print(lightning_flops.__file__, counts.forward)\n"
    )
    installed = packages / "lightning_flops"
    assert printed(tmp_path, python, "-c", program).split() == [str(installed / "__init__.py"), str(2 * 3 * 4 * 8)]
    assert printed(tmp_path, python.with_name("lightning-flops"), "--version").startswith("lightning-flops ")
    for name in ("py.typed", "report/page/page.js", "SKILL.md"):
        assert (installed / name).is_file(), name
    licences = packages / f"lightning_flops-{lightning_flops.__version__}.dist-info" / "licenses"
    assert {path.name for path in licences.iterdir()} == {"LICENSE", "NOTICE"}


def test_an_index_shows_the_readme_without_links_that_lead_nowhere(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith("/METADATA"))
        shown = files.read(name).decode().partition("\n\n")[2]
    assert "FlopsProfilerCallback(profile_step=5)" in shown
    assert not re.findall(r"\]\((?!https?:)", shown)


def test_tests_collect_from_the_sdist(built: Path, tmp_path: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    printed(tmp_path, sys.executable, "-m", "tarfile", "-e", sdist)
    (unpacked,) = tmp_path.iterdir()
    collect = ("-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/corpus", "tests/test_readme.py")
    assert "no tests collected" not in printed(unpacked, sys.executable, *collect, PYTHONPATH=str(unpacked))
