// Conversations of the playground: in this browser only, for the key that is signed in, until it signs out (signedout.js).

import { $ } from "./dom.js";

const PLACE = "corral.playground";
const MOST = 50;
const owner = $("#playground").dataset.key;
let ended = false;

function read() {
  try {
    const kept = JSON.parse(localStorage.getItem(PLACE) ?? "{}");
    return kept.owner === owner && Array.isArray(kept.all) ? kept.all : [];
  } catch {
    return [];
  }
}

let all = read();

export const list = () => all;
export const find = (id) => all.find((each) => each.id === id);

/** Newest first. Of what does not fit into the browser's store, the oldest goes. False: not even this one fits. */
export function keep(conversation) {
  if (ended) return true;
  all = [conversation, ...read().filter((each) => each.id !== conversation.id)].slice(0, MOST);
  for (let count = all.length; count > 0; count -= 1) {
    try {
      localStorage.setItem(PLACE, JSON.stringify({ owner, all: all.slice(0, count) }));
      all = all.slice(0, count);
      return true;
    } catch {
      // Full: images are large.
    }
  }
  return false;
}

export function forget(id) {
  all = all.filter((each) => each.id !== id);
  localStorage.setItem(PLACE, JSON.stringify({ owner, all }));
}

// Signed out in another tab: nothing may be written back, and what is on the screen goes too.
addEventListener("storage", ({ key, newValue }) => {
  if ((key === PLACE || key === null) && newValue === null) {
    ended = true;
    all = [];
    location.replace("/login?why=ended");
  }
});
