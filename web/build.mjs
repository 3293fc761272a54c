// Builds the page's script and style. Same sources, same bytes: `make test` compares them with the files in the package.
//
//   node build.mjs [folder]     by default lightning_flops/report/page
import { build } from "esbuild";
import { copyFile, mkdir } from "node:fs/promises";
import { fileURLToPath } from "node:url";

const here = fileURLToPath(new URL(".", import.meta.url));
const folder = process.argv[2] ?? `${here}../lightning_flops/report/page`;

await mkdir(folder, { recursive: true });
await copyFile(`${here}src/tensorboard.js`, `${folder}/index.js`);
await build({
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
});
