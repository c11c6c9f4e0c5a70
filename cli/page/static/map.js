// The map of the world: each node is a block, each rank a square in it. Drawn on a canvas, for 4 to 10,000 ranks.

import { byId, colours, count, drawn, made, say, unrolled } from "./made.js";

const LARGEST = 34, SMALLEST = 2;
const STATE = {
  training: "good", finished: "finished", exited: "finished", released: "finished",
  absent: "bad", starting: "start", joined: "start", quiescing: "work", quiesced: "work", rejoining: "work", ready: "work",
};
const NODE = { spare: "spare", lost: "lost", isolated: "bad", unfit: "work", requested: "start", active: "none" };

export class WorldMap {
  constructor(open) {
    this.canvas = byId("map");
    this.open = open;
    this.colour = "state";
    this.chosen = -1;
    this.blocks = [];
    this.wanted = false;
    this.selecting = false; // then a click selects instead of opening
    this.selectedNodes = new Set(); // by name
    this.selectedRanks = new Set(); // by number
    this.selected = () => {};
    this.canvas.addEventListener("click", (event) => this.#clicked(event));
    this.canvas.addEventListener("mousemove", (event) => this.#moved(event));
    this.canvas.addEventListener("mouseleave", () => say("pointed", ""));
    this.canvas.addEventListener("keydown", (event) => this.#typed(event));
    this.canvas.addEventListener("focus", () => this.#choose(Math.max(0, this.chosen)));
    this.canvas.addEventListener("blur", () => this.#choose(-1));
    for (const button of document.querySelectorAll("[data-colour]")) {
      button.addEventListener("click", () => this.#coloured(button));
    }
    new ResizeObserver(() => this.redraw()).observe(this.canvas.parentElement);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  }

  world(world) {
    this.nodes = world.nodes.map((node) => ({ ...node, of: [] }));
    this.numbers = unrolled(world.ranks).map((offset, place) => place + offset);
    this.life = unrolled(world.life);
    this.role = unrolled(world.role).map((place) => world.roles[place]);
    this.nodeOf = unrolled(world.node);
    this.nodeOf.forEach((node, place) => node >= 0 && this.nodes[node].of.push(place));
    this.homeless = this.nodeOf.flatMap((node, place) => (node < 0 ? [place] : []));
    this.asked = world.asked;
    this.redraw();
  }

  beat(beat) {
    this.top = beat.top;
    this.behind = unrolled(beat.behind);
    this.slowness = unrolled(beat.slowness);
    this.state = unrolled(beat.state).map((place) => beat.states[place]);
    this.activity = unrolled(beat.activity).map((place) => beat.activities[place]);
    this.redraw();
  }

  redraw() {
    if (this.wanted) return;
    this.wanted = true;
    requestAnimationFrame(() => {
      this.wanted = false;
      if (this.nodes && this.state && this.state.length === this.numbers.length) this.#draw();
    });
  }

  #draw() {
    const width = this.canvas.parentElement.clientWidth;
    if (!width) return;
    const began = performance.now();
    const [cell, gap] = this.#lay(width);
    const scale = devicePixelRatio || 1;
    const height = Math.max(24, ...this.blocks.map((block) => block.y + block.height));
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    const colour = colours();
    const paint = this.#paint(colour);
    pen.font = "11px system-ui, DejaVu Sans, sans-serif";
    for (const block of this.blocks) {
      const node = this.nodes[block.node];
      if (node.state !== "active" || !node.of.length) {
        pen.strokeStyle = colour(NODE[node.state] || "none");
        pen.lineWidth = cell > 7 ? 2 : 1;
        pen.strokeRect(block.x + 1, block.y + 1, block.columns * cell - gap - 1, block.rows * cell - gap - 1);
      }
      node.of.forEach((place, at) => {
        pen.fillStyle = paint(place);
        const x = block.x + (at % block.columns) * cell, y = block.y + Math.floor(at / block.columns) * cell;
        pen.fillRect(x, y, cell - gap, cell - gap);
        if (cell >= 22) this.#number(pen, colour, place, x, y, cell - gap);
      });
      if (this.selecting) this.#outline(pen, colour, node, block, cell, gap);
      if (block.label) {
        pen.fillStyle = colour("dim");
        pen.textAlign = "left";
        pen.fillText(this.#label(node, block), block.x, block.y + block.rows * cell + 11);
      }
      if (block.node === this.chosen) {
        pen.strokeStyle = colour("focus");
        pen.lineWidth = 3;
        pen.strokeRect(block.x - 2, block.y - 2, block.columns * cell - gap + 4, block.rows * cell - gap + 4);
      }
    }
    this.#words();
    this.canvas.dataset.drawnMs = (performance.now() - began).toFixed(1);
    this.canvas.dataset.ranks = String(this.numbers.length);
  }

  #outline(pen, colour, node, block, cell, gap) {
    pen.strokeStyle = colour("text");
    pen.lineWidth = cell > 7 ? 3 : 2;
    if (this.selectedNodes.has(node.name)) pen.strokeRect(block.x, block.y, block.columns * cell - gap, block.rows * cell - gap);
    node.of.forEach((place, at) => {
      if (!this.selectedRanks.has(this.numbers[place])) return;
      pen.strokeRect(block.x + (at % block.columns) * cell + 1, block.y + Math.floor(at / block.columns) * cell + 1, cell - gap - 2, cell - gap - 2);
    });
  }

  select(on) {
    this.selecting = on;
    this.selectedNodes.clear();
    this.selectedRanks.clear();
    this.redraw();
    this.selected();
  }

  #toggle(of, value) {
    if (!of.delete(value)) of.add(value);
    this.redraw();
    this.selected();
  }

  // The largest squares with which all blocks fit into the width and a part of the screen.
  #lay(width) {
    const most = Math.max(220, Math.min(520, 0.55 * innerHeight));
    for (let cell = LARGEST; ; cell -= 1) {
      const gap = cell > 8 ? 3 : cell > 3 ? 1 : 0;
      const between = cell > 12 ? 14 : Math.max(2, Math.round(cell / 2));
      const label = cell >= 16 ? 17 : 0;
      let x = 3, y = 3, tallest = 0;
      this.blocks = this.nodes.map((node, number) => {
        const ranks = Math.max(1, node.of.length);
        const columns = Math.min(ranks, Math.max(label ? 2 : 1, Math.ceil(Math.sqrt(ranks * 2)), ranks > 64 ? 16 : 0));
        const rows = Math.ceil(ranks / columns);
        const taken = Math.max(columns * cell, label ? 74 : 0);
        if (x + taken > width - 3 && x > 3) [x, y, tallest] = [3, y + tallest + between, 0];
        const block = { node: number, x, y, columns, rows, cell, width: taken, height: rows * cell + label, label };
        x += taken + between;
        tallest = Math.max(tallest, block.height);
        return block;
      });
      if (y + tallest <= most || cell <= SMALLEST) return [cell, gap];
    }
  }

  #number(pen, colour, place, x, y, size) {
    pen.fillStyle = colour("card");
    pen.textAlign = "center";
    pen.fillText(String(this.numbers[place]), x + size / 2, y + size / 2 + 4);
  }

  #label(node, block) {
    const text = node.state === "active" ? node.name : `${node.name} ${node.state}`;
    const most = Math.floor(block.width / 6);
    return text.length > most ? `${text.slice(0, Math.max(1, most - 1))}…` : text;
  }

  #paint(colour) {
    const known = new Map();
    const of = (name) => known.get(name) ?? known.set(name, colour(name)).get(name);
    if (this.colour === "behind") {
      return (place) => of(this.behind[place] === 0 ? "good" : this.behind[place] === 1 ? "start" : "work");
    }
    if (this.colour === "slow") {
      const shade = (times) => (!times ? "none" : times <= 1 ? "good" : times < 1.5 ? "start" : times < 2 ? "work" : "bad");
      return (place) => of(shade(this.slowness[place]));
    }
    if (this.colour === "life") {
      return (place) => of(this.life[place] <= 1 ? "good" : this.life[place] === 2 ? "start" : this.life[place] < 5 ? "work" : "bad");
    }
    return (place) => of(STATE[this.state[place]] || "none");
  }

  #words() {
    const states = new Map();
    for (const state of this.state) states.set(state, (states.get(state) || 0) + 1);
    const ranks = [...states].map(([state, many]) => `${many.toLocaleString()} ${state}`).join(", ");
    const nodes = new Map();
    for (const node of this.nodes) nodes.set(node.state, (nodes.get(node.state) || 0) + 1);
    const told = [...nodes].map(([state, many]) => `${many.toLocaleString()} ${state}`).join(", ");
    const homeless = this.homeless.length ? ` ${count(this.homeless.length, "rank")} without a node.` : "";
    say("world-words", `${count(this.numbers.length, "rank")}: ${ranks || "none yet"}. ${count(this.nodes.length, "node")}: ${told || "none yet"}.${homeless}`);
    const legend = {
      state: [["training", "good"], ["starting", "start"], ["in a recovery", "work"], ["no process", "bad"], ["finished", "finished"], ["spare node", "spare", true], ["lost node", "lost", true]],
      behind: [["at the newest step", "good"], ["one behind", "start"], ["more behind", "work"]],
      slow: [["as fast as others", "good"], ["up to 1.5 times their time", "start"], ["up to twice their time", "work"], ["longer", "bad"], ["not compared", "none"]],
      life: [["first process", "good"], ["replaced once", "start"], ["up to three times", "work"], ["more often", "bad"]],
    }[this.colour];
    const key = `${this.colour}${colours()("good")}`;
    if (byId("legend").dataset.key === key) return;
    byId("legend").dataset.key = key;
    byId("legend").replaceChildren(...legend.map(([text, name, hollow]) => {
      const paint = hollow ? { fill: "none", stroke: `var(--${name})`, "stroke-width": 2 } : { fill: `var(--${name})` };
      const box = drawn("rect", { x: 1, y: 1, width: 9, height: 9, ...paint });
      return made("li", {}, drawn("svg", { viewBox: "0 0 11 11", "aria-hidden": "true" }, box), text);
    }));
  }

  #coloured(button) {
    this.colour = button.dataset.colour;
    for (const each of document.querySelectorAll("[data-colour]")) each.setAttribute("aria-pressed", String(each === button));
    this.redraw();
  }

  #at(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left, y = event.clientY - box.top;
    const block = this.blocks.find((each) => x >= each.x && x < each.x + each.width && y >= each.y && y < each.y + each.height);
    if (!block) return [undefined, undefined];
    const column = Math.floor((x - block.x) / block.cell), row = Math.floor((y - block.y) / block.cell);
    const inside = column < block.columns && row < block.rows;
    return [block, inside ? this.nodes[block.node].of[row * block.columns + column] : undefined];
  }

  #moved(event) {
    const [block, place] = this.#at(event);
    if (!block) say("pointed", "");
    else if (place === undefined) say("pointed", this.#nodeWords(this.nodes[block.node]));
    else say("pointed", this.#rankWords(place));
  }

  #rankWords(place) {
    const behind = this.behind[place] ? `, ${count(this.behind[place], "step")} behind` : "";
    const role = this.role[place] ? ` (${this.role[place]})` : "";
    const doing = this.activity[place] ? `, ${this.activity[place]}` : "";
    const slow = this.slowness[place] > 1 ? `, computes ${this.slowness[place]} times as long as others with equal work` : "";
    const life = this.life[place] > 1 ? `, process ${this.life[place]} of this rank` : "";
    return `rank ${this.numbers[place]}${role} on ${this.nodes[this.nodeOf[place]].name}: ${this.state[place]}${doing}, step ${(this.top - this.behind[place]).toLocaleString()}${behind}${slow}${life}`;
  }

  #nodeWords(node) {
    const failures = node.failures ? `, ${count(node.failures, "failure")}` : "";
    const states = [...new Set(node.of.map((place) => this.state[place]))].join(", ");
    return `${node.name}: ${node.state}${node.ranks ? `, ranks ${node.ranks}` : ""}${states ? `, ${states}` : ""}${failures}`;
  }

  #choose(node) {
    if (!this.nodes || !this.nodes.length) return;
    this.chosen = Math.min(node, this.nodes.length - 1);
    say("pointed", this.chosen < 0 ? "" : this.#nodeWords(this.nodes[this.chosen]));
    this.redraw();
  }

  #clicked(event) {
    const [block, place] = this.#at(event);
    if (!block) return;
    if (!this.selecting) this.open(this.nodes[block.node].name);
    else if (place === undefined || block.cell < 7) this.#toggle(this.selectedNodes, this.nodes[block.node].name);
    else this.#toggle(this.selectedRanks, this.numbers[place]);
  }

  #typed(event) {
    if (!this.nodes || !this.nodes.length) return;
    const here = this.blocks[this.chosen];
    const row = here ? this.blocks.filter((each) => each.y === here.y).length : 1;
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: row, ArrowUp: -row, Home: -Infinity, End: Infinity }[event.key];
    if (step !== undefined) this.#choose(Math.max(0, Math.min(this.nodes.length - 1, this.chosen + step)));
    else if ((event.key === "Enter" || event.key === " ") && this.chosen >= 0) {
      if (this.selecting) this.#toggle(this.selectedNodes, this.nodes[this.chosen].name);
      else this.open(this.nodes[this.chosen].name);
    }
    else return;
    event.preventDefault();
  }
}
