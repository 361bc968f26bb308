// The playground: which tab is shown, and which models each of them offers.

import { setUpChat, showChatModels } from "./chat.js";
import { $, make } from "./dom.js";
import { dropToken, listModels } from "./inference.js";
import { start } from "./page.js";
import { setUpVectors } from "./vectors.js";

const AGAIN_MS = 10_000;
const tabs = [...document.querySelectorAll("#tabs [role=tab]")];

function show(name, focus = false) {
  for (const tab of tabs) {
    const chosen = tab.dataset.tab === name;
    tab.setAttribute("aria-selected", String(chosen));
    tab.tabIndex = chosen ? 0 : -1;
    $(`#${tab.getAttribute("aria-controls")}`).hidden = !chosen;
    if (chosen && focus) tab.focus();
  }
  const wanted = new URLSearchParams(location.search);
  wanted.delete("again");
  if (name === "chat") wanted.delete("tab");
  else wanted.set("tab", name);
  history.replaceState(null, "", `/playground${wanted.size ? `?${wanted}` : ""}`);
}

function fill(select, models) {
  const chosen = select.value;
  const options = models.map(({ name, ready }) => make("option", { value: name, textContent: ready ? name : `${name} (cold)` }));
  const same = options.length === select.options.length
    && options.every((option, at) => option.value === select.options[at].value && option.textContent === select.options[at].textContent);
  if (same) return;
  select.replaceChildren(...options);
  if (models.some(({ name }) => name === chosen)) select.value = chosen;
}

async function refreshModels() {
  const models = await listModels();
  for (const select of document.querySelectorAll("select[data-kind]")) {
    const fitting = models.filter(({ kinds }) => kinds.includes(select.dataset.kind));
    fill(select, fitting);
    const none = $(`[data-none="${select.dataset.kind}"]`);
    none.hidden = fitting.length > 0;
    for (const button of select.closest("[role=tabpanel]").querySelectorAll("button.primary")) button.disabled = !fitting.length;
  }
  showChatModels(models);
}

tabs.forEach((tab, at) => {
  tab.addEventListener("click", () => show(tab.dataset.tab));
  tab.addEventListener("keydown", ({ key }) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
    if (step) show(tabs[(at + step + tabs.length) % tabs.length].dataset.tab, true);
  });
});
const wanted = new URLSearchParams(location.search).get("tab");
setUpChat();
setUpVectors();
show(tabs.some((tab) => tab.dataset.tab === wanted) ? wanted : "chat");
addEventListener("pagehide", dropToken);
// Keys for inference follow nothing of the fleet.
if (document.body.dataset.role === "inference") document.documentElement.classList.add("js");
else start();
const quietly = () => refreshModels().catch(() => {});
refreshModels().catch((error) => ($("#said").textContent = error.message));
setInterval(() => document.hidden || quietly(), AGAIN_MS);
