"""The predicted memory of a step as a document."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from lightning_flops.records import OUTSIDE
from lightning_flops.report.document import Column, Item, Section, Table, at, share
from lightning_flops.schema.memory import LargestBatch, MemoryReport, ModuleMemory
from lightning_flops.units import percent, plain, plural, si

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_MOST_ROWS = 12


def predicted_section(report: MemoryReport) -> Section:
    """The peak, what is held then, which modules keep it, and what would fit."""
    about = (
        "Of tensors, in two eager steps on fake ones, as the optimizer's states are made in the first. CUDA's context, "
        "workspaces of cuBLAS, NCCL's buffers and fragmentation come on top."
    )
    items: list[Item] = [*peak_tables(report), *_remarks(report), *report.notes, about]
    return Section("Predicted memory", f"{headline(report)}.", items)


def peak_tables(report: MemoryReport) -> list[Item]:
    """What is held at the peak by kind, and the modules that keep most."""
    shares = share("share", lambda row: row[1] / report.peak_bytes if report.peak_bytes else None)
    kinds = Table([*report.at_peak.items()], [Column("at the peak", at("0"), str), _bytes("", "1"), shares], whole=True)
    rows = list(_by_pattern(report.modules))[:_MOST_ROWS]
    names = [Column("module", at("0"), str), Column("modules", at("1"))]
    modules = Table(rows, [*names, _bytes("kept for backward", "2"), _bytes("at the peak", "3")], whole=True)
    return [kinds, modules]


def headline(report: MemoryReport) -> str:
    """When the peak is, and how high."""
    of = "" if report.available_bytes is None else f" of {si(report.available_bytes, 'B')}"
    size = "" if report.batch_size is None else f" with a batch of {plain(report.batch_size)}"
    when = report.when
    part = when.part or "code between the parts"
    where = "the optimizer's step" if part == "optimizer" else f"the {part} of {_name(when.module)}"
    by = f" ({when.operator.removesuffix('.default')})" if when.operator else ""
    return f"Peak {si(report.peak_bytes, 'B')}{of}{size}, in {where}{by}"


def _remarks(report: MemoryReport) -> Iterator[str]:
    if (largest := report.largest) is not None:
        yield largest_words(report, largest)
    if (saved := report.checkpointed) is not None:
        number = len(saved.names)
        yield (
            f"With a checkpoint around each of the {plain(number)} {plural('block', number)} "
            f"{_pattern(saved.names[0])}: {si(saved.peak_bytes, 'B')} "
            f"({percent(saved.peak_bytes / report.peak_bytes - 1)}), for {si(saved.recompute_flops, 'FLOPs')} more "
            f"({percent(saved.recompute_flops / saved.model_flops if saved.model_flops else None)} of the step's)."
        )


def largest_words(report: MemoryReport, largest: LargestBatch) -> str:
    """The largest batch that fits, and the line that the peak follows near it."""
    words = f"Largest batch in {si(report.available_bytes, 'B')}"
    if largest.size == 0:
        return f"{words}: none, not one sample fits."
    peak, more = largest.peak_bytes, largest.bytes_per_sample
    of = "" if peak is None else f", with a peak of {si(peak, 'B')}"
    if peak is not None and more is not None:
        of += f", near which peak = {si(peak - more * largest.size, 'B')} + {si(more, 'B')} × batch"
    return f"{words}: {plain(largest.size)}{of}."


def _by_pattern(modules: tuple[ModuleMemory, ...]) -> Iterator[tuple[str, int, int, int]]:
    """Equal modules of repeated blocks as one row: name, how many, bytes kept, bytes at the peak.

    Of a module without modules inside the last number stays: the layers of a list are not alike.
    """
    rows = defaultdict[str, list[ModuleMemory]](list)
    around = {name.rpartition(".")[0] for name in (one.name for one in modules)}
    for one in modules:
        above, dot, last = one.name.rpartition(".")
        rows[_pattern(one.name) if one.name in around else _pattern(above) + dot + last].append(one)
    summed = [
        (_name(name), len(some), sum(one.kept_bytes for one in some), sum(one.peak_bytes for one in some))
        for name, some in rows.items()
    ]
    yield from sorted(summed, key=lambda row: (-row[2], -row[3]))


def _pattern(name: str) -> str:
    return _NUMBER.sub("*", name)


def _name(module: str) -> str:
    return "code outside of the model" if module == OUTSIDE else module or "the root"


def _bytes(label: str, path: str) -> Column:
    return Column(label, at(path), unit="B")
