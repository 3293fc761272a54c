// The answer: what ran where, how fast, where the step goes, and what to do first.

import type { JSX } from "preact";
import { bytes, counted, duration, percent, plain, si } from "../model/format";
import type { WindowFigures } from "../data";
import type { ModuleTree } from "../model/modules";
import { partColor, partLabel } from "../model/steps";
import { hrefOf, type Place } from "../place";
import type { Profile } from "../schema";
import { type Card, Cards, FirstAdvice } from "../ui/answer";
import { StackedBar } from "../ui/bar";
import { Section } from "../ui/section";

export function Answer(props: {
  profile: Profile;
  figures: WindowFigures;
  tree: ModuleTree | null;
  place: Place;
}): JSX.Element {
  const { profile, figures, tree, place } = props;
  const timing = profile.timing;
  const step = profile.context.loop === "training" ? "step" : "batch";
  return (
    <Section
      id="answer"
      title="The answer"
      note={
        timing
          ? `Times are means over ${counted(timing.timed_steps, `timed ${step}`)}; FLOPs are of one counted ${step}.`
          : `FLOPs are of one counted ${step}; no ${step} was timed.`
      }
    >
      <ProfileCards profile={profile} />
      {timing ? (
        <StackedBar
          caption={`Where one ${step} of ${duration(timing.global_step_sec)} goes`}
          whole={timing.global_step_sec}
          table
          parts={timing.parts.map((one) => ({
            key: one.name,
            label: partLabel(one.name),
            seconds: one.mean_sec,
            color: partColor(one.name),
            words: [
              `single ${step}s: ${duration(one.minimum_sec)} to ${duration(one.maximum_sec)}, median ${duration(one.median_sec)}`,
            ],
          }))}
        />
      ) : null}
      <div class="halves">
        <Longest figures={figures} tree={tree} place={place} />
        <First profile={profile} rules={figures.advice} />
      </div>
    </Section>
  );
}

function ProfileCards({ profile }: { profile: Profile }): JSX.Element {
  const { timing, flops, ranks } = profile;
  const job = ranks?.rates ?? profile.rates;
  const reasons: Record<string, string> = ranks?.unavailable ?? profile.unavailable;
  const bound = profile.lower_bound ? "≥ " : "";
  const atLeast = (figure: string): string => (figure === "n/a" ? figure : bound + figure);
  const params = ranks ? ranks.params : profile.params;
  const peak = profile.memory?.run_peak_bytes ?? peakOf(profile);
  const cards: Card[] = [
    {
      word: "step time",
      figure: duration(timing?.global_step_sec),
      below: timing ? `± ${duration(timing.global_step.deviation_sec)} between steps` : undefined,
      why: "no step was timed",
    },
    {
      word: "samples/s",
      figure: plain(rounded(job.samples_per_sec)),
      below: "over the wall clock",
      why: reasons["samples_per_sec"],
    },
    ...(job.tokens_per_sec !== null
      ? [
          {
            word: "tokens/s",
            figure: plain(rounded(job.tokens_per_sec)),
            below:
              job.tokens_per_sec_per_device !== null && (ranks?.answered ?? 1) > 1
                ? `${plain(rounded(job.tokens_per_sec_per_device))} a device`
                : "over the wall clock",
          },
        ]
      : []),
    { word: "MFU", figure: atLeast(percent(job.mfu)), below: peakWords(profile), why: reasons["mfu"] },
    { word: "HFU", figure: atLeast(percent(job.hfu)), below: "with all that kernels execute", why: reasons["hfu"] },
    {
      word: "FLOPs",
      figure: atLeast(si(flops.model)),
      below:
        profile.context.loop === "training"
          ? `forward ${si(flops.forward)}, backward ${si(flops.backward)}`
          : "forward",
    },
    {
      word: "parameters",
      figure: si(params),
      below:
        params !== null && profile.trainable_params !== null && profile.trainable_params !== profile.params
          ? `${si(profile.trainable_params)} trainable`
          : "",
    },
    ...(peak !== null
      ? [
          {
            word: "peak memory",
            figure: bytes(peak),
            below: profile.memory?.kind === "resident" ? "of the process" : "of tensors on the device",
          },
        ]
      : []),
  ];
  return <Cards cards={cards} />;
}

function rounded(value: number | null): number | null {
  return value === null ? null : value >= 100 ? Math.round(value) : Number(value.toPrecision(4));
}

function peakOf(profile: Profile): number | null {
  const peaks = (profile.memory?.phases ?? []).flatMap((one) => one.peak_bytes ?? []);
  return peaks.length ? Math.max(...peaks) : null;
}

function peakWords(profile: Profile): string {
  const used = profile.dtypes.filter((one) => one.model > 0 && one.peak_flops_per_sec !== null);
  const words = used.slice(0, 2).map((one) => `${si(one.peak_flops_per_sec)}FLOP/s in ${one.dtype}`);
  return words.length ? `of ${words.join(", ")}` : "of the dense peak";
}

function Longest(props: { figures: WindowFigures; tree: ModuleTree | null; place: Place }): JSX.Element {
  const { longest, longest_of } = props.figures;
  return (
    <div>
      <h3>{longest_of === "FLOPs" ? "Most FLOPs" : "Longest modules"}, without those inside</h3>
      {longest.length === 0 ? <p class="dim">n/a: no module was seen to work.</p> : null}
      <ol class="longest">
        {longest.map((one) => {
          const module = props.tree?.byName.get(one.name);
          const own = longest_of === "FLOPs" ? si(module?.own.flops) : duration(module?.own.seconds);
          return (
            <li key={one.name}>
              <a href={hrefOf(props.place, { module: one.name })}>{one.name || "(the root)"}</a>{" "}
              <span class="dim">{module?.type}</span>
              <span class="longest-figure">
                {own} <b>{percent(one.share, 1)}</b> <span class="dim">{LONGEST_OF[longest_of]}</span>
              </span>
              <span class="meter" aria-hidden="true">
                <span style={{ width: `${100 * one.share}%` }} />
              </span>
            </li>
          );
        })}
      </ol>
    </div>
  );
}

const LONGEST_OF: Record<string, string> = {
  "traced step": "of the traced step",
  forward: "of the forward",
  FLOPs: "of all FLOPs",
};

function First({ profile, rules }: { profile: Profile; rules: readonly string[] }): JSX.Element {
  const first = rules.flatMap((rule) => profile.advice.find((one) => one.rule === rule) ?? []);
  return <FirstAdvice first={first} more={profile.advice.length - first.length} />;
}
