// The modules as an icicle: as wide as a module's cost, one below the other as they contain one another.
//
// Ten thousand modules are a few paths, one for each colour: what lies under the pointer is found by where it is.

import { hierarchy, partition, type HierarchyRectangularNode } from "d3-hierarchy";
import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { type Module, type ModuleTree, type SizeKey, isInside } from "../model/modules";
import { paintOf } from "./colors";
import { useWidth } from "./size";
import { hush, say } from "./tip";

/** Pixels that a row is high: more where there are few. */
const LOWEST = 23;
const HIGHEST = 36;
const WHOLE = 320;
const THINNEST = 0.7;
const NAMED_FROM = 34;

type Box = HierarchyRectangularNode<Module>;

/** Where every module stands if the root is one wide; children in the order of the model. */
export function layout(tree: ModuleTree, size: SizeKey): Map<Module, Box> {
  const root = hierarchy(tree.root, (one) => one.children).sum((one) => Math.max(0, one.own[size] ?? 0));
  const boxes = new Map<Module, Box>();
  partition<Module>()(root as Box).each((box) => void boxes.set(box.data, box));
  return boxes;
}

interface Drawn {
  box: Box;
  x: number;
  width: number;
}

/** What is to be drawn of the subtree of *zoomed* and of all above it; modules too thin to see are passed over. */
export function visible(zoomed: Box, width: number): Drawn[] {
  const drawn: Drawn[] = [];
  const scale = width / (zoomed.x1 - zoomed.x0 || 1);
  for (let above = zoomed.parent; above; above = above.parent) drawn.push({ box: above, x: 0, width });
  const enter = (box: Box): void => {
    const wide = (box.x1 - box.x0) * scale;
    if (wide < THINNEST) return;
    drawn.push({ box, x: (box.x0 - zoomed.x0) * scale, width: wide });
    box.children?.forEach(enter);
  };
  enter(zoomed);
  return drawn;
}

/** The module in a row of the icicle, at a share of its width; null where there is none. */
export function moduleAt(zoomed: Box, row: number, share: number): Module | null {
  if (row < 0) return null;
  let box: Box | undefined = zoomed;
  while (box && box.depth > row) box = box.parent ?? undefined;
  const x = zoomed.x0 + share * (zoomed.x1 - zoomed.x0);
  while (box && box.depth < row) box = box.children?.find((one) => one.x0 <= x && x < one.x1);
  return box?.data ?? null;
}

interface Shape {
  fill: string;
  kind: string;
  path: string;
}

/** All slabs of one look as one path. */
function shapes(
  drawn: readonly Drawn[],
  looks: { row: number; depth: number; shareOf: (one: Module) => number | null },
): Shape[] {
  const found = new Map<string, { fill: string; kind: string; pieces: string[] }>();
  for (const { box, x, width } of drawn) {
    const module = box.data;
    const { fill } = paintOf(looks.shareOf(module));
    const kind = box.depth < looks.depth ? "above" : "";
    const key = `${fill} ${kind}`;
    const shape = found.get(key) ?? { fill, kind, pieces: [] };
    found.set(key, shape);
    const wide = Math.max(0.5, width - (width > 4 ? 1 : 0.25));
    shape.pieces.push(
      `M${x.toFixed(1)} ${box.depth * looks.row}h${wide.toFixed(1)}v${looks.row - 1}h${(-wide).toFixed(1)}z`,
    );
  }
  return [...found.values()].map(({ fill, kind, pieces }) => ({ fill, kind, path: pieces.join("") }));
}

export function Icicle(props: {
  tree: ModuleTree;
  size: SizeKey;
  zoomed: Module;
  selected: Module | null;
  wordsOf: (module: Module) => string;
  shareOf: (module: Module) => number | null;
  onZoom: (module: Module) => void;
  onSelect: (module: Module) => void;
}): JSX.Element {
  const { tree, size, zoomed, selected, shareOf } = props;
  const [box, width] = useWidth<HTMLDivElement>();
  const [pointed, setPointed] = useState<Module | null>(null);
  const boxes = useMemo(() => layout(tree, size), [tree, size]);
  const at = boxes.get(zoomed) as Box;
  const drawn = useMemo(() => (width ? visible(at, width) : []), [at, width]);
  const row = useMemo(() => {
    const deepest = tree.all.reduce((most, one) => Math.max(most, one.depth), 0) + 1;
    return Math.max(LOWEST, Math.min(HIGHEST, Math.floor(WHOLE / deepest)));
  }, [tree]);
  const rows = drawn.reduce((most, one) => Math.max(most, one.box.depth), 0) + 1;
  const slabs = useMemo(
    () => shapes(drawn, { row, depth: at.depth, shareOf }),
    [drawn, row, at], // shareOf is of the tree alone
  );
  const names = useMemo(
    () =>
      drawn
        .filter((one) => one.width > NAMED_FROM)
        .map((one) => (
          <text
            key={one.box.data.index}
            x={one.x + 6}
            y={one.box.depth * row + row / 2 + 4}
            fill={paintOf(shareOf(one.box.data)).ink}
          >
            {fitted(one.box.data, one.width - 10)}
          </text>
        )),
    [drawn, row],
  );

  const under = (event: MouseEvent): Module | null => {
    const place = (event.currentTarget as Element).getBoundingClientRect();
    return moduleAt(at, Math.floor((event.clientY - place.top) / row), (event.clientX - place.left) / (width || 1));
  };
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
        tabindex={0}
        aria-label={`Icicle of the modules. ${selected ? props.wordsOf(selected) : ""} Arrow keys move, Enter zooms in, Backspace out. The table below has every figure.`}
        onKeyDown={onKeyDown}
        onMouseMove={(event) => {
          const module = under(event);
          setPointed(module);
          if (module) say(props.wordsOf(module), event);
          else hush();
        }}
        onMouseLeave={() => {
          setPointed(null);
          hush();
        }}
        onClick={(event) => {
          const module = under(event);
          if (module) props.onZoom(module);
        }}
        style={pointed ? { cursor: "pointer" } : {}}
      >
        {slabs.map((one) => (
          <path key={`${one.fill}${one.kind}`} class={`slabs ${one.kind}`} d={one.path} fill={one.fill} />
        ))}
        {names}
        <Outline look="pointed" at={at} box={pointed ? boxes.get(pointed) : undefined} width={width} row={row} />
        <Outline look="outline" at={at} box={selected ? boxes.get(selected) : undefined} width={width} row={row} />
      </svg>
    </div>
  );
}

function Outline(props: {
  look: string;
  at: Box;
  box: Box | undefined;
  width: number;
  row: number;
}): JSX.Element | null {
  const { at, box, width, row } = props;
  if (!box) return null;
  const scale = width / (at.x1 - at.x0 || 1);
  const left = Math.max(0, (box.x0 - at.x0) * scale);
  const right = Math.min(width, (box.x1 - at.x0) * scale);
  if (right <= left) return null;
  return (
    <rect
      class={props.look}
      x={left + 1}
      y={box.depth * row + 1}
      width={Math.max(2, right - left - 3)}
      height={row - 3}
    />
  );
}

const LETTER = 6.9;

/** The name, with the class behind it where there is room, cut to *width* pixels. */
function fitted(module: Module, width: number): string {
  const room = Math.floor(width / LETTER);
  const whole = module.name === "" || !module.type ? module.label : `${module.label}  ${module.type}`;
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
