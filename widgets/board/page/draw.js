// Drawing the timeline: only the visible lanes and bars.

import { DARK, clip, colours, sized } from "./canvas.js";
import { nameOf } from "./fold_lanes.js";
import { GUTTER, tickText } from "./scale.js";
import { durationText } from "./text.js";
import { W, endOf, isRunning, lasting, sameOp } from "./works.js";

export const AXIS = 20; // px for the times above
const HEAD = 6; // px of the head of an arrow
const STUB = 16; // px to the right of an arrow whose other end is not there
const MOST_ARROWS = 300; // in sight; more would cover the bars

export function drawTimeline(view) {
  if (!view.sight.width) return;
  const look = colours(view.element);
  const height = Math.max(1, view.lanes.length) * view.pitch;
  drawAxis(view, look, sized(view.axis, view.sight.width, AXIS));
  const pen = sized(view.canvas, view.sight.width, height);
  pen.font = look.font;
  pen.textBaseline = "middle";
  const top = Math.floor(view.scroll.scrollTop / view.pitch) - 1;
  const bottom = top + Math.ceil(view.scroll.clientHeight / view.pitch) + 2;
  const first = Math.max(0, top);
  const last = Math.min(view.lanes.length, bottom);
  drawGrid(view, look, pen, first * view.pitch, last * view.pitch);
  for (let place = first; place < last; place++) drawLane(view, look, pen, place);
  drawMissing(view, look, pen, first, last);
  drawMessages(view, look, pen, first, last);
  drawMeeting(view, look, pen);
  const { marked } = view.input;
  if (marked) {
    const [x, right] = marked;
    Object.assign(pen, { fillStyle: look.accent, globalAlpha: 0.2 });
    pen.fillRect(x, 0, right - x, height);
    pen.globalAlpha = 1;
  }
  if (view.lanes.length === 0 || view.lanes.every((lane) => lane.works.length === 0)) {
    pen.fillStyle = look.quiet;
    pen.fillText("no op was issued on this group yet", GUTTER, view.pitch / 2);
  }
}

function drawAxis(view, look, pen) {
  const { step, found } = view.sight.ticks;
  pen.font = look.font;
  pen.textBaseline = "middle";
  pen.fillStyle = look.quiet;
  const taken = []; // from and to of the texts
  const write = (text, x) => {
    const right = x + pen.measureText(text).width;
    if (x < 0 || right > view.sight.width || taken.some(([from, to]) => x < to + 6 && right > from - 6)) return;
    taken.push([x, right]);
    pen.fillText(text, x, AXIS / 2);
  };
  for (const { from, to } of view.sight.pauses.within(view.sight.shown)) {
    const text = `⋯ ${durationText(to - from)} ⋯`;
    write(text, Math.round((view.sight.xOf(from) + view.sight.xOf(to) - pen.measureText(text).width) / 2));
  }
  for (const time of found) {
    const x = Math.round(view.sight.xOf(time));
    write(tickText(time, step, view.sight.shown[1]), x + 4);
    pen.fillRect(x, AXIS - 5, 1, 5);
  }
}

function drawGrid(view, look, pen, top, bottom) {
  pen.fillStyle = look.line;
  for (const time of view.sight.ticks.found) {
    const x = Math.round(view.sight.xOf(time));
    if (x >= GUTTER) pen.fillRect(x, top, 1, bottom - top);
  }
  pen.globalAlpha = 0.5;
  for (const { from, to } of view.sight.pauses.within(view.sight.shown)) {
    const [x, right] = [from, to].map((time) => Math.max(GUTTER, Math.round(view.sight.xOf(time))));
    pen.fillRect(x, top, right - x, bottom - top);
  }
  pen.globalAlpha = 1;
}

function drawLane(view, look, pen, place) {
  const lane = view.lanes[place];
  const top = place * view.pitch;
  const middle = top + view.pitch / 2;
  const every = view.pitch >= 12 ? 1 : 4;
  if (place % every === 0) {
    pen.fillStyle = look.quiet;
    pen.fillText(clip(pen, nameOf(lane, view.wide), GUTTER - 13), 5, middle);
  }
  const [from, to] = view.sight.shown;
  const now = view.clock();
  const gap = view.pitch >= 20 ? 4 : view.pitch >= 12 ? 3 : 1.5;
  let covered = -1; // the pixel up to which narrow bars were drawn
  for (const [index, work] of lane.works.entries()) {
    const begun = work[W.created];
    const ended = endOf(work, now);
    if (ended < from || begun > to) continue;
    const x = Math.max(GUTTER, view.sight.xOf(begun));
    const right = Math.min(view.sight.width, Math.max(view.sight.xOf(ended), x + 1));
    if (right <= covered) continue; // hidden behind one that is as narrow
    if (right - x <= 1.5) covered = right;
    // The next one may begin before this one has ended: it is drawn over it.
    const next = lane.works[index + 1]?.[W.created];
    const free = next === undefined ? right : Math.min(right, Math.max(x, view.sight.xOf(next)));
    const isOf = (found) => found?.lane.group === lane.group && sameOp(found.work, work);
    const frame = isOf(view.chosen) ? 1.5 : isOf(view.pointed) ? 1 : 0;
    drawBar(view, look, pen, work, x, right, free, top + gap, view.pitch - 2 * gap, now, frame);
  }
  if (view.store.head.dead?.includes(lane.rank)) drawDeath(view, look, pen, lane, place);
}

/** A line behind the last work of a dead rank; a word alone where its works are gone too. */
function drawDeath(view, look, pen, lane, place) {
  const ends = lane.works.map((work) => Math.max(work[W.created], work[W.ended]));
  const x = ends.length ? Math.max(GUTTER, view.sight.xOf(Math.max(...ends)) + 2) : GUTTER;
  if (x >= view.sight.width) return;
  pen.fillStyle = look.badText;
  if (ends.length) pen.fillRect(Math.round(x), place * view.pitch + 2, 2, view.pitch - 4);
  pen.fillText("dead", Math.round(x) + 7, (place + 0.5) * view.pitch + 0.5);
}

/** A bar from `x` to `right`, with its label in front of `free`, and a frame of some px. */
function drawBar(view, look, pen, work, x, right, free, top, height, now, frame) {
  const state = view.words[work[W.state]];
  const bad = state === "failed" || state === "timed_out" || state === "aborted";
  const running = isRunning(work);
  const colour = bad ? look.bad : running ? look.late : look.accent;
  const waits = work[W.gathered] < 0 && running ? now : work[W.gathered];
  const turn = Math.min(right, Math.max(x, view.sight.xOf(waits)));
  // Over a bar that goes on below, a light part would look like a dark one.
  pen.fillStyle = look.ground;
  pen.fillRect(x, top, right - x, height);
  pen.fillStyle = colour;
  pen.globalAlpha = 0.3;
  if (turn > x) pen.fillRect(x, top, turn - x, height);
  pen.globalAlpha = bad ? 0.55 : 0.9;
  if (right > turn) pen.fillRect(turn, top, right - turn, height);
  pen.globalAlpha = 1;
  if (right - x > 3) {
    // An edge at the start, to separate consecutive bars.
    pen.fillRect(x, top, 1, height);
    if (bad) pen.fillRect(right - 2, top, 2, height);
  }
  if (frame > 0) {
    pen.strokeStyle = look.text;
    pen.lineWidth = frame;
    pen.strokeRect(x + 0.5, top + 0.5, Math.max(1, right - x - 1), height - 1);
  }
  if (height >= 11 && free - x > 20) {
    const mark = bad ? "✕ " : running ? "… " : "";
    const op = view.words[work[W.op]];
    const number = ` #${work[W.seq]}`;
    // "send → 2 tag 0", or its beginning: whom it is for is told before its number.
    const untagged = op.replace(/ tag \d+$/, "");
    const short = work[W.isP2p] ? [op, untagged, untagged.replace(/^\w+ /, "")] : [];
    // On the light part, or on the dark one if only that has room.
    const light = Math.min(turn, free) - x > free - turn;
    const [left, end] = light ? [x, Math.min(turn, free)] : [turn, free];
    pen.fillStyle = light || bad ? look.text : running ? DARK : look.ground;
    const labels = [op + number, ...short, number.trim()].map((one) => mark + one);
    const text = fitting(pen, labels, end - left - 8);
    if (text) pen.fillText(text, left + 5, top + height / 2 + 0.5);
  }
}

/** The first of some texts that fits. */
function fitting(pen, texts, room) {
  return texts.find((text) => pen.measureText(text).width <= room);
}

/** A rank that has not entered a collective: dashes while others wait, pale if it waits, too. */
function drawMissing(view, look, pen, first, last) {
  const now = view.clock();
  for (const missing of lasting(view.store.timeline)) {
    for (let place = first; place < last; place++) {
      const lane = view.lanes[place];
      if (lane.group !== missing.group || !missing.ranks.includes(lane.rank)) continue;
      const x = Math.max(GUTTER, view.sight.xOf(missing.since));
      const until = missing.until < 0 ? now : missing.until;
      const right = Math.min(view.sight.width - 1, view.sight.xOf(until));
      if (right <= x) continue;
      const gap = view.pitch >= 20 ? 4 : 2;
      const top = place * view.pitch + gap;
      const held = missing.held.includes(lane.rank);
      pen.strokeStyle = held ? look.quiet : look.bad;
      pen.lineWidth = 1;
      pen.setLineDash([4, 3]);
      pen.strokeRect(x + 0.5, top + 0.5, right - x, view.pitch - 2 * gap - 1);
      pen.setLineDash([]);
      const inOther = lane.works.some(
        (work) => endOf(work, now) > missing.since && work[W.created] < until,
      );
      const dead = view.store.head.dead?.includes(lane.rank); // which stands there, too
      if (view.pitch >= 12 && !inOther && !dead) {
        pen.fillStyle = held ? look.quiet : look.badText;
        const text = `not in ${missing.op} #${missing.seq}`;
        pen.fillText(clip(pen, text, right - x - 8), x + 5, place * view.pitch + view.pitch / 2 + 0.5);
      }
    }
  }
}

/** Arrows from sends to their receives; of very many, those of the selected work. */
function drawMessages(view, look, pen, first, last) {
  const now = view.clock();
  const [since, until] = view.sight.shown;
  const places = new Map(view.lanes.map((lane, place) => [lane, place]));
  const selected = [view.chosen?.work, view.pointed?.work];
  const isOf = ({ from, to }) =>
    selected.some((work) => work && (work === from.work || work === to.work));
  const span = ({ from, to }) => [
    (from.work ?? to.work)[W.created],
    to.work ? endOf(to.work, now) : endOf(from.work, now),
  ];
  const inSight = view.messages.filter((message) => {
    const [begun, ended] = span(message);
    const rows = [places.get(message.from.lane), places.get(message.to.lane)];
    return ended >= since && begun <= until && Math.max(...rows) >= first && Math.min(...rows) < last;
  });
  const drawn = inSight.length > MOST_ARROWS ? inSight.filter(isOf) : inSight;
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, 0, view.sight.width - GUTTER, view.lanes.length * view.pitch);
  pen.clip();
  for (const message of drawn) {
    const { from, to } = message;
    const [begun, ended] = span(message).map((time) => view.sight.xOf(time));
    const [y, aim] = [from, to].map(({ lane }) => (places.get(lane) + 0.5) * view.pitch);
    const single = !from.work || !to.work;
    // Where a side is not issued there is no end: a stub, beside the bar's beginning.
    const x = single ? Math.max(GUTTER, begun) : begun;
    const running = single && isRunning(from.work ?? to.work);
    pen.strokeStyle = pen.fillStyle = running ? look.badText : look.text;
    pen.globalAlpha = isOf(message) || running ? 1 : 0.6;
    drawArrow(pen, x, y, single ? x + STUB : ended, aim, single);
  }
  pen.restore();
}

function drawArrow(pen, x, y, toX, toY, dashed) {
  const angle = Math.atan2(toY - y, toX - x);
  const [back, side] = [angle + Math.PI - 0.4, angle + Math.PI + 0.4];
  pen.lineWidth = 1.25;
  pen.setLineDash(dashed ? [4, 3] : []);
  pen.beginPath();
  pen.moveTo(x, y);
  pen.lineTo(toX, toY);
  pen.stroke();
  pen.setLineDash([]);
  pen.beginPath();
  pen.moveTo(toX, toY);
  pen.lineTo(toX + HEAD * Math.cos(back), toY + HEAD * Math.sin(back));
  pen.lineTo(toX + HEAD * Math.cos(side), toY + HEAD * Math.sin(side));
  pen.closePath();
  if (dashed) pen.stroke();
  else pen.fill();
}

/** For the selected work: a line where the last rank entered. */
function drawMeeting(view, look, pen) {
  const found = view.chosen ?? view.pointed;
  if (!found || found.work[W.gathered] < 0) return;
  const x = Math.round(view.sight.xOf(found.work[W.gathered]));
  if (x < GUTTER || x > view.sight.width) return;
  pen.strokeStyle = look.text;
  pen.setLineDash([2, 3]);
  pen.lineWidth = 1;
  pen.beginPath();
  pen.moveTo(x + 0.5, 0);
  pen.lineTo(x + 0.5, view.lanes.length * view.pitch);
  pen.stroke();
  pen.setLineDash([]);
}
