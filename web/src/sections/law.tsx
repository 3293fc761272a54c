import type { JSX } from "preact";
import type { WindowFigures } from "../data";
import { counted, duration, percent, plain, si } from "../model/format";
import type { LengthRow, Profile } from "../schema";
import { PlainTable, Section, ShareCell } from "../ui/section";
import { Term } from "../ui/tip";

/** The law of the FLOPs where sizes varied, and the steps by length; or why there is none. */
export function Law({ profile, figures }: { profile: Profile; figures: WindowFigures }): JSX.Element | null {
  const { law: words, no_law: reason } = figures;
  if (!words && !reason) return null;
  const lengths = profile.law?.lengths ?? [];
  return (
    <Section
      id="law"
      title="FLOPs by size"
      note={
        words ? (
          <>
            The <Term word="law">law of the FLOPs</Term> of a batch. {words.support}
          </>
        ) : null
      }
    >
      {words ? (
        <ul class="formulas">
          {words.formulas.map((one) => (
            <li key={one}>
              <code>{one}</code>
            </li>
          ))}
        </ul>
      ) : (
        <p>{reason}</p>
      )}
      {words && lengths.length ? <Lengths lengths={lengths} name={words.length} /> : null}
    </Section>
  );
}

function Lengths({ lengths, name }: { lengths: readonly LengthRow[]; name: string }): JSX.Element {
  const whole = lengths.reduce((sum, one) => sum + one.steps, 0);
  return (
    <>
      <h3>{counted(whole, "step")} by length</h3>
      <PlainTable
        caption="Steps by length"
        head={[`length (${name})`, "of the steps", "model FLOPs", "step time", "MFU"]}
        rows={lengths.map((one) => [
          one.shortest === one.longest ? plain(one.shortest) : `${plain(one.shortest)}–${plain(one.longest)}`,
          <ShareCell share={one.steps / whole}>{percent(one.steps / whole)}</ShareCell>,
          si(one.model_flops),
          duration(one.step_sec),
          percent(one.mfu),
        ])}
      />
    </>
  );
}
