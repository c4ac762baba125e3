// The map: a square for each rank, to find the conspicuous ones among many. It is a
// matrix for a mesh, else a line for each host.

import { DARK, colours, sized } from "./canvas.js";
import { mapText } from "./cells.js";
import { make, setAttribute, setText } from "./elements.js";
import { aboutLines, layOut, linesOf, meshOf, neighbour, placeOf, scaleOf, scalesOf } from "./map_layout.js";
import { Tip } from "./tip.js";

const FROM = 24; // ranks from which on there is a map
const FROM_OF_MESH = 8; // the same where they are a mesh
const TALLEST = 240; // px of squares before they scroll
const SCROLLBAR = 16; // px
const STATES = [
  ["calm", "idle"], ["busy", "computes"], ["working", "in an op"], ["warning", "silent"],
  ["error", "aborted, dead, no answer"], ["blamed", "at fault"],
];
// Of colours, as in board.css: text can be read on all of them.
const STRENGTH = { calm: 0.22, busy: 0.25, working: 0.6, warning: 1, error: 1 };

export class RankMap {
  /** `reveal(rank)` is called where a square is pressed. */
  constructor(reveal) {
    this.reveal = reveal;
    this.rows = new Map();
    this.groups = null;
    this.mesh = null;
    this.key = "state"; // what the colours mean
    this.width = 0;
    this.laid = { squares: [], size: [0, 0] }; // until it is drawn
    this.place = -1; // of the square that the keys are at
    this.build();
  }

  build() {
    this.element = make("div", "map");
    this.select = make("select", "", null, { "aria-label": "colour of the map" });
    this.select.addEventListener("change", () => {
      this.key = this.select.value;
      this.draw();
    });
    this.legend = make("span", "legend quiet");
    this.about = make("span", "grow quiet");
    const tools = make("div", "tools");
    tools.append(this.select, this.legend, this.about);
    this.canvas = make("canvas", "squares", null, {
      role: "img", tabindex: "0", title: "arrow keys go from rank to rank, Enter to its row",
    });
    this.scroll = make("div", "scroll");
    this.scroll.style.maxHeight = `${TALLEST}px`;
    this.scroll.append(this.canvas);
    this.tip = new Tip({ role: "status" });
    this.element.append(tools, this.scroll, this.tip.element);
    this.canvas.addEventListener("click", (event) => this.press(this.placeAt(event)));
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.tip.hide());
    this.canvas.addEventListener("keydown", (event) => this.keydown(event));
    this.canvas.addEventListener("blur", () => this.goTo(-1));
  }

  /** Show these rows; `groups` are all groups, of which some may make a mesh. */
  update(rows, groups) {
    this.rows = rows;
    if (groups !== this.groups) {
      this.groups = groups;
      this.found = meshOf(groups);
    }
    const ranks = [...rows.keys()].sort((one, other) => one - other);
    this.mesh = this.found && ranks.every((rank) => this.found.at.has(rank)) ? this.found : null;
    this.element.hidden = rows.size < (this.mesh ? FROM_OF_MESH : FROM);
    if (this.element.hidden) return;
    this.lines = linesOf(ranks, rows, this.mesh);
    const scales = scalesOf(rows);
    const known = JSON.stringify(scales);
    if (known !== this.known) {
      this.known = known;
      const options = [["state", "state"], ...scales];
      if (!options.some(([key]) => key === this.key)) this.key = "state";
      this.select.replaceChildren(
        ...options.map(([key, title]) => make("option", "", `colour: ${title}`, { value: key })),
      );
      this.select.value = this.key;
    }
    setText(this.about, aboutLines(this.lines, this.mesh));
    setAttribute(this.canvas, "aria-label", mapText(rows));
    this.draw();
  }

  resize(width) {
    if (width === this.width) return;
    this.width = width;
    this.draw();
  }

  draw() {
    if (this.element.hidden || !this.lines || this.width === 0) return;
    const look = colours(this.element);
    const pen = this.canvas.getContext("2d");
    pen.font = look.font;
    const measure = (text) => pen.measureText(text).width;
    const at = (width) => layOut(this.lines, width, measure, this.mesh !== null, TALLEST);
    this.laid = at(this.width);
    // The rest of a tall one is scrolled to.
    if (this.laid.height > TALLEST) this.laid = at(this.width - SCROLLBAR);
    const { squares, labels, size, width, height } = this.laid;
    Object.assign(this.canvas.style, { width: `${width}px`, height: `${height}px` });
    sized(this.canvas, width, height);
    Object.assign(pen, { font: look.font, textBaseline: "middle", textAlign: "left", fillStyle: look.quiet });
    for (const { text, x, y } of labels) pen.fillText(text, x, y + size[1] / 2 + 0.5);
    pen.textAlign = "center";
    const scale = this.key === "state" ? null : scaleOf(this.rows, this.key);
    squares.forEach((square, place) => this.drawSquare(pen, look, square, scale, place === this.place));
    this.drawLegend(scale);
  }

  drawSquare(pen, look, { rank, x, y }, scale, chosen) {
    const cells = this.rows.get(rank);
    const [wide, high] = this.laid.size;
    const part = scale?.parts.get(rank);
    const mood = scale ? (part === undefined ? "none" : "value") : cells.mood;
    const strength = scale ? 0.08 + 0.52 * (part ?? 0) : (STRENGTH[mood] ?? STRENGTH.calm);
    pen.fillStyle = { calm: look.quiet, warning: look.late, error: look.bad }[mood] ?? look.accent;
    pen.globalAlpha = strength;
    if (mood === "warning" && !this.laid.numbered) {
      pen.beginPath();
      pen.moveTo(x + wide / 2, y);
      pen.lineTo(x + wide, y + high);
      pen.lineTo(x, y + high);
      pen.fill();
    } else if (mood !== "none") pen.fillRect(x, y, wide, high);
    pen.globalAlpha = 1;
    if (mood === "none") this.outline(pen, look.line, x + 0.5, y + 0.5, wide - 1, high - 1, 1);
    if (this.laid.numbered) {
      pen.fillStyle = { warning: DARK, error: look.ground }[mood] ?? look.text;
      pen.fillText(String(rank), x + wide / 2, y + high / 2 + 0.5);
    }
    if (cells.blame) {
      // A gap within the frame: the square may be red, too.
      this.outline(pen, look.ground, x + 1, y + 1, wide - 2, high - 2, 2);
      this.outline(pen, look.bad, x, y, wide, high, 2);
    }
    if (chosen) this.outline(pen, look.text, x, y, wide, high, 2);
  }

  outline(pen, colour, x, y, wide, high, line) {
    Object.assign(pen, { strokeStyle: colour, lineWidth: line });
    pen.strokeRect(x, y, wide, high);
  }

  drawLegend(scale) {
    const known = scale ? `${this.key} ${scale.least} ${scale.most}` : "state";
    if (known === this.told) return;
    this.told = known;
    const swatch = (name) => make("i", name, null, { "aria-hidden": "true" });
    const item = (...parts) => {
      const span = make("span");
      span.append(...parts);
      return span;
    };
    const items = STATES.map(([mood, title]) => item(swatch(mood), title));
    if (scale) items.splice(0, STATES.length - 1, item(scale.least, swatch("ramp"), scale.most));
    this.legend.replaceChildren(...items);
  }

  // -- pointer and keys ------------------------------------------------------------

  placeAt({ offsetX, offsetY }) {
    const [wide, high] = this.laid.size;
    return this.laid.squares.findIndex(
      ({ x, y }) => offsetX >= x && offsetX < x + wide + 2 && offsetY >= y && offsetY < y + high + 2,
    );
  }

  press(place) {
    if (place >= 0) this.reveal(this.laid.squares[place].rank);
  }

  point(event) {
    const place = this.placeAt(event);
    if (place < 0) this.tip.hide();
    else this.tell(place, { x: event.clientX, y: event.clientY });
  }

  keydown(event) {
    const { squares } = this.laid;
    if (squares.length === 0) return;
    if (event.key === "Enter" && this.place >= 0) this.press(this.place);
    else if (event.key === "Escape" && this.place >= 0) this.goTo(-1);
    else if (/^Arrow|^Home$|^End$/.test(event.key)) {
      this.goTo(this.place < 0 ? this.first() : neighbour(squares, this.place, event.key));
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** The square of the first rank at fault, else the first one. */
  first() {
    return Math.max(0, this.laid.squares.findIndex(({ rank }) => this.rows.get(rank).blame));
  }

  goTo(place) {
    if (place === this.place) return;
    this.place = place;
    this.draw();
    if (place < 0) {
      this.tip.hide();
      return;
    }
    const { x, y } = this.laid.squares[place];
    const [wide, high] = this.laid.size;
    const { scrollTop, clientHeight } = this.scroll;
    this.scroll.scrollTop = Math.min(y, Math.max(y + high + 2 - clientHeight, scrollTop));
    const box = this.canvas.getBoundingClientRect();
    this.tell(place, { x: box.left + x + wide, y: box.top + y + high });
  }

  tell(place, at) {
    const { rank } = this.laid.squares[place];
    const cells = this.rows.get(rank);
    const op = [cells.op, cells.seq].filter(Boolean).join(" ");
    const value = this.key === "state" ? "" : (cells[this.key] ?? (this.key === "lag" ? 0 : "not known"));
    this.tip.show(
      `rank ${rank}`,
      [
        placeOf(rank, cells, this.mesh), cells.state, op, cells.line, cells.verdict,
        value === "" ? "" : `${this.select.selectedOptions[0].textContent.slice(8)} ${value}`,
      ].filter(Boolean),
      at,
    );
  }
}
