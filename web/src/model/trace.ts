// What a trace says, as the page shows it: times of one step, in seconds.

import type {
  Durations,
  JobStepFlops,
  KernelFlops,
  KernelRow,
  OperatorFlops,
  OperatorRow,
  OperatorShapeRow,
  ShapeFlops,
  StepTime,
  TracedStepFlops,
  TraceReport,
} from "../schema";

/** What fills a step of a trace, by priority: a moment that several share is of the first of them. */
export const KINDS: readonly (readonly [name: string, field: keyof StepTime])[] = [
  ["kernels", "kernel_us"],
  ["copies", "memcpy_us"],
  ["memsets", "memset_us"],
  ["communication", "communication_us"],
  ["runtime calls", "runtime_us"],
  ["data loader", "data_loader_us"],
  ["host operators", "cpu_us"],
  ["nothing recorded", "other_us"],
];

export const KIND_NAMES: readonly string[] = KINDS.map(([name]) => name);

/** Steps of a trace, one at least: what totals are divided by. */
export function stepsOf(trace: Pick<TraceReport, "step_times">): number {
  return Math.max(1, trace.step_times.steps.length);
}

/** Seconds of each kind that took any in *step*. */
export function kindsOf(step: StepTime): Record<string, number> {
  return Object.fromEntries(
    KINDS.flatMap(([name, field]) => {
      const us = step[field];
      return us ? [[name, us / 1e6]] : [];
    }),
  );
}

/** "step", or what stands for it where the trace has no marks of steps. */
export function stepWord(trace: Pick<TraceReport, "step_times">): string {
  return trace.step_times.marked ? "step" : "trace";
}

export function stepName(number: number | null): string {
  return number === null ? "whole trace" : `step ${number}`;
}

export function executedOf(flops: JobStepFlops | OperatorFlops | TracedStepFlops): number {
  return flops.forward + flops.backward + flops.recompute + flops.optimizer - flops.skipped;
}

export function countedOf(flops: OperatorFlops | ShapeFlops | TracedStepFlops): number {
  return flops.forward + flops.backward + flops.recompute + flops.optimizer;
}

/** An operator in one step, with the FLOPs that were worked out of its shapes. */
export interface TracedOperator {
  name: string;
  row: OperatorRow | null;
  calls: number;
  /** In itself: on the device if there is one, else on the host. */
  seconds: number | null;
  /** Of all operators' own time there. */
  share: number | null;
  deviceSec: number | null;
  hostOwnSec: number | null;
  hostSec: number | null;
  /** Of one call, on the device if there is one. */
  meanSec: number | null;
  /** Null where none were counted. */
  flops: number | null;
  flopsPerSec: number | null;
  peakShare: number | null;
  flopsPerByte: number | null;
  bytes: number | null;
  dtypes: string;
  /** The line of the user's code that spends most time in it. */
  place: string | null;
  shapes: OperatorShapeRow[];
}

/** The operators of *trace*, the longest first. */
export function tracedOperators(trace: TraceReport): TracedOperator[] {
  const steps = stepsOf(trace);
  const counted = new Map<string, OperatorFlops[]>();
  for (const one of trace.flops?.operators ?? []) add(counted, one.operator, one);
  const shapes = new Map<string, OperatorShapeRow[]>();
  for (const one of trace.operators_by_shape ?? []) add(shapes, one.name, one);
  const rows = (trace.operators ?? []).map((row): TracedOperator => {
    const name = row.name.replaceAll("::", ".");
    const spent = row.device_self ?? row.host_self;
    const flops = counted.get(name) ?? [];
    counted.delete(name);
    return {
      name: row.name,
      row,
      calls: row.calls / steps,
      seconds: spent.total_us / 1e6 / steps,
      share: spent.ratio,
      deviceSec: row.device === null ? null : row.device.total_us / 1e6 / steps,
      hostOwnSec: row.host_self.total_us / 1e6 / steps,
      hostSec: row.host.total_us / 1e6 / steps,
      meanSec: (row.device ?? row.host).mean_us / 1e6,
      place: row.called_from[0]?.place ?? null,
      shapes: shapes.get(row.name) ?? [],
      ...countedIn(flops, steps),
    };
  });
  for (const [name, flops] of counted) {
    rows.push({
      name,
      row: null,
      calls: flops.reduce((sum, one) => sum + one.calls, 0) / steps,
      seconds: null,
      share: null,
      deviceSec: null,
      hostOwnSec: null,
      hostSec: null,
      meanSec: null,
      place: null,
      shapes: [],
      ...countedIn(flops, steps),
    });
  }
  return rows.sort((one, other) => (other.seconds ?? 0) - (one.seconds ?? 0));
}

type Counted = Pick<TracedOperator, "flops" | "flopsPerSec" | "peakShare" | "flopsPerByte" | "bytes" | "dtypes">;

/** All dtypes of one operator together: rates over the time of all, n/a as soon as one is not known. */
function countedIn(flops: readonly OperatorFlops[], steps: number): Counted {
  const sum = (of: (one: OperatorFlops) => number | null): number | null =>
    flops.reduce<number | null>((all, one) => {
      const value = of(one);
      return all === null || value === null ? null : all + value;
    }, 0);
  const time = sum((one) => one.time_us);
  const done = sum((one) =>
    one.flops_per_sec === null || one.time_us === null ? null : one.flops_per_sec * one.time_us,
  );
  const atPeak = sum((one) => (one.peak_share === null || one.time_us === null ? null : one.peak_share * one.time_us));
  const bytes = sum((one) => one.bytes);
  const executed = sum(executedOf);
  return {
    flops: flops.length ? (sum(countedOf) ?? 0) / steps : null,
    flopsPerSec: time && done !== null ? done / time : null,
    peakShare: time && atPeak !== null ? atPeak / time : null,
    flopsPerByte: bytes && executed !== null ? executed / bytes : null,
    bytes: flops.length && bytes !== null ? bytes / steps : null,
    dtypes: flops.map((one) => one.dtype).join(", "),
  };
}

function add<Key, Value>(found: Map<Key, Value[]>, key: Key, value: Value): void {
  const known = found.get(key);
  if (known) known.push(value);
  else found.set(key, [value]);
}

/** Kernels with their FLOPs, where an operator that was counted launched them. */
export function kernelFlops(trace: TraceReport): ReadonlyMap<string, KernelFlops> {
  return new Map((trace.flops?.kernels ?? []).map((one) => [one.name, one]));
}

/** The FLOPs of each operator and shape that was counted, by `shapeKey`. */
export function shapeFlops(trace: TraceReport): ReadonlyMap<string, ShapeFlops> {
  return new Map((trace.flops?.shapes ?? []).map((one) => [shapeKey(one), one]));
}

export function shapeKey(row: Pick<OperatorShapeRow, "name" | "inputs" | "dtypes">): string {
  return JSON.stringify([row.name, row.inputs, row.dtypes]);
}

/** The end of the path of a file and a line: its folder, its name and the line. */
export function shortPlace(place: string): string {
  const parts = place.split("/");
  return parts.length > 3 ? `…/${parts.slice(-2).join("/")}` : place;
}

/** "32 × 8 × 1 blocks of 256 × 1 × 1", of the launches that took most time. */
export function launchWords(kernel: KernelRow): string {
  const first = kernel.launch_shapes[0];
  if (!first?.grid || !first.block) return "";
  const more = kernel.launch_shapes.length - 1;
  return `${first.grid.join("×")} of ${first.block.join("×")}${more ? ` (+${more})` : ""}`;
}

/** The part of *durations* that is of one step, in seconds. */
export function perStep(durations: Durations | null | undefined, steps: number): number | null {
  return durations ? durations.total_us / 1e6 / steps : null;
}
