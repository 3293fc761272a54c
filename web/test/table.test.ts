import { expect, test } from "vitest";
import type { Cell } from "../src/document";
import { sorted } from "../src/ui/table";

const ROWS: Cell[][] = [
  [["b"], ["2 ms", 0.002]],
  [["a10"], ["n/a"]],
  [["a9"], ["1 s", 1]],
];

const names = (column: number, down: boolean): string[] =>
  sorted(ROWS, { column, down }).map((row) => row[0]?.[0] ?? "");

test("rows are sorted by their numbers, and what is not known comes last", () => {
  expect(names(1, true)).toEqual(["a9", "b", "a10"]);
  expect(names(1, false)).toEqual(["b", "a9", "a10"]);
});

test("text is sorted with its numbers by value", () => {
  expect(names(0, false)).toEqual(["a9", "a10", "b"]);
  expect(sorted(ROWS, null)).toBe(ROWS);
});
