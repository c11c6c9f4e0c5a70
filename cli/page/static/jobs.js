// All jobs of the machine in one list: what each does, and whether anything is asked of you. Each opens.

import { byId, clock, count, made, say } from "./made.js";

const EVERY_MS = 5000;

async function look() {
  const answer = document.hidden ? null : await fetch("/jobs").catch(() => null);
  if (answer && answer.status === 401) location.assign("/login");
  const told = answer && answer.ok ? await answer.json().catch(() => null) : null;
  if (told) show(told);
  if (!document.hidden) {
    say("connection", told ? "live" : "connection lost, trying again");
    byId("connection").dataset.live = told ? "yes" : "no";
  }
  setTimeout(look, EVERY_MS);
}

function show(told) {
  const asks = told.filter((job) => job.mood === "asks" && !job.ended).length;
  const live = told.filter((job) => !job.ended).length;
  byId("top").dataset.mood = asks ? "asks" : live ? "training" : "ended";
  say("headline", asks ? `${count(asks, "job")} of ${live} ${asks === 1 ? "asks" : "ask"} something of you` : live ? `${count(live, "job")} under way, nothing is asked of you` : "No job is under way");
  byId("jobs").replaceChildren(...told.map((job) => made("li", { "data-mood": job.mood, "data-job": job.name },
    made("p", {}, made("a", { href: `/?job=${encodeURIComponent(job.name)}`, text: job.name }), `: ${job.headline}`),
    made("p", { class: "dim", text: [job.figures, job.at_s ? `as of ${clock(job.at_s)}` : ""].filter(Boolean).join(", ") }))));
  if (!told.length) byId("jobs").replaceChildren(made("li", { text: "There are none yet: midstep run starts one." }));
}

look();
