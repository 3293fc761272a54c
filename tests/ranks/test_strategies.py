"""Lightning's strategies on two and on four ranks of gloo: FLOPs of every rank by hand, the model whole, no bit moved.

What Lightning and torch keep for GPUs has a stand-in here. FSDP1 and communication hooks run in subclasses of their
strategies. ``context_parallel`` does not run on a CPU (flash attention has no sharding strategy there, the plain one
mixes tensors), so the ranks gather keys and values themselves, on a mesh with a dimension of that name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from lightning_flops.schema.profile import Profile
from tests.analysis.in_memory import known
from tests.ranks.launching import launch, profile_in
from tests.ranks.strategies_truth import (
    BATCH,
    OUT,
    PEAK_FLOPS_PER_SEC,
    TOKENS,
    WIDTH,
    Cost,
    attention_cost,
    net_cost,
    net_params,
)

pytestmark = pytest.mark.timeout(280)


@dataclass(frozen=True)
class Expected:
    """What is known of a scenario by hand; of each rank, or the same for all."""

    costs: list[Cost]
    params: int
    local_params: list[int]
    dp: int = 1
    tp: int = 1
    cp: int = 1
    micro_steps: int = 1
    tokens_per_sample: int | None = None


WHOLE = net_params()
EVENLY = [net_cost()] * 4

EXPECTED = {
    "ddp_accumulating": Expected(EVENLY[:2], WHOLE, [WHOLE] * 2, dp=2, micro_steps=3),
    # Each layer is a flat parameter, cut in two (45 elements of the first into 23 and 22), and the norm another.
    "fsdp1": Expected([net_cost(hidden=5)] * 2, net_params(hidden=5), [23 + 24 + 18 + 8, 22 + 24 + 18 + 8], dp=2),
    # Each parameter is cut by its rows: the first layer's five into three and two.
    "fsdp2": Expected(
        [net_cost(hidden=5)] * 2,
        net_params(hidden=5),
        [3 * 8 + 3 + (4 * 5 + 4) + 2 * 4 + (2 * 8 + 2), 2 * 8 + 2 + (4 * 5 + 4) + 2 * 4 + (2 * 8 + 2)],
        dp=2,
    ),
    # Half of the first two layers' work; the head is whole on both.
    "tensors": Expected([net_cost(hidden=8)] * 2, WHOLE, [8 * 8 + 8 + 8 * 8 + 8 + 16 + 36] * 2, tp=2),
    # Half of everything; the second bias and the norm are on both.
    "sequences": Expected(
        [net_cost(BATCH * TOKENS, hidden=8, head=2)] * 2,
        WHOLE,
        [8 * 8 + 8 + 8 * 8 + 8 + 16 + 2 * 8 + 2] * 2,
        tp=2,
        tokens_per_sample=TOKENS,
    ),
    "contexts": Expected(
        [attention_cost(BATCH, tokens=TOKENS // 2, of=TOKENS)] * 2,
        3 * WIDTH * WIDTH + 3 * WIDTH,
        [3 * WIDTH * WIDTH + 3 * WIDTH] * 2,
        cp=2,
        tokens_per_sample=TOKENS,
    ),
    "fsdp1_hybrid": Expected(EVENLY, WHOLE, [WHOLE // 2] * 4, dp=4),
    "fsdp2_tensors": Expected(
        [net_cost(hidden=8)] * 4, WHOLE, [(8 * 8 + 8 + 8 * 8 + 8 + 16 + 36) // 2] * 4, dp=2, tp=2
    ),
}


@dataclass(frozen=True)
class Case:
    """A scenario, what is known of it, and what each rank returned."""

    truth: Expected
    returned: list[dict[str, Any]]
    profiles: list[Profile]

    ranks: int
    flops: tuple[int, int]  #: Forward and backward of all ranks.


def case_of(name: str) -> Case:
    truth = EXPECTED[name]
    returned, costs = launch("tests.ranks.scenarios_strategies", ranks=len(truth.costs))(name), truth.costs
    forward, backward = sum(cost.forward for cost in costs), sum(cost.backward for cost in costs)
    flops = truth.micro_steps * forward, truth.micro_steps * backward
    return Case(truth, returned, [profile_in(one) for one in returned], len(costs), flops)


@pytest.fixture(params=EXPECTED)
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


def test_flops_and_parameters_of_each_rank_are_its_share_by_hand(case: Case) -> None:
    steps = case.truth.micro_steps
    for profile, cost, local in zip(case.profiles, case.truth.costs, case.truth.local_params, strict=True):
        assert (profile.flops.forward, profile.flops.backward) == (steps * cost.forward, steps * cost.backward)
        assert profile.flops.recompute == profile.flops.optimizer == profile.outside.total == 0
        assert not profile.uncounted and not profile.lower_bound
        assert profile.params == profile.trainable_params == case.truth.params
        assert profile.local_params == local


def test_ranks_are_told_apart_by_what_they_share(case: Case) -> None:
    truth = case.truth
    for rank, profile in enumerate(case.profiles):
        context = profile.context
        assert (context.rank, context.world_size) == (rank, case.ranks)
        assert (context.dp_size, context.tp_size, context.cp_size) == (truth.dp, truth.tp, truth.cp)
        assert (context.pp_size, context.sp_size, context.ep_size) == (1, 1, 1)
        assert truth.dp * truth.tp * truth.cp == case.ranks


def test_training_does_not_notice(case: Case) -> None:
    for rank, returned in enumerate(case.returned):
        assert returned["differs"] == []
        assert len(set(returned["losses"])) == len(returned["losses"]) >= 10  # no two alike: something was trained
        names = [] if rank else ["profile.html", "profile.json", "profile.txt", "throughput.json"]
        assert returned["files"] == [f"lightning_flops/{name}" for name in names]


def test_the_job_is_all_ranks_together(case: Case) -> None:
    truth, (first, *others) = case.truth, case.profiles
    assert all(other.ranks is None for other in others)
    job = known(first.ranks)
    assert (job.world_size, job.answered, job.absences) == (case.ranks, case.ranks, {})
    assert (job.flops.forward, job.flops.backward, job.flops.recompute) == (*case.flops, 0)
    assert (job.params, job.trainable_params) == (truth.params, truth.params)
    # Ranks with different data have a copy of the model each.
    copy = known(job.flops_of_model)
    assert (truth.dp * copy.forward, truth.dp * copy.backward) == case.flops
    each = [truth.micro_steps * (cost.forward + cost.backward) for cost in truth.costs]
    assert [one.model_flops for one in job.ranks] == each


def test_rates_of_the_job_count_samples_once_for_ranks_that_share_them_and_all_devices(case: Case) -> None:
    truth, rates = case.truth, known(case.profiles[0].ranks).rates
    assert [profile.samples for profile in case.profiles] == [truth.micro_steps * BATCH] * case.ranks
    seconds = [known(profile.timing).global_step_sec for profile in case.profiles]
    per_sec = sum(truth.micro_steps * BATCH / one for one in seconds) * truth.dp / case.ranks
    assert rates.samples_per_sec == pytest.approx(per_sec, rel=1e-9)
    tokens = truth.tokens_per_sample
    assert rates.tokens_per_sec == (None if tokens is None else pytest.approx(per_sec * tokens, rel=1e-9))
    assert rates.mfu == pytest.approx(sum(case.flops) / (PEAK_FLOPS_PER_SEC * sum(seconds)), rel=1e-12)


@pytest.mark.parametrize("name", ["fsdp1", "fsdp2", "tensors"])
def test_modules_keep_their_names_and_have_their_parameters_in_full(name: str) -> None:
    hidden = 16 if name == "tensors" else 5
    for profile in case_of(name).profiles:
        assert {module.name: module.params for module in profile.modules} == {
            "": net_params(hidden=hidden),
            "net": net_params(hidden=hidden),
            "net.first": 8 * hidden + hidden,
            "net.second": hidden * 8 + 8,
            "net.norm": 2 * WIDTH,
            "net.head": WIDTH * OUT + OUT,
        }
