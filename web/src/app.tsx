// The page: the run and window that the address names, section by section.

import type { JSX } from "preact";
import { useEffect, useMemo, useState } from "preact/hooks";
import type { ProfilesDocument, Source } from "./data";
import { plain } from "./model/format";
import { moduleTree } from "./model/modules";
import { usePlace } from "./place";
import type { Profile } from "./schema";
import { Advice } from "./sections/advice";
import { Answer } from "./sections/answer";
import { Budget } from "./sections/budget";
import { Comparison } from "./sections/comparison";
import { Memory } from "./sections/memory";
import { Modules } from "./sections/modules";
import { Kernels, Operators } from "./sections/operators";
import { Provenance } from "./sections/provenance";
import { Ranks } from "./sections/ranks";
import { Roofline } from "./sections/roofline";
import { Steps } from "./sections/steps";
import { Windows } from "./sections/windows";
import { Tip } from "./ui/tip";

export function App({ source }: { source: Source }): JSX.Element {
  const { document } = source;
  switch (document.kind) {
    case "profiles":
      return <Profiles source={source} first={document} />;
    case "comparison":
      return <Comparison source={source} document={document} />;
  }
}

function Profiles({ source, first }: { source: Source; first: ProfilesDocument }): JSX.Element {
  const [shown, setShown] = useState(first);
  const [place, go] = usePlace();
  const runAt = Math.max(
    0,
    shown.runs.findIndex((one) => one.name === place["run"]),
  );
  const run = shown.runs[runAt];
  const last = (run?.windows.length ?? 1) - 1;
  const windowAt = Math.min(last, Math.max(0, Number(place["window"] ?? last) || 0));
  const figures = run?.windows[windowAt];
  const [profile, problem] = useProfile(source, runAt, windowAt, run?.windows.length ?? 0);
  const tree = useMemo(() => (profile ? moduleTree(profile) : null), [profile]);

  // The first screen comes first: what is further down is drawn in the frame after it.
  const [whole, setWhole] = useState<Profile | null>(null);
  useEffect(() => {
    if (!profile) return;
    performance.mark("shown");
    const frame = requestAnimationFrame(() => setTimeout(() => setWhole(profile)));
    return () => cancelAnimationFrame(frame);
  }, [profile]);
  useEffect(() => {
    if (whole) performance.mark("whole");
  }, [whole]);

  // What depends on the profile alone is not drawn again when the place changes.
  const ofProfile = useMemo(
    () =>
      profile ? (
        <>
          <Roofline profile={profile} tree={tree} />
          <Operators profile={profile} />
          <Kernels profile={profile} />
          <Steps profile={profile} />
          <Ranks profile={profile} />
          <Memory profile={profile} />
        </>
      ) : null,
    [profile, tree],
  );
  const sections = profile ? namesOfSections(profile, run?.windows.length ?? 0) : [];
  return (
    <>
      <a class="skip" href="#answer" onClick={(event) => jump(event, "answer")}>
        To the answer
      </a>
      <header class="top">
        <div class="title">
          <h1>{tree?.root.profile.type_name || "FLOPs profile"}</h1>
          <p class="where">{profile ? whereOf(profile) : ""}</p>
        </div>
        <div class="pickers">
          {shown.runs.length > 1 ? (
            <label>
              <span class="dim">Run</span>
              <select
                aria-label="Run"
                value={run?.name}
                onChange={(event) => go({ run: event.currentTarget.value, window: "", module: "" })}
              >
                {shown.runs.map((one) => (
                  <option key={one.name} value={one.name}>
                    {one.name}
                  </option>
                ))}
              </select>
            </label>
          ) : null}
          {(run?.windows.length ?? 0) > 1 ? (
            <label>
              <span class="dim">Step</span>
              <select
                aria-label="Step"
                value={String(windowAt)}
                onChange={(event) => go({ window: event.currentTarget.value })}
              >
                {run?.windows.map((one, at) => (
                  <option key={at} value={String(at)}>
                    {plain(one.profile_step)}
                  </option>
                ))}
              </select>
            </label>
          ) : null}
          {source.refresh ? (
            <button type="button" onClick={() => void source.refresh?.().then((fresh) => setShown(fresh))}>
              Reload
            </button>
          ) : null}
          {source.refresh ? null : <Colours />}
        </div>
        <nav class="nav" aria-label="Parts of the page">
          {sections.map(([id, title]) => (
            <a key={id} href={`#${id}`} onClick={(event) => jump(event, id)}>
              {title}
            </a>
          ))}
        </nav>
      </header>
      <main aria-busy={profile !== null && whole !== profile}>
        {(run?.problems ?? []).map((one) => (
          <p key={one} class="callout" role="alert">
            {one}
          </p>
        ))}
        {figures?.page ? (
          <p class="callout" role="status">
            Step {plain(figures.profile_step)} is on a page of its own, beside this one:{" "}
            <a href={`./${encodeURIComponent(figures.page)}`}>{figures.page}</a>
          </p>
        ) : problem ? (
          <p class="callout" role="alert">
            This profile cannot be shown: {problem}
          </p>
        ) : null}
        {shown.runs.length === 0 ? <p class="callout">There is no profile here yet.</p> : null}
        {run && figures?.page ? <Windows run={run} at={windowAt} place={place} go={go} /> : null}
        {profile && run && figures && !figures.page ? (
          <>
            <Answer profile={profile} figures={figures} tree={tree} place={place} />
            <Budget profile={profile} />
            {tree ? <Modules profile={profile} tree={tree} place={place} go={go} /> : null}
            {whole === profile ? ofProfile : null}
            <Windows run={run} at={windowAt} place={place} go={go} />
            <Advice profile={profile} />
            <Provenance profile={profile} writtenBy={shown.written_by} />
          </>
        ) : null}
      </main>
      <Tip />
    </>
  );
}

/** Light, dark, or as the system has it; TensorBoard has a choice of its own. */
function Colours(): JSX.Element {
  const [theme, setTheme] = useState("");
  useEffect(() => {
    if (theme) document.documentElement.dataset["theme"] = theme;
    else delete document.documentElement.dataset["theme"];
  }, [theme]);
  return (
    <select value={theme} onChange={(event) => setTheme(event.currentTarget.value)} aria-label="Colours">
      <option value="">System colours</option>
      <option value="light">Light</option>
      <option value="dark">Dark</option>
    </select>
  );
}

/** Go to a part of the page without losing the place that the address keeps. */
function jump(event: Event, id: string): void {
  event.preventDefault();
  const target = document.getElementById(id);
  target?.scrollIntoView({ block: "start" });
  target?.focus({ preventScroll: true });
}

function useProfile(source: Source, run: number, window: number, windows: number): [Profile | null, string] {
  const [shown, setShown] = useState<[Profile | null, string]>([null, ""]);
  useEffect(() => {
    if (windows === 0) {
      setShown([null, ""]);
      return;
    }
    let current = true;
    source.profile(run, window).then(
      (profile) => {
        if (current) setShown([profile, ""]);
      },
      (error: unknown) => {
        if (current) setShown([null, error instanceof Error ? error.message : String(error)]);
      },
    );
    return () => {
      current = false;
    };
  }, [source, run, window, windows]);
  return shown;
}

function whereOf(profile: Profile): string {
  const { context } = profile;
  return [
    `${context.device_name || "unknown device"}${context.device_type === "cpu" ? " (cpu)" : ""}`,
    context.precision,
    context.world_size > 1 ? `${plain(context.world_size)} ranks` : "",
    context.micro_batch_size ? `batch ${plain(context.micro_batch_size)}` : "",
    context.loop === "training" ? "" : `${context.loop} loop`,
    `step ${plain(profile.profile_step)} counted`,
  ]
    .filter(Boolean)
    .join(" · ");
}

function namesOfSections(profile: Profile, windows: number): [string, string][] {
  const tables = profile.traced?.tables;
  const all: [string, string, boolean][] = [
    ["answer", "Answer", true],
    ["budget", "Budget", profile.budget !== null],
    ["modules", "Modules", profile.modules.length > 0],
    ["roofline", "Roofline", profile.traced?.like_counted === true && profile.modules.length > 0],
    ["operators", "Operators", profile.operators.length > 0],
    ["kernels", "Kernels", (tables?.kernels?.length ?? 0) > 0],
    ["steps", "Steps", profile.timing !== null],
    ["ranks", "Ranks", profile.ranks !== null],
    ["memory", "Memory", profile.memory !== null],
    ["windows", "Windows", windows > 1],
    ["advice", "Advice", true],
    ["provenance", "Provenance", true],
  ];
  return all.filter(([, , is]) => is).map(([id, title]) => [id, title]);
}
