// Keeps the key that logging in gave this browser, /#key=KEY, and puts it into every form that changes something. It
// stands behind # and in this origin's storage, so no other port of this host is sent it, as each is the cookie.
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
