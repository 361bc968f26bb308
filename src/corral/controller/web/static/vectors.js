// The playground's embeddings, how alike two texts are, and rerank, which of several texts fits a question best.

import { guarded } from "./acts.js";
import { $, make } from "./dom.js";
import { ask, receiptOf } from "./inference.js";
import { duration } from "./receiptwords.js";

/** The cosine of the angle between two vectors: 1 the same direction, 0 nothing in common. */
export function cosine(one, other) {
  let [dot, a, b] = [0, 0, 0];
  for (let at = 0; at < one.length; at += 1) {
    dot += one[at] * other[at];
    a += one[at] ** 2;
    b += other[at] ** 2;
  }
  return a && b ? dot / Math.sqrt(a * b) : 0;
}

function factsLine(id) {
  const line = make("p", { className: "receipt quiet" });
  receiptOf(id).then((receipt) => {
    if (receipt) line.textContent = [receipt.node && `node ${receipt.node}`, duration(receipt.total_ms), receipt.prompt_tokens && `${receipt.prompt_tokens} tokens`].filter(Boolean).join(" · ");
  });
  return line;
}

async function compare(form) {
  const { model, first, second } = form.elements;
  const { id, told } = await ask("/v1/embeddings", { model: model.value, input: [first.value, second.value], encoding_format: "float" });
  const [one, other] = [...told.data].sort((a, b) => a.index - b.index).map((each) => each.embedding);
  const alike = cosine(one, other);
  const words = make("p", {}, make("strong", { textContent: alike.toFixed(3) }), ` cosine similarity of two vectors with ${one.length} numbers`);
  const bar = make("meter", { min: 0, max: 1, value: Math.max(0, alike), ariaLabel: "Cosine similarity" });
  $("output", form).replaceChildren(words, bar, factsLine(id));
}

async function rerank(form) {
  const { model, query, documents } = form.elements;
  const texts = documents.value.split("\n").map((line) => line.trim()).filter(Boolean);
  const { id, told } = await ask("/v1/rerank", { model: model.value, query: query.value, documents: texts });
  const best = [...told.results].sort((a, b) => b.relevance_score - a.relevance_score);
  const items = best.map(({ index, relevance_score: score }) => make("li", {}, make("span", { className: "num", textContent: score.toFixed(3) }), " ", texts[index] ?? ""));
  $("output", form).replaceChildren(make("ol", { className: "ranked" }, ...items), factsLine(id));
}

export function setUpVectors() {
  for (const [name, act] of [["compare", compare], ["rank", rerank]]) {
    const form = $(`#${name}`);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const button = $("button.primary", form);
      $("output", form).textContent = "Waiting for the model…";
      guarded(button, () => act(form).catch((error) => {
        $("output", form).replaceChildren(make("p", { className: "wrong", textContent: error.message }));
      }));
    });
  }
}
