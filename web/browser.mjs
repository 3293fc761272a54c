// Unpacks the browser that the tests of the page open, with its libraries and its fonts, and prints where it is.
//
//   node browser.mjs folder
import { existsSync } from "node:fs";
import { mkdir, writeFile } from "node:fs/promises";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const folder = resolve(process.argv[2]);
await mkdir(folder, { recursive: true });
process.env.TMPDIR = folder; // where the package unpacks, whatever it is asked
const { default: chromium, inflate } = await import("@sparticuz/chromium");

const packed = join(dirname(fileURLToPath(import.meta.resolve("@sparticuz/chromium"))), "..", "bin");
const program = await chromium.executablePath(packed);
if (!existsSync(join(folder, "al2023"))) await inflate(join(packed, "al2023.tar.br"));
await writeFile(
  join(folder, "fonts.conf"),
  `<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>${folder}/fonts</dir><cachedir>${folder}/fonts-cache</cachedir></fontconfig>
`,
);
console.log(program);
