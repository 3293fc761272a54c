"""Every step's FLOPs of each stage of a pipeline, though all steps have other numbers of rows."""

from __future__ import annotations

import random

import pytest

from lightning_flops.schema.throughput import ThroughputSummary
from tests.deepspeed.launching import INSTALLED, launch

pytestmark = pytest.mark.skipif(not INSTALLED, reason="needs deepspeed")

# As scenarios_pipeline says it, which imports DeepSpeed.
STEPS, MICRO_STEPS, IN, HIDDEN, OUT = 80, 3, 8, 16, 4
FIRST, SECOND, THIRD, FOURTH = (2 * size for size in (IN * HIDDEN, HIDDEN**2, HIDDEN**2, HIDDEN * OUT))


def test_every_step_of_a_stage_is_known_and_each_stages_law_is_that_of_its_layers() -> None:
    numbers = random.Random(1)
    rows = sum(MICRO_STEPS * numbers.randint(2, 25 if step < 25 else 50) for step in range(STEPS))
    # Of a row. The data needs no gradient; the second stage sends its input's gradient back.
    forward, backward = (FIRST + SECOND, THIRD + FOURTH), (FIRST + 2 * SECOND, 2 * (THIRD + FOURTH))
    stages = launch("scenarios_pipeline_lengths", ranks=2)("varying")
    for stage, returned in enumerate(stages):
        summary = ThroughputSummary.from_json(returned["throughput"])
        assert returned["left"]
        assert summary.law is not None
        assert {one.bucket: [(term.numerator, term.powers) for term in one.terms] for one in summary.law.sums} == {
            "forward": [(forward[stage], {"B": 1})],
            "backward": [(backward[stage], {"B": 1})],
        }
        assert summary.steps_counted + summary.steps_predicted + summary.steps_unknown == STEPS
        if stage == 0:  # whose figures are shown: after the window, steps of more rows are counted
            assert (summary.steps_unknown, summary.steps_counted > 8) == (0, True)
            assert summary.model_flops == rows * (forward[0] + backward[0])


def test_a_stage_counts_a_step_once_more_where_rows_never_change() -> None:
    """An evaluation comes where that step is due: it does not run under the counter, and the step after it is taken."""
    stages = launch("scenarios_pipeline_lengths", ranks=2)("constant")
    assert [returned["modes"] for returned in stages] == [[0], [0]]
    first, other = (ThroughputSummary.from_json(returned["throughput"]) for returned in stages)
    assert (first.steps_counted, first.steps_predicted, first.steps_unknown) == (2, 106, 0)
    assert first.model_flops == 108 * MICRO_STEPS * 4 * (FIRST + SECOND + FIRST + 2 * SECOND)
    assert other.steps_counted == 1  # nobody sees what its steps spend one by one
