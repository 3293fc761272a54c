// What the page shows, as lightning_flops/report/page_views.py writes it.

/** Text, and the number that it is sorted by. */
export type Cell = readonly [text: string, value?: number | null, link?: string];

export interface TableData {
  head: readonly { label: string; left: boolean; bar: boolean }[];
  rows: readonly (readonly Cell[])[];
}

export type Item =
  | TableData
  | { label: string; value: string }
  | { text: string }
  | { picture: "steps" | "modules" | "roofline" | "curves" };

export interface SectionData {
  title: string;
  note: string;
  items: readonly Item[];
}

/** An operator: FLOP/s, and FLOPs a byte. */
export type PointData = readonly [
  name: string,
  seconds: number,
  achieved: number,
  intensity: number,
  attainable: number | null,
];

export interface RooflineData {
  /** FLOP/s by dtype, the fastest first. */
  peaks: readonly (readonly [dtype: string, flopsPerSec: number])[];
  /** Bytes a second; null where the device's memory bandwidth is not known. */
  bandwidth: number | null;
  operators: readonly PointData[];
}

export interface CurveData {
  device: number;
  absolute: boolean;
  peak_bytes: number;
  peak_us: number;
  points: readonly (readonly [us: number, bytes: number])[];
  peak_phase: string | null;
  /** Stretches of phases on the host, in the order of time. */
  phases: readonly (readonly [name: string, startUs: number, endUs: number])[];
}

export interface StepsData {
  names: readonly string[];
  items: readonly (readonly [label: string, seconds: readonly number[]])[];
}

/** One profile, trace or comparison. */
export interface View {
  title: string;
  where: string;
  summary: readonly string[];
  parts: readonly (readonly [name: string, seconds: number])[];
  steps: StepsData | null;
  /** What the columns of the table of modules have; none without modules. */
  modules: readonly string[];
  roofline: RooflineData | null;
  curves: readonly CurveData[];
  sections: readonly SectionData[];
}

/** One view in a few figures: what a strip of many shows without reading any. */
export interface WindowFigures {
  label: string;
  global_step_sec?: number | null;
  parts_sec?: Readonly<Record<string, number>>;
  mfu?: number | null;
  /** Where TensorBoard's server has it. */
  address?: string;
}

export interface Run {
  name: string;
  windows: readonly WindowFigures[];
  /** What could not be read, in sentences. */
  problems: readonly string[];
}

export interface PageDocument {
  written_by: string;
  runs: readonly Run[];
}
