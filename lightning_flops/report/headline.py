"""What a report says first: the answer in at most twelve lines, or in one."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from fractions import Fraction

from lightning_flops.report.layout import TITLE_WIDTH, cut, wrapped
from lightning_flops.report.profile_document import NO_ADVICE
from lightning_flops.schema.advice import Advice
from lightning_flops.schema.answer import Answer
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

_WIDTH = 200
"""Characters of a headline, if its figures leave room for the advice."""

_LEAST_ADVICE = 120
"""Characters of an advice that are shown in any case."""


def answer_lines(profile: Profile, *, advice: bool = True, whole: bool = False) -> list[str]:
    """The summary in plain words: what ran where, a step's time and its parts, MFU, FLOPs, the top modules, advice.

    At most ``MOST_LINES`` lines of ``layout.TITLE_WIDTH`` columns, names of the user's apart; with *whole* a line for
    each part, however long, where something else breaks the lines.
    """
    answer = profile.answer
    lines = [
        *(line for sentences in opening(profile) for line in _sentences(sentences, whole=whole)),
        *_bar(answer),
        *_sentences(_flops(profile, answer), whole=whole),
        *_sentences(_longest(answer, lower_bound=profile.lower_bound), whole=whole),
    ]
    if not advice:
        return lines
    room = max(len(answer.advice), MOST_LINES - len(lines))
    return [*lines, *try_first(answer.advice, room=room, width=TITLE_WIDTH)][:MOST_LINES]


def try_first(advice: Sequence[Advice], *, room: int, width: int) -> Iterator[str]:
    """*advice* without its rules, the largest saving first: in at most *room* lines, at least one for each."""
    if not advice:
        yield NO_ADVICE
    for index, one in enumerate(advice):
        first, most = "Then: " if index else "Try first: ", max(1, room - (len(advice) - index - 1))
        saving = "" if one.stake is None else f" (Potential saving: up to {100 * one.stake:.1f}% of step time.)"
        lines: list[str] = []
        for text in (f"{one.evidence} {one.action}", f"{one.action}{saving}"):
            lines = wrapped(text, width=width, first=first, rest="  ")
            if len(lines) <= most:
                break
        lines = cut(lines, most=most, width=width)
        room -= len(lines)
        yield from lines


def opening(profile: Profile) -> tuple[str, str]:
    """What ran where and when; a step's time, its rates and utilization."""
    answer = profile.answer
    return (
        f"{_what(profile)} {_when(profile)}",
        f"{_step(profile, answer)} {_utilization(profile, answer)}".rstrip(),
    )


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


def _step(profile: Profile, answer: Answer) -> str:
    word = profile.context.step_word
    if answer.global_step_sec is None:
        return f"No {word} was timed, so samples/s, MFU and HFU are {NOT_AVAILABLE}."
    figures = [duration(answer.global_step_sec)]
    if answer.samples_per_sec is not None:
        figures.append(f"{plain(answer.samples_per_sec)} samples/s")
    else:
        reason = answer.unavailable.get("samples_per_sec", "")
        figures.append(f"samples/s {NOT_AVAILABLE}" + (f" ({reason})" if reason else ""))
    if answer.tokens_per_sec is not None:
        figures.append(f"{plain(answer.tokens_per_sec)} tokens/s")
    in_all = " in all" if profile.context.world_size > 1 else ""
    return f"One {word}: {', '.join(figures)}{in_all} over the wall clock."


def _utilization(profile: Profile, answer: Answer) -> str:
    if answer.global_step_sec is None:
        return ""
    if answer.mfu is None or answer.hfu is None:
        reason = answer.unavailable.get("mfu") or answer.unavailable.get("hfu", "")
        known = "" if answer.mfu is None else f"MFU {percent(answer.mfu)}, "
        return f"{known}{'MFU and HFU' if answer.mfu is None else 'HFU'} {NOT_AVAILABLE}: {reason}."
    least = "at least " if profile.lower_bound else ""
    values = f"MFU {least}{percent(answer.mfu)}, HFU {least}{percent(answer.hfu)}"
    given = ", as given" if profile.settings.peak_given else ", measured" if profile.settings.measured else ""
    if profile.ranks is not None:
        return f"{values} of {si(profile.ranks.peak_flops_per_sec, 'FLOP/s')} of all ranks{given}."
    peaks = [
        f"{si(one.peak_flops_per_sec, 'FLOP/s')} ({one.dtype})" for one in profile.dtypes if one.peak_flops_per_sec
    ]
    return f"{values} of {', '.join(peaks)}{given}."


def _bar(answer: Answer) -> Iterator[str]:
    """Each part's share, which add up to 100%, and blocks of that length."""
    if not answer.parts:
        return
    shares = _apportioned(answer.parts, among=1000)
    cells = _apportioned(answer.parts, among=_CELLS)
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


def _flops(profile: Profile, answer: Answer) -> str:
    flops, context = profile.flops, profile.context
    of_rank = "" if context.world_size == 1 else " on this rank"
    parts = [f"forward {si(answer.forward_flops)}"]
    if profile.has_backward:
        parts.append(f"backward {si(answer.backward_flops)}")
    least = "At least " if profile.lower_bound else ""
    words = f"{least}{si(flops.model, 'FLOPs')} a {context.step_word}{of_rank}: {', '.join(parts)}"
    beside = [
        f"{name} {si(amount)}"
        for name, amount in (("recomputed", flops.recompute), ("optimizer", flops.optimizer))
        if amount
    ]
    if beside:
        words += f"; beside them {', '.join(beside)}"
    if flops.skipped > 0:
        words += f"; masked attention skips {si(flops.skipped)}"
    return f"{words}. {plain(answer.params)} parameters." if answer.params is not None else f"{words}."


def _longest(answer: Answer, *, lower_bound: bool) -> str:
    if not answer.longest:
        return ""
    shown = [f"{_module(one.name)} {100 * one.share:.1f}%" for one in answer.longest]
    if answer.longest_of == "FLOPs":
        of_what = " of those that could be counted" if lower_bound else ""
        return f"Top modules by FLOPs of their own: {', '.join(shown)}{of_what}."
    whole = "the traced step" if answer.longest_of == "traced step" else "all modules' forwards"
    return f"Top modules by self time: {', '.join(shown)} of {whole}."


def _module(name: str) -> str:
    """*name*; of a long one, the end."""
    name = printable(name) or "(root)"
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
    if profile.answer.advice:
        first = profile.answer.advice[0]
        opening = f"{sentences} First advice: "
        words = printable(f"{first.evidence} {first.action}")
        room = max(_LEAST_ADVICE, _WIDTH - len(opening))
        sentences = opening + textwrap.shorten(words, room, placeholder=" …")
    return printable(sentences)


def counted(profile: Profile) -> str:
    """Whose FLOPs they are: "step 3", "steps 3, 16-18", "batch 2"."""
    return _indexes(profile.context.step_word, profile.counted_steps or (profile.profile_step,)).lower()


def figures(profile: Profile, *, reasons: bool = True) -> str:
    """FLOPs and time of a step, samples/s, and MFU or why there is none, in one line; without *reasons*, not why."""
    context, ranks, answer = profile.context, profile.ranks, profile.answer
    word = context.step_word
    of_rank = in_all = of_whom = ""
    if context.world_size > 1:
        of_rank, in_all = f" on rank {context.rank} of {context.world_size}", " in all"
        of_whom = " of this rank" if ranks is None else " of all ranks"
    flops = f"{'at least ' if profile.lower_bound else ''}{si(profile.flops.model, 'FLOPs')}"
    known = [f"{flops} a {word}{of_rank}"]
    if answer.global_step_sec is not None:
        known = [f"{flops} and {duration(answer.global_step_sec)} a {word}{of_rank}"]
    if answer.samples_per_sec is not None:
        known.append(f"{plain(answer.samples_per_sec)} samples/s{in_all}")
    if answer.mfu is not None:
        known.append(f"MFU {'at least ' if profile.lower_bound else ''}{percent(answer.mfu)}{of_whom}")
    return ", ".join((*known, *(_missing(answer) if reasons else ())))


def _missing(answer: Answer) -> Iterator[str]:
    """The figures that are not known, and why; one phrase for each reason."""
    by_reason: dict[str, list[str]] = {}
    for name, value, rate in (
        ("samples/s", answer.samples_per_sec, "samples_per_sec"),
        ("MFU", answer.mfu, "mfu"),
    ):
        if value is None:
            by_reason.setdefault(answer.unavailable.get(rate, ""), []).append(name)
    for reason, names in by_reason.items():
        yield f"{' and '.join(names)} {NOT_AVAILABLE}" + (f" ({reason})" if reason else "")


def throughput_headline(summary: ThroughputSummary) -> str:
    """The averages of a run in one line."""
    ips = NOT_AVAILABLE if summary.ips is None else plain(summary.ips.average)
    waiting = NOT_AVAILABLE if summary.reader_ratio is None else percent(summary.reader_ratio)
    return (
        f"{plain(summary.batches)} {plural('batch', summary.batches)}, {ips} {summary.ips_unit}, "
        f"{duration(summary.batch_cost_sec.average)} a batch, of it in the data loader {waiting}"
    )
