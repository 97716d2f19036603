// Asks for confirmation before a button acts. Without this script, the hub asks.
"use strict";
document.getElementById("act")?.addEventListener("submit", (event) => {
  if (!confirm(event.submitter.dataset.question)) event.preventDefault();
  else document.getElementById("confirmed").value = "yes";
});
