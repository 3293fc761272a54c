import type { JSX } from "preact";
import { budgetColor } from "../model/budget";
import { duration, percent } from "../model/format";
import type { Budget as Account, Profile } from "../schema";
import { StackedBar } from "../ui/bar";
import { PlainTable, Section, ShareCell } from "../ui/section";
import { Term } from "../ui/tip";

export function Budget({ profile }: { profile: Profile }): JSX.Element | null {
  const { budget } = profile;
  if (budget === null || budget.wall_ns <= 0) return null;
  const sec = (ns: number): number => ns / 1e9;
  const explained = budget.rows.some((one) => one.memory_ns !== null);
  return (
    <Section
      id="budget"
      title="Budget"
      note={
        <>
          Where {budget.knows_peak ? "peak × time" : "the time"} of one step of {duration(sec(budget.wall_ns))} went;
          the rows add up to it.
          {budget.traced_step !== null
            ? " Times of phases are of the timed steps, shares inside a phase of the traced step."
            : ""}
          {budget.knows_peak ? "" : " Without a known peak the rows are times only."}
        </>
      }
    >
      <StackedBar
        caption="Budget of the step"
        whole={sec(budget.wall_ns)}
        parts={budget.rows.map((one) => ({
          key: one.key,
          label: one.label,
          seconds: sec(one.time_ns),
          color: budgetColor(one.key),
        }))}
      />
      <PlainTable
        caption="Budget of the step"
        head={[
          "row",
          "time",
          "share",
          ...(explained ? [<Term word="explained by memory" />] : []),
          "advice that lowers it",
        ]}
        text={[0, explained ? 4 : 3]}
        rows={budget.rows.map((one) => [
          <>
            <span class="swatch" style={{ background: budgetColor(one.key) }} aria-hidden="true" /> {one.label}
            {one.joined.length ? (
              <span class="dim"> (with {one.joined.map((key) => key.replaceAll("_", " ")).join(", ")})</span>
            ) : null}
          </>,
          duration(sec(one.time_ns)),
          <ShareCell share={one.time_ns / budget.wall_ns}>{percent(one.time_ns / budget.wall_ns)}</ShareCell>,
          ...(explained ? [one.memory_ns === null ? "" : `at most ${duration(sec(one.memory_ns))}`] : []),
          one.advice.map((rule, at) => (
            <>
              {at ? ", " : ""}
              <a
                href={`#advice-${rule}`}
                onClick={(event) => {
                  event.preventDefault();
                  document.getElementById(`advice-${rule}`)?.scrollIntoView({ block: "center" });
                }}
              >
                {rule.replaceAll("_", " ")}
              </a>
            </>
          )),
        ])}
      />
      <Run budget={budget} />
      {budget.notes.map((one) => (
        <p key={one} class="note">
          {one}
        </p>
      ))}
    </Section>
  );
}

function Run({ budget }: { budget: Account }): JSX.Element | null {
  const whole = budget.run.reduce((sum, one) => sum + one.time_ns, 0);
  if (budget.run.length < 2 || whole <= 0) return null;
  return (
    <p class="note">
      The run while the profiler's window was open ({duration(whole / 1e9)}):{" "}
      {budget.run
        .map(
          (one, at) =>
            `${at ? ", " : ""}${one.label} ${duration(one.time_ns / 1e9)} (${percent(one.time_ns / whole, 1)})`,
        )
        .join("")}
      .
    </p>
  );
}
