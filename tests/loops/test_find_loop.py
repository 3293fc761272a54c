"""``lightning-flops run``: the loop of a program that knows nothing of the profiler is found, and so is its model."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import swa_utils

from lightning_flops import ConfigError, Profile, ProfilerConfig, profile_training
from lightning_flops.adapters.find_loop import LoopFinder
from lightning_flops.adapters.loop_search import holders_of, optimizers_that_exist
from lightning_flops.schema.throughput import ThroughputSummary
from lightning_flops.session.outcomes import OUTCOMES, Outcomes
from tests.fake_clock import FakeNow
from tests.forks import BEFORE_LIGHTNING, run_fork
from tests.left_on_objects import left_on_object
from tests.left_on_torch import torch_state
from tests.loops.nets import (
    BACKWARD,
    BACKWARD_SEC,
    BATCH,
    FETCH_SEC,
    FORWARD,
    FORWARD_SEC,
    LOSS_SEC,
    MIDDLE,
    NARROW,
    UPDATE_SEC,
    WIDE,
    Net,
    SharpnessAware,
    SlowSGD,
    loader,
    loss_of,
)
from tests.ranks import LIGHTNING


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What the command would say, in a process in which nothing was profiled before."""
    before = vars(OUTCOMES).copy()
    vars(OUTCOMES).update(vars(Outcomes()))
    left_by_others = list(optimizers_that_exist())
    monkeypatch.setattr(
        "lightning_flops.adapters.loop_search.optimizers_that_exist",
        lambda: (one for one in optimizers_that_exist() if not any(one is other for other in left_by_others)),
    )
    yield []
    vars(OUTCOMES).update(before)


def found(said: list[str], train: Callable[[], object], **settings: Any) -> LoopFinder:
    finder = LoopFinder(
        ProfilerConfig(timing_steps=2, trace=False, html=False, **settings), log_dir=None, announce=said.append
    )
    finder.begin()
    try:
        train()
    finally:
        finder.end(None)
    return finder


def only(finder: LoopFinder) -> Profile:
    (profile,) = finder.profiles
    return profile


def summary(name: str) -> ThroughputSummary:
    """Of a loop's whole run."""
    return ThroughputSummary.from_json(Path(f"lightning_flops_logs/{name}.json").read_text())


def steps_in(name: str) -> int:
    """All that its figures are of, or that it says are in none."""
    run = summary(name)
    return run.steps_counted + run.steps_predicted + run.steps_unknown


def test_a_loop_of_torch_is_found_after_two_updates(now: FakeNow, said: list[str]) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    before = torch_state()

    def train() -> None:
        for rows in loader(12, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
            optimizer.zero_grad()

    finder = found(said, train)
    profile = only(finder)
    assert (profile.flops.forward, profile.flops.backward, profile.samples) == (FORWARD, BACKWARD, BATCH)
    assert (profile.counted_steps, profile.timed_steps) == ((4,), (7, 8))
    assert profile.modules[0].type_name == "Net"
    assert any(
        "Net is the module that its loop calls, and whose parameters SlowSGD updates" in n for n in profile.notes
    )
    assert said[0].startswith("FLOPs of step 4: ") and said[0].endswith("lightning_flops_logs/profile.json")
    assert Path("lightning_flops_logs/profile.txt").read_text().startswith("Net on cpu")
    assert (left_on_object(net), left_on_object(optimizer), torch_state() == before) == ([], [], True)


def test_the_step_that_was_asked_for_is_profiled(now: FakeNow, said: list[str]) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)

    def train() -> None:
        for rows in loader(16, now):
            loss_of(net(rows), now).backward()
            optimizer.step()

    assert only(found(said, train, profile_step=8)).counted_steps == (8,)


def test_a_wrapper_that_the_loop_calls_is_whole_and_a_copy_is_not_taken_for_the_model(
    now: FakeNow, said: list[str]
) -> None:
    net = nn.Sequential(nn.Linear(WIDE, MIDDLE), nn.ReLU(), nn.Linear(MIDDLE, NARROW))
    averaged = swa_utils.AveragedModel(net)  # has parameters of its own
    holder = nn.ModuleDict({"net": net, "other": nn.Linear(3, 3)})  # nobody calls it
    compiled = torch.compile(net, backend="eager")
    optimizer = SlowSGD(net.parameters(), now)

    def train() -> None:
        for rows in loader(12, now):
            loss_of(compiled(rows), now).backward()
            optimizer.step()
            averaged.update_parameters(net)

    profile = only(found(said, train))
    assert (profile.modules[0].type_name, profile.flops.forward) == ("Sequential", FORWARD)
    assert profile.timing is not None and profile.timing.forward_sec is not None
    assert len(list(holder.parameters())) == 6


class TwoLayers(nn.Module):
    """``torch.compile`` of a module whose forward is no function of torch's calls the module as a loop does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDE, MIDDLE), nn.Linear(MIDDLE, NARROW)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(rows).relu())  # type: ignore[no-any-return]


def test_of_a_compiled_model_that_is_found_the_model_alone_is_compiled(now: FakeNow, said: list[str]) -> None:
    torch._dynamo.reset()
    compiled_graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        compiled_graphs.append(graph)
        return graph.forward

    net = TwoLayers()
    compiled = torch.compile(net, backend=backend)
    optimizer = SlowSGD(net.parameters(), now)

    def train() -> None:
        for rows in loader(12, now):
            loss_of(compiled(rows), now).backward()
            optimizer.step()

    assert only(found(said, train)).flops.forward == FORWARD
    assert len(compiled_graphs) == 1


def test_two_optimizers_in_turn_make_one_step(now: FakeNow, said: list[str]) -> None:
    net = Net(now)
    optimizers = [SlowSGD(layer.parameters(), now) for layer in (net.first, net.second)]

    def train() -> None:
        for rows in loader(12, now):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(net(rows), now).backward()
            for optimizer in optimizers:
                optimizer.step()

    profile = only(found(said, train))
    assert (profile.flops.forward, profile.samples, profile.micro_steps) == (FORWARD, BATCH, 1)


@pytest.mark.parametrize("raises", [False, True])
def test_the_optimizer_whose_step_calls_anothers_is_the_loops(raises: bool, now: FakeNow, said: list[str]) -> None:
    net = Net(now)
    optimizer = SharpnessAware(SlowSGD(net.parameters(), now))

    def train() -> None:
        for place, rows in enumerate(loader(14, now)):

            def loss_there(rows: torch.Tensor = rows, fails: bool = raises and place == 1) -> None:
                loss_of(net(rows), now).backward()
                if fails:
                    raise RuntimeError("too large")

            with suppress(RuntimeError):
                loss_of(net(rows), now).backward()
                optimizer.step(loss_there)

    profile = only(found(said, train))
    assert (profile.flops.forward, profile.flops.backward, profile.samples) == (2 * FORWARD, 2 * BACKWARD, BATCH)
    assert any("whose parameters SharpnessAware updates" in note for note in profile.notes)
    assert steps_in("throughput") == 14 - raises


LAYERS = 8


@pytest.mark.parametrize("in_backward", [False, True])
def test_an_optimizer_for_each_layer_makes_one_step(in_backward: bool, said: list[str]) -> None:
    net = nn.Sequential(*(nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in net]
    if in_backward:  # as torch's recipe for less memory has it
        for weight, optimizer in zip(net.parameters(), optimizers, strict=True):
            weight.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())

    def train() -> None:
        for rows in [torch.ones(BATCH, WIDE)] * 14:
            for optimizer in optimizers:
                optimizer.zero_grad()
            net(rows).mean().backward()
            for optimizer in optimizers if not in_backward else ():
                optimizer.step()

    profile = only(found(said, train))
    forward = LAYERS * 2 * BATCH * WIDE * WIDE
    assert (profile.flops.forward, profile.flops.backward) == (forward, 2 * forward - forward // LAYERS)
    assert profile.micro_steps == 1


def test_a_loop_that_calls_methods_of_its_model_has_counts_and_no_time_of_its_forward(
    now: FakeNow, said: list[str]
) -> None:
    class Method(Net):
        def loss(self, rows: torch.Tensor) -> torch.Tensor:
            return loss_of(self.second(self.first(rows)), now)

    net = Method(now)
    optimizer = SlowSGD(net.parameters(), now)

    def train() -> None:
        for rows in loader(14, now):
            net.loss(rows).backward()
            optimizer.step()

    profile = only(found(said, train))
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert profile.timing is not None and profile.timing.forward_sec is None


@pytest.mark.parametrize(
    ("steps", "reason"),
    [
        (0, "no optimizer took a step in this process"),
        (1, "training ended after 1 step(s), while its loop was being recognized"),
        (2, "training ended after 2 step(s), while its loop was being recognized"),
    ],
)
def test_a_loop_that_is_too_short_is_not_profiled_and_why_is_known(
    now: FakeNow, said: list[str], steps: int, reason: str
) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)

    def train() -> None:
        for rows in loader(steps, now) if steps else ():
            loss_of(net(rows), now).backward()
            optimizer.step()

    finder = found(said, train)
    assert (finder.profiles, finder.reason) == ([], reason)


def test_optimizers_that_are_made_anew_for_a_few_steps_make_no_loop_and_that_is_said(
    now: FakeNow, said: list[str]
) -> None:
    net = Net(now)
    outer = SlowSGD(net.parameters(), now)

    def train() -> None:
        for rows in loader(8, now):
            inner = SlowSGD(net.parameters(), now)
            for _ in range(2):
                loss_of(net(rows), now).backward()
                inner.step()
            outer.step()

    finder = found(said, train)
    assert finder.profiles == []
    assert finder.reason.startswith("no loop was recognized among 24 updates, as where optimizers are made anew")


def test_what_takes_turns_in_two_threads_is_no_loop(now: FakeNow, said: list[str]) -> None:
    turns = threading.Semaphore(1), threading.Semaphore(0)

    def train(place: int) -> None:
        net = Net(now)
        optimizer = SlowSGD(net.parameters(), now)
        for rows in loader(12, now):
            turns[place].acquire()
            loss_of(net(rows), now).backward()
            optimizer.step()
            turns[1 - place].release()

    def both() -> None:
        threads = [threading.Thread(target=train, args=(place,)) for place in (0, 1)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()

    finder = found(said, both)
    profile = only(finder)
    assert (profile.flops.forward, profile.flops.backward, profile.samples) == (FORWARD, BACKWARD, BATCH)
    assert profile.modules[0].type_name == "Net"
    assert finder.loops[-1] == "what other threads trained at the same time is in none of these"


def test_a_loop_in_a_thread_after_that_of_another_thread_has_a_report_of_its_own(now: FakeNow, said: list[str]) -> None:
    def train(steps: int) -> None:
        net = Net(now)
        optimizer = SlowSGD(net.parameters(), now)
        for rows in loader(steps, now):
            loss_of(net(rows), now).backward()
            optimizer.step()

    def one_after_the_other() -> None:
        for steps in (12, 14):
            thread = threading.Thread(target=train, args=(steps,))
            thread.start()
            thread.join()

    finder = found(said, one_after_the_other)
    assert [profile.flops.forward for profile in finder.profiles] == [FORWARD, FORWARD]
    assert (steps_in("throughput"), steps_in("throughput.loop2"), len(finder.loops)) == (12, 14, 2)


class Late(SlowSGD):
    """The discriminator's."""


def test_an_optimizer_that_makes_an_update_now_and_then_is_named(
    now: FakeNow, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    net, judge = Net(now), nn.Linear(NARROW, 1)
    optimizer, late = SlowSGD(net.parameters(), now), Late(judge.parameters(), now)

    def train() -> None:
        for place, rows in enumerate(loader(40, now)):
            output = net(rows)
            loss_of(output, now).backward()
            optimizer.step()
            if place >= 20 and place % 7 == 0:  # six updates of the other one in between
                judge(output.detach()).mean().backward()
                late.step()

    profile = only(found(said, train))
    assert (profile.flops.forward, profile.modules[0].type_name) == (FORWARD, "Net")
    assert caplog.text.count("Late, an optimizer that made no update while this loop was recognized") == 1


@pytest.mark.parametrize("judges_first", [False, True])
def test_an_optimizer_that_begins_late_and_takes_turns_makes_another_loop(
    judges_first: bool, now: FakeNow, said: list[str]
) -> None:
    """A generator is trained alone for 20 steps, then beside a discriminator of its output, for 20 more."""
    net, judge = Net(now), nn.Linear(NARROW, 1)
    optimizer, late = SlowSGD(net.parameters(), now), Late(judge.parameters(), now)

    def judges(output: torch.Tensor) -> None:
        judge(output.detach()).mean().backward()
        late.step()

    def train() -> None:
        for place, rows in enumerate(loader(40, now)):
            output = net(rows)
            if judges_first and place >= 20:
                judges(output)
            loss_of(output, now).backward()
            optimizer.step()
            if not judges_first and place >= 20:
                judges(output)

    finder = found(said, train, peak_flops_per_sec=1e12)
    first, second = finder.profiles
    assert (first.flops.forward, first.flops.backward, first.modules[0].type_name) == (FORWARD, BACKWARD, "Net")
    of_judge = 2 * BATCH * NARROW  # one product forward, and one backward: its input needs no gradient
    assert (second.flops.forward, second.flops.backward) == (FORWARD + of_judge, BACKWARD + of_judge)
    assert {one.name: one.total.forward for one in second.modules if one.depth == 1} == {
        "Net": FORWARD,
        "Linear": of_judge,
    }
    assert second.samples == BATCH
    assert not any("made no update while this loop was recognized" in one for one in first.notes + second.notes)
    # The first loop has no step with work of the discriminator. If that comes last, the one before it is of both loops.
    assert [steps_in(name) for name in ("throughput", "throughput.loop2")] == [20 + (not judges_first), 20]
    assert [summary(name).mfu is not None for name in ("throughput", "throughput.loop2")] == [True, True]


def test_where_a_framework_has_a_door_of_its_own_the_loop_is_left_to_it(now: FakeNow, said: list[str]) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)

    def train() -> None:
        with profile_training(net, optimizer, profile_step=20):
            for rows in loader(8, now):
                loss_of(net(rows), now).backward()
                optimizer.step()

    finder = found(said, train)
    assert (finder.profiles, said, finder.loops) == ([], [], ())
    assert finder.reason == "its framework's own door profiles the training"


def test_a_failure_while_a_loop_is_looked_for_never_reaches_it(
    now: FakeNow, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_flops.adapters.loop_search.holders_of", lambda *_: 1 / 0)
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)

    def train() -> None:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            optimizer.step()

    finder = found(said, train)
    assert finder.reason == "the FLOPs profiler failed: ZeroDivisionError: division by zero"


def test_the_holders_of_parameters_come_outermost_first() -> None:
    inner = nn.Linear(2, 3)
    middle = nn.Sequential(inner)
    outer = nn.ModuleList([middle, nn.ReLU()])
    assert list(holders_of([id(one) for one in inner.parameters()])) == [outer, middle, inner]


def test_modules_that_hold_as_many_of_them_but_others_are_no_holders_of_the_same() -> None:
    one, other = nn.Linear(2, 3), nn.Linear(3, 2)
    wrapper = nn.Sequential(other)
    assert list(holders_of([id(each) for model in (one, other) for each in model.parameters()])) == [one]
    assert list(holders_of([id(each) for each in other.parameters()])) == [wrapper, other]


def test_the_steps_before_a_loop_is_recognized_cost_its_mfu_nothing(now: FakeNow, said: list[str]) -> None:
    """Three steps pass until the model is known, and a fourth that runs then is not seen from its beginning."""
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)

    def train() -> None:
        for rows in loader(12, now):
            loss_of(net(rows), now).backward()
            optimizer.step()

    found(said, train, peak_flops_per_sec=1e12)
    run = summary("throughput")
    assert (run.steps_unknown, run.steps_counted, run.steps_predicted) == (4, 1, 7)
    assert (run.model_flops, run.batches) == (None, 7)
    assert run.unavailable["model_flops"] == "4 steps ran before the loop was recognized"
    seconds = 7 * run.batch_cost_sec.average if run.batch_cost_sec else 0.0
    assert run.mfu == pytest.approx(7 * (FORWARD + BACKWARD) / (1e12 * seconds), rel=1e-12)


@pytest.mark.parametrize("inside", [False, True], ids=["for the next stage", "inside a stage"])
def test_what_is_unfrozen_for_the_next_stage_leaves_the_figures_of_a_stage(
    inside: bool, now: FakeNow, said: list[str]
) -> None:
    """Stages of 24 steps: the last layer, then all. Of the first stage each step but the four first is known."""
    net = Net(now)
    body, head = net.first.weight, [net.second.weight]
    body.requires_grad_(False)

    def train() -> None:
        first = SlowSGD([*head, body] if inside else head, now)
        steps_of(net, first, 12, now)
        body.requires_grad_(inside)
        steps_of(net, first, 12, now)
        body.requires_grad_(True)
        steps_of(net, SlowSGD([*head, body], now), 24, now)

    found(said, train, peak_flops_per_sec=1e12)
    run = summary("throughput")
    assert (run.mfu is None) == inside
    assert run.steps_unknown == (23 if inside else 4)


# ---- several loops, and several models in one


def steps_of(net: nn.Module, optimizer: torch.optim.Optimizer, number: int, now: FakeNow) -> None:
    for rows in loader(number, now):
        loss_of(net(rows), now).backward()
        optimizer.step()
        optimizer.zero_grad()


class Other(Net):
    """Has the shapes of the first."""


def test_two_models_that_are_trained_one_after_the_other_have_a_report_each(now: FakeNow, said: list[str]) -> None:
    before = torch_state()
    nets = [Net(now), Other(now)]

    def train() -> None:
        for net in nets:
            steps_of(net, SlowSGD(net.parameters(), now), 24, now)

    finder = found(said, train)
    assert [one.modules[0].type_name for one in finder.profiles] == ["Net", "Other"]
    for profile in finder.profiles:
        assert (profile.flops.forward, profile.flops.backward, profile.samples) == (FORWARD, BACKWARD, BATCH)
        assert profile.timing is not None
        assert profile.timing.global_step_sec == FETCH_SEC + FORWARD_SEC + LOSS_SEC + BACKWARD_SEC + UPDATE_SEC
    first, second = finder.loops
    assert first.startswith("Net: FLOPs of step 4: 22.53 KFLOPs") and first.endswith(
        "lightning_flops_logs/profile.json"
    )
    assert second.startswith("Other: FLOPs of step ") and second.endswith("lightning_flops_logs/profile.loop2.json")
    assert torch_state() == before


def in_turns(now: FakeNow, *, turns: int, steps: int) -> Callable[[], None]:
    """Trains two models, whose optimizers exist from the beginning, so many times one after the other."""
    nets = [Net(now), Other(now)]
    optimizers = [SlowSGD(net.parameters(), now) for net in nets]

    def train() -> None:
        for _ in range(turns):
            for net, optimizer in zip(nets, optimizers, strict=True):
                steps_of(net, optimizer, steps, now)

    return train


def test_a_loop_whose_optimizers_exist_before_it_is_one_of_its_own_all_the_same(now: FakeNow, said: list[str]) -> None:
    profiles = found(said, in_turns(now, turns=1, steps=24)).profiles
    assert [(one.modules[0].type_name, one.flops.forward) for one in profiles] == [("Net", FORWARD), ("Other", FORWARD)]


OF_LATER_TURNS = " (of 3 turns, of each of which the first steps are in no figure)"

UNSEEN_OF_TURN = 3
"""Two updates in a row show that a loop has its turn again, and the step after them was not seen from its beginning."""


def test_models_that_take_turns_by_epochs_have_a_report_each_of_all_their_turns(now: FakeNow, said: list[str]) -> None:
    before = torch_state()
    finder = found(said, in_turns(now, turns=3, steps=24), peak_flops_per_sec=1e12)
    assert torch_state() == before
    assert [one.modules[0].type_name for one in finder.profiles] == ["Net", "Other"]
    assert [line.endswith(OF_LATER_TURNS) for line in finder.loops] == [True, True]
    for name in ("throughput", "throughput.loop2"):
        run, of_first = summary(name), 9  # that no other optimizer takes turns with it is known after six
        assert (steps_in(name), run.steps_counted, run.steps_unknown) == (72, 1, of_first + 2 * UNSEEN_OF_TURN)
        # With no batch of the other's, whose first steps show its turn, and no second of them.
        assert run.batches == run.steps_predicted
        assert run.batch_cost_sec.maximum <= 2 * (FETCH_SEC + FORWARD_SEC + LOSS_SEC + BACKWARD_SEC + UPDATE_SEC)
        seconds = run.batches * run.batch_cost_sec.average
        assert run.mfu == pytest.approx(run.batches * (FORWARD + BACKWARD) / (1e12 * seconds), rel=1e-12)
        assert any("trains in turn with others" in sentence for sentence in run.notes)


def test_a_loop_between_its_turns_holds_nothing_and_may_be_gone(now: FakeNow, said: list[str]) -> None:
    gone = []

    def train() -> None:
        net, other = Net(now), Other(now)
        optimizers = SlowSGD(net.parameters(), now), SlowSGD(other.parameters(), now)
        for _ in range(2):
            steps_of(net, optimizers[0], 24, now)
            steps_of(other, optimizers[1], 24, now)
        held = weakref.ref(net)
        del net, optimizers
        gc.collect()
        gone.append(held() is None)

    finder = found(said, train)
    assert gone == [True]
    assert len(finder.loops) == 2 and (steps_in("throughput"), steps_in("throughput.loop2")) == (48, 48)


def test_later_turns_are_in_the_figures_though_no_further_loop_is_profiled(
    now: FakeNow, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_flops.adapters.find_loop._MOST_LOOPS", 1)
    first, *rest = found(said, in_turns(now, turns=3, steps=24)).loops
    assert first.endswith(OF_LATER_TURNS) and steps_in("throughput") == 72
    assert rest == ["further ones were not profiled"]


def test_models_whose_turns_are_short_are_profiled_in_a_later_turn(now: FakeNow, said: list[str]) -> None:
    finder = found(said, in_turns(now, turns=5, steps=8))
    profiles = {one.modules[0].type_name: one for one in finder.profiles}
    assert sorted(profiles) == ["Net", "Other"] and len(finder.profiles) == 2
    assert [one.flops.forward for one in profiles.values()] == [FORWARD, FORWARD]
    assert [line.endswith(OF_LATER_TURNS.replace("3", "5")) for line in finder.loops] == [True, True]
    for name in ("throughput", "throughput.loop2"):
        assert (steps_in(name), summary(name).steps_unknown) == (40, 8 + 4 * UNSEEN_OF_TURN)


@pytest.mark.parametrize("first", [1, 3])
def test_a_loop_that_is_too_short_does_not_hide_the_next(now: FakeNow, said: list[str], first: int) -> None:
    nets = [Net(now), Other(now)]

    def train() -> None:
        for net, steps in zip(nets, (first, 30), strict=True):
            steps_of(net, SlowSGD(net.parameters(), now), steps, now)

    finder = found(said, train)
    assert [one.modules[0].type_name for one in finder.profiles] == ["Other"]
    assert len(finder.loops) == 2
    assert "profiled" in finder.loops[0] and finder.loops[1].startswith("Other: FLOPs of step")


LATENT = 4


class Generator(nn.Linear):
    """From random numbers to a row."""


class Discriminator(nn.Linear):
    """From a row to a number."""


# One product of each, over a batch.
MAKES, JUDGES = 2 * BATCH * LATENT * WIDE, 2 * BATCH * WIDE * 1


class Gan:
    """The models of a GAN and their optimizers."""

    def __init__(self, now: FakeNow) -> None:
        self.generator, self.discriminator = Generator(LATENT, WIDE), Discriminator(WIDE, 1)
        self.makes, self.judges = (
            SlowSGD(self.generator.parameters(), now),
            SlowSGD(self.discriminator.parameters(), now),
        )
        self._now = now

    def criticizes(self, steps: int) -> None:
        """The discriminator is trained alone."""
        for rows in loader(steps, self._now):
            made = self.generator(torch.randn(BATCH, LATENT)).detach()
            (self.discriminator(made).mean() - self.discriminator(rows).mean()).backward()
            self.judges.step()
            self.judges.zero_grad()

    def generates(self) -> None:
        """One update of the generator, through the discriminator."""
        (-self.discriminator(self.generator(torch.randn(BATCH, LATENT))).mean()).backward()
        self.makes.step()
        self.makes.zero_grad()
        self.judges.zero_grad()

    def imitates(self, steps: int) -> None:
        """The generator is trained alone, on rows that it should make of numbers."""
        for rows in loader(steps, self._now):
            (self.generator(rows[:, :LATENT]) - rows).square().mean().backward()
            self.makes.step()
            self.makes.zero_grad()

    def train(self, critics: int, steps: int = 14) -> None:
        for _ in range(steps):
            self.criticizes(critics)
            self.generates()


def is_of_both(profile: Profile, critics: int) -> None:
    # The critic: the generator, and the discriminator on both kinds of rows. The generator: each once.
    assert profile.flops.forward == critics * (MAKES + 2 * JUDGES) + MAKES + JUDGES
    # The critic has no gradient of its rows; the generator has one through the discriminator, whose weights get theirs.
    assert profile.flops.backward == critics * 2 * JUDGES + 2 * JUDGES + MAKES
    assert profile.params == LATENT * WIDE + WIDE + WIDE + 1
    assert {one.name: one.total.forward for one in profile.modules} == {
        "": profile.flops.forward,
        "Generator": (critics + 1) * MAKES,
        "Discriminator": (2 * critics + 1) * JUDGES,
    }
    assert profile.timing is not None and profile.timing.forward_sec is not None


@pytest.mark.parametrize("critics", [1, 5])
def test_the_report_of_a_gan_is_of_both_its_models(now: FakeNow, said: list[str], critics: int) -> None:
    profile = only(found(said, lambda: Gan(now).train(critics)))
    is_of_both(profile, critics)
    assert any("are the modules that its loop calls" in one and "of all of them" in one for one in profile.notes)
    assert not any("belong to no module" in one for one in profile.notes)


def profiles_after(alone: Callable[[], None], gan: Gan, critics: int, said: list[str]) -> list[Profile]:
    """What is found where *alone* runs before both models of *gan* are trained together."""

    def train() -> None:
        alone()
        gan.train(critics, steps=24)

    return found(said, train).profiles


ALONE = MAKES  # the generator on a batch, without its critic


@pytest.mark.parametrize("critics", [1, 5])
@pytest.mark.parametrize("alone", [3, 12, 16])
def test_a_gan_whose_generator_is_trained_alone_first_is_profiled_whole(
    alone: int, critics: int, now: FakeNow, said: list[str]
) -> None:
    gan = Gan(now)
    *first, both = profiles_after(lambda: gan.imitates(alone), gan, critics, said)
    # Until it has made six updates alone, others are waited for, and it is no loop of its own.
    assert [(one.flops.forward, one.modules[0].type_name) for one in first] == [(ALONE, "Generator")] * (alone > 6)
    is_of_both(both, critics)


@pytest.mark.parametrize("critics", [2, 5])
@pytest.mark.parametrize("alone", [1, 8, 16])
def test_a_gan_whose_discriminator_is_trained_alone_first_is_profiled_whole(
    alone: int, critics: int, now: FakeNow, said: list[str]
) -> None:
    gan = Gan(now)
    *first, both = profiles_after(lambda: gan.criticizes(alone), gan, critics, said)
    is_of_both(both, critics)
    assert [one.modules[0].type_name for one in first] == ["Discriminator"] * (alone + critics > 6)


@pytest.mark.parametrize("critics", [1, 3])
def test_a_gan_after_both_its_models_were_trained_alone_has_the_third_report(
    critics: int, now: FakeNow, said: list[str]
) -> None:
    gan = Gan(now)

    def train() -> None:
        gan.imitates(24)
        gan.criticizes(24)
        gan.train(critics, steps=24)

    finder = found(said, train)
    of_generator, of_discriminator, both = finder.profiles
    assert (of_generator.flops.forward, of_generator.modules[0].type_name) == (ALONE, "Generator")
    assert of_discriminator.modules[0].type_name == "Discriminator"
    is_of_both(both, critics)
    assert steps_in("throughput") == 24
    assert not any("later turns" in one for one in finder.loops)


def test_both_models_of_a_gan_are_found_though_they_have_as_many_tensors_and_the_critic_is_called_first(
    now: FakeNow, said: list[str]
) -> None:
    makes, judges = nn.Sequential(nn.Linear(LATENT, WIDE)), nn.Sequential(nn.Linear(WIDE, 1))
    of_critic, of_maker = SlowSGD(judges.parameters(), now), SlowSGD(makes.parameters(), now)

    def train() -> None:
        for rows in loader(14, now):
            judges(rows).mean().backward()
            made = makes(torch.randn(BATCH, LATENT))
            judges(made.detach()).mean().backward()
            of_critic.step()
            judges(made).mean().backward()
            of_maker.step()

    profile = only(found(said, train))
    assert profile.params == LATENT * WIDE + WIDE + WIDE + 1
    assert {one.name: one.total.forward for one in profile.modules if one.depth == 1} == {
        "Sequential": 3 * JUDGES,
        "Sequential_2": MAKES,
    }
    assert not any("belong to no module" in one for one in profile.notes)


def test_several_models_are_given_by_name(now: FakeNow) -> None:
    gan = Gan(now)
    models, optimizers = {"Generator": gan.generator, "Discriminator": gan.discriminator}, [gan.judges, gan.makes]
    with profile_training(models, optimizers, timing_steps=2, trace=False) as profiler:
        gan.train(1)
    assert profiler.profile is not None
    is_of_both(profiler.profile, 1)
    assert [left_on_object(one) for one in (*models.values(), *optimizers)] == [[]] * 4
    with pytest.raises(ConfigError, match="names without dots"):
        profile_training({"a.b": models["Generator"]})
    with pytest.raises(ConfigError, match="at least one"):
        profile_training({})
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got int"):
        profile_training({"one": 1})  # type: ignore[dict-item]


PLAIN = """
import torch
from torch import nn
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(14):
    net(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

FABRIC = """
import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger
from torch import nn
fabric = Fabric(accelerator="cpu", devices=1, loggers=CSVLogger("logs"))
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
net, optimizer = fabric.setup(net, torch.optim.AdamW(net.parameters()))
for _ in range(14):
    fabric.backward(net(torch.randn(8, 16)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""

ACCELERATE = """
import torch
from accelerate import Accelerator
from torch import nn
accelerator = Accelerator(cpu=True)
net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
for _ in range(14):
    accelerator.backward(net(torch.randn(8, 16)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""

TRAINER = """
from torch import nn
from torch.utils.data import Dataset
import torch
from transformers import Trainer, TrainingArguments

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    def forward(self, rows):
        return {"loss": self.body(rows).square().mean()}

rows = [{"rows": torch.randn(16)} for _ in range(8 * 14)]
arguments = TrainingArguments("out", use_cpu=True, per_device_train_batch_size=8, num_train_epochs=1, report_to=[],
                              save_strategy="no", disable_tqdm=True)
Trainer(Net(), arguments, train_dataset=rows).train()
"""

PROGRAMS = {
    "plain": (PLAIN, "torch", "lightning_flops_logs/profile.json"),
    "fabric": (FABRIC, "lightning.fabric", "logs/lightning_logs/version_0/profile.json"),
    "accelerate": (ACCELERATE, "accelerate", "lightning_flops_logs/profile.json"),
    "trainer": (TRAINER, "transformers", "out/lightning_flops_logs/profile.json"),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_an_unchanged_program_is_profiled_and_one_line_says_so(kind: str, in_a_folder: Path) -> None:
    program, framework, file = PROGRAMS[kind]
    Path("train.py").write_text(program)
    arguments = ["-m", "lightning_flops", "run", "--timing-steps", "2", "--trace", "false", "train.py"]
    # One of them has to import torch itself, one a framework that we wait for.
    imports = {"plain": (), "fabric": LIGHTNING}.get(kind, BEFORE_LIGHTNING)
    ended = run_fork(arguments, folder=in_a_folder, imports=imports, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert ended.returncode == 0, ended.stderr
    profile = Profile.from_json(Path(file).read_text())
    assert (profile.flops.forward, profile.flops.backward, profile.context.framework) == (FORWARD, BACKWARD, framework)
    (line,) = [one for one in (ended.stderr + ended.stdout).splitlines() if "FLOPs of step" in one]
    assert file in line and "22.53 KFLOPs" in line


OF_GAN = """
import torch
from torch import nn
from torch.utils.data import DataLoader

class Generator(nn.Linear):
    pass

class Discriminator(nn.Linear):
    pass

generator, discriminator = Generator(4, 16), Discriminator(16, 1)
makes, judges = torch.optim.Adam(generator.parameters()), torch.optim.RMSprop(discriminator.parameters())

def criticize(rows):
    judges.zero_grad()
    made = generator(torch.randn(8, 4)).detach()
    (discriminator(made).mean() - discriminator(rows).mean()).backward()
    judges.step()

def generate():
    makes.zero_grad()
    (-discriminator(generator(torch.randn(8, 4))).mean()).backward()
    makes.step()
"""

WARM_UP_OF_GENERATOR = """
for step, rows in enumerate(DataLoader(torch.randn(8 * 60, 16), batch_size=8)):
    if step < 30:
        makes.zero_grad()
        (generator(rows[:, :4]) - rows).square().mean().backward()
        makes.step()
    else:
        criticize(rows)
        generate()
"""

CRITIC_FIRST = """
for step, rows in enumerate(DataLoader(torch.randn(8 * 120, 16), batch_size=8)):
    criticize(rows)
    if step >= 30 and step % 3 == 2:
        generate()
"""


@pytest.mark.parametrize(
    ("program", "first", "critics"),
    [(WARM_UP_OF_GENERATOR, ("Generator", ALONE), 1), (CRITIC_FIRST, ("Discriminator", MAKES + 2 * JUDGES), 3)],
    ids=["generator", "discriminator"],
)
def test_a_gan_program_that_trains_one_model_alone_first_has_a_report_of_both(
    program: str, first: tuple[str, int], critics: int, in_a_folder: Path
) -> None:
    Path("train.py").write_text(OF_GAN + program)
    arguments = ["-m", "lightning_flops", "run", "--timing-steps", "2", "--trace", "false", "train.py"]
    ended = run_fork(arguments, folder=in_a_folder, imports=BEFORE_LIGHTNING, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert ended.returncode == 0, ended.stderr
    of_first, of_both = [
        Profile.from_json((Path("lightning_flops_logs") / name).read_text())
        for name in ("profile.json", "profile.loop2.json")
    ]
    assert (of_first.modules[0].type_name, of_first.flops.forward) == first
    is_of_both(of_both, critics)
    last = ended.stderr.splitlines()[-1]
    assert last.startswith(f"lightning-flops: trainings of this program: (1) {first[0]}: FLOPs of step ")
    assert "; (2) Generator and Discriminator: FLOPs of step " in last


TWO = PLAIN + PLAIN.replace("range(14)", "range(24)") + "torch.manual_seed(0)\n"


WITH_TRAINER = (
    """
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
Trainer(max_epochs=1, limit_train_batches=20, limit_val_batches=0, enable_progress_bar=False, logger=False,
        enable_checkpointing=False, enable_model_summary=False, accelerator="cpu").fit(BoringModel())
"""
    + PLAIN
)


def test_a_loop_after_a_trainers_fit_is_profiled_and_the_last_line_tells_of_both(in_a_folder: Path) -> None:
    Path("train.py").write_text(WITH_TRAINER)
    arguments = ["-m", "lightning_flops", "run", "--timing-steps", "2", "--trace", "false", "train.py"]
    ended = run_fork(arguments, folder=in_a_folder, imports=LIGHTNING, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert ended.returncode == 0, ended.stderr
    frameworks = [
        Profile.from_json((Path("lightning_flops_logs") / name).read_text()).context.framework
        for name in ("profile.json", "profile-2.json")
    ]
    assert frameworks == ["lightning.pytorch", "torch"]
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("lightning-flops: trainings of this program: (1) FLOPs of step 1: ")
    assert "; (2) Sequential: FLOPs of step 4: " in last


def test_the_last_line_tells_of_each_loop_of_a_program(in_a_folder: Path) -> None:
    Path("train.py").write_text(TWO)
    arguments = ["-m", "lightning_flops", "run", "--timing-steps", "2", "--trace", "false", "train.py"]
    ended = run_fork(arguments, folder=in_a_folder, imports=BEFORE_LIGHTNING, environment={"CUDA_VISIBLE_DEVICES": ""})
    assert ended.returncode == 0, ended.stderr
    for name in ("profile.json", "profile.loop2.json"):
        profile = Profile.from_json((Path("lightning_flops_logs") / name).read_text())
        assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("lightning-flops: trainings of this program: (1) Sequential: FLOPs of step ")
    assert "lightning_flops_logs/profile.json; (2) Sequential: FLOPs of step " in last
    assert last.endswith("lightning_flops_logs/profile.loop2.json.")
