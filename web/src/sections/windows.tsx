import type { JSX } from "preact";
import type { Run } from "../data";
import { duration, percent, plain, si } from "../model/format";
import { inOrder } from "../model/steps";
import { hrefOf, type Place } from "../place";
import { SearchableGrid } from "../ui/grid";
import { Section } from "../ui/section";
import { Strip } from "../ui/strip";

export function Windows(props: {
  run: Run;
  at: number;
  place: Place;
  go: (changes: Place) => void;
}): JSX.Element | null {
  const { run, at, place, go } = props;
  if (run.windows.length < 2) return null;
  const timed = run.windows.flatMap((one, window) => (one.global_step_sec === null ? [] : [{ one, window }]));
  const names = inOrder(new Set(timed.flatMap(({ one }) => Object.keys(one.parts_sec))));
  return (
    <Section
      id="windows"
      title="Windows"
      note={`This run was profiled ${plain(run.windows.length)} times; choose one to see it whole.`}
    >
      {timed.length ? (
        <Strip
          caption="Windows of the run"
          axis="step"
          names={names}
          items={timed.map(({ one }) => ({
            label: `step ${one.profile_step}`,
            parts: one.parts_sec,
            total: one.global_step_sec as number,
            words: [`MFU ${percent(one.mfu)}`],
          }))}
          selected={timed.findIndex(({ window }) => window === at)}
          onSelect={(chosen) => go({ window: String(timed[chosen]?.window ?? 0) })}
        />
      ) : null}
      <SearchableGrid
        caption="Windows of the run"
        what="windows"
        searched={(one) => `${one.figures.profile_step} ${one.figures.advice[0] ?? ""}`}
        first={{ key: "step", down: false }}
        keyOf={(one) => one.window}
        rows={run.windows.map((figures, window) => ({ figures, window }))}
        rowClass={(one) => (one.window === at ? "current" : "")}
        onOpen={(one) => go({ window: String(one.window) })}
        columns={[
          {
            key: "step",
            label: "counted step",
            text: true,
            value: (one) => one.figures.profile_step,
            cell: ({ figures, window }) =>
              window === at ? (
                <b aria-current="true">{plain(figures.profile_step)}</b>
              ) : (
                <a href={hrefOf(place, { window: String(window) })}>{plain(figures.profile_step)}</a>
              ),
          },
          {
            key: "time",
            label: "step time",
            value: (one) => one.figures.global_step_sec,
            cell: (one) => duration(one.figures.global_step_sec),
          },
          {
            key: "samples",
            label: "samples/s",
            value: (one) => one.figures.samples_per_sec,
            cell: (one) => plain(one.figures.samples_per_sec),
          },
          { key: "mfu", label: "MFU", value: (one) => one.figures.mfu, cell: (one) => percent(one.figures.mfu) },
          {
            key: "flops",
            label: "FLOPs",
            value: (one) => one.figures.model_flops,
            cell: (one) => si(one.figures.model_flops),
          },
          {
            key: "advice",
            label: "first advice",
            text: true,
            value: (one) => one.figures.advice[0] ?? null,
            cell: (one) => one.figures.advice[0]?.replaceAll("_", " ") ?? "",
          },
        ]}
        height={320}
      />
    </Section>
  );
}
