"""What is no profile, as documents: memory before and after it is used, a plan, counts, a formula, a throughput."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from operator import attrgetter
from typing import Any

from lightning_flops.analysis.counts import (
    FlopCounts,
    ModuleNode,
    build_modules,
    grouped,
    module_tree,
    parent_name,
    pattern_of,
)
from lightning_flops.records import OUTSIDE, ModuleRecord, PhaseFlops
from lightning_flops.report.document import (
    CALLS,
    Column,
    Item,
    Section,
    Table,
    all_of,
    at,
    share,
    short,
    some_of,
)
from lightning_flops.report.module_text import names_of
from lightning_flops.report.profile_document import PHASES
from lightning_flops.schema.plan import (
    FormulaReport,
    FormulaSize,
    FormulaTerm,
    LargestBatch,
    MemoryReport,
    ModuleMemory,
    Plan,
)
from lightning_flops.schema.profile import Profile, ThroughputSummary
from lightning_flops.units import NOT_AVAILABLE, bytes_by_dtype, duration, percent, plain, plural, si

_MOST_ROWS = 12


def predicted_section(report: MemoryReport) -> Section:
    """The peak, what is held then, which modules keep it, and what would fit."""
    return Section(
        "Predicted memory",
        f"{headline(report)}.",
        [
            *peak_tables(report),
            *_checkpointed(report),
            *report.notes,
            "Of tensors, in two eager steps on fake ones, as the optimizer's states are made in the first. CUDA's "
            "context, workspaces of cuBLAS, NCCL's buffers and fragmentation come on top.",
        ],
    )


def peak_tables(report: MemoryReport) -> Iterator[Item]:
    """What is held at the peak by kind, the modules that keep most, and the largest batch that fits."""
    shares = share("share", lambda row: row[1] / report.peak_bytes if report.peak_bytes else None)
    kinds = [Column("at the peak", at("0"), str), Column("", at("1"), unit="B"), shares]
    yield Table([*report.at_peak.items()], kinds, whole=True)
    kept = [Column("kept for backward", at("2"), unit="B"), Column("at the peak", at("3"), unit="B")]
    columns = [Column("module", at("0"), str), Column("modules", at("1")), *kept]
    yield Table(_by_pattern(report.modules)[:_MOST_ROWS], columns, whole=True)
    if report.largest is not None:
        yield _largest_words(report, report.largest)


def headline(report: MemoryReport) -> str:
    """When the peak is, and how high."""
    of = "" if report.available_bytes is None else f" of {si(report.available_bytes, 'B')}"
    size = "" if report.batch_size is None else f" with a batch of {plain(report.batch_size)}"
    part, operator = report.when.part or "code between the parts", report.when.operator.removesuffix(".default")
    where = "the optimizer's step" if part == "optimizer" else f"the {part} of {_name(report.when.module)}"
    return f"Peak {si(report.peak_bytes, 'B')}{of}{size}, in {where}{f' ({operator})' if operator else ''}"


def _checkpointed(report: MemoryReport) -> Iterator[str]:
    if (saved := report.checkpointed) is not None:
        number = len(saved.names)
        yield (
            f"With a checkpoint around each of the {plain(number)} {plural('block', number)} "
            f"{pattern_of(saved.names[0])}: {si(saved.peak_bytes, 'B')} "
            f"({percent(saved.peak_bytes / report.peak_bytes - 1)}), for {si(saved.recompute_flops, 'FLOPs')} more "
            f"({percent(saved.recompute_flops / saved.model_flops if saved.model_flops else None)} of the step's)."
        )


def _largest_words(report: MemoryReport, largest: LargestBatch) -> str:
    """The largest batch that fits, and the line that the peak follows near it, or how much steeper it gets there."""
    size, peak, more = largest.size, largest.peak_bytes, largest.bytes_per_sample
    reaches = "" if peak is None else f", with a peak of {si(peak, 'B')}"
    if peak is not None and more is not None:
        rest, step = peak - more * size, si(more, "B")
        near = f", near which peak = {si(rest, 'B')} + {step} × batch"
        reaches += near if rest >= 0 else f"; in a batch an eighth larger each sample more takes {step} on average"
    fits = plain(size) if size else "none, not one sample fits"
    return f"Largest batch in {si(report.available_bytes, 'B')}: {fits}{reaches}."


def _by_pattern(modules: Sequence[ModuleMemory]) -> list[tuple[str, int, int, int]]:
    """Equal modules of repeated blocks as one row: name, how many, bytes kept, bytes at the peak; the largest first.

    Of a module without modules inside the last number stays: the layers of a list are not alike.
    """
    around = {parent_name(one.name) for one in modules}

    def pattern(one: ModuleMemory) -> str:
        above, dot, last = one.name.rpartition(".")
        return pattern_of(one.name) if one.name in around else pattern_of(above) + dot + last

    rows = [
        (
            _name(name if len(some) > 1 else some[0].name),
            len(some),
            sum(one.kept_bytes for one in some),
            sum(one.peak_bytes for one in some),
        )
        for name, some in grouped(modules, pattern).items()
    ]
    return sorted(rows, key=lambda row: (-row[2], -row[3]))


def _name(module: str) -> str:
    return "code outside of the model" if module == OUTSIDE else module or "the root"


def memory_section(profile: Profile) -> Section | None:
    """What each phase holds, and what it is for; None if memory was not looked at."""
    memory, tensors = profile.memory, profile.tensors
    if memory is None:
        return None
    kind, on_device = memory.kind, memory.kind == "allocated"
    # What is empty is no figure of this run.
    values = {
        **{f"{kind} at the end of {PHASES[phase]}": si(held, "B") for phase, held in memory.held_bytes.items()},
        f"peak {kind}, of this process so far": si(memory.run_peak_bytes, "B"),
        "peak reserved, of this process so far": si(memory.run_reserved_peak_bytes, "B") if on_device else "",
        "parameters on this rank": si(memory.parameter_bytes, "B"),
        "parameters of the model": bytes_by_dtype(profile.parameter_bytes),
        "buffers": si(memory.buffer_bytes, "B"),
        **{
            label: f"{NOT_AVAILABLE} ({reason})" if getattr(memory, name) is None else si(getattr(memory, name), "B")
            for label, (name, reason) in (_UNKNOWN_BYTES if profile.context.trains else {}).items()
        },
        "the peak grew in": (memory.peak_grew_in or "").replace("_", " "),
        "held by tensors at the peak": ""
        if tensors is not None
        else f"{NOT_AVAILABLE} (compiled graphs' and FSDP's own are not seen)",
    }
    known = {label: value for label, value in values.items() if value}
    of_tensors = [] if tensors is None else [f"Of tensors: {headline(tensors)}.", *peak_tables(tensors)]
    whose = (
        "on the device, as its caching allocator counts them" if on_device else "of this process on the host, all of it"
    )
    return Section(
        f"Memory of this rank in the counted {profile.context.step_word}", f"Bytes {whose}.", [known, *of_tensors]
    )


# What training holds by its label: where a record has it, and why it may not be known.
_UNKNOWN_BYTES = {
    "gradients": ("gradient_bytes", "on no parameter, as under ZeRO"),
    "optimizer states": ("optimizer_bytes", "not where torch's optimizers keep them"),
    "activations and outputs that a forward keeps": ("kept_by_forward_bytes", "measured on a device alone"),
}


def plan_section(plan: Plan) -> Section:
    """What one rank computes, holds and sends in a step, and the floor of the step."""
    sizes = " x ".join(f"{name} {size}" for name, size in plan.mesh.items())
    batch = "".join(f", {name} {plain(size)}" for name, size in plan.at.items())
    bound = " (lower bound)" if plan.lower_bound else ""
    phases = {name: getattr(plan.flops, name) for name in ("forward", "backward", "recompute", "optimizer")}
    counts = {f"{name} FLOPs": plain(flops) + bound for name, flops in phases.items() if flops or name != "optimizer"}
    columns = [
        Column("collective", at("kind"), str),
        Column("along", at("dim"), str, left=True),
        Column("ranks", at("size")),
        CALLS,
        Column("bytes", at("bytes"), plain),
        Column("floor", at("floor_sec"), duration),
    ]
    stages = {f"FLOPs of stage {place}": plain(sum(astuple(one))) for place, one in enumerate(plan.stages)}
    items: list[Item] = [
        *(
            f"Nothing is sent along {dim}: its ranks would train apart, and what they have to send is missing here. "
            f"Have the function use its mesh, as by fully_shard(model, mesh=mesh['{dim}']) or "
            f"DistributedDataParallel(model, device_mesh=mesh['{dim}'])."
            for dim in plan.unused
        ),
        counts
        | {"peak memory of its tensors": _held_words(plan.memory)}
        | {"parameters of this rank": plain(plan.local_params), "parameters of the model": plain(plan.params)},
        stages | ({} if plan.bubble is None else {"bubble of the pipeline": percent(plan.bubble)}),
        Table(plan.collectives, columns, whole=True) if plan.collectives else "No collectives.",
        _floor(plan),
        {
            f"{plain(one.steps)} steps at {one.at}": f"{plain(one.hours)} hours, {plain(one.device_hours)} device hours"
            + ("" if one.price is None else f", price {plain(one.price)}")
            for one in plan.runs
        },
        *plan.notes,
    ]
    return Section(
        "Plan",
        f"One step of rank {plan.rank} of the mesh {sizes}{batch}, counted without the job. A floor is no forecast.",
        items,
    )


def _held_words(memory: MemoryReport | None) -> str:
    """The peak, and its largest kinds."""
    kinds = [f"{kind} {si(size, 'B')}" for kind, size in (memory.at_peak.items() if memory else ())]
    peak = NOT_AVAILABLE if memory is None else si(memory.peak_bytes, "B")
    return f"{peak} ({', '.join(kinds[:3]) if memory else 'not all storages are seen'})"


def _floor(plan: Plan) -> dict[str, str]:
    peaks = ", ".join(f"{si(peak, 'FLOP/s')} in {dtype}" for dtype, peak in plan.peaks_flops_per_sec.items())
    why = plan.unavailable.get("floor_sec") or plan.unavailable.get("communication_sec")
    floors = {
        label: f"{NOT_AVAILABLE} ({plan.unavailable.get(name) or why})" if seconds is None else duration(seconds)
        for label, name in _FLOORS.items()
        for seconds in (getattr(plan, name),)
    }
    return {
        "device": plan.device or NOT_AVAILABLE,
        "its peak": peaks or NOT_AVAILABLE,
        "its memory": si(plan.memory_bytes_per_sec, "B/s"),
        **floors,
        "MFU at most": percent(plan.mfu_at_most),
    }


_FLOORS = {
    "floor of the arithmetic": "arithmetic_sec",
    "floor of the operators": "operators_sec",
    "floor of the communication": "communication_sec",
    "floor of the step, communication hidden": "floor_sec",
    "floor of the step, nothing hidden": "exposed_floor_sec",
}


# ---- what was counted, its formula, and the throughput of a run as Paddle prints it

_SHAPES_SHOWN = 4
_RAISED = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
_PHASES = {"forward": "forward", "backward": "backward", "recompute": "recomputed", "optimizer": "optimizer"}


def counts_section(counts: FlopCounts) -> Section:
    """The tree of modules, of which equal ones in a row are one row with the figures of each, and what is not in it."""
    record = counts.record
    records = [replace(one, extra_repr=_shapes(one)) for one in counts.modules]
    counts = FlopCounts(record)  # of one moment, also while counting goes on
    total, outside = counts.total, counts.own_by_module().get(OUTSIDE, PhaseFlops())
    phases = [phase for phase in _PHASES if phase in ("forward", "backward") or getattr(total, phase)]
    root, names = module_tree(build_modules(records, counts)), sorted(counts.uncounted)

    def of_described(name: str) -> Callable[[ModuleNode], Any]:
        return lambda node: getattr(node.module, name) if node.module.type_name else None

    columns = [
        Column("module", _node_name, str),
        Column("", of_described("params"), unit=" params"),
        Column("weight shapes", of_described("extra_repr"), str, left=True),
        *(Column(_PHASES[phase], attrgetter(f"module.total.{phase}"), unit="FLOPs") for phase in phases),
    ]
    amounts = ", ".join(f"{_PHASES[phase]} {si(getattr(outside, phase))}" for phase in phases)
    sizes = next((one.parameter_bytes for one in records if not one.name), {})
    bound = ": these figures are lower bounds" if counts.is_lower_bound else ""
    remarks = [
        f"{OUTSIDE}: {amounts}." if outside.total else "",
        f"Parameters: {bytes_by_dtype(sizes)}." if sizes else "",
        f"Not counted: {some_of(names, most=_SHAPES_SHOWN)}{bound}." if names else "",
    ]
    nodes = [] if root is None else list(_nodes(root))
    return Section(
        "FLOPs by module",
        "Of each module with those inside it; a multiply-add is two FLOPs.",
        [Table(nodes, columns), *remarks, *record.notes],
    )


def _node_name(node: ModuleNode) -> str:
    name, kind = names_of(node)
    same = node.module.alias_of
    kind += "" if same is None or len(node.alike) > 1 else f", the same as {same or 'the root'}"
    return "  " * node.module.depth + short(f"{name}: {kind}" if name else kind)


def _shapes(record: ModuleRecord) -> str:
    """Shapes of the module's own parameters: "64x3x7x7, 64"."""
    return some_of(["x".join(map(str, one)) or "scalar" for one in record.parameter_shapes], most=_SHAPES_SHOWN)


def _nodes(node: ModuleNode) -> Iterator[ModuleNode]:
    yield node
    for child in node.children:
        yield from _nodes(child)


def formula_section(report: FormulaReport) -> Section:
    """The formula, the sizes that it holds for, and what was asked of it."""
    several = len({term.dtype for term in report.terms}) > 1
    sums = grouped(report.terms, lambda term: f"{term.bucket} ({term.dtype})" if several else term.bucket)
    columns = [
        Column("sizes", lambda one: ", ".join(f"{name} {plain(size)}" for name, size in one.sizes.items()), str),
        *all_of({phase: phase for phase in ("forward", "backward", "recompute")}),
        *all_of({"model FLOPs": "model_flops", "hardware FLOPs": "hardware_flops"}),
        Column("from", at("source"), str),
    ]
    found = (
        f"A multiply-add is two FLOPs. Counted on fake tensors for {plain(report.counted)} "
        f"{plural('batch', report.counted)} of different sizes, {plain(report.checks)} of which the others predict "
        f"to the last FLOP. Used for {' and '.join(map(_range, report.sizes)) or 'the counted sizes'}; other sizes "
        "are counted by themselves."
    )
    return Section(
        "FLOPs by size",
        "",
        [
            *(f"{bucket} = {' + '.join(map(_product, terms)).replace('+ -', '- ')}" for bucket, terms in sums.items()),
            found if report.reason is None else f"No formula: {report.reason}.",
            "An operator that may have FLOPs could not be counted: every figure is a lower bound."
            if report.lower_bound
            else "",
            *([Table(report.asked, columns, whole=True)] if report.asked else []),
        ],
    )


def _product(term: FormulaTerm) -> str:
    """A product of its factors: ``64·batch·sequence²``."""
    number = plain(term.numerator) + ("" if term.denominator == 1 else f"/{plain(term.denominator)}")
    powers = [name + ("" if power == 1 else str(power).translate(_RAISED)) for name, power in term.powers.items()]
    return "·".join([number, *powers])


def _range(size: FormulaSize) -> str:
    words = f"{size.name} from {plain(size.least)} to {plain(size.greatest)}"
    return words if size.apart == 1 else f"{words} in steps of {plain(size.apart)}"


def run_section(summary: ThroughputSummary) -> Section:
    """What a run's batches cost, and the FLOPs and tokens of all of them."""
    costs = {"reader_cost": summary.reader_cost_sec, "batch_cost": summary.batch_cost_sec, "ips": summary.ips}
    spreads = all_of({"avg": "1.average", "max": "1.maximum", "min": "1.minimum"}, "{:.6f}".format)
    error, bound = summary.flops_error, " (lower bound)" if summary.lower_bound else ""
    counted = "by tokens_per_sample" if summary.tokens is None else "without padding"
    almost, useful = "" if error == 0.0 else "≈ ", "useful MFU, of the FLOPs without padding"
    figures = {
        "model FLOPs": f"{almost}{plain(summary.model_flops)}{bound}",
        "hardware FLOPs": f"{almost}{plain(summary.hardware_flops)}{bound}",
        "MFU": f"{estimate_text(summary.mfu, error, summary.checks)}{bound}",
        useful: f"{estimate_text(summary.useful_mfu, error, summary.checks)}{bound}",
        "tokens": plain(summary.tokens),
        "tokens without padding": plain(summary.real_tokens),
        "padding": percent(summary.padding_ratio),
        f"tokens/s, {counted}": plain(summary.tokens_per_sec),
    }
    known = {label: value for label, value in figures.items() if NOT_AVAILABLE not in value}
    reasons = {"MFU": summary.unavailable.get("mfu"), useful: summary.unavailable.get("useful_mfu")}
    items: list[Item] = [
        f"Reader Ratio: {percent(summary.reader_ratio)}",
        f"Time Unit: s, IPS Unit: {summary.ips_unit}",
        Table([*costs.items()], [Column("", at("0"), str), *spreads], whole=True),
        f"Over {plain(summary.batches)} {plural('batch', summary.batches)} of this rank. ips is this rank's, times the "
        "number of ranks that see different data, as if all were as fast. An average is a total divided by a total. "
        "Left out: batches that were counted or traced, validation, checkpoints and what lies between epochs.",
        known | {label: f"{NOT_AVAILABLE} ({reason})" for label, reason in reasons.items() if reason},
        *summary.notes,
        "" if summary.model_flops is None else _steps(summary),
    ]
    return Section("Throughput of the run", "", items)


# With fewer nothing is said of the error.
_LEAST_CHECKS = 3


def estimate_text(value: float | None, error: float | None, checks: int) -> str:
    """A share whose FLOPs have this *error*: ``34.2%``, ``≈ 34.2% ± 0.30%`` or ``≈ 34.2% (12 checks agreed)``."""
    if value is None or error == 0.0:
        return percent(value)
    if error is not None:
        return f"≈ {percent(value)} ± {percent(value * error)}"
    return f"≈ {percent(value)} " + ("(unchecked)" if checks < _LEAST_CHECKS else f"({plain(checks)} checks agreed)")


def _steps(summary: ThroughputSummary) -> str:
    """How the FLOPs of the run's steps are known, and what random checks show of them."""
    numbers = {
        "of shapes that were counted": summary.steps_counted,
        "by an exact formula of the batch's sizes": summary.steps_by_formula,
        "estimated": summary.steps_estimated,
    }
    steps, error, number = sum(numbers.values()), summary.flops_error, summary.checks
    shares = ", ".join(f"{percent(number / steps)} {words}" for words, number in numbers.items() if number)
    checks = f"{plain(number)} random {plural('check', number)}"
    checked = f"By {checks} they are within {percent(error)} of the truth, with 95% confidence."
    if error == 0.0:
        checked = f"They are exact, and {checks} agreed." if number else "They are exact."
    elif error is None and number < _LEAST_CHECKS:
        checked = f"Their error is not known: there were {checks}, and it takes three."
    elif error is None:
        differ = f"at most {percent(1 - 0.05 ** (1 / number))} of the steps differ, with 95% confidence"
        checked = f"{checks} agreed to the last FLOP: {differ}."
    return f"FLOPs are of all {plain(steps)} {plural('step', steps)}: {shares}. {checked}"
