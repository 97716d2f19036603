// Foldable parts of the page. On a phone, all parts without the class `stays` start folded; an anchor opens its part.
"use strict";
(() => {
  const NARROW = "(max-width: 47.99rem)";
  if (matchMedia(NARROW).matches) for (const fold of document.querySelectorAll("details.plane:not(.stays)")) fold.open = false;

  function reveal() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target?.closest("details.plane")) return;
    for (let fold = target.closest("details"); fold; fold = fold.parentElement.closest("details")) fold.open = true;
    target.scrollIntoView();
  }

  addEventListener("hashchange", reveal);
  // A second click on the same link does not fire hashchange.
  document.addEventListener("click", ({ target }) => {
    if (target.closest?.("a")?.hash === location.hash) reveal();
  });
  reveal();
})();
