import type { JSX } from "preact";
import type { TraceFigures } from "../data";
import { plain, si } from "../model/format";
import { stepName } from "../model/trace";
import type { TraceReport } from "../schema";
import { PlainTable, Section } from "../ui/section";
import { Term } from "../ui/tip";

export function TraceProvenance(props: { trace: TraceReport; figures: TraceFigures; writtenBy: string }): JSX.Element {
  const { trace, figures, writtenBy } = props;
  const { flops, step_times: times } = trace;
  const steps = times.steps;
  const first = stepName(steps[0]?.number ?? null);
  const rows: [string, string][] = [
    ["file", figures.source],
    ["events", plain(trace.events)],
    ["rank", trace.rank === null ? "n/a: the file does not say" : plain(trace.rank)],
    [
      "steps",
      times.marked
        ? `${plain(steps.length)}: ${steps.length > 1 ? `${first} to ${stepName(steps.at(-1)?.number ?? null)}` : first}`
        : "none marked: the whole trace is taken as one",
    ],
    ["device", deviceWords(trace)],
    ...(flops
      ? ([
          [
            "dense peaks",
            Object.entries(flops.peaks)
              .map(([dtype, peak]) => `${si(peak, "FLOP/s")} in ${dtype}`)
              .join(", ") || "n/a",
          ],
          ["memory bandwidth", si(flops.memory_bytes_per_sec, "B/s")],
          ["FLOPs outside of steps", si(flops.outside_steps, "FLOPs")],
        ] as [string, string][])
      : []),
    ["modules", modulesWords(trace)],
    ["written by", `lightning-flops ${writtenBy}`],
  ];
  return (
    <Section id="provenance" title="Where the figures come from">
      <dl class="facts">
        {rows.map(([term, fact]) => (
          <div key={term}>
            <dt>{term}</dt>
            <dd>{fact}</dd>
          </div>
        ))}
      </dl>
      {flops?.lower_bound ? (
        <p class="callout">
          FLOPs and their rates are a <Term word="lower bound" />: something that ran could not be counted.
        </p>
      ) : null}
      {flops?.uncounted.length ? (
        <>
          <h3>Not counted</h3>
          <PlainTable
            caption="What may have spent FLOPs and was not counted"
            head={["name", "calls", "why"]}
            text={[0, 2]}
            rows={flops.uncounted.slice(0, 60).map((one) => [<code>{one.name}</code>, plain(one.calls), one.reason])}
          />
          {flops.uncounted.length > 60 ? <p class="note">and {plain(flops.uncounted.length - 60)} more</p> : null}
        </>
      ) : null}
      {trace.notes.length ? (
        <>
          <h3>Notes</h3>
          <ul class="plain-list">
            {trace.notes.map((one) => (
              <li key={one}>{one}</li>
            ))}
          </ul>
        </>
      ) : null}
    </Section>
  );
}

function deviceWords({ device_metrics: metrics, flops }: TraceReport): string {
  if (metrics === null) return "none in the trace: times are the host's";
  if (flops?.device) return `${flops.devices > 1 ? `${plain(flops.devices)} × ` : ""}${flops.device}`;
  const names = [...new Set(metrics.map((one) => one.name ?? "not described in the trace"))];
  return names.join(", ");
}

function modulesWords({ modules }: TraceReport): string {
  if (modules === null) return "none in the trace (with_stack=True shows them)";
  return `${plain(modules.rows.length)}, timed on the ${modules.clock}`;
}
