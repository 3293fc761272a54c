"""Makes the site of ``docs/`` whole: the README is its front page, and what a page links to outside of it goes along.

On a disk and on a forge the pages' links lead to files of the repository (``../benchmarks/results/zoo.md``). In the
site a file outside of ``docs/`` has its copy below ``repository/``, and links lead there. mkdocs calls these functions
by their names (``hooks`` in mkdocs.yml).
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[1]
FRONT_PAGE = "README.md"
COPIES = "repository"

_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)(?P<target>[^)#\s]+)")


def linked_files(text: str, page: str) -> set[str]:
    """Paths in the repository that *text* links to, the file *page* of the repository being where it stands."""
    return {_resolved(link["target"], page) for link in _LINK.finditer(text)}


def place_in_site(path: str) -> str:
    """Where the site has the file *path* of the repository."""
    if path == FRONT_PAGE:
        return "index.md"
    folder, _, rest = path.partition("/")
    return rest if folder == "docs" else f"{COPIES}/{path}"


def links_within_the_site(text: str, page: str) -> str:
    """*text* of the repository's file *page*, its links leading to where the site has what they name."""
    here = posixpath.dirname(place_in_site(page))
    return _LINK.sub(lambda link: posixpath.relpath(place_in_site(_resolved(link["target"], page)), here or "."), text)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the front page and, page by page, the files outside of docs/ that pages link to."""
    known = {FRONT_PAGE, *(f"docs/{file.src_uri}" for file in files)}
    files.append(_copy(FRONT_PAGE, config))
    unread = {path for path in known if path.endswith(".md")}
    while unread:
        found = {target for path in unread for target in linked_files((REPOSITORY / path).read_text("utf-8"), path)}
        new = {path for path in found - known if (REPOSITORY / path).is_file() and not path.startswith("docs/")}
        for path in sorted(new):
            files.append(_copy(path, config))
        known |= new
        unread = {path for path in new if path.endswith(".md")}
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Let the page's links lead to places in the site."""
    source = page.file.src_uri
    if source == "index.md":
        return links_within_the_site(markdown, FRONT_PAGE)
    folder, rest = source.partition("/")[::2]
    if folder != COPIES:
        return links_within_the_site(markdown, f"docs/{source}")
    # An error's text in a copied page, as KeyError: settings['a']['b'], is no reference of Markdown's.
    return links_within_the_site(markdown, rest).replace("'][", "']\\[")


def _resolved(target: str, page: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), target))


def _copy(path: str, config: MkDocsConfig) -> File:
    # A copied page is reached by links; the menu need not list it.
    level = InclusionLevel.INCLUDED if path == FRONT_PAGE else InclusionLevel.NOT_IN_NAV
    return File.generated(config, place_in_site(path), abs_src_path=os.fspath(REPOSITORY / path), inclusion=level)
