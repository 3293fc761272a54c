// The operators of a trace: how long, how many FLOPs, with which shapes, from which lines.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { bytes, counted, duration, percent, plain, si } from "../model/format";
import {
  countedOf,
  perStep,
  shapeFlops,
  shapeKey,
  shortPlace,
  stepsOf,
  stepWord,
  type TracedOperator,
} from "../model/trace";
import type { OperatorShapeRow, ShapeFlops, TraceReport } from "../schema";
import { type Column, SearchableGrid } from "../ui/grid";
import { PlainTable, Section, ShareCell } from "../ui/section";

type View = "operators" | "shapes";

export function TraceOperators(props: {
  trace: TraceReport;
  operators: readonly TracedOperator[];
}): JSX.Element | null {
  const { trace, operators } = props;
  const [view, setView] = useState<View>("operators");
  const [chosen, setChosen] = useState<TracedOperator | null>(null);
  if (!operators.length) return null;
  const shapes = trace.operators_by_shape ?? [];
  const onDevice = trace.device_metrics !== null;
  return (
    <Section
      id="operators"
      title="Operators"
      note={
        <>
          Of one {stepWord(trace)}; times are {onDevice ? "of the work on the device" : "on the host"}. Self: without
          the operators that it called. {trace.flops ? "FLOPs are worked out from the shapes in the trace. " : ""}
          Choose one to see its shapes, its lines and what it called.
        </>
      }
    >
      {shapes.length ? (
        <div class="tools">
          <div class="choice" role="group" aria-label="Rows">
            {(["operators", "shapes"] as const).map((one) => (
              <button
                key={one}
                type="button"
                class={view === one ? "chosen" : ""}
                aria-pressed={view === one}
                onClick={() => setView(one)}
              >
                {one === "operators" ? "By operator" : "By input shape"}
              </button>
            ))}
          </div>
        </div>
      ) : null}
      {view === "shapes" ? (
        <Shapes rows={shapes} trace={trace} withName />
      ) : (
        <>
          <SearchableGrid
            caption="Operators"
            what="operators"
            searched={(one) => `${one.name} ${one.dtypes} ${one.place ?? ""}`}
            first={{ key: "seconds", down: true }}
            keyOf={(one) => one.name}
            rows={operators}
            onSelect={setChosen}
            columns={columnsOf(trace, operators)}
            height={420}
          />
          {chosen ? <Chosen operator={chosen} trace={trace} /> : null}
        </>
      )}
    </Section>
  );
}

function columnsOf(trace: TraceReport, operators: readonly TracedOperator[]): Column<TracedOperator>[] {
  const onDevice = trace.device_metrics !== null;
  const places = operators.some((one) => one.place !== null);
  const time = (
    key: keyof TracedOperator & ("deviceSec" | "hostOwnSec" | "hostSec" | "meanSec"),
    label: string,
    word: string,
  ): Column<TracedOperator> => ({
    key,
    label,
    word,
    value: (one) => one[key],
    cell: (one) => (one[key] === null ? "–" : duration(one[key])),
  });
  const figure = (
    key: keyof TracedOperator & ("flops" | "flopsPerSec" | "peakShare" | "flopsPerByte" | "bytes"),
    label: string,
    show: (value: number) => string,
    word = label,
  ): Column<TracedOperator> => ({
    key,
    label,
    word,
    value: (one) => one[key],
    cell: (one) => (one[key] === null ? "–" : show(one[key])),
  });
  return [
    { key: "name", label: "operator", text: true, value: (one) => one.name, cell: (one) => <code>{one.name}</code> },
    {
      key: "seconds",
      label: "self time",
      value: (one) => one.seconds,
      cell: (one) => <ShareCell share={one.share}>{one.seconds === null ? "–" : duration(one.seconds)}</ShareCell>,
    },
    {
      key: "share",
      label: "share",
      value: (one) => one.share,
      cell: (one) => (one.share === null ? "–" : percent(one.share, 1)),
    },
    ...(onDevice ? [time("deviceSec", "total", "device total")] : []),
    time("hostOwnSec", onDevice ? "host self" : "self", "host own"),
    time("hostSec", onDevice ? "host total" : "total", "host total"),
    { key: "calls", label: "calls", value: (one) => one.calls, cell: (one) => plain(one.calls) },
    time("meanSec", "of a call", "of a call"),
    ...(trace.flops
      ? [
          figure("flops", "FLOPs", (value) => si(value)),
          figure("flopsPerSec", "FLOP/s", (value) => si(value)),
          figure("peakShare", "of peak", (value) => percent(value, 1), "share of peak"),
          figure("bytes", "bytes", bytes),
          figure("flopsPerByte", "FLOPs a byte", (value) => plain(Number(value.toPrecision(3)))),
          {
            key: "dtypes",
            label: "dtypes",
            text: true,
            value: (one: TracedOperator) => one.dtypes,
            cell: (one: TracedOperator) => one.dtypes,
          },
        ]
      : []),
    ...(places
      ? [
          {
            key: "place",
            label: "called from",
            text: true,
            value: (one: TracedOperator) => one.place,
            cell: (one: TracedOperator) => {
              const more = (one.row?.called_from.length ?? 0) - 1;
              return one.place === null ? (
                "–"
              ) : (
                <code title={one.place}>
                  {shortPlace(one.place)}
                  {more > 0 ? <span class="dim"> and {counted(more, "more line")}</span> : null}
                </code>
              );
            },
          },
        ]
      : []),
  ];
}

const MOST = 30;

/** What is known of one operator beside its row. */
function Chosen({ operator, trace }: { operator: TracedOperator; trace: TraceReport }): JSX.Element {
  const steps = stepsOf(trace);
  const lines = operator.row?.called_from ?? [];
  const least = operator.row?.device ?? operator.row?.host ?? null;
  return (
    <div class="chosen-operator" aria-label={`The operator ${operator.name}`} role="group">
      <h3>
        <code>{operator.name}</code>
        {least ? (
          <span class="dim">
            {" "}
            {duration(least.min_us / 1e6)} to {duration(least.max_us / 1e6)} a call
          </span>
        ) : null}
      </h3>
      {operator.shapes.length ? <Shapes rows={operator.shapes} trace={trace} /> : null}
      {lines.length ? (
        <PlainTable
          caption={`Lines that call ${operator.name}`}
          head={["called from", "calls", "host", ...(lines[0]?.device_us == null ? [] : ["device"])]}
          rows={lines
            .slice(0, MOST)
            .map((one) => [
              <code>{one.place}</code>,
              plain(one.calls / steps),
              duration(one.host_us / 1e6 / steps),
              ...(one.device_us === null ? [] : [duration(one.device_us / 1e6 / steps)]),
            ])}
        />
      ) : null}
      {lines.length > MOST ? <p class="note">and {counted(lines.length - MOST, "more line")}</p> : null}
      {!operator.shapes.length && !lines.length ? (
        <p class="note">Its shapes are recorded with record_shapes=True, its lines with with_stack=True.</p>
      ) : null}
    </div>
  );
}

function Shapes(props: { rows: readonly OperatorShapeRow[]; trace: TraceReport; withName?: boolean }): JSX.Element {
  const { trace } = props;
  const steps = stepsOf(trace);
  const onDevice = props.rows.some((one) => one.device !== null);
  const flops = shapeFlops(trace);
  const rows = props.rows.map((one, index) => ({ ...one, index, flops: flops.get(shapeKey(one)) ?? null }));
  type Row = (typeof rows)[number];
  const own = (one: Row): number => (one.device_self ?? one.host_self).total_us;
  return (
    <SearchableGrid
      caption="Operators by the shapes of their inputs"
      what="shapes"
      searched={(one) => `${one.name} ${one.inputs} ${one.dtypes}`}
      first={{ key: "self", down: true }}
      keyOf={(one) => one.index}
      rows={rows}
      columns={[
        ...(props.withName
          ? [
              {
                key: "name",
                label: "operator",
                text: true,
                value: (one: Row) => one.name,
                cell: (one: Row) => <code>{one.name}</code>,
              },
            ]
          : []),
        {
          key: "inputs",
          label: "sizes of its inputs",
          text: true,
          value: (one) => one.inputs,
          cell: (one) => (
            <code class="sizes" title={`${one.inputs}\n${one.dtypes}`}>
              {one.inputs}
            </code>
          ),
        },
        { key: "calls", label: "calls", value: (one) => one.calls, cell: (one) => plain(one.calls / steps) },
        {
          key: "self",
          label: "self time",
          value: own,
          cell: (one) => (
            <ShareCell share={(one.device_self ?? one.host_self).ratio}>{duration(own(one) / 1e6 / steps)}</ShareCell>
          ),
        },
        {
          key: "total",
          label: onDevice ? "device total" : "host total",
          value: (one) => (one.device ?? one.host).total_us,
          cell: (one) => duration(perStep(one.device ?? one.host, steps)),
        },
        {
          key: "mean",
          label: "of a call",
          value: (one) => (one.device ?? one.host).mean_us,
          cell: (one) => duration((one.device ?? one.host).mean_us / 1e6),
        },
        ...(flops.size ? flopsColumns<Row>(steps) : []),
        { key: "dtypes", label: "dtypes", text: true, value: (one) => one.dtypes, cell: (one) => one.dtypes },
      ]}
      height={props.withName ? 420 : 240}
    />
  );
}

/** FLOPs of the calls of one shape, where they were counted. */
function flopsColumns<Row extends { flops: ShapeFlops | null }>(steps: number): Column<Row>[] {
  const figure = (
    key: string,
    label: string,
    value: (one: ShapeFlops) => number | null,
    show: (value: number) => string,
    word = label,
  ): Column<Row> => ({
    key,
    label,
    word,
    value: (one) => (one.flops ? value(one.flops) : null),
    cell: (one) => {
      const found = one.flops ? value(one.flops) : null;
      return found === null ? "–" : show(found);
    },
  });
  return [
    figure("flops", "FLOPs", (one) => countedOf(one) / steps, si),
    figure("flopsPerSec", "FLOP/s", (one) => one.flops_per_sec, si),
    figure(
      "peakShare",
      "of peak",
      (one) => one.peak_share,
      (value) => percent(value, 1),
      "share of peak",
    ),
  ];
}
