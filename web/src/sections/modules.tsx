// The modules: an icicle and a table of the same tree, which share selection, zoom and search.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import { bytes, duration, percent, plain, si } from "../model/format";
import { type Module, type ModuleTree, type SizeKey, pathTo } from "../model/modules";
import { hrefOf, type Place } from "../place";
import { STEPS } from "../ui/colors";
import { type Column, Grid, Search, type Sorting, sorted } from "../ui/grid";
import { Icicle } from "../ui/icicle";
import { Section, ShareCell } from "../ui/section";
import { Term } from "../ui/tip";

const SIZES: readonly { key: SizeKey; label: string; show: (value: number | null) => string }[] = [
  { key: "seconds", label: "Time", show: duration },
  { key: "flops", label: "FLOPs", show: (value) => si(value, "FLOPs") },
  { key: "bytes", label: "Bytes", show: bytes },
  { key: "params", label: "Parameters", show: (value) => si(value) },
  { key: "memory", label: "Memory kept", show: bytes },
];

export function Modules(props: {
  /** What its figures are of. */
  note: ComponentChildren;
  tree: ModuleTree;
  place: Place;
  go: (changes: Place) => void;
}): JSX.Element {
  const { tree, place, go } = props;
  const size = sizeIn(place, tree);
  const zoomed = tree.byName.get(place["module"] ?? "") ?? tree.root;
  const [selected, setSelected] = useState<Module | null>(null);
  const [search, setSearch] = useState("");
  const [sorting, setSorting] = useState<Sorting>({ key: "order", down: false });
  const [flat, setFlat] = useState(false);
  const [folds, setFolds] = useState<ReadonlyMap<Module, boolean>>(new Map());
  useEffect(() => {
    setSelected(null);
    setFolds(new Map());
  }, [tree]);

  const matches = useMemo(() => matching(tree, search), [tree, search]);
  const columns = columnsOf();
  const rows = useMemo(
    () =>
      flat
        ? flatRows(zoomed, { matches, sorting, columns })
        : treeRows(zoomed, {
            matches,
            sorting,
            columns,
            isOpen: (one) => isOpen(one, { folds, matches, tree, zoomed }),
          }),
    [flat, zoomed, matches, sorting, folds, tree], // what columns sort by depends on the tree alone
  );
  const zoom = (module: Module): void => {
    setSelected(module);
    go({ module: module.name });
  };
  const up = (): void => {
    if (zoomed.parent) zoom(zoomed.parent);
  };
  const looked = selected ?? zoomed;
  const words = (module: Module): string => wordsOf(module, size, tree);

  return (
    <Section
      id="modules"
      title="Modules"
      note={
        <>
          {plain(tree.all.length)} modules. {props.note} Click to zoom in, or use the arrow keys and Enter.
        </>
      }
    >
      <div class="tools">
        <div class="choice" role="group" aria-label="Width of the icicle">
          <span class="dim">Width</span>
          {SIZES.map((one) => (
            <button
              key={one.key}
              type="button"
              class={one.key === size ? "chosen" : ""}
              aria-pressed={one.key === size}
              disabled={tree.why[one.key] !== ""}
              title={tree.why[one.key] ? `n/a: ${tree.why[one.key]}` : undefined}
              onClick={() => go({ size: one.key === "seconds" ? "" : one.key })}
            >
              {one.label}
            </button>
          ))}
        </div>
        <Scale tree={tree} />
      </div>
      <Crumbs zoomed={zoomed} place={place} />
      <div class="modules">
        <Icicle
          tree={tree}
          size={size}
          zoomed={zoomed}
          selected={selected}
          matches={matches}
          wordsOf={words}
          shareOf={(one) => colored(one, tree)}
          onZoom={zoom}
          onSelect={setSelected}
        />
        <Looked module={looked} tree={tree} />
      </div>
      <div class="tools">
        <Search what="modules" value={search} onChange={setSearch} found={matches?.size ?? 0} of={tree.all.length} />
        <label class="check">
          <input
            type="checkbox"
            checked={flat}
            onChange={(event) => {
              setFlat(event.currentTarget.checked);
              setSorting({
                key:
                  event.currentTarget.checked && tree.timed
                    ? "own_seconds"
                    : event.currentTarget.checked
                      ? "flops"
                      : "order",
                down: event.currentTarget.checked,
              });
            }}
          />
          flat list
        </label>
      </div>
      <Grid
        caption="Modules"
        columns={columns}
        rows={rows}
        keyOf={(one) => one.index}
        sorting={sorting}
        onSort={setSorting}
        selected={looked.index}
        onSelect={setSelected}
        onOpen={zoom}
        onUp={up}
        level={(one) => (flat ? 0 : one.depth - zoomed.depth)}
        {...(flat
          ? {}
          : {
              expanded: (one: Module) => (one.children.length ? isOpen(one, { folds, matches, tree, zoomed }) : null),
              onFold: (one: Module, open: boolean) => setFolds(new Map(folds).set(one, open)),
            })}
        rowClass={(one) => (matches !== null && !matches.has(one) ? "faded" : "")}
        height={520}
      />
    </Section>
  );

  function columnsOf(): Column<Module>[] {
    const whole = tree.root.total.seconds;
    const name: Column<Module> = {
      key: "order",
      label: "module",
      text: true,
      value: (one) => one.index,
      cell: (one) => (
        <NameCell
          module={one}
          indent={flat ? 0 : one.depth - zoomed.depth}
          whole={flat}
          href={hrefOf(place, { module: one.name })}
          onFold={flat || one.children.length === 0 ? null : (open) => setFolds((kept) => new Map(kept).set(one, open))}
          open={isOpen(one, { folds, matches, tree, zoomed })}
        />
      ),
    };
    const times: Column<Module>[] = tree.timed
      ? [
          {
            key: "seconds",
            label: "time",
            value: (one) => one.total.seconds,
            cell: (one) => (
              <ShareCell share={whole && one.total.seconds !== null ? one.total.seconds / whole : null}>
                {duration(one.total.seconds)}
              </ShareCell>
            ),
          },
          {
            key: "own_seconds",
            label: "own time",
            value: (one) => one.own.seconds,
            cell: (one) => duration(one.own.seconds),
          },
          { key: "forward", label: "forward", value: (one) => one.forwardSec, cell: (one) => duration(one.forwardSec) },
          {
            key: "backward",
            label: "backward",
            value: (one) => one.backwardSec,
            cell: (one) => duration(one.backwardSec),
          },
        ]
      : [];
    const rates: Column<Module>[] = tree.timed
      ? [
          {
            key: "achieved",
            label: "FLOP/s",
            value: (one) => one.achieved,
            cell: (one) => dash(one.achieved, (value) => si(value)),
          },
          {
            key: "share",
            label: "of peak",
            word: "share of peak",
            value: (one) => one.share,
            cell: (one) => dash(one.share, percent),
          },
        ]
      : [];
    return [
      name,
      ...times,
      ...(has("flops")
        ? [
            {
              key: "flops",
              label: "FLOPs",
              value: (one: Module) => one.total.flops,
              cell: (one: Module) => si(one.total.flops),
            },
            ...rates,
          ]
        : []),
      ...(has("bytes")
        ? [
            {
              key: "bytes",
              label: "bytes",
              value: (one: Module) => one.total.bytes,
              cell: (one: Module) => bytes(one.total.bytes),
            },
            {
              key: "intensity",
              label: "FLOPs a byte",
              value: (one: Module) => one.intensity,
              cell: (one: Module) => dash(one.intensity, (value) => plain(Number(value.toPrecision(3)))),
            },
          ]
        : []),
      ...(has("params")
        ? [
            {
              key: "params",
              label: "parameters",
              value: (one: Module) => one.total.params,
              cell: (one: Module) => si(one.total.params),
            },
          ]
        : []),
      ...(has("memory")
        ? [
            {
              key: "memory",
              label: "kept",
              value: (one: Module) => one.total.memory,
              cell: (one: Module) => dash(one.total.memory, bytes),
            },
          ]
        : []),
      ...(tree.all.some((one) => one.kernels !== null)
        ? [
            {
              key: "kernels",
              label: "kernels",
              value: kernelsOf,
              cell: (one: Module) => dash(kernelsOf(one), plain),
            },
          ]
        : []),
      { key: "calls", label: "calls", value: (one) => one.calls, cell: (one) => plain(one.calls) },
      ...(tree.all.some((one) => one.source !== null)
        ? [
            {
              key: "source",
              label: "forward is in",
              text: true,
              value: (one: Module) => one.source,
              cell: (one: Module) => (one.source ? <code title={one.source}>{one.source}</code> : "–"),
            },
          ]
        : []),
    ];
  }

  /** Whether some module says it. */
  function has(key: SizeKey): boolean {
    return tree.all.some((one) => one.total[key] !== null);
  }
}

function kernelsOf({ kernels }: Module): number | null {
  return kernels === null ? null : kernels.forward + (kernels.backward ?? 0);
}

function dash(value: number | null, show: (value: number) => string): string {
  return value === null ? "–" : show(value);
}

function sizeIn(place: Place, tree: ModuleTree): SizeKey {
  const asked = SIZES.find((one) => one.key === place["size"])?.key;
  if (asked && tree.why[asked] === "") return asked;
  return SIZES.find((one) => tree.why[one.key] === "")?.key ?? "seconds";
}

/** What colours a module: its share of the peak; without a peak its share of the fastest module's FLOP/s. */
function colored(module: Module, tree: ModuleTree): number | null {
  if (tree.knowsPeak) return module.share;
  return module.achieved !== null && tree.fastest > 0 ? module.achieved / tree.fastest : null;
}

function matching(tree: ModuleTree, search: string): ReadonlySet<Module> | null {
  const wanted = search.trim().toLowerCase().split(/\s+/).filter(Boolean);
  if (!wanted.length) return null;
  const words = searched(tree);
  return new Set(tree.all.filter((_, at) => wanted.every((word) => (words[at] as string).includes(word))));
}

const SEARCHED = new WeakMap<ModuleTree, string[]>();

/** Name and class of each module in lower case, made when somebody searches. */
function searched(tree: ModuleTree): string[] {
  const known = SEARCHED.get(tree);
  if (known) return known;
  const made = tree.all.map((one) => `${one.name} ${one.type}`.toLowerCase());
  SEARCHED.set(tree, made);
  return made;
}

interface Openness {
  folds: ReadonlyMap<Module, boolean>;
  matches: ReadonlySet<Module> | null;
  tree: ModuleTree;
  zoomed: Module;
}

const SMALL = 60;

/** What the reader folded stays so; else a small tree is open, a large one down to where layers begin to repeat. */
function isOpen(module: Module, { folds, matches, tree, zoomed }: Openness): boolean {
  const said = folds.get(module);
  if (said !== undefined) return said;
  if (matches !== null) return true;
  if (tree.all.length <= SMALL) return true;
  return module === zoomed || (module.depth - zoomed.depth < 2 && module.children.length <= 24);
}

interface Shown {
  matches: ReadonlySet<Module> | null;
  sorting: Sorting;
  columns: readonly Column<Module>[];
}

function treeRows(
  zoomed: Module,
  { matches, sorting, columns, isOpen }: Shown & { isOpen: (one: Module) => boolean },
): Module[] {
  const kept = matches === null ? null : new Set<Module>();
  for (const one of matches ?? []) {
    for (let above: Module | null = one; above !== null && !kept?.has(above); above = above.parent) kept?.add(above);
  }
  const rows: Module[] = [];
  const enter = (one: Module): void => {
    if (kept !== null && !kept.has(one)) return;
    rows.push(one);
    if (!isOpen(one)) return;
    const children = sorting.key === "order" && !sorting.down ? one.children : sorted(one.children, columns, sorting);
    children.forEach(enter);
  };
  enter(zoomed);
  return rows;
}

function flatRows(zoomed: Module, { matches, sorting, columns }: Shown): Module[] {
  const rows: Module[] = [];
  const enter = (one: Module): void => {
    if (matches === null || matches.has(one)) rows.push(one);
    one.children.forEach(enter);
  };
  enter(zoomed);
  return sorted(rows, columns, sorting);
}

function NameCell(props: {
  module: Module;
  indent: number;
  whole: boolean;
  href: string;
  open: boolean;
  onFold: ((open: boolean) => void) | null;
}): JSX.Element {
  const { module, onFold, open } = props;
  return (
    <span class="name-cell" style={{ paddingLeft: `${props.indent * 15}px` }}>
      {onFold ? (
        <button
          type="button"
          class="fold"
          tabIndex={-1}
          aria-label={`${open ? "Fold" : "Unfold"} ${module.name || module.label}`}
          onClick={(event) => {
            event.stopPropagation();
            onFold(!open);
          }}
        >
          {open ? "▾" : "▸"}
        </button>
      ) : (
        <span class="fold" />
      )}
      <a href={props.href} tabIndex={-1} title={`${module.name || module.label}: zoom in`}>
        {props.whole ? module.name || module.label : module.label}
      </a>
      {module.name === "" || !module.type ? null : <span class="dim kind">{module.type}</span>}
      {module.aliasOf !== null ? <span class="dim kind">= {module.aliasOf}</span> : null}
    </span>
  );
}

function Crumbs({ zoomed, place }: { zoomed: Module; place: Place }): JSX.Element {
  const path = pathTo(zoomed);
  return (
    <nav class="crumbs" aria-label="Path of the module">
      {path.map((one, at) => (
        <span key={one.index}>
          {at ? <span class="dim"> › </span> : null}
          {one === zoomed ? (
            <b aria-current="location">{one.label}</b>
          ) : (
            <a href={hrefOf(place, { module: one.name })}>{one.label}</a>
          )}
        </span>
      ))}
    </nav>
  );
}

function Scale({ tree }: { tree: ModuleTree }): JSX.Element | null {
  if (tree.timed === null || !tree.all.some((one) => one.achieved !== null)) return null;
  return (
    <div class="scale">
      <span class="dim">
        {tree.knowsPeak ? <Term word="share of peak">Share of peak</Term> : "FLOP/s, share of the fastest module"}
      </span>
      {STEPS.map((one) => (
        <span key={one.words} class="scale-step">
          <span class="swatch wide" style={{ background: one.fill }} aria-hidden="true" />
          {one.words}
        </span>
      ))}
      <span class="scale-step">
        <span class="swatch wide" style={{ background: "var(--no-flops)" }} aria-hidden="true" />
        no FLOPs
      </span>
    </div>
  );
}

function wordsOf(module: Module, size: SizeKey, tree: ModuleTree): string {
  const shown = SIZES.find((one) => one.key === size);
  const whole = tree.root.total[size];
  const value = module.total[size];
  const share = whole && value !== null ? `, ${percent(value / whole)} of the model` : "";
  return [
    `${module.name || module.label}${module.type ? ` (${module.type})` : ""}`,
    `${shown?.label}: ${shown?.show(value)}${share}`,
    ...(module.achieved !== null
      ? [`${si(module.achieved, "FLOP/s")}${module.share !== null ? `, ${percent(module.share)} of peak` : ""}`]
      : []),
  ].join("\n");
}

/** Everything that is known of the module that is looked at. */
function Looked({ module, tree }: { module: Module; tree: ModuleTree }): JSX.Element {
  const { total, own, phases, phaseShares } = module;
  const rows: [ComponentChildren, ComponentChildren][] = [];
  if (tree.timed) {
    const whole = tree.root.total.seconds;
    rows.push([
      <Term word="time" />,
      <>
        {duration(total.seconds)}
        {whole && total.seconds !== null ? <span class="dim"> {percent(total.seconds / whole, 1)}</span> : null}
      </>,
    ]);
    if (module.children.length) rows.push([<Term word="own time" />, duration(own.seconds)]);
    rows.push(["time forward", duration(module.forwardSec)], ["time backward", duration(module.backwardSec)]);
  }
  if (phases !== null) {
    rows.push(["FLOPs forward", si(phases.forward)], ["FLOPs backward", si(phases.backward)]);
    if (phases.recompute > 0) rows.push(["FLOPs recomputed", si(phases.recompute)]);
  }
  if (module.achieved !== null) rows.push(["FLOP/s", si(module.achieved, "FLOP/s")]);
  if (module.share !== null || phaseShares.forward !== null || phaseShares.backward !== null)
    rows.push([
      <Term word="share of peak" />,
      <>
        {percent(module.share)}
        {phaseShares.forward !== null || phaseShares.backward !== null ? (
          <span class="dim block">
            fwd {percent(phaseShares.forward, 1)}, bwd {percent(phaseShares.backward, 1)}
          </span>
        ) : null}
      </>,
    ]);
  if (total.bytes !== null) rows.push([<Term word="bytes" />, bytes(total.bytes)]);
  if (module.intensity !== null)
    rows.push([<Term word="FLOPs a byte" />, plain(Number(module.intensity.toPrecision(3)))]);
  if (total.params !== null)
    rows.push([
      "parameters",
      <>
        {plain(total.params)}
        {module.trainable !== total.params ? <span class="dim"> {plain(module.trainable)} trainable</span> : null}
      </>,
    ]);
  if (total.memory !== null) rows.push([<Term word="kept">kept by its forward</Term>, bytes(total.memory)]);
  if (module.kernels !== null)
    rows.push(["kernels", `${plain(module.kernels.forward)} forward, ${plain(module.kernels.backward)} backward`]);
  rows.push(["calls", plain(module.calls)]);
  if (module.source !== null) rows.push(["forward is in", <code>{module.source}</code>]);
  return (
    <aside class="looked" aria-label="The selected module">
      <h3>{module.name || module.label}</h3>
      <p class="dim">
        {module.type}
        {module.detail ? <code>{module.detail}</code> : null}
      </p>
      <dl>
        {rows.map(([term, figure], at) => (
          <div key={at}>
            <dt>{term}</dt>
            <dd>{figure}</dd>
          </div>
        ))}
      </dl>
    </aside>
  );
}
