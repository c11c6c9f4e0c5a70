// The time line, and incidents that open to cause, decision, rungs passed over and why.

import { byId, clock, count, drawn, duration, made, say } from "./made.js";

const WIDTH = 1000, HEIGHT = 74, BASE = 56;
const MOST_SHOWN = 30;

export class Story {
  constructor() {
    this.ended = [];
    this.earlier = 0;
    this.open = null;
    this.window = 0;
    for (const button of document.querySelectorAll("[data-window]")) {
      button.addEventListener("click", () => {
        this.window = Number(button.dataset.window);
        for (const each of document.querySelectorAll("[data-window]")) each.setAttribute("aria-pressed", String(each === button));
        this.#line();
      });
    }
  }

  head(head) {
    if (head.at_s === undefined) return;
    this.now = head.at_s;
    this.began = head.began_s ?? head.at_s;
    this.#line();
  }

  incidents({ ended, earlier }) {
    this.ended = ended;
    this.earlier = earlier;
    this.#list();
    this.#line();
  }

  current(open) {
    this.open = open;
    byId("now").hidden = !open;
    byId("open").replaceChildren(...(open ? [made("p", {}, made("strong", { text: open.line })), inside(open)] : []));
    this.#line();
  }

  #line() {
    if (this.now === undefined) return;
    const from = this.window ? Math.max(this.began, this.now - this.window) : this.began;
    const span = Math.max(1, this.now - from);
    const x = (at) => (WIDTH * (Math.min(Math.max(at, from), this.now) - from)) / span;
    const told = [...this.ended, ...(this.open ? [this.open] : [])];
    const seen = told.filter((each) => (each.outcome === "open" ? this.now : each.ended_s) >= from);
    const bars = this.#bars(seen, from, span);
    const marks = seen.map((each) => {
      const left = x(each.began_s), right = x(each.outcome === "open" ? this.now : each.ended_s);
      const mark = drawn("rect", { class: `incident ${each.outcome}`, x: left, y: 4, width: Math.max(3, right - left), height: BASE - 4, title: `${each.line}, ${clock(each.began_s)}` });
      mark.addEventListener("click", () => this.#show(each.number));
      return mark;
    });
    const line = byId("line");
    line.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    line.replaceChildren(...bars, drawn("line", { class: "axis", x1: 0, x2: WIDTH, y1: BASE, y2: BASE }), ...marks);
    const lost = seen.reduce((sum, each) => sum + Math.max(0, (each.outcome === "open" ? this.now : each.ended_s) - Math.max(from, each.began_s)), 0);
    say("line-words", `${clock(from)} to ${clock(this.now)}: ${seen.length ? `${count(seen.length, "incident")}, ${duration(lost)} in all` : "no incident"}`);
  }

  // The height of a bar is the part of its time that no incident took.
  #bars(seen, from, span) {
    const many = 100, each_s = span / many;
    return Array.from({ length: many }, (_, number) => {
      const begin = from + number * each_s, end = begin + each_s;
      const taken = seen.reduce((sum, each) => sum + Math.max(0, Math.min(end, each.outcome === "open" ? this.now : each.ended_s) - Math.max(begin, each.began_s)), 0);
      const height = (BASE - 4) * Math.max(0, 1 - taken / each_s);
      return drawn("rect", { class: "good", x: (number * WIDTH) / many, y: BASE - height, width: WIDTH / many - 1.5, height });
    });
  }

  #show(number) {
    const found = document.getElementById(`incident-${number}`);
    if (!found) return;
    found.open = true;
    found.scrollIntoView({ block: "nearest" });
    found.querySelector("summary").focus();
  }

  #list() {
    const opened = new Set([...document.querySelectorAll("details.incident[open]")].map((each) => each.id));
    const shown = this.ended.slice(-MOST_SHOWN).reverse().map((each) => {
      const told = made("details", { class: "incident", id: `incident-${each.number}`, "data-outcome": each.outcome });
      told.append(made("summary", {}, made("span", { text: each.line }), made("span", { class: "when", text: clock(each.began_s) })));
      told.append(inside(each));
      told.open = opened.has(told.id);
      return told;
    });
    const more = this.earlier + Math.max(0, this.ended.length - MOST_SHOWN);
    if (more) shown.push(made("p", { class: "dim", text: `${count(more, "earlier incident")}: midstep report tells of them` }));
    if (!shown.length) shown.push(made("p", { class: "dim", text: "No incident has ended yet." }));
    byId("incidents").replaceChildren(...shown);
  }
}

function inside(incident) {
  const lines = (texts) => texts.map((text) => made("p", { text }));
  const rows = [["cause", lines(incident.causes.length ? incident.causes : [incident.cause])]];
  if (incident.output.length) rows.push(["last words", [made("pre", { text: incident.output.join("\n"), tabindex: "0" })]]);
  rows.push(["decision", decisions(incident)]);
  if (incident.state.length) rows.push(["state", lines(incident.state)]);
  if (incident.ended) rows.push(["end", lines([incident.ended])]);
  if (incident.phases.length) rows.push([`time, ${incident.took}`, [phases(incident.phases)]]);
  return made("dl", { class: "inside" }, ...rows.flatMap(([term, told]) => [made("dt", { text: term }), made("dd", {}, ...told)]));
}

function decisions(incident) {
  if (!incident.decisions.length) return [made("p", { text: "none yet" })];
  return incident.decisions.flatMap((each) => [
    made("p", {}, made("strong", { text: each.rung }), `: ${each.reason}`, ...(each.failed ? [made("span", { class: "failed", text: " (not completed)" })] : [])),
    ...each.passed_over.map((over) => made("p", { class: "passed", text: `not ${over.rung}: ${over.reason}` })),
  ]);
}

function phases(told) {
  const whole = Math.max(1e-9, told.reduce((sum, each) => sum + each.seconds, 0));
  let at = 0;
  return made("div", { class: "phases" }, ...told.flatMap((each) => {
    const bar = drawn("rect", { x: (100 * at) / whole, y: 0, width: Math.max(0.6, (100 * each.seconds) / whole), height: 9 });
    at += each.seconds;
    return [made("span", { text: each.name }), made("span", { text: duration(each.seconds) }), drawn("svg", { viewBox: "0 0 100 9", preserveAspectRatio: "none", "aria-hidden": "true" }, bar)];
  }));
}
