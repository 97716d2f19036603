// Keeps a page live: requested as an event stream, the page's own address sends its changes (echo_hub.dashboard.live).
// The server renders everything; this script only inserts it. A hidden page holds no stream.
"use strict";
(() => {
  const shown = document.documentElement.dataset;
  if (shown.revision === undefined) return; // This page is not live.

  const FIRST_WAIT_MS = 1_000;
  const LONGEST_WAIT_MS = 30_000;
  const COUNT_MS = 5_000;
  const SPANS = [[86_400, "d"], [3_600, "h"], [60, "min"], [1, "s"]];
  const link = document.getElementById("link");
  const held = new Map(); // By part: changes to insert once no text in the part is selected.
  let stream = null;
  let of = null;
  let silentMs = 60_000;
  let heardAt = Date.now();
  let ahead_s = 0; // The hub's clock minus this machine's.
  let waitMs = FIRST_WAIT_MS;
  let timer = 0;

  function say(text, state) {
    link.hidden = false;
    if (link.textContent !== text) link.textContent = text;
    link.dataset.state = state;
  }

  const sayStale = (why) => say(`${why}; as of ${new Date(heardAt).toLocaleTimeString()}`, "away");

  function isSelecting(part) {
    const selection = document.getSelection();
    return selection !== null && !selection.isCollapsed && part.contains(selection.anchorNode);
  }

  // A change is {html}, or {changed: {row: HTML}, order: [row, ...]}; this merges two consecutive ones.
  function merged(before, after) {
    if (before === undefined || after.html !== undefined) return after;
    return { changed: { ...before.changed, ...after.changed }, order: after.order ?? before.order };
  }

  function putRows(part, { changed, order }) {
    const made = new Map();
    const shell = part.cloneNode(false); // The parser accepts table rows only inside a table.
    for (const [id, html] of Object.entries(changed)) {
      shell.innerHTML = html;
      made.set(id, shell.firstElementChild);
    }
    const there = new Map([...part.children].map((row) => [row.id, row]));
    if (order === undefined) {
      for (const [id, row] of made) there.get(id)?.replaceWith(row);
      return;
    }
    const rows = order.map((id) => made.get(id) ?? there.get(id));
    if (rows.includes(undefined)) location.reload(); // An earlier change is missing.
    else part.replaceChildren(...rows);
  }

  function put(id, news) {
    const part = document.getElementById(id);
    if (part === null) {
      location.reload(); // The hub was upgraded, and its page has different parts.
      return;
    }
    const all = merged(held.get(id), news);
    if (isSelecting(part)) {
      held.set(id, all);
      return;
    }
    held.delete(id);
    const focused = document.activeElement?.id;
    if (all.html === undefined) putRows(part, all);
    else part.innerHTML = all.html;
    if (focused && document.activeElement?.id !== focused) {
      document.getElementById(focused)?.focus({ preventScroll: true });
    }
    part.dispatchEvent(new CustomEvent("echo:part", { bubbles: true }));
  }

  function take(news) {
    shown.revision = news.revision;
    if (news.title !== undefined) document.title = news.title;
    for (const [id, html] of Object.entries(news.parts ?? {})) put(id, { html });
    for (const [id, rows] of Object.entries(news.rows ?? {})) put(id, rows);
    count();
  }

  // Same format as echo_hub.dashboard.formats.ago.
  function ago(seconds) {
    if (seconds < 5) return "now";
    const [length, unit] = SPANS.find(([span]) => seconds >= span);
    return `${Math.floor(seconds / length)}\u202f${unit} ago`;
  }

  function count() {
    const now = Date.now() / 1000 + ahead_s;
    for (const time of document.querySelectorAll("time[data-ago]")) {
      const text = ago(now - Date.parse(time.dateTime) / 1000);
      if (time.textContent !== text && !isSelecting(time)) time.textContent = text;
    }
  }

  function heard() {
    heardAt = Date.now();
    clearTimeout(timer);
    timer = setTimeout(() => again("connection lost"), silentMs);
    say("live", "live");
  }

  function on(name, act) {
    const opened = stream;
    stream.addEventListener(name, (event) => {
      if (stream !== opened) return;
      const news = JSON.parse(event.data);
      if (name !== "gone") heard();
      act(news);
    });
  }

  function close() {
    clearTimeout(timer);
    stream?.close();
    stream = null;
  }

  function open() {
    close();
    if (document.hidden) return;
    const address = new URL(location.href);
    address.searchParams.set("live", shown.revision);
    address.hash = "";
    stream = new EventSource(address);
    timer = setTimeout(() => again("no answer"), silentMs);
    on("hello", (news) => {
      if (of !== null && news.of !== of) location.reload(); // This address now serves another run or another release.
      of = news.of;
      silentMs = 1000 * news.silent_s;
      ahead_s = news.now - Date.now() / 1000;
      waitMs = FIRST_WAIT_MS;
    });
    on("parts", take);
    on("beat", () => {});
    on("curves", (news) => document.dispatchEvent(new CustomEvent("echo:curves", { detail: news })));
    on("gone", end);
    stream.addEventListener("error", () => again("reconnecting"));
  }

  function end() {
    close();
    sayStale("this page no longer exists");
  }

  // Reconnect here: the browser's own attempts would send the first revision again, and would stop after an error.
  function again(why) {
    close();
    sayStale(why);
    timer = setTimeout(look, waitMs * (0.5 + Math.random()));
    waitMs = Math.min(2 * waitMs, LONGEST_WAIT_MS);
  }

  async function look() {
    if (document.hidden) return;
    try {
      const answer = await fetch(location.href, { method: "HEAD", cache: "no-store" });
      if (answer.status === 404 || answer.status === 410) return end();
      if (answer.status === 401 || new URL(answer.url).pathname !== location.pathname) {
        sayStale("logged out: reload this page");
        return;
      }
    } catch {
      // The hub cannot be reached yet; opening the stream fails and is retried.
    }
    open();
  }

  document.addEventListener("selectionchange", () => {
    for (const [id, news] of [...held]) put(id, news);
  });
  document.addEventListener("visibilitychange", () => (document.hidden ? close() : open()));
  addEventListener("pagehide", close);
  addEventListener("pageshow", (event) => event.persisted && open());
  setInterval(count, COUNT_MS);
  open();
})();
