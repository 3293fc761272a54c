"""The block of DeepSpeed's Flops Profiler as text: its summary lines, labels and order.

Its users search these lines: a label is DeepSpeed's to the letter, and a value ends its line. What has to be said of a
value, that it is estimated, say, stands before it; what DeepSpeed does not print has lines of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_flops.analysis.rates import ratio
from lightning_flops.report.layout import TITLE_WIDTH, line, marked_before, title, wrapped
from lightning_flops.report.profile_document import whose
from lightning_flops.schema.profile import Profile
from lightning_flops.units import duration, plain, plural, run_text, runs_of, si

_NOTATIONS = (
    # No label is followed by a colon: a search for "data parallel size:" finds the line with its value.
    "dp_size (data parallel size, ranks that see different data), mp_size (model parallel size, tensor-parallel "
    "ranks), params (number of parameters), MACs (number of multiply-adds of matmul-like operators), flops (number of "
    "floating-point operations, two a MAC), FLOPS (floating-point operations per second), fwd latency (forward pass)"
)
_NOTATIONS_OF_TRAINING = (
    f"{_NOTATIONS}, bwd latency (backward pass), step latency (optimizer), iter latency (sum of fwd, bwd and step "
    "latency). Estimated lines take the bwd flops from the fwd flops, as DeepSpeed does; measured lines take those "
    "that autograd ran, recomputation included."
)


def summary_lines(profile: Profile, *, of_run: bool = True) -> list[str]:
    """DeepSpeed's lines, labels and order; between them the measured lines and the trainable parameters.

    Args:
        profile: what was measured.
        of_run: say of which steps of which run the figures are.
    """
    context, flops, rates, timing = profile.context, profile.flops, profile.rates, profile.timing
    factor = f"{2 + profile.settings.recompute_fwd_factor:g}"
    bwd_flops = f"{factor} * fwd flops per GPU"
    fwd_bwd_flops = f"{3 + profile.settings.recompute_fwd_factor:g} * fwd flops per GPU"
    if flops.without_backward:  # DeepSpeed's formulas would not give these figures
        bwd_flops, fwd_bwd_flops = f"{factor} * fwd flops with bwd", f"(fwd + {factor} * fwd with bwd)"
    params_lines, forward_line = _model_lines(profile)

    def rate(value: float | None, *words: str) -> str:
        return marked_before(si(value, "FLOPS"), *words, *_bound(profile)) if value is not None else si(None)

    def estimated(seconds: float | None) -> float | None:
        return ratio(part=flops.forward + flops.backward_estimated, whole=seconds)

    def count(text: str) -> str:
        return marked_before(text, *_bound(profile))

    lines = [
        title("Flops Profiler"),
        f"Profile Summary at {context.step_word if of_run else 'step'} {profile.profile_step}:",
        *([*_when_lines(profile), *_where_lines(profile), *_paragraph(_about_rates(profile))] if of_run else []),
        *_paragraph(_NOTATIONS_OF_TRAINING if context.trains else f"{_NOTATIONS}.", first="Notations: "),
        "",
        line("world size", plain(context.world_size)),
        line("data parallel size", plain(context.dp_size)),
        line("model parallel size", plain(context.tp_size)),
        line("batch size per GPU", plain(context.micro_batch_size)),
        *_micro_step_lines(profile),
        line("params per GPU", si(profile.local_params)),
        *params_lines,
        line("fwd MACs per GPU", count(si(flops.forward / 2, "MACs"))),
        line("fwd flops per GPU", count(si(flops.forward))),
        forward_line,
        line("fwd latency", duration(timing.forward_sec if timing else None)),
        line("fwd FLOPS per GPU = fwd flops per GPU / fwd latency", rate(rates.forward_flops_per_sec)),
    ]
    if not context.trains:
        measured = (("bwd", flops.backward), ("recomputed", flops.recompute))
        lines += [line(f"{name} flops per GPU", count(f"(measured) {si(spent)}")) for name, spent in measured if spent]
        return [*lines, line("samples/second", _samples_per_sec(profile))]
    return [
        *lines,
        line("bwd latency", duration(timing.backward_sec if timing else None)),
        line(
            f"bwd FLOPS per GPU = {bwd_flops} / bwd latency",
            rate(rates.backward_flops_per_sec_estimated, "estimated"),
        ),
        line(
            f"bwd FLOPS per GPU = {'bwd+recomputed flops' if flops.recompute else 'bwd flops per GPU'} / bwd latency",
            rate(rates.backward_flops_per_sec, "measured"),
        ),
        line(
            f"fwd+bwd FLOPS per GPU = {fwd_bwd_flops} / (fwd+bwd latency)",
            rate(estimated(timing.forward_backward_sec if timing else None), "estimated"),
        ),
        line(
            "fwd+bwd FLOPS per GPU = "
            + ("fwd+bwd+recomputed flops" if flops.recompute else "fwd+bwd flops per GPU")
            + " / (fwd+bwd latency)",
            rate(rates.forward_backward_flops_per_sec, "measured"),
        ),
        line("step latency", duration(timing.optimizer_sec if timing else None)),
        line("iter latency", duration(timing.iter_sec if timing else None)),
        line(
            f"FLOPS per GPU = {fwd_bwd_flops} / iter latency",
            rate(estimated(timing.iter_sec if timing else None), "estimated"),
        ),
        line("FLOPS per GPU = hardware flops per GPU / iter latency", rate(rates.iter_flops_per_sec, "measured")),
        line("samples/second", _samples_per_sec(profile)),
    ]


def _model_lines(profile: Profile) -> tuple[list[str], str]:
    """Parameters and forward of the whole model, or of a pipeline's stage where the other stages are not known."""
    context, ranks, words = profile.context, profile.ranks, "of model"
    params, trainable = profile.params, profile.trainable_params
    marks: tuple[str, ...] = ()
    forward: int | None
    if ranks is not None:
        marks = (whose(ranks),) if ranks.absences else ()
        params, trainable = ranks.params, ranks.trainable_params
    elif context.pp_size > 1:
        words, marks = "of stage", (f"stage {context.pp_rank} of {context.pp_size}",)
    label = f"params {words}"
    if profile.local_params is not None and params == profile.local_params * context.tp_size:
        label += " = params per GPU * mp_size"
    sizes = {"cp_size": context.cp_size, "sp_size": context.sp_size}
    factors = {"mp_size": context.tp_size} | {word: size for word, size in sizes.items() if size > 1}
    forward = profile.flops.forward * math.prod(factors.values())
    forward_words = f"fwd flops per GPU * {' * '.join(factors)}"
    if ranks is not None:
        of_model = None if ranks.flops_of_model is None else ranks.flops_of_model.forward
        if of_model != forward:  # ranks differ: stages, or uneven batches
            forward, forward_words = of_model, "fwd flops of all GPUs / dp_size"
    params_lines = [
        line(label, marked_before(si(params), *marks)),
        line(f"trainable params {words}", marked_before(si(trainable), *marks)),
    ]
    text = marked_before(si(forward), *marks, *_bound(profile))
    return params_lines, line(f"fwd flops {words} = {forward_words}", text)


def _about_rates(profile: Profile) -> str:
    """What a reader who knows the figures above must know of those below."""
    latency = "iter latency" if profile.context.trains else "fwd latency"
    job = profile.job_rates
    wall = (
        "" if job.samples_per_sec is None else f": over the wall clock they are {plain(job.samples_per_sec)} a second"
    )
    return (
        f"As DeepSpeed prints it, under its labels: GPU is whatever device the run is on, FLOPS a rate (FLOP/s), and "
        f"samples/second are over the {latency}{wall}. Counts are those of one counted {profile.step_name}, latencies "
        "means of the timed ones."
    )


def _when_lines(profile: Profile) -> list[str]:
    word = profile.context.step_word
    many = plural(word, 2)
    timing = f"no {word}"
    if profile.timed_steps:
        timing = f"{len(profile.timed_steps)} {many}, {_ranges(profile.timed_steps)}"
    counted = f"no whole {word}"
    if profile.counted_steps:
        counted = f"{plural(word, len(profile.counted_steps))} {_ranges(profile.counted_steps)}"
    return _paragraph(
        f"The report came out at {word} {profile.report_step}. Counted: {counted}. Timed: {timing}. ({many.title()} of "
        f"this {profile.context.run_word}; the first is 0.)"
    )


def _where_lines(profile: Profile) -> list[str]:
    context = profile.context
    sizes = {name: getattr(context, f"{name}_size") for name in ("dp", "tp", "pp", "cp", "sp", "ep")}
    parallel = [f"{name} {size}" for name, size in sizes.items() if size != 1]
    parts = [
        f"{context.device_name or 'unknown device'} ({context.device_type})",
        *([f"precision {context.precision}"] if context.precision else []),
        *([f"strategy {context.strategy}"] if context.strategy else []),
        f"rank {context.rank} of {context.world_size}" + (f" ({', '.join(parallel)})" if parallel else ""),
        f"{context.framework} {context.framework_version}",
        *([f"torch {context.torch_version}"] if context.framework != "torch" else []),
    ]
    return _paragraph(", ".join(parts), first="On: ", rest="    ")


def _micro_step_lines(profile: Profile) -> list[str]:
    """How many batches and samples a step has, where it is not one batch of the size above."""
    size, trains = profile.context.micro_batch_size, profile.context.trains
    lines = []
    if profile.micro_steps != 1 and trains:
        lines.append(line("micro-steps of a global step", plain(profile.micro_steps)))
    if size is not None and profile.samples is not None and (profile.micro_steps != 1 or profile.samples != size):
        about = ", on average" if profile.variable else ""
        lines.append(line(f"samples per GPU in a {profile.step_name}{about}", plain(profile.samples)))
    return lines


def _bound(profile: Profile) -> list[str]:
    return ["lower bound"] if profile.lower_bound else []


def _samples_per_sec(profile: Profile) -> str:
    value = profile.job_rates.iter_samples_per_sec
    return plain(value) if value is None else f"{value:.2f}"


def _ranges(steps: Sequence[int]) -> str:
    """Indexes, with runs joined: 3, 4, 5, 9 is "3-5, 9"."""
    return ", ".join(map(run_text, runs_of(steps)))


def _paragraph(text: str, *, first: str = "", rest: str = "") -> list[str]:
    return wrapped(text, width=TITLE_WIDTH, first=first, rest=rest)
