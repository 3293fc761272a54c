// What the first screen of a page has, whatever it is of: figures as cards, and the first advice.

import type { ComponentChildren, JSX } from "preact";
import { counted } from "../model/format";
import type { Advice } from "../schema";
import { Term } from "./tip";

export interface Card {
  word: string;
  figure: string;
  below?: ComponentChildren;
  /** Why there is no figure. */
  why?: string | undefined;
}

export function Cards({ cards }: { cards: readonly Card[] }): JSX.Element {
  return (
    <ul class="cards">
      {cards.map((one) => (
        <li key={one.word} class="card">
          <span class="card-word">
            <Term word={one.word} />
          </span>
          <span class={`card-figure${one.figure === "n/a" ? " missing" : ""}`}>{one.figure}</span>
          <span class="card-below">{one.figure === "n/a" ? (one.why ?? "") : one.below}</span>
        </li>
      ))}
    </ul>
  );
}

/** The first pieces of advice, and how *more* there are. */
export function FirstAdvice({ first, more }: { first: readonly Advice[]; more: number }): JSX.Element {
  return (
    <div>
      <h3>Try first</h3>
      {first.length === 0 ? <p class="dim">Nothing that was measured is over its threshold.</p> : null}
      <ol class="first-advice">
        {first.map((one) => (
          <li key={one.rule}>
            <b>{one.evidence}</b> {one.action}
          </li>
        ))}
      </ol>
      {more > 0 ? <p class="dim">and {counted(more, "more piece")} of advice below</p> : null}
    </div>
  );
}
