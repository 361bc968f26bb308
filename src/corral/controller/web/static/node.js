// The page of one node. The server draws it; what an admin does goes through the API, after the cost was shown.

import { admin, allow, call, guarded, say, sure } from "./acts.js";
import { $ } from "./dom.js";
import { isOpen, on } from "./live.js";
import { start } from "./page.js";
import { AskedPart, refresh, refreshSoon } from "./parts.js";

const EVERY_MS = 5_000;
const { id, name } = $("#node-head").dataset;
const path = (verb = "") => `/api/nodes/${encodeURIComponent(id)}${verb}`;

on("node", (view) => view.id === id && refreshSoon());
on("node-removed", (gone) => gone.id === id && location.assign("/nodes"));
for (const kind of ["operation", "operation-removed"]) on(kind, refreshSoon);
setInterval(() => document.hidden || !isOpen() || refresh(), EVERY_MS);

async function act(verb, words) {
  await call("POST", path(`/${verb}`));
  say(words);
  refreshSoon();
}

allow({
  approve: () => act("approve", `${name} is approved.`),
  resume: () => act("resume", `${name} gets work again.`),
  async drain({ cost }) {
    if (await sure(`Drain ${name}?`, cost, "Drain")) await act("drain", `${name} is draining.`);
  },
  async delete({ cost }) {
    if (!(await sure(`Delete ${name}?`, cost, "Delete", true))) return;
    await call("DELETE", path());
    location.assign("/nodes");
  },
});

/** `a=b,c=d` as a mapping; the server says which labels it takes. */
function labelsOf(text) {
  const pairs = text.split(",").map((pair) => pair.trim()).filter(Boolean);
  return Object.fromEntries(pairs.map((pair) => {
    const spot = pair.indexOf("=");
    return spot < 0 ? [pair, ""] : [pair.slice(0, spot).trim(), pair.slice(spot + 1).trim()];
  }));
}

function onSave(form, save) {
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    guarded(event.submitter, async () => {
      const wrong = $("#change-error");
      wrong.hidden = true;
      try {
        await save(form.elements);
      } catch (error) {
        wrong.textContent = error.message;
        wrong.hidden = false;
      }
    });
  });
}

if (admin) {
  onSave($("#budget-form"), async ({ value }) => {
    await call("PUT", path("/vram-budget"), { value: value.value.trim() });
    say("The budget is saved.");
    refreshSoon();
  });
  let own = labelsOf($("#label").value);
  onSave($("#label-form"), async ({ labels }) => {
    const wanted = labelsOf(labels.value);
    for (const key of Object.keys(own)) {
      if (!(key in wanted)) await call("DELETE", path(`/labels/${encodeURIComponent(key)}`));
    }
    if (Object.keys(wanted).length) await call("PATCH", path("/labels"), wanted);
    own = wanted;
    say("The labels are saved.");
    refreshSoon();
  });
}
start();
new AskedPart(`/page/node-files?node=${encodeURIComponent(name)}`, "node-files-told").refresh();
