// What if: nodes and ranks that are selected on the map, and what their loss would cost. Nothing is done to the job.

import { byId, made, ofJob } from "./made.js";

const MOST = 1000; // of an address
let asked = 0;

export function supposes(map) {
  const button = byId("select");
  button.addEventListener("click", () => {
    const on = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(on));
    map.select(on);
  });
  map.selected = () => show(map);
}

async function show(map) {
  const panel = byId("supposed"), number = ++asked;
  panel.hidden = !map.selecting;
  const nodes = [...map.selectedNodes], ranks = [...map.selectedRanks];
  if (!nodes.length && !ranks.length) {
    panel.replaceChildren("What if they were lost? Select ranks, or a node by its name; with the keyboard a node by Enter.");
    return;
  }
  if (nodes.length + ranks.length > MOST) {
    panel.replaceChildren(`At most ${MOST.toLocaleString()} at once.`);
    return;
  }
  const query = new URLSearchParams([...nodes.map((node) => ["node", node]), ...ranks.map((rank) => ["rank", String(rank)])]);
  const answer = await fetch(ofJob(`/what-if?${query}`)).catch(() => null);
  const told = answer ? await answer.json().catch(() => null) : null;
  if (number !== asked) return; // another one was selected meanwhile
  if (!told || !told.lines) panel.replaceChildren(told ? told.text : "the page cannot be reached");
  else panel.replaceChildren(made("p", {}, made("strong", { text: `What if: ${told.lost}` })), ...told.lines.map((text, at) => made("p", { text, class: at ? "dim" : "" })));
}
