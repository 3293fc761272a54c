"""The traces of two runs compared, as text: what in a step takes longer, the most first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lightning_flops.analysis.rank_names import name_files
from lightning_flops.report.compare_words import Scale, difference_sentence, figure_lines, setting_lines
from lightning_flops.report.layout import and_more, shortened_apart
from lightning_flops.report.trace_view import WHOLE, View
from lightning_flops.schema.trace_comparison import (
    ComparedTraces,
    TableName,
    TimeDifference,
    TimeTable,
    TraceComparison,
)
from lightning_flops.text.printable import page
from lightning_flops.units import NOT_AVAILABLE, plain, plural

ROWS_SHOWN = 12
"""Of each long table."""

_NAMED = 3
_NAME_CHARS = 56
_FILES_NAMED = 4

_TITLES: dict[tuple[TableName, str], str] = {
    ("phases", "host"): "By phase, on the host",
    ("phases", "device"): "By phase, work launched on the device",
    ("modules", "device"): "By module, on the device, without the modules inside",
    ("modules", "host"): "By module, on the host, without the modules inside",
    ("kernels", "device"): "By kernel, copy and memset",
    ("operators", "device"): "By operator, what it launched itself",
    ("operators", "host"): "By operator, on the host, without those it called",
    ("collectives", "device"): "By collective",
    ("collectives", "host"): "By collective, on the host",
}

_CAUSES_IN = {
    "kernel": ("kernels", "device"),
    "memcpy": ("kernels", "device"),
    "memset": ("kernels", "device"),
    "communication": ("collectives", ""),
    "cpu": ("operators", "host"),
}


def render_trace_comparison(comparison: TraceComparison, *, width: int | None = None) -> str:
    """The report on *comparison*, for people, ending in a line break.

    Args:
        comparison: what to tell.
        width: columns of the terminal, into which tables are made to fit; None for no limit.
    """
    return page(_Report(comparison, View(rows=ROWS_SHOWN, width=width)).lines())


def trace_comparison_headline(comparison: TraceComparison) -> str:
    """The difference, and what of it is beyond noise."""
    report = _Report(comparison, WHOLE)
    return " ".join([report.sentence(), *report.named()])


class _Report:
    """Writes one comparison, all times in the unit that fits its step."""

    def __init__(self, comparison: TraceComparison, view: View) -> None:
        self._comparison = comparison
        self._view = view
        self._scale = Scale.of_steps(comparison.step.a_ns, comparison.step.b_ns)

    def lines(self) -> Iterator[str]:
        """The whole report."""
        comparison, view = self._comparison, self._view
        yield view.title("Two traces compared")
        for letter, run in (("A", comparison.a), ("B", comparison.b)):
            yield from view.paragraph(f"{letter}: {_where(run)}", rest="   ")
        if comparison.settings:
            yield from setting_lines(comparison.settings)
        yield ""
        yield from view.paragraph(self.sentence())
        yield from (line for words in self.named() for line in view.paragraph(words))
        yield from self._parts()
        if comparison.ranks:
            yield from ["", view.title("By rank"), *self._table("step of", comparison.ranks)]
        for table in comparison.tables:
            yield from ["", view.title(_TITLES[table.of, table.clock]), *self._rows(table)]
        yield ""
        yield from figure_lines(comparison.figures, view)
        yield from ["", *self._notes()]
        yield view.rule()

    def sentence(self) -> str:
        """What the difference comes to."""
        step = self._comparison.step
        return difference_sentence(
            "One step" if self._comparison.a.marked else "The whole trace",
            a_ns=step.a_ns,
            b_ns=step.b_ns,
            noise=step.noise,
            confidence=self._comparison.confidence,
            scale=self._scale,
        )

    def named(self) -> Iterator[str]:
        """The parts that changed most, each with what in it did, if that is no noise."""
        found = sorted(
            (part for part in self._comparison.parts if part.noise is not None and part.noise.beyond),
            key=lambda part: -abs(part.difference_ns),
        )
        words = []
        for part in found[:_NAMED]:
            inside = self._most_of(part)
            words.append(f"{part.name} {self._scale.signed(part.difference_ns)}" + (f" ({inside})" if inside else ""))
        if words:
            yield f"Beyond noise: {', '.join(words)}."

    def _most_of(self, part: TimeDifference) -> str:
        """What changed most among that which fills a part, if it changed as the part did and is no noise."""
        of, clock = _CAUSES_IN.get(part.name, (None, ""))
        sign = 1 if part.difference_ns > 0 else -1
        rows = [
            row
            for table in self._comparison.tables
            if table.of == of and clock in ("", table.clock)
            for row in table.rows
            if row.noise is not None
            and row.noise.beyond
            and row.difference_ns * sign > 0
            and _is_in(row.name, part.name)
        ]
        if not rows:
            return ""
        row = max(rows, key=lambda row: abs(row.difference_ns))
        name = shortened_apart([row.name], chars=_NAME_CHARS)[0]
        return f"{name} {self._scale.signed(row.difference_ns)}, {_cause(row)}"

    def _parts(self) -> Iterator[str]:
        comparison, view = self._comparison, self._view
        yield from ["", view.title("By part of the step")]
        head = [f"mean, {self._scale.unit}", "A", "B", "B - A", "by noise"]
        rows = [[row.name, *self._times(row), self._interval(row)] for row in (*comparison.parts, comparison.step)]
        yield from view.table(head, rows, left=(0, 4))

    def _rows(self, table: TimeTable) -> Iterator[str]:
        yield from self._table(f"mean, {self._scale.unit}", table.rows)

    def _table(self, first: str, found: Sequence[TimeDifference]) -> Iterator[str]:
        differing = [row for row in found if row.difference_ns or row.calls_a != row.calls_b]
        shown = differing[: self._view.rows]
        if not shown:
            yield f"No difference in any of {plain(len(found))}."
            return
        names = shortened_apart([row.name or "(root)" for row in shown], chars=_NAME_CHARS)
        with_calls = any(row.calls_a is not None for row in shown)
        rows = []
        for name, row in zip(names, shown, strict=True):
            calls = [_calls(row)] if with_calls else []
            rows.append([name, *self._times(row), *calls, self._verdict(row)])
        head = [first, "A", "B", "B - A", *(["calls"] if with_calls else []), ""]
        yield from self._view.table(head, rows, least_width=7, left=(0, len(head) - 1))
        yield from and_more(len(differing) - len(shown))

    def _times(self, row: TimeDifference) -> list[str]:
        number = self._scale.number
        return [number(row.a_ns), number(row.b_ns), number(row.difference_ns, signed=True)]

    def _verdict(self, row: TimeDifference) -> str:
        """What a difference comes from, unless it is noise. What only one of the runs has is no chance."""
        in_both = row.calls_a is None or (row.calls_a and row.calls_b)
        if in_both and row.noise is not None and not row.noise.beyond:
            return "noise"
        if not row.difference_ns:
            return ""
        if not row.calls_ns or not row.length_ns:
            return _cause(row)
        calls, length = (self._scale.number(ns, signed=True) for ns in (row.calls_ns, row.length_ns))
        return f"calls {calls}, length {length}"

    def _interval(self, row: TimeDifference) -> str:
        if row.noise is None:
            return NOT_AVAILABLE
        low, high = (self._scale.number(ns, signed=True) for ns in (row.noise.low_ns, row.noise.high_ns))
        return f"{low} to {high}" if row.noise.beyond else "noise"

    def _notes(self) -> Iterator[str]:
        comparison = self._comparison
        yield self._view.title("How to read it")
        for note in (
            "Each moment of a step counts under the first part from the top that ran then, so the parts add up to the "
            "step. All other tables are sums of what was launched or began in the step; they may overlap. Calls: what "
            "goes with more or fewer of them. Length: each call takes longer or shorter, perhaps for other inputs.",
            f"Noise is the spread of the traced steps ({plain(100 * comparison.confidence)}% by Welch's t). Of a "
            "hundred rows that do not differ, one seems to. What changes from one start of a program to the next is "
            "not in it: compare two traces of A to see that.",
            "Steps under torch.profiler are slower than others, above all on the host.",
            *comparison.notes,
        ):
            yield from self._view.paragraph(note, first="- ", rest="  ")


def _where(run: ComparedTraces) -> str:
    names = list(run.sources) if len(run.sources) == 1 else name_files(run.sources)
    files = ", ".join(names[:_FILES_NAMED]) + (
        f" and {len(names) - _FILES_NAMED} more" if len(names) > _FILES_NAMED else ""
    )
    steps = f"{plain(run.steps)} {plural('step', run.steps)}" if run.marked else "no marks of steps"
    ranks = f"{plain(run.ranks)} ranks, " if run.ranks > 1 else ""
    return f"{files} ({run.device or 'no device'}, {ranks}{steps})"


def _is_in(name: str, part: str) -> bool:
    """Whether a device event of this name fills the part of the step: kernels, copies and memsets share a table."""
    is_copy, is_memset = name.startswith("Memcpy"), name.startswith("Memset")
    return {"memcpy": is_copy, "memset": is_memset, "kernel": not is_copy and not is_memset}.get(part, True)


def _calls(row: TimeDifference) -> str:
    """How often it runs in a step: one number, or that of A and that of B."""
    if row.calls_a is None or row.calls_b is None:
        return ""
    a, b = (plain(int(calls) if calls == int(calls) else calls) for calls in (row.calls_a, row.calls_b))
    return a if a == b else f"{a} -> {b}"


def _cause(row: TimeDifference) -> str:
    """What most of a difference comes from, of that which has its sign."""
    more = row.difference_ns > 0
    if row.calls_ns is None or row.length_ns is None:
        return "longer" if more else "shorter"
    if not row.calls_a:
        return "new"
    if not row.calls_b:
        return "gone"
    sign = 1 if more else -1
    if sign * row.calls_ns > sign * row.length_ns:
        return "more calls" if more else "fewer calls"
    return "longer calls" if more else "shorter calls"
