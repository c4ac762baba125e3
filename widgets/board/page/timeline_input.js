// What the pointer and the keys do on the timeline: select, move, zoom.

import { AXIS } from "./draw.js";
import { GUTTER, STEP, panned, partAt } from "./scale.js";
import { W, nearest, sameOp, workNear } from "./works.js";

export class TimelineInput {
  constructor(view) {
    this.view = view;
    this.drag = null;
    const canvas = view.canvas;
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  workAt(x, y) {
    const lane = this.view.lanes[Math.floor(y / this.view.pitch)];
    if (lane === undefined || x < GUTTER) return null;
    // A bar of less than a pixel can be selected as well.
    const [time, beside] = [x, x + 2].map((one) => this.view.sight.timeAt(one));
    const work = workNear(lane.works, time, beside - time, this.view.clock());
    return work && { lane, work };
  }

  press(event) {
    if (event.button !== 0) return;
    this.view.canvas.setPointerCapture(event.pointerId);
    const { offsetX: x, shiftKey: marks } = event;
    this.drag = { x, end: x, places: this.view.sight.drawn, moved: false, marks };
  }

  /** The part of the picture that is marked by dragging with Shift, in px. */
  get marked() {
    const { x, end, moved, marks } = this.drag ?? {};
    return moved && marks ? [Math.min(x, end), Math.max(x, end)] : null;
  }

  point(event) {
    if (this.drag) {
      const by = event.offsetX - this.drag.x;
      if (Math.abs(by) > 3) this.drag.moved = true;
      this.drag.end = Math.max(GUTTER, event.offsetX);
      if (this.marked) {
        this.view.request();
        this.leave();
        return;
      }
      if (this.drag.moved) {
        this.view.sight.look(panned(this.drag.places, -by / (this.view.sight.width - GUTTER)));
        this.leave();
        return;
      }
    }
    const found = this.workAt(event.offsetX, event.offsetY);
    if (found?.work !== this.view.pointed?.work) {
      this.view.pointed = found;
      this.view.request();
    }
    this.view.showTip(found, event);
  }

  release(event) {
    const { drag, marked } = this;
    this.drag = null;
    if (marked) this.view.sight.look(marked.map((x) => this.view.sight.placeAt(x)));
    if (!drag || drag.moved) return;
    const lane = this.view.lanes[Math.floor(event.offsetY / this.view.pitch)];
    if (event.offsetX < GUTTER && lane?.part) {
      this.view.openGroup(lane.group);
      return;
    }
    this.view.choose(this.workAt(event.offsetX, event.offsetY));
  }

  leave() {
    this.view.tip.hide();
    if (this.view.pointed) {
      this.view.pointed = null;
      this.view.request();
    }
  }

  /** Zoom with Ctrl or ⌘, pan sideways; else the page scrolls. */
  wheel(event) {
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault();
      const at = partAt(this.view.sight.drawn, this.view.sight.placeAt(event.offsetX));
      this.view.sight.zoom(event.deltaY > 0 ? STEP : 1 / STEP, Math.min(1, Math.max(0, at)));
    } else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      event.preventDefault();
      this.view.sight.pan((event.deltaX || event.deltaY) / this.view.sight.width);
    }
  }

  key(event) {
    const steps = {
      ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0],
    };
    if (event.shiftKey && (event.key === "ArrowLeft" || event.key === "ArrowRight")) {
      this.view.sight.pan(event.key === "ArrowLeft" ? -0.2 : 0.2);
    } else if (event.key in steps) this.walk(...steps[event.key]);
    else if (event.key === "+" || event.key === "=") this.view.zoom(1 / STEP);
    else if (event.key === "-") this.view.zoom(STEP);
    else if (event.key === "0") this.view.sight.look(null);
    else if (event.key === "a") this.view.lookAtAll();
    else if (event.key === "s") this.view.count();
    else if (event.key === "p") this.view.stretch();
    else if (event.key === "o") this.view.openGroup((this.view.chosen?.lane ?? this.view.lanes[0])?.group);
    else if (event.key === "Enter" && this.view.chosen) {
      this.view.goTo(this.view.words[this.view.chosen.work[W.line]]);
    } else if (event.key === "Escape") this.view.choose(null);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Go to the neighbouring lane, or the neighbouring work in this one. */
  walk(lanes, works) {
    if (this.view.lanes.length === 0) return;
    let place = this.view.chosen ? this.view.lanes.indexOf(this.view.chosen.lane) : 0;
    place = Math.min(this.view.lanes.length - 1, Math.max(0, place + lanes));
    const lane = this.view.lanes[place];
    if (lane.works.length === 0) return;
    let index = lane.works.length - 1;
    if (this.view.chosen && lanes !== 0) {
      // The same collective there, or the work nearest to it.
      const time = this.view.chosen.work[W.created];
      const twin = lane.works.findIndex((work) => sameOp(work, this.view.chosen.work));
      index = twin >= 0 ? twin : nearest(lane.works, time);
    } else if (this.view.chosen) {
      index = lane.works.indexOf(this.view.chosen.work) + works;
    }
    index = Math.min(lane.works.length - 1, Math.max(0, index));
    this.view.choose({ lane, work: lane.works[index] });
    this.bringIn();
  }

  bringIn() {
    const { lane, work } = this.view.chosen;
    this.view.sight.bringIn(work[W.created]);
    const top = this.view.lanes.indexOf(lane) * this.view.pitch;
    const box = this.view.scroll;
    const room = box.clientHeight - AXIS - this.view.pitch;
    box.scrollTop = Math.min(top, Math.max(top - room, box.scrollTop));
  }
}
