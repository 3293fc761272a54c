// Parts of steps: their names for people, their order, and steps that stand out.

import type { Profile } from "../schema";

/** In the order of a step; a name that joins several (`forward + backward`) goes by its first. */
const ORDER = [
  ...["data wait", "transfer", "forward", "backward", "bubble", "optimizer"],
  ...["kernels", "copies", "memsets", "communication", "runtime calls", "data loader", "host operators"],
  ...["nothing recorded", "other"],
];

function firstOf(name: string): string {
  return (name.split(" + ")[0] ?? "").replaceAll("_", " ");
}

export function partLabel(name: string): string {
  return name.replaceAll("_", " ").replace(/\bbubble\b/, "pipeline bubble");
}

/** The colour of a part, as a custom property of the style. */
export function partColor(name: string): string {
  const first = firstOf(name);
  return ORDER.includes(first) ? `var(--part-${first.replaceAll(" ", "-")})` : "var(--part-other)";
}

export function inOrder(names: Iterable<string>): string[] {
  const place = (name: string): number => {
    const found = ORDER.indexOf(firstOf(name));
    return found < 0 ? ORDER.length : found;
  };
  return [...names].sort((one, other) => place(one) - place(other));
}

/** One timed step. */
export interface TimedStep {
  index: number;
  seconds: number;
  parts: Record<string, number>;
}

/** Each timed step with its parts, where the profile keeps them. */
export function timedSteps({ timing, timed_steps }: Profile): TimedStep[] {
  if (timing === null) return [];
  return timing.global_step.steps_sec.map((seconds, place) => ({
    index: timed_steps[place] ?? place,
    seconds,
    parts: Object.fromEntries(timing.parts.map((one) => [one.name, one.steps_sec[place] ?? 0])),
  }));
}

export function median(values: readonly number[]): number {
  const sorted = [...values].sort((one, other) => one - other);
  const middle = sorted.length >> 1;
  return sorted.length % 2 ? (sorted[middle] ?? 0) : ((sorted[middle - 1] ?? 0) + (sorted[middle] ?? 0)) / 2;
}

/** Places of values that lie far above the others: over the median by four times their usual distance from it, and 5%. */
export function outliers(values: readonly number[]): number[] {
  if (values.length < 5) return [];
  const middle = median(values);
  const usual = 1.4826 * median(values.map((one) => Math.abs(one - middle)));
  return values.flatMap((one, place) => (one - middle > Math.max(4 * usual, 0.05 * middle) ? [place] : []));
}
