// The traces of two runs compared: what in a step takes longer, the most first.

import type { JSX } from "preact";
import { useEffect } from "preact/hooks";
import type { ComparisonDocument, Source } from "../data";
import { signed } from "../model/causes";
import { causeOf, tableTitle } from "../model/compared_traces";
import { counted, duration, percent, plain } from "../model/format";
import type { TimeDifference, TimeTable, TraceComparison as Compared } from "../schema";
import { SearchableGrid } from "../ui/grid";
import { PlainTable, Section } from "../ui/section";
import { Tip } from "../ui/tip";
import { usePromised } from "../ui/top";
import { Delta, Figures, interval, Settings } from "./comparison";

export function TraceComparison({ source, document }: { source: Source; document: ComparisonDocument }): JSX.Element {
  const [compared, problem] = usePromised(source.traceComparison ?? null, [source]);
  useEffect(() => {
    if (compared) performance.mark("whole");
  }, [compared]);
  return (
    <>
      <header class="top">
        <div class="title">
          <h1>Two traces compared</h1>
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
            <Rows
              id="parts"
              title="By part of the step"
              note="Each moment counts under the first part from the top that ran then: the parts add up to the step."
              rows={[...compared.parts, compared.step]}
            />
            {compared.ranks.length ? (
              <Rows id="ranks" title="By rank" note="The step of each rank that both have." rows={compared.ranks} />
            ) : null}
            {compared.tables.map((one) => (
              <Table key={`${one.of} ${one.clock}`} table={one} />
            ))}
            <Figures figures={compared.figures} note="As far as both traces tell them; the ratio is B over A." />
            <Provenance compared={compared} writtenBy={document.written_by} />
          </>
        ) : null}
      </main>
      <Tip />
    </>
  );
}

function Answer({ compared, headline }: { compared: Compared; headline: string }): JSX.Element {
  const { step } = compared;
  const share = step.a_ns ? step.difference_ns / step.a_ns : null;
  const of = (steps: number): string => (compared.a.marked ? counted(steps, "step") : "the whole trace");
  const cards: [string, string, string][] = [
    [`one ${step.name} of A`, duration(step.a_ns / 1e9), of(compared.a.steps)],
    [`one ${step.name} of B`, duration(step.b_ns / 1e9), of(compared.b.steps)],
    ["difference B − A", signed(step.difference_ns), share === null ? "" : `${share > 0 ? "+" : ""}${percent(share)}`],
  ];
  return (
    <Section id="answer" title="The answer" note={headline}>
      <ul class="cards">
        {cards.map(([word, figure, below]) => (
          <li key={word} class="card">
            <span class="card-word">{word}</span>
            <span class="card-figure">{figure}</span>
            <span class="card-below">{below}</span>
          </li>
        ))}
      </ul>
      {compared.settings.length ? <Settings settings={compared.settings} /> : null}
    </Section>
  );
}

function noiseOf(one: TimeDifference): string {
  if (one.difference_ns === 0) return "";
  if (one.noise === null) return "n/a";
  return one.noise.beyond ? interval(one.noise) : "noise";
}

function Rows(props: { id: string; title: string; note: string; rows: readonly TimeDifference[] }): JSX.Element {
  const most = Math.max(...props.rows.map((one) => Math.abs(one.difference_ns)));
  return (
    <Section id={props.id} title={props.title} note={props.note}>
      <PlainTable
        caption={props.title}
        head={["", "A", "B", "B − A", "by noise"]}
        text={[0, 4]}
        rows={props.rows.map((one) => [
          one.name,
          duration(one.a_ns / 1e9),
          duration(one.b_ns / 1e9),
          <Delta ns={one.difference_ns} most={most} />,
          noiseOf(one),
        ])}
      />
    </Section>
  );
}

function Table({ table }: { table: TimeTable }): JSX.Element {
  const title = tableTitle(table);
  const most = Math.max(...table.rows.map((one) => Math.abs(one.difference_ns)));
  const rows = table.rows.map((one, index) => ({ one, index, name: one.name || "(root)" }));
  const way = (ns: number | null): string => (ns === null ? "" : signed(ns));
  return (
    <Section
      id={`${table.of}-${table.clock}`}
      title={title}
      note="Means over the steps. By calls: more or fewer of them; by length: each takes longer or shorter."
    >
      <SearchableGrid
        caption={title}
        what={table.of}
        searched={(row) => row.name.toLowerCase()}
        first={{ key: "difference", down: true }}
        keyOf={(row) => row.index}
        rows={rows}
        height={420}
        columns={[
          { key: "name", label: "name", text: true, value: (row) => row.name, cell: (row) => row.name },
          { key: "a", label: "A", value: (row) => row.one.a_ns, cell: (row) => duration(row.one.a_ns / 1e9) },
          { key: "b", label: "B", value: (row) => row.one.b_ns, cell: (row) => duration(row.one.b_ns / 1e9) },
          {
            key: "difference",
            label: "B − A",
            value: (row) => Math.abs(row.one.difference_ns),
            cell: (row) => <Delta ns={row.one.difference_ns} most={most} />,
          },
          {
            key: "cause",
            label: "cause",
            text: true,
            value: (row) => causeOf(row.one),
            cell: (row) => causeOf(row.one),
          },
          {
            key: "calls",
            label: "calls A → B",
            value: (row) => row.one.calls_b,
            cell: (row) => callsOf(row.one),
          },
          {
            key: "by_calls",
            label: "by calls",
            value: (row) => row.one.calls_ns,
            cell: (row) => way(row.one.calls_ns),
          },
          {
            key: "by_length",
            label: "by length",
            value: (row) => row.one.length_ns,
            cell: (row) => way(row.one.length_ns),
          },
        ]}
      />
    </Section>
  );
}

function callsOf(one: TimeDifference): string {
  if (one.calls_a === null || one.calls_b === null) return "";
  const [a, b] = [plain(one.calls_a), plain(one.calls_b)];
  return a === b ? a : `${a} → ${b}`;
}

function Provenance({ compared, writtenBy }: { compared: Compared; writtenBy: string }): JSX.Element {
  const run = ({ sources, device, ranks }: Compared["a"]): string =>
    `${sources.join(", ")} (${device || "no device"}${ranks > 1 ? `, ${plain(ranks)} ranks` : ""})`;
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
