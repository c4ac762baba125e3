// The buttons: Profile, Diagnose, Abort, Rebuild. A costly action asks for a confirmation.

class Action {
  constructor(board, options) {
    // name, label, doing, about, what, parameters, question, strong, able, absent, done
    Object.assign(this, { board, ...options });
    const { label } = options;
    this.element = make("span", "action");
    this.button = make("button", "main", label(), { type: "button" });
    this.button.addEventListener("click", () => this.press());
    this.asked = make("span", "asked");
    this.yes = make("button", "yes", "yes", { type: "button" });
    this.no = make("button", "no", "no", { type: "button" });
    this.asked.append(make("span", "what"), this.yes, this.no);
    this.asked.hidden = true;
    this.yes.addEventListener("click", () => this.confirm());
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
    if (this.button.disabled === able) this.button.disabled = !able;
    setText(this.button, this.running ? this.doing : this.label());
    setAttribute(this.button, "class", this.strong() && able ? "main strong" : "main");
    const { live, headline } = this.board.store;
    setAttribute(this.button, "title", live ? this.about() : headline.text);
  }

  press() {
    const question = this.question();
    if (question === null) {
      this.run();
      return;
    }
    setText(this.asked.firstChild, question);
    this.armed = performance.now();
    this.button.hidden = true;
    this.asked.hidden = false;
    this.yes.focus();
    this.timer = setTimeout(() => this.disarm(false), ARMED);
  }

  confirm() {
    // The second click of a double click is no confirmation.
    if (performance.now() - this.armed < DOUBLE) return;
    this.disarm(true);
    // What was asked about may be over.
    if (this.able()) this.run();
    else this.board.showOutcome(this.about(), true);
  }

  disarm(focus) {
    clearTimeout(this.timer);
    this.asked.hidden = true;
    this.button.hidden = false;
    if (focus) this.button.focus();
  }

  run() {
    this.running = true;
    this.board.showOutcome("", true);
    this.update();
    this.board.store.request(this.what(), this.parameters(), (answer) => {
      this.running = false;
      this.board.showOutcome(answer.text ?? "", answer.ok);
      if (answer.ok) this.done?.(answer);
      this.update();
    });
  }
}

/** Make the buttons of a board, or those of them that `only` names. */
function makeActions(board, only = ["Profile", "Diagnose", "Abort", "Rebuild"]) {
  const { store } = board;
  const running = () => store.live;
  // A frozen rank, too, is replaced by a restart only.
  const dead = () => [
    ...new Set([...(store.head.dead ?? []), ...(store.head.frozen ?? [])]),
  ];
  const group = () => board.tab();
  const real = () => running() && Boolean(group()?.facts.length);
  const name = () => `group '${group()?.label ?? ""}'`;
  const size = () => `${group()?.size} rank${group()?.size === 1 ? "" : "s"}`;
  const flight = () => Boolean(group()?.flight);
  const refused = (what) => store.head.refused?.[what];
  const parameters = () => ({ group: group()?.id ?? null });
  const all = [
    new Action(board, {
      name: "Profile",
      label: () => "Profile",
      doing: "Profiling…",
      about: () => "Show the calls that every rank is in now. Nothing is changed.",
      what: () => "profile",
      parameters: () => ({ seconds: 0 }),
      question: () => null,
      strong: () => false,
      able: running,
      done: (answer) => board.stacks.show(answer),
    }),
    new Action(board, {
      name: "Diagnose",
      label: () => "Diagnose",
      doing: "Diagnosing…",
      about: () => "Ask every rank what it waits for, and compare. Nothing is changed.",
      what: () => "diagnose",
      parameters,
      question: () => null,
      strong: () => false,
      able: running,
    }),
    new Action(board, {
      name: "Abort",
      label: () => "Abort",
      doing: "Aborting…",
      about: () => {
        if (refused("abort")) return refused("abort");
        if (!flight()) return `Nothing is in flight in ${name()}.`;
        const what = `End what is in flight in ${name()} with an error on every rank. `;
        return refused("rebuild")
          ? `${what}The script ends, unless it handles the error.`
          : `${what}Ranks, variables and other groups are kept; Rebuild makes it usable again.`;
      },
      what: () => "abort",
      parameters,
      question: () => `Abort ${name()} on ${size()}?`,
      strong: () => store.headline.mood === "error" && flight(),
      able: () => real() && !group().aborted && flight() && !refused("abort"),
    }),
    new Action(board, {
      name: "Rebuild",
      label: () => (dead().length ? "Restart and rebuild" : "Rebuild"),
      doing: "Rebuilding…",
      about: () =>
        dead().length
          ? `Replace ${nameRanks(dead())} by fresh ranks, whose variables are lost, and ` +
            "make the groups usable again. The other ranks keep their variables."
          : `Make ${name()} usable again, all ranks in step. Variables are kept.`,
      what: () => (dead().length ? "restart" : "rebuild"),
      parameters,
      question: () => {
        if (dead().length) {
          return `Restart ${nameRanks(dead())}?`;
        }
        return flight() ? `Abort and rebuild ${name()} on ${size()}?` : null;
      },
      strong: () => Boolean(group()?.aborted) || dead().length > 0,
      able: real,
      absent: () => Boolean(refused("rebuild")),
    }),
  ];
  const there = (name) => name !== "Diagnose" || store.model.get("diagnoses");
  const list = all.filter(({ name: one }) => only.includes(one) && there(one));
  board.actions.append(...list.map((action) => action.element));
  return {
    update: () => list.forEach((action) => action.update()),
    asking: () => list.some((action) => !action.asked.hidden),
  };
}
