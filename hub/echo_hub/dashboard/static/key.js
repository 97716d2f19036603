// Stores the key that login gives this browser, /#key=KEY, and adds it to every form that changes something. The key
// is only after # and in this origin's storage. Other ports of this host receive the cookie, but never the key.
"use strict";
(() => {
  const NAME = "echo-key";
  const given = /^#key=([\w-]{43})$/.exec(location.hash)?.[1];
  if (given !== undefined) {
    localStorage.setItem(NAME, given);
    history.replaceState(null, "", location.pathname + location.search);
  }
  const put = (event) => {
    const field = event.target.elements.namedItem("page_key");
    if (field !== null) field.value = localStorage.getItem(NAME) ?? "";
  };
  document.addEventListener("submit", put, true);
})();
