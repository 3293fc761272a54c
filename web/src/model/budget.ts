// The budget of a step, where the profile has one: rows that add up to the step's wall time.

import type { Profile } from "../schema";

export interface BudgetRow {
  key: string;
  label: string;
  time_ns: number;
  joined: string[];
  memory_ns: number | null;
  advice: string[];
}

export interface Budget {
  wall_ns: number;
  rows: BudgetRow[];
  traced_step: number | null;
  knows_peak: boolean;
  run: { key: string; label: string; time_ns: number }[];
  notes: string[];
}

export function budgetOf(profile: Profile): Budget | null {
  return ((profile as unknown as { budget?: Budget | null }).budget ?? null) as Budget | null;
}

const COLORS: Record<string, string> = {
  model: "--budget-model",
  recompute: "--budget-recompute",
  optimizer_flops: "--budget-recompute",
  causal_skipped: "--budget-recompute",
  matmul: "--budget-matmul",
  other_operators: "--budget-operators",
  operators: "--budget-operators",
  compute: "--budget-operators",
  communication: "--budget-communication",
  copies: "--part-transfer",
  idle: "--budget-idle",
  bubble: "--part-bubble",
  data_wait: "--part-data-wait",
  transfer: "--part-transfer",
};

export function budgetColor(key: string): string {
  return `var(${COLORS[key] ?? "--part-other"})`;
}
