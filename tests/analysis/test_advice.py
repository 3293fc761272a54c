"""What is advised from what was measured: each rule from both sides of its limit, and what it says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from lightning_flops.analysis.advice import RULES, advise
from lightning_flops.analysis.devices import DeviceAbilities
from lightning_flops.analysis.evidence import Evidence, gather_evidence
from lightning_flops.analysis.timing import build_timing
from lightning_flops.config import AdviceThresholds, ProfilerConfig
from lightning_flops.records import ModuleRecord, OptimizerFacts, PhaseSeconds, ProcessorLoss, RunFacts
from lightning_flops.schema.ranks import Straggler
from lightning_flops.schema.step import Advice, Budget, BudgetKey, DtypeFlops, ModuleTimes
from lightning_flops.schema.trace import TracedStep
from tests.report import windows
from tests.report.traced_windows import transformer_traced
from tests.report.windows import A100, cell

DEFAULTS = AdviceThresholds()
TENSOR_CORES = DeviceAbilities(tensor_core_dtypes=("bfloat16", "float16"), tf32=True, pins_memory=True)
STRAGGLER = Straggler(
    rank=3, late_sec=0.004, share=0.2, part="backward", part_sec=0.004, module=None,
)  # fmt: skip
ADAM = OptimizerFacts(type_name="Adam", faster_with=("fused=True", "foreach=True"))
TWO_CORES = {"cores": 2, "loader_workers": 0}
PROP = OptimizerFacts(type_name="RMSprop", faster_with=("foreach=True",))


def rules(evidence: Evidence, thresholds: AdviceThresholds = DEFAULTS) -> list[str]:
    return [advice.rule for advice in advise(evidence, thresholds)]


def only(evidence: Evidence) -> Advice:
    (advice,) = advise(evidence, DEFAULTS)
    return advice


LIMITS: list[tuple[str, float, Callable[[float], dict[str, Any]]]] = [
    ("padding", 0.20, lambda share: {"facts": RunFacts(padding_ratio=share)}),
    ("exposed_communication", 0.10, lambda share: {"shares": {"exposed_communication": share}}),
    ("waiting", 0.10, lambda share: {"shares": {"waiting": share}}),
    ("straggler", 0, lambda share: {"straggler": STRAGGLER if share else None}),
    ("backend", 0, lambda share: {"backend": "gloo" if share else "nccl"}),
    ("data_parallel", 1, lambda share: {"facts": RunFacts(data_parallel_devices=math.ceil(share))}),
    ("optimizer", 0.15, lambda share: {"shares": {"optimizer": share}, "facts": RunFacts(optimizers=(ADAM,))}),
    ("norm", 0.10, lambda share: {"shares": {"norm": share}}),
    ("dropout", 0.10, lambda share: {"shares": {"dropout": share}}),
    ("starved", 0.05, lambda share: {"shares": {"starved": share}}),
    ("idle", 0.20, lambda share: {"shares": {"idle": share}}),
    ("tensor_core_eligible", 0.05, lambda share: {"shares": {"tensor_core_eligible": share}, "device": TENSOR_CORES}),
    ("float32", 0.05, lambda share: {"shares": {"float32": share}, "device": TENSOR_CORES}),
    ("misaligned", 0.05, lambda share: {"shares": {"misaligned": share}}),
    ("pageable_copies", 0.05, lambda share: {"shares": {"pageable_copies": share}}),
    ("heat_limited", 0.05, lambda share: {"shares": {"heat_limited": share}}),
]


def test_every_rule_has_a_case() -> None:
    assert {rule for rule, *_ in LIMITS} == {one.name for one in RULES if not one.name.startswith("data_wait")}


@pytest.mark.parametrize(("rule", "limit", "of"), LIMITS)
def test_a_rule_speaks_above_its_limit_alone(rule: str, limit: float, of: Callable[[float], dict[str, Any]]) -> None:
    assert rules(Evidence(**of(limit))) == []
    assert rules(Evidence(**of(limit + 0.01))) == [rule]


def waits(wait_sec: float, *, step_sec: float = 0.1, batches: float = 1, **measured: Any) -> Evidence:
    facts = RunFacts(**{name: measured.pop(name) for name in ("cores", "loader_workers") if name in measured})
    return Evidence(step_sec=step_sec, data_wait_sec=wait_sec, batches=batches, facts=facts, **measured)


@pytest.mark.parametrize(
    ("evidence", "rule", "workers"),
    [
        pytest.param(waits(0.005, cores=4), None, 0, id="at the limit"),
        pytest.param(waits(0.0051, batches=6, cores=4), "data_wait_short", 0, id="under a millisecond a batch"),
        pytest.param(waits(0.006, batches=6, cores=4), "data_wait", 1, id="a millisecond a batch"),
        pytest.param(waits(0.05, cores=1), "data_wait_full", 0, id="one core"),
        pytest.param(waits(0.05, cores=8, idle_cores=0.4), "data_wait_full", 0, id="no idle core"),
        pytest.param(waits(0.05, cores=8, idle_cores=0.6), "data_wait", 1, id="an idle core"),
        pytest.param(waits(0.05, cores=2, loader_workers=2, idle_cores=1.5), "data_wait_full", 0, id="workers' cores"),
        # Of 100 ms, 50 wait for data; a process that was to compute for 25 of them and more may have loaded.
        pytest.param(waits(0.05, idle_cores=0.0, processor_share=0.25, **TWO_CORES), "data_wait_full", 0, id="busy"),
        pytest.param(waits(0.05, idle_cores=0.0, processor_share=0.24, **TWO_CORES), "data_wait", 1, id="disk"),
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


def test_advice_has_the_fact_the_remedy_the_ceiling_and_when_not_to_follow_it() -> None:
    one = waits(0.05, cores=8, loader_workers=0, idle_cores=6.5, device=TENSOR_CORES, shares={"pageable_copies": 0.01})
    assert only(one) == Advice(
        rule="data_wait",
        fact="The step waits 50 ms a batch for data (50.0%), with 0 loader workers; this process may use 8 cores, 6.5 "
        "of them idle.",
        remedy="Set the DataLoader's num_workers=1, with persistent_workers=True, pin_memory=True.",
        ceiling=0.5,
        unless="where the wait is for a disk or a network that is at its limit",
        threshold="more than 5.00%",
        source="PyTorch Profiler's recommendations",
    )


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
            Evidence(shares={"optimizer": 0.5}, facts=RunFacts(optimizers=(ADAM, PROP))),
            "Adam and RMSprop updates one tensor at a time and takes 50.0% of the step.",
        ),
    ],
)
def test_facts_name_the_rank_the_modules_and_the_optimizers(evidence: Evidence, words: str) -> None:
    assert only(evidence).fact.endswith(words)


def test_the_largest_possible_saving_comes_first_and_two_may_name_the_same_time() -> None:
    evidence = Evidence(
        shares={"exposed_communication": 0.4, "waiting": 0.1, "starved": 0.1, "float32": 0.5},
        backend="gloo",
        device=TENSOR_CORES,
    )
    found = {one.rule: one.ceiling for one in advise(evidence, DEFAULTS)}
    assert list(found) == ["exposed_communication", "backend", "starved", "float32"]
    assert found["exposed_communication"] == found["backend"] == pytest.approx(0.3)
    assert found["float32"] is None


def test_arguments_are_advised_that_all_slow_optimizers_take() -> None:
    fused = replace(ADAM, faster_with=())
    for optimizers, remedy in (((ADAM,), "fused=True, or with foreach=True"), ((ADAM, PROP, fused), "foreach=True")):
        evidence = Evidence(shares={"optimizer": 0.5}, facts=RunFacts(optimizers=optimizers))
        assert only(evidence).remedy == f"Construct it with {remedy}."
    assert rules(Evidence(shares={"optimizer": 0.5}, facts=RunFacts(optimizers=(fused,)))) == []


def test_a_device_without_tensor_cores_or_tf32_is_not_told_of_them() -> None:
    evidence = Evidence(shares={"tensor_core_eligible": 0.5, "float32": 0.5}, kernel_share=0.5)
    assert rules(evidence) == []
    volta = only(replace(evidence, device=DeviceAbilities(tensor_core_dtypes=("float16",))))
    # What kernels take is the ceiling of advice on them.
    assert (volta.remedy, volta.ceiling) == ("Train with automatic mixed precision in float16.", 0.25)


def test_thresholds_are_settings() -> None:
    config = ProfilerConfig(advice_thresholds={"data_wait": 0.2})
    assert [rules(waits(sec, cores=2), config.thresholds) for sec in (0.015, 0.021)] == [[], ["data_wait"]]


# ---- what a window knows


def gathered(
    *,
    times: dict[str, float] | None = None,
    traced: TracedStep | None = None,
    budget: Budget | None = None,
    **changes: Any,
) -> Evidence:
    """Evidence of eight equal steps of 20 ms; *times* are the modules' own milliseconds."""
    seconds = PhaseSeconds(data_wait=0.004, forward=0.006, backward=0.008, optimizer=0.002)
    window = replace(
        windows.mlp_window(), timed_steps=tuple(windows.step(at, seconds=seconds) for at in range(8)), **changes
    )
    of_modules = {
        name: ModuleTimes(
            clock="host", forward_sec=own / 1e3, own_forward_sec=own / 1e3, backward_sec=0.0, own_backward_sec=0.0,
            forward_flops_per_sec=None, backward_flops_per_sec=None, forward_utilization=None,
            backward_utilization=None,
        )
        for name, own in (times or {}).items()
    }  # fmt: skip
    return gather_evidence(
        window,
        timing=build_timing(window.timed_steps, mixed_phases=()),
        batches=2,
        dtypes=(DtypeFlops(dtype="float32", model=30, hardware=30), DtypeFlops(dtype="tf32", model=70, hardware=70)),
        times=of_modules,
        traced=traced,
        budget=budget,
    )


TRACED = windows.traced()


def test_times_are_those_of_a_typical_step() -> None:
    evidence = gathered(processor=ProcessorLoss(seconds=2.0, batches_sec=(), waited_share=0.2, idle_cores=1.5))
    assert evidence.step_sec == pytest.approx(0.020)
    assert evidence.data_wait_share == pytest.approx(0.2)
    assert evidence.compute_share == pytest.approx(0.7)
    assert evidence.shares["optimizer"] == pytest.approx(0.1)
    assert (evidence.shares["starved"], evidence.idle_cores) == (0.2, 1.5)


def test_device_is_idle_for_what_the_breakdown_of_a_typical_step_says_and_not_in_the_slower_traced_one() -> None:
    rows: dict[BudgetKey, int | None] = {"model": 30, "other_flops": -5, "compute": 20, "operators": 5, "idle": 40}
    budget = Budget(wall_ns=100, rows_ns=rows, notes=())
    found = gathered(traced=transformer_traced()[1], budget=budget)
    assert (found.shares["idle"], found.kernel_share) == (0.4, 0.5)
    unlike = replace(transformer_traced()[1], like_counted=False)  # it did other work: kernels fill 79.5 of its 93.5 ms
    assert gathered(traced=unlike, budget=budget).shares["idle"] == pytest.approx(14 / 93.5)


@pytest.mark.parametrize(
    ("seconds", "waited", "share"), [(1.0, 0.06, 0.06), (0.05, 0.2, None), (0.05, 0.5, 0.5), (0.05, None, None)]
)
def test_a_short_run_is_starved_beyond_chance(seconds: float, waited: float | None, share: float | None) -> None:
    found = gathered(processor=ProcessorLoss(seconds=seconds, batches_sec=(), waited_share=waited))
    assert found.shares["starved"] == share


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
    ],
)
def test_modules_that_a_remedy_is_known_for_are_found_by_class_and_operators(
    type_name: str, operators: tuple[str, ...], found: str | None
) -> None:
    modules = (ModuleRecord(name="a", type_name=type_name), ModuleRecord(name="b", type_name=type_name))
    cells = tuple(cell(at, "forward", 0, operator=f"aten.{operator}") for at in ("a", "b") for operator in operators)
    flops = replace(windows.mlp_window().flops, cells=cells)
    evidence = gathered(modules=modules, flops=flops, times={"a": 2.0, "b": 4.0}, traced=TRACED)
    # 6 of 20 ms, b first.
    costs = {name: share for name in ("dropout", "norm") if (share := evidence.shares.get(name)) is not None}
    assert costs == ({} if found is None else {found: pytest.approx(0.3)})
    assert found is None or evidence.modules[found] == ["b", "a"]
    # The traced steps' backward took over twice the timed ones': what modules took is not known well enough.
    apart = gathered(modules=modules, flops=flops, times={"a": 2.0, "b": 4.0}, traced=replace(TRACED, is_apart=True))
    assert apart.shares.keys().isdisjoint(("dropout", "norm"))
