// Where the page's views come from: the file that the page itself is, or TensorBoard's server.

import type { PageDocument, View } from "./document";

export interface Source {
  document: PageDocument;
  view(run: number, window: number): Promise<View>;
  /** Where runs come and go: reads the document anew. */
  refresh?(): Promise<PageDocument>;
}

/** The views that lie in this page, each compressed on its own: only what is looked at is unpacked. */
export function embeddedSource(page: Document): Source | null {
  const text = page.getElementById("document")?.textContent;
  if (!text) return null;
  const known = new Map<string, Promise<View>>();
  return {
    document: JSON.parse(text) as PageDocument,
    view: (run, window) => {
      const id = `view-${run}-${window}`;
      const found = known.get(id) ?? unpack<View>(page.getElementById(id)?.textContent ?? "");
      known.set(id, found);
      return found;
    },
  };
}

/** The views of the runs that TensorBoard shows; *base* is the address of the plugin's routes. */
export async function servedSource(base: string): Promise<Source> {
  const get = async (path: string): Promise<unknown> => {
    const answer = await fetch(new URL(path, base));
    if (!answer.ok) throw new Error(await answer.text());
    return answer.json();
  };
  let served = (await get("runs")) as PageDocument;
  return {
    document: served,
    view: (run, window) => get(`profile?${served.runs[run]?.windows[window]?.address ?? ""}`) as Promise<View>,
    refresh: async () => {
      served = (await get("runs")) as PageDocument;
      return served;
    },
  };
}

/** JSON that was compressed by gzip and written in base64. */
export async function unpack<Kind = unknown>(text: string): Promise<Kind> {
  const packed = Uint8Array.from(atob(text.trim()), (letter) => letter.charCodeAt(0));
  const unpacked = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(unpacked).text()) as Kind;
}
