import type { JSX } from "preact";
import { bytes, duration, percent, plain } from "../model/format";
import { stepsOf, stepWord } from "../model/trace";
import type { CollectiveRow, TraceReport } from "../schema";
import { StackedBar } from "../ui/bar";
import { SearchableGrid } from "../ui/grid";
import { Section, ShareCell } from "../ui/section";
import { Term } from "../ui/tip";

/** What of a trace's steps was communication, what computation hid it, and each collective. */
export function Communication({ trace }: { trace: TraceReport }): JSX.Element | null {
  const share = trace.overlap;
  if (share === null) return null;
  const steps = stepsOf(trace);
  const sec = (us: number): number => us / 1e6 / steps;
  return (
    <Section
      id="communication"
      title="Communication"
      note={
        <>
          Of one {stepWord(trace)}; events that overlap are merged. {percent(share.overlap_ratio, 1)} of the
          communication is hidden by computation, the rest is <Term word="exposed" />.
        </>
      }
    >
      <StackedBar
        caption="Computation and communication"
        whole={sec(share.wall_us)}
        table
        parts={[
          {
            key: "computation",
            label: "computation alone",
            seconds: sec(share.computation_us - share.overlap_us),
            color: "var(--part-forward)",
          },
          { key: "both", label: "both at once", seconds: sec(share.overlap_us), color: "var(--part-backward)" },
          {
            key: "exposed",
            label: "communication alone",
            seconds: sec(share.communication_us - share.overlap_us),
            color: "var(--part-communication)",
          },
          { key: "neither", label: "neither", seconds: sec(share.other_us), color: "var(--part-other)" },
        ]}
      />
      {trace.collectives?.length ? <Collectives rows={trace.collectives} steps={steps} /> : null}
    </Section>
  );
}

function Collectives({ rows, steps }: { rows: readonly CollectiveRow[]; steps: number }): JSX.Element {
  return (
    <SearchableGrid
      caption="Collectives"
      what="collectives"
      searched={(one) => one.name}
      first={{ key: "time", down: true }}
      keyOf={(one) => one.name}
      rows={rows}
      columns={[
        {
          key: "name",
          label: "collective",
          text: true,
          value: (one) => one.name,
          cell: (one) => <code>{one.name}</code>,
        },
        {
          key: "time",
          label: "time",
          word: "of all calls",
          value: (one) => one.latency.total_us,
          cell: (one) => (
            <ShareCell share={one.latency.ratio}>{duration(one.latency.total_us / 1e6 / steps)}</ShareCell>
          ),
        },
        { key: "calls", label: "calls", value: (one) => one.calls, cell: (one) => plain(one.calls / steps) },
        {
          key: "bytes",
          label: "bytes",
          word: "bytes sent",
          value: (one) => one.bytes,
          cell: (one) => (one.bytes === null ? "n/a" : bytes(one.bytes / steps)),
        },
        {
          key: "mean",
          label: "of a call",
          value: (one) => one.latency.mean_us,
          cell: (one) => duration(one.latency.mean_us / 1e6),
        },
        {
          key: "least",
          label: "least",
          value: (one) => one.latency.min_us,
          cell: (one) => duration(one.latency.min_us / 1e6),
        },
        {
          key: "most",
          label: "most",
          value: (one) => one.latency.max_us,
          cell: (one) => duration(one.latency.max_us / 1e6),
        },
      ]}
      height={300}
    />
  );
}
