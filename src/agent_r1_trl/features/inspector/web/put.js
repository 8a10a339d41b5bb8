// Every string that this page shows passes `put`: most were written by a model, a tool or a web page.

// Controls, zero-width and bidirectional characters, tags, lone surrogates. Newline, tab, ZWJ and ZWNJ are not among them.
const CONTROL = new RegExp("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\xad\\u061c\\u180e\\u200b\\u200e\\u200f\\u2028-\\u202e" +
  "\\u2060-\\u206f\\ufeff\\ufff9-\\ufffb\\u{e0000}-\\u{e007f}\\p{Cs}]", "u");
const SPECIAL_TEXT = new RegExp(
  `(${CONTROL.source})|([^\\s\\u200c\\u200d]{0,12}(?:[\\u200c\\u200d][^\\s\\u200c\\u200d]{0,12})+)|(\\n)`, "gu");
const ANY_SPECIAL = new RegExp(`${CONTROL.source}|[\\u200c\\u200d\\n]`, "u");
const NAMES = ("NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB ESC FS " +
  "GS RS US").split(" ");
const LONGEST = 3000;

function controlName(character) {
  const code = character.codePointAt(0);
  if (code < 32) return NAMES[code];
  return code === 127 ? "DEL" : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

// Write a text into a node, as text: controls as small chips, words with joiners outlined. `newline`: "break" shows ↵ and
// breaks the line, "mark" shows ↵ alone, "plain" breaks only.
function put(node, text, newline = "plain") {
  const leaf = (content) => node.appendChild(document.createTextNode(content));
  const chip = (name, content) => {
    const mark = document.createElement("span");
    mark.className = name;
    mark.appendChild(document.createTextNode(content));
    node.appendChild(mark);
  };
  const whole = String(text ?? "");
  if (!ANY_SPECIAL.test(whole)) {
    if (whole) leaf(whole);
    return node;
  }
  let from = 0;
  for (const found of whole.matchAll(SPECIAL_TEXT)) {
    if (found.index > from) leaf(whole.slice(from, found.index));
    from = found.index + found[0].length;
    if (found[1] !== undefined) chip("control", controlName(found[1]));
    else if (found[2] !== undefined) putJoined(node, found[2], chip);
    else if (newline === "plain") leaf("\n");
    else {
      chip("newline", "↵");
      if (newline === "break") leaf("\n");
    }
  }
  if (from < whole.length) leaf(whole.slice(from));
  return node;
}

// Joiners make one sign of several emoji and shape Persian and Hindi: they stay, and their word is outlined.
function putJoined(node, text, chip) {
  let start = 0;
  for (const found of text.matchAll(new RegExp(CONTROL.source, "gu"))) {
    if (found.index > start) chip("joined", text.slice(start, found.index));
    chip("control", controlName(found[0]));
    start = found.index + found[0].length;
  }
  if (start < text.length) chip("joined", text.slice(start));
}

// A text in which controls are spelled, for places that hold no elements: options and the title.
function spelled(text) {
  return String(text ?? "").replace(new RegExp(CONTROL.source, "gu"), (found) => `[${controlName(found)}]`);
}

// el("div.note", "text", node, ...): an element with classes; strings pass `put`.
function el(kind, ...children) {
  const [tag, ...classes] = kind.split(".");
  const node = document.createElement(tag || "div");
  if (classes.length) node.className = classes.join(" ");
  return add(node, children);
}

// Append nodes, and strings through `put`; null and false are skipped.
function add(node, ...children) {
  for (const child of children.flat(Infinity)) {
    if (child === null || child === undefined || child === false) continue;
    if (child instanceof Node) node.appendChild(child);
    else put(node, child);
  }
  return node;
}

// A string of somebody else: its direction does not touch what stands around it. One longer than `most` is folded.
function foreign(text, newline = "plain", most = LONGEST) {
  const whole = String(text ?? "");
  const node = document.createElement("bdi");
  node.dir = "auto";
  if (whole.length <= most) return put(node, whole, newline);
  const end = Math.round(most / 3), start = most - end;
  put(node, whole.slice(0, start), newline);
  const more = button(`… ${count(whole.length - most)} characters more …`, () => {
    more.replaceWith(put(document.createElement("span"), whole.slice(start, -end), newline));
  });
  more.classList.add("more");
  node.appendChild(more);
  return put(node, whole.slice(-end), newline);
}

// The name of an example, a tool, a reward, as somebody else chose it.
const named = (text) => foreign(text, "mark", 150);

function button(label, onClick, isOn) {
  const node = el("button", label);
  node.type = "button";
  if (isOn !== undefined) node.setAttribute("aria-pressed", isOn ? "true" : "false");
  node.addEventListener("click", onClick);
  return node;
}

function clear(node) {
  node.replaceChildren();
  return node;
}

// SVG; `attributes` are numbers and words of this page, never foreign text.
function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  return add(node, children);
}

// A drawing of somebody else as an image: scripts in one do not run, and it fetches nothing.
function picture(drawing, caption) {
  const image = document.createElement("img");
  image.src = `data:image/svg+xml,${encodeURIComponent(spelled(drawing))}`;
  image.alt = caption;
  return image;
}

// ---------------------------------------------------------------- numbers

const wholes = new Intl.NumberFormat("en-US", {maximumFractionDigits: 0});

function count(number) {
  return wholes.format(Math.round(number));
}

// A number for people: 4 digits, "4e−5" for small ones, a sign only on request; nothing is "0", neither + nor −.
function show(value, sign = false, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  let text;
  if (size < 0.5 * 10 ** -digits) text = size.toExponential(0);
  else if (size >= 1e6) text = size.toExponential(2);
  else if (size >= 1000) text = size.toLocaleString("en-US", {maximumFractionDigits: size >= 10000 ? 0 : 1});
  else text = size.toFixed(size >= 100 ? Math.min(digits, 1) : size >= 10 ? Math.min(digits, 2) : digits);
  text = text.replace("e-", "e−").replace("e+", "e");
  return (value < 0 ? "−" : sign ? "+" : "") + text;
}

function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  return value < 90 ? `${value.toFixed(1)} s` : `${Math.round(value / 60)} min`;
}

function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
