// Which part of a long list is shown is in the address, so that a reload shows the same.

import { $ } from "./dom.js";
import { lookAt } from "./parts.js";

/** For the page `/fleet/{place}` with its part `/page/{place}`: links marked `data-look`, and the field in `#find`. */
export function setUpLooking(place) {
  const find = $("#find");
  let typing = 0;

  /** What the field says counts, not what it said when the link was drawn. */
  async function look(wanted) {
    clearTimeout(typing);
    const words = find.elements.find.value;
    if (words.trim()) wanted.set("find", words);
    else wanted.delete("find");
    const query = wanted.size ? `?${wanted}` : "";
    history.replaceState(null, "", `/fleet/${place}${query}`);
    await lookAt(`/page/${place}${query}`);
  }

  document.addEventListener("click", (event) => {
    const link = event.target.closest("a[data-look]");
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    look(new URL(link.href).searchParams);
  });
  find.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => {
      const wanted = new URLSearchParams(location.search);
      wanted.delete("at"); // from the first of those that fit
      look(wanted);
    }, 200);
  });
  find.addEventListener("submit", (event) => event.preventDefault());
}
