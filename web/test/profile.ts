// The golden profile, whose figures are worked out by hand in tests/report/windows.py, and models made from it.

import { readFileSync } from "node:fs";
import type { ModuleProfile, ModuleTimes, Profile } from "../src/schema";

const GOLDEN = new URL("../../tests/golden/json/mlp.json", import.meta.url);

/** 1000 -> 2000 -> 500, batch 100: fc1 800 MFLOPs a step, fc2 600; steps of 10 and 30 ms. */
export function mlp(): Profile {
  return JSON.parse(readFileSync(GOLDEN, "utf8")) as Profile;
}

/** Times of a module, whose rates and shares follow from its FLOPs and *peak*. */
export function timed(module: ModuleProfile, forward: number, backward: number, peak: number | null): ModuleProfile {
  const rate = (flops: number, seconds: number): number | null => (flops > 0 ? flops / seconds : null);
  const ofForward = rate(module.total.forward, forward);
  const ofBackward = rate(module.total.backward + module.total.recompute, backward);
  const times: ModuleTimes = {
    clock: "device",
    forward_sec: forward,
    own_forward_sec: forward,
    backward_sec: backward,
    own_backward_sec: backward,
    forward_kernels: null,
    backward_kernels: null,
    forward_flops_per_sec: ofForward,
    backward_flops_per_sec: ofBackward,
    forward_utilization: ofForward !== null && peak !== null ? ofForward / peak : null,
    backward_utilization: ofBackward !== null && peak !== null ? ofBackward / peak : null,
  };
  return { ...module, times };
}
