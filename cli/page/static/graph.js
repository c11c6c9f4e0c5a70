// A value that the script reports, over its steps: a line, its ends in words, and the last value as a number.

import { count, drawn, made } from "./made.js";

const WIDTH = 300, HEIGHT = 60, EDGE = 3;
const short = (value) => String(Number(value.toPrecision(4)));

export function graph(told) {
  const points = told.steps.map((step, at) => [step, told.values[at]]).filter(([, value]) => typeof value === "number");
  const values = points.map(([, value]) => value);
  const least = Math.min(...values), most = Math.max(...values), first = told.steps[0], last = told.steps[told.steps.length - 1];
  const words = points.length > 1 ? `between ${short(least)} and ${short(most)}, steps ${first.toLocaleString()} to ${last.toLocaleString()}` : `step ${last.toLocaleString()}`;
  const left = count(told.steps.length - points.length, "point");
  const missing = told.steps.length > points.length ? `; ${left} with no finite number` : "";
  return made("figure", { class: "graph" },
    made("figcaption", {}, made("strong", { text: told.name }), ` ${told.last}`, made("span", { class: "dim", text: ` on rank ${told.rank}` })),
    drawn("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, ...lines(points, [first, last], [least, most])),
    made("p", { class: "dim", text: words + missing }));
}

function lines(points, [first, last], [least, most]) {
  if (points.length < 2) return [];
  const x = (step) => EDGE + ((WIDTH - 2 * EDGE) * (step - first)) / Math.max(1, last - first);
  const y = (value) => HEIGHT - EDGE - ((HEIGHT - 2 * EDGE) * (value - least)) / (most - least || 1);
  return [drawn("polyline", { points: points.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`).join(" ") })];
}
