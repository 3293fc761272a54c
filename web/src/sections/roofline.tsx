import { scaleLog } from "d3-scale";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { bytes, duration, percent, plain, si } from "../model/format";
import type { Module, ModuleTree } from "../model/modules";
import type { PointData, RooflineData } from "../document";
import { useWidth } from "../ui/size";
import { hush, say } from "../ui/tip";

const MOST = 400;
const HEIGHT = 340;
const MARGIN = { left: 86, right: 16, top: 14, bottom: 40 };

interface Point {
  name: string;
  kind: string;
  seconds: number;
  /** FLOP/s. */
  achieved: number;
  /** FLOPs a byte. */
  intensity: number;
  attainable: number | null;
}

function ofOperator([name, seconds, achieved, intensity, attainable]: PointData): Point {
  return { name, kind: "operator", seconds, achieved, intensity, attainable };
}

/** A module without those inside it; none where its time, FLOPs or bytes are not known. */
function ofModule({ name, type: kind, own }: Module, roof: RooflineData): Point[] {
  const { seconds, flops, bytes } = own;
  if (!seconds || !flops || !bytes) return [];
  const peak = roof.peaks[0]?.[1] ?? Infinity;
  const attainable = Math.min(peak, roof.bandwidth === null ? Infinity : (roof.bandwidth * flops) / bytes);
  const limit = attainable === Infinity ? null : attainable;
  const where = { achieved: flops / seconds, intensity: flops / bytes, attainable: limit };
  return [{ name: name || "(root)", kind, seconds, ...where }];
}

export function Roofline({ roof, tree }: { roof: RooflineData; tree: ModuleTree | null }): JSX.Element | null {
  const modules = useMemo(() => tree?.all.flatMap((one) => ofModule(one, roof)) ?? [], [tree, roof]);
  const points = modules.length ? modules : roof.operators.map(ofOperator);
  if (!points.length) return null;
  const drawn = [...points].sort((one, other) => other.seconds - one.seconds).slice(0, MOST);
  return (
    <>
      <Plot points={drawn} roof={roof} />
      {drawn.length < points.length ? <p class="note">{`Drawn: the ${plain(MOST)} that take most time.`}</p> : null}
    </>
  );
}

/** Width of the memory's label, which stands above the line that rises below it. */
const LABEL = 130;

function Plot({ points, roof }: { points: readonly Point[]; roof: RooflineData }): JSX.Element {
  const [box, width] = useWidth<HTMLDivElement>();
  const peak = roof.peaks[0]?.[1] ?? null;
  const xs = points.map((one) => one.intensity);
  const ys = points.map((one) => one.achieved);
  const ridge = peak !== null && roof.bandwidth !== null ? peak / roof.bandwidth : null;
  const x = scaleLog(wide(Math.min(...xs, ridge ?? Infinity) / 2, Math.max(...xs, ridge ?? 0) * 2), [
    MARGIN.left,
    Math.max(MARGIN.left + 10, width - MARGIN.right),
  ]);
  const y = scaleLog(wide(Math.min(...ys) / 3, Math.max(...ys, peak ?? 0) * 2), [HEIGHT - MARGIN.bottom, MARGIN.top]);
  const longest = Math.max(...points.map((one) => one.seconds));
  const radius = (one: Point): number => Math.max(2.5, 15 * Math.sqrt(one.seconds / longest));
  const labels = placedLabels(points, x, y, radius);
  const clipped = (value: number): number => Math.min(value, y.domain()[1] as number);
  const [from, to] = x.domain() as [number, number];
  const lines = (one: Point): string =>
    [
      `${one.name} (${one.kind})`,
      `${si(one.achieved, "FLOP/s")}${one.attainable ? `, ${percent(one.achieved / one.attainable)} of the attainable ${si(one.attainable, "FLOP/s")}` : ""}`,
      `${plain(Number(one.intensity.toPrecision(3)))} FLOPs a byte, ${duration(one.seconds)}, ${si(flopsOf(one), "FLOPs")}, ${bytes(flopsOf(one) / one.intensity)}`,
    ].join("\n");
  return (
    <div ref={box} class="roofline">
      <svg width="100%" height={HEIGHT} role="img" aria-label={`Roofline of ${points.length} points`}>
        {decades(x.domain() as [number, number]).map((one) => (
          <g key={one}>
            <line class="rule" x1={x(one)} x2={x(one)} y1={MARGIN.top} y2={HEIGHT - MARGIN.bottom} />
            <text class="axis" x={x(one)} y={HEIGHT - MARGIN.bottom + 16} text-anchor="middle">
              {plain(one)}
            </text>
          </g>
        ))}
        {decades(y.domain() as [number, number]).map((one) => (
          <g key={one}>
            <line class="rule" x1={MARGIN.left} x2={width - MARGIN.right} y1={y(one)} y2={y(one)} />
            <text class="axis" x={MARGIN.left - 8} y={y(one) + 4} text-anchor="end">
              {si(one, "FLOP/s")}
            </text>
          </g>
        ))}
        <text class="axis" x={width - MARGIN.right} y={HEIGHT - 8} text-anchor="end">
          FLOPs a byte
        </text>
        {roof.bandwidth !== null ? (
          <text
            class="axis strong"
            x={x(from) + 8}
            y={y(clipped(Math.max(y.domain()[0] as number, roof.bandwidth * x.invert(x(from) + LABEL)))) - 8}
          >
            {`memory ${si(roof.bandwidth)}B/s`}
          </text>
        ) : null}
        {roof.bandwidth !== null ? (
          <line
            class="roof"
            x1={x(from)}
            y1={y(Math.max(y.domain()[0] as number, roof.bandwidth * from))}
            x2={x(ridge ?? to)}
            y2={y(clipped(roof.bandwidth * (ridge ?? to)))}
          />
        ) : null}
        {roof.peaks.map(([dtype, flopsPerSec], place) => (
          <g key={dtype}>
            <line
              class={`roof${place ? " lesser" : ""}`}
              x1={x(Math.min(Math.max(from, roof.bandwidth ? flopsPerSec / roof.bandwidth : from), to))}
              x2={x(to)}
              y1={y(flopsPerSec)}
              y2={y(flopsPerSec)}
            />
            <text class="axis strong" x={x(to) - 4} y={y(flopsPerSec) - 5} text-anchor="end">
              {`${dtype} peak ${si(flopsPerSec, "FLOP/s")}`}
            </text>
          </g>
        ))}
        {points.map((one) => (
          <circle
            key={one.name}
            class="point"
            cx={x(one.intensity)}
            cy={y(one.achieved)}
            r={radius(one)}
            onMouseMove={(event) => say(lines(one), event)}
            onMouseLeave={hush}
          />
        ))}
        {labels.map(({ point, dx, anchor }) => (
          <text
            key={point.name}
            class="point-name"
            x={x(point.intensity) + dx}
            y={y(point.achieved) + 4}
            text-anchor={anchor}
          >
            {point.name.length > 34 ? `…${point.name.slice(-33)}` : point.name}
          </text>
        ))}
      </svg>
    </div>
  );
}

function flopsOf(point: Point): number {
  return point.achieved * point.seconds;
}

/** At least two decades, so that what lies close together looks close together. */
function wide(from: number, to: number): [number, number] {
  const missing = Math.max(0, 2 - Math.log10(to / from)) / 2;
  return [from / 10 ** missing, to * 10 ** missing];
}

function decades([from, to]: [number, number]): number[] {
  const found: number[] = [];
  for (let power = Math.ceil(Math.log10(from)); power <= Math.floor(Math.log10(to)); power += 1)
    found.push(10 ** power);
  return found;
}

type Scale = (value: number) => number;

/** Names of the largest points, where they do not run into one another. */
function placedLabels(
  points: readonly Point[],
  x: Scale,
  y: Scale,
  radius: (one: Point) => number,
): { point: Point; dx: number; anchor: "start" | "end" }[] {
  const taken: { left: number; right: number; top: number }[] = [];
  const placed: { point: Point; dx: number; anchor: "start" | "end" }[] = [];
  for (const point of points.slice(0, 40)) {
    const long = Math.min(34, point.name.length) * 6.2;
    const ends = x(point.intensity) > MARGIN.left + long + 40;
    const dx = (ends ? -1 : 1) * (radius(point) + 4);
    const left = ends ? x(point.intensity) + dx - long : x(point.intensity) + dx;
    const box = { left, right: left + long, top: y(point.achieved) };
    if (taken.some((one) => one.left < box.right && box.left < one.right && Math.abs(one.top - box.top) < 14)) continue;
    taken.push(box);
    placed.push({ point, dx, anchor: ends ? "end" : "start" });
    if (placed.length >= 14) break;
  }
  return placed;
}
