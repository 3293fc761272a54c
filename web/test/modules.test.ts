import { expect, test } from "vitest";
import type { ModuleData } from "../src/document";
import { isInside, moduleTree, pathTo } from "../src/model/modules";
import { layout, moduleAt, visible } from "../src/ui/icicle";

// The root has 1 s of its own; fc1 takes 2 s, fc2 5 s, at half and a tenth of the peak.
const ROWS: ModuleData[] = [
  ["", "Net", "", [1, 0, 0, 0, null], [8, 14, 3, 5, null], null, null, 1],
  ["fc1", "Linear", "in=3", [2, 8, 2, 3, null], [2, 8, 2, 3, null], 4, 0.5, 1],
  ["fc2", "Linear", "", [5, 6, 1, 2, null], [5, 6, 1, 2, null], 1.2, 0.1, 1],
];

test("a tree has its modules below one another", () => {
  const tree = moduleTree(ROWS);
  if (!tree) throw new Error("no tree");
  expect(tree.root.label).toBe("Net");
  expect(tree.root.children.map((one) => one.name)).toEqual(["fc1", "fc2"]);
  const inner = tree.byName.get("fc1");
  if (!inner) throw new Error("no module");
  expect([inner.total.seconds, inner.own.flops, inner.total.memory, inner.share]).toEqual([2, 8, null, 0.5]);
  expect(pathTo(inner).map((one) => one.label)).toEqual(["Net", "fc1"]);
  expect([isInside(inner, tree.root), isInside(tree.root, inner)]).toEqual([true, false]);
  expect([tree.knowsPeak, tree.fastest]).toEqual([true, 4]);
  expect(moduleTree([])).toBeNull();
});

test("an icicle is as wide as what modules spent, and finds what is under the pointer", () => {
  const tree = moduleTree(ROWS);
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
