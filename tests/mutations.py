"""Names and bytes that a damaged or hostile file may hold."""

from __future__ import annotations

import random
import re
import unicodedata
from typing import Any

# fmt: off
HOSTILE = (
    "\x1b[2J\x1b]0;owned\x07", "name\nFORGED: 1 TFLOPS", "name\rFORGED", "\u202egnp.exe", "\u2066x\u2069", "\x00",
    "\x9b31m", "a\u2028FORGED", "\x7f", "\ud800", "\ufeff", "\t" * 3, "%s%n{0}{name}", "|`*_<script>", "ü" * 300, "",
)
# fmt: on
"""Names that write to a terminal, forge lines, turn text around, or are no text at all."""

_SHOWS = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def unsafe_in(text: str) -> str:
    """What *text* holds that a terminal obeys, or that forges a line; empty if nothing."""
    obeyed = sorted({character for character in text if unicodedata.category(character) in _SHOWS} - {"\n"})
    if obeyed:
        return "control characters shown as they are: " + " ".join(f"U+{ord(character):04X}" for character in obeyed)
    forged = re.search(r"^\s*FORGED", text, flags=re.MULTILINE)
    return "a name forges a line" if forged else ""


def mutated(draw: random.Random, data: bytes) -> bytes:
    """*data* with a few things done to it: cut off, left out, repeated, flipped, put between, or random."""
    for _ in range(draw.randint(1, 4)):
        start = draw.randrange(len(data) + 1)
        end = draw.choice([len(data), *(min(len(data), start + size) for size in (0, 1, 2, 8, 100, 5000))])
        old = data[start:end]
        new = draw.choice(
            [
                b"",
                old[:5000] * draw.choice([2, 3, 51]),
                bytes(byte ^ 1 << draw.randrange(8) for byte in old[:5000]),
                draw.randbytes(min(len(old), 5000)),
                draw.choice(_PIECES),
            ]
        )
        data = data[:start] + new + data[end:]
    return data


# fmt: off
_PIECES = (
    b"9" * 5_000, b"[" * 100_000, b'{"a":' * 50_000, b"null", b"NaN", b"-Infinity", b"1e999",
    b'"' + b"x" * 1_000_000 + b'"', b"[]," * 200_000, b"\x00" * 100, b"\xff\xfe", b"\\ud800", b"\xef\xbb\xbf",
    b'"ph":"X",',
)
# fmt: on
_TREES: tuple[Any, ...] = (None, True, -1, 0, 1e308, -1e308, 2**70, "x", "1", "-1", [], {}, [[]], {"a": 1}, *HOSTILE)


def mutated_tree(draw: random.Random, tree: Any) -> Any:
    """JSON with values replaced, left out or repeated at a few random places."""
    for _ in range(draw.randint(1, 6)):
        parent: Any = tree
        for _ in range(draw.randint(0, 5)):
            children = list(parent.values() if isinstance(parent, dict) else parent)
            inner = [child for child in children if isinstance(child, (dict, list)) and child]
            if not inner:
                break
            parent = draw.choice(inner)
        if not parent:
            continue
        key = draw.choice(list(parent) if isinstance(parent, dict) else range(len(parent)))
        match draw.randrange(4):
            case 0:
                del parent[key]
            case 1 if isinstance(parent, list):
                parent.extend([parent[key]] * draw.choice([1, 3, 200]))
            case 2 if isinstance(parent, dict):
                parent[draw.choice(HOSTILE)] = parent.pop(key)
            case _:
                parent[key] = draw.choice(_TREES)
    return tree
