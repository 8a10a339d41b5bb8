// What tokens are coloured by. A letter belongs to a column, whether the others are there or not.

const COLUMNS = [
  {name: "mask", label: "mask", key: "k", hint: "blue: sampled by the policy, trained on"},
  {name: "advantage", label: "advantage", key: "a", isSigned: true},
  {name: "value", label: "value", key: "v", isSigned: true},
  {name: "log_ratio", label: "log ratio", key: "r", isSigned: true, hint: "trainer − sampler"},
  {name: "entropy", label: "entropy", key: "e"},
  {name: "logprob", label: "log-prob", key: "l", isNegative: true},
];
const OTHERS = [
  {name: "return", label: "return"},
  {name: "reference", label: "reference's log-prob"},
];
const LEVELS = 24;
for (const hue of ["blue", "orange", "purple"]) { // classes, because a style of each token's own takes twice the time
  for (let level = 1; level <= LEVELS; level++) {
    const share = ((level / LEVELS) ** 0.7).toFixed(3); // so that half of the scale is seen
    const colour = `rgb(var(--${hue}) / calc(${share} * var(--full)))`;
    document.styleSheets[0].insertRule(`.${hue}${level} { background-color: ${colour}; }`);
  }
}

const scaleOf = (name) => meta.scales[name] || 1;

// The class with the background of a value; "" for none.
function colourOf(column, value) {
  if (column.name === "mask") return "blue15";
  const level = Math.round(LEVELS * Math.min(1, Math.abs(value) / scaleOf(column.name)));
  if (!level) return ""; // NaN, too
  return (column.isSigned ? (value > 0 ? "blue" : "orange") : "purple") + level;
}

function availableColumns(opened) {
  return COLUMNS.filter((column) => column.name === "mask" || opened.columns[column.name]);
}

function paintToken(node, opened, column) {
  const isChosen = opened === shown.opened && node.position === shown.position;
  node.className = `${node.kind}${isChosen ? " chosen " : " "}${colourOf(column, opened.at(column.name, node.position))}`;
}

function legend(column) {
  if (column.name === "mask") return el("span.legend", swatch(column, 1), column.hint);
  const full = scaleOf(column.name), sign = column.isNegative ? -1 : 1;
  const steps = column.isSigned ? [-1, -0.5, 0, 0.5, 1] : [0, 0.5, 1];
  return el("span.legend", steps.map((share) => {
    const value = share * full * sign, text = show(value, column.isSigned && value !== 0, full < 0.1 ? 4 : 2);
    const mark = Math.abs(share) < 1 ? "" : value > 0 ? "≥ " : "≤ ";
    return el("span.step", swatch(column, value), `${mark}${text}`);
  }));
}

function swatch(column, value) {
  return el(`span.swatch.${colourOf(column, value)}`);
}
