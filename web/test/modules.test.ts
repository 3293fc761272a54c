import { expect, test } from "vitest";
import type { Cell } from "../src/document";
import { isInside, type ModuleTree, moduleTree, pathTo } from "../src/model/modules";
import { layout, moduleAt, visible } from "../src/ui/icicle";

const KEYS = ["name", "type", "params", "forward", "own", "forwardSec", "ownSec", "share", "bytes", "calls"];

const row = (name: string, type: string, ...figures: (number | null)[]): Cell[] => [
  [name],
  [type],
  ...figures.map((one): Cell => (one === null ? ["n/a"] : [String(one), one])),
];

// The root has 1 s of its own; fc1 takes 2 s, fc2 5 s, at half and a tenth of the peak.
const ROWS = [
  row("(root)", "Net", 5, 14, 0, 8, 1, null, 3, 1),
  row("fc1", "Linear", 3, 8, 8, 2, 2, 0.5, 2, 1),
  row("fc2", "Linear", 2, 6, 6, 5, 5, 0.1, 1, 1),
];

const treeOf = (rows: Cell[][]): ModuleTree | null => {
  const items = [{ picture: "modules" as const }, { head: [], rows }];
  return moduleTree({ modules: KEYS, sections: [{ title: "Modules", note: "", items }] });
};

test("a tree has its modules below one another", () => {
  const tree = treeOf(ROWS);
  if (!tree) throw new Error("no tree");
  expect(tree.root.label).toBe("Net");
  expect(tree.root.children.map((one) => one.name)).toEqual(["fc1", "fc2"]);
  const inner = tree.byName.get("fc1");
  if (!inner) throw new Error("no module");
  expect([inner.total.seconds, inner.own.flops, inner.own.bytes, inner.share]).toEqual([2, 8, 2, 0.5]);
  expect(pathTo(inner).map((one) => one.label)).toEqual(["Net", "fc1"]);
  expect([isInside(inner, tree.root), isInside(tree.root, inner)]).toEqual([true, false]);
  expect([tree.knowsPeak, tree.fastest]).toEqual([true, 4]);
  expect(treeOf([])).toBeNull();
});

test("an icicle is as wide as what modules spent, and finds what is under the pointer", () => {
  const tree = treeOf(ROWS);
  if (!tree) throw new Error("no tree");
  const boxes = layout(tree, "seconds");
  const root = boxes.get(tree.root);
  if (!root) throw new Error("no box");
  const widths = visible(root, 800).map((one) => [one.box.data.label, Math.round(one.width)]);
  expect(widths).toEqual([
    ["Net", 800],
    ["fc1", 200],
    ["fc2", 500],
  ]);
  expect(moduleAt(root, 1, 0.1)?.name).toBe("fc1");
  expect(moduleAt(root, 1, 0.5)?.name).toBe("fc2");
  expect(moduleAt(root, 1, 0.99)).toBeNull();
});
