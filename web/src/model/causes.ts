// Two runs compared: what each cause is called, and the modules as rows.

import type { Causes, Comparison, ModuleDifference } from "../schema";
import { duration } from "./format";

export const CAUSES = [
  { key: "work_ns", label: "work", more: "more work", less: "less work" },
  { key: "efficiency_ns", label: "efficiency", more: "worse efficiency", less: "better efficiency" },
  { key: "waiting_ns", label: "waiting", more: "more waiting", less: "less waiting" },
] as const;

export const DETAILS: Record<string, readonly (readonly [keyof Causes, string])[]> = {
  work_ns: [
    ["work_flops_ns", "FLOPs"],
    ["work_bytes_ns", "bytes"],
    ["work_modules_ns", "new or gone modules"],
  ],
  efficiency_ns: [],
  waiting_ns: [
    ["waiting_data_ns", "data"],
    ["waiting_communication_ns", "communication"],
    ["waiting_idle_ns", "idle device"],
    ["waiting_loop_ns", "the loop"],
  ],
};

/** `signed(1_500_000)` is "+1.5 ms". */
export function signed(ns: number): string {
  if (ns === 0) return "0";
  return `${ns > 0 ? "+" : ns < 0 ? "−" : ""}${duration(Math.abs(ns) / 1e9)}`;
}

/** What a cause consists of, in words. */
export function detailsOf(causes: Causes, key: string): string {
  const named = (DETAILS[key] ?? []).filter(([detail]) => causes[detail] !== 0);
  if (key === "efficiency_ns")
    return causes.efficiency_ns === 0 ? "" : `the same work, ${causes.efficiency_ns > 0 ? "slower" : "faster"}`;
  return named.map(([detail, word]) => `${word} ${signed(causes[detail])}`).join(", ");
}

export interface ComparedModule {
  index: number;
  name: string;
  type: string;
  depth: number;
  difference: ModuleDifference;
  /** New in B, gone from A, or known by another name. */
  remark: string;
  found: string;
}

export function comparedModules({ modules }: Comparison): ComparedModule[] {
  return modules.map((one, index) => {
    const side = one.b ?? one.a;
    const name = side?.name ?? "";
    const remark =
      one.a === null
        ? "new"
        : one.b === null
          ? "gone"
          : one.a.name !== one.b.name
            ? `was ${one.a.name || "(the root)"}`
            : one.a.type_name !== one.b.type_name
              ? `was ${one.a.type_name}`
              : "";
    const type = side?.type_name ?? "";
    const depth = name === "" ? 0 : name === "(outside)" ? 0 : name.split(".").length;
    return {
      index,
      name,
      type,
      depth,
      difference: one,
      remark,
      found: `${name} ${type} ${remark} ${one.a?.name ?? ""}`.toLowerCase(),
    };
  });
}
