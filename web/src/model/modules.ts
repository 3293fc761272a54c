// The modules as a tree, each with its cost in one step.

import type { ModuleData } from "../document";

/** In the order of `Sizes`. */
export const SIZE_KEYS = ["seconds", "flops", "bytes", "params"] as const;

export type SizeKey = (typeof SIZE_KEYS)[number];

/** The cost of one module in one step; null is what was not measured. */
export type Spent = Record<SizeKey, number | null>;

export interface Module {
  /** Place in tree order; the root is 0. */
  index: number;
  name: string;
  /** What its parent calls it; the root goes by its class. */
  label: string;
  /** Its class; empty where that is not known. */
  type: string;
  detail: string;
  parent: Module | null;
  children: Module[];
  depth: number;
  /** With the modules inside. */
  total: Spent;
  /** Without them. */
  own: Spent;
  /** In one step. */
  calls: number;
  /** Share of the device's peak over forward and backward; null without FLOPs, times or a peak. */
  share: number | null;
  /** FLOP/s over forward and backward. */
  achieved: number | null;
}

export interface ModuleTree {
  root: Module;
  all: Module[];
  byName: Map<string, Module>;
  /** Share of peak colours the modules; without a peak, share of the fastest module. */
  knowsPeak: boolean;
  fastest: number;
}

export function moduleTree(rows: readonly ModuleData[]): ModuleTree | null {
  const all: Module[] = [];
  const byName = new Map<string, Module>();
  for (const [name, type, detail, own, total, achieved, share, calls] of rows) {
    const end = name.lastIndexOf(".");
    const parent = name === "" ? null : (byName.get(name.slice(0, Math.max(0, end))) ?? null);
    const module: Module = {
      index: all.length,
      name,
      label: name === "" ? type || "(the root)" : name.slice(end + 1),
      type,
      detail,
      parent,
      children: [],
      depth: parent === null ? 0 : parent.depth + 1,
      total: spent(total),
      own: spent(own),
      calls,
      share,
      achieved,
    };
    parent?.children.push(module);
    all.push(module);
    byName.set(name, module);
  }
  if (all[0] === undefined) return null;
  return {
    root: all[0],
    all,
    byName,
    knowsPeak: all.some((one) => one.share !== null),
    fastest: all.reduce((most, one) => Math.max(most, one.achieved ?? 0), 0),
  };
}

function spent(sizes: readonly (number | null)[]): Spent {
  return Object.fromEntries(SIZE_KEYS.map((key, at) => [key, sizes[at] ?? null])) as Spent;
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
