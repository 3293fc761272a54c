import type { JSX } from "preact";
import { duration, percent, si } from "../model/format";
import { countedOf, KIND_NAMES, kindsOf, stepName } from "../model/trace";
import type { StepTime, TracedStepFlops, TraceReport } from "../schema";
import { SearchableGrid } from "../ui/grid";
import { Section } from "../ui/section";
import { Strip } from "../ui/strip";

interface Row {
  step: StepTime;
  index: number;
  flops: TracedStepFlops | null;
  parts: Record<string, number>;
}

/** Each step of a trace: what filled it, its FLOPs, its MFU. */
export function TraceSteps({ trace }: { trace: TraceReport }): JSX.Element {
  const rows = trace.step_times.steps.map((step, index): Row => {
    return { step, index, flops: trace.flops?.steps[index] ?? null, parts: kindsOf(step) };
  });
  const used = KIND_NAMES.filter((name) => rows.some((one) => one.parts[name]));
  const mark = (one: Row): string => (one.flops?.lower_bound ? "≥ " : "");
  return (
    <Section
      id="steps"
      title="Steps"
      note="Each moment counts once, under the first kind from the left that ran then; the kinds add up to the wall time."
    >
      {rows.length > 1 ? (
        <Strip
          caption="Steps of the trace"
          axis="step"
          names={used}
          items={rows.map((one) => ({
            label: stepName(one.step.number),
            parts: one.parts,
            total: one.step.wall_us / 1e6,
            words: one.flops ? [`MFU ${percent(one.flops.mfu)}`] : [],
          }))}
        />
      ) : null}
      <SearchableGrid
        caption="Steps"
        what="steps"
        searched={(one) => stepName(one.step.number)}
        first={{ key: "step", down: false }}
        keyOf={(one) => one.index}
        rows={rows}
        columns={[
          {
            key: "step",
            label: "step",
            text: true,
            value: (one) => one.index,
            cell: (one) => stepName(one.step.number),
          },
          {
            key: "wall",
            label: "wall time",
            value: (one) => one.step.wall_us,
            cell: (one) => duration(one.step.wall_us / 1e6),
          },
          ...used.map((name) => ({
            key: name,
            label: name,
            value: (one: Row) => one.parts[name] ?? 0,
            cell: (one: Row) => (one.parts[name] ? duration(one.parts[name]) : "–"),
          })),
          ...(trace.flops
            ? [
                {
                  key: "flops",
                  label: "FLOPs",
                  value: (one: Row) => (one.flops ? countedOf(one.flops) : null),
                  cell: (one: Row) => (one.flops ? `${mark(one)}${si(countedOf(one.flops))}` : "n/a"),
                },
                ...(["forward", "backward", "recompute", "optimizer"] as const)
                  .filter((part) => rows.some((one) => (one.flops?.[part] ?? 0) > 0))
                  .map((part) => ({
                    key: `flops ${part}`,
                    label: part,
                    word: "FLOPs",
                    value: (one: Row) => one.flops?.[part] ?? null,
                    cell: (one: Row) => (one.flops ? `${mark(one)}${si(one.flops[part])}` : "n/a"),
                  })),
                {
                  key: "mfu",
                  label: "MFU",
                  value: (one: Row) => one.flops?.mfu ?? null,
                  cell: (one: Row) => `${one.flops?.mfu == null ? "" : mark(one)}${percent(one.flops?.mfu)}`,
                },
                {
                  key: "hfu",
                  label: "HFU",
                  value: (one: Row) => one.flops?.hfu ?? null,
                  cell: (one: Row) => `${one.flops?.hfu == null ? "" : mark(one)}${percent(one.flops?.hfu)}`,
                },
              ]
            : []),
        ]}
        height={280}
      />
    </Section>
  );
}
