"""The profile of a model's forwards in the layout of DeepSpeed's Flops Profiler: labels, order, widths and units.

What DeepSpeed's profiler does not print follows its own lines: the measured backward, what could not be counted, notes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_flops.analysis.module_tree import ModuleNode, depth_shown, heaviest_types, module_tree
from lightning_flops.analysis.rates import per_second
from lightning_flops.report.deepspeed_units import (
    duration_to_string,
    flops_to_string,
    macs_to_string,
    number_to_string,
    params_to_string,
)
from lightning_flops.report.layout import line, marked, paragraph, some_of, title
from lightning_flops.schema.forward import ForwardModule, ForwardProfile
from lightning_flops.schema.modules import ModuleProfile
from lightning_flops.text.printable import page, printable_lines
from lightning_flops.units import NOT_AVAILABLE, plain, plural

_TITLE_WIDTH = 78
_SECTION_WIDTH = 86
_STEP = "  "
_MODULES_NAMED = 3

_NOTATIONS = (
    # No label is followed by a colon: a search for "data parallel size:" finds the line with its value.
    "dp_size (data parallel size, ranks that see different data), mp_size (model parallel size),",
    "params (number of parameters), MACs (multiply-adds of matmul-like operators),",
    "flops (floating-point operations, two a MAC), FLOPS (floating-point operations per second),",
    "fwd latency (forward pass), bwd latency (backward pass),",
    "step latency (optimizer step), iter latency (fwd, bwd and step latency together)",
)
_TREE_NOTE = (
    "Note: What a module computes itself, outside the modules inside it, makes the difference between its MACs (or "
    "latency) and the sum of theirs. MACs are those of products, convolutions, attention and recurrent layers."
)
_LATENCY_NOTE = (
    "Latencies here were taken module by module in one forward, the fwd latency above in another that nothing "
    "listened to."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardReportSettings:
    """What of a forward profile is printed, under DeepSpeed's names."""

    profile_step: int = 1
    """The step that the summary names."""
    module_depth: int = -1
    """Deepest level of modules shown, the model's own being 0; -1 shows all."""
    top_modules: int = 1
    """Classes of modules listed at each depth."""
    detailed: bool = True
    """Whether the tree of modules is printed."""
    recompute_fwd_factor: float = 0.0
    """Forwards that a backward repeats, in the estimated lines."""


def render_forward_text(profile: ForwardProfile, settings: ForwardReportSettings) -> str:
    """The report, beginning with an empty line and ending in a line break."""
    sections = [
        ["", title("Flops Profiler", width=_TITLE_WIDTH), *_summary_lines(profile, settings)],
        ["", title("Aggregated Profile per GPU", width=_SECTION_WIDTH), *_aggregated_lines(profile, settings)],
        _detailed_lines(profile, settings) if settings.detailed else [],
        _remarks(profile),
        ["-" * _TITLE_WIDTH],
    ]
    return page(text for section in sections for text in section)


def render_aggregated_text(profile: ForwardProfile, settings: ForwardReportSettings) -> str:
    """The aggregated profile alone."""
    return page(_aggregated_lines(profile, settings))


def _summary_lines(profile: ForwardProfile, settings: ForwardReportSettings) -> list[str]:
    engine, root, module = profile.engine, profile.root, profile.root.module
    forward, counted = module.total.forward, profile.timed_while_counted
    at_least = _bound(profile.lower_bound)
    mp_size = 1 if engine is None else engine.tp_size
    sharded = module.params != module.local_params * mp_size
    params_of_model = "params of model" if sharded else "params of model = params per GPU * mp_size"
    lines = [f"Profile Summary at step {settings.profile_step}:", "Notations:", *_NOTATIONS, ""]
    if engine is not None:
        lines += [
            line("world size", str(engine.world_size)),
            line("data parallel size", str(engine.dp_size)),
            line("model parallel size", str(engine.tp_size)),
            line("batch size per GPU", str(engine.micro_batch_size)),
        ]
    lines += [
        line("params per GPU", params_to_string(module.local_params)),
        line(params_of_model, params_to_string(module.params)),
        line("fwd MACs per GPU", marked(macs_to_string(root.macs), *at_least)),
        line("fwd flops per GPU", marked(number_to_string(forward), *at_least)),
        line(
            "fwd flops of model = fwd flops per GPU * mp_size", marked(number_to_string(forward * mp_size), *at_least)
        ),
        line("fwd latency", marked(_latency(profile.forward_sec, counted), *_mean_of(profile))),
        line(
            "fwd FLOPS per GPU = fwd flops per GPU / fwd latency",
            _rate(profile, forward, profile.forward_sec, counted),
        ),
        *_calls_lines(profile),
        *_backward_lines(profile),
        *_engine_rate_lines(profile, settings),
    ]
    return lines


def _mean_of(profile: ForwardProfile) -> list[str]:
    calls = profile.calls
    return [] if calls is None or calls.number == 1 else [f"mean of {calls.number} runs"]


def _calls_lines(profile: ForwardProfile) -> Iterator[str]:
    """The spread of several timed calls, and what they achieve; nothing of a single one, as DeepSpeed has it."""
    calls = profile.calls
    if calls is None or calls.number == 1:
        return
    spread = (calls.minimum_sec, calls.median_sec, calls.maximum_sec)
    yield line(
        f"fwd timed {calls.number} times, latency min / median / max",
        " / ".join(duration_to_string(seconds).strip() for seconds in spread),
    )
    rate = per_second(amount=calls.samples, seconds=calls.mean_sec)
    yield line(
        "samples/second = samples / fwd latency",
        f"{NOT_AVAILABLE} (the first dimensions of the inputs do not tell how many samples there are)"
        if rate is None
        else f"{rate:.2f} ({calls.samples} {plural('sample', calls.samples or 0)})",
    )


def _backward_lines(profile: ForwardProfile) -> Iterator[str]:
    """What DeepSpeed's profiler cannot know: the backward, if one was counted."""
    at_least = _bound(profile.lower_bound)
    for label, flops in (
        ("bwd flops per GPU", profile.flops.backward),
        ("recomputed flops per GPU", profile.flops.recompute),
    ):
        if flops:
            yield line(label, marked(number_to_string(flops), "measured", *at_least))


def _engine_rate_lines(profile: ForwardProfile, settings: ForwardReportSettings) -> Iterator[str]:
    """Rates over the latencies that only an engine knows."""
    engine = profile.engine
    if engine is None or engine.backward_sec is None or engine.optimizer_sec is None:
        return
    factor = 2 + settings.recompute_fwd_factor
    backward_counted = profile.timed_while_counted and profile.flops.backward > 0
    both_sec = None if profile.forward_sec is None else profile.forward_sec + engine.backward_sec
    iter_sec = None if both_sec is None else both_sec + engine.optimizer_sec
    samples = per_second(amount=engine.micro_batch_size * engine.dp_size, seconds=iter_sec)
    yield line("bwd latency", _latency(engine.backward_sec, backward_counted))
    yield from _backward_rates(
        profile, "bwd FLOPS per GPU", factor, "bwd latency", engine.backward_sec, backward_counted
    )
    yield from _backward_rates(
        profile, "fwd+bwd FLOPS per GPU", factor + 1, "(fwd+bwd latency)", both_sec, profile.timed_while_counted
    )
    yield line("step latency", duration_to_string(engine.optimizer_sec))
    yield line("iter latency", _latency(iter_sec, profile.timed_while_counted))
    yield from _backward_rates(
        profile, "FLOPS per GPU", factor + 1, "iter latency", iter_sec, profile.timed_while_counted
    )
    yield line(
        "samples/second",
        NOT_AVAILABLE if samples is None else marked(f"{samples:.2f}", *_bound(profile.timed_while_counted)),
    )


def _backward_rates(
    profile: ForwardProfile, label: str, factor: float, latency: str, seconds: float | None, counted: bool
) -> Iterator[str]:
    """The rate of *factor* forwards, as DeepSpeed has it, and below it the measured one if a backward was counted."""
    flops = profile.flops
    yield line(
        f"{label} = {factor:g} * fwd flops per GPU / {latency}",
        _rate(profile, factor * flops.forward, seconds, counted, "estimated"),
    )
    if flops.backward:
        spent, words = (
            flops.backward + flops.recompute,
            "bwd+recomputed flops" if flops.recompute else "bwd flops per GPU",
        )
        if label != "bwd FLOPS per GPU":
            spent, words = spent + flops.forward, f"fwd+{words}"
        yield line(f"{label} = {words} / {latency}", _rate(profile, spent, seconds, counted, "measured"))


def _aggregated_lines(profile: ForwardProfile, settings: ForwardReportSettings) -> list[str]:
    seconds = {entry.module.name: entry.seconds or 0.0 for entry in profile.modules}
    columns: tuple[tuple[str, Callable[[ModuleProfile], float], Callable[[float], str]], ...] = (
        ("params", lambda module: 0 if module.alias_of is not None else module.params, params_to_string),
        ("MACs", lambda module: module.total.forward // 2, macs_to_string),
        ("fwd latency", lambda module: seconds[module.name], duration_to_string),
    )
    top, modules = settings.top_modules, [entry.module for entry in profile.modules]
    lines = [f"Top {top} modules in terms of params, MACs or fwd latency at different model depths:"]
    for depth in range(depth_shown(modules, limit=settings.module_depth) + 1):
        lines.append(f"depth {depth}:")
        for label, weight, text in columns:
            heaviest = heaviest_types(modules, depth=depth, weight=weight, top=top)
            known = label != "fwd latency" or profile.root.seconds is not None
            lines.append(
                f"    {label:<11} - { {name: text(size) if known else NOT_AVAILABLE for name, size in heaviest} }"
            )
    return lines


def _detailed_lines(profile: ForwardProfile, settings: ForwardReportSettings) -> list[str]:
    return [
        "",
        title("Detailed Profile per GPU", width=_SECTION_WIDTH),
        "Each module profile is listed after its name in the following order:",
        "params, percentage of total params, MACs, percentage of total MACs, fwd latency, percentage of total fwd "
        "latency, fwd FLOPS",
        "",
        _TREE_NOTE if profile.calls is None else f"{_TREE_NOTE} {_LATENCY_NOTE}",
        "",
        *_Tree(profile, settings).lines(),
    ]


class _Tree:
    """Writes the modules the way torch prints a model, each with its figures before its own settings."""

    def __init__(self, profile: ForwardProfile, settings: ForwardReportSettings) -> None:
        modules = [entry.module for entry in profile.modules]
        self._root = profile.root
        self._tree = module_tree(modules, fold=False)
        self._entries = {entry.module.name: entry for entry in profile.modules}
        self._depth_shown = depth_shown(modules, limit=settings.module_depth)

    def lines(self) -> Iterator[str]:
        if self._tree is not None:
            yield from self._lines(self._tree, "")

    def _lines(self, node: ModuleNode, indent: str) -> Iterator[str]:
        module, children = node.module, node.children
        name = f"({module.short_name}): " if module.name else ""
        text = ", ".join(filter(None, [self._figures(self._entries[module.name]), printable_lines(module.extra_repr)]))
        opening = f"{indent}{name}{module.type_name}("
        if not children and "\n" not in text:
            yield f"{opening}{text})"
            return
        inside = indent + _STEP
        yield opening
        yield from (f"{inside}{part}" for part in text.split("\n"))
        if children and module.depth >= self._depth_shown:
            yield f"{inside}... {node.size - 1} modules inside, deeper than module_depth"
        else:
            for child in children:
                yield from self._lines(child, inside)
        yield f"{indent})"

    def _figures(self, entry: ForwardModule) -> str:
        root, forward = self._root, entry.module.total.forward
        return ", ".join(
            [
                f"{params_to_string(entry.module.params)} = {_share(entry.module.params, root.module.params)} Params",
                f"{macs_to_string(entry.macs)} = {_share(entry.macs, root.macs)} MACs",
                f"{duration_to_string(entry.seconds)} = {_share(entry.seconds, root.seconds)} latency",
                flops_to_string(per_second(amount=forward, seconds=entry.seconds) if forward else 0),
            ]
        )


def _remarks(profile: ForwardProfile) -> list[str]:
    """What the counts leave out, and notes; nothing where there is nothing to say."""
    lines: list[str] = []
    if profile.outside.total:
        lines.append(f"Flops outside the model: {number_to_string(profile.outside.total).rstrip()}")
    for name, operator in sorted(profile.uncounted.items()):
        modules = some_of(operator.modules, most=_MODULES_NAMED)
        heavy = "; it may spend flops, so all figures of flops are lower bounds" if operator.heavy else ""
        lines += paragraph(
            f"Not counted: {name}, {plain(operator.calls)} {plural('call', operator.calls)} in {modules}{heavy}.",
            rest=_STEP,
        )
    for note in profile.notes:
        lines += paragraph(f"Note: {note}", rest=_STEP)
    return ["", *lines] if lines else []


def _latency(seconds: float | None, counted: bool) -> str:
    """*seconds*, an upper bound if they were *counted* in."""
    return marked(duration_to_string(seconds), *(["upper bound"] if counted and seconds is not None else []))


def _rate(profile: ForwardProfile, flops: float, seconds: float | None, counted: bool, *words: str) -> str:
    rate = per_second(amount=flops, seconds=seconds)
    if rate is None:
        return NOT_AVAILABLE
    return marked(flops_to_string(rate), *words, *_bound(counted or profile.lower_bound))


def _bound(is_lower_bound: bool) -> list[str]:
    return ["lower bound"] if is_lower_bound else []


def _share(part: float | None, whole: float | None) -> str:
    if part is None or whole is None:
        return NOT_AVAILABLE
    return f"{round(100 * part / whole, 2) if whole else 0:g}%"
