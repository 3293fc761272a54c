// Where the page's profiles come from: the file that the page itself is, or TensorBoard's server.

import type { Comparison, Profile, StepTime, TraceComparison, TraceReport, TracesReport } from "./schema";

/** One window in a few figures: what a strip of many windows shows without reading any profile. */
export interface WindowFigures {
  profile_step: number;
  report_step: number;
  global_step_sec: number | null;
  parts_sec: Record<string, number>;
  samples_per_sec: number | null;
  tokens_per_sec: number | null;
  mfu: number | null;
  model_flops: number;
  /** The modules that weigh most, without those inside, and what their shares are of. */
  longest: { name: string; share: number }[];
  longest_of: string;
  /** Rules of the first pieces of advice. */
  advice: string[];
  /** Where TensorBoard's server has its profile. */
  address?: string;
}

export interface Run {
  name: string;
  windows: WindowFigures[];
  /** Files of the run that could not be read, in sentences. */
  problems: string[];
}

/** Runs with their windows. */
export interface ProfilesDocument {
  kind: "profiles";
  written_by: string;
  runs: Run[];
}

/** Two runs compared, by their profiles or by their traces. */
export interface ComparisonDocument {
  kind: "comparison" | "trace_comparison";
  written_by: string;
  a: string;
  b: string;
  /** The difference and its largest cause in a sentence. */
  headline: string;
}

/** One trace in a few figures: what all of them side by side show without reading any. */
export interface TraceFigures {
  /** Told apart from the others by it: its rank, or its file. */
  name: string;
  source: string;
  steps: number;
  /** The mean step. */
  mean: StepTime;
  /** Why there are no FLOPs, or no MFU; null where there are, or where nobody knows. */
  why_no_flops: string | null;
  why_no_mfu: string | null;
  /** Of a step, the mean; null where the trace has no FLOPs. */
  forward_flops: number | null;
  backward_flops: number | null;
  model_flops: number | null;
  hardware_flops: number | null;
  /** Of all steps together. */
  mfu: number | null;
  hfu: number | null;
  lower_bound: boolean;
}

/** Traces of torch.profiler. */
export interface TracesDocument {
  kind: "traces";
  written_by: string;
  /** Whether the files name their ranks; else they are separate runs. */
  ranks: boolean;
  traces: TraceFigures[];
}

export type PageDocument = ProfilesDocument | ComparisonDocument | TracesDocument;

export interface Source {
  document: PageDocument;
  profile(run: number, window: number): Promise<Profile>;
  /** In a page that compares two runs. */
  comparison?(): Promise<Comparison>;
  /** In one that compares two traces. */
  traceComparison?(): Promise<TraceComparison>;
  /** In a page of traces. */
  trace?(at: number): Promise<TraceReport>;
  /** What several traces say together, without themselves. */
  together?(): Promise<TracesReport>;
  /** Where runs come and go: reads the document anew. */
  refresh?(): Promise<ProfilesDocument>;
}

/** The profiles that lie in this page, each compressed on its own: only what is looked at is unpacked. */
export function embeddedSource(page: Document): Source | null {
  const text = page.getElementById("document")?.textContent;
  if (!text) return null;
  const packed = (id: string): string => page.getElementById(id)?.textContent ?? "";
  return {
    document: JSON.parse(text) as PageDocument,
    profile: remembered((run, window) => unpack<Profile>(packed(`profile-${run}-${window}`))),
    comparison: () => unpack<Comparison>(packed("comparison")),
    traceComparison: () => unpack<TraceComparison>(packed("comparison")),
    trace: remembered((at) => unpack<TraceReport>(packed(`trace-${at}`))),
    together: () => unpack<TracesReport>(packed("together")),
  };
}

/** The profiles of the runs that TensorBoard shows; *base* is the address of the plugin's routes. */
export async function servedSource(base: string): Promise<Source> {
  const get = async (path: string): Promise<unknown> => {
    const answer = await fetch(new URL(path, base));
    if (!answer.ok) throw new Error(await answer.text());
    return JSON.parse(visible(await answer.text()));
  };
  let served = (await get("runs")) as ProfilesDocument;
  const source: Source = {
    document: served,
    profile: (run, window) => {
      const address = served.runs[run]?.windows[window]?.address ?? "";
      return get(`profile?${address}`) as Promise<Profile>;
    },
    refresh: async () => {
      served = (await get("runs")) as ProfilesDocument;
      return served;
    },
  };
  return source;
}

function remembered<Keys extends readonly number[], Value>(
  read: (...keys: Keys) => Promise<Value>,
): (...keys: Keys) => Promise<Value> {
  const known = new Map<string, Promise<Value>>();
  return (...keys) => {
    const key = keys.join("-");
    const found = known.get(key) ?? read(...keys);
    known.set(key, found);
    return found;
  };
}

/** JSON that was compressed by gzip and written in base64. */
export async function unpack<Kind = unknown>(text: string): Promise<Kind> {
  const packed = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(visible(await new Response(unpacked).text())) as Kind;
}

/** JSON text in which signs that turn text around, or break lines, are written out: a name may have them. */
export function visible(text: string): string {
  return text.replace(
    /[\u200e\u200f\u2028-\u202e\u2066-\u2069]/g,
    (sign) => `\\\\u${sign.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}
