// The page of traces: the one that the address names, section by section, and all of them side by side.

import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import type { Source, TracesDocument } from "./data";
import { counted, plain } from "./model/format";
import { type ModuleTree, tracedTree } from "./model/modules";
import { traceChart } from "./model/roofline";
import { stepWord, tracedOperators } from "./model/trace";
import { usePlace } from "./place";
import type { TraceReport } from "./schema";
import { Advice } from "./sections/advice";
import { Communication } from "./sections/communication";
import { HostAndDevice } from "./sections/host_and_device";
import { Modules } from "./sections/modules";
import { Kernels } from "./sections/operators";
import { Phases } from "./sections/phases";
import { Roofline } from "./sections/roofline";
import { TraceAnswer } from "./sections/trace_answer";
import { TraceMemory } from "./sections/trace_memory";
import { TraceOperators } from "./sections/trace_operators";
import { TraceProvenance } from "./sections/trace_provenance";
import { TraceRanks } from "./sections/trace_ranks";
import { TraceSteps } from "./sections/trace_steps";
import { Tip } from "./ui/tip";
import { Colours, Pick, Top, useLater, usePromised } from "./ui/top";

export function Traces({ source, document }: { source: Source; document: TracesDocument }): JSX.Element {
  const [place, go] = usePlace();
  const at = Math.max(
    0,
    document.traces.findIndex((one) => one.name === place["trace"]),
  );
  const figures = document.traces[at];
  const { trace: read, together } = source;
  const [trace, problem] = usePromised(read ? () => read(at) : null, [source, at]);
  const [report, reason] = usePromised(together ?? null, [source]);
  const tree = useMemo(() => (trace ? tracedTree(trace) : null), [trace]);
  const operators = useMemo(() => (trace ? tracedOperators(trace) : []), [trace]);
  const chart = useMemo(() => (trace ? traceChart(trace) : null), [trace]);
  const whole = useLater(report ? trace : null);

  // What depends on the trace alone is not drawn again when the place changes.
  const ofTrace = useMemo(
    () =>
      trace && chart ? (
        <>
          <Roofline {...chart} note={rooflineNote(trace)} />
          <TraceOperators key={trace.source} trace={trace} operators={operators} />
          <Kernels tables={trace} of={trace.step_times.marked ? "steps of the trace" : "trace"} />
          <Communication trace={trace} />
          <TraceMemory trace={trace} />
          <HostAndDevice trace={trace} />
        </>
      ) : null,
    [trace, chart, operators],
  );
  const shown = trace && report && figures;
  return (
    <>
      <Top
        title={figures?.name ?? "Traces"}
        where={trace ? whereOf(trace, document) : ""}
        sections={trace ? sectionsOf(trace, { tree, several: document.traces.length > 1, roofline: chart }) : []}
      >
        <Pick
          label={document.ranks ? "Rank" : "Trace"}
          value={figures?.name ?? ""}
          options={document.traces.map((one) => [one.name, one.name])}
          onPick={(name) => go({ trace: name, module: "" })}
        />
        <Colours />
      </Top>
      <main aria-busy={whole === null || whole !== trace}>
        {problem || reason ? (
          <p class="callout" role="alert">
            This trace cannot be shown: {problem || reason}
          </p>
        ) : null}
        {shown ? (
          <>
            <TraceAnswer trace={trace} figures={figures} operators={operators} advice={report.advice} />
            <TraceRanks document={document} report={report} at={at} place={place} go={go} />
            <TraceSteps trace={trace} />
            <Phases trace={trace} />
            {tree ? <Modules tree={tree} note={modulesNote(trace)} place={place} go={go} /> : null}
            {whole === trace ? ofTrace : null}
            <Advice advice={report.advice} />
            <TraceProvenance trace={trace} figures={figures} writtenBy={document.written_by} />
          </>
        ) : null}
      </main>
      <Tip />
    </>
  );
}

function modulesNote(trace: TraceReport): string {
  const clock = trace.modules?.clock === "device" ? "of the work on the device" : "on the host";
  return `Of one ${stepWord(trace)}; times are ${clock}${trace.flops ? ", FLOPs are worked out from shapes" : ""}.`;
}

function rooflineNote(trace: TraceReport): string {
  const roof = trace.flops?.memory_bytes_per_sec == null ? " The bandwidth of the memory is not known." : "";
  return `FLOPs and bytes are worked out from shapes; all of one ${stepWord(trace)}.${roof}`;
}

function whereOf(trace: TraceReport, document: TracesDocument): string {
  const devices = trace.device_metrics;
  return [
    trace.flops?.device ?? devices?.[0]?.name ?? (devices ? "unknown device" : "host alone"),
    document.traces.length > 1 ? counted(document.traces.length, document.ranks ? "rank" : "trace") : "",
    trace.step_times.marked ? counted(trace.step_times.steps.length, "step") : "no marks of steps",
    `${plain(trace.events)} events`,
  ]
    .filter(Boolean)
    .join(" · ");
}

function sectionsOf(
  trace: TraceReport,
  has: { tree: ModuleTree | null; several: boolean; roofline: ReturnType<typeof traceChart> | null },
): [string, string][] {
  const all: [string, string, boolean][] = [
    ["answer", "Answer", true],
    ["ranks", "Side by side", has.several],
    ["steps", "Steps", true],
    ["phases", "Phases", true],
    ["modules", "Modules", has.tree !== null],
    ["roofline", "Roofline", (has.roofline?.operators.length ?? 0) > 0],
    ["operators", "Operators", (trace.operators?.length ?? 0) > 0],
    ["kernels", "Kernels", (trace.kernels?.length ?? 0) > 0],
    ["communication", "Communication", trace.overlap !== null],
    ["memory", "Memory", (trace.memory_curves?.length ?? trace.memory?.length ?? 0) > 0],
    ["processors", "Host and device", true],
    ["advice", "Advice", true],
    ["provenance", "Provenance", true],
  ];
  return all.filter(([, , is]) => is).map(([id, title]) => [id, title]);
}
