"""Numbers to text under the names, and with the results, of DeepSpeed's Flops Profiler.

For programs that import these helpers from DeepSpeed; the reports of this package use ``units``.
"""

from __future__ import annotations

from lightning_flops.units import NOT_AVAILABLE

_MAGNITUDES = {"T": 1e12, "G": 1e9, "M": 1e6, "K": 1e3, "": 1.0, "m": 1e-3, "u": 1e-6}
"""What each prefix stands for, the largest first."""

_PRECISION = 2


def number_to_string(num: float | None, units: str | None = None, precision: int = _PRECISION) -> str:
    """A number with its decimal prefix: ``number_to_string(6279.86e9)`` is ``"6.28 T"``.

    Args:
        num: the number; None, one that is not known, is ``"n/a"``.
        units: the prefix to use, of ``T G M K m u``, or ``""`` for none; None takes the largest that fits.
        precision: decimals; of all digits at most six are shown.

    Returns:
        The text; a number without prefix ends in a space, to which a unit can be added.
    """
    return _with_unit(num, "", units, precision)


def macs_to_string(macs: float | None, units: str | None = None, precision: int = _PRECISION) -> str:
    """Multiply-adds as text: ``macs_to_string(3.2e9)`` is ``"3.2 GMACs"``."""
    return _with_unit(macs, "MACs", units, precision)


def flops_to_string(flops: float | None, units: str | None = None, precision: int = _PRECISION) -> str:
    """A rate as text: ``flops_to_string(81.9e12)`` is ``"81.9 TFLOPS"``. DeepSpeed's FLOPS are FLOPs per second."""
    return _with_unit(flops, "FLOPS", units, precision)


def bytes_to_string(b: float | None, units: str | None = None, precision: int = _PRECISION) -> str:
    """Bytes as text, in powers of a thousand: ``bytes_to_string(2048)`` is ``"2.05 KB"``."""
    return _with_unit(b, "B", units, precision)


def duration_to_string(duration: float | None, units: str | None = None, precision: int = _PRECISION) -> str:
    """Seconds as text: ``duration_to_string(0.07667)`` is ``"76.67 ms"``."""
    return _with_unit(duration, "s", units, precision)


def params_to_string(params_num: float | None, units: str | None = None, precision: int = _PRECISION) -> str:
    """A number of parameters as text, B for billions: ``params_to_string(1.5e9)`` is ``"1.5 B"``."""
    prefix = None if units is None else units.replace("B", "G")
    return _with_unit(params_num, "", prefix, precision).replace("G", "B").strip()


def _with_unit(value: float | None, unit: str, prefix: str | None, precision: int) -> str:
    if value is None:
        return NOT_AVAILABLE
    if prefix is None:
        prefix = _fitting_prefix(abs(value))
    return f"{round(value / _MAGNITUDES.get(prefix, 1.0), precision):g} {prefix}{unit}"


def _fitting_prefix(size: float) -> str:
    if size == 0:
        return ""
    return next((prefix for prefix, magnitude in _MAGNITUDES.items() if size >= magnitude), "u")
