"""DeepSpeed's ways to share the work: the job's report has every rank's FLOPs once, and the model whole."""

from __future__ import annotations

import pytest

from lightning_flops.schema.profile import Profile
from lightning_flops.schema.ranks import RanksProfile
from tests.deepspeed.engines_truth import BACKWARD, FORWARD, PARAMS
from tests.deepspeed.launching import INSTALLED, launch
from tests.ranks.launching import profile_in

pytestmark = [pytest.mark.skipif(not INSTALLED, reason="needs deepspeed"), pytest.mark.timeout(280)]


def profiles(module: str, scenario: str, *, ranks: int) -> list[Profile]:
    return [profile_in(returned) for returned in launch(module, ranks=ranks)(scenario)]


def job_of(profiles: list[Profile]) -> RanksProfile:
    """What rank 0 says of the job; the others say nothing of it."""
    first, *others = profiles
    assert all(other.ranks is None for other in others)
    assert first.ranks is not None
    assert (first.ranks.world_size, first.ranks.answered) == (len(profiles), len(profiles))
    return first.ranks


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_zero_shares_parameters_and_no_flops(ranks: int, stage: int, accumulate: int) -> None:
    job = job_of(profiles("scenarios_zero", f"zero_{stage}_accumulate_{accumulate}", ranks=ranks))
    assert (job.flops.forward, job.flops.backward) == (ranks * accumulate * FORWARD, ranks * accumulate * BACKWARD)
    assert job.flops_of_model is not None
    assert job.flops_of_model.model == accumulate * (FORWARD + BACKWARD)
    assert (job.params, job.trainable_params) == (PARAMS, PARAMS)


# As scenarios_pipeline says it, which imports DeepSpeed: three micro-steps of four samples.
ROWS, IN, HIDDEN, OUT = 3 * 4, 8, 16, 4
LAYERS = [2 * ROWS * size for size in (IN * HIDDEN, HIDDEN**2, HIDDEN**2, HIDDEN * OUT)]
"""FLOPs of each layer's forward; backward it costs that for its weights and, but for the first, for its inputs."""
LAYER_PARAMS = [IN * HIDDEN + HIDDEN, HIDDEN**2 + HIDDEN, HIDDEN**2 + HIDDEN, HIDDEN * OUT + OUT]


@pytest.mark.parametrize(
    ("module", "scenario", "stages", "copies"),
    [
        ("scenarios_two_parallel", "attached", 2, 1),
        ("scenarios_four_parallel", "four_stages", 4, 1),
        ("scenarios_four_parallel", "two_pipelines", 2, 2),
    ],
)
def test_stages_of_a_pipeline_add_up_to_the_model_and_its_copies_to_the_job(
    module: str, scenario: str, stages: int, copies: int
) -> None:
    job = job_of(profiles(module, scenario, ranks=stages * copies))
    forward, backward = sum(LAYERS), 2 * sum(LAYERS) - LAYERS[0]
    assert (job.flops.forward, job.flops.backward) == (copies * forward, copies * backward)
    assert job.flops_of_model is not None
    assert (job.flops_of_model.forward, job.flops_of_model.backward) == (forward, backward)
    assert job.params == sum(LAYER_PARAMS)
    each = len(LAYERS) // stages
    assert [(one.stage, one.params, one.flops.forward) for one in job.stages] == [
        (
            stage,
            sum(LAYER_PARAMS[each * stage : each * (stage + 1)]),
            sum(LAYERS[each * stage : each * (stage + 1)]),
        )
        for stage in range(stages)
    ]


def test_a_weight_that_two_stages_share_is_one_parameter_of_the_model() -> None:
    job = job_of(profiles("scenarios_two_parallel", "tied", ranks=2))
    assert job.params == IN * IN + 2 * (IN * IN + IN)
    assert job.flops.forward == 4 * 2 * ROWS * IN * IN


@pytest.mark.parametrize(("ranks", "pairs"), [(2, 1), (4, 2)])
def test_ranks_of_a_sequence_share_its_flops_and_samples(ranks: int, pairs: int) -> None:
    module = "scenarios_two_parallel" if ranks == 2 else "scenarios_four_parallel"
    every = profiles(module, "sequences", ranks=ranks)
    job = job_of(every)
    # Three sequences of six tokens, eight wide, with two heads: a projection to 24, and two products of the attention.
    forward = 2 * 3 * 6 * 8 * 24 + 2 * 2 * 3 * 2 * 6 * 6 * 4
    assert job.flops.forward == pairs * forward
    assert job.flops_of_model is not None and job.flops_of_model.forward == forward
    assert job.params == 3 * 8 * 8


def test_weights_that_deepspeed_cut_count_once_in_the_model() -> None:
    job = job_of(profiles("scenarios_two_parallel", "automatic_tensor_parallel", ranks=2))
    # Three samples through 8 -> 32 -> 8 in two halves, and through the head, 8 -> 3, on both ranks.
    assert job.flops.forward == 2 * 2 * 3 * 8 * 32 + 2 * (2 * 3 * 8 * 3)
    assert job.flops_of_model is not None and job.flops_of_model.forward == job.flops.forward
    assert job.params == (8 * 32 + 32) + (32 * 8 + 8) + 2 * 8 + (8 * 3 + 3)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_other_experts_are_all_of_the_job(ranks: int) -> None:
    module = "scenarios_two_parallel" if ranks == 2 else "scenarios_four_parallel"
    every = profiles(module, "routed", ranks=ranks)
    job = job_of(every)
    assert job.flops.forward == sum(profile.flops.forward for profile in every)
    # Four experts of 8 x 8 with a bias, a gate without, and a head.
    assert job.params == 4 * (8 * 8 + 8) + 4 * 8 + (8 * 3 + 3)
