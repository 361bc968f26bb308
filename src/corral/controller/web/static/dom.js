// Small tools for the document. Text is set as text, never as markup: names and reasons come from other machines.

export const $ = (selector, root = document) => root.querySelector(selector);

export function make(tag, properties = {}, ...inside) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...inside);
  return element;
}

/** Elements by what they hold: `data-f="name"` is parts.name. */
export function partsOf(root, mark = "f") {
  const parts = {};
  for (const part of root.querySelectorAll(`[data-${mark}]`)) parts[part.dataset[mark]] ??= part;
  return parts;
}

export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Text that is not there takes no room. */
export function setWords(element, text) {
  setText(element, text);
  if (element.hidden === Boolean(text)) element.hidden = !text;
}

const keyOf = (node) => node.nodeType === Node.ELEMENT_NODE ? node.id || node.dataset.key || "" : "";
const LEFT_ALONE = new Set(["open", "aria-busy"]); // what the person opened; what is on its way

/** Make `old` like `next` and keep what is the same: focus, scrolling, selected text and open parts survive. */
export function patch(old, next) {
  if (old.nodeName !== next.nodeName || keyOf(old) !== keyOf(next)) return old.replaceWith(next);
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== next.data) old.data = next.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!next.hasAttribute(name) && !LEFT_ALONE.has(name)) old.removeAttribute(name);
  }
  for (const { name, value } of next.attributes) {
    if (old.getAttribute(name) !== value && !LEFT_ALONE.has(name)) old.setAttribute(name, value);
  }
  patchInside(old, next);
}

function patchInside(old, next) {
  const keyed = new Map();
  for (const child of old.childNodes) if (keyOf(child)) keyed.set(keyOf(child), child);
  let spot = old.firstChild;
  for (const wanted of [...next.childNodes]) {
    const key = keyOf(wanted);
    const known = key ? keyed.get(key) : spot;
    const fits = known && known.nodeName === wanted.nodeName && keyOf(known) === key;
    if (!fits) {
      old.insertBefore(wanted, spot);
    } else if (known === spot) {
      spot = spot.nextSibling;
      patch(known, wanted);
    } else {
      old.insertBefore(known, spot);
      patch(known, wanted);
    }
  }
  while (spot) {
    const gone = spot;
    spot = spot.nextSibling;
    gone.remove();
  }
}
