"""Layers of experts that are spread over ranks: parameters of the whole model, FLOPs of the tokens that came."""

from __future__ import annotations

import pytest

from lightning_flops.report.text import render_text
from lightning_flops.schema.profile import Profile
from tests.deepspeed.launching import INSTALLED, OLD, launch, profile_in

pytestmark = pytest.mark.skipif(not INSTALLED, reason="needs deepspeed")

# As scenarios_groups says it, which imports DeepSpeed.
TOKENS, WIDTH, EXPERTS, CLASSES = 16, 8, 4, 3
EP_SIZE = 2
BUSIEST = {2: (9, 9), 4: (9, 9, 5, 5)}
"""Most tokens that any rank of a rank's group sends to one expert, by the number of ranks: every expert's buffer."""

EXPERT_PARAMS = WIDTH * WIDTH + WIDTH
OTHER_PARAMS = EXPERTS * WIDTH + WIDTH * CLASSES + CLASSES
EXPERTS_NAME = "moe.deepspeed_moe.experts"


def profiles(ranks: int) -> list[Profile]:
    launched = launch("scenarios_two_parallel" if ranks == 2 else "scenarios_four_parallel", ranks=ranks)
    return [profile_in(returned) for returned in launched("routed")]


@pytest.mark.parametrize("ranks", [2, 4])
def test_flops_of_experts_are_those_of_the_tokens_that_were_routed_to_them(ranks: int) -> None:
    for profile, busiest in zip(profiles(ranks), BUSIEST[ranks], strict=True):
        gate, head = 2 * TOKENS * WIDTH * EXPERTS, 2 * TOKENS * WIDTH * CLASSES
        # DeepSpeed 0.16 sorts the tokens into the buffers, and back, by products with all places of all buffers.
        sorting = 2 * TOKENS * (EXPERTS * busiest) * WIDTH if OLD else 0
        # A rank computes two of the four experts, each on a buffer from either rank of its group.
        expert = 2 * (EP_SIZE * busiest) * WIDTH * WIDTH
        # How many tokens came decides the buffers, so the window counts several steps, of the same batch.
        steps = len(profile.counted_steps)
        forwards = {module.name: module.total.forward / steps for module in profile.modules}
        assert forwards[f"{EXPERTS_NAME}.deepspeed_experts.0"] == expert
        assert forwards[f"{EXPERTS_NAME}.deepspeed_experts.1"] == expert
        assert forwards["moe.deepspeed_moe.gate"] == gate
        assert profile.flops.forward == gate + head + 2 * expert + 2 * sorting
        # The tokens need no gradient: neither the gate's product nor the experts' has one to send back.
        assert profile.flops.backward == gate + 2 * head + 2 * expert + 2 * sorting
        assert not profile.uncounted


@pytest.mark.parametrize("ranks", [2, 4])
def test_parameters_of_the_model_are_those_of_all_experts_and_once_the_rest(ranks: int) -> None:
    for profile in profiles(ranks):
        params = {module.name: module.params for module in profile.modules}
        assert profile.params == profile.trainable_params == OTHER_PARAMS + EXPERTS * EXPERT_PARAMS
        assert params[EXPERTS_NAME] == EXPERTS * EXPERT_PARAMS
        assert profile.local_params == OTHER_PARAMS + EXPERTS // EP_SIZE * EXPERT_PARAMS


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_with_other_experts_see_different_data(ranks: int) -> None:
    for profile in profiles(ranks):
        context = profile.context
        assert (context.world_size, context.dp_size, context.ep_size) == (ranks, ranks, EP_SIZE)
        assert profile.timing is not None
        assert profile.samples == TOKENS
        assert profile.rates.samples_per_sec == ranks * TOKENS / profile.timing.global_step_sec


def test_the_report_names_the_expert_parallel_ranks() -> None:
    text = render_text(profiles(2)[0], detailed=True)
    assert "rank 0 of 2 (dp 2, ep 2)" in text
    assert f"params of model:{'':55} {OTHER_PARAMS + EXPERTS * EXPERT_PARAMS}" in text
