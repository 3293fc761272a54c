import type { ComponentChildren, JSX } from "preact";

/** A part of the page with its heading; *note* says what the figures are of. */
export function Section(props: {
  id: string;
  title: string;
  note?: ComponentChildren;
  children: ComponentChildren;
}): JSX.Element {
  return (
    <section id={props.id} class="section" aria-labelledby={`${props.id}-title`} tabIndex={-1}>
      <header class="section-head">
        <h2 id={`${props.id}-title`}>{props.title}</h2>
        {props.note ? <p class="note">{props.note}</p> : null}
      </header>
      {props.children}
    </section>
  );
}

/** The figures behind a picture, as a table. */
export function AsTable(props: {
  caption: string;
  head: readonly ComponentChildren[];
  rows: readonly (readonly ComponentChildren[])[];
  open?: boolean;
}): JSX.Element {
  return (
    <details class="as-table" open={props.open ?? false}>
      <summary>{props.caption}</summary>
      <PlainTable {...props} />
    </details>
  );
}

/** A short table: the first column is text, the others are figures. */
export function PlainTable(props: {
  caption: string;
  head: readonly ComponentChildren[];
  rows: readonly (readonly ComponentChildren[])[];
  text?: readonly number[];
}): JSX.Element {
  const kind = (column: number): string => ((props.text ?? [0]).includes(column) ? "text" : "figure");
  return (
    <div class="scroll-x">
      <table class="plain">
        <caption class="unseen">{props.caption}</caption>
        <thead>
          <tr>
            {props.head.map((one, column) => (
              <th key={column} scope="col" class={kind(column)}>
                {one}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {props.rows.map((row, at) => (
            <tr key={at}>
              {row.map((one, column) => (
                <td key={column} class={kind(column)}>
                  {one}
                </td>
              ))}
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** A share of one as a small bar behind its figure. */
export function ShareCell({ share, children }: { share: number | null; children: ComponentChildren }): JSX.Element {
  return (
    <span class="share-cell">
      {share !== null && share > 0 ? (
        <span class="share-bar" style={{ width: `${Math.min(100, share * 100)}%` }} aria-hidden="true" />
      ) : null}
      <span class="share-words">{children}</span>
    </span>
  );
}
