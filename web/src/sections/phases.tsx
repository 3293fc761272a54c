import type { JSX } from "preact";
import { duration, percent, plain } from "../model/format";
import { partColor } from "../model/steps";
import { perStep, stepsOf, stepWord } from "../model/trace";
import type { Durations, PhaseRow, TraceReport } from "../schema";
import { StackedBar } from "../ui/bar";
import { PlainTable, Section, ShareCell } from "../ui/section";
import { Term } from "../ui/tip";

/** Forward, backward and optimizer of a trace's steps, on the host's clock and by the device work they launched. */
export function Phases({ trace }: { trace: TraceReport }): JSX.Element {
  const summary = trace.model_summary;
  const steps = stepsOf(trace);
  const onDevice = summary.step.device !== null;
  const phases: [string, PhaseRow | null][] = [
    ["data loader", summary.data_loader],
    ["forward", summary.forward],
    ["backward", summary.backward],
    ["optimizer", summary.optimizer],
  ];
  const found = phases.some(([, row]) => row?.source === "operators");
  const time = (durations: Durations | null | undefined): string => duration(perStep(durations, steps));
  const share = (durations: Durations | null | undefined): JSX.Element => (
    <ShareCell share={durations?.ratio ?? null}>{percent(durations?.ratio, 1)}</ShareCell>
  );
  return (
    <Section
      id="phases"
      title="Phases"
      note={
        <>
          Of one {stepWord(trace)}, on the host's clock
          {onDevice ? ", and the device work that was launched in them" : ""}.
          {found ? " *: has no scope in the trace and is found by its operators." : ""} A phase that is n/a cannot be
          found; its time is in the rest.
        </>
      }
    >
      <PhaseBar trace={trace} phases={phases} />
      <PlainTable
        caption="Phases"
        head={["phase", "calls", "host", "share", ...(onDevice ? ["device", "share"] : [])]}
        rows={[
          ...phases.map(([name, row]) => [
            <>
              <Term word={name} />
              {row?.source === "operators" ? " *" : ""}
            </>,
            row ? plain(row.calls / steps) : "n/a",
            time(row?.host),
            share(row?.host),
            ...(onDevice ? [time(row?.device), share(row?.device)] : []),
          ]),
          [
            "the rest",
            "",
            duration(summary.others.host_us / 1e6 / steps),
            <ShareCell share={summary.others.host_ratio}>{percent(summary.others.host_ratio, 1)}</ShareCell>,
            ...(onDevice
              ? [
                  duration(summary.others.device_us === null ? null : summary.others.device_us / 1e6 / steps),
                  <ShareCell share={summary.others.device_ratio}>{percent(summary.others.device_ratio, 1)}</ShareCell>,
                ]
              : []),
          ],
          [
            <b>{stepWord(trace)}</b>,
            plain(summary.step.calls / steps),
            time(summary.step.host),
            "",
            ...(onDevice ? [time(summary.step.device), ""] : []),
          ],
        ]}
      />
    </Section>
  );
}

/** The phases as one bar, by the device work they launched if there is any; nothing where they overlap. */
function PhaseBar(props: { trace: TraceReport; phases: readonly [string, PhaseRow | null][] }): JSX.Element | null {
  const { trace, phases } = props;
  const { step, others } = trace.model_summary;
  const onDevice = step.device !== null && step.device.total_us > 0;
  const steps = stepsOf(trace);
  const whole = perStep(onDevice ? step.device : step.host, steps) ?? 0;
  const rest = ((onDevice ? others.device_us : others.host_us) ?? 0) / 1e6 / steps;
  const parts = phases.flatMap(([name, row]) => {
    const seconds = perStep(onDevice ? row?.device : row?.host, steps);
    return seconds ? [{ key: name, label: name, seconds, color: partColor(name) }] : [];
  });
  const sum = parts.reduce((all, one) => all + one.seconds, rest);
  if (!parts.length || whole <= 0 || Math.abs(sum - whole) > 0.001 * whole) return null;
  return (
    <StackedBar
      caption={onDevice ? "Device work by the phase that launched it" : "Phases on the host's clock"}
      whole={whole}
      parts={[...parts, { key: "rest", label: "the rest", seconds: rest, color: "var(--part-other)" }]}
    />
  );
}
