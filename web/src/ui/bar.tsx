// One whole, divided: parts that add up, each with its name and its share.

import type { JSX } from "preact";
import { definitionOf } from "../definitions";
import { duration, percent } from "../model/format";
import { AsTable } from "./section";
import { hush, say, Term } from "./tip";

export interface Part {
  key: string;
  label: string;
  seconds: number;
  color: string;
  /** More to say of it, a line each. */
  words?: readonly string[];
}

/** *whole* seconds as a bar of *parts*; the parts below zero are in the table alone. */
export function StackedBar(props: {
  parts: readonly Part[];
  whole: number;
  caption: string;
  table?: boolean;
}): JSX.Element {
  const { parts, whole } = props;
  const drawn = parts.filter((one) => one.seconds > 0);
  const spoken = drawn.map((one) => `${one.label} ${percent(one.seconds / whole, 1)}`).join(", ");
  return (
    <figure class="bar-figure">
      <div class="bar" role="img" aria-label={`${props.caption}: ${spoken}`}>
        {drawn.map((one) => {
          const share = one.seconds / whole;
          const meaning = definitionOf(one.label);
          const lines = [
            `${one.label}: ${duration(one.seconds)}, ${percent(share)} of the step`,
            ...(one.words ?? []),
            ...(meaning ? [meaning] : []),
          ];
          return (
            <div
              key={one.key}
              class="bar-part"
              style={{ flexGrow: one.seconds / whole, background: one.color }}
              onMouseMove={(event) => say(lines.join("\n"), event)}
              onMouseLeave={hush}
            >
              {share > 0.075 ? <span class="bar-words">{percent(share, 1)}</span> : null}
            </div>
          );
        })}
      </div>
      <ul class="legend">
        {drawn.map((one) => (
          <li key={one.key}>
            <span class="swatch" style={{ background: one.color }} aria-hidden="true" />
            <Term word={one.label} /> <b>{duration(one.seconds)}</b>{" "}
            <span class="dim">{percent(one.seconds / whole, 1)}</span>
          </li>
        ))}
      </ul>
      {props.table ? (
        <AsTable
          caption={`${props.caption}, as a table`}
          head={["part", "time", "share"]}
          rows={parts.map((one) => [one.label, duration(one.seconds), percent(one.seconds / whole)])}
        />
      ) : null}
    </figure>
  );
}
