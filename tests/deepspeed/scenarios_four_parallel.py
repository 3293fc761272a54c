"""Four ranks: four stages, or pairs of ranks that share experts, sequences or the stages of a pipeline."""

from __future__ import annotations

from tests.deepspeed import scenarios_groups, scenarios_pipeline
from tests.deepspeed.scenarios_parallel import fresh, possible

SCENARIOS = {
    scenario.__name__: fresh(scenario)
    for scenario in (
        scenarios_pipeline.four_stages,
        scenarios_pipeline.two_pipelines,
        scenarios_groups.routed,
        scenarios_groups.sequences,
    )
    if possible(scenario.__name__)
}
