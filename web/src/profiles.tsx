// The page of profiles: the run and window that the address names, section by section.

import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import type { ProfilesDocument, Source } from "./data";
import { plain } from "./model/format";
import { type ModuleTree, moduleTree } from "./model/modules";
import { profileChart } from "./model/roofline";
import { usePlace } from "./place";
import type { Profile } from "./schema";
import { Advice } from "./sections/advice";
import { Answer } from "./sections/answer";
import { Budget } from "./sections/budget";
import { Memory } from "./sections/memory";
import { Modules } from "./sections/modules";
import { Kernels, Operators } from "./sections/operators";
import { Provenance } from "./sections/provenance";
import { Ranks } from "./sections/ranks";
import { Roofline } from "./sections/roofline";
import { Steps } from "./sections/steps";
import { Windows } from "./sections/windows";
import { Term, Tip } from "./ui/tip";
import { Colours, Pick, Top, useLater, usePromised } from "./ui/top";

export function Profiles({ source, first }: { source: Source; first: ProfilesDocument }): JSX.Element {
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
  const windows = run?.windows.length ?? 0;
  const [profile, problem] = usePromised(windows ? () => source.profile(runAt, windowAt) : null, [
    source,
    runAt,
    windowAt,
    windows,
  ]);
  const tree = useMemo(() => (profile ? moduleTree(profile) : null), [profile]);
  const whole = useLater(profile);

  // What depends on the profile alone is not drawn again when the place changes.
  const ofProfile = useMemo(
    () =>
      profile ? (
        <>
          <Roofline {...profileChart(profile, tree)} note={rooflineNote(profile)} />
          <Operators profile={profile} />
          {profile.traced?.tables ? <Kernels tables={profile.traced.tables} of="traced step" /> : null}
          <Steps profile={profile} />
          <Ranks profile={profile} />
          <Memory profile={profile} />
        </>
      ) : null,
    [profile, tree],
  );
  const sections = profile ? namesOfSections(profile, windows) : [];
  return (
    <>
      <Top title={tree?.root.type || "FLOPs profile"} where={profile ? whereOf(profile) : ""} sections={sections}>
        <Pick
          label="Run"
          value={run?.name ?? ""}
          options={shown.runs.map((one) => [one.name, one.name])}
          onPick={(name) => go({ run: name, window: "", module: "" })}
        />
        <Pick
          label="Step"
          value={String(windowAt)}
          options={(run?.windows ?? []).map((one, at) => [String(at), plain(one.profile_step)])}
          onPick={(at) => go({ window: at })}
        />
        {source.refresh ? (
          <button type="button" onClick={() => void source.refresh?.().then((fresh) => setShown(fresh))}>
            Reload
          </button>
        ) : (
          <Colours />
        )}
      </Top>
      <main aria-busy={profile !== null && whole !== profile}>
        {(run?.problems ?? []).map((one) => (
          <p key={one} class="callout" role="alert">
            {one}
          </p>
        ))}
        {problem ? (
          <p class="callout" role="alert">
            This profile cannot be shown: {problem}
          </p>
        ) : null}
        {shown.runs.length === 0 ? <p class="callout">There is no profile here yet.</p> : null}
        {profile && run && figures ? (
          <>
            <Answer profile={profile} figures={figures} tree={tree} place={place} />
            <Budget profile={profile} />
            {tree ? <Modules tree={tree} note={modulesNote(tree)} place={place} go={go} /> : null}
            {whole === profile ? ofProfile : null}
            <Windows run={run} at={windowAt} place={place} go={go} />
            <Advice advice={profile.advice} />
            <Provenance profile={profile} writtenBy={shown.written_by} />
          </>
        ) : null}
      </main>
      <Tip />
    </>
  );
}

function rooflineNote(profile: Profile): JSX.Element {
  return (
    <>
      FLOPs and bytes are of the <Term word="counted step" />, seconds of the <Term word="traced step" />.
      {profile.memory_bytes_per_sec === null
        ? " The memory bandwidth of this device is not known (set memory_bytes_per_sec), so the roof is the peak alone."
        : ""}
    </>
  );
}

function modulesNote(tree: ModuleTree): JSX.Element {
  return (
    <>
      FLOPs and bytes are of the <Term word="counted step" />
      {tree.timed ? (
        <>
          , times of the <Term word="traced step" />
          {tree.timed === "forward" ? " (forward alone)" : ""}
        </>
      ) : null}
      .
    </>
  );
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
    ["memory", "Memory", profile.memory !== null || (tables?.memory_curves?.length ?? 0) > 0],
    ["windows", "Windows", windows > 1],
    ["advice", "Advice", true],
    ["provenance", "Provenance", true],
  ];
  return all.filter(([, , is]) => is).map(([id, title]) => [id, title]);
}
