"""Plans one rank of a job that does not exist yet, in one process, on a machine without its devices."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Mapping
from typing import Any, Literal

from lightning_flops.analysis.peaks import measured_peaks
from lightning_flops.analysis.plan import build_plan, figures_of, stages_with
from lightning_flops.errors import ConfigError
from lightning_flops.measure.planned_rank import plan_rank
from lightning_flops.schema.plan import Plan
from lightning_flops.units import shown


def plan_job(
    make: Callable[[Any], Any],
    mesh: Mapping[str, int],
    rank: int = 0,
    *,
    at: Mapping[str, int] | None = None,
    microbatches: int | None = None,
    device: str | None = None,
    peak_flops_per_sec: float | Mapping[str, float] | None = None,
    memory_bytes_per_sec: float | None = None,
    links: Mapping[str, float] | None = None,
    node_size: int = 8,
    steps: int | None = None,
    price: float | None = None,
    causal_attention: Literal["full", "half"] = "full",
) -> Plan:
    """FLOPs, parameters and collectives of one rank in a step of a job that does not run, and the floor of the step.

    *make* builds the job's part of one rank on fake tensors: nothing has values, so that no size is too large, and no
    process group, device or file of the job is needed. A floor is what these operators cannot go below, no forecast.

    ``plan_job(make, mesh={"dp": 8, "tp": 8}, device="H100").floor_sec``

    Args:
        make: takes the job's device mesh (on ``"cpu"``); returns the parallelized model, a batch of this rank, and an
            optimizer if there is one. A batch is a tuple of positional arguments, a dict of keyword arguments, or the
            one argument. The loss is the model's ``loss``, or all that it returns.
        mesh: size of each dimension by name; ranks count along the last one first.
        rank: which one is planned.
        at: sizes of the batch that the step has instead, as ``{"batch": 8, "sequence": 4096}``: by the first tensor's
            axes, 0 ``batch`` and 1 ``sequence``, of images 2 ``height`` and 3 ``width``; other tensors' axes go with
            them where they agree in place and size.
        microbatches: of a pipeline, whose stages are the mesh's dimension ``pp``: *make* returns the rank's stage, and
            of one microbatch what that stage takes, which requires gradients behind the first.
        device: whose peaks and bandwidth the floor is by: a name as ``torch.cuda.get_device_name`` has it, or a short
            one, as ``H100``; what ``lightning-flops peak`` has measured here is known, too.
        peak_flops_per_sec: dense peak of the device, for all dtypes or by dtype; wins over what is known.
        memory_bytes_per_sec: bandwidth of its memory; wins over what is known.
        links: bytes/s that one device sends, by dimension of the mesh, or as ``nvlink`` (between devices of one node)
            and ``net``.
        node_size: devices of one node; ranks of a node count one after the other.
        steps: of the run, for its hours.
        price: of one device hour.
        causal_attention: as for ``count_flops``.

    Raises:
        ConfigError: an argument is not what is described here.
        LightningFlopsError: the job cannot be planned; the message says why.
    """
    if not mesh or any(type(size) is not int or size < 1 for size in mesh.values()):
        raise ConfigError(f"mesh must have a size of at least 1 by the name of each dimension, got {shown(mesh)}")
    if type(rank) is not int or not 0 <= rank < math.prod(mesh.values()):
        raise ConfigError(f"rank must be one of the {math.prod(mesh.values())} of the mesh, got {shown(rank)}")
    if unknown := sorted({*(links or ())} - {*mesh, "nvlink", "net"}):
        raise ConfigError(f"links must be by dimension of the mesh, or nvlink and net, got {', '.join(unknown)}")
    if wrong := [name for name, size in (at or {}).items() if type(size) is not int or size < 1]:
        raise ConfigError(f"at must have an integer of at least 1 by name, got {shown((at or {})[wrong[0]])}")
    measured = measured_peaks(platform.node(), device) if device else {}
    figures = figures_of(device, peak_flops_per_sec, memory_bytes_per_sec, measured)
    if microbatches is not None and (type(microbatches) is not int or microbatches < 1 or "pp" not in mesh):
        raise ConfigError(f"microbatches must be an integer of at least 1, with a mesh that has pp, got {microbatches}")
    ranks = stages_with(rank, mesh) if microbatches else [rank]
    given: dict[str, Any] = {"at": at or {}, "microbatches": microbatches or 1}
    planned = [plan_rank(make, mesh, one, **given, causal_attention=causal_attention) for one in ranks]
    return build_plan(
        planned[list(ranks).index(rank)],
        figures,
        stages=planned if microbatches else (),
        **given,
        links=links or {},
        node_size=node_size,
        steps=steps,
        price=price,
    )
