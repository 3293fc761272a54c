"""Every table that a torch trace file yields, for CPU and GPU traces alike.

Needs numpy, and neither torch nor a framework. A trace is loaded once, with ``load_trace``; each table is then a pure
function of it. Steps, in all tables, are the profiler's, each extended to the last device event that was launched in
it. Times are in microseconds, as in the file; what a trace does not contain is None.
"""

from lightning_flops.analysis.trace.columns import CollectiveArguments as CollectiveArguments
from lightning_flops.analysis.trace.columns import DeviceProperties as DeviceProperties
from lightning_flops.analysis.trace.columns import Lane as Lane
from lightning_flops.analysis.trace.columns import MemoryEvents as MemoryEvents
from lightning_flops.analysis.trace.columns import Trace as Trace
from lightning_flops.analysis.trace.communication import collective_table as collective_table
from lightning_flops.analysis.trace.communication import overlap as overlap
from lightning_flops.analysis.trace.device import device_metrics as device_metrics
from lightning_flops.analysis.trace.device import idle_times as idle_times
from lightning_flops.analysis.trace.device import kernel_summary as kernel_summary
from lightning_flops.analysis.trace.device import kernel_table as kernel_table
from lightning_flops.analysis.trace.device import launch_statistics as launch_statistics
from lightning_flops.analysis.trace.loading import TraceFormatError as TraceFormatError
from lightning_flops.analysis.trace.loading import load_trace as load_trace
from lightning_flops.analysis.trace.loading import trace_from_columns as trace_from_columns
from lightning_flops.analysis.trace.loading import trace_from_events as trace_from_events
from lightning_flops.analysis.trace.module_memory import module_memory_table as module_memory_table
from lightning_flops.analysis.trace.modules import module_table as module_table
from lightning_flops.analysis.trace.names import Kind as Kind
from lightning_flops.analysis.trace.operators import memory_table as memory_table
from lightning_flops.analysis.trace.operators import operator_table as operator_table
from lightning_flops.analysis.trace.parts import step_parts as step_parts
from lightning_flops.analysis.trace.phases import model_summary as model_summary
from lightning_flops.analysis.trace.ranks import RanksError as RanksError
from lightning_flops.analysis.trace.ranks import collective_calls as collective_calls
from lightning_flops.analysis.trace.ranks import compare_ranks as compare_ranks
from lightning_flops.analysis.trace.report import analyze_trace as analyze_trace
from lightning_flops.analysis.trace.report import analyze_traces as analyze_traces
from lightning_flops.analysis.trace.scopes import device_summary as device_summary
from lightning_flops.analysis.trace.scopes import overview as overview
from lightning_flops.analysis.trace.scopes import transfer_table as transfer_table
from lightning_flops.analysis.trace.scopes import user_scope_table as user_scope_table
from lightning_flops.analysis.trace.step_time import step_times as step_times
from lightning_flops.analysis.trace.structure import Steps as Steps
from lightning_flops.schema.communication import CollectiveRow as CollectiveRow
from lightning_flops.schema.communication import Overlap as Overlap
from lightning_flops.schema.communication import RankCollectiveRow as RankCollectiveRow
from lightning_flops.schema.communication import RankComparison as RankComparison
from lightning_flops.schema.communication import RankRow as RankRow
from lightning_flops.schema.trace import TracedPart as TracedPart
from lightning_flops.schema.trace import TraceReport as TraceReport
from lightning_flops.schema.trace import TracesReport as TracesReport
from lightning_flops.schema.trace_events import ChildRow as ChildRow
from lightning_flops.schema.trace_events import IdleTime as IdleTime
from lightning_flops.schema.trace_events import KernelRow as KernelRow
from lightning_flops.schema.trace_events import KernelSummary as KernelSummary
from lightning_flops.schema.trace_events import LaunchRow as LaunchRow
from lightning_flops.schema.trace_events import MemoryRow as MemoryRow
from lightning_flops.schema.trace_events import ModuleMemoryRow as ModuleMemoryRow
from lightning_flops.schema.trace_events import OperatorRow as OperatorRow
from lightning_flops.schema.trace_events import TransferRow as TransferRow
from lightning_flops.schema.trace_events import UserScopeRow as UserScopeRow
from lightning_flops.schema.trace_steps import DeviceMetrics as DeviceMetrics
from lightning_flops.schema.trace_steps import DeviceSummary as DeviceSummary
from lightning_flops.schema.trace_steps import DeviceUse as DeviceUse
from lightning_flops.schema.trace_steps import Durations as Durations
from lightning_flops.schema.trace_steps import ModelSummary as ModelSummary
from lightning_flops.schema.trace_steps import OverviewRow as OverviewRow
from lightning_flops.schema.trace_steps import PhaseRow as PhaseRow
from lightning_flops.schema.trace_steps import Remainder as Remainder
from lightning_flops.schema.trace_steps import StepTime as StepTime
from lightning_flops.schema.trace_steps import StepTimes as StepTimes
