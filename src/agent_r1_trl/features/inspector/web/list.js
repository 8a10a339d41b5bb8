// The list: a line for each group, with one tick for each of its trajectories. It holds only the lines that can be seen.

const ROW = 44;
const CHIPS = [
  {flag: "lost", label: "lost", weight: 16},
  {flag: "gap", label: "unexplained", weight: 8},
  {flag: "call_errors", label: "call errors", weight: 6},
  {flag: "invalid", label: "invalid turns", weight: 4},
  {flag: "truncated", label: "truncated", weight: 3},
  {flag: "unsolved", label: "unsolved", weight: 0},
  {flag: "untrained", label: "not trained on", weight: 0},
  {flag: "same", label: "all the same", weight: 0},
  {flag: "rows", label: "new contexts", weight: 0},
  {flag: "masked", label: "secrets masked", weight: 0},
];
const SORTS = {
  problems: "problems first", step: "in order", newest: "last step first", low: "lowest reward", high: "highest reward",
  spread: "largest spread", long: "longest",
};
const list = {chips: new Set(), query: "", step: "", unit: "groups", sort: "problems", lines: [], texts: null, examples: null,
  column: "", value: null};
const countOf = (flag) => table.flags.filter((flags) => flags & FLAG[flag]).length;
const chipCounts = Object.fromEntries(CHIPS.map(({flag}) => [flag, countOf(flag)]));

function problemOf(flags) {
  return CHIPS.reduce((sum, {flag, weight}) => sum + (flags & FLAG[flag] ? weight : 0), 0);
}

const ORDERS = {
  problems: (a, b) => problemOf(b.flags) - problemOf(a.flags) || b.spread - a.spread || a.order - b.order,
  step: (a, b) => a.order - b.order,
  newest: (a, b) => a.run - b.run || b.step - a.step || a.order - b.order,
  low: (a, b) => (a.mean ?? Infinity) - (b.mean ?? Infinity) || a.order - b.order,
  high: (a, b) => (b.mean ?? -Infinity) - (a.mean ?? -Infinity) || a.order - b.order,
  spread: (a, b) => b.spread - a.spread || a.order - b.order,
  long: (a, b) => longest(b) - longest(a) || a.order - b.order,
};
const longest = (line) => Math.max(...line.members.map((i) => table.tokens[i]));

// The lines of the list that fit the filters, in order: groups, or their trajectories as lines of one member.
function chosenLines() {
  const wanted = [...list.chips].reduce((bits, flag) => bits | FLAG[flag], 0);
  const fits = (i) => (table.flags[i] & wanted) === wanted && (!list.examples || list.examples.has(table.example[i])) &&
    matches(i) && (list.value === null || tagOf(i) === list.value);
  const inStep = (group) => list.step === "" || stepKey(group) === list.step;
  let lines = groups.filter((group) => inStep(group) && group.members.some(fits));
  if (list.unit === "each") {
    const alone = (group, i) => ({...group, members: [i], flags: table.flags[i], mean: table.reward[i],
      order: group.order + table.generation[i] / 1e6});
    lines = lines.flatMap((group) => group.members.filter(fits).map((i) => alone(group, i)));
  }
  return lines.sort(ORDERS[list.sort]);
}

// Columns of the data with 2 to 50 values in this file; values are foreign text.
const tagColumns = (() => {
  const values = new Map();
  for (const tags of meta.tags) {
    for (const [name, value] of Object.entries(tags)) values.set(name, (values.get(name) || new Set()).add(value));
  }
  return [...values].filter(([, found]) => found.size > 1 && found.size <= 50).map(([name]) => name);
})();
const tagOf = (i) => meta.tags[table.tags[i]][list.column] ?? "(none)";

// The values of the chosen column, each with its trajectories and their mean reward.
function tagGroups() {
  const found = new Map();
  for (let i = 0; i < total; i++) {
    if (list.step !== "" && stepKey(groupOf[i]) !== list.step) continue;
    const group = found.get(tagOf(i)) || {num: 0, rewards: []};
    group.num += 1;
    if (table.reward[i] !== null) group.rewards.push(table.reward[i]);
    found.set(tagOf(i), group);
  }
  return [...found].sort(([a], [b]) => a < b ? -1 : 1);
}

function tagChips() {
  const chips = el("div.chips.tags");
  for (const [value, {num, rewards}] of list.column ? tagGroups() : []) {
    const mean = rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length;
    const chip = button("", () => {
      list.value = list.value === value ? null : value;
      drawFilters();
    }, list.value === value);
    add(chips, add(chip, named(value.slice(0, 150)), ` ${count(num)}${rewards.length ? ` · reward ${mean.toFixed(2)}` : ""}`));
  }
  return chips;
}

const stepKey = (group) => `${group.run}/${group.isEval}/${group.step}`;

function matches(i) {
  if (!list.query) return true;
  const names = [example(i), meta.examples[table.example[i]]];
  if (names.some((name) => name.toLowerCase().includes(list.query))) return true;
  if (!list.texts) return false;
  const text = list.texts[table.text_block[i]], start = table.text_start[i];
  const found = text.indexOf(list.query, start);
  return found >= 0 && found + list.query.length <= start + table.text_length[i];
}

// ---------------------------------------------------------------- filters

function drawFilters() {
  const search = document.createElement("input");
  search.type = "search";
  search.id = "search";
  search.placeholder = "text, example   ( / )";
  search.setAttribute("aria-label", "Search texts and examples");
  search.value = list.query;
  search.addEventListener("input", () => searchFor(search.value));
  const chips = el("div.chips");
  for (const {flag, label} of CHIPS) {
    if (!chipCounts[flag]) continue;
    add(chips, button(`${label} ${count(chipCounts[flag])}`, () => toggleChip(flag), list.chips.has(flag)));
  }
  if (list.examples) add(chips, button("examples of the comparison ×", () => filterBy({}), true));
  const keys = new Map(groups.map((group) => [stepKey(group), stepName(group)]));
  const steps = [["", "all steps"], ...keys];
  const lines = [
    el("div.line",
      choice("Unit", [["groups", "groups"], ["each", "each"]], list.unit, (value) => (list.unit = value)),
      choice("Step", steps, list.step, (value) => (list.step = value))),
    el("div.line",
      choice("Order", Object.entries(SORTS), list.sort, (value) => (list.sort = value)),
      el("span.found")),
  ];
  if (tagColumns.length) {
    const columns = [["", "all of the data"], ...tagColumns.map((name) => [name, `by ${name}`])];
    const choose = (name) => Object.assign(list, {column: name, value: null});
    lines.push(el("div.line", choice("Column", columns, list.column, choose)), tagChips());
  }
  add(clear(document.getElementById("filters")), search, chips, lines);
  drawList(true);
}

function stepName(group) {
  return `${group.run ? "other · " : ""}${group.isEval ? "evaluation " : "step "}${group.step}`;
}

function choice(label, options, value, onChange) {
  const node = document.createElement("select");
  node.setAttribute("aria-label", label);
  for (const [name, text] of options) {
    const option = el("option", spelled(text));
    option.value = name;
    option.selected = name === value;
    add(node, option);
  }
  node.addEventListener("change", () => {
    onChange(node.value);
    drawFilters();
  });
  return node;
}

function toggleChip(flag) {
  if (!list.chips.delete(flag)) list.chips.add(flag);
  drawFilters();
}

// Set the filters as a card of the overview or the comparison asks; what is not named is reset.
function filterBy({chips = [], step = "", sort = "problems", unit = "groups", examples = null}) {
  Object.assign(list, {chips: new Set(chips), step, sort, unit, examples, query: "", value: null});
  drawFilters();
}

async function searchFor(text) {
  list.query = text.toLowerCase();
  if (list.query && !list.texts) {
    drawList(true, "reading texts …");
    list.texts = await loweredTexts();
  }
  drawList(true);
}

// ---------------------------------------------------------------- lines

function drawList(isNew, note) {
  const rows = document.getElementById("rows"), sizer = document.getElementById("sizer");
  if (isNew) {
    list.lines = chosenLines();
    sizer.style.height = `${list.lines.length * ROW}px`;
    rows.scrollTop = 0;
    const all = list.unit === "each" ? total : groups.length;
    const found = document.querySelector("#filters .found");
    put(clear(found), note || `${count(list.lines.length)} of ${count(all)}`);
  }
  const first = Math.max(0, Math.floor(rows.scrollTop / ROW) - 4);
  const last = Math.min(list.lines.length, first + Math.ceil((rows.clientHeight || 800) / ROW) + 8);
  clear(sizer);
  for (let i = first; i < last; i++) add(sizer, lineNode(list.lines[i], i));
  if (!list.lines.length) add(sizer, el("p.quiet", "Nothing fits these filters."));
}

function lineNode(line, position) {
  const isOn = line.members.includes(shown.trajectory);
  const node = el(isOn ? "div.row.on" : "div.row");
  node.style.top = `${position * ROW}px`;
  node.setAttribute("role", "option");
  node.setAttribute("aria-selected", String(isOn));
  const first = line.members[0], isGroup = list.unit === "groups";
  const isMarked = line.members.some((i) => bookmarks.has(linkOf(i)));
  const place = `${stepName(line)} · group ${line.number}${isGroup ? "" : ` · ${table.generation[first]}`}`;
  add(node, 
    el("div.top", el("span.name", isMarked ? "★ " : null, foreign(example(first).slice(0, 150), "mark")), ticks(line)),
    el("div.bottom", noteOf(line), el("span.place", place)));
  node.addEventListener("click", (event) => {
    const tick = event.target.closest(".tick");
    go(tick ? tick.trajectory : isGroup ? worst(line) : first);
  });
  return node;
}

// The member that a click opens: one with a problem that the filters ask for, else with any, else the first.
function worst(line) {
  const wanted = [...list.chips].reduce((bits, flag) => bits | FLAG[flag], 0);
  const fitting = line.members.filter((i) => (table.flags[i] & wanted) === wanted && matches(i));
  const among = fitting.length ? fitting : line.members;
  return among.reduce((best, i) => (problemOf(table.flags[i]) > problemOf(table.flags[best]) ? i : best), among[0]);
}

function ticks(line) {
  return el("span.ticks", line.members.slice(0, 32).map((i) => {
    const node = el("i.tick");
    const reward = table.reward[i];
    if (reward === null) node.classList.add("none");
    else node.style.backgroundColor = rewardColour(reward);
    if (i === shown.trajectory) node.classList.add("on");
    node.style.height = `${6 + Math.round(8 * rewardSize(reward ?? 0))}px`;
    node.trajectory = i;
    return node;
  }));
}

// Blue above 0, orange below, grey for 0; paler for smaller ones.
function rewardColour(reward) {
  const hue = reward > 0 ? "--blue" : reward < 0 ? "--orange" : "--grey";
  return `rgb(var(${hue}) / ${(0.4 + 0.6 * rewardSize(reward)).toFixed(2)})`;
}

function noteOf(line) {
  const errors = line.members.filter((i) => has(i, "call_errors")).length;
  const isEach = line.members.length === 1;
  const first = line.members[0];
  const problem = CHIPS.find(({flag, weight}) => weight > 0 && line.flags & FLAG[flag]);
  if (isEach) {
    const reward = table.reward[first] === null ? "not scored" : show(table.reward[first], true, 2);
    return el(problem ? "span.problem" : "span", `${problem ? problem.label : stopReason(first)} · ${reward}`);
  }
  if (problem && problem.flag === "call_errors") return el("span.problem", `${errors} with call errors`);
  if (problem) return el("span.problem", problem.label);
  if (line.flags & FLAG.same) return el("span", "all the same reward");
  return el("span", `mean ${show(line.mean, true, 2)}`);
}

const lineOf = (trajectory) => list.lines.findIndex((line) => line.members.includes(trajectory));

// Scroll the list to the trajectory that is shown, where its line is out of sight.
function revealInList() {
  const rows = document.getElementById("rows"), at = lineOf(shown.trajectory), top = at * ROW;
  const isVisible = top >= rows.scrollTop && top + ROW <= rows.scrollTop + rows.clientHeight;
  if (at >= 0 && !isVisible) rows.scrollTop = top - Math.max(0, rows.clientHeight - ROW) / 2;
  drawList(false);
}

function moveInList(by) {
  const to = Math.min(list.lines.length - 1, Math.max(0, lineOf(shown.trajectory) + by));
  if (!list.lines[to]) return;
  go(list.unit === "groups" ? worst(list.lines[to]) : list.lines[to].members[0]);
}

function moveInGroup(by) {
  if (shown.trajectory === null) return;
  const members = groupOf[shown.trajectory].members;
  go(members[(members.indexOf(shown.trajectory) + by + members.length) % members.length]);
}
