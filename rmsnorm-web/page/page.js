const $ = id => document.getElementById(id);
const buttons = ['look', 'smoke', 'core', 'bench', 'train'].map($);
const results = (window.results = {}); // for programs that open the page
let worker, report;

// Starts a job of the worker. `progress` gets what the job reports, `line` each line of a report.
function run(job, options = {}, progress = () => {}, line = () => {}) {
  worker ??= new Worker('worker.js', { type: 'module' });
  buttons.forEach(button => (button.disabled = true));
  return new Promise((resolve, reject) => {
    let panic;
    worker.onmessage = ({ data }) => {
      if (data.progress) progress(...data.progress);
      else if (data.line) line(data.line);
      else if (data.panic) panic = data.panic;
      else if (data.error) reject(new Error(data.error));
      else if (data.done) resolve(data.done);
    };
    // The program stopped in the middle: only a new worker can go on.
    worker.onerror = event => {
      event.preventDefault();
      worker.terminate();
      worker = undefined;
      reject(new Error(`the program stopped: ${panic ?? event.message}`));
    };
    worker.postMessage({ job, ...options });
  }).finally(() => buttons.forEach(button => (button.disabled = false)));
}

function verdict(kind, title, detail) {
  $('verdict').className = kind;
  $('verdict').replaceChildren(element('strong', title), element('span', detail));
}

function element(name, content, attributes = {}) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...[content].flat());
  return made;
}

function table(head, rows) {
  const line = (cell, cells) => element('tr', cells.map(content => element(cell, String(content))));
  const body = [element('thead', line('th', head)), element('tbody', rows.map(row => line('td', row)))];
  return element('div', element('table', body), { class: 'scroll' });
}

// A progress bar in `place`, and the function that moves it.
function bar(place) {
  const moved = element('progress', [], { max: 1, value: 0, 'aria-label': 'progress' });
  const text = element('p', 'Starting…', { class: 'note' });
  place.replaceChildren(moved, text);
  const start = performance.now();
  return (done, total) => {
    moved.max = total;
    moved.value = done;
    text.textContent = `${done} of ${total}, ${seconds(performance.now() - start)}`;
  };
}

const seconds = ms => `${(ms / 1e3).toFixed(ms < 1e4 ? 1 : 0)} s`;
const percent = share => `${(100 * share).toFixed(0)} %`;

// The address can name cases to run instead of a profile: ?case=ID&case=ID.
const cases = new URLSearchParams(location.search).getAll('case');

async function prove(profile) {
  const lines = [];
  report = { name: `rmsnorm-${profile}.jsonl`, lines };
  $('save').disabled = true;
  const move = bar($('proof'));
  const made = run('prove', { profile, cases }, move, line => lines.push(line));
  // After an error the report has the cases until then.
  const { summary, text, lost } = await made.finally(() => ($('save').disabled = lines.length === 0));
  const { counts, quality, failures, elapsed_us, digest } = summary;
  const others = [['unsupported', 'not supported by these kernels'], ['skipped', 'skipped for want of memory'], ['vacuous', 'without a meaningful bound']];
  const executed = [`${counts.passed} cases passed`, `${counts.failed} failed`]
    .concat(others.filter(([name]) => counts[name]).map(([name, words]) => `${counts[name]} ${words}`))
    .join(', ');
  const titles = { core: 'Your GPU passed the full test', smoke: 'Your GPU passed the quick test' };
  const passed = (cases.length === 0 && titles[profile]) || 'No error was found';
  if (lost) verdict('bad', 'The browser lost the GPU', `${lost}. Cases after that failed for this reason. A press of a button opens the GPU again.`);
  else if (summary.success) verdict('good', passed, `${executed}. Result: ${summary.conclusion}.`);
  else verdict('bad', 'Your GPU did not pass', `${executed}. Result: ${summary.conclusion}. Please save the report and send it to us.`);
  const rows = Object.entries(quality).map(([name, { checked, budget }]) => [name, checked, `${(100 * budget).toFixed(1)} %`]);
  $('proof').replaceChildren(
    element('p', `${seconds(elapsed_us / 1e3)}. The largest error of each result, as a share of what its bound allows:`),
    table(['result / type', 'values tested', 'largest error'], rows),
    element('p', `Digest of all results: ${digest.slice(0, 16)}…`, { class: 'note' }),
    element('details', [element('summary', failures.length ? 'The failures' : 'Everything that the program says'), element('pre', text)]),
  );
  results.proof = { summary, lines: lines.join('') };
}

// Bars of shares: `rows` are [label, first, second].
function bars(rows, names) {
  const height = rows.length * 26 + 30;
  const width = share => 230 * Math.min(share, 1.2);
  const parts = rows.flatMap(([label, ...shares], row) => [
    `<text x="150" y="${row * 26 + 37}" text-anchor="end">${label}</text>`,
    ...shares.map((share, i) => `<rect x="156" y="${row * 26 + 26 + 9 * i}" width="${width(share)}" height="8" fill="var(--${names[i][0]})"/>`),
  ]);
  const legend = names.map(([color, name], i) => `<rect x="${156 + 90 * i}" y="4" width="10" height="10" fill="var(--${color})"/><text x="${171 + 90 * i}" y="14">${name}</text>`);
  const full = `<line x1="386" x2="386" y1="20" y2="${height}" stroke="var(--faint)" stroke-dasharray="3"/><text x="386" y="14" text-anchor="middle">100 %</text>`;
  return picture('speeds, as in the table below', `0 0 440 ${height}`, [...legend, full, ...parts]);
}

function picture(label, box, parts) {
  const made = element('div', []);
  made.innerHTML = `<svg viewBox="${box}" role="img" aria-label="${label}">${parts.join('')}</svg>`;
  return made;
}

async function bench() {
  const rows = await run('bench', {}, bar($('speed')));
  const us = time => (time < 100 ? time.toFixed(1) : time.toFixed(0));
  const label = row => `${row.norm.replace('_norm', '')} ${row.dtype}, ${row.rows} x ${row.cols}`;
  $('speed').replaceChildren(
    bars(rows.map(row => [label(row), row.forward_of_copy, row.backward_of_copy]), [['first', 'forward'], ['second', 'backward']]),
    table(
      ['norm, rows x columns', 'copy', 'forward', 'backward', 'forward, of copy', 'backward, of copy'],
      rows.map(row => [label(row), ...[row.copy_us, row.forward_us, row.backward_us].map(time => `${us(time)} µs`), percent(row.forward_of_copy), percent(row.backward_of_copy)]),
    ),
    element('p', 'The share is the time of the copy divided by that of the norm. A backward pass moves 1.5 times the bytes of the copy, so its share is multiplied by 1.5.', { class: 'note' }),
  );
  results.bench = rows;
}

// Curves of losses over steps, on a logarithmic scale.
function curves({ every, fused, plain }) {
  const series = [['first', 'our fused norms', fused.losses, ''], ['second', 'plain operations', plain.losses, '6 4']];
  const [low, high] = [Math.min, Math.max].map(of => Math.log10(of(...fused.losses, ...plain.losses)));
  const steps = every * (fused.losses.length - 1);
  const x = step => 50 + (380 * step) / steps;
  const y = loss => 30 + (220 * (high - Math.log10(loss))) / (high - low || 1);
  const marks = [...Array(9).keys()].map(i => 10 ** (i - 7)).filter(mark => Math.log10(mark) >= low && Math.log10(mark) <= high);
  const grid = marks.map(mark => `<line x1="50" x2="430" y1="${y(mark)}" y2="${y(mark)}" stroke="var(--line)"/><text x="44" y="${y(mark) + 4}" text-anchor="end">${mark}</text>`);
  const lines = series.map(([color, , losses, dash]) => `<polyline fill="none" stroke="var(--${color})" stroke-width="2" stroke-dasharray="${dash}" points="${losses.map((loss, i) => `${x(i * every)},${y(loss)}`).join(' ')}"/>`);
  const legend = series.map(([color, name, , dash], i) => `<line x1="${50 + 160 * i}" x2="${80 + 160 * i}" y1="12" y2="12" stroke="var(--${color})" stroke-width="2" stroke-dasharray="${dash}"/><text x="${86 + 160 * i}" y="16">${name}</text>`);
  const axis = `<text x="430" y="272" text-anchor="end">${steps} steps</text><text x="50" y="272">loss, logarithmic</text>`;
  return picture('curves of the loss', '0 0 440 280', [...grid, ...lines, ...legend, axis]);
}

async function train() {
  const result = await run('train', {}, bar($('training')));
  const { fused, plain } = result;
  if ([...fused.losses, ...plain.losses].includes(null)) {
    throw new Error('a loss is not a number: this GPU computes wrongly; fix: run the full test, and send us its report');
  }
  const row = (name, { losses, step_ms }) => [name, losses[0].toFixed(3), losses.at(-1).toPrecision(2), `${step_ms.toFixed(2)} ms`];
  $('training').replaceChildren(
    curves(result),
    table(['norms', 'first loss', 'last loss', 'time per step'], [row('our fused norms', fused), row('plain operations', plain)]),
    element('p', 'The step contains matrix products and the optimizer, which are the same in both. A small network takes most of its time to start kernels.', { class: 'note' }),
  );
  results.train = result;
}

function save() {
  const url = URL.createObjectURL(new Blob(report.lines, { type: 'application/json' }));
  element('a', [], { href: url, download: report.name }).click();
}

// Runs a job, and reports its error in words: in its place, and at the top if there is no result yet.
const guarded = (place, job) => async () => {
  try {
    await job();
  } catch ({ message }) {
    const next = message.includes('fix: ') ? '' : ' A press of a button opens the GPU again.';
    place.replaceChildren(element('p', `It stopped with an error: ${message}.${next}`));
    if (place === $('proof')) verdict('bad', 'It stopped with an error', `${message}.${next}`);
  }
};

for (const profile of ['look', 'smoke', 'core']) $(profile).onclick = guarded($('proof'), () => prove(profile));
$('bench').onclick = guarded($('speed'), bench);
$('train').onclick = guarded($('training'), train);
$('save').onclick = save;

guarded($('proof'), async () => {
  const { device, host } = await run('open');
  verdict('', 'Not tested yet', `${host.split(';')[0]}: ${device}`);
})();
