"""Where a run takes place, in the same words for every framework, and how its ranks share the work."""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from lightning_flops.measure.deepspeed_groups import ParallelSizes
from lightning_flops.records import RunContext
from lightning_flops.units import printable


def run_context_on(device: torch.device, sizes: ParallelSizes, **fields: Any) -> RunContext:
    """The context of a run on *device*, on this machine, in groups of these *sizes*; *fields* are the others."""
    return RunContext(
        torch_version=str(torch.__version__),  # whose class is its own
        device_type=device.type,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        host=platform.node(),
        **asdict(sizes),
        **fields,
    )


def sizes_along(known: Mapping[str, int], *, world_size: int) -> ParallelSizes:
    """How many ranks share the work, given the *known* sizes of dimensions as ``mesh_sizes`` names them."""
    sizes = {f"{name}_size": size for name, size in known.items()}
    # Ranks with different experts see different data.
    same_data = math.prod(size for name, size in known.items() if name != "ep")
    return ParallelSizes(dp_size=max(1, world_size // same_data), **sizes)


_KINDS = {"tensor": "tp", "pipeline": "pp", "context": "cp", "sequence": "sp", "expert": "ep"}
_DIMENSIONS = {name: kind for word, kind in _KINDS.items() for name in (kind, f"{word}_parallel")} | {"ulysses": "sp"}
"""The kind of parallelism of a device mesh's dimension, by its name: Lightning's, torchtitan's and the usual names."""


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Sizes of the dimensions of *mesh* that we know, by our names for them; empty without a mesh.

    Along every other dimension the ranks see different data, whatever the mesh calls it: replicas, shards or both.
    """
    sizes: dict[str, int] = {}
    names = getattr(mesh, "mesh_dim_names", None) or ()
    for name, size in zip(names, mesh.shape if names else (), strict=True):
        if (kind := _DIMENSIONS.get(name)) is not None:
            sizes[kind] = sizes.get(kind, 1) * int(size)
    return sizes


def log_is_shown() -> bool:
    """Whether our own log is shown, whose INFO lines name each file."""
    ours = logging.getLogger("lightning_flops")
    return ours.isEnabledFor(logging.INFO) and ours.hasHandlers()


def announce_in_log(name: str, sentence: str) -> None:
    """Say *sentence* in the framework's own log of this *name*, which a terminal shows, unless our own is shown."""
    if not log_is_shown():
        logging.getLogger(name).info("%s", printable(sentence))
