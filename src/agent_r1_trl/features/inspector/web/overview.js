// The run in one sentence, what to look at first, its curves, what its guard did, where the time went, its recipe.

const run = meta.runs[0];
const hasCritic = "critic/explained_variance" in run.metrics; // then groups are not what teaches
const FIRST = [
  ["reward"], ["env/em", "env/success", "reward/outcome"], hasCritic ? [] : ["frac_reward_zero_std"], ["entropy"], ["kl"],
  ["rollout/turns"], ["completions/mean_length"], ["rollout/truncated_share"], ["tools/call_error_share"], ["grad_norm"],
  ["loss"], ["critic/explained_variance"], ["step_time"],
];
// Of a rollout beside the update, a step takes what the update waits for it.
const ROLLOUT = run.metrics["time/wait_s"] ? [["time/wait_s", "waiting for the rollout"]]
  : [["time/generate_s", "generating"], ["time/env_s", "tools and environments"]];
const PHASES = [...ROLLOUT, ["time/resample_s", "resampling"], ["time/sync_s", "weights to the sampler"]];

const last = (values) => values?.findLast((value) => value !== null) ?? null;
const first = (values) => values?.find((value) => value !== null) ?? null;

function drawOverview() {
  const screen = clear(document.getElementById("overview"));
  add(screen, 
    el("h1", foreign(run.name)),
    el("p.sentence", sentence()),
    run.left_out.length ? el("p.note", `This file holds the last ${plural(run.steps.length, "step")}: with steps ` +
      `${run.left_out[0]} to ${run.left_out.at(-1)} it would be larger than a browser likes.`) : null,
    run.tokenizer || !table.tokens.some((number) => number) ? null
      : el("p.note", "No tokenizer was found: tokens are shown as numbers. Pass --tokenizer."),
    bookmarksPart(), cards(), eventsPart(), curvesPart(), timePart(), recipePart(), keysPart());
}

function sentence() {
  const rewards = run.metrics.reward, parts = [];
  if (rewards && first(rewards) !== null) {
    const logs = rewards.filter((value) => value !== null).length;
    const from = show(first(rewards), true, 2), to = show(last(rewards), true, 2);
    const [step, best] = points(run, "reward").reduce((a, b) => (b[1] > a[1] ? b : a));
    const fell = best > Math.max(first(rewards), last(rewards)) ? `; at step ${step} it was ${show(best, true, 2)}` : "";
    parts.push(logs > 1 ? `Reward went from ${from} to ${to} in ${plural(logs, "log")}${fell}.` : `Reward is ${to}.`);
  } else {
    const known = Object.keys(table.run).filter((i) => table.run[i] === 0 && table.reward[i] !== null);
    const solved = known.filter((i) => !has(i, "unsolved") && !has(i, "lost")).length;
    const mean = known.reduce((sum, i) => sum + table.reward[i], 0) / known.length;
    if (known.length) parts.push(`${count(solved)} of ${plural(known.length, "trajectory", "trajectories")} are solved; ` +
      `the mean reward is ${show(mean, true, 2)}.`);
  }
  const taught = last(run.metrics["group/taught_share"]);
  const zero = taught === undefined || taught === null ? last(run.metrics.frac_reward_zero_std) : 1 - taught;
  if (zero && !hasCritic) parts.push(`${Math.round(100 * zero)} % of the last groups had no advantage, and taught nothing.`);
  const em = run.metrics["env/em"];
  if (em && first(em) !== null) parts.push(`Exact match ${show(first(em), false, 2)} → ${show(last(em), false, 2)}.`);
  const trained = table.eval.filter((isEval, i) => !isEval && table.run[i] === 0).length;
  const evaluated = table.eval.filter((isEval, i) => isEval && table.run[i] === 0).length;
  parts.push(`${[trained && `${plural(trained, "trajectory", "trajectories")} of training`,
    evaluated && `${count(evaluated)} of evaluations`].filter(Boolean).join(" and ")} are in this file.`);
  return parts.join(" ");
}

// ---------------------------------------------------------------- look at these first

const CARDS = [
  ["lost", "lost to an infrastructure failure", "neither in the baseline nor in the loss"],
  ["gap", "with an advantage that the record does not explain", "please report it"],
  ["call_errors", "with call errors", "tool calls that failed"],
  ["invalid", "with an unusable turn", "malformed calls, unknown tools"],
  ["truncated", "ended by a limit", "turns, tokens or time"],
  ["untrained", "not trained on", "filtered, replaced, lost, or without advantage"],
  ["same", "in groups with one reward", "a group like that has no signal"],
  ["masked", "with a masked secret", ""],
];

function cards() {
  const filtering = ([flag, text, hint]) => card(count(chipCounts[flag]), text, hint, () => {
    filterBy({chips: [flag]});
    goToList();
  });
  const list = CARDS.filter(([flag]) => chipCounts[flag]).map(filtering);
  const apart = extremeRatio();
  if (apart) list.push(apart);
  const spread = groups.findLast((group) => group.run === 0 && !group.isEval && group.spread > 0);
  if (spread) {
    const reward = (i) => table.reward[i] ?? Infinity;
    const at = spread.members.reduce((low, i) => (reward(i) < reward(low) ? i : low));
    const open = () => go(at, natural(at));
    list.push(card("±", "a group of the last step that disagrees", "one did better than its siblings", open));
  }
  return el("section", el("h2", "Look at these first"), 
    el("div.cards", list.length ? list : el("p.quiet", "Nothing stands out.")));
}

// The token on which sampler and trainer disagree most, where the record has the column.
function extremeRatio() {
  const [size, trajectory] = meta.worst_ratio || [0, 0];
  if (size < 0.05) return null;
  return card(show(size, false, 2), "largest gap between sampler and trainer", "log-probs of one token", () => {
    shown.column = "log_ratio";
    go(trajectory);
  });
}

function card(number, text, hint, onClick) {
  const node = button("", onClick);
  node.className = "card";
  add(node, el("b", number), el("span", text, hint ? el("span.quiet", hint) : null));
  return node;
}

// ---------------------------------------------------------------- curves

function curvesPart() {
  const names = Object.keys(run.metrics).filter((name) => !["step", "epoch"].includes(name));
  if (!names.length) return el("section", el("h2", "Metrics"), el("p.quiet", "No metrics were found in the run."));
  const chosen = FIRST.map((group) => group.find((name) => first(run.metrics[name]) !== null)).filter(Boolean);
  const rest = names.filter((name) => !chosen.includes(name) && first(run.metrics[name]) !== null);
  return el("section", el("h2", "Metrics"), el("div.curves", chosen.map(curve)),
    rest.length ? fold(false, [`${rest.length} more`], (body) => add(body, el("div.curves", rest.map(curve)))) : null);
}

function points(source, name) {
  const values = source?.metrics[name] || [], steps = source?.metrics.step || values.map((_, i) => i + 1);
  return values.map((value, i) => [steps[i] ?? i + 1, value]).filter(([, value]) => value !== null);
}

// A small curve: the last value at the right of its name, axes with least and most, the value under the pointer beside it.
function curve(name) {
  const [W, H] = [240, 56];
  const lines = meta.runs.map((source) => points(source, name));
  const all = lines.flat(), xs = all.map(([x]) => x), ys = all.map(([, y]) => y);
  const [x0, x1, y0, y1] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const px = (x) => 3 + ((W - 6) * (x - x0)) / (x1 - x0 || 1);
  const py = (y) => (y1 > y0 ? H - 4 - ((H - 8) * (y - y0)) / (y1 - y0) : H / 2);
  const picture = svg("svg", {viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", class: "curve"});
  if (y0 < 0 && y1 > 0) add(picture, svg("line", {x1: 0, x2: W, y1: py(0), y2: py(0), class: "zero"}));
  lines.forEach((line, i) => {
    const d = line.map(([x, y], n) => `${n ? "L" : "M"}${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("");
    if (line.length > 1) add(picture, svg("path", {d, class: i ? "line other" : "line"}));
    else if (line.length) add(picture, svg("circle", {cx: px(line[0][0]), cy: py(line[0][1]), r: 3, class: "dot"}));
  });
  const cursor = svg("line", {x1: 0, x2: 0, y1: 0, y2: H, class: "cursor"});
  add(picture, cursor);
  const own = lines[0], tip = el("span.tip");
  tip.hidden = true;
  picture.addEventListener("pointermove", (event) => {
    const box = picture.getBoundingClientRect();
    const x = x0 + ((event.clientX - box.left) / box.width) * (x1 - x0);
    const nearest = (line) => line.reduce((best, point) =>
      (!best || Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best), null);
    const near = nearest(own.length ? own : all);
    cursor.setAttribute("x1", px(near[0]));
    cursor.setAttribute("x2", px(near[0]));
    cursor.classList.add("on");
    const beside = lines[1]?.length ? el("span.other", ` ${show(nearest(lines[1])[1])}`) : null;
    add(clear(tip), el("b", show(near[1])), beside, ` at step ${show(near[0], false, 0)}`);
    tip.hidden = false;
    const isRight = px(near[0]) > W / 2; // the text stands where there is room for it
    tip.style.left = isRight ? "auto" : `${(100 * px(near[0])) / W}%`;
    tip.style.right = isRight ? `${100 - (100 * px(near[0])) / W}%` : "auto";
  });
  picture.addEventListener("pointerleave", () => {
    cursor.classList.remove("on");
    tip.hidden = true;
  });
  const other = lines[1]?.length ? el("span.other", ` ${show(lines[1].at(-1)[1])}`) : null;
  const ends = y0 === y1 ? [show(y0)] : [show(y1), show(y0)];
  const steps = x0 === x1 ? [`step ${show(x0, false, 0)}`] : [show(x0, false, 0), "step", show(x1, false, 0)];
  return el("figure",
    el("figcaption", el("span.name", foreign(name)), el("span", el("b", show(own.at(-1)?.[1] ?? null)), other)),
    el("div.plot", el("div.yaxis", ends.map((text) => el("span", text))), el("div.area", picture, tip)),
    el("div.xaxis", steps.map((text) => el("span", text))));
}

// ---------------------------------------------------------------- guard, time, recipe, keys

function eventsPart() {
  if (!run.events.length) return null;
  const lines = run.events.map((event) => {
    const causes = Object.values(event.signals || {}).join("; ");
    return el("tr", el("td", `step ${event.step}`), el("td", foreign(event.state)),
      el("td", el("b", foreign(event.action)), event.outcome ? [" (", foreign(event.outcome), ")"] : null),
      el("td", foreign(event.text), causes ? el("span.quiet", " Because ", foreign(causes)) : null));
  });
  return el("section", el("h2", "What the guard did"), el("div.scroll", el("table.events", el("tbody", lines))));
}

function timePart() {
  const logs = (run.metrics.step_time || []).filter((value) => value !== null).length; // a log has the mean of its steps
  const perStep = (name) => (run.metrics[name] || []).reduce((sum, value) => sum + (value || 0), 0) / logs;
  const whole = perStep("step_time");
  const known = PHASES.map(([name, label]) => [label, perStep(name)]).filter(([, time]) => time > 0);
  if (!known.length || !whole) return null;
  const rest = whole - known.reduce((sum, [, time]) => sum + time, 0);
  if (rest > 0) known.push(["update and the rest", rest]);
  const all = known.reduce((sum, [, time]) => sum + time, 0);
  const bar = el("div.timebar", known.map(([, time], i) => {
    const part = el(`i.phase${i}`);
    part.style.width = `${(100 * time) / all}%`;
    return part;
  }));
  const labels = known.map(([label, time], i) =>
    el("span", el(`i.key.phase${i}`), ` ${label} ${seconds(time)}, ${Math.round((100 * time) / all)} %`));
  return el("section", el("h2", "Time"), bar, el("div.timekeys", labels),
    el("p.quiet", `${seconds(whole)} a step, on average. Where phases overlap, their sum is more than that.`));
}

function recipePart() {
  if (!run.recipe) return null;
  const title = ["recipe (", foreign(run.recipe_file), ")"];
  return el("section", fold(false, title, (body) => add(body, el("pre", foreign(run.recipe)))));
}

function keysPart() {
  const letters = COLUMNS.map(({key, label}) => [key, `colour by ${label}`]);
  const rows = [...KEYBOARD.map(([key, , text]) => [key, text]), ...letters];
  const lines = rows.map(([key, text]) => [el("dt", key), el("dd", text)]);
  return el("section", fold(false, ["keys"], (body) => add(body, el("dl.keys", lines))));
}
