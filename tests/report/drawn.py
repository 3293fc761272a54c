"""Sections of a document as the text report draws them."""

from __future__ import annotations

from lightning_flops.report.document import Section
from lightning_flops.report.layout import VIEW, draw
from lightning_flops.report.ranks_document import ranks_section
from lightning_flops.schema.profile import Profile


def drawn(section: Section | None) -> list[str]:
    """The lines of *section*, its title first; none if there is none."""
    return [] if section is None else list(draw(section, VIEW))[1:]


def ranks_lines(profile: Profile) -> list[str]:
    """The section of all ranks."""
    return drawn(ranks_section(profile))
