// The colours of a budget's rows.

import type { BudgetRow } from "../schema";

const COLORS: Partial<Record<BudgetRow["key"], string>> = {
  model: "--budget-model",
  padding: "--budget-padding",
  recompute: "--budget-recompute",
  optimizer_flops: "--budget-recompute",
  skipped: "--budget-recompute",
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

export function budgetColor(key: BudgetRow["key"]): string {
  return `var(${COLORS[key] ?? "--part-other"})`;
}
