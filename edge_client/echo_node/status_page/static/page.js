"use strict";
// Show the node's state, and send the buttons' commands. All values are inserted as text, never as HTML.

const AGAIN_MS = 2000;
const TONES = {
  sampling: "good", waiting: "good", fetching: "busy", preparing: "busy", connecting: "busy",
  standby: "wait", paused: "wait", finishing: "wait", "not connected": "bad",
};
const SHOWN_ELSEWHERE = new Set(["state", "speed", "fetching", "preparing", "device"]);

const by = (id) => document.getElementById(id);
let socket = null;

function connect() {
  const address = new URL("live", location.href);
  address.protocol = "ws:";
  socket = new WebSocket(address);
  socket.onmessage = (event) => {
    const news = JSON.parse(event.data);
    if (news.view) show(news.view);
    say(news.refused || "");
  };
  socket.onopen = () => setOpen(true);
  socket.onclose = () => {
    setOpen(false);
    setState("not running", "bad");
    by("reason").textContent =
      "The node does not answer. It has stopped, or this page has expired. Open it again with: echo-node page";
    setTimeout(connect, AGAIN_MS);
  };
}

function setOpen(open) {
  for (const button of document.querySelectorAll("#actions button, #devices button")) button.disabled = !open;
}

function say(text) {
  by("said").textContent = text;
  by("said").hidden = !text;
}

function setState(state, tone) {
  if (by("state").textContent !== state) by("state").textContent = state;
  by("state").dataset.tone = tone;
  document.title = `${state} – Echo`;
}

function show(view) {
  const node = view.snapshot;
  setState(node.state, TONES[node.state] || "busy");
  by("reason").textContent = node.reason;
  by("node").textContent = `${node.name} lends this computer to ${node.run_name || node.hub}`;
  const paused = "paused" in node.holds;
  by("resume").hidden = !paused;
  by("pause").hidden = paused;
  by("pause-hour").hidden = paused;
  by("finish").disabled = node.state === "finishing";
  draw(node.token_rates);
  by("rate").textContent = `${Math.round(node.drawn_tokens_per_s ?? 0).toLocaleString("en")} tokens/s`;
  bars(node);
  devices(node.devices, view.rows);
  list(view.rows, node.page);
}

function draw(rates) {
  const most = Math.max(1, ...rates);
  const step = 290 / 29;
  const first = 290 - step * (rates.length - 1);
  by("line").setAttribute("points", rates.map((rate, at) => `${first + at * step},${58 - (56 * rate) / most}`).join(" "));
}

function bars(node) {
  const wanted = Object.entries({ ...node.fetching, ...node.preparing }).map(([title, [done, total]]) => [title, done, total]);
  if (node.held_rollouts) wanted.push(["Tokens of the current leases", node.lease_tokens, node.lease_most_tokens]);
  by("bars").replaceChildren(...wanted.map(([title, done, total]) => {
    const bar = document.createElement("progress");
    bar.max = Math.max(1, total);
    bar.value = done;
    const label = document.createElement("label");
    label.append(title, bar);
    return label;
  }));
}

function devices(all, rows) {
  const lines = rows.filter(([name]) => name === "device").map(([, value]) => value);
  const chosen = all.filter((one) => one.is_chosen);
  const shown = by("devices");
  shown.hidden = !chosen.length;
  if (shown.children.length !== chosen.length) shown.replaceChildren(...chosen.map(deviceRow));
  chosen.forEach((one, at) => {
    const [text, button] = shown.children[at].children;
    const paused = "paused" in one.holds;
    text.textContent = lines[at];
    button.textContent = paused ? "Resume" : "Pause";
    button.setAttribute("aria-label", `${paused ? "Resume" : "Pause"} ${one.name}`);
    button.onclick = () => ask(paused ? "resume" : "pause", { device: one.name });
  });
}

function deviceRow() {
  const row = document.createElement("li");
  const button = document.createElement("button");
  button.type = "button";
  button.className = "plain";
  row.append(document.createElement("span"), button);
  return row;
}

function list(rows, page) {
  const parts = [];
  for (const [name, value] of rows) {
    if (SHOWN_ELSEWHERE.has(name)) continue;
    const term = document.createElement("dt");
    term.textContent = name;
    const text = document.createElement("dd");
    if (name === "page" && /^https?:\/\//.test(page)) {
      const link = document.createElement("a");
      link.href = page;
      link.target = "_blank";
      link.rel = "noopener noreferrer";
      link.textContent = value;
      text.append(link);
    } else {
      text.textContent = value;
    }
    parts.push(term, text);
  }
  // Keep the keyboard's focus on the link.
  const had = by("rows").contains(document.activeElement);
  by("rows").replaceChildren(...parts);
  if (had) by("rows").querySelector("a")?.focus();
}

function ask(verb, args = {}) {
  socket.send(JSON.stringify({ verb, arguments: args }));
}

by("pause-hour").onclick = () => ask("pause", { length: "1h" });
by("pause").onclick = () => ask("pause");
by("resume").onclick = () => ask("resume");
by("finish").onclick = () => by("sure").showModal();
by("sure").onclose = () => { if (by("sure").returnValue === "yes") ask("finish"); };
connect();
