"""Bandwidth of devices' memory, as vendors publish it (``devices.py``); a user may give ``memory_bytes_per_sec``."""

from __future__ import annotations

from lightning_flops.analysis.devices import bandwidth_of, device_named


def memory_bytes_per_sec(device_name: str) -> float | None:
    """Bandwidth of one device's memory in bytes/s.

    Args:
        device_name: the name that ``torch.cuda.get_device_name`` reports, such as ``"NVIDIA A100-SXM4-80GB"``.

    Returns:
        None if it is not known. An unknown device never takes another's figure.
    """
    device = device_named(device_name)
    return None if device is None else bandwidth_of(device)
