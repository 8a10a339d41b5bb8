// One trajectory: its turns as coloured tokens or as messages, rewards where they sit, new contexts where they began.

const FOLD_PROMPT = 300; // tokens
const NEAR_TOKENS = 400; // the first tokens are cells at once, the others when they come near the window
const OPEN_TOKENS = 6000; // a longer trajectory opens with its first turns, its last, and those with problems
const shown = {
  trajectory: null, opened: null, mate: null, mateOpened: null, column: "advantage", isMessages: false, position: null,
};

async function showTrajectory(number, mate = null) {
  const [opened, mateOpened] = await Promise.all([open(number), mate === null ? null : open(mate)]);
  if (showsMessages(opened) || [opened, mateOpened].some((each) => each?.contexts.length)) await readTexts(opened, mateOpened);
  if (route.wanted !== number) return; // another one was asked for meanwhile
  const isSame = shown.trajectory === number && shown.mate === mate;
  Object.assign(shown, {trajectory: number, opened, mate, mateOpened});
  if (!isSame) shown.position = null;
  drawTrajectory();
  drawWhy();
  revealInList();
}

function currentColumn(opened) {
  const available = availableColumns(opened);
  const columnOf = (wanted) => available.find(({name}) => name === wanted);
  return columnOf(shown.column) || columnOf("logprob") || available[0];
}

function drawTrajectory() {
  const middle = clear(document.getElementById("middle"));
  const {opened} = shown;
  near.disconnect();
  middle.scrollTop = 0; // while it is empty: it asks for a layout
  add(middle, heading(opened), switches(opened));
  const body = el("div.body");
  if (shown.mateOpened) add(body, siblingsView(opened, shown.mateOpened));
  else if (showsMessages(opened)) add(body, messagesView(opened));
  else add(body, promptView(opened), turnsView(opened, 0));
  add(middle, body);
}

// Those of a hosted model have no tokens.
const showsMessages = (opened) => shown.isMessages || opened.completion.length === 0;
const readTexts = (...all) => Promise.all(all.map(async (opened) => opened && (opened.text = await textOf(opened.number))));

function repaint() {
  const column = currentColumn(shown.opened);
  for (const part of document.querySelectorAll("#middle .turns")) {
    const opened = part.classList.contains("mate") ? shown.mateOpened : shown.opened;
    for (const node of part.querySelectorAll(".tokens .token")) paintToken(node, opened, column);
  }
}

// ---------------------------------------------------------------- heading

function heading(opened) {
  const i = opened.number, {head} = opened;
  const parts = head.parts.map(([name, value], n) => [n ? ", " : "", named(name), ` ${show(value, true, 2)}`]);
  const reward = table.reward[i] === null ? "not scored" : `reward ${show(table.reward[i], true)}`;
  const facts = [
    el(stopReason(i) === "done" ? "span" : "span.problem", stopReason(i)), " · ", el("b", reward),
    parts.length ? [" (outcome: ", parts, ")"] : null,
    head.process ? ` + turns ${show(head.process, true, 2)}` : null,
    ` · ${plural(table.turns[i], "turn")} · ${count(table.policy[i])} of ${count(table.tokens[i])} tokens are the policy's`,
    ` · ${seconds(table.seconds[i])}`,
  ];
  const notes = [
    has(i, "untrained") ? "Not trained on: none of its tokens is in the loss." : "",
    has(i, "masked") ? "A secret was masked: the ids of that part are 0." : "",
    has(i, "gap") ? "The recorded advantage is not the one that the record explains." : "",
    ...head.tries.map((text) => `An earlier try was lost: ${text}`),
  ].filter(Boolean);
  const infos = head.info.map(([name, value]) => el("span.item", named(name), " = ", foreign(value, "plain", 600)));
  return el("div.heading", bookmarkPart(i),
    el("h1", named(example(i)), el("span.where", ` · ${stepName(groupOf[i])} · generation ${table.generation[i]}`)),
    el("p.facts", facts),
    infos.length ? el("p.info", infos) : null,
    head.error ? el("p.problem", foreign(head.error)) : null,
    notes.map((note) => el("p.note", foreign(note))));
}

function switches(opened) {
  const column = currentColumn(opened);
  const line = el("div.colours");
  add(line, button("← list", goToList));
  line.firstChild.classList.add("back");
  add(line, button("messages", () => setMessages(!shown.isMessages), showsMessages(opened)));
  for (const item of availableColumns(opened)) {
    add(line, button(item.label, () => setColumn(item.name), !showsMessages(opened) && item === column));
  }
  const bar = el("div.switch", line);
  if (!showsMessages(opened)) add(bar, legend(column));
  return bar;
}

function setColumn(name) {
  if (!shown.opened || (name !== "mask" && !shown.opened.columns[name])) return;
  const wasMessages = shown.isMessages;
  Object.assign(shown, {column: name, isMessages: false});
  if (wasMessages) return drawTrajectory();
  document.querySelector("#middle .switch").replaceWith(switches(shown.opened));
  repaint();
}

async function setMessages(isOn) {
  const number = shown.trajectory;
  if (!shown.opened) return;
  await readTexts(shown.opened, shown.mateOpened);
  if (shown.trajectory !== number) return;
  shown.isMessages = isOn;
  drawTrajectory();
}

// ---------------------------------------------------------------- turns

function fold(isOpen, title, fill) {
  const node = document.createElement("details");
  const body = el("div.fold");
  add(node, el("summary", title), body);
  let isFilled = false;
  const onToggle = () => {
    if (!node.open || isFilled) return;
    isFilled = true;
    fill(body);
  };
  node.addEventListener("toggle", onToggle);
  node.open = isOpen;
  onToggle();
  return node;
}

function promptView(opened) {
  const num = opened.prompt.length;
  const skip = meta.runs[table.run[opened.number]].strips && vocabulary.tokens[opened.prompt[0]]?.[0] === 32 ? 1 : 0;
  return fold(num <= FOLD_PROMPT, [`prompt · ${plural(num, "token")}`], (body) => {
    body.classList.add("prompt");
    add(body, stateView(opened.head.rendered, "at the start"));
    add(body, plainTokens(opened.prompt, 0, num, "break", skip)); // `decode` drops the first blank of a text, too
  });
}

// The turns from number `first` on; `from` leaves out the tokens before it in the first of them.
function turnsView(opened, first, from = 0) {
  const {turns} = opened.head, nodes = [];
  const start = turns.length ? turns[first]?.span[0] ?? 0 : opened.completion.length;
  if (first === 0 && start > 0) nodes.push(el("div.glue", between(opened, 0, start)));
  const isLong = opened.completion.length > OPEN_TOKENS;
  const sections = opened.contexts.length ? messagesOf(opened) : new Map();
  let policy = 0;
  for (let i = first; i < turns.length; i++) {
    const turn = turns[i], [begin, end] = turn.span;
    const next = i + 1 < turns.length ? turns[i + 1].span[0] : opened.completion.length;
    for (const context of opened.contexts) {
      if (context.start === begin && (i + 1 === turns.length || end > begin || turns[i + 1].span[0] > begin)) {
        nodes.push(contextView(opened, context));
      }
    }
    const isProblem = turn.flags.length > 0 || turn.calls.some((call) => call.error);
    const isOpen = !isLong || policy < OPEN_TOKENS / 2 || isProblem || i === turns.length - 1;
    const isNear = policy < NEAR_TOKENS;
    policy += next - begin;
    nodes.push(el("div.turn", fold(isOpen, turnTitle(opened, turn, i), (body) => {
      add(body, stateView(turn.rendered, `after turn ${i + 1}`));
      add(body, tokensView(opened, Math.max(begin, from), end, isNear));
      if (next > end) add(body, el("div.observation", between(opened, end, next)));
      // A new context holds the answer, so that no token of it stands behind the turn.
      else add(body, answersOf(turn, sections.get(i) || []).map(messageNode));
    })));
  }
  const node = el("div.turns", nodes);
  node.opened = opened;
  return [node];
}

function turnTitle(opened, turn, i) {
  const [begin, end] = turn.span;
  const values = opened.columns.advantage;
  const parts = [el("b", `${turn.summary ? "summary" : "turn"} ${i + 1}`), plural(end - begin, "token")];
  if (values && end > begin) {
    let sum = 0;
    for (let at = begin; at < end; at++) sum += values[opened.nth[at]];
    parts.push(`mean A ${show(sum / (end - begin), true)}`);
  }
  if (turn.reward) parts.push(`reward ${show(turn.reward, true, 2)}`);
  if (turn.weights.length) parts.push(weightsView(turn.weights, opened.head.turns[i - 1]?.weights.at(-1)));
  for (const call of turn.calls.slice(0, 4)) {
    const time = call.ms === undefined || call.error === "malformed" ? "" : ` ${call.ms} ms`;
    const error = call.error ? el("span.problem", ` ${call.error}`) : null;
    parts.push([call.name === "?" ? "call" : foreign(call.name.slice(0, 60)), time, error]);
  }
  if (turn.calls.length > 4) parts.push(`${turn.calls.length - 4} calls more`);
  for (const flag of turn.flags) parts.push(el("span.problem", flag));
  return parts.map((part) => el("span.item", part));
}

// The steps whose weights sampled a turn; a tick where they are not those of the turn before, whose last stamp is given.
function weightsView(stamps, before) {
  const text = `weights of step ${stamps.map(([step]) => step).join(", ")}`;
  const hasChanged = stamps.length > 1 || (before && before[0] !== stamps[0][0]);
  return hasChanged ? el("span.tick", text) : text;
}

// Position of each token inside a turn before which the weights changed, and the step of the new ones.
function changesOfWeights(turns) {
  const found = new Map();
  for (const turn of turns) {
    let at = turn.span[0];
    for (const [step, num] of turn.weights) {
      if (at > turn.span[0]) found.set(at, step);
      at += num;
    }
  }
  return found;
}

const near = new IntersectionObserver((entries) => {
  for (const {target, isIntersecting} of entries) if (isIntersecting) target.fill?.();
}, {root: document.getElementById("middle"), rootMargin: "300px"});

// The tokens of a turn: plain text until they come near, of which a search of the browser knows, then cells.
function tokensView(opened, start, end, isNear) {
  const node = el("div.tokens");
  node.fill = () => {
    node.fill = null;
    near.unobserve(node);
    add(clear(node), policyTokens(opened, start, end));
  };
  if (isNear) node.fill();
  else near.observe(put(node, lenient.decode(bytesOf(opened.completion, start, end)), "break"));
  return node;
}

function fillAll() {
  for (const node of document.querySelectorAll("#middle .tokens")) node.fill?.();
}

function policyTokens(opened, start, end) {
  const nodes = [], column = currentColumn(opened);
  opened.changes ??= changesOfWeights(opened.head.turns);
  for (const cell of cellsOf(opened.completion, start, end)) {
    const node = cellNode(cell);
    const step = opened.changes.get(cell.start);
    if (step !== undefined) nodes.push(el("span.tick.inside", `step ${step}`));
    paintToken(node, opened, column);
    nodes.push(node, marksBehind(opened, cell));
  }
  return nodes.flat();
}

// What stands behind a cell of tokens: the rewards that sit on them.
function marksBehind(opened, cell) {
  const isHere = (position) => position >= cell.start && position < cell.start + cell.num;
  return opened.head.badges.filter(([at]) => isHere(at)).map(([, name, value]) => badge(name, value));
}

function badge(name, value) {
  return el(value < 0 ? "span.badge.minus" : "span.badge.plus", foreign(String(name).slice(0, 80)), ` ${show(value, true, 2)}`);
}

// A state as the environment rendered it.
function stateView(rendered, caption) {
  const {svg, text, error} = rendered;
  if (!svg && !text && !error) return null;
  return el("figure.state", svg ? picture(svg, caption) : null, text ? el("pre", foreign(text)) : null,
    error ? el("p.problem", foreign(error)) : null, el("figcaption.quiet", caption));
}

// Tokens that the policy did not sample: template glue is fainter and stays on its line.
function between(opened, start, end) {
  const nodes = [];
  for (let from = start, to = start; from < end; from = to) {
    while (to < end && opened.authors[to] === opened.authors[from]) to++;
    const isTemplate = opened.authors[from] === 1;
    nodes.push(el(isTemplate ? "span.template" : "span.environment",
      plainTokens(opened.completion, from, to, isTemplate ? "mark" : "break")));
    const isLine = vocabulary.tokens[opened.completion[to - 1]].at(-1) === 10; // its newline is only marked
    if (isTemplate && isLine && to < end) nodes.push("\n");
  }
  return nodes;
}

// ---------------------------------------------------------------- new contexts

function contextView(opened, context) {
  if (!context.ids) return el("p.context", `goes on in row ${context.row + 1}`);
  const before = tokensBefore(opened, context);
  const title = `row ${context.row + 1} · new context, ${plural(context.ids.length, "token")}`;
  const changes = contextChanges(before, context.ids);
  const sizes = {kept: 0, dropped: 0, added: 0};
  for (const [kind, start, end] of changes) sizes[kind] += end - start;
  const what = ` · ${count(sizes.kept)} kept, ${count(sizes.dropped)} dropped, ${count(sizes.added)} added`;
  return el("div.context", fold(false, [el("b", title), what], (body) => {
    for (const [kind, start, end] of changes) {
      const ids = kind === "dropped" ? before : context.ids;
      const content = () => plainTokens(ids, start, end, kind === "kept" ? "mark" : "break");
      const label = el("span.label", `${kind} ${count(end - start)}`);
      add(body, el(`div.change.${kind}`, label, content()));
    }
  }));
}

// What the row before this context held: its prompt and the tokens sampled or read in it.
function tokensBefore(opened, context) {
  const earlier = opened.contexts.filter((other) => other.start < context.start ||
    (other.start === context.start && opened.contexts.indexOf(other) < opened.contexts.indexOf(context)));
  const row = earlier.length ? earlier.at(-1).row : 0;
  const opening = row === 0 ? opened.prompt : earlier.find((other) => other.row === row && other.ids).ids;
  const parts = [...opening];
  const edges = [{start: 0, row: 0}, ...earlier, {start: context.start, row: -1}];
  edges.forEach((edge, i) => {
    if (edge.row === row) parts.push(...opened.completion.subarray(edge.start, edges[i + 1].start));
  });
  return Uint32Array.from(parts);
}
