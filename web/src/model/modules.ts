// The modules as a tree, each with what it spent in one step: those of a profile, or those of a trace.

import type { ModuleProfile, ModuleRow, PhaseBytes, PhaseFlops, Profile, TraceReport } from "../schema";
import { stepsOf } from "./trace";

/** What one module spent in one step; null is what was not measured. */
export interface Spent {
  seconds: number | null;
  flops: number | null;
  bytes: number | null;
  params: number | null;
  memory: number | null;
}

export interface Module {
  /** Place in tree order; the root is 0. */
  index: number;
  name: string;
  /** What its parent calls it; the root goes by its class. */
  label: string;
  /** Its class; empty where that is not known. */
  type: string;
  /** What its class says of its settings. */
  detail: string;
  /** The module that it is another name of. */
  aliasOf: string | null;
  /** File and line of its forward. */
  source: string | null;
  parent: Module | null;
  children: Module[];
  depth: number;
  /** With the modules inside. */
  total: Spent;
  /** Without them. */
  own: Spent;
  /** In one step. */
  calls: number;
  trainable: number | null;
  forwardSec: number | null;
  backwardSec: number | null;
  /** FLOPs of one step by phase; null where they are not known. */
  phases: { forward: number; backward: number; recompute: number } | null;
  kernels: { forward: number; backward: number | null } | null;
  /** Share of the device's peak over forward and backward; null without FLOPs, times or a peak. */
  share: number | null;
  /** Of each phase alone. */
  phaseShares: { forward: number | null; backward: number | null };
  /** FLOP/s over forward and backward. */
  achieved: number | null;
  /** FLOP/s that its own dtypes and bytes allow. */
  attainable: number | null;
  /** FLOPs a byte of forward and backward, with the modules inside. */
  intensity: number | null;
}

export type SizeKey = keyof Spent;

export interface ModuleTree {
  root: Module;
  all: Module[];
  byName: Map<string, Module>;
  /** Whether times are of forward and backward, of the forward alone, or missing. */
  timed: "both" | "forward" | null;
  /** Why a size cannot be chosen; empty for one that can. */
  why: Record<SizeKey, string>;
  /** Share of peak colours the modules; without a peak, share of the fastest module. */
  knowsPeak: boolean;
  fastest: number;
}

export const totalOf = (amounts: PhaseFlops | PhaseBytes): number =>
  amounts.forward + amounts.backward + amounts.recompute + amounts.optimizer;

type Kept = ReadonlyMap<string, readonly [number, number]>;

const NO_MEMORY = "memory of modules is recorded with profile_memory=True";

export function moduleTree(profile: Profile): ModuleTree | null {
  const steps = Math.max(1, profile.counted_steps.length);
  const memory = keptByForward(profile.traced?.tables ?? null);
  const all: Module[] = [];
  const path: Module[] = [];
  for (const one of profile.modules) {
    while (path.length && (path.at(-1) as Module).depth >= one.depth) path.pop();
    const parent = path.at(-1) ?? all[0] ?? null;
    const module = describe(one, { index: all.length, parent, steps, memory });
    parent?.children.push(module);
    all.push(module);
    path.push(module);
  }
  if (all[0] === undefined) return null;
  setOwn(all, profile.modules, memory);
  const times = profile.modules.filter((one) => one.times !== null);
  const backward = all.some((one) => one.backwardSec !== null);
  const trains = profile.context.loop === "training";
  return treeOf(all, times.length === 0 ? null : backward || !trains ? "both" : "forward", {
    seconds: times.length ? "" : "no step was traced",
    flops: "no FLOPs were counted in a module",
    bytes: "no bytes were counted in a module",
    params: "the model has no parameters",
    memory: NO_MEMORY,
  });
}

/** The tree of *all*, the root first; *why* says of a size that no module has why that is. */
function treeOf(all: Module[], timed: ModuleTree["timed"], why: Record<SizeKey, string>): ModuleTree {
  const has = (key: SizeKey): boolean => all.some((one) => (one.total[key] ?? 0) > 0);
  return {
    root: all[0] as Module,
    all,
    byName: new Map(all.map((one) => [one.name, one])),
    timed,
    why: {
      seconds: timed === null ? why.seconds : "",
      flops: has("flops") ? "" : why.flops,
      bytes: has("bytes") ? "" : why.bytes,
      params: has("params") ? "" : why.params,
      memory: all.some((one) => one.total.memory !== null) ? "" : why.memory,
    },
    knowsPeak: all.some((one) => one.share !== null),
    fastest: all.reduce((most, one) => Math.max(most, one.achieved ?? 0), 0),
  };
}

interface Surroundings {
  index: number;
  parent: Module | null;
  steps: number;
  memory: Kept;
}

function describe(profile: ModuleProfile, { index, parent, steps, memory }: Surroundings): Module {
  const times = profile.times;
  const forwardSec = times?.forward_sec ?? null;
  const backwardSec = times?.backward_sec ?? null;
  const seconds = times === null ? null : times.forward_sec + (times.backward_sec ?? 0);
  const { forward, backward, recompute } = profile.total;
  const flops = totalOf(profile.total) / steps;
  const bytes = totalOf(profile.total_bytes) / steps;
  const name = profile.name;
  return {
    index,
    name,
    label: name === "" ? profile.type_name || "(the root)" : name.slice(name.lastIndexOf(".") + 1),
    type: profile.type_name,
    detail: profile.extra_repr,
    aliasOf: profile.alias_of,
    source: null,
    parent,
    children: [],
    depth: profile.depth,
    total: { seconds, flops, bytes, params: profile.params, memory: memory.get(name)?.[0] ?? null },
    own: { seconds: null, flops: totalOf(profile.own) / steps, bytes: 0, params: 0, memory: null },
    calls: profile.calls / steps,
    trainable: profile.trainable_params,
    forwardSec,
    backwardSec,
    phases: { forward: forward / steps, backward: backward / steps, recompute: recompute / steps },
    kernels:
      times?.forward_kernels == null ? null : { forward: times.forward_kernels, backward: times.backward_kernels },
    ...ratesOf(profile),
    phaseShares: { forward: times?.forward_utilization ?? null, backward: times?.backward_utilization ?? null },
    attainable: profile.roofline?.attainable_flops_per_sec ?? null,
    intensity: profile.roofline?.flops_per_byte ?? null,
  };
}

const NO_RATES = { share: null, achieved: null };

/** FLOP/s and share of the peak over the phases that have FLOPs; null if one of them was not timed. */
function ratesOf({ times, total }: ModuleProfile): { share: number | null; achieved: number | null } {
  if (times === null) return NO_RATES;
  const { forward, backward, recompute } = total;
  let seconds = 0;
  let flops = 0;
  let atPeak: number | null = 0;
  const add = (took: number, rate: number, share: number | null): void => {
    seconds += took;
    flops += rate * took;
    atPeak = atPeak === null || share === null ? null : atPeak + share * took;
  };
  if (forward > 0) {
    if (times.forward_flops_per_sec === null) return NO_RATES;
    add(times.forward_sec, times.forward_flops_per_sec, times.forward_utilization);
  }
  if (backward + recompute > 0 && times.backward_sec !== null) {
    if (times.backward_flops_per_sec === null) return NO_RATES;
    add(times.backward_sec, times.backward_flops_per_sec, times.backward_utilization);
  }
  if (seconds <= 0) return NO_RATES;
  return { share: atPeak === null ? null : atPeak / seconds, achieved: flops / seconds };
}

/** Bytes that each module's forward keeps in one step, with and without the modules inside. */
function keptByForward(tables: TraceReport | null): Kept {
  const steps = tables === null ? 1 : stepsOf(tables);
  const rows = (tables?.module_memory ?? []).filter((one) => one.name !== null && one.part === "forward");
  const device = rows.some((one) => one.device_type === "device") ? "device" : "host";
  return new Map(
    rows
      .filter((one) => one.device_type === device)
      .map((one) => [one.name ?? "", [one.size_increase_bytes / steps, one.self_size_increase_bytes / steps]]),
  );
}

/** What children leave of their parent; a tied parameter is in two children and once in the parent, so never below 0. */
function setOwn(all: readonly Module[], profiles: readonly ModuleProfile[], memory: Kept): void {
  all.forEach((one, at) => {
    const times = profiles[at]?.times ?? null;
    one.own.seconds = times === null ? null : times.own_forward_sec + (times.own_backward_sec ?? 0);
    one.own.bytes = rest(one, "bytes");
    one.own.params = rest(one, "params");
    one.own.memory = memory.get(one.name)?.[1] ?? null;
  });
}

function rest(module: Module, key: "bytes" | "params"): number {
  if (module.aliasOf !== null) return 0;
  const below = module.children.reduce((sum, one) => sum + (one.aliasOf === null ? (one.total[key] ?? 0) : 0), 0);
  return Math.max(0, (module.total[key] ?? 0) - below);
}

/**
 * The modules that a trace shows; null where it shows none. A container that is never called has no row there, and a
 * root that neither was called nor did anything itself is none.
 */
export function tracedTree(trace: TraceReport): ModuleTree | null {
  const table = trace.modules;
  if (!table?.rows.some((one) => one.name !== "" || one.calls > 0)) return null;
  const make = tracedModule(trace);
  const rows = table.rows
    .filter((one) => one.name !== "" || one.calls > 0 || one.own_forward_us + one.own_backward_us > 0)
    .sort((one, other) => inNames(one.name, other.name));
  const top = rows.filter((one) => !rows.some((above) => isAbove(above.name, one.name)));
  const all: Module[] = [make(top.length === 1 ? (top[0] as ModuleRow) : together(top), null)];
  const path: Module[] = [all[0] as Module];
  for (const one of rows) {
    if (one.name === all[0]?.name) continue;
    while (path.length > 1 && !isAbove((path.at(-1) as Module).name, one.name)) path.pop();
    const parent = path.at(-1) as Module;
    const module = make(one, parent);
    module.index = all.length;
    parent.children.push(module);
    all.push(module);
    path.push(module);
  }
  return treeOf(all, "both", {
    seconds: "",
    flops: trace.flops ? "no FLOPs were counted in a module" : "shapes are recorded with record_shapes=True",
    bytes: "a trace tells the bytes of operators, not those of modules",
    params: "a trace does not tell the parameters",
    memory: NO_MEMORY,
  });
}

/** Makes the modules of *trace* of their rows, each of one step. */
function tracedModule(trace: TraceReport): (row: ModuleRow, parent: Module | null) => Module {
  const steps = Math.max(1, trace.modules?.steps ?? 1);
  const memory = keptByForward(trace);
  const counts = new Map((trace.flops?.modules ?? []).map((one) => [one.name, one]));
  const counted = trace.flops?.modules != null;
  return (row, parent) => {
    const flops = counts.get(row.name);
    const all = flops ? flops.forward + flops.backward + flops.recompute : 0;
    const sec = (us: number): number => us / 1e6 / steps;
    const kept = memory.get(row.name);
    return {
      index: 0,
      name: row.name,
      label: row.name === "" ? "(the root)" : parent?.name ? row.name.slice(parent.name.length + 1) : row.name,
      type: "",
      detail: "",
      aliasOf: null,
      source: row.source,
      parent,
      children: [],
      depth: parent === null ? 0 : parent.depth + 1,
      total: {
        seconds: sec(row.forward_us + row.backward_us),
        flops: counted ? all / steps : null,
        bytes: null,
        params: null,
        memory: kept?.[0] ?? null,
      },
      own: {
        seconds: sec(row.own_forward_us + row.own_backward_us),
        flops: counted ? (flops?.own ?? 0) / steps : null,
        bytes: null,
        params: null,
        memory: kept?.[1] ?? null,
      },
      calls: row.calls / steps,
      trainable: null,
      forwardSec: sec(row.forward_us),
      backwardSec: sec(row.backward_us),
      phases: counted
        ? {
            forward: (flops?.forward ?? 0) / steps,
            backward: (flops?.backward ?? 0) / steps,
            recompute: (flops?.recompute ?? 0) / steps,
          }
        : null,
      kernels:
        row.forward_kernels === null
          ? null
          : { forward: row.forward_kernels / steps, backward: (row.backward_kernels ?? 0) / steps },
      share: flops?.peak_share ?? null,
      phaseShares: { forward: null, backward: null },
      achieved: flops?.flops_per_sec ?? null,
      attainable: null,
      intensity: null,
    };
  };
}

/** Several modules that no other one contains, as the root that the trace does not have. */
function together(rows: readonly ModuleRow[]): ModuleRow {
  const sum = (key: "forward_us" | "backward_us"): number => rows.reduce((all, one) => all + one[key], 0);
  return {
    name: "",
    calls: 0,
    forward_us: sum("forward_us"),
    own_forward_us: 0,
    backward_us: sum("backward_us"),
    own_backward_us: 0,
    forward_kernels: null,
    backward_kernels: null,
    source: null,
  };
}

function isAbove(name: string, other: string): boolean {
  return name !== other && (name === "" || other.startsWith(`${name}.`));
}

const NATURAL = new Intl.Collator("en", { numeric: true });

/** By the parts of names, numbers by their value, what contains before what is contained. */
function inNames(one: string, other: string): number {
  const parts = one.split(".");
  const others = other.split(".");
  for (let at = 0; at < Math.min(parts.length, others.length); at += 1) {
    const order =
      NATURAL.compare(parts[at] as string, others[at] as string) || byText(parts[at] as string, others[at] as string);
    if (order) return order;
  }
  return parts.length - others.length;
}

function byText(one: string, other: string): number {
  return one < other ? -1 : one > other ? 1 : 0;
}

/** The module and all above it, the root first. */
export function pathTo(module: Module): Module[] {
  const path: Module[] = [];
  for (let one: Module | null = module; one !== null; one = one.parent) path.unshift(one);
  return path;
}

export function isInside(module: Module, other: Module): boolean {
  for (let one: Module | null = module; one !== null; one = one.parent) if (one === other) return true;
  return false;
}
