"""Launches scenarios once under DeepSpeed, however many tests ask for what they returned."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util

from tests.ranks import DEEPSPEED, launching

INSTALLED = importlib.util.find_spec("deepspeed") is not None
OLD = INSTALLED and importlib.metadata.version("deepspeed").startswith("0.16.")

NOT_IN_0_16 = {
    "checkpointed": "its checkpointing wants streams, which a CPU has not",
    "sequences": "has no groups of its own for sequences",
    "automatic_tensor_parallel": "cuts the models of some libraries only",
}
"""What keeps a scenario from running under DeepSpeed 0.16."""


ON_ONE = "scenarios_attach+scenarios_failures+scenarios_steps+scenarios_zero"
PARALLEL = "scenarios_pipeline+scenarios_groups"
"""Modules whose scenarios are of one launch."""
ON_FOUR = (
    "a_stage_in_the_middle_knows_its_samples_though_it_sees_no_batch",
    "ranks_that_see_different_data_are_no_stages_and_write_reports_of_their_own_where_asked",
)
ON_BOTH = (
    "experts_count_the_tokens_that_were_routed_to_them_and_parameters_of_all",
    "ranks_that_share_sequences_count_their_samples_once_and_their_own_tokens_and_heads",
)
"""Scenarios of pipelines and groups that run on four ranks, or on two and on four; all others run on two."""


launch = functools.partial(launching.launch, worker="tests.deepspeed.worker", imports=DEEPSPEED)
"""Runs every scenario of some modules."""


# FLOPs of ``tests.deepspeed.engines.Net`` by hand, for a micro-batch of two samples.
FORWARD_BY_MODULE = {"": 2 * 2 * (8 * 8 + 8 * 16 + 16 * 4), "first": 2 * 2 * 8 * 16, "second": 2 * 2 * 16 * 4}
FORWARD = FORWARD_BY_MODULE[""]
# Once more for every weight, and once more for the inputs of the two layers, whose inputs need gradients.
BACKWARD = FORWARD + FORWARD_BY_MODULE["first"] + FORWARD_BY_MODULE["second"]
PARAMS = 8 * 8 + (8 * 16 + 16) + (16 * 4 + 4)
