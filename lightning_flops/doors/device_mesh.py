"""How many ranks share the work along each dimension of a device mesh, as its dimensions are called."""

from __future__ import annotations

from typing import Any

_DIMENSIONS = {
    "tensor_parallel": "tp",
    "tp": "tp",
    "pipeline_parallel": "pp",
    "pp": "pp",
    "context_parallel": "cp",
    "cp": "cp",
    "sequence_parallel": "sp",
    "sp": "sp",
    "ulysses": "sp",
    "expert_parallel": "ep",
    "ep": "ep",
}
"""The kind of parallelism of a device mesh's dimension, by its name: Lightning's, torchtitan's and the usual names."""


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Sizes of the dimensions of *mesh* that we know, by our names for them; empty without a mesh.

    Along every other dimension the ranks see different data, whatever the mesh calls it: replicas, shards or both.
    """
    names = getattr(mesh, "mesh_dim_names", None)
    if mesh is None or not names:
        return {}
    sizes: dict[str, int] = {}
    for name, size in zip(names, mesh.shape, strict=True):
        if name in _DIMENSIONS:
            sizes[_DIMENSIONS[name]] = sizes.get(_DIMENSIONS[name], 1) * int(size)
    return sizes
