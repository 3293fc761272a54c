"""Two ranks whose batches have other sizes in every step: what a rank says of its FLOPs is right, or n/a."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_flops.schema.throughput import ThroughputSummary
from tests.ranks.launching import launch
from tests.ranks.scenarios_lengths import STEPS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(280)]


def known(returned: dict[str, Any]) -> ThroughputSummary:
    summary = ThroughputSummary.from_json(returned["throughput"])
    assert returned["wrong"] == 0
    assert summary.steps_counted + summary.steps_predicted + summary.steps_unknown == STEPS
    assert summary.model_flops == (None if summary.steps_unknown else returned["model_flops"])
    return summary


def test_rank_0_alone_counts_steps_outside_of_its_windows() -> None:
    first, second = launch("scenarios_lengths", ranks=2)("rank_0_counts")
    assert (known(first).steps_unknown, known(first).law is None) == (0, False)
    assert first["outside"] > 0
    assert (second["outside"], known(second).steps_unknown > 0) == (0, True)


def test_with_all_ranks_each_counts_its_own() -> None:
    returned = launch("scenarios_lengths", ranks=2)("all_ranks_count")
    assert [known(one).steps_unknown for one in returned] == [0, 0]
    assert all(one["outside"] > 0 for one in returned)
    assert returned[0]["model_flops"] != returned[1]["model_flops"]
