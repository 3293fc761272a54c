"""What DeepSpeed's own profiler prints and answers, as JSON on the last line; run where DeepSpeed is installed."""

from __future__ import annotations

import json
import sys

from deepspeed.profiling import flops_profiler

import lightning_flops
from tests.standalone.questions import METHODS, aggregated, parameters_of, report, report_in_an_engine, strings

if __name__ == "__main__":
    answers = {
        "strings": strings(flops_profiler),
        "methods": {name: parameters_of(getattr(flops_profiler.FlopsProfiler, name)) for name in METHODS},
        "get_model_profile": parameters_of(flops_profiler.get_model_profile),
        "report": report(flops_profiler, top_modules=2),
        "brief": report(flops_profiler, detailed=False),
        "aggregated": aggregated(flops_profiler),
        "in_engine": report_in_an_engine(flops_profiler.FlopsProfiler),
        "ours_in_engine": report_in_an_engine(lightning_flops.FlopsProfiler),
    }
    sys.stdout.write(f"\n{json.dumps(answers)}\n")
