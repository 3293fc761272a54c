"""Two ranks that are two stages, or share experts, sequences or weights."""

from __future__ import annotations

from tests.deepspeed import scenarios_groups, scenarios_pipeline
from tests.deepspeed.scenarios_parallel import fresh, possible

SCENARIOS = {
    scenario.__name__: fresh(scenario)
    for scenario in (
        scenarios_pipeline.attached,
        scenarios_pipeline.one_stage,
        scenarios_pipeline.tied,
        scenarios_pipeline.checkpointed,
        scenarios_pipeline.same_bits,
        scenarios_pipeline.interrupted,
        scenarios_pipeline.timed,
        scenarios_pipeline.never_reached,
        scenarios_groups.routed,
        scenarios_groups.sequences,
        scenarios_groups.mesh_of_sequences,
        scenarios_groups.automatic_tensor_parallel,
        scenarios_groups.tensor_parallel_unit,
    )
    if possible(scenario.__name__)
}
