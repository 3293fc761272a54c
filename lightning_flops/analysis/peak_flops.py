"""The dense peak that rates are held against: the vendor's (``devices.py``), or a user's own figure, which wins."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_flops.analysis.devices import device_named, peak_of


def peak_for(
    device_name: str,
    dtype: str,
    given: float | Mapping[str, float] | None = None,
    measured: Mapping[str, float] | None = None,
) -> float | None:
    """Dense peak in FLOP/s that a profile uses: the user's figure where there is one, else the table's, or a measured.

    Args:
        device_name: the name that ``torch.cuda.get_device_name`` reports, such as ``"NVIDIA A100-SXM4-80GB"``.
        dtype: ``bfloat16``, ``float16``, ``tf32``, ``float32``, ``float8``, ``float4``, ``int8`` or any other that the
            counter names.
        given: the setting ``peak_flops_per_sec``: one figure for all dtypes, some by dtype, or None.
        measured: peaks that were measured on this machine, used where no vendor's is known.

    Returns:
        None if the device, or its rate in that dtype, is not known. An unknown device never takes another's figure.
    """
    if isinstance(given, Mapping):
        given = given.get(dtype)
    if given is not None:
        return given
    device = device_named(device_name)
    peak = None if device is None else peak_of(device, dtype)
    return (measured or {}).get(dtype) if peak is None else peak
