"""What is advised from what was measured: each rule from both sides of its limit, and what it says."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from lightning_flops.analysis.advice import advise, starved_words, unexplained_words
from lightning_flops.analysis.counts import with_those_below
from lightning_flops.analysis.devices import DeviceAbilities
from lightning_flops.analysis.evidence import Evidence, gather_evidence
from lightning_flops.analysis.lines import Cause, build_lines, causes
from lightning_flops.analysis.plan import build_memory_report
from lightning_flops.analysis.rules import RULES
from lightning_flops.analysis.timing import build_timing
from lightning_flops.config import ADVICE_THRESHOLDS, ProfilerConfig
from lightning_flops.records import (
    LineRecord,
    LinesRecord,
    ModuleRecord,
    OptimizerFacts,
    PhaseFlops,
    PhaseSeconds,
    ProcessorLoss,
    RunFacts,
    StepTensors,
    TensorLife,
    TimePhase,
    WindowRecord,
)
from lightning_flops.report.profile_document import saving
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import (
    Advice,
    Budget,
    BudgetKey,
    DtypeFlops,
    LineProfile,
    LinesProfile,
    ModuleTimes,
    PhaseProfile,
)
from lightning_flops.schema.trace import Straggler, TracedStep
from tests.analysis.in_memory import known
from tests.report import windows
from tests.report.traced_windows import transformer_traced
from tests.report.windows import A100, cell

TENSOR_CORES = DeviceAbilities(tensor_core_dtypes=("bfloat16", "float16"), pins_memory=True)
STRAGGLER = Straggler(
    rank=3, late_sec=0.004, share=0.2, part="backward", part_sec=0.004, module=None,
)  # fmt: skip
LBFGS = OptimizerFacts(type_name="LBFGS")
ADAM = OptimizerFacts(type_name="Adam", faster_with=("fused=True", "foreach=True"))
TWO_CORES = {"cores": 2, "loader_workers": 0}
FOREACH = OptimizerFacts(type_name="AdamW", faster_with=("fused=True",), updates="foreach")


def row(line: int, seconds: float, text: str, *, function: str = "log", hook: str = "", **more: Any) -> LineProfile:
    given = {"part": "other", "only_enters": False, "file": "/home/anna/train.py", "samples": 20, **more}
    return LineProfile(line=line, function=function, text=text, hook=hook, seconds=seconds, share=seconds, **given)


HOOK = "Ema.on_train_batch_end"
SAVES = Cause(
    part="other",
    share=0.4,
    rows=(row(3, 0.3, "torch.save(x)", function=HOOK, hook=HOOK), row(4, 0.1, "x = 1", function=HOOK, hook=HOOK)),
)
READS = Cause(part="other", share=0.2, rows=(row(7, 0.2, "x.item()"),))
PROP = OptimizerFacts(type_name="RMSprop", faster_with=("foreach=True",))


def rules(evidence: Evidence, thresholds: Mapping[str, float] = ADVICE_THRESHOLDS) -> list[str]:
    return [advice.rule for advice in advise(evidence, thresholds)]


def only(evidence: Evidence) -> Advice:
    (advice,) = advise(evidence, ADVICE_THRESHOLDS)
    return advice


def phases(name: str, share: float, *, flops: int = 10**9, **more: Any) -> dict[str, PhaseProfile]:
    """A phase of a step of one second, and a training of 0.1 s at 100 GFLOP/s."""
    one = PhaseProfile(flops=flops, seconds=share, ratio=share, mfu=None, dtype="float32", **more)
    return {name: one, "training": PhaseProfile(flops=10**10, seconds=0.1, ratio=0.1, mfu=None, dtype="bfloat16")}


LIMITS: list[tuple[str, float, Callable[[float], dict[str, Any]]]] = [
    ("rollout", 0.20, lambda share: {"phases": phases("rollout", share)}),
    ("scoring", 0.05, lambda share: {"phases": phases("scoring", share), "peaks": {"float32": 1e12, "bfloat16": 4e12}}),
    ("metric_forward", 0.05, lambda share: {"shares": {"metric_forward": share}, "phases": phases("scoring", share)}),
    ("padding", 0.20, lambda share: {"facts": RunFacts(padding_ratio=share)}),
    ("exposed_communication", 0.10, lambda share: {"shares": {"exposed_communication": share}}),
    ("waiting", 0.10, lambda share: {"shares": {"waiting": share}}),
    ("straggler", 0, lambda share: {"straggler": STRAGGLER if share else None}),
    ("backend", 0, lambda share: {"backend": "gloo" if share else "nccl"}),
    ("data_parallel", 1, lambda share: {"facts": RunFacts(data_parallel_devices=math.ceil(share))}),
    ("optimizer", 0.15, lambda share: {"shares": {"optimizer": share}, "facts": RunFacts(optimizers=(ADAM,))}),
    ("norm", 0.10, lambda share: {"shares": {"norm": share}}),
    ("dropout", 0.10, lambda share: {"shares": {"dropout": share}}),
    *(
        (name, limit, lambda share, name=name: {"shares": {name: share}, "on_gpu": True})
        for name, limit in (
            ("line", 0.10),
            ("line_in_module", 0.25),
            ("calls", 0.10),
            ("unused_forward", 0.05),
            ("attention", 0.10),
            ("attention_dropout", 0.10),
            ("recompute", 0.10),
            ("other_operators", 0.25),
            ("float64", 0.05),
        )
    ),
    ("closure", 3.0, lambda number: {"forwards_a_batch": number, "facts": RunFacts(optimizers=(LBFGS,))}),
    ("graph_breaks", 0, lambda number: {"facts": RunFacts(graph_breaks=math.ceil(number))}),
    ("recompilations", 0, lambda number: {"facts": RunFacts(recompilations=math.ceil(number))}),
    ("tf32", 0.05, lambda share: {"shares": {"tf32": share}, "device": TENSOR_CORES}),
    ("idle", 0.20, lambda share: {"shares": {"idle": share}}),
    ("tensor_core_eligible", 0.05, lambda share: {"shares": {"tensor_core_eligible": share}, "device": TENSOR_CORES}),
    ("float32", 0.05, lambda share: {"shares": {"float32": share}, "device": TENSOR_CORES}),
    ("misaligned", 0.05, lambda share: {"shares": {"misaligned": share}}),
    ("pageable_copies", 0.05, lambda share: {"shares": {"pageable_copies": share}}),
    ("heat_limited", 0.05, lambda share: {"shares": {"heat_limited": share}}),
]


def test_every_rule_has_a_case() -> None:
    apart = {one.name for one in RULES if one.name.startswith("data_wait")} | {"host_wait", "launches"}
    assert {rule for rule, *_ in LIMITS} == {one.name for one in RULES} - apart


@pytest.mark.parametrize(("rule", "limit", "of"), LIMITS)
def test_a_rule_speaks_above_its_limit_alone(rule: str, limit: float, of: Callable[[float], dict[str, Any]]) -> None:
    assert rules(Evidence(**of(limit))) == []
    assert rules(Evidence(**of(limit + 0.01))) == [rule]


def test_a_rollout_saves_its_time_less_what_its_flops_take_at_the_trainings_speed() -> None:
    advice = only(Evidence(phases=phases("rollout", 0.5)))  # 2 GFLOP/s, and training 100
    assert "50.0% of the step, at 2 GFLOP/s, where training runs at 100 GFLOP/s" in advice.fact
    assert advice.saves == pytest.approx(0.5 - 10**9 / 100e9)


@pytest.mark.parametrize(
    "of",
    [
        pytest.param(phases("rollout", 0.5, flops=25 * 10**9), id="half of the training's speed"),
        pytest.param(phases("rollout", 0.5, estimated=True), id="a server's"),
        pytest.param({"rollout": phases("rollout", 0.5)["rollout"]}, id="nothing to compare with"),
    ],
)
def test_a_rollout_that_is_not_known_to_be_slow_gets_no_advice(of: dict[str, PhaseProfile]) -> None:
    assert rules(Evidence(phases=of)) == []


def test_scoring_saves_what_the_peak_of_bfloat16_saves_and_nothing_where_it_is_in_it_or_not_faster() -> None:
    of, faster = phases("scoring", 0.4), {"float32": 1e12, "bfloat16": 4e12}
    advice = only(Evidence(phases=of, peaks=faster))
    assert "take 40.0% of the step, in float32" in advice.fact
    assert advice.saves == pytest.approx(0.4 * 3 / 4)
    assert rules(Evidence(phases=of)) == []
    assert rules(Evidence(phases=of, peaks={"float32": 1e12, "bfloat16": 1e12})) == []
    of["scoring"] = replace(of["scoring"], dtype="bfloat16")
    assert rules(Evidence(phases=of, peaks=faster)) == []


def waits(wait_sec: float, *, step_sec: float = 0.1, batches: float = 1, **measured: Any) -> Evidence:
    facts = RunFacts(**{name: measured.pop(name) for name in ("cores", "loader_workers") if name in measured})
    return Evidence(
        step_sec=step_sec, parts={"data wait": wait_sec / step_sec}, batches=batches, facts=facts, **measured
    )


@pytest.mark.parametrize(
    ("evidence", "rule", "workers"),
    [
        pytest.param(waits(0.005, cores=4), None, 0, id="at the limit"),
        # Six batches' fetches would take 0.3 of 5.29 ms though each batch came whole: 4.99 are under the limit of 5.
        pytest.param(waits(0.00529, batches=6, cores=4), None, 0, id="a fetch of whole batches has a price"),
        pytest.param(waits(0.00531, batches=6, cores=4), "data_wait_short", 0, id="under a millisecond a batch"),
        # Of 100 ms 12 wait for 24 batches: 0.5 ms each, of which a framework's fetcher leaves 0.3.
        pytest.param(waits(0.012, batches=24, cores=4, fetch_sec=(0.0002, 0.0003)), None, 0, id="a framework fetches"),
        pytest.param(waits(0.012, batches=24, cores=4), "data_wait_short", 0, id="a plain loader"),
        pytest.param(waits(0.006, batches=6, cores=4), "data_wait", 1, id="a millisecond a batch"),
        pytest.param(waits(0.05, cores=1), "data_wait_full", 0, id="one core"),
        pytest.param(waits(0.05, cores=8, idle_cores=0.4), "data_wait_full", 0, id="no idle core"),
        pytest.param(waits(0.05, cores=8, idle_cores=0.6), "data_wait", 1, id="an idle core"),
        pytest.param(waits(0.05, cores=2, loader_workers=2, idle_cores=1.5), "data_wait_full", 0, id="workers' cores"),
        # Of 100 ms, 50 wait for data; a process that was to compute for 25 of them and more may have loaded.
        pytest.param(waits(0.05, idle_cores=0.0, processor_share=0.25, **TWO_CORES), "data_wait_full", 0, id="busy"),
        pytest.param(waits(0.05, idle_cores=0.0, processor_share=0.24, **TWO_CORES), "data_wait", 1, id="disk"),
        # 256 samples of 19 us are only taken and stacked; of 21 us something is made. Two workers load twice as long.
        pytest.param(waits(256 * 19e-6, samples=256, idle_cores=0.0, **TWO_CORES), None, 0, id="under the limit"),
        pytest.param(waits(512 * 19e-6, samples=512, idle_cores=0.0, **TWO_CORES), "data_wait_samples", 0, id="taken"),
        pytest.param(waits(512 * 19e-6, samples=512, cores=8), "data_wait", 1, id="taken, beside idle cores"),
        pytest.param(waits(512 * 21e-6, samples=512, idle_cores=0.0, **TWO_CORES), "data_wait_full", 0, id="made"),
        pytest.param(
            waits(0.05, samples=9_000, cores=2, loader_workers=2, idle_cores=0.0), "data_wait_full", 0, id="made by two"
        ),
        # 75 ms to load a batch that 25 ms train on: three.
        pytest.param(waits(0.075, cores=16, loader_workers=0), "data_wait", 3, id="as many as keep up"),
        pytest.param(waits(0.075, cores=3, loader_workers=0), "data_wait", 2, id="a core is left for training"),
        # Two workers deliver a batch each 100 ms, so one takes 200 ms: four for 50 ms.
        pytest.param(waits(0.05, cores=16, loader_workers=2), "data_wait", 4, id="more"),
    ],
)
def test_advice_on_waits_goes_by_length_and_idle_cores(evidence: Evidence, rule: str | None, workers: int) -> None:
    assert rules(evidence) == ([] if rule is None else [rule])
    if workers:
        assert only(evidence).remedy == f"Set the DataLoader's num_workers={workers}, with persistent_workers=True."


def test_samples_that_are_only_taken_are_taken_at_once_but_for_what_a_fetch_takes() -> None:
    # A TensorDataset: 512 samples of 19 us; a fetch of the whole batch takes 20 us or more of the 9.73 ms.
    advice = only(waits(512 * 19e-6, samples=512, idle_cores=0.0, **TWO_CORES))
    assert (
        advice.remedy.startswith("No core is idle for more workers, and a sample takes 19 us,")
        and "__getitems__(indices)" in advice.remedy
    )
    assert advice.saves == pytest.approx(0.09728 - 0.0002)
    assert advice.at_least is None


def test_advice_has_the_fact_the_remedy_the_ceiling_and_when_not_to_follow_it() -> None:
    one = waits(0.05, cores=8, loader_workers=0, idle_cores=6.5, device=TENSOR_CORES, shares={"pageable_copies": 0.01})
    assert only(one) == Advice(
        rule="data_wait",
        fact="The step waits 50 ms a batch for data (50.0%), with 0 loader workers; this process may use 8 cores, 6.5 "
        "of them idle.",
        remedy="Set the DataLoader's num_workers=1, with persistent_workers=True, pin_memory=True.",
        saves=0.496,
        unless="where the wait is for a disk or a network that is at its limit",
        threshold="more than 5.00%",
        source="PyTorch Profiler's recommendations",
    )


def test_what_a_remedy_takes_away_whole_is_saved_at_least_where_nothing_runs_beside_the_thread() -> None:
    beside = Evidence(shares={"line": 0.4}, causes={"line": (SAVES,)})
    alone = replace(beside, runs_alone=True)
    assert [(one.saves, one.at_least) for one in map(only, (alone, beside))] == [(0.4, True), (0.4, False)]
    assert saving(only(alone)) == " It saves at least 40.0% of a step."
    # The operator before it may have had the time: without this line alone nothing may be saved.
    long = replace(SAVES, rows=tuple(replace(one, is_long=True) for one in SAVES.rows))
    assert saving(only(replace(alone, causes={"line": (long,)}))) == " It can save up to 40.0% of a step."
    starved = replace(alone, shares={"line": 0.4, "starved": 0.3})  # no time of such a run is the least
    assert (only(starved).at_least, saving(only(starved))) == (None, " It saves about 40.0% of a step.")
    for shares in ({"optimizer": 0.4}, {"optimizer": 0.4, "starved": 0.3}):  # a fused one takes its time, too
        fused = replace(alone, shares=shares, facts=RunFacts(optimizers=(FOREACH,)))
        assert (only(fused).saves, only(fused).at_least) == (0.4, False)


def test_a_line_of_the_users_own_loop_may_make_what_the_step_needs() -> None:
    """An environment in Python: nobody can do it every so many steps, and vectorized it takes some time, too."""
    steps = Cause(part="other", share=0.4, rows=(row(3, 0.4, "o, r, d = env.step(a)"),))
    advice = only(Evidence(shares={"line": 0.4}, causes={"line": (steps,)}, runs_alone=True))
    assert saving(advice) == " It saves about 40.0% of a step."
    seldom, at_once = advice.remedy.split("; if they do")
    assert seldom.endswith("do it every so many steps, or in another process") and "environments at once" in at_once
    beside = replace(steps, rows=(replace(steps.rows[0], is_long=True),))
    assert only(Evidence(shares={"line": 0.4}, causes={"line": (beside,)}, runs_alone=True)).at_least is False


@pytest.mark.parametrize(
    ("facts", "context", "alone"),
    [
        (RunFacts(loader_workers=0), {}, True),
        (RunFacts(), {}, False),  # no loader was seen: what reads may run beside the training
        (RunFacts(loader_workers=2), {}, False),
        (RunFacts(loader_workers=0), {"world_size": 2}, False),
        (RunFacts(loader_workers=0), {"device_type": "cuda"}, False),
    ],
)
def test_a_run_is_alone_without_device_workers_and_other_ranks(
    facts: RunFacts, context: dict[str, Any], alone: bool
) -> None:
    context = {"device_type": "cpu", "world_size": 1, **context}
    found = gathered(facts=facts, context=replace(windows.mlp_window().context, **context))
    assert found.runs_alone is alone


@pytest.mark.parametrize(
    ("evidence", "words"),
    [
        (Evidence(straggler=STRAGGLER), "rank 3: its backward takes 4 ms longer than theirs."),
        (
            Evidence(shares={"norm": 0.5}, modules={"norm": ("a.norm", "b.norm")}),
            "take 50.0% of the step: a.norm, b.norm.",
        ),
        (
            Evidence(shares={"dropout": 0.5}, modules={"dropout": ("", "b", "c", "d", "e")}),
            ": the root, b, c and 2 more.",
        ),
        (
            Evidence(shares={"dropout": 0.5}, modules={"dropout": ("layers.0.drop", "head", "layers.11.drop")}),
            ": 2 x layers.*.drop, head.",
        ),
        (
            Evidence(shares={"dropout": 0.5}, modules={"dropout": ("1", "3", "5", "7")}),
            ": 1, 3, 5 and 1 more.",
        ),
        (
            Evidence(shares={"optimizer": 0.5}, facts=RunFacts(optimizers=(ADAM, PROP))),
            "Adam and RMSprop update one tensor at a time and take 50.0% of the step.",
        ),
        (
            Evidence(shares={"optimizer": 0.5}, facts=RunFacts(optimizers=(FOREACH,))),
            "AdamW updates each group of tensors in several kernels and takes 50.0% of the step.",
        ),
        (
            Evidence(shares={"idle": 0.15}, on_gpu=True, reads_a_step=26.0, causes={"host_wait": (READS,)}),
            "The host reads a number from the device 26 times a step and waits for it; the device is idle for 15.0% of "
            "the step. The host's time is at log train.py:7: `x.item()`.",
        ),
        (
            Evidence(shares={"line": 0.4}, causes={"line": (SAVES,)}),
            "40.0% of the step (other) is Ema.on_train_batch_end train.py:3 (also 4): `torch.save(x)`.",
        ),
        (
            Evidence(shares={"calls": 0.5}, modules={"calls": ("proj",)}, calls={"proj": 200}),
            "proj is called 200 times a batch, which takes 50.0% of the step.",
        ),
    ],
)
def test_facts_name_the_rank_the_modules_and_the_optimizers(evidence: Evidence, words: str) -> None:
    assert only(evidence).fact.endswith(words)


def test_the_largest_possible_saving_comes_first_and_two_may_name_the_same_time() -> None:
    evidence = Evidence(
        shares={"exposed_communication": 0.4, "waiting": 0.1, "norm": 0.2, "misaligned": 0.5},
        backend="gloo",
        device=TENSOR_CORES,
    )
    found = {one.rule: one.saves for one in advise(evidence, ADVICE_THRESHOLDS)}
    assert list(found) == ["backend", "exposed_communication", "norm", "misaligned"]
    assert found["exposed_communication"] == found["backend"] == pytest.approx(0.3)
    assert found["misaligned"] is None


def test_precision_saves_what_the_peaks_and_the_share_of_the_products_say() -> None:
    h200 = {"float32": 66.9e12, "tf32": 494.7e12, "bfloat16": 989.4e12}
    evidence = Evidence(shares={"float32": 1.0, "idle": 0.21}, device=TENSOR_CORES, peaks=h200, matmul_share=0.7)
    first = advise(evidence, ADVICE_THRESHOLDS)[0]
    # Products take 70% of the step, and 66.9 / 494.7 of that at the peak of TF32.
    assert (first.rule, first.changes) == ("float32", True)
    assert first.saves == pytest.approx(0.7 * (1 - 66.9 / 494.7))
    in_tf32 = only(replace(evidence, shares={"tf32": 0.8}))
    assert in_tf32.rule == "tf32"
    assert in_tf32.saves == pytest.approx(0.8 * 0.7 * 0.5)


@pytest.mark.parametrize(
    ("workers", "cores", "idle", "saves"),
    [
        (0, 2, 1.0, 0.196),  # 80 ms to load and 0.4 to hand over, by one worker: no step is shorter
        (0, 8, 7.0, 0.799),  # by four 20.1 ms, while the step works for 20
        (1, 2, 1.0, 0.5),  # a worker that loads for all of the 100 ms, and another
        (1, None, None, 0.8),
    ],
)
def test_workers_save_what_they_can_load_meanwhile(
    workers: int, cores: int | None, idle: float | None, saves: float
) -> None:
    evidence = waits(0.08, cores=cores, loader_workers=workers, idle_cores=idle)
    assert only(evidence).saves == pytest.approx(saves)


@pytest.mark.parametrize(
    ("processor", "saves"),
    [
        (0.06, 0.53),  # of 100 ms 6 are the processor's: two workers wait 47 for each batch, whatever they compute
        (0.01, 0.515),  # 3 of the step's are another wait: the batches are waited for 97
        (0.49, 0.513),  # loading computes: 97 ms to load and 0.4 to hand over
    ],
)
def test_workers_that_only_wait_compute_and_hand_over_in_no_time(processor: float, saves: float) -> None:
    evidence = waits(0.097, cores=2, loader_workers=0, idle_cores=2.0, processor_share=processor)
    assert only(evidence).saves == pytest.approx(saves)


def test_fewer_runs_of_a_closure_save_their_part_of_the_optimizer_too() -> None:
    facts = RunFacts(optimizers=(LBFGS,))
    evidence = Evidence(forwards_a_batch=8, compute_share=0.7, shares={"optimizer": 0.2}, facts=facts)
    assert only(evidence).saves == pytest.approx(0.9 * 7 / 8)


def test_what_is_prepared_before_saves_about_the_wait_as_loading_on_all_cores_slows_the_rest_too() -> None:
    advice = only(waits(0.05, idle_cores=0.0, cores=2, loader_workers=2))
    assert (advice.rule, advice.at_least) == ("data_wait_full", None)
    assert saving(advice) == " It saves about 50.0% of a step."


def test_what_changes_the_models_results_is_not_first_while_something_else_saves_a_twentieth() -> None:
    shares = {"dropout": 0.5, "float64": 0.4, "norm": 0.11}
    assert rules(Evidence(shares=shares)) == ["norm", "dropout", "float64"]
    assert rules(Evidence(shares={"dropout": 0.5})) == ["dropout"]
    assert [one.changes for one in advise(Evidence(shares=shares), ADVICE_THRESHOLDS)] == [False, True, True]


@pytest.mark.parametrize(("short", "found"), [(0.4, ["idle"]), (0.6, ["idle", "launches"])])
def test_many_short_kernels_on_an_idle_device_are_launched_together(short: float, found: list[str]) -> None:
    evidence = Evidence(shares={"idle": 0.3, "short_kernels": short})
    assert sorted(rules(evidence)) == found


@pytest.mark.parametrize(
    ("idle", "reads", "on_gpu", "found"),
    [(0.05, 26, True, []), (0.06, 26, True, ["host_wait"]), (0.06, 0.5, True, []), (0.06, 26, False, [])],
)
def test_a_host_that_waits_for_its_device_reads_numbers_from_it(
    idle: float, reads: float, on_gpu: bool, found: list[str]
) -> None:
    assert rules(Evidence(shares={"idle": idle}, reads_a_step=reads, on_gpu=on_gpu)) == found


@pytest.mark.parametrize(
    ("fits", "words"), [(41, "Raise the batch size (memory for a batch of 41 instead of 16), and"), (16, "size, and")]
)
def test_an_idle_device_is_told_of_the_batch_that_its_memory_holds(fits: int, words: str) -> None:
    """160 bytes of 200 are the batch's: 450 hold (450 - 40) / 10 rows."""
    lives = [
        TensorLife(size=40, born=0, part="", module="", operator="", kind="parameters"),
        TensorLife(size=160, born=1, part="forward", module="", operator="aten.mm", kind="activations"),
    ]
    more: dict[str, Any] = {"before_forward": 0, "flops": PhaseFlops(), "batch_size": 16, "notes": ()}
    report = build_memory_report(StepTensors(lives=lives, available_bytes=40 + 10 * fits, **more))
    assert words in only(Evidence(shares={"idle": 0.3}, tensors=report)).remedy


@pytest.mark.parametrize(
    ("available", "words"),
    [(1000, ": 80.0% of the memory is free at the peak"), (None, ", as far as memory is free"), (220, None)],
)
def test_fewer_layers_are_checkpointed_only_where_memory_is_free(available: int | None, words: str | None) -> None:
    life = TensorLife(size=200, born=0, part="", module="", operator="", kind="parameters")
    more: dict[str, Any] = {"before_forward": 0, "flops": PhaseFlops(), "batch_size": None, "notes": ()}
    report = build_memory_report(StepTensors(lives=[life], available_bytes=available, **more))
    evidence = Evidence(shares={"recompute": 0.3}, tensors=report)
    assert rules(evidence) == ([] if words is None else ["recompute"])
    if words is not None:
        assert only(evidence).remedy == f"Checkpoint fewer layers{words}."


def test_a_starved_run_is_a_warning_and_no_cause() -> None:
    evidence = Evidence(shares={"starved": 0.3})
    assert rules(evidence) == []
    assert starved_words(evidence, ADVICE_THRESHOLDS).startswith(
        "For 30.0% of the timed steps' time this process was ready"
    )
    assert starved_words(Evidence(shares={"starved": 0.05}), ADVICE_THRESHOLDS) == ""


def test_a_large_part_that_no_rule_explains_is_named_with_its_lines() -> None:
    parts = {"other": 0.6, "forward": 0.3}
    assert unexplained_words(Evidence(parts=parts, rows={"other": SAVES.rows}), ADVICE_THRESHOLDS) == (
        f"other takes 60.0% of the step, and no rule says why: {HOOK} train.py:3 (30.0%), {HOOK} train.py:4 (10.0%)."
    )
    only_enters = [replace(row, only_enters=True, hook="") for row in SAVES.rows]
    framework = Evidence(parts=parts, rows={"other": only_enters}, whose_loop="Lightning's own loop")
    assert unexplained_words(framework, ADVICE_THRESHOLDS) == (
        "other takes 60.0% of the step, in Lightning's own loop: no line of yours was seen in it."
    )
    # A closure of LBFGS: what the line calls is torch's, and the loop's around the optimizer it is not.
    optimizer = Evidence(parts={"optimizer": 0.6}, rows={"optimizer": only_enters})
    assert unexplained_words(optimizer, ADVICE_THRESHOLDS) == (
        f"optimizer takes 60.0% of the step, in what {only_enters[0].where} calls: no line of yours was seen in it."
    )
    beside = unexplained_words(
        Evidence(parts=parts, rows={"other": [only_enters[0], SAVES.rows[1]]}), ADVICE_THRESHOLDS
    )
    assert beside.endswith(f"no rule says why: {HOOK} train.py:4 (10.0%).")
    assert unexplained_words(Evidence(parts=parts, causes={"line": (SAVES,)}), ADVICE_THRESHOLDS) == ""
    assert unexplained_words(Evidence(parts={"other": 0.25}), ADVICE_THRESHOLDS) == ""
    # The model's own work, and what has rules of its own
    parts = {"forward": 0.4, "backward": 0.6, "data wait": 0.5, "optimizer": 0.5}
    assert unexplained_words(Evidence(parts=parts, facts=RunFacts(optimizers=(ADAM,))), ADVICE_THRESHOLDS) == ""
    assert (
        unexplained_words(Evidence(parts=parts), ADVICE_THRESHOLDS)
        == "optimizer takes 50.0% of the step, and no rule says why."
    )


def test_the_wait_for_data_names_the_line_of_the_dataset_that_most_of_it_is_in() -> None:
    load = Cause(part="data wait", share=0.4, rows=(row(9, 0.4, "Image.open(path)", function="Photos.__getitem__"),))
    found = only(waits(0.05, cores=4, loader_workers=0, causes={"data wait": (load,)}))
    assert found.fact.endswith(" Most of it is Photos.__getitem__ train.py:9: `Image.open(path)`.")
    small = replace(load, share=0.2)
    assert "Photos" not in only(waits(0.05, cores=4, causes={"data wait": (small,)})).fact


def test_arguments_are_advised_that_all_slow_optimizers_take() -> None:
    fused = replace(ADAM, faster_with=())
    for optimizers, remedy in (((ADAM,), "fused=True, or with foreach=True"), ((ADAM, PROP), "foreach=True")):
        evidence = Evidence(shares={"optimizer": 0.5}, facts=RunFacts(optimizers=optimizers))
        assert only(evidence).remedy == f"Construct it with {remedy}."
    # Of an Adam beside a SparseAdam it is not known what it takes.
    for optimizers in ((fused,), (ADAM, fused)):
        assert rules(Evidence(shares={"optimizer": 0.5}, facts=RunFacts(optimizers=optimizers))) == []


def test_a_device_without_tensor_cores_or_tf32_is_not_told_of_them() -> None:
    evidence = Evidence(shares={"tensor_core_eligible": 0.5, "float32": 0.5, "tf32": 0.5}, kernel_share=0.5)
    assert rules(evidence) == []
    volta = only(replace(evidence, device=DeviceAbilities(tensor_core_dtypes=("float16",))))
    # What kernels take is the ceiling of advice on them.
    assert (volta.remedy, volta.saves) == ("Train with automatic mixed precision in float16.", 0.25)


def test_nothing_saves_more_than_the_whole_step() -> None:
    # A loop's share goes with the backward of what it makes, which was not measured.
    assert only(Evidence(shares={"line_in_module": 1.3})).saves == 1.0


def test_thresholds_are_settings() -> None:
    config = ProfilerConfig(advice_thresholds={"data_wait": 0.2})
    assert [rules(waits(sec, cores=2), config.thresholds) for sec in (0.015, 0.021)] == [[], ["data_wait"]]


# ---- what a window knows


def flops_in(dtype: str, flops: int) -> DtypeFlops:
    return DtypeFlops(dtype=dtype, model=flops, hardware=flops, executed=flops, executed_model=flops)


def gathered(
    *,
    times: dict[str, float] | None = None,
    traced: TracedStep | None = None,
    budget: Budget | None = None,
    of_phases: dict[str, PhaseProfile] | None = None,
    lines: LinesProfile | None = None,
    **changes: Any,
) -> Evidence:
    """Evidence of eight equal steps of 20 ms; *times* are the modules' own milliseconds."""
    seconds = PhaseSeconds(data_wait=0.004, forward=0.006, backward=0.008, optimizer=0.002)
    window = replace(
        windows.mlp_window(),
        timed_steps=tuple(windows.step(at, micro_steps=2, seconds=seconds) for at in range(8)),
        **changes,
    )
    dtypes = flops_in("float32", 30), flops_in("tf32", 70)
    profile = replace(
        profile_of(window), dtypes=dtypes, traced=traced, budget=budget, phases=of_phases or {}, lines=lines
    )
    return gather_evidence(window, with_times(profile, times or {}))


def profile_of(window: WindowRecord) -> Profile:
    return windows.build_profile(window, config=ProfilerConfig())


def with_times(profile: Profile, times: dict[str, float]) -> Profile:
    """*profile* with modules that have these own milliseconds of forward, and those of the modules inside them."""
    whole = with_those_below({name: own / 1e3 for name, own in times.items()}, 0.0)
    of_modules = {
        name: ModuleTimes(
            clock="host", forward_sec=whole[name], own_forward_sec=own / 1e3, backward_sec=0.0, own_backward_sec=0.0
        )
        for name, own in times.items()
    }
    root = profile.modules[0]
    return replace(profile, modules=tuple(replace(root, name=name, times=one) for name, one in of_modules.items()))


TRACED = windows.traced()


def test_times_are_those_of_a_typical_step() -> None:
    evidence = gathered(processor=ProcessorLoss(seconds=2.0, batches_sec=(), waited_share=0.2, idle_cores=1.5))
    assert evidence.step_sec == pytest.approx(0.020)
    assert evidence.data_wait_share == pytest.approx(0.2)
    assert evidence.compute_share == pytest.approx(0.7)
    assert evidence.shares["optimizer"] == pytest.approx(0.1)
    assert (evidence.shares["starved"], evidence.idle_cores, evidence.samples) == (0.2, 1.5, 100)


def test_device_is_idle_for_what_the_breakdown_of_a_typical_step_says_and_not_in_the_slower_traced_one() -> None:
    rows: dict[BudgetKey, int | None] = {"model": 30, "other_flops": -5, "compute": 20, "operators": 5, "idle": 40}
    budget = Budget(wall_ns=100, rows_ns=rows, notes=())
    found = gathered(traced=transformer_traced()[1], budget=budget)
    assert (found.shares["idle"], found.kernel_share) == (0.4, 0.5)
    assert (found.shares["other_operators"], found.matmul_share) == (0.05, 0.45)
    unlike = replace(transformer_traced()[1], like_counted=False)  # it did other work: kernels fill 79.5 of its 93.5 ms
    assert gathered(traced=unlike, budget=budget).shares["idle"] == pytest.approx(14 / 93.5)


@pytest.mark.parametrize(
    ("seconds", "waited", "share"), [(1.0, 0.06, 0.06), (0.05, 0.2, None), (0.05, 0.5, 0.5), (0.05, None, None)]
)
def test_a_short_run_is_starved_beyond_chance(seconds: float, waited: float | None, share: float | None) -> None:
    found = gathered(processor=ProcessorLoss(seconds=seconds, batches_sec=(), waited_share=waited))
    assert found.shares.get("starved") == share


def test_reads_and_repeated_forwards_are_those_of_one_counted_step() -> None:
    window = windows.mlp_window()
    cells = (
        cell("", "forward", 100),
        cell("", "backward", 200),
        cell("", "recompute", 100),
        cell("", "recompute", 50, operator="aten._flash_attention_backward"),  # what its kernel always repeats
        cell("", "outside", 1_000),
        replace(cell("", "forward", 0, operator="aten._local_scalar_dense"), calls=52),
    )
    two = window.counted_steps[:1] * 2
    evidence = gathered(flops=replace(window.flops, cells=cells), counted_steps=two)
    assert evidence.reads_a_step == 26
    # 100 of 450 FLOPs of forward and backward, which take 14 of 20 ms.
    assert evidence.shares["recompute"] == pytest.approx(100 / 450 * 0.7)
    signature = replace(two[0].signature, forwards=20)
    closure = gathered(counted_steps=(replace(two[0], signature=signature, micro_steps=4),))
    assert closure.forwards_a_batch == 5


def test_facts_of_a_gpu_are_none_of_a_cpus() -> None:
    facts = RunFacts(compute_capability=(8, 0), process_group_backend="gloo")
    on_gpu = gathered(context=replace(A100, world_size=2), facts=facts)
    assert (on_gpu.shares["float32"], on_gpu.backend) == (0.3, "gloo")
    assert gathered(context=A100, facts=facts).backend is None
    # Torch for Windows has no NCCL.
    assert gathered(context=replace(A100, world_size=2), facts=replace(facts, nccl=False)).backend is None
    on_cpu = gathered(facts=facts)
    assert (on_cpu.shares["float32"], on_cpu.backend) == (None, None)


def test_products_are_misaligned_by_the_flops_of_16_bit_products_in_odd_modules() -> None:
    modules = (
        ModuleRecord(name="", type_name="Model"),
        ModuleRecord(name="hidden", type_name="Linear", weight_sizes=(64, 64)),
        ModuleRecord(name="head", type_name="Linear", weight_sizes=(50257, 64)),
        ModuleRecord(name="scale", type_name="Linear", weight_sizes=(3, 64)),
    )
    cells = (
        cell("hidden", "forward", 700, dtype="bfloat16"),
        cell("head", "forward", 100, dtype="bfloat16"),
        cell("head", "backward", 150, dtype="bfloat16"),
        cell("scale", "forward", 50, dtype="float32"),
    )
    flops = replace(windows.mlp_window().flops, cells=cells)
    facts = RunFacts(compute_capability=(8, 0))
    evidence = gathered(modules=modules, flops=flops, context=A100, facts=facts)
    # 250 of 1,000; float32 needs no such alignment.
    assert (evidence.shares["misaligned"], evidence.modules["misaligned"]) == (0.25, ("head (50257)",))
    assert gathered(modules=modules, flops=flops).shares["misaligned"] is None


@pytest.mark.parametrize(
    ("type_name", "operators", "found"),
    [
        ("Dropout", ("bernoulli_", "div_", "mul"), "dropout"),
        ("Dropout", ("native_dropout",), "dropout"),
        ("Dropout", (), None),  # p is 0
        ("RMSNorm", ("pow", "mean", "rsqrt", "mul"), "norm"),
        ("LayerNorm", ("native_layer_norm",), None),
        ("BatchNorm2d", ("native_batch_norm", "sqrt"), None),
        ("Residual", ("rsqrt",), None),
        ("ReLU", ("relu",), None),
        ("ConnectedDropout", ("bernoulli_", "mm"), None),  # its time is not that of dropout alone
        ("NormedLinear", ("linalg_vector_norm", "mm"), None),
    ],
)
def test_modules_that_a_remedy_is_known_for_are_found_by_class_and_operators(
    type_name: str, operators: tuple[str, ...], found: str | None
) -> None:
    modules = (ModuleRecord(name="a", type_name=type_name), ModuleRecord(name="b", type_name=type_name))
    cells = tuple(
        cell(at, "forward", 100 * (one == "mm"), operator=f"aten.{one}") for at in ("a", "b") for one in operators
    )
    flops = replace(windows.mlp_window().flops, cells=cells)
    evidence = gathered(modules=modules, flops=flops, times={"a": 2.0, "b": 4.0}, traced=TRACED)
    # 6 of 20 ms, b first.
    costs = {name: share for name in ("dropout", "norm") if (share := evidence.shares.get(name)) is not None}
    assert costs == ({} if found is None else {found: pytest.approx(0.3)})
    assert found is None or evidence.modules[found] == ["b", "a"]
    # The traced steps' backward took over twice the timed ones': what modules took is not known well enough.
    apart = gathered(modules=modules, flops=flops, times={"a": 2.0, "b": 4.0}, traced=replace(TRACED, is_apart=True))
    assert apart.shares.keys().isdisjoint(("dropout", "norm"))


def test_a_norm_that_is_written_out_saves_all_but_one_of_its_operators() -> None:
    cells = [cell("a", "forward", 0, operator=f"aten.{one}", calls=2) for one in ("pow", "mean", "rsqrt", "mul")]
    flops = replace(windows.mlp_window().flops, cells=tuple(cells), module_calls={"a": 2})
    modules = (ModuleRecord(name="a", type_name="RMSNorm"),)
    evidence = gathered(modules=modules, flops=flops, times={"a": 6.0}, traced=TRACED)
    advice = next(one for one in advise(evidence, ADVICE_THRESHOLDS) if one.rule == "norm")
    assert "take 30.0% of the step: a." in advice.fact  # 6 of 20 ms
    assert advice.saves == pytest.approx(0.3 * 3 / 4)


# ---- the user's lines


def sampled(*lines: tuple[str, int, float, dict[str, Any]], steps: int = 10) -> LinesRecord:
    """Lines as (part, number, seconds in all sampled steps, what else is known), 20 samples of each."""
    usual = {"file": "/home/anna/train.py", "function": "log", "hook": "", "text": "x", "callee": "", "samples": 20}
    records = [
        LineRecord(**{**usual, "part": part, "line": line, "seconds": seconds, "only_enters": False, **more})
        for part, line, seconds, more in lines
    ]
    return LinesRecord(steps=steps, lines=tuple(records))


SECONDS = PhaseSeconds(data_wait=0.004, forward=0.006, backward=0.008, other=0.002)


def of_lines(record: LinesRecord, *, on_host: bool = True) -> Any:
    timing = build_timing([windows.step(at, seconds=SECONDS) for at in range(8)], mixed_phases=())
    return build_lines(record, timing=timing, on_host=on_host)


def test_samples_divide_a_part_whose_length_the_timed_steps_say() -> None:
    # Of 0.3 s in other a third; other takes 2 of 20 ms. What is no part of a step is in no row.
    record = sampled(("other", 3, 0.2, {}), ("other", 4, 0.1, {}), ("validation", 9, 5.0, {}), ("forward", 5, 0.1, {}))
    found = {one.line: (one.seconds, one.share) for one in of_lines(record).rows}
    assert found == {
        5: (pytest.approx(0.006), pytest.approx(0.3)),
        3: (pytest.approx(0.002 * 2 / 3), pytest.approx(0.1 * 2 / 3)),
        4: (pytest.approx(0.002 / 3), pytest.approx(0.1 / 3)),
    }
    # On a device a part's time is the device's: a line has the host's own.
    on_device = {one.line: (one.seconds, one.share) for one in of_lines(record, on_host=False).rows}
    assert on_device[3] == (pytest.approx(0.02), pytest.approx(0.5))


@pytest.mark.parametrize(
    ("part", "more", "rule"),
    [
        ("other", {}, "line"),
        ("other", {"only_enters": True}, None),  # ``trainer.fit()``
        ("other", {"only_enters": True, "hook": "Ema.on_train_batch_end"}, "line"),  # a framework's callback
        ("other", {"samples": 3}, None),
        ("forward", {}, "line"),  # a loop in the loss
        ("forward", {"callee": "torch.cross_entropy"}, None),
        ("forward", {"long_sec": 0.2}, None),
        ("forward", {"in_module": True}, "line_in_module"),
        ("forward", {"in_module": True, "callee": "torch.max_pool2d"}, None),
        ("forward", {"in_module": True, "callee": "einsum"}, "line_in_module"),
        ("forward", {"in_module": True, "long_sec": 0.2}, None),  # one long operator: the model's work
    ],
)
def test_lines_are_named_that_are_not_the_models_work(part: str, more: dict[str, Any], rule: str | None) -> None:
    record = sampled((part, 3, 0.3, more), ("backward", 1, 0.4, {"only_enters": True}))
    timed = tuple(windows.step(at, seconds=replace(SECONDS, other=0.02, forward=0.02)) for at in range(8))
    window, timing = replace(windows.mlp_window(), timed_steps=timed), build_timing(timed, mixed_phases=())
    lines = build_lines(record, timing=timing, on_host=True)
    evidence = gather_evidence(window, replace(profile_of(window), lines=lines))
    found = [one for one in ("line", "line_in_module") if evidence.causes.get(one)]
    assert found == ([] if rule is None else [rule])
    assert bool(evidence.shares.get("line")) is (rule == "line")


@pytest.mark.parametrize(("hook", "rule"), [("Ema.on_train_batch_end", True), ("", False)])
def test_a_callbacks_long_operator_is_named_though_its_flops_join_its_part_to_the_forward(
    hook: str, rule: bool
) -> None:
    long = {"callee": "torch.svdvals", "long_sec": 0.3, "hook": hook}
    record = sampled(("other", 3, 0.3, long), ("backward", 1, 0.4, {"only_enters": True}))
    timed = tuple(windows.step(at, seconds=replace(SECONDS, other=0.02)) for at in range(8))
    window = replace(windows.mlp_window(), timed_steps=timed, mixed_phases=("forward", "other"))
    timing = build_timing(timed, mixed_phases=window.mixed_phases)
    lines = build_lines(record, timing=timing, on_host=True)
    evidence = gather_evidence(window, replace(profile_of(window), lines=lines))
    assert bool(evidence.shares.get("line")) is rule


@pytest.mark.parametrize(("long_sec", "ends"), [(0.3, "`, or an operator just before it"), (0.1, "`")])
def test_a_line_of_long_operators_may_stand_for_the_one_before(long_sec: float, ends: str) -> None:
    record = sampled(("other", 3, 0.3, {"long_sec": long_sec}), ("backward", 1, 0.4, {"only_enters": True}))
    timing = build_timing(windows.mlp_window().timed_steps, mixed_phases=())
    lines = known(build_lines(record, timing=timing, on_host=True))
    (cause,) = causes(lines, lambda row: row.part == "other")
    assert cause.words.rpartition("`")[1] + cause.words.rpartition("`")[2] == ends


# ---- modules that do what a remedy is known for


def of_modules(
    cells: Any, *, calls: dict[str, int], times: dict[str, float], unused: dict[str, int], **more: Any
) -> Evidence:
    flops = replace(windows.mlp_window().flops, cells=cells, module_calls=calls, unused_calls=unused)
    modules = tuple(ModuleRecord(name=name, type_name="Module") for name in times)
    return gathered(modules=modules, flops=flops, times=times, traced=TRACED, **more)


@pytest.mark.parametrize(
    ("operators", "found"),
    [
        (("bmm", "_softmax", "bmm"), True),
        (("bmm", "exp", "sum", "div", "bmm"), True),
        (("_softmax", "bmm"), False),  # one product: a router's
        (("bmm", "bmm"), False),
        (("_scaled_dot_product_flash_attention_for_cpu",), False),
    ],
)
def test_attention_is_written_out_where_a_softmax_is_between_two_products(
    operators: tuple[str, ...], found: bool
) -> None:
    cells = tuple(cell("attn", "forward", 1, operator=f"aten.{one}") for one in operators)
    evidence = of_modules(cells, calls={"attn": 1}, times={"attn": 5.0}, unused={})
    assert evidence.shares.get("attention") == (pytest.approx(0.25) if found else None)


@pytest.mark.parametrize(
    ("softmax", "drops", "rule"),
    [
        ("_safe_softmax", "bernoulli_", "attention_dropout"),  # scaled_dot_product_attention on a CPU
        ("_safe_softmax", "mul", "attention"),
        ("_softmax", "bernoulli_", "attention"),  # written out by hand
    ],
)
def test_attention_that_falls_back_for_its_dropout_has_a_remedy_of_its_own(softmax: str, drops: str, rule: str) -> None:
    operators = ("bmm", softmax, drops, "bmm")
    cells = tuple(cell("attn", "forward", 1, operator=f"aten.{one}") for one in operators)
    found = of_modules(cells, calls={"attn": 1}, times={"attn": 5.0}, unused={}).shares
    assert {one for one in ("attention", "attention_dropout") if found.get(one)} == {rule}


def test_a_loop_of_lines_has_what_its_module_takes_by_itself_as_far_as_it_is_of_its_lines() -> None:
    # The module takes 8 of 20 ms. Of its function's time in the forward all, or half, is in the loop.
    shares = []
    for others_sec, operators in ((0.1, 64), (0.3, 64), (0.1, 63)):
        cells = (replace(cell("net", "forward", 0), calls=operators),)
        other = ("forward", 4, others_sec, {"in_module": True, "long_sec": others_sec})
        lines = of_lines(sampled(("forward", 3, 0.3, {"in_module": True}), other))
        found = of_modules(cells, calls={"net": 1}, times={"net": 8.0}, unused={}, lines=lines)
        shares.append(found.shares["line_in_module"])
    assert shares == [pytest.approx(0.4), pytest.approx(0.2), None]


@pytest.mark.parametrize(
    ("operators", "on_gpu", "loop_sec", "fact"),
    [
        (64, False, 0.3, "70.0% of the step, with as much of"),
        (64, False, 0.15, "35.0% of the step, with as much of"),  # 15% in the forward alone are below the limit
        (63, False, 0.3, ""),
        (64, True, 0.3, ""),
    ],
)
def test_a_loop_of_lines_is_named_where_tracing_it_took_too_long_for_times_of_modules(
    operators: int, on_gpu: bool, loop_sec: float, fact: str
) -> None:
    # Most of the forward's 6 of 20 ms is in the loop, so that the function has them all; so may the backward's 8 be.
    # Or half is: then so much of the backward is its own by all that is known, and at most all.
    cells = (replace(cell("net", "forward", 0), calls=operators),)
    other = ("forward", 4, 0.1 if loop_sec > 0.2 else 0.15, {"in_module": True, "long_sec": 0.15})
    lines = of_lines(sampled(("forward", 3, loop_sec, {"in_module": True}), other))
    flops = replace(windows.mlp_window().flops, cells=cells, module_calls={"net": 1})
    found = gathered(
        modules=(ModuleRecord(name="net", type_name="Net"),),
        flops=flops,
        times={"net": 8.0},
        traced=replace(TRACED, is_apart=True),
        lines=lines,
        context=A100 if on_gpu else windows.mlp_window().context,
    )
    advice = [one for one in advise(found, ADVICE_THRESHOLDS) if one.rule == "line_in_module"]
    assert [one.fact.partition(" the backward")[0] for one in advice] == ([fact] if fact else [])
    at_most = {0.3: 0.3 + 0.4, 0.15: 0.15 + 0.4}[loop_sec]
    assert [one.saves for one in advice] == ([pytest.approx(at_most)] if fact else [])


@pytest.mark.parametrize(("others_sec", "words"), [(0.01, "train.py:3"), (0.12, "train.py:3 (also other lines)")])
def test_a_function_whose_other_lines_take_time_is_not_its_first_line_alone(others_sec: float, words: str) -> None:
    others: Any = [("other", line, others_sec / 4, {}) for line in (4, 5, 6, 7)]
    (cause,) = causes(of_lines(sampled(("other", 3, 0.3, {}), *others)), lambda row: True)
    assert cause.words == f"log {words}: `x`"


@pytest.mark.parametrize(("in_module", "rules"), [(False, []), (True, ["line_in_module"])])
def test_a_line_that_calls_parts_of_the_model_is_the_models_work(in_module: bool, rules: list[str]) -> None:
    # ``model.head(model.body(x))``, so that the forward cannot be separated from the rest of the loop.
    record = sampled(("other", 3, 0.3, {"callee": "_wrapped_call_impl", "in_module": in_module}))
    timed = tuple(windows.step(at, seconds=replace(SECONDS, other=0.02)) for at in range(8))
    window = replace(windows.mlp_window(), timed_steps=timed, mixed_phases=("forward", "other"))
    timing = build_timing(timed, mixed_phases=window.mixed_phases)
    lines = build_lines(record, timing=timing, on_host=True)
    evidence = gather_evidence(window, replace(profile_of(window), lines=lines))
    assert [one for one in ("line", "line_in_module") if evidence.causes.get(one)] == rules


@pytest.mark.parametrize("mixed", [(), ("forward", "other")])
def test_a_host_that_runs_a_teacher_waits_at_the_line_that_reads_a_number(mixed: tuple[TimePhase, ...]) -> None:
    record = sampled(("other", 3, 0.3, {"callee": "_wrapped_call_impl"}), ("other", 7, 0.1, {"long_sec": 0.1}))
    timed = tuple(windows.step(at, seconds=replace(SECONDS, other=0.02)) for at in range(8))
    window = replace(windows.mlp_window(), timed_steps=timed, mixed_phases=mixed)
    lines = build_lines(record, timing=build_timing(timed, mixed_phases=mixed), on_host=False)
    (cause,) = gather_evidence(window, replace(profile_of(window), lines=lines)).causes["host_wait"]
    assert cause.rows[0].line == 7


def test_a_function_has_the_time_of_its_other_lines_where_most_of_it_is_named() -> None:
    lines: Any = ("forward", 3, 0.3, {}), ("forward", 4, 0.1, {"callee": "torch.__iter__"}), ("backward", 9, 1, {})
    found = of_lines(sampled(*lines))
    assert [one.share for one in causes(found, lambda row: row.line == 3)] == [pytest.approx(0.3)]
    assert [one.share for one in causes(found, lambda row: row.line == 4)] == [pytest.approx(0.075)]


def test_modules_are_called_many_times_a_batch_the_outermost_alone() -> None:
    cells = (cell("net.proj", "forward", 100),)
    times = {"net": 2.0, "net.proj": 6.0, "act": 6.0}
    # Two batches a step: 16 calls of each. ``act`` multiplies nothing.
    evidence = of_modules(cells, calls={"net": 32, "net.proj": 32, "act": 64}, times=times, unused={})
    assert evidence.modules["calls"] == ["net"]
    assert evidence.shares["calls"] == pytest.approx(0.4)
    assert "calls" not in of_modules(cells, calls={"net": 31}, times=times, unused={}).shares
    slow = of_modules(cells, calls={"net": 32}, times={"net": 80.0}, unused={})
    assert "calls" not in slow.shares  # 2.5 ms each: the model's work
    generates = of_modules(cells, calls={"net": 32}, times=times, unused={}, of_phases=phases("rollout", 0.5))
    assert "calls" not in generates.shares  # each token needs the one before
    closes = of_modules(cells, calls={"net": 32}, times=times, unused={}, facts=RunFacts(optimizers=(LBFGS,)))
    assert "calls" not in closes.shares  # each closure needs the update of the one before
    # Tracing took too long for times of modules: what calls the model in all takes the forward and the backward, 14 ms.
    (inside,) = cells
    root = of_modules((replace(inside, module=""),), calls={"": 32, "net": 32}, times={}, unused={})
    assert root.modules["calls"] == [""]
    assert root.shares["calls"] == pytest.approx(0.7)
    assert "calls" not in of_modules(cells, calls={"": 2, "net": 32}, times={}, unused={}).shares


NET, PROJ, OTHER = ({"in_module": True, "function": f"{name}.forward"} for name in ("make.Net", "Proj", "Other"))


@pytest.mark.parametrize(
    ("calls", "lines", "share"),
    [
        (2, (), 0.7),  # no line is known: all of the 8 ms
        (4, (), 0.3),  # eight calls are no loop
        (2, (("forward", 3, 0.3, NET),), 0.7),
        # Three quarters of its 14 ms are at the line of the calls, of which these take 6: at most three quarters of 8.
        (2, (("forward", 3, 0.3, NET), ("forward", 4, 0.1, NET)), 0.6),
        (2, (("forward", 3, 0.1, NET), ("forward", 4, 0.3, {})), 0.7),  # a line around the model
        # Most of the forward is in another module, which says nothing of this one's lines.
        (2, (("forward", 8, 0.6, OTHER), ("forward", 9, 0.6, OTHER), ("forward", 3, 0.3, NET)), 0.7),
        # The user has written the called module: three quarters of the 8 ms around it are at the line of its calls.
        (
            2,
            (
                ("forward", 8, 0.6, PROJ),
                ("forward", 9, 0.6, PROJ),
                *(("forward", 3, 0.3, NET), ("forward", 4, 0.1, NET)),
            ),
            0.6,
        ),
    ],
)
def test_the_loop_around_many_calls_goes_with_them_as_far_as_it_is_of_their_line(
    calls: int, lines: Any, share: float
) -> None:
    # Of 20 ms the calls take 6, and the module around them 8 by itself.
    cells, module_calls = (cell("net.proj", "forward", 100),), {"net": calls, "net.proj": 32}
    found = gathered(
        flops=replace(windows.mlp_window().flops, cells=cells, module_calls=module_calls),
        modules=(ModuleRecord(name="net", type_name="Net"), ModuleRecord(name="net.proj", type_name="Proj")),
        times={"net": 8.0, "net.proj": 6.0},
        traced=TRACED,
        lines=of_lines(sampled(*lines)) if lines else None,
    )
    assert found.modules["calls"] == ["net.proj"]
    assert found.shares["calls"] == pytest.approx(share)
    (advice,) = (one for one in advise(found, ADVICE_THRESHOLDS) if one.rule == "calls")
    assert "Other" not in advice.fact and ("longest at" in advice.fact) == bool(lines)


@pytest.mark.parametrize(
    ("lines", "between"),
    [
        (None, 0.0),
        ((), 0.2),  # what was sampled in it was ours
        ((("other", 3, 0.3, {"only_enters": True}), ("other", 4, 0.1, {})), 0.15),  # line 4 is the user's own
        ((("other", 0, 0.3, {"only_enters": True, "file": ""}), ("other", 3, 0.1, {"only_enters": True})), 0.05),
    ],
)
def test_what_is_freed_between_the_parts_is_the_modules_by_their_share(lines: Any, between: float) -> None:
    # Of 20 ms 4 lie between the parts; the model takes 6 ms in its forward and 6 in its backward, of which it has 8.
    seconds = PhaseSeconds(data_wait=0.002, forward=0.006, backward=0.006, optimizer=0.002, other=0.004)
    timed = tuple(windows.step(at, seconds=seconds) for at in range(8))
    whole, timing = windows.mlp_window(), build_timing(timed, mixed_phases=())
    cells = (replace(cell("", "forward", 100), calls=16),)
    flops = replace(whole.flops, cells=cells, module_calls={"": 16})
    context = replace(whole.context, framework="torch")
    window = replace(whole, timed_steps=timed, context=context, flops=flops)
    samples = None if lines is None else build_lines(sampled(*lines), timing=timing, on_host=True)
    profile = replace(profile_of(window), lines=samples, traced=TRACED)
    profile = with_times(profile, {"": 8.0})
    assert gather_evidence(window, profile).shares["calls"] == pytest.approx(12 / 20 + between)
    # Where the loop is a trainer's, and where the host's time is not the step's.
    trainers = (replace(context, framework=one) for one in ("lightning.pytorch", "transformers"))
    for other in (*trainers, replace(context, device_type="cuda")):
        elsewhere = replace(window, context=other)
        assert gather_evidence(elsewhere, profile).shares["calls"] == pytest.approx(12 / 20)


def test_forwards_are_unused_where_others_of_the_module_were_used() -> None:
    cells = (cell("net", "forward", 100),)
    evidence = of_modules(
        cells,
        calls={"": 2, "net": 2, "head": 1},
        times={"": 1.0, "net": 6.0, "head": 1.0},
        unused={"": 1, "net": 1, "head": 1},
    )
    assert evidence.modules["unused_forward"] == [""]
    assert evidence.shares["unused_forward"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("asked", "others", "is_named"),
    [
        (("",), {}, True),
        (("net",), {}, True),
        (("teacher",), {}, False),  # which does not train
        (("", "(outside)"), {}, False),  # a model that was not given, too
        ((), {}, False),  # a phase that the loop named by hand
        (("",), phases("rollout", 0.1), False),  # an old policy
    ],
)
def test_a_forward_without_gradients_is_a_metrics_where_all_models_that_were_called_so_train(
    asked: tuple[str, ...], others: dict[str, PhaseProfile], is_named: bool
) -> None:
    cells = (cell("net", "forward", 100), cell("net", "backward", 100), cell("teacher", "forward", 100))
    flops = replace(windows.mlp_window().flops, cells=cells, asked=asked)
    evidence = gathered(flops=flops, of_phases={**others, **phases("scoring", 0.2)})
    assert evidence.shares["metric_forward"] == (0.2 if is_named else None)


def test_float64_takes_the_time_of_its_modules_or_by_flops_where_none_was_traced() -> None:
    cells = (cell("a", "forward", 30, dtype="float64"), cell("b", "forward", 70))
    assert of_modules(cells, calls={}, times={"a": 4.0, "b": 4.0}, unused={}).shares["float64"] == pytest.approx(0.2)
