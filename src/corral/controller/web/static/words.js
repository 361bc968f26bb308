// Numbers and moments: the same as web/words.py, which drew the page; tests compare what the two draw.

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

function stepOf(count) {
  let step = 0;
  while (step < UNITS.length - 1 && count >= 1024 ** (step + 1)) step += 1;
  return step;
}

function short(count, step) {
  const value = count / 1024 ** step;
  const tenths = value < 10 ? 10 : 1;
  return String(Math.floor(value * tenths + 0.5) / tenths);
}

export function usedOf(used, total) {
  const step = stepOf(total);
  return `${short(used, step)} / ${short(total, step)} ${UNITS[step]}`;
}

export function size(count) {
  const step = stepOf(count);
  return `${short(count, step)} ${UNITS[step]}`;
}

let skew = 0; // the server's clock minus ours, in ms: laptops are minutes off, and "3 s ago" must not be

export function setClock(stamp) {
  skew = Date.parse(stamp) - Date.now();
}

export function ago(stamp) {
  const at = Date.parse(stamp);
  if (!(at > -62e12)) return "never"; // no stamp, or Go's year one
  const seconds = Math.max(0, Math.floor((Date.now() + skew - at) / 1000));
  if (seconds >= 172800) return `${Math.floor(seconds / 86400)} d ago`;
  if (seconds >= 7200) return `${Math.floor(seconds / 3600)} h ago`;
  return seconds >= 60 ? `${Math.floor(seconds / 60)} min ago` : `${seconds} s ago`;
}

export function until(stamp) {
  const seconds = Math.ceil((Date.parse(stamp) - Date.now() - skew) / 1000);
  if (!(seconds > 0)) return "now";
  if (seconds >= 7200) return `in ${Math.floor(seconds / 3600)} h`;
  return seconds >= 120 ? `in ${Math.floor(seconds / 60)} min` : `in ${seconds} s`;
}

export const counted = (count, one, many) => `${count} ${count === 1 ? one : many}`;

export function tick(root = document) {
  const told = [["time[data-ago]", ago], ["time[data-until]", until]];
  for (const [selector, words] of told) {
    for (const time of root.querySelectorAll(selector)) {
      const text = words(time.getAttribute("datetime"));
      if (time.textContent !== text) time.textContent = text;
    }
  }
}
