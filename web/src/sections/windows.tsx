import type { JSX } from "preact";
import type { Run } from "../data";
import { duration, percent, plain } from "../model/format";
import { inOrder } from "../model/steps";
import { hrefOf, type Place } from "../place";
import { PlainTable, Section } from "../ui/section";
import { Strip } from "../ui/strip";
import { Term } from "../ui/tip";

export function Windows(props: { run: Run; at: number; place: Place; go: (changes: Place) => void }): JSX.Element | null {
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
      <PlainTable
        caption="Windows of the run"
        head={["counted step", <Term word="step time" />, <Term word="samples/s" />, <Term word="MFU" />, "first advice"]}
        text={[0, 4]}
        rows={run.windows.map((one, window) => [
          window === at ? (
            <b aria-current="true">{plain(one.profile_step)}</b>
          ) : (
            <a href={hrefOf(place, { window: String(window) })}>{plain(one.profile_step)}</a>
          ),
          duration(one.global_step_sec),
          plain(one.samples_per_sec),
          percent(one.mfu),
          one.advice?.replaceAll("_", " ") ?? "",
        ])}
      />
    </Section>
  );
}
