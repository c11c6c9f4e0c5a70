// Makes elements. Texts are set as text and never as markup, wherever they come from.

// The job that this page is about, where the server has several.
const JOB = new URLSearchParams(location.search).get("job");

export function ofJob(path) {
  return JOB ? `${path}${path.includes("?") ? "&" : "?"}job=${encodeURIComponent(JOB)}` : path;
}

const SVG = "http://www.w3.org/2000/svg";

export function made(name, { text, title, ...attributes } = {}, ...children) {
  const element = document.createElement(name);
  return filled(element, text, title, attributes, children);
}

export function drawn(name, { text, title, ...attributes } = {}, ...children) {
  const element = document.createElementNS(SVG, name);
  return filled(element, text, title, attributes, children);
}

function filled(element, text, title, attributes, children) {
  if (text !== undefined) element.textContent = text;
  if (title !== undefined) element.append(drawn("title", { text: title }));
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

// A text that has not changed is left alone: a screen reader would say it again.
export function say(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

export function percent(share) {
  return share === null || share === undefined ? "not known" : `${(100 * share).toFixed(1)} %`;
}

export function duration(seconds) {
  if (seconds < 1) return `${Math.round(1000 * seconds)} ms`;
  if (seconds < 60) return `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
  return `${Math.floor(seconds / 86400)} d ${Math.floor((seconds % 86400) / 3600)} h`;
}

export function clock(at_s) {
  return new Date(1000 * at_s).toLocaleString([], { dateStyle: "short", timeStyle: "medium" });
}

export function count(number, noun) {
  return `${number.toLocaleString()} ${noun}${number === 1 ? "" : "s"}`;
}

export function unrolled(runs) {
  const values = [];
  for (const [value, times] of runs) for (let left = times; left > 0; left -= 1) values.push(value);
  return values;
}

export function colours() {
  const style = getComputedStyle(document.documentElement);
  return (name) => style.getPropertyValue(`--${name}`).trim();
}
