// The data of the page: an index that is read at once, blocks of tokens and of texts that are unpacked when asked for.

const meta = JSON.parse(document.getElementById("meta0").text);
const table = meta.index; // a list for each column, with a place for each trajectory
const total = table.run.length;
const FLAG = Object.fromEntries(meta.flags.map((name, bit) => [name, 1 << bit]));
const has = (trajectory, flag) => (table.flags[trajectory] & FLAG[flag]) !== 0;
const example = (trajectory) => meta.titles[table.title[trajectory]] || "trajectory";
const stopReason = (trajectory) => meta.stops[table.stop[trajectory]];

async function inflate(packed) {
  const binary = atob(packed);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const embedded = (name) => inflate(document.getElementById(name).text);

// ---------------------------------------------------------------- vocabulary

const vocabulary = {tokens: [], texts: [], special: new Set(meta.vocabulary.special)};
const strict = new TextDecoder("utf-8", {fatal: true, ignoreBOM: true});
const lenient = new TextDecoder("utf-8", {ignoreBOM: true});

async function loadVocabulary() {
  const [bytes, raw] = await Promise.all([inflate(meta.vocabulary.bytes), inflate(meta.vocabulary.lengths)]);
  let at = 0;
  for (let i = 0; i < raw.length; i += 2) {
    const length = raw[i] + 256 * raw[i + 1];
    vocabulary.tokens.push(bytes.subarray(at, at + length));
    at += length;
  }
  vocabulary.texts = vocabulary.tokens.map(decodeWhole);
}

// The text, or null where the bytes are no whole characters.
function decodeWhole(bytes) {
  try {
    return strict.decode(bytes);
  } catch {
    return null;
  }
}

// ---------------------------------------------------------------- blocks

const KEPT_BLOCKS = 24;
const blocks = new Map();
let halves = null;

// Float16 as a number, for each of its 65,536 patterns.
function halfTable() {
  const values = new Float32Array(65536);
  for (let bits = 0; bits < 65536; bits++) {
    const sign = bits >> 15 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    if (exponent === 31) values[bits] = fraction ? NaN : sign * Infinity;
    else values[bits] = sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
  }
  return values;
}

function readBlock(bytes) {
  const length = new DataView(bytes.buffer).getUint32(0, true);
  const head = JSON.parse(lenient.decode(bytes.subarray(4, 4 + length)));
  let at = 4 + length;
  const plane = (size) => bytes.subarray(at, (at += size));
  const joined = (size, width) => { // numbers of planes, the lowest byte first
    const numbers = new Uint32Array(size);
    for (let shift = 0; shift < 8 * width; shift += 8) {
      const bytes = plane(size);
      for (let i = 0; i < size; i++) numbers[i] |= bytes[i] << shift;
    }
    return numbers;
  };
  halves = halves || halfTable();
  const ids = joined(head.ids, 3), short = joined(head.f2, 2), f2 = new Float32Array(head.f2);
  for (let i = 0; i < f2.length; i++) f2[i] = halves[short[i]];
  return {items: head.items, ids, floats: {2: f2, 4: new Float32Array(joined(head.f4, 4).buffer)}};
}

async function block(number) {
  const kept = blocks.get(number) || embedded(`block${number}`).then(readBlock);
  blocks.delete(number);
  blocks.set(number, kept); // the newest last
  if (blocks.size > KEPT_BLOCKS) blocks.delete(blocks.keys().next().value);
  return kept;
}

// Everything of one trajectory: its head, `ids` of prompt and completion (places in the vocabulary), columns, texts.
async function open(trajectory) {
  const unpacked = await block(table.block[trajectory]);
  const head = unpacked.items[table.slot[trajectory]];
  const slice = (place) => unpacked.ids.subarray(place[0], place[0] + place[1]);
  const completion = slice(head.completion);
  const authors = new Uint8Array(completion.length);
  for (let i = 0, at = 0; i < head.authors.length; i += 2) {
    authors.fill(head.authors[i], at, (at += head.authors[i + 1]));
  }
  const nth = new Int32Array(completion.length).fill(-1); // position -> number of the policy token
  let policy = 0;
  for (let i = 0; i < authors.length; i++) if (authors[i] === 0) nth[i] = policy++;
  const column = ([kind, place, last]) => {
    if (kind === 1) return Float32Array.from([...columns.value.subarray(1).map((value) => place * value), last ?? NaN]);
    return kind === 0 ? new Float32Array(policy).fill(place ?? NaN) : unpacked.floats[kind].subarray(place, place + policy);
  };
  const columns = Object.fromEntries(Object.entries(head.columns).map(([name, packed]) => [name, column(packed)]));
  const found = head.why || {lines: [], tokens: [], gap: null};
  const why = {...found, tokens: found.tokens.map(([label, ...packed]) => [label, packed.length ? column(packed) : null])};
  return {
    number: trajectory, head, completion, authors, nth, columns, why, policy,
    prompt: slice(head.prompt),
    contexts: head.segments.map(([start, row, place]) => ({start, row, ids: place && slice(place)})),
    at: (name, position) => (nth[position] < 0 || !columns[name] ? NaN : columns[name][nth[position]]),
  };
}

// ---------------------------------------------------------------- texts

const textBlocks = [];

// Where no trajectory has any text there is no block.
function textBlock(number) {
  if (number >= meta.text_blocks) return Promise.resolve("");
  textBlocks[number] = textBlocks[number] || embedded(`text${number}`).then((bytes) => lenient.decode(bytes));
  return textBlocks[number];
}

async function textOf(trajectory) {
  const text = await textBlock(table.text_block[trajectory]);
  return text.substr(table.text_start[trajectory], table.text_length[trajectory]);
}

let lowered = null;

// The texts of all blocks in lower case, for the search. Letters whose lower case is longer stay, so that places do.
async function loweredTexts() {
  lowered = lowered || Promise.all(Array.from({length: Math.max(1, meta.text_blocks)}, async (_, number) => {
    const text = await textBlock(number), low = text.toLowerCase();
    return low.length === text.length ? low : text.replace(/./gsu, (letter) => {
      const small = letter.toLowerCase();
      return small.length === letter.length ? small : letter;
    });
  }));
  return lowered;
}

// ---------------------------------------------------------------- groups

function makeGroups() {
  const found = new Map();
  for (let i = 0; i < total; i++) {
    const key = `${table.run[i]}/${table.eval[i]}/${table.step[i]}/${table.group[i]}`;
    const place = {run: table.run[i], isEval: table.eval[i], step: table.step[i], number: table.group[i]};
    if (!found.has(key)) found.set(key, {...place, members: []});
    found.get(key).members.push(i);
  }
  const all = [...found.values()];
  all.sort((a, b) => a.run - b.run || a.isEval - b.isEval || a.step - b.step || a.number - b.number);
  all.forEach((group, order) => {
    group.order = order;
    group.flags = group.members.reduce((flags, i) => flags | table.flags[i], 0);
    const rewards = group.members.map((i) => table.reward[i]).filter((reward) => reward !== null);
    group.mean = rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
    group.spread = rewards.length ? Math.max(...rewards) - Math.min(...rewards) : 0;
    for (const i of group.members) groupOf[i] = group;
  });
  return all;
}

const groupOf = [];
const groups = makeGroups();
const largestReward = (() => {
  const sizes = table.reward.filter((reward) => reward !== null).map(Math.abs).sort((a, b) => a - b);
  return sizes[Math.floor(0.99 * sizes.length)] || 1;
})();

// Size of a reward: 0 for none, 1 for the largest of the file (the 99th percentile), whatever its sign.
const rewardSize = (reward) => Math.min(1, Math.abs(reward) / largestReward);

const linkOf = (trajectory) =>
  `#${table.run[trajectory] ? "b" : ""}${table.eval[trajectory] ? "e" : ""}${table.step[trajectory]}/` +
  `${table.group[trajectory]}/${table.generation[trajectory]}`;
const links = new Map(Array.from({length: total}, (_, i) => [linkOf(i), i]).reverse());
