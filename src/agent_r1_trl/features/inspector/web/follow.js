// Only in a page that is served while its run goes on: loads the newer one, at the same link, as soon as there is one.

async function follow() {
  const answer = document.hidden ? null : await fetch("version").catch(() => null); // null: the command has ended
  if (answer?.ok && (await answer.text()) !== meta.version) location.reload();
  else setTimeout(follow, 2000);
}

setTimeout(follow, 2000);
