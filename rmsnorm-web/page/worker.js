// Runs everything that takes long, so that the page stays usable. Each message asks for one job, and is answered by `progress`
// messages and one `done` or `error`.
import init, { Device } from './rmsnorm_web.js';

let device;

// The browser and its adapter, for the report.
async function host() {
  const { vendor, architecture, device, description } =
    (await navigator.gpu.requestAdapter({ powerPreference: 'high-performance' })).info;
  const adapter = [vendor, architecture, device, description].filter(Boolean).join(' ') || 'an adapter without a name';
  return `${adapter}; ${navigator.userAgent}`;
}

async function open() {
  await init();
  if (!navigator.gpu) {
    throw new Error(
      'this browser offers no WebGPU to this page; fix: use Chrome or Edge 113, Safari 26, Firefox 141, or later, and open the page from https or localhost',
    );
  }
  device ??= await Device.open();
  return { device: device.toString(), host: await host() };
}

const jobs = {
  open,
  async prove({ profile, cases }, progress) {
    const { host } = await open();
    const { isSuccess, summary, text, report } = await device.prove(profile, cases, host, progress);
    return { isSuccess, summary: JSON.parse(summary), text, report };
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
    // A device that is lost or has failed is opened again by the next job.
    device = undefined;
    postMessage({ error: error.message ?? String(error) });
  }
};
