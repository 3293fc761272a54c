import { expect, test } from "vitest";
import { isInside, type Module, moduleTree, pathTo } from "../src/model/modules";
import type { ModuleProfile, Profile } from "../src/schema";
import { layout, moduleAt, visible } from "../src/ui/icicle";
import { mlp, timed } from "./profile";

function tree(profile: Profile) {
  const found = moduleTree(profile);
  if (!found) throw new Error("no modules");
  return found;
}

function named(profile: Profile, name: string): Module {
  return tree(profile).byName.get(name) as Module;
}

test("modules are a tree in the model's order, FLOPs by hand", () => {
  const { root, all } = tree(mlp());
  expect(root.children.map((one) => one.name)).toEqual(["fc1", "act", "drop", "fc2"]);
  expect(all.map((one) => one.own.flops)).toEqual([0, 800e6, 0, 0, 600e6]);
  expect(root.total.flops).toBe(1_400_000_000);
  expect(root.own.params).toBe(0);
  expect(named(mlp(), "fc1").own.params).toBe(2_002_000);
});

test("figures are of one step where several were counted", () => {
  expect(named({ ...mlp(), counted_steps: [3, 7] }, "fc1").total.flops).toBe(400e6);
});

test("without a trace there is a reason, and another size", () => {
  const { timed: how, why } = tree(mlp());
  expect(how).toBeNull();
  expect(why.seconds).toBe("no step was traced");
  expect(why.flops).toBe("");
  expect(why.memory).toContain("profile_memory=True");
});

test("share of peak is time at the peak over time taken, of both phases together", () => {
  const profile = mlp();
  // fc1: 400 M FLOPs each way. At 1 TFLOP/s each takes 0.4 ms; it took 1 and 3 ms: 0.8 / 4 = 20%.
  profile.modules = profile.modules.map((one) => (one.name === "fc1" ? timed(one, 1e-3, 3e-3, 1e12) : one));
  const fc1 = named(profile, "fc1");
  expect(fc1.share).toBeCloseTo(0.2, 12);
  expect(fc1.achieved).toBeCloseTo(800e6 / 4e-3, 0);
  expect(named(profile, "fc2").share).toBeNull();
});

test("a module without FLOPs has a time and no share of the peak", () => {
  const profile = mlp();
  profile.modules = profile.modules.map((one) => (one.name === "drop" ? timed(one, 1e-3, 1e-3, 1e12) : one));
  const drop = named(profile, "drop");
  expect([drop.total.seconds, drop.share, drop.achieved]).toEqual([2e-3, null, null]);
});

test("a tied module is drawn where it stands first, and never makes its parent's own share negative", () => {
  const profile = mlp();
  const again: ModuleProfile = { ...(profile.modules[1] as ModuleProfile), name: "again", alias_of: "fc1" };
  profile.modules = [...profile.modules, again];
  expect(named(profile, "again").own.params).toBe(0);
  expect(named(profile, "").own.params).toBe(0);
});

test("the icicle is as wide as what modules spent, and tells what lies where", () => {
  const modules = tree(mlp());
  const boxes = layout(modules, "flops");
  const root = boxes.get(modules.root);
  const fc2 = boxes.get(modules.byName.get("fc2") as Module);
  if (!root || !fc2) throw new Error("not placed");
  // 800 and 600 of 1400.
  expect(fc2.x0).toBeCloseTo(800 / 1400, 12);
  expect(fc2.x1).toBeCloseTo(1, 12);
  expect(moduleAt(root, 1, 0.5)?.name).toBe("fc1");
  expect(moduleAt(root, 1, 0.6)?.name).toBe("fc2");
  expect(moduleAt(root, 0, 0.6)?.name).toBe("");
  expect(moduleAt(root, 2, 0.6)).toBeNull();
  // Zoomed into fc2 the row above is still the root's.
  expect(moduleAt(fc2, 0, 0.1)?.name).toBe("");
  expect(moduleAt(fc2, 1, 0.1)?.name).toBe("fc2");
  expect(visible(root, 1400).map((one) => [one.box.data.name, one.x, one.width])).toEqual([
    ["", 0, 1400],
    ["fc1", 0, 800],
    ["fc2", 800, 600],
  ]);
  expect(visible(fc2, 1400).map((one) => [one.box.data.name, one.x, one.width])).toEqual([
    ["", 0, 1400],
    ["fc2", 0, expect.closeTo(1400, 6)],
  ]);
});

test("a path begins at the root", () => {
  const { byName, root } = tree(mlp());
  const fc1 = byName.get("fc1") as Module;
  expect(pathTo(fc1)).toEqual([root, fc1]);
  expect([isInside(fc1, root), isInside(root, fc1)]).toEqual([true, false]);
});
