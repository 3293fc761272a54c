"""The budget of a step as text."""

from __future__ import annotations

from lightning_flops.report.layout import paragraph, table, title
from lightning_flops.report.step_text import time_unit
from lightning_flops.schema.budget import Budget, BudgetRow
from lightning_flops.schema.profile import Profile
from lightning_flops.units import duration, percent

_NS_PER_SEC = 1e9


def budget_lines(profile: Profile) -> list[str]:
    """A section of the report; empty if no step was timed."""
    budget = profile.budget
    if budget is None:
        return []
    unit, size = time_unit(budget.wall_ns / _NS_PER_SEC)
    number = {one.rule: place for place, one in enumerate(profile.advice, start=1)}

    def row(one: BudgetRow) -> list[list[str]]:
        links = ", ".join(f"{number[rule]} ({rule})" for rule in one.advice if rule in number)
        cells = [[one.label, f"{one.time_ns / _NS_PER_SEC / size:.3f}", percent(one.time_ns / budget.wall_ns), links]]
        if one.memory_ns is not None:
            words = "  of it moving their bytes at the memory's bandwidth, at most"
            share = percent(one.memory_ns / budget.wall_ns)
            cells.append([words, f"{one.memory_ns / _NS_PER_SEC / size:.3f}", share, ""])
        return cells

    rows = [cells for one in budget.rows for cells in row(one)]
    rows.append([profile.step_name, f"{budget.wall_ns / _NS_PER_SEC / size:.3f}", percent(1.0), ""])
    head = ["", f"mean, {unit}", "share", "lowered by advice"]
    if not any(cells[-1] for cells in rows):
        head, rows = head[:-1], [cells[:-1] for cells in rows]
    heading = "where peak x time went" if budget.knows_peak else "where the time went"
    lines = [title(f"Budget of a {profile.step_name}: {heading}"), *table(head, rows, left=(0, 3))]
    lines += paragraph(f"{_about(profile, budget)} {' '.join(budget.notes)}".strip())
    beside = [f"{one.label} {duration(one.time_ns / _NS_PER_SEC)}" for one in budget.run]
    if len(beside) > 1:
        lines += paragraph(f"Beside it the run, while the profiler's window was open: {', '.join(beside)}.")
    return lines


def _about(profile: Profile, budget: Budget) -> str:
    """Which steps the figures are from."""
    if budget.traced_step is None:
        return ""
    word = profile.context.step_word
    return (
        f"The time of each part of a {word} is that of the timed {word}s. What filled the part is divided as in the "
        f"traced {word} {budget.traced_step}."
    )
