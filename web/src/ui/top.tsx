// What stands above every page: what it is of, what can be chosen, and where its parts are.

import type { ComponentChildren, JSX } from "preact";
import { useEffect, useLayoutEffect, useState } from "preact/hooks";

export function Top(props: {
  title: string;
  where: string;
  /** Name and heading of each part of the page. */
  sections?: readonly (readonly [id: string, title: string])[];
  children?: ComponentChildren;
}): JSX.Element {
  return (
    <>
      <a class="skip" href="#summary" onClick={(event) => jump(event, "summary")}>
        To the summary
      </a>
      <header class="top">
        <div class="title">
          <h1>{props.title}</h1>
          <p class="where">{props.where}</p>
        </div>
        <div class="pickers">{props.children}</div>
        {props.sections ? (
          <nav class="nav" aria-label="Parts of the page">
            {props.sections.map(([id, title]) => (
              <a key={id} href={`#${id}`} onClick={(event) => jump(event, id)}>
                {title}
              </a>
            ))}
          </nav>
        ) : null}
      </header>
    </>
  );
}

/** One of several, to be chosen; nothing where there is no choice. */
export function Pick(props: {
  label: string;
  value: string;
  options: readonly (readonly [value: string, words: string])[];
  onPick: (value: string) => void;
}): JSX.Element | null {
  if (props.options.length < 2) return null;
  return (
    <label>
      <span class="dim">{props.label}</span>
      <select
        aria-label={props.label}
        value={props.value}
        onChange={(event) => props.onPick(event.currentTarget.value)}
      >
        {props.options.map(([value, words]) => (
          <option key={value} value={value}>
            {words}
          </option>
        ))}
      </select>
    </label>
  );
}

/** Light, dark, or as the system has it; TensorBoard has a choice of its own. */
export function Colours(): JSX.Element {
  const [theme, setTheme] = useState("");
  useLayoutEffect(() => {
    const dark = matchMedia("(prefers-color-scheme: dark)");
    const follow = (): void => {
      document.documentElement.dataset["theme"] = theme || (dark.matches ? "dark" : "light");
    };
    follow();
    dark.addEventListener("change", follow);
    return () => dark.removeEventListener("change", follow);
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
export function jump(event: Event, id: string): void {
  event.preventDefault();
  const target = document.getElementById(id);
  target?.scrollIntoView({ block: "start" });
  target?.focus({ preventScroll: true });
}

/** *value* in the frame after the first screen: what is further down is drawn then. */
export function useLater<Value>(value: Value | null): Value | null {
  const [later, setLater] = useState<Value | null>(null);
  useEffect(() => {
    if (!value) return;
    performance.mark("shown");
    const frame = requestAnimationFrame(() => setTimeout(() => setLater(value)));
    return () => cancelAnimationFrame(frame);
  }, [value]);
  useEffect(() => {
    if (later) performance.mark("whole");
  }, [later]);
  return later;
}

/** What *read* promises, or why it cannot be had; asked again when one of *keys* changes. */
export function usePromised<Value>(
  read: (() => Promise<Value>) | null,
  keys: readonly unknown[],
): [Value | null, string] {
  const [shown, setShown] = useState<[Value | null, string]>([null, ""]);
  useEffect(() => {
    if (read === null) {
      setShown([null, ""]);
      return;
    }
    let current = true;
    read().then(
      (value) => {
        if (current) setShown([value, ""]);
      },
      (error: unknown) => {
        if (current) setShown([null, error instanceof Error ? error.message : String(error)]);
      },
    );
    return () => {
      current = false;
    };
  }, keys);
  return shown;
}
