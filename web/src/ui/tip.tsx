// One tip for the whole page: what is under the pointer, or has the focus, says its words there.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";

interface Shown {
  text: string;
  x: number;
  y: number;
}

let show: (shown: Shown | null) => void = () => {};

/** Say *text* beside the pointer, or beside an element; lines are apart by line breaks. */
export function say(text: string, at: MouseEvent | Element): void {
  if (at instanceof Element) {
    const box = at.getBoundingClientRect();
    show({ text, x: box.left, y: box.bottom + 6 });
  } else {
    show({ text, x: at.clientX + 14, y: at.clientY + 16 });
  }
}

export function hush(): void {
  show(null);
}

export function Tip(): JSX.Element {
  const [shown, setShown] = useState<Shown | null>(null);
  useEffect(() => {
    show = setShown;
    const onKey = (event: KeyboardEvent): void => {
      if (event.key === "Escape") setShown(null);
    };
    addEventListener("keydown", onKey);
    addEventListener("scroll", hush, { passive: true, capture: true });
    return () => {
      show = () => {};
      removeEventListener("keydown", onKey);
      removeEventListener("scroll", hush, { capture: true });
    };
  }, []);
  const width = 340;
  const left = shown ? Math.max(8, Math.min(shown.x, innerWidth - width - 12)) : 0;
  const high = shown !== null && shown.y > innerHeight - 150;
  const place = shown
    ? high
      ? { left, bottom: innerHeight - shown.y + 24, maxWidth: width }
      : { left, top: shown.y, maxWidth: width }
    : {};
  return (
    <div id="tip" class="tip" role="tooltip" hidden={shown === null} style={place}>
      {shown?.text.split("\n").map((line, at) => (
        <div key={at} class={at ? "" : "tip-first"}>
          {line}
        </div>
      ))}
    </div>
  );
}
