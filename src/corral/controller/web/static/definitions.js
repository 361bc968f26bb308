// A model's definition: read by whoever is signed in, edited by an admin. What is wrong with it is said where it stands.

import { admin, call, guarded, sure } from "./acts.js";
import { $ } from "./dom.js";

/** Returns what opens it. `path(model)` is the model's place in the API, `tell` says what came of it. */
export function setUpEditing(path, tell) {
  const dialog = $("#edit");
  const form = $("#edit-form");
  const { text, recreate } = form.elements;
  const wrong = $("#edit-error");
  let model = "";
  let read = { text: "", row_version: 0 };

  function complain(words) {
    wrong.textContent = words;
    wrong.hidden = !words;
  }

  async function leave() {
    const changed = !text.readOnly && text.value !== read.text;
    if (!changed || (await sure("Discard your changes?", `${model} stays as it is.`, "Throw away", true))) dialog.close();
  }

  $("[data-close]", dialog).addEventListener("click", leave);
  dialog.addEventListener("cancel", (event) => {
    event.preventDefault();
    leave();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!admin || text.readOnly) return;
    guarded(event.submitter ?? form, async () => {
      complain("");
      try {
        const asked = { text: text.value, recreate: recreate.checked, row_version: read.row_version };
        const told = await call("PUT", path(model), asked);
        dialog.close();
        tell(told);
      } catch (error) {
        complain(error.message);
        text.focus();
      }
    });
  });
  // Tab leaves the field, as everywhere; a line's indentation is kept by Enter.
  text.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.ctrlKey || event.metaKey || text.readOnly) return;
    const before = text.value.slice(0, text.selectionStart);
    const indent = /[^\n]*$/.exec(before)[0].match(/^ */)[0];
    if (!indent) return;
    event.preventDefault();
    text.setRangeText(`\n${indent}`, text.selectionStart, text.selectionEnd, "end");
  });

  return async ({ model: name }) => {
    model = name;
    read = await call("GET", `/page/definition?model=${encodeURIComponent(name)}`);
    const closed = !admin || Boolean(read.file);
    form.reset();
    complain("");
    text.value = read.text;
    text.readOnly = closed;
    $("#edit-title").textContent = closed ? `Definition of ${name}` : `Edit ${name}`;
    $("#edit-hint").textContent = read.file ? `The file ${read.file} in the models folder defines this model: change the file.` : "";
    $("#edit-hint").hidden = !read.file;
    for (const part of ["#edit-yes", "#edit-recreate"]) if ($(part)) $(part).hidden = closed;
    dialog.showModal();
    text.setSelectionRange(0, 0);
    text.focus();
    text.scrollTop = 0; // not where it was left the last time
  };
}
