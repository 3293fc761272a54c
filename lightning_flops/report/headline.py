"""What a report says first: the answer in at most twelve lines, or in one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from fractions import Fraction

from lightning_flops.report.layout import TITLE_WIDTH, cut, wrapped
from lightning_flops.report.profile_document import NO_ADVICE, ORIGIN_WORDS, no_advice, saving, top_modules
from lightning_flops.schema.advice import Advice
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.throughput import ThroughputSummary
from lightning_flops.text.printable import printable
from lightning_flops.units import NOT_AVAILABLE, duration, percent, plain, plural, run_text, runs_of, si

MOST_LINES = 12
"""Lines of the answer, whatever the model, the job and the advice are called."""

_BAR_COLUMNS = 80
"""The bar is not to be broken by a narrow terminal."""

_CELLS = 40
"""Width of a step's bar, all its parts together."""

_BLOCK = "█"
_NAME_CHARS = 44
_DEVICES_SHOWN = 2
_MODULES = 3
_ADVICE = 3

_WIDTH = 200
"""Characters of a headline, if its figures leave room for the advice."""

_LEAST_ADVICE = 120
"""Characters of an advice that are shown in any case."""


def answer_lines(profile: Profile, *, advice: bool = True, bar: bool = True, whole: bool = False) -> list[str]:
    """The summary in plain words: what ran where, a step's time and its parts, MFU, FLOPs, the top modules, advice.

    At most ``MOST_LINES`` lines of ``layout.TITLE_WIDTH`` columns, names of the user's apart; with *whole* a line for
    each part, however long, where something else breaks the lines; without the *bar* where a picture stands for it.
    """
    lines = [
        *(line for sentences in opening(profile) for line in _sentences(sentences, whole=whole)),
        *(_bar(step_parts(profile)) if bar else ()),
        *_sentences(stalls_words(profile), whole=whole),
        *_sentences(_flops(profile), whole=whole),
        *_sentences(_longest(profile), whole=whole),
    ]
    if not advice:
        return lines
    room, nothing = MOST_LINES - len(lines), no_advice(profile)
    return [*lines, *try_first(profile.advice[:_ADVICE], room=room, width=TITLE_WIDTH, nothing=nothing)][:MOST_LINES]


def try_first(advice: Sequence[Advice], *, room: int, width: int, nothing: str = NO_ADVICE) -> Iterator[str]:
    """*advice* without its rules, fact and remedy of each: as many pieces as *room* lines hold, the first in any case.

    Args:
        advice: the largest saving first.
        room: lines.
        width: columns.
        nothing: what to say without advice.
    """
    if not advice:
        yield nothing
    for index, one in enumerate(advice):
        first = "Then: " if index else "Try first: "
        lines = wrapped(f"{one.fact} {one.remedy}{saving(one)}", width=width, first=first, rest="  ")
        if index and len(lines) > room:
            return
        lines = cut(lines, most=max(1, room), width=width)
        room -= len(lines)
        yield from lines


def opening(profile: Profile) -> tuple[str, str]:
    """What ran where and when; a step's time, its rates and utilization."""
    return f"{_what(profile)} {_when(profile)}", f"{_step(profile)} {_utilization(profile)}".rstrip()


def step_parts(profile: Profile) -> list[tuple[str, float]]:
    """Seconds of each part of a typical step that took any, the longest first; they add up to it."""
    parts = () if profile.timing is None else profile.timing.parts
    return sorted(((one.name, one.typical_sec) for one in parts if one.typical_sec > 0), key=lambda one: -one[1])


def _sentences(text: str, *, whole: bool) -> list[str]:
    if whole:
        return [printable(text)] if text else []
    return cut(wrapped(text, width=TITLE_WIDTH, first="", rest="  "), most=2, width=TITLE_WIDTH)


def _what(profile: Profile) -> str:
    context = profile.context
    name = profile.modules[0].type_name if profile.modules else ""
    loop = "" if context.trains else f" in a {context.loop} loop"
    parts = [f"{name or 'A model'}{loop} on {_where(profile)}"]
    if context.precision:
        parts.append(f"precision {context.precision}")
    if context.micro_batch_size is not None:
        batch = f"batch {plain(context.micro_batch_size)}"
        if profile.micro_steps != 1:
            batch += f" x {plain(profile.micro_steps)} micro-steps"
        parts.append(batch if context.dp_size == 1 else f"{batch} on each of {plain(context.dp_size)} ranks")
    return f"{', '.join(parts)}."


def _where(profile: Profile) -> str:
    context, ranks = profile.context, profile.ranks
    device = context.device_name or "unknown device"
    if device.lower() != context.device_type.lower():
        device = f"{context.device_type} ({device})"
    if context.world_size == 1:
        return device
    if ranks is None:
        return f"{device}, rank {plain(context.rank)} of {plain(context.world_size)}"
    groups = [f"{plain(one.ranks)} x {one.device_name or 'unknown device'}" for one in ranks.devices]
    more = len(groups) - _DEVICES_SHOWN
    shown = f"{', '.join(groups[:_DEVICES_SHOWN])}" + (f" and {more} more kinds" if more > 0 else "")
    missing = f", {plain(ranks.world_size - ranks.answered)} ranks did not answer" if ranks.absences else ""
    return f"{shown}{missing}, times of rank {plain(context.rank)}"


def _when(profile: Profile) -> str:
    word = profile.context.step_word
    counted = _indexes(word, profile.counted_steps) if profile.counted_steps else f"No whole {word}"
    timed = _indexes(word, profile.timed_steps).lower() if profile.timed_steps else f"no {word}"
    return f"{counted} counted, {timed} timed."


def _indexes(word: str, steps: Sequence[int]) -> str:
    """Their numbers: "Step 10", "Steps 13-32", or how many there are where they lie apart."""
    runs = runs_of(steps)
    if len(runs) > 2:
        return f"{plain(len(steps))} {plural(word, 2)} of {min(steps)}-{max(steps)}"
    return f"{plural(word, len(steps)).title()} {', '.join(map(run_text, runs))}"


def _step(profile: Profile) -> str:
    word, timing, rates = profile.context.step_word, profile.timing, profile.job_rates
    if timing is None:
        return f"No {word} was timed, so samples/s, MFU and HFU are {NOT_AVAILABLE}."
    reason = profile.job_unavailable.get("samples_per_sec", "")
    figures = [f"samples/s {NOT_AVAILABLE}" + (f" ({reason})" if reason else "")]
    if rates.samples_per_sec is not None:
        figures = [f"{plain(rates.samples_per_sec)} samples/s"]
    if rates.tokens_per_sec is not None:
        figures.append(f"{plain(rates.tokens_per_sec)} tokens/s")
    in_all = " in all" if profile.context.world_size > 1 else ""
    few = f" (few steps: {len(profile.timed_steps)} timed)" if timing.few_steps else ""
    typical = f"A typical {word}{few}: {duration(timing.global_step.typical_sec)}"
    return f"{typical}; {', '.join(figures)}{in_all} over the wall clock."


def _utilization(profile: Profile) -> str:
    mfu, hfu = profile.job_rates.mfu, profile.job_rates.hfu
    if profile.timing is None:
        return ""
    if mfu is None or hfu is None:
        reason = profile.job_unavailable.get("mfu") or profile.job_unavailable.get("hfu", "")
        known = "" if mfu is None else f"MFU {percent(mfu)}, "
        return f"{known}{'MFU and HFU' if mfu is None else 'HFU'} {NOT_AVAILABLE}: {reason}."
    least = "at least " if profile.lower_bound else ""
    values = f"MFU {least}{percent(mfu)}, HFU {least}{percent(hfu)}"
    given = ORIGIN_WORDS[profile.settings.peaks_from]
    if profile.ranks is not None:
        return f"{values} of {si(profile.ranks.peak_flops_per_sec, 'FLOP/s')} of all ranks{given}."
    known_peaks, spending = profile.peaks_flops_per_sec, [one.dtype for one in profile.dtypes]
    peaks = [f"{si(known_peaks[dtype], 'FLOP/s')} ({dtype})" for dtype in spending if dtype in known_peaks]
    return f"{values} of {', '.join(peaks)}{given}."


def _bar(parts: Sequence[tuple[str, float]]) -> Iterator[str]:
    """Each part's share, which add up to 100%, and blocks of that length."""
    if not parts:
        return
    shares = _apportioned(parts, among=1000)
    cells = _apportioned(parts, among=_CELLS)
    pieces = [
        f"{name} {share / 10:.1f}%{' ' if cells[name] else ''}{_BLOCK * cells[name]}"
        for name, share in shares.items()
        if share
    ]
    line = ""
    for piece in pieces:
        if line and len(line) + 2 + len(piece) > _BAR_COLUMNS:
            yield line
            line = ""
        line += f"{'  ' if line else ''}{piece}"
    yield line


def _apportioned(parts: Sequence[tuple[str, float]], *, among: int) -> dict[str, int]:
    """*among* whole units over *parts* by their sizes: each at most one unit off, and none lost (largest remainder)."""
    whole = sum(Fraction(size) for _, size in parts)
    exact = {name: Fraction(size) * among / whole for name, size in parts}
    units = {name: int(one) for name, one in exact.items()}
    left = among - sum(units.values())
    for name in sorted(exact, key=lambda name: units[name] - exact[name])[:left]:
        units[name] += 1
    return units


def stalls_words(profile: Profile) -> str:
    """Steps that took much longer than a typical one, in a sentence; empty if none did."""
    timing = profile.timing
    if timing is None or timing.stalls is None:
        return ""
    one, word = timing.stalls, profile.context.step_word
    return (
        f"Stalls: {plain(one.steps)} of {plain(timing.timed_steps)} {plural(word, 2)} took {duration(one.seconds)} "
        f"longer than typical ones, mostly in {one.part}."
    )


def _flops(profile: Profile) -> str:
    flops, context, params = profile.flops, profile.context, profile.job_params
    of_rank = "" if context.world_size == 1 else " on this rank"
    parts = [f"forward {si(flops.forward)}", *([f"backward {si(flops.backward)}"] if profile.has_backward else [])]
    least = "At least " if profile.lower_bound else ""
    words = f"{least}{si(flops.model, 'FLOPs')} a {context.step_word}{of_rank}: {', '.join(parts)}"
    others = (("recomputed", flops.recompute), ("optimizer", flops.optimizer))
    if beside := [f"{name} {si(amount)}" for name, amount in others if amount]:
        words += f"; in addition {', '.join(beside)}"
    if flops.skipped > 0:
        words += f"; masked attention skips {si(flops.skipped)}"
    return f"{words}." if params is None else f"{words}. {plain(params)} parameters."


def _longest(profile: Profile) -> str:
    found, of = top_modules(profile)
    if not found:
        return ""
    shown = ", ".join(
        f"{f'{group.size} x ' if group.size > 1 else ''}{_module(group.name)} {100 * (part or 0.0):.1f}%"
        for group, part in found[:_MODULES]
    )
    if of == "FLOPs":
        of_what = " of those that could be counted" if profile.lower_bound else ""
        return f"Top modules by FLOPs of their own: {shown}{of_what}."
    whole = "a typical step" if of == "step" else "all modules' forwards"
    if profile.traced is not None and profile.traced.is_apart:
        whole += " (rough: traced steps took far longer, or shorter)"
    return f"Top modules by self time: {shown} of {whole}."


def _module(name: str) -> str:
    """*name*; of a long one, the end."""
    name = printable(name)
    if len(name) <= _NAME_CHARS:
        return name
    kept = ""
    for part in reversed(name.split(".")):
        if kept and len(kept) + len(part) + 4 > _NAME_CHARS:
            break
        kept = f".{part}{kept}"
    return f"..{kept[-_NAME_CHARS:]}"


def headline(profile: Profile) -> str:
    """One line of whole sentences: FLOPs and time of a step, samples/s, MFU or why there is none, the first advice."""
    sentences = f"{figures(profile)}."
    if profile.advice:
        first = profile.advice[0]
        opening = f"{sentences} First advice: "
        words = printable(f"{first.fact} {first.remedy}")
        room = max(_LEAST_ADVICE, _WIDTH - len(opening))
        sentences = opening + textwrap.shorten(words, room, placeholder=" …")
    return printable(sentences)


def counted(profile: Profile) -> str:
    """Whose FLOPs they are: "step 3", "steps 3, 16-18", "batch 2"."""
    return _indexes(profile.context.step_word, profile.counted_steps or (profile.profile_step,)).lower()


def figures(profile: Profile, *, reasons: bool = True) -> str:
    """FLOPs and time of a step, samples/s, and MFU or why there is none, in one line; without *reasons*, not why."""
    context, ranks, rates, timing = profile.context, profile.ranks, profile.job_rates, profile.timing
    of_rank = in_all = of_whom = ""
    if context.world_size > 1:
        of_rank, in_all = f" on rank {context.rank} of {context.world_size}", " in all"
        of_whom = " of this rank" if ranks is None else " of all ranks"
    least = "at least " if profile.lower_bound else ""
    took = "" if timing is None else f" and {duration(timing.global_step.typical_sec)}"
    known = [f"{least}{si(profile.flops.model, 'FLOPs')}{took} a {context.step_word}{of_rank}"]
    missing: dict[str, list[str]] = {}  # by reason
    if rates.samples_per_sec is not None:
        known.append(f"{plain(rates.samples_per_sec)} samples/s{in_all}")
    else:
        missing.setdefault(profile.job_unavailable.get("samples_per_sec", ""), []).append("samples/s")
    if rates.mfu is not None:
        known.append(f"MFU {least}{percent(rates.mfu)}{of_whom}")
    else:
        missing.setdefault(profile.job_unavailable.get("mfu", ""), []).append("MFU")
    for reason, names in missing.items() if reasons else ():
        known.append(f"{' and '.join(names)} {NOT_AVAILABLE}" + (f" ({reason})" if reason else ""))
    return ", ".join(known)


def throughput_headline(summary: ThroughputSummary) -> str:
    """The averages of a run in one line."""
    ips = NOT_AVAILABLE if summary.ips is None else plain(summary.ips.average)
    waiting = NOT_AVAILABLE if summary.reader_ratio is None else percent(summary.reader_ratio)
    return (
        f"{plain(summary.batches)} {plural('batch', summary.batches)}, {ips} {summary.ips_unit}, "
        f"{duration(summary.batch_cost_sec.average)} a batch, of it in the data loader {waiting}"
    )
