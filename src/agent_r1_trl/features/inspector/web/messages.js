// The conversation as messages: what was said, reasoning, calls and what came of them.

// Turn -> its messages in order; -1: those of the prompt.
function messagesOf(opened) {
  const sections = new Map();
  let at = 0;
  for (const [turn, role, kind, length] of opened.head.texts) {
    if (!sections.has(turn)) sections.set(turn, []);
    sections.get(turn).push({role, kind, content: opened.text.substr(at, length).replace(/\n$/, "")});
    at += length;
  }
  return sections;
}

// What a turn was answered, as messages; a summary's first one asked for it.
function answersOf(turn, said) {
  const others = said.filter(({role}) => role !== "assistant");
  return turn.summary ? others.slice(1) : others;
}

function messagesView(opened) {
  const sections = messagesOf(opened);
  const nodes = [];
  const prompt = sections.get(-1) || [];
  if (prompt.length) nodes.push(fold(true, ["prompt"], (body) => add(body,
    stateView(opened.head.rendered, "at the start"), prompt.map(messageNode))));
  opened.head.turns.forEach((turn, i) => {
    for (const context of opened.contexts) {
      if (context.start === turn.span[0] && turn.span[1] > turn.span[0]) nodes.push(contextView(opened, context));
    }
    nodes.push(el("div.turn", fold(true, turnTitle(opened, turn, i), (body) => {
      const said = sections.get(i) || [], answers = answersOf(turn, said);
      const isOwn = (part) => part.role === "assistant";
      const asked = said.filter((part) => !isOwn(part) && !answers.includes(part));
      const calls = turn.calls.filter(({name}) => name !== "?"); // a call that could not be read is a message
      add(body, stateView(turn.rendered, `after turn ${i + 1}`));
      add(body, asked.map(messageNode), said.filter(isOwn).map(messageNode), calls.map(callNode));
      add(body, answers.map(messageNode));
      add(body, el("div.earned", opened.head.badges.filter(([place]) => place >= turn.span[0] && place < turn.span[1])
        .map(([, name, value]) => badge(name, value))));
    })));
  });
  return [el("div.messages", nodes)];
}

function messageNode({role, kind, content}) {
  const label = kind === "text" ? role : kind === "malformed" ? "malformed call" : kind;
  return el(`div.message.${["assistant", "user", "system", "tool"].includes(role) ? role : "other"}.${kind}`,
    el("span.label", named(label)), el("div.content", foreign(content)));
}

function callNode(call) {
  const list = Array.isArray(call.arguments) ? call.arguments : [["", call.arguments]];
  const facts = [
    call.ms === undefined ? "not made" : `${call.ms} ms`,
    call.attempts > 1 ? `${call.attempts} attempts` : "",
    call.cut ? "result cut" : "",
  ].filter(Boolean).join(" · ");
  return el("div.call", el("span.label", "call"), el("div.content",
    el("b", named(call.name)),
    list.map(([name, value]) => el("div.argument", name ? [named(name), " = "] : null, foreign(value))),
    el("div.quiet", facts, call.error ? el("span.problem", ` · call error: ${call.error}`) : null)));
}
