// A dialog about one model whose content the server renders, and that follows what happens while it is open.

import { $, patch } from "./dom.js";
import { signIn } from "./live.js";

const AGAIN_MS = 4_000;

/** Returns what opens it. `name`: of the dialog and of its part of the page; `title`: for a model. */
export function setUpFollowed(name, title) {
  const dialog = $(`#${name}`);
  let asked = "";
  let again = 0;

  async function draw() {
    clearTimeout(again);
    const model = asked;
    let words = "";
    try {
      const answer = await fetch(`/page/${name}?model=${encodeURIComponent(model)}`, { signal: AbortSignal.timeout(15_000) });
      if (answer.status === 401) return signIn();
      const text = await answer.text();
      if (!answer.ok) throw new Error(JSON.parse(text).error?.message ?? `Corral answered ${answer.status}`);
      const next = new DOMParser().parseFromString(text, "text/html").body.firstElementChild;
      if (model !== asked || !dialog.open) return;
      patch($(`#${name}-told`), document.adoptNode(next));
    } catch (error) {
      words = error.name === "TimeoutError" ? "Corral does not answer." : error.message;
    }
    if (model !== asked || !dialog.open) return;
    $(`#${name}-words`).textContent = words;
    again = setTimeout(draw, AGAIN_MS);
  }

  $("[data-close]", dialog).addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    clearTimeout(again);
    asked = "";
  });
  return async ({ model }) => {
    asked = model;
    $(`#${name}-title`).textContent = title(model);
    $(`#${name}-words`).textContent = "Looking…";
    $(`#${name}-told`).replaceChildren();
    dialog.dataset.model = model;
    if (!dialog.open) dialog.showModal();
    await draw();
  };
}
