// Buttons that copy the command next to them. The style sheet shows them only with the class `copies`, set here.
"use strict";
(() => {
  document.documentElement.classList.add("copies");

  function copied(text, line) {
    if (navigator.clipboard) return navigator.clipboard.writeText(text);
    getSelection().selectAllChildren(line); // Over plain HTTP there is no clipboard API: select the text and use execCommand.
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
      button.textContent = "Selected: press copy";
    }
    setTimeout(() => (button.textContent = label), 2000);
  });
})();
