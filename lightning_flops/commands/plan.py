"""``lightning-flops plan FILE.py:FUNCTION``: one rank of a job that does not exist yet, and the floor of its step."""

from __future__ import annotations

import argparse

from lightning_flops.commands.common import (
    DEVICE_FIGURES,
    by_name,
    command,
    function_named,
    given_figures,
    option,
    print_report,
)

_MESH, _LINKS, _AT = "dp=8,tp=8", "nvlink=450e9,net=50e9", "batch=8,sequence=4096"


@command(
    option("example", metavar="FILE.py:FUNCTION", help="takes the device mesh; returns a model, a batch, an optimizer"),
    option("--mesh", type=by_name(int, _MESH), required=True, metavar="DIM=SIZE,...", help=f"of the job: {_MESH}"),
    option("--rank", type=int, default=0, metavar="N", help="which rank is planned (default: 0)"),
    option("--at", type=by_name(int, _AT), default={}, metavar="NAME=SIZE,...", help=f"of the batch instead: {_AT}"),
    option(
        "--microbatches",
        type=int,
        metavar="N",
        help="required with a dimension pp of the mesh: the stages of a pipeline",
    ),
    option("--device", metavar="NAME", help="whose peaks the floor is by: H100, A100-SXM4-80GB"),
    option(
        "--links",
        type=by_name(float, _LINKS),
        default={},
        metavar="LINK=BYTES,...",
        help=f"bytes/s that a device sends within a node and beyond, or by dimension: {_LINKS}",
    ),
    option("--node", type=int, default=8, metavar="N", help="devices of one node (default: 8)"),
    option("--steps", type=int, metavar="N", help="of the run, for its hours"),
    option("--price", type=float, metavar="PRICE", help="of one device hour"),
    *DEVICE_FIGURES,
    option("--causal-attention", choices=("full", "half"), default="full", help="of the score matrix (default: full)"),
    option("--json", action="store_true", help="print JSON"),
)
def plan(options: argparse.Namespace) -> None:
    """Say what one rank of a job computes, holds and sends in a step, and the floor of that step's time.

    The job does not run: FLOPs, parameters and collectives are counted in one process, on fake tensors. A floor is no
    forecast.

    Example:
      lightning-flops plan my_job.py:make --mesh dp=8,tp=8 --device H100 --links nvlink=450e9,net=50e9
    """
    from lightning_flops.adapters.planning import plan_job

    given = given_figures(options)
    found = plan_job(
        function_named(options.example),
        options.mesh,
        options.rank,
        at=options.at,
        microbatches=options.microbatches,
        device=options.device,
        peak_flops_per_sec=given.peak_flops_per_sec,
        memory_bytes_per_sec=given.memory_bytes_per_sec,
        links=options.links,
        node_size=options.node,
        steps=options.steps,
        price=options.price,
        causal_attention=options.causal_attention,
    )
    print_report(found, options)
