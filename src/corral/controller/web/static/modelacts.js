// What may be done with one model, on the list of models and on its own page.

import { admin, allow, call, openMenu, respond, say, sure } from "./acts.js";
import { setUpEditing } from "./definitions.js";
import { refreshSoon } from "./parts.js";
import { setUpScaling } from "./scaling.js";

export const path = (model, verb = "") => `/api/models/${encodeURIComponent(model)}${verb}`;
export const sentence = (words) => `${words}${/[.!?]$/.test(words) ? "" : "."}`;
const lineOf = (model) => [...document.querySelectorAll(".model")].find((line) => line.dataset.model === model);

export function tell({ message, notes = [], pending_cleanup: pending }) {
  const words = [message, ...notes];
  if (pending) words.push("Replicas of the previous definition still serve; they stop by themselves");
  say(words.map(sentence).join(" "), notes.length > 0);
  refreshSoon();
}

/** `stage` brings the files of a model to every node; `onDeleted` is told when one is gone. */
export function setUpModelActs({ stage, onDeleted = tell }) {
  const edit = setUpEditing(path, tell);
  respond({ definition: edit });
  allow({
    "model-menu"({ model, may }, button) {
      const given = Object.fromEntries(may.split(" ").map((act) => [act, true]));
      openMenu(button, { requests: true, files: Boolean(document.querySelector("dialog#files")), delete: given.edit, ...given }, { model });
    },
    async load({ model }) {
      const told = await call("POST", path(model, "/load"));
      if (told.state === "failed") {
        const wait = told.retry_after_s > 0 ? ` The next attempt is possible in ${Math.ceil(told.retry_after_s)} s.` : "";
        throw new Error(`${model} failed a moment ago: ${sentence(told.error || "no reason was reported")}${wait}`);
      }
      say(told.state === "loaded" ? `${model} is ready.` : `${model} is being loaded.`);
      refreshSoon();
    },
    async unload({ model }) {
      const text = "Its replicas finish their requests and stop. The next request loads the model again.";
      if (!(await sure(`Unload ${model}?`, text, "Unload"))) return;
      tell(await call("POST", path(model, "/unload")));
    },
    async delete({ model }) {
      const text = "The model and its schedule are deleted; requests for it are refused. Its replicas finish their requests first.";
      if (!(await sure(`Delete ${model}?`, text, "Delete", true))) return;
      try {
        onDeleted(await call("DELETE", path(model)));
      } catch (error) {
        if (error.status !== 409) throw error;
        if (await sure(`Delete ${model} anyway?`, sentence(error.message), "Delete", true)) {
          onDeleted(await call("DELETE", path(model, "?force=true")));
        }
      }
    },
    stage,
    requests: ({ model }) => location.assign(`/fleet/requests?model=${encodeURIComponent(model)}`),
  });
  if (!admin) return;
  const scale = setUpScaling(tell);
  allow({ scale: ({ model }) => scale(model, lineOf(model)?.dataset.schedule ?? ""), edit });
}
