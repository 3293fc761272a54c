"""What is installed for the tests of the page, with a stand-in for apt-get that says what it was asked for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.page import install_tools
from tests.test_packaging import REPOSITORY

UPDATE = "apt-get update --quiet=2"
INSTALL = "apt-get install --yes --quiet=2 --no-install-recommends"
NPM_CI = "npm ci --no-audit --no-fund"
QUICK_BROWSER = "chromium-headless-shell"
COMMANDS = {"nodejs": "node", "npm": "npm", QUICK_BROWSER: QUICK_BROWSER, "chromium": "chromium"}


class Machine:
    """A machine with these commands alone, each of which only notes that it was called."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log = folder / "log"
        self.log.touch()
        self.installed = folder / "web" / "node_modules" / ".package-lock.json"
        self._bin = folder / "bin"
        for made in (self._bin, self.installed.parent):
            made.mkdir(parents=True)
        (folder / "web" / "package-lock.json").write_text("{}")
        monkeypatch.setenv("PATH", str(self._bin))
        monkeypatch.setattr(install_tools, "WEB", folder / "web")
        monkeypatch.setattr(install_tools, "INSTALLED", self.installed)

    def has(self, *names: str, status: int = 0, then: str = "") -> None:
        for name in names:
            path = self._bin / name
            path.write_text(f'#!/bin/sh\necho {name} "$@" >> {self.log}\n{then}\nexit {status}\n')
            path.chmod(0o755)

    def has_apt(self, *, status: int = 0, without: str = "") -> None:
        """An apt-get that puts there what it is asked for, if it succeeds and knows the package."""
        lines = [
            f'case " $* " in *" install "*" {package} "*) printf "#!/bin/sh\\necho {name} \\"\\$@\\" >> {self.log}\\n" '
            f"> {self._bin}/{name}; /bin/chmod 755 {self._bin}/{name};; esac"
            for package, name in COMMANDS.items()
            if package != without
        ]
        self.has("apt-get", status=status, then="" if status else "\n".join(lines))

    def packages_are_there(self) -> None:
        """What package-lock.json names is installed, and newer."""
        self.installed.touch()
        os.utime(self.installed.parent.parent / "package-lock.json", (1, 1))

    def asked(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture()
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setattr(os, "geteuid", lambda: 0, raising=False)
    return Machine(tmp_path, monkeypatch)


def test_root_gets_what_is_missing_from_debian(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.has_apt()
    install_tools.main()
    assert machine.asked() == [UPDATE, f"{INSTALL} nodejs npm", f"{INSTALL} {QUICK_BROWSER}", NPM_CI]
    assert install_tools.missing() == [] and install_tools.node_is_ready()
    assert capsys.readouterr().err == ""


def test_a_debian_without_the_quick_browser_has_the_other(machine: Machine) -> None:
    machine.has_apt(without=QUICK_BROWSER)
    machine.has("node", "npm")
    machine.packages_are_there()
    install_tools.main()
    assert machine.asked() == [UPDATE, f"{INSTALL} {QUICK_BROWSER}", f"{INSTALL} chromium"]
    assert install_tools.missing() == []
    assert str(install_tools.browser_here()).endswith("/chromium")


@pytest.mark.parametrize("missing", ["node", "npm", QUICK_BROWSER])
def test_only_what_is_missing_is_installed(missing: str, machine: Machine) -> None:
    machine.has_apt()
    machine.has(*{*COMMANDS.values()} - {missing})
    machine.packages_are_there()
    install_tools.main()
    package = next(package for package, name in COMMANDS.items() if name == missing)
    assert machine.asked() == [UPDATE, f"{INSTALL} {package}"]


def test_where_all_is_there_nothing_is_asked_for(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.has_apt()
    machine.has(*COMMANDS.values())
    machine.packages_are_there()
    install_tools.main()
    assert machine.asked() == [] and capsys.readouterr().err == ""


def test_packages_of_another_lock_file_are_installed_anew(machine: Machine) -> None:
    machine.has(*COMMANDS.values())
    machine.installed.touch()
    os.utime(machine.installed, (1, 1))
    assert not install_tools.node_is_ready()
    install_tools.main()
    assert machine.asked() == [NPM_CI]
    assert install_tools.node_is_ready()


@pytest.mark.parametrize("why", ["no root", "no apt-get", "apt-get fails"])
def test_what_may_not_be_installed_is_said_on_a_line(
    why: str, machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if why != "no apt-get":
        machine.has_apt(status=100 if why == "apt-get fails" else 0)
    if why == "no root":
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
    machine.has("chromium")
    install_tools.main()
    tried = [UPDATE, f"{INSTALL} nodejs npm", f"{INSTALL} {QUICK_BROWSER}"]
    assert machine.asked() == (tried if why == "apt-get fails" else [])
    assert capsys.readouterr().err == (
        "not here: node, npm; the tests of the page that need them are skipped and counted\n"
    )


def test_packages_that_npm_cannot_get_leave_node_not_ready(machine: Machine) -> None:
    machine.has("node", QUICK_BROWSER)
    machine.has("npm", status=1)
    install_tools.main()
    assert machine.asked() == [NPM_CI] and not install_tools.node_is_ready()


def test_skipped_tests_are_counted_on_a_line_for_each_reason(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "from tests.page.install_tools import missing\n"
        "gone = pytest.mark.skip(reason='chromium is not here (python -m tests.page.install_tools)')\n"
        "@gone\ndef test_one(): ...\n@gone\ndef test_two(): ...\n"
        "@pytest.mark.skip(reason='another')\ndef test_three(): ...\n"
        "def test_four(): ...\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", os.devnull,
         "--rootdir", str(tmp_path), str(tmp_path)],
        cwd=REPOSITORY, env={**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("Skipped ")]
    assert lines == ["Skipped 2 tests: chromium is not here (python -m tests.page.install_tools)"]
