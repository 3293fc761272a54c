import { expect, test } from "vitest";
import { inOrder, median, outliers, partColor, partLabel, timedSteps } from "../src/model/steps";
import { hrefOf, readPlace } from "../src/place";
import { unpack, visible } from "../src/data";
import { sorted } from "../src/ui/grid";
import { mlp } from "./profile";

test("each timed step has its parts", () => {
  const steps = timedSteps(mlp());
  expect(steps.map((one) => [one.index, one.seconds])).toEqual([
    [5, expect.closeTo(0.01, 9)],
    [6, expect.closeTo(0.03, 9)],
  ]);
  expect(steps[1]?.parts["backward"]).toBeCloseTo(0.012, 9);
});

test("a step stands out by four of the usual distances, and by a twentieth at least", () => {
  const usual = [100, 101, 99, 100, 101, 99, 100];
  expect(outliers([...usual, 150])).toEqual([7]);
  expect(outliers([...usual, 103])).toEqual([]);
  expect(outliers([1, 9, 1])).toEqual([]); // too few to say
  expect(median([4, 1, 3, 2])).toBe(2.5);
});

test("parts stand in the order of a step, joined ones by their first", () => {
  expect(inOrder(["other", "forward + backward", "data wait", "mine"])).toEqual([
    "data wait",
    "forward + backward",
    "other",
    "mine",
  ]);
  expect(partColor("forward + backward")).toBe("var(--part-forward)");
  expect(partColor("data wait")).toBe("var(--part-data-wait)");
  expect(partColor("mine")).toBe("var(--part-other)");
  expect(partLabel("bubble")).toBe("pipeline bubble");
});

test("a place is kept in the address, whatever it is called", () => {
  const href = hrefOf({ module: "a&b=#c", size: "flops" }, { size: "", run: "r/1" });
  expect(readPlace(href)).toEqual({ module: "a&b=#c", run: "r/1" });
});

test("what is not known comes last, in either order", () => {
  const columns = [{ key: "a", label: "a", value: (one: number | null) => one, cell: () => "" }];
  const rows = [2, null, 3, 1];
  expect(sorted(rows, columns, { key: "a", down: false })).toEqual([1, 2, 3, null]);
  expect(sorted(rows, columns, { key: "a", down: true })).toEqual([3, 2, 1, null]);
});

test("signs that turn text around are shown, not obeyed", () => {
  expect(visible('{"a\u202eb": "c\u2028"}')).toBe('{"a\\\\u202eb": "c\\\\u2028"}');
});

test("a profile is unpacked from gzip in base64", async () => {
  const { gzipSync } = await import("node:zlib");
  const packed = gzipSync(JSON.stringify({ a: "b\u202e" })).toString("base64");
  expect(await unpack(`\n${packed}\n`)).toEqual({ a: "b\\u202e" });
});
