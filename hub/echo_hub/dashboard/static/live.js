// Keeps a page live: at each `changed` event the page is asked for again, and every [data-live] part that differs is
// put in place. The server renders everything; a missed event only delays what the next one brings.
"use strict";
(() => {
  const link = document.getElementById("link");
  let busy = false;
  let again = false;

  function show(text, state) {
    link.hidden = false;
    if (link.textContent !== text) link.textContent = text;
    link.dataset.state = state;
  }

  function isSelecting(part) {
    const selection = document.getSelection();
    return selection !== null && !selection.isCollapsed && part.contains(selection.anchorNode);
  }

  function put(fresh) {
    const parts = [...document.querySelectorAll("[data-live]")];
    const counterparts = parts.map((part) => fresh.getElementById(part.id));
    if (fresh.querySelectorAll("[data-live]").length !== parts.length || counterparts.includes(null)) {
      location.reload(); // The hub was upgraded, and its page has other parts now.
      return;
    }
    const focused = document.activeElement?.id;
    parts.forEach((part, i) => {
      if (part.innerHTML === counterparts[i].innerHTML || isSelecting(part)) return;
      part.replaceChildren(...counterparts[i].childNodes);
    });
    if (focused && document.activeElement?.id !== focused) {
      document.getElementById(focused)?.focus({ preventScroll: true });
    }
    document.title = fresh.title;
  }

  async function refresh() {
    if (document.hidden || busy) {
      again = true;
      return;
    }
    busy = true;
    again = false;
    try {
      const response = await fetch(location.href, { cache: "no-store" });
      if (response.ok) put(new DOMParser().parseFromString(await response.text(), "text/html"));
    } catch {
      // The hub went away in between; the event source reconnects and says `changed` then.
    } finally {
      busy = false;
    }
    document.dispatchEvent(new CustomEvent("echo:changed"));
    if (again && link.dataset.state === "live") refresh();
  }

  const events = new EventSource("/api/v1/events");
  events.addEventListener("open", () => show("live", "live"));
  events.addEventListener("error", () => show("reconnecting", "away"));
  events.addEventListener("changed", refresh);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && again) refresh();
  });
})();
