import { expect, test } from "vitest";
import { causeOf, tableTitle } from "../src/model/compared_traces";
import type { TimeDifference } from "../src/schema";

function row(some: Partial<TimeDifference>): TimeDifference {
  return {
    name: "relu",
    a_ns: 8,
    b_ns: 8,
    difference_ns: 0,
    calls_a: 1,
    calls_b: 1,
    calls_ns: 0,
    length_ns: 0,
    noise: null,
    ...some,
  };
}

test("what most of a difference comes from", () => {
  expect(causeOf(row({}))).toBe("");
  expect(causeOf(row({ difference_ns: 8, calls_b: 2, calls_ns: 8 }))).toBe("more calls");
  expect(causeOf(row({ difference_ns: 8, length_ns: 8 }))).toBe("longer calls");
  expect(causeOf(row({ difference_ns: -3, calls_ns: 1, length_ns: -4 }))).toBe("shorter calls");
  expect(causeOf(row({ difference_ns: 8, calls_a: 0, calls_ns: 8 }))).toBe("new");
  expect(causeOf(row({ difference_ns: -8, calls_b: 0, calls_ns: -8 }))).toBe("gone");
  expect(causeOf(row({ difference_ns: 8, calls_a: null, calls_ns: null, length_ns: null }))).toBe("longer");
  expect(causeOf(row({ difference_ns: 8, length_ns: 8, noise: { low_ns: -1, high_ns: 17, beyond: false } }))).toBe(
    "noise",
  );
});

test("what only one of the runs has is no chance", () => {
  const noise = { low_ns: -1, high_ns: 17, beyond: false };
  expect(causeOf(row({ difference_ns: 8, calls_a: 0, calls_ns: 8, noise }))).toBe("new");
});

test("a table says what its rows are and on which clock", () => {
  expect(tableTitle({ of: "operators", clock: "host", rows: [] })).toContain("on the host");
});
