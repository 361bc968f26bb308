// How to ask a model: lines to copy. The page itself does not ask, because a session is good for the page only.

import { $ } from "./dom.js";

const QUESTION = "What is a corral?";

/** As one word of a shell. */
const word = (text) => (/^[\w./:@-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);

/** Returns what opens the dialog. */
export function setUpUse() {
  const dialog = $("#use");
  $("[data-close]", dialog).addEventListener("click", () => dialog.close());
  return ({ model }) => {
    const body = JSON.stringify({ model, messages: [{ role: "user", content: QUESTION }] });
    $("#use-title").textContent = `Ask ${model}`;
    $("#use-cli").textContent = `corral chat ${word(model)} "${QUESTION}"`;
    $("#use-curl").textContent = [
      `curl ${location.origin}/v1/chat/completions \\`,
      `  -H "Authorization: Bearer $CORRAL_KEY" -H "Content-Type: application/json" \\`,
      `  -d ${word(body)}`,
    ].join("\n");
    $("#use-python").textContent = [
      "from openai import OpenAI",
      "",
      `client = OpenAI(base_url="${location.origin}/v1", api_key="ck_…")`,
      "answer = client.chat.completions.create(",
      `    model=${JSON.stringify(model)},`,
      `    messages=[{"role": "user", "content": "${QUESTION}"}],`,
      ")",
      "print(answer.choices[0].message.content)",
    ].join("\n");
    dialog.showModal();
  };
}
