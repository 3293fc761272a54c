// Many columns side by side, each divided into the same parts: steps, ranks, windows. A part is one path, however many
// columns there are.

import { scaleLinear } from "d3-scale";
import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { duration } from "../model/format";
import { partColor } from "../model/parts";
import { useWidth } from "./size";
import { hush, say } from "./tip";

export interface StripItem {
  label: string;
  parts: Readonly<Record<string, number>>;
  total: number;
  words?: readonly string[];
}

const LEFT = 62;
const BOTTOM = 22;
const TOP = 18;

export function Strip(props: {
  caption: string;
  names: readonly string[];
  items: readonly StripItem[];
  selected?: number;
  onSelect?: (place: number) => void;
  axis: string;
  height?: number;
}): JSX.Element {
  const { items, names } = props;
  const [box, width] = useWidth<HTMLDivElement>();
  const [pointed, setPointed] = useState<number | null>(null);
  const height = props.height ?? 190;
  const most = Math.max(...items.map((one) => one.total), 0) || 1;
  const y = scaleLinear([0, most * 1.04], [height - BOTTOM, TOP]).nice(4);
  const inside = Math.max(10, width - LEFT - 4);
  const pitch = Math.min(64, inside / Math.max(1, items.length));
  const gap = pitch > 6 ? Math.min(4, pitch * 0.18) : pitch > 3 ? 1 : 0;
  const xOf = (at: number): number => LEFT + at * pitch;
  const paths = stackedPaths(items, names, xOf, y, pitch - gap);
  const at = pointed ?? props.selected ?? null;

  const lines = (place: number): string => {
    const item = items[place];
    if (!item) return "";
    const parts = names
      .filter((name) => (item.parts[name] ?? 0) > 0)
      .map((name) => `${name} ${duration(item.parts[name])}`);
    return [`${item.label}: ${duration(item.total)}`, ...parts, ...(item.words ?? [])].join("\n");
  };
  const placeOf = (event: MouseEvent): number | null => {
    const left = (event.currentTarget as Element).getBoundingClientRect().left;
    const place = Math.floor((event.clientX - left - LEFT) / pitch);
    return place >= 0 && place < items.length ? place : null;
  };
  const onKeyDown = (event: KeyboardEvent): void => {
    const moves: Record<string, number> = {
      ArrowRight: (at ?? -1) + 1,
      ArrowLeft: (at ?? items.length) - 1,
      Home: 0,
      End: items.length - 1,
    };
    const to = moves[event.key];
    if (to !== undefined) setPointed(Math.max(0, Math.min(items.length - 1, to)));
    else if (event.key === "Enter" && at !== null) props.onSelect?.(at);
    else return;
    event.preventDefault();
  };

  const ticks = labelled(items.length, pitch);
  return (
    <div ref={box} class="strip">
      <svg
        width="100%"
        height={height}
        role={props.onSelect ? "listbox" : "img"}
        tabindex={0}
        aria-label={`${props.caption}. ${at === null ? "Arrow keys go through them." : lines(at)}`}
        onMouseMove={(event) => {
          const place = placeOf(event);
          setPointed(place);
          if (place === null) hush();
          else say(lines(place), event);
        }}
        onMouseLeave={() => {
          setPointed(null);
          hush();
        }}
        onClick={(event) => {
          const place = placeOf(event);
          if (place !== null) props.onSelect?.(place);
        }}
        onKeyDown={onKeyDown}
        onBlur={() => setPointed(null)}
        style={props.onSelect ? { cursor: "pointer" } : {}}
      >
        {y.ticks(4).map((tick) => (
          <g key={tick}>
            <line class="rule" x1={LEFT} x2={LEFT + inside} y1={y(tick)} y2={y(tick)} />
            <text class="axis" x={LEFT - 8} y={y(tick) + 4} text-anchor="end">
              {duration(tick)}
            </text>
          </g>
        ))}
        {names.map((name) => (
          <path key={name} d={paths.get(name) ?? ""} fill={partColor(name)} />
        ))}
        {at !== null ? (
          <rect
            class="pointed"
            x={xOf(at) - gap / 2 - 1}
            width={Math.max(3, pitch - gap + gap + 2)}
            y={TOP - 4}
            height={height - BOTTOM - TOP + 4}
          />
        ) : null}
        {ticks.map((place) => (
          <text key={place} class="axis" x={xOf(place) + (pitch - gap) / 2} y={height - 6} text-anchor="middle">
            {items[place]?.label.replace(/^\D+/, "")}
          </text>
        ))}
        <text class="axis" x={LEFT - 8} y={height - 6} text-anchor="end">
          {props.axis}
        </text>
      </svg>
      <p class="readout" aria-live="polite">
        {at !== null && pointed !== null ? lines(at).split("\n").join(" · ") : " "}
      </p>
    </div>
  );
}

/** Each part as one path of all columns. */
function stackedPaths(
  items: readonly StripItem[],
  names: readonly string[],
  xOf: (place: number) => number,
  y: (seconds: number) => number,
  width: number,
): Map<string, string> {
  const paths = new Map<string, string[]>(names.map((name) => [name, []]));
  items.forEach((item, place) => {
    let from = 0;
    const x = xOf(place).toFixed(2);
    for (const name of names) {
      const seconds = item.parts[name] ?? 0;
      if (seconds <= 0) continue;
      const bottom = y(from);
      const top = y(from + seconds);
      from += seconds;
      paths.get(name)?.push(`M${x} ${bottom.toFixed(2)}V${top.toFixed(2)}h${width.toFixed(2)}V${bottom.toFixed(2)}z`);
    }
  });
  return new Map([...paths].map(([name, pieces]) => [name, pieces.join("")]));
}

/** Places whose labels do not touch one another. */
function labelled(items: number, pitch: number): number[] {
  const each = Math.max(1, Math.ceil(44 / pitch));
  return Array.from({ length: Math.ceil(items / each) }, (_, at) => at * each);
}
