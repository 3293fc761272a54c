"""Plans one rank of a job that does not exist yet, in one process, on a machine without its devices."""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from lightning_flops.analysis.devices import devices_called
from lightning_flops.analysis.plan import build_plan, stages_with
from lightning_flops.analysis.rates import measured_peaks
from lightning_flops.errors import require
from lightning_flops.measure.planned_rank import plan_rank
from lightning_flops.schema.plan import Plan


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
        microbatches: required with a pipeline, whose stages are the mesh's dimension ``pp``: *make* returns the rank's
            stage, and of one microbatch what that stage takes, which requires gradients behind the first.
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
    measured = measured_peaks(platform.node(), device) if device else {}
    is_known = not device or peak_flops_per_sec is not None or measured or devices_called(device)
    unknown, sizes = sorted({*(links or ())} - {*mesh, "nvlink", "net"}), [*mesh.values()]
    require(("mesh must have a size of at least 1 by the name of each dimension", mesh, mesh and _are_sizes(sizes)))
    ranks = math.prod(sizes)
    piped = _are_sizes([microbatches]) if "pp" in mesh else microbatches is None
    require(
        (f"rank must be one of the {ranks} of the mesh", rank, type(rank) is int and 0 <= rank < ranks),
        ("links must be by dimension of the mesh, or nvlink and net", unknown, not unknown),
        ("at must have an integer of at least 1 by name", at, _are_sizes((at or {}).values())),
        ("device must be one whose figures are known, as H100 or A100-SXM4-80GB", device, is_known),
        (
            "microbatches must be an integer of at least 1 where the mesh has a dimension pp, and be left out "
            "elsewhere",
            microbatches,
            piped,
        ),
    )
    given: dict[str, Any] = {"at": at or {}, "microbatches": microbatches or 1}
    stages = stages_with(rank, mesh) if microbatches else [rank]
    planned = {one: plan_rank(make, mesh, one, **given, causal_attention=causal_attention) for one in stages}
    return build_plan(
        planned[rank],
        stages=[*planned.values()] if microbatches else (),
        **given,
        device=device or "",
        peak_flops_per_sec=peak_flops_per_sec,
        memory_bytes_per_sec=memory_bytes_per_sec,
        measured=measured,
        links=links or {},
        node_size=node_size,
        steps=steps,
        price=price,
    )


def _are_sizes(values: Iterable[object]) -> bool:
    return all(type(one) is int and one >= 1 for one in values)
