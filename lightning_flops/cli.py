"""Front door of the command line: ``run PROGRAM…``, ``report PATH``, ``compare A B``, ``trace FILE…``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import io
import itertools
import json
import os
import re
import runpy
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

import lightning_flops
from lightning_flops.errors import ComparisonError, ConfigError, LightningFlopsError
from lightning_flops.text.json_text import MOST_DIGITS, shown
from lightning_flops.text.printable import printable

if TYPE_CHECKING:
    from lightning_flops.doors.find_loop import LoopFinder
    from lightning_flops.records import RecordedCall, RecordedWork
    from lightning_flops.schema.comparison import Comparison
    from lightning_flops.schema.profile import Profile
    from lightning_flops.schema.trace import TracesReport
    from lightning_flops.schema.trace_comparison import TraceComparison
    from lightning_flops.session.outcomes import Outcomes

PROGRAM = "lightning-flops"

_SORT_KEYS = ("total", "self", "mean", "max", "min", "calls", "name", "flops", "rate", "bytes")

_INTERRUPTED = 130
"""The exit status after Ctrl-C, as shells have it: 128 and the signal's number."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that *arguments* (by default the program's) ask for; returns the exit status.

    0: done. 1: a file cannot be read or written, files do not belong together, or there is no such module to run;
    standard error says which. 2: wrong usage, or no such script to run. 130: Ctrl-C. What a program under ``run``
    raises is raised here, its Ctrl-C as well.

    Of ``compare``, 1 means that a condition of ``--fail-if`` holds, and 2 that something cannot be compared or read.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # DeepSpeed's launcher, and torch's old one, put this argument first. It is meant for the program.
    launcher = list(itertools.takewhile(re.compile(r"--local[-_]rank=\d+").fullmatch, arguments))
    if arguments[len(launcher) : len(launcher) + 1] == ["run"]:
        options = _parser().parse_args(arguments[len(launcher) :])
        return _run(options, [*options.program[:1], *launcher, *options.program[1:]])
    options = _parser().parse_args(arguments)
    act: Callable[[argparse.Namespace], int] = options.act
    try:
        return act(options)
    except KeyboardInterrupt:
        return _INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Says in printable text what is wrong with arguments."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


_Commands = Any
"""What ``add_subparsers`` returns; argparse has no public name for its class."""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM, description="What a PyTorch training run computes and waits for.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {lightning_flops.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a training program unchanged, profiled",
        usage="%(prog)s [-h] [--profile-step N] [--log-dir DIR] [...] [-m] PROGRAM [ARGUMENT ...]",
        description=(
            "Run a Python program unchanged, and profile its training: every Trainer of Lightning and of transformers, "
            "every DeepSpeed engine whose config has an enabled flops_profiler block, or else the first loop of torch, "
            "accelerate or Fabric whose optimizer takes a step. A profiler that the program has itself goes before. "
            "LIGHTNING_FLOPS=0 in the environment leaves all but DeepSpeed alone."
        ),
        epilog=(
            "examples:\n"
            f"  {PROGRAM} run train.py --epochs 3\n"
            f"  {PROGRAM} run --profile-step 20 --log-dir logs train.py\n"
            f"  torchrun --nproc-per-node 2 -m lightning_flops run --tokens-per-sample 2048 -m my_package.train"
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module's name, as after python -m")
    run.add_argument(
        "--log-dir", metavar="DIR", help="folder for TensorBoard and files, if the loggers of a framework have none"
    )
    _add_settings(run)
    run.add_argument(
        "program",
        nargs=argparse.PARSER,
        metavar="PROGRAM",
        help="a script, or a directory or zip file with a __main__.py; what follows it is its own",
    )
    _add_law(commands)
    report = commands.add_parser(
        "report",
        help="write profiles as one HTML page",
        description="Write profiles as one HTML page, which needs no network and opens from disk.",
    )
    report.set_defaults(act=_write_page)
    report.add_argument(
        "path", metavar="PATH", help="a profile.json, or a folder of logs with such files below it; path or URL"
    )
    report.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="path or URL of the page; by default beside the profile, or profile.html in the folder; of a URL, "
        "profile.html in the working directory",
    )
    trace = commands.add_parser(
        "trace",
        help="say where the time went in trace files of torch.profiler",
        description=(
            "Say where the time went in trace files of torch.profiler, of CPU or GPU. FLOPs are worked out from the "
            "shapes in the file, where it has any and torch is installed; all else needs no torch."
        ),
    )
    trace.set_defaults(act=_print_trace)
    trace.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="trace, .json or .json.gz, path or URL, or a folder; several: one of each rank",
    )
    trace.add_argument("--children", action="store_true", help="show what each operator called and launched itself")
    trace.add_argument("--json", action="store_true", help="print every table whole, as JSON")
    trace.add_argument("--html", metavar="FILE", help="write them also as a page, to a path or URL")
    trace.add_argument(
        "--rows", type=_rows, default=20, metavar="N", help="rows of each long table, 0 for all (default: %(default)s)"
    )
    trace.add_argument(
        "--sort",
        choices=_SORT_KEYS,
        metavar="KEY",
        help=f"sort every table that has such a column by {', '.join(_SORT_KEYS)}; others keep their own order",
    )
    trace.add_argument(
        "--threshold",
        type=_threshold,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a limit from which on advice is given, named as in advice_thresholds: straggler=1.05",
    )
    _add_compare(commands)
    return parser


def _add_law(commands: _Commands) -> None:
    law = commands.add_parser(
        "law",
        help="say what a model's FLOPs are as a function of its batch's sizes",
        description=(
            "Say what one forward and backward of a model costs as an exact function of its batch's sizes, from fake "
            "tensors: nothing of it runs."
        ),
        epilog=f"example:\n  {PROGRAM} law my_models.py:bert --vary input_ids=0,1 --at batch=8,sequence=4096",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    law.set_defaults(act=_print_law)
    law.add_argument(
        "example", metavar="FILE.py:FUNCTION", help="returns a model and a batch; MODULE:FUNCTION may be given as well"
    )
    law.add_argument(
        "--vary",
        type=_varying,
        action="append",
        required=True,
        metavar="TENSOR=AXIS,...",
        help="axes of a tensor of the batch that vary, by its name or position; AXIS:NAME names one",
    )
    law.add_argument(
        "--at", type=_sizes, action="append", default=[], metavar="NAME=SIZE,...", help="print the FLOPs of these sizes"
    )
    law.add_argument(
        "--causal-attention", choices=("full", "half"), default="full", help="of the score matrix (default: full)"
    )
    law.add_argument("--json", action="store_true", help="print JSON")


def _varying(text: str) -> tuple[str | int, dict[int, str] | list[int]]:
    """A tensor, and its axes with or without names: ``input_ids=0,1``, ``0=0:batch,2:length``."""
    tensor, _, axes = text.partition("=")
    found = [part.partition(":") for part in axes.split(",")]
    try:
        key = int(tensor) if tensor.isdecimal() else tensor
        if any(colon for _, colon, _ in found):
            return key, {int(axis): name for axis, _, name in found if name}
        return key, [int(axis) for axis, _, _ in found]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a tensor, = and axes, got {shown(text)}") from None


def _sizes(text: str) -> dict[str, int]:
    try:
        return {name: int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be names and sizes, as batch=8,sequence=512, got {shown(text)}"
        ) from None


def _add_compare(commands: _Commands) -> None:
    compare = commands.add_parser(
        "compare",
        help="say why the steps of one run take longer than those of another, by profiles or traces",
        description=(
            "Give every millisecond between the steps of two profiled runs a cause: more work, worse efficiency or\n"
            "more waiting, by part of the step and by module, and say what is noise. Of two traces of torch.profiler,\n"
            "say which part, phase, module, kernel and operator takes longer, and what is noise."
        ),
        epilog=(
            "examples:\n"
            f"  {PROGRAM} compare before/profile.json after/profile.json\n"
            f"  {PROGRAM} compare lightning_logs/version_0 lightning_logs/version_1\n"
            f"  {PROGRAM} compare before.pt.trace.json.gz after.pt.trace.json.gz\n"
            f"  {PROGRAM} compare --json s3://runs/main/profile.json logs > difference.json\n"
            f"  {PROGRAM} compare --fail-if 'global_step_sec > 1.05' --fail-if 'hardware_flops > 1' main branch\n"
            "\n"
            "exit status: 0: done. 1: a condition of --fail-if holds. 2: something cannot be read or compared, and\n"
            "standard error says why."
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    compare.set_defaults(act=_compare)
    where = "profile.json of a run or its folder of logs; or a trace, or a folder with one of each rank; path or URL"
    compare.add_argument("a", metavar="A", help=f"what is compared with: {where}")
    compare.add_argument("b", metavar="B", help="what is compared, likewise")
    compare.add_argument("--json", action="store_true", help="print the whole comparison as JSON")
    compare.add_argument("--html", metavar="FILE", help="write it also as a page, to a path or URL")
    compare.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="CONDITION",
        help=(
            "end with status 1 if this holds beyond noise: one of 'Figures of both', which stands for its ratio "
            "B / A, one of > >= < <=, and a number; may be given several times"
        ),
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting that can be written on a command line."""
    from lightning_flops.config import ARGUMENTS
    from lightning_flops.config import SETTINGS as KNOWN

    group = parser.add_argument_group("settings")
    for name in ARGUMENTS:
        option = f"--{name.replace('_', '-')}"
        group.add_argument(
            option, dest=f"{_SETTING}{name}", metavar="VALUE", type=_value, help=_plain(KNOWN[name].help)
        )


_SETTING = "setting:"


def _plain(text: str) -> str:
    """*text* of a docstring as a terminal shows it."""
    return text.replace("``", "").replace("%", "%%")


def _value(text: str) -> object:
    """A setting's value: JSON, as 20, true or {"wait": 1}; any other text is text."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)


def _settings_in(options: argparse.Namespace) -> dict[str, object]:
    """The settings among *options*.

    Raises:
        ConfigError: one breaks its rule.
    """
    from lightning_flops.config import BLOCK, config_from

    given = {
        name.removeprefix(_SETTING): value
        for name, value in vars(options).items()
        if name.startswith(_SETTING) and value is not None
    }
    try:
        config_from(given, owner="run")
    except ConfigError as error:
        words = str(error)
        for name in given:
            words = words.replace(f"{BLOCK}.{name} ", f"--{name.replace('_', '-')} ", 1)
        raise ConfigError(words) from None
    return given


def _threshold(text: str) -> tuple[str, float]:
    from lightning_flops.config import ProfilerConfig

    name, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError
        limit = float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a name, = and a number, got {text!r}") from None
    try:
        ProfilerConfig(advice_thresholds={name: limit})
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name, limit


def _rows(text: str) -> int:
    if not text.isdecimal() or len(text) > MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {shown(text)}")
    return int(text)


def _run(options: argparse.Namespace, program: Sequence[str]) -> int:
    from lightning_flops.doors.run_program import ProgramNotFoundError, run

    try:
        doors = _Doors(_settings_in(options), log_dir=options.log_dir)
    except ConfigError as wrong:
        sys.stderr.write(f"{PROGRAM} run: error: {printable(str(wrong))}\n")
        return 2
    error: BaseException | None = None
    try:
        run(program[0], program[1:], as_module=options.module)
    except ProgramNotFoundError as missing:
        doors.silent = True
        sys.stderr.write(f"{PROGRAM}: {missing}\n")
        return missing.exit_status
    except BaseException as raised:
        error = raised
        raise
    finally:
        doors.close(error)
    return 0


class _Doors:
    """Has the program's training profiled. No framework is loaded before the program loads it.

    Args:
        settings: those that the user has given.
        log_dir: a folder for the reports of a training whose framework has none for them.

    Raises:
        ConfigError: the environment has settings that break their rules.
    """

    def __init__(self, settings: Mapping[str, object], *, log_dir: str | None) -> None:
        from lightning_flops import entry_points
        from lightning_flops.config import OWN_FOLDER
        from lightning_flops.doors.when_imported import when_imported

        self._environment = {
            name: os.environ.get(name) for name in (entry_points.SWITCH, entry_points.SETTINGS, entry_points.LOG_DIR)
        }
        """What the environment said before; the program and what it starts see ours."""
        if settings:
            os.environ[entry_points.SETTINGS] = json.dumps({**entry_points.settings(), **settings})
        os.environ.setdefault(entry_points.SWITCH, "1")  # a value that is there is the user's
        if log_dir is not None:
            os.environ[entry_points.LOG_DIR] = log_dir
        os.environ.setdefault(entry_points.LOG_DIR, OWN_FOLDER)
        self.silent = False
        """Say nothing at the end."""
        self._settings = entry_points.settings()
        self._log_dir = log_dir
        self._finder: LoopFinder | None = None
        when_imported("deepspeed", _install)
        if entry_points.is_on():
            when_imported("transformers.trainer", self._give_callback)
            when_imported("torch", self._find_loop)

    def _give_callback(self, trainer: ModuleType) -> None:
        """Have every Trainer of transformers add a callback of ours to those that it adds itself."""
        from lightning_flops.transformers import CallbackOfAnyTrainer

        trainer.DEFAULT_CALLBACKS.append(CallbackOfAnyTrainer(**self._settings))

    def _find_loop(self, torch: ModuleType) -> None:
        from lightning_flops.config import config_from
        from lightning_flops.doors.find_loop import LoopFinder

        config = config_from(self._settings, owner="run")
        self._finder = LoopFinder(config, log_dir=self._log_dir, announce=_say)

    def close(self, error: BaseException | None) -> None:
        """The program is over, or *error* ends it: report what was measured, and say if nothing was."""
        try:
            self._report(error)
        finally:
            for name, value in self._environment.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def _report(self, error: BaseException | None) -> None:
        from lightning_flops.session.outcomes import OUTCOMES

        if self._finder is not None:
            self._finder.end(error)
        if self.silent or os.environ.get("RANK", "0") != "0":
            return
        if OUTCOMES.profiles:
            if not OUTCOMES.told:  # of a profiler that the program has itself
                _say(f"FLOPs of {OUTCOMES.latest} The report went where the program's own profiler has it.")
            self._tell_of_several(OUTCOMES)
            return
        _say(f"nothing was profiled: {self._reason(OUTCOMES)}")

    def _tell_of_several(self, outcomes: Outcomes) -> None:
        """If the program had several trainings, say in one last line what became of each."""
        found = () if self._finder is None else self._finder.loops
        of_found = frozenset[str]() if self._finder is None else self._finder.said
        frameworks = [one.line.rstrip(".") for one in outcomes.told if one.line not in of_found]
        if len(runs := [*frameworks, *found]) > 1:
            _say(f"trainings of this program: {'; '.join(f'({n}) {run}' for n, run in enumerate(runs, 1))}.")

    def _reason(self, outcomes: Outcomes) -> str:
        """Why nothing was profiled; without a full stop."""
        if outcomes.sessions and self._settings.get("timer_only"):
            return "timer_only was asked for; throughput is where the run's logs are"
        if outcomes.sessions:
            return "; ".join(dict.fromkeys(outcomes.reasons)) or "training ended before its step was counted to the end"
        if (switch := os.environ.get("LIGHTNING_FLOPS")) != "1":
            return f"LIGHTNING_FLOPS is {switch} in the environment"
        return "the program did not import torch" if self._finder is None else self._finder.reason


def _say(sentence: str) -> None:
    """Tell the user *sentence*, beside what the program itself prints."""
    with contextlib.suppress(Exception):  # standard error may be closed
        sys.stderr.write(f"{PROGRAM}: {printable(sentence)}\n")


def _install(deepspeed: ModuleType) -> None:
    from lightning_flops.deepspeed import install

    install()


def _write_page(options: argparse.Namespace) -> int:
    from lightning_flops.report.html_page import ShownRun, render_page
    from lightning_flops.sinks.file import write_text_file
    from lightning_flops.sinks.profile_files import read_runs

    output = options.output or _page_of(options.path)
    try:
        runs = read_runs(options.path)
        problems = [problem for run in runs for problem in run.problems]
        if not any(run.windows for run in runs):
            raise LightningFlopsError("; ".join(problems))
        page = render_page([ShownRun(name=one.name, windows=one.windows, problems=one.problems) for one in runs])
        write_text_file(output, page)
    except (LightningFlopsError, OSError) as error:
        sys.stderr.write(f"{PROGRAM}: {printable(str(error))}\n")
        return 1
    for problem in problems:
        _say(problem)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"{printable(output)}\n")
    return 0


def _page_of(path: str) -> str:
    """Where the page of what lies at *path* goes if nobody says: never to another machine."""
    if "://" in path or "::" in path:
        return "profile.html"
    return os.path.join(path, "profile.html") if os.path.isdir(path) else f"{os.path.splitext(path)[0]}.html"


def _print_trace(options: argparse.Namespace) -> int:
    try:
        report = _analyzed(options)
        _print(report.to_json() if options.json else _trace_text(report, options))
        if options.html is not None:
            _write_traces_page(report, options.html)
    except (LightningFlopsError, OSError) as error:
        sys.stderr.write(f"{PROGRAM}: {printable(str(error))}\n")
        return 2
    return 0


def _print(text: str) -> None:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a kernel's name must not fail for the terminal's encoding
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`). At exit Python would flush into it and report the error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_law(options: argparse.Namespace) -> int:
    try:
        _print(_law(options))
    except LightningFlopsError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 1
    return 0


def _law(options: argparse.Namespace) -> str:
    from lightning_flops.pytorch import flops_law
    from lightning_flops.report.law_text import render_law

    model, batch = _example(options.example)
    law = flops_law(model, batch, vary=dict(options.vary), causal_attention=options.causal_attention)
    for sizes in options.at:
        try:
            law(**sizes)
        except TypeError as error:
            raise LightningFlopsError(f"--at: {error}") from error
    return law.to_json() if options.json else render_law(law.report())


def _example(where: str) -> tuple[Any, Any]:
    """The model and the batch that the function named by *where* returns.

    Raises:
        LightningFlopsError: there is no such function, or it returns something else.
    """
    source, _, name = where.rpartition(":")
    try:
        if source.endswith(".py"):
            function = runpy.run_path(source)[name]
        else:
            sys.path.insert(0, os.getcwd())
            function = getattr(importlib.import_module(source), name)
        answer = function()
    except (ImportError, OSError, KeyError, AttributeError, ValueError) as error:
        raise LightningFlopsError(f"{where}: {type(error).__name__}: {error}") from error
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise LightningFlopsError(f"{where} must return a model and a batch, got {shown(answer)}")
    return answer


def _analyzed(options: argparse.Namespace) -> TracesReport:
    files = _trace_files(options.files)
    _refuse_repeated(files)
    try:
        from lightning_flops.analysis.trace import analyze_files
        from lightning_flops.config import AdviceThresholds
        from lightning_flops.sinks.progress import ProgressLine
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise LightningFlopsError("reading traces needs numpy: pip install 'lightning-flops[trace]'") from error
    progress = ProgressLine(sys.stderr)
    try:
        return analyze_files(
            files,
            thresholds=AdviceThresholds(**dict(options.threshold)),
            formulas=recorded_work if importlib.util.find_spec("torch") else None,
            processes=_processors(),
            progress=progress,
        )
    finally:
        progress.end()


def _trace_files(paths: Sequence[str]) -> list[str]:
    """*paths* with the trace files of each folder in its place."""
    from lightning_flops.sinks.trace_files import traces_in

    return [file for path in paths for file in (traces_in(path) if os.path.isdir(path) else (path,))]


def _trace_text(report: TracesReport, options: argparse.Namespace) -> str:
    from lightning_flops.report.trace_text import render_traces

    return render_traces(
        report,
        top_rows=options.rows or None,
        children=options.children,
        sort=options.sort,
        width=_terminal_width(),
    )


def _write_traces_page(report: TracesReport, path: str) -> None:
    from lightning_flops.report.html_page import render_traces_page
    from lightning_flops.sinks.file import write_text_file

    write_text_file(path, render_traces_page(report))


def recorded_work(call: RecordedCall) -> RecordedWork:
    """What a call in a trace spent, by the counter's formulas: the first call imports torch."""
    from lightning_flops.instrument.counting.recorded_calls import recorded_work

    return recorded_work(call)


def _processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _compare(options: argparse.Namespace) -> int:
    from lightning_flops.analysis.compare_rules import SETTING, judge, parse_condition
    from lightning_flops.sinks.file import write_text_file

    try:
        conditions = [parse_condition(text) for text in options.fail_if]
        comparison, text, page = _compared(options)
    except ConfigError as wrong:
        _complain(str(wrong).replace(SETTING, "--fail-if", 1))
        return 2
    except LightningFlopsError as error:
        _complain(str(error))
        return 2
    _print(comparison.to_json() if options.json else text)
    status = 0
    if options.html is not None:
        try:
            write_text_file(options.html, page)
        except OSError as error:
            _complain(str(error))
            status = 2
    for condition in conditions:
        try:
            verdict = judge(comparison, condition)
        except ComparisonError as error:
            _complain(f"--fail-if {error}")
            status = 2
            continue
        _complain(f"--fail-if '{condition.text}' {'holds' if verdict.holds else 'does not hold'}: {verdict.words}")
        status = max(status, int(verdict.holds))
    return status


def _compared(options: argparse.Namespace) -> tuple[Comparison | TraceComparison, str, str]:
    """The comparison, its text, and its page if one is wanted.

    Raises:
        LightningFlopsError: the two cannot be read or compared.
    """
    from lightning_flops.sinks.trace_files import traces_at

    traces = [traces_at(path) for path in (options.a, options.b)]
    if traces[0] is not None and traces[1] is not None:
        return _compared_traces(options, traces[0], traces[1])
    from lightning_flops.analysis.compare import compare_profiles
    from lightning_flops.report.compare_text import render_comparison
    from lightning_flops.sinks.profile_files import read_profile

    if any(files is not None for files in traces):
        trace, profile = (options.b, options.a) if traces[0] is None else (options.a, options.b)
        raise ComparisonError(_why_not_both_kinds(trace, *read_profile(profile)))
    (a, source_a), (b, source_b) = read_profile(options.a), read_profile(options.b)
    comparison = compare_profiles(a, b, sources=(source_a, source_b))
    page = "" if options.html is None else comparison.to_html()
    return comparison, render_comparison(comparison, width=_terminal_width()), page


def _compared_traces(
    options: argparse.Namespace, a: Sequence[str], b: Sequence[str]
) -> tuple[TraceComparison, str, str]:
    from lightning_flops.analysis.compare import NEEDS_NUMPY
    from lightning_flops.report.compare_traces_text import render_trace_comparison
    from lightning_flops.report.html_page import render_trace_comparison_page
    from lightning_flops.sinks.progress import ProgressLine

    if importlib.util.find_spec("numpy") is None:
        raise LightningFlopsError(NEEDS_NUMPY)
    from lightning_flops.analysis.trace import analyze_each, compare_traces

    progress = ProgressLine(sys.stderr)
    try:
        analyzed = analyze_each(
            [*a, *b],
            stepwise=True,
            formulas=recorded_work if importlib.util.find_spec("torch") else None,
            processes=_processors(),
            progress=progress,
        )
    finally:
        progress.end()
    sources = (options.a, options.b)
    comparison = compare_traces(analyzed[: len(a)], analyzed[len(a) :], sources=sources)
    page = "" if options.html is None else render_trace_comparison_page(comparison, sources=sources)
    return comparison, render_trace_comparison(comparison, width=_terminal_width()), page


def _why_not_both_kinds(trace: str, profile: Profile, source: str) -> str:
    kept = profile.traced.files if profile.traced is not None else ()
    return (
        f"{trace} is a trace and {source} a profile: a trace's steps ran under torch.profiler, which slows them down, "
        "and those that a profile times did not. Give two traces"
        + (f"; that of {source} is {kept[0]}" if kept else f"; {source} kept none, as trace_dir does")
    )


def _terminal_width() -> int | None:
    """Columns of the terminal; None where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def _complain(words: str) -> None:
    sys.stderr.write(f"{PROGRAM} compare: {printable(words)}\n")


def _refuse_repeated(files: Sequence[str]) -> None:
    """Refuse a file that is given twice: it would stand for two ranks."""
    seen: set[str] = set()
    for file in files:
        whole = file if "://" in file or "::" in file else os.path.realpath(file)
        if whole in seen:
            raise LightningFlopsError(f"{file}: given twice; give one trace for each rank")
        seen.add(whole)
