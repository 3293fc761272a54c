import type { JSX } from "preact";
import { bytes, plain } from "../model/format";
import { stepsOf, stepWord } from "../model/trace";
import type { MemoryRow, ModuleMemoryRow, TraceReport } from "../schema";
import { type Column, SearchableGrid } from "../ui/grid";
import { Section } from "../ui/section";
import { MemoryOverTime } from "./memory_curve";

/** Who allocated what in a trace, and when. */
export function TraceMemory({ trace }: { trace: TraceReport }): JSX.Element | null {
  const { memory_curves: curves, memory, module_memory: modules } = trace;
  if (!curves?.length && !memory?.length) return null;
  const steps = stepsOf(trace);
  return (
    <Section id="memory" title="Memory" note="Of tensors, as torch's allocators gave it out.">
      {curves ? <MemoryOverTime curves={curves} /> : null}
      {memory?.length ? (
        <>
          <h3>By operator, of one {stepWord(trace)}</h3>
          <Allocations
            what="operators"
            steps={steps}
            rows={memory.map((row, index) => ({ row, index, name: row.name ?? "(outside operators)", more: "" }))}
            calls
          />
        </>
      ) : null}
      {modules?.length ? (
        <>
          <h3>By module, of one {stepWord(trace)}</h3>
          <Allocations
            what="modules"
            steps={steps}
            rows={modules.map((row, index) => ({
              row,
              index,
              name: row.name === null ? `(${row.part})` : row.name || "(the root)",
              more: row.name === null ? "" : row.part,
            }))}
          />
        </>
      ) : null}
    </Section>
  );
}

interface Allocated {
  row: MemoryRow | ModuleMemoryRow;
  index: number;
  name: string;
  more: string;
}

function Allocations(props: { what: string; rows: readonly Allocated[]; steps: number; calls?: boolean }): JSX.Element {
  const { steps, rows } = props;
  const size = (
    key: "allocation_bytes" | "self_allocation_bytes" | "size_increase_bytes" | "self_size_increase_bytes",
    label: string,
    word: string,
  ): Column<Allocated> => ({
    key,
    label,
    word,
    value: (one) => one.row[key],
    cell: (one) => bytes(one.row[key] / steps),
  });
  return (
    <SearchableGrid
      caption={`Memory by ${props.what}`}
      what={props.what}
      searched={(one) => `${one.name} ${one.more}`}
      first={{ key: "self_allocation_bytes", down: true }}
      keyOf={(one) => one.index}
      rows={rows}
      columns={[
        {
          key: "name",
          label: props.what === "modules" ? "module" : "operator",
          text: true,
          value: (one) => one.name,
          cell: (one) => (
            <>
              <code>{one.name}</code> <span class="dim">{one.more}</span>
            </>
          ),
        },
        {
          key: "where",
          label: "where",
          text: true,
          value: (one) => one.row.device,
          cell: ({ row }) => (row.device < 0 ? row.device_type : `${row.device_type} ${row.device}`),
        },
        size("self_allocation_bytes", "allocated itself", "allocated itself"),
        size("allocation_bytes", "with what it called", "allocated"),
        size("self_size_increase_bytes", "kept itself", "kept by it"),
        size("size_increase_bytes", "kept in all", "kept in all"),
        ...(props.calls
          ? [
              {
                key: "allocations",
                label: "allocations",
                value: (one: Allocated) => ("allocations" in one.row ? one.row.allocations : null),
                cell: (one: Allocated) => ("allocations" in one.row ? plain(one.row.allocations / steps) : "–"),
              },
            ]
          : []),
      ]}
      height={300}
    />
  );
}
