"""The dense peak that rates are held against: a user's own figure, the vendor's (``devices.py``), or a measured one."""

from __future__ import annotations

import json
import os
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


COPY = "copy"
"""The name of the bandwidth of a copy, in bytes/s, among the FLOP/s of dtypes."""


def measured_file(host: str) -> str:
    """Where the figures of the machine *host* are kept: in the user's cache folder, which machines may share."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(cache, "lightning_flops", f"peaks-{host}.json")


def read_measured(host: str) -> dict[str, dict[str, float]]:
    """FLOP/s by dtype, and bytes/s of a copy, by the name of each device of *host*; empty if nothing was measured."""
    try:
        with open(measured_file(host), encoding="utf-8") as file:
            return {
                str(name): {str(key): float(one) for key, one in of.items()} for name, of in json.load(file).items()
            }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def measured_peaks(host: str, device_name: str) -> Mapping[str, float]:
    """Measured peaks of one device of *host*; none for a host without a name."""
    found = read_measured(host).get(device_name, {}) if host else {}
    return {name: rate for name, rate in found.items() if 0 < rate < float("inf")}
