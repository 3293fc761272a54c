// The one table of the page: searched, sorted by any column, a part of its rows at first.

import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import type { Cell, TableData } from "../document";
import { plain } from "../model/format";

const FIRST = 12;
const MORE = 200;
const SEARCHED_FROM = 12;

interface Sorting {
  column: number;
  down: boolean;
}

export function Table({ data, caption }: { data: TableData; caption: string }): JSX.Element {
  const { head, rows } = data;
  const [sorting, setSorting] = useState<Sorting | null>(null);
  const [search, setSearch] = useState("");
  const [most, setMost] = useState(FIRST);
  const found = useMemo(() => matching(rows, search), [rows, search]);
  const ordered = useMemo(() => sorted(found, sorting), [found, sorting]);
  const shown = ordered.slice(0, rows.length <= FIRST + 4 ? rows.length : most);
  return (
    <div class="table">
      {rows.length > SEARCHED_FROM ? (
        <div class="search">
          <input
            type="search"
            value={search}
            placeholder="Search"
            aria-label={`Search ${caption}`}
            onInput={(event) => setSearch(event.currentTarget.value)}
          />
          <span class="note" role="status">
            {search ? `${plain(found.length)} of ${plain(rows.length)}` : ""}
          </span>
        </div>
      ) : null}
      <div class="scroll-x">
        <table class="plain">
          <caption class="unseen">{caption}</caption>
          <thead>
            <tr>
              {head.map((one, column) => (
                <Head
                  key={column}
                  label={one.label}
                  left={one.left}
                  sorted={sorting?.column === column ? sorting : null}
                  onSort={(down) => setSorting({ column, down })}
                />
              ))}
            </tr>
          </thead>
          <tbody>
            {shown.map((row, at) => (
              <tr key={at}>
                {head.map((one, column) => (
                  <td key={column} class={one.left ? "text" : "figure"}>
                    {one.bar ? <Share cell={row[column]} /> : <Words cell={row[column]} />}
                  </td>
                ))}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      {shown.length < ordered.length ? (
        <button type="button" class="more" onClick={() => setMost(most + MORE)}>
          {`Show ${plain(Math.min(MORE, ordered.length - shown.length))} more of ${plain(ordered.length)}`}
        </button>
      ) : null}
    </div>
  );
}

function Head(props: {
  label: string;
  left: boolean;
  sorted: Sorting | null;
  onSort: (down: boolean) => void;
}): JSX.Element {
  const { label, left, sorted } = props;
  return (
    <th
      scope="col"
      class={left ? "text" : "figure"}
      aria-sort={sorted ? (sorted.down ? "descending" : "ascending") : "none"}
    >
      <button
        type="button"
        class={`sort${sorted ? " sorted" : ""}`}
        aria-label={`Sort by ${label || "this column"}`}
        onClick={() => props.onSort(sorted ? !sorted.down : !left)}
      >
        {label} <span aria-hidden="true">{sorted ? (sorted.down ? "▼" : "▲") : "↕"}</span>
      </button>
    </th>
  );
}

/** Text, which may lead to an editor. */
function Words({ cell }: { cell: Cell | undefined }): JSX.Element {
  return cell?.[2]?.startsWith("vscode://file/") ? <a href={cell[2]}>{cell[0]}</a> : <>{cell?.[0]}</>;
}

/** A share of one as a small bar behind its figure. */
function Share({ cell }: { cell: Cell | undefined }): JSX.Element {
  const share = cell?.[1] ?? 0;
  return (
    <span class="share-cell">
      {share > 0 ? (
        <span class="share-bar" style={{ width: `${Math.min(100, share * 100)}%` }} aria-hidden="true" />
      ) : null}
      <span class="share-words">{cell?.[0]}</span>
    </span>
  );
}

type Rows = readonly (readonly Cell[])[];

function matching(rows: Rows, search: string): Rows {
  const wanted = search.trim().toLowerCase();
  return wanted ? rows.filter((row) => row.some(([text]) => text.toLowerCase().includes(wanted))) : rows;
}

/** *rows* in the order that *sorting* asks for, by number where there is one; what is not known comes last. */
export function sorted(rows: Rows, sorting: Sorting | null): Rows {
  if (sorting === null) return rows;
  const sign = sorting.down ? -1 : 1;
  const missing = (text: string): boolean => text === "" || text.startsWith("n/a");
  return [...rows].sort((one, other) => {
    const [text = "", value] = one[sorting.column] ?? [];
    const [otherText = "", otherValue] = other[sorting.column] ?? [];
    if (missing(text) || missing(otherText)) return Number(missing(text)) - Number(missing(otherText));
    if (typeof value === "number" && typeof otherValue === "number") return sign * (value - otherValue);
    return sign * text.localeCompare(otherText, "en", { numeric: true });
  });
}
