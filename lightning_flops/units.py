"""Numbers and names to text: ``6.28 TFLOPS``, ``76.7 ms``, ``41.3%``; what is not known is ``n/a``.

Numbers have three significant digits; from 1,000 on, and where they are ints, all that stand before the point.

A name may come from a model, a file, another rank or a trace: in text for people, no name can end a line, move the
cursor or change the direction of the text. JSON keeps names as they are.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from itertools import groupby

from lightning_flops.signals import Quiet

NOT_AVAILABLE = "n/a"  # how a number that is not known prints

_LARGE = dict(enumerate(("", "K", "M", "G", "T", "P", "E", "Z")))
_SECONDS = {0: "s", -1: "ms", -2: "us", -3: "ns"}
_LEAST_OF_DECIMALS = Decimal("99.95"), Decimal("9.995"), Decimal("0.9995")  # with none, one and two
_TOO_LONG = Decimal("1e15")  # from here on a number is written with an exponent


def si(value: float | None, unit: str = "") -> str:
    """A count or a rate with its decimal prefix: ``si(3.2e9, "FLOP/s")`` is ``"3.2 GFLOP/s"``."""
    return _scaled(value, _LARGE, unit)


def duration(seconds: float | None) -> str:
    """Seconds in the unit that keeps the number above one: ``duration(0.07667)`` is ``"76.7 ms"``."""
    return _scaled(seconds, _SECONDS)


def _scaled(value: float | None, names: Mapping[int, str], unit: str = "") -> str:
    """*value* by the power of a thousand, of those that have *names*, that leaves it one to three digits."""
    if (number := _known(value)) is None:
        return NOT_AVAILABLE
    power = Decimal(f"{number:.3g}").adjusted() // 3 if number else 0  # of what is printed: 999.5 is a thousand
    power = max(min(power, max(names)), min(names))
    return f"{_short(number.scaleb(-3 * power))} {names[power]}{unit}".rstrip()


def percent(fraction: float | None) -> str:
    """A fraction of one as a percentage, with two decimals at most: ``percent(0.4125)`` is ``"41.2%"``."""
    number = _known(None if fraction is None else Decimal(fraction).scaleb(2))
    if number and 0 < number < Decimal("0.005"):
        return "<0.01%"
    return NOT_AVAILABLE if number is None else f"{number:,.{_decimals(number) if number else 0}f}%"


def plain(value: float | None) -> str:
    """A number without a prefix, thousands apart, ints in full: ``plain(12.345)`` is ``"12.3"``."""
    if isinstance(value, int):
        return f"{value:,}"
    number = _known(value)
    return NOT_AVAILABLE if number is None else _short(number)


def plural(noun: str, number: float) -> str:
    """*noun* as it stands behind *number*: "1 step", "2 steps"."""
    return noun if number == 1 else f"{noun}es" if noun.endswith(("ch", "ss")) else f"{noun}s"


def bytes_by_dtype(sizes: Mapping[str, int]) -> str:
    """Bytes of parameters in each dtype: "408 KB of float32", the most first."""
    ordered = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{si(size, 'B')} of {dtype}" for dtype, size in ordered)


def runs_of(numbers: Iterable[int]) -> list[list[int]]:
    """*numbers* in order, those that follow one another drawn together."""
    placed = enumerate(sorted(numbers))  # in a run each number has the same distance to its place
    return [[number for _, number in run] for _, run in groupby(placed, key=lambda item: item[1] - item[0])]


def run_text(run: Sequence[int]) -> str:
    """The first and the last of a run: "3-5", or "9" of one that has no other."""
    return str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}"


def name_ranks(ranks: Iterable[int], *, most: int = 4) -> str:
    """*ranks* in words, however many there are: "rank 3", "ranks 0-2 and 5", "ranks 0, 2, 4, 6 and 20 more"."""
    runs = runs_of(ranks)
    shown = [run_text(run) for run in runs[:most]]
    if more := sum(map(len, runs[most:])):
        shown.append(f"{more} more")
    words = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"
    return f"{plural('rank', sum(map(len, runs)))} {words}"


def _known(value: float | Decimal | None) -> Decimal | None:
    """The exact value; None if there is none to show."""
    return Decimal(value) if value is not None and Decimal(value).is_finite() else None


def _short(number: Decimal) -> str:
    """Three significant digits, thousands apart."""
    if abs(number) >= _TOO_LONG or abs(number) < _LEAST_OF_DECIMALS[-1]:
        return f"{float(number):.3g}"
    text = f"{number:,.{_decimals(number)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _decimals(number: Decimal) -> int:
    """How many decimals there are among the first three digits of *number*, two for one that is small."""
    return next((decimals for decimals, least in enumerate(_LEAST_OF_DECIMALS) if abs(number) >= least), 2)


# ---- names and other words


def name_files(sources: Sequence[str]) -> list[str]:
    """The last part of each of *sources*, or all of it where the last parts are the same."""
    last = [os.path.basename(source.rstrip("/")) or source for source in sources]
    return [short if last.count(short) == 1 else source for short, source in zip(last, sources, strict=True)]


def printable(text: str) -> str:
    r"""*text* on one line. A character that does not print becomes an escape as Python writes it.

    Such characters are control characters and line breaks (``\x1b``, ``\n``), those that change the direction of text
    or have no width (``\u202e``), spaces other than the usual one, and those that no file can hold (``\ud800``).
    """
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def page(lines: Iterable[str]) -> str:
    """*lines* as one text, each made ``printable``, with a line break after each."""
    return "".join(f"{printable(line)}\n" for line in lines)


def shown(value: object, *, chars: int = 500) -> str:
    """*value* as Python writes it, for a message: cut short, and only its type if Python cannot write it."""
    try:
        text = repr(value)
    except Exception:  # nested too deep, a whole number of thousands of digits, or a class whose repr raises
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= chars else text[: chars - 1] + "…"


def package_logger(name: str) -> logging.Logger:
    """The logger of the module *name*. Every record of it is one line of printable text.

    To log with it never raises an ``Exception``, though a handler of the user's may: a warning is no reason to end a
    training.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_on_one_line)
    # Here and not around the calls: a function of ours on the stack would be the place that records name.
    logger.handle = functools.partial(_handle, logger)  # type: ignore[method-assign]
    return logger


def _handle(logger: logging.Logger, record: logging.LogRecord) -> None:
    with Quiet(Exception):
        type(logger).handle(logger, record)


def _on_one_line(record: logging.LogRecord) -> bool:
    """Put the message of *record* on one line. Returns True, since no record is held back."""
    message = record.getMessage()
    if not message.isprintable():
        record.msg, record.args = printable(message), ()
    return True
