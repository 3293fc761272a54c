"""The block of DeepSpeed's Flops Profiler: its summary lines, labels and order, to the letter.

Its users search these lines: a value ends its line, and what has to be said of it stands before it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

from lightning_flops.analysis.rates import ratio
from lightning_flops.report.document import Figure, Item, Section
from lightning_flops.report.profile_document import whose
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import TimingProfile
from lightning_flops.units import NOT_AVAILABLE, duration, plain, si

_ABOUT = (
    # No label is followed by a colon: a search for "data parallel size:" finds the line with its value.
    "As DeepSpeed prints it, under its labels: GPU is whatever device the run is on, MACs are multiply-adds of "
    "matmul-like operators, flops two a MAC, FLOPS a rate, and samples/second are over the latency of the passes, not "
    "over the wall clock. Counts are those of one counted step, latencies means of the timed ones."
)
_ABOUT_TRAINING = (
    " iter latency is the sum of fwd, bwd and step (optimizer) latency. Estimated lines take the bwd flops from the "
    "fwd flops, as DeepSpeed does; measured lines take those that autograd ran, recomputation included."
)


def summary_section(profile: Profile, *, of_run: bool = True) -> Section:
    """DeepSpeed's lines, labels and order, and between them the measured lines; *of_run*: of which steps they are."""
    context, timing, samples = profile.context, profile.timing, profile.job_rates.iter_samples_per_sec
    items: list[Item] = [
        f"Profile Summary at {context.step_word if of_run else 'step'} {profile.profile_step}:",
        *([f"The report came out at {context.step_word} {profile.report_step}.", _where(profile)] if of_run else []),
        f"{_ABOUT}{_ABOUT_TRAINING if context.trains else ''}",
        "",
        Figure("world size", plain(context.world_size)),
        Figure("data parallel size", plain(context.dp_size)),
        Figure("model parallel size", plain(context.tp_size)),
        Figure("batch size per GPU", plain(context.micro_batch_size)),
        Figure("params per GPU", si(profile.local_params)),
        *_model(profile),
        _latency("fwd latency", timing, "forward_sec"),
        _rate(profile, "fwd FLOPS per GPU = fwd flops per GPU / fwd latency", profile.rates.forward_flops_per_sec),
        *(_training(profile) if context.trains else _without_training(profile)),
        Figure("samples/second", NOT_AVAILABLE if samples is None else f"{samples:.2f}"),
    ]
    return Section("Flops Profiler", "", items)


def _training(profile: Profile) -> Iterator[Figure]:
    """The lines on the backward and the optimizer."""
    flops, rates, timing = profile.flops, profile.rates, profile.timing
    factor = profile.settings.recompute_fwd_factor
    bwd_flops, fwd_bwd_flops = f"{2 + factor:g} * fwd flops per GPU", f"{3 + factor:g} * fwd flops per GPU"
    ran = "bwd+recomputed flops" if flops.recompute else "bwd flops per GPU"

    spent, rate = flops.forward + flops.backward_estimated, partial(_rate, profile)
    both, whole = (
        ratio(part=spent, whole=getattr(timing, name, None)) for name in ("forward_backward_sec", "iter_sec")
    )
    yield _latency("bwd latency", timing, "backward_sec")
    yield rate(f"bwd FLOPS per GPU = {bwd_flops} / bwd latency", rates.backward_flops_per_sec_estimated, "estimated")
    yield rate(f"bwd FLOPS per GPU = {ran} / bwd latency", rates.backward_flops_per_sec, "measured")
    yield rate(f"fwd+bwd FLOPS per GPU = {fwd_bwd_flops} / (fwd+bwd latency)", both, "estimated")
    measured = rates.forward_backward_flops_per_sec
    yield rate(f"fwd+bwd FLOPS per GPU = fwd+{ran} / (fwd+bwd latency)", measured, "measured")
    yield _latency("step latency", timing, "optimizer_sec")
    yield _latency("iter latency", timing, "iter_sec")
    yield rate(f"FLOPS per GPU = {fwd_bwd_flops} / iter latency", whole, "estimated")
    yield rate("FLOPS per GPU = hardware flops per GPU / iter latency", rates.iter_flops_per_sec, "measured")


def _without_training(profile: Profile) -> Iterator[Figure]:
    for name, spent in (("bwd", profile.flops.backward), ("recomputed", profile.flops.recompute)):
        if spent:
            yield Figure(f"{name} flops per GPU", _marked(si(spent), *_bound(profile), "measured"))


def _latency(label: str, timing: TimingProfile | None, name: str) -> Figure:
    return Figure(label, duration(getattr(timing, name, None)))


def _rate(profile: Profile, label: str, value: float | None, *marks: str) -> Figure:
    marks = () if value is None else (*marks, *_bound(profile))
    return Figure(label, _marked(si(value, "FLOPS"), *marks))


def _marked(text: str, *words: str) -> str:
    """*words* in brackets, if there are any, and then *text*, so that it ends its line: ``(measured) 6.28 G``."""
    return f"({', '.join(words)}) {text}" if words else text


def _bound(profile: Profile) -> list[str]:
    return ["lower bound"] if profile.lower_bound else []


def _model(profile: Profile) -> Iterator[Figure]:
    """Parameters and forward of the whole model, or of a pipeline's stage where the other stages are not known."""
    context, ranks, words = profile.context, profile.ranks, "of model"
    params, trainable = profile.params, profile.trainable_params
    marks: list[str] = []
    if ranks is not None:
        marks = [whose(ranks)] if ranks.absences else []
        params, trainable = ranks.params, ranks.trainable_params
    elif context.pp_size > 1:
        words, marks = "of stage", [f"stage {context.pp_rank} of {context.pp_size}"]
    whole = profile.local_params is not None and params == profile.local_params * context.tp_size
    yield Figure(f"params {words}{' = params per GPU * mp_size' if whole else ''}", _marked(si(params), *marks))
    yield Figure(f"trainable params {words}", _marked(si(trainable), *marks))
    factors = {"mp_size": context.tp_size, "cp_size": context.cp_size, "sp_size": context.sp_size}
    factors = {word: size for word, size in factors.items() if size > 1 or word == "mp_size"}
    forward: int | None = profile.flops.forward * math.prod(factors.values())
    label = f"fwd flops per GPU * {' * '.join(factors)}"
    if ranks is not None:
        of_model = None if ranks.flops_of_model is None else ranks.flops_of_model.forward
        if of_model != forward:  # ranks differ: stages, or uneven batches
            forward, label = of_model, "fwd flops of all GPUs / dp_size"
    yield Figure("fwd MACs per GPU", _marked(si(profile.flops.forward / 2, "MACs"), *_bound(profile)))
    yield Figure("fwd flops per GPU", _marked(si(profile.flops.forward), *_bound(profile)))
    yield Figure(f"fwd flops {words} = {label}", _marked(si(forward), *marks, *_bound(profile)))


def _where(profile: Profile) -> str:
    context = profile.context
    sizes = {name: getattr(context, f"{name}_size") for name in ("dp", "tp", "pp", "cp", "sp", "ep")}
    parallel = ", ".join(f"{name} {size}" for name, size in sizes.items() if size != 1)
    parts = [
        f"On: {context.device_name or 'unknown device'} ({context.device_type})",
        f"precision {context.precision}" if context.precision else "",
        f"strategy {context.strategy}" if context.strategy else "",
        f"rank {context.rank} of {context.world_size}" + (f" ({parallel})" if parallel else ""),
        f"{context.framework} {context.framework_version}",
        f"torch {context.torch_version}" if context.framework != "torch" else "",
    ]
    return ", ".join(filter(None, parts))


_MAGNITUDES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
"""What each prefix stands for, the largest first."""


def number_to_string(num: float | None, units: str | None = None, precision: int = 2, unit: str = "") -> str:
    """A number with its decimal prefix: ``number_to_string(6279.86e9)`` is ``"6.28 T"``, without one ``"6 "``."""
    if num is None:
        return NOT_AVAILABLE
    if units is None:
        fits = (one for one, magnitude in _MAGNITUDES.items() if abs(num) >= magnitude)
        units = next(fits, "u" if num else "")
    return f"{round(num / _MAGNITUDES.get(units, 1.0), precision):g} {units}{unit}"


macs_to_string = partial(number_to_string, unit="MACs")
"""Multiply-adds as text: ``macs_to_string(3.2e9)`` is ``"3.2 GMACs"``."""

flops_to_string = partial(number_to_string, unit="FLOPS")
"""A rate as text: ``flops_to_string(81.9e12)`` is ``"81.9 TFLOPS"``. DeepSpeed's FLOPS are FLOPs per second."""

bytes_to_string = partial(number_to_string, unit="B")
"""Bytes as text, in powers of a thousand: ``bytes_to_string(2048)`` is ``"2.05 KB"``."""

duration_to_string = partial(number_to_string, unit="s")
"""Seconds as text: ``duration_to_string(0.07667)`` is ``"76.67 ms"``."""


def params_to_string(params_num: float | None, units: str | None = None, precision: int = 2) -> str:
    """A number of parameters as text, B for billions: ``params_to_string(1.5e9)`` is ``"1.5 B"``."""
    prefix = None if units is None else units.replace("B", "G")
    return number_to_string(params_num, prefix, precision).replace("G", "B").strip()
