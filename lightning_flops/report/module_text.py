"""The block of DeepSpeed's Flops Profiler: its summary lines, labels and order, to the letter, and its modules.

Its users search these lines: a value ends its line, and what has to be said of it stands before it. The modules come as
the aggregated profile by depth, and as the detailed tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean, harmonic_mean

from lightning_flops.analysis.counts import (
    ModuleNode,
    heaviest_types,
    lower_bound_modules,
    module_tree,
)
from lightning_flops.analysis.rates import ratio
from lightning_flops.report.document import VIEW, Section, View, at, sentences
from lightning_flops.report.profile_document import NOT_DESCRIBED, PHASES, whose
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import ModuleProfile
from lightning_flops.units import NOT_AVAILABLE, plain, plural, printable


def is_under_deepspeed(profile: Profile) -> bool:
    """Whether its users search the block for DeepSpeed's own lines: an engine ran, by itself or in a strategy."""
    return profile.context.framework == "deepspeed" or "deepspeed" in profile.context.strategy.lower()


def device_word(profile: Profile) -> str:
    """What heads of the block say figures of one rank are "per": DeepSpeed's word under DeepSpeed."""
    return "GPU" if is_under_deepspeed(profile) else profile.context.device_word


def summary_section(profile: Profile, *, of_run: bool = True) -> Section:
    """DeepSpeed's lines, labels and order, and between them the measured lines; *of_run*: of which steps they are."""
    context, rates, as_deepspeed = profile.context, profile.job_rates, is_under_deepspeed(profile)
    word = context.step_word if of_run else "step"
    about = [
        f"Profile Summary at {word} {profile.profile_step}:",
        f"The report came out at {word} {profile.report_step}." if of_run else "",
        f"On: {where(profile)}" if of_run else "",
        "Notations:",
        # No label is followed by a colon: a search for "data parallel size:" finds the line with its value.
        "data parallel size (dp_size), model parallel size (mp_size), number of parameters (params), number of "
        "multiply-accumulate operations of matmul-like operators (MACs), number of floating-point operations, two a "
        "MAC (flops), floating-point operations per second (FLOPS), fwd latency (forward), bwd latency (backward), "
        "step (optimizer) latency, iter latency (sum of fwd, bwd and step latency)",
        sentences(
            "As DeepSpeed prints it, under its labels: GPU is whatever device the run is on, and samples/second are "
            "over the latency of the passes, not over the wall clock.",
            "Counts are those of one counted step, latencies means of the timed ones."
            if profile.flops_of == "counted"
            else "Latencies are means of the timed steps. Counts are of the same steps, by a formula of their batches' "
            "sizes; of modules they are those of the counted steps.",
            "Lines with a factor of the fwd flops estimate the bwd flops, as DeepSpeed does; measured lines take those "
            "that autograd ran, recomputation included."
            if context.trains
            else "",
            "Something could not be counted: MACs, flops and FLOPS are at least what stands here."
            if as_deepspeed and profile.lower_bound
            else "",
        ),
    ]
    others = {"bwd": profile.flops.backward, "recomputed": profile.flops.recompute}
    spent = {f"{name} flops per GPU": _marked(profile, one, mark="measured") for name, one in others.items() if one}
    figures = {
        "world size": plain(context.world_size),
        "data parallel size": plain(context.dp_size),
        "model parallel size": plain(context.tp_size),
        "batch size per GPU": plain(context.micro_batch_size),
        "params per GPU": amount(profile.local_params),
        **_model(profile),
        "fwd latency": _latency(profile, "forward"),
        "fwd FLOPS per GPU = fwd flops per GPU / fwd latency": _marked(
            profile, profile.rates.forward_flops_per_sec, "FLOPS"
        ),
        **(_training(profile) if context.trains else spent),
        "samples/second": NOT_AVAILABLE if rates.iter_samples_per_sec is None else f"{rates.iter_samples_per_sec:.2f}",
    }
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


def _latency(profile: Profile, name: str) -> str:
    return amount(at(f"timing.{name}_sec")(profile), "s")


def _marked(profile: Profile, value: float | None, unit: str = "", mark: str = "") -> str:
    """*value* at the end of its line, after what has to be said of it: ``(measured, lower bound) 6.28 G``.

    Under DeepSpeed nothing stands before a value of DeepSpeed's lines: the label and the paragraph say what it is.
    """
    under_deepspeed = is_under_deepspeed(profile)
    bound = "lower bound" if profile.lower_bound and not under_deepspeed else ""
    words = ", ".join(filter(None, (mark.replace("estimated", "") if under_deepspeed else mark, bound)))
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
    sizes = {"cp_size": context.cp_size, "sp_size": context.sp_size}
    factors = {"mp_size": context.tp_size} | {word: size for word, size in sizes.items() if size > 1}
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


# What each prefix stands for, the largest first.
_MAGNITUDES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}


def number_to_string(num: float | None, units: str | None = None, precision: int = 2, unit: str = "") -> str:
    """A number with its decimal prefix: ``number_to_string(6279.86e9)`` is ``"6.28 T"``, without one ``"6 "``."""
    if num is None:
        return NOT_AVAILABLE
    if units is None:
        units = next((one for one, least in _MAGNITUDES.items() if abs(num) >= least), "u" if num else "")
    return f"{round(num / _MAGNITUDES.get(units, 1.0), precision):g} {units}{unit}"


def amount(value: float | None, unit: str = "") -> str:
    """A figure of the block: two decimals and a prefix, as all of DeepSpeed's."""
    return number_to_string(value, unit=unit).strip()


#: Multiply-adds as text: ``macs_to_string(3.2e9)`` is ``"3.2 GMACs"``.
macs_to_string = partial(number_to_string, unit="MACs")

#: A rate as text: ``flops_to_string(81.9e12)`` is ``"81.9 TFLOPS"``. DeepSpeed's FLOPS are FLOPs per second.
flops_to_string = partial(number_to_string, unit="FLOPS")

#: Bytes as text, in powers of a thousand: ``bytes_to_string(2048)`` is ``"2.05 KB"``.
bytes_to_string = partial(number_to_string, unit="B")

#: Seconds as text: ``duration_to_string(0.07667)`` is ``"76.67 ms"``.
duration_to_string = partial(number_to_string, unit="s")


def params_to_string(params_num: float | None, units: str | None = None, precision: int = 2) -> str:
    """A number of parameters as text, B for billions: ``params_to_string(1.5e9)`` is ``"1.5 B"``."""
    prefix = None if units is None else units.replace("B", "G")
    return number_to_string(params_num, prefix, precision).replace("G", "B").strip()


_FAR_FROM_MEAN = 2.0  # the largest of several latencies is shown beyond so many times their mean


def aggregated_lines(profile: Profile, view: View = VIEW) -> list[str]:
    """The classes of modules that weigh most at each depth; a shared module's parameters count once."""
    top, limit, modules = profile.settings.top_modules, profile.settings.module_depth, profile.modules
    if not modules:
        return []
    weights, deepest = _weights(profile), max(module.depth for module in modules)
    bound = "; FLOPs and MACs are lower bounds" if profile.lower_bound else ""
    lines = [
        view.rule(f"Aggregated Profile per {device_word(profile)}"),
        *_wrapped(
            profile,
            view,
            f"Top {top} modules in terms of {' or '.join(', '.join(weights).rsplit(', ', 1))} at different model depths"
            f", modules of one class at one depth added up{bound}:",
        ),
    ]
    for depth in range(1 + (deepest if limit < 0 else min(limit, deepest))):
        lines.append(f"depth {depth}:")
        for label, (unit, weight) in weights.items():
            found = heaviest_types(modules, depth=depth, weight=weight)
            entries = ", ".join(f"'{name or NOT_DESCRIBED}': '{amount(value, unit)}'" for name, value in found[:top])
            text = f"{{{entries}}}" + (f" and {len(found) - top} more" if len(found) > top else "")
            lines += _wrapped(profile, view, text if found else "none", first=f"    {label:<11} - ", rest=" " * 19)
    if 0 <= limit < deepest:
        lines.append(f"(module_depth is {limit}; the model has {deepest} {plural('level', deepest)} below the root)")
    return lines


def _weights(profile: Profile) -> dict[str, tuple[str, Callable[[ModuleProfile], float]]]:
    """What modules weigh, by its label: its unit, and how much of it a module has; times where there are any."""
    weights: dict[str, tuple[str, Callable[[ModuleProfile], float]]] = {
        "params": ("", lambda module: module.params if module.alias_of is None else 0),
        "MACs": ("MACs", lambda module: profile.per_step(module.total.forward) / 2),
        "bwd FLOPs": ("", lambda module: profile.per_step(module.total.backward)),
        "fwd latency": ("s", lambda module: at("times.forward_sec")(module) or 0.0),
        "bwd latency": ("s", lambda module: at("times.backward_sec")(module) or 0.0),
    }
    always = ("params", "MACs", "bwd FLOPs") if profile.has_backward else ("params", "MACs")
    return {label: one for label, one in weights.items() if label in always or any(map(one[1], profile.modules))}


def detailed_lines(profile: Profile, view: View = VIEW) -> list[str]:
    """The tree of modules with the figures of each."""
    title, root = view.rule(f"Detailed Profile per {device_word(profile)}"), module_tree(profile.modules)
    if root is None:
        return [title, "No module was described."]
    about = sentences(
        "Each module profile is listed after its name in the following order: params, percentage of total params, fwd "
        "MACs, percentage of total MACs, FLOPs of each phase (measured), percentage of total FLOPs; in angle brackets, "
        f"from the traced {profile.context.step_word}: latency, percentage of all modules' latency, FLOP/s and "
        f"percentage of the peak. All of one {profile.step_name}, the modules inside included. (0-11): 12 x Block "
        "stands for 12 modules in a row that are equal but for their times, of which the mean is shown, and where one "
        "is far from it, the least and the largest.",
        "Lower bound: figures of a module in which something could not be counted." if profile.lower_bound else "",
    )
    spent = {word: getattr(profile.outside, phase) for phase, word in PHASES.items()}
    outside = ", ".join(f"{name} {amount(profile.per_step(flops))}" for name, flops in spent.items() if flops)
    below = [f"FLOPs outside the model: {outside}"] if outside else []
    return [title, *view.paragraph(about), "", *_Tree(profile, view).lines(root, names=[""], indent=""), *below]


def _wrapped(profile: Profile, view: View, text: str, *, first: str = "", rest: str = "") -> list[str]:
    """*text* in lines of the report's width; under DeepSpeed in one, as searches for its lines expect."""
    if is_under_deepspeed(profile):
        return [printable(f"{first}{text}")]
    return view.paragraph(text, first=first, rest=rest)


def names_of(node: ModuleNode) -> tuple[str, str]:
    """What their parent calls the modules of *node*, and their class: ``0-11`` and ``12 x Block``."""
    name, kind = node.module.short_name, node.module.type_name or NOT_DESCRIBED
    if len(node.alike) == 1:
        return name, kind
    return f"{name}-{node.alike[-1].short_name}", f"{len(node.alike)} x {kind}"


# What is said of a module by whether it has FLOPs, and whether something in it was not counted.
_BOUNDS = {(True, True): "lower bound", (False, True): "no FLOPs counted", (False, False): "no FLOPs"}


class _Tree:
    """Writes one module after the other, with shares of the whole model's figures."""

    def __init__(self, profile: Profile, view: View) -> None:
        self._profile, self._wrapped = profile, partial(_wrapped, profile, view)
        self._lower_bounds = lower_bound_modules(profile.uncounted)
        self._root = profile.modules[0]
        self._times = {module.name: module.times for module in profile.modules}

    def lines(self, node: ModuleNode, *, names: Sequence[str], indent: str) -> Iterator[str]:
        """The lines of one module, or of several that are alike, whose qualified *names* are these, after *indent*."""
        module, (name, kind) = node.module, names_of(node)
        opening = f"({name}): {kind}(" if name else f"{kind}("
        extra = " ".join(printable(module.extra_repr.replace("\n", " ")).split())
        parts = [part for part in (self._figures(node), self._latencies(names), extra) if part]
        if not node.children:
            yield from self._wrapped(f"{opening}{', '.join(parts)})", first=indent, rest=f"{indent}    ")
            return
        inside = f"{indent}  "
        yield printable(f"{indent}{opening}")
        for part in [", ".join(parts)] if is_under_deepspeed(self._profile) else parts:
            yield from self._wrapped(part, first=inside, rest=inside)
        if 0 <= self._profile.settings.module_depth <= module.depth:
            yield f"{inside}... {node.size - 1} modules inside, deeper than module_depth"
        else:
            for child in node.children:
                below = [
                    f"{name}.{one.short_name}" if name else one.short_name for name in names for one in child.alike
                ]
                yield from self.lines(child, names=below, indent=inside)
        yield f"{indent})"

    def _latencies(self, names: Sequence[str]) -> str:
        """Latencies of the module of this name, or the means of several; nothing where one is not known."""
        times, parts = [self._times.get(name) for name in names], []
        for phase, word in (("forward", "fwd"), ("backward", "bwd")):
            figures = (f"{phase}_sec", f"{phase}_flops_per_sec", f"{phase}_utilization")
            seconds, rates, shares = ([*map(at(figure), times)] for figure in figures)
            if None in seconds:
                continue
            mean, least, largest = fmean(seconds), min(seconds), max(seconds)
            ends = f" ({amount(least, 's')} to {amount(largest, 's')})" if largest > _FAR_FROM_MEAN * mean else ""
            of_all = _share(mean, at(f"times.{phase}_sec")(self._root))
            # Their FLOPs are the same, so the harmonic mean of their rates is that of all.
            rate = "" if None in rates else f", {amount(harmonic_mean(rates), 'FLOP/s')}"
            of_peak = "" if None in shares else f", {_share(harmonic_mean(shares), 1.0)} of peak"
            parts.append(f"{word} latency {amount(mean, 's')}{ends}, {of_all} {word} latency{rate}{of_peak}")
        return f"<{'; '.join(parts)}>" if parts else ""

    def _figures(self, node: ModuleNode) -> str:
        module, total, root, per_step = node.module, node.module.total, self._root, self._profile.per_step
        same, calls, at_least = module.alias_of, per_step(module.calls), module.name in self._lower_bounds
        always = ("forward", "backward") if self._profile.has_backward else ("forward",)
        spent = {phase: getattr(total, phase) for phase in PHASES}
        phases = [
            f"{word} {amount(per_step(spent[phase]))}"
            for phase, word in PHASES.items()
            if spent[phase] or phase in always
        ]
        params = f"{amount(module.params)}, {_share(module.params, root.params)} Params"
        flops = [
            amount(per_step(total.forward) / 2, "MACs"),
            f"{_share(total.forward, root.total.forward)} MACs",
            *phases,
            f"{_share(total.total - total.optimizer, root.total.total - root.total.optimizer)} FLOPs",
        ]
        parts = [
            "no call seen" if same is None and not node.called else "",
            "" if same is None else f"the same module as {same or 'the root'}",
            params if module.params or total.total else "no params",
            *(flops if total.total else ()),
            _BOUNDS.get((bool(total.total), at_least), ""),
            f"{plain(calls)} {plural('call', calls)}" if calls not in (0, self._profile.micro_steps) else "",
        ]
        return ", ".join(filter(None, parts))


def _share(part: float | None, whole: float | None) -> str:
    """A percentage as DeepSpeed prints it."""
    share = ratio(part=part, whole=whole)
    return NOT_AVAILABLE if share is None else f"{100 * share:.2f}%"
