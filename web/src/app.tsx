// The page: the run and window that the address names, section by section.

import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import type { Source } from "./data";
import type { Run, View } from "./document";
import { percent } from "./model/format";
import { moduleTree } from "./model/modules";
import { inOrder } from "./model/parts";
import { type Place, usePlace } from "./place";
import { MemoryOverTime } from "./sections/memory_curve";
import { Modules } from "./sections/modules";
import { Roofline } from "./sections/roofline";
import { StackedBar } from "./ui/bar";
import { DocumentSection, idOf, Section } from "./ui/section";
import { Strip } from "./ui/strip";
import { Tip } from "./ui/tip";
import { Colours, Pick, Top, useLater, usePromised } from "./ui/top";

/** Sections of the first screen; the others are drawn a frame later. */
const FIRST = 4;

export function App({ source }: { source: Source }): JSX.Element {
  const [shown, setShown] = useState(source.document);
  const [place, go] = usePlace();
  const { runs } = shown;
  const runAt = Math.max(
    0,
    runs.findIndex((one) => one.name === place["run"]),
  );
  const run = runs[runAt];
  const windows = run?.windows.length ?? 0;
  const windowAt = Math.min(windows - 1, Math.max(0, Number(place["window"] ?? windows - 1) || 0));
  const read = windows ? () => source.view(runAt, windowAt) : null;
  const [view, problem] = usePromised(read, [source, shown, runAt, windowAt]);
  const whole = useLater(view);
  const titles = view?.sections.map((one) => one.title) ?? [];
  return (
    <>
      <Top
        title={view?.title ?? "FLOPs profile"}
        where={view?.where ?? ""}
        sections={titles.map((title) => [idOf(title), title])}
      >
        <Pick
          label="Run"
          value={run?.name ?? ""}
          options={runs.map((one) => [one.name, one.name])}
          onPick={(name) => go({ run: name, window: "", module: "" })}
        />
        <Pick
          label="Step"
          value={String(windowAt)}
          options={(run?.windows ?? []).map((one, at) => [String(at), one.label])}
          onPick={(at) => go({ window: at })}
        />
        {source.refresh ? (
          <button type="button" onClick={() => void source.refresh?.().then(setShown)}>
            Reload
          </button>
        ) : (
          <Colours />
        )}
      </Top>
      <main aria-busy={view !== null && whole !== view}>
        {runs
          .flatMap((one) => one.problems.map((words) => (one.name ? `${one.name}: ${words}` : words)))
          .map((words) => (
            <p key={words} class="callout" role="alert">
              {words}
            </p>
          ))}
        {problem ? (
          <p class="callout" role="alert">
            This profile cannot be shown: {problem}
          </p>
        ) : null}
        {runs.length === 0 ? <p class="callout">There is no profile here yet.</p> : null}
        {view && run ? (
          <Sections view={view} whole={whole === view} place={place} go={go}>
            {windows > 1 ? <Windows run={run} at={windowAt} go={go} /> : null}
          </Sections>
        ) : null}
        <p class="note" id="provenance">
          Written by lightning-flops {shown.written_by}. The page contains Preact (MIT) and D3 (ISC); their licences are
          in its source.
        </p>
      </main>
      <Tip />
    </>
  );
}

function Sections(props: {
  view: View;
  whole: boolean;
  place: Place;
  go: (changes: Place) => void;
  children: JSX.Element | null;
}): JSX.Element {
  const { view, place, go } = props;
  const tree = useMemo(() => moduleTree(view), [view]);
  const picture = (name: string): JSX.Element | null => {
    if (name === "modules") return tree ? <Modules tree={tree} place={place} go={go} /> : null;
    if (name === "roofline") return view.roofline ? <Roofline roof={view.roofline} tree={tree} /> : null;
    if (name === "curves") return <MemoryOverTime curves={view.curves} />;
    return view.steps ? <Steps steps={view.steps} /> : null;
  };
  const shown = props.whole ? view.sections : view.sections.slice(0, FIRST);
  return (
    <>
      <Section id="summary" title="Summary">
        {view.summary.map((line) => (
          <p key={line}>{line}</p>
        ))}
        {view.parts.length ? <StackedBar parts={view.parts} /> : null}
      </Section>
      {props.children}
      {shown.map((one) => (
        <DocumentSection key={one.title} section={one} picture={picture} />
      ))}
    </>
  );
}

function Steps({ steps }: { steps: NonNullable<View["steps"]> }): JSX.Element {
  const items = steps.items.map(([label, seconds]) => ({
    label,
    parts: Object.fromEntries(steps.names.map((name, at) => [name, seconds[at] ?? 0])),
    total: seconds.reduce((sum, one) => sum + one, 0),
  }));
  return <Strip caption="Timed steps" axis="step" names={inOrder(steps.names)} items={items} />;
}

/** The windows of a run side by side, to be chosen. */
function Windows(props: { run: Run; at: number; go: (changes: Place) => void }): JSX.Element | null {
  const timed = props.run.windows.flatMap((one, window) => (one.global_step_sec ? [{ one, window }] : []));
  if (timed.length < 2) return null;
  return (
    <Section id="windows" title="Windows" note="This run was profiled several times; choose one to see it whole.">
      <Strip
        caption="Windows of the run"
        axis="step"
        names={inOrder(new Set(timed.flatMap(({ one }) => Object.keys(one.parts_sec ?? {}))))}
        items={timed.map(({ one }) => ({
          label: `step ${one.label}`,
          parts: one.parts_sec ?? {},
          total: one.global_step_sec ?? 0,
          words: [`MFU ${percent(one.mfu)}`],
        }))}
        selected={timed.findIndex(({ window }) => window === props.at)}
        onSelect={(chosen) => props.go({ window: String(timed[chosen]?.window ?? 0) })}
      />
    </Section>
  );
}
