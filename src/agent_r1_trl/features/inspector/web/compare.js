// Two runs, or two evaluations: their examples, better and worse. Curves stand over each other in the overview.

const isComparison = meta.runs.length > 1;
const comparison = {show: "all"};

// Example -> mean reward in either run; of evaluations where both have some, else of training.
function pairsOf() {
  const counts = [0, 1].map((number) => table.eval.filter((isEval, i) => isEval && table.run[i] === number).length);
  const wanted = counts[0] && counts[1] ? 1 : 0;
  const sums = new Map();
  for (let i = 0; i < total; i++) {
    if (table.eval[i] !== wanted || table.reward[i] === null) continue;
    const key = table.example[i];
    if (!sums.has(key)) sums.set(key, [[0, 0, []], [0, 0, []]]);
    const cell = sums.get(key)[table.run[i]];
    cell[0] += table.reward[i];
    cell[1]++;
    cell[2].push(i);
  }
  const pairs = [];
  for (const [key, [a, b]] of sums) {
    if (a[1] && b[1]) pairs.push({example: key, one: a[0] / a[1], other: b[0] / b[1], a: a[2], b: b[2]});
  }
  pairs.forEach((pair) => (pair.change = pair.one - pair.other));
  pairs.sort((a, b) => Math.abs(b.change) - Math.abs(a.change) || a.example - b.example);
  return {pairs, isEval: wanted === 1, alone: sums.size - pairs.length};
}

function drawCompare() {
  const screen = clear(document.getElementById("compare"));
  const {pairs, isEval, alone} = pairsOf();
  const [one, other] = meta.runs;
  const better = pairs.filter(({change}) => change > 1e-9), worse = pairs.filter(({change}) => change < -1e-9);
  const mean = (name) => pairs.reduce((sum, pair) => sum + pair[name], 0) / (pairs.length || 1);
  const kinds = {all: ["all", pairs], better: ["better", better], worse: ["worse", worse],
    ties: ["the same", pairs.filter(({change}) => Math.abs(change) <= 1e-9)]};
  const chip = ([name, [label, list]]) => button(`${label} ${count(list.length)}`, () => {
    comparison.show = name;
    drawCompare();
  }, comparison.show === name);
  const chips = el("div.chips", Object.entries(kinds).map(chip));
  const most = Math.max(1e-9, ...pairs.map(({change}) => Math.abs(change)));
  const visible = kinds[comparison.show][1].slice(0, 500);
  add(screen, 
    el("h1", foreign(one.name), " against ", foreign(other.name)),
    pairs.length ? el("p.sentence", `Mean reward ${show(mean("one"), true, 2)} against ${show(mean("other"), true, 2)} on ` +
      `${plural(pairs.length, "example")} that both have, ${isEval ? "in their evaluations" : "while training"}: ` +
      `${count(better.length)} better, ${count(worse.length)} worse.`) : el("p.sentence", "They have no example in common."),
    alone ? el("p.quiet", `${plural(alone, "example")} more in one of them alone.`) : null,
    pairs.length ? el("section", el("h2", "Examples"), chips, el("div.scroll", pairTable(visible, most)),
      kinds[comparison.show][1].length > 500 ? el("p.quiet", "The 500 largest differences are listed.") : null) : null,
    curvesPart());
}

function pairTable(pairs, most) {
  const head = el("tr", ["example", "this", "other", "difference"].map((label) => el("th", label)), el("th"));
  const lines = pairs.map((pair) => {
    const bar = el("span.difference"), fill = el(pair.change < 0 ? "i.below" : "i.above");
    fill.style.width = `${(50 * Math.abs(pair.change)) / most}%`;
    add(bar, fill);
    const opening = (value, members) => el("td", button(show(value, true, 2), () => go(members.at(-1))));
    return el("tr", el("td", named(example(pair.a.at(-1)))), opening(pair.one, pair.a),
      opening(pair.other, pair.b), el("td.number", show(pair.change, true, 2)), el("td", bar));
  });
  return el("table.pairs", el("thead", head), el("tbody", lines));
}
