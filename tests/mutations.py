"""Small mutations of the package, and the tests that must notice each: `make test-mutations`.

A mutation counts as killed if the tests it names pass on the package as it is, and fail on the mutated one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
ALLOWED = 0.1  # of all mutations may survive
_LIMIT_SEC = 600
_FAILED = 1  # what pytest ends with if tests fail; any other status is no verdict


class Mutation(NamedTuple):
    """One change of one line."""

    file: str  #: Below the package.
    before: str  #: Stands in the file exactly once.
    after: str
    tests: str  #: Below tests/, with spaces between them.
    why_it_survives: str = ""  #: The reason, where no test can or need notice it.


_CLI, _STEPS = "test_cli.py", "run/test_step_flops.py"
_TRACES = "analysis/test_trace_foreign.py analysis/test_trace_operators.py"

MUTATIONS = (
    # analysis
    Mutation("analysis/ranks.py", "_STANDARD_ERRORS = 4.0", "_STANDARD_ERRORS = 2.0", "analysis/test_ranks.py"),
    Mutation("analysis/ranks.py", "np.argsort(-late_sec", "np.argsort(late_sec", "analysis/test_ranks.py"),
    Mutation("analysis/ranks.py", "_MAIN_SHARE = 0.5", "_MAIN_SHARE = 0.9", "analysis/test_ranks.py"),
    Mutation("analysis/ranks.py", "means.var(ddof=1)", "means.var(ddof=0)", "analysis/test_ranks.py"),
    Mutation("analysis/differences.py", "4.60, 4.03,", "4.60, 4.30,", "analysis/test_compare.py"),
    Mutation("analysis/differences.py", "(1 / len(a) + 1 / len(b))", "(1 / len(a))", "analysis/test_compare.py"),
    Mutation("analysis/differences.py", "one.var(ddof=1)", "one.var(ddof=0)", "analysis/test_compare.py"),
    Mutation("analysis/differences.py", "ratio = b / a if a", "ratio = a / b if a", "analysis/test_compare.py"),
    Mutation("analysis/differences.py", "dict(enumerate((*own_a, *own_b)))", "{}", "analysis/test_compare.py"),
    Mutation("analysis/differences.py", "len(side) - len(slow) > 1", "len(side) > 1", "analysis/test_compare.py"),
    Mutation("analysis/differences.py", "slower = max(waits", "slower = min(waits", "analysis/test_compare.py"),
    Mutation("analysis/differences.py", "limit * (1 - more)", "limit", "analysis/test_compare.py"),
    Mutation("analysis/step_flops.py", "for one in (min, max))", "for one in (min, max)) * 2", _STEPS),
    Mutation("analysis/step_flops.py", "freedom = number - 1", "freedom = number", _STEPS),
    Mutation("analysis/step_flops.py", "steps * shape.elements / other.elements", "steps", _STEPS),
    Mutation("analysis/step_flops.py", "_SHARE = 0.005", "_SHARE = 0.05", _STEPS),
    Mutation("analysis/step_flops.py", "real < processed", "real <= processed", _STEPS),
    Mutation("analysis/rates.py", "[rate * dp_size for", "[rate for", "analysis/test_throughput.py"),
    Mutation("analysis/rates.py", "timed_tokens * dp_size", "timed_tokens", "analysis/test_throughput.py"),
    Mutation(
        "analysis/rates.py",
        "share is not None and share > 1\n    }",
        "share is not None and share > 9\n    }",
        "analysis/test_throughput.py",
    ),
    Mutation(
        "analysis/rates.py",
        "return (processed - real) / processed",
        "return real / processed",
        "analysis/test_throughput.py run/test_step_flops.py report/test_text.py",
    ),
    Mutation(
        "analysis/rates.py",
        "sum(spent / peaks_flops_per_sec[dtype]",
        "max(spent / peaks_flops_per_sec[dtype]",
        "analysis/test_profile.py analysis/test_peak_flops.py",
    ),
    Mutation(
        "analysis/timing.py",
        '("idle_ns", "copies_ns")',
        '("idle_ns",)',
        "analysis/test_traced_step.py analysis/test_profile.py report/test_text.py",
    ),
    Mutation("analysis/ranks.py", "latency_ns.min(axis=0)", "latency_ns.max(axis=0)", "analysis/test_trace_ranks.py"),
    Mutation("analysis/ranks.py", "return min(sum(known), most)", "return sum(known)", "analysis/test_trace_ranks.py"),
    Mutation(
        "analysis/ranks.py",
        "context.dp_size * _ranks_of_one_copy(context)",
        "context.dp_size",
        "analysis/test_ranks.py",
    ),
    Mutation(
        "analysis/ranks.py",
        "min(exposed_us, median(waits_us))",
        "median(waits_us)",
        "analysis/test_ranks.py",
    ),
    Mutation("analysis/timing.py", "len(times) // 4 :", "len(times) // 3 :", "analysis/test_timing.py"),
    Mutation("analysis/timing.py", "_STALLS_FROM * step", "0.5 * step", "analysis/test_timing.py"),
    Mutation("analysis/timing.py", "if odd or not size", "if not size", "analysis/test_timing.py"),
    Mutation("analysis/rules.py", "1.0 - slow / fast", "1.0 - fast / slow", "analysis/test_advice.py"),
    Mutation(
        "analysis/evidence.py",
        "share < self.data_wait_share / 2",
        "share < self.data_wait_share * 2",
        "analysis/test_advice.py",
    ),
    Mutation(
        "analysis/advice.py", "if harmless is not None and ordered[0].changes", "if False", "analysis/test_advice.py"
    ),
    Mutation(
        "analysis/plan.py",
        "life.died > moment",
        "life.died >= moment",
        "measure/test_predicted_memory.py",
        "events have numbers of their own: none ends in the one in which another begins",
    ),
    Mutation(
        "analysis/plan.py",
        "int(held.argmax())",
        "len(held) - 1 - int(held[::-1].argmax())",
        "measure/test_predicted_memory.py",
        "of moments that hold equally much either may be named",
    ),
    Mutation(
        "analysis/plan.py",
        "- peak(size)) / further",
        "- peak(size))",
        "measure/test_predicted_memory.py test_memory_command.py",
    ),
    Mutation(
        "analysis/rates.py",
        "given is not None:\n        return given",
        "given is None:\n        return given",
        "analysis/test_peak_flops.py",
    ),
    Mutation(
        "analysis/rules.py",
        "self.removes and evidence.runs_alone and",
        "self.removes and",
        "analysis/test_advice.py",
    ),
    Mutation(
        "analysis/rules.py",
        "evidence.runs_alone and not any(row.is_long for row in rows)",
        "evidence.runs_alone",
        "analysis/test_advice.py",
    ),
    Mutation("analysis/rules.py", "None if saves is None else min(1.0, saves)", "saves", "analysis/test_advice.py"),
    Mutation(
        "analysis/timing.py",
        "in_order = sorted(range(len(wall)), key=wall.__getitem__)",
        "in_order = range(len(wall))",
        "analysis/test_timing.py",
    ),
    Mutation(
        "analysis/profile.py",
        "fmean(spent[place] for place in middle) / fmean(spent)",
        "fmean(spent) / fmean(spent)",
        "analysis/test_profile.py run/test_step_flops.py",
    ),
    Mutation("analysis/plan.py", "max(operators, *by_link.values(), 0.0)", "max(operators, 0.0)", "ranks/test_plan.py"),
    Mutation(
        "analysis/plan.py",
        "math.fsum(map(max, least, moving))",
        "math.fsum(map(min, least, moving))",
        "ranks/test_plan.py",
    ),
    Mutation("analysis/plan.py", "(cell.flops - cell.skipped) / peaks", "cell.flops / peaks", "ranks/test_plan.py"),
    Mutation("analysis/plan.py", "return (size - 1) / size\n", "return 1.0\n", "ranks/test_plan.py"),
    Mutation(
        "analysis/differences.py",
        "sign(least / (1 + starts), limit)",
        "sign(least, limit)",
        "analysis/test_compare.py",
    ),
    Mutation(
        "analysis/differences.py",
        "(0.0, 0.0) if name not in WALL",
        "(0.0, 0.0) if name in WALL",
        "analysis/test_compare.py",
    ),
    Mutation(
        "analysis/plan.py",
        "while peak(high) <= available",
        "while peak(high) < available",
        "measure/test_predicted_memory.py",
    ),
    Mutation(
        "analysis/plan.py",
        "key=peak)\n        if not",
        "key=peak) - 1\n        if not",
        "measure/test_predicted_memory.py",
    ),
    # measure
    Mutation("measure/peaks.py", "2 * size**3 /", "size**3 /", _CLI),
    Mutation("measure/peaks.py", "2 * _COPIED_BYTES /", "_COPIED_BYTES /", _CLI),
    Mutation("measure/peaks.py", "float(min(", "float(max(", _CLI),
    Mutation("measure/timing/processor_wait.py", "max(waits)", "sum(waits)", "measure/timing/test_processor_wait.py"),
    Mutation(
        "measure/timing/processor_wait.py",
        "* idle / max(1, busy + idle)",
        "* busy / max(1, busy + idle)",
        "measure/timing/test_processor_wait.py",
    ),
    Mutation(
        "measure/timing/phase_timer.py",
        'if running == "other":',
        "if True:",
        "measure/timing",
    ),
    Mutation(
        "measure/timing/phase_timer.py",
        "if running not in _PHASES or (self.whole and part in _PHASES):",
        "if False:",
        "measure/timing lightning/test_loops.py",
    ),
    Mutation("measure/timing/phase_timer.py", "if len(self.marks) == 1:", "if True:", "measure/timing"),
    Mutation("measure/batches.py", "min(lengths) < 0", "min(lengths) <= 0", "measure/test_tokens.py"),
    Mutation("measure/batches.py", "1 in (lengths[0], lengths[-1])", "1 in lengths", "measure/test_tokens.py"),
    Mutation("measure/batches.py", "length * length for", "length for", "measure/test_tokens.py"),
    Mutation("measure/batches.py", "_IGNORED = -100", "_IGNORED = 0", "measure/test_tokens.py"),
    Mutation(
        "measure/recorder.py",
        "min(max(self._settle_steps, steps), self._timing_steps)",
        "max(self._settle_steps, steps)",
        "measure/test_recorder.py",
    ),
    Mutation("measure/batches.py", "found.pop() if len(found) == 1", "found.pop() if found", "measure/test_batches.py"),
    Mutation("measure/batches.py", "samples * per_sample", "per_sample", "measure/test_batches.py"),
    Mutation(
        "measure/module_scope.py",
        "size * expert_parallel_size(parameter)",
        "size",
        "measure/test_parameter_sizes.py",
    ),
    Mutation(
        "measure/counting/formulas/products.py",
        "return 2 * rows_of(values) * non_zeros(weight)",
        "return rows_of(values) * non_zeros(weight)",
        "measure/counting/test_formulas_products.py",
    ),
    Mutation(
        "measure/counting/formulas/products.py",
        "bool(mask[0]) + bool(mask[1])",
        "bool(mask[0]) + 1",
        "measure/counting/test_formulas_products.py",
    ),
    Mutation(
        "measure/counting/formulas/products.py",
        "(1 + bool(mask[3])) * layers",
        "2 * layers",
        "measure/counting/test_formulas_by_schema.py measure/counting/test_formulas_products.py",
    ),
    Mutation(
        "measure/counting/formulas/attention.py",
        "keys - queries if bottom_right else 0",
        "0",
        "measure/counting/test_formulas_attention.py",
    ),
    Mutation(
        "measure/counting/formulas/attention.py",
        "if right is None else right) + 1",
        "if right is None else right)",
        "measure/counting/test_formulas_attention.py",
    ),
    Mutation(
        "measure/counting/formulas/products.py",
        "sum(map(bool, wanted)) * plain",
        "2 * plain",
        "measure/counting/test_formulas_by_schema.py measure/counting/test_formulas_products.py",
    ),
    Mutation(
        "measure/counting/formulas/products.py",
        "[(14, 1, 2), (8, 0, 3)]",
        "[(4, 1, 2), (8, 0, 3)]",
        "measure/counting/test_formulas_estimates.py",
    ),
    Mutation(
        "measure/counting/formulas/products.py",
        "4 if values.dim() == 4 else 8",
        "8",
        "measure/counting/test_formulas_estimates.py",
    ),
    Mutation(
        "measure/module_hooks.py",
        "if hearer in self._hearers:  # another",
        "if True:  # another",
        "measure lightning/test_callback.py",
    ),
    Mutation(
        "measure/module_hooks.py",
        "if handles is not self._handles:  # another thread",
        "if False:  # another thread",
        "measure/test_module_hooks.py",
    ),
    Mutation(
        "measure/module_hooks.py",
        "are_safe or all(map(_is_last, self._calling))",
        "True",
        "measure lightning/test_fits_inside.py loops",
    ),
    # run
    Mutation(
        "run/throughput.py",
        "self._since += self.now() - self._outside_since",
        "pass",
        "lightning/test_loops.py loops/test_plain_loop.py run/test_monitor.py",
    ),
    Mutation(
        "run/throughput.py", "if profiled:\n            self", "if False:\n            self", "run/test_monitor.py"
    ),
    Mutation("run/throughput.py", "0.0 if ends_step else seconds", "0.0", "run/test_monitor.py"),
    Mutation("run/throughput.py", "if self._fetches > 1 or not inside", "if not inside", "run/test_monitor.py"),
    Mutation("run/throughput.py", "2 * self.length", "self.length", "run/test_monitor.py"),
    Mutation("run/ranks.py", "min(timeout_sec, max(", "(max(", "ranks/test_ranks.py"),
    Mutation("run/ranks.py", "elif is_out:", "else:", "ranks/test_ranks.py"),
    Mutation("run/ranks.py", "is_late or sent >=", "is_late and sent >=", "ranks/test_ranks.py"),
    Mutation(
        "run/ranks.py", "return answer if answer.rank == rank else", "return answer if True else", "ranks/test_ranks.py"
    ),
    Mutation("run/output.py", 'f"{folder}_logs" if', "folder if", "run/test_output.py"),
    Mutation(
        "run/output.py",
        "logging.DEBUG if self._has_failed",
        "logging.WARNING if self._has_failed",
        "run/test_output.py lightning/test_exceptions.py",
    ),
    Mutation(
        "run/throughput.py",
        "samples * per_sample if samples",
        "per_sample if samples",
        "loops/test_outputs.py",
    ),
    Mutation(
        "run/run.py", "window.ends_at = self.adapter.x_axis(), self.adapter.logged_at()", "pass", "run/test_delivery.py"
    ),
    Mutation(
        "run/run.py",
        "isinstance(error, torch.OutOfMemoryError)) or adapter.facts.rank",
        "isinstance(error, torch.OutOfMemoryError))",
        "run/test_out_of_memory.py",
    ),
    Mutation(
        "run/run.py",
        'isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)',
        "isinstance(error, RuntimeError)",
        "run/test_out_of_memory.py",
    ),
    # sinks
    Mutation("sinks/file.py", "name.touch(exist_ok=False)", "name.touch()", "sinks/test_file.py"),
    Mutation("sinks/file.py", "draft.unlink(missing_ok=True)", "pass", "sinks/test_file.py"),
    Mutation("sinks/file.py", "count(after + 1)", "count(after + 2)", "sinks/test_file.py"),
    Mutation("sinks/file.py", "local and local.resolve()", "local and local.absolute()", "sinks/test_file.py"),
    Mutation(
        "sinks/services.py", "not in self._refused and not ours", "not in self._refused", "sinks/test_services.py"
    ),
    Mutation(
        "sinks/services.py",
        "math.isfinite(value)",
        "True",
        "sinks/test_services.py",
    ),
    Mutation("sinks/profile_files.py", "not one.whose,", "0,", "sinks/test_profile_files.py"),
    Mutation("sinks/profile_files.py", "one.logs == root,", "0,", "sinks/test_profile_files.py"),
    # report, units, config, schema
    Mutation(
        "report/text.py",
        '"" if context.dp_size == 1',
        '"" if context.world_size == 1',
        "report/test_answer.py",
    ),
    Mutation("report/text.py", "if one.typical_sec > 0", "if one.typical_sec >= 0", "report/test_answer.py"),
    Mutation(
        "report/scalars.py", "None if samples is None else samples * dp_size", "samples", "report/test_scalars.py"
    ),
    Mutation("report/scalars.py", 'highest = {"mfu": 1.0', 'highest = {"mfu": 9.0', "report/test_scalars.py"),
    Mutation("units.py", "{number:.3g}", "{number:.9g}", "test_units.py"),
    Mutation("units.py", 'number < Decimal("0.005")', 'number < Decimal("0.05")', "test_units.py"),
    Mutation(
        "config/rules.py",
        "several and 0 < len(value) <= _MOST_STEPS",
        "several and len(value) <= _MOST_STEPS",
        "test_config.py",
    ),
    Mutation(
        "config/rules.py",
        "_if(schedule, schedule.active and schedule.repeat)",
        "_if(schedule, schedule.active)",
        "test_config.py",
    ),
    Mutation(
        "report/text.py",
        '" in all" if profile.context.world_size > 1',
        '" in all" if profile.context.world_size > 9',
        "report/test_text.py report/test_answer.py",
    ),
    Mutation("report/compare_text.py", "value * 1e-6 / steps", "value * 1e-6", "report/test_ranks_text.py"),
    Mutation(
        "report/compare_text.py",
        "for one in (-noise, noise)",
        "for one in (noise, -noise)",
        "report/test_compare_text.py",
    ),
    Mutation(
        "report/profile_document.py",
        "math.fsum(filter(None, found))",
        "math.fsum(filter(None, found)) / len(found)",
        "report/test_answer.py report/test_text.py",
    ),
    Mutation(
        "schema/comparison.py",
        "self.step.noise_ns + self.starts_share * self.step.a_ns",
        "self.step.noise_ns",
        "analysis/test_compare.py report/test_compare_text.py",
    ),
    Mutation(
        "schema/comparison.py",
        "0.0 if self.has_several_runs else max(",
        "max(",
        "analysis/test_compare.py report/test_compare_text.py",
    ),
    Mutation(
        "schema/comparison.py",
        "(ratio / factor, ratio * factor)",
        "(ratio * factor, ratio / factor)",
        "analysis/test_compare.py report/test_compare_text.py",
    ),
    Mutation("schema/codec.py", 'if found > version else "an older', 'if found < version else "an older', "schema"),
    Mutation("schema/codec.py", "allow_nan=False", "allow_nan=True", "schema"),
    Mutation(
        "schema/trace.py",
        "if len(known) == self.pipeline_stages else None",
        "",
        "analysis/test_ranks.py report/test_ranks_text.py",
    ),
    Mutation(
        "schema/profile.py",
        "if len(self.counted_steps) > 1 else total",
        "if len(self.counted_steps) > 2 else total",
        "report/test_text.py analysis/test_profile.py report/test_answer.py",
    ),
    Mutation(
        "schema/step.py",
        "return self.total - self.skipped",
        "return self.total",
        "report/test_text.py analysis/test_profile.py analysis/test_one_convention.py",
    ),
    Mutation(
        "run/run.py",
        "range((window.step or 0) + 1, self.steps_done)",
        "range(window.step or 0, self.steps_done)",
        "run/test_delivery.py lightning/test_schedule.py",
    ),
    Mutation(
        "config/settings.py",
        "-(-(steps_done - steps[-1]) // self.every) * self.every",
        "(steps_done - steps[-1]) // self.every * self.every",
        "test_config.py lightning/test_schedule.py",
    ),
    Mutation(
        "config/settings.py",
        '{"enabled": False, "detailed": True, **block}',
        '{"detailed": True, **block}',
        "test_config.py",
    ),
    Mutation(
        "config/rules.py", "least <= int(value) < _TOO_LARGE", "least < int(value) < _TOO_LARGE", "test_config.py"
    ),
    Mutation("signals.py", "raised = error\n                    one()", "raised = error", "run/test_undo.py"),
    Mutation("signals.py", " and error is not None and not is_of_signal_handler(error)", "", "run/test_undo.py"),
    # commands
    Mutation("commands/peak.py", "_STARVED = 0.05", "_STARVED = 0.5", _CLI),
    Mutation("commands/compare.py", "Status.INCONCLUSIVE, Status.HOLDS,", "Status.HOLDS, Status.INCONCLUSIVE,", _CLI),
    Mutation("commands/compare.py", "runs[places[0] + 1 :]", "runs[places[0] + 2 :]", _CLI),
    Mutation(
        "commands/compare.py",
        "(Status.DONE, Status.INCONCLUSIVE, Status.HOLDS, Status.FAILED)",
        "(Status.DONE, Status.HOLDS, Status.INCONCLUSIVE, Status.FAILED)",
        "test_cli.py",
    ),
    Mutation("commands/memory.py", "int(size[1]) * 1e9", "int(size[1]) * 2**30", "test_memory_command.py"),
    Mutation(
        "commands/report.py",
        'beside = os.path.isfile(path) and not path.startswith("/dev/")',
        "beside = True",
        "page/test_report_command.py",
    ),
    Mutation(
        "commands/common.py",
        "not 2 <= len(answer) <= most",
        "not 2 <= len(answer)",
        "test_flops_formula.py",
    ),
    # trace
    Mutation("trace/flops.py", "holds[links.operator_of_launch[trace.device_rows]] = True", "pass", _TRACES),
    Mutation(
        "trace/intervals.py",
        "starts[1:] > reached[:-1]",
        "starts[1:] > ends[:-1]",
        "analysis/test_trace_views.py analysis/test_trace_steps.py analysis/test_trace_known_answers.py",
    ),
    Mutation(
        "trace/intervals.py",
        "before[begun] - np.maximum(until[begun] - moments, 0)",
        "before[begun]",
        "analysis/test_trace_steps.py analysis/test_trace_known_answers.py",
    ),
    Mutation(
        "trace/steps.py",
        "start[1:] = np.maximum(start[1:], end[:-1])",
        "pass",
        "analysis/test_trace_steps.py analysis/test_trace_known_answers.py",
    ),
    Mutation(
        "trace/steps.py",
        "is_whole = 2 * calls >= least",
        "is_whole = calls >= least",
        "analysis/test_trace_steps.py analysis/test_trace_known_answers.py",
    ),
    Mutation(
        "trace/flops.py",
        "counting[broken], owner[broken] = False, -1",
        "pass",
        "analysis/test_trace_foreign.py analysis/test_trace_operators.py",
    ),
    Mutation(
        "trace/tables.py",
        "launch_ns_of(trace)[rows[1:]] > reached",
        "launch_ns_of(trace)[rows[1:]] >= 0",
        "analysis/test_trace_views.py analysis/test_trace_known_answers.py",
    ),
    Mutation(
        "trace/structure.py",
        "_ROUNDING_NS = 1000",
        "_ROUNDING_NS = 0",
        "analysis/test_trace_joins.py analysis/test_trace_reading.py analysis/test_trace_operators.py",
    ),
    Mutation(
        "trace/modules.py",
        "phase[around] or (_FORWARD if parts.get(around) in _INSIDE_STEP else _NO_PHASE)",
        "_FORWARD",
        "analysis/test_trace_modules.py",
    ),
    # the package's own modules
    Mutation("records.py", "None if None in column else sum(", "sum(", "measure/test_tokens.py"),
    Mutation("records.py", '"" if name == _ROOT else name', "name", "analysis/test_trace_modules.py"),
    Mutation("pytorch.py", 'not on <= {"cpu"}', '"cuda" in on', "measure/test_predicted_memory.py"),
    Mutation("pytorch.py", "initial_step=initial_step or 0", "initial_step=0", "loops/test_outputs.py"),
    Mutation(
        "lightning.py",
        'if trainer.state.fn == "validate":\n            self._finish()',
        "self._finish()",
        "lightning/test_loops.py",
    ),
    Mutation(
        "lightning.py",
        "not self._for_any_trainer or block_of(trainer) is not None",
        "True",
        "deepspeed/test_parallel.py",
    ),
    Mutation(
        "deepspeed.py",
        "if handle is not None and not handle._detached:",
        "if handle is not None:",
        "deepspeed/test_engine.py",
    ),
    Mutation(
        "transformers.py",
        "self._start_anew()\n        self._has_begun = False",
        "self._start_anew()",
        "transformers/test_trainer_callback.py",
    ),
    Mutation("units.py", "(-item[1], item[0])", "(item[1], item[0])", "test_units.py"),
    Mutation(
        "tensorboard.py",
        "windows.sort(key=lambda window: window.profile_step)",
        "windows.reverse()",
        "page/test_tensorboard_tab.py",
    ),
    Mutation("signals.py", "if one in self._todo:", "if True:", "run/test_undo.py"),
    Mutation(
        "signals.py", "if numbers and any(one is interrupted for one in given):", "if numbers:", "run/test_undo.py"
    ),
    Mutation("signals.py", "f_locals.values())[:3]", "f_locals.values())[:2]", "run/test_undo.py"),
    # adapters
    Mutation(
        "adapters/transformers.py",
        ', "_save_checkpoint": "checkpoint"}',
        "}",
        "transformers/test_trainer_phases.py transformers/test_trainer_callback.py",
    ),
    Mutation(
        "run/window.py", "min(adapter.loader_workers()", "max(adapter.loader_workers()", "lightning/test_loops.py"
    ),
    Mutation("adapters/place.py", "if is_theirs and inner is not None", "if inner is not None", "loops/test_place.py"),
    Mutation("adapters/place.py", 'if name != "ep"', "if name", "loops/test_place.py"),
    Mutation(
        "adapters/steps.py",
        "inside.fetches > 1 or inside.left_out",
        "inside.left_out",
        "loops/test_steps.py",
    ),
    Mutation(
        "adapters/steps.py", "self.away &= source not in known.feeders", "self.away = False", "loops/test_steps.py"
    ),
    Mutation(
        "adapters/deepspeed.py",
        "int(self.engine.global_samples) if self._monitors_log else",
        "int(self.engine.global_steps) if self._monitors_log else",
        "deepspeed/test_engine.py",
    ),
    Mutation("adapters/place.py", "sizes.get(kind, 1) * int(size)", "int(size)", "loops/test_place.py"),
    Mutation("adapters/standalone.py", "model.train(before[0][1])", "model.train()", "standalone"),
    Mutation(
        "adapters/program.py",
        "finders = [one for one in sys.meta_path if one is not self",
        "finders = [one for one in sys.meta_path if one",
        "loops/test_run_program.py",
    ),
)


class _Verdict(NamedTuple):
    mutation: Mutation
    words: str  #: "killed", "survived", or why there is no verdict.


def wrong(mutation: Mutation) -> str:
    """Why *mutation* is none of today's package; empty if it is one."""
    path = ROOT / "lightning_flops" / mutation.file
    found = path.read_text(encoding="utf-8").count(mutation.before) if path.exists() else 0
    missing = [test for test in mutation.tests.split() if not (ROOT / "tests" / test.partition("::")[0]).exists()]
    if found != 1:
        return f"`{mutation.before}` stands {found} times in {mutation.file}, and must stand there once"
    return f"there is no tests/{missing[0]}" if missing or not mutation.tests else ""


def _copy_to(folder: Path) -> None:
    """The tree as git sees it, with what is not committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)


def _ends_with(folder: Path, tests: str) -> int:
    """What pytest ends with in the copy in *folder*; a run that never ends has failed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider"]
    names = [f"tests/{one}" for one in tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        run = subprocess.run(
            [*command, "-m", "not slow", *names], cwd=folder, env=environment, capture_output=True, timeout=_LIMIT_SEC
        )
    except subprocess.TimeoutExpired:
        return _FAILED
    return run.returncode


def _tried(mutation: Mutation, folder: Path) -> str:
    path = folder / "lightning_flops" / mutation.file
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace(mutation.before, mutation.after), encoding="utf-8")
    try:
        status = _ends_with(folder, mutation.tests)
    finally:
        path.write_text(text, encoding="utf-8")
    return {0: "survived", _FAILED: "killed"}.get(status, f"no verdict: pytest ended with {status}")


def run(mutations: Iterable[Mutation], *, jobs: int) -> list[_Verdict]:
    """Try *mutations*, so many at a time, each in a copy of the tree, after their tests have passed without them."""
    mutations = list(mutations)
    with tempfile.TemporaryDirectory() as base, ThreadPoolExecutor(jobs) as pool:
        folders: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            _copy_to(folder := Path(base, str(number)))
            folders.put(folder)

        def plain(tests: str) -> int:
            folder = folders.get()
            try:
                return _ends_with(folder, tests)
            finally:
                folders.put(folder)

        def tried(mutation: Mutation) -> _Verdict:
            words = wrong(mutation)
            if not words and passes[mutation.tests] != 0:
                words = f"no verdict: its tests end with {passes[mutation.tests]} without it"
            if not words:
                folder = folders.get()
                try:
                    words = _tried(mutation, folder)
                finally:
                    folders.put(folder)
            print(f"{words:10} {mutation.file}: {mutation.before.splitlines()[0]}", flush=True)
            return _Verdict(mutation, words)

        named = sorted({one.tests for one in mutations if not wrong(one)})
        passes = dict(zip(named, pool.map(plain, named), strict=True))
        return list(pool.map(tried, mutations))


def main() -> int:
    """Try all mutations, or those whose file has a word of the command line in its path; 0: enough are killed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("only", nargs="*", help="words of files' paths; without any, all mutations are tried")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at a time")
    given = parser.parse_args()
    chosen = [one for one in MUTATIONS if not given.only or any(word in one.file for word in given.only)]
    verdicts = run(chosen, jobs=given.jobs)
    killed = sum(one.words == "killed" for one in verdicts)
    print(f"\n{killed} of {len(verdicts)} mutations were killed.")
    for mutation, verdict in verdicts:
        if verdict != "killed":
            print(f"{verdict}: {mutation.file}: {mutation.before!r} -> {mutation.after!r} {mutation.why_it_survives}")
    has_errors = any(one.words not in ("killed", "survived") for one in verdicts)
    return int(has_errors or killed < (1 - ALLOWED) * len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
