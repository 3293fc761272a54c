import type { JSX } from "preact";

/** One of several, each a button. */
export function Choice<Key extends string>(props: {
  label: string;
  /** Stands before the buttons. */
  word?: string;
  options: readonly (readonly [key: Key, words: string])[];
  chosen: Key;
  onPick: (key: Key) => void;
}): JSX.Element {
  return (
    <div class="choice" role="group" aria-label={props.label}>
      {props.word ? <span class="dim">{props.word}</span> : null}
      {props.options.map(([key, words]) => (
        <button
          key={key}
          type="button"
          class={key === props.chosen ? "chosen" : ""}
          aria-pressed={key === props.chosen}
          onClick={() => props.onPick(key)}
        >
          {words}
        </button>
      ))}
    </div>
  );
}
