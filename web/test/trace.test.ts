import { expect, test } from "vitest";
import { tracedTree } from "../src/model/modules";
import { traceChart } from "../src/model/roofline";
import { kindsOf, launchWords, shortPlace, tracedOperators } from "../src/model/trace";
import type { KernelRow, ModuleRow, OperatorFlops, OperatorRow, StepTime, TraceReport } from "../src/schema";

const STEP = { number: 1, wall_us: 1000, kernel_us: 400, other_us: 600, memcpy_us: 0, cpu_us: null } as StepTime;

function trace(parts: Partial<TraceReport>): TraceReport {
  return {
    step_times: { marked: true, steps: [STEP, STEP], mean: STEP },
    modules: null,
    module_memory: null,
    operators: null,
    operators_by_shape: null,
    flops: null,
    ...parts,
  } as TraceReport;
}

function row(name: string, calls: number, own_us: number, forward_us = own_us): ModuleRow {
  return {
    name,
    calls,
    forward_us,
    own_forward_us: own_us,
    backward_us: 0,
    own_backward_us: 0,
    forward_kernels: null,
    backward_kernels: null,
    source: null,
  };
}

function modules(...rows: ModuleRow[]): TraceReport {
  return trace({ modules: { clock: "host", steps: 2, rows } as TraceReport["modules"] });
}

test("modules of a trace are a tree in natural order, also below containers that were never called", () => {
  const found = tracedTree(
    modules(row("", 2, 10, 100), row("layers.10", 2, 40), row("layers.2", 2, 50, 50), row("layers.2.fc", 2, 0)),
  );
  expect(found?.all.map((one) => [one.name, one.label, one.depth])).toEqual([
    ["", "(the root)", 0],
    ["layers.2", "layers.2", 1],
    ["layers.2.fc", "fc", 2],
    ["layers.10", "layers.10", 1],
  ]);
  // Of two steps.
  expect(found?.root.total.seconds).toBeCloseTo(50e-6, 12);
  expect(found?.byName.get("layers.10")?.calls).toBe(1);
  expect(found?.why.bytes).toContain("not those of modules");
});

test("a root that was never called leaves its place to the only module below it", () => {
  const found = tracedTree(modules(row("", 0, 0, 100), row("Net_0", 2, 100), row("Net_0.Linear_0", 2, 60)));
  expect(found?.all.map((one) => [one.name, one.label])).toEqual([
    ["Net_0", "Net_0"],
    ["Net_0.Linear_0", "Linear_0"],
  ]);
});

test("several modules side by side get a root of their own", () => {
  const found = tracedTree(modules(row("a", 2, 30), row("b", 2, 10)));
  expect(found?.root.children.map((one) => one.name)).toEqual(["a", "b"]);
  expect(found?.root.total.seconds).toBeCloseTo(20e-6, 12);
  expect(tracedTree(trace({}))).toBeNull();
});

function counted(dtype: string, flops: number, time_us: number, peak_share: number | null): OperatorFlops {
  return {
    operator: "aten.mm",
    dtype,
    calls: 2,
    forward: flops,
    backward: 0,
    recompute: 0,
    optimizer: 0,
    skipped: 0,
    bytes: 100,
    time_us,
    flops_per_sec: (flops / time_us) * 1e6,
    peak_share,
    flops_per_byte: flops / 100,
    attainable_flops_per_sec: null,
  };
}

test("an operator's dtypes are one row: rates over the time of all, unknown where one is", () => {
  const spent = { total_us: 40, mean_us: 20, max_us: 30, min_us: 10, ratio: 1 };
  const operator = {
    name: "aten::mm",
    calls: 4,
    host: spent,
    host_self: spent,
    device: null,
    device_self: null,
    called_from: [],
    children: [],
  } as unknown as OperatorRow;
  const of = (...flops: OperatorFlops[]) =>
    tracedOperators(trace({ operators: [operator], flops: { operators: flops } as TraceReport["flops"] }))[0];
  // 1000 FLOPs in 10 us and 1000 in 30 us: 2000 in 40 us; at the peak for 0.5 of 10 and 0.1 of 30 us: 8 of 40.
  const both = of(counted("float32", 1000, 10, 0.5), counted("float16", 1000, 30, 0.1));
  expect([both?.flops, both?.flopsPerSec, both?.peakShare, both?.calls]).toEqual([1000, 50e6, 0.2, 2]);
  expect(of(counted("float32", 1000, 10, 0.5), counted("float16", 1000, 30, null))?.peakShare).toBeNull();
  expect(of()?.flops).toBeNull();
  const chart = traceChart(
    trace({
      flops: {
        operators: [counted("float32", 1000, 10, 0.5)],
        peaks: { float32: 2e8 },
      } as unknown as TraceReport["flops"],
    }),
  );
  expect(chart.operators.map((one) => [one.name, one.intensity, one.seconds])).toEqual([["aten.mm", 10, 5e-6]]);
});

test("kinds that took no time are not named", () => {
  expect(kindsOf(STEP)).toEqual({ kernels: 400e-6, "nothing recorded": 600e-6 });
});

test("places are told by their end, launches by their first shape", () => {
  expect(shortPlace("/a/b/site-packages/torch/nn.py:7")).toBe("…/torch/nn.py:7");
  expect(shortPlace("net.py:7")).toBe("net.py:7");
  const launch = { grid: [8, 1, 1], block: [64, 2, 1], registers: 32, shared_memory: 0, calls: 1, device_us: 1 };
  expect(launchWords({ launch_shapes: [launch, launch] } as unknown as KernelRow)).toBe("8×1×1 of 64×2×1 (+1)");
  expect(launchWords({ launch_shapes: [] } as unknown as KernelRow)).toBe("");
});
