"""The model's modules as text: the aggregated profile by depth, and the detailed tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import fmean, harmonic_mean
from typing import Any

from lightning_flops.analysis.module_tree import (
    ModuleNode,
    depth_shown,
    heaviest_types,
    lower_bound_modules,
    module_tree,
)
from lightning_flops.analysis.rates import ratio
from lightning_flops.report.document import at
from lightning_flops.report.layout import VIEW
from lightning_flops.report.profile_document import NOT_DESCRIBED, PHASES
from lightning_flops.report.summary_text import amount, device_word, is_under_deepspeed
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import ModuleProfile
from lightning_flops.units import NOT_AVAILABLE, plain, plural, printable, printable_lines

_FAR_FROM_MEAN = 2.0  # the largest of several latencies is shown beyond so many times their mean


def aggregated_lines(profile: Profile) -> list[str]:
    """The classes of modules that weigh most at each depth; a shared module's parameters count once."""
    top, limit, modules = profile.settings.top_modules, profile.settings.module_depth, profile.modules
    if not modules:
        return []

    def macs(module: ModuleProfile) -> float:
        return profile.per_step(module.total.forward) / 2

    terms: dict[str, tuple[Callable[[float], str], Callable[[ModuleProfile], float]]] = {
        "params": (amount, lambda module: module.params if module.alias_of is None else 0),
        "MACs": (partial(amount, unit="MACs"), macs),
        "bwd FLOPs": (amount, lambda module: profile.per_step(module.total.backward)),
        "fwd latency": (partial(amount, unit="s"), lambda module: at("times.forward_sec")(module) or 0.0),
        "bwd latency": (partial(amount, unit="s"), lambda module: at("times.backward_sec")(module) or 0.0),
    }
    always = ("params", "MACs", "bwd FLOPs") if profile.has_backward else ("params", "MACs")
    terms = {label: term for label, term in terms.items() if label in always or any(map(term[1], modules))}
    bound = "; FLOPs and MACs are lower bounds" if profile.lower_bound else ""
    lines = [
        VIEW.rule(f"Aggregated Profile per {device_word(profile)}"),
        *_wrapped(
            profile,
            f"Top {top} modules in terms of {' or '.join(', '.join(terms).rsplit(', ', 1))} at different model depths, "
            f"modules of one class at one depth added up{bound}:",
        ),
    ]
    shown, deepest = depth_shown(modules, limit=limit), depth_shown(modules, limit=-1)
    for depth in range(shown + 1):
        lines.append(f"depth {depth}:")
        for label, (words, weight) in terms.items():
            found = heaviest_types(modules, depth=depth, weight=weight)
            entries = ", ".join(f"'{name or NOT_DESCRIBED}': '{words(value)}'" for name, value in found[:top])
            text = f"{{{entries}}}" + (f" and {len(found) - top} more" if len(found) > top else "")
            lines += _wrapped(profile, text if found else "none", first=f"    {label:<11} - ", rest=" " * 19)
    if shown == limit < deepest:
        levels = f"{deepest} {plural('level', deepest)}"
        lines.append(f"(module_depth is {limit}; the model has {levels} below the root)")
    return lines


def detailed_lines(profile: Profile) -> list[str]:
    """The tree of modules with the figures of each."""
    lines = [VIEW.rule(f"Detailed Profile per {device_word(profile)}")]
    root = module_tree(profile.modules)
    if root is None:
        return [*lines, "No module was described."]
    about = (
        "Each module profile is listed after its name in the following order: params, percentage of total params, fwd "
        "MACs, percentage of total MACs, FLOPs of each phase (measured), percentage of total FLOPs; in angle brackets, "
        f"from the traced {profile.context.step_word}: latency, percentage of all modules' latency, FLOP/s and "
        f"percentage of the peak. All of one {profile.step_name}, the modules inside included. (0-11): 12 x Block "
        "stands for 12 modules in a row that are equal but for their times, of which the mean is shown, and where one "
        "is far from it, the least and the largest."
    )
    if profile.lower_bound:
        about += " Lower bound: figures of a module in which something could not be counted."
    lines += [*VIEW.paragraph(about), "", *_Tree(profile).lines(root, names=[""], indent="")]
    if profile.outside.total:
        spent = {word: getattr(profile.outside, phase) for phase, word in PHASES.items()}
        figures = ", ".join(f"{name} {amount(profile.per_step(flops))}" for name, flops in spent.items() if flops)
        lines.append(f"FLOPs outside the model: {figures}")
    return lines


def _wrapped(profile: Profile, text: str, *, first: str = "", rest: str = "") -> list[str]:
    """*text* in lines of the report's width; under DeepSpeed in one, as searches for its lines expect."""
    if is_under_deepspeed(profile):
        return [printable(f"{first}{text}")]
    return VIEW.paragraph(text, first=first, rest=rest)


def names_of(node: ModuleNode) -> tuple[str, str]:
    """What their parent calls the modules of *node*, and their class: ``0-11`` and ``12 x Block``."""
    name, kind = node.module.short_name, node.module.type_name or NOT_DESCRIBED
    if node.last is None:
        return name, kind
    return f"{name}-{node.last.short_name}", f"{int(node.last.short_name) - int(name) + 1} x {kind}"


class _Tree:
    """Writes one module after the other, with shares of the whole model's figures."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        self._lower_bounds = lower_bound_modules(profile.uncounted)
        self._depth_shown = depth_shown(profile.modules, limit=profile.settings.module_depth)
        self._root = profile.modules[0]
        self._times = {module.name: module.times for module in profile.modules}

    def lines(self, node: ModuleNode, *, names: Sequence[str], indent: str) -> Iterator[str]:
        """The lines of one module, or of several that are alike, whose qualified *names* are these, after *indent*."""
        module, (name, kind) = node.module, names_of(node)
        opening = f"({name}): {kind}(" if name else f"{kind}("
        extra = " ".join(printable_lines(module.extra_repr).split())
        parts = [part for part in (self._figures(node), self._latencies(names), extra) if part]
        if not node.children:
            yield from _wrapped(self._profile, f"{opening}{', '.join(parts)})", first=indent, rest=f"{indent}    ")
            return
        inside = f"{indent}  "
        yield printable(f"{indent}{opening}")
        for part in [", ".join(parts)] if is_under_deepspeed(self._profile) else parts:
            yield from _wrapped(self._profile, part, first=inside, rest=inside)
        if module.depth >= self._depth_shown:
            yield f"{inside}... {node.size - 1} modules inside, deeper than module_depth"
        else:
            for child in node.children:
                yield from self.lines(child, names=_names_below(names, child), indent=inside)
        yield f"{indent})"

    def _latencies(self, names: Sequence[str]) -> str:
        """Latencies of the module of this name, or the means of several; nothing where one is not known."""
        parts = []
        for phase, word in (("forward", "fwd"), ("backward", "bwd")):
            if (seconds := self._mean(names, f"{phase}_sec", fmean)) is not None:
                share = _share(seconds, at(f"times.{phase}_sec")(self._root))
                rate, of_peak = (self._mean(names, f"{phase}_{name}") for name in ("flops_per_sec", "utilization"))
                part = f"{word} latency {amount(seconds, 's')}{self._range(names, phase)}, {share} {word} latency"
                part += "" if rate is None else f", {amount(rate, 'FLOP/s')}"
                parts.append(part if of_peak is None else f"{part}, {_share(of_peak, 1.0)} of peak")
        return f"<{'; '.join(parts)}>" if parts else ""

    def _range(self, names: Sequence[str], phase: str) -> str:
        """The least and the largest of several latencies, where one is far from their mean."""
        found = [float(at(f"{phase}_sec")(self._times[name])) for name in names]
        if max(found) <= _FAR_FROM_MEAN * fmean(found):
            return ""
        return f" ({amount(min(found), 's')} to {amount(max(found), 's')})"

    def _mean(
        self, names: Sequence[str], figure: str, mean: Callable[[list[Any]], float] = harmonic_mean
    ) -> float | None:
        """A figure of alike modules: their FLOPs are the same, so the harmonic mean of their rates is that of all."""
        found = [getattr(self._times.get(name), figure, None) for name in names]
        return None if None in found else mean(found)

    def _figures(self, node: ModuleNode) -> str:
        module, total, root, per_step = node.module, node.module.total, self._root, self._profile.per_step
        parts = []
        if module.alias_of is not None:
            parts.append(f"the same module as {module.alias_of or 'the root'}")
        elif not node.called:
            parts.append("no call seen")
        if module.params or total.total:
            parts += [amount(module.params), f"{_share(module.params, root.params)} Params"]
        else:
            parts.append("no params")
        if total.total:
            macs = _share(total.forward, root.total.forward)
            parts += [amount(per_step(total.forward) / 2, "MACs"), f"{macs} MACs"]
            always = ("forward", "backward") if self._profile.has_backward else ("forward",)
            for phase, word in PHASES.items():
                if (flops := getattr(total, phase)) or phase in always:
                    parts.append(f"{word} {amount(per_step(flops))}")
            spent, of = (one.total - one.optimizer for one in (total, root.total))
            parts.append(f"{_share(spent, of)} FLOPs")
        at_least = module.name in self._lower_bounds
        if at_least or not total.total:
            parts.append("lower bound" if total.total else "no FLOPs counted" if at_least else "no FLOPs")
        calls = per_step(module.calls)
        if module.calls and calls != self._profile.micro_steps:
            parts.append(f"{plain(calls)} {plural('call', calls)}")
        return ", ".join(parts)


def _names_below(names: Sequence[str], child: ModuleNode) -> list[str]:
    """Qualified names of all modules that *child* stands for, below each of *names*."""
    short = [child.module.short_name]
    if child.last is not None:
        short = [str(number) for number in range(int(short[0]), int(child.last.short_name) + 1)]
    return [f"{name}.{one}" if name else one for name in names for one in short]


def _share(part: float | None, whole: float | None) -> str:
    """A percentage as DeepSpeed prints it."""
    share = ratio(part=part, whole=whole)
    return NOT_AVAILABLE if share is None else f"{100 * share:.2f}%"
