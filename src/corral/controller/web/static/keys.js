// The page of API keys: create one, shown once, and revoke one.

import { allow, call, closePanel, guarded, openPanel, say, sure } from "./acts.js";
import { $ } from "./dom.js";
import { start } from "./page.js";
import { refresh } from "./parts.js";

const panel = $("#create");
const form = $("#create-form");

function forget() {
  $("#made-secret").textContent = "";
  $("#made").hidden = true;
}

const number = (name) => (form.elements[name].value ? Number(form.elements[name].value) : null);

async function create() {
  const limits = Object.fromEntries(["requests_per_min", "tokens_per_min", "concurrent"].map((name) => [name, number(name)]));
  const models = form.elements.models.value.split("\n").map((line) => line.trim()).filter(Boolean);
  forget();
  const { key, secret } = await call("POST", "/api/keys", {
    name: form.elements.name.value.trim(),
    role: form.elements.role.value,
    ttl_s: number("ttl_s"),
    models: models.length ? models : null,
    limits: Object.values(limits).some(Boolean) ? limits : null,
  });
  $("#made-name").textContent = key.name;
  $("#made-secret").textContent = secret;
  $("#made").hidden = false;
  $("#made-secret").focus();
  form.reset();
  await refresh();
}

$("#add").addEventListener("click", () => (panel.hidden ? openPanel(panel, form.elements.name) : closePanel(panel)));
form.addEventListener("submit", (event) => {
  event.preventDefault();
  guarded($("button.primary", form), create);
});
addEventListener("pagehide", forget); // also from what the browser keeps to go back to

allow({
  "close-create": () => {
    forget();
    closePanel(panel);
  },
  "copy-key": async () => {
    await navigator.clipboard?.writeText($("#made-secret").textContent);
    say(navigator.clipboard ? "Copied." : "Select the key and copy it.");
  },
  revoke: async ({ id, name }) => {
    const text = "It is refused within two seconds, and its sessions on the page end. Streams that run finish.";
    if (!(await sure(`Revoke ${name}?`, text, "Revoke", true))) return;
    await call("DELETE", `/api/keys/${id}`);
    say(`${name} revoked.`);
    await refresh();
  },
});
start();
