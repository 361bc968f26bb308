// Markdown of a model's answer as elements. Nothing is ever parsed as HTML: each piece of text becomes a text node, and
// the only attribute that takes text of a model is the address of a link, of two schemes.

import { make } from "./dom.js";

const DEEPEST = 6; // quotes and lists inside each other; what is deeper is shown as it is written
const LONGEST_LINE = 20_000; // of a line that is searched for marks
const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}(?:(?:\*\s*){3,}|(?:-\s*){3,}|(?:_\s*){3,})$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(\s+)(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const ESCAPABLE = /[\\`*_{}[\]()#+\-.!|>~]/;

/** The address, if a click on it can do no more than open a page. */
export function safeAddress(text) {
  if (!/^https?:\/\/[^\s<>"]+$/i.test(text)) return "";
  try {
    const { protocol, href } = new URL(text);
    return protocol === "http:" || protocol === "https:" ? href : "";
  } catch {
    return "";
  }
}

export function markdown(text) {
  const whole = document.createDocumentFragment();
  blocks(text.replaceAll("\r\n", "\n").split("\n"), whole, 0);
  return whole;
}

function blocks(lines, into, depth) {
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    if (!line.trim()) at += 1;
    else if (FENCE.test(line)) at = fenced(lines, at, into);
    else if (HEADING.test(line)) {
      const [, marks, words] = HEADING.exec(line);
      const heading = make("p", { className: `md-h${marks.length}` }); // no part of the page's own outline
      heading.setAttribute("role", "heading");
      heading.setAttribute("aria-level", String(Math.min(6, marks.length + 2)));
      into.append(inline(words, heading));
      at += 1;
    } else if (RULE.test(line)) {
      into.append(make("hr"));
      at += 1;
    } else if (depth < DEEPEST && QUOTE.test(line)) at = quoted(lines, at, into, depth);
    else if (depth < DEEPEST && ITEM.test(line)) at = listed(lines, at, into, depth);
    else if (line.includes("|") && DIVIDER.test(lines[at + 1] ?? "")) at = tabled(lines, at, into);
    else at = paragraph(lines, at, into, depth);
  }
}

function fenced(lines, at, into) {
  const [, fence, language] = FENCE.exec(lines[at]);
  const inside = [];
  const ends = new RegExp(`^ {0,3}${fence[0]}{${fence.length},}\\s*$`);
  for (at += 1; at < lines.length && !ends.test(lines[at]); at += 1) inside.push(lines[at]);
  const copy = make("button", { type: "button", className: "copy", textContent: "Copy" });
  copy.addEventListener("click", () => copyText(copy, inside.join("\n")));
  const head = make("div", { className: "code-head" }, make("span", { textContent: language || "code" }), copy);
  const code = make("pre", { tabIndex: 0 }, make("code", { textContent: inside.join("\n") }));
  into.append(make("div", { className: "code" }, head, code));
  return at + 1;
}

async function copyText(button, text) {
  await navigator.clipboard?.writeText(text).then(() => (button.textContent = "Copied"), () => {});
  setTimeout(() => (button.textContent = "Copy"), 2_000);
}

function quoted(lines, at, into, depth) {
  const inside = [];
  for (; at < lines.length && QUOTE.test(lines[at]); at += 1) inside.push(lines[at].replace(QUOTE, ""));
  const quote = make("blockquote");
  blocks(inside, quote, depth + 1);
  into.append(quote);
  return at;
}

function listed(lines, at, into, depth) {
  const numbered = /\d/.test(ITEM.exec(lines[at])[2]);
  const list = make(numbered ? "ol" : "ul");
  if (numbered) list.start = parseInt(ITEM.exec(lines[at])[2], 10);
  while (at < lines.length) {
    const found = ITEM.exec(lines[at]);
    if (!found || RULE.test(lines[at]) || /\d/.test(found[2]) !== numbered) break;
    const indent = found[1].length + found[2].length + Math.min(4, found[3].length);
    const inside = [found[4]];
    for (at += 1; at < lines.length; at += 1) {
      const blank = !lines[at].trim();
      const deeper = lines[at].search(/\S/) >= Math.min(indent, 2 + found[1].length);
      if (blank ? !(lines[at + 1] ?? "").startsWith("  ") : !deeper) break;
      inside.push(lines[at].slice(Math.min(indent, Math.max(0, lines[at].search(/\S/)))));
    }
    const item = make("li");
    blocks(inside, item, depth + 1);
    list.append(item);
    while (at < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1] ?? "")) at += 1;
  }
  into.append(list);
  return at;
}

function tabled(lines, at, into) {
  const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());
  const head = make("tr", {}, ...cells(lines[at]).map((cell) => inline(cell, make("th", { scope: "col" }))));
  const body = make("tbody");
  for (at += 2; at < lines.length && lines[at].includes("|") && lines[at].trim(); at += 1) {
    body.append(make("tr", {}, ...cells(lines[at]).map((cell) => inline(cell, make("td")))));
  }
  const table = make("table", {}, make("thead", {}, head), body);
  const box = make("div", { className: "scroll", tabIndex: 0 }, table);
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", "Table; scrolls sideways");
  into.append(box);
  return at;
}

function paragraph(lines, at, into, depth) {
  const inside = [];
  const begins = (line) =>
    !line.trim() || FENCE.test(line) || HEADING.test(line) || RULE.test(line) ||
    (depth < DEEPEST && (QUOTE.test(line) || ITEM.test(line)));
  do inside.push(lines[at++].trim());
  while (at < lines.length && !begins(lines[at]));
  const words = make("p");
  inside.forEach((line, index) => {
    if (index) words.append(make("br"));
    inline(line, words);
  });
  into.append(words);
  return at;
}

/** Marks inside a line. Scanned once from left to right: no text makes this slow. */
function inline(text, into, depth = 0) {
  if (text.length > LONGEST_LINE || depth > DEEPEST) {
    into.append(text);
    return into;
  }
  let plain = "";
  const flush = () => {
    if (plain) into.append(plain);
    plain = "";
  };
  const missing = new Set(); // marks that do not come again in this line: not searched for twice
  const find = (mark, from) => {
    if (missing.has(mark)) return -1;
    const found = text.indexOf(mark, from);
    if (found < 0) missing.add(mark);
    return found;
  };
  for (let at = 0; at < text.length; ) {
    const here = text[at];
    if (here === "\\" && ESCAPABLE.test(text[at + 1] ?? "")) {
      plain += text[at + 1];
      at += 2;
      continue;
    }
    const made = markAt(text, at, find, depth);
    if (made) {
      flush();
      into.append(made.element);
      at = made.end;
    } else {
      plain += here;
      at += 1;
    }
  }
  flush();
  return into;
}

function markAt(text, at, find, depth) {
  const here = text[at];
  if (here === "`") {
    const ticks = /^`+/.exec(text.slice(at, at + 8))[0];
    const end = find(ticks, at + ticks.length);
    return end < 0 ? null : { element: make("code", { textContent: text.slice(at + ticks.length, end).trim() }), end: end + ticks.length };
  }
  for (const [mark, tag] of [["**", "strong"], ["__", "strong"], ["~~", "s"], ["*", "em"], ["_", "em"]]) {
    if (!text.startsWith(mark, at)) continue;
    const inWord = mark[0] === "_" && /\w/.test(text[at - 1] ?? "");
    const end = inWord || /\s/.test(text[at + mark.length] ?? " ") ? -1 : find(mark, at + mark.length);
    if (end <= at + mark.length || /\s/.test(text[end - 1])) return null;
    return { element: inline(text.slice(at + mark.length, end), make(tag), depth + 1), end: end + mark.length };
  }
  if (here === "[") return linkAt(text, at, find, depth);
  if (here === "h" && !/\w/.test(text[at - 1] ?? "")) {
    const address = /^https?:\/\/[^\s<>"'`*)\]]+[^\s<>"'`*)\].,;:!?]/.exec(text.slice(at, at + 2_048))?.[0] ?? "";
    if (safeAddress(address)) return { element: link(address, document.createTextNode(address)), end: at + address.length };
  }
  return null;
}

function linkAt(text, at, find, depth) {
  const middle = find("](", at + 1);
  const end = middle < 0 ? -1 : text.indexOf(")", middle);
  if (end < 0 || end - at > 4_096) return null;
  const address = text.slice(middle + 2, end).trim().split(/\s/)[0];
  if (!safeAddress(address)) return null;
  return { element: link(address, inline(text.slice(at + 1, middle), document.createDocumentFragment(), depth + 1)), end: end + 1 };
}

function link(address, words) {
  const made = make("a", { href: safeAddress(address), rel: "noopener noreferrer nofollow", target: "_blank" });
  made.append(words);
  return made;
}
