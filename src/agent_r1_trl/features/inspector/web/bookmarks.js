// Bookmarks and notes of the reader. The browser keeps them under the name of this file, and the file stays as it is.

const BOOKMARKS = `agent-r1-trl inspector ${location.pathname}`;
const bookmarks = new Map(readBookmarks()); // link of a trajectory -> note

function readBookmarks() {
  try {
    const kept = Object.entries(JSON.parse(localStorage.getItem(BOOKMARKS) || "{}"));
    return kept.filter(([, note]) => typeof note === "string");
  } catch {
    return []; // this browser keeps nothing, or something else
  }
}

function keepBookmarks() {
  try {
    localStorage.setItem(BOOKMARKS, JSON.stringify(Object.fromEntries(bookmarks)));
  } catch {
    put(clear(document.getElementById("count")), "this browser keeps no bookmarks");
  }
  drawOverview();
  drawList(false);
}

function toggleBookmark() {
  if (shown.trajectory === null) return;
  const link = linkOf(shown.trajectory);
  if (!bookmarks.delete(link)) bookmarks.set(link, "");
  keepBookmarks();
  document.querySelector("#middle .bookmark")?.replaceWith(bookmarkPart(shown.trajectory));
}

// The switch of a trajectory, with its note.
function bookmarkPart(number) {
  const link = linkOf(number), isOn = bookmarks.has(link);
  const node = el("div.bookmark", button(isOn ? "★ bookmark" : "☆ bookmark", toggleBookmark, isOn));
  if (!isOn) return node;
  const note = document.createElement("input");
  note.value = bookmarks.get(link);
  note.placeholder = "a note, kept in this browser";
  note.setAttribute("aria-label", "Note");
  note.addEventListener("input", () => {
    bookmarks.set(link, note.value);
    keepBookmarks();
  });
  return add(node, note);
}

function bookmarksPart() {
  const known = [...bookmarks].filter(([link]) => links.has(link));
  if (!known.length) return null;
  const lines = known.map(([link, note]) => {
    const number = links.get(link), place = el("a", named(example(number)));
    place.href = link;
    const where = `${stepName(groupOf[number])} · generation ${table.generation[number]}`;
    return el("tr", el("td", place), el("td", where), el("td", foreign(note)));
  });
  return el("section", el("h2", "Bookmarks"), el("div.scroll", el("table.events", el("tbody", lines))));
}
