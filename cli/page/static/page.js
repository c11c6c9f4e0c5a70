// Listens to the server's events and shows what each part says. It asks nothing of anybody else.

import { buttonsAt, loadButtons, stands } from "./buttons.js";
import { graph } from "./graph.js";
import { byId, clock, count, drawn, duration, made, ofJob, percent, say } from "./made.js";
import { logButton } from "./log.js";
import { WorldMap } from "./map.js";
import { Story } from "./story.js";
import { supposes } from "./suppose.js";

const map = new WorldMap(openNode);
const story = new Story();
supposes(map);
const COLOURS = { training: "good", repeated_steps: "spare", start: "start", waiting_for_nodes: "bad", checkpoint: "spare", planned_change: "finished", unguarded: "none", finish: "finished" };
let offset_s = 0;
let reserves = null; // as told last: the age of a checkpoint grows without news

const SHOWN = {
  head(head) {
    byId("top").dataset.mood = head.mood;
    say("headline", head.headline);
    say("figures", head.figures);
    const asks = head.asks.filter((ask) => !head.headline.endsWith(ask));
    if (byId("asks").dataset.told !== asks.join("\n")) {
      byId("asks").dataset.told = asks.join("\n");
      byId("asks").replaceChildren(...asks.map((text) => made("li", { text })));
    }
    if (head.job) {
      say("job", head.job);
      document.title = `${{ asks: "! ", failed: "! ", recovering: "~ " }[head.mood] || ""}${head.job}: ${head.headline}`;
    }
    if (head.at_s !== undefined) offset_s = head.at_s - Date.now() / 1000;
    connected(head.live ? "live" : head.ended ? "ended" : "not live", head.live);
    stands({ ended: Boolean(head.ended) });
    story.head(head);
    if (reserves) SHOWN.reserves(reserves);
  },
  world: (world) => map.world(world),
  beat: (beat) => map.beat(beat),
  incidents: (told) => story.incidents(told),
  incident: (told) => story.current(told), // the one under way
  time(time) {
    say("goodput", percent(time.goodput));
    say("lately", time.lately.map((each) => `${percent(each.goodput)} of the ${each.window}`).join(", ") || `of ${duration(time.wall_s)}`);
    say("forecast", time.forecast === null ? "" : `forecast ${percent(time.forecast)}`);
    let at = 0;
    const bars = time.parts.map((part) => {
      const bar = drawn("rect", { x: at, y: 0, width: 100 * part.share, height: 12, fill: paint(part.name) });
      at += 100 * part.share;
      return bar;
    });
    byId("shares").replaceChildren(drawn("svg", { viewBox: "0 0 100 12", preserveAspectRatio: "none" }, ...bars));
    byId("parts").replaceChildren(...time.parts.map((part) => made("li", {}, dot(paint(part.name)), made("span", { text: part.meaning }), made("span", { text: part.took }), made("span", { text: percent(part.share) }))));
  },
  reported(told) {
    byId("reported").hidden = !told.length;
    byId("graphs").replaceChildren(...told.map(graph));
  },
  budgets(budgets) {
    byId("budgets").replaceChildren(...budgets.map((each) => {
      const share = each.limit ? Math.min(1, each.used / each.limit) : 0;
      const near = share >= 1 ? " spent" : share >= 0.8 ? " near" : "";
      const bar = drawn("svg", { viewBox: "0 0 100 7", preserveAspectRatio: "none", "aria-hidden": "true" }, drawn("rect", { class: "track", x: 0, y: 0, width: 100, height: 7 }), drawn("rect", { class: `used${near}`, x: 0, y: 0, width: 100 * share, height: 7 }));
      return made("li", {}, made("div", {}, made("span", { text: `${each.name}: ${each.used} of ${each.limit}` }), made("span", { class: "dim", text: each.outlook })), bar);
    }));
  },
  reserves(told) {
    reserves = told;
    const age = told.checkpoint ? Math.max(0, Date.now() / 1000 + offset_s - told.checkpoint.written_s) : 0;
    const rows = [
      ["spare nodes", told.spares.length ? `${told.spares.length}: ${told.spares.slice(0, 8).join(", ")}` : "none"],
      ["built ahead", told.built ? `ranks ${told.built}` : "no rank"],
      ["imported ahead", count(told.imported, "node")],
      ["checkpoint", told.checkpoint ? `step ${told.checkpoint.step.toLocaleString()}, ${duration(age)} old` : "none is known here"],
      ...told.held, // copies in host memory, and what the ranks have agreed on
      ...told.faults.map((fault) => [`${fault.level} fault`, `${fault.place || "somewhere"}: ${fault.says}, since ${clock(fault.since_s)}`]),
    ];
    byId("reserves").replaceChildren(...rows.flatMap(([term, text]) => [made("dt", { text: term }), made("dd", { text })]));
  },
  control(told) {
    const rows = told.controllers.map((each) => made("li", {}, `${each.name} on ${each.host}, pid ${each.pid}: ${each.phase}, since ${clock(each.since_s)}`, ...(each.leads ? [made("span", { class: "tag", text: "leads" })] : [])));
    if (!rows.length) rows.push(made("li", { class: "dim", text: "None is known to live." }));
    rows.push(made("li", { class: "dim", text: `term ${told.term}` }));
    if (told.paused_until_s) rows.push(made("li", { text: `failover is paused until ${clock(told.paused_until_s)}` }));
    for (const [reason, times] of told.refused) rows.push(made("li", { class: "dim", text: `refused ${times}: ${reason}` }));
    byId("controllers").replaceChildren(...rows);
  },
  operators(told) {
    stands({ paused: told.paused });
    byId("operators").hidden = !told.standing.length && !told.records.length;
    byId("standing").replaceChildren(...told.standing.map((text) => made("li", {}, made("strong", { text }))));
    const rows = told.records.map((text) => made("li", { text }));
    if (told.earlier) rows.push(made("li", { class: "dim", text: `${count(told.earlier, "earlier one")}: midstep report --story tells of them` }));
    byId("records").replaceChildren(...rows);
  },
  policy(policy) {
    stands({ injects: policy.injects });
    say("policy", policy.text || "It lies with the job, on the machine that runs it.");
  },
};

function paint(name) {
  return `var(--${COLOURS[name] || "work"})`;
}

function dot(fill) {
  return drawn("svg", { viewBox: "0 0 11 11", "aria-hidden": "true" }, drawn("rect", { x: 1, y: 1, width: 9, height: 9, fill }));
}

function connected(text, live) {
  say("connection", text);
  byId("connection").dataset.live = live ? "yes" : "no";
}

async function openNode(name) {
  const answer = await fetch(ofJob(`/node?name=${encodeURIComponent(name)}`));
  if (!answer.ok) return;
  const node = await answer.json();
  say("node-title", node.name);
  say("node-words", [`${node.state}, failure domain ${node.domain}, ${count(node.failures, "failure")}`, node.note, ...node.built].filter(Boolean).join("\n"));
  const columns = ["rank", "role", "state", "activity", "step", "incarnation", "pid"].filter((column) => column !== "role" || node.of_ranks.some((rank) => rank.role));
  const head = made("tr", {}, ...columns.map((text) => made("th", { text, scope: "col" })));
  byId("node-buttons").replaceChildren(...buttonsAt("node", { node: node.name }));
  const rows = node.of_ranks.map((rank) => made("tr", {}, ...columns.map((column) => made("td", { text: String(rank[column] || (column === "rank" || column === "step" ? 0 : "-")) })), made("td", { class: "buttons" }, ...logButton(rank), ...buttonsAt("rank", { rank: rank.rank }))));
  byId("node-ranks").replaceChildren(...(rows.length ? [made("thead", {}, head), made("tbody", {}, ...rows)] : []));
  byId("node").showModal();
}

function listen() {
  const events = new EventSource(ofJob("/events"));
  events.addEventListener("open", loadButtons);
  for (const [name, show] of Object.entries(SHOWN)) events.addEventListener(name, (event) => show(JSON.parse(event.data)));
  events.addEventListener("error", () => {
    connected("connection lost, trying again", false);
    if (events.readyState !== EventSource.CLOSED) return; // it tries again by itself
    setTimeout(async () => {
      const answer = await fetch(ofJob("/node?name=")).catch(() => null);
      if (answer && answer.status === 401) location.assign("/login");
      else listen();
    }, 2000);
  });
}

listen();
