"""Pipelines of stages: each stage's profile is exact and true of the stage, and the stages add up to the model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed import initialize  # bound before the hook is installed, as in many programs
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import p2p
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

from lightning_flops import Profile, ProfilerConfig, host_clock
from lightning_flops.analysis.step_flops import CountSchedule
from lightning_flops.deepspeed import attach
from lightning_flops.schema.profile import Spread
from tests.deepspeed.engines import config, installed, job_of, left_on
from tests.deepspeed.launching import NOT_IN_0_16, OLD
from tests.deepspeed.scenario import Skipped, scenario
from tests.fake_clock import FakeNow
from tests.loops.nets import Slow, SlowSGD
from tests.results import profile_of, throughput_of

BATCH, MICRO_STEPS, IN, HIDDEN, OUT = 4, 3, 8, 16, 4
ROWS = MICRO_STEPS * BATCH
FIRST, SECOND, THIRD, FOURTH = (2 * ROWS * size for size in (IN * HIDDEN, HIDDEN**2, HIDDEN**2, HIDDEN * OUT))
WHOLE = FIRST + SECOND + THIRD + FOURTH
LAYER_PARAMS = (IN * HIDDEN + HIDDEN, HIDDEN**2 + HIDDEN, HIDDEN**2 + HIDDEN, HIDDEN * OUT + OUT)
PARAMS = sum(LAYER_PARAMS)
STEPS = 9
WINDOW: dict[str, Any] = {"profile_step": 1, "timing_steps": 3, "trace": False}

LOADER_SEC, FORWARD_SEC, BACKWARD_SEC, SEND_SEC, RECEIVE_SEC = 4.0, 1.0, 2.0, 0.25, 0.5
LOSS_SEC, OPTIMIZER_SEC, BETWEEN_SEC = 1.0, 8.0, 0.125


def net(stages: int, **settings: Any) -> PipelineModule:
    """Four linear layers, apportioned evenly over the stages."""
    torch.manual_seed(0)
    widths = (IN, HIDDEN, HIDDEN, HIDDEN, OUT)
    layers = [LayerSpec(nn.Linear, wide, high) for wide, high in zip(widths, widths[1:], strict=False)]
    return PipelineModule(
        layers, num_stages=stages, loss_fn=nn.MSELoss(), partition_method="uniform", seed_layers=True, **settings
    )


def batches(wait: Callable[[], None] = lambda: None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless batches, the same on every stage."""
    generator = torch.Generator().manual_seed(1)
    while True:
        wait()
        yield torch.randn(BATCH, IN, generator=generator), torch.randn(BATCH, OUT, generator=generator)


def engine_of(model: PipelineModule, optimizer: Any = None, **settings: Any) -> Any:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    settings = config(block=None, accumulate=MICRO_STEPS, train_micro_batch_size_per_gpu=BATCH, **settings)
    return initialize(model=model, optimizer=optimizer, config=settings)[0]


def own_names(engine: Any) -> list[str]:
    """Attributes of the instance that its class has as well, which is what we replace, and what is left elsewhere."""
    return [*sorted(name for name in vars(engine) if hasattr(type(engine), name)), *left_on(engine)]


def trained(model: PipelineModule, *, evaluates: bool = False, **settings: Any) -> Profile:
    """The profile of some steps, if asked with an evaluation after every other; nothing of ours is left."""
    engine = engine_of(model)
    before = own_names(engine)
    handle = attach(engine, ProfilerConfig(**WINDOW, **settings))
    assert own_names(engine) != before
    data, evaluation = batches(), batches()
    for step in range(STEPS):
        engine.train_batch(data)
        if step % 2 and evaluates:
            engine.eval_batch(evaluation)
    handle.detach()
    assert own_names(engine) == before
    assert profile_of(handle).timed_steps == (4, 5, 6)
    return profile_of(handle)


def flops(profile: Profile) -> tuple[int, int, int, int]:
    one = profile.flops
    return one.forward, one.backward, one.recompute, one.optimizer


def stages_add_up_to_the_model_and_its_copies_to_the_job(profile: Profile, *, stages: int, copies: int = 1) -> None:
    if job := job_of(profile):
        # Backward, a layer costs its forward for its weights and, but for the first, for its inputs.
        forward, backward = WHOLE, 2 * WHOLE - FIRST
        assert (job.flops.forward, job.flops.backward) == (copies * forward, copies * backward)
        assert job.flops_of_model is not None
        assert (job.flops_of_model.forward, job.flops_of_model.backward) == (forward, backward)
        assert job.params == PARAMS
        forwards, each = (FIRST, SECOND, THIRD, FOURTH), 4 // stages
        assert [(one.stage, one.params, one.flops.forward) for one in job.stages] == [
            (
                stage,
                sum(LAYER_PARAMS[each * stage : each * (stage + 1)]),
                sum(forwards[each * stage : each * (stage + 1)]),
            )
            for stage in range(stages)
        ]


def rank() -> int:
    return int(torch.distributed.get_rank())


@scenario()
def each_stage_counts_its_own_layers_of_all_micro_batches_and_no_evaluation() -> None:
    profile, stage = trained(net(2), evaluates=True), rank()
    # The data needs no gradient; the second stage sends its input's gradient back.
    expected = (FIRST + SECOND, FIRST + 2 * SECOND, 0, 0), (THIRD + FOURTH, 2 * (THIRD + FOURTH), 0, 0)
    assert flops(profile) == expected[stage]
    forwards = {module.name: module.total.forward for module in profile.modules if module.total.forward}
    assert stage == 0 or forwards == {"": THIRD + FOURTH, "2": THIRD, "3": FOURTH}
    assert not profile.uncounted and profile.outside.total == 0
    stages_add_up_to_the_model_and_its_copies_to_the_job(profile, stages=2)


@scenario()
def a_stage_in_the_middle_knows_its_samples_though_it_sees_no_batch() -> None:
    profile, stage = trained(net(4), tokens_per_sample=7), rank()
    context = profile.context
    assert (context.pp_size, context.dp_size, context.tp_size, context.world_size) == (4, 1, 1, 4)
    assert (context.pp_rank, context.micro_batch_size, context.accumulate) == (stage, 4, 3)
    assert (profile.micro_steps, profile.samples, profile.tokens) == (3, ROWS, 7 * ROWS)
    layer = (FIRST, SECOND, THIRD, FOURTH)[stage]
    assert flops(profile) == (layer, layer if stage == 0 else 2 * layer, 0, 0)
    assert profile.params == LAYER_PARAMS[stage]
    stages_add_up_to_the_model_and_its_copies_to_the_job(profile, stages=4)


@scenario()
def a_single_stage_is_the_model_and_waits_for_no_other() -> None:
    profile = trained(net(1))
    assert flops(profile) == (WHOLE, FIRST + 2 * (SECOND + THIRD + FOURTH), 0, 0)
    assert (profile.params, profile.context.dp_size, profile.context.pp_size) == (PARAMS, 2, 1)
    assert (profile.counted_steps, profile.notes) == ((1,), ())
    assert profile.timing is not None
    assert "bubble" not in [part.name for part in profile.timing.parts]


@scenario()
def a_tied_weight_counts_in_the_first_stage_that_has_it() -> None:
    layers = [TiedLayerSpec("shared", nn.Linear, IN, IN, bias=False), LayerSpec(nn.Linear, IN, IN)]
    layers += [LayerSpec(nn.Linear, IN, IN), TiedLayerSpec("shared", nn.Linear, IN, IN, bias=False)]
    model = PipelineModule(
        layers, num_stages=2, loss_fn=lambda outputs, labels: outputs.square().sum(), partition_method="uniform"
    )
    profile, tied, layer = trained(model), IN * IN, IN * IN + IN
    assert (profile.params, profile.local_params) == ((tied + layer, tied + layer), (layer, tied + layer))[rank()]
    assert flops(profile) == (2 * 2 * ROWS * IN * IN, (3, 4)[rank()] * 2 * ROWS * IN * IN, 0, 0)
    if job := job_of(profile):  # the weight that both stages share is one parameter of the model
        assert (job.params, job.flops.forward) == (tied + 2 * layer, 4 * 2 * ROWS * IN * IN)


@scenario()
def what_a_stage_computes_again_for_its_backward_is_recompute() -> None:
    if OLD:
        raise Skipped(f"DeepSpeed 0.16: {NOT_IN_0_16['checkpointed']}")
    profile = trained(net(2, activation_checkpoint_interval=1))
    # DeepSpeed lets the data need a gradient, or nothing behind a reentrant checkpoint would.
    layers = (FIRST + SECOND, THIRD + FOURTH)[rank()]
    assert flops(profile) == (layers, 2 * layers, layers, 0)


@scenario()
def losses_and_weights_are_the_same_bits_with_the_hook_and_without() -> None:
    def train(**settings: Any) -> tuple[list[float], list[list[float]], list[str]]:
        engine = engine_of(net(2), **settings)
        data = batches()
        losses = [float(engine.train_batch(data)) for _ in range(STEPS)]
        if settings.get("flops_profiler", {}).get("enabled"):
            attach(engine).detach()
        return losses, [weight.flatten().tolist() for weight in engine.module.parameters()], own_names(engine)

    without = train()
    with installed():
        switched_off = train(flops_profiler={"enabled": False, **WINDOW})
        profiled = train(flops_profiler={"enabled": True, **WINDOW, "trace": True})
    assert without == switched_off and profiled[:2] == without[:2]
    assert len(set(without[0])) == STEPS  # they train


@scenario()
def every_part_of_a_step_has_its_time_and_the_exchange_with_the_other_stage_is_the_bubble() -> None:
    now = FakeNow()

    class SlowLinear(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            outputs = super().forward(inputs)
            result: torch.Tensor = Slow.apply(outputs, now, FORWARD_SEC, BACKWARD_SEC)  # type: ignore[no-untyped-call]
            return result

    def slow(owner: Any, name: str, seconds: float) -> Any:
        return patch.object(owner, name, now.slowed(getattr(owner, name), seconds))

    layers = [LayerSpec(SlowLinear, IN, IN), LayerSpec(SlowLinear, IN, OUT)]
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
    with contextlib.ExitStack() as patched:
        patched.enter_context(patch.object(host_clock, "now", now))
        for name in ("draws_check", "learns"):  # no step is counted outside of windows
            patched.enter_context(patch.object(CountSchedule, name, lambda schedule: False))
        patched.enter_context(slow(p2p, "send", SEND_SEC))
        patched.enter_context(slow(p2p, "recv", RECEIVE_SEC))
        patched.enter_context(slow(PipelineEngine, "_aggregate_total_loss", LOSS_SEC))
        engine = engine_of(model, SlowSGD(model.parameters(), now, OPTIMIZER_SEC))
        handle = attach(engine, ProfilerConfig(**WINDOW))
        data, evaluation = batches(lambda: now.sleep(LOADER_SEC)), batches(lambda: now.sleep(LOADER_SEC))
        for _ in range(STEPS):
            engine.train_batch(data)
            engine.eval_batch(evaluation)
            now.sleep(BETWEEN_SEC)
        handle.detach()
    profile, summary = profile_of(handle), throughput_of(handle)
    assert profile.timing is not None
    # Three micro-batches, each loaded once, sent once and received once.
    seconds = {
        "data wait": 3 * LOADER_SEC,
        "transfer": 0.0,
        "forward": 3 * FORWARD_SEC,
        "backward": 3 * BACKWARD_SEC,
        "bubble": 3 * (SEND_SEC + RECEIVE_SEC) + LOSS_SEC,
        "optimizer": OPTIMIZER_SEC,
        "other": BETWEEN_SEC,
    }
    step_sec = sum(seconds.values())
    parts = {part.name: (min(part.steps_sec), part.mean_sec, max(part.steps_sec)) for part in profile.timing.parts}
    assert parts == {name: (value,) * 3 for name, value in seconds.items()}
    assert (profile.timing.global_step_sec, profile.timing.reader_sec) == (step_sec, 12.0)
    # An evaluation loads and computes as much, and sends or receives one way, after each of the three steps.
    way = RECEIVE_SEC if rank() else SEND_SEC
    assert profile.timing.excluded_sec == {"validation": 3 * 3 * (LOADER_SEC + FORWARD_SEC + way)}
    assert (profile.counted_steps, profile.timed_steps) == ((1,), (4, 5, 6))
    assert (profile.micro_steps, profile.samples, profile.rates.samples_per_sec) == (3, ROWS, ROWS / step_sec)
    # Throughput of the whole run takes a train_batch for a batch.
    assert summary.batches in range(1, 9)  # neither the counted one nor those beside the analysis
    assert summary.batch_cost_sec.minimum == step_sec  # in the first step stages exchange their shapes, too
    assert summary.reader_cost_sec == Spread(average=12.0, maximum=12.0, minimum=12.0)
    assert summary.ips is not None and summary.ips.maximum == ROWS / step_sec


@scenario()
def ranks_that_see_different_data_are_no_stages_and_write_reports_of_their_own_where_asked() -> None:
    """Two stages, each on two ranks; a block in the config, which names a file."""
    shared = Path("..", "shared").resolve()
    block = {"enabled": True, **WINDOW, "output_file": f"{shared}/flops.txt", "all_ranks": True}
    monitor = {"enabled": True, "output_path": str(shared), "job_name": "logs"}
    with installed():
        engine = engine_of(net(2), flops_profiler=block, csv_monitor=monitor)
    data = batches()
    for _ in range(STEPS):
        engine.train_batch(data)
    handle = attach(engine)
    handle.detach()  # the run is over
    torch.distributed.barrier()  # until every rank has written
    profile = profile_of(handle)
    assert profile.timing is not None
    context = profile.context
    assert (context.rank, context.pp_rank) == (rank(), rank() // 2)
    assert (context.dp_size, context.pp_size, context.tp_size) == (2, 2, 1)
    assert profile.rates.samples_per_sec == 2 * ROWS / profile.timing.global_step_sec
    stages_add_up_to_the_model_and_its_copies_to_the_job(profile, stages=2, copies=2)
    files = {str(path.relative_to(shared)) for path in shared.rglob("*") if path.suffix in (".json", ".txt")}
    names = ["", ".rank1", ".rank2", ".rank3"]
    expected = {f"flops{name}.txt" for name in names} | {"logs/lightning_flops/profile.json"}
    assert {name for name in files if "throughput" not in name} == expected
    # DeepSpeed's monitors have no folder on other ranks.
    assert rank() == 0 or Path("lightning_flops", f"profile.rank{rank()}.json").exists()
