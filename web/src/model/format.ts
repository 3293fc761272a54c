// Numbers as the text report writes them (lightning_flops/units.py): the same figure reads the same in both.

export const NOT_AVAILABLE = "n/a";

type Known = number | null | undefined;

const LARGE = ["", "K", "M", "G", "T", "P", "E", "Z"];
const SECONDS = ["s", "ms", "µs", "ns"];

function isKnown(value: Known): value is number {
  return typeof value === "number" && Number.isFinite(value);
}

// Made once: making one for each number takes longer than everything else on the page.
const GROUPED = new Intl.NumberFormat("en-US", { maximumFractionDigits: 2 });

/** At most two decimals, or three digits that count where two decimals would hide the number. */
function short(value: number): string {
  const size = Math.abs(value);
  if (size >= 1e15) return value.toExponential(2);
  if (size !== 0 && size < 0.1) return String(Number(value.toPrecision(3)));
  return GROUPED.format(value);
}

/** `si(3.2e9, "FLOP/s")` is "3.2 GFLOP/s". */
export function si(value: Known, unit = ""): string {
  if (!isKnown(value)) return NOT_AVAILABLE;
  let power = 0;
  let scaled = value;
  while (power + 1 < LARGE.length && Math.abs(scaled) >= 999.995) {
    scaled /= 1000;
    power += 1;
  }
  return `${short(scaled)} ${LARGE[power]}${unit}`.trimEnd();
}

/** `duration(0.07667)` is "76.67 ms". */
export function duration(seconds: Known): string {
  if (!isKnown(seconds)) return NOT_AVAILABLE;
  let power = 0;
  let scaled = seconds;
  while (scaled !== 0 && power + 1 < SECONDS.length && Math.abs(scaled) < 0.995) {
    scaled *= 1000;
    power += 1;
  }
  return `${short(scaled)} ${SECONDS[power]}`;
}

/** `percent(0.4125)` is "41.25%"; with no decimals, "41%". */
export function percent(fraction: Known, decimals = 2): string {
  return isKnown(fraction) ? `${(fraction * 100).toFixed(decimals)}%` : NOT_AVAILABLE;
}

/** Thousands apart. */
export function plain(value: Known): string {
  if (!isKnown(value)) return NOT_AVAILABLE;
  return Number.isInteger(value) && Math.abs(value) <= Number.MAX_SAFE_INTEGER ? GROUPED.format(value) : short(value);
}

/** Decimal units, as the text report has them. */
export function bytes(value: Known): string {
  return si(value, "B");
}

/** The end of a list in words: "a, b and c". */
export function listed(words: readonly string[]): string {
  return words.length < 2 ? words.join("") : `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}

/** "1 step", "2 steps". */
export function counted(number: number, noun: string): string {
  return `${plain(number)} ${noun}${number === 1 ? "" : noun.endsWith("ch") ? "es" : "s"}`;
}

/** 3, 4, 5, 9 as "3–5, 9". */
export function runsOf(numbers: readonly number[]): string {
  const parts: string[] = [];
  for (let first = 0; first < numbers.length;) {
    let last = first;
    while (last + 1 < numbers.length && numbers[last + 1] === (numbers[last] ?? 0) + 1) last += 1;
    parts.push(first === last ? String(numbers[first]) : `${numbers[first]}–${numbers[last]}`);
    first = last + 1;
  }
  return parts.join(", ");
}

/**
 * Each name cut to so many characters that different names stay different, as in the text report: a C++ function's
 * arguments go first, then the middle, or, where names would then look the same, all up to where they begin to differ.
 */
export function shortenedApart(names: readonly string[], chars: number): Map<string, string> {
  const alike = new Map<string, string[]>();
  const tail = Math.floor((chars - 1) / 2);
  for (const name of new Set(names)) {
    const bare = name.length <= chars ? name : withoutArguments(name);
    const short = bare.length <= chars ? bare : `${bare.slice(0, chars - 1 - tail)}…${bare.slice(-tail)}`;
    alike.set(short, [...(alike.get(short) ?? []), name]);
  }
  const shown = new Map<string, string>();
  const head = Math.floor(chars / 3);
  for (const [short, group] of alike) {
    const [first = ""] = group;
    let same = 0;
    while (group.length > 1 && same < first.length && group.every((name) => name[same] === first[same])) same += 1;
    for (const name of group) {
      const rest = name.slice(Math.max(same - 2, head));
      const end = rest.length < chars - head ? rest : `${rest.slice(0, chars - head - 2)}…`;
      shown.set(name, group.length === 1 ? short : `${name.slice(0, head)}…${end}`);
    }
  }
  return shown;
}

/** `kernel<float>` of `void kernel<float>(float const*, int)`; a name that is no such function's as it is. */
function withoutArguments(name: string): string {
  if (!name.endsWith(")")) return name;
  let open = 0;
  for (let place = name.length - 1; place > 0; place -= 1) {
    open += name[place] === ")" ? 1 : name[place] === "(" ? -1 : 0;
    if (!open) return name.slice(0, place).replace(/^void /, "");
  }
  return name;
}

/** A figure of a comparison, to six digits: `figure(0.177592)` is "0.177592". */
export function figure(value: number | null): string {
  if (value === null) return "n/a";
  const rounded = Number(value.toPrecision(6));
  return Math.abs(rounded) < 1 ? String(rounded) : plain(Number.isInteger(value) ? value : rounded);
}
