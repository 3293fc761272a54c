"""Phases of loops that people write: FLOPs by hand, and seconds by a clock that the test lets go by."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_flops import Profile, profile_training
from lightning_flops.pytorch import TrainingProfiler
from lightning_flops.report.scalars import profile_scalars
from tests.fake_clock import FakeNow
from tests.results import profile_of

ROWS, WIDTH, TOKENS = 3, 4, 5
PEAK = 1e6
FORWARD = 2 * ROWS * WIDTH * WIDTH


class Policy(nn.Module):
    """One matrix, whose calls take time, and ``generate`` more of it."""

    def __init__(self, now: FakeNow, seconds: float) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.now, self.seconds = now, seconds

    def forward(self, rows: Tensor) -> Tensor:
        self.now.sleep(self.seconds)
        output: Tensor = self.layer(rows)
        return output

    def generate(self, rows: Tensor) -> Tensor:
        """Calls itself for each token, and draws it."""
        for _ in range(TOKENS):
            rows = self(rows)
            self.now.sleep(0.25)
        return rows.new_zeros(ROWS, WIDTH + TOKENS)


class Checkpointed(Policy):
    def forward(self, rows: Tensor) -> Tensor:
        self.now.sleep(self.seconds)
        output: Tensor = checkpoint(lambda given: self.layer(given).sigmoid(), rows, use_reentrant=False)
        return output


class Reentrant(Policy):
    """Its checkpoint runs the forward without gradients, and again in the backward; so does a frozen part, once."""

    def forward(self, rows: Tensor) -> Tensor:
        self.now.sleep(self.seconds)
        with torch.no_grad():
            rows = rows + 0 * self.layer(rows)
        output: Tensor = checkpoint(self.layer, rows.requires_grad_(), use_reentrant=True)
        return output


Step = Callable[[Policy, Policy, Tensor, TrainingProfiler, FakeNow], object]


def profiled(now: FakeNow, step: Step, kind: type[Policy] = Policy, **given: Any) -> Profile:
    torch.manual_seed(0)
    policy, reference = kind(now, 0.5), Policy(now, 3.0)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    settings: dict[str, Any] = {"profile_step": 2, "timing_steps": 2, "trace": False, "lines": False, **given}
    batches = 6 + settings["timing_steps"]
    loader: Any = torch.utils.data.DataLoader(torch.ones(batches * ROWS, WIDTH), batch_size=ROWS)  # type: ignore[arg-type]
    with profile_training(policy, optimizer, peak_flops_per_sec={"float32": PEAK}, **settings) as profiler:
        for rows in loader:
            step(policy, reference, rows, profiler, now)
            policy(rows).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    profile = profile_of(profiler)
    assert profile.timing is not None
    counted = [one.flops or 0 for one in profile.phases.values() if not one.estimated]
    assert sum(counted) in (0, profile.flops.model)
    return profile


def test_what_a_model_runs_without_gradients_inside_its_forward_is_no_phase(now: FakeNow) -> None:
    profile = profiled(now, lambda *_: None, Reentrant)
    assert profile.phases == {}
    # In the forward the frozen part and the checkpoint's; its second run is the backward's.
    assert (profile.flops.forward, profile.flops.backward) == (2 * FORWARD, 2 * FORWARD)
    assert profile.flops.recompute == FORWARD


def rolls_out_and_scores(
    policy: Policy, reference: Policy, rows: Tensor, profiler: TrainingProfiler, now: FakeNow
) -> None:
    with torch.no_grad():
        policy.generate(rows)
        policy(rows)  # the old policy
        reference(rows)
    now.sleep(2.0)  # a reward by a rule


def test_what_runs_in_generate_is_rollout_and_a_call_without_gradients_outside_of_it_is_scoring(now: FakeNow) -> None:
    phases = profiled(now, rolls_out_and_scores).phases
    assert [*phases] == ["rollout", "scoring", "training", "rest"]
    assert {name: one.flops for name, one in phases.items()} == {
        "rollout": TOKENS * FORWARD,
        "scoring": 2 * FORWARD,
        "training": 2 * FORWARD,  # the rows need no gradient
        "rest": 0,
    }
    assert {name: one.seconds for name, one in phases.items()} == pytest.approx(
        {"rollout": TOKENS * 0.75, "scoring": 3.5, "training": 0.5, "rest": 2.0}
    )
    rollout = phases["rollout"]
    assert rollout.mfu == pytest.approx(TOKENS * FORWARD / (PEAK * TOKENS * 0.75))
    assert (rollout.tokens, rollout.completion_tokens) == (ROWS * (WIDTH + TOKENS), ROWS * TOKENS)
    assert rollout.tokens_per_sec == pytest.approx(ROWS / 0.75)


class WithoutGradients(Policy):
    @torch.no_grad()
    def generate(self, rows: Tensor) -> Tensor:
        return super().generate(rows)


class WithGuide(Policy):
    def generate(self, rows: Tensor) -> Tensor:
        """Asks a model that does not train, and trains on what it makes."""
        with torch.no_grad():
            rows = rows + self.now.guide(rows)  # type: ignore[attr-defined]
        return self(rows)  # type: ignore[no-any-return]


def test_a_generate_that_switches_gradients_off_by_itself_is_rollout(now: FakeNow) -> None:
    profile = profiled(now, lambda policy, reference, rows, *_: policy.generate(rows), WithoutGradients)
    rollout = profile.phases["rollout"]
    assert rollout.flops == TOKENS * FORWARD
    assert rollout.seconds == pytest.approx(TOKENS * 0.75)
    assert rollout.completion_tokens == ROWS * TOKENS


def test_a_phase_named_by_hand_keeps_the_generate_in_it_that_switches_gradients_off_by_itself(now: FakeNow) -> None:
    def rolls_out_and_searches(
        policy: Policy, reference: Policy, rows: Tensor, profiler: TrainingProfiler, now: FakeNow
    ) -> None:
        policy.generate(rows)  # so that its calls are heard
        with profiler.phase("search"):
            policy.generate(rows)

    profile = profiled(now, rolls_out_and_searches, WithoutGradients)
    assert profile.phases["rollout"].flops == profile.phases["search"].flops == TOKENS * FORWARD


def test_a_generate_that_trains_is_training_whatever_model_it_asks(now: FakeNow) -> None:
    now.guide = Policy(now, 1.0)  # type: ignore[attr-defined]
    profile = profiled(now, lambda policy, reference, rows, *_: policy.generate(rows).sum().backward(), WithGuide)
    assert "rollout" not in profile.phases
    assert profile.phases["scoring"].flops == FORWARD


def test_what_a_checkpoint_repeats_is_in_no_phase_s_flops_and_mfu(now: FakeNow) -> None:
    profile = profiled(now, rolls_out_and_scores, Checkpointed)
    assert profile.flops.recompute == FORWARD
    training = profile.phases["training"]
    assert training.flops == 2 * FORWARD
    assert training.mfu == pytest.approx(2 * FORWARD / (PEAK * 0.5))


def test_the_summary_the_table_the_json_and_the_scalars_have_the_phases(now: FakeNow) -> None:
    profile = profiled(now, rolls_out_and_scores)
    assert "Phases: rollout 38.5% (MFU 0.01%) · scoring 35.9% (MFU 0.01%) · training 5.13%" in str(profile)
    assert "Phases of a global step" in str(profile)
    assert Profile.from_json(profile.to_json()).phases == profile.phases
    scalars = profile_scalars(profile)
    assert scalars["flops_monitor/rollout_ratio"] == pytest.approx(3.75 / 9.75)
    assert scalars["flops_monitor/scoring_mfu"] == pytest.approx(2 * FORWARD / (PEAK * 3.5))


class Value(nn.Module):
    """A number for each row, by a matrix of one column."""

    def __init__(self, now: FakeNow, seconds: float) -> None:
        super().__init__()
        self.layer, self.now, self.seconds = nn.Linear(WIDTH, 1, bias=False), now, seconds

    def forward(self, rows: Tensor) -> Tensor:
        self.now.sleep(self.seconds)
        output: Tensor = self.layer(rows)
        return output


@pytest.mark.parametrize(("says_all_ends", "profile_step"), [(False, 8), (True, 1)])
def test_a_step_of_ppo_has_its_rollout_its_scoring_and_all_epochs_over_minibatches(
    says_all_ends: bool, profile_step: int, now: FakeNow
) -> None:
    epochs, minibatches, rows_each = 2, 3, 1
    policy, reference, reward, value = Policy(now, 0.5), Policy(now, 3.0), Value(now, 2.0), Value(now, 1.0)
    optimizer = torch.optim.SGD([*policy.parameters(), *value.parameters()], lr=0.1)
    loader: Any = torch.utils.data.DataLoader(torch.ones(12 * ROWS, WIDTH), batch_size=ROWS)  # type: ignore[arg-type]
    settings: dict[str, Any] = {"profile_step": profile_step, "timing_steps": 3, "trace": False, "lines": False}
    models, known = {"policy": policy, "value": value}, None if says_all_ends else optimizer
    with profile_training(models, known, **settings) as profiler:
        for rows in loader:
            with torch.no_grad():
                policy.generate(rows)
                for scores in (policy, reference, reward, value):
                    scores(rows)
            with profiler.phase("advantages"):
                now.sleep(1.5)
            for _ in range(epochs):
                for piece in rows.split(rows_each):
                    (policy(piece).sum() + value(piece).sum()).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            profiler.step()
    profile = profile_of(profiler)
    a_row, a_value = 2 * WIDTH * WIDTH, 2 * WIDTH  # a forward; its backward is as much again, as rows need no gradient
    assert {name: one.flops for name, one in profile.phases.items()} == {
        "rollout": TOKENS * ROWS * a_row,
        "scoring": ROWS * (2 * a_row + 2 * a_value),
        "training": epochs * minibatches * rows_each * 2 * (a_row + a_value),
        "advantages": 0,
        "rest": 0,
    }
    assert {name: one.seconds for name, one in profile.phases.items()} == pytest.approx(
        {"rollout": TOKENS * 0.75, "scoring": 6.5, "training": 6 * 1.5, "advantages": 1.5, "rest": 0.0}
    )
    assert profile.timing is not None
    assert sum(one.seconds or 0.0 for one in profile.phases.values()) == pytest.approx(profile.timing.global_step_sec)
    assert sum(one.flops or 0 for one in profile.phases.values()) == profile.flops.model


def test_a_name_by_hand_wins_and_what_it_names_belongs_to_the_step(now: FakeNow) -> None:
    def step(policy: Policy, reference: Policy, rows: Tensor, profiler: TrainingProfiler, now: FakeNow) -> None:
        with profiler.phase("act"), torch.no_grad():
            policy.eval()  # otherwise an evaluation
            policy(rows)
            reference.generate(rows)
            now.sleep(1.0)
            policy.train()

    phases = profiled(now, step).phases
    assert [*phases] == ["training", "act", "rest"]
    assert phases["act"].flops == (1 + TOKENS) * FORWARD
    assert phases["act"].seconds == pytest.approx(0.5 + TOKENS * 3.25 + 1.0)


def test_a_step_that_only_trains_shows_nothing_of_phases(now: FakeNow) -> None:
    profile = profiled(now, lambda *_: None)
    assert profile.phases == {}
    assert "Phases" not in str(profile)
    assert not any("ratio" in tag for tag in profile_scalars(profile) if tag.startswith("flops_monitor"))


def test_a_model_that_trains_and_is_called_for_a_metric_in_every_step_is_named(now: FakeNow) -> None:
    def advised(*asked: str) -> dict[str, tuple[str, float | None]]:
        def step(policy: Policy, reference: Policy, rows: Tensor, profiler: TrainingProfiler, now: FakeNow) -> None:
            with torch.no_grad():
                for name in asked:
                    {"policy": policy, "reference": reference}[name](rows)

        profile = profiled(now, step, timing_steps=8)
        of_process = "graph_breaks", "recompilations"  # counted since it began: other tests may have compiled
        return {one.rule: (one.fact, one.saves) for one in profile.advice if one.rule not in of_process}

    # A forward takes 0.5 s, the one that trains and the one without gradients; reference takes 3 s.
    fact = "The model that trains is called without gradients as well: 96 FLOPs and 500 ms a step, 50.0% of it."
    assert advised("policy") == {"metric_forward": (fact, 0.5)}
    assert advised("reference") == advised("policy", "reference") == {}


def test_an_evaluation_is_no_scoring(now: FakeNow) -> None:
    def step(policy: Policy, reference: Policy, rows: Tensor, profiler: TrainingProfiler, now: FakeNow) -> None:
        with profiler.outside_of_steps(), torch.no_grad():
            reference(rows)
            policy.generate(rows)

    assert profiled(now, step).phases == {}


def test_a_loop_that_evaluates_after_every_step_has_no_phases_and_steps_that_are_timed_as_a_whole(now: FakeNow) -> None:
    policy = Policy(now, 0.5)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    loader: Any = torch.utils.data.DataLoader(torch.ones(24 * ROWS, WIDTH), batch_size=ROWS)  # type: ignore[arg-type]
    held_out = torch.ones(2 * ROWS, WIDTH)
    with profile_training(policy, optimizer, profile_step=2, timing_steps=16, trace=False, lines=False) as profiler:
        for rows in loader:
            policy(rows).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            policy.eval()
            with torch.no_grad():
                policy(held_out)
            policy.train()
    profile = profile_of(profiler)
    assert profile.phases == {} and profile.flops.model == 2 * FORWARD
    assert profile.timing is not None
    assert (profile.timing.timed_steps, profile.timing.whole_steps) == (8, 8)
    assert profile.timing.global_step_sec == 0.5 and profile.timing.excluded_sec == {"validation": 16 * 0.5}


def test_tokens_of_a_generate_that_calls_another_are_counted_once_and_none_of_an_evaluation(now: FakeNow) -> None:
    class Wrapper(Policy):
        def generate(self, rows: Tensor) -> Tensor:
            return super().generate(rows)

    def step(policy: Policy, reference: Policy, rows: Tensor, profiler: TrainingProfiler, now: FakeNow) -> None:
        policy.__class__ = Wrapper
        with torch.no_grad():
            policy.generate(rows)
            with profiler.outside_of_steps():
                reference.generate(rows)

    rollout = profiled(now, step).phases["rollout"]
    assert (rollout.tokens, rollout.completion_tokens) == (ROWS * (WIDTH + TOKENS), ROWS * TOKENS)


def test_a_generate_inside_a_rollout_that_is_named_by_hand_has_its_tokens(now: FakeNow) -> None:
    def step(policy: Policy, reference: Policy, rows: Tensor, profiler: TrainingProfiler, now: FakeNow) -> None:
        with profiler.phase("rollout"), torch.no_grad():
            now.sleep(1.0)
            policy.generate(rows)

    rollout = profiled(now, step).phases["rollout"]
    assert rollout.completion_tokens == ROWS * TOKENS
    assert rollout.seconds == pytest.approx(1.0 + TOKENS * 0.75)


def test_what_trains_inside_generate_is_training(now: FakeNow) -> None:
    def step(policy: Policy, reference: Policy, rows: Tensor, profiler: TrainingProfiler, now: FakeNow) -> None:
        policy.generate(rows).sum()

    assert profiled(now, step).phases == {}


def test_a_step_without_the_rollout_of_the_counted_one_is_not_compared_with_it(now: FakeNow) -> None:
    turns = []

    def step(policy: Policy, reference: Policy, rows: Tensor, profiler: TrainingProfiler, now: FakeNow) -> None:
        turns.append(rows)
        if len(turns) % 2:  # the third step is counted
            with torch.no_grad():
                policy.generate(rows)

    profile = profiled(now, step, timing_steps=1)
    assert (profile.counted_steps, profile.timed_steps) == ((2,), (4,))
    assert profile.phases["rollout"].flops == TOKENS * FORWARD
    assert profile.phases["rollout"].seconds == pytest.approx(TOKENS * 0.75)


def test_flops_of_a_rollout_by_a_server_are_an_estimate_and_in_no_sum(
    now: FakeNow, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Client:
        def generate(self, prompts: list[list[int]]) -> dict[str, Any]:
            now.sleep(4.0)
            return {"prompt_ids": prompts, "completion_ids": [[0] * TOKENS for _ in prompts]}

    client, generate = Client(), Client.generate
    monkeypatch.setitem(sys.modules, "trl.generation.vllm_client", SimpleNamespace(VLLMClient=Client))

    def step(policy: Policy, reference: Policy, rows: Tensor, profiler: TrainingProfiler, now: FakeNow) -> None:
        client.generate([[0] * WIDTH] * ROWS)

    profile = profiled(now, step, tokens_per_sample=WIDTH)
    rollout = profile.phases["rollout"]
    assert (rollout.flops, rollout.estimated) == (FORWARD * (WIDTH + TOKENS) // WIDTH, True)
    assert rollout.seconds == pytest.approx(4.0)
    assert rollout.mfu is None
    assert (rollout.tokens, rollout.completion_tokens) == (ROWS * (WIDTH + TOKENS), ROWS * TOKENS)
    assert Client.generate is generate
    assert "A server generated" in str(profile)
    unknown = profiled(now, step).phases["rollout"]  # how many tokens the training has is not known
    assert (unknown.flops, unknown.estimated) == (None, False)
    assert unknown.seconds == pytest.approx(4.0)
