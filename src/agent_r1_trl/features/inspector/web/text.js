// Tokens as cells: one token each, or as many as it takes to make whole characters.

const MOST_JOINED = 8;

// Cells of the tokens [start, end): {start, num, text, isSpecial}. A half character is joined with what follows it.
function cellsOf(ids, start, end) {
  const cells = [];
  for (let i = start; i < end;) {
    const text = vocabulary.texts[ids[i]];
    let num = 1, joined = text;
    if (text === null) {
      for (let n = 2; n <= MOST_JOINED && i + n <= end && joined === null; n++) {
        joined = decodeWhole(bytesOf(ids, i, i + n));
        num = joined === null ? 1 : n;
      }
    }
    const isSpecial = text !== null && vocabulary.special.has(ids[i]);
    cells.push({start: i, num, text: joined, bytes: joined === null ? vocabulary.tokens[ids[i]] : null, isSpecial});
    i += num;
  }
  return cells;
}

function bytesOf(ids, start, end) {
  let length = 0;
  for (let i = start; i < end; i++) length += vocabulary.tokens[ids[i]].length;
  const bytes = new Uint8Array(length);
  for (let i = start, at = 0; i < end; at += vocabulary.tokens[ids[i]].length, i++) bytes.set(vocabulary.tokens[ids[i]], at);
  return bytes;
}

function cellText(cell) {
  if (cell.text !== null) return cell.text;
  return [...cell.bytes].map((byte) => byte.toString(16).toUpperCase().padStart(2, "0")).join(" ");
}

// One cell that can be clicked and coloured.
function cellNode(cell) {
  const node = document.createElement("span");
  node.kind = cell.isSpecial ? "token special" : cell.text === null ? "token bytes" : cell.num > 1 ? "token several" : "token";
  put(node, cellText(cell), cell.isSpecial ? "mark" : "break");
  node.position = cell.start;
  return node;
}

// Tokens that nobody colours: one text node between special tokens; `mark` keeps template glue on one line, and the first
// `skip` bytes are left out.
function plainTokens(ids, start, end, newline = "break", skip = 0) {
  const parts = [];
  let from = start;
  const flush = (to) => {
    if (to > from) parts.push(foreign(lenient.decode(bytesOf(ids, from, to).subarray(from === start ? skip : 0)), newline));
  };
  for (let i = start; i < end; i++) {
    if (!vocabulary.special.has(ids[i])) continue;
    flush(i);
    parts.push(put(el("span.token.special"), vocabulary.texts[ids[i]] ?? "?", "mark"));
    from = i + 1;
  }
  flush(end);
  return parts;
}

// What became of a context: blocks [kind, start, end] with kind "kept" and "added" (in `after`) or "dropped" (in `before`).
function contextChanges(before, after) {
  const SPAN = 6;
  const places = new Map();
  const key = (ids, at) => ids.subarray(at, at + SPAN).join(",");
  for (let i = before.length - SPAN; i >= 0; i--) {
    const found = places.get(key(before, i));
    if (found) found.push(i); // descending
    else places.set(key(before, i), [i]);
  }
  const changes = [];
  const add = (kind, start, end) => {
    const last = changes.at(-1);
    if (end > start && last && last[0] === kind && last[2] === start) last[2] = end;
    else if (end > start) changes.push([kind, start, end]);
  };
  let i = 0, j = 0;
  while (j < after.length) {
    if (i < before.length && before[i] === after[j]) {
      add("kept", j, j + 1);
      i++, j++;
      continue;
    }
    const next = (places.get(key(after, j)) || []).findLast((place) => place >= i);
    if (next === undefined || j + SPAN > after.length) {
      add("added", j, j + 1);
      j++;
    } else {
      add("dropped", i, next);
      i = next;
    }
  }
  add("dropped", i, before.length);
  return changes;
}
