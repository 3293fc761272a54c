// The page's second mode: two runs compared, every nanosecond of their difference with its cause.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import type { ComparisonDocument, Source } from "../data";
import { CAUSES, type ComparedModule, comparedModules, detailsOf, signed } from "../model/causes";
import { duration, figure, percent, plain, si } from "../model/format";
import { partLabel } from "../model/steps";
import type {
  Causes,
  Comparison as Compared,
  FigureDifference,
  NoiseInterval,
  PartDifference,
  SettingDifference,
} from "../schema";
import { type Column, SearchableGrid } from "../ui/grid";
import { PlainTable, Section } from "../ui/section";
import { Term, Tip } from "../ui/tip";

export function Comparison({ source, document }: { source: Source; document: ComparisonDocument }): JSX.Element {
  const [compared, setCompared] = useState<Compared | null>(null);
  const [problem, setProblem] = useState("");
  useEffect(() => {
    source.comparison?.().then(setCompared, (error: unknown) => setProblem(String(error)));
  }, [source]);
  useEffect(() => {
    if (compared) performance.mark("whole");
  }, [compared]);
  return (
    <>
      <header class="top">
        <div class="title">
          <h1>Two runs compared</h1>
          <p class="where">
            A: {document.a} · B: {document.b}
          </p>
        </div>
      </header>
      <main aria-busy={compared === null && problem === ""}>
        {problem ? (
          <p class="callout" role="alert">
            This comparison cannot be shown: {problem}
          </p>
        ) : null}
        {compared ? (
          <>
            <Answer compared={compared} headline={document.headline} />
            <Parts compared={compared} />
            <Modules compared={compared} />
            <Figures figures={compared.figures} note="Of Profile.summary(); the ratio is B over A." />
            <Provenance compared={compared} writtenBy={document.written_by} />
          </>
        ) : null}
      </main>
      <Tip />
    </>
  );
}

function Answer({ compared, headline }: { compared: Compared; headline: string }): JSX.Element {
  const { causes, difference } = compared.step;
  const share = causes.a_ns ? causes.difference_ns / causes.a_ns : null;
  const step = compared.step_name;
  const cards: [string, string, ComponentChildren][] = [
    [`one ${step} of A`, duration(causes.a_ns / 1e9), `${plain(compared.a.timed_steps)} timed`],
    [`one ${step} of B`, duration(causes.b_ns / 1e9), `${plain(compared.b.timed_steps)} timed`],
    [
      "difference B − A",
      signed(causes.difference_ns),
      share === null ? "" : `${share > 0 ? "+" : ""}${percent(share)}`,
    ],
    ...CAUSES.map(({ key, more, less }): [string, string, ComponentChildren] => [
      causes[key] < 0 ? less : more,
      signed(causes[key]),
      detailsOf(causes, key),
    ]),
  ];
  return (
    <Section id="answer" title="The answer" note={headline}>
      <ul class="cards">
        {cards.map(([word, figure, below]) => (
          <li key={word} class="card">
            <span class="card-word">
              <Term word={word} />
            </span>
            <span class="card-figure">{figure}</span>
            <span class="card-below">{below}</span>
          </li>
        ))}
      </ul>
      <Bridge causes={causes} />
      <p class="note">
        {difference === null
          ? "Noise is not known: single steps were not kept, or are too few."
          : difference.beyond
            ? `More than noise explains (${percent(compared.confidence, 0)}: ${interval(difference)}).`
            : `Within the noise of the timed steps (${percent(compared.confidence, 0)}: ${interval(difference)}).`}
      </p>
      {compared.settings.length ? (
        <Settings settings={compared.settings} />
      ) : (
        <p class="note">Set up alike: device, ranks, batch, versions and settings.</p>
      )}
    </Section>
  );
}

export function Settings({ settings }: { settings: readonly SettingDifference[] }): JSX.Element {
  return (
    <>
      <h3>Set up differently</h3>
      <PlainTable
        caption="Set up differently"
        head={["setting", "A", "B"]}
        text={[0, 1, 2]}
        rows={settings.map((one) => [<code>{one.name}</code>, one.a, one.b])}
      />
    </>
  );
}

export function interval(one: NoiseInterval): string {
  return `${signed(one.low_ns)} to ${signed(one.high_ns)}`;
}

/** From A to B: a bar for each run, and between them what each cause adds or takes away. */
function Bridge({ causes }: { causes: Causes }): JSX.Element {
  const most = Math.max(causes.a_ns, causes.b_ns, causes.a_ns + Math.max(0, causes.work_ns)) || 1;
  let at = causes.a_ns;
  const rows: { label: string; from: number; to: number; kind: string; words: string }[] = [
    { label: "A", from: 0, to: causes.a_ns, kind: "run", words: duration(causes.a_ns / 1e9) },
  ];
  for (const { key, label } of CAUSES) {
    const next = at + causes[key];
    rows.push({
      label,
      from: Math.min(at, next),
      to: Math.max(at, next),
      kind: causes[key] < 0 ? "faster" : "slower",
      words: signed(causes[key]),
    });
    at = next;
  }
  rows.push({ label: "B", from: 0, to: causes.b_ns, kind: "run", words: duration(causes.b_ns / 1e9) });
  const whole = Math.max(most, ...rows.map((one) => one.to));
  const spoken = rows.map((one) => `${one.label} ${one.words}`).join(", ");
  return (
    <div class="bridge" role="img" aria-label={`From A to B: ${spoken}`}>
      {rows.map((one) => (
        <div key={one.label} class="bridge-row">
          <span class="bridge-label">{one.label}</span>
          <span class="bridge-track">
            <span
              class={`bridge-bar ${one.kind}`}
              style={{ left: `${(100 * one.from) / whole}%`, width: `${(100 * (one.to - one.from)) / whole}%` }}
            />
          </span>
          <span class="bridge-words">{one.words}</span>
        </div>
      ))}
    </div>
  );
}

/** A difference with its bar, to the right for slower and to the left for faster. */
export function Delta({ ns, most }: { ns: number; most: number }): JSX.Element {
  const width = most > 0 ? Math.min(50, (50 * Math.abs(ns)) / most) : 0;
  return (
    <span class="delta">
      <span>{signed(ns)}</span>
      <span class="delta-track" aria-hidden="true">
        <span
          class={`delta-bar ${ns > 0 ? "slower" : "faster"}`}
          style={ns > 0 ? { left: "50%", width: `${width}%` } : { right: "50%", width: `${width}%` }}
        />
      </span>
    </span>
  );
}

function Parts({ compared }: { compared: Compared }): JSX.Element {
  const most = Math.max(...compared.parts.map((one) => Math.abs(one.causes.difference_ns)));
  return (
    <Section
      id="parts"
      title="By part of the step"
      note="Means over the timed steps; each difference is the sum of its causes."
    >
      <PlainTable
        caption="By part of the step"
        head={["part", "A", "B", "B − A", "work", "efficiency", "waiting", "beyond noise"]}
        text={[0, 7]}
        rows={[...compared.parts, compared.step].map((one) => [
          one === compared.step ? <b>{partLabel(one.name)}</b> : <Term word={partLabel(one.name)} />,
          duration(one.causes.a_ns / 1e9),
          duration(one.causes.b_ns / 1e9),
          <Delta ns={one.causes.difference_ns} most={one === compared.step ? 0 : most} />,
          ...CAUSES.map(({ key }) => (one.causes[key] === 0 ? "0" : signed(one.causes[key]))),
          one.difference === null ? "n/a" : one.difference.beyond ? "yes" : "–",
        ])}
      />
    </Section>
  );
}

function Modules({ compared }: { compared: Compared }): JSX.Element | null {
  const modules = useMemo(() => comparedModules(compared), [compared]);
  if (!modules.length) return null;
  const timed = modules.some((one) => one.difference.whole.a_ns !== 0 || one.difference.whole.b_ns !== 0);
  const most = Math.max(...modules.map((one) => Math.abs(one.difference.own.difference_ns)));
  const columns: Column<ComparedModule>[] = [
    {
      key: "module",
      label: "module",
      text: true,
      value: (one) => one.index,
      cell: (one) => (
        <span class="name-cell">
          {one.name || "(the root)"} <span class="dim kind">{one.type}</span>
          {one.remark ? <span class="badge">{one.remark}</span> : null}
        </span>
      ),
    },
    ...(timed
      ? (
          [
            ["a", "own, A", (one: ComparedModule) => one.difference.own.a_ns],
            ["b", "own, B", (one: ComparedModule) => one.difference.own.b_ns],
          ] as const
        ).map(([key, label, value]) => ({
          key,
          label,
          word: "own time",
          value,
          cell: (one: ComparedModule) => duration(value(one) / 1e9),
        }))
      : []),
    {
      key: "difference",
      label: "B − A",
      value: (one) => Math.abs(one.difference.own.difference_ns),
      cell: (one) => <Delta ns={one.difference.own.difference_ns} most={most} />,
    },
    ...CAUSES.map(({ key, label }) => ({
      key,
      label,
      value: (one: ComparedModule) => one.difference.own[key],
      cell: (one: ComparedModule) => (one.difference.own[key] === 0 ? "0" : signed(one.difference.own[key])),
    })),
    {
      key: "noise",
      label: "beyond noise",
      value: (one) => Number(one.difference.beyond_noise ?? -1),
      cell: (one) => (one.difference.beyond_noise === null ? "n/a" : one.difference.beyond_noise ? "yes" : "no"),
    },
    {
      key: "whole",
      label: "with those inside",
      value: (one) => one.difference.whole.difference_ns,
      cell: (one) => signed(one.difference.whole.difference_ns),
    },
    {
      key: "flops",
      label: "FLOPs",
      value: (one) => (one.difference.b?.flops ?? 0) - (one.difference.a?.flops ?? 0),
      cell: (one) => change(one.difference.a?.flops, one.difference.b?.flops),
    },
    {
      key: "params",
      label: "parameters",
      value: (one) => (one.difference.b?.params ?? 0) - (one.difference.a?.params ?? 0),
      cell: (one) => change(one.difference.a?.params, one.difference.b?.params),
    },
  ];
  return (
    <Section
      id="modules"
      title="By module"
      note={
        timed
          ? "Forward and backward of each module without those inside; parts are means over the timed steps, their shares from the traced steps."
          : "Times of modules are not known in both runs: a trace of a step has them."
      }
    >
      <SearchableGrid
        caption="Modules of both runs"
        what="modules"
        searched={(one) => one.found}
        first={{ key: "difference", down: true }}
        keyOf={(one) => one.index}
        rows={modules}
        columns={columns}
        height={520}
      />
    </Section>
  );
}

function change(a: number | undefined, b: number | undefined): string {
  if (a === b) return a === undefined ? "–" : si(a);
  return `${a === undefined ? "–" : si(a)} → ${b === undefined ? "–" : si(b)}`;
}

export function Figures({ figures, note }: { figures: readonly FigureDifference[]; note: string }): JSX.Element {
  return (
    <Section id="figures" title="Figures of both" note={note}>
      <PlainTable
        caption="Figures of both"
        head={["figure", "A", "B", "B / A", "by noise"]}
        text={[0, 4]}
        rows={figures.map((one) => [
          <code>{one.name}</code>,
          figure(one.a),
          figure(one.b),
          one.ratio === null ? "n/a" : one.ratio.toFixed(4),
          one.ratio_low === null || one.ratio_high === null
            ? one.reason || "n/a"
            : one.ratio_low === one.ratio_high
              ? "exact"
              : `${one.ratio_low.toFixed(4)} to ${one.ratio_high.toFixed(4)}`,
        ])}
      />
    </Section>
  );
}

function Provenance({ compared, writtenBy }: { compared: Compared; writtenBy: string }): JSX.Element {
  const run = (one: Compared["a"]): string =>
    `${one.source}: ${one.model || "unknown model"} on ${one.device || "unknown device"}, step ${plain(one.profile_step)} counted, ${plain(one.timed_steps)} timed`;
  return (
    <Section id="provenance" title="Where the figures come from">
      <dl class="facts">
        <div>
          <dt>A</dt>
          <dd>{run(compared.a)}</dd>
        </div>
        <div>
          <dt>B</dt>
          <dd>{run(compared.b)}</dd>
        </div>
        <div>
          <dt>written by</dt>
          <dd>
            lightning-flops {writtenBy}; noise intervals of {percent(compared.confidence, 0)}
          </dd>
        </div>
      </dl>
      {compared.notes.length ? (
        <ul class="plain-list">
          {compared.notes.map((one, at) => (
            <li key={at}>{one}</li>
          ))}
        </ul>
      ) : null}
    </Section>
  );
}
