import type { ComponentChildren, JSX } from "preact";
import { counted, duration, listed, plain, runsOf, si } from "../model/format";
import type { Profile } from "../schema";
import { PlainTable, Section } from "../ui/section";
import { Term } from "../ui/tip";

export function Provenance({ profile, writtenBy }: { profile: Profile; writtenBy: string }): JSX.Element {
  const { context, settings, traced } = profile;
  const rows: [ComponentChildren, ComponentChildren][] = [
    ["framework", `${context.framework} ${context.framework_version}, torch ${context.torch_version}`],
    [
      "device",
      `${context.device_name || "unknown"} (${context.device_type})${context.host ? ` on ${context.host}` : ""}`,
    ],
    ["precision", context.precision || "n/a"],
    ["ranks", ranksWords(profile)],
    [<Term word="counted step">counted</Term>, `step ${runsOf(profile.counted_steps) || "n/a"}`],
    [
      <Term word="timed steps">timed</Term>,
      profile.timed_steps.length ? `steps ${runsOf(profile.timed_steps)}` : "n/a: no step was timed",
    ],
    [
      <Term word="traced step">traced</Term>,
      traced
        ? `step ${traced.index}${traced.like_counted ? ", like the counted one" : ", unlike the counted one: no rates are made of both"}${traced.tables ? "" : " (modules by a clock, no trace)"}`
        : "n/a: no step was traced",
    ],
    ["trace files", traced?.files.length ? traced.files.join(", ") : "none kept"],
    [
      "batch",
      `${profile.samples === null ? "n/a" : plain(profile.samples)} samples a step on this rank, ${counted(profile.micro_steps, "micro-step")}${profile.variable ? "; shapes kept changing" : ""}`,
    ],
    [
      "causal attention",
      settings.causal_attention === "full"
        ? "counted over the full score matrix"
        : "counted over half of the score matrix",
    ],
    [
      "dtypes",
      profile.dtypes
        .filter((one) => one.hardware > 0)
        .map(
          (one) =>
            `${one.dtype} ${si(one.hardware / Math.max(1, profile.counted_steps.length), "FLOPs")} (peak ${si(one.peak_flops_per_sec, "FLOP/s")})`,
        )
        .join(", ") || "n/a",
    ],
    ...(Object.keys(profile.timing?.excluded_sec ?? {}).length
      ? [
          [
            "left out of steps",
            listed(
              Object.entries(profile.timing?.excluded_sec ?? {}).map(([cause, sec]) => `${cause} ${duration(sec)}`),
            ),
          ] as [string, string],
        ]
      : []),
    [
      "written by",
      `lightning-flops ${writtenBy}, schema ${profile.schema_version}, when the run was at step ${plain(profile.report_step)}`,
    ],
  ];
  const missing = Object.entries(profile.ranks?.unavailable ?? profile.unavailable);
  const uncounted = Object.entries(profile.uncounted);
  return (
    <Section id="provenance" title="Where the figures come from">
      <dl class="facts">
        {rows.map(([term, fact], at) => (
          <div key={at}>
            <dt>{term}</dt>
            <dd>{fact}</dd>
          </div>
        ))}
      </dl>
      {profile.lower_bound ? (
        <p class="callout">
          FLOPs and their rates are a <Term word="lower bound" />: something that ran could not be counted.
        </p>
      ) : null}
      {uncounted.length ? (
        <>
          <h3>Not counted</h3>
          <PlainTable
            caption="Operators that were not counted"
            head={["operator", "calls", "output elements", "may have FLOPs", "in modules"]}
            text={[0, 4]}
            rows={uncounted.map(([name, one]) => [
              <code>{name}</code>,
              plain(one.calls),
              plain(one.output_elements),
              one.heavy ? "yes" : "no",
              `${one.modules
                .slice(0, 4)
                .map((module) => module || "(the root)")
                .join(", ")}${one.modules.length > 4 ? ` and ${one.modules.length - 4} more` : ""}`,
            ])}
          />
        </>
      ) : null}
      {missing.length ? (
        <>
          <h3>Not available</h3>
          <ul class="plain-list">
            {missing.map(([rate, reason]) => (
              <li key={rate}>
                <code>{rate}</code>: {reason}
              </li>
            ))}
          </ul>
        </>
      ) : null}
      {profile.notes.length ? (
        <>
          <h3>Notes</h3>
          <ul class="plain-list">
            {profile.notes.map((one, at) => (
              <li key={at}>{one}</li>
            ))}
          </ul>
        </>
      ) : null}
    </Section>
  );
}

function ranksWords({ context }: Profile): string {
  if (context.world_size === 1) return `1${context.strategy ? ` (${context.strategy})` : ""}`;
  const sizes = (
    [
      ["data parallel", context.dp_size],
      ["tensor parallel", context.tp_size],
      ["pipeline", context.pp_size],
      ["context parallel", context.cp_size],
      ["sequence parallel", context.sp_size],
      ["expert parallel", context.ep_size],
    ] as const
  )
    .filter(([, size]) => size > 1)
    .map(([name, size]) => `${name} ${size}`);
  return `${context.world_size} (${[context.strategy, ...sizes].filter(Boolean).join(", ")}); this profile is of rank ${context.rank}`;
}
