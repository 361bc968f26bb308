// The field in the header: `/` leads to it, what fits is listed below it, Enter opens the first or the chosen one.
// Without this script the form opens the page of what was found.

import { $, patch } from "./dom.js";

const PAUSE_MS = 120;

export function setUpSearch() {
  const form = $("#search");
  if (!form) return; // a key that may only use models
  const field = form.elements.q;
  let turns = 0; // an answer that was overtaken by a later one is old news
  let pause = 0;
  let chosen = -1;

  const hits = () => [...document.querySelectorAll("#search-hits a")];

  function open(shown) {
    $("#search-hits").hidden = !shown;
    field.setAttribute("aria-expanded", String(shown));
    if (!shown) choose(-1);
  }

  function choose(index) {
    const all = hits();
    chosen = all.length && index >= 0 ? index % all.length : -1;
    all.forEach((hit, place) => hit.setAttribute("aria-selected", String(place === chosen)));
    if (chosen < 0) return field.removeAttribute("aria-activedescendant");
    field.setAttribute("aria-activedescendant", all[chosen].id);
    all[chosen].scrollIntoView({ block: "nearest" });
  }

  async function look() {
    const turn = ++turns;
    const query = field.value.trim();
    if (!query) return open(false);
    const answer = await fetch(`/page/search?q=${encodeURIComponent(query)}`).catch(() => null);
    if (turn !== turns || !answer?.ok) return;
    const next = new DOMParser().parseFromString(await answer.text(), "text/html").body.firstElementChild;
    if (turn !== turns) return;
    patch($("#search-hits"), document.adoptNode(next));
    open(true);
    choose(-1);
  }

  field.addEventListener("input", () => {
    clearTimeout(pause);
    pause = setTimeout(look, PAUSE_MS);
  });
  field.addEventListener("focus", () => field.value.trim() && look());
  field.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      if ($("#search-hits").hidden) field.blur();
      open(false);
    } else if (event.key === "ArrowDown" || event.key === "ArrowUp") {
      event.preventDefault();
      const count = hits().length;
      if (count) choose(event.key === "ArrowDown" ? chosen + 1 : (chosen < 0 ? count : chosen) - 1 + (chosen === 0 ? count : 0));
    } else if (event.key === "Enter" && chosen >= 0) {
      event.preventDefault();
      hits()[chosen].click();
    }
  });
  document.addEventListener("click", (event) => form.contains(event.target) || open(false));
  form.addEventListener("focusout", (event) => form.contains(event.relatedTarget) || setTimeout(() => form.contains(document.activeElement) || open(false), 150));
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
    if (event.key !== "/" || typing || event.ctrlKey || event.metaKey || event.altKey || $("dialog[open]")) return;
    event.preventDefault();
    field.focus();
    field.select();
  });
}
