// Compiles WGSL programs with Tint, the compiler of Chromium, for a device that need not be there. Reads the programs from standard input, each ended
// by a NUL, and prints the messages of each, then how many it read.
//
//     node tint.mjs FOLDER < PROGRAMS     in FOLDER `npm install webgpu` was run

import { readFileSync, writeSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

const { create } = await import(pathToFileURL(resolve(process.argv[2], "node_modules/webgpu/index.js")));
// The package needs this object as long as the device.
globalThis.gpu = create(["backend=null"]);
const adapter = await gpu.requestAdapter();
const device = await adapter.requestDevice({ requiredFeatures: ["subgroups"] });
// The messages have what the device reports on stderr by itself.
device.addEventListener("uncapturederror", (event) => event.preventDefault());
const programs = readFileSync(0, "utf8").split("\0").slice(0, -1);
for (const [index, code] of programs.entries()) {
    const { messages } = await device.createShaderModule({ code }).getCompilationInfo();
    for (const { type, lineNum, linePos, message } of messages) {
        writeSync(1, `program ${index}, line ${lineNum}:${linePos}: ${type}: ${message}\n    ${code.split("\n")[lineNum - 1]}\n`);
    }
}
writeSync(1, `${programs.length} programs\n`);
process.exit(0);
