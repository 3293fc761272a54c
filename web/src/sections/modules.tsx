// The icicle of the modules, and what is known of the one that is looked at.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { bytes, duration, percent, plain, si } from "../model/format";
import { type Module, type ModuleTree, pathTo, SIZE_KEYS, type SizeKey } from "../model/modules";
import { hrefOf, type Place } from "../place";
import { Choice } from "../ui/choice";
import { STEPS } from "../ui/colors";
import { Icicle } from "../ui/icicle";

const SIZES: Record<SizeKey, { label: string; show: (value: number | null) => string }> = {
  seconds: { label: "Time", show: duration },
  flops: { label: "FLOPs", show: (value) => si(value, "FLOPs") },
  bytes: { label: "Bytes", show: bytes },
  memory: { label: "Memory at the peak", show: bytes },
  params: { label: "Parameters", show: (value) => si(value) },
};

export function Modules(props: { tree: ModuleTree; place: Place; go: (changes: Place) => void }): JSX.Element {
  const { tree, place, go } = props;
  const has = (key: SizeKey): boolean => tree.all.some((one) => (one.total[key] ?? 0) > 0);
  const size = [place["size"] as SizeKey, ...SIZE_KEYS].find((one) => SIZE_KEYS.includes(one) && has(one)) ?? "flops";
  const zoomed = tree.byName.get(place["module"] ?? "") ?? tree.root;
  const [selected, setSelected] = useState<Module | null>(null);
  useEffect(() => setSelected(null), [tree]);
  const zoom = (module: Module): void => {
    setSelected(module);
    go({ module: module.name });
  };
  return (
    <>
      <div class="tools">
        <Choice
          label="Width of the icicle"
          word="Width"
          options={SIZE_KEYS.filter(has).map((key) => [key, SIZES[key].label])}
          chosen={size}
          onPick={(key) => go({ size: key })}
        />
        <Scale tree={tree} />
      </div>
      <Crumbs zoomed={zoomed} place={place} />
      <div class="modules">
        <Icicle
          tree={tree}
          size={size}
          zoomed={zoomed}
          selected={selected}
          wordsOf={(module) => wordsOf(module, size, tree)}
          shareOf={(one) => colored(one, tree)}
          onZoom={zoom}
          onSelect={setSelected}
        />
        <Looked module={selected ?? zoomed} />
      </div>
    </>
  );
}

/** What colours a module: its share of the peak; without a peak its share of the fastest module's FLOP/s. */
function colored(module: Module, tree: ModuleTree): number | null {
  if (tree.knowsPeak) return module.share;
  return module.achieved !== null && tree.fastest > 0 ? module.achieved / tree.fastest : null;
}

function Crumbs({ zoomed, place }: { zoomed: Module; place: Place }): JSX.Element {
  return (
    <nav class="crumbs" aria-label="Path of the module">
      {pathTo(zoomed).map((one, at) => (
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
  if (!tree.all.some((one) => one.achieved !== null)) return null;
  return (
    <div class="scale">
      <span class="dim">{tree.knowsPeak ? "Share of peak" : "FLOP/s, share of the fastest module"}</span>
      {[...STEPS, { fill: "var(--no-flops)", words: "no FLOPs" }].map((one) => (
        <span key={one.words} class="scale-step">
          <span class="swatch wide" style={{ background: one.fill }} aria-hidden="true" />
          {one.words}
        </span>
      ))}
    </div>
  );
}

function wordsOf(module: Module, size: SizeKey, tree: ModuleTree): string {
  const whole = tree.root.total[size];
  const value = module.total[size];
  const share = whole && value !== null ? `, ${percent(value / whole)} of the model` : "";
  const rate = module.achieved === null ? [] : [`${si(module.achieved, "FLOP/s")}${ofPeak(module)}`];
  const head = `${module.name || module.label}${module.type ? ` (${module.type})` : ""}`;
  return [head, `${SIZES[size].label}: ${SIZES[size].show(value)}${share}`, ...rate].join("\n");
}

function ofPeak(module: Module): string {
  return module.share === null ? "" : `, ${percent(module.share)} of peak`;
}

/** Everything that is known of the module that is looked at. */
function Looked({ module }: { module: Module }): JSX.Element {
  const rows: [string, string][] = [];
  for (const key of SIZE_KEYS) {
    const { label, show } = SIZES[key];
    if (module.total[key] !== null) rows.push([label, show(module.total[key])]);
    if (module.own[key] !== null && module.children.length) rows.push([`${label}, self`, show(module.own[key])]);
  }
  if (module.achieved !== null) rows.push(["FLOP/s", `${si(module.achieved)}${ofPeak(module)}`]);
  rows.push(["Calls", plain(module.calls)]);
  return (
    <aside class="looked" aria-label="The selected module">
      <h3>{module.name || module.label}</h3>
      <p class="dim">
        {module.type}
        {module.detail ? <code>{module.detail}</code> : null}
      </p>
      <dl>
        {rows.map(([term, figure]) => (
          <div key={term}>
            <dt>{term}</dt>
            <dd>{figure}</dd>
          </div>
        ))}
      </dl>
    </aside>
  );
}
