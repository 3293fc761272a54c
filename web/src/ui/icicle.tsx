// The modules as an icicle: as wide as what a module spent, one below the other as they contain one another.

import { hierarchy, partition, type HierarchyRectangularNode } from "d3-hierarchy";
import type { JSX } from "preact";
import { useMemo } from "preact/hooks";
import { type Module, type ModuleTree, type SizeKey, isInside } from "../model/modules";
import { paintOf } from "./colors";
import { useWidth } from "./size";
import { hush, say } from "./tip";

/** Pixels that a row is high: more where there are few. */
const LOWEST = 23;
const HIGHEST = 36;
const WHOLE = 320;
const THINNEST = 1.2;

type Box = HierarchyRectangularNode<Module>;

/** Where every module stands if the root is one wide; children in the order of the model. */
export function layout(tree: ModuleTree, size: SizeKey): { boxes: Map<Module, Box>; root: Box } {
  const root = hierarchy(tree.root, (one) => one.children).sum((one) => Math.max(0, one.own[size] ?? 0));
  const placed = partition<Module>()(root as unknown as HierarchyRectangularNode<Module>);
  const boxes = new Map<Module, Box>();
  placed.each((box) => void boxes.set(box.data, box));
  return { boxes, root: placed };
}

interface Drawn {
  box: Box;
  x: number;
  width: number;
  row: number;
}

/** What is to be drawn of the subtree of *zoomed* and of all above it; modules too thin to see are passed over. */
export function visible(zoomed: Box, width: number): Drawn[] {
  const drawn: Drawn[] = [];
  const from = zoomed.x0;
  const scale = width / (zoomed.x1 - zoomed.x0 || 1);
  for (let above = zoomed.parent; above; above = above.parent) {
    drawn.push({ box: above, x: 0, width, row: above.depth });
  }
  const enter = (box: Box): void => {
    const wide = (box.x1 - box.x0) * scale;
    if (wide < THINNEST) return;
    drawn.push({ box, x: (box.x0 - from) * scale, width: wide, row: box.depth });
    box.children?.forEach(enter);
  };
  enter(zoomed);
  return drawn;
}

export function Icicle(props: {
  tree: ModuleTree;
  size: SizeKey;
  zoomed: Module;
  selected: Module | null;
  matches: ReadonlySet<Module> | null;
  wordsOf: (module: Module) => string;
  shareOf: (module: Module) => number | null;
  onZoom: (module: Module) => void;
  onSelect: (module: Module) => void;
}): JSX.Element {
  const { tree, size, zoomed, selected, matches } = props;
  const [box, width] = useWidth<HTMLDivElement>();
  const { boxes } = useMemo(() => layout(tree, size), [tree, size]);
  const at = boxes.get(zoomed) as Box;
  const drawn = useMemo(() => (width ? visible(at, width) : []), [at, width]);
  const rows = drawn.reduce((most, one) => Math.max(most, one.row), 0) + 1;
  const deepest = useMemo(() => tree.all.reduce((most, one) => Math.max(most, one.depth), 0) + 1, [tree]);
  const row = Math.max(LOWEST, Math.min(HIGHEST, Math.floor(WHOLE / deepest)));

  const onKeyDown = (event: KeyboardEvent): void => {
    const from = selected !== null && isInside(selected, zoomed) ? selected : zoomed;
    const to = neighbour(from, event.key, boxes);
    if (to) props.onSelect(to);
    else if (event.key === "Enter" || event.key === " ") props.onZoom(from);
    else if (event.key === "Backspace" || event.key === "Escape") {
      if (zoomed.parent) props.onZoom(zoomed.parent);
    } else return;
    event.preventDefault();
  };

  return (
    <div ref={box} class="icicle">
      <svg
        width="100%"
        height={rows * row + 1}
        role="application"
        tabIndex={0}
        aria-label={`Icicle of the modules. ${selected ? props.wordsOf(selected) : ""} Arrow keys move, Enter zooms in, Backspace out. The table below has every figure.`}
        onKeyDown={onKeyDown}
        onMouseLeave={hush}
      >
        {drawn.map((one) => {
          const module = one.box.data;
          const paint = paintOf(props.shareOf(module));
          const above = one.row < at.depth;
          const state = `${above ? "above " : ""}${module === selected ? "selected " : ""}${
            matches !== null && !matches.has(module) ? "faded" : ""
          }`;
          return (
            <g
              key={module.index}
              class={`slab ${state}`}
              transform={`translate(${one.x.toFixed(2)} ${one.row * row})`}
              onClick={() => props.onZoom(module)}
              onMouseMove={(event) => say(props.wordsOf(module), event)}
            >
              <rect width={Math.max(0.6, one.width - (one.width > 4 ? 1 : 0.3))} height={row - 1} fill={paint.fill} />
              {one.width > 34 ? (
                <text x={6} y={row / 2 + 4} fill={paint.ink}>
                  {fitted(module, one.width - 10)}
                </text>
              ) : null}
            </g>
          );
        })}
        {selected !== null && boxes.has(selected) ? <Outline at={at} box={boxes.get(selected) as Box} width={width} row={row} /> : null}
      </svg>
    </div>
  );
}

function Outline({ at, box, width, row }: { at: Box; box: Box; width: number; row: number }): JSX.Element | null {
  const scale = width / (at.x1 - at.x0 || 1);
  const left = Math.max(0, (box.x0 - at.x0) * scale);
  const right = Math.min(width, (box.x1 - at.x0) * scale);
  if (right <= left || box.depth < at.depth) return null;
  return (
    <rect
      class="outline"
      x={left + 1}
      y={box.depth * row + 1}
      width={Math.max(2, right - left - 3)}
      height={row - 3}
    />
  );
}

const LETTER = 6.7;

/** The name, with the class behind it where there is room, cut to *width* pixels. */
function fitted(module: Module, width: number): string {
  const room = Math.floor(width / LETTER);
  const whole = module.name === "" ? module.label : `${module.label}  ${module.profile.type_name}`;
  if (whole.length <= room) return whole;
  return module.label.length <= room ? module.label : `${module.label.slice(0, Math.max(1, room - 1))}…`;
}

/** Where an arrow key leads: down to the widest child, up to the parent, aside to what stands in the same row. */
function neighbour(from: Module, key: string, boxes: ReadonlyMap<Module, Box>): Module | null {
  const wide = (one: Module): number => {
    const box = boxes.get(one);
    return box ? box.x1 - box.x0 : 0;
  };
  if (key === "ArrowUp") return from.parent;
  if (key === "ArrowDown") {
    const widest = from.children.reduce<Module | null>(
      (most, one) => (wide(one) > (most ? wide(most) : 0) ? one : most),
      null,
    );
    return widest;
  }
  if ((key !== "ArrowLeft" && key !== "ArrowRight") || from.parent === null) return null;
  const row = from.parent.children.filter((one) => wide(one) > 0);
  return row[row.indexOf(from) + (key === "ArrowRight" ? 1 : -1)] ?? null;
}
