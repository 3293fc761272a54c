import type { JSX } from "preact";
import type { TraceFigures, TracesDocument } from "../data";
import { bytes, counted, duration, percent, plain, si } from "../model/format";
import { executedOf, KIND_NAMES, kindsOf } from "../model/trace";
import { hrefOf, type Place } from "../place";
import type { RankRow, TracesReport } from "../schema";
import { SearchableGrid } from "../ui/grid";
import { PlainTable, Section } from "../ui/section";
import { Strip } from "../ui/strip";

const MOST_STEPS = 20;

interface Row {
  at: number;
  figures: TraceFigures;
  rank: RankRow | null;
}

/** Several traces side by side: ranks of one run, or separate runs. */
export function TraceRanks(props: {
  document: TracesDocument;
  report: TracesReport;
  at: number;
  place: Place;
  go: (changes: Place) => void;
}): JSX.Element | null {
  const { document, report, at, place, go } = props;
  const ranks = report.ranks;
  if (document.traces.length < 2 || ranks === null) return null;
  const what = document.ranks ? "rank" : "trace";
  const rows = document.traces.map((figures, index): Row => ({ at: index, figures, rank: ranks.ranks[index] ?? null }));
  const names = KIND_NAMES.filter((name) => rows.some((one) => kindsOf(one.figures.mean)[name]));
  const straggler = report.advice.find((one) => one.rule === "straggler");
  const collectives = rows.flatMap((one) =>
    (one.rank?.collectives ?? []).map((collective, number) => ({
      ...collective,
      row: one,
      key: `${one.at} ${number}`,
    })),
  );
  const us = (value: number | null | undefined): string => duration(value == null ? null : value / 1e6);
  return (
    <Section
      id="ranks"
      title={document.ranks ? "Ranks" : "Traces side by side"}
      note={
        document.ranks
          ? "Choose one to see it whole. Transfer: the shortest of the ranks for each call of a collective; wait: the rest, until the last rank came."
          : "Of separate runs, as none of these files says its rank; nobody waited here for another. Choose one to see it whole."
      }
    >
      {straggler ? <p class="callout">{straggler.evidence}</p> : null}
      <Strip
        caption={`Mean step of each ${what}`}
        axis={what}
        names={names}
        items={rows.map(({ figures }) => ({
          label: figures.name,
          parts: kindsOf(figures.mean),
          total: figures.mean.wall_us / 1e6,
          words: figures.mfu === null ? [] : [`MFU ${percent(figures.mfu)}`],
        }))}
        selected={at}
        onSelect={(chosen) => go({ trace: document.traces[chosen]?.name ?? "", module: "" })}
      />
      <SearchableGrid
        caption={document.ranks ? "Ranks" : "Traces"}
        what={`${what}s`}
        searched={(one) => `${one.figures.name} ${one.figures.source}`}
        first={{ key: "name", down: false }}
        keyOf={(one) => one.at}
        rows={rows}
        rowClass={(one) => (one.at === at ? "current" : "")}
        onOpen={(one) => go({ trace: one.figures.name, module: "" })}
        columns={[
          {
            key: "name",
            label: what,
            text: true,
            value: (one) => one.at,
            cell: (one) =>
              one.at === at ? (
                <b aria-current="true">{one.figures.name}</b>
              ) : (
                <a href={hrefOf(place, { trace: one.figures.name, module: "" })}>{one.figures.name}</a>
              ),
          },
          { key: "steps", label: "steps", value: (one) => one.figures.steps, cell: (one) => plain(one.figures.steps) },
          {
            key: "wall",
            label: "mean step",
            value: (one) => one.figures.mean.wall_us,
            cell: (one) => us(one.figures.mean.wall_us),
          },
          {
            key: "mfu",
            label: "MFU",
            value: (one) => one.figures.mfu,
            cell: (one) =>
              `${one.figures.lower_bound && one.figures.mfu !== null ? "≥ " : ""}${percent(one.figures.mfu)}`,
          },
          {
            key: "flops",
            label: "FLOPs",
            value: (one) => one.figures.model_flops,
            cell: (one) => si(one.figures.model_flops),
          },
          ...(
            [
              ["computation", (one: RankRow) => one.overlap.computation_us],
              ["communication", (one: RankRow) => one.overlap.communication_us],
              ["exposed", (one: RankRow) => one.overlap.communication_us - one.overlap.overlap_us],
              ["transfer between ranks", (one: RankRow) => one.transfer_us],
              ["wait for ranks", (one: RankRow) => one.wait_us],
            ] as const
          )
            .filter(([, value]) => rows.some((one) => one.rank !== null && value(one.rank)))
            .map(([name, value]) => {
              const ofStep = (one: Row): number | null => {
                const all = one.rank === null ? null : value(one.rank);
                return all === null ? null : all / Math.max(1, one.figures.steps);
              };
              return { key: name, label: name, value: ofStep, cell: (one: Row) => us(ofStep(one)) };
            }),
          {
            key: "median",
            label: "computes, of the median",
            value: (one) => one.rank?.compute_over_median ?? null,
            cell: (one) => one.rank?.compute_over_median?.toFixed(3) ?? "n/a",
          },
        ]}
        height={300}
      />
      <JobFlops flops={report.job_flops} />
      {collectives.length ? (
        <>
          <h3>Collectives on each {what}</h3>
          <SearchableGrid
            caption={`Collectives on each ${what}`}
            what="collectives"
            searched={(one) => `${one.row.figures.name} ${one.name}`}
            first={{ key: "latency", down: true }}
            keyOf={(one) => one.key}
            rows={collectives}
            columns={[
              {
                key: "name",
                label: "collective",
                text: true,
                value: (one) => one.name,
                cell: (one) => <code>{one.name}</code>,
              },
              { key: "rank", label: what, text: true, value: (one) => one.row.at, cell: (one) => one.row.figures.name },
              { key: "calls", label: "calls", value: (one) => one.calls, cell: (one) => plain(one.calls) },
              {
                key: "matched",
                label: "matched",
                value: (one) => one.matched_calls,
                cell: (one) => plain(one.matched_calls),
              },
              {
                key: "bytes",
                label: "bytes",
                word: "bytes sent",
                value: (one) => one.bytes,
                cell: (one) => bytes(one.bytes),
              },
              {
                key: "latency",
                label: "time",
                word: "of all calls",
                value: (one) => one.latency_us,
                cell: (one) => us(one.latency_us),
              },
              {
                key: "transfer",
                label: "transfer",
                word: "transfer between ranks",
                value: (one) => one.transfer_us,
                cell: (one) => us(one.transfer_us),
              },
              {
                key: "wait",
                label: "wait",
                word: "wait for ranks",
                value: (one) => one.wait_us,
                cell: (one) => us(one.wait_us),
              },
            ]}
            height={260}
          />
        </>
      ) : null}
      {ranks.notes.map((one) => (
        <p key={one} class="note">
          {one}
        </p>
      ))}
    </Section>
  );
}

/** FLOPs of all ranks together, step by step, or why they are not known. */
function JobFlops({ flops }: { flops: TracesReport["job_flops"] }): JSX.Element | null {
  if (flops === null) return null;
  if (flops.reason !== null) return <p class="note">FLOPs of all ranks together: n/a ({flops.reason}).</p>;
  const shown = flops.steps.slice(0, MOST_STEPS);
  return (
    <>
      <h3>FLOPs of the job</h3>
      <PlainTable
        caption="FLOPs of all ranks together, step by step"
        head={["step", "mean wall", "forward", "backward", "recompute", "optimizer", "FLOP/s", "MFU", "HFU"]}
        rows={shown.map((one) => {
          const bound = one.lower_bound ? "≥ " : "";
          return [
            String(one.step),
            duration(one.wall_us / 1e6),
            ...[one.forward, one.backward, one.recompute, one.optimizer].map((part) => bound + si(part)),
            bound + si(one.wall_us ? (executedOf(one) / one.wall_us) * 1e6 : null),
            ...[one.mfu, one.hfu].map((share) => (share === null ? "n/a" : bound + percent(share))),
          ];
        })}
      />
      {flops.steps.length > MOST_STEPS ? (
        <p class="note">and {counted(flops.steps.length - MOST_STEPS, "more step")}</p>
      ) : null}
    </>
  );
}
