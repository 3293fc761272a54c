// How many FLOPs a byte, and how fast: where a module or an operator stands below what the device allows.

import type { Profile, TraceReport } from "../schema";
import { type ModuleTree, totalOf } from "./modules";
import { executedOf, stepsOf } from "./trace";

export interface Point {
  name: string;
  kind: string;
  /** FLOPs a byte. */
  intensity: number;
  /** FLOP/s. */
  achieved: number;
  seconds: number;
  flops: number;
  bytes: number;
  /** FLOP/s that the roof allows here; null without a roof. */
  attainable: number | null;
}

export interface Roof {
  /** FLOP/s by dtype, of the dtypes that ran, the fastest first. */
  peaks: { dtype: string; flopsPerSec: number }[];
  /** Bytes a second; null where the device's memory bandwidth is not known. */
  bandwidth: number | null;
}

/** What a roofline shows. */
export interface Chart {
  modules: Point[];
  operators: Point[];
  roof: Roof;
}

export function profileChart(profile: Profile, tree: ModuleTree | null): Chart {
  return {
    modules: tree ? modulePoints(profile, tree) : [],
    operators: operatorPoints(profile),
    roof: roofOf(profile),
  };
}

/** The operators whose shapes tell their bytes, and whose time is in the trace; of one step. */
export function traceChart(trace: TraceReport): Chart {
  const flops = trace.flops;
  const steps = stepsOf(trace);
  const peaks = Object.entries(flops?.peaks ?? {})
    .map(([dtype, flopsPerSec]) => ({ dtype, flopsPerSec }))
    .sort((one, other) => other.flopsPerSec - one.flopsPerSec);
  const rows = flops?.operators ?? [];
  const several = new Set(rows.map((one) => one.dtype)).size > 1;
  const operators = rows.flatMap((one): Point[] => {
    const { flops_per_sec: achieved, flops_per_byte: intensity, time_us, bytes } = one;
    if (!(achieved && intensity && time_us && bytes)) return [];
    return [
      {
        name: several ? `${one.operator} (${one.dtype})` : one.operator,
        kind: "operator",
        intensity,
        achieved,
        seconds: time_us / 1e6 / steps,
        flops: executedOf(one) / steps,
        bytes: bytes / steps,
        attainable: one.attainable_flops_per_sec,
      },
    ];
  });
  return { modules: [], operators, roof: { peaks, bandwidth: flops?.memory_bytes_per_sec ?? null } };
}

export function roofOf(profile: Profile): Roof {
  const used = profile.dtypes.filter((one) => one.peak_flops_per_sec !== null && one.hardware > 0);
  const peaks = used
    .map((one) => ({ dtype: one.dtype, flopsPerSec: one.peak_flops_per_sec as number }))
    .sort((one, other) => other.flopsPerSec - one.flopsPerSec);
  return { peaks, bandwidth: profile.memory_bytes_per_sec };
}

export function attainable(roof: Roof, intensity: number): number | null {
  const peak = roof.peaks[0]?.flopsPerSec ?? null;
  const fed = roof.bandwidth === null ? null : roof.bandwidth * intensity;
  return peak === null ? fed : fed === null ? peak : Math.min(peak, fed);
}

/** Modules with FLOPs of their own, by what they do themselves. */
export function modulePoints(profile: Profile, tree: ModuleTree): Point[] {
  if (!comparable(profile) || tree.timed !== "both") return [];
  const roof = roofOf(profile);
  return tree.all.flatMap((one) => {
    const { flops, bytes, seconds } = one.own;
    if (!(flops && flops > 0 && bytes && bytes > 0 && seconds !== null && seconds > 0)) return [];
    const made = point(roof, { name: one.name || one.label, kind: one.type, flops, bytes, seconds });
    // Of a module without others inside, the profile knows what its own dtypes allow.
    const known = one.children.length === 0 ? one.attainable : null;
    return [{ ...made, attainable: known ?? made.attainable }];
  });
}

/** Operators that have FLOPs, and a time of the same name in the traced step. */
export function operatorPoints(profile: Profile): Point[] {
  if (!comparable(profile)) return [];
  const roof = roofOf(profile);
  const known = new Map(profile.operators.map((one) => [one.operator, one.roofline]));
  return operatorRows(profile).flatMap(({ name, flops, bytes, seconds }) => {
    if (!(flops > 0 && bytes > 0 && seconds !== null && seconds > 0)) return [];
    const made = point(roof, { name, kind: "operator", flops, bytes, seconds });
    return [{ ...made, attainable: known.get(name)?.attainable_flops_per_sec ?? made.attainable }];
  });
}

/** FLOPs are of the counted step, seconds of the traced one: a rate of both needs two steps alike. */
function comparable(profile: Profile): boolean {
  return profile.traced?.like_counted === true;
}

function point(roof: Roof, one: { name: string; kind: string; flops: number; bytes: number; seconds: number }): Point {
  const intensity = one.flops / one.bytes;
  return { ...one, intensity, achieved: one.flops / one.seconds, attainable: attainable(roof, intensity) };
}

export interface OperatorRow {
  name: string;
  calls: number;
  flops: number;
  bytes: number;
  dtypes: string;
  /** In itself: on the device if there is one, else on the host; null where the traced step does not show it. */
  seconds: number | null;
  /** Of all operators' own time. */
  share: number | null;
  hostSec: number | null;
}

/** Counted and traced operators side by side, per step; the longest first. */
export function operatorRows(profile: Profile): OperatorRow[] {
  const steps = Math.max(1, profile.counted_steps.length);
  const tables = profile.traced?.tables ?? null;
  const traced = Math.max(1, tables?.step_times.steps.length ?? 1);
  const rows = new Map<string, OperatorRow>();
  for (const one of profile.operators) {
    rows.set(one.operator, {
      name: one.operator,
      calls: one.calls / steps,
      flops: totalOf(one.flops) / steps,
      bytes: (one.bytes_read + one.bytes_written) / steps,
      dtypes: one.dtypes.join(", "),
      seconds: null,
      share: null,
      hostSec: null,
    });
  }
  for (const one of tables?.operators ?? []) {
    const name = one.name.replaceAll("::", ".");
    const row = rows.get(name) ?? {
      name,
      calls: one.calls / traced,
      flops: 0,
      bytes: 0,
      dtypes: "",
      seconds: null,
      share: null,
      hostSec: null,
    };
    const spent = one.device_self ?? one.host_self;
    row.seconds = spent.total_us / 1e6 / traced;
    row.share = spent.ratio;
    row.hostSec = one.host_self.total_us / 1e6 / traced;
    rows.set(name, row);
  }
  return [...rows.values()].sort((one, other) => (other.seconds ?? 0) - (one.seconds ?? 0) || other.flops - one.flops);
}
