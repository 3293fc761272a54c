// Builds the page's script and style. Same sources, same bytes: `make test` compares them with the files in the package.
//
//   node build.mjs [folder]     by default lightning_flops/report/page
import { build } from "esbuild";
import { copyFile, mkdir, readFile } from "node:fs/promises";
import { fileURLToPath } from "node:url";

const here = fileURLToPath(new URL(".", import.meta.url));
const folder = process.argv[2] ?? `${here}../lightning_flops/report/page`;

const options = {
  absWorkingDir: here,
  entryPoints: { page: "src/main.tsx", style: "src/style.css" },
  outdir: folder,
  bundle: true,
  minify: true,
  format: "iife",
  target: ["chrome109", "firefox115", "safari16.4"],
  charset: "utf8",
  legalComments: "none",
  jsx: "automatic",
  jsxImportSource: "preact",
  define: { "process.env.NODE_ENV": '"production"' },
  logLevel: "warning",
};

/** The licences of what is bundled, which ask to travel with it: a comment at the head of the script. */
async function licences() {
  const { metafile } = await build({ ...options, write: false, metafile: true });
  const inside = Object.keys(metafile.inputs).flatMap((path) => path.match(/\bnode_modules\/([^/]+)\//)?.[1] ?? []);
  const texts = [...new Set(inside)].sort().map(async (name) => {
    const { version } = JSON.parse(await readFile(`${here}node_modules/${name}/package.json`, "utf8"));
    return `${name} ${version}\n\n${(await readFile(`${here}node_modules/${name}/LICENSE`, "utf8")).trim()}`;
  });
  return `/*!\n${(await Promise.all(texts)).join("\n\n---\n\n").replaceAll("*/", "* /")}\n*/`;
}

await mkdir(folder, { recursive: true });
await copyFile(`${here}src/tensorboard.js`, `${folder}/index.js`);
await build({ ...options, banner: { js: await licences() } });
