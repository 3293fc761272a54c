// A long table of which only the visible rows exist. With levels it is a tree: ARIA calls it a treegrid.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useId, useLayoutEffect, useRef, useState } from "preact/hooks";
import { Term } from "./tip";

export interface Column<Row> {
  key: string;
  label: string;
  /** The word to define, where it is not the label. */
  word?: string;
  text?: boolean;
  /** What the column is sorted by; null comes last. */
  value?: (row: Row) => number | string | null;
  cell: (row: Row) => ComponentChildren;
}

export interface Sorting {
  key: string;
  down: boolean;
}

export interface GridProps<Row> {
  caption: string;
  columns: readonly Column<Row>[];
  rows: readonly Row[];
  keyOf: (row: Row) => string | number;
  sorting: Sorting;
  onSort: (sorting: Sorting) => void;
  selected?: string | number | null;
  onSelect?: (row: Row) => void;
  onOpen?: (row: Row) => void;
  onUp?: () => void;
  level?: (row: Row) => number;
  expanded?: (row: Row) => boolean | null;
  onFold?: (row: Row, open: boolean) => void;
  rowClass?: (row: Row) => string;
  height?: number;
}

export const ROW_HEIGHT = 28;
const HEAD_HEIGHT = 34;
const BEYOND = 8;
const PRINTED = 400;

export function Grid<Row>(props: GridProps<Row>): JSX.Element {
  const { rows, columns, keyOf } = props;
  const height = Math.min(props.height ?? 460, HEAD_HEIGHT + rows.length * ROW_HEIGHT + 2);
  const box = useRef<HTMLDivElement>(null);
  const [top, setTop] = useState(0);
  const printing = usePrinting();
  const active = rows.findIndex((row) => keyOf(row) === props.selected);
  const id = useId();

  useLayoutEffect(() => {
    const element = box.current;
    if (!element || active < 0) return;
    const at = active * ROW_HEIGHT;
    const shown = element.clientHeight - HEAD_HEIGHT;
    if (at < element.scrollTop) element.scrollTop = at;
    else if (at + ROW_HEIGHT > element.scrollTop + shown) element.scrollTop = at + ROW_HEIGHT - shown;
  }, [active, rows]);

  const first = printing ? 0 : Math.max(0, Math.floor(top / ROW_HEIGHT) - BEYOND);
  const last = printing
    ? Math.min(rows.length, PRINTED)
    : Math.min(rows.length, Math.ceil((top + height) / ROW_HEIGHT) + BEYOND);
  const isTree = props.level !== undefined;

  const onKeyDown = (event: KeyboardEvent): void => {
    if (event.target !== event.currentTarget || event.ctrlKey || event.metaKey || event.altKey) return;
    const page = Math.max(1, Math.floor(height / ROW_HEIGHT) - 2);
    const moves: Record<string, number> = {
      ArrowDown: active + 1,
      ArrowUp: active - 1,
      PageDown: active + page,
      PageUp: active - page,
      Home: 0,
      End: rows.length - 1,
    };
    const row = rows[active];
    const next = moves[event.key];
    if (next !== undefined) {
      const to = rows[Math.max(0, Math.min(rows.length - 1, next))];
      if (to !== undefined) props.onSelect?.(to);
    } else if (row !== undefined && event.key === "Enter") {
      props.onOpen?.(row);
    } else if (event.key === "Backspace") {
      props.onUp?.();
    } else if (row !== undefined && (event.key === "ArrowRight" || event.key === "ArrowLeft") && props.expanded) {
      const open = event.key === "ArrowRight";
      const is = props.expanded(row);
      if (is !== null && is !== open) props.onFold?.(row, open);
      else if (open && is === true && rows[active + 1] !== undefined) props.onSelect?.(rows[active + 1] as Row);
      else if (!open) {
        const level = props.level?.(row) ?? 0;
        for (let at = active - 1; at >= 0; at -= 1) {
          const before = rows[at] as Row;
          if ((props.level?.(before) ?? 0) < level) {
            props.onSelect?.(before);
            break;
          }
        }
      }
    } else return;
    event.preventDefault();
  };

  return (
    <div
      ref={box}
      class="grid-box"
      style={printing ? {} : { height }}
      onScroll={(event) => setTop(event.currentTarget.scrollTop)}
    >
      <table
        class="grid"
        role={isTree ? "treegrid" : "grid"}
        aria-rowcount={rows.length + 1}
        aria-label={props.caption}
        aria-description={`Arrow keys move${props.onOpen ? ", Enter zooms in, Backspace out" : ""}.`}
        aria-activedescendant={active >= first && active < last ? `${id}-${active}` : undefined}
        tabIndex={0}
        onKeyDown={onKeyDown}
      >
        <thead>
          <tr aria-rowindex={1}>
            {columns.map((column) => (
              <Head key={column.key} column={column} sorting={props.sorting} onSort={props.onSort} />
            ))}
          </tr>
        </thead>
        <tbody>
          {first > 0 ? <tr class="gap" style={{ height: first * ROW_HEIGHT }} aria-hidden="true" /> : null}
          {rows.slice(first, last).map((row, place) => {
            const at = first + place;
            const isActive = at === active;
            return (
              <tr
                key={keyOf(row)}
                id={`${id}-${at}`}
                class={`${isActive ? "active " : ""}${props.rowClass?.(row) ?? ""}`}
                aria-rowindex={at + 2}
                aria-selected={props.onSelect ? isActive : undefined}
                aria-level={isTree ? (props.level as (row: Row) => number)(row) + 1 : undefined}
                aria-expanded={props.expanded?.(row) ?? undefined}
                onClick={() => props.onSelect?.(row)}
                onDblClick={() => props.onOpen?.(row)}
              >
                {columns.map((column) => (
                  <td key={column.key} class={column.text ? "text" : "figure"}>
                    {column.cell(row)}
                  </td>
                ))}
              </tr>
            );
          })}
          {last < rows.length && !printing ? (
            <tr class="gap" style={{ height: (rows.length - last) * ROW_HEIGHT }} aria-hidden="true" />
          ) : null}
        </tbody>
      </table>
      {printing && rows.length > PRINTED ? <p class="note">and {rows.length - PRINTED} more</p> : null}
    </div>
  );
}

function Head<Row>(props: { column: Column<Row>; sorting: Sorting; onSort: (sorting: Sorting) => void }): JSX.Element {
  const { column, sorting } = props;
  const isSorted = sorting.key === column.key;
  const kind = column.text ? "text" : "figure";
  const words = <Term word={column.word ?? column.label}>{column.label}</Term>;
  if (!column.value)
    return (
      <th scope="col" class={kind}>
        {words}
      </th>
    );
  return (
    <th scope="col" class={kind} aria-sort={isSorted ? (sorting.down ? "descending" : "ascending") : "none"}>
      {words}
      <button
        type="button"
        class={`sort${isSorted ? " sorted" : ""}`}
        aria-label={`Sort by ${column.label}`}
        onClick={() => props.onSort({ key: column.key, down: isSorted ? !sorting.down : !column.text })}
      >
        {isSorted ? (sorting.down ? "▼" : "▲") : "↕"}
      </button>
    </th>
  );
}

/** *rows* in the order that *sorting* asks for; what is not known comes last, either way. */
export function sorted<Row>(rows: readonly Row[], columns: readonly Column<Row>[], sorting: Sorting): Row[] {
  const value = columns.find((one) => one.key === sorting.key)?.value;
  if (!value) return [...rows];
  const sign = sorting.down ? -1 : 1;
  return rows
    .map((row) => ({ row, by: value(row) }))
    .sort((one, other) => {
      if (one.by === null || other.by === null) return Number(one.by === null) - Number(other.by === null);
      return one.by < other.by ? -sign : one.by > other.by ? sign : 0;
    })
    .map(({ row }) => row);
}

/** True while the page is printed: then a table shows its rows, not a window on them. */
export function usePrinting(): boolean {
  const [printing, setPrinting] = useState(() => matchMedia("print").matches);
  useEffect(() => {
    const media = matchMedia("print");
    const follow = (): void => setPrinting(media.matches);
    const before = (): void => setPrinting(true);
    const after = (): void => setPrinting(false);
    media.addEventListener("change", follow);
    addEventListener("beforeprint", before);
    addEventListener("afterprint", after);
    return () => {
      media.removeEventListener("change", follow);
      removeEventListener("beforeprint", before);
      removeEventListener("afterprint", after);
    };
  }, []);
  return printing;
}

/** A table that looks after its own order and search. */
export function SearchableGrid<Row>(
  props: Omit<GridProps<Row>, "sorting" | "onSort"> & { first: Sorting; searched: (row: Row) => string; what: string },
): JSX.Element {
  const [sorting, setSorting] = useState(props.first);
  const [search, setSearch] = useState("");
  const [selected, setSelected] = useState<string | number | null>(null);
  const wanted = search.trim().toLowerCase();
  const found = wanted ? props.rows.filter((row) => props.searched(row).toLowerCase().includes(wanted)) : props.rows;
  return (
    <>
      {props.rows.length > 8 ? (
        <Search what={props.what} value={search} onChange={setSearch} found={found.length} of={props.rows.length} />
      ) : null}
      <Grid
        {...props}
        rows={sorted(found, props.columns, sorting)}
        sorting={sorting}
        onSort={setSorting}
        selected={selected}
        onSelect={(row) => {
          setSelected(props.keyOf(row));
          props.onSelect?.(row);
        }}
      />
    </>
  );
}

export function Search(props: {
  what: string;
  value: string;
  onChange: (value: string) => void;
  found: number;
  of: number;
}): JSX.Element {
  return (
    <div class="search">
      <input
        type="search"
        value={props.value}
        placeholder={`Search ${props.what}`}
        aria-label={`Search ${props.what}`}
        onInput={(event) => props.onChange(event.currentTarget.value)}
      />
      <span class="note" role="status">
        {props.value
          ? `${props.found.toLocaleString("en-US")} of ${props.of.toLocaleString("en-US")} ${props.what}`
          : ""}
      </span>
    </div>
  );
}
