"""Numbers to text under the names, and with the results, of DeepSpeed's Flops Profiler.

For programs that import these helpers from DeepSpeed; the reports of this package use ``units``. *units* is the prefix,
of ``T G M K m u``, or ``""`` for none; None takes the largest that fits. A number that is None is ``"n/a"``.
"""

from __future__ import annotations

from lightning_flops.units import NOT_AVAILABLE

_MAGNITUDES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
"""What each prefix stands for, the largest first."""


def number_to_string(num: float | None, units: str | None = None, precision: int = 2) -> str:
    """A number with its decimal prefix: ``number_to_string(6279.86e9)`` is ``"6.28 T"``, without one ``"6 "``."""
    return _with_unit(num, "", units, precision)


def macs_to_string(macs: float | None, units: str | None = None, precision: int = 2) -> str:
    """Multiply-adds as text: ``macs_to_string(3.2e9)`` is ``"3.2 GMACs"``."""
    return _with_unit(macs, "MACs", units, precision)


def flops_to_string(flops: float | None, units: str | None = None, precision: int = 2) -> str:
    """A rate as text: ``flops_to_string(81.9e12)`` is ``"81.9 TFLOPS"``. DeepSpeed's FLOPS are FLOPs per second."""
    return _with_unit(flops, "FLOPS", units, precision)


def bytes_to_string(b: float | None, units: str | None = None, precision: int = 2) -> str:
    """Bytes as text, in powers of a thousand: ``bytes_to_string(2048)`` is ``"2.05 KB"``."""
    return _with_unit(b, "B", units, precision)


def duration_to_string(duration: float | None, units: str | None = None, precision: int = 2) -> str:
    """Seconds as text: ``duration_to_string(0.07667)`` is ``"76.67 ms"``."""
    return _with_unit(duration, "s", units, precision)


def params_to_string(params_num: float | None, units: str | None = None, precision: int = 2) -> str:
    """A number of parameters as text, B for billions: ``params_to_string(1.5e9)`` is ``"1.5 B"``."""
    prefix = None if units is None else units.replace("B", "G")
    return _with_unit(params_num, "", prefix, precision).replace("G", "B").strip()


def _with_unit(value: float | None, unit: str, prefix: str | None, precision: int) -> str:
    if value is None:
        return NOT_AVAILABLE
    if prefix is None:
        fits = (one for one, magnitude in _MAGNITUDES.items() if abs(value) >= magnitude)
        prefix = next(fits, "u" if value else "")
    return f"{round(value / _MAGNITUDES.get(prefix, 1.0), precision):g} {prefix}{unit}"
