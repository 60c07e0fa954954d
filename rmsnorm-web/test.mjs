// Opens the page in Chromium as a person would, and fails if it does not say what it must. Arguments: the folder of the page, the
// profile to run, the folder for the report and the pictures.
import assert from 'node:assert/strict';
import fs from 'node:fs';
import http from 'node:http';
import path from 'node:path';
import { chromium } from 'playwright-core';

const [root, profile, out] = process.argv.slice(2);
const types = { '.html': 'text/html', '.js': 'text/javascript', '.wasm': 'application/wasm' };
const server = http.createServer(({ url }, answer) => {
  const file = path.join(root, url === '/' ? 'index.html' : url);
  if (!fs.existsSync(file)) return answer.writeHead(404).end();
  answer.writeHead(200, { 'content-type': types[path.extname(file)] }).end(fs.readFileSync(file));
});
await new Promise(done => server.listen(0, '127.0.0.1', done));

const software = ['--enable-unsafe-webgpu', '--use-webgpu-adapter=swiftshader'];

async function open(args) {
  const browser = await chromium.launch({ executablePath: '/usr/bin/chromium', args: ['--no-sandbox', ...args] });
  const page = await browser.newPage({ acceptDownloads: true });
  page.on('pageerror', error => assert.fail(`an error of the page: ${error}`));
  await page.goto(`http://127.0.0.1:${server.address().port}/`);
  await ready(page);
  return { browser, page };
}

// Waits until the page can do the next job, for an hour and a half at most.
const ready = page => page.waitForFunction(() => !document.getElementById('smoke').disabled, null, { timeout: 5.4e6 });
const verdict = page => page.textContent('#verdict');

async function press(page, button) {
  const start = Date.now();
  await page.click(`#${button}`);
  await ready(page);
  console.log(`${button}: ${((Date.now() - start) / 1e3).toFixed(0)} s, ${await verdict(page)}`);
  return page.evaluate(() => results);
}

// Without WebGPU: what to do.
{
  const { browser, page } = await open(['--disable-gpu']);
  assert.match(await verdict(page), /stopped with an error.*fix: use (a browser with WebGPU|Chrome)/);
  await browser.close();
}

// The GPU is lost in the middle of a job; the next one goes through.
{
  const { browser, page } = await open(software);
  await page.click('#look');
  await page.waitForFunction(() => /^[1-9]/.test(document.querySelector('#proof p')?.textContent), null, { timeout: 6e4 });
  const { processInfo } = await (await browser.newBrowserCDPSession()).send('SystemInfo.getProcessInfo');
  process.kill(processInfo.find(({ type }) => type === 'GPU').id, 'SIGKILL');
  await ready(page);
  assert.match(await verdict(page), /lost the GPU.*the device is lost.*A press of a button opens the GPU again/);
  assert(await page.isEnabled('#save'));
  await press(page, 'look');
  assert.match(await verdict(page), /No error was found/);
  await browser.close();
}

const { browser, page } = await open(software);
const width = { width: 1000, height: 900 };
await page.setViewportSize(width);
assert.match(await verdict(page), /Not tested yet.*swiftshader.*10 storage buffers/);

const { proof } = await press(page, 'look');
assert(proof.summary.success && proof.summary.counts.passed > 30 && proof.summary.counts.failed === 0);

const { bench } = await press(page, 'bench');
assert.equal(bench.length, 16);
assert(bench.every(row => row.copy_us > 0 && row.forward_of_copy > 0 && row.backward_of_copy > 0));
assert.equal(await page.locator('#speed rect').count(), 2 * 16 + 2);

const { train } = await press(page, 'train');
for (const { losses } of [train.fused, train.plain]) assert(losses[0] > 0.5 && losses.at(-1) < 0.01);
assert.equal(await page.locator('#training polyline').count(), 2);

const { proof: whole } = await press(page, profile);
assert.match(await verdict(page), /Your GPU passed the (quick|full) test/);
assert(whole.summary.counts.passed > 1000);
const [saved] = await Promise.all([page.waitForEvent('download'), page.click('#save')]);
await saved.saveAs(path.join(out, `${profile}.jsonl`));
assert.equal(fs.readFileSync(path.join(out, `${profile}.jsonl`), 'utf8'), whole.lines);

// Nothing is wider than a phone.
for (const [name, size] of [['wide', width], ['narrow', { width: 390, height: 844 }]]) {
  await page.setViewportSize(size);
  assert(await page.evaluate(() => document.documentElement.scrollWidth <= innerWidth), `${name}: the page is too wide`);
  await page.screenshot({ path: path.join(out, `${name}.png`), fullPage: true });
}
await browser.close();
server.close();
