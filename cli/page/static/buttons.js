// The buttons of this viewer's role. Each asks first, with what will happen, for a name and a reason.

import { logsAreRead } from "./log.js";
import { byId, made, ofJob, say } from "./made.js";

const PLACES = ["job", "ladder", "controllers"];
const NAME = "midstep-name"; // in the browser's own memory, to be offered again
let known = { role: "viewer", proof: "", buttons: [] };
let isPaused = false, hasEnded = false, injects = true;
let press = null; // what the dialog is about

export async function loadButtons() {
  const answer = await fetch(ofJob("/buttons")).catch(() => null);
  if (!answer || !answer.ok) return;
  known = await answer.json();
  say("role", known.role === "viewer" ? "" : known.role);
  byId("login").hidden = !known.login;
  byId("bundle").hidden = !known.bundle;
  byId("bundle").href = ofJob("/bundle");
  byId("all").hidden = !known.list;
  logsAreRead(known.log);
  for (const place of PLACES) byId(`${place}-buttons`).replaceChildren(...buttonsAt(place, {}));
}

export function buttonsAt(place, about) {
  const [subject] = Object.values(about);
  const all = known.buttons.filter((each) => each.place === place).map((each) => {
    const more = subject === undefined ? {} : { "aria-label": `${each.label} ${place} ${subject}` };
    const button = made("button", { type: "button", "data-button": each.name, text: each.label, ...more });
    if (each.paused !== null) button.dataset.paused = String(each.paused);
    button.addEventListener("click", () => ask(each, about));
    return button;
  });
  all.forEach(fit);
  return all;
}

export function stands(told) {
  isPaused = told.paused ?? isPaused;
  hasEnded = told.ended ?? hasEnded;
  injects = told.injects ?? injects;
  document.querySelectorAll("[data-button]").forEach(fit);
}

function fit(button) {
  const refused = button.dataset.button === "inject" && !injects; // by the policy
  button.hidden = hasEnded || refused || (button.dataset.paused !== undefined && button.dataset.paused !== String(isPaused));
}

function ask(button, about) {
  press = { button, about };
  const subject = Object.entries(about).map(([what, which]) => `${what} ${which}`).join(", ");
  say("ask-title", subject ? `${button.label}: ${subject}` : button.label);
  say("ask-says", button.says.replaceAll(/\{(\w+)\}/g, (whole, name) => String(about[name] ?? whole)));
  say("ask-do", button.label);
  say("ask-wrong", "");
  byId("ask-fields").replaceChildren(...(button.fields || []).flatMap((field) => {
    const id = `field-${field.name}`;
    const input = field.choices ? made("select", { id }, ...field.choices.map((text) => made("option", { text, value: text }))) : made("input", { id, required: "", maxlength: "256", autocomplete: "off" });
    input.value = field.default || (field.choices ? field.choices[0] : "");
    return [made("label", { for: id, text: field.label }), input];
  }));
  byId("ask-by").value = localStorage.getItem(NAME) || "";
  byId("ask-why").value = "";
  byId("ask").showModal();
  (byId("ask-fields").querySelector("input, select") || byId(byId("ask-by").value ? "ask-why" : "ask-by")).focus();
}

async function confirmed(event) {
  event.preventDefault();
  const { button, about } = press;
  const values = Object.fromEntries(Object.entries(about).map(([name, value]) => [name, String(value)]));
  for (const field of button.fields || []) values[field.name] = byId(`field-${field.name}`).value.trim();
  const by = byId("ask-by").value.trim();
  localStorage.setItem(NAME, by);
  byId("ask-do").disabled = true;
  const body = JSON.stringify({ button: button.name, by, why: byId("ask-why").value.trim(), values });
  const headers = { "Content-Type": "application/json", "X-Midstep-Proof": known.proof };
  const answer = await fetch(ofJob("/press"), { method: "POST", headers, body }).catch(() => null);
  const told = answer ? await answer.json().catch(() => ({ text: "the page gave no answer" })) : { text: "the page cannot be reached" };
  byId("ask-do").disabled = false;
  if (!answer || !answer.ok) {
    say("ask-wrong", told.text);
    return;
  }
  byId("ask").close();
  if (byId("node").open) byId("node").close();
  say("answer", told.text);
}

byId("ask-form").addEventListener("submit", confirmed);
byId("ask-cancel").addEventListener("click", () => byId("ask").close());
