// One whole, divided: parts that add up, each with its name and its share.

import type { JSX } from "preact";
import { duration, percent } from "../model/format";
import { partColor } from "../model/parts";
import { hush, say } from "./tip";

export function StackedBar({ parts }: { parts: readonly (readonly [name: string, seconds: number])[] }): JSX.Element {
  const whole = parts.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
  const spoken = parts.map(([name, seconds]) => `${name} ${percent(seconds / whole)}`).join(", ");
  return (
    <figure class="bar-figure">
      <div class="bar" role="img" aria-label={`Parts of a step of ${duration(whole)}: ${spoken}`}>
        {parts.map(([name, seconds]) => (
          <div
            key={name}
            class="bar-part"
            style={{ flexGrow: seconds / whole, background: partColor(name) }}
            onMouseMove={(event) =>
              say(`${name}: ${duration(seconds)}, ${percent(seconds / whole)} of the step`, event)
            }
            onMouseLeave={hush}
          >
            {seconds / whole > 0.075 ? <span class="bar-words">{percent(seconds / whole)}</span> : null}
          </div>
        ))}
      </div>
      <ul class="legend">
        {parts.map(([name, seconds]) => (
          <li key={name}>
            <span class="swatch" style={{ background: partColor(name) }} aria-hidden="true" />
            {name} <b>{duration(seconds)}</b> <span class="dim">{percent(seconds / whole)}</span>
          </li>
        ))}
      </ul>
    </figure>
  );
}
