// Two traces compared: what tables are called, and what a difference comes from.

import type { TimeDifference, TimeTable } from "../schema";

const TITLES: Record<TimeTable["of"], Record<TimeTable["clock"], string>> = {
  phases: { host: "By phase, on the host", device: "By phase, work launched on the device" },
  modules: {
    host: "By module, on the host, without the modules inside",
    device: "By module, on the device, without the modules inside",
  },
  kernels: { host: "By kernel, copy and memset", device: "By kernel, copy and memset" },
  operators: {
    host: "By operator, on the host, without those it called",
    device: "By operator, what it launched itself",
  },
  collectives: { host: "By collective, on the host", device: "By collective" },
};

export function tableTitle({ of, clock }: TimeTable): string {
  return TITLES[of][clock];
}

/**
 * What most of a difference comes from, of that which has its sign; "noise" where the spread of the steps explains it.
 * What only one of the runs has is no chance.
 */
export function causeOf(one: TimeDifference): string {
  if (one.difference_ns === 0) return "";
  const more = one.difference_ns > 0;
  if (one.calls_a === 0) return "new";
  if (one.calls_b === 0) return "gone";
  if (one.noise !== null && !one.noise.beyond) return "noise";
  if (one.calls_ns === null || one.length_ns === null) return more ? "longer" : "shorter";
  const sign = more ? 1 : -1;
  if (sign * one.calls_ns > sign * one.length_ns) return more ? "more calls" : "fewer calls";
  return more ? "longer calls" : "shorter calls";
}
