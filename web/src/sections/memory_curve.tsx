// Memory over time: the curve of each device, its peak, and the phases of the steps below it.

import { scaleLinear } from "d3-scale";
import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { bytes, duration, percent } from "../model/format";
import { partColor } from "../model/parts";
import type { CurveData } from "../document";
import { useWidth } from "../ui/size";
import { hush, say } from "../ui/tip";

type MemoryPoint = { us: number; bytes: number };
type Drawn = Omit<CurveData, "points"> & { points: readonly MemoryPoint[] };

const HEIGHT = 220;
const MARGIN = { left: 78, right: 14, top: 22, bottom: 38 };
const STRIP = 7;

/** A phase's name as the parts of a step have it, whose colours it shares. */
function partOf(phase: string): string {
  const name = phase.replace(" (by operators)", "");
  return name === "data loader" ? "data wait" : name;
}

export function MemoryOverTime({ curves }: { curves: readonly CurveData[] }): JSX.Element {
  const drawn = useMemo(
    () => curves.map((one): Drawn => ({ ...one, points: one.points.map(([us, bytes]) => ({ us, bytes })) })),
    [curves],
  );
  return (
    <>
      {drawn.map((one) => (
        <Curve key={one.device} curve={one} where={one.device < 0 ? "the host" : `device ${one.device}`} />
      ))}
    </>
  );
}

function Curve({ curve, where }: { curve: Drawn; where: string }): JSX.Element {
  const [box, width] = useWidth<HTMLDivElement>();
  const [pointed, setPointed] = useState<MemoryPoint | null>(null);
  const { points } = curve;
  const first = points[0]?.us ?? 0;
  const last = points.at(-1)?.us ?? 1;
  const least = Math.min(0, ...points.map((one) => one.bytes));
  const right = Math.max(MARGIN.left + 10, width - MARGIN.right);
  const x = scaleLinear([first, Math.max(last, first + 1e-3)], [MARGIN.left, right]);
  const y = scaleLinear([least, curve.peak_bytes || 1], [HEIGHT - MARGIN.bottom, MARGIN.top]).nice(4);
  const peak = { us: curve.peak_us, bytes: curve.peak_bytes };
  const within = curve.phases.filter(([, start, end]) => end > first && start < last);
  const phaseAt = (us: number): string => {
    const found = curve.phases.findLast(([, start, end]) => start <= us && us < end);
    return found === undefined ? "" : `, in ${found[0]}`;
  };
  const words = (one: MemoryPoint): string =>
    `${bytes(one.bytes)}${curve.absolute ? "" : " more than at first"}\n${duration(one.us / 1e6)} after the first event${phaseAt(one.us)}, ${percent(curve.peak_bytes ? one.bytes / curve.peak_bytes : null)} of the peak`;
  const nearest = (event: MouseEvent): MemoryPoint | null => {
    const left = (event.currentTarget as Element).getBoundingClientRect().left;
    const us = x.invert(event.clientX - left);
    // What was allocated last stays so until the next moment that is drawn.
    return points.findLast((one) => one.us <= us) ?? points[0] ?? null;
  };
  const onKeyDown = (event: KeyboardEvent): void => {
    const at = pointed === null ? -1 : points.indexOf(pointed);
    const moves: Record<string, number> = {
      ArrowRight: at + 1,
      ArrowLeft: at - 1,
      Home: 0,
      End: points.length - 1,
    };
    const to = moves[event.key];
    if (to === undefined) return;
    setPointed(points[Math.max(0, Math.min(points.length - 1, to))] ?? null);
    event.preventDefault();
  };
  return (
    <div ref={box} class="curve">
      <h3>Over time on {where}</h3>
      <svg
        width="100%"
        height={HEIGHT}
        role="img"
        tabindex={0}
        aria-label={`Memory over time on ${where}. ${pointed === null ? `Peak ${words(peak)}. Arrow keys go along it.` : words(pointed)}`}
        onMouseMove={(event) => {
          const found = nearest(event);
          setPointed(found);
          if (found) say(words(found), event);
        }}
        onMouseLeave={() => {
          setPointed(null);
          hush();
        }}
        onKeyDown={onKeyDown}
        onBlur={() => setPointed(null)}
      >
        {y.ticks(4).map((tick) => (
          <g key={tick}>
            <line class="rule" x1={MARGIN.left} x2={right} y1={y(tick)} y2={y(tick)} />
            <text class="axis" x={MARGIN.left - 8} y={y(tick) + 4} text-anchor="end">
              {bytes(tick)}
            </text>
          </g>
        ))}
        {x.ticks(Math.max(2, Math.floor(width / 140))).map((tick) => (
          <text key={tick} class="axis" x={x(tick)} y={HEIGHT - 6} text-anchor="middle">
            {duration(tick / 1e6)}
          </text>
        ))}
        {within.map(([name, start, end]) => (
          <rect
            key={`${name} ${start}`}
            class="phase"
            x={x(Math.max(start, first))}
            y={HEIGHT - MARGIN.bottom + 4}
            width={Math.max(0.5, x(Math.min(end, last)) - x(Math.min(Math.max(start, first), last)))}
            height={STRIP}
            fill={partColor(partOf(name))}
          >
            <title>{name}</title>
          </rect>
        ))}
        <path class="area" d={outline(points, x, y, y(0))} />
        <path class="line" d={outline(points, x, y, null)} />
        {pointed !== null ? (
          <line class="pointed" x1={x(pointed.us)} x2={x(pointed.us)} y1={MARGIN.top} y2={HEIGHT - MARGIN.bottom} />
        ) : null}
        <circle class="peak" cx={x(peak.us)} cy={y(peak.bytes)} r={4} />
        <text
          class="mark"
          x={x(peak.us) + (x(peak.us) > right - 160 ? -9 : 9)}
          y={y(peak.bytes) - 7}
          text-anchor={x(peak.us) > right - 160 ? "end" : "start"}
        >
          {`peak ${bytes(peak.bytes)}${curve.peak_phase === null ? "" : `, in ${curve.peak_phase}`}`}
        </text>
      </svg>
      <p class="readout">{pointed === null ? " " : words(pointed).replace("\n", " · ")}</p>
    </div>
  );
}

/** The curve, level from each moment to the next; as far down as *ground* it is an area. */
function outline(
  points: readonly MemoryPoint[],
  x: (us: number) => number,
  y: (bytes: number) => number,
  ground: number | null,
): string {
  const [first, ...others] = points;
  if (first === undefined) return "";
  const drawn = others.map((one) => `H${x(one.us).toFixed(1)}V${y(one.bytes).toFixed(1)}`).join("");
  const begin = `${x(first.us).toFixed(1)} `;
  return ground === null
    ? `M${begin}${y(first.bytes).toFixed(1)}${drawn}`
    : `M${begin}${ground.toFixed(1)}V${y(first.bytes).toFixed(1)}${drawn}V${ground.toFixed(1)}z`;
}
