"""What one step spent and where its time went, as text: the sections that DeepSpeed's report does not have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lightning_flops.analysis.rates import ratio
from lightning_flops.analysis.step_rates import RATES_OF_TRAINING
from lightning_flops.report.layout import line, paragraph, some_of, table, title
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import PartTiming
from lightning_flops.units import NOT_AVAILABLE, duration, percent, plain, plural, si

_OPERATORS_SHOWN = 10
_MODULES_SHOWN = 3

_NOT_OPERATORS = ("cuda", "inductor", "triton")
"""How names of kernels and graphs begin that are no operators."""

MODEL_ROW = "model FLOPs = fwd + bwd"
HARDWARE_ROW = "hardware FLOPs = fwd + bwd + recomputed + optimizer - skipped"

ROWS_OF_A_FORWARD = {
    "fwd": "fwd",
    MODEL_ROW: "model FLOPs = fwd",
    HARDWARE_ROW: "hardware FLOPs = fwd - skipped",
}
"""What the rows are called that are left where there is no backward and no optimizer."""

_UNITS = (("s", 1.0), ("ms", 1e-3), ("us", 1e-6))

_RATE_WORDS = {
    "forward_flops_per_sec": "fwd FLOP/s",
    "backward_flops_per_sec": "bwd FLOP/s",
    "backward_flops_per_sec_estimated": "bwd FLOP/s",
    "forward_backward_flops_per_sec": "fwd+bwd FLOP/s",
    "forward_backward_flops_per_sec_estimated": "fwd+bwd FLOP/s",
    "iter_flops_per_sec": "FLOP/s",
    "iter_flops_per_sec_estimated": "FLOP/s",
    "samples_per_sec": "samples/second",
    "iter_samples_per_sec": "samples/second",
    "tokens_per_sec": "tokens/second",
    "tokens_per_sec_per_device": "tokens/second",
    "mfu": "MFU",
    "hfu": "HFU",
    "data_wait_ratio": "data wait",
}
"""How a report names a rate that has no value."""


def flops_lines(profile: Profile) -> list[str]:
    """Every bucket of FLOPs, to the last one."""
    mean, total = profile.flops, profile.flops_total
    several = len(profile.counted_steps) > 1
    factor = f"{2 + profile.settings.recompute_fwd_factor:g}"
    skipped = (
        "skipped by fused masked attention"
        if profile.settings.causal_attention == "full"
        else "skipped: causal attention, counted less executed"
    )
    rows = [
        ("fwd", mean.forward, total.forward),
        ("  of it without a bwd to follow", mean.without_backward, total.without_backward),
        ("bwd (measured)", mean.backward, total.backward),
        (f"bwd (estimated: {factor} x fwd with a bwd to follow)", mean.backward_estimated, total.backward_estimated),
        ("recomputed in the bwd", mean.recompute, total.recompute),
        ("optimizer", mean.optimizer, total.optimizer),
        (skipped, mean.skipped, total.skipped),
        (MODEL_ROW, mean.model, total.model),
        (HARDWARE_ROW, mean.hardware, total.hardware),
    ]
    counted_steps = f"{len(profile.counted_steps)} {plural(profile.context.step_word, 2)}"
    head = ["", "FLOPs", f"all {counted_steps}" if several else "exact"]
    cells = [[label, si(one), plain(all_steps)] for label, one, all_steps in rows]
    if several:
        head[1] = f"mean of a {profile.context.step_word}"
    if profile.flops_spread is not None:
        least, most = profile.flops_spread.minimum, profile.flops_spread.maximum
        spread = {
            "fwd": (least.forward, most.forward),
            "bwd (measured)": (least.backward, most.backward),
            "recomputed in the bwd": (least.recompute, most.recompute),
            "optimizer": (least.optimizer, most.optimizer),
            MODEL_ROW: (profile.flops_spread.model_minimum, profile.flops_spread.model_maximum),
        }
        head += ["min", "max"]
        for row in cells:
            row += map(si, spread[row[0]]) if row[0] in spread else ("", "")
    moved = profile.bytes_total
    if moved.total:
        head.append("bytes")
        by_row = {
            "fwd": moved.forward,
            "bwd (measured)": moved.backward,
            "recomputed in the bwd": moved.recompute,
            "optimizer": moved.optimizer,
        }
        for row in cells:
            row.append(si(profile.per_step(by_row[row[0]]), "B") if row[0] in by_row else "")
    if not profile.has_backward:
        cells = [row for row in cells if row[0] in ROWS_OF_A_FORWARD or row[0] == skipped]
        for row in cells:
            row[0] = ROWS_OF_A_FORWARD.get(row[0], row[0])
    attention = (
        "Attention counts the full score matrix, causal or not."
        if profile.settings.causal_attention == "full"
        else "Attention that is flagged causal counts half the score matrix."
    )
    return [
        title(f"FLOPs of a {profile.step_name} per {profile.context.device_word}"),
        *paragraph(
            f"Matrix products, convolutions, attention and recurrent layers, two FLOPs a multiply-add. {attention}"
        ),
        *(["Bytes are what all operators read and write, elementwise ones included."] if moved.total else []),
        *(paragraph(_lower_bound_words(profile)) if profile.lower_bound else []),
        *table(head, cells),
    ]


def time_lines(profile: Profile) -> list[str]:
    """The parts of a step, which add up to it."""
    lines = [title(f"Time of a {profile.step_name}")]
    timing, word = profile.timing, profile.context.step_word
    many = plural(word, 2)
    if timing is None:
        return [*lines, f"No {word} was timed."]
    unit, size = time_unit(timing.global_step_sec)

    def row(part: PartTiming) -> list[str]:
        # Each figure is rounded by itself, as elsewhere in the report: printed parts may miss the sum by a digit.
        spread = (part.minimum_sec, part.median_sec, part.maximum_sec)
        share = f"{100 * (part.share or 0.0):.2f}%"
        name = profile.step_name if part is timing.global_step else part.name
        return [name, f"{part.mean_sec / size:.3f}", share, *(f"{seconds / size:.3f}" for seconds in spread)]

    rows = [row(part) for part in (*timing.parts, timing.global_step)]
    lines += table(["", f"mean, {unit}", "share", "min", "median", "max"], rows)
    steps = f"{plain(timing.timed_steps)} timed {plural(word, timing.timed_steps)}"
    lines.append(f"Mean, min, median and max of {steps}. Counted and traced {many} are not among them.")
    if timing.reader_sec is not None:
        lines.append(
            f"The data loader ran {duration(timing.reader_sec)} per {word} on the host, whether other work hid it or "
            "not."
        )
    return lines


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit in which parts of *seconds* are printed, and its length in seconds."""
    return next(((unit, size) for unit, size in _UNITS if seconds >= size), _UNITS[-1])


def throughput_lines(profile: Profile) -> list[str]:
    """What the run achieves, and what share of the device's peak that is."""
    rates, job, name = profile.rates, profile.job_rates, profile.step_name
    device = profile.context.device_word
    latency = "iter latency (as DeepSpeed)" if profile.context.trains else "fwd latency"
    bound = " (lower bound)" if profile.lower_bound else ""

    def utilization(value: float | None) -> str:
        return percent(value) if value is None else f"{percent(value)}{bound}"

    lines = [
        title("Throughput and utilization"),
        line(f"MFU = model FLOPs per {device} / peak FLOP/s / {name} time", utilization(rates.mfu)),
        line(f"HFU = hardware FLOPs per {device} / peak FLOP/s / {name} time", utilization(rates.hfu)),
        *_peak_lines(profile),
        line(f"samples/second over the {name}", plain(job.samples_per_sec)),
        line(f"samples/second over the {latency}", plain(job.iter_samples_per_sec)),
        line(f"tokens/second over the {name}", plain(job.tokens_per_sec)),
        line(f"tokens/second per {device}", plain(job.tokens_per_sec_per_device)),
        line(f"data wait, share of the {name}", percent(rates.data_wait_ratio)),
    ]
    lines += _whose_lines(profile)
    unavailable = profile.unavailable
    if not profile.has_backward:
        # No line above asks for them. A loop that could not be timed says so for those that it has.
        unavailable = {rate: why for rate, why in unavailable.items() if rate not in RATES_OF_TRAINING}
    return lines + missing_rates_lines(unavailable)


def missing_rates_lines(unavailable: Mapping[str, str]) -> list[str]:
    """Why some rates, by their fields' names, are not known; one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for rate, reason in unavailable.items():
        words = reasons.setdefault(reason, [])
        if _RATE_WORDS[rate] not in words:
            words.append(_RATE_WORDS[rate])
    lines = []
    for reason, words in reasons.items():
        lines += paragraph(f"{NOT_AVAILABLE}: {', '.join(words)}: {reason}.", rest="     ")
    return lines


def _whose_lines(profile: Profile) -> list[str]:
    """Which figures are this rank's, and which the job's."""
    context = profile.context
    if context.world_size == 1:
        return []
    if profile.ranks is not None:
        return paragraph(
            f"MFU, HFU and the times are those of rank {context.rank}; samples and tokens are those of all ranks, as "
            'each measured them. "All ranks" has the MFU and HFU of the job, which the scalars show.'
        )
    whose = "that all ranks work on together"
    if context.dp_size > 1:
        dp_size = context.dp_size
        whose = f"of all {dp_size} ranks that see different data, taken as {dp_size} times this rank's"
    return paragraph(f"MFU, HFU and the times are those of rank {context.rank}; samples and tokens are those {whose}.")


def _peak_lines(profile: Profile) -> list[str]:
    """The peak of each dtype, and the dtype's share of the model FLOPs."""
    whole = sum(one.model for one in profile.dtypes)
    return [
        line(
            f"  peak FLOP/s for {one.dtype}, {percent(ratio(part=one.model, whole=whole))} of the model FLOPs",
            si(one.peak_flops_per_sec, "FLOP/s"),
        )
        for one in profile.dtypes
    ]


def operator_lines(profile: Profile) -> list[str]:
    """The operators that spend most."""
    spending = [operator for operator in profile.operators if operator.flops.total]
    if not spending:
        return []
    whole = sum(operator.flops.total for operator in spending)
    per_step = profile.per_step
    shown = spending[:_OPERATORS_SHOWN]
    columns = [
        ["", *(operator.operator for operator in shown)],
        ["calls", *(si(per_step(operator.calls)) for operator in shown)],
        ["fwd", *(si(per_step(operator.flops.forward)) for operator in shown)],
    ]
    if profile.has_backward:
        columns.append(["bwd", *(si(per_step(operator.flops.backward)) for operator in shown)])
    if profile.flops_total.recompute:
        columns.append(["recomputed", *(si(per_step(operator.flops.recompute)) for operator in shown)])
    if profile.flops_total.optimizer:
        columns.append(["optimizer", *(si(per_step(operator.flops.optimizer)) for operator in shown)])
    columns += [
        ["share", *(percent(ratio(part=operator.flops.total, whole=whole)) for operator in shown)],
        ["dtype", *(", ".join(operator.dtypes) for operator in shown)],
    ]
    head, *rows = zip(*columns, strict=True)
    lines = [
        title(f"Operators with most FLOPs in a {profile.step_name}"),
        *table(head, rows, least_width=7, left=(0, len(columns) - 1)),
        *(["Shares are of what was counted, a lower bound."] if profile.lower_bound else []),
    ]
    if len(spending) > _OPERATORS_SHOWN:
        rest = sum(operator.flops.total for operator in spending[_OPERATORS_SHOWN:])
        share = percent(ratio(part=rest, whole=whole))
        lines.append(f"And {plain(len(spending) - _OPERATORS_SHOWN)} more operators, which spend {share}.")
    return lines


def uncounted_lines(profile: Profile) -> list[str]:
    """Each operator that ran and is in no count."""
    lines = [title("Not counted")]
    if not profile.uncounted:
        return [*lines, "Nothing: every operator that ran has a FLOP count or is known to spend none."]
    if profile.lower_bound:
        lines += paragraph(" ".join((_lower_bound_words(profile), *_how_to_teach(profile))))
    ordered = sorted(profile.uncounted.items(), key=lambda item: (not item[1].heavy, -item[1].output_elements, item[0]))
    rows = []
    for name, operator in ordered:
        rows.append(
            [
                name,
                plain(operator.calls),
                si(operator.output_elements),
                "heavy" if operator.heavy else "",
                some_of(operator.modules, most=_MODULES_SHOWN),
            ]
        )
    numbers = table(["", "calls", "output elements", ""], [row[:4] for row in rows], least_width=0)
    names = ["modules", *(row[4] for row in rows)]
    indent = " " * max(map(len, numbers))
    for number, modules_text in zip(numbers, names, strict=True):
        lines += paragraph(modules_text, first=f"{number:<{len(indent)}}  ", rest=f"{indent}  ")
    return lines


def notes_lines(profile: Profile) -> list[str]:
    """What is missing or degraded."""
    if not profile.notes:
        return []
    lines = [title("Notes")]
    for note in profile.notes:
        lines += paragraph(note, first="- ", rest="  ")
    return lines


def _lower_bound_words(profile: Profile) -> str:
    heavy = sorted(name for name, operator in profile.uncounted.items() if operator.heavy)
    return (
        f"LOWER BOUND: {', '.join(heavy)} may spend FLOPs and could not be counted, so FLOPs, MACs, FLOP/s, MFU and "
        "HFU are at least what is printed."
    )


def _how_to_teach(profile: Profile) -> Iterator[str]:
    """How to have an operator counted; nothing where only kernels without an operator are not counted."""
    for name, operator in sorted(profile.uncounted.items()):
        namespace, _, short = name.partition(".")
        if operator.heavy and namespace not in _NOT_OPERATORS and short and "." not in short:
            yield (
                f'lightning_flops.register_flop_formula("{namespace}::{short}", formula) has an operator counted; 0 in '
                "place of the formula says that it spends none."
            )
            return
