import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { counted, duration, listed, plain } from "../model/format";
import { inOrder, outliers, partLabel, timedSteps } from "../model/steps";
import type { Profile } from "../schema";
import { AsTable, PlainTable, Section } from "../ui/section";
import { Strip } from "../ui/strip";
import { Term } from "../ui/tip";

export function Steps({ profile }: { profile: Profile }): JSX.Element | null {
  const steps = useMemo(() => timedSteps(profile), [profile]);
  const timing = profile.timing;
  if (timing === null) return null;
  const spread = timing.parts.map((one) => [
    <Term word={partLabel(one.name)} />,
    duration(one.mean_sec),
    duration(one.minimum_sec),
    duration(one.median_sec),
    duration(one.maximum_sec),
    duration(one.deviation_sec),
  ]);
  const whole = timing.global_step;
  spread.push([
    <Term word="global step" />,
    duration(whole.mean_sec),
    duration(whole.minimum_sec),
    duration(whole.median_sec),
    duration(whole.maximum_sec),
    duration(whole.deviation_sec),
  ]);
  const far = outliers(steps.map((one) => one.seconds));
  const names = inOrder(timing.parts.map((one) => one.name));
  return (
    <Section
      id="steps"
      title="Timed steps"
      note={
        <>
          {counted(timing.timed_steps, "step")} one by one.{" "}
          {steps.length ? (
            far.length ? (
              <>
                {counted(far.length, "outlier")} (<Term word="outlier">far above the others</Term>): step{" "}
                {listed(far.slice(0, 6).map((one) => plain(steps[one]?.index)))}
                {far.length > 6 ? ` and ${far.length - 6} more` : ""}.
              </>
            ) : (
              <>
                No <Term word="outlier" />.
              </>
            )
          ) : null}
        </>
      }
    >
      {steps.length ? (
        <>
          <Strip
            caption="Timed steps"
            axis="step"
            names={names}
            items={steps.map((one) => ({ label: `step ${one.index}`, parts: one.parts, total: one.seconds }))}
            marked={new Map(far.map((one) => [one, "▼"]))}
          />
          <AsTable
            caption="Every timed step, as a table"
            head={["step", ...names.map(partLabel), "all"]}
            rows={steps.map((one) => [
              one.index,
              ...names.map((name) => duration(one.parts[name])),
              duration(one.seconds),
            ])}
          />
        </>
      ) : null}
      <PlainTable
        caption="Spread of the timed steps"
        head={["part", "mean", "least", "median", "most", "deviation"]}
        rows={spread}
      />
    </Section>
  );
}
