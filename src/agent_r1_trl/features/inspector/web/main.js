// Which screen is shown follows from the link: "" the overview, "#list", "#compare", "#step/group/generation",
// "#step/group/generation/sibling". An evaluation's step is "e10", one of the other run "b10".

const LINK = /^#(b?e?\d{1,9}\/\d{1,9}\/\d{1,9})(?:\/(\d{1,9}))?$/;
const SCREENS = {overview: "Overview", trajectories: "Trajectories", compare: "Compare"};

function go(number, mate = null) {
  location.hash = linkOf(number) + (mate === null ? "" : `/${table.generation[mate]}`);
}

function goToList() {
  location.hash = "#list";
}

function route() {
  const hash = location.hash;
  const found = LINK.exec(hash);
  const number = found ? links.get(`#${found[1]}`) : undefined;
  const screen = hash === "" || hash === "#" ? "overview" : hash === "#compare" && isComparison ? "compare" : "trajectories";
  showScreen(screen);
  route.wanted = number ?? null;
  if (number !== undefined) {
    const mate = groupOf[number].members.find((i) => String(table.generation[i]) === found[2]) ?? null;
    showTrajectory(number, mate === number ? null : mate);
    document.body.classList.add("reading");
    return;
  }
  document.body.classList.remove("reading");
  if (screen !== "trajectories") return;
  if (hash !== "#list") {
    const middle = clear(document.getElementById("middle"));
    add(middle, el("p.note", "There is no such trajectory in this file: ", foreign(hash.slice(0, 80))));
    Object.assign(shown, {trajectory: null, opened: null});
    drawWhy();
  } else if (shown.trajectory === null && list.lines.length && !isNarrow()) {
    go(worst(list.lines[0]));
    return;
  }
  revealInList();
}

const isNarrow = () => matchMedia("(max-width: 760px)").matches;

function showScreen(name) {
  for (const screen of Object.keys(SCREENS)) document.getElementById(screen).hidden = screen !== name;
  document.body.dataset.screen = name;
  const tabs = clear(document.getElementById("tabs"));
  for (const [screen, label] of Object.entries(SCREENS)) {
    if (screen === "compare" && !isComparison) continue;
    const link = el(screen === name ? "a.on" : "a", label);
    const trajectories = shown.trajectory === null || isNarrow() ? "#list" : linkOf(shown.trajectory);
    link.href = {overview: "#", compare: "#compare", trajectories}[screen];
    if (screen === name) link.setAttribute("aria-current", "page");
    add(tabs, link);
  }
  if (name === "trajectories") drawList(false);
}

// ---------------------------------------------------------------- keys

const KEYBOARD = [
  ["j", () => moveInList(1), "next in the list"],
  ["i", () => moveInList(-1), "previous in the list"],
  ["s", () => moveInGroup(1), "next sibling of the group"],
  ["w", () => moveInGroup(-1), "previous sibling of the group"],
  ["n", () => stepToken(1), "next token of the policy"],
  ["p", () => stepToken(-1), "previous token of the policy"],
  ["c", () => compareNatural(), "compare with the sibling that earned most differently"],
  ["b", () => toggleBookmark(), "bookmark the trajectory"],
  ["m", () => setMessages(!shown.isMessages), "messages in place of tokens"],
  ["o", () => (location.hash = "#"), "overview"],
  ["/", () => focusSearch(), "search"],
  ["Escape", () => escape(), "close what is open"],
];

function focusSearch() {
  if (document.getElementById("trajectories").hidden || isNarrow()) goToList();
  setTimeout(() => document.getElementById("search").focus());
}

function escape() {
  if (document.activeElement?.id === "search") return document.activeElement.blur();
  if (shown.position !== null) return choosePosition(null);
  if (shown.mate !== null) return compareWith(null);
  if (isNarrow()) goToList();
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = event.target.matches?.("input, select, textarea");
  if (isTyping && event.key !== "Escape") return;
  const column = COLUMNS.find(({key}) => key === event.key);
  const action = column ? () => setColumn(column.name) : KEYBOARD.find(([key]) => key === event.key)?.[1];
  if (!action) return;
  event.preventDefault();
  action();
}

// ---------------------------------------------------------------- start

async function start() {
  document.title = `${spelled(run.name)} · inspector`;
  add(clear(document.getElementById("name")), foreign(run.name));
  put(clear(document.getElementById("count")), plural(total, "trajectory", "trajectories"));
  await loadVocabulary();
  drawOverview();
  if (isComparison) drawCompare();
  drawFilters();
  if (!run.tokenizer) shown.isMessages = true;
  addEventListener("hashchange", route);
  addEventListener("beforeprint", fillAll);
  addEventListener("resize", () => drawList(false));
  document.addEventListener("keydown", onKey);
  document.getElementById("rows").addEventListener("scroll", () => drawList(false), {passive: true});
  document.getElementById("middle").addEventListener("click", (event) => {
    const token = event.target.closest(".tokens .token");
    if (token?.position === undefined) return;
    const isMate = token.closest(".mate") !== null;
    if (isMate) go(shown.mate, shown.trajectory);
    else choosePosition(token.position === shown.position ? null : token.position);
  });
  route();
  document.body.dataset.ready = String(Math.round(performance.now()));
}

start();
