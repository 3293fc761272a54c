// The modules of a profile as a tree, each with what it spent in one step.

import type { ModuleProfile, PhaseBytes, PhaseFlops, Profile } from "../schema";

/** What one module spent in one step; null is what was not measured. */
export interface Spent {
  seconds: number | null;
  flops: number;
  bytes: number;
  params: number;
  memory: number | null;
}

export interface Module {
  /** Place in tree order; the root is 0. */
  index: number;
  name: string;
  /** What its parent calls it; the root goes by its class. */
  label: string;
  profile: ModuleProfile;
  parent: Module | null;
  children: Module[];
  depth: number;
  /** With the modules inside. */
  total: Spent;
  /** Without them. */
  own: Spent;
  forwardSec: number | null;
  backwardSec: number | null;
  /** Share of the device's peak over forward and backward; null without FLOPs, times or a peak. */
  share: number | null;
  /** FLOP/s over forward and backward. */
  achieved: number | null;
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

export function moduleTree(profile: Profile): ModuleTree | null {
  const steps = Math.max(1, profile.counted_steps.length);
  const memory = keptByForward(profile);
  const all: Module[] = [];
  const path: Module[] = [];
  for (const one of profile.modules) {
    while (path.length && (path.at(-1) as Module).profile.depth >= one.depth) path.pop();
    const parent = path.at(-1) ?? all[0] ?? null;
    const module = describe(one, { index: all.length, parent, steps, memory });
    parent?.children.push(module);
    all.push(module);
    path.push(module);
  }
  const root = all[0];
  if (root === undefined) return null;
  setOwn(all, memory);
  const times = all.filter((one) => one.profile.times !== null);
  const backward = times.some((one) => one.backwardSec !== null);
  const trains = profile.context.loop === "training";
  return {
    root,
    all,
    byName: new Map(all.map((one) => [one.name, one])),
    timed: times.length === 0 ? null : backward || !trains ? "both" : "forward",
    why: {
      seconds: times.length ? "" : "no step was traced",
      flops: all.some((one) => one.total.flops > 0) ? "" : "no FLOPs were counted in a module",
      bytes: all.some((one) => one.total.bytes > 0) ? "" : "no bytes were counted in a module",
      params: all.some((one) => one.total.params > 0) ? "" : "the model has no parameters",
      memory: memory.size ? "" : "memory of modules is recorded with profile_memory=True",
    },
    knowsPeak: all.some((one) => one.share !== null),
    fastest: all.reduce((most, one) => Math.max(most, one.achieved ?? 0), 0),
  };
}

interface Surroundings {
  index: number;
  parent: Module | null;
  steps: number;
  memory: ReadonlyMap<string, readonly [number, number]>;
}

function describe(profile: ModuleProfile, { index, parent, steps, memory }: Surroundings): Module {
  const times = profile.times;
  const forwardSec = times?.forward_sec ?? null;
  const backwardSec = times?.backward_sec ?? null;
  const seconds = times === null ? null : times.forward_sec + (times.backward_sec ?? 0);
  const flops = totalOf(profile.total) / steps;
  const bytes = totalOf(profile.total_bytes) / steps;
  const name = profile.name;
  const label = name === "" ? profile.type_name || "(the root)" : name.slice(name.lastIndexOf(".") + 1);
  return {
    index,
    name,
    label,
    profile,
    parent,
    children: [],
    depth: profile.depth,
    total: { seconds, flops, bytes, params: profile.params, memory: memory.get(name)?.[0] ?? null },
    own: { seconds: null, flops: totalOf(profile.own) / steps, bytes: 0, params: 0, memory: null },
    forwardSec,
    backwardSec,
    ...ratesOf(profile),
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
function keptByForward(profile: Profile): Map<string, readonly [number, number]> {
  const tables = profile.traced?.tables;
  const steps = Math.max(1, tables?.step_times.steps.length ?? 1);
  const rows = (tables?.module_memory ?? []).filter((one) => one.name !== null && one.part === "forward");
  const device = rows.some((one) => one.device_type === "device") ? "device" : "host";
  return new Map(
    rows
      .filter((one) => one.device_type === device)
      .map((one) => [one.name ?? "", [one.size_increase_bytes / steps, one.self_size_increase_bytes / steps]]),
  );
}

/** What children leave of their parent; a tied parameter is in two children and once in the parent, so never below 0. */
function setOwn(all: readonly Module[], memory: ReadonlyMap<string, readonly [number, number]>): void {
  for (const one of all) {
    const times = one.profile.times;
    one.own.seconds = times === null ? null : times.own_forward_sec + (times.own_backward_sec ?? 0);
    one.own.bytes = rest(one, "bytes");
    one.own.params = rest(one, "params");
    one.own.memory = memory.get(one.name)?.[1] ?? null;
  }
}

function rest(module: Module, key: "bytes" | "params"): number {
  if (module.profile.alias_of !== null) return 0;
  const below = module.children.reduce((sum, one) => sum + (one.profile.alias_of === null ? one.total[key] : 0), 0);
  return Math.max(0, module.total[key] - below);
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
