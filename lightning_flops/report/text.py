"""The whole report as text: DeepSpeed's summary, then what its profiler does not tell, then the modules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.report.advice_text import advice_lines
from lightning_flops.report.compare_text import render_comparison
from lightning_flops.report.counts_text import render_counts
from lightning_flops.report.layout import line, marked, paragraph, rule, title
from lightning_flops.report.memory_text import memory_lines
from lightning_flops.report.module_text import aggregated_lines, detailed_lines
from lightning_flops.report.ranks_text import ranks_lines, whose
from lightning_flops.report.step_text import (
    flops_lines,
    notes_lines,
    operator_lines,
    throughput_lines,
    time_lines,
    uncounted_lines,
)
from lightning_flops.report.traced_text import traced_lines
from lightning_flops.schema.comparison import Comparison
from lightning_flops.schema.profile import Profile
from lightning_flops.text.printable import page
from lightning_flops.units import duration, plain, plural, run_text, runs_of, si

_NOTATIONS = (
    "data parallel size (dp_size: ranks that see different data), model parallel size (mp_size: tensor-parallel "
    "ranks), number of parameters (params), number of multiply-adds of matmul-like operators (MACs), number of "
    "floating-point operations (flops: two a MAC), floating-point operations per second (FLOPS), fwd and bwd latency "
    "(forward and backward passes), step latency (optimizer), iter latency (sum of fwd, bwd and step latency). "
    "Counts and latencies are those of one global step: all its micro-steps, up to one optimizer attempt. Estimated "
    "lines take the bwd flops from the fwd flops, as DeepSpeed does; measured lines take those that autograd ran, "
    "recomputation included."
)

_NOTATIONS_WITHOUT_TRAINING = (
    "data parallel size (dp_size: ranks that see different data), model parallel size (mp_size: tensor-parallel "
    "ranks), number of parameters (params), number of multiply-adds of matmul-like operators (MACs), number of "
    "floating-point operations (flops: two a MAC), floating-point operations per second (FLOPS), fwd latency (forward "
    "pass). Counts and latencies are those of one batch. This loop does not train."
)
"""The same for a loop that only runs the model forward."""


def render_text(profile: Profile | FlopCounts | Comparison) -> str:
    """The report on *profile*, for people: lines of at most 120 columns for ordinary models, ending in a line break.

    Of the counts of ``count_flops`` it is the table by module that ``print`` shows; of what ``compare_profiles``
    returns, the difference of two runs by cause.
    """
    if isinstance(profile, Comparison):
        return render_comparison(profile)
    if isinstance(profile, FlopCounts):
        return render_counts(profile)
    sections = [
        _summary_lines(profile),
        flops_lines(profile),
        time_lines(profile),
        throughput_lines(profile),
        ranks_lines(profile),
        memory_lines(profile.memory, profile.traced, trains=profile.context.trains),
        operator_lines(profile),
        traced_lines(profile),
        uncounted_lines(profile),
        advice_lines(profile.advice),
        notes_lines(profile),
        aggregated_lines(profile),
        detailed_lines(profile) if profile.settings.detailed else [],
    ]
    lines = [line for section in sections if section for line in (*section, "")]
    return page([*lines[:-1], rule()])


def _summary_lines(profile: Profile) -> list[str]:
    """DeepSpeed's lines, labels and order; between them the measured lines and the trainable parameters."""
    context, flops, rates, timing = profile.context, profile.flops, profile.rates, profile.timing
    factor = f"{2 + profile.settings.recompute_fwd_factor:g}"
    bwd_flops = f"{factor} * fwd flops per GPU"
    fwd_bwd_flops = f"{3 + profile.settings.recompute_fwd_factor:g} * fwd flops per GPU"
    if flops.without_backward:  # DeepSpeed's formulas would not give these figures
        bwd_flops, fwd_bwd_flops = f"{factor} * fwd flops with bwd", f"(fwd + {factor} * fwd with bwd)"
    model = _of_model(profile)

    def rate(value: float | None, *words: str) -> str:
        return marked(si(value, "FLOPS"), *words, *_bound(profile)) if value is not None else si(None)

    def count(text: str, *words: str) -> str:
        micro_steps = f" ({_micro_steps(profile)})" if context.trains else ""
        return marked(f"{text}{micro_steps}", *words, *_bound(profile))

    lines = [
        title("Flops Profiler"),
        f"Profile Summary at {context.step_word} {profile.report_step}:",
        *_when_lines(profile),
        *_where_lines(profile),
        *paragraph(_NOTATIONS if context.trains else _NOTATIONS_WITHOUT_TRAINING, first="Notations: "),
        "",
        line("world size", plain(context.world_size)),
        line("data parallel size", plain(context.dp_size)),
        line("model parallel size", plain(context.tp_size)),
        line("batch size per GPU", _batch_size(profile)),
        line("params per GPU", si(profile.local_params)),
        line(model.params_label, f"{si(model.params)}{model.mark}"),
        line(f"trainable params {model.words}", f"{si(model.trainable_params)}{model.mark}"),
        line("fwd MACs per GPU", count(si(flops.forward / 2, "MACs"))),
        line("fwd flops per GPU", count(si(flops.forward))),
        line(model.forward_label, marked(f"{si(model.forward)}{model.mark}", *_bound(profile))),
        line("fwd latency", duration(timing.forward_sec if timing else None)),
        line("fwd FLOPS per GPU = fwd flops per GPU / fwd latency", rate(rates.forward_flops_per_sec)),
    ]
    if not context.trains:
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
            rate(rates.forward_backward_flops_per_sec_estimated, "estimated"),
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
            rate(rates.iter_flops_per_sec_estimated, "estimated"),
        ),
        line("FLOPS per GPU = hardware flops per GPU / iter latency", rate(rates.iter_flops_per_sec, "measured")),
        line("samples/second", _samples_per_sec(profile)),
    ]


class _OfModel(NamedTuple):
    """What the report says of the whole model, or of a pipeline's stage where the other stages are not known."""

    words: str
    mark: str
    """Follows each figure."""
    params_label: str
    params: int | None
    trainable_params: int | None
    forward_label: str
    forward: int | None


def _of_model(profile: Profile) -> _OfModel:
    context, ranks = profile.context, profile.ranks
    words, mark = "of model", ""
    if ranks is not None:
        mark = whose(ranks)
        params, trainable_params = ranks.params, ranks.trainable_params
    else:
        params, trainable_params = profile.params, profile.trainable_params
        if context.pp_size > 1:
            words, mark = "of stage", f" (stage {context.pp_rank} of {context.pp_size})"
    local = profile.local_params
    params_label = f"params {words}"
    if local is not None and params == local * context.tp_size:
        params_label += " = params per GPU * mp_size"
    factor, factor_words = context.tp_size, "mp_size"
    for size, word in ((context.cp_size, "cp_size"), (context.sp_size, "sp_size")):
        if size > 1:
            factor, factor_words = factor * size, f"{factor_words} * {word}"
    forward: int | None = profile.flops.forward * factor
    forward_words = f"fwd flops per GPU * {factor_words}"
    if ranks is not None:
        of_model = None if ranks.flops_of_model is None else ranks.flops_of_model.forward
        if of_model != forward:  # ranks differ: stages, or uneven batches
            forward, forward_words = of_model, "fwd flops of all GPUs / dp_size"
    return _OfModel(
        words=words,
        mark=mark,
        params_label=params_label,
        params=params,
        trainable_params=trainable_params,
        forward_label=f"fwd flops {words} = {forward_words}",
        forward=forward,
    )


def _when_lines(profile: Profile) -> list[str]:
    word, run = profile.context.step_word, profile.context.run_word
    many = plural(word, 2)
    timing = f"no {word}"
    if profile.timed_steps:
        timing = f"{len(profile.timed_steps)} of {profile.settings.timing_steps} {many}, {_ranges(profile.timed_steps)}"
    counted = f"{many} {_ranges(profile.counted_steps)}" if len(profile.counted_steps) > 1 else f"{word} "
    if len(profile.counted_steps) == 1:
        counted += plain(profile.counted_steps[0])
    elif not profile.counted_steps:
        counted = f"no whole {word}"
    return paragraph(f"Counted: {counted}. Timed: {timing}. ({many.title()} of this {run}; the first is 0.)")


def _where_lines(profile: Profile) -> list[str]:
    context = profile.context
    parallel = [
        f"{name} {size}"
        for name, size in (
            ("dp", context.dp_size),
            ("tp", context.tp_size),
            ("pp", context.pp_size),
            ("cp", context.cp_size),
            ("sp", context.sp_size),
            ("ep", context.ep_size),
        )
        if size != 1
    ]
    parts = [
        f"{context.device_name or 'unknown device'} ({context.device_type})",
        *([f"precision {context.precision}"] if context.precision else []),
        *([f"strategy {context.strategy}"] if context.strategy else []),
        f"rank {context.rank} of {context.world_size}" + (f" ({', '.join(parallel)})" if parallel else ""),
        f"{context.framework} {context.framework_version}",
        *([f"torch {context.torch_version}"] if context.framework != "torch" else []),
    ]
    return paragraph(", ".join(parts), first="On: ", rest="    ")


def _batch_size(profile: Profile) -> str:
    size = profile.context.micro_batch_size
    if size is None or profile.samples is None:
        return plain(size)
    if profile.micro_steps == 1 and profile.samples == size:
        return plain(size)
    about = "on average, " if profile.variable else ""
    if not profile.context.trains:
        return f"{plain(size)} ({about}{plain(profile.samples)} samples)"
    return f"{plain(size)} (a global step: {about}{_micro_steps(profile)}, {plain(profile.samples)} samples)"


def _micro_steps(profile: Profile) -> str:
    return f"{plain(profile.micro_steps)} {plural('micro-step', profile.micro_steps)}"


def _bound(profile: Profile) -> list[str]:
    return ["lower bound"] if profile.lower_bound else []


def _samples_per_sec(profile: Profile) -> str:
    value = profile.job_rates.iter_samples_per_sec
    latency = "iter latency" if profile.context.trains else "fwd latency"
    return plain(value) if value is None else f"{value:.2f} (over the {latency})"


def _ranges(steps: Sequence[int]) -> str:
    """Indexes, with runs joined: 3, 4, 5, 9 is "3-5, 9"."""
    return ", ".join(map(run_text, runs_of(steps)))
