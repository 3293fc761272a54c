"""The user's lines: what each takes of a typical step.

Samples divide a part of the step; its length is that of the timed steps, which were not sampled. On a device a part's
time is the device's and a sample is the host's, so there the time of the sampled steps is shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from lightning_flops.analysis.counts import grouped
from lightning_flops.analysis.rates import ratio
from lightning_flops.records import LineRecord, LinesRecord
from lightning_flops.schema.step import LineProfile, LinesProfile, TimingProfile

_MOST, _ALSO, _ALL = 0.6, 0.3, 0.9  # of the time of a line, of the first of several, or of all of them
_FIELDS = ("file", "line", "function", "hook", "in_module", "part")
_PLACE = attrgetter(*_FIELDS)  # samples that have all of them in common are one row
_LEAST_SAMPLES = 8  # of what is named as a cause; in fewer steps than twice as many, half of their number


def build_lines(record: LinesRecord | None, *, timing: TimingProfile | None, on_host: bool) -> LinesProfile | None:
    """The lines of *record* with their seconds of a step; None where there was no loop to sample."""
    if record is None:
        return None
    parts = () if timing is None else timing.parts
    name_of: dict[str, str] = {phase: part.name for part in parts for phase in part.phases}
    typical = {part.name: part.typical_sec for part in parts} if on_host else {}
    inside = [replace(one, part=name_of[one.part]) for one in record.lines if one.part in name_of]
    sampled = {part: _seconds(found) for part, found in grouped(inside, attrgetter("part")).items()}
    part_sec = {part: typical.get(part, seconds / max(1, record.steps)) for part, seconds in sampled.items()}
    step_sec = sum(typical.values()) or sum(part_sec.values())
    rows = [
        _row(found, of_step=_seconds(found) / sampled[found[0].part] * part_sec[found[0].part], step_sec=step_sec)
        for found in grouped(inside, _PLACE).values()
    ]
    return LinesProfile(steps=record.steps, rows=tuple(sorted(rows, key=lambda row: -row.seconds)), why=record.why)


def _row(found: Sequence[LineRecord], *, of_step: float, step_sec: float) -> LineProfile:
    """What was *found* in one place, as a row: *of_step* of a typical step's seconds."""
    one, seconds = found[0], _seconds(found)
    is_long = 2 * sum(at.long_sec for at in found) >= seconds > 0
    return LineProfile(
        **{name: getattr(one, name) for name in _FIELDS},
        text=one.text,
        seconds=of_step,
        share=ratio(part=of_step, whole=step_sec),
        samples=sum(one.samples for one in found),
        only_enters=2 * _seconds(one for one in found if one.only_enters) > seconds,
        in_pieces=not (is_long or _is_one(found, seconds)),
        is_long=is_long,
    )


def _seconds(lines: Iterable[LineRecord]) -> float:
    return sum(one.seconds for one in lines)


def _is_one(found: Sequence[LineRecord], seconds: float) -> bool:
    """Whether most of the *seconds* of *found* are in one function of torch's, or in parts of the model around it."""
    by_callee = grouped(found, attrgetter("callee")).items()
    of_model = "ward" in found[0].part and not found[0].in_module
    calls_model = ("_call_impl", "_wrapped_call_impl") if of_model else ()  # torch's, that run a module
    is_whole = [of for name, of in by_callee if name.startswith("torch.") or name in calls_model]
    return any(_seconds(of) > _MOST * seconds for of in is_whole)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """Lines of one function, or of one callback's hook, in one part of the step."""

    part: str
    share: float
    rows: Sequence[LineProfile]  #: The one with most time first.

    @property
    def words(self) -> str:
        """Where it is, and what stands there: "Ema.on_train_batch_end train.py:12 (also 13, 14): `…`"."""
        first, *others = self.rows
        if not first.file:
            return first.hook
        named = [row for row in others if row.seconds > _ALSO * first.seconds][:3]
        rest = "other lines" if _share([first, *named]) < _ALL * self.share else ""
        also = ", ".join(filter(None, [*(str(row.line) for row in named), rest]))
        before = ", or an operator just before it" if first.is_long else ""
        return f"{first.where}{f' (also {also})' if also else ''}: `{first.start}`{before}"


def causes(lines: LinesProfile, is_asked: Callable[[LineProfile], bool]) -> list[Cause]:
    """What the user's own code does in rows that are *asked* for, the most time first; without what only enters.

    A function of which such rows are most has the time of its other rows, too.
    """
    rows_of = grouped((row for row in lines.rows if row.hook or not row.only_enters), _whose)
    least, found = min(_LEAST_SAMPLES, max(1, lines.steps // 2)), []
    for rows in rows_of.values():
        asked, whole = [row for row in rows if is_asked(row)], _share(rows)
        if sum(row.samples for row in asked) >= least:
            of_asked = _share(asked)
            found.append(Cause(part=rows[0].part, share=whole if of_asked > _MOST * whole else of_asked, rows=asked))
    return sorted(found, key=lambda one: -one.share)


def _whose(row: LineProfile) -> tuple[str, str, str, bool]:
    file, name = ("", row.hook) if row.only_enters or not row.file else (row.file, row.function)
    return file, name, row.part, row.in_module


def _share(rows: Iterable[LineProfile]) -> float:
    return sum(row.share or 0.0 for row in rows)


def between(parts: Mapping[str, float], rows: Iterable[LineProfile]) -> float:
    """The share of what lies between the parts of a loop of the user's and no line of it takes."""
    known = {part: share for part, share in parts.items() if "other" in part}
    others = sum(row.share or 0.0 for row in rows if row.part in known and not (row.only_enters and row.file))
    return max(0.0, sum(known.values()) - others)
