// Numbers in pictures: on axes, and beside the pointer. Those of tables are text when they come.

export const NOT_AVAILABLE = "n/a";

type Known = number | null | undefined;

const LARGE = ["", "K", "M", "G", "T", "P", "E", "Z"];
const SECONDS = ["s", "ms", "us", "ns"];

function isKnown(value: Known): value is number {
  return typeof value === "number" && Number.isFinite(value);
}

/** Three significant digits, without zeros at the end. */
function short(value: number): string {
  return String(Number(value.toPrecision(3)));
}

/** `si(3.2e9, "FLOP/s")` is "3.2 GFLOP/s". */
export function si(value: Known, unit = ""): string {
  if (!isKnown(value)) return NOT_AVAILABLE;
  let power = 0;
  let scaled = value;
  while (power + 1 < LARGE.length && Math.abs(scaled) >= 999.5) {
    scaled /= 1000;
    power += 1;
  }
  return `${short(scaled)} ${LARGE[power]}${unit}`.trimEnd();
}

/** `duration(0.07667)` is "76.7 ms". */
export function duration(seconds: Known): string {
  if (!isKnown(seconds)) return NOT_AVAILABLE;
  let power = 0;
  let scaled = seconds;
  while (scaled !== 0 && power + 1 < SECONDS.length && Math.abs(scaled) < 0.9995) {
    scaled *= 1000;
    power += 1;
  }
  return `${short(scaled)} ${SECONDS[power]}`;
}

/** With three significant digits, and two decimals at most: `percent(0.4124)` is "41.2%". */
export function percent(fraction: Known): string {
  if (!isKnown(fraction)) return NOT_AVAILABLE;
  const value = fraction * 100;
  const decimals = [99.95, 9.995].filter((most) => Math.abs(value) < most).length;
  return `${value.toFixed(value ? decimals : 0)}%`;
}

/** Thousands apart. */
export function plain(value: Known): string {
  return isKnown(value) ? Number(value.toPrecision(15)).toLocaleString("en-US") : NOT_AVAILABLE;
}

export function bytes(value: Known): string {
  return si(value, "B");
}
