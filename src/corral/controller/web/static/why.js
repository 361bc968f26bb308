// Why a model is, or is not, where it is: a dialog that the server words, and that follows what happens while it is open.

import { $, patch } from "./dom.js";
import { signIn } from "./live.js";

const AGAIN_MS = 4_000;

/** Returns what opens it. */
export function setUpWhy() {
  const dialog = $("#why");
  let asked = "";
  let again = 0;

  async function draw() {
    clearTimeout(again);
    const model = asked;
    let words = "";
    try {
      const answer = await fetch(`/page/why?model=${encodeURIComponent(model)}`, { signal: AbortSignal.timeout(15_000) });
      if (answer.status === 401) return signIn();
      const text = await answer.text();
      if (!answer.ok) throw new Error(JSON.parse(text).error?.message ?? `Corral answered ${answer.status}`);
      const next = new DOMParser().parseFromString(text, "text/html").body.firstElementChild;
      if (model !== asked || !dialog.open) return;
      patch($("#why-told"), document.adoptNode(next));
    } catch (error) {
      words = error.name === "TimeoutError" ? "Corral does not answer." : error.message;
    }
    if (model !== asked || !dialog.open) return;
    $("#why-words").textContent = words;
    again = setTimeout(draw, AGAIN_MS);
  }

  $("[data-close]", dialog).addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => {
    clearTimeout(again);
    asked = "";
  });
  return async ({ model }) => {
    asked = model;
    $("#why-title").textContent = `Where ${model} goes, and why`;
    $("#why-words").textContent = "Looking…";
    $("#why-told").replaceChildren();
    dialog.showModal();
    await draw();
  };
}
