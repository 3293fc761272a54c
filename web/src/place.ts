// Where in the page the reader is: it stands in the address, so that it can be kept, sent and gone back from.

import { useEffect, useState } from "preact/hooks";

export type Place = Readonly<Record<string, string>>;

export function readPlace(hash: string): Place {
  return Object.fromEntries(new URLSearchParams(hash.replace(/^#/, "")));
}

/** The address of *place* with *changes*; an empty text takes a key out. */
export function hrefOf(place: Place, changes: Place): string {
  const kept = Object.entries({ ...place, ...changes }).filter(([, value]) => value !== "");
  return `#${new URLSearchParams(kept)}`;
}

/** The place, and a function that goes to another one. */
export function usePlace(): [Place, (changes: Place) => void] {
  const [place, setPlace] = useState(() => readPlace(location.hash));
  useEffect(() => {
    const follow = (): void => setPlace(readPlace(location.hash));
    const onClick = (event: MouseEvent): void => {
      if (event.defaultPrevented || event.button !== 0 || event.ctrlKey || event.metaKey || event.shiftKey) return;
      const link = event.target instanceof Element ? event.target.closest("a") : null;
      const href = link?.getAttribute("href") ?? "";
      if (!href.startsWith("#")) return;
      event.preventDefault();
      history.pushState(null, "", `${location.pathname}${location.search}${href}`);
      follow();
    };
    addEventListener("hashchange", follow);
    addEventListener("popstate", follow);
    addEventListener("click", onClick);
    return () => {
      removeEventListener("hashchange", follow);
      removeEventListener("popstate", follow);
      removeEventListener("click", onClick);
    };
  }, []);
  const go = (changes: Place): void => {
    const href = hrefOf(readPlace(location.hash), changes);
    if (href === (location.hash || "#")) return;
    // With the path: in TensorBoard's frame an address alone is one below the plugin's files.
    history.pushState(null, "", `${location.pathname}${location.search}${href}`);
    setPlace(readPlace(location.hash));
  };
  return [place, go];
}
