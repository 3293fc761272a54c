import type { ComponentChildren, JSX } from "preact";
import type { TraceFigures } from "../data";
import { bytes, counted, duration, percent, plain, si } from "../model/format";
import { partColor } from "../model/steps";
import { kindsOf, shortPlace, stepsOf, type TracedOperator } from "../model/trace";
import type { Advice, TraceReport } from "../schema";
import { Cards, FirstAdvice } from "../ui/answer";
import { StackedBar } from "../ui/bar";
import { Section } from "../ui/section";

export function TraceAnswer(props: {
  trace: TraceReport;
  figures: TraceFigures;
  operators: readonly TracedOperator[];
  advice: readonly Advice[];
}): JSX.Element {
  const { trace, figures, operators, advice } = props;
  const times = trace.step_times;
  const steps = times.steps.length;
  const mean = times.mean;
  const wall = mean.wall_us / 1e6;
  const parts = kindsOf(mean);
  return (
    <Section
      id="answer"
      title="The answer"
      note={
        times.marked
          ? `Means over ${counted(steps, "step")} of the trace. A step lasts to the end of the last kernel that was launched in it.`
          : "The trace has no marks of steps: all of it is taken as one."
      }
    >
      <Cards cards={cardsOf(trace, figures)} />
      <StackedBar
        caption={`What fills ${times.marked ? "one step" : "the trace"} of ${duration(wall)}`}
        whole={wall}
        table
        parts={Object.entries(parts).map(([name, seconds]) => ({
          key: name,
          label: name,
          seconds,
          color: partColor(name),
        }))}
      />
      <div class="halves">
        <LongestOperators operators={operators} onDevice={trace.device_metrics !== null} />
        <FirstAdvice first={advice.slice(0, 3)} more={advice.length - 3} />
      </div>
    </Section>
  );
}

function cardsOf(trace: TraceReport, figures: TraceFigures): Parameters<typeof Cards>[0]["cards"] {
  const { device_metrics: devices, kernel_summary: kernels } = trace;
  const bound = figures.lower_bound ? "≥ " : "";
  const atLeast = (figure: string): string => (figure === "n/a" ? figure : bound + figure);
  const noFlops = figures.why_no_flops ?? undefined;
  const busy = devices?.map((one) => one.utilization) ?? [];
  const peak = peakOf(trace);
  const steps = trace.step_times.steps;
  const walls = steps.map((one) => one.wall_us / 1e6);
  const cards: { word: string; figure: string; below?: ComponentChildren; why?: string | undefined }[] = [
    {
      word: trace.step_times.marked ? "traced step time" : "traced time",
      figure: duration(figures.mean.wall_us / 1e6),
      below:
        walls.length > 1
          ? `${duration(Math.min(...walls))} to ${duration(Math.max(...walls))}`
          : trace.step_times.marked
            ? "of one step"
            : "from first to last event",
    },
    {
      word: "MFU",
      figure: atLeast(percent(figures.mfu)),
      below: peakWords(trace),
      why: figures.why_no_mfu ?? undefined,
    },
    {
      word: "HFU",
      figure: atLeast(percent(figures.hfu)),
      below: "with all that kernels execute",
      why: figures.why_no_mfu ?? undefined,
    },
    {
      word: "FLOPs",
      figure: figures.model_flops === null ? "n/a" : atLeast(si(figures.model_flops)),
      below: `forward ${si(figures.forward_flops)}, backward ${si(figures.backward_flops)}`,
      why: noFlops,
    },
    {
      word: "FLOP/s",
      figure:
        figures.hardware_flops === null
          ? "n/a"
          : atLeast(si(figures.mean.wall_us ? (figures.hardware_flops / figures.mean.wall_us) * 1e6 : null)),
      below: "executed, over the step's wall time",
      why: noFlops,
    },
    ...(busy.length
      ? [
          {
            word: "GPU utilization",
            figure: percent(busy.reduce((sum, one) => sum + one, 0) / busy.length, 1),
            below: "of the time a kernel ran",
          },
        ]
      : []),
    ...(kernels
      ? [
          {
            word: "kernels",
            figure: plain(Math.round(kernels.calls / stepsOf(trace))),
            below: `${percent(kernels.short_calls_ratio, 0)} shorter than 10 µs`,
          },
        ]
      : []),
    ...(peak ? [peak] : []),
  ];
  return cards;
}

/** Memory at its peak, where the file says what was allocated in all. */
function peakOf(trace: TraceReport): { word: string; figure: string; below: string } | null {
  const curves = trace.memory_curves ?? [];
  const curve = curves.find((one) => one.device_type === "device") ?? curves[0];
  if (!curve) return null;
  const where = curve.device_type === "host" ? "on the host" : `on device ${curve.device}`;
  return {
    word: "memory at its peak",
    figure: bytes(curve.peak_bytes),
    below: curve.absolute ? `of tensors ${where}` : `${where}, more than at first`,
  };
}

function peakWords({ flops }: TraceReport): string {
  const words = Object.entries(flops?.peaks ?? {})
    .slice(0, 2)
    .map(([dtype, peak]) => `${si(peak)}FLOP/s in ${dtype}`);
  return words.length ? `of ${words.join(", ")}` : "of the dense peak";
}

function LongestOperators(props: { operators: readonly TracedOperator[]; onDevice: boolean }): JSX.Element {
  const longest = props.operators.filter((one) => one.seconds).slice(0, 3);
  return (
    <div>
      <h3>Longest operators, {props.onDevice ? "on the device" : "on the host"}, without those they call</h3>
      {longest.length === 0 ? <p class="dim">n/a: the trace has no operators.</p> : null}
      <ol class="longest">
        {longest.map((one) => (
          <li key={one.name}>
            <code>{one.name}</code>
            <span class="dim" title={one.place ?? ""}>
              {one.place === null ? "" : shortPlace(one.place)}
            </span>
            <span class="longest-figure">
              {duration(one.seconds)} <b>{percent(one.share, 1)}</b> <span class="dim">of all operators</span>
            </span>
            <span class="meter" aria-hidden="true">
              <span style={{ width: `${100 * (one.share ?? 0)}%` }} />
            </span>
          </li>
        ))}
      </ol>
    </div>
  );
}
