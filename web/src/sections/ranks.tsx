import type { JSX } from "preact";
import { bytes, counted, duration, listed, percent, plain, si } from "../model/format";
import { inOrder, partLabel } from "../model/steps";
import type { Profile, RankFigures, RankSpread, Straggler } from "../schema";
import { SearchableGrid } from "../ui/grid";
import { PlainTable, Section } from "../ui/section";
import { Strip } from "../ui/strip";
import { Term } from "../ui/tip";

export function Ranks({ profile }: { profile: Profile }): JSX.Element | null {
  const ranks = profile.ranks;
  if (ranks === null) return null;
  const names = inOrder(new Set(ranks.ranks.flatMap((one) => Object.keys(one.parts_sec))));
  const timed = ranks.ranks.filter((one) => Object.keys(one.parts_sec).length > 0);
  const places = new Map(timed.map((one, place) => [one.rank, place]));
  const marked = new Map<number, string>();
  for (const one of ranks.stragglers) {
    const place = places.get(one.rank);
    if (place !== undefined) marked.set(place, `▼ rank ${one.rank}`);
  }
  return (
    <Section
      id="ranks"
      title="Ranks"
      note={`${plain(ranks.answered)} of ${plain(ranks.world_size)} answered; every figure is of those, and of one step.`}
    >
      {ranks.stragglers.map((one) => (
        <p key={one.rank} class="callout">
          <Term word="straggler">Straggler</Term>: {evidence(one)}
        </p>
      ))}
      {ranks.answered > 1 && !ranks.stragglers.length ? <p class="note">All ranks keep pace.</p> : null}
      {timed.length ? (
        <Strip
          caption="Parts of a step on each rank"
          axis="rank"
          names={names}
          items={timed.map((one) => ({
            label: `rank ${one.rank}`,
            parts: one.parts_sec,
            total: one.global_step_sec ?? sum(one),
            words: [one.host],
          }))}
          marked={marked}
        />
      ) : null}
      <SearchableGrid
        caption="Ranks"
        what="ranks"
        searched={(one) => `rank ${one.rank} ${one.host}`}
        first={{ key: "rank", down: false }}
        keyOf={(one) => one.rank}
        rows={ranks.ranks}
        rowClass={(one) => (ranks.stragglers.some((late) => late.rank === one.rank) ? "late" : "")}
        columns={[
          { key: "rank", label: "rank", text: true, value: (one) => one.rank, cell: (one) => one.rank },
          { key: "host", label: "host", text: true, value: (one) => one.host, cell: (one) => one.host },
          ...(ranks.stages.length
            ? [
                {
                  key: "stage",
                  label: "stage",
                  value: (one: RankFigures) => one.stage,
                  cell: (one: RankFigures) => one.stage,
                },
              ]
            : []),
          {
            key: "step",
            label: "step time",
            value: (one) => one.global_step_sec,
            cell: (one) => duration(one.global_step_sec),
          },
          ...names.map((name) => ({
            key: name,
            label: partLabel(name),
            value: (one: RankFigures) => one.parts_sec[name] ?? null,
            cell: (one: RankFigures) => duration(one.parts_sec[name]),
          })),
          { key: "flops", label: "FLOPs", value: (one) => one.model_flops, cell: (one) => si(one.model_flops) },
          {
            key: "memory",
            label: "peak memory",
            value: (one) => one.peak_memory_bytes,
            cell: (one) => bytes(one.peak_memory_bytes),
          },
        ]}
        height={300}
      />
      <Communication profile={profile} />
      {ranks.absences.length ? (
        <p class="note">
          Missing:{" "}
          {ranks.absences
            .slice(0, 8)
            .map((one) => `rank ${one.rank} (${one.reason})`)
            .join("; ")}
          {ranks.absences.length > 8 ? ` and ${counted(ranks.absences.length - 8, "more rank")}` : ""}.
        </p>
      ) : null}
      {ranks.left_out.map((one) => (
        <p key={one} class="note">
          {one}
        </p>
      ))}
    </Section>
  );
}

function sum(one: RankFigures): number {
  return Object.values(one.parts_sec).reduce((all, part) => all + part, 0);
}

/** Why we say so, in a sentence. */
export function evidence(one: Straggler): string {
  const why = [
    one.part !== null ? `mostly in ${partLabel(one.part)} (${duration(one.part_sec)} longer)` : "",
    one.module !== null ? `in module ${one.module || "(the root)"} (${duration(one.module_sec)} longer)` : "",
    one.exposed_sec !== null && one.others_exposed_sec !== null
      ? `it waits ${duration(one.exposed_sec)} in exposed communication, the others ${duration(one.others_exposed_sec)}`
      : "",
  ].filter(Boolean);
  return `the others wait ${duration(one.late_sec)} a step (${percent(one.share, 1)}) for rank ${one.rank}${why.length ? `, ${listed(why)}` : ""}; shown by the ${one.shown_by === "timed steps" ? "timed steps" : "traced step"}.`;
}

function Communication({ profile }: { profile: Profile }): JSX.Element | null {
  const found = profile.ranks?.communication ?? null;
  if (found === null) return null;
  const row = (name: string, one: RankSpread | null, show: (value: number) => string): (string | number)[] =>
    one === null
      ? [name, "n/a", "", ""]
      : [
          name,
          `${show(one.least)} (rank ${one.least_rank})`,
          show(one.median),
          `${show(one.greatest)} (rank ${one.greatest_rank})`,
        ];
  return (
    <>
      <h3>Communication in the traced step</h3>
      <PlainTable
        caption="Communication in the traced step"
        head={[`over ${plain(found.ranks)} ranks`, "least", "median", "most"]}
        rows={[
          row("computation", found.computation_sec, duration),
          row("communication", found.communication_sec, duration),
          row("exposed", found.exposed_sec, duration),
          row("hidden share", found.overlap_ratio, percent),
          row("transfer", found.transfer_sec, duration),
          row("waiting for other ranks", found.wait_sec, duration),
        ]}
      />
      <PlainTable
        caption="Collectives"
        head={["collective", "calls", "bytes", "transfer, median", "wait, median", "wait, most"]}
        rows={found.collectives.map((one) => [
          one.name,
          plain(one.calls),
          bytes(one.bytes),
          duration(one.transfer_sec?.median),
          duration(one.wait_sec?.median),
          one.wait_sec ? `${duration(one.wait_sec.greatest)} (rank ${one.wait_sec.greatest_rank})` : "n/a",
        ])}
      />
    </>
  );
}
