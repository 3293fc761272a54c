// A section of the document: its figures, paragraphs, tables and pictures in their order.

import type { ComponentChildren, JSX } from "preact";
import type { Item, SectionData } from "../document";
import { Table } from "./table";

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

type Picture = Extract<Item, { picture: string }>["picture"];

/** The address of a section: its title in lower case, with dashes. */
export function idOf(title: string): string {
  return title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
}

export function DocumentSection(props: {
  section: SectionData;
  picture: (name: Picture) => ComponentChildren;
}): JSX.Element {
  const { section } = props;
  return (
    <Section id={idOf(section.title)} title={section.title} note={section.note}>
      {grouped(section.items).map((one, at) => {
        if (Array.isArray(one)) return <Figures key={at} figures={one} />;
        if ("picture" in one) return <div key={at}>{props.picture(one.picture)}</div>;
        if ("text" in one) return one.text ? <p key={at}>{one.text}</p> : null;
        return <Table key={at} data={one} caption={section.title} />;
      })}
    </Section>
  );
}

type Figure = Extract<Item, { label: string }>;
type Group = Exclude<Item, Figure> | Figure[];

/** Figures that follow one another, together. */
function grouped(items: readonly Item[]): Group[] {
  const groups: Group[] = [];
  for (const one of items) {
    const last = groups.at(-1);
    if (!("label" in one)) groups.push(one);
    else if (Array.isArray(last)) last.push(one);
    else groups.push([one]);
  }
  return groups;
}

function Figures({ figures }: { figures: readonly Figure[] }): JSX.Element {
  return (
    <dl class="figures">
      {figures.map((one, at) => (
        <div key={at}>
          <dt>{one.label}</dt>
          <dd>{one.value}</dd>
        </div>
      ))}
    </dl>
  );
}
