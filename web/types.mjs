// Writes src/schema.ts: the types of profile.json, from docs/profile.schema.json.
import { compile } from "json-schema-to-typescript";
import { readFile, writeFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";

const here = fileURLToPath(new URL(".", import.meta.url));
const target = process.argv[2] ?? `${here}src/schema.ts`;

/** A reference that has words beside it would become a type of its own, numbered. */
function withoutWordsBesideReferences(value) {
  if (Array.isArray(value)) return value.map(withoutWordsBesideReferences);
  if (value === null || typeof value !== "object") return value;
  if (typeof value.$ref === "string") return { $ref: value.$ref };
  return Object.fromEntries(Object.entries(value).map(([key, one]) => [key, withoutWordsBesideReferences(one)]));
}

const schema = withoutWordsBesideReferences(JSON.parse(await readFile(`${here}../docs/profile.schema.json`, "utf8")));
// Of all that is written, what the page reads.
schema.oneOf = ["Profile", "Comparison", "TracesReport", "TraceComparison"].map((name) => ({
  $ref: `#/$defs/${name}`,
}));
const types = await compile(schema, "Written", {
  bannerComment:
    "// Written by types.mjs from docs/profile.schema.json; change the dataclasses in lightning_flops/schema.",
  style: { printWidth: 120 },
});
await writeFile(target, types);
