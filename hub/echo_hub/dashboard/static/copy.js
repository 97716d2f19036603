// Buttons that copy the line beside them. Without this script there are none: `copies` on the root shows them.
"use strict";
(() => {
  document.documentElement.classList.add("copies");

  function copied(text, line) {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    getSelection().selectAllChildren(line); // By plain HTTP browsers have no clipboard: select it, and ask the old way.
    return document.execCommand("copy") ? Promise.resolve() : Promise.reject(new Error("selected"));
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    const line = button.parentElement.querySelector("code");
    const label = button.textContent;
    try {
      await copied(line.textContent, line);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Selected: copy it";
    }
    setTimeout(() => (button.textContent = label), 2000);
  });
})();
