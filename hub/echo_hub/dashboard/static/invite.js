// A person's invite, /about#invite=TOKEN: the token is put into the lines that join. What stands behind # stays in the
// browser: no server and no proxy is told it.
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
