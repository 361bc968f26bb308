// What needs a person, as the server words it: the one line is read aloud when it changes, and nodes are approved here.

import { allow, call, say } from "./acts.js";
import { $ } from "./dom.js";
import { onDrawn, refreshSoon } from "./parts.js";

async function approve(ids) {
  const outcomes = await Promise.allSettled(ids.map((id) => call("POST", `/api/nodes/${encodeURIComponent(id)}/approve`)));
  refreshSoon();
  const failed = outcomes.find((outcome) => outcome.status === "rejected");
  if (failed) throw failed.reason;
  say(ids.length === 1 ? `${outcomes[0].value.name} is approved.` : `${ids.length} nodes are approved.`);
}

export function setUpAttention() {
  let line = $("#attention-line").textContent;
  onDrawn(() => {
    const now = $("#attention-line").textContent;
    if (now !== line) $("#spoken").textContent = now;
    line = now;
  });
  allow({
    approve: ({ id }) => approve([id]),
    // Those listed under the button, never one that came since the person read the list.
    "approve-all": () => approve([...document.querySelectorAll("#attention [data-act=approve]")].map((b) => b.dataset.id)),
  });
}
