// Two trajectories of a group, from the first token on in which they differ, or as messages.

function compareWith(mate) {
  go(shown.trajectory, mate);
}

function compareNatural() {
  if (shown.trajectory !== null) compareWith(shown.mate === null ? natural(shown.trajectory) : null);
}

// The sibling whose reward is furthest from this one's.
function natural(number) {
  const others = groupOf[number].members.filter((i) => i !== number);
  const distance = (i) => Math.abs((table.reward[i] ?? 0) - (table.reward[number] ?? 0));
  return others.reduce((best, i) => (best === null || distance(i) > distance(best) ? i : best), null);
}

function siblingsView(one, other) {
  let same = 0;
  const shortest = Math.min(one.completion.length, other.completion.length);
  while (same < shortest && one.completion[same] === other.completion[same]) same++;
  const turnOf = (opened) => Math.max(0, opened.head.turns.findIndex(({span}, i) =>
    same < (opened.head.turns[i + 1]?.span[0] ?? Infinity)));
  const turn = Math.min(turnOf(one), turnOf(other));
  const note = showsMessages(one) ? null : same === 0 ? "They differ from the first token on."
    : same === shortest && one.completion.length === other.completion.length ? "All their tokens are the same."
    : `The first ${plural(same, "token")} are the same; shown from turn ${turn + 1} on, where they differ.`;
  const column = (opened, isMate) => {
    const i = opened.number;
    const parts = showsMessages(one) ? messagesView(opened) : turnsView(opened, turn);
    if (isMate) parts[0].classList.add("mate");
    return el("div.sibling", el("h2", `generation ${table.generation[i]} · reward ${show(table.reward[i], true, 2)}`,
      table.advantage[i] === null ? null : ` · A ${show(table.advantage[i], true)}`), parts);
  };
  return [note && el("p.same", note), el("div.siblings", column(one, false), column(other, true))];
}
