import type { JSX } from "preact";
import { percent } from "../model/format";
import type { Advice as Piece } from "../schema";
import { Section } from "../ui/section";
import { Term } from "../ui/tip";

export function Advice({ advice }: { advice: readonly Piece[] }): JSX.Element {
  return (
    <Section id="advice" title="Advice" note="What holds the run back, the most at stake first, with what shows it.">
      {advice.length === 0 ? <p class="dim">Nothing that was measured is over its threshold.</p> : null}
      <ol class="advice">
        {advice.map((one, at) => (
          <li key={at} id={`advice-${one.rule}`}>
            <div class="stake">
              {one.stake !== null ? (
                <>
                  <b>{percent(one.stake, 1)}</b>
                  <span class="meter" aria-hidden="true">
                    <span style={{ width: `${Math.min(100, one.stake * 100)}%` }} />
                  </span>
                  <Term word="at stake">of the step</Term>
                </>
              ) : (
                <span class="dim">stake n/a</span>
              )}
            </div>
            <div>
              <p>
                <b>{one.action}</b>
              </p>
              <p>{one.evidence}</p>
              <p class="dim">
                Threshold: {one.threshold}. Source: {one.source}. Rule: <code>{one.rule}</code>.
              </p>
            </div>
          </li>
        ))}
      </ol>
    </Section>
  );
}
