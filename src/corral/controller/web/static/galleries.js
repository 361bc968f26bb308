// What the galleries have, searched while somebody types: the panel behind `#add` with `#term`, `#found-words`, `#found`.

import { call, openPanel } from "./acts.js";
import { $, make } from "./dom.js";

const PAUSE_MS = 200;

/** `kind`: of the galleries; `ask(term)` resolves to `{ items, count }`; `item(each)` is the line of one; `words(count)`
 *  says how many fit. Galleries that cannot be read are named behind it. Returns what searches again. */
export function setUpSearch({ kind, ask, item, words }) {
  let searches = 0; // an answer that was overtaken by a later one is old news
  let pause = 0;

  async function search() {
    const mine = ++searches;
    try {
      const { items, count } = await ask($("#term").value.trim());
      if (mine !== searches) return;
      const more = count > items.length ? ` The first ${items.length} are shown.` : "";
      const said = `${words(count)}.${more}`;
      $("#found-words").textContent = said;
      $("#found").replaceChildren(...items.map(item));
      const notices = (await call("GET", "/api/galleries")).filter((each) => each.kind === kind && each.notice);
      if (mine === searches) $("#found-words").textContent = [said, ...notices.map((each) => each.notice)].join(" ");
    } catch (error) {
      if (mine === searches) $("#found-words").textContent = error.message;
    }
  }

  $("#add").addEventListener("click", () => {
    openPanel($("#install"), $("#term"));
    search();
  });
  $("#term").addEventListener("input", () => {
    clearTimeout(pause);
    pause = setTimeout(search, PAUSE_MS);
  });
  return search;
}

/** A line of what was found: its name, some tags, what it is, and what can be done with it. */
export function foundLine({ name, description }, tags, ...acts) {
  const about = make("span", { className: "about", textContent: description ?? "", title: description ?? "" });
  const marks = tags.filter(Boolean).map((textContent) => make("span", { className: "tag", textContent }));
  return make("li", {}, make("div", {}, make("strong", { textContent: name }), " ", ...marks, about), ...acts);
}

export function actOn(words, name, data) {
  const button = make("button", { type: "button" }, words, make("span", { className: "unseen", textContent: ` ${name}` }));
  Object.assign(button.dataset, data);
  return button;
}
