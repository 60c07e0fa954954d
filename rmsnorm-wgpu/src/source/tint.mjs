// Compiles WGSL programs with Tint, Chromium's compiler. It needs no GPU. It reads the programs from
// standard input, each ended by a NUL, prints the messages of each, and at last their number.
//
//     node tint.mjs FOLDER < PROGRAMS     FOLDER: where `npm install webgpu` was run

import { readFileSync, writeSync } from "node:fs";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";

// Dawn fails in some ways by never answering.
setTimeout(() => process.exit(2), 300_000);
const { create } = await import(pathToFileURL(resolve(process.argv[2], "node_modules/webgpu/index.js")));
// The device fails once this object is collected as garbage.
globalThis.gpu = create(["backend=null"]);
const adapter = await gpu.requestAdapter();
const device = await adapter.requestDevice({ requiredFeatures: ["subgroups"] });
// Otherwise Dawn prints each error to stderr too.
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
