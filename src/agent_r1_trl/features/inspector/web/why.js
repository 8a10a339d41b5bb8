// Why a token was pushed up or down: its numbers, the sum that Python worked out, and its group.

function drawWhy() {
  const panel = clear(document.getElementById("why"));
  const {opened, position} = shown;
  if (!opened) return;
  const bar = button("", () => panel.classList.toggle("open"));
  bar.className = "bar";
  add(bar, el("span", whyLine(opened, position)), el("span", "▴"));
  add(panel, bar, el("div.inside",
    position === null ? null : tokenPart(opened, position), advantagePart(opened, position), groupPart(opened),
    position === null ? el("p.quiet", "Click a token for its numbers; n and p step through them.") : null));
}

// "A −0.866 = (−1.00 − 0.00) / 1.15", where the last sum is one of all tokens.
function whyLine(opened, position) {
  const value = position === null ? table.advantage[opened.number] : opened.at("advantage", position);
  if (value === null || Number.isNaN(value)) return `reward ${show(table.reward[opened.number], true)}`;
  const sum = position !== null && opened.why.tokens.length ? shortSum(tokenSum(opened, position)) : shortSum(opened.why.lines);
  return `A ${show(value, true)}${sum ? ` = ${sum}` : ""}`;
}

// The last sum of [label, value] lines in one line; the first character of a label says what its number does.
function shortSum(lines) {
  let text = "", isSum = false;
  for (const [label, value] of lines.slice(0, -1)) {
    const [mark] = label, number = show(value, false, 2);
    if (mark === "*" || mark === "/") text = `${isSum ? `(${text})` : text} ${mark === "*" ? "×" : "/"} ${number}`;
    else if (mark === "+" || mark === "-") text = `${text} ${mark === "-" ? "−" : "+"} ${value < 0 ? `(${number})` : number}`;
    else text = number; // a sum begins, or goes on from an intermediate result
    isSum = mark === "+" || mark === "-" || (isSum && mark !== "=" && "*/".includes(mark) === false);
  }
  return text;
}

// The sums of a token. Left out of the file are results, and one part of the last sum, whose result is the advantage.
function tokenSum(opened, position) {
  const lines = opened.why.tokens.map(([label, values]) => [label, values ? values[opened.nth[position]] : 0]);
  const open = opened.why.tokens.findIndex(([label, values]) => !values && !label.startsWith("= "));
  if (open >= 0) {
    const resultOf = (value) => ((lines[open][1] = value), workOut(lines)), base = resultOf(0);
    lines[open][1] = (opened.at("advantage", position) - base) / (resultOf(1) - base);
  }
  workOut(lines);
  return lines;
}

// Fill in the results of sums; returns the last.
function workOut(lines) {
  let sum = 0;
  for (const line of lines) {
    const [[mark, space], value] = line;
    if (mark === "=") line[1] = sum;
    else if (space !== " ") sum = value;
    else sum = {"+": sum + value, "-": sum - value, "*": sum * value, "/": sum / value}[mark] ?? value;
  }
  return sum;
}

// Lines of sums as rows: signs for people, results in bold, a gap where another sum begins.
function sumRows(lines) {
  const signs = {"+": "+", "-": "−", "*": "×", "/": "÷", "=": "="};
  return lines.map(([label, value], i) => {
    const mark = signs[label[0]], kind = label[0] === "=" ? "sum" : !mark && i ? "begins" : "plain";
    return [mark ? `${mark}${label.slice(1)}` : label, show(value, kind === "sum", 4), kind];
  });
}

function tableOf(rows) {
  return el("table", el("tbody", rows.map(([label, value, kind]) =>
    el(`tr.${kind || "plain"}`, el("th", foreign(label)), el("td", typeof value === "string" ? foreign(value) : value)))));
}

function tokenPart(opened, position) {
  const cell = cellsOf(opened.completion, position, Math.min(position + MOST_JOINED, opened.completion.length))[0];
  const turn = opened.head.turns.findIndex(({span}) => position >= span[0] && position < span[1]);
  const rows = [];
  for (const column of [...COLUMNS, ...OTHERS]) {
    const values = opened.columns[column.name];
    if (!values) continue;
    const note = {logprob: (value) => `p ${show(Math.exp(value), false, 3)}`}[column.name];
    const value = opened.at(column.name, position);
    rows.push([column.label, el("span", show(value, column.name === "advantage", 4),
      note && !Number.isNaN(value) ? el("span.quiet", ` ${note(value)}`) : null)]);
  }
  const reward = opened.head.badges.filter(([at]) => at >= position && at < position + cell.num);
  return el("section", el("h2", "Token"),
    el("p.spelled", put(el("code"), cellText(cell), "mark")),
    el("p.quiet", `position ${count(position)} · turn ${turn + 1}`,
      cell.num > 1 ? ` · one character over ${cell.num} tokens` : null),
    tableOf(rows), reward.map(([, name, value]) => badge(name, value)));
}

function advantagePart(opened, position) {
  const {why, head} = opened, i = opened.number;
  if (table.eval[i]) return null;
  const own = position === null ? [] : tokenSum(opened, position);
  const rows = sumRows([...why.lines, ...own]);
  const gap = has(i, "gap") ? el("p.problem", `Recomputed from the record, and off by up to ${show(why.gap)}.`)
    : el("p.quiet", "Recomputed from the record, equal to what was trained on.");
  const none = opened.columns.advantage ? "Recorded advantage; no explanation." : "No advantage was recorded.";
  const [estimator, scale] = head.how;
  return el("section", el("h2", "Why this advantage"),
    rows.length ? tableOf(rows) : null,
    why.tokens.length && position === null ? el("p.quiet", "Each token has a sum of its own: click one.") : null,
    head.why ? gap : el("p.quiet", none),
    estimator ? el("p.quiet", named(estimator), scale ? [", scale_rewards ", named(scale)] : null) : null);
}

function groupPart(opened) {
  const group = groupOf[opened.number];
  if (group.members.length < 2) return null;
  const rewards = group.members.map((i) => table.reward[i]).filter((reward) => reward !== null);
  const low = Math.min(0, ...rewards), high = Math.max(0, ...rewards), span = high - low || 1;
  const place = (value) => `${(100 * (value - low)) / span}%`;
  const lines = group.members.map((i) => {
    const bar = el("span.track"), reward = table.reward[i];
    if (reward !== null) {
      const fill = el(reward < 0 ? "i.fill.below" : "i.fill");
      fill.style.left = place(Math.min(0, reward));
      fill.style.width = `${(100 * Math.abs(reward)) / span}%`;
      add(bar, fill);
    }
    if (group.mean !== null) {
      const line = el("i.mean");
      line.style.left = place(group.mean);
      add(bar, line);
    }
    const node = button("", () => go(i));
    node.className = i === opened.number ? "member on" : "member";
    add(node, el("span", String(table.generation[i])), bar, el("span.value", reward === null ? "none" : show(reward, true, 2)));
    return node;
  });
  const others = group.members.filter((i) => i !== opened.number);
  const isComparing = shown.mate !== null;
  const compare = el("div.comparing",
    isComparing ? button("close the comparison ( c )", () => compareWith(null)) : el("span.quiet", "side by side with ( c )"),
    others.slice(0, 16).map((i) => button(String(table.generation[i]), () => compareWith(i), i === shown.mate)));
  return el("section", el("h2", "Its group"), lines, el("p.quiet", "line: mean of the group"), compare);
}

function choosePosition(position) {
  for (const node of document.querySelectorAll("#middle .chosen")) node.classList.remove("chosen");
  shown.position = position;
  drawWhy();
  if (position === null) return;
  const node = [...document.querySelectorAll("#middle .turns:not(.mate) .token")].find((token) => token.position === position);
  if (!node) return;
  node.classList.add("chosen");
  node.scrollIntoView({block: "nearest"});
}

// The next or previous token that the policy sampled.
function stepToken(by) {
  fillAll();
  const tokens = [...document.querySelectorAll("#middle .turns:not(.mate) .tokens .token")];
  if (!tokens.length) return;
  const at = tokens.findIndex((token) => token.position === shown.position);
  choosePosition(tokens[at < 0 ? 0 : Math.min(tokens.length - 1, Math.max(0, at + by))].position);
}
