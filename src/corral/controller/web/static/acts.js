// What an admin may do. The server checks again: a viewer's page merely has no buttons.

import { $ } from "./dom.js";
import { signIn } from "./live.js";

const { role, csrf } = document.body.dataset;
export const admin = role === "admin";

let hush = 0;

export function say(text, bad = false) {
  const said = $("#said");
  said.textContent = text;
  said.classList.toggle("bad", bad);
  said.hidden = false;
  clearTimeout(hush);
  hush = setTimeout(() => (said.hidden = true), Math.max(bad ? 10_000 : 4_000, text.length * 60)); // time to read it
}

export async function call(method, path, body) {
  const headers = { "X-CSRF-Token": csrf, ...(body && { "Content-Type": "application/json" }) };
  const answer = await fetch(path, { method, headers, body: body && JSON.stringify(body) }).catch(() => {
    throw new Error("Corral does not answer. Reload to see whether the change was made.");
  });
  if (answer.status === 401) signIn();
  const message = await answer.json().catch(() => ({}));
  // Two families of errors: a sentence by itself, and one with its number.
  if (!answer.ok) {
    const words = message.error?.message ?? message.error ?? `Corral answered ${answer.status}.`;
    throw Object.assign(new Error(words), { status: answer.status });
  }
  return message;
}

export async function sure(title, text, verb, danger = false) {
  const dialog = $("#confirm");
  $("#confirm-title").textContent = title;
  $("#confirm-text").textContent = text;
  $("#confirm-yes").textContent = verb;
  $("#confirm-yes").classList.toggle("danger", danger);
  dialog.returnValue = "";
  dialog.showModal();
  await new Promise((resolve) => dialog.addEventListener("close", resolve, { once: true }));
  return dialog.returnValue === "yes";
}

/** Under the button, with those of its items that `may` allows; each is handed `data`. */
export function openMenu(button, may, data) {
  const menu = $("#menu");
  for (const item of menu.children) {
    item.hidden = !may[item.dataset.act];
    Object.assign(item.dataset, data);
  }
  menu.showPopover();
  const spot = button.getBoundingClientRect();
  menu.style.left = `${Math.max(8, Math.min(spot.right - menu.offsetWidth, innerWidth - menu.offsetWidth - 8))}px`;
  menu.style.top = `${Math.min(spot.bottom + 4, innerHeight - menu.offsetHeight - 8)}px`;
  $("button:not([hidden])", menu)?.focus();
}

export async function guarded(button, work) {
  if (button.ariaBusy) return; // not `disabled`: that would take the focus away
  button.ariaBusy = "true";
  await work().catch((error) => say(error.message, true));
  button.ariaBusy = null;
}

/** Buttons with `data-act` do what is told here under that name, for admins. */
export function allow(acts) {
  if (admin) respond(acts);
}

/** The same for whoever is signed in. */
export function respond(acts) {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-act]");
    if (!button || !(button.dataset.act in acts)) return;
    if (button.closest("#menu")) $("#menu").hidePopover();
    guarded(button, async () => acts[button.dataset.act](button.dataset, button));
  });
}

/** A panel behind the button `#add`. */
export function openPanel(panel, first) {
  panel.hidden = false;
  $("#add").setAttribute("aria-expanded", "true");
  first.focus();
}

export function closePanel(panel) {
  panel.hidden = true;
  $("#add").setAttribute("aria-expanded", "false");
  $("#add").focus();
}
