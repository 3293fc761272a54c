import type { JSX } from "preact";
import { bytes, percent } from "../model/format";
import { partLabel } from "../model/steps";
import type { Profile } from "../schema";
import { PlainTable, Section } from "../ui/section";
import { Term } from "../ui/tip";
import { MemoryOverTime } from "./memory_curve";

const FILLS: Record<string, string> = {
  parameters: "var(--part-forward)",
  buffers: "var(--part-transfer)",
  gradients: "var(--part-backward)",
  "optimizer states": "var(--part-optimizer)",
  "kept by the forward": "var(--part-bubble)",
  "everything else": "var(--part-other)",
};

const OF_TRACED_STEP = (
  <>
    Memory over time is of the <Term word="traced step" />.
  </>
);

export function Memory({ profile }: { profile: Profile }): JSX.Element | null {
  const memory = profile.memory;
  const curves = profile.traced?.tables?.memory_curves ?? [];
  if (memory === null) {
    return curves.length ? (
      <Section id="memory" title="Memory" note={OF_TRACED_STEP}>
        <MemoryOverTime curves={curves} />
      </Section>
    ) : null;
  }
  const peaks = memory.phases.flatMap((one) => one.peak_bytes ?? []);
  const held = memory.phases.flatMap((one) => one.current_bytes ?? []);
  const peak = memory.run_peak_bytes ?? Math.max(0, ...peaks, ...held);
  const known: [string, number | null][] = [
    ["parameters", memory.parameter_bytes],
    ["buffers", memory.buffer_bytes],
    ["gradients", memory.gradient_bytes],
    ["optimizer states", memory.optimizer_bytes],
    ["kept by the forward", memory.kept_by_forward_bytes],
  ];
  const named = known.reduce((sum, [, value]) => sum + (value ?? 0), 0);
  const shown = known.filter((one): one is [string, number] => (one[1] ?? 0) > 0);
  if (memory.kind === "allocated" && peak > named) shown.push(["everything else", peak - named]);
  const whole = Math.max(peak, named) || 1;
  const resident = memory.kind === "resident";
  return (
    <Section
      id="memory"
      title="Memory"
      note={
        <>
          Of this rank in the counted step,{" "}
          {resident
            ? "of the whole process: what it is for is told by tensors, the rest is Python and its libraries"
            : "of tensors on the device"}
          .{peak ? ` Peak ${bytes(peak)}.` : ""}
        </>
      }
    >
      <figure class="bar-figure">
        <div class="bar" role="img" aria-label={shown.map(([name, value]) => `${name} ${bytes(value)}`).join(", ")}>
          {shown.map(([name, value]) => (
            <div key={name} class="bar-part" style={{ flexGrow: value / whole, background: FILLS[name] }} />
          ))}
          {resident && whole > named ? (
            <div class="bar-part rest" style={{ flexGrow: (whole - named) / whole }} />
          ) : null}
        </div>
        <ul class="legend">
          {shown.map(([name, value]) => (
            <li key={name}>
              <span class="swatch" style={{ background: FILLS[name] }} aria-hidden="true" />
              {name} <b>{bytes(value)}</b> <span class="dim">{percent(value / whole, 1)}</span>
            </li>
          ))}
          {resident && whole > named ? (
            <li>
              <span class="swatch rest" aria-hidden="true" />
              rest of the process <b>{bytes(whole - named)}</b>
            </li>
          ) : null}
        </ul>
      </figure>
      <PlainTable
        caption="Memory by phase"
        head={[
          "phase",
          "held at its end",
          "most in it",
          ...(resident ? [] : [<Term word="reserved">reserved at its end</Term>, "most reserved"]),
        ]}
        rows={memory.phases.map((one) => [
          partLabel(one.name),
          bytes(one.current_bytes),
          one.peak_bytes === null ? "no new peak" : bytes(one.peak_bytes),
          ...(resident
            ? []
            : [
                bytes(one.reserved_bytes),
                one.reserved_peak_bytes === null ? "no new peak" : bytes(one.reserved_peak_bytes),
              ]),
        ])}
      />
      {known.some(([, value]) => value === null) ? (
        <p class="note">
          n/a:{" "}
          {known
            .filter(([, value]) => value === null)
            .map(([name]) => name)
            .join(", ")}
          {resident ? " (resident memory does not tell)" : ""}.
        </p>
      ) : null}
      {curves.length ? <p class="note">{OF_TRACED_STEP}</p> : null}
      <MemoryOverTime curves={curves} />
    </Section>
  );
}
