// The buttons: Profile, Diagnose, Abort, Rebuild. A costly action asks for a confirmation.

import { make, setAttribute, setText } from "./elements.js";
import { nameRanks, plural } from "./text.js";

export const OUTCOME_SHOWN = 8_000; // ms for which the outcome of a click is shown
const ARMED = 6_000; // ms for which a confirmation is offered
const DOUBLE = 350; // ms within which a second click belongs to a double click
const NAMED = 3; // groups that a question names
const LONG = 1_000; // ms after which an abort tells how far it is
const TICK = 200; // ms between two looks at it

/** "group 'tp'", or "2 hung groups, 'dp' and 'tp'". */
export function nameGroups(groups, hung) {
  const labels = groups.map((group) => `'${group.label}'`);
  if (labels.length === 1) return `group ${labels[0]}`;
  const most = labels.length > NAMED + 1 ? NAMED : labels.length;
  const left = labels.length - most;
  const listed = left ? [...labels.slice(0, most), `${left} more`] : labels;
  const text = `${listed.slice(0, -1).join(", ")} and ${listed.at(-1)}`;
  return `${labels.length}${hung ? " hung" : ""} groups, ${text},`;
}

const ranksOf = (groups) => new Set(groups.flatMap((group) => group.ranks)).size;
const sizeOf = (groups) => plural(ranksOf(groups), "rank");

/** "Aborting…", or "Aborting… 40 of 64 ranks" of `groups` after some `time`. */
export function aborting(groups, time) {
  const size = ranksOf(groups);
  const left = groups.reduce((sum, group) => sum + group.flight, 0);
  if (time < LONG) return "Aborting…";
  return `Aborting… ${size - Math.min(left, size)} of ${sizeOf(groups)}`;
}

class Action {
  constructor(board, options) {
    // name, label, doing, about, what, parameters, targets, question, strong, able, absent, done
    Object.assign(this, { board, ...options });
    const { label } = options;
    this.element = make("span", "action");
    this.button = make("button", "main", label(), { type: "button" });
    this.button.addEventListener("click", () => {
      if (this.button.getAttribute("aria-disabled") === "false") this.press();
    });
    this.asked = make("span", "asked");
    this.yes = make("button", "yes", "yes", { type: "button" });
    this.only = make("button", "no", null, { type: "button" });
    this.no = make("button", "no", "no", { type: "button" });
    this.asked.append(make("span", "what"), this.yes, this.only, this.no);
    this.asked.hidden = true;
    this.yes.addEventListener("click", () => this.confirm(this.meant));
    this.only.addEventListener("click", () => this.confirm([this.one]));
    this.no.addEventListener("click", () => this.disarm(true));
    this.asked.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.disarm(true);
    });
    this.element.append(this.button, this.asked);
    this.running = false;
  }

  update() {
    // A button that can never work here is absent; one that has to be allowed says how.
    this.element.hidden = this.absent?.() ?? false;
    const able = this.able() && !this.running;
    // Not `disabled`: the focus would fall to the page, and nothing would say why.
    setAttribute(this.button, "aria-disabled", String(!able));
    setText(this.button, this.running ? this.doing(this.ids, this.began) : this.label());
    setAttribute(this.button, "class", this.strong() && able ? "main strong" : "main");
    const { live, headline } = this.board.store;
    setAttribute(this.button, "title", live ? this.about() : headline.text);
  }

  press() {
    // A question is about the groups that it names.
    this.meant = this.targets?.() ?? [];
    const question = this.question();
    if (question === null) {
      this.run(this.meant);
      return;
    }
    setText(this.asked.firstChild, question);
    const shown = this.board.tab();
    const cause = ({ id }) => id === this.board.store.headline.groups?.[0];
    this.one = this.meant.includes(shown) ? shown : this.meant.find(cause);
    this.only.hidden = this.meant.length < 2 || !this.one;
    setText(this.only, `only '${this.one?.label}'`);
    this.armed = performance.now();
    this.button.hidden = true;
    this.asked.hidden = false;
    this.yes.focus();
    this.timer = setTimeout(() => this.disarm(this.hasFocus()), ARMED);
  }

  confirm(groups) {
    // The second click of a double click is no confirmation.
    if (performance.now() - this.armed < DOUBLE) return;
    this.disarm(true);
    // What was asked about may be over.
    const ids = (this.targets?.() ?? []).map((group) => group.id);
    const left = groups.filter((group) => ids.includes(group.id));
    if (this.able() && (left.length || !groups.length)) this.run(left);
    else this.board.showOutcome(this.about(), true);
  }

  /** Whether the focus is in the question. */
  hasFocus() {
    return this.asked.contains(this.asked.getRootNode().activeElement);
  }

  disarm(focus) {
    clearTimeout(this.timer);
    this.asked.hidden = true;
    this.button.hidden = false;
    if (focus) this.button.focus();
  }

  run(groups) {
    this.running = true;
    this.began = performance.now();
    this.ids = groups.map((group) => group.id);
    this.board.showOutcome("", true);
    this.update();
    // A busy kernel may send nothing for a while.
    const timer = setInterval(() => this.update(), TICK);
    const parameters = { ...this.parameters, groups: this.ids };
    this.board.store.request(this.what(), parameters, (answer) => {
      clearInterval(timer);
      this.running = false;
      this.board.showOutcome(answer.text ?? "", answer.ok);
      if (answer.ok) this.done?.(answer);
      this.update();
    });
  }
}

/** Make the buttons of a board, or those of them that `only` names. */
export function makeActions(board, only = ["Profile", "Diagnose", "Abort", "Rebuild"]) {
  const { store } = board;
  const running = () => store.live;
  // A frozen rank, too, is replaced by a restart only.
  const dead = () => [
    ...new Set([...(store.head.dead ?? []), ...(store.head.frozen ?? [])]),
  ];
  const refused = (what) => store.head.refused?.[what];
  const flying = () => store.groups.filter((group) => group.flight && !group.aborted);
  // Those that hang, by the verdict.
  const hung = () => flying().filter((group) => store.headline.groups?.includes(group.id));
  const ended = () => (hung().length ? hung() : flying());
  const rebuilt = () => {
    const found = store.groups.filter((group) => group.aborted);
    if (!found.length) found.push(...hung());
    return found.length ? found : [board.tab()].filter((group) => group?.facts.length);
  };
  const names = (groups) => nameGroups(groups, hung().length > 0);
  const all = [
    new Action(board, {
      name: "Profile",
      label: () => "Profile",
      doing: () => "Profiling…",
      about: () => "Show the calls that every rank is in now. Nothing is changed.",
      what: () => "profile",
      parameters: { seconds: 0 },
      question: () => null,
      strong: () => false,
      able: running,
      done: (answer) => board.stacks.show(answer),
    }),
    new Action(board, {
      name: "Diagnose",
      label: () => "Diagnose",
      doing: () => "Diagnosing…",
      about: () => "Ask every rank what it waits for, and compare. Nothing is changed.",
      what: () => "diagnose",
      question: () => null,
      strong: () => false,
      able: running,
    }),
    new Action(board, {
      name: "Abort",
      label: () => "Abort",
      doing: (ids, began) =>
        aborting(
          store.groups.filter(({ id }) => ids.includes(id)), performance.now() - began,
        ),
      about: () => {
        if (refused("abort")) return refused("abort");
        if (!flying().length) return "Nothing is in flight.";
        const what = `End what is in flight in ${names(ended())} with an error on every rank. `;
        return refused("rebuild")
          ? `${what}The script ends, unless it handles the error.`
          : `${what}Ranks, variables and other groups are kept; Rebuild makes all usable again.`;
      },
      what: () => "abort",
      targets: ended,
      question: () => `Abort ${names(ended())} on ${sizeOf(ended())}?`,
      strong: () => store.headline.mood === "error" && hung().length > 0,
      able: () => running() && ended().length > 0 && !refused("abort"),
    }),
    new Action(board, {
      name: "Rebuild",
      label: () => (dead().length ? "Restart and rebuild" : "Rebuild"),
      doing: () => "Rebuilding…",
      about: () =>
        dead().length
          ? `Replace ${nameRanks(dead())} by fresh ranks, whose variables are lost, and ` +
            "make the groups usable again. The other ranks keep their variables."
          : !rebuilt().length
            ? "No group is aborted. To rebuild one, open its tab."
            : `Make ${names(rebuilt())} usable again, all ranks in step. Variables are kept.`,
      what: () => (dead().length ? "restart" : "rebuild"),
      targets: rebuilt,
      question: () => {
        if (dead().length) {
          return `Restart ${nameRanks(dead())}?`;
        }
        return rebuilt().some((group) => group.flight && !group.aborted)
          ? `Abort and rebuild ${names(rebuilt())} on ${sizeOf(rebuilt())}?`
          : null;
      },
      strong: () => store.groups.some((group) => group.aborted) || dead().length > 0,
      able: () => running() && rebuilt().length > 0,
      absent: () => Boolean(refused("rebuild")),
    }),
  ];
  const there = (name) => name !== "Diagnose" || store.model.get("diagnoses");
  const list = all.filter(({ name: one }) => only.includes(one) && there(one));
  board.actions.append(...list.map((action) => action.element));
  return {
    update: () => list.forEach((action) => action.update()),
    of: (name) => list.find((action) => action.name === name)?.button,
    asking: () => list.some((action) => !action.asked.hidden),
  };
}
