"""The block of DeepSpeed's Flops Profiler: its summary lines, labels and order, to the letter.

Its users search these lines: a value ends its line, and what has to be said of it stands before it.
"""

from __future__ import annotations

import math
from functools import partial

from lightning_flops.analysis.rates import ratio
from lightning_flops.report.document import Section, at
from lightning_flops.report.profile_document import whose
from lightning_flops.schema.profile import Profile
from lightning_flops.units import NOT_AVAILABLE, plain

_NOTATIONS = (
    # No label is followed by a colon: a search for "data parallel size:" finds the line with its value.
    "data parallel size (dp_size), model parallel size (mp_size), number of parameters (params), number of "
    "multiply-accumulate operations of matmul-like operators (MACs), number of floating-point operations, two a MAC "
    "(flops), floating-point operations per second (FLOPS), fwd latency (forward), bwd latency (backward), step "
    "(optimizer) latency, iter latency (sum of fwd, bwd and step latency)"
)
_ABOUT = (
    "As DeepSpeed prints it, under its labels: GPU is whatever device the run is on, and samples/second are over the "
    "latency of the passes, not over the wall clock. Counts are those of one counted step, latencies means of the "
    "timed ones."
)
_ABOUT_TRAINING = (
    " Lines with a factor of the fwd flops estimate the bwd flops, as DeepSpeed does; measured lines take those that "
    "autograd ran, recomputation included."
)
_LOWER_BOUND = " Something could not be counted: MACs, flops and FLOPS are at least what stands here."


def is_under_deepspeed(profile: Profile) -> bool:
    """Whether its users search the block for DeepSpeed's own lines: an engine ran, by itself or in a strategy."""
    return profile.context.framework == "deepspeed" or "deepspeed" in profile.context.strategy.lower()


def device_word(profile: Profile) -> str:
    """What heads of the block say figures of one rank are "per": DeepSpeed's word under DeepSpeed."""
    return "GPU" if is_under_deepspeed(profile) else profile.context.device_word


def summary_section(profile: Profile, *, of_run: bool = True) -> Section:
    """DeepSpeed's lines, labels and order, and between them the measured lines; *of_run*: of which steps they are."""
    context, samples = profile.context, profile.job_rates.iter_samples_per_sec
    word = context.step_word if of_run else "step"
    about = [f"Profile Summary at {word} {profile.profile_step}:"]
    if of_run:
        about += [f"The report came out at {word} {profile.report_step}.", f"On: {where(profile)}"]
    rate = _marked(profile, profile.rates.forward_flops_per_sec, "FLOPS")
    figures = {
        "world size": plain(context.world_size),
        "data parallel size": plain(context.dp_size),
        "model parallel size": plain(context.tp_size),
        "batch size per GPU": plain(context.micro_batch_size),
        "params per GPU": amount(profile.local_params),
        **_model(profile),
        "fwd latency": _latency(profile, "forward"),
        "fwd FLOPS per GPU = fwd flops per GPU / fwd latency": rate,
        **(_training(profile) if context.trains else _without_training(profile)),
        "samples/second": NOT_AVAILABLE if samples is None else f"{samples:.2f}",
    }
    as_deepspeed = is_under_deepspeed(profile)
    words = f"{_ABOUT}{_ABOUT_TRAINING if context.trains else ''}"
    about += ["Notations:", _NOTATIONS, f"{words}{_LOWER_BOUND if as_deepspeed and profile.lower_bound else ''}"]
    return Section("DeepSpeed Flops Profiler" if as_deepspeed else "Flops Profiler", "", [*about, figures])


def _training(profile: Profile) -> dict[str, str]:
    """The lines on the backward and the optimizer."""
    flops, rates, factor = profile.flops, profile.rates, profile.settings.recompute_fwd_factor
    bwd_flops, fwd_bwd_flops = f"{2 + factor:g} * fwd flops per GPU", f"{3 + factor:g} * fwd flops per GPU"
    ran = "bwd+recomputed flops" if flops.recompute else "bwd flops per GPU"
    estimated, measured = (partial(_marked, profile, unit="FLOPS", mark=mark) for mark in ("estimated", "measured"))
    both, whole = (
        ratio(part=flops.forward + flops.backward_estimated, whole=at(f"timing.{name}_sec")(profile))
        for name in ("forward_backward", "iter")
    )
    return {
        "bwd latency": _latency(profile, "backward"),
        f"bwd FLOPS per GPU = {bwd_flops} / bwd latency": estimated(rates.backward_flops_per_sec_estimated),
        f"bwd FLOPS per GPU = {ran} / bwd latency": measured(rates.backward_flops_per_sec),
        f"fwd+bwd FLOPS per GPU = {fwd_bwd_flops} / (fwd+bwd latency)": estimated(both),
        f"fwd+bwd FLOPS per GPU = fwd+{ran} / (fwd+bwd latency)": measured(rates.forward_backward_flops_per_sec),
        "step latency": _latency(profile, "optimizer"),
        "iter latency": _latency(profile, "iter"),
        f"FLOPS per GPU = {fwd_bwd_flops} / iter latency": estimated(whole),
        "FLOPS per GPU = hardware flops per GPU / iter latency": measured(rates.iter_flops_per_sec),
    }


def _without_training(profile: Profile) -> dict[str, str]:
    spent = {"bwd": profile.flops.backward, "recomputed": profile.flops.recompute}
    return {f"{name} flops per GPU": _marked(profile, flops, mark="measured") for name, flops in spent.items() if flops}


def _latency(profile: Profile, name: str) -> str:
    return amount(at(f"timing.{name}_sec")(profile), "s")


def _marked(profile: Profile, value: float | None, unit: str = "", mark: str = "") -> str:
    """*value* at the end of its line, after what has to be said of it: ``(measured, lower bound) 6.28 G``.

    Under DeepSpeed nothing stands before a value of DeepSpeed's lines: the label and the paragraph say what it is.
    """
    if is_under_deepspeed(profile):
        mark, bound = mark.replace("estimated", ""), ""
    else:
        bound = "lower bound" if profile.lower_bound else ""
    words = ", ".join(filter(None, (mark, bound)))
    return f"({words}) {amount(value, unit)}" if words and value is not None else amount(value, unit)


def _model(profile: Profile) -> dict[str, str]:
    """Parameters and forward of the whole model, or of a pipeline's stage where the other stages are not known."""
    context, ranks, of, mark = profile.context, profile.ranks, "of model", ""
    params, trainable = profile.params, profile.trainable_params
    if ranks is not None:
        params, trainable, mark = ranks.params, ranks.trainable_params, whose(ranks)
    elif context.pp_size > 1:
        of, mark = "of stage", f"stage {context.pp_rank} of {context.pp_size}"
    whole = profile.local_params is not None and params == profile.local_params * context.tp_size
    factors = {"mp_size": context.tp_size, "cp_size": context.cp_size, "sp_size": context.sp_size}
    factors = {word: size for word, size in factors.items() if size > 1 or word == "mp_size"}
    forward: int | None = profile.flops.forward * math.prod(factors.values())
    label = f"fwd flops per GPU * {' * '.join(factors)}"
    if ranks is not None and (of_model := at("flops_of_model.forward")(ranks)) != forward:
        forward, label = of_model, "fwd flops of all GPUs / dp_size"  # ranks differ: stages, or uneven batches
    prefix = f"({mark}) " if mark else ""
    return {
        f"params {of}{' = params per GPU * mp_size' if whole else ''}": f"{prefix}{amount(params)}",
        f"trainable params {of}": f"{prefix}{amount(trainable)}",
        "fwd MACs per GPU": _marked(profile, profile.flops.forward / 2, "MACs"),
        "fwd flops per GPU": _marked(profile, profile.flops.forward),
        f"fwd flops {of} = {label}": _marked(profile, forward, mark=mark),
    }


def where(profile: Profile) -> str:
    """What the run is on: device, strategy, ranks and versions."""
    context = profile.context
    sizes = {name: getattr(context, f"{name}_size") for name in ("dp", "tp", "pp", "cp", "sp", "ep")}
    parallel = ", ".join(f"{name} {size}" for name, size in sizes.items() if size != 1)
    parts = [
        f"{context.device_name or 'unknown device'} ({context.device_type})",
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


def amount(value: float | None, unit: str = "") -> str:
    """A figure of the block: two decimals and a prefix, as all of DeepSpeed's."""
    return number_to_string(value, unit=unit).strip()


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
