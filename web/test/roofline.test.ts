import { expect, test } from "vitest";
import { moduleTree } from "../src/model/modules";
import { attainable, modulePoints, operatorPoints, operatorRows, roofOf } from "../src/model/roofline";
import type { Profile, TracedStep } from "../src/schema";
import { mlp, timed } from "./profile";

/** fc1 took 1 + 3 ms and moved 8 MB; the traced step is like the counted one, or not. */
function traced(like: boolean): Profile {
  const profile = mlp();
  profile.modules = profile.modules.map((one) =>
    one.name === "fc1" ? { ...timed(one, 1e-3, 3e-3, null), total_bytes: { ...one.total_bytes, forward: 8e6 } } : one,
  );
  profile.traced = {
    index: 8,
    like_counted: like,
    files: [],
    tables: null,
    own_forward_sec: null,
  } as unknown as TracedStep;
  return profile;
}

test("the roof is the peak, or memory bandwidth times FLOPs a byte if that is less", () => {
  const roof = { peaks: [{ dtype: "float32", flopsPerSec: 100e9 }], bandwidth: 10e9 };
  expect(attainable(roof, 2)).toBe(20e9);
  expect(attainable(roof, 50)).toBe(100e9);
  expect(attainable({ ...roof, bandwidth: null }, 2)).toBe(100e9);
  expect(attainable({ peaks: [], bandwidth: null }, 2)).toBeNull();
});

test("a module stands at its own FLOPs a byte and FLOP/s", () => {
  const profile = traced(true);
  const points = modulePoints(profile, moduleTree(profile)!);
  expect(points.map((one) => [one.name, one.intensity, one.achieved])).toEqual([
    ["fc1", 100, expect.closeTo(200e9, -3)],
  ]);
});

test("FLOPs of one step over seconds of another that differs are no rate", () => {
  const profile = traced(false);
  expect(modulePoints(profile, moduleTree(profile)!)).toEqual([]);
  expect(operatorPoints(profile)).toEqual([]);
});

test("operators without a trace have FLOPs and no time", () => {
  const rows = operatorRows(mlp());
  expect(rows.map((one) => [one.name, one.flops, one.seconds])).toEqual([
    ["aten.mm", 800e6, null],
    ["aten.addmm", 600e6, null],
  ]);
  expect(roofOf(mlp()).peaks).toEqual([{ dtype: "float32", flopsPerSec: 700e9 }]);
});
