// An invite link, /about#invite=TOKEN: puts the token into the join commands. The part after # stays in the browser:
// no server or proxy receives it.
"use strict";
(() => {
  const token = /^#invite=([\w-]{16,128})$/.exec(location.hash)?.[1];
  const lines = document.querySelectorAll(".join code");
  if (token === undefined || !lines.length) return;
  for (const line of lines) {
    const text = line.textContent;
    const option = text.startsWith("&") ? "-Token" : "--token";
    line.textContent = text.includes("TOKEN") ? text.replace("TOKEN", token) : `${text} ${option} ${token}`;
  }
  document.getElementById("invited").hidden = false;
  for (const one of document.querySelectorAll(".without-invite")) one.hidden = true;
})();
