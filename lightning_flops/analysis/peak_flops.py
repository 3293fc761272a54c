"""The dense peak that rates are held against: the vendor's (``devices.py``), or a user's own figure, which wins."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_flops.analysis.devices import device_named, peak_of
from lightning_flops.analysis.measured_peaks import measured_peaks


def peak_flops_per_sec(device_name: str, dtype: str) -> float | None:
    """Dense peak of one device in one dtype, in FLOP/s.

    Args:
        device_name: the name that ``torch.cuda.get_device_name`` reports, such as ``"NVIDIA A100-SXM4-80GB"``.
        dtype: ``bfloat16``, ``float16``, ``tf32``, ``float32``, ``float8``, ``float4``, ``int8`` or any
            other that the counter names.

    Returns:
        None if the device, or its rate in that dtype, is not known. An unknown device never takes another's figure.
    """
    device = device_named(device_name)
    return None if device is None else peak_of(device, dtype)


def peak_for(
    *, device_name: str, dtype: str, given: float | Mapping[str, float] | None, host: str = ""
) -> float | None:
    """Peak of *dtype* that a profile uses: the user's figure where there is one, else the table's, else a measured one.

    Args:
        device_name: see ``peak_flops_per_sec``.
        dtype: see ``peak_flops_per_sec``.
        given: the setting ``peak_flops_per_sec``: one figure for all dtypes, some by dtype, or None.
        host: the machine, whose measured peaks are used where no vendor's is known; empty: they are not.
    """
    if given is not None and not isinstance(given, Mapping):
        return given
    if given is not None and dtype in given:
        return given[dtype]
    peak = peak_flops_per_sec(device_name, dtype)
    return measured_peaks(host, device_name).get(dtype) if peak is None else peak
