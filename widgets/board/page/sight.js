// What the timeline shows: a window of times, and its places in the picture. Windows are
// [from, to]: times in ns, or places, which are what is left of times without pauses.

import { Pauses } from "./pauses.js";
import { GUTTER, panned, partAt, tickStep, ticks, timeAt, xOf, zoomed } from "./scale.js";

const MARGIN = 1.04; // the picture of some works against them

export class Sight {
  /** `recent()` are the times that are shown by default, `changed()` is called. */
  constructor(recent, changed) {
    this.recent = recent;
    this.changed = changed;
    this.width = 0; // of the picture, in px
    this.pauses = new Pauses();
    this.window = null; // of times, or null: the default
    this.renew();
  }

  /** Forget what is computed once per frame, not for each bar. */
  renew() {
    this.times = this.places = null;
  }

  /** Look at a window of places; null: at the default. */
  look(places) {
    this.window = places && this.timesOf(places);
    this.renew();
    this.changed();
  }

  /** Look at a window of times, with a margin. */
  lookAround(times) {
    this.look(this.around(times));
  }

  around(times) {
    return zoomed(this.placesOf(times), MARGIN);
  }

  placesOf(times) {
    return times.map((time) => this.pauses.place(time));
  }

  timesOf(places) {
    return places.map((place) => this.pauses.timeAt(place));
  }

  /** The visible times. */
  get shown() {
    this.times ??= this.window ?? this.timesOf(this.around(this.recent()));
    return this.times;
  }

  /** The visible places: what has a length in the picture. */
  get drawn() {
    this.places ??= this.placesOf(this.shown);
    return this.places;
  }

  /** The times of the axis, and their distance. */
  get ticks() {
    const [from, to] = this.drawn;
    const step = tickStep(to - from, this.width - GUTTER);
    return { step, found: this.pauses.between(this.shown).flatMap((part) => ticks(part, step)) };
  }

  /** Zoom; the part `at` of the picture stays, or the middle if that is not in sight. */
  zoom(factor, at) {
    this.look(zoomed(this.drawn, factor, at >= 0 && at <= 1 ? at : 0.5));
  }

  pan(part) {
    this.look(panned(this.drawn, part));
  }

  /** Bring a time into sight. */
  bringIn(time) {
    const part = this.partOf(time);
    if (part < 0 || part > 1) this.pan(part - 1 / 3);
  }

  /** In which part of the picture a time is. */
  partOf(time) {
    return partAt(this.drawn, this.pauses.place(time));
  }

  xOf(time) {
    return xOf(this.drawn, this.width, this.pauses.place(time));
  }

  placeAt(x) {
    return timeAt(this.drawn, this.width, x);
  }

  timeAt(x) {
    return this.pauses.timeAt(this.placeAt(x));
  }
}
