// The line that lets a new machine join.

import { admin, allow, call, closePanel, guarded, openPanel } from "./acts.js";
import { $ } from "./dom.js";

async function join(form) {
  const asked = {
    uses: form.uses.valueAsNumber,
    ttl_s: Number(form.ttl_s.value),
    pre_approved: form.pre_approved.checked,
    url: location.origin, // where the controller does not know a public URL
  };
  const { install_command: line, join_command: short } = await call("POST", "/api/tokens", asked);
  $("#join-command").textContent = line;
  $("#join-short").textContent = short;
  $("#join-line").hidden = false;
  $("#join-hint").hidden = !/\/\/(localhost|127\.|\[::1\])/.test(line);
  $("[data-act=copy]").textContent = "Copy";
}

export function setUpJoining() {
  allow({
    async copy(_, button) {
      // Plain HTTP has no clipboard API, so there the line is selected and copied the old way.
      getSelection().selectAllChildren($("#join-command"));
      const copied = navigator.clipboard
        ? await navigator.clipboard.writeText($("#join-command").textContent).then(() => true, () => false)
        : document.execCommand("copy");
      button.textContent = copied ? "Copied" : "Press Ctrl+C";
    },
    "close-join"() {
      $("#join-line").hidden = true;
      $("#join-command").textContent = $("#join-short").textContent = ""; // a secret is not left lying in the page
      closePanel($("#join"));
    },
  });
  if (!admin) return;
  $("#add").addEventListener("click", () => openPanel($("#join"), $("#join-form button")));
  $("#join-form").addEventListener("submit", (event) => {
    event.preventDefault();
    guarded(event.submitter, () => join(event.target.elements));
  });
}
