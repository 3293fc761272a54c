"""What ``lightning-flops peak`` has measured on this machine, for devices of which no vendor's figures are known."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping

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
