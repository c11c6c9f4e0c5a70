// What a process of a rank has printed, again and again while the dialog is open. For those whose role may read logs.

import { byId, made, ofJob, say } from "./made.js";

const EVERY_MS = 2000;
let may = false;
let about = null; // rank, its present process, the one that is shown
let timer = 0;

export function logsAreRead(allowed) {
  may = allowed;
}

export function logButton(rank) {
  if (!may || !rank.incarnation) return [];
  const button = made("button", { type: "button", text: "Log", "aria-label": `Log of rank ${rank.rank}`, "data-log": rank.rank });
  button.addEventListener("click", () => {
    about = { rank: rank.rank, present: rank.incarnation, life: rank.incarnation };
    say("log-text", "");
    byId("log").showModal();
    look();
  });
  return [button];
}

async function look() {
  clearTimeout(timer);
  const { rank, life, present } = about;
  const answer = await fetch(ofJob(`/log?rank=${rank}&life=${life}`)).catch(() => null);
  const text = answer ? await answer.text() : "the page cannot be reached";
  if (about.rank !== rank || about.life !== life || !byId("log").open) return;
  say("log-title", `Log of rank ${rank}, process ${life}${life === present ? "" : ", which has ended"}`);
  say("log-words", answer && answer.ok && !text ? "Nothing is in it, or it is on another machine." : "Its end, of at most 64 KiB.");
  byId("log-earlier").disabled = life <= 1;
  byId("log-later").disabled = life >= present;
  const shown = byId("log-text"), atEnd = shown.scrollTop + shown.clientHeight >= shown.scrollHeight - 20;
  say("log-text", text);
  if (atEnd) shown.scrollTop = shown.scrollHeight;
  timer = setTimeout(look, EVERY_MS);
}

function another(by) {
  about = { ...about, life: Math.min(about.present, Math.max(1, about.life + by)) };
  look();
}

byId("log-earlier").addEventListener("click", () => another(-1));
byId("log-later").addEventListener("click", () => another(1));
byId("log").addEventListener("close", () => clearTimeout(timer));
