// Runs everything that takes long, so that the page stays usable. Each message asks for one job, and is answered by messages with
// `progress`, a `line` of a report or a `panic`, and one with `done` or `error`.
import init, { Device } from './rmsnorm_web.js';

let device;

// The program writes here what it panics with, before it stops.
const write = console.error;
console.error = text => {
  postMessage({ panic: String(text).split('\n\nStack')[0] });
  write(text);
};

// The browser and its adapter, for the report.
async function host() {
  const adapter = await navigator.gpu.requestAdapter({ powerPreference: 'high-performance' });
  const { vendor, architecture, device, description } = adapter?.info ?? {};
  const name = [vendor, architecture, device, description].filter(Boolean).join(' ') || 'an adapter without a name';
  return `${name}; ${navigator.userAgent}`;
}

async function open() {
  await init();
  if (!navigator.gpu) {
    throw new Error(
      'this browser offers no WebGPU to this page; fix: use Chrome or Edge 132, Safari 26, or Firefox 145, or later, and open the page from https or localhost',
    );
  }
  device ??= await Device.open();
  return { device: device.toString(), host: await host() };
}

// A device that is lost or has failed is opened again by the next job. Its memory is not freed before that otherwise.
function close() {
  device?.close();
  device = undefined;
}

const jobs = {
  open,
  async prove({ profile, cases }, progress) {
    const { host } = await open();
    const { summary, text, lost } = await device.prove(profile, cases, host, progress, line => postMessage({ line }));
    if (lost) close();
    return { summary: JSON.parse(summary), text, lost };
  },
  async bench(_, progress) {
    await open();
    return JSON.parse(await device.bench(progress));
  },
  async train(_, progress) {
    await open();
    return JSON.parse(await device.train(progress));
  },
};

onmessage = async ({ data: { job, ...options } }) => {
  try {
    const result = await jobs[job](options, (...progress) => postMessage({ progress }));
    postMessage({ done: result });
  } catch (error) {
    close();
    postMessage({ error: error.message ?? String(error) });
  }
};
