"""Other people's traces: each read as text, JSON and page, and held to sums that are made here.

``python -m benchmarks.foreign_traces --folder FOLDER`` writes it; the sums know nothing of the package. In brackets:
the sum where it differs: steps that the report leaves out with a note, and products that are a part of an operator that
is counted as a whole.
The files' licences are their owners' matter, so only the table is kept. Where they are from: a100_*, mi250_*,
mtia_* and runtime_without_kernels are examples of HolisticTraceAnalysis, v100_* of Kineto, ascend_* of MindStudio's
tools (mstt), all others of TraceLens, each in its public repository. Seven files have no products with shapes, and two
no kernels: there both sides are 0.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from .machine import RESULTS
from .page import described, table, write_page
from .runner import start

_KERNELS = ("kernel", "mtia_ccp_events")
_ON_DEVICE = (*_KERNELS, "gpu_memcpy", "memcpy", "gpu_memset", "memset")
_ON_HOST = ("user_annotation", "cpu_op", "operator")
_PRODUCTS = ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm")

_BARE = re.compile(r"(?<=[:,\[])(\s*)[-+]?(?:inf|nan|Infinity|NaN|N/A)(?=\s*[,}\]])")
_BACKSLASH = re.compile(r'\\(["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')


def events_of(path: Path) -> list[Any]:
    """The events of a file, by the standard library alone."""
    packed = path.read_bytes()
    text = (gzip.decompress(packed) if packed[:2] == b"\x1f\x8b" else packed).decode("utf-8", errors="replace")
    try:
        whole = json.loads(text, strict=False)
    except ValueError:
        mended = _BACKSLASH.sub(lambda found: found[0] if found[1] else "\\\\", _BARE.sub(r"\1null", text))
        whole = json.loads(mended, strict=False)
    return list(whole if isinstance(whole, list) else whole.get("traceEvents", []))


def sums_of(events: Sequence[Any]) -> dict[str, float]:
    """Kernels' time added up, the time in which each device ran anything (us), marked steps, and FLOPs of products."""
    spans = [one for one in events if isinstance(one, dict) and one.get("ph") == "X"]
    on_device = [one for one in spans if str(one.get("cat")).lower() in _ON_DEVICE]
    union, reached = 0.0, dict[Any, float]()
    for one in sorted(on_device, key=_ends):
        (begin, end), device = _ends(one), str((one.get("args") or {}).get("device", one["pid"]))
        union += max(0.0, end - max(begin, reached.get(device, -math.inf)))
        reached[device] = max(reached.get(device, -math.inf), end)
    marks = [one for one in spans if str(one.get("name")).startswith("ProfilerStep#")]
    return {
        "events": len(on_device),
        "kernels": math.fsum(float(one.get("dur") or 0) for one in spans if str(one.get("cat")).lower() in _KERNELS),
        "union": union,
        "steps": sum(str(one.get("cat")).lower() in _ON_HOST for one in marks),
        "products": sum(_product(one) for one in _that_ran(spans)),
    }


def _ends(event: Mapping[str, Any]) -> tuple[float, float]:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur") or 0)


def _that_ran(spans: Sequence[Any]) -> Iterator[Any]:
    """Products that did not only record a graph: none that lies in its thread's stream capture."""
    captures: dict[Any, list[tuple[float, bool]]] = {}
    for one in spans:
        if match := re.match(r"(?:cuda|hip)Stream(Begin|End)Capture", str(one.get("name"))):
            captures.setdefault(one["tid"], []).append((float(one["ts"]), match[1] == "Begin"))
    ended: dict[Any, float] = {}
    for one in sorted(spans, key=lambda one: (float(one["ts"]), -float(one.get("dur") or 0))):
        if one.get("name") in _PRODUCTS and str(one.get("cat")).lower() in _ON_HOST:
            begin, end = _ends(one)
            if begin < ended.get(one["tid"], -math.inf):
                continue  # called by another product: a part of it
            ended[one["tid"]] = end
            before = [mark for mark in captures.get(one["tid"], ()) if mark[0] <= begin]
            if not before or not max(before)[1]:
                yield one


def _product(event: Mapping[str, Any]) -> int:
    """2 x rows x columns x inner of the last two tensors that fit together; 0 where shapes were not recorded.

    Behind them there may stand where the result goes, and before them what TorchScript left over.
    """
    arguments = event.get("args") or {}
    tensors = [one for one in arguments.get("Input Dims") or arguments.get("Input dims") or () if one]
    for a, b in reversed(list(pairwise(tensors))):
        if len(b) > 1 and a[-1] == b[-2]:
            return int(2 * math.prod(a) * b[-1])
    return 0


def said_of(path: Path, folder: Path) -> tuple[str, dict[str, Any] | None]:
    """What the command says of a file: an error's last line, or nothing and its report."""
    page = folder / "page.html"
    command = [sys.executable, "-m", "lightning_flops", "trace", str(path)]
    text = subprocess.run([*command, "--html", str(page)], capture_output=True, text=True)
    read = subprocess.run([*command, "--json"], capture_output=True, text=True)
    if text.returncode or read.returncode:
        return (text.stderr or read.stderr).strip().rpartition("\n")[2], None
    if not text.stdout or not page.stat().st_size:
        return "an empty text or page", None
    found: dict[str, Any] = json.loads(read.stdout)["traces"][0]
    return "", found


def figures_of(report: Mapping[str, Any]) -> dict[str, float]:
    """The same sums as ``sums_of`` makes, by the report."""
    kernels = report["kernels"] or ()
    flops = report["flops"] or {"operators": (), "steps": ()}
    return {
        "kernels": math.fsum(one["device"]["total_us"] for one in kernels),
        "union": math.fsum(one["busy_us"] for one in report["idle"] or ()),
        "steps": len(report["step_times"]["steps"]) if report["step_times"]["marked"] else 0,
        "products": sum(
            one["forward"] + one["backward"] + one["recompute"] + one["optimizer"]
            for one in flops["operators"]
            if one["name"].replace(".", "::") in _PRODUCTS
        ),
    }


def row_of(path: Path, folder: Path) -> tuple[list[str], bool]:
    """A file's row of the table, and whether all of it is right."""
    error, report = said_of(path, folder)
    if report is None:
        return [path.name, f"refused: {error}", *[""] * 6], False
    mine, theirs = sums_of(events_of(path)), figures_of(report)
    notes, cells, right = report["notes"], [], True
    for name, unit in (("kernels", " us"), ("union", " us"), ("steps", ""), ("products", "")):
        # The report's times are whole nanoseconds; the file's, as floats of a calendar's time, are less exact.
        rounding = (0.5e-3 + 0.25 * (name == "union")) * mine["events"]
        equal = math.isclose(mine[name], theirs[name], rel_tol=1e-9, abs_tol=rounding)
        left_out = name == "steps" and any("is left out" in note for note in notes)
        cut = name in ("kernels", "union") and any(note.startswith("Cut at the start") for note in notes)
        # A product in a call that was counted as a whole is that call's.
        within = name == "products" and theirs[name] <= mine[name]
        right &= equal or left_out or cut or within
        cells.append(f"{theirs[name]:,.6g}{unit}" + ("" if equal else f" ({mine[name]:,.6g})"))
    steps = (report["flops"] or {"steps": ()})["steps"]
    shares = [step[share] for step in steps for share in ("mfu", "hfu") if step[share] is not None]
    impossible = sum(share > 2 for share in shares)
    most = f"{max(shares):.2%}" if shares else "n/a"
    return [path.name, "read", *cells, most, str(impossible)], right and not impossible


def main() -> int:
    """The table of all files below a folder; 1 if something is wrong."""
    options = start(__file__, __doc__, RESULTS / "foreign_traces.md", folder="")
    found = (path for ending in ("*.json", "*.json.gz") for path in Path(options.folder).rglob(ending))
    files = sorted(filter(Path.is_file, found))
    with tempfile.TemporaryDirectory() as folder:
        rows = [row_of(path, Path(folder)) for path in files]
    wrong = sum(not right for _, right in rows)
    columns = ["file", "", "kernels", "devices busy", "steps", "FLOPs of matrix products"]
    columns += ["greatest MFU or HFU", "impossible"]
    lines = [*table(columns, [row for row, _ in rows]), "", f"{len(files)} files, {wrong} with something wrong."]
    write_page(options.output, [*described(__doc__), *lines])
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
