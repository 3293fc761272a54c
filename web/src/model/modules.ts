// The modules as a tree, each with its cost in one step.

import type { View } from "../document";

export const SIZE_KEYS = ["seconds", "flops", "bytes", "memory", "params"] as const;

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

/** The tree of the modules in the table that has them; null without any. */
export function moduleTree({ modules: keys, sections }: Pick<View, "modules" | "sections">): ModuleTree | null {
  const section = sections.find((one) => one.items.some((item) => "picture" in item && item.picture === "modules"));
  const rows = section?.items.flatMap((item) => ("rows" in item ? item.rows : [])) ?? [];
  const all: Module[] = [];
  const byName = new Map<string, Module>();
  for (const row of rows) {
    const words = (key: string): string => row[keys.indexOf(key)]?.[0] ?? "";
    const figure = (key: string): number | null => row[keys.indexOf(key)]?.[1] ?? null;
    const name = all.length ? words("name") : "";
    const end = name.lastIndexOf(".");
    const parent = all.length ? (byName.get(name.slice(0, Math.max(0, end))) ?? null) : null;
    const seconds = figure("ownSec") === null ? null : (figure("forwardSec") ?? 0) + (figure("backwardSec") ?? 0);
    const flops = (figure("forward") ?? 0) + (figure("backward") ?? 0);
    const total = { seconds, flops, bytes: figure("bytes"), memory: figure("memory"), params: figure("params") };
    const module: Module = {
      index: all.length,
      name,
      label: all.length ? name.slice(end + 1) : words("type"),
      type: words("type"),
      detail: words("detail"),
      parent,
      children: [],
      depth: parent === null ? 0 : parent.depth + 1,
      total,
      own: { ...total, seconds: figure("ownSec"), flops: figure("own") },
      calls: figure("calls") ?? 0,
      share: figure("share"),
      achieved: seconds && flops ? flops / seconds : null,
    };
    for (const key of ["bytes", "memory", "params"] as const) {
      if (parent) parent.own[key] = Math.max(0, (parent.own[key] ?? 0) - (total[key] ?? 0));
    }
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
