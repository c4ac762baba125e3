// The buttons: Diagnose, Abort, Rebuild. A costly action asks for a confirmation.

class Action {
  constructor(board, { label, doing, what, parameters, question, strong, able }) {
    Object.assign(this, { board, label, doing, what, parameters, question, strong, able });
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
    const able = this.able() && !this.running;
    if (this.button.disabled === able) this.button.disabled = !able;
    setText(this.button, this.running ? this.doing : this.label());
    setAttribute(this.button, "class", this.strong() && able ? "main strong" : "main");
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
    this.run();
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
      this.update();
    });
  }
}

function makeActions(board) {
  const { store } = board;
  const running = () => store.live && store.head.state === "running";
  // A frozen rank, too, is replaced by a restart only.
  const dead = () => [
    ...new Set([...(store.head.dead ?? []), ...(store.head.frozen ?? [])]),
  ];
  const group = () => board.tab();
  const real = () => running() && Boolean(group()?.facts.length);
  const name = () => group()?.label ?? "";
  const parameters = () => ({ group: group()?.id ?? null });
  const list = [
    new Action(board, {
      label: () => "Diagnose",
      doing: "Diagnosing…",
      what: () => "diagnose",
      parameters,
      question: () => null,
      strong: () => false,
      able: running,
    }),
    new Action(board, {
      label: () => "Abort",
      doing: "Aborting…",
      what: () => "abort",
      parameters,
      question: () => `Abort ${name()}?`,
      strong: () => store.banner.mood === "error" && Boolean(group()?.flight),
      able: () => real() && !group().aborted,
    }),
    new Action(board, {
      label: () => (dead().length ? "Restart and rebuild" : "Rebuild"),
      doing: "Rebuilding…",
      what: () => (dead().length ? "restart" : "rebuild"),
      parameters,
      question: () => {
        if (dead().length) {
          return `Restart ${nameRanks(dead())}?`;
        }
        return group()?.flight ? `Abort and rebuild ${name()}?` : null;
      },
      strong: () => Boolean(group()?.aborted) || dead().length > 0,
      able: real,
    }),
  ];
  if (!store.model.get("diagnoses")) list.shift();
  board.actions.append(...list.map((action) => action.element));
  return {
    update: () => list.forEach((action) => action.update()),
    asking: () => list.some((action) => !action.asked.hidden),
  };
}
