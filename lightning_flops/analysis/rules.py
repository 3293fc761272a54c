"""The rules of advice, one row each, which compares a measured number with a limit; docs/advice.md is made of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from lightning_flops.analysis.counts import grouped, parent_name, pattern_of
from lightning_flops.analysis.evidence import Evidence, of_optimizer
from lightning_flops.analysis.rates import rate, rate_of_rollout, scoring_gain
from lightning_flops.analysis.waits import WAITS, saved_of_wait, share_of_wait, words_of_loader
from lightning_flops.records import ROLLOUT, SCORING, TRAINING
from lightning_flops.schema.plan import MemoryReport
from lightning_flops.schema.step import Advice
from lightning_flops.units import duration, percent, plain, si

_PROFILER, _MATCHER, _OWN = "PyTorch Profiler's recommendations", "torch.profiler's pattern matcher", "this project"
NAMED = 3
_MOSTLY = 0.5
_LEAST_FREE = 0.1  # of the memory; the rest is for what no tensor is


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the table. In ``fact`` and ``remedy``, names in braces stand for what ``words`` returns."""

    name: str
    #: What is compared: None where it is not known or the rule does not apply; else the share of the rule's name.
    measured: Callable[[Evidence], float | None] | None = None
    limit: str = ""  #: The name in ``ADVICE_THRESHOLDS`` above which that must be, if not that of the rule's name.
    threshold: str = "more than {limit}"
    fact: str
    remedy: str
    unless: str  #: When not to follow it.
    changes: bool = False  #: Whether following it changes what the model computes.
    #: The ceiling: the share of a step that the remedy can save at most; None if that is not known.
    saves: Callable[[Evidence, float], float | None] | None = lambda evidence, measured: measured
    ceiling: str = ""  #: That limit in words, where it is neither the share that was measured nor unknown.
    #: Whether the remedy puts nothing in the place of what was measured; None: the figure is no limit. Where nothing
    #: runs beside the thread, a step is shorter by at least that (caches stay warm), but for what the line before had.
    removes: bool | None = False
    source: str = _OWN
    words: Callable[[Evidence], Mapping[str, str]] = lambda evidence: {}

    def limit_of(self, limits: Mapping[str, float]) -> float | None:
        """What must be exceeded; None where the rule knows no limit."""
        return limits.get(self.limit or self.name)

    def threshold_text(self, limits: Mapping[str, float]) -> str:
        """What must be exceeded, in words."""
        limit = self.limit_of(limits)
        return self.threshold.format(limit=percent(limit), forwards=plain(limit))

    def advice(self, evidence: Evidence, limits: Mapping[str, float]) -> Advice | None:
        """What this rule says; None if it says nothing."""
        limit = self.limit_of(limits)
        measured = evidence.shares.get(self.name) if self.measured is None else self.measured(evidence)
        if measured is None or measured <= (-math.inf if limit is None else limit):
            return None
        words = {
            "measured": percent(measured),
            "modules": _some(evidence.modules.get(self.name, ())),
            **self.words(evidence),
        }
        saves = self.saves(evidence, measured) if self.saves else None
        rows = [one.rows[0] for one in evidence.causes.get(self.name, ())[:1]]
        is_least = self.removes and evidence.runs_alone and not any(row.is_long for row in rows)
        is_starved = (evidence.shares.get("starved") or 0.0) > limits.get("starved", math.inf)
        # The step may need what a line of the user's loop makes: then another way of making it takes some time, too.
        is_about = is_starved or not all(row.hook for row in rows)
        return Advice(
            rule=self.name,
            fact=self.fact.format(**words),
            remedy=self.remedy.format(**words),
            saves=None if saves is None else min(1.0, saves),
            at_least=None if is_least and is_about else is_least,
            unless=self.unless,
            changes=self.changes,
            threshold=self.threshold_text(limits),
            source=self.source,
        )


# ---- measures and words


def _of_products(dtype: str, faster: str, evidence: Evidence, measured: float) -> float | None:
    """What products in *dtype* save at the peak of another one."""
    peaks, share = evidence.peaks, evidence.matmul_share or evidence.compute_share
    slow, fast = peaks.get(dtype), peaks.get(faster)
    return None if not slow or not fast or share is None else measured * share * max(0.0, 1.0 - slow / fast)


def _of_memory(evidence: Evidence) -> Mapping[str, str]:
    """The batch that nine tenths of the memory hold, where that is larger: the rest is for what no tensor is."""
    tensors = evidence.tensors
    size, fits = (None, None) if tensors is None else (tensors.batch_size, tensors.largest)
    room = size is not None and fits is not None and fits.size > size
    return {"room": f" (memory for a batch of {plain(fits.size)} instead of {plain(size)})" if room and fits else ""}


def _free_share(tensors: MemoryReport | None) -> float:
    """What no tensor takes of the memory at the peak; 1 where that is not known."""
    known = tensors is not None and tensors.available_bytes
    return 1.0 - tensors.peak_bytes / known if tensors is not None and known else 1.0


def _words_of_free(evidence: Evidence) -> Mapping[str, str]:
    free = _free_share(evidence.tensors)
    return {
        "free": f": {percent(free)} of the memory is free at the peak" if free < 1.0 else ", as far as memory is free"
    }


def _line(rule: str, evidence: Evidence) -> Mapping[str, str]:
    found = evidence.causes.get(rule, ())
    is_known = evidence.shares.get("behind_the_loop") is None
    beside = "the backward of what it makes" if is_known else "as much of the backward as of the forward"
    return {"line": found[0].words if found else "", "part": found[0].part if found else "", "beside": beside}


def _repeated_calls(evidence: Evidence) -> Mapping[str, str]:
    name = next(iter(evidence.modules.get("calls", ())), "")
    rows = evidence.lines_of(name, parent_name(name)) if name else evidence.forward_rows
    return {
        "module": name or "the model",
        "calls": plain(round(evidence.calls.get(name, 0.0))),
        "line": "".join(f", longest at {row.where}" for row in rows[:1]),
    }


def _some(names: Sequence[str]) -> str:
    """The first of *names*, repeated layers together: "2 x layers.*.dropout"."""
    alike = grouped(names, lambda name: name if name.isdecimal() else pattern_of(name))  # a lone star says nothing
    words = [f"{len(of)} x {pattern}" if of[1:] else of[0] or "the root" for pattern, of in alike.items()]
    more = f" and {len(words) - NAMED} more" if len(words) > NAMED else ""
    return f"{', '.join(words[:NAMED])}{more}"


def _of_waiting(evidence: Evidence) -> Mapping[str, str]:
    if evidence.shares.get("waiting") is None:
        return {"waits": "with any wait for other ranks, which is not known"}
    known = " as far as it is known" if evidence.shares.get("unmatched") else ""
    return {"waits": f"the wait for other ranks left out{known}"}


#: Every rule, in the order of docs/advice.md.
RULES: tuple[Rule, ...] = (
    Rule(
        name="line",
        words=partial(_line, "line"),
        fact="{measured} of the step ({part}) is {line}.",
        remedy="If steps do not need its result (a log, a norm, a file), do it every so many steps, or in another "
        "process; if they do (an environment, an average, a loss), do it for all tensors or environments at once, "
        "without a loop of Python, or in processes that run beside the step.",
        unless="where steps need it and it is done for all at once already",
        removes=True,
    ),
    Rule(
        name="line_in_module",
        words=partial(_line, "line_in_module"),
        threshold="more than {limit}, where a call of a module runs 64 operators or more by itself; untraced, its "
        "lines' time and as much of the backward as that is of the forward",
        saves=lambda one, measured: measured + (one.shares.get("behind_the_loop") or 0.0),
        ceiling="what that module takes by itself in forward and backward, and its share of what the step does outside "
        "of modules, data, optimizer, your lines and a framework's loop; untraced, its lines' time and all backward",
        fact="{measured} of the step, with {beside}, is in many short operations of {line}.",
        remedy="Do in one operator over all of them what a loop of Python does one by one, or compile the module with "
        "torch.compile.",
        unless="where each needs the result of the one before",
    ),
    Rule(
        name="calls",
        words=_repeated_calls,
        fact="{module} is called {calls} times a batch, which takes {measured} of the step{line}.",
        remedy="Call it once with all of its inputs stacked into one tensor.",
        unless="where each call needs the result of the one before",
        ceiling="the time of that module, what the one around takes by itself at the line of its calls, and their "
        "share of what the step does outside of modules, data, optimizer, your lines and a framework's loop",
    ),
    Rule(
        name="unused_forward",
        fact="{measured} of the step is forwards with gradients whose output no backward used: {modules}.",
        remedy="Take metrics from the output of the forward that is trained on; run what needs another in "
        "torch.no_grad(), and not in every step.",
        unless="where their gradients are taken in a later step",
        removes=True,
    ),
    Rule(
        name="metric_forward",
        words=lambda one: {
            "flops": si(one.phases[SCORING].flops, "FLOPs"),
            "seconds": duration(one.phases[SCORING].seconds),
        },
        fact="The model that trains is called without gradients as well: {flops} and {seconds} a step, {measured} of "
        "it.",
        remedy="Take metrics from the output of the forward that is trained on, or do this every so many steps.",
        unless="where steps train on its answers, as on labels or a reference's",
        removes=True,
    ),
    Rule(
        name="attention",
        fact="Attention that is written out takes {measured} of the step: {modules}.",
        remedy="Call torch.nn.functional.scaled_dot_product_attention, which keeps no matrix of scores; where it is "
        "called, its arguments have it fall back on separate products: see torch.nn.attention.sdpa_kernel.",
        unless="where the scores themselves are needed",
        ceiling="the time of these modules without the modules inside them",
    ),
    Rule(
        name="attention_dropout",
        limit="attention",
        threshold="more than {limit}, on a CPU",
        fact="Attention takes {measured} of the step in separate products, as it has dropout: {modules}.",
        remedy="Set the attention's dropout to 0: with it scaled_dot_product_attention falls back on separate products "
        "on a CPU; on a GPU it does not.",
        unless="where the model overfits without it",
        changes=True,
        ceiling="the time of these modules without the modules inside them",
    ),
    Rule(
        name="rollout",
        measured=lambda one: one.phases[ROLLOUT].ratio if rate_of_rollout(one.phases) < _MOSTLY else None,
        threshold="more than {limit}, at less than half of the training's FLOP/s",
        words=lambda one: {name: si(rate(name, one.phases), "FLOP/s") for name in (ROLLOUT, TRAINING)},
        fact="Generation takes {measured} of the step, at {rollout}, where training runs at {training}.",
        remedy="Generate for more prompts at once, as each token reads all of the weights (TRL: a larger "
        "generation_batch_size), or let an inference server do it (TRL: use_vllm=True).",
        unless="where memory is full of keys and values, or where steps must not train on samples of earlier weights",
        saves=lambda one, measured: measured * (1.0 - rate_of_rollout(one.phases)),
        ceiling="that share, less what its FLOPs take at the training's FLOP/s",
    ),
    Rule(
        name="scoring",
        measured=lambda one: one.phases[SCORING].ratio if scoring_gain(one.phases, one.peaks) else None,
        threshold="more than {limit}, in a dtype whose peak is below that of bfloat16",
        words=lambda one: {"dtype": str(one.phases[SCORING].dtype)},
        fact="Models that are only asked, as a reference or a reward model, take {measured} of the step, in {dtype}.",
        remedy="Load them in bfloat16, or call them inside torch.autocast. Where the answers on a sample stay the "
        "same, as a reference's, ask once before training (TRL's DPO: precompute_ref_log_probs=True).",
        unless="where their answers are compared with the trained model's to more digits",
        changes=True,
        saves=lambda one, measured: measured * scoring_gain(one.phases, one.peaks),
        ceiling="that share, less what it takes at the peak of bfloat16",
    ),
    Rule(
        name="recompute",
        measured=lambda one: one.shares.get("recompute") if _free_share(one.tensors) > _LEAST_FREE else None,
        threshold="more than {limit}, with more than a tenth of the memory free as far as that is known",
        words=_words_of_free,
        fact="Repeating forwards for the backward (activation checkpointing) takes {measured} of the step, by FLOPs.",
        remedy="Checkpoint fewer layers{free}.",
        unless="where memory is full without it",
        ceiling="their share of the FLOPs, of forward and backward",
    ),
    Rule(
        name="closure",
        measured=lambda one: (
            one.forwards_a_batch if any(of.type_name == "LBFGS" for of in one.facts.optimizers or ()) else None
        ),
        threshold="an LBFGS that runs the model more than {forwards} times a batch",
        words=lambda one: {"forwards": plain(one.forwards_a_batch)},
        fact="LBFGS's closure runs the model {forwards} times a batch.",
        remedy="Lower its max_iter and max_eval, or take an optimizer without a closure.",
        unless="where the steps are worth their price",
        changes=True,
        saves=lambda one, measured: (
            sum(filter(None, (one.compute_share, one.shares.get("optimizer")))) * (1 - 1 / measured)
        ),
        ceiling="all but one of these runs, and of the optimizer's own work between them",
    ),
    Rule(
        name="host_wait",
        measured=lambda one: one.shares.get("idle") if one.on_gpu and one.reads_a_step >= 1 else None,
        words=lambda one: {**_line("host_wait", one), "reads": plain(round(one.reads_a_step))},
        fact="The host reads a number from the device {reads} times a step and waits for it; the device is idle for "
        "{measured} of the step. The host's time is at {line}.",
        remedy="Keep losses and metrics as tensors, and read them every so many steps.",
        unless="where the step depends on the number",
    ),
    Rule(
        name="other_operators",
        measured=lambda one: one.shares.get("other_operators") if one.on_gpu and not one.facts.compiled else None,
        fact="Operators without products (norms, activations, sums, copies) take {measured} of the step.",
        remedy="Compile the model with torch.compile, which fuses them.",
        unless="where shapes change in every step",
    ),
    Rule(
        name="launches",
        measured=lambda one: one.shares.get("idle") if (one.shares.get("short_kernels") or 0.0) > _MOSTLY else None,
        limit="idle",
        fact="Most kernels are shorter than 10 us, and the device is idle for {measured} of the step.",
        remedy='Launch them together: torch.compile(model, mode="reduce-overhead"), which makes CUDA graphs.',
        unless="where shapes change in every step",
    ),
    Rule(
        name="graph_breaks",
        measured=lambda one: one.facts.graph_breaks or None,
        threshold="any",
        words=lambda one: {"breaks": plain(one.facts.graph_breaks), "why": one.facts.graph_break_reason.rstrip(" .")},
        fact="torch.compile broke the graph ({breaks} in all), mostly for this reason: {why}.",
        remedy="Take what breaks it out of the compiled module; TORCH_LOGS=graph_breaks lists the places.",
        unless="where the pieces are large",
        saves=None,
        source="torch.compile",
    ),
    Rule(
        name="recompilations",
        measured=lambda one: one.facts.recompilations or None,
        threshold="any",
        words=lambda one: {
            "times": plain(one.facts.recompilations),
            "why": one.facts.recompilation_reason.rstrip(" ."),
        },
        fact="torch.compile has compiled anew ({times} in all), the last time for this reason: {why}.",
        remedy="Compile with dynamic=True, or keep constant what changes; TORCH_LOGS=recompiles lists the reasons.",
        unless="where each was needed once, before the steps that count",
        saves=None,
        source="torch.compile",
    ),
    *(
        Rule(
            name=name,
            measured=partial(share_of_wait, name),
            limit="data_wait",
            words=words_of_loader,
            saves=saved_of_wait,
            removes=False if is_ceiling else None,
            ceiling=ceiling,
            fact="The step waits {wait} a batch for data ({measured}){workers}{cores}.{line}",
            remedy=remedy,
            unless=unless,
            source=_PROFILER if name == "data_wait" else _OWN,
        )
        for name, is_ceiling, ceiling, remedy, unless in WAITS
    ),
    Rule(
        name="padding",
        measured=lambda one: one.facts.padding_ratio,
        fact="Padding is {measured} of the tokens that are processed.",
        remedy="Put samples of similar lengths into a batch (transformers: train_sampling_strategy='group_by_length', "
        "before version 5 group_by_length=True), pad to the longest of the batch alone, or pack several samples into "
        "one sequence.",
        unless="where the order of the samples must stay random",
        saves=lambda one, measured: None if one.compute_share is None else measured * one.compute_share,
        ceiling="that share of forward and backward; of attention, whose work grows with the square, more",
    ),
    Rule(
        name="exposed_communication",
        measured=lambda one: one.transfer_share,
        words=lambda one: {**_of_waiting(one), **_of_memory(one)},
        fact="Communication that no computation hides takes {measured} of the step, {waits}.",
        # Sharded gradients (ZeRO-2 and -3, FSDP) are reduced in every micro-step: accumulation saves nothing there.
        remedy="Raise the batch size{room}, or, where gradients are reduced once a step (DDP, ZeRO-0 and -1), "
        "accumulate them over more batches; let communication begin earlier (DDP: a smaller bucket_cap_mb; DeepSpeed: "
        "overlap_comm, reduce_bucket_size, stage3_prefetch_bucket_size).",
        unless="where a larger batch changes how the model learns",
        changes=True,
        source=_PROFILER,
    ),
    Rule(
        name="waiting",
        measured=lambda one: one.shares.get("waiting") if one.straggler is None else None,
        fact="Waiting for other ranks takes {measured} of the traced step, and none of them is late enough to be a "
        "straggler.",
        remedy="Even out what ranks do in a step: lengths of samples, sizes of batches, what else runs on their hosts.",
        unless="where another rank is late in each step for a reason outside of the program",
    ),
    Rule(
        name="straggler",
        measured=lambda one: None if one.straggler is None else math.inf,
        threshold="more than {limit} of the other ranks' own time, and longer by more than straggler_sec",
        words=lambda one: {"who": one.straggler.evidence, "look": one.straggler.action} if one.straggler else {},
        fact="{who}",
        remedy="{look}",
        unless="where that rank does what the others do not, such as saving a checkpoint in each step",
        saves=lambda one, _: None if one.straggler is None else one.straggler.share,
        ceiling="what the others wait for it",
    ),
    Rule(
        name="backend",
        measured=lambda one: None if one.backend in (None, "nccl", "rccl") else math.inf,
        threshold="any backend but NCCL",
        words=lambda one: {"backend": str(one.backend)},
        fact="Gradients on GPUs are synchronized through {backend}.",
        remedy='Initialize the process group with backend="nccl".',
        unless="where NCCL does not run",
        saves=lambda one, _: one.transfer_share,
        ceiling="exposed communication",
        source=_PROFILER,
    ),
    Rule(
        name="data_parallel",
        measured=lambda one: math.inf if one.facts.data_parallel_devices > 1 else None,
        threshold="DataParallel over several GPUs",
        fact="torch.nn.DataParallel spreads the batch over several GPUs from one process.",
        remedy="Use DistributedDataParallel, with a process for each GPU.",
        unless="where the program cannot run as several processes",
        saves=None,
        source=_PROFILER,
    ),
    Rule(
        name="optimizer",
        measured=lambda one: one.shares.get("optimizer") if of_optimizer(one)["ways"] else None,
        words=of_optimizer,
        fact="{names} {does} {measured} of the step.",
        remedy="Construct it with {ways}.",
        unless="where its results must stay the same to the last bit",
        source=_MATCHER,
    ),
    Rule(
        name="norm",
        fact="Norms that are written out in Python take {measured} of the step: {modules}.",
        remedy="Take torch's own, which are one operator: nn.LayerNorm, nn.RMSNorm, nn.BatchNorm.",
        unless="where torch has none that computes the same",
        saves=lambda one, measured: measured - (one.shares.get("norm_left") or 0.0),
        ceiling="that share, less what one operator takes of it if all take as long",
    ),
    Rule(
        name="dropout",
        fact="Dropout takes {measured} of the step: {modules}.",
        remedy="Try a smaller model, or fewer epochs, with its p at 0.",
        unless="where the model overfits without it",
        changes=True,
    ),
    Rule(
        name="idle",
        words=_of_memory,
        fact="The device is idle for {measured} of the step, not counting the wait for data.",
        remedy="Raise the batch size{room}, and take .item(), print and other synchronizations out of the step.",
        unless="where memory is full, or a larger batch changes how the model learns",
        changes=True,
        source="Holistic Trace Analysis",
    ),
    Rule(
        name="tensor_core_eligible",
        measured=lambda one: one.shares.get("tensor_core_eligible") if one.device.tensor_core_dtypes else None,
        words=lambda one: {"dtype": one.device.tensor_core_dtypes[0]},
        fact="No kernel runs on tensor cores, but {measured} of the kernel time could.",
        remedy="Train with automatic mixed precision in {dtype}.",
        unless="where the model needs more digits",
        changes=True,
        saves=lambda one, measured: None if one.kernel_share is None else measured * one.kernel_share,
        ceiling="that share of the kernels",
        source=_PROFILER,
    ),
    Rule(
        name="float32",
        measured=lambda one: one.shares.get("float32") if "bfloat16" in one.device.tensor_core_dtypes else None,
        fact="{measured} of the model FLOPs are float32, with TF32 off.",
        remedy='Call torch.set_float32_matmul_precision("high"): products of float32 run in TF32, with ten bits of '
        "mantissa; bfloat16 by autocast is faster still.",
        unless="where the model needs more digits",
        changes=True,
        saves=partial(_of_products, "float32", "tf32"),
        ceiling="that share of the products, less what they take at the peak of TF32",
        source=_MATCHER,
    ),
    Rule(
        name="tf32",
        measured=lambda one: one.shares.get("tf32") if "bfloat16" in one.device.tensor_core_dtypes else None,
        fact="{measured} of the model FLOPs are in TF32; the peak of bfloat16 is twice as high.",
        remedy='Train with torch.autocast("cuda", torch.bfloat16), or precision="bf16-mixed".',
        unless="where the model needs more digits",
        changes=True,
        saves=partial(_of_products, "tf32", "bfloat16"),
        ceiling="that share of the products, less what they take at the peak of bfloat16",
    ),
    Rule(
        name="float64",
        fact="Products in float64 take {measured} of the step: {modules}.",
        remedy="Keep tensors in float32: look for a .double(), a table that numpy has made, or a default dtype.",
        unless="where the model needs so many digits",
        changes=True,
        ceiling="the time of these modules",
    ),
    Rule(
        name="misaligned",
        fact="{measured} of the FLOPs are 16-bit products with a dimension that is not a multiple of 8: {modules}.",
        remedy="Pad the dimension (vocabulary, hidden size) to a multiple of 8.",
        unless="where a checkpoint fixes it",
        saves=None,
        source="NVIDIA's matrix multiplication guide",
    ),
    Rule(
        name="pageable_copies",
        fact="Copies from pageable host memory to the device take {measured} of the step.",
        remedy="Set the DataLoader's pin_memory, and copy with non_blocking=True.",
        unless="where host memory is short",
    ),
    Rule(
        name="heat_limited",
        fact="While steps were timed, heat held the GPU's clock down for {measured} of the time.",
        remedy="Look after its cooling, or what else heats its host.",
        unless="where that is the speed that the GPU has for such work",
        saves=None,
        source="NVML",
    ),
)
