"""The committed bundle is what the sources in ``web/`` give, and the sources hold to their own checks."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lightning_flops.report.html_page import BUNDLE, bundled
from tests.page import install_tools
from tests.page.install_tools import WEB, node_is_ready

LIMIT_BYTES = 100_000
FILES = ("index.js", "page.js", "style.css")

needs_node = pytest.mark.skipif(
    not node_is_ready(), reason="node and the packages of web/ are not here (python -m tests.page.install_tools)"
)


def run(*command: str) -> str:
    done = install_tools.run(*command)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_node
def test_the_sources_give_the_bundle(tmp_path: Path) -> None:
    run("node", "build.mjs", str(tmp_path))
    for name in FILES:
        built = (tmp_path / name).read_text(encoding="utf-8")
        assert built == bundled(name), f"{name} is stale: make page"


@needs_node
@pytest.mark.parametrize("script", ["check", "test"])
def test_the_sources_pass_the_compiler_the_formatter_and_their_tests(script: str) -> None:
    run("npm", "run", "--silent", script)


def test_the_bundle_is_small() -> None:
    assert sum(len(bundled(name).encode()) for name in FILES) <= LIMIT_BYTES
    assert {path.name for path in Path(str(BUNDLE)).iterdir() if path.is_file()} >= {*FILES}


def test_the_licences_of_what_is_bundled_travel_in_the_script() -> None:
    head = bundled("page.js").partition("*/")[0]
    for name in ("preact", "d3-hierarchy", "d3-scale", "d3-array"):
        assert f"\n{name} " in head
    assert "Permission is hereby granted" in head and "Mike Bostock" in head and "Jason Miller" in head


def test_versions_are_pinned_and_no_registry_is_named() -> None:
    package = json.loads((WEB / "package.json").read_text(encoding="utf-8"))
    for version in (*package["dependencies"].values(), *package["devDependencies"].values()):
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    locked = json.loads((WEB / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert len(locked) > 20
    for name, one in locked.items():
        assert not name or ("integrity" in one and "resolved" not in one), name
